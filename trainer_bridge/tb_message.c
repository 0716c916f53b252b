/* The table of messages, and what walks it; see tb_message.h. Layer: trainer_bridge. */
#include "tb_message.h"

#include <stdio.h>
#include <string.h>

#define U32_MAX 0xffffffffu
#define U64_MAX UINT64_MAX
#define NUMBER(kind_, struct_, field_, min_, max_) {kind_, offsetof(struct_, field_), min_, max_, #field_}
#define U32(s, f, min, max) NUMBER(TB_U32, s, f, min, max)
#define U64(s, f) NUMBER(TB_U64, s, f, 0, U64_MAX)
#define DIGEST(s, f) NUMBER(TB_DIGEST, s, f, 0, 0)
#define TEXT(s, f, min, max) NUMBER(TB_TEXT, s, f, min, max)
#define WORDS(s, f, min, max) NUMBER(TB_WORDS, s, f, min, max)
#define END {TB_END, 0, 0, 0, NULL}

static const tb_field hello_fields[] = {
    U32(tb_hello, role, TB_TRAINER, TB_WORKER), U32(tb_hello, abi, 0, U32_MAX), U32(tb_hello, can, 0, U32_MAX),
    U32(tb_hello, pid, 0, U32_MAX), U32(tb_hello, rank, 0, U32_MAX), U64(tb_hello, live_version), DIGEST(tb_hello, contract),
    DIGEST(tb_hello, config), DIGEST(tb_hello, base), DIGEST(tb_hello, tokenizer), DIGEST(tb_hello, adapter),
    TEXT(tb_hello, build, 0, 64), TEXT(tb_hello, alpha, 0, 32), END};
static const tb_field error_fields[] = {
    U32(tb_error, code, 1, U32_MAX), U32(tb_error, fatal, 0, 1), TEXT(tb_error, text, 0, TB_TEXT_MAX), END};
static const tb_field bye_fields[] = {TEXT(tb_bye, text, 0, TB_TEXT_MAX), END};
static const tb_field manifest_fields[] = {NUMBER(TB_TENSORS, tb_manifest, tensors, 1, TB_TENSOR_MAX), END};
static const tb_field manifest_req_fields[] = {TEXT(tb_manifest_req, adapter, 0, BR_UID_BYTES_MAX), END};
static const tb_field manifest_ack_fields[] = {
    U64(tb_manifest_ack, hash), U64(tb_manifest_ack, n_bytes), U32(tb_manifest_ack, n_tensor, 1, TB_TENSOR_MAX), END};
static const tb_field w_begin_fields[] = {
    U32(tb_w_begin, flags, 0, TB_INITIAL | TB_RESYNC), U32(tb_w_begin, kind, TB_W_ADAPTER, TB_W_FULL), U64(tb_w_begin, base_version),
    U64(tb_w_begin, n_bytes), U64(tb_w_begin, manifest), TEXT(tb_w_begin, adapter, 0, BR_UID_BYTES_MAX), END};
static const tb_field w_chunk_fields[] = {U64(tb_w_chunk, offset), NUMBER(TB_REST, tb_w_chunk, data, 0, TB_PAYLOAD_MAX - 8), END};
static const tb_field w_ipc_fields[] = {
    U64(tb_w_ipc, offset), NUMBER(TB_REST, tb_w_ipc, handle, BR_IPC_HANDLE_BYTES, BR_IPC_HANDLE_BYTES), END};
static const tb_field w_digest_fields[] = {DIGEST(tb_w_digest, digest), END};
static const tb_field w_nack_fields[] = {U32(tb_w_nack, code, 1, U32_MAX), TEXT(tb_w_nack, text, 0, TB_TEXT_MAX), END};
static const tb_field w_committed_fields[] = {U64(tb_w_committed, step), DIGEST(tb_w_committed, digest), END};
static const tb_field gen_req_fields[] = {
    U32(tb_gen_req, flags, 0, TB_CERTIFY), U32(tb_gen_req, sample, 0, (1 << 24) - 1), U64(tb_gen_req, seed),
    U32(tb_gen_req, temperature, 0, U32_MAX), U32(tb_gen_req, min_p, 0, U32_MAX), U64(tb_gen_req, top_p),
    U32(tb_gen_req, top_k, 0, INT32_MAX), U32(tb_gen_req, max_new, 1, TB_WORDS_MAX), U32(tb_gen_req, min_new, 0, TB_WORDS_MAX),
    U32(tb_gen_req, ignore_eos, 0, 1), TEXT(tb_gen_req, uid, 1, BR_UID_BYTES_MAX), TEXT(tb_gen_req, adapter, 0, BR_UID_BYTES_MAX),
    WORDS(tb_gen_req, stop, 0, BR_STOP_MAX), WORDS(tb_gen_req, prompt, 1, TB_WORDS_MAX), END};
static const tb_field gen_part_fields[] = {
    U32(tb_gen_part, first, 0, TB_WORDS_MAX), WORDS(tb_gen_part, token, 1, TB_PART_MAX), WORDS(tb_gen_part, logprob, 0, TB_PART_MAX),
    DIGEST(tb_gen_part, digest), END};
static const tb_field gen_done_fields[] = {
    U32(tb_gen_done, stop, 0, BR_STOP_ERROR), U32(tb_gen_done, status, 0, U32_MAX), U32(tb_gen_done, n_tok, 0, TB_WORDS_MAX),
    U32(tb_gen_done, certified, 0, 1), U64(tb_gen_done, version_begin), U64(tb_gen_done, version_end), DIGEST(tb_gen_done, digest),
    WORDS(tb_gen_done, runs, 0, 3 * TB_RUN_MAX), TEXT(tb_gen_done, text, 0, TB_TEXT_MAX), END};
static const tb_field gen_release_fields[] = {DIGEST(tb_gen_release, certificate), END};
static const tb_field gen_held_fields[] = {
    U32(tb_gen_held, first, 0, TB_WORDS_MAX), U32(tb_gen_held, n_tok, 0, TB_WORDS_MAX), U32(tb_gen_held, equal, 0, 1),
    WORDS(tb_gen_held, logprob, 0, TB_PART_MAX), END};
static const tb_field credit_fields[] = {U32(tb_credit, requests, 0, 1 << 24), NUMBER(TB_U64, tb_credit, bytes, 0, (uint64_t)1 << 40), END};
static const tb_field pause_fields[] = {U32(tb_pause, mode, 0, TB_PAUSE_MODE_COUNT - 1), END};
static const tb_field score_req_fields[] = {
    U32(tb_score_req, first_asked, 0, TB_WORDS_MAX), U32(tb_score_req, temperature, 0, U32_MAX),
    TEXT(tb_score_req, adapter, 0, BR_UID_BYTES_MAX), WORDS(tb_score_req, token, 1, TB_WORDS_MAX), END};
static const tb_field score_done_fields[] = {
    U32(tb_score_done, status, 0, U32_MAX), WORDS(tb_score_done, logprob, 0, TB_WORDS_MAX), TEXT(tb_score_done, text, 0, TB_TEXT_MAX), END};
static const tb_field stats_fields[] = {
    U64(tb_stats, live_version), U64(tb_stats, n_done), U64(tb_stats, n_tok), U32(tb_stats, n_held, 0, U32_MAX),
    U32(tb_stats, n_running, 0, U32_MAX), U32(tb_stats, n_unreleased, 0, U32_MAX), U32(tb_stats, weights, 0, 3),
    U32(tb_stats, paused, 0, 1), U32(tb_stats, mode, 0, TB_PAUSE_MODE_COUNT - 1), U32(tb_stats, asleep, 0, 1), U64(tb_stats, base_version),
    DIGEST(tb_stats, adapter), DIGEST(tb_stats, base), END};

enum { T = TB_TRAINER, W = TB_WORKER, BOTH = TB_TRAINER | TB_WORKER };

const tb_spec tb_specs[] = {
    {TB_HELLO, "HELLO", T, 0, hello_fields},
    {TB_HELLO_ACK, "HELLO_ACK", W, 0, hello_fields},
    {TB_HEARTBEAT, "HEARTBEAT", BOTH, 0, NULL},
    {TB_ERROR, "ERROR", BOTH, 0, error_fields},
    {TB_BYE, "BYE", BOTH, 0, bye_fields},
    {TB_MANIFEST, "MANIFEST", BOTH, 0, manifest_fields},
    {TB_MANIFEST_ACK, "MANIFEST_ACK", W, 0, manifest_ack_fields},
    {TB_MANIFEST_REQ, "MANIFEST_REQ", T, 0, manifest_req_fields},
    {TB_W_BEGIN, "W_BEGIN", T, 0, w_begin_fields},
    {TB_W_CHUNK, "W_CHUNK", T, 1, w_chunk_fields},
    {TB_W_END, "W_END", T, 0, w_digest_fields},
    {TB_W_PREPARED, "W_PREPARED", W, 0, w_digest_fields},
    {TB_W_NACK, "W_NACK", W, 0, w_nack_fields},
    {TB_W_COMMIT, "W_COMMIT", T, 0, NULL},
    {TB_W_COMMITTED, "W_COMMITTED", W, 0, w_committed_fields},
    {TB_W_ABORT, "W_ABORT", T, 0, NULL},
    {TB_W_IPC, "W_IPC", T, 0, w_ipc_fields},
    {TB_GEN_REQ, "GEN_REQ", T, 0, gen_req_fields},
    {TB_GEN_PART, "GEN_PART", W, 1, gen_part_fields},
    {TB_GEN_DONE, "GEN_DONE", W, 1, gen_done_fields},
    {TB_GEN_ABORT, "GEN_ABORT", T, 0, NULL},
    {TB_GEN_RELEASE, "GEN_RELEASE", T, 0, gen_release_fields},
    {TB_GEN_HELD, "GEN_HELD", W, 1, gen_held_fields},
    {TB_GEN_DISCARD, "GEN_DISCARD", T, 0, NULL},
    {TB_CREDIT, "CREDIT", BOTH, 0, credit_fields},
    {TB_PAUSE, "PAUSE", T, 0, pause_fields},
    {TB_RESUME, "RESUME", T, 0, NULL},
    {TB_SLEEP, "SLEEP", T, 0, NULL},
    {TB_WAKE, "WAKE", T, 0, NULL},
    {TB_SCORE_REQ, "SCORE_REQ", T, 0, score_req_fields},
    {TB_SCORE_DONE, "SCORE_DONE", W, 1, score_done_fields},
    {TB_STATS_REQ, "STATS_REQ", T, 0, NULL},
    {TB_STATS, "STATS", W, 0, stats_fields},
};

const int32_t tb_spec_count = sizeof tb_specs / sizeof tb_specs[0];

const tb_spec *tb_spec_of(uint32_t type) {
    for (int32_t i = 0; i < tb_spec_count; i++)
        if (tb_specs[i].type == type)
            return &tb_specs[i];
    return NULL;
}

tb_code tb_spec_none(uint32_t type) {
    return tb_fail(TB_BAD_TYPE, "message type %u does not exist in version %d of the protocol", type, TB_MAJOR);
}

const char *tb_type_name(uint32_t type) {
    const tb_spec *spec = tb_spec_of(type);
    return spec ? spec->name : "type?";
}

tb_text tb_text_of(const char *text) {
    return (tb_text){text, (uint32_t)strlen(text)};
}

int tb_text_equal(tb_text a, tb_text b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

uint64_t tb_dtype_bytes(uint32_t dtype) {
    static const uint64_t bytes[] = {0, 2, 4, 1, 1};
    return dtype < sizeof bytes / sizeof bytes[0] ? bytes[dtype] : 0;
}

static uint64_t padded(uint64_t n) {
    return (n + 3) & ~(uint64_t)3;
}

enum { TENSOR_MIN = 4 * 4 + 4 }; /* dtype, kind, n_dim, length of a name, a name of a byte */

void tb_spec_bounds(const tb_spec *spec, uint64_t *min, uint64_t *max) {
    *min = *max = 0;
    for (const tb_field *f = spec->field; f && f->kind != TB_END; f++) {
        const uint64_t fixed = f->kind == TB_DIGEST ? 16 : f->kind == TB_U64 ? 8 : f->kind == TB_REST ? 0 : 4;
        const uint64_t unit = f->kind == TB_WORDS ? 4 : f->kind == TB_TEXT || f->kind == TB_REST ? 1 : 0;
        *min += fixed + (f->kind == TB_TENSORS ? f->min * TENSOR_MIN : padded(unit * f->min));
        *max += fixed + (f->kind == TB_TENSORS ? TB_PAYLOAD_MAX - 4 : padded(unit * f->max));
    }
}

void tb_spec_line(const tb_spec *spec, char *out, size_t n) {
    static const char *const kind[] = {"", "u32", "u64", "digest", "text", "words", "bytes", "tensors"};
    static const char *const from[] = {"", "trainer", "worker", "both"};
    uint64_t min, max;
    tb_spec_bounds(spec, &min, &max);
    int at = snprintf(out, n, "%3d %-12s %-7s %4llu..%llu", (int)spec->type, spec->name, from[spec->from], (unsigned long long)min,
                      (unsigned long long)max);
    for (const tb_field *f = spec->field; f && f->kind != TB_END && at >= 0 && (size_t)at < n; f++)
        at += snprintf(out + at, n - (size_t)at, " %s:%s", f->name, kind[f->kind]);
}

/* ---- encoding ------------------------------------------------------------------------------------------------------------ */

static tb_code out_of_bounds(const tb_spec *spec, const tb_field *f, const char *of, uint64_t found) {
    return tb_fail(TB_BAD_PAYLOAD, "%s, %s%s: %llu is out of its range, %llu to %llu", spec->name, f->name, of, (unsigned long long)found,
                   (unsigned long long)f->min, (unsigned long long)f->max);
}

static tb_code check_field(const tb_spec *spec, const tb_field *f, const void *at) {
    static const char *const of[] = {[TB_TEXT] = ", its bytes", [TB_WORDS] = ", its words", [TB_REST] = ", its bytes", [TB_TENSORS] = ", how many"};
    const void *bytes = NULL;
    uint64_t n = 0;
    uint32_t u32;
    switch (f->kind) {
    case TB_U32:
        memcpy(&u32, at, sizeof u32);
        return u32 < f->min || u32 > f->max ? out_of_bounds(spec, f, "", u32) : TB_OK;
    case TB_U64:
        memcpy(&n, at, sizeof n);
        return n > f->max ? out_of_bounds(spec, f, "", n) : TB_OK;
    case TB_TEXT: bytes = ((const tb_text *)at)->p, n = ((const tb_text *)at)->n; break;
    case TB_WORDS: bytes = ((const tb_words *)at)->p, n = ((const tb_words *)at)->n; break;
    case TB_REST: bytes = ((const tb_bytes *)at)->p, n = ((const tb_bytes *)at)->n; break;
    case TB_TENSORS: bytes = ((const tb_tensors *)at)->raw.p, n = ((const tb_tensors *)at)->n; break;
    case TB_DIGEST:
    case TB_END: return TB_OK;
    }
    if (n < f->min || n > f->max)
        return out_of_bounds(spec, f, of[f->kind], n);
    return n && !bytes ? tb_fail(TB_BAD_PAYLOAD, "%s, %s: %llu long, and no bytes", spec->name, f->name, (unsigned long long)n) : TB_OK;
}

tb_code tb_message_check(tb_type type, const tb_message *message) {
    const tb_spec *spec = tb_spec_of(type);
    tb_code code = spec ? TB_OK : tb_spec_none((uint32_t)type);
    if (spec && spec->field && !message)
        code = tb_fail(TB_BAD_PAYLOAD, "%s has fields, and there is no message", spec->name);
    for (const tb_field *f = spec ? spec->field : NULL; code == TB_OK && f && f->kind != TB_END; f++)
        code = check_field(spec, f, (const char *)message + f->at);
    return code;
}

static void add_u32(tb_buffer *out, uint32_t x) {
    tb_buffer_add(out, &x, sizeof x);
}

static void add_text(tb_buffer *out, tb_text text) {
    add_u32(out, text.n);
    tb_buffer_add(out, text.p, text.n);
    (void)tb_buffer_take(out, padded(text.n) - text.n);
}

static void encode_field(const tb_field *f, const void *at, tb_buffer *out) {
    const tb_text *text = at;
    const tb_words *words = at;
    const tb_bytes *bytes = at;
    const tb_tensors *tensors = at;
    uint32_t u32;
    switch (f->kind) {
    case TB_U32:
        memcpy(&u32, at, sizeof u32);
        add_u32(out, u32);
        break;
    case TB_U64: tb_buffer_add(out, at, 8); break;
    case TB_DIGEST: tb_buffer_add(out, at, 16); break;
    case TB_TEXT: add_text(out, *text); break;
    case TB_WORDS:
        add_u32(out, words->n);
        tb_buffer_add(out, words->p, 4 * (size_t)words->n);
        break;
    case TB_REST: tb_buffer_add(out, bytes->p, bytes->n); break;
    case TB_TENSORS:
        add_u32(out, tensors->n);
        tb_buffer_add(out, tensors->raw.p, tensors->raw.n);
        break;
    case TB_END: break;
    }
}

void tb_message_encode(tb_type type, const tb_message *message, tb_buffer *out) {
    const tb_spec *spec = tb_spec_of(type);
    BR_ASSERT(tb_message_check(type, message) == TB_OK);
    for (const tb_field *f = spec->field; f && f->kind != TB_END; f++)
        encode_field(f, (const char *)message + f->at, out);
}

void tb_tensor_add(tb_buffer *raw, const tb_tensor *tensor) {
    if (raw->failed == BR_OK && (tensor->n_dim > TB_DIM_MAX || tensor->name.n < 1 || tensor->name.n > TB_TEXT_MAX || !tensor->name.p))
        raw->failed = br_fail(BR_E_ARG, "a tensor of %u dimensions with a name of %u bytes: at most %d, and 1 to %d", tensor->n_dim,
                              tensor->name.n, TB_DIM_MAX, TB_TEXT_MAX);
    if (raw->failed != BR_OK)
        return;
    add_u32(raw, tensor->dtype);
    add_u32(raw, tensor->kind);
    add_u32(raw, tensor->n_dim);
    add_text(raw, tensor->name);
    tb_buffer_add(raw, tensor->dim, 8 * (size_t)tensor->n_dim);
}

/* ---- decoding ------------------------------------------------------------------------------------------------------------ */

typedef struct reader {
    const unsigned char *p;
    uint64_t n, at;
    const char *message, *field;
} reader;

static tb_code bad(const reader *r, const char *why, uint64_t found) {
    return tb_fail(TB_BAD_PAYLOAD, "%s, %s: %s (%llu)", r->message, r->field, why, (unsigned long long)found);
}

/* The next n bytes, NULL when there are not as many. */
static const unsigned char *take(reader *r, uint64_t n) {
    if (n > r->n - r->at)
        return NULL;
    r->at += n;
    return r->p + r->at - n;
}

static tb_code read_u32(reader *r, uint64_t min, uint64_t max, uint32_t *out) {
    const unsigned char *p = take(r, 4);
    if (!p)
        return bad(r, "the payload ends before it", r->n);
    memcpy(out, p, 4);
    if (*out < min || *out > max)
        return bad(r, "out of its range", *out);
    return TB_OK;
}

static tb_code read_text(reader *r, uint64_t min, uint64_t max, tb_text *out) {
    tb_code code = read_u32(r, min, max, &out->n);
    if (code != TB_OK)
        return code;
    const unsigned char *p = take(r, padded(out->n));
    if (!p)
        return bad(r, "the payload ends inside it", r->n);
    if (memchr(p, 0, out->n))
        return bad(r, "a zero byte in a text", out->n);
    for (uint64_t i = out->n; i < padded(out->n); i++)
        if (p[i])
            return bad(r, "its padding is not zero", p[i]);
    out->p = (const char *)p;
    return TB_OK;
}

static tb_code read_words(reader *r, uint64_t min, uint64_t max, tb_words *out) {
    tb_code code = read_u32(r, min, max, &out->n);
    if (code != TB_OK)
        return code;
    const void *p = take(r, 4 * (uint64_t)out->n);
    if (!p)
        return bad(r, "the payload ends inside it", r->n);
    out->p = p;
    return TB_OK;
}

/* A tensor is of 2^40 bytes at most, so that offsets and sums of three do not wrap. */
static tb_code read_tensor(reader *r, tb_tensor *out) {
    tb_code code;
    memset(out, 0, sizeof *out);
    if ((code = read_u32(r, TB_BF16, TB_U8, &out->dtype)) || (code = read_u32(r, TB_BASE, TB_LORA_B, &out->kind)) ||
        (code = read_u32(r, 0, TB_DIM_MAX, &out->n_dim)) || (code = read_text(r, 1, TB_TEXT_MAX, &out->name)))
        return code;
    out->n_bytes = tb_dtype_bytes(out->dtype);
    for (uint32_t d = 0; d < out->n_dim; d++) {
        const unsigned char *p = take(r, 8);
        if (!p)
            return bad(r, "the payload ends inside a shape", r->n);
        memcpy(&out->dim[d], p, 8);
        if (out->dim[d] > (uint64_t)1 << 40 || (out->n_bytes && out->dim[d] > ((uint64_t)1 << 40) / out->n_bytes))
            return bad(r, "a tensor of more than 2^40 bytes", out->dim[d]);
        out->n_bytes *= out->dim[d];
    }
    return TB_OK;
}

static tb_code read_tensors(reader *r, const tb_field *f, tb_tensors *out) {
    tb_tensor tensor;
    tb_code code = read_u32(r, f->min, f->max, &out->n);
    const uint64_t begin = r->at;
    for (uint32_t i = 0; code == TB_OK && i < out->n; i++)
        code = read_tensor(r, &tensor);
    out->raw = (tb_bytes){r->p + begin, r->at - begin};
    return code;
}

int tb_tensor_next(const tb_tensors *tensors, uint64_t *at, tb_tensor *out) {
    reader r = {tensors->raw.p, tensors->raw.n, *at, "MANIFEST", "tensors"};
    if (*at == tensors->raw.n)
        return 0;
    const tb_code code = read_tensor(&r, out);
    BR_ASSERT(code == TB_OK);
    *at = r.at;
    return 1;
}

static tb_code decode_field(reader *r, const tb_field *f, void *at) {
    const unsigned char *p;
    r->field = f->name;
    switch (f->kind) {
    case TB_U32: return read_u32(r, f->min, f->max, at);
    case TB_TEXT: return read_text(r, f->min, f->max, at);
    case TB_WORDS: return read_words(r, f->min, f->max, at);
    case TB_TENSORS: return read_tensors(r, f, at);
    case TB_REST:
        if (r->n - r->at < f->min || r->n - r->at > f->max)
            return bad(r, "another number of bytes", r->n - r->at);
        *(tb_bytes *)at = (tb_bytes){r->p + r->at, r->n - r->at};
        r->at = r->n;
        return TB_OK;
    case TB_U64:
    case TB_DIGEST:
        p = take(r, f->kind == TB_U64 ? 8 : 16);
        if (!p)
            return bad(r, "the payload ends before it", r->n);
        memcpy(at, p, f->kind == TB_U64 ? 8 : 16);
        if (f->kind == TB_U64 && *(const uint64_t *)at > f->max)
            return bad(r, "out of its range", *(const uint64_t *)at);
        return TB_OK;
    case TB_END: break;
    }
    return TB_OK;
}

/* What the fields alone cannot say. */
static tb_code check_whole(const reader *r, const tb_spec *spec, const tb_message *m) {
    uint64_t n_tok = 0;
    if (spec->type == TB_GEN_PART && m->gen_part.logprob.n != 0 && m->gen_part.logprob.n != m->gen_part.token.n)
        return bad(r, "another number of log-probs than of tokens", m->gen_part.logprob.n);
    if (spec->type != TB_GEN_DONE)
        return TB_OK;
    if (m->gen_done.runs.n % 3 != 0)
        return bad(r, "runs are not three words each", m->gen_done.runs.n);
    for (uint32_t i = 2; i < m->gen_done.runs.n; i += 3)
        n_tok += m->gen_done.runs.p[i];
    return n_tok == m->gen_done.n_tok ? TB_OK : bad(r, "the runs do not add up to its tokens", n_tok);
}

tb_code tb_message_decode(uint32_t type, const void *payload, uint64_t n, tb_message *out) {
    static const unsigned char nothing[4];
    const tb_spec *spec = tb_spec_of(type);
    reader r = {payload ? payload : nothing, n, 0, spec ? spec->name : "", "payload"};
    memset(out, 0, sizeof *out);
    if (!spec)
        return tb_spec_none(type);
    for (const tb_field *f = spec->field; f && f->kind != TB_END; f++) {
        const tb_code code = decode_field(&r, f, (char *)out + f->at);
        if (code != TB_OK)
            return code;
    }
    if (r.at != n)
        return bad(&r, "bytes are left behind the last field", n - r.at);
    return check_whole(&r, spec, out);
}
