/* 200 swaps over 8 versions on `small` while sequences run: every text as a cold start of its version gives it. */
#include "gpu_swap.h"

#include "engine_parts.h"

#include <stdio.h>
#include <string.h>

enum { VERSIONS = 8, REQUESTS = 8, PROMPT_MAX = 200, MAX_NEW = 12, SWAPS = 200, QUICK_SWAPS = 24 };

typedef struct text {
    int32_t n, token[MAX_NEW];
    uint32_t logprob[MAX_NEW];
    br_stop_reason stop;
} text;

typedef struct run {
    uint64_t id[REQUESTS];
    text text[REQUESTS];
    int n_ended;
} run;

typedef struct load {
    char model[GPU_PATH], dir[VERSIONS][GPU_PATH];
    int32_t prompt[REQUESTS][PROMPT_MAX], n_prompt[REQUESTS];
    text cold[VERSIONS][REQUESTS];
    lora_set *set[VERSIONS];
    const uint16_t **value[VERSIONS];
    int64_t n_tensor;
} load;

static void start(const load *l, br_engine *e, run *r) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < REQUESTS; i++) {
        char uid[16];
        snprintf(uid, sizeof uid, "p%d", i);
        br_request request = {.uid = uid, .prompt = l->prompt[i], .n_prompt = l->n_prompt[i], .seed = 7, .adapter = "a",
                              .sampling = br_sampling_default()};
        request.sampling.max_new = MAX_NEW;
        request.sampling.ignore_eos = 1;
        GPU_TRY(br_submit(e, &request, &r->id[i]));
    }
}

static void poll_once(br_engine *e, run **r, int n_run) {
    br_token token[64];
    int32_t n, done;
    GPU_TRY(br_poll(e, token, 64, &n, &done));
    for (int32_t k = 0; k < n; k++)
        for (int j = 0; j < n_run; j++)
            for (int i = 0; i < REQUESTS; i++) {
                text *t = &r[j]->text[i];
                if (r[j]->id[i] != token[k].request)
                    continue;
                if (token[k].token >= 0) {
                    t->token[t->n] = token[k].token;
                    t->logprob[t->n++] = token[k].logprob;
                }
                t->stop = token[k].stop;
                r[j]->n_ended += token[k].last;
            }
}

static void finish(br_engine *e, run *r) {
    while (r->n_ended < REQUESTS)
        poll_once(e, &r, 1);
}

static br_engine *open_engine(const load *l, int v, int32_t swap_rank) {
    br_engine *e;
    const br_adapter_source source = {"a", l->dir[v]};
    const br_engine_options options = {.model_dir = l->model, .adapter = &source, .n_adapter = 1, .backend = "cuda", .swap_rank = swap_rank,
                                       .max_seqs = 2 * REQUESTS};
    GPU_TRY(br_engine_open(&options, &e));
    return e;
}

static void make(const gpu_swap *g, load *l) {
    run r;
    gpu_make_model(g, "small", l->model);
    for (int v = 0; v < VERSIONS; v++) {
        char name[32];
        snprintf(name, sizeof name, "version-%d", v);
        gpu_make_adapter(g, l->model, name, (uint64_t)(100 + v), GPU_RANK, l->dir[v]);
    }
    for (int i = 0; i < REQUESTS; i++) {
        l->n_prompt[i] = 5 + i * (PROMPT_MAX - 5) / REQUESTS;
        for (int32_t t = 0; t < l->n_prompt[i]; t++)
            l->prompt[i][t] = 3 + (int32_t)(gpu_mix((uint64_t)(i * 1000 + t)) % 500);
    }
    for (int v = 0; v < VERSIONS; v++) {
        br_engine *e = open_engine(l, v, 0);
        start(l, e, &r);
        finish(e, &r);
        memcpy(l->cold[v], r.text, sizeof r.text);
        for (int w = 0; w < v; w++)
            GPU_EXPECT(memcmp(l->cold[v], l->cold[w], sizeof r.text) != 0, "load: versions %d and %d speak alike", v, w);
        br_engine_close(e);
    }
}

static void expect_cold(const load *l, const run *r, int v, int swap) {
    for (int i = 0; i < REQUESTS; i++) {
        const text *got = &r->text[i], *want = &l->cold[v][i];
        GPU_EXPECT(got->stop == BR_STOP_ABORT ? got->n <= want->n : got->n == want->n, "load: swap %d, request %d: %d tokens", swap, i, got->n);
        for (int32_t t = 0; t < got->n; t++)
            GPU_EXPECT(got->token[t] == want->token[t] && got->logprob[t] == want->logprob[t],
                       "load: swap %d, version %d, request %d, token %d: %d with %08x, cold %d with %08x", swap, v, i, t, got->token[t],
                       got->logprob[t], want->token[t], want->logprob[t]);
    }
}

/* Beside the run r[0]; afterwards r[0] is a run under the new version, and the one before has ended. */
static void swap_once(load *l, br_engine *e, run *r[2], int v, int k, double *us, double *commit_us) {
    static const br_swap_mode MODE[] = {BR_SWAP_FINISH_OLD, BR_SWAP_DRAIN, BR_SWAP_STOP};
    const br_digest digest = lora_digest(l->set[v], 0);
    br_swap_answer answer;
    br_swap_status status;
    for (int i = 0; i < k % 5; i++)
        poll_once(e, r, 1);
    *us = -1e3 * gpu_now_ms();
    GPU_TRY(br_swap_from_memory(e, "a", l->value[v], l->n_tensor, &digest, k, 0, &answer));
    *us += 1e3 * gpu_now_ms();
    for (int i = 0; i < k % 3; i++) /* prepared, while the live one goes on */
        poll_once(e, r, 1);
    *commit_us = -1e3 * gpu_now_ms();
    GPU_TRY(br_swap_commit(e, "a", k, MODE[k % 3], &answer));
    *commit_us += 1e3 * gpu_now_ms();
    do {
        GPU_TRY(br_swap_status_of(e, "a", &status));
        if (status.live_version != k)
            poll_once(e, r, 1);
    } while (status.live_version != k);
    run *fresh = r[1];
    r[1] = r[0];
    r[0] = fresh;
    start(l, e, r[0]);
    while (r[1]->n_ended < REQUESTS)
        poll_once(e, r, 2);
}

void gpu_swap_load(const gpu_swap *g) {
    load *l = gpu_alloc(1, sizeof *l);
    run *r[2] = {gpu_alloc(1, sizeof(run)), gpu_alloc(1, sizeof(run))};
    const int n_swap = g->quick ? QUICK_SWAPS : SWAPS;
    double us[SWAPS], commit_us[SWAPS];
    char shape[96];
    int v = 0;
    make(g, l);
    br_engine *e = open_engine(l, 0, GPU_RANK);
    for (int i = 0; i < VERSIONS; i++) {
        const br_adapter_source source = {"a", l->dir[i]};
        GPU_TRY(lora_open(&e->loaded.config, &source, 1, 0, &l->set[i]));
        l->value[i] = gpu_values(e, "a", l->set[i], &l->n_tensor);
    }
    start(l, e, r[0]);
    for (int k = 1; k <= n_swap; k++) {
        const int next = (int)(gpu_mix((uint64_t)k) % VERSIONS);
        swap_once(l, e, r, next, k, &us[k - 1], &commit_us[k - 1]);
        expect_cold(l, r[1], v, k);
        v = next;
        gpu_expect_live(e, "a", "load");
    }
    finish(e, r[0]);
    expect_cold(l, r[0], v, n_swap + 1);
    snprintf(shape, sizeof shape, "small: %d swaps of %lld tensors", n_swap, (long long)l->n_tensor);
    gpu_row(g, "swap.load.prepare", shape, us, n_swap, 0, NULL);
    gpu_row(g, "swap.load.commit", shape, commit_us, n_swap, 0, NULL);
    printf("load: %d swaps under load, every text equal to its version's cold start\n", n_swap);
    br_engine_close(e);
    for (int i = 0; i < VERSIONS; i++) {
        lora_close(l->set[i]);
        free(l->value[i]);
    }
    free(l);
    free(r[0]);
    free(r[1]);
}
