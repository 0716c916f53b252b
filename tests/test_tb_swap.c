/* tb_weights_of behind a real engine: the digest that it answers with is of the memory that forwards read. A byte that is flipped there
 * shows in it even when it lies in an expert that no row was routed to, where no text can show it. */
#include "engine_parts.h"
#include "lora_file.h"
#include "model_parts.h"
#include "swap_rig.h"
#include "tb_worker.h"
#include "test_support.h"

#include <string.h>

enum { MAX_NEW = 4, EXPERT_MAX = 256, STACKS = 6 };

typedef struct rig {
    br_engine *engine;
    tb_swap swap;
    tb_weights_ops ops;
    lora_set *set[SWAP_VERSIONS];
    br_trace trace;
    int32_t layer;                    /* the one that is watched, the first with experts */
    unsigned char chosen[EXPERT_MAX]; /* 1: a row of it was routed there */
} rig;

typedef struct text {
    int32_t n;
    br_token token[MAX_NEW];
} text;

static void see_rows(void *context, br_stage stage, int32_t layer, const br_piece *piece, int32_t n_piece) {
    rig *r = context;
    const int32_t topk = r->engine->loaded.config.n_expert_topk;
    if (stage != BR_STAGE_ROUTE || layer != r->layer)
        return;
    ck_assert_int_eq(n_piece, 2);
    for (int32_t row = 0; row < r->engine->plan->n_row; row++)
        for (int32_t k = 0; k < topk; k++)
            r->chosen[((const int32_t *)piece[0].data)[row * topk + k]] = 1;
}

static void open_rig(rig *r) {
    memset(r, 0, sizeof *r);
    r->engine = swap_engine(swap_of.dir[0]);
    r->swap = (tb_swap){.engine = r->engine, .adapter = "a"};
    r->ops = tb_weights_of(&r->swap);
    r->layer = r->engine->loaded.config.n_dense_layer;
    r->trace = (br_trace){.rows = see_rows, .context = r};
    r->engine->trace = &r->trace;
    ck_assert_int_le(r->engine->loaded.config.n_expert, EXPERT_MAX);
    swap_open_sets(r->engine, r->set);
}

static void close_rig(rig *r) {
    swap_close_sets(r->set);
    br_engine_close(r->engine);
}

/* The same short request each time: it leaves experts idle, and fills no block that a later one could reuse. */
static text generate(rig *r) {
    static const int32_t prompt[3] = {5, 6, 7};
    br_request request = {.uid = "short", .prompt = prompt, .n_prompt = 3, .seed = 7, .adapter = "a", .sampling = br_sampling_default()};
    text t = {0};
    uint64_t id;
    int32_t n, done = 0;
    request.sampling.max_new = MAX_NEW;
    request.sampling.ignore_eos = 1;
    memset(r->chosen, 0, sizeof r->chosen);
    CHECK_OK(br_submit(r->engine, &request, &id));
    for (; !done; t.n += n)
        CHECK_OK(br_poll(r->engine, t.token + t.n, MAX_NEW - t.n, &n, &done));
    ck_assert_int_eq(t.n, MAX_NEW);
    return t;
}

static int is_same(const text *a, const text *b) {
    int same = 1;
    for (int32_t i = 0; i < MAX_NEW; i++)
        same &= a->token[i].token == b->token[i].token && a->token[i].logprob == b->token[i].logprob;
    return same;
}

static int32_t idle_expert(const rig *r) {
    int32_t n_chosen = 0, idle = -1;
    for (int32_t e = r->engine->loaded.config.n_expert - 1; e >= 0; e--) {
        n_chosen += r->chosen[e];
        idle = r->chosen[e] ? idle : e;
    }
    ck_assert_int_ge(n_chosen, r->engine->loaded.config.n_expert_topk); /* the watcher saw something */
    ck_assert_int_ge(idle, 0);
    return idle;
}

/* A byte in the middle of A or B of one of the maps of an expert, in the place of "a" that is live, or in the other one. */
static unsigned char *byte_of(const rig *r, int is_live, int32_t expert, int stack) {
    const br_loaded *loaded = &r->engine->loaded;
    const moe_weights *w = &loaded->model->layer[r->layer].moe;
    const bi_adapter *map[STACKS / 2] = {w->lora1, w->lora3, w->lora2};
    const int32_t way = is_live ? loaded->live_way[0] : !loaded->live_way[0];
    const bi_adapter *adapter = &map[stack / 2][way];
    const bi_mat one = bi_mat_at(stack % 2 ? &adapter->b : &adapter->a, expert);
    ck_assert(adapter->a.stride && adapter->b.stride); /* every expert has its own */
    return (unsigned char *)(uintptr_t)one.data + one.stride / 4;
}

/* All of version v as a trainer sends it, up to the end of it. */
static void prepare(rig *r, int v, uint64_t version) {
    tb_buffer raw = {0};
    uint32_t n;
    const tb_w_begin begin = {.kind = TB_W_ADAPTER, .adapter = tb_text_of("a")};
    CHECK_OK(r->ops.describe(r->ops.context, begin.adapter, &raw, &n));
    const tb_manifest manifest = {.tensors = {.raw = {raw.bytes, raw.n}, .n = n}};
    CHECK_OK(r->ops.manifest(r->ops.context, &manifest));
    tb_buffer_close(&raw);
    CHECK_OK(r->ops.ws_begin(r->ops.context, version, &begin));
    for (uint32_t i = 0; i < n; i++) {
        br_swap_tensor t;
        lora_key key;
        CHECK_OK(br_swap_tensor_at(r->engine, "a", i, &t));
        CHECK_OK(lora_key_parse("test", &r->engine->loaded.config, t.name, &key));
        const lora_pair pair = lora_pair_of(r->set[v], 0, key.cls, key.layer, key.expert);
        CHECK_OK(r->ops.ws_chunk(r->ops.context, i, 0, t.is_b ? pair.b : pair.a, (uint64_t)t.n_row * (uint64_t)t.n_col * 2));
    }
    CHECK_OK(r->ops.ws_end(r->ops.context, lora_digest(r->set[v], 0)));
}

/* The digest that COMMITTED tells. */
static br_digest commit(rig *r) {
    br_digest digest;
    uint64_t step;
    CHECK_OK(r->ops.ws_commit(r->ops.context, TB_DRAIN, &step, &digest));
    ck_assert_uint_ne(step, 0);
    return digest;
}

static br_digest live(rig *r) {
    br_digest digest;
    CHECK_OK(r->ops.ws_live(r->ops.context, &digest));
    return digest;
}

START_TEST(a_flipped_byte_of_an_idle_expert_is_seen) {
    rig r;
    open_rig(&r);
    const text before = generate(&r);
    const br_digest sent = lora_digest(r.set[1], 0);
    prepare(&r, 1, 1);
    ck_assert(br_digest_equal(commit(&r), sent));
    const text whole = generate(&r);
    const int32_t expert = idle_expert(&r);
    ck_assert(!is_same(&before, &whole)); /* what is live shows in texts */
    for (int stack = 0; stack < STACKS; stack++) {
        unsigned char *byte = byte_of(&r, 1, expert, stack);
        *byte ^= 0x10;
        const text flipped = generate(&r);
        ck_assert_msg(is_same(&whole, &flipped) && !r.chosen[expert], "expert %d, stack %d: a row was routed there", expert, stack);
        ck_assert_msg(!br_digest_equal(live(&r), sent), "expert %d, stack %d: the digest does not show a flipped byte", expert, stack);
        *byte ^= 0x10;
        ck_assert(br_digest_equal(live(&r), sent));
    }
    close_rig(&r);
}
END_TEST

/* The bytes that came had the right digest; what went live is something else, and COMMITTED says so. */
START_TEST(a_byte_flipped_before_the_commit_is_seen) {
    rig r;
    open_rig(&r);
    const br_digest sent = lora_digest(r.set[1], 0);
    prepare(&r, 1, 1);
    ck_assert(br_digest_equal(commit(&r), sent));
    const text whole = generate(&r);
    const int32_t expert = idle_expert(&r);
    for (int stack = 0; stack < STACKS; stack++) {
        prepare(&r, 1, 2 + (uint64_t)stack); /* the same values once more */
        *byte_of(&r, 0, expert, stack) ^= 0x10;
        const br_digest committed = commit(&r);
        const text flipped = generate(&r);
        ck_assert(is_same(&whole, &flipped) && !r.chosen[expert]);
        ck_assert_msg(!br_digest_equal(committed, sent), "expert %d, stack %d: COMMITTED does not show a flipped byte", expert, stack);
        ck_assert(br_digest_equal(committed, live(&r)));
    }
    prepare(&r, 1, 2 + STACKS); /* written anew, it is whole again */
    ck_assert(br_digest_equal(commit(&r), sent));
    close_rig(&r);
}
END_TEST

Suite *test_tb_swap_suite(void) {
    Suite *suite = suite_create("tb_swap");
    TCase *tcase = tcase_create("live memory");
    tcase_set_timeout(tcase, 120);
    tcase_add_unchecked_fixture(tcase, swap_models_make, NULL);
    tcase_add_test(tcase, a_flipped_byte_of_an_idle_expert_is_seen);
    tcase_add_test(tcase, a_byte_flipped_before_the_commit_is_seen);
    suite_add_tcase(suite, tcase);
    return suite;
}
