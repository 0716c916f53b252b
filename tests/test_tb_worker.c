/* bitroll-worker as a process with a real engine: what comes over the bridge is what the engine gives in process, token by token and bit
 * by bit, certified or not, whole or aborted and resumed. */
#include "br_file.h"
#include "br_hash.h"
#include "br_weights.h"
#include "config_json.h"
#include "engine_rig.h"
#include "test_support.h"
#include "tb_trainer.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N = 12, MAX_NEW = 24, TIMEOUT_MS = 30000 };

static rig_model model;
static rig_request request[N];
static rig_text want[N];
static tb_hello me;
static char path[300];

static void make(void) {
    rig_model_make(&model, "pico");
}

/* Once a test: the reference and who the trainer says it is. */
static void make_reference(void) {
    br_engine_options o = rig_options(&model);
    br_engine *engine;
    br_map map;
    char config[300];
    rig_requests(&model, 3, N, 5, 90, MAX_NEW, request);
    rig_generate(&o, request, NULL, N, want);
    CHECK_OK(br_engine_open(&o, &engine));
    snprintf(config, sizeof config, "%s/config.json", model.dir);
    CHECK_OK(br_file_map(config, &map));
    me = (tb_hello){.abi = BR_ABI_VERSION, .contract = br_contract_digest(), .base = br_engine_weights_digest(engine),
                    .config = br_hash_bytes(map.bytes, map.n), .build = tb_text_of("test")};
    br_file_unmap(&map);
    br_engine_close(engine);
    snprintf(path, sizeof path, "%s/w.sock", test_tmp_dir());
}

static pid_t start_worker(const char *option, const char *value_of_option) {
    char adapter[2][300];
    for (int i = 0; i < 2; i++)
        snprintf(adapter[i], sizeof adapter[i], "%s=%s", model.adapter[i].name, model.adapter[i].dir);
    const pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        execl(BITROLL_BINARY_DIR "/bitroll-worker", "bitroll-worker", "--model", model.dir, "--adapter", adapter[0], "--adapter", adapter[1],
              "--threads", "1", "--backend", "oracle", "--max-seqs", "5", "--socket", path, option, value_of_option, (char *)NULL);
        _exit(97);
    }
    return pid;
}

static int end_of(pid_t pid) {
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static tb_trainer *greet(const tb_hello *hello, br_status wanted) {
    const tb_trainer_options o = {.me = *hello};
    tb_transport *t;
    tb_trainer *tr;
    CHECK_OK(tb_socket_connect(path, TIMEOUT_MS, &t));
    CHECK_FAILS(tb_trainer_open(t, &o, &tr), wanted);
    return tr;
}

/* A request as the wire has it; `given` tokens of the reference's response are part of the prompt already. */
static void send_request(tb_trainer *tr, uint64_t id, const rig_request *r, const rig_text *text, int32_t given, uint32_t flags) {
    static const char *const adapter[] = {"", "a", "b"};
    tb_gen_req g = {.flags = flags, .sample = r->sample, .seed = 42, .top_k = (uint32_t)r->top_k, .max_new = (uint32_t)(r->max_new - given),
                    .uid = tb_text_of(r->uid), .adapter = tb_text_of(adapter[r->adapter + 1])};
    g.prompt = (tb_words){(const uint32_t *)text->token, (uint32_t)(r->n_prompt + given)};
    memcpy(&g.temperature, &r->temperature, 4);
    memcpy(&g.top_p, &r->top_p, 8);
    CHECK_OK(tb_trainer_send(tr, TB_GEN_REQ, 0, id, &(tb_message){.gen_req = g}));
}

/* The response as it has come so far. */
typedef struct got {
    int32_t n;
    int32_t done, held;
    uint32_t stop;
    uint32_t token[MAX_NEW], logprob[MAX_NEW];
    br_digest digest;
} got;

/* Takes one message of the worker. */
static void take(tb_trainer *tr, got *all) {
    tb_event e;
    CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, &e));
    ck_assert_uint_lt(e.header.subject, N);
    got *g = &all[e.header.subject];
    if (e.header.type == TB_GEN_PART) {
        const tb_gen_part *part = &e.message.gen_part;
        ck_assert_uint_eq(part->first, (uint32_t)g->n);
        memcpy(g->token + g->n, part->token.p, 4 * (size_t)part->token.n);
        memcpy(g->logprob + g->n, part->logprob.p, 4 * (size_t)part->logprob.n);
        g->n += (int32_t)part->token.n;
    } else if (e.header.type == TB_GEN_DONE) {
        ck_assert_uint_eq(e.message.gen_done.n_tok, (uint32_t)g->n);
        ck_assert_uint_eq(e.message.gen_done.certified, 1);
        g->stop = e.message.gen_done.stop;
        g->digest = e.message.gen_done.digest;
        g->done = 1;
    } else {
        ck_assert_int_eq(e.header.type, TB_GEN_HELD);
        ck_assert_uint_eq(e.message.gen_held.equal, 1);
        memcpy(g->logprob, e.message.gen_held.logprob.p, 4 * (size_t)e.message.gen_held.logprob.n);
        g->held = 1;
    }
}

static void check(int i, const got *g, int32_t from) {
    const int32_t n = want[i].n_tok - request[i].n_prompt - from;
    const int32_t at = request[i].n_prompt + from;
    ck_assert_int_eq(g->n, n);
    ck_assert_mem_eq(g->token, want[i].token + at, 4 * (size_t)n);
    ck_assert_mem_eq(g->logprob, want[i].logprob[0] + at, 4 * (size_t)n);
    ck_assert_uint_eq(g->stop, want[i].stop);
}

START_TEST(test_bits_over_the_bridge) {
    static got all[N];
    make_reference();
    const pid_t worker = start_worker("--once", NULL);
    tb_trainer *tr = greet(&me, BR_OK);
    ck_assert_uint_eq(tb_trainer_worker(tr)->live_version, 0);
    for (int i = 0; i < N; i++)
        send_request(tr, (uint64_t)i, &request[i], &want[i], 0, i % 2 ? TB_CERTIFY : 0);
    for (int n_done = 0; n_done < N;) {
        take(tr, all);
        for (n_done = 0; n_done < N && all[n_done].done; n_done++)
            continue;
    }
    for (int i = 1; i < N; i += 2) { /* the digest is the trainer's own; the bits come after it */
        const int32_t n = want[i].n_tok - request[i].n_prompt;
        const br_digest digest = br_hash_bytes(want[i].logprob[0] + request[i].n_prompt, 4 * (size_t)n);
        ck_assert(br_digest_equal(digest, all[i].digest));
        CHECK_OK(tb_trainer_send(tr, TB_GEN_RELEASE, 0, (uint64_t)i, &(tb_message){.gen_release = {digest}}));
        while (!all[i].held)
            take(tr, all);
    }
    for (int i = 0; i < N; i++)
        check(i, &all[i], 0);
    tb_trainer_close(tr, 1);
    ck_assert_int_eq(end_of(worker), 0);
}
END_TEST

/* Aborted after its first tokens and sent again with them as a prompt: the rest is that of the uninterrupted run. */
START_TEST(test_abort_and_resume) {
    static got first[N], second[N];
    make_reference();
    const pid_t worker = start_worker("--once", NULL);
    tb_trainer *tr = greet(&me, BR_OK);
    int n_partial = 0;
    for (int i = 0; i < N; i++)
        send_request(tr, (uint64_t)i, &request[i], &want[i], 0, 0);
    while (first[0].n == 0)
        take(tr, first);
    CHECK_OK(tb_trainer_send(tr, TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_STOP}}));
    tb_event e;
    for (int stopped = 0; !stopped;) { /* STATS says that nothing runs any more; every GEN_DONE is before or right behind it */
        CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, &e));
        stopped = e.header.type == TB_STATS;
        got *g = &first[e.header.subject < N ? e.header.subject : 0];
        if (e.header.type == TB_GEN_PART) {
            memcpy(g->token + g->n, e.message.gen_part.token.p, 4 * (size_t)e.message.gen_part.token.n);
            g->n += (int32_t)e.message.gen_part.token.n;
        }
        if (e.header.type == TB_GEN_DONE) {
            g->done = 1;
            g->stop = e.message.gen_done.stop;
        }
    }
    CHECK_OK(tb_trainer_send(tr, TB_RESUME, 0, 0, &(tb_message){.stats = {0}}));
    CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, &e));
    ck_assert_int_eq(e.header.type, TB_STATS);
    for (int i = 0; i < N; i++) {
        ck_assert_int_eq(first[i].done, 1);
        ck_assert_mem_eq(first[i].token, want[i].token + request[i].n_prompt, 4 * (size_t)first[i].n);
        n_partial += first[i].stop == BR_STOP_ABORT && first[i].n > 0;
        if (first[i].stop == BR_STOP_ABORT)
            send_request(tr, (uint64_t)i, &request[i], &want[i], first[i].n, 0);
    }
    ck_assert_int_gt(n_partial, 0);
    for (int i = 0; i < N; i++) {
        while (first[i].stop == BR_STOP_ABORT && !second[i].done)
            take(tr, second);
        if (first[i].stop == BR_STOP_ABORT)
            check(i, &second[i], first[i].n);
    }
    tb_trainer_close(tr, 1);
    ck_assert_int_eq(end_of(worker), 0);
}
END_TEST

/* ---- a swap -------------------------------------------------------------------------------------------------------------- */

enum { TENSORS_MAX = 4096 };
static uint16_t *value[TENSORS_MAX];
static tb_buffer raw; /* the manifest's tensors */
static uint64_t manifest_hash;

static int has_part(tb_text text, const char *part) {
    return memmem(text.p, text.n, part, strlen(part)) != NULL;
}

/* The manifest of adapter "a", small bf16 numbers for each tensor, and their digest as an engine of our own computes it; that engine
 * commits them, so that it gives the reference of version 1. */
static br_digest make_version(br_engine *engine, int64_t *n_tensor) {
    br_digest digest;
    br_swap_tensor t;
    br_swap_status status;
    br_swap_answer answer;
    CHECK_OK(br_swap_manifest(engine, "a", n_tensor, &digest));
    ck_assert_int_le(*n_tensor, TENSORS_MAX);
    for (int64_t i = 0; i < *n_tensor; i++) {
        CHECK_OK(br_swap_tensor_at(engine, "a", i, &t));
        const size_t n = (size_t)t.n_row * (size_t)t.n_col;
        value[i] = rig_alloc(n + 1, sizeof **value);
        for (size_t k = 0; k < n; k++)
            value[i][k] = (uint16_t)(0x3c00 + test_mix((uint64_t)i << 32 | k) % 0x100 + (test_mix(k) % 2 << 15));
        const tb_tensor wire = {.name = tb_text_of(t.name), .dtype = TB_BF16, .kind = t.is_b ? TB_LORA_B : TB_LORA_A, .n_dim = 2,
                                .dim = {(uint64_t)t.n_row, (uint64_t)t.n_col}};
        tb_tensor_add(&raw, &wire);
    }
    CHECK_OK(br_swap_from_memory(engine, "a", (const uint16_t *const *)value, *n_tensor, NULL, 1, 0, &answer));
    CHECK_OK(br_swap_status_of(engine, "a", &status));
    CHECK_OK(br_swap_commit(engine, "a", 1, BR_SWAP_DRAIN, &answer));
    ck_assert_int_eq(answer, BR_SWAP_COMMITTED);
    return status.digest;
}

static void expect(tb_trainer *tr, tb_type type, tb_event *e) {
    CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, e));
    const tb_text why = e->header.type == TB_W_NACK ? e->message.w_nack.text : tb_text_of("");
    ck_assert_msg(e->header.type == (uint32_t)type, "%s came: %.*s", tb_type_name(e->header.type), (int)why.n, why.p);
}

/* Version 1 over the wire, in two chunks a tensor. `flip`: one bit of the last tensor is another, and the digest must say so. */
static void send_version(tb_trainer *tr, int64_t n_tensor, br_digest digest, int flip, tb_event *e) {
    tb_message m = {.manifest = {{{raw.bytes, raw.n}, (uint32_t)n_tensor}}};
    tb_tensor t;
    uint64_t at = 0;
    CHECK_OK(tb_trainer_send(tr, TB_MANIFEST, 0, 0, &m));
    expect(tr, TB_MANIFEST_ACK, e);
    const tb_tensors all = m.manifest.tensors;
    manifest_hash = e->message.manifest_ack.hash;
    m = (tb_message){.w_begin = {.kind = TB_W_ADAPTER, .manifest = e->message.manifest_ack.hash, .adapter = tb_text_of("a")}};
    CHECK_OK(tb_trainer_send(tr, TB_W_BEGIN, 1, 0, &m));
    for (int64_t i = 0; i < n_tensor; i++) {
        t.n_dim = 0;
        ck_assert_int_eq(tb_tensor_next(&all, &at, &t), 1);
        value[i][0] ^= (uint16_t)(flip && i + 1 == n_tensor);
        CHECK_OK(tb_trainer_send_chunk(tr, 1, (uint64_t)i, 0, value[i], t.n_bytes / 2));
        CHECK_OK(tb_trainer_send_chunk(tr, 1, (uint64_t)i, t.n_bytes / 2, (const char *)value[i] + t.n_bytes / 2, t.n_bytes - t.n_bytes / 2));
        value[i][0] ^= (uint16_t)(flip && i + 1 == n_tensor);
    }
    m = (tb_message){.w_digest = {digest}};
    CHECK_OK(tb_trainer_send(tr, TB_W_END, 1, 0, &m));
    expect(tr, flip ? TB_W_NACK : TB_W_PREPARED, e);
}

/* An adapter goes over the bridge into the running engine: what it generates then is what our own engine generates with the same bytes. */
START_TEST(test_swap_over_the_bridge) {
    static got all[N];
    br_engine_options o = rig_options(&model);
    br_engine *engine;
    br_token token[MAX_NEW];
    int64_t n_tensor;
    int32_t n = 0, done = 0;
    uint64_t id;
    tb_event e;
    make_reference();
    o.swap_rank = 32;
    CHECK_OK(br_engine_open(&o, &engine));
    const br_digest digest = make_version(engine, &n_tensor);
    const pid_t worker = start_worker("--swap-rank", "32");
    tb_trainer *tr = greet(&me, BR_OK);
    ck_assert_uint_eq(tb_trainer_worker(tr)->can & TB_CAN_SWAP, TB_CAN_SWAP);
    send_version(tr, n_tensor, digest, 1, &e);
    ck_assert_uint_eq(e.message.w_nack.code, TB_BAD_DIGEST);
    const tb_message last = {.w_begin = {.kind = TB_W_ADAPTER, .flags = TB_RESYNC, .manifest = manifest_hash, .adapter = tb_text_of("a")}};
    CHECK_OK(tb_trainer_send(tr, TB_W_BEGIN, INT64_MAX, 0, &last)); /* another could never follow */
    expect(tr, TB_W_NACK, &e);
    ck_assert_uint_eq(e.message.w_nack.code, TB_BAD_TENSOR);
    ck_assert_msg(has_part(e.message.w_nack.text, "another can follow"), "%.*s", (int)e.message.w_nack.text.n, e.message.w_nack.text.p);
    send_version(tr, n_tensor, digest, 0, &e);
    CHECK_OK(tb_trainer_send(tr, TB_W_COMMIT, 1, 0, &(tb_message){.stats = {0}}));
    expect(tr, TB_W_COMMITTED, &e);
    ck_assert(br_digest_equal(e.message.w_committed.digest, digest));
    request[0].adapter = 0;
    const br_request r = rig_br_request(&request[0]);
    CHECK_OK(br_submit(engine, &r, &id));
    for (int32_t more; !done; n += more)
        CHECK_OK(br_poll(engine, token + n, MAX_NEW - n, &more, &done));
    send_request(tr, 0, &request[0], &want[0], 0, 0);
    while (!all[0].done)
        take(tr, all);
    ck_assert_int_eq(all[0].n, n);
    for (int32_t i = 0; i < n; i++) {
        ck_assert_uint_eq(all[0].token[i], (uint32_t)token[i].token);
        ck_assert_uint_eq(all[0].logprob[i], token[i].logprob);
    }
    tb_trainer_close(tr, 1);
    ck_assert_int_eq(end_of(worker), 0);
    br_engine_close(engine);
}
END_TEST

/* ---- scores and full weights --------------------------------------------------------------------------------------------- */

static void ask_scores(tb_trainer *tr, int i) {
    static const char *const adapter[] = {"base", "a", "b"};
    tb_score_req r = {.first_asked = (uint32_t)request[i].n_prompt, .adapter = tb_text_of(adapter[request[i].adapter + 1]),
                      .token = {(const uint32_t *)want[i].token, (uint32_t)want[i].n_tok}};
    memcpy(&r.temperature, &request[i].temperature, 4);
    CHECK_OK(tb_trainer_send(tr, TB_SCORE_REQ, 0, (uint64_t)i, &(tb_message){.score_req = r}));
}

/* Scores of the rollout's texts, certifying requests of the same texts beside them: each is answered with the rollout's bits, or, under
 * an adapter that certifies, not at all. */
START_TEST(test_scores_over_the_bridge) {
    make_reference();
    const pid_t worker = start_worker("--once", NULL);
    tb_trainer *tr = greet(&me, BR_OK);
    ck_assert_uint_eq(tb_trainer_worker(tr)->can & TB_CAN_SCORE, TB_CAN_SCORE);
    int n_held = 0;
    for (int certify = 0; certify < 2; certify++) {
        if (certify)
            send_request(tr, 500, &request[0], &want[0], 0, TB_CERTIFY);
        for (int i = 0; i < N; i++)
            ask_scores(tr, i);
        for (int n_done = 0; n_done < N;) {
            tb_event e;
            CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, &e));
            if (e.header.type != TB_SCORE_DONE)
                continue;
            const int i = (int)e.header.subject;
            const tb_score_done *done = &e.message.score_done;
            const int is_held = certify && request[i].adapter == request[0].adapter;
            n_done++;
            n_held += is_held;
            ck_assert_uint_eq(done->status, is_held ? BR_E_LIMIT : BR_OK);
            ck_assert_uint_eq(done->logprob.n, is_held ? 0 : (uint32_t)want[i].n_tok);
            for (int32_t t = 0; !is_held && t < want[i].n_tok; t++)
                ck_assert_uint_eq(done->logprob.p[t], t < request[i].n_prompt ? BR_UNSCORED : want[i].logprob[0][t]);
        }
    }
    ck_assert_int_gt(n_held, 0);
    tb_trainer_close(tr, 1);
    ck_assert_int_eq(end_of(worker), 0);
}
END_TEST

static void send_base(tb_trainer *tr, const br_weights *weights, br_digest digest, int flip, tb_event *e) {
    static const uint32_t DTYPE[] = {[BR_DTYPE_BF16] = TB_BF16, [BR_DTYPE_F32] = TB_F32, [BR_DTYPE_U8] = TB_U8};
    const int64_t n = br_weights_count(weights);
    tb_buffer list = {0};
    for (int64_t i = n - 1; i >= 0; i--) { /* an order of the trainer's own */
        const br_tensor *t = br_weights_at(weights, i);
        tb_tensor wire = {.name = tb_text_of(t->name), .dtype = DTYPE[t->dtype], .kind = TB_BASE, .n_dim = (uint32_t)t->n_dim};
        for (int32_t d = 0; d < t->n_dim; d++)
            wire.dim[d] = (uint64_t)t->dim[d];
        tb_tensor_add(&list, &wire);
    }
    tb_message m = {.manifest = {{{list.bytes, list.n}, (uint32_t)n}}};
    CHECK_OK(tb_trainer_send(tr, TB_MANIFEST, 0, 0, &m));
    expect(tr, TB_MANIFEST_ACK, e);
    m = (tb_message){.w_begin = {.kind = TB_W_FULL, .manifest = e->message.manifest_ack.hash}};
    CHECK_OK(tb_trainer_send(tr, TB_W_BEGIN, 1, 0, &m));
    for (int64_t i = 0; i < n; i++) {
        const br_tensor *t = br_weights_at(weights, n - 1 - i);
        unsigned char *bytes = rig_alloc(t->n_byte + 1, 1);
        memcpy(bytes, t->data, t->n_byte);
        bytes[0] ^= (unsigned char)(flip && i == n / 2);
        CHECK_OK(tb_trainer_send_chunk(tr, 1, (uint64_t)i, 0, bytes, t->n_byte / 2));
        CHECK_OK(tb_trainer_send_chunk(tr, 1, (uint64_t)i, t->n_byte / 2, bytes + t->n_byte / 2, t->n_byte - t->n_byte / 2));
        free(bytes);
    }
    CHECK_OK(tb_trainer_send(tr, TB_W_END, 1, 0, &(tb_message){.w_digest = {digest}}));
    expect(tr, flip ? TB_W_NACK : TB_W_PREPARED, e);
    tb_buffer_close(&list);
}

/* Another checkpoint goes over the bridge tensor by tensor: from then on the worker is as one that was started on it. */
START_TEST(test_full_weights_over_the_bridge) {
    static got all[N];
    char other[300];
    br_report report;
    br_config config;
    br_weights *weights;
    tb_event e;
    make_reference();
    snprintf(other, sizeof other, "%s/other", test_tmp_dir());
    const br_init_options init = {.preset = "pico", .out_dir = other, .seed = 77};
    CHECK_OK(br_job_init(&init, NULL, &report));
    br_engine_options o = rig_options(&model);
    o.model_dir = other;
    rig_generate(&o, request, NULL, N, want);
    CHECK_OK(br_config_read(other, &config));
    CHECK_OK(br_weights_open(other, &config, &weights));
    const pid_t worker = start_worker("--swap-rank", "32");
    tb_trainer *tr = greet(&me, BR_OK);
    ck_assert_uint_eq(tb_trainer_worker(tr)->can & TB_CAN_FULL, TB_CAN_FULL);
    send_base(tr, weights, report.weights_digest, 1, &e);
    ck_assert_uint_eq(e.message.w_nack.code, TB_BAD_DIGEST);
    send_base(tr, weights, report.weights_digest, 0, &e);
    CHECK_OK(tb_trainer_send(tr, TB_W_COMMIT, 1, 0, &(tb_message){.stats = {0}}));
    expect(tr, TB_W_COMMITTED, &e);
    ck_assert(e.header.version == 1 && br_digest_equal(e.message.w_committed.digest, report.weights_digest));
    CHECK_OK(tb_trainer_send(tr, TB_STATS_REQ, 0, 0, &(tb_message){.stats = {0}}));
    expect(tr, TB_STATS, &e);
    const tb_stats stats = e.message.stats;
    ck_assert(stats.base_version == 1 && stats.live_version == 0 && br_digest_equal(stats.base, report.weights_digest));
    ck_assert(br_digest_equal(stats.adapter, tb_trainer_worker(tr)->adapter));
    for (int i = 0; i < N; i++)
        send_request(tr, (uint64_t)i, &request[i], &want[i], 0, 0);
    for (int i = 0; i < N; i++) {
        while (!all[i].done)
            take(tr, all);
        check(i, &all[i], 0);
    }
    tb_trainer_close(tr, 1);
    ck_assert_int_eq(end_of(worker), 0);
    br_weights_close(weights);
    br_report_free(&report);
}
END_TEST

START_TEST(test_what_it_refuses) {
    const uint32_t token[2] = {1, 2};
    tb_hello other;
    tb_event e;
    make_reference();
    const pid_t worker = start_worker(NULL, NULL);
    other = me;
    other.base.lo ^= 1;
    ck_assert_ptr_null(greet(&other, BR_E_MISMATCH)); /* and goes on listening */
    ck_assert_msg(strstr(br_last_error(), "base weights") != NULL, "%s", br_last_error());
    tb_trainer *tr = greet(&me, BR_OK);
    CHECK_OK(tb_trainer_send(tr, TB_W_COMMIT, 1, 0, &(tb_message){.stats = {0}}));
    CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, &e));
    ck_assert_int_eq(e.header.type, TB_W_NACK);
    CHECK_OK(tb_trainer_send(tr, TB_SCORE_REQ, 0, 1, &(tb_message){.score_req = {.first_asked = 2, .token = {token, 2}}}));
    CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, &e));
    ck_assert_uint_eq(e.message.score_done.status, BR_E_ARG); /* nothing is behind its last token */
    request[0].max_new = 4;
    want[0].token[0] = 1 << 20; /* not in the vocabulary */
    send_request(tr, 0, &request[0], &want[0], 0, 0);
    CHECK_OK(tb_trainer_next(tr, TIMEOUT_MS, &e));
    ck_assert_uint_eq(e.message.gen_done.stop, BR_STOP_ERROR);
    ck_assert_uint_eq(e.message.gen_done.status, BR_E_ARG);
    tb_trainer_close(tr, 0); /* without BYE: lost, and listening again */
    tr = greet(&me, BR_OK);
    tb_trainer_close(tr, 1);
    ck_assert_int_eq(end_of(worker), 0);
}
END_TEST

/* The same worker as rank 0 of a job whose rank 1 is the trainer; roles are chosen by rank. */
START_TEST(test_engine_over_mpi) {
    char command[2048], out[8192];
    size_t n = 0;
    snprintf(command, sizeof command,
             TEST_MPIRUN " sh -c 'if [ $OMPI_COMM_WORLD_RANK = 0 ]; then exec %s/bitroll-worker --model %s --threads 1 --backend oracle "
             "--mpi 1; else exec %s/tb_mpi_peer engine %s; fi' 2>&1",
             BITROLL_BINARY_DIR, model.dir, BITROLL_BINARY_DIR, model.dir);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    for (size_t more; n + 1 < sizeof out && (more = fread(out + n, 1, sizeof out - 1 - n, pipe)) > 0;)
        n += more;
    out[n] = 0;
    const int status = pclose(pipe);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d:\n%s", status, out);
    ck_assert_msg(strstr(out, "ok engine over MPI: the same bits") != NULL, "%s", out);
    ck_assert_msg(strstr(out, "bitroll-worker: Open MPI") != NULL, "%s", out);
    ck_assert_msg(strstr(out, "the peer said BYE") != NULL, "%s", out);
}
END_TEST

START_TEST(test_usage) {
#define SAYS_USAGE " is needed\nusage: bitroll-worker --model DIR (--socket PATH | --mpi RANK) [options]; see --help\n"
    static const struct { const char *arguments; int code; const char *sentence; } run[] = {
        {"", 2, "--model DIR" SAYS_USAGE}, {"--model x", 2, "one of --socket and --mpi" SAYS_USAGE},
        {"--model x --socket y --mpi 1", 2, "--socket and --mpi: expected one of them\n"},
        {"--bogus", 2, "no option '--bogus'; see bitroll-worker --help\n"}, {"--live", 2, "--live needs a value\n"},
        {"--adapter policy --model x --socket y", 2, "--adapter: expected NAME=DIR, found 'policy'\n"},
        {"--threads 0 --model x --socket y", 2, "--threads: expected a whole number from 1 to 1048576, found '0'\n"},
        {"--model --socket y", 2, "--model: expected a value, found '--socket'\n"},
        {"--swap-alpha x --model x --socket y", 2, "--swap-alpha: expected a number above 0, at most 1048576, found 'x'\n"},
        {"--protocol", 0, ""}, {"--swap-alpha 0.5 --protocol", 0, ""}, {"--model no-such-folder --socket /tmp/none.sock", 2, NULL},
    };
    for (size_t i = 0; i < sizeof run / sizeof *run; i++) {
        char command[400], said[4096], wanted[400];
        snprintf(command, sizeof command, "%s/bitroll-worker %s 2>&1 >/dev/null", BITROLL_BINARY_DIR, run[i].arguments);
        snprintf(wanted, sizeof wanted, "%s%s", run[i].code ? "bitroll-worker: " : "", run[i].sentence ? run[i].sentence : "");
        FILE *pipe = popen(command, "r");
        ck_assert_ptr_nonnull(pipe);
        said[fread(said, 1, sizeof said - 1, pipe)] = 0;
        const int status = pclose(pipe);
        ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == run[i].code, "%s: %d", run[i].arguments, status);
        ck_assert_msg(!run[i].sentence || strcmp(said, wanted) == 0, "%s: %s", run[i].arguments, said);
    }
    ck_assert_int_eq(WEXITSTATUS(system(BITROLL_BINARY_DIR "/bitroll-worker --protocol >/dev/full 2>&1")), 2);
    ck_assert_int_eq(WEXITSTATUS(system(BITROLL_BINARY_DIR "/bitroll-worker --help >/dev/full 2>&1")), 2);
}
END_TEST

/* The options that the parser takes, and every status. */
START_TEST(test_help) {
    static const char *const name[] = {
        "--model", "--adapter", "--live", "--swap-rank", "--swap-alpha", "--socket", "--mpi", "--backend", "--threads", "--max-seqs",
        "--chunk-tokens", "--kv-pages", "--requests", "--greet", "--allow-zero-adapter", "--once", "--own-status", "--protocol", "--help",
        "exit 0", "exit 1", "exit 2", "exit 3", "exit 4", "exit 5", "exit 6",
    };
    char out[8192], source[1 << 15], line[64];
    FILE *pipe = popen(BITROLL_BINARY_DIR "/bitroll-worker --help 2>&1", "r");
    FILE *file = fopen(BITROLL_SOURCE_DIR "/trainer_bridge/tb_worker_main.c", "r");
    ck_assert(pipe && file);
    out[fread(out, 1, sizeof out - 1, pipe)] = 0;
    source[fread(source, 1, sizeof source - 1, file)] = 0;
    ck_assert_int_eq(pclose(pipe), 0);
    fclose(file);
    int n_line = 0, n_name = sizeof name / sizeof *name;
    for (const char *at = out; (at = strchr(at, '\n')) != NULL; at++)
        n_line++;
    ck_assert_int_eq(n_line, n_name);
    for (int i = 0; i < n_name; i++) {
        snprintf(line, sizeof line, "  %s ", name[i]);
        ck_assert_msg(strstr(out, line) != NULL, "--help does not tell of %s:\n%s", name[i], out);
    }
    for (const char *at = source; (at = strstr(at, "\"--")) != NULL; at += 3) { /* wherever the parser names one */
        snprintf(line, sizeof line, "  %.*s ", (int)strcspn(at + 1, "\" "), at + 1);
        ck_assert_msg(strstr(out, line) != NULL, "--help does not tell of%s", line);
    }
}
END_TEST

Suite *test_tb_worker_suite(void) {
    Suite *s = suite_create("tb_worker");
    TCase *t = tcase_create("worker");
    tcase_set_timeout(t, 120);
    tcase_add_unchecked_fixture(t, make, NULL);
    tcase_add_test(t, test_bits_over_the_bridge);
    tcase_add_test(t, test_abort_and_resume);
    tcase_add_test(t, test_swap_over_the_bridge);
    tcase_add_test(t, test_scores_over_the_bridge);
    tcase_add_test(t, test_full_weights_over_the_bridge);
    tcase_add_test(t, test_what_it_refuses);
    tcase_add_test(t, test_engine_over_mpi);
    tcase_add_test(t, test_usage);
    tcase_add_test(t, test_help);
    suite_add_tcase(s, t);
    return s;
}
