/* Requests under way, the worker's side; see tb_session.h. Layer: trainer_bridge. */
#include "tb_session_parts.h"

#include "br_hash.h"
#include "br_mem.h"

#include <stdio.h>
#include <string.h>

int32_t tb_gen_count(const tb_session *s, gen_phase phase) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->opt.n_request_max; i++)
        n += s->slot[i].phase == phase;
    return n;
}

static gen_slot *find(tb_session *s, uint64_t id) {
    for (int32_t i = 0; i < s->n_used; i++)
        if (s->slot[i].phase != GEN_FREE && s->slot[i].phase != GEN_ORPHAN && s->slot[i].id == id)
            return &s->slot[i];
    return NULL;
}

/* Gives the slot's credit back to the trainer. */
static void release(tb_session *s, gen_slot *g) {
    br_mem_free(g->token);
    tb_buffer_close(&g->request);
    memset(g, 0, sizeof *g);
    while (s->n_used > 0 && s->slot[s->n_used - 1].phase == GEN_FREE)
        s->n_used--;
    tb_channel_grant(&s->channel, 1);
}

static br_digest digest_of(const uint32_t *bits, uint32_t n) {
    return br_hash_bytes(bits, sizeof *bits * (size_t)n);
}

/* What a request is computed with: equal for two exactly when a version of one is a version of the other. */
static uint64_t adapter_of(tb_text name) {
    return name.n == 0 || tb_text_equal(name, tb_text_of("base")) ? 0 : br_hash_u64(name.p, name.n) | 1;
}

static uint64_t live_of(const tb_session *s, const gen_slot *g) {
    return s->track[(g->adapter ? TB_W_ADAPTER : TB_W_FULL) - 1].live;
}

/* Scored log-probs are whole and of one version, or none. */
static void check_scored(gen_slot *g, br_stop_reason stop) {
    if (g->status == BR_OK && stop == BR_STOP_ABORT)
        g->status = br_fail(BR_E_ABORTED, "aborted while it was scored");
    else if (g->status == BR_OK && g->switched)
        g->status = br_fail(BR_E_ABORTED, "version %llu went live while it was scored: ask again", (unsigned long long)g->version);
    else
        return;
    snprintf(g->sentence, sizeof g->sentence, "%s", br_last_error());
}

/* The request has all its tokens; what is left is to send. */
static void ended(tb_session *s, gen_slot *g, br_stop_reason stop, br_status status, const char *sentence) {
    g->stop = stop;
    g->status = status;
    snprintf(g->sentence, sizeof g->sentence, "%s", sentence);
    tb_buffer_close(&g->request);
    s->n_done++;
    if (g->scored) {
        check_scored(g, stop);
        g->phase = GEN_SCORED;
        return;
    }
    g->digest = digest_of(g->logprob, g->n_tok);
    g->phase = GEN_SENDING;
    s->n_tok += g->n_tok;
}

/* ---- messages ------------------------------------------------------------------------------------------------------------ */

/* A free slot, its arrays for n words of tokens and log-probs; the credit says that there is one. */
static gen_slot *take_slot(tb_session *s, uint64_t id, uint32_t n) {
    gen_slot *g = NULL;
    for (int32_t i = 0; i < s->opt.n_request_max && !g; i++)
        if (s->slot[i].phase == GEN_FREE) {
            g = &s->slot[i];
            s->n_used = i < s->n_used ? s->n_used : i + 1;
        }
    BR_ASSERT(g);
    g->id = id;
    if (br_mem_alloc((void **)&g->token, 2 * sizeof(uint32_t) * (size_t)n, "a response") == BR_OK) {
        g->n_max = n;
        g->logprob = g->token + n;
    }
    return g;
}

static int is_taken(tb_session *s, const tb_header *header) {
    if (!find(s, header->subject))
        return 0;
    (void)tb_fail(TB_BAD_STATE, "%s %llu: a request of this id is under way", tb_type_name(header->type), (unsigned long long)header->subject);
    tb_channel_close(&s->channel, TB_BAD_STATE, br_last_error());
    return 1;
}

/* Until the engine takes it, the slot keeps what was asked. */
static void wait_for_engine(tb_session *s, gen_slot *g, const tb_header *header, const void *payload) {
    g->ticket = s->n_ticket++;
    g->phase = GEN_WAITING;
    tb_buffer_add(&g->request, payload, header->n_payload);
    if (!g->token || g->request.failed != BR_OK)
        ended(s, g, BR_STOP_ERROR, BR_E_NOMEM, br_last_error());
    else
        tb_gen_submit_waiting(s);
}

static void take_request(tb_session *s, const tb_header *header, const void *payload, const tb_gen_req *request) {
    if (is_taken(s, header))
        return;
    gen_slot *g = take_slot(s, header->subject, request->max_new);
    g->flags = request->flags;
    g->adapter = adapter_of(request->adapter);
    wait_for_engine(s, g, header, payload);
}

/* Log-probs of this adapter are held back until the trainer has said what its own are. */
static int withholds(const tb_session *s, uint64_t adapter) {
    for (int32_t i = 0; i < s->n_used; i++) {
        const gen_slot *g = &s->slot[i];
        const int is_open = g->phase == GEN_WAITING || g->phase == GEN_RUNNING || g->phase == GEN_SENDING || g->phase == GEN_UNRELEASED;
        if (is_open && g->flags & TB_CERTIFY && g->adapter == adapter)
            return 1;
    }
    return 0;
}

static void take_score(tb_session *s, const tb_header *header, const void *payload, const tb_score_req *request) {
    if (is_taken(s, header))
        return;
    const uint64_t adapter = adapter_of(request->adapter);
    br_status status = BR_OK;
    if (!s->opt.engine->score)
        status = br_fail(BR_E_UNSUPPORTED, "this worker cannot score: not built in");
    else if (withholds(s, adapter))
        status = br_fail(BR_E_LIMIT, "certifying requests of this adapter are not released: nothing is scored under it before");
    gen_slot *g = take_slot(s, header->subject, request->token.n);
    g->scored = 1;
    g->adapter = adapter;
    for (uint32_t i = 0; i < g->n_max; i++)
        g->logprob[i] = BR_UNSCORED;
    if (status == BR_OK)
        wait_for_engine(s, g, header, payload);
    else
        ended(s, g, BR_STOP_ERROR, status, br_last_error());
}

/* Ends at once when the engine does not know it; else the engine's last token ends it. What has ended stays as it is. */
static void stop(tb_session *s, gen_slot *g) {
    if (g->phase == GEN_WAITING)
        ended(s, g, BR_STOP_ABORT, BR_OK, "");
    else if (g->phase == GEN_RUNNING)
        (void)s->opt.engine->cancel(s->opt.engine->context, g->engine_id); /* it may have ended in the step that is in flight */
}

/* GEN_RELEASE and GEN_DISCARD come after the GEN_DONE: a trainer that sends them before breaks the protocol. */
static int is_before_done(tb_session *s, const tb_header *header, const gen_slot *g) {
    if (!g || g->phase == GEN_UNRELEASED || g->phase == GEN_RELEASED)
        return 0;
    (void)tb_fail(TB_BAD_STATE, "%s %llu %s", tb_type_name(header->type), (unsigned long long)header->subject,
                  g->scored ? "of a request that is scored: nothing of it is certified"
                            : "before its GEN_DONE: until then nothing is held");
    tb_channel_close(&s->channel, TB_BAD_STATE, br_last_error());
    return 1;
}

static void take_certificate(tb_session *s, const tb_header *header, gen_slot *g, br_digest certificate) {
    if (is_before_done(s, header, g))
        return;
    if (!g || g->phase == GEN_RELEASED) {
        (void)tb_fail(TB_BAD_STATE, "GEN_RELEASE %llu: no log-probs are held of it: it was released or discarded before, or never certified",
                      (unsigned long long)header->subject);
        tb_session_say_error(s, TB_BAD_STATE, header->subject);
        return;
    }
    g->certificate = certificate;
    g->n_sent = 0;
    g->phase = GEN_RELEASED;
}

static void discard(tb_session *s, const tb_header *header, gen_slot *g) {
    if (!is_before_done(s, header, g) && g)
        release(s, g);
}

/* An abort or a discard of what is not known is no error: it is gone, as it should be. */
void tb_gen_receive(tb_session *s, int64_t now, const tb_header *header, const void *payload, const tb_message *m) {
    gen_slot *g = find(s, header->subject);
    (void)now;
    if (header->type == TB_GEN_REQ) {
        take_request(s, header, payload, &m->gen_req);
    } else if (header->type == TB_SCORE_REQ) {
        take_score(s, header, payload, &m->score_req);
    } else if (header->type == TB_GEN_ABORT && g) {
        stop(s, g);
    } else if (header->type == TB_GEN_RELEASE) {
        take_certificate(s, header, g, m->gen_release.certificate);
    } else if (header->type == TB_GEN_DISCARD) {
        discard(s, header, g);
    }
}

void tb_gen_stop_all(tb_session *s) {
    for (int32_t i = 0; i < s->n_used; i++)
        if (s->slot[i].phase == GEN_WAITING || s->slot[i].phase == GEN_RUNNING)
            stop(s, &s->slot[i]);
}

void tb_gen_orphan_all(tb_session *s) {
    for (int32_t i = 0; i < s->n_used; i++) {
        gen_slot *g = &s->slot[i];
        if (g->phase == GEN_RUNNING) {
            g->phase = GEN_ORPHAN;
            (void)s->opt.engine->cancel(s->opt.engine->context, g->engine_id);
        } else if (g->phase != GEN_FREE && g->phase != GEN_ORPHAN) {
            release(s, g);
        }
    }
}

/* Tokens are counted in runs of equal versions. When there are too many runs the last takes the rest: several make the response
 * uncertified in any case. */
static void book(gen_slot *g, uint32_t n) {
    uint32_t *last = g->run + 3 * (g->n_run ? g->n_run - 1 : 0);
    const uint32_t low = (uint32_t)g->version, high = (uint32_t)(g->version >> 32);
    if (n == 0)
        return;
    if (g->n_run == 0 || ((last[0] != low || last[1] != high) && g->n_run < TB_RUN_MAX)) {
        last = g->run + 3 * g->n_run++;
        last[0] = low;
        last[1] = high;
    }
    last[2] += n;
    g->n_booked += n;
}

/* Tokens that the engine has sampled and still queues are of the version before. One that the commit did not touch, because it runs on
 * other weights or has ended, stays as it is. */
static void switch_version(tb_session *s, gen_slot *g) {
    const tb_engine_ops *engine = s->opt.engine;
    br_versions versions;
    if (engine->versions && engine->versions(engine->context, g->engine_id, &versions) == BR_OK) {
        uint32_t n_sampled = 0;
        if (versions.certified)
            return;
        for (int32_t i = 0; i < versions.n_run; i++)
            n_sampled += (uint32_t)versions.run[i].n_tok;
        book(g, n_sampled > g->n_booked ? n_sampled - g->n_booked : 0);
    }
    g->switched = 1;
    g->version = live_of(s, g);
}

void tb_gen_version(tb_session *s) {
    for (int32_t i = 0; i < s->n_used; i++)
        if (s->slot[i].phase == GEN_RUNNING && s->slot[i].adapter)
            switch_version(s, &s->slot[i]);
}

/* ---- the engine ---------------------------------------------------------------------------------------------------------- */

static gen_slot *first_waiting(tb_session *s) {
    gen_slot *first = NULL;
    for (int32_t i = 0; i < s->n_used; i++)
        if (s->slot[i].phase == GEN_WAITING && (!first || s->slot[i].ticket < first->ticket))
            first = &s->slot[i];
    return first;
}

void tb_gen_submit_waiting(tb_session *s) {
    gen_slot *g;
    tb_message m;
    if (s->paused || s->asleep || s->weights == TB_COMMITTING)
        return;
    while ((g = first_waiting(s))) {
        const tb_engine_ops *engine = s->opt.engine;
        const tb_code code = tb_message_decode(g->scored ? TB_SCORE_REQ : TB_GEN_REQ, g->request.bytes, g->request.n, &m);
        BR_ASSERT(code == TB_OK);
        const br_status status = g->scored ? engine->score(engine->context, &m.score_req, &g->engine_id)
                                           : engine->submit(engine->context, &m.gen_req, &g->engine_id);
        s->engine_full = status == BR_E_LIMIT;
        if (s->engine_full)
            return;
        if (status != BR_OK) {
            ended(s, g, BR_STOP_ERROR, status, br_last_error());
            continue;
        }
        g->phase = GEN_RUNNING;
        g->version = live_of(s, g);
        s->n_running++;
        tb_buffer_close(&g->request);
    }
}

static gen_slot *find_engine(tb_session *s, uint64_t engine_id) {
    for (int32_t i = 0; i < s->n_used; i++) {
        s->expected = s->expected < s->n_used ? s->expected : 0;
        gen_slot *g = &s->slot[s->expected++];
        if ((g->phase == GEN_RUNNING || g->phase == GEN_ORPHAN) && g->engine_id == engine_id)
            return g;
    }
    return NULL;
}

static void take_token(tb_session *s, int64_t now, const br_token *t) {
    gen_slot *g = find_engine(s, t->request);
    const char *sentence = "";
    BR_ASSERT(g);
    if (t->token >= 0 && g->phase == GEN_RUNNING && g->scored) {
        BR_ASSERT(t->position >= 0 && (uint32_t)t->position < g->n_max);
        g->logprob[t->position] = t->logprob;
    } else if (t->token >= 0 && g->phase == GEN_RUNNING) {
        BR_ASSERT(g->n_tok < g->n_max);
        g->unsent_ms = g->n_sent == g->n_tok ? now : g->unsent_ms;
        g->token[g->n_tok] = (uint32_t)t->token;
        g->logprob[g->n_tok++] = t->logprob;
        book(g, g->n_tok > g->n_booked);
    }
    if (!t->last)
        return;
    s->n_running--;
    if (g->phase == GEN_ORPHAN) {
        release(s, g);
        return;
    }
    const br_status status =
        t->stop == BR_STOP_ERROR ? s->opt.engine->error(s->opt.engine->context, t->request, &sentence) : BR_OK;
    ended(s, g, t->stop, status, sentence);
}

/* Without credit the engine rests; without a trainer it only ends what it holds. A full engine makes room when it is polled, also when
 * all that it holds has ended. A failure is waiting to be returned. */
int tb_session_wants_pump(const tb_session *s) {
    if (s->failed != BR_OK)
        return 1;
    return s->channel.phase == TB_OPEN ? (s->n_running > 0 || s->engine_full) && s->channel.may_bytes > 0 : s->n_running > 0;
}

br_status tb_gen_pump(tb_session *s, int64_t now) {
    enum { N = 256 };
    br_token token[N];
    int32_t n = 0, done;
    const br_status status = s->opt.engine->poll(s->opt.engine->context, token, N, &n, &done);
    if (status != BR_OK) {
        tb_session_fail(s, status);
        return status;
    }
    s->engine_full = 0;
    for (int32_t i = 0; i < n; i++)
        take_token(s, now, &token[i]);
    tb_gen_submit_waiting(s);
    tb_gen_flush(s, now);
    return BR_OK;
}

/* ---- what goes out ------------------------------------------------------------------------------------------------------- */

static int has_credit(const tb_session *s) {
    return s->channel.phase == TB_OPEN && s->channel.may_bytes > 0;
}

/* The version of the next token to send, and how many tokens that are here are of the same run. */
static uint64_t next_version(const gen_slot *g, uint32_t *n) {
    uint32_t end = 0, i = 0;
    while (i + 1 < g->n_run && end + g->run[3 * i + 2] <= g->n_sent)
        end += g->run[3 * i++ + 2];
    end += g->run[3 * i + 2];
    *n = (end < g->n_tok ? end : g->n_tok) - g->n_sent;
    return g->run[3 * i] | (uint64_t)g->run[3 * i + 1] << 32;
}

/* A part holds tokens of one version. */
static void send_part(tb_session *s, int64_t now, gen_slot *g) {
    uint32_t n;
    const uint64_t version = next_version(g, &n);
    n = n < TB_PART_MAX ? n : TB_PART_MAX;
    tb_gen_part part = {.first = g->n_sent, .token = {g->token + g->n_sent, n}, .logprob = {g->logprob + g->n_sent, n}};
    part.digest = digest_of(part.logprob.p, n);
    if (g->flags & TB_CERTIFY)
        part.logprob.n = 0;
    tb_channel_send(&s->channel, TB_GEN_PART, version, g->id, &(tb_message){.gen_part = part});
    g->n_sent += n;
    g->unsent_ms = now;
}

static void send_done(tb_session *s, gen_slot *g) {
    const uint32_t *last = g->run + 3 * (g->n_run ? g->n_run - 1 : 0);
    tb_gen_done done = {.stop = g->stop, .status = (uint32_t)g->status, .n_tok = g->n_tok,
                        .certified = g->n_run <= 1 && !g->switched, .digest = g->digest};
    done.version_begin = g->n_run ? g->run[0] | (uint64_t)g->run[1] << 32 : live_of(s, g);
    done.version_end = g->n_run ? last[0] | (uint64_t)last[1] << 32 : live_of(s, g);
    done.runs = (tb_words){g->run, 3 * g->n_run};
    done.text = tb_text_of(g->sentence);
    tb_channel_send(&s->channel, TB_GEN_DONE, done.version_end, g->id, &(tb_message){.gen_done = done});
    if (g->flags & TB_CERTIFY && g->n_tok > 0)
        g->phase = GEN_UNRELEASED;
    else
        release(s, g);
}

static void send_held(tb_session *s, gen_slot *g) {
    const uint32_t left = g->n_tok - g->n_sent, n = left < TB_PART_MAX ? left : TB_PART_MAX;
    const tb_gen_held held = {.first = g->n_sent, .n_tok = g->n_tok, .equal = (uint32_t)br_digest_equal(g->certificate, g->digest),
                              .logprob = {g->logprob + g->n_sent, n}};
    tb_channel_send(&s->channel, TB_GEN_HELD, g->version, g->id, &(tb_message){.gen_held = held});
    g->n_sent += n;
    if (g->n_sent == g->n_tok)
        release(s, g);
}

static void send_scored(tb_session *s, gen_slot *g) {
    const tb_score_done done = {.status = (uint32_t)g->status, .logprob = {g->logprob, g->status == BR_OK ? g->n_max : 0},
                                .text = tb_text_of(g->sentence)};
    tb_channel_send(&s->channel, TB_SCORE_DONE, g->version, g->id, &(tb_message){.score_done = done});
    release(s, g);
}

static void flush_slot(tb_session *s, int64_t now, gen_slot *g) {
    const uint32_t part = (uint32_t)s->opt.part_tok;
    while (has_credit(s) && !g->scored && (g->phase == GEN_RUNNING || g->phase == GEN_SENDING) && g->n_sent < g->n_tok &&
           (g->phase == GEN_SENDING || g->n_tok - g->n_sent >= part || now - g->unsent_ms >= s->opt.flush_ms))
        send_part(s, now, g);
    if (has_credit(s) && g->phase == GEN_SENDING && g->n_sent == g->n_tok)
        send_done(s, g);
    while (has_credit(s) && g->phase == GEN_RELEASED)
        send_held(s, g);
    if (has_credit(s) && g->phase == GEN_SCORED)
        send_scored(s, g);
}

void tb_gen_flush(tb_session *s, int64_t now) {
    for (int32_t i = 0; i < s->n_used; i++)
        flush_slot(s, now, &s->slot[i]);
}
