/* The making of a plan: who runs, how many rows, in which pages, from which state; see br_sched.h for the policy.
 *
 * Order matters: pages are handed out oldest first, so that a sequence preempted for room is one that has nothing in the
 * plan yet; states to keep are taken last, since they can be missed. */
#include "sched_core.h"

#include <string.h>

static int32_t left_of(const sched_seq *q) {
    return q->n_tok - q->pos;
}

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

static int32_t larger(int32_t a, int32_t b) {
    return a > b ? a : b;
}

static int is_keep_point(const sched *s, const sched_seq *q, int32_t pos) {
    return pos == q->n_prefix || (s->opt.state_every > 0 && pos % s->opt.state_every == 0);
}

/* Rows up to the next point whose state is kept, so that the live state after the segment is that state. */
static int32_t rows_to_cut(const sched *s, const sched_seq *q) {
    int32_t rows = left_of(q);
    if (!s->opt.prefix_cache)
        return rows;
    if (q->pos < q->n_prefix)
        rows = smaller(rows, q->n_prefix - q->pos);
    if (s->opt.state_every > 0)
        rows = smaller(rows, s->opt.state_every - q->pos % s->opt.state_every);
    return rows;
}

static void preempt(sched *s, int32_t seq) {
    sched_release(s, seq);
    sched_enqueue(s, seq);
}

/* A sequence alone is preempted by force only after it sampled a token since its start: it resumes by a prefill that may
 * take more than preempt_every steps, and would otherwise never get further. */
static void preempt_by_force(sched *s) {
    if (!s->opt.preempt_every || s->stats.n_step % s->opt.preempt_every || !s->n_running)
        return;
    int32_t youngest = s->running[s->n_running - 1];
    if (s->n_running == 1 && s->seq[youngest].n_sampled == 0)
        return;
    preempt(s, youngest);
    s->stats.n_preempt_forced++;
}

/* A tail in the index is immutable: the sequence goes on in a copy, or in the page itself when nobody else holds it and its
 * state is gone or there is no page for a copy. 0: no page. */
static int own_tail(sched *s, int32_t *entry) {
    kv_cache *kv = &s->kv;
    if (kv->node[*entry].state < 0 && kv_take_back(kv, *entry))
        return 1;
    int32_t copy = kv_page_take(kv);
    if (copy < 0)
        return kv_take_back(kv, *entry);
    s->page_copy[s->plan.n_page_copy++] = (sched_copy){.src = *entry, .dst = copy};
    kv_page_release(kv, *entry);
    *entry = copy;
    return 1;
}

/* Gives the sequence pages of its own for its next rows; how many of the n rows have one. */
static int32_t make_writable(sched *s, sched_seq *q, int32_t n) {
    int32_t *row = sched_row_of(s, q), block = q->pos / BR_PAGE_TOK;
    if (block < q->n_block && kv_page_indexed(&s->kv, row[block]) && !own_tail(s, &row[block]))
        return 0;
    while (q->n_block * BR_PAGE_TOK < q->pos + n) {
        int32_t page = kv_page_take(&s->kv);
        if (page < 0)
            break;
        row[q->n_block++] = page;
    }
    return smaller(n, q->n_block * BR_PAGE_TOK - q->pos);
}

/* Plans n rows of a running sequence or as many as there are pages for, at least one: for that one the youngest are
 * preempted, if need be the sequence itself. Alone it always finds pages: sched_submit accepts only what fits alone. */
static void plan_rows(sched *s, int32_t seq, int32_t n) {
    sched_seq *q = &s->seq[seq];
    while ((q->n_row = make_writable(s, q, n)) == 0) {
        int32_t youngest = s->running[s->n_running - 1];
        BR_ASSERT(s->n_running > 1);
        preempt(s, youngest);
        s->stats.n_preempt++;
        if (youngest == seq)
            return;
    }
    s->plan.n_row += q->n_row;
}

/* Decode rows before prefill rows, but one row for the oldest sequence even when it is in its prefill: otherwise a chunk
 * full of younger decoders would hold it up. */
static void plan_running(sched *s) {
    int32_t n_decode = 0, n_decode_max = s->opt.chunk_tokens;
    for (int32_t i = 0; i < s->n_running; i++)
        n_decode += left_of(&s->seq[s->running[i]]) == 1;
    if (s->n_running && left_of(&s->seq[s->running[0]]) > 1)
        n_decode_max--;
    n_decode = smaller(n_decode, n_decode_max);
    int32_t n_prefill = s->opt.chunk_tokens - n_decode;
    for (int32_t i = 0; i < s->n_running; i++) {
        sched_seq *q = &s->seq[s->running[i]];
        int decodes = left_of(q) == 1;
        int32_t n = decodes ? smaller(1, n_decode) : smaller(n_prefill, rows_to_cut(s, q));
        if (n == 0)
            continue;
        plan_rows(s, s->running[i], n);
        *(decodes ? &n_decode : &n_prefill) -= q->n_row;
    }
}

/* A running sequence is about to compute what this request could share. Who is waited for runs, so nobody waits in a circle;
 * an aborted or failed one no longer runs, and the first that waited then computes the prompt itself. Hashes do here: two
 * different prompts with one hash would cost the younger a wait and nothing else. */
static int waits_for_equal_prompt(const sched *s, const sched_seq *q) {
    for (int32_t i = 0; i < s->n_leader; i++)
        if (s->seq[s->leader[i]].prefix_hash == q->prefix_hash)
            return 1;
    return 0;
}

static void note_leader(sched *s, int32_t seq) {
    if (s->opt.prefix_cache && s->seq[seq].pos < s->seq[seq].n_prefix)
        s->leader[s->n_leader++] = seq;
}

/* Pages that running sequences still have to take to compute the tokens they have; a start must leave them. Nobody has yet
 * to take one for a shared tail: something starts only when rows are left, and then every running sequence has its own. */
static int32_t pages_promised(const sched *s) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        n += sched_block_count(s->seq[s->running[i]].n_tok) - s->seq[s->running[i]].n_block;
    return n;
}

/* Holds the pages of the hit and tells whether the rest of the sequence has room, with one page to grow: without that page a
 * sequence just preempted would start again at once and be preempted again. */
static int hold_hit(sched *s, const sched_seq *q, const kv_hit *hit) {
    for (int32_t i = 0; i < hit->n_page; i++)
        kv_page_hold(&s->kv, s->path[i]);
    int32_t n_need = sched_block_count(q->n_tok) - hit->n_tok / BR_PAGE_TOK + 1;
    if (s->n_running == 0 || n_need <= kv_page_available(&s->kv) - pages_promised(s))
        return 1;
    for (int32_t i = hit->n_page - 1; i >= 0; i--)
        kv_page_release(&s->kv, s->path[i]);
    return 0;
}

static void take_slot(sched *s, int32_t seq) {
    int32_t slot = 0, at = s->n_running;
    while (s->state_index[slot] >= 0)
        slot++;
    s->seq[seq].slot = slot;
    for (; at > 0 && s->seq[s->running[at - 1]].arrival > s->seq[seq].arrival; at--)
        s->running[at] = s->running[at - 1];
    s->running[at] = seq;
    s->n_running++;
}

/* The live state of a start: any when nothing was hit, since it is not read before position 0. */
static int32_t start_state(sched *s, const kv_hit *hit) {
    if (hit->n_page == 0)
        return kv_state_take(&s->kv);
    int32_t src, state = kv_state_start(&s->kv, s->path[hit->n_page - 1], &src);
    if (src >= 0)
        s->state_copy[s->plan.n_state_copy++] = (sched_copy){.src = src, .dst = state};
    return state;
}

static void start(sched *s, int32_t seq, const kv_hit *hit) {
    sched_seq *q = &s->seq[seq];
    kv_ring_remove(&s->waiting, seq);
    take_slot(s, seq);
    s->state_index[q->slot] = start_state(s, hit);
    memcpy(sched_row_of(s, q), s->path, sizeof *s->path * (size_t)hit->n_page);
    q->pos = hit->n_tok;
    q->n_block = hit->n_page;
    q->n_indexed = hit->n_tok / BR_PAGE_TOK;
    s->stats.n_hit_tok += hit->n_tok;
    plan_rows(s, seq, smaller(s->opt.chunk_tokens - s->plan.n_row, rows_to_cut(s, q)));
    BR_ASSERT(q->n_row > 0);
    note_leader(s, seq);
}

static void start_waiting(sched *s) {
    int32_t seq = kv_ring_first(&s->waiting), next;
    s->n_leader = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        note_leader(s, s->running[i]);
    for (; seq < s->waiting.n; seq = next) {
        next = s->waiting.next[seq];
        if (s->plan.n_row == s->opt.chunk_tokens || s->n_running == s->opt.n_seq_max || !kv_state_available(&s->kv))
            return;
        const sched_seq *q = &s->seq[seq];
        kv_hit hit = {0};
        if (waits_for_equal_prompt(s, q))
            continue;
        if (s->opt.prefix_cache)
            hit = kv_find(&s->kv, q->root, q->token, larger(q->n_prefix, q->n_done), s->path);
        if (!hold_hit(s, q, &hit))
            return;
        start(s, seq, &hit);
    }
}

static void emit(sched *s, int32_t seq) {
    sched_seq *q = &s->seq[seq];
    int32_t end = q->pos + q->n_row, at = s->plan.n_seg++;
    s->seg_seq[at] = seq;
    s->seg[at] = (sched_seg){.id = q->id, .slot = q->slot, .adapter = q->adapter, .pos = q->pos, .n_tok = q->n_row,
                             .token = q->token + q->pos, .sample = end == q->n_tok};
    if (!s->opt.prefix_cache || !is_keep_point(s, q, end))
        return;
    q->keep = kv_state_take(&s->kv);
    if (q->keep >= 0)
        s->keep[s->plan.n_keep++] = (sched_copy){.src = s->state_index[q->slot], .dst = q->keep};
}

static void emit_all(sched *s) {
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->seq[s->running[i]].n_row > 0 && left_of(&s->seq[s->running[i]]) == 1)
            emit(s, s->running[i]);
    s->plan.n_decode = s->plan.n_seg;
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->seq[s->running[i]].n_row > 0 && left_of(&s->seq[s->running[i]]) > 1)
            emit(s, s->running[i]);
}

const sched_plan *sched_plan_step(sched *s) {
    BR_ASSERT(!s->in_flight);
    s->stats.n_step++;
    s->plan = (sched_plan){.seg = s->seg, .page_copy = s->page_copy, .state_copy = s->state_copy, .keep = s->keep,
                           .table = s->table, .table_ld = s->table_ld, .state_index = s->state_index};
    preempt_by_force(s);
    plan_running(s);
    start_waiting(s);
    emit_all(s);
    s->stats.n_row += s->plan.n_row;
    s->in_flight = 1;
    return &s->plan;
}
