/* gpu_swap: what the parts of `bitroll_cuda_swap` share: swaps and digests of adapters on a GPU, checked and timed. No Check here: the
 * program runs where nothing is installed. The first thing that is wrong ends it with a sentence and status 1. */
#ifndef GPU_SWAP_H
#define GPU_SWAP_H

#include "bitroll.h"
#include "lora_slots.h"

#include <stdint.h>
#include <stdlib.h>

enum { GPU_PATH = 512, GPU_RANK = 32 };

typedef struct gpu_swap {
    char dir[GPU_PATH]; /* for checkpoints and adapters */
    char gpu[128];
    const char *csv, *commit; /* NULL: none */
    int quick;          /* fewer swaps */
} gpu_swap;

_Noreturn void gpu_die(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define GPU_TRY(call)                                                                        \
    do {                                                                                     \
        if ((call) != BR_OK)                                                                 \
            gpu_die("%s:%d: %s", __FILE__, __LINE__, br_last_error());                       \
    } while (0)
#define GPU_EXPECT(condition, ...)                                                           \
    do {                                                                                     \
        if (!(condition))                                                                    \
            gpu_die(__VA_ARGS__);                                                            \
    } while (0)

uint64_t gpu_mix(uint64_t x);
double gpu_now_ms(void);
void *gpu_alloc(size_t n, size_t bytes);
/* A row: prints it, and adds it to the table. us (n): times; floor_us 0: none. */
void gpu_row(const gpu_swap *g, const char *row, const char *shape, double *us, int n, double floor_us, const br_digest *digest);

/* A checkpoint and adapters of it, made once a name. */
void gpu_make_model(const gpu_swap *g, const char *preset, char dir[GPU_PATH]);
void gpu_make_adapter(const gpu_swap *g, const char *model_dir, const char *name, uint64_t seed, int32_t rank, char dir[GPU_PATH]);
/* Values of a loaded adapter by tensor number of the manifest of `adapter`, whose plan has to be that of the set. */
const uint16_t **gpu_values(const br_engine *e, const char *adapter, const lora_set *set, int64_t *n);
void gpu_expect_live(br_engine *e, const char *adapter, const char *what);

void gpu_swap_digest(const gpu_swap *g);  /* digests equal the host's, odd shapes, flipped bits */
void gpu_swap_ipc(const gpu_swap *g);     /* from the memory of another process */
void gpu_swap_load(const gpu_swap *g);    /* 200 swaps while sequences run */
void gpu_swap_speed(const gpu_swap *g);   /* slice-full */
void gpu_swap_stream(const gpu_swap *g);  /* the price of streaming over the bridge */

/* The other process of gpu_swap_ipc, which begins before this one has touched the GPU. */
void gpu_swap_ipc_fork(void);
/* Reads n bytes of device memory and nothing else; gpu_swap_read.cu. */
void gpu_read_all(const void *at, size_t n, void *stream);

#endif
