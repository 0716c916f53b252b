/* Opening, and the events that come in: requests, aborts, results. The plans are made in sched_plan.c. */
#include "sched_core.h"

#include "br_hash.h"
#include <string.h>

enum { PAGE_MAX = 1 << 26, SMALL_MAX = 1 << 20 };

static br_status check_range(const char *what, int32_t value, int32_t low, int32_t high) {
    if (value < low || value > high)
        return br_fail(BR_E_ARG, "%s is %d: expected %d to %d", what, value, low, high);
    return BR_OK;
}

static br_status check_options(const sched_options *o) {
    BR_TRY(check_range("n_seq_max", o->n_seq_max, 1, SMALL_MAX));
    BR_TRY(check_range("chunk_tokens", o->chunk_tokens, 1, SMALL_MAX));
    BR_TRY(check_range("n_page", o->n_page, 1, PAGE_MAX));
    BR_TRY(check_range("n_state", o->n_state, 1, SMALL_MAX));
    BR_TRY(check_range("n_queue_max", o->n_queue_max, 1, SMALL_MAX));
    BR_TRY(check_range("n_tok_max", o->n_tok_max, 1, BR_POSITION_MAX));
    BR_TRY(check_range("preempt_every", o->preempt_every, 0, INT32_MAX));
    BR_TRY(check_range("prefix_cache", o->prefix_cache, 0, 1));
    if (o->state_every != -1 && (o->state_every <= 0 || o->state_every % BR_PAGE_TOK != 0))
        return br_fail(BR_E_ARG, "state_every is %d: expected -1 or a multiple of %d", o->state_every, BR_PAGE_TOK);
    return BR_OK;
}

static sched *layout(const sched_options *o, br_arena *arena) {
    sched measured = {.opt = *o}, *s = BR_ARENA_ARRAY(arena, sched, 1);
    sched *at = s ? s : &measured;
    at->opt = *o;
    at->table_ld = sched_block_count(o->n_tok_max);
    kv_layout(&at->kv, arena, o->n_page, o->n_state);
    at->seq = BR_ARENA_ARRAY(arena, sched_seq, o->n_queue_max);
    int32_t *token = BR_ARENA_ARRAY(arena, int32_t, (size_t)o->n_queue_max * (size_t)o->n_tok_max);
    kv_pool_layout(&at->seq_pool, arena, o->n_queue_max);
    kv_ring_layout(&at->waiting, arena, o->n_queue_max);
    at->running = BR_ARENA_ARRAY(arena, int32_t, o->n_seq_max);
    at->table = BR_ARENA_ARRAY(arena, int32_t, (size_t)o->n_seq_max * (size_t)at->table_ld);
    at->state_index = BR_ARENA_ARRAY(arena, int32_t, o->n_seq_max);
    at->path = BR_ARENA_ARRAY(arena, int32_t, at->table_ld + 1);
    at->leader = BR_ARENA_ARRAY(arena, int32_t, o->n_seq_max);
    at->seg = BR_ARENA_ARRAY(arena, sched_seg, o->n_seq_max);
    at->seg_seq = BR_ARENA_ARRAY(arena, int32_t, o->n_seq_max);
    at->page_copy = BR_ARENA_ARRAY(arena, sched_copy, o->n_seq_max);
    at->state_copy = BR_ARENA_ARRAY(arena, sched_copy, o->n_seq_max);
    at->keep = BR_ARENA_ARRAY(arena, sched_copy, o->n_seq_max);
    at->page_held = BR_ARENA_ARRAY(arena, int32_t, o->n_page);
    at->state_held = BR_ARENA_ARRAY(arena, int32_t, o->n_state);
    if (!s)
        return NULL;
    for (int32_t i = 0; i < o->n_queue_max; i++)
        s->seq[i].token = token + (size_t)i * (size_t)o->n_tok_max;
    memset(s->table, 0xff, sizeof *s->table * (size_t)o->n_seq_max * (size_t)s->table_ld);
    memset(s->state_index, 0xff, sizeof *s->state_index * (size_t)o->n_seq_max);
    return s;
}

br_status sched_open(const sched_options *options, sched **out) {
    *out = NULL;
    BR_TRY(check_options(options));
    br_arena arena = {0};
    layout(options, &arena);
    void *block;
    BR_TRY(br_mem_alloc(&block, arena.used, "the scheduler"));
    arena = (br_arena){.base = block, .size = arena.used};
    *out = layout(options, &arena);
    BR_ASSERT((void *)*out == block);
    return BR_OK;
}

void sched_close(sched *s) {
    br_mem_free(s);
}

static sched_seq *seq_by_id(const sched *s, uint64_t id, int32_t *seq) {
    for (int32_t i = 0; i < s->opt.n_queue_max; i++) {
        *seq = i;
        if (s->seq_pool.n_ref[i] && s->seq[i].id == id)
            return &s->seq[i];
    }
    return NULL;
}

/* The last token is never run, so a response of max_new needs max_new - 1 positions after the prompt. */
static br_status check_request(const sched *s, const sched_request *r) {
    int32_t seq;
    if (r->score_from && (r->score_from < 1 || r->score_from >= r->n_prompt || r->max_new))
        return br_fail(BR_E_ARG, "scored from position %d, a prompt of %d tokens and a response of %d: expected 1 to %d, and no response",
                       r->score_from, r->n_prompt, r->max_new, r->n_prompt - 1);
    if (r->n_prompt < 1 || (r->max_new < 1 && !r->score_from))
        return br_fail(BR_E_ARG, "a prompt of %d tokens and a response of %d: expected at least 1 of each", r->n_prompt,
                       r->max_new);
    int64_t n_tok = (int64_t)r->n_prompt + r->max_new;
    if (n_tok > s->opt.n_tok_max)
        return br_fail(BR_E_CAPACITY, "a prompt of %d tokens and a response of %d exceed the longest sequence, %d",
                       r->n_prompt, r->max_new, s->opt.n_tok_max);
    if (sched_block_count((int32_t)n_tok - 1) > s->opt.n_page)
        return br_fail(BR_E_CAPACITY, "a prompt of %d tokens and a response of %d need %d cache pages, there are %d",
                       r->n_prompt, r->max_new, sched_block_count((int32_t)n_tok - 1), s->opt.n_page);
    if (seq_by_id(s, r->id, &seq))
        return br_fail(BR_E_ARG, "request %llu is already held", (unsigned long long)r->id);
    for (int32_t i = 0; i < r->n_prompt; i++)
        if (r->token[i] < 0)
            return br_fail(BR_E_ARG, "token %d of the prompt is %d: expected 0 or more", i, r->token[i]);
    return BR_OK;
}

br_status sched_submit(sched *s, const sched_request *request) {
    BR_TRY(check_request(s, request));
    int32_t seq = kv_pool_take(&s->seq_pool);
    if (seq < 0)
        return br_fail(BR_E_LIMIT, "the queue is full: %d requests", s->opt.n_queue_max);
    sched_seq *q = &s->seq[seq];
    *q = (sched_seq){.id = request->id, .arrival = s->n_arrived++, .root = request->root, .token = q->token,
                     .n_prompt = request->n_prompt, .max_new = request->max_new, .adapter = request->adapter,
                     .n_prefix = (request->score_from ? request->score_from : request->n_prompt) - 1,
                     .n_tok = request->n_prompt - (request->score_from > 0), .slot = -1, .keep = -1};
    memcpy(q->token, request->token, sizeof *q->token * (size_t)q->n_prompt);
    q->prefix_hash = br_hash_chain(q->root, q->token, sizeof *q->token * (size_t)q->n_prefix).lo;
    sched_enqueue(s, seq);
    return BR_OK;
}

/* Almost always the last place, or for a preempted one the first: both ends are near. */
void sched_enqueue(sched *s, int32_t seq) {
    int32_t at = s->waiting.n;
    if (s->waiting.n_in && s->seq[kv_ring_last(&s->waiting)].arrival > s->seq[seq].arrival)
        for (at = kv_ring_first(&s->waiting); s->seq[at].arrival < s->seq[seq].arrival;)
            at = s->waiting.next[at];
    kv_ring_insert(&s->waiting, seq, at);
}

void sched_release(sched *s, int32_t seq) {
    sched_seq *q = &s->seq[seq];
    int32_t *row = sched_row_of(s, q), i = 0;
    while (q->n_block > 0) {
        kv_page_release(&s->kv, row[--q->n_block]);
        row[q->n_block] = -1;
    }
    if (q->keep >= 0)
        kv_state_release(&s->kv, q->keep);
    kv_state_release(&s->kv, s->state_index[q->slot]);
    s->state_index[q->slot] = -1;
    q->keep = q->slot = -1;
    q->pos = q->n_indexed = q->n_row = q->n_sampled = 0;
    while (s->running[i] != seq)
        i++;
    s->n_running--;
    memmove(&s->running[i], &s->running[i + 1], sizeof *s->running * (size_t)(s->n_running - i));
}

br_status sched_abort(sched *s, uint64_t id) {
    int32_t seq;
    sched_seq *q = seq_by_id(s, id, &seq);
    if (!q || q->aborted)
        return br_fail(BR_E_NOT_FOUND, "no request %llu", (unsigned long long)id);
    if (s->in_flight && q->n_row > 0) {
        q->aborted = 1;
        return BR_OK;
    }
    if (q->slot >= 0)
        sched_release(s, seq);
    else
        kv_ring_remove(&s->waiting, seq);
    kv_pool_drop(&s->seq_pool, seq);
    return BR_OK;
}

int32_t sched_table_ld(const sched *s) {
    return s->table_ld;
}

int32_t sched_n_left(const sched *s) {
    return s->opt.n_queue_max - s->seq_pool.n_free;
}

static br_status check_outcomes(const sched *s, const sched_outcome *outcome, int32_t n_outcome) {
    if (!s->in_flight || n_outcome != s->plan.n_seg)
        return br_fail(BR_E_ARG, "%d outcomes: expected one for each of the %d segments of a plan in flight", n_outcome,
                       s->in_flight ? s->plan.n_seg : 0);
    for (int32_t i = 0; i < n_outcome; i++) {
        const sched_seq *q = &s->seq[s->seg_seq[i]];
        sched_verdict verdict = outcome[i].verdict;
        if (verdict != SCHED_GO_ON && verdict != SCHED_END && verdict != SCHED_FAIL)
            return br_fail(BR_E_ARG, "segment %d: verdict %d is unknown", i, (int)verdict);
        if (q->aborted || verdict != SCHED_GO_ON || !s->seg[i].sample)
            continue;
        if (outcome[i].token < 0)
            return br_fail(BR_E_ARG, "segment %d: sampled token %d is negative", i, outcome[i].token);
        if (q->n_tok + 1 >= q->n_prompt + q->max_new)
            return br_fail(BR_E_ARG, "segment %d: request %llu goes on after its last token, %d of %d", i,
                           (unsigned long long)q->id, q->max_new, q->max_new);
    }
    return BR_OK;
}

/* Only blocks that are computed in full and without fault come here, so the index never holds anything else. The state goes
 * to the block that ends where the segment ended. */
static void index_blocks(sched *s, sched_seq *q) {
    int32_t *row = sched_row_of(s, q);
    while (q->n_indexed * BR_PAGE_TOK < q->pos) {
        int32_t begin = q->n_indexed * BR_PAGE_TOK, n = q->pos - begin < BR_PAGE_TOK ? q->pos - begin : BR_PAGE_TOK;
        int32_t parent = q->n_indexed ? row[q->n_indexed - 1] : -1, keep = begin + n == q->pos ? q->keep : -1;
        if (n < BR_PAGE_TOK && keep < 0)
            return;
        row[q->n_indexed] = kv_insert(&s->kv, q->root, parent, q->token + begin, n, row[q->n_indexed], keep);
        if (keep >= 0)
            q->keep = -1;
        if (n < BR_PAGE_TOK)
            return;
        q->n_indexed++;
    }
}

static void apply(sched *s, int32_t seq, const sched_seg *seg, const sched_outcome *outcome) {
    sched_seq *q = &s->seq[seq];
    int ends = q->aborted || outcome->verdict != SCHED_GO_ON;
    q->n_row = 0;
    if (!q->aborted && outcome->verdict != SCHED_FAIL) {
        q->pos = seg->pos + seg->n_tok;
        q->n_done = q->pos > q->n_done ? q->pos : q->n_done;
        if (s->opt.prefix_cache)
            index_blocks(s, q);
    }
    if (ends) {
        sched_release(s, seq);
        kv_pool_drop(&s->seq_pool, seq);
    } else if (seg->sample) {
        q->token[q->n_tok++] = outcome->token;
        q->n_sampled++;
    }
}

br_status sched_result(sched *s, const sched_outcome *outcome, int32_t n_outcome) {
    BR_TRY(check_outcomes(s, outcome, n_outcome));
    for (int32_t i = 0; i < n_outcome; i++)
        apply(s, s->seg_seq[i], &s->seg[i], &outcome[i]);
    s->in_flight = 0;
    return BR_OK;
}

sched_stats sched_stats_of(const sched *s) {
    sched_stats stats = s->stats;
    stats.n_page_evicted = s->kv.n_page_evicted;
    stats.n_state_evicted = s->kv.n_state_evicted;
    stats.n_running = s->n_running;
    stats.n_waiting = s->waiting.n_in;
    stats.n_page_free = s->kv.page.n_free;
    stats.n_page_idle = s->kv.idle.n_in;
    stats.n_state_free = s->kv.state.n_free;
    stats.n_state_kept = s->kv.kept.n_in;
    return stats;
}
