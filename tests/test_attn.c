/* bi_latent_store, bi_attn, bi_attn_gate: the oracle against the slow form, and the survival list. */
#include "cache_rig.h"
#include "row_case.h"
#include "slow_attn.h"

#include "bi_fn.h"

enum { CODE = 41, GAP = 3, N_ISA = 3 };

typedef enum attn_shape {
    SHAPE_FREE,  /* latents of the family */
    SHAPE_RISE,  /* scores rise with the position: every later block moves the maximum */
    SHAPE_FALL   /* scores fall: no later block does, and late weights vanish */
} attn_shape;

typedef struct attn_case {
    int32_t n_head, d_kv_latent, d_rope, n_pos[CACHE_RIG_SEQS], topk; /* topk 0: dense */
    row_family latent, query;
    attn_shape shape;
    uint64_t key;
} attn_case;

/* One test's inputs, by sequence. */
static struct {
    attn_case c;
    int32_t d_latent, select_ld;
    float alpha;
    bi_bf16 *latent[CACHE_RIG_SEQS], *q[CACHE_RIG_SEQS], *q_r[CACHE_RIG_SEQS];
    int32_t *select[CACHE_RIG_SEQS], *n_select[CACHE_RIG_SEQS];
} now;

typedef struct attn_out {
    bi_bf16 *z[CACHE_RIG_SEQS]; /* (n_pos, n_head, d_kv_latent) */
    uint32_t *fault[CACHE_RIG_SEQS];
} attn_out;

/* How the same positions are run. */
typedef struct attn_run {
    const char *isa;
    int n_thread, paged, chunk, reversed, listed, only; /* listed: dense by lists; only: one sequence, or -1 */
} attn_run;

static const attn_run whole = {NULL, 1, 1, 4096, 0, 0, -1};

/* k of the visible positions, ascending, each subset equally likely. */
static int32_t choose(uint64_t key, int32_t visible, int32_t k, int32_t *select) {
    int32_t n = 0, left = visible;
    k = k < left ? k : left;
    for (int32_t j = 0; j < visible; j++)
        if ((int32_t)(test_mix(key + (uint64_t)j) % (uint64_t)left--) < k - n)
            select[n++] = j;
    return n;
}

/* Latents and queries along one direction, so that the score is +-200 * position / n_pos. */
static void slope(bi_bf16 *latent, int32_t n_pos, int rising) {
    for (int32_t j = 0; j < n_pos; j++)
        for (int32_t k = 0; k < now.d_latent; k++)
            latent[(int64_t)j * now.d_latent + k] =
                bi_round((rising ? 200.0f : -200.0f) * (float)j / (float)n_pos / (now.alpha * (float)now.d_latent));
}

static void prepare(attn_case c) {
    row_case_arena.used = 0;
    now.c = c;
    now.d_latent = c.d_kv_latent + c.d_rope;
    now.alpha = bi_rsqrt((float)now.d_latent);
    now.select_ld = c.topk;
    for (int s = 0; s < CACHE_RIG_SEQS && !c.topk; s++)
        now.select_ld = now.select_ld > c.n_pos[s] ? now.select_ld : c.n_pos[s];
    int sloped = c.shape == SHAPE_RISE || c.shape == SHAPE_FALL;
    row_family query = sloped ? ROW_PLATEAU : c.query;
    for (uint64_t s = 0; s < CACHE_RIG_SEQS; s++) {
        int32_t n = c.n_pos[s];
        now.latent[s] = row_case_bf16_array((int64_t)n * now.d_latent, c.latent, c.key + 10 * s);
        now.q[s] = row_case_bf16_array((int64_t)n * c.n_head * c.d_kv_latent, query, c.key + 10 * s + 1);
        now.q_r[s] = row_case_bf16_array((int64_t)n * c.n_head * c.d_rope, query, c.key + 10 * s + 2);
        if (sloped)
            slope(now.latent[s], n, c.shape == SHAPE_RISE);
        now.select[s] = ROW_CASE_ARRAY(int32_t, (int64_t)n * now.select_ld);
        now.n_select[s] = ROW_CASE_ARRAY(int32_t, n);
        for (int32_t t = 0; t < n; t++)
            now.n_select[s][t] = choose(test_mix(c.key + s) + (uint64_t)t * 77777, t + 1, now.select_ld,
                                        now.select[s] + (int64_t)t * now.select_ld);
    }
}

static attn_out new_out(void) {
    attn_out out;
    for (int s = 0; s < CACHE_RIG_SEQS; s++) {
        int32_t n = now.c.n_pos[s];
        out.z[s] = ROW_CASE_ARRAY(bi_bf16, (int64_t)n * now.c.n_head * now.c.d_kv_latent);
        out.fault[s] = ROW_CASE_ARRAY(uint32_t, n);
        memset(out.fault[s], 0, sizeof(uint32_t) * (size_t)n);
    }
    return out;
}

/* One step: the batch's rows, gathered from the inputs into arrays with gaps, and back. */
static void step(const op_rig *rig, const bi_batch *batch, const bi_cache *cache, int listed, attn_out *out) {
    size_t used = row_case_arena.used;
    int32_t n = batch->n_row, d = now.c.d_kv_latent, n_head = now.c.n_head, d_rope = now.c.d_rope;
    int32_t x_ld = now.d_latent + GAP, head_ld = d_rope + GAP, select_ld = now.select_ld;
    bi_bf16 *x = ROW_CASE_ARRAY(bi_bf16, n * x_ld), *q = ROW_CASE_ARRAY(bi_bf16, n * n_head * d);
    bi_bf16 *q_r = ROW_CASE_ARRAY(bi_bf16, n * n_head * head_ld), *z = ROW_CASE_ARRAY(bi_bf16, n * n_head * d);
    int32_t *select = ROW_CASE_ARRAY(int32_t, listed ? n * select_ld : 0), *n_select = ROW_CASE_ARRAY(int32_t, n);
    uint32_t *fault = ROW_CASE_ARRAY(uint32_t, n);
    memset(fault, 0, sizeof *fault * (size_t)n);
    for (int32_t t = 0; t < n - CACHE_RIG_PAD; t++) {
        const bi_seg *seg = &batch->seg[batch->row_seg[t]];
        int64_t pos = seg->pos + t - seg->row;
        memcpy(x + t * x_ld, now.latent[seg->seq] + pos * now.d_latent, 2 * (size_t)now.d_latent);
        memcpy(q + t * n_head * d, now.q[seg->seq] + pos * n_head * d, 2 * (size_t)(n_head * d));
        for (int32_t h = 0; h < n_head; h++)
            memcpy(q_r + (t * n_head + h) * head_ld, now.q_r[seg->seq] + (pos * n_head + h) * d_rope, 2 * (size_t)d_rope);
        if (listed)
            memcpy(select + t * select_ld, now.select[seg->seq] + pos * select_ld, 4 * (size_t)select_ld);
        n_select[t] = now.n_select[seg->seq][pos];
    }
    bi_latent_store_args store = {batch, now.d_latent, x, x_ld, *cache};
    bi_attn_args attn = {batch, n_head, d, d_rope, q, q_r, n_head * head_ld, head_ld, *cache, listed ? select : NULL,
                         listed ? n_select : NULL, select_ld, now.alpha, z, {fault, CODE}};
    CHECK_OK(rig->backend.op->latent_store(rig->backend.ctx, &store));
    CHECK_OK(rig->backend.op->attn(rig->backend.ctx, &attn));
    for (int32_t t = 0; t < n - CACHE_RIG_PAD; t++) {
        const bi_seg *seg = &batch->seg[batch->row_seg[t]];
        int64_t pos = seg->pos + t - seg->row;
        memcpy(out->z[seg->seq] + pos * n_head * d, z + t * n_head * d, 2 * (size_t)(n_head * d));
        out->fault[seg->seq][pos] = fault[t];
    }
    row_case_arena.used = used;
}

static bi_limits limits_of(int32_t n_row, int32_t n_head, int32_t d_kv_latent, int32_t d_rope) {
    bi_limits limits = {.n_row = n_row, .n_head = n_head, .d_kv_latent = d_kv_latent, .d_rope = d_rope,
                        .n_pos = CACHE_RIG_BLOCKS * BR_PAGE_TOK};
    return limits;
}

/* Steps of at most `chunk` rows of each sequence, until all have run. */
static void run(attn_run how, attn_out *out) {
    static batch_rig rows;
    const attn_case *c = &now.c;
    bi_limits limits = limits_of(CACHE_RIG_ROWS + CACHE_RIG_PAD, c->n_head, c->d_kv_latent, c->d_rope);
    op_rig rig;
    cache_rig cache;
    op_rig_open(&rig, &limits, how.isa, how.n_thread);
    op_rig_poison(&rig);
    cache_rig_open(&cache, rig.backend.op->latent_block_bytes(now.d_latent), how.paged, c->key);
    for (int32_t pos = 0;; pos += how.chunk) {
        batch_rig_begin(&rows);
        for (int i = 0; i < CACHE_RIG_SEQS; i++) {
            int s = how.reversed ? CACHE_RIG_SEQS - 1 - i : i;
            int32_t left = c->n_pos[s] - pos;
            if (left > 0 && (how.only < 0 || how.only == s))
                batch_rig_add(&rows, s, pos, left < how.chunk ? left : how.chunk);
        }
        if (!rows.batch.n_row)
            break;
        batch_rig_pad(&rows);
        step(&rig, &rows.batch, &cache.cache, c->topk || how.listed, out);
    }
    cache_rig_close(&cache);
    op_rig_close(&rig);
}

/* Check writes a record for every assertion that holds, so only arrays that differ are walked. */
static void same_z(const char *what, const bi_bf16 *got, const bi_bf16 *want, int64_t n) {
    if (memcmp(got, want, sizeof *got * (size_t)n))
        row_case_same_bf16(what, got, want, n);
}

static void same_sequence(const char *what, int s, const attn_out *got, const attn_out *want) {
    for (int32_t t = 0; t < now.c.n_pos[s]; t++)
        if (got->fault[s][t] != want->fault[s][t])
            ck_abort_msg("%s: sequence %d position %d: fault %u, wanted %u", what, s, t, got->fault[s][t],
                         want->fault[s][t]);
    same_z(what, got->z[s], want->z[s], (int64_t)now.c.n_pos[s] * now.c.n_head * now.c.d_kv_latent);
}

/* The slow form of one position; a row with a fault only has to say so. */
static void same_as_slow(const char *what, int s, int32_t t, const attn_out *got) {
    size_t used = row_case_arena.used;
    const attn_case *c = &now.c;
    int32_t n = c->n_head * c->d_kv_latent;
    slow_attn args = {c->n_head, c->d_kv_latent, c->d_rope, now.q[s] + (int64_t)t * n,
                      now.q_r[s] + (int64_t)t * c->n_head * c->d_rope, c->d_rope, now.latent[s],
                      now.select[s] + (int64_t)t * now.select_ld, now.n_select[s][t], now.alpha};
    bi_bf16 *want = ROW_CASE_ARRAY(bi_bf16, n);
    uint32_t fault = slow_attn_row(&args, want) ? CODE : 0;
    if (got->fault[s][t] != fault)
        ck_abort_msg("%s: sequence %d position %d: fault %u, wanted %u", what, s, t, got->fault[s][t], fault);
    for (int32_t i = 0; i < n && !fault; i++)
        if (got->z[s][(int64_t)t * n + i] != want[i])
            ck_abort_msg("%s: topk %d family %d %d shape %d: sequence %d position %d head %d dim %d is %04x, wanted %04x",
                         what, c->topk, c->latent, c->query, c->shape, s, t, i / c->d_kv_latent, i % c->d_kv_latent,
                         got->z[s][(int64_t)t * n + i], want[i]);
    row_case_arena.used = used;
}

/* Runs the case on every instruction set. Every `every`-th position, block edges and the last meet the slow form once; the
 * other sets must equal the first everywhere. */
static void check_case(attn_case c, int every) {
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa);
    every = test_is_long() ? every / 8 + 1 : every;
    prepare(c);
    attn_out first = new_out();
    for (int i = 0; i < n_isa; i++) {
        size_t used = row_case_arena.used;
        attn_out out = i ? new_out() : first;
        attn_run how = whole;
        how.isa = isa[i];
        run(how, &out);
        for (int s = 0; s < CACHE_RIG_SEQS && i; s++)
            same_sequence(isa[i], s, &out, &first);
        row_case_arena.used = i ? used : row_case_arena.used;
    }
    for (int s = 0; s < CACHE_RIG_SEQS; s++)
        for (int32_t t = 0; t < c.n_pos[s]; t++)
            if (t % every == 0 || (every < 64 && (t + 1) % 64 < 3) || t == c.n_pos[s] - 1)
                same_as_slow(isa[0], s, t, &first);
}

static const attn_case nano = {4, 64, 16, {150, 40, 1}, 0, ROW_NORMAL, ROW_NORMAL, SHAPE_FREE, 1};

START_TEST(equals_slow_form_dense) {
    attn_case c = nano;
    c.n_pos[0] = 700;
    c.key = test_seed();
    check_case(c, 47);
}
END_TEST

START_TEST(equals_slow_form_sparse) {
    attn_case c = nano;
    c.n_pos[0] = 700;
    for (c.topk = 1; c.topk <= 300; c.topk = c.topk * 3 + 1) {
        c.key = test_seed() + (uint64_t)c.topk;
        check_case(c, 41);
    }
}
END_TEST

START_TEST(equals_slow_form_families) {
    attn_case c = nano;
    for (int f = 0; f < ROW_FAMILIES; f++) {
        for (c.topk = 0; c.topk <= 16; c.topk += 16) {
            c.key = test_seed() + (uint64_t)f;
            c.latent = (row_family)f;
            c.query = ROW_NORMAL;
            check_case(c, 13);
            c.latent = ROW_NORMAL;
            c.query = (row_family)f;
            check_case(c, 13);
            c.latent = (row_family)f;
            check_case(c, 29);
        }
    }
}
END_TEST

/* Later blocks: the running maximum moves, stays, and the old accumulator is scaled to nothing. */
START_TEST(long_lists) {
    for (int shape = SHAPE_FREE; shape <= SHAPE_FALL; shape++) {
        attn_case c = {2, 32, 16, {1300, 70, 3}, 640, ROW_NORMAL, ROW_NORMAL, (attn_shape)shape, test_seed()};
        check_case(c, 433);
        c.topk = 0;
        check_case(c, 433);
    }
}
END_TEST

/* Rows of more entries than a part has, beside rows of fewer. */
START_TEST(several_parts) {
    for (int shape = SHAPE_FREE; shape <= SHAPE_FALL; shape++) {
        attn_case c = {2, 16, 8, {2200, 70, 3}, 0, ROW_NORMAL, ROW_NORMAL, (attn_shape)shape, test_seed()};
        check_case(c, 731);
        prepare(c);
        attn_out out = new_out();
        run(whole, &out);
        for (int32_t t = 2046; t < 2051; t++)
            same_as_slow("the end of a part", 0, t, &out);
    }
}
END_TEST

/* One ulp of l or L moves one output in some 50,000 across a rounding of bf16, and l only where a part has two blocks. So half a million
 * outputs of such rows meet the slow form. */
START_TEST(roundings_of_the_sums_show) {
    attn_case c = {4, 512, 16, {1100, 1, 1}, 100, ROW_NORMAL, ROW_NORMAL, SHAPE_FREE, test_seed()};
    prepare(c);
    attn_out out = new_out();
    run(whole, &out);
    for (int32_t t = 600; t < 1100; t += 2)
        same_as_slow("a part of two blocks", 0, t, &out);
}
END_TEST

/* Widths that are no multiple of a block or panel, no rope part, one head, and the real width. */
START_TEST(odd_shapes) {
    static const int32_t shape[][3] = {{1, 1, 0},  {1, 5, 3},    {3, 17, 0},  {5, 33, 14},
                                       {7, 48, 1}, {2, 512, 64}, {33, 32, 16}};
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
        attn_case c = {shape[i][0], shape[i][1], shape[i][2], {130, 9, 1}, 0, ROW_NORMAL, ROW_NORMAL, SHAPE_FREE, 7 + i};
        check_case(c, 43);
        c.topk = 20;
        check_case(c, 43);
    }
}
END_TEST


/* The same positions in other ways must give the same bytes: each field of `how` in turn. */
START_TEST(survives_every_way_to_run) {
    attn_case c = nano;
    c.key = test_seed();
    for (c.topk = 0; c.topk <= 16; c.topk += 16) {
        static const attn_run ways[] = {
            {NULL, 1, 1, 4096, 0, 0, -1}, {NULL, 1, 0, 4096, 0, 0, -1}, {NULL, 2, 1, 4096, 0, 0, -1},
            {NULL, 5, 0, 4096, 0, 0, -1}, {NULL, 1, 1, 4096, 1, 0, -1}, {NULL, 1, 1, 4096, 0, 1, -1},
            {NULL, 1, 1, 1, 0, 0, -1},    {NULL, 2, 0, 1, 1, 0, -1},    {NULL, 1, 1, 64, 0, 0, -1},
        };
        prepare(c);
        attn_out want = new_out();
        run(whole, &want);
        for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
            attn_out got = new_out();
            run(ways[i], &got);
            for (int s = 0; s < CACHE_RIG_SEQS; s++)
                same_sequence("another way to run", s, &got, &want);
        }
        for (int s = 0; s < CACHE_RIG_SEQS; s++) {
            attn_out got = new_out();
            attn_run alone = whole;
            alone.only = s;
            run(alone, &got);
            same_sequence("alone", s, &got, &want);
        }
    }
}
END_TEST

START_TEST(survives_every_chunk_cut) {
    attn_case c = nano;
    c.n_pos[0] = 40;
    c.n_pos[1] = 70;
    for (c.topk = 0; c.topk <= 5; c.topk += 5) {
        prepare(c);
        attn_out want = new_out();
        run(whole, &want);
        for (int chunk = 1; chunk < 71; chunk++) {
            size_t used = row_case_arena.used;
            attn_out got = new_out();
            attn_run how = whole;
            how.chunk = chunk;
            run(how, &got);
            for (int s = 0; s < CACHE_RIG_SEQS; s++)
                same_sequence("another chunk", s, &got, &want);
            row_case_arena.used = used;
        }
    }
}
END_TEST

/* A list of every visible position takes the path of a selection; the bits are those of no list. */
START_TEST(sparse_with_everything_is_dense) {
    attn_case c = nano;
    c.n_pos[0] = 600;
    prepare(c);
    attn_out dense = new_out(), sparse = new_out();
    attn_run listed = whole;
    listed.listed = 1;
    run(whole, &dense);
    run(listed, &sparse);
    ck_assert_int_eq(now.n_select[0][599], 600);
    for (int s = 0; s < CACHE_RIG_SEQS; s++)
        same_sequence("everything selected", s, &sparse, &dense);
}
END_TEST

/* Poisons position `at` of sequence 0 after the clean run; only rows that read it may change, and they must say so. */
static void poisoned_latent(int32_t topk, int32_t at, bi_bf16 value) {
    attn_case c = nano;
    c.topk = topk;
    prepare(c);
    attn_out clean = new_out(), got = new_out();
    run(whole, &clean);
    now.latent[0][at * now.d_latent + 7] = value;
    run(whole, &got);
    for (int32_t t = 0; t < c.n_pos[0]; t++) {
        int reads = 0;
        for (int32_t i = 0; i < now.n_select[0][t]; i++)
            reads |= now.select[0][t * now.select_ld + i] == at;
        if (got.fault[0][t] != (reads ? CODE : 0))
            ck_abort_msg("position %d: reads it %d, fault %u", t, reads, got.fault[0][t]);
        int32_t n = c.n_head * c.d_kv_latent;
        if (!reads)
            same_z("beside a fault", got.z[0] + t * n, clean.z[0] + t * n, n);
    }
    same_sequence("the neighbour", 1, &got, &clean);
    same_sequence("the neighbour", 2, &got, &clean);
}

START_TEST(a_bad_latent_row_ends_its_readers) {
    for (int32_t topk = 0; topk <= 5; topk += 5) {
        poisoned_latent(topk, 20, 0x7fc1);
        poisoned_latent(topk, 3, 0x7f80);
        poisoned_latent(topk, 64, 0xff80);
    }
}
END_TEST

START_TEST(a_bad_query_ends_its_row) {
    attn_case c = nano;
    prepare(c);
    attn_out clean = new_out(), got = new_out();
    run(whole, &clean);
    now.q[0][(30 * c.n_head + 2) * c.d_kv_latent] = 0x7f80;
    now.q_r[0][(31 * c.n_head + 3) * c.d_rope + 1] = 0xffff;
    now.q[0][(32 * c.n_head + 1) * c.d_kv_latent + 5] = 0x7f7f; /* finite: the score is too, or it is a fault of this row */
    run(whole, &got);
    for (int32_t t = 0; t < c.n_pos[0]; t++) {
        int32_t n = c.n_head * c.d_kv_latent;
        if (t == 30 || t == 31)
            ck_assert_uint_eq(got.fault[0][t], CODE);
        else if (t == 32)
            same_as_slow("a huge query", 0, t, &got);
        else
            same_z("beside a fault", got.z[0] + t * n, clean.z[0] + t * n, n);
    }
    same_sequence("the neighbour", 1, &got, &clean);
}
END_TEST

/* The first fault of a row stays, and without a place to report to the op still runs. */
START_TEST(faults_are_kept_and_optional) {
    op_rig rig;
    cache_rig cache;
    static batch_rig rows;
    bi_limits limits = limits_of(1, 1, 16, 16);
    op_rig_open(&rig, &limits, NULL, 1);
    cache_rig_open(&cache, rig.backend.op->latent_block_bytes(32), 1, 1);
    batch_rig_begin(&rows);
    batch_rig_add(&rows, 0, 0, 1);
    bi_bf16 x[32], z[16];
    memset(x, 0xff, sizeof x);
    uint32_t fault[1] = {7};
    bi_latent_store_args store = {&rows.batch, 32, x, 32, cache.cache};
    bi_attn_args attn = {&rows.batch, 1, 16, 16, x, x + 16, 16, 16, cache.cache, NULL, NULL, 0, 0.25f, z, {fault, CODE}};
    CHECK_OK(rig.backend.op->latent_store(rig.backend.ctx, &store));
    CHECK_OK(rig.backend.op->attn(rig.backend.ctx, &attn));
    ck_assert_uint_eq(fault[0], 7);
    attn.fault.row = NULL;
    CHECK_OK(rig.backend.op->attn(rig.backend.ctx, &attn));
    cache_rig_close(&cache);
    op_rig_close(&rig);
}
END_TEST

/* A block is self-contained: copied whole elsewhere, it serves the same rows. */
START_TEST(blocks_are_copied_whole) {
    static batch_rig rows;
    op_rig rig;
    cache_rig cache;
    bi_limits limits = limits_of(80, 2, 40, 8);
    op_rig_open(&rig, &limits, NULL, 2);
    size_t bytes = rig.backend.op->latent_block_bytes(48);
    cache_rig_open(&cache, bytes + 64, 1, 5); /* a stride with other kinds of state between */
    batch_rig_begin(&rows);
    batch_rig_add(&rows, 1, 0, 80);
    bi_bf16 *x = row_case_bf16_array(80 * 48, ROW_NORMAL, 3), *q = row_case_bf16_array(80 * 96, ROW_NORMAL, 4);
    bi_bf16 *z = ROW_CASE_ARRAY(bi_bf16, 80 * 80), *moved = ROW_CASE_ARRAY(bi_bf16, 80 * 80);
    bi_latent_store_args store = {&rows.batch, 48, x, 48, cache.cache};
    bi_attn_args attn = {&rows.batch, 2, 40, 8, q, q, 96, 8, cache.cache, NULL, NULL, 0, 0.125f, z, {NULL, CODE}};
    CHECK_OK(rig.backend.op->latent_store(rig.backend.ctx, &store));
    CHECK_OK(rig.backend.op->attn(rig.backend.ctx, &attn));
    for (int b = 0; b < 2; b++) {
        int32_t *at = &cache.table[1 * CACHE_RIG_BLOCKS + b], to = cache.table[2 * CACHE_RIG_BLOCKS + b];
        memcpy(cache.cache.base + (bytes + 64) * (size_t)to, cache.cache.base + (bytes + 64) * (size_t)*at, bytes);
        memset(cache.cache.base + (bytes + 64) * (size_t)*at, 0xff, bytes);
        *at = to;
    }
    attn.z = moved;
    CHECK_OK(rig.backend.op->attn(rig.backend.ctx, &attn));
    same_z("moved blocks", moved, z, 80 * 80);
    cache_rig_close(&cache);
    op_rig_close(&rig);
}
END_TEST

static void check_refused(const op_rig *rig, const bi_attn_args *a, br_status status) {
    CHECK_FAILS(rig->backend.op->attn(rig->backend.ctx, a), status);
}

START_TEST(refuses_bad_shapes) {
    static batch_rig rows;
    op_rig rig;
    cache_rig cache;
    bi_limits limits = limits_of(4, 2, 16, 16);
    limits.n_pos = 64;
    op_rig_open(&rig, &limits, NULL, 1);
    cache_rig_open(&cache, rig.backend.op->latent_block_bytes(32), 1, 1);
    batch_rig_begin(&rows);
    batch_rig_add(&rows, 0, 3, 2);
    bi_bf16 x[64] = {0}, z[64];
    int32_t select[8] = {0, 1, 2, 3, 0, 1, 2, 3}, n_select[2] = {4, 4};
    const bi_attn_args good = {&rows.batch, 2, 16, 16, x, x, 0, 0, cache.cache, select, n_select, 4, 1.0f, z, {NULL, CODE}};
    const bi_latent_store_args store = {&rows.batch, 32, x, 32, cache.cache};
    bi_latent_store_args s = store;
    CHECK_OK(rig.backend.op->latent_store(rig.backend.ctx, &store));
    CHECK_OK(rig.backend.op->attn(rig.backend.ctx, &good));
    bi_attn_args a = good;
#define REFUSED(change, status) ((void)(a = good, change), check_refused(&rig, &a, status))
    REFUSED(a.n_head = 3, BR_E_SHAPE);
    REFUSED(a.n_head = 0, BR_E_SHAPE);
    REFUSED(a.d_kv_latent = 17, BR_E_SHAPE);
    REFUSED(a.d_rope = 17, BR_E_SHAPE);
    REFUSED(a.d_rope = -1, BR_E_SHAPE);
    REFUSED(a.select_ld = 3, BR_E_SHAPE);
    REFUSED(n_select[1] = 0, BR_E_SHAPE);
    n_select[1] = 4;
    REFUSED(rows.seg[0].pos = 63, BR_E_SHAPE);
    REFUSED(rows.seg[0].pos = -1, BR_E_SHAPE);
    REFUSED(rows.seg[0].pos = 2, BR_E_SHAPE); /* 4 selected of 3 visible */
    rows.seg[0].pos = 3;
    REFUSED(a.cache.block_bytes -= 4, BR_E_SHAPE);
    REFUSED(a.cache.base += 2, BR_E_ALIGN);
    REFUSED(a.cache.block_bytes += 2, BR_E_ALIGN);
#undef REFUSED
    s.x_ld = 31;
    CHECK_FAILS(rig.backend.op->latent_store(rig.backend.ctx, &s), BR_E_SHAPE);
    s = store;
    s.cache.block_bytes -= 4;
    CHECK_FAILS(rig.backend.op->latent_store(rig.backend.ctx, &s), BR_E_SHAPE);
    rows.batch.n_row = 0;
    CHECK_OK(rig.backend.op->attn(rig.backend.ctx, &good));
    cache_rig_close(&cache);
    op_rig_close(&rig);
}
END_TEST

/* y = R(RN(o * sigmoid(gate))), element by element, and R(o) without a gate. */
START_TEST(gate_is_its_clause) {
    enum { ROWS = 37, D = 70 };
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa);
    bi_limits limits = limits_of(ROWS, 1, 16, 16);
    for (int f = 0; f < ROW_FAMILIES * n_isa; f++) {
        op_rig rig;
        row_case_arena.used = 0;
        op_rig_open(&rig, &limits, isa[f % n_isa], 1 + f % 3);
        float *o = row_case_f32_array(ROWS * D, (row_family)(f / n_isa), test_seed() + 1);
        bi_bf16 *gate = row_case_bf16_array(ROWS * D, (row_family)(f / n_isa), test_seed());
        bi_bf16 *y = ROW_CASE_ARRAY(bi_bf16, ROWS * D), *want = ROW_CASE_ARRAY(bi_bf16, ROWS * D);
        bi_attn_gate_args a = {ROWS, D, o, gate, y};
        CHECK_OK(rig.backend.op->attn_gate(rig.backend.ctx, &a));
        for (int i = 0; i < ROWS * D; i++)
            want[i] = bi_round(o[i] * bi_sigmoid(bi_widen(gate[i])));
        same_z("gated", y, want, ROWS * D);
        a.gate = NULL;
        CHECK_OK(rig.backend.op->attn_gate(rig.backend.ctx, &a));
        for (int i = 0; i < ROWS * D; i++)
            want[i] = bi_round(o[i]);
        same_z("without a gate", y, want, ROWS * D);
        a.d = 0;
        CHECK_FAILS(rig.backend.op->attn_gate(rig.backend.ctx, &a), BR_E_SHAPE);
        op_rig_close(&rig);
    }
}
END_TEST

Suite *test_attn_suite(void);
Suite *test_attn_suite(void) {
    Suite *suite = suite_create("attn");
    TCase *tcase = tcase_create("attn");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, row_case_setup, row_case_teardown);
    tcase_add_test(tcase, equals_slow_form_dense);
    tcase_add_test(tcase, equals_slow_form_sparse);
    tcase_add_test(tcase, equals_slow_form_families);
    tcase_add_test(tcase, long_lists);
    tcase_add_test(tcase, several_parts);
    tcase_add_test(tcase, roundings_of_the_sums_show);
    tcase_add_test(tcase, odd_shapes);
    tcase_add_test(tcase, survives_every_way_to_run);
    tcase_add_test(tcase, survives_every_chunk_cut);
    tcase_add_test(tcase, sparse_with_everything_is_dense);
    tcase_add_test(tcase, a_bad_latent_row_ends_its_readers);
    tcase_add_test(tcase, a_bad_query_ends_its_row);
    tcase_add_test(tcase, faults_are_kept_and_optional);
    tcase_add_test(tcase, blocks_are_copied_whole);
    tcase_add_test(tcase, refuses_bad_shapes);
    tcase_add_test(tcase, gate_is_its_clause);
    suite_add_tcase(suite, tcase);
    return suite;
}
