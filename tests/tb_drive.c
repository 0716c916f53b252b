/* A session driven by hand; see tb_drive.h. */
#include "tb_drive.h"

#include <string.h>

rig_worker worker;
int64_t now;
uint64_t sequence;

answer heard[ANSWER_MAX];
int n_heard;

void forget(void) {
    memset(heard, 0, sizeof heard[0] * (size_t)n_heard);
    n_heard = 0;
}

void listen_to(void) {
    tb_channel *c = tb_session_channel(worker.session);
    const unsigned char *payload;
    tb_header header;
    for (size_t at = 0; tb_out_next(c, &at, &header, &payload);) {
        answer *a = &heard[n_heard];
        if (header.type == TB_CREDIT)
            continue;
        ck_assert_int_lt(n_heard++, ANSWER_MAX);
        ck_assert_uint_le(header.n_payload, sizeof a->bytes);
        memcpy(a->bytes, payload, header.n_payload);
        a->header = header;
        ck_assert_msg(tb_message_decode(header.type, a->bytes, header.n_payload, &a->message) == TB_OK, "%s", br_last_error());
    }
    tb_out_clear(c);
}

void give(tb_type type, uint64_t version, uint64_t subject, const tb_message *m) {
    static const tb_message empty;
    tb_buffer out = {0};
    tb_header h = {.type = (uint16_t)type, .session = 77, .sequence = sequence++, .version = version, .subject = subject};
    unsigned char head[TB_HEADER_BYTES];
    if (tb_spec_of(type))
        tb_message_encode(type, m ? m : &empty, &out);
    tb_header_seal(&h, out.bytes, out.n, head);
    tb_session_receive(worker.session, now, &h, out.bytes, out.n);
    tb_buffer_close(&out);
    listen_to();
}

void say(tb_type type, uint64_t version, uint64_t subject, const tb_message *m) {
    forget();
    give(type, version, subject, m);
}

/* Engine steps and ticks until nothing moves; what it says is added. */
void settle(void) {
    for (int i = 0; i < 40; i++) {
        CHECK_OK(tb_session_pump(worker.session, now));
        tb_session_tick(worker.session, now, 0);
        listen_to();
    }
}

const answer *first_of(tb_type type) {
    for (int i = 0; i < n_heard; i++)
        if (heard[i].header.type == type)
            return &heard[i];
    return NULL;
}

tb_stats state(void) {
    return tb_session_stats(worker.session);
}

tb_channel *channel(void) {
    return tb_session_channel(worker.session);
}

void open_session(uint64_t live) {
    CHECK_OK(rig_worker_open(&worker));
    tb_session_options o = rig_session_options(&worker);
    o.channel.me.live_version = live;
    tb_session_close(worker.session);
    CHECK_OK(tb_session_open(&o, &worker.session));
    now = 1000;
    sequence = 0;
    moved = TB_W_ADAPTER;
    forget();
    tb_session_connect(worker.session, now);
}

void credit(uint32_t bytes) {
    give(TB_CREDIT, 0, 0, &(tb_message){.credit = {.bytes = bytes}});
}

void greet(void) {
    say(TB_HELLO, 0, 0, &(tb_message){.hello = rig_hello(TB_TRAINER)});
    ck_assert_int_eq(channel()->phase, TB_OPEN);
    credit(1 << 20);
}

uint64_t manifest_hash;
uint32_t moved;

void give_manifest(void) {
    tb_buffer raw = {0}, payload = {0};
    tb_message m;
    fake_manifest(moved, &raw, &m);
    tb_message_encode(TB_MANIFEST, &m, &payload);
    manifest_hash = br_hash_xxh64(payload.bytes, payload.n);
    give(TB_MANIFEST, 0, 0, &m);
    tb_buffer_close(&raw);
    tb_buffer_close(&payload);
}

void give_begin(uint64_t version, uint32_t flags) {
    const tb_message m = {.w_begin = {.flags = flags, .kind = moved, .manifest = manifest_hash}};
    give(TB_W_BEGIN, version, 0, &m);
}

void give_chunk(uint64_t version, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    give(TB_W_CHUNK, version, tensor, &(tb_message){.w_chunk = {.offset = offset, .data = {bytes, n}}});
}

void give_end(uint64_t version) {
    unsigned char bytes[2][FAKE_BYTES];
    fake_version(version, bytes);
    give(TB_W_END, version, 0, &(tb_message){.w_digest = {fake_digest(bytes)}});
}

void give_whole(uint64_t version) {
    unsigned char bytes[2][FAKE_BYTES];
    fake_version(version, bytes);
    for (uint64_t t = 0; t < 2; t++)
        give_chunk(version, t, 0, bytes[t], FAKE_BYTES);
}

void give_request(uint64_t id, const char *uid, uint32_t max_new, uint32_t flags, uint32_t first_token) {
    const uint32_t prompt[2] = {first_token, 2};
    give(TB_GEN_REQ, 0, id, &(tb_message){.gen_req = {.flags = flags, .max_new = max_new, .uid = tb_text_of(uid),
                                                       .adapter = tb_text_of("policy"), .prompt = {prompt, 2}}});
}

void give_score(uint64_t id, const char *adapter, uint32_t first_asked, uint32_t n_tok) {
    static const uint32_t token[64] = {3, 1, 4};
    give(TB_SCORE_REQ, 0, id, &(tb_message){.score_req = {.first_asked = first_asked, .adapter = tb_text_of(adapter), .token = {token, n_tok}}});
}

/* An open session with version LIVE serving, in a state of its weights on the way to NEXT. */
void reach(tb_weights_state to) {
    open_session(LIVE);
    greet();
    give_manifest();
    if (to >= TB_RECEIVING) {
        give_begin(NEXT, 0);
        give_whole(NEXT);
    }
    if (to >= TB_PREPARED)
        give_end(NEXT);
    if (to == TB_COMMITTING) {
        give_request(900, "hold", 4, 0, 1);
        give(TB_W_COMMIT, NEXT, 0, NULL);
    }
    ck_assert_uint_eq(state().weights, to);
    ck_assert_uint_eq(state().live_version, LIVE);
    forget();
}

void close_session(void) {
    rig_worker_close(&worker);
}
