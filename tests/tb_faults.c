/* The table of faults; see tb_faults.h. */
#include "tb_faults.h"

#include <stdio.h>
#include <string.h>

/* ---- faults of frames ---------------------------------------------------------------------------------------------------- */

static int with_header(rig_peer *p, void (*spoil)(tb_header *h, unsigned char *head)) {
    const tb_credit credit = {.bytes = 1};
    tb_buffer out = {0};
    unsigned char head[TB_HEADER_BYTES];
    tb_header h;
    tb_message_encode(TB_CREDIT, &(tb_message){.credit = credit}, &out);
    rig_head(p, TB_CREDIT, 0, out.bytes, out.n, &h, head);
    spoil(&h, head);
    const int sent = rig_say_raw(p, head, out.bytes, out.n);
    tb_buffer_close(&out);
    return sent;
}

static void flip_header(tb_header *h, unsigned char *head) {
    (void)h;
    head[21] ^= 4;
}

static void other_magic(tb_header *h, unsigned char *head) {
    (void)h;
    memcpy(head, "GET ", 4);
}

static void other_major(tb_header *h, unsigned char *head) {
    h->major++;
    tb_header_write(h, head);
}

static void too_long(tb_header *h, unsigned char *head) {
    h->n_payload = TB_PAYLOAD_MAX + 1;
    tb_header_write(h, head);
}

static void flip_hash(tb_header *h, unsigned char *head) {
    h->payload_hash ^= 1ull << 40;
    tb_header_write(h, head);
}

static void other_session(tb_header *h, unsigned char *head) {
    h->session ^= 2;
    tb_header_write(h, head);
}

static void other_type(tb_header *h, unsigned char *head) {
    h->type = 4242;
    tb_header_write(h, head);
}

static void other_sequence(tb_header *h, unsigned char *head, int64_t by) {
    h->sequence += (uint64_t)by;
    tb_header_write(h, head);
}

static void repeat(tb_header *h, unsigned char *head) {
    other_sequence(h, head, -1);
}

static void gap(tb_header *h, unsigned char *head) {
    other_sequence(h, head, 1);
}

static int act_flip_header(rig_peer *p) { return with_header(p, flip_header); }
static int act_magic(rig_peer *p) { return with_header(p, other_magic); }
static int act_major(rig_peer *p) { return with_header(p, other_major); }
static int act_too_long(rig_peer *p) { return with_header(p, too_long); }
static int act_flip_payload(rig_peer *p) { return with_header(p, flip_hash); }
static int act_session(rig_peer *p) { return with_header(p, other_session); }
static int act_type(rig_peer *p) { return with_header(p, other_type); }
static int act_repeat(rig_peer *p) { return with_header(p, repeat); }
static int act_gap(rig_peer *p) { return with_header(p, gap); }

static int half_a_payload(rig_peer *p) {
    unsigned char head[TB_HEADER_BYTES], payload[100] = {0};
    tb_header h;
    rig_head(p, TB_W_CHUNK, 1, payload, sizeof payload, &h, head);
    return rig_say_raw(p, head, payload, 50);
}

/* Two frames in one batch, the second without its end. */
static int half_in_a_batch(rig_peer *p) {
    unsigned char frames[2 * TB_HEADER_BYTES + 100] = {0};
    tb_header h;
    rig_head(p, TB_HEARTBEAT, 0, NULL, 0, &h, frames);
    rig_head(p, TB_W_CHUNK, 1, frames + 2 * TB_HEADER_BYTES, 100, &h, frames + TB_HEADER_BYTES);
    return rig_say_batch(p, &(tb_batch){frames, sizeof frames - 50, NULL, 0});
}

static int half_a_header(rig_peer *p) {
    unsigned char frame[TB_HEADER_BYTES];
    tb_header h;
    rig_head(p, TB_HEARTBEAT, 0, NULL, 0, &h, frame);
    return rig_say_batch(p, &(tb_batch){frame, sizeof frame / 2, NULL, 0});
}

static int act_half_and_gone(rig_peer *p) {
    const int sent = half_a_payload(p);
    rig_peer_close(p);
    return sent;
}

static int act_direction(rig_peer *p) { return rig_say(p, TB_HELLO_ACK, 0, 0, &(tb_message){.hello = rig_hello(TB_WORKER)}); }
static int act_hello_again(rig_peer *p) { return rig_say(p, TB_HELLO, 0, 0, &(tb_message){.hello = rig_hello(TB_TRAINER)}); }
static int act_early(rig_peer *p) { return rig_say(p, TB_STATS_REQ, 0, 0, NULL); }

static int act_differs(rig_peer *p) {
    tb_message m = {.hello = rig_hello(TB_TRAINER)};
    m.hello.base.hi++;
    return rig_say(p, TB_HELLO, 0, 0, &m);
}

static int act_bad_payload(rig_peer *p) {
    unsigned char head[TB_HEADER_BYTES];
    const uint32_t mode = TB_PAUSE_MODE_COUNT;
    tb_header h;
    rig_head(p, TB_PAUSE, 0, &mode, sizeof mode, &h, head);
    return rig_say_raw(p, head, &mode, sizeof mode);
}

/* ---- ends ---------------------------------------------------------------------------------------------------------------- */

static int act_close(rig_peer *p) {
    rig_peer_close(p);
    return 1;
}

static int act_silence(rig_peer *p) {
    (void)p;
    return 1;
}

static int act_bye(rig_peer *p) { return rig_say(p, TB_BYE, 0, 0, NULL); }

/* ---- faults of transfers; version 1, tensor 0 is in when RECEIVING ----------------------------------------------------------- */

static unsigned char good[2][FAKE_BYTES];

static int chunk(rig_peer *p, uint64_t tensor, uint64_t offset, uint64_t n) {
    fake_version(1, good);
    return rig_say_chunk(p, 1, tensor, offset, good[tensor == 1], n);
}

static int end_with(rig_peer *p, const unsigned char b[FAKE_BYTES]) {
    unsigned char bytes[2][FAKE_BYTES];
    fake_version(1, bytes);
    memcpy(bytes[1], b, FAKE_BYTES);
    return rig_say_chunk(p, 1, 1, 0, bytes[1], FAKE_BYTES) && rig_say_end(p, 1, fake_digest(bytes));
}

static int act_out_of_range(rig_peer *p) { return chunk(p, 1, FAKE_BYTES - 4, 8); }
static int act_offset_wraps(rig_peer *p) { return chunk(p, 1, UINT64_MAX - 3, 8); }
static int act_far_tensor(rig_peer *p) { return chunk(p, FAKE_TENSORS, 0, 4); }
static int act_overlap(rig_peer *p) { return chunk(p, 0, 8, 1); }
static int act_doubled(rig_peer *p) { return chunk(p, 1, 0, FAKE_BYTES) && chunk(p, 1, 0, FAKE_BYTES); }
static int act_into_empty(rig_peer *p) { return chunk(p, 2, 0, 1); }
static int act_chunk(rig_peer *p) { return chunk(p, 1, 0, FAKE_BYTES); }
static int act_other_version(rig_peer *p) { return rig_say_chunk(p, 2, 1, 0, good[1], 4); }
static int act_end(rig_peer *p) { return rig_say_end(p, 1, (br_digest){1, 1}); }
static int act_missing(rig_peer *p) { return rig_say_end(p, 1, fake_digest(good)); }
static int act_commit(rig_peer *p) { return rig_say(p, TB_W_COMMIT, 1, 0, NULL); }
static int act_commit_other(rig_peer *p) { return rig_say(p, TB_W_COMMIT, 2, 0, NULL); }
static int act_begin(rig_peer *p) { return rig_say_begin(p, 1, 0); }
static int act_begin_skip(rig_peer *p) { return rig_say_begin(p, 2, 0); }
static int act_initial_later(rig_peer *p) { return rig_say_begin(p, 1, TB_INITIAL); }
static int act_abort(rig_peer *p) { return rig_say(p, TB_W_ABORT, 1, 0, NULL); }

static int act_commit_twice(rig_peer *p) {
    return act_commit(p) && rig_expect(p, TB_W_COMMITTED, 2000) && act_commit(p);
}

static int act_digest(rig_peer *p) {
    fake_version(1, good);
    br_digest digest = fake_digest(good);
    digest.hi ^= 1;
    return chunk(p, 1, 0, FAKE_BYTES) && rig_say_end(p, 1, digest);
}

/* A chunk without bytes of a tensor without elements is lawful; so is the lack of it. */
static int act_empty_tensor(rig_peer *p) {
    fake_version(1, good);
    return chunk(p, 2, 0, 0) && chunk(p, 1, 0, FAKE_BYTES) && rig_say_end(p, 1, fake_digest(good));
}

static int act_nan(rig_peer *p) {
    unsigned char b[FAKE_BYTES];
    fake_version(1, good);
    memcpy(b, good[1], sizeof b);
    b[10] = 0xc0;
    b[11] = 0x7f;
    return end_with(p, b);
}

static int act_zero_effect(rig_peer *p) {
    static const unsigned char zero[FAKE_BYTES];
    return end_with(p, zero);
}

static int manifest_with(rig_peer *p, const char *name, uint64_t dim) {
    tb_buffer raw = {0}, all = {0};
    tb_message m;
    tb_tensor t;
    uint64_t at = 0;
    fake_manifest(TB_W_ADAPTER, &raw, &m);
    for (int i = 0; tb_tensor_next(&m.manifest.tensors, &at, &t); i++) {
        if (i == 1 && name)
            t.name = tb_text_of(name);
        if (i == 1 && dim)
            t.dim[0] = dim;
        tb_tensor_add(&all, &t);
    }
    m.manifest.tensors.raw = (tb_bytes){all.bytes, all.n};
    const int sent = rig_say(p, TB_MANIFEST, 0, 0, &m);
    tb_buffer_close(&raw);
    tb_buffer_close(&all);
    return sent;
}

static int act_misnamed(rig_peer *p) { return manifest_with(p, "layers.0.q_proj.lora_C.weight", 0); }
static int act_other_shape(rig_peer *p) { return manifest_with(p, NULL, 9); }

/* ---- scores and full weights ----------------------------------------------------------------------------------------------- */

static int act_score_held(rig_peer *p) { return rig_say_request(p, 1, "hold", 4, TB_CERTIFY) && rig_say_score(p, 2, "policy"); }
static int act_score_base(rig_peer *p) { return rig_say_request(p, 1, "hold", 4, TB_CERTIFY) && rig_say_score(p, 2, ""); }
static int act_score_twice(rig_peer *p) { return rig_say_score(p, 1, "hold") && rig_say_score(p, 1, "hold"); }

/* "policy" again, once what it would certify is aborted. */
static int act_score_free(rig_peer *p) {
    return act_score_held(p) && rig_expect(p, TB_SCORE_DONE, 2000) && rig_say(p, TB_GEN_ABORT, 0, 1, NULL) &&
           rig_say(p, TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_DRAIN}}) && rig_expect(p, TB_STATS, 2000) &&
           rig_say(p, TB_RESUME, 0, 0, NULL) && rig_expect(p, TB_STATS, 2000) && rig_say_score(p, 3, "policy");
}

static int act_score_abort(rig_peer *p) { return rig_say_score(p, 1, "hold") && rig_say(p, TB_GEN_ABORT, 0, 1, NULL); }

static int act_release_score(rig_peer *p) {
    return rig_say_score(p, 1, "hold") && rig_say(p, TB_GEN_RELEASE, 0, 1, &(tb_message){.gen_release = {{1, 1}}});
}

/* Where a text is held already, the credit ends before the last of these, and the worker may be gone when that is sent: its answer tells. */
static int act_score_too_many(rig_peer *p) {
    uint64_t n_sent = 0;
    while (n_sent < 9 && rig_say_score(p, n_sent + 1, "hold"))
        n_sent++;
    return n_sent >= 8;
}

static int act_full(rig_peer *p) { return rig_say_full(p, 1, 0); }
static int act_full_initial(rig_peer *p) { return rig_say_full(p, 0, TB_INITIAL); }

/* ---- certificates ---------------------------------------------------------------------------------------------------------- */

static int release(rig_peer *p, uint64_t id) {
    uint32_t bits[4];
    for (uint32_t i = 0; i < 4; i++)
        bits[i] = fake_logprob(fake_uid("short"), i);
    return rig_say(p, TB_GEN_RELEASE, 0, id, &(tb_message){.gen_release = {br_hash_bytes(bits, sizeof bits)}});
}

/* A certified text, its GEN_DONE sent: the pause holds when nothing runs. */
static int certified_text(rig_peer *p) {
    return rig_say_request(p, 1, "short", 4, TB_CERTIFY) && rig_say(p, TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_DRAIN}}) &&
           rig_expect(p, TB_STATS, 2000);
}

static int act_late_abort(rig_peer *p) { return certified_text(p) && rig_say(p, TB_GEN_ABORT, 0, 1, NULL) && release(p, 1); }
static int act_discard(rig_peer *p) { return certified_text(p) && rig_say(p, TB_GEN_DISCARD, 0, 1, NULL) && release(p, 1); }
static int act_release_nothing(rig_peer *p) { return release(p, 1); }
static int act_release_twice(rig_peer *p) { return certified_text(p) && release(p, 1) && rig_expect(p, TB_GEN_HELD, 2000) && release(p, 1); }
static int act_early_discard(rig_peer *p) {
    return rig_say_request(p, 1, "hold", 4, TB_CERTIFY) && rig_say(p, TB_GEN_DISCARD, 0, 1, NULL);
}

/* ---- the table ----------------------------------------------------------------------------------------------------------- */

enum { SOON = 3000, GONE = RIG_DEAD_MS - 300 /* found by the stream's end, not by silence */, DEAD = RIG_DEAD_MS + 1500 };

/* An error of the peer itself: the connection ends; what was staged is dropped, what was ordered is done. */
#define OPEN_STATES(name, act, code, over) \
    {name, act, AT_IDLE, TB_ERROR, code, -1, 0, 4, SOON, over}, {name, act, AT_RECEIVING, TB_ERROR, code, -1, 0, 4, SOON, over}, \
    {name, act, AT_PREPARED, TB_ERROR, code, -1, 0, 4, SOON, over}, {name, act, AT_COMMITTING, TB_ERROR, code, -1, 1, 4, SOON, over}
#define ALL_STATES(name, act, code, over) {name, act, AT_GREETING, TB_ERROR, code, -1, 0, 4, SOON, over}, OPEN_STATES(name, act, code, over)
/* The peer is gone, or says that it goes. */
#define ENDS(name, act, answer, exit_code, deadline, over) \
    {name, act, AT_GREETING, answer, 0, -1, 0, exit_code, deadline, over}, ENDS_OPEN(name, act, answer, exit_code, deadline, over)
#define ENDS_OPEN(name, act, answer, exit_code, deadline, over) \
    {name, act, AT_IDLE, answer, 0, -1, 0, exit_code, deadline, over}, {name, act, AT_RECEIVING, answer, 0, -1, 0, exit_code, deadline, over}, \
    {name, act, AT_PREPARED, answer, 0, -1, 0, exit_code, deadline, over}, \
    {name, act, AT_COMMITTING, answer, 0, -1, 1, exit_code, deadline, over}
/* A transfer that is refused: the connection goes on, version 0 serves. */
#define REFUSED(name, act, state, code) {name, act, state, TB_W_NACK, code, TB_IDLE, 0, 0, SOON, OVER_ALL}

/* A score is answered by its own status; what the weights do is not its affair. */
#define SCORED(name, act, status) \
    {name, act, AT_IDLE, TB_SCORE_DONE, status, TB_IDLE, 0, 0, SOON, OVER_ALL}, \
    {name, act, AT_RECEIVING, TB_SCORE_DONE, status, TB_RECEIVING, 0, 0, SOON, OVER_ALL}, \
    {name, act, AT_PREPARED, TB_SCORE_DONE, status, TB_PREPARED, 0, 0, SOON, OVER_ALL}

/* What is said of a text that has ended: the connection goes on, and the weights as well. */
#define OF_A_TEXT(name, act, answer, code) \
    {name, act, AT_IDLE, answer, code, TB_IDLE, 0, 0, SOON, OVER_ALL}, \
    {name, act, AT_RECEIVING, answer, code, TB_RECEIVING, 0, 0, SOON, OVER_ALL}, \
    {name, act, AT_PREPARED, answer, code, TB_PREPARED, 0, 0, SOON, OVER_ALL}

const tb_fault tb_faults[] = {
    ALL_STATES("a flipped bit in the header", act_flip_header, TB_BAD_CRC, OVER_ALL),
    ALL_STATES("no magic", act_magic, TB_BAD_MAGIC, OVER_ALL),
    ALL_STATES("another major version", act_major, TB_BAD_MAJOR, OVER_ALL),
    ALL_STATES("a payload above the cap", act_too_long, TB_BAD_LENGTH, OVER_ALL),
    ALL_STATES("a payload with another hash", act_flip_payload, TB_BAD_HASH, OVER_ALL),
    ALL_STATES("half a payload", half_a_payload, TB_TRUNCATED, OVER_LOOPBACK | OVER_MPI),
    OPEN_STATES("half a payload in a batch", half_in_a_batch, TB_TRUNCATED, OVER_LOOPBACK | OVER_MPI),
    ALL_STATES("half a header", half_a_header, TB_TRUNCATED, OVER_LOOPBACK | OVER_MPI),
    ENDS("half a payload, then gone", act_half_and_gone, 0, 4, GONE, OVER_SOCKET),
    OPEN_STATES("a frame twice", act_repeat, TB_BAD_SEQUENCE, OVER_ALL),
    ALL_STATES("a frame missing", act_gap, TB_BAD_SEQUENCE, OVER_ALL),
    OPEN_STATES("another session", act_session, TB_BAD_SESSION, OVER_ALL),
    ALL_STATES("a type that does not exist", act_type, TB_BAD_TYPE, OVER_ALL),
    ALL_STATES("a message of the worker's", act_direction, TB_BAD_DIRECTION, OVER_ALL),
    OPEN_STATES("a second greeting", act_hello_again, TB_BAD_STATE, OVER_ALL),
    OPEN_STATES("a field out of its range", act_bad_payload, TB_BAD_PAYLOAD, OVER_ALL),
    {"no greeting", act_early, AT_GREETING, TB_ERROR, TB_BAD_STATE, -1, 0, 4, SOON, OVER_ALL},
    {"another base model", act_differs, AT_GREETING, TB_ERROR, TB_DIFFERS, -1, 0, 5, SOON, OVER_ALL},
    ENDS("disconnect", act_close, 0, 3, GONE, OVER_LOOPBACK | OVER_SOCKET),
    ENDS("silence", act_silence, 0, 3, DEAD, OVER_SOCKET | OVER_MPI),
    ENDS_OPEN("BYE", act_bye, TB_BYE, 0, SOON, OVER_ALL),
    {"BYE in place of a greeting", act_bye, AT_GREETING, TB_ERROR, TB_BAD_STATE, -1, 0, 4, SOON, OVER_ALL},
    REFUSED("a chunk out of range", act_out_of_range, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("a chunk whose offset wraps", act_offset_wraps, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("a chunk of no tensor", act_far_tensor, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("an overlapping chunk", act_overlap, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("a doubled chunk", act_doubled, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("bytes into a tensor without elements", act_into_empty, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("a chunk of another version", act_other_version, AT_RECEIVING, TB_BAD_STATE),
    REFUSED("a missing tensor", act_missing, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("NaN in the adapter", act_nan, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("an adapter without effect", act_zero_effect, AT_RECEIVING, TB_BAD_TENSOR),
    REFUSED("another digest", act_digest, AT_RECEIVING, TB_BAD_DIGEST),
    REFUSED("a misnamed tensor", act_misnamed, AT_IDLE, TB_BAD_TENSOR),
    REFUSED("a tensor of another shape", act_other_shape, AT_IDLE, TB_BAD_TENSOR),
    REFUSED("a manifest on the way", act_misnamed, AT_RECEIVING, TB_BAD_STATE),
    REFUSED("a version skipped", act_begin_skip, AT_IDLE, TB_BAD_VERSION),
    REFUSED("INITIAL at version 1", act_initial_later, AT_IDLE, TB_BAD_VERSION),
    REFUSED("W_BEGIN twice", act_begin, AT_RECEIVING, TB_BAD_STATE),
    REFUSED("W_BEGIN when prepared", act_begin, AT_PREPARED, TB_BAD_STATE),
    REFUSED("a chunk out of order", act_chunk, AT_IDLE, TB_BAD_STATE),
    REFUSED("a chunk behind the end", act_chunk, AT_PREPARED, TB_BAD_STATE),
    REFUSED("an end out of order", act_end, AT_IDLE, TB_BAD_STATE),
    REFUSED("a second end", act_end, AT_PREPARED, TB_BAD_STATE),
    REFUSED("COMMIT of nothing", act_commit, AT_IDLE, TB_BAD_STATE),
    REFUSED("COMMIT without PREPARED", act_commit, AT_RECEIVING, TB_BAD_STATE),
    REFUSED("COMMIT of another version", act_commit_other, AT_PREPARED, TB_BAD_STATE),
    REFUSED("abort of nothing", act_abort, AT_IDLE, TB_ABORTED),
    REFUSED("abort while receiving", act_abort, AT_RECEIVING, TB_ABORTED),
    REFUSED("abort when prepared", act_abort, AT_PREPARED, TB_ABORTED),
    OPEN_STATES("a scored request twice", act_score_twice, TB_BAD_STATE, OVER_ALL),
    OPEN_STATES("a certificate of a scored request", act_release_score, TB_BAD_STATE, OVER_ALL),
    OPEN_STATES("scores above the credit", act_score_too_many, TB_NO_CREDIT, OVER_ALL),
    SCORED("a score beside its certificate", act_score_held, BR_E_LIMIT),
    SCORED("a score of the base beside it", act_score_base, BR_OK),
    SCORED("a score when it is aborted", act_score_free, BR_OK),
    SCORED("an abort of a score", act_score_abort, BR_E_ABORTED),
    OF_A_TEXT("an abort behind the end, then a release", act_late_abort, TB_GEN_HELD, 0),
    OF_A_TEXT("a release of what is discarded", act_discard, TB_ERROR, TB_BAD_STATE),
    OF_A_TEXT("a release of nothing", act_release_nothing, TB_ERROR, TB_BAD_STATE),
    OF_A_TEXT("a release twice", act_release_twice, TB_ERROR, TB_BAD_STATE),
    OPEN_STATES("a discard before the end", act_early_discard, TB_BAD_STATE, OVER_ALL),
    REFUSED("full weights by no manifest", act_full, AT_IDLE, TB_BAD_STATE),
    REFUSED("full weights into a transfer", act_full, AT_RECEIVING, TB_BAD_STATE),
    REFUSED("full weights when prepared", act_full, AT_PREPARED, TB_BAD_STATE),
    REFUSED("full weights that are INITIAL", act_full_initial, AT_IDLE, TB_BAD_VERSION),
    {"full weights after COMMIT", act_full, AT_COMMITTING, TB_W_NACK, TB_BUSY, TB_COMMITTING, 1, 0, SOON, OVER_ALL},
    {"abort after COMMIT", act_abort, AT_COMMITTING, TB_W_NACK, TB_BUSY, TB_COMMITTING, 1, 0, SOON, OVER_ALL},
    {"W_BEGIN after COMMIT", act_begin, AT_COMMITTING, TB_W_NACK, TB_BUSY, TB_COMMITTING, 1, 0, SOON, OVER_ALL},
    {"COMMIT twice", act_commit_twice, AT_PREPARED, TB_W_COMMITTED, 0, TB_IDLE, 1, 0, SOON, OVER_ALL},
    {"a tensor without elements", act_empty_tensor, AT_RECEIVING, TB_W_PREPARED, 0, TB_PREPARED, 0, 0, SOON, OVER_ALL},
};

const int tb_fault_count = sizeof tb_faults / sizeof tb_faults[0];

/* ---- playing it ---------------------------------------------------------------------------------------------------------- */

static int answered(rig_peer *p, const tb_fault *f, char *text, size_t n_text) {
    const int64_t begin = tb_now_ms();
    if (!rig_expect_any(p, f->deadline_ms)) {
        if (f->answer == 0 && p->frame)
            return 1; /* the stream's end; MPI has none, and tells nothing */
        snprintf(text, n_text, "%s", p->text);
        return f->answer == 0;
    }
    const int type = p->frame->header.type;
    const int code = type == TB_ERROR ? (int)p->message.error.code : type == TB_W_NACK ? (int)p->message.w_nack.code
                     : type == TB_SCORE_DONE ? (int)p->message.score_done.status : 0;
    if (type == f->answer && code == f->code)
        return 1;
    snprintf(text, n_text, "answered %s, code %d, after %lld ms: expected %s, code %d", tb_type_name((uint32_t)type), code,
             (long long)(tb_now_ms() - begin), tb_type_name((uint32_t)f->answer), f->code);
    return 0;
}

/* Over an answer that leaves the connection open: the state, then BYE. */
static int leave(rig_peer *p, const tb_fault *f, char *text, size_t n_text) {
    if (f->after < 0)
        return 1;
    if (rig_say(p, TB_STATS_REQ, 0, 0, NULL) && rig_expect(p, TB_STATS, 2000)) {
        const uint32_t weights = p->message.stats.weights;
        if (weights != (uint32_t)f->after) {
            snprintf(text, n_text, "state %u afterwards: expected %d", weights, f->after);
            return 0;
        }
        if (act_bye(p) && rig_expect(p, TB_BYE, 2000))
            return 1;
    }
    snprintf(text, n_text, "afterwards: %s", p->text);
    return 0;
}

int tb_fault_play(const tb_fault *fault, tb_transport *t, char *text, size_t n_text) {
    rig_peer p;
    rig_peer_open(&p, t);
    int ok = rig_reach(&p, fault->state) && fault->act(&p);
    if (!ok)
        snprintf(text, n_text, "on the way: %s", p.text);
    ok = ok && (!p.t || (answered(&p, fault, text, n_text) && leave(&p, fault, text, n_text)));
    if (p.t)
        rig_peer_close(&p);
    return ok;
}

int tb_fault_check(const tb_fault *fault, const rig_outcome *outcome, char *text, size_t n_text) {
    const int dropped = fault->live == 0 && (fault->state == AT_RECEIVING || fault->state == AT_PREPARED);
    const int64_t ms_most = fault->deadline_ms + (fault->answer ? 3000 : 0); /* the way to the answer, and from there to the end */
    snprintf(text, n_text, "the worker ended after %lld ms with %d, version %llu, weights in state %u, %d transfers dropped", (long long)outcome->ms,
             outcome->code, (unsigned long long)outcome->live, outcome->weights, outcome->n_abort);
    return outcome->ms < ms_most && outcome->code == fault->exit_code &&
           outcome->live == fault->live && outcome->weights == TB_IDLE && outcome->n_abort == dropped;
}
