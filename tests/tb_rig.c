/* Both ends of a bridge for tests; see tb_rig.h. */
#include "tb_rig.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* ---- messages by the table ----------------------------------------------------------------------------------------------- */

enum { FILL_BYTES = 4096, FILL_WORDS = 64 };
static char fill_text[FILL_BYTES];
static uint32_t fill_word[FILL_WORDS];
static tb_buffer fill_raw;

static uint64_t at_most(uint64_t n, uint64_t most) {
    return n < most ? n : most;
}

static void fill_tensors(uint64_t seed, tb_tensors *out) {
    out->n = 1 + (uint32_t)(mix(seed) % 4);
    fill_raw.n = 0;
    for (uint32_t i = 0; i < out->n; i++) {
        tb_tensor t = {.name = {fill_text, 1 + (uint32_t)(mix(seed + i) % 40)}, .dtype = 1 + (uint32_t)(mix(seed - i) % 4),
                       .kind = 1 + i % 3, .n_dim = i % (TB_DIM_MAX + 1)};
        for (uint32_t d = 0; d < t.n_dim; d++)
            t.dim[d] = mix(seed * 31 + d) % 7;
        tb_tensor_add(&fill_raw, &t);
    }
    out->raw = (tb_bytes){fill_raw.bytes, fill_raw.n};
}

static void fill_field(const tb_field *f, uint64_t draw, void *at) {
    const uint64_t range = f->max - f->min;
    const uint64_t in_range = f->min + (range == UINT64_MAX ? draw : draw % (range + 1));
    const uint32_t u32 = (uint32_t)in_range;
    const uint32_t n_text = (uint32_t)(f->min + draw % (at_most(f->max, 40) - f->min + 1));
    const uint32_t n_word = (uint32_t)(f->min + draw % (at_most(f->max, FILL_WORDS) - f->min + 1));
    const br_digest digest = {draw, mix(draw)};
    switch (f->kind) {
    case TB_U32: memcpy(at, &u32, 4); break;
    case TB_U64: memcpy(at, &in_range, 8); break;
    case TB_DIGEST: memcpy(at, &digest, 16); break;
    case TB_TEXT: *(tb_text *)at = (tb_text){fill_text, n_text}; break;
    case TB_WORDS: *(tb_words *)at = (tb_words){fill_word, n_word}; break;
    case TB_REST: *(tb_bytes *)at = (tb_bytes){(const unsigned char *)fill_text, f->min + draw % (at_most(f->max, 99) - f->min + 1)}; break;
    case TB_TENSORS: fill_tensors(draw, at); break;
    case TB_END: break;
    }
}

void rig_message(const tb_spec *spec, uint64_t seed, tb_message *out) {
    memset(out, 0, sizeof *out);
    for (int i = 0; i < FILL_BYTES; i++)
        fill_text[i] = (char)('a' + mix(seed + (uint64_t)i) % 26);
    for (int i = 0; i < FILL_WORDS; i++)
        fill_word[i] = (uint32_t)mix(seed ^ (uint64_t)i);
    for (const tb_field *f = spec->field; f && f->kind != TB_END; f++)
        fill_field(f, mix(seed * 1000 + f->at), (char *)out + f->at);
    if (spec->type == TB_GEN_PART)
        out->gen_part.logprob.n = seed % 2 ? out->gen_part.token.n : 0;
    if (spec->type == TB_GEN_DONE) {
        fill_word[2] = out->gen_done.n_tok / 2;
        fill_word[5] = out->gen_done.n_tok - fill_word[2];
        out->gen_done.runs.n = 6;
    }
}

/* ---- made-up weights ----------------------------------------------------------------------------------------------------- */

void fake_version(uint64_t version, unsigned char out[2][FAKE_BYTES]) {
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < FAKE_BYTES; i++)
            out[t][i] = (unsigned char)(1 + mix(version * 1000 + (uint64_t)(t * 100 + i)) % 60);
}

br_digest fake_digest(unsigned char bytes[2][FAKE_BYTES]) {
    return br_hash_bytes(bytes, 2 * FAKE_BYTES);
}

static const struct {
    const char *name;
    uint32_t kind;
    uint64_t dim[2];
} fake_tensor[FAKE_TENSORS] = {
    {"layers.0.q_proj.lora_A.weight", TB_LORA_A, {4, 8}},
    {"layers.0.q_proj.lora_B.weight", TB_LORA_B, {8, 4}},
    {"layers.0.none.lora_A.weight", TB_LORA_A, {0, 8}},
};

void fake_manifest(uint32_t kind, tb_buffer *raw, tb_message *out) {
    raw->n = 0;
    for (int i = 0; i < FAKE_TENSORS; i++) {
        tb_tensor t = {.name = tb_text_of(fake_tensor[i].name), .dtype = TB_BF16, .n_dim = 2,
                       .kind = kind == TB_W_FULL ? TB_BASE : fake_tensor[i].kind, .dim = {fake_tensor[i].dim[0], fake_tensor[i].dim[1]}};
        tb_tensor_add(raw, &t);
    }
    memset(out, 0, sizeof *out);
    out->manifest.tensors = (tb_tensors){{raw->bytes, raw->n}, FAKE_TENSORS};
}

static void die_if(const fake_weights *w, fake_death death) {
    if (w->death == death)
        raise(SIGKILL);
}

static br_status weights_describe(void *context, tb_text adapter, tb_buffer *raw, uint32_t *n_tensor) {
    tb_message m;
    (void)context;
    if (tb_text_equal(adapter, tb_text_of("stranger")))
        return br_fail(BR_E_NOT_FOUND, "no adapter 'stranger'");
    fake_manifest(TB_W_ADAPTER, raw, &m);
    *n_tensor = m.manifest.tensors.n;
    return BR_OK;
}

static br_status weights_manifest(void *context, const tb_manifest *manifest) {
    tb_tensor t;
    uint64_t at = 0;
    (void)context;
    for (int i = 0; i < FAKE_TENSORS; i++) {
        if (!tb_tensor_next(&manifest->tensors, &at, &t))
            return br_fail(BR_E_NOT_FOUND, "the manifest has no %s", fake_tensor[i].name);
        if (!tb_text_equal(t.name, tb_text_of(fake_tensor[i].name)))
            return br_fail(BR_E_NOT_FOUND, "%.*s matches no module", (int)t.name.n, t.name.p);
        if (t.dtype != TB_BF16 || t.n_dim != 2 || t.dim[0] != fake_tensor[i].dim[0] || t.dim[1] != fake_tensor[i].dim[1])
            return br_fail(BR_E_SHAPE, "%s: another shape", fake_tensor[i].name);
    }
    return BR_OK;
}

static br_status weights_begin(void *context, uint64_t version, const tb_w_begin *begin) {
    fake_weights *w = context;
    die_if(w, DIE_IN_BEGIN);
    if (w->busy > 0 && w->busy--)
        return br_fail(BR_E_LIMIT, "sequences still run on the version before");
    memset(w->staged, 0, sizeof w->staged);
    memset(w->seen, 0, sizeof w->seen);
    w->version = version;
    w->flags = begin->flags;
    return BR_OK;
}

static br_status weights_chunk(void *context, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    fake_weights *w = context;
    die_if(w, DIE_IN_CHUNK);
    if (tensor >= FAKE_TENSORS)
        return br_fail(BR_E_ARG, "chunk of tensor %llu: there are %d", (unsigned long long)tensor, FAKE_TENSORS);
    const uint64_t size = tensor == 2 ? 0 : FAKE_BYTES;
    if (offset > size || n > size - offset)
        return br_fail(BR_E_ARG, "chunk out of range");
    for (uint64_t i = 0; i < n; i++) {
        if (w->seen[tensor][offset + i]++)
            return br_fail(BR_E_ARG, "chunk overlaps an earlier one");
        w->staged[tensor][offset + i] = ((const unsigned char *)bytes)[i];
    }
    return BR_OK;
}

static br_status weights_end(void *context, br_digest digest) {
    static const unsigned char zero[FAKE_BYTES];
    fake_weights *w = context;
    die_if(w, DIE_IN_END);
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < FAKE_BYTES; i++)
            if (!w->seen[t][i])
                return br_fail(BR_E_ARG, "%s is not whole", fake_tensor[t].name);
    for (int t = 0; t < 2; t++)
        for (int i = 1; i < FAKE_BYTES; i += 2)
            if ((w->staged[t][i] & 0x7f) == 0x7f && w->staged[t][i - 1] & 0x80)
                return br_fail(BR_E_NAN, "%s holds NaN or Inf", fake_tensor[t].name);
    if (memcmp(w->staged[1], zero, sizeof zero) == 0 && !(w->flags & TB_INITIAL))
        return br_fail(BR_E_FORMAT, "%s is all zero: the adapter has no effect", fake_tensor[1].name);
    if (!br_digest_equal(digest, fake_digest(w->staged)))
        return br_fail(BR_E_MISMATCH, "the bytes that came have another digest");
    return BR_OK;
}

static br_status weights_commit(void *context, tb_pause_mode mode, uint64_t *step, br_digest *digest) {
    fake_weights *w = context;
    if (w->busy > 0 && w->busy--)
        return br_fail(BR_E_LIMIT, "not yet");
    die_if(w, DIE_BEFORE_COMMIT);
    memcpy(w->live, w->staged, sizeof w->live);
    die_if(w, DIE_AFTER_COMMIT);
    w->n_commit++;
    w->mode = mode;
    *step = ++w->step;
    *digest = fake_digest(w->live);
    return w->late == BR_OK ? BR_OK : br_fail(w->late, "the live memory cannot be read");
}

static void weights_abort(void *context) {
    fake_weights *w = context;
    w->n_abort++;
}

static br_status weights_live(void *context, br_digest *digest) {
    fake_weights *w = context;
    *digest = fake_digest(w->live);
    return w->late == BR_OK ? BR_OK : br_fail(w->late, "the live memory cannot be read");
}

tb_weights_ops fake_weights_ops(fake_weights *w) {
    return (tb_weights_ops){w, weights_manifest, weights_begin, weights_chunk, weights_end, weights_commit, weights_abort, weights_live,
                            weights_describe, NULL};
}

/* ---- a made-up engine ---------------------------------------------------------------------------------------------------- */

uint64_t fake_uid(const char *uid) {
    return br_hash_u64(uid, strlen(uid));
}

uint32_t fake_token(uint64_t uid, uint32_t i) {
    return (uint32_t)(mix(uid + i) % 1000);
}

uint32_t fake_logprob(uint64_t uid, uint32_t i) {
    return (uint32_t)mix(uid * 3 + i);
}

static br_status engine_hold(fake_engine *e, fake_request request, uint32_t first_token, uint64_t *id) {
    if (e->full)
        return br_fail(BR_E_LIMIT, "the queue is full: poll first");
    if (first_token == 666)
        return br_fail(BR_E_ARG, "token 666 is out of range");
    for (int i = 0; i < FAKE_REQUESTS; i++) {
        if (e->request[i].used)
            continue;
        *id = request.id = ++e->n_id;
        e->request[i] = request;
        return BR_OK;
    }
    return br_fail(BR_E_LIMIT, "the queue is full");
}

static fake_request engine_request(tb_text uid, uint32_t n_max) {
    return (fake_request){.uid = br_hash_u64(uid.p, uid.n), .n_max = n_max, .used = 1, .hold = tb_text_equal(uid, tb_text_of("hold"))};
}

static br_status engine_submit(void *context, const tb_gen_req *request, uint64_t *id) {
    return engine_hold(context, engine_request(request->uid, request->max_new), request->prompt.p[0], id);
}

static br_status engine_score(void *context, const tb_score_req *request, uint64_t *id) {
    fake_request r = engine_request(request->adapter, request->token.n);
    r.n = request->first_asked ? request->first_asked : 1;
    r.scored = 1;
    if (r.n >= r.n_max)
        return br_fail(BR_E_ARG, "nothing is asked for");
    return engine_hold(context, r, request->token.p[0], id);
}

static br_status engine_abort(void *context, uint64_t id) {
    fake_engine *e = context;
    for (int i = 0; i < FAKE_REQUESTS; i++)
        if (e->request[i].used && e->request[i].id == id && !e->request[i].aborted) {
            e->request[i].aborted = 1;
            return BR_OK;
        }
    return br_fail(BR_E_NOT_FOUND, "no request %llu", (unsigned long long)id);
}

static br_status engine_poll(void *context, br_token *out, int32_t n_max, int32_t *n_out, int32_t *done) {
    fake_engine *e = context;
    e->n_poll++;
    e->full = 0;
    *n_out = *done = 0;
    if (e->broken)
        return br_fail(BR_E_DEVICE, "the device fell off the bus");
    for (int i = 0; i < FAKE_REQUESTS && *n_out < n_max; i++) {
        fake_request *r = &e->request[i];
        if (!r->used || (r->hold && !r->aborted))
            continue;
        br_token t = {.request = r->id, .token = -1, .last = 1, .stop = BR_STOP_ABORT};
        if (!r->aborted) {
            t.token = (int32_t)fake_token(r->uid, r->n);
            t.logprob = fake_logprob(r->uid, r->n);
            t.position = r->scored ? (int32_t)r->n : 0;
            t.last = ++r->n == r->n_max;
            t.stop = BR_STOP_LENGTH;
        }
        r->used = !t.last;
        out[(*n_out)++] = t;
    }
    return BR_OK;
}

static br_status engine_versions(void *context, uint64_t id, br_versions *out) {
    *out = ((fake_engine *)context)->versions;
    return out->n_run ? BR_OK : br_fail(BR_E_NOT_FOUND, "no request %llu", (unsigned long long)id);
}

static br_status engine_error(void *context, uint64_t id, const char **sentence) {
    (void)context, (void)id;
    *sentence = "made up";
    return BR_E_NAN;
}

static br_status engine_sleep(void *context, int asleep) {
    ((fake_engine *)context)->asleep = asleep;
    return BR_OK;
}

tb_engine_ops fake_engine_ops(fake_engine *e) {
    return (tb_engine_ops){e, engine_submit, engine_abort, engine_poll, engine_versions, engine_error, engine_score, engine_sleep};
}

/* ---- a worker around them ------------------------------------------------------------------------------------------------ */

tb_hello rig_hello(tb_role role) {
    return (tb_hello){.role = role, .abi = BR_ABI_VERSION, .contract = {1, 2}, .config = {3, 4}, .base = {5, 6}, .tokenizer = {7, 8},
                      .build = tb_text_of("rig"), .pid = 42};
}

tb_session_options rig_session_options(rig_worker *w) {
    return (tb_session_options){.channel = {.me = rig_hello(TB_WORKER), .dead_ms = RIG_DEAD_MS, .grant_bytes = RIG_GRANT_BYTES},
                                .weights = &w->weights_ops, .full = &w->full_ops, .engine = &w->engine_ops, .n_request_max = 8, .part_tok = 4};
}

br_status rig_worker_open(rig_worker *w) {
    memset(w, 0, sizeof *w);
    w->weights_ops = fake_weights_ops(&w->weights);
    w->full_ops = fake_weights_ops(&w->full);
    w->engine_ops = fake_engine_ops(&w->engine);
    const tb_session_options o = rig_session_options(w);
    return tb_session_open(&o, &w->session);
}

void rig_worker_close(rig_worker *w) {
    tb_session_close(w->session);
}

rig_outcome rig_serve(rig_worker *w, tb_transport *t, int64_t beat_ms) {
    const tb_worker_options o = {.beat_ms = beat_ms, .stall_ms = RIG_STALL_MS};
    const int64_t begin = tb_now_ms();
    const br_status engine = tb_worker_serve(w->session, t, &o);
    const tb_stats stats = tb_session_stats(w->session);
    return (rig_outcome){stats.weights, stats.live_version, tb_worker_exit_code(tb_session_channel(w->session)->end, engine),
                         w->weights.n_abort, tb_now_ms() - begin};
}

/* ---- a trainer's end ----------------------------------------------------------------------------------------------------- */

static int wrong(rig_peer *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int wrong(rig_peer *p, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(p->text, sizeof p->text, format, args);
    va_end(args);
    return 0;
}

void rig_peer_open(rig_peer *p, tb_transport *t) {
    *p = (rig_peer){.t = t, .session = 0xabcdef0123456789ull};
}

void rig_peer_close(rig_peer *p) {
    tb_frame_free(p->frame);
    tb_transport_close(p->t);
    p->frame = NULL;
    p->t = NULL;
}

void rig_head(rig_peer *p, tb_type type, uint64_t version, const void *payload, uint64_t n, tb_header *header, unsigned char head[TB_HEADER_BYTES]) {
    *header = (tb_header){.major = TB_MAJOR, .minor = TB_MINOR, .type = (uint16_t)type, .sequence = p->sequence++, .session = p->session,
                          .version = version};
    tb_header_seal(header, payload, n, head);
}

int rig_say_batch(rig_peer *p, const tb_batch *batch) {
    return tb_transport_send(p->t, batch, 2000) == BR_OK || wrong(p, "cannot send: %s", br_last_error());
}

int rig_say_raw(rig_peer *p, const unsigned char head[TB_HEADER_BYTES], const void *payload, uint64_t n) {
    return rig_say_batch(p, &(tb_batch){head, TB_HEADER_BYTES, payload, n});
}

int rig_say(rig_peer *p, tb_type type, uint64_t version, uint64_t subject, const tb_message *m) {
    static const tb_message empty;
    tb_buffer out = {0};
    tb_header header = {.major = TB_MAJOR, .minor = TB_MINOR, .type = (uint16_t)type, .sequence = p->sequence++, .session = p->session,
                        .version = version, .subject = subject};
    unsigned char head[TB_HEADER_BYTES];
    tb_message_encode(type, m ? m : &empty, &out);
    tb_header_seal(&header, out.bytes, out.n, head);
    const int sent = rig_say_raw(p, head, out.bytes, out.n);
    tb_buffer_close(&out);
    return sent;
}

static int is_noise(uint32_t type) {
    return type == TB_CREDIT || type == TB_HEARTBEAT || type == TB_GEN_PART || type == TB_GEN_DONE;
}

int rig_expect_any(rig_peer *p, int64_t wait_ms) {
    const int64_t until = tb_now_ms() + wait_ms;
    for (;;) {
        const int64_t left = until - tb_now_ms();
        tb_frame_free(p->frame);
        p->frame = tb_transport_receive(p->t, left > 0 ? left : 0);
        if (!p->frame)
            return wrong(p, "nothing came within %lld ms", (long long)wait_ms);
        if (p->frame->fault != TB_OK)
            return wrong(p, "the stream ended: %s", p->frame->sentence);
        if (!is_noise(p->frame->header.type))
            break;
    }
    if (tb_message_decode(p->frame->header.type, p->frame->payload, p->frame->n, &p->message) != TB_OK)
        return wrong(p, "%s", br_last_error());
    return 1;
}

int rig_expect(rig_peer *p, tb_type type, int64_t wait_ms) {
    if (!rig_expect_any(p, wait_ms))
        return 0;
    const uint32_t got = p->frame->header.type;
    const tb_text why = got == TB_ERROR ? p->message.error.text : got == TB_W_NACK ? p->message.w_nack.text : (tb_text){"", 0};
    return got == (uint32_t)type || wrong(p, "%s came where %s was expected: %.*s", tb_type_name(got), tb_type_name(type), (int)why.n, why.p);
}

static int say_begin(rig_peer *p, uint32_t kind, uint64_t version, uint32_t flags) {
    tb_buffer raw = {0}, payload = {0};
    tb_message m;
    fake_manifest(kind, &raw, &m);
    tb_message_encode(TB_MANIFEST, &m, &payload);
    const tb_message begin = {.w_begin = {.flags = flags, .kind = kind, .n_bytes = 2 * FAKE_BYTES,
                                          .manifest = br_hash_xxh64(payload.bytes, payload.n), .adapter = tb_text_of("policy")}};
    tb_buffer_close(&raw);
    tb_buffer_close(&payload);
    return rig_say(p, TB_W_BEGIN, version, 0, &begin);
}

int rig_say_begin(rig_peer *p, uint64_t version, uint32_t flags) {
    return say_begin(p, TB_W_ADAPTER, version, flags);
}

int rig_say_full(rig_peer *p, uint64_t version, uint32_t flags) {
    return say_begin(p, TB_W_FULL, version, flags);
}

int rig_say_score(rig_peer *p, uint64_t id, const char *adapter) {
    static const uint32_t token[3] = {1, 2, 3};
    return rig_say(p, TB_SCORE_REQ, 0, id, &(tb_message){.score_req = {.adapter = tb_text_of(adapter), .token = {token, 3}}});
}

int rig_say_chunk(rig_peer *p, uint64_t version, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    return rig_say(p, TB_W_CHUNK, version, tensor, &(tb_message){.w_chunk = {.offset = offset, .data = {bytes, n}}});
}

int rig_say_end(rig_peer *p, uint64_t version, br_digest digest) {
    return rig_say(p, TB_W_END, version, 0, &(tb_message){.w_digest = {digest}});
}

int rig_say_request(rig_peer *p, uint64_t id, const char *uid, uint32_t max_new, uint32_t flags) {
    static const uint32_t prompt[3] = {1, 2, 3};
    const tb_message m = {.gen_req = {.flags = flags, .max_new = max_new, .top_p = 0x3ff0000000000000ull, .temperature = 0x3f800000u,
                                      .uid = tb_text_of(uid), .adapter = tb_text_of("policy"), .prompt = {prompt, 3}}};
    return rig_say(p, TB_GEN_REQ, 0, id, &m);
}

const char *const rig_state_name[RIG_STATES] = {"GREETING", "IDLE", "RECEIVING", "PREPARED", "COMMITTING"};

static int reach_idle(rig_peer *p) {
    tb_buffer raw = {0};
    tb_message m = {.hello = rig_hello(TB_TRAINER)};
    int ok = rig_say(p, TB_HELLO, 0, 0, &m) && rig_expect(p, TB_HELLO_ACK, 2000) &&
             rig_say(p, TB_CREDIT, 0, 0, &(tb_message){.credit = {.bytes = RIG_GRANT_BYTES}});
    fake_manifest(TB_W_ADAPTER, &raw, &m);
    ok = ok && rig_say(p, TB_MANIFEST, 0, 0, &m) && rig_expect(p, TB_MANIFEST_ACK, 2000);
    tb_buffer_close(&raw);
    return ok;
}

int rig_reach(rig_peer *p, rig_state state) {
    unsigned char bytes[2][FAKE_BYTES];
    fake_version(1, bytes);
    if (state >= AT_IDLE && !reach_idle(p))
        return 0;
    if (state >= AT_RECEIVING && !(rig_say_begin(p, 1, 0) && rig_say_chunk(p, 1, 0, 0, bytes[0], FAKE_BYTES)))
        return 0;
    if (state >= AT_PREPARED && !(rig_say_chunk(p, 1, 1, 0, bytes[1], FAKE_BYTES) && rig_say_end(p, 1, fake_digest(bytes)) &&
                                  rig_expect(p, TB_W_PREPARED, 2000)))
        return 0;
    if (state == AT_COMMITTING && !(rig_say_request(p, 900, "hold", 4, 0) && rig_say(p, TB_W_COMMIT, 1, 0, NULL)))
        return 0;
    if (state == AT_GREETING)
        return 1;
    if (!rig_say(p, TB_STATS_REQ, 0, 0, NULL) || !rig_expect(p, TB_STATS, 2000)) /* in step: it has taken everything when it answers */
        return 0;
    const uint32_t weights = p->message.stats.weights;
    return weights == (uint32_t)state - AT_IDLE || wrong(p, "the worker is in state %u", weights);
}
