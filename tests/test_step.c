/* What a step of the engine moves between host and device, call by call and byte by byte, and that no step allocates. The host device counts
 * as a GPU does. */
#include "br_mem.h"
#include "device_parts.h"
#include "engine_parts.h"
#include "engine_rig.h"
#include "scorer.h"
#include "test_support.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_SEQ = 3, CHUNK = 8, N_PROMPT = 20, MAX_NEW = 4 };
enum { SAMPLE_BYTES = 5 * 4, ENTROPY_BYTES = 4, TOP_BYTES = 20 * 8, SCORE_BYTES = 3 * 4, FAULT_BYTES = 8 };

static rig_model pico;
static int32_t prompt[N_PROMPT];

static void make_models(void) {
    rig_model_make(&pico, "pico");
    for (int32_t t = 0; t < N_PROMPT; t++)
        prompt[t] = t + 1;
}

static br_engine *open_engine(int32_t chunk) {
    br_engine *engine;
    br_engine_options options = rig_options(&pico);
    options.backend = "oracle";
    options.max_seqs = N_SEQ;
    options.chunk_tokens = chunk;
    options.no_prefix_cache = 1; /* a prompt is read in one piece where it fits */
    CHECK_OK(br_engine_open(&options, &engine));
    return engine;
}

static uint64_t submit(br_engine *engine, int32_t n_prompt, int32_t entropy, int32_t top) {
    uint64_t id;
    br_request r = {.uid = "x", .prompt = prompt, .n_prompt = n_prompt, .sampling = br_sampling_default()};
    r.sampling.max_new = MAX_NEW;
    r.sampling.ignore_eos = 1;
    r.sampling.entropy = entropy;
    r.sampling.top_logprobs = top;
    CHECK_OK(br_submit(engine, &r, &id));
    return id;
}

/* One step, which gives n_token tokens: what it moved. */
static br_device_count step(br_engine *e, int32_t n_token) {
    br_token token[16];
    int32_t n, done;
    const br_device_count before = br_device_counted(e->loaded.device);
    CHECK_OK(br_poll(e, token, 16, &n, &done));
    ck_assert_int_eq(n, n_token);
    const br_device_count after = br_device_counted(e->loaded.device);
    return (br_device_count){
        .n_download = after.n_download - before.n_download, .download_bytes = after.download_bytes - before.download_bytes,
        .n_upload = after.n_upload - before.n_upload, .upload_bytes = after.upload_bytes - before.upload_bytes,
        .n_alloc = after.n_alloc - before.n_alloc, .alloc_bytes = after.alloc_bytes - before.alloc_bytes, .n_wait = after.n_wait - before.n_wait,
    };
}

#define EXPECT_MOVED(moved, downloads, down, uploads, up)                                                             \
    do {                                                                                                              \
        const br_device_count m_ = (moved);                                                                           \
        ck_assert_int_eq(m_.n_download, downloads);                                                                   \
        ck_assert_int_eq(m_.download_bytes, down);                                                                    \
        ck_assert_int_eq(m_.n_upload, uploads);                                                                       \
        ck_assert_int_eq(m_.upload_bytes, (int64_t)(up));                                                             \
        ck_assert_int_eq(m_.n_alloc, 0);                                                                              \
        ck_assert_int_eq(m_.alloc_bytes, 0);                                                                          \
        ck_assert_int_eq(m_.n_wait, 1);                                                                               \
    } while (0)

/* Nothing is drawn: the settings stay here, the error words come back. */
START_TEST(a_step_of_prefill) {
    br_engine *e = open_engine(CHUNK);
    submit(e, N_PROMPT, 1, 20);
    EXPECT_MOVED(step(e, 0), 1, FAULT_BYTES, 1, e->rows.in.bytes);
    EXPECT_MOVED(step(e, 0), 1, FAULT_BYTES, 1, e->rows.in.bytes);
    br_engine_close(e);
}
END_TEST

START_TEST(a_step_of_decode) {
    br_engine *e = open_engine(CHUNK);
    for (int i = 0; i < N_SEQ; i++)
        submit(e, 2, 0, 0);
    for (int i = 0; i < 2; i++) /* the first one reads the prompts and draws from their last rows */
        EXPECT_MOVED(step(e, N_SEQ), 2, N_SEQ * (SAMPLE_BYTES + FAULT_BYTES), 2, e->rows.in.bytes + e->draw.in.bytes);
    br_engine_close(e);
}
END_TEST

/* One request asks: the entropies of all rows lie in front of the tops, the tops behind the last that asks stay. */
START_TEST(a_step_that_is_asked_for_more) {
    for (int asked = 0; asked < 4; asked++) {
        const int entropy = asked & 1, top = asked & 2;
        br_engine *e = open_engine(CHUNK);
        submit(e, 2, 0, 0);
        submit(e, 2, entropy, top ? 5 : 0);
        submit(e, 2, 0, 0);
        const int32_t more = (entropy || top ? N_SEQ * ENTROPY_BYTES : 0) + (top ? 2 * TOP_BYTES : 0);
        for (int i = 0; i < 2; i++)
            EXPECT_MOVED(step(e, N_SEQ), 2, N_SEQ * (SAMPLE_BYTES + FAULT_BYTES) + more, 2, e->rows.in.bytes + e->draw.in.bytes);
        br_engine_close(e);
    }
}
END_TEST

/* A sampler that leaves behind what nobody asked for, as old entropies lie on the host's side of a GPU. */
static const bi_ops *real;
static br_status untidy_sample(bi_ctx *ctx, const bi_sample_args *a) {
    BR_TRY(real->sample(ctx, a));
    for (int32_t t = 0; t < a->n_row; t++)
        if (!a->setting[t].entropy)
            a->entropy[t] = 1;
    return BR_OK;
}

/* What is not brought back is not handed out either, and what is asked for beside others that do not ask is what it is alone. */
START_TEST(each_gets_what_it_asks_for) {
    br_token token[2][16];
    br_top_logprob top[2][BR_TOP_LOGPROBS_MAX];
    for (int beside = 0; beside < 2; beside++) {
        int32_t n, done;
        br_engine *e = open_engine(CHUNK);
        real = e->loaded.backend.op;
        bi_ops untidy = *real;
        untidy.sample = untidy_sample;
        e->loaded.backend.op = &untidy;
        if (beside)
            submit(e, 2, 0, 0);
        const uint64_t id = submit(e, 2, 1, 7);
        CHECK_OK(br_poll(e, token[beside], 16, &n, &done));
        ck_assert_int_eq(n, 1 + beside);
        ck_assert_int_eq(token[beside][beside].request, id);
        ck_assert_int_eq(br_top_logprobs(e, id, top[beside]), 7);
        e->loaded.backend.op = real;
        br_engine_close(e);
    }
    ck_assert_uint_eq(token[1][0].entropy, BR_UNSCORED);
    ck_assert_uint_ne(token[1][1].entropy, BR_UNSCORED);
    ck_assert_uint_eq(token[1][1].entropy, token[0][0].entropy);
    ck_assert_int_eq(token[1][1].token, token[0][0].token);
    ck_assert_mem_eq(top[0], top[1], 7 * sizeof top[0][0]);
}
END_TEST

/* Given tokens: rows to score go over, and their error words, cleared; log-probs come back, entropies when asked. */
START_TEST(a_step_of_a_scored_request) {
    for (int entropy = 0; entropy < 2; entropy++) {
        uint64_t id;
        br_engine *e = open_engine(2 * N_PROMPT);
        br_request r = {.uid = "x", .prompt = prompt, .n_prompt = N_PROMPT, .sampling = br_sampling_default(), .score_from = 5};
        r.sampling.entropy = entropy;
        CHECK_OK(br_submit(e, &r, &id));
        const int32_t n = N_PROMPT - 5;
        EXPECT_MOVED(step(e, n), 2, n * (SCORE_BYTES + (entropy ? ENTROPY_BYTES : 0)) + FAULT_BYTES, 3,
                     e->rows.in.bytes + e->score.in.bytes + (size_t)n * 4);
        br_engine_close(e);
    }
}
END_TEST

START_TEST(a_pack_waits_once) {
    br_loaded loaded;
    scorer *s;
    const bi_bf16 *final;
    uint32_t logprob[2][N_PROMPT], raw[2][N_PROMPT];
    const br_engine_options options = rig_options(&pico);
    scorer_seq seq[2];
    CHECK_OK(br_loaded_open(&options, 2 * N_PROMPT, N_PROMPT, 1, &loaded));
    CHECK_OK(scorer_open(&loaded, &s));
    for (int i = 0; i < 2; i++)
        seq[i] = (scorer_seq){.token = prompt, .n_tok = N_PROMPT, .slot = -1, .temperature = 1, .logprob = logprob[i], .logprob_raw = raw[i]};
    const br_device_count before = br_device_counted(loaded.device);
    CHECK_OK(scorer_forward(s, seq, 2, NULL, &final));
    CHECK_OK(scorer_logprobs(s, seq, 2, final));
    const br_device_count after = br_device_counted(loaded.device);
    ck_assert_int_eq(after.n_wait - before.n_wait, 1);
    ck_assert_int_eq(after.n_download - before.n_download, 2);
    ck_assert_int_eq(after.download_bytes - before.download_bytes, 2 * N_PROMPT * 4 + 2 * (N_PROMPT - 1) * SCORE_BYTES);
    ck_assert_int_eq(after.n_alloc - before.n_alloc, 0);
    scorer_close(s);
    br_loaded_close(&loaded);
}
END_TEST

/* ---- a recording that fails ------------------------------------------------------------------------------------------------------- */

static int is_recording, n_part; /* between begin and end; parts of a step that were recorded and not freed */
static void free_part(br_graph *graph);
static const device_ops part_ops = {.graph_free = free_part};
static const device_ops *part = &part_ops; /* a graph begins with its device's table */

static br_status begin_recording(br_device *device) {
    (void)device;
    is_recording = 1;
    return BR_OK;
}

static br_status end_recording(br_device *device, br_graph **out) {
    (void)device;
    *out = NULL;
    is_recording = 0;
    return br_fail(BR_E_DEVICE, "the recording was broken off");
}

static br_status fault_that_fails(bi_ctx *ctx, const bi_seg_fault_args *args) {
    if (is_recording)
        return br_fail(BR_E_LIMIT, "the op's own sentence");
    return real->seg_fault(ctx, args);
}

static br_status end_with_a_part(br_device *device, br_graph **out) {
    (void)device;
    *out = (br_graph *)(void *)&part;
    is_recording = 0;
    n_part++;
    return BR_OK;
}

static void free_part(br_graph *graph) {
    ck_assert_ptr_eq(graph, (void *)&part);
    n_part--;
}

/* Ending it fails as well, and its sentence was the one that was told. */
START_TEST(the_op_of_a_failed_recording_is_named) {
    br_token token[16];
    int32_t n, done;
    br_engine *e = open_engine(CHUNK);
    br_device *device = e->loaded.device;
    real = e->loaded.backend.op;
    bi_ops op = *real;
    device_ops recorder = *device->op;
    const device_ops *host = device->op;
    op.seg_fault = fault_that_fails;
    recorder.graph_begin = begin_recording;
    recorder.graph_end = _i ? end_with_a_part : end_recording;
    submit(e, 4, 0, 0); /* the prompt, then two steps of one shape: the first is run, the second recorded */
    step(e, 1);
    e->loaded.backend.op = &op;
    device->op = &recorder;
    device->is_host = 0; /* which records nothing */
    step(e, 1);
    ck_assert_int_eq(e->n_graph, 1);
    CHECK_FAILS(br_poll(e, token, 16, &n, &done), BR_E_LIMIT);
    ck_assert_str_eq(br_last_error(), "the op's own sentence");
    ck_assert(e->n_graph == 1 && !e->graph[0].graph && !is_recording && !n_part);
    device->is_host = 1;
    device->op = host;
    e->loaded.backend.op = real;
    br_engine_close(e);
}
END_TEST

/* ---- memory ----------------------------------------------------------------------------------------------------------------- */

/* As a GPU's: its memory is not br_mem's, so that nothing but the device can notice. */
static br_status far_alloc(br_device *device, size_t bytes, const char *what, void **out) {
    (void)device;
    (void)what;
    *out = calloc(1, bytes);
    return BR_OK;
}

static void far_free(br_device *device, void *block) {
    (void)device;
    free(block);
}

static const device_ops FAR_OPS = {.alloc = far_alloc, .release = far_free, .locked_alloc = far_alloc, .locked_free = far_free};

START_TEST(allocations_are_counted) {
    br_device far = {.op = &FAR_OPS, .name = "far"};
    void *block;
    br_mirror mirror;
    CHECK_OK(br_device_alloc(&far, 100, "a block", &block));
    CHECK_OK(br_mirror_open(&far, 28, "a mirror", &mirror));
    ck_assert_int_eq(br_device_counted(&far).n_alloc, 2);
    ck_assert_int_eq(br_device_counted(&far).alloc_bytes, 128);
    br_mirror_close(&far, &mirror);
    br_device_free(&far, block);
}
END_TEST

START_TEST(a_sealed_phase_allocates_no_block) {
    br_device far = {.op = &FAR_OPS, .name = "far"};
    void *block;
    br_mem_seal("step");
    br_device_alloc(&far, 100, "a block", &block);
}
END_TEST

START_TEST(a_sealed_phase_allocates_no_mirror) {
    br_device far = {.op = &FAR_OPS, .name = "far"};
    br_mirror mirror;
    br_mem_seal("step");
    br_mirror_open(&far, 100, "a mirror", &mirror);
}
END_TEST

Suite *test_step_suite(void) {
    Suite *suite = suite_create("step");
    TCase *moved = tcase_create("moved"), *memory = tcase_create("memory");
    tcase_add_unchecked_fixture(moved, make_models, NULL);
    tcase_set_timeout(moved, 60);
    tcase_add_test(moved, a_step_of_prefill);
    tcase_add_test(moved, a_step_of_decode);
    tcase_add_test(moved, a_step_that_is_asked_for_more);
    tcase_add_test(moved, each_gets_what_it_asks_for);
    tcase_add_test(moved, a_step_of_a_scored_request);
    tcase_add_test(moved, a_pack_waits_once);
    tcase_add_loop_test(moved, the_op_of_a_failed_recording_is_named, 0, 2);
    suite_add_tcase(suite, moved);
    tcase_add_test(memory, allocations_are_counted);
    tcase_add_test_raise_signal(memory, a_sealed_phase_allocates_no_block, SIGABRT);
    tcase_add_test_raise_signal(memory, a_sealed_phase_allocates_no_mirror, SIGABRT);
    suite_add_tcase(suite, memory);
    return suite;
}
