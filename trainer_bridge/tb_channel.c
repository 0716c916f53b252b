/* Greeting, sequence, life and credit; see tb_channel.h. Layer: trainer_bridge. */
#include "tb_channel.h"

#include "br_hash.h"

#include <stdio.h>
#include <string.h>

static const int64_t credit_most = (int64_t)1 << 41;

/* ---- what goes out ------------------------------------------------------------------------------------------------------- */

static tb_header *header_at(const tb_channel *c, size_t at) {
    return (tb_header *)(void *)(c->out.bytes + at);
}

static void put(tb_channel *c, tb_type type, uint64_t version, uint64_t subject, const tb_message *message) {
    const size_t at = c->out.n;
    if (!tb_buffer_take(&c->out, sizeof(tb_header)))
        return;
    const size_t begin = c->out.n;
    tb_message_encode(type, message, &c->out);
    const size_t n = c->out.n - begin;
    (void)tb_buffer_take(&c->out, (8 - n % 8) % 8);
    if (c->out.failed != BR_OK)
        c->out.n = at; /* nothing of a message that is not whole */
    else
        *header_at(c, at) = (tb_header){.type = (uint16_t)type, .session = c->session, .version = version, .subject = subject, .n_payload = n};
}

int tb_out_next(const tb_channel *c, size_t *at, tb_header *header, const unsigned char **payload) {
    if (*at >= c->out.n)
        return 0;
    *header = *header_at(c, *at);
    *payload = c->out.bytes + *at + sizeof(tb_header);
    *at += sizeof(tb_header) + (header->n_payload + 7) / 8 * 8;
    return 1;
}

void tb_out_clear(tb_channel *c) {
    c->out.n = 0;
}

void tb_channel_spend(tb_channel *c, tb_type type, uint64_t n_payload) {
    if (tb_spec_of(type)->paid)
        c->may_bytes -= (int64_t)n_payload;
    if (type == TB_GEN_REQ || type == TB_SCORE_REQ)
        c->may_requests--;
}

void tb_channel_send(tb_channel *c, tb_type type, uint64_t version, uint64_t subject, const tb_message *message) {
    const size_t before = c->out.n;
    if (c->phase == TB_CLOSED)
        return;
    put(c, type, version, subject, message);
    if (c->out.failed == BR_OK)
        tb_channel_spend(c, type, header_at(c, before)->n_payload);
    else
        tb_channel_close(c, TB_FAILED, "no memory for a message");
}

void tb_channel_close(tb_channel *c, tb_code code, const char *sentence) {
    tb_message m;
    if (c->phase == TB_CLOSED)
        return;
    memset(&m, 0, sizeof m);
    c->end = code;
    snprintf(c->sentence, sizeof c->sentence, "%s", sentence);
    if (code == TB_OK)
        m.bye.text = tb_text_of(c->sentence);
    else
        m.error = (tb_error){.code = code, .fatal = 1, .text = tb_text_of(c->sentence)};
    if (code != TB_LOST && code != TB_SILENT)
        put(c, code == TB_OK ? TB_BYE : TB_ERROR, 0, 0, &m);
    c->phase = TB_CLOSED;
}

static int refuse(tb_channel *c, tb_code code) {
    tb_channel_close(c, code, br_last_error());
    return 0;
}

/* ---- greeting ------------------------------------------------------------------------------------------------------------ */

static void say_hello(tb_channel *c) {
    const tb_message m = {.hello = c->opt.me};
    tb_channel_send(c, c->opt.me.role == TB_TRAINER ? TB_HELLO : TB_HELLO_ACK, c->opt.me.live_version, 0, &m);
}

void tb_channel_open(tb_channel *c, int64_t now) {
    BR_ASSERT(c->phase == TB_CLOSED);
    c->phase = TB_GREETING;
    c->session = c->opt.session;
    c->expected = 0;
    c->opened_ms = c->heard_ms = now;
    c->may_requests = c->may_bytes = c->peer_requests = c->peer_bytes = 0;
    c->owed_bytes = 0;
    c->end = TB_OK;
    c->sentence[0] = 0;
    tb_out_clear(c);
    c->out.failed = BR_OK;
    if (c->opt.me.role == TB_TRAINER)
        say_hello(c);
}

void tb_channel_free(tb_channel *c) {
    tb_buffer_close(&c->out);
}

/* Every fact that differs, by name, in one sentence. */
static tb_code compare(const tb_hello *me, const tb_hello *peer) {
    const struct {
        const char *name;
        br_digest mine, theirs;
    } fact[] = {
        {"contract", me->contract, peer->contract},
        {"config", me->config, peer->config},
        {"base weights", me->base, peer->base},
        {"tokenizer", me->tokenizer, peer->tokenizer},
        {"ABI", {me->abi, 0}, {peer->abi, 0}},
    };
    const char *const who[] = {"", "trainer", "worker"};
    char text[TB_SENTENCE_BYTES] = "", mine[BR_DIGEST_TEXT_BYTES], theirs[BR_DIGEST_TEXT_BYTES];
    size_t n = 0;
    for (size_t i = 0; i < sizeof fact / sizeof fact[0]; i++) {
        if (br_digest_equal(fact[i].mine, fact[i].theirs))
            continue;
        br_digest_text(fact[i].mine, mine);
        br_digest_text(fact[i].theirs, theirs);
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s %s and %s", n ? ", " : "", fact[i].name, mine, theirs);
    }
    return n ? tb_fail(TB_DIFFERS, "%s and %s do not run the same model; they differ in: %s", who[me->role], who[peer->role], text) : TB_OK;
}

/* Of a trainer that says which adapters it will send. */
static tb_code compare_adapters(const tb_hello *trainer, const tb_hello *worker) {
    const tb_text sent = trainer->alpha, taken = worker->alpha;
    if (!trainer->rank)
        return TB_OK;
    if (!(worker->can & TB_CAN_SWAP))
        return tb_fail(TB_DIFFERS, "the worker has no adapter that can be swapped: start bitroll-worker with such as --adapter policy= "
                       "--swap-rank %u --swap-alpha %.*s", trainer->rank, (int)sent.n, sent.p);
    if (!worker->rank || (worker->rank == trainer->rank && tb_text_equal(sent, taken)))
        return TB_OK;
    return tb_fail(TB_DIFFERS, "the trainer's adapters have rank %u and alpha %.*s, the worker's rank %u and alpha %.*s: start bitroll-worker "
                   "with --swap-rank %u --swap-alpha %.*s, or set r: %u and lora_alpha: %.*s in the trainer's settings",
                   trainer->rank, (int)sent.n, sent.p, worker->rank, (int)taken.n, taken.p,
                   trainer->rank, (int)sent.n, sent.p, worker->rank, (int)taken.n, taken.p);
}

static int take_hello(tb_channel *c, const tb_header *header, const tb_hello *peer) {
    if (peer->role == c->opt.me.role)
        return refuse(c, tb_fail(TB_DIFFERS, "the peer says that it has the same role"));
    c->session = header->session;
    c->peer = *peer;
    memcpy(c->peer_build, peer->build.p, peer->build.n);
    c->peer_build[peer->build.n] = 0;
    c->peer.build.p = c->peer_build;
    c->peer.alpha = tb_text_of(""); /* it lies in the frame */
    const tb_hello *me = &c->opt.me;
    tb_code code = compare(me, peer);
    if (code == TB_OK)
        code = me->role == TB_TRAINER ? compare_adapters(me, peer) : compare_adapters(peer, me);
    if (code != TB_OK)
        return refuse(c, code);
    c->phase = TB_OPEN;
    if (c->opt.me.role == TB_WORKER)
        say_hello(c);
    const tb_message m = {.credit = {.requests = c->grant_requests, .bytes = c->opt.grant_bytes}};
    c->peer_requests = c->grant_requests;
    c->peer_bytes = (int64_t)c->opt.grant_bytes;
    tb_channel_send(c, TB_CREDIT, 0, 0, &m);
    return 0;
}

/* ---- what comes in ------------------------------------------------------------------------------------------------------- */

static tb_code check_frame(const tb_channel *c, const tb_header *header, const void *payload, uint64_t n) {
    const tb_spec *spec = tb_spec_of(header->type);
    const tb_role me = c->opt.me.role;
    const int greets = header->type == (me == TB_WORKER ? TB_HELLO : TB_HELLO_ACK);
    const tb_code code = tb_payload_check(header, payload, n);
    if (code != TB_OK)
        return code;
    if (header->sequence != c->expected)
        return tb_fail(TB_BAD_SEQUENCE, "frame %llu came where %llu was expected: frames are %s", (unsigned long long)header->sequence,
                       (unsigned long long)c->expected, header->sequence < c->expected ? "repeated" : "missing");
    if (!spec)
        return tb_spec_none(header->type);
    if (spec->from & me && spec->from != (TB_TRAINER | TB_WORKER))
        return tb_fail(TB_BAD_DIRECTION, "%s came from the side that receives it", spec->name);
    /* A worker that refuses what came before HELLO knows no session yet. */
    if (header->type == TB_ERROR && c->phase == TB_GREETING && header->session == 0)
        return TB_OK;
    if (header->session == 0 || (c->session && header->session != c->session))
        return tb_fail(TB_BAD_SESSION, "%s is of session %016llx, this one is %016llx", spec->name, (unsigned long long)header->session,
                       (unsigned long long)c->session);
    /* Either side may say why it does not greet, and a worker that it ends; a trainer that said no HELLO has nothing to end as agreed. */
    const int ends = header->type == TB_ERROR || (header->type == TB_BYE && (c->phase == TB_OPEN || me == TB_TRAINER));
    if ((c->phase == TB_GREETING) != greets && !ends)
        return tb_fail(TB_BAD_STATE, c->phase == TB_GREETING ? "%s came before the greeting" : "%s came a second time", spec->name);
    return TB_OK;
}

static tb_code check_credit(tb_channel *c, const tb_header *header) {
    if (tb_spec_of(header->type)->paid) {
        if (c->peer_bytes <= 0)
            return tb_fail(TB_NO_CREDIT, "%s of %llu bytes came without credit", tb_type_name(header->type), (unsigned long long)header->n_payload);
        c->peer_bytes -= (int64_t)header->n_payload;
    }
    if (header->type != TB_GEN_REQ && header->type != TB_SCORE_REQ)
        return TB_OK;
    if (c->peer_requests <= 0)
        return tb_fail(TB_NO_CREDIT, "%s %llu came without credit", tb_type_name(header->type), (unsigned long long)header->subject);
    c->peer_requests--;
    return TB_OK;
}

static void add_credit(tb_channel *c, const tb_credit *credit) {
    c->may_requests = c->may_requests + credit->requests < credit_most ? c->may_requests + credit->requests : credit_most;
    c->may_bytes = c->may_bytes + (int64_t)credit->bytes < credit_most ? c->may_bytes + (int64_t)credit->bytes : credit_most;
}

int tb_channel_receive(tb_channel *c, int64_t now, const tb_header *header, const void *payload, uint64_t n, tb_message *message) {
    tb_code code;
    if (c->phase == TB_CLOSED)
        return 0;
    if ((code = check_frame(c, header, payload, n)) != TB_OK || (code = tb_message_decode(header->type, payload, n, message)) != TB_OK ||
        (code = check_credit(c, header)) != TB_OK)
        return refuse(c, code);
    c->expected++;
    c->heard_ms = now;
    switch (header->type) {
    case TB_HELLO:
    case TB_HELLO_ACK: return take_hello(c, header, &message->hello);
    case TB_HEARTBEAT: return 0;
    case TB_CREDIT: add_credit(c, &message->credit); return 0;
    case TB_BYE:
        tb_channel_close(c, TB_OK, "the peer said BYE");
        return 0;
    case TB_ERROR:
        if (!message->error.fatal)
            return header->session ? 1 : refuse(c, tb_fail(TB_BAD_SESSION, "ERROR is of no session and not fatal"));
        c->end = message->error.code < TB_CODE_COUNT ? (tb_code)message->error.code : TB_FAILED;
        snprintf(c->sentence, sizeof c->sentence, "the peer ended the session: %.*s", (int)message->error.text.n,
                 message->error.text.n ? message->error.text.p : "");
        c->phase = TB_CLOSED;
        return 0;
    default: return 1;
    }
}

void tb_channel_tick(tb_channel *c, int64_t now, int64_t at_ms) {
    const int greets = c->phase == TB_GREETING;
    const int64_t most = greets && c->opt.greet_ms ? c->opt.greet_ms : c->opt.dead_ms;
    char text[128];
    c->heard_ms = at_ms > c->heard_ms ? at_ms : c->heard_ms;
    const int64_t waited = now - (greets ? c->opened_ms : c->heard_ms);
    if (c->phase == TB_CLOSED || waited < most)
        return;
    snprintf(text, sizeof text, greets ? "the peer did not greet within %lld ms" : "nothing was heard of the peer for %lld ms", (long long)waited);
    tb_channel_close(c, TB_SILENT, text);
}

void tb_channel_consumed(tb_channel *c, uint64_t n_bytes) {
    c->owed_bytes += n_bytes;
    if (c->phase != TB_OPEN || 4 * c->owed_bytes < c->opt.grant_bytes)
        return;
    const tb_message m = {.credit = {.bytes = c->owed_bytes}};
    c->peer_bytes += (int64_t)c->owed_bytes;
    c->owed_bytes = 0;
    tb_channel_send(c, TB_CREDIT, 0, 0, &m);
}

void tb_channel_grant(tb_channel *c, uint32_t requests) {
    const tb_message m = {.credit = {.requests = requests}};
    if (c->phase != TB_OPEN || requests == 0)
        return;
    c->peer_requests += requests;
    tb_channel_send(c, TB_CREDIT, 0, 0, &m);
}
