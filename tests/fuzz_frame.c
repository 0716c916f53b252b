/* libFuzzer target: any bytes as a header with a payload, as the payload of every message, and as a stream that a session reads. What
 * decodes must encode to the same bytes; a session must keep its invariants whatever comes. */
#include "br_hash.h"
#include "br_mem.h"
#include "tb_session.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_decoder(const tb_spec *spec, const unsigned char *payload, size_t n) {
    tb_message m;
    tb_buffer out = {0};
    if (tb_message_decode(spec->type, payload, n, &m) != TB_OK)
        return;
    tb_message_encode(spec->type, &m, &out);
    BR_ASSERT(out.failed == BR_OK && out.n == n && (n == 0 || memcmp(out.bytes, payload, n) == 0));
    tb_buffer_close(&out);
}

static br_status describe(void *context, tb_text adapter, tb_buffer *raw, uint32_t *n_tensor) {
    const tb_tensor t = {.name = tb_text_of("a"), .dtype = TB_BF16, .kind = TB_LORA_A};
    (void)context;
    if (adapter.n > 8)
        return br_fail(BR_E_NOT_FOUND, "no such adapter");
    tb_tensor_add(raw, &t);
    *n_tensor = 1;
    return BR_OK;
}

static br_status manifest(void *context, const tb_manifest *m) {
    tb_tensor t;
    uint32_t n = 0;
    (void)context;
    for (uint64_t at = 0; tb_tensor_next(&m->tensors, &at, &t); n++)
        BR_ASSERT(t.name.n > 0);
    BR_ASSERT(n == m->tensors.n);
    return BR_OK;
}

static br_status ws_begin(void *context, uint64_t version, const tb_w_begin *begin) {
    (void)context, (void)version, (void)begin;
    return BR_OK;
}

static br_status ws_chunk(void *context, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    (void)context, (void)offset, (void)bytes, (void)n;
    return tensor > 2 ? br_fail(BR_E_ARG, "no such tensor") : BR_OK;
}

static br_status ws_end(void *context, br_digest digest) {
    (void)context;
    return digest.lo ? BR_OK : br_fail(BR_E_MISMATCH, "another digest");
}

static br_status ws_commit(void *context, tb_pause_mode mode, uint64_t *step, br_digest *digest) {
    (void)context, (void)mode;
    *step = 1;
    *digest = (br_digest){1, 1};
    return BR_OK;
}

static void ws_abort(void *context) {
    (void)context;
}

static br_status submit(void *context, const tb_gen_req *request, uint64_t *id) {
    (void)context, (void)request, (void)id;
    return br_fail(BR_E_ARG, "refused");
}

static const tb_weights_ops weights = {NULL, manifest, ws_begin, ws_chunk, ws_end, ws_commit, ws_abort, NULL, describe, NULL};
static br_status score(void *context, const tb_score_req *request, uint64_t *id) {
    (void)context, (void)request, (void)id;
    return br_fail(BR_E_ARG, "refused");
}

static const tb_engine_ops engine = {.submit = submit, .score = score};

/* The bytes as events: type, version, length, payload. Headers are sealed, so that what is behind them is reached. */
static void try_session(const uint8_t *data, size_t size) {
    const tb_session_options o = {.channel = {.me = {.abi = 1}, .dead_ms = 1000, .grant_bytes = 1 << 20}, .weights = &weights,
                                  .full = &weights, .engine = &engine};
    static unsigned char *block;
    tb_session *s;
    tb_header h;
    unsigned char head[TB_HEADER_BYTES];
    BR_ASSERT(block || br_mem_alloc((void **)&block, 1 << 16, "fuzz") == BR_OK);
    BR_ASSERT(tb_session_open(&o, &s) == BR_OK);
    tb_session_connect(s, 0);
    const tb_message hello = {.hello = {.role = TB_TRAINER, .abi = 1}};
    tb_buffer out = {0};
    tb_message_encode(TB_HELLO, &hello, &out);
    h = (tb_header){.type = TB_HELLO, .session = 7};
    tb_header_seal(&h, out.bytes, out.n, head);
    tb_session_receive(s, 0, &h, out.bytes, out.n);
    tb_buffer_close(&out);
    for (uint64_t sequence = 1; size >= 4; sequence++) {
        size_t n = data[2] | (size_t)data[3] << 8;
        n = n < size - 4 ? n : size - 4;
        h = (tb_header){.type = data[0], .version = data[1] % 4, .subject = data[1] / 4, .session = 7, .sequence = sequence};
        memcpy(block, data + 4, n);
        tb_header_seal(&h, block, n, head);
        tb_session_receive(s, (int64_t)sequence, &h, block, n);
        tb_out_clear(tb_session_channel(s));
        const tb_stats stats = tb_session_stats(s);
        BR_ASSERT(stats.n_running == 0 && stats.weights < TB_WEIGHTS_STATE_COUNT && stats.weights != TB_COMMITTING);
        data += 4 + n;
        size -= 4 + n;
    }
    tb_session_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    unsigned char *payload;
    tb_header header;
    const size_t n = size > TB_HEADER_BYTES ? size - TB_HEADER_BYTES : 0;
    if (tb_header_read(data, size, &header) == TB_OK) {
        unsigned char again[TB_HEADER_BYTES];
        tb_header_write(&header, again);
        BR_ASSERT(memcmp(again, data, sizeof again) == 0);
        (void)tb_payload_check(&header, n ? data + TB_HEADER_BYTES : NULL, n);
    }
    BR_ASSERT(br_mem_alloc((void **)&payload, size, "fuzz") == BR_OK);
    memcpy(payload, data, size);
    for (int32_t i = 0; i < tb_spec_count; i++)
        try_decoder(&tb_specs[i], payload, size);
    br_mem_free(payload);
    try_session(data, size);
    return 0;
}
