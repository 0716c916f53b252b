/* A version in the memory of another process on the same GPU, by handles; against the same values out of the host's memory. The other
 * process is forked before this one has touched the GPU: a CUDA context does not survive a fork. */
#include "gpu_swap.h"

#include "br_device.h"
#include "engine_parts.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int to_other[2], from_other[2];
static pid_t other;

static uint16_t value_at(size_t i) {
    return (uint16_t)(gpu_mix(i) & 0xbdff);
}

static void get(int fd, void *out, size_t n) {
    for (size_t at = 0; at < n;) {
        const ssize_t got = read(fd, (char *)out + at, n - at);
        GPU_EXPECT(got > 0, "ipc: the other process is gone");
        at += (size_t)got;
    }
}

static void put(int fd, const void *bytes, size_t n) {
    GPU_EXPECT(write(fd, bytes, n) == (ssize_t)n, "ipc: the other process is gone");
}

/* Two blocks of n elements each, filled; their handles, from an address inside on. */
static void be_the_other(void) {
    br_device *gpu;
    uint64_t n;
    char end;
    get(to_other[0], &n, sizeof n);
    GPU_TRY(br_device_open("cuda", &gpu));
    for (size_t b = 0; b < 2; b++) {
        void *block;
        br_ipc ipc;
        uint16_t *value = gpu_alloc(n, sizeof *value);
        GPU_TRY(br_device_alloc(gpu, n * sizeof *value, "values to share", &block));
        for (size_t i = 0; i < n; i++)
            value[i] = value_at(b * n + i);
        GPU_TRY(br_device_upload(gpu, block, value, n * sizeof *value));
        GPU_TRY(br_device_wait(gpu));
        GPU_TRY(br_ipc_export((char *)block + 512, &ipc));
        GPU_EXPECT(ipc.offset % 512 == 0 && ipc.offset >= 512, "ipc: offset %llu", (unsigned long long)ipc.offset);
        ipc.offset -= 512;
        put(from_other[1], &ipc, sizeof ipc);
        free(value);
    }
    const int gone = read(to_other[0], &end, 1) <= 0;
    _exit(gone ? 1 : 0);
}

void gpu_swap_ipc_fork(void) {
    GPU_EXPECT(pipe(to_other) == 0 && pipe(from_other) == 0, "ipc: no pipe");
    fflush(stdout);
    other = fork();
    GPU_EXPECT(other >= 0, "ipc: no fork");
    if (other == 0) {
        close(to_other[1]);
        be_the_other();
    }
    close(to_other[0]);
    close(from_other[1]);
}

/* Even tensors lie in block 0, odd ones in block 1, from an even place on. */
static uint64_t layout(const br_engine *e, int64_t n, uint64_t *place) {
    uint64_t used[2] = {0};
    for (int64_t i = 0; i < n; i++) {
        br_swap_tensor t;
        GPU_TRY(br_swap_tensor_at(e, "a", i, &t));
        place[i] = used[i % 2];
        used[i % 2] += (uint64_t)t.n_row * (uint64_t)t.n_col;
    }
    return used[0] > used[1] ? used[0] : used[1];
}

void gpu_swap_ipc(const gpu_swap *g) {
    char model[GPU_PATH];
    br_engine *e;
    br_swap_answer answer;
    br_digest manifest, digest[2];
    br_ipc block[2];
    int64_t n;
    int status;
    gpu_make_model(g, "small", model);
    const br_adapter_source source = {"a", NULL};
    const br_engine_options options = {.model_dir = model, .adapter = &source, .n_adapter = 1, .backend = "cuda", .swap_rank = GPU_RANK,
                                       .max_seqs = 4, .kv_pages = 64};
    GPU_TRY(br_engine_open(&options, &e));
    GPU_TRY(br_swap_manifest(e, "a", &n, &manifest));
    uint64_t *place = gpu_alloc((size_t)n, sizeof *place);
    const uint64_t n_value = layout(e, n, place);
    uint16_t *value = gpu_alloc(2 * n_value, sizeof *value);
    const uint16_t **tensor = gpu_alloc((size_t)n, sizeof *tensor);
    put(to_other[1], &n_value, sizeof n_value);
    for (int b = 0; b < 2; b++)
        get(from_other[0], &block[b], sizeof block[b]);
    for (size_t i = 0; i < 2 * n_value; i++)
        value[i] = value_at(i);
    for (int64_t i = 0; i < n; i++)
        tensor[i] = value + (uint64_t)(i % 2) * n_value + place[i];
    GPU_TRY(br_swap_from_memory(e, "a", tensor, n, NULL, 0, 0, &answer));
    GPU_TRY(br_swap_commit(e, "a", 0, BR_SWAP_STOP, &answer));
    GPU_TRY(br_engine_adapter_digest(e, "a", &digest[0]));
    double us[1] = {-1e3 * gpu_now_ms()};
    GPU_TRY(br_swap_begin(e, "a", 1, 0, &answer));
    for (int64_t i = 0; i < n; i++) {
        br_ipc from = block[i % 2];
        from.offset += place[i] * sizeof *value;
        GPU_TRY(br_swap_ipc(e, "a", i, &from));
    }
    GPU_TRY(br_swap_end(e, "a", digest[0]));
    GPU_TRY(br_swap_commit(e, "a", 1, BR_SWAP_STOP, &answer));
    us[0] += 1e3 * gpu_now_ms();
    gpu_expect_live(e, "a", "ipc");
    GPU_TRY(br_engine_adapter_live_digest(e, "a", &digest[1]));
    GPU_EXPECT(br_digest_equal(digest[0], digest[1]), "ipc: another digest than out of the host's memory");
    br_ipc nobody = {{1, 2, 3}, 0};
    GPU_TRY(br_swap_begin(e, "a", 2, 0, &answer));
    GPU_EXPECT(br_swap_ipc(e, "a", 0, &nobody) == BR_E_NOT_FOUND, "ipc: a handle of nobody was opened");
    gpu_expect_live(e, "a", "ipc, after a refusal");
    br_swap_tensor first;
    br_ipc outside = block[0];
    outside.offset += 1ull << 40; /* behind any block of a GPU */
    GPU_TRY(br_swap_tensor_at(e, "a", 0, &first));
    GPU_TRY(br_swap_begin(e, "a", 2, 0, &answer));
    GPU_EXPECT(br_swap_ipc(e, "a", 0, &outside) == BR_E_FORMAT, "ipc: a tensor outside of its block was taken");
    GPU_EXPECT(strstr(br_last_error(), first.name) && strstr(br_last_error(), "of a block"), "ipc: refused with '%s'", br_last_error());
    gpu_expect_live(e, "a", "ipc, after a tensor outside of its block");
    gpu_row(g, "swap.ipc", "small from the memory of another process", us, 1, 0, &digest[1]);
    put(to_other[1], "x", 1);
    GPU_EXPECT(waitpid(other, &status, 0) == other && status == 0, "ipc: the other process ended with %d", status);
    br_engine_close(e);
    free(place);
    free(value);
    free(tensor);
}
