/* What it costs to stream tokens and log-probs over the bridge while they are made: `small`, 64 sequences of 256 new tokens, by polls of
 * the engine itself and by a trainer at the other end of a socket, in turns. Both get the same tokens and bits. */
#include "gpu_swap.h"

#include "br_hash.h"
#include "engine_parts.h"
#include "tb_trainer.h"
#include "tb_worker.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum { SEQUENCES = 64, NEW = 256, PROMPT = 64, PAIRS = 5, WAIT_MS = 60000, GRANT = 64 << 20 };

typedef struct stream {
    br_engine *engine;
    uint32_t prompt[SEQUENCES][PROMPT];
    uint32_t token[SEQUENCES][NEW], logprob[SEQUENCES][NEW];
    int fd; /* the trainer's end */
    double ms;
    int64_t n_wait; /* of the device: one a step */
} stream;

static int64_t waits(const stream *s) {
    return br_device_counted(s->engine->loaded.device).n_wait;
}

static void uid_of(int i, char uid[16]) {
    snprintf(uid, 16, "s%d", i);
}

static br_digest digest_of(const stream *s) {
    br_hash_stream h;
    br_hash_begin(&h);
    br_hash_add(&h, s->token, sizeof s->token);
    br_hash_add(&h, s->logprob, sizeof s->logprob);
    return br_hash_end(&h);
}

/* By the engine alone. */
static void run_plain(stream *s) {
    uint64_t id[SEQUENCES];
    br_token token[SEQUENCES];
    int32_t n, done = 0, place[SEQUENCES] = {0};
    s->n_wait = -waits(s);
    const double begin = gpu_now_ms();
    for (int i = 0; i < SEQUENCES; i++) {
        char uid[16];
        uid_of(i, uid);
        br_request r = {.uid = uid, .prompt = (const int32_t *)s->prompt[i], .n_prompt = PROMPT, .seed = 3, .sampling = br_sampling_default()};
        r.sampling.max_new = NEW;
        r.sampling.ignore_eos = 1;
        GPU_TRY(br_submit(s->engine, &r, &id[i]));
    }
    while (!done) {
        GPU_TRY(br_poll(s->engine, token, SEQUENCES, &n, &done));
        for (int32_t k = 0; k < n; k++) {
            int i = 0;
            while (id[i] != token[k].request)
                i++;
            s->token[i][place[i]] = (uint32_t)token[k].token;
            s->logprob[i][place[i]++] = token[k].logprob;
        }
    }
    s->ms = gpu_now_ms() - begin;
    s->n_wait += waits(s);
}

static void submit(tb_trainer *trainer, const stream *s, int i) {
    char uid[16];
    uint64_t one;
    const double top_p = 1;
    tb_message m = {.gen_req = {.seed = 3, .temperature = 0x3f800000, .max_new = NEW, .ignore_eos = 1, .prompt = {s->prompt[i], PROMPT}}};
    uid_of(i, uid);
    memcpy(&one, &top_p, sizeof one);
    m.gen_req.top_p = one;
    m.gen_req.uid = tb_text_of(uid);
    GPU_TRY(tb_trainer_send(trainer, TB_GEN_REQ, 0, (uint64_t)i + 1, &m));
}

static void *be_the_trainer(void *context) {
    stream *s = context;
    tb_transport *t;
    tb_trainer *trainer;
    const tb_trainer_options options = {.me = {.abi = BR_ABI_VERSION}, .grant_bytes = GRANT};
    int n_done = 0;
    GPU_TRY(tb_socket_adopt(s->fd, &t));
    GPU_TRY(tb_trainer_open(t, &options, &trainer));
    const double begin = gpu_now_ms();
    for (int i = 0; i < SEQUENCES; i++)
        submit(trainer, s, i);
    while (n_done < SEQUENCES) {
        tb_event e;
        GPU_TRY(tb_trainer_next(trainer, WAIT_MS, &e));
        const uint64_t i = e.header.subject - 1;
        if (e.header.type == TB_GEN_PART) {
            const tb_gen_part *p = &e.message.gen_part;
            GPU_EXPECT(i < SEQUENCES && p->first + p->token.n <= NEW && p->logprob.n == p->token.n, "stream: a part of request %d", (int)i);
            memcpy(s->token[i] + p->first, p->token.p, p->token.n * sizeof(uint32_t));
            memcpy(s->logprob[i] + p->first, p->logprob.p, p->token.n * sizeof(uint32_t));
        }
        if (e.header.type == TB_GEN_DONE)
            GPU_EXPECT(e.message.gen_done.n_tok == NEW, "stream: request %d ended after %u tokens", (int)i, e.message.gen_done.n_tok);
        n_done += e.header.type == TB_GEN_DONE;
    }
    s->ms = gpu_now_ms() - begin;
    tb_trainer_close(trainer, 1);
    return NULL;
}

static void run_streamed(stream *s) {
    const tb_engine_ops ops = tb_engine_of(s->engine);
    const tb_worker_options timing = {.beat_ms = TB_BEAT_MS, .stall_ms = TB_DEAD_MS};
    const tb_session_options options = {.engine = &ops,
                                        .channel = {.me = {.role = TB_WORKER, .abi = BR_ABI_VERSION, .can = TB_CAN_GENERATE},
                                                    .dead_ms = TB_DEAD_MS, .grant_bytes = GRANT}};
    pthread_t trainer;
    tb_session *session;
    tb_transport *t;
    int fd[2];
    GPU_EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0, "stream: no sockets");
    s->fd = fd[1];
    s->n_wait = -waits(s);
    GPU_TRY(tb_socket_adopt(fd[0], &t));
    GPU_TRY(tb_session_open(&options, &session));
    GPU_EXPECT(pthread_create(&trainer, NULL, be_the_trainer, s) == 0, "stream: no thread");
    GPU_TRY(tb_worker_serve(session, t, &timing));
    pthread_join(trainer, NULL);
    s->n_wait += waits(s);
    tb_session_close(session);
}

void gpu_swap_stream(const gpu_swap *g) {
    stream *s = gpu_alloc(1, sizeof *s);
    char model[GPU_PATH];
    double plain_us[PAIRS], streamed_us[PAIRS], share[PAIRS];
    br_digest wanted = {0};
    gpu_make_model(g, "small", model);
    const br_engine_options options = {.model_dir = model, .backend = "cuda", .max_seqs = SEQUENCES, .no_prefix_cache = 1};
    GPU_TRY(br_engine_open(&options, &s->engine));
    for (int i = 0; i < SEQUENCES; i++)
        for (int t = 0; t < PROMPT; t++)
            s->prompt[i][t] = 3 + (uint32_t)(gpu_mix((uint64_t)(i * 100 + t)) % 500);
    for (int k = -1; k < PAIRS; k++) { /* the first pair loads what steps need */
        const int at = k < 0 ? 0 : k;
        run_plain(s);
        plain_us[at] = 1e3 * s->ms;
        const int64_t plain_waits = s->n_wait;
        const br_digest plain = digest_of(s);
        memset(s->token, 0, sizeof s->token);
        run_streamed(s);
        streamed_us[at] = 1e3 * s->ms;
        share[at] = streamed_us[at] / plain_us[at] - 1;
        wanted = k < 0 ? plain : wanted;
        GPU_EXPECT(br_digest_equal(plain, wanted) && br_digest_equal(digest_of(s), wanted), "stream: pair %d: other tokens or bits", k);
        if (k >= 0)
            printf("stream: pair %d: plain %.1f ms, streamed %.1f ms, %+.2f %%; waits %lld and %lld\n", k, 1e-3 * plain_us[at],
                   1e-3 * streamed_us[at], 1e2 * share[at], (long long)plain_waits, (long long)s->n_wait);
    }
    gpu_row(g, "rollout.plain", "small: 64 sequences of 256 new tokens", plain_us, PAIRS, 0, &wanted);
    gpu_row(g, "rollout.streamed", "the same over the bridge; floor: plain", streamed_us, PAIRS, plain_us[PAIRS / 2], &wanted);
    br_engine_close(s->engine);
    free(s);
}
