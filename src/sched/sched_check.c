/* The invariants S-1 .. S-11 of br_sched.h, walked in full. */
#include "sched_core.h"

#include "br_hash.h"
#include <string.h>

#define ID(q) ((unsigned long long)(q)->id)

static br_status check_lists(const sched *s) {
    int32_t n = 0, last = -1;
    for (int32_t i = kv_ring_first(&s->waiting); i < s->waiting.n && n <= s->waiting.n_in; i = s->waiting.next[i], n++) {
        const sched_seq *q = &s->seq[i];
        if (q->slot != -1 || q->n_block || q->pos || q->n_indexed || q->n_row || q->keep != -1 || q->aborted)
            return br_fail(BR_E_MISMATCH, "S-1: waiting request %llu owns something", ID(q));
        if (!s->seq_pool.n_ref[i] || (last >= 0 && s->seq[last].arrival >= q->arrival))
            return br_fail(BR_E_MISMATCH, "S-2: request %llu waits out of order", ID(q));
        last = i;
    }
    for (int32_t i = 0; i < s->n_running; i++) {
        const sched_seq *q = &s->seq[s->running[i]];
        if (!s->seq_pool.n_ref[s->running[i]] || kv_ring_has(&s->waiting, s->running[i]) || q->slot < 0 ||
            (i && s->seq[s->running[i - 1]].arrival >= q->arrival))
            return br_fail(BR_E_MISMATCH, "S-2: request %llu runs out of order, waits too or has no slot", ID(q));
    }
    if (n != s->waiting.n_in || n + s->n_running != sched_n_left(s))
        return br_fail(BR_E_MISMATCH, "S-2: %d waiting and %d running of %d requests held", n, s->n_running,
                       sched_n_left(s));
    return BR_OK;
}

static br_status check_block(const sched *s, const sched_seq *q, int32_t b) {
    const int32_t *row = sched_row_of(s, q);
    int32_t page = row[b];
    if (page < 0 || page >= s->opt.n_page)
        return br_fail(BR_E_MISMATCH, "S-3: block %d of request %llu has page %d", b, ID(q), page);
    const kv_node *node = &s->kv.node[page];
    int is_node = b < q->n_indexed || (b == q->n_block - 1 && node->n_tok > 0);
    if (is_node && ((b < q->n_indexed) != (node->n_tok == BR_PAGE_TOK) || !br_digest_equal(node->root, q->root) ||
                    b * BR_PAGE_TOK + node->n_tok > q->pos || node->parent != (b ? row[b - 1] : -1) ||
                    memcmp(s->kv.token + (size_t)page * BR_PAGE_TOK, q->token + b * BR_PAGE_TOK,
                           sizeof *q->token * (size_t)node->n_tok)))
        return br_fail(BR_E_MISMATCH, "S-4: page %d of the index is not block %d of request %llu", page, b, ID(q));
    if (!is_node && node->n_tok)
        return br_fail(BR_E_MISMATCH, "S-4: block %d of request %llu, page %d, is in the index", b, ID(q), page);
    if (!is_node && s->page_held[page] != 1)
        return br_fail(BR_E_MISMATCH, "S-5: page %d is outside the index and named %d times", page, s->page_held[page]);
    return BR_OK;
}

static br_status check_running(const sched *s, const sched_seq *q) {
    if (q->pos < 0 || q->pos >= q->n_tok || q->n_block < sched_block_count(q->pos) || q->n_block > s->table_ld ||
        q->n_tok >= q->n_prompt + q->max_new)
        return br_fail(BR_E_MISMATCH, "S-3: request %llu computed %d of %d tokens and owns %d pages", ID(q), q->pos,
                       q->n_tok, q->n_block);
    if (s->opt.prefix_cache && q->n_indexed != q->pos / BR_PAGE_TOK)
        return br_fail(BR_E_MISMATCH, "S-4: request %llu computed %d tokens, %d blocks are indexed", ID(q), q->pos,
                       q->n_indexed);
    for (int32_t b = 0; b < s->table_ld; b++) {
        if (b < q->n_block)
            BR_TRY(check_block(s, q, b));
        else if (sched_row_of(s, q)[b] != -1)
            return br_fail(BR_E_MISMATCH, "S-3: request %llu has %d pages and an entry %d", ID(q), q->n_block, b);
    }
    return BR_OK;
}

static br_status check_seg(const sched *s, int32_t i) {
    const sched_seg *seg = &s->seg[i];
    const sched_seq *q = &s->seq[s->seg_seq[i]];
    int32_t end = seg->pos + seg->n_tok;
    if (seg->pos != q->pos || seg->n_tok < 1 || end > q->n_tok || seg->sample != (end == q->n_tok) || seg->id != q->id ||
        seg->slot != q->slot || seg->token != q->token + q->pos || seg->n_tok != q->n_row)
        return br_fail(BR_E_MISMATCH, "S-7: a segment at %d of %d rows for request %llu at %d of %d", seg->pos, seg->n_tok,
                       ID(q), q->pos, q->n_tok);
    if ((i < s->plan.n_decode) != (q->n_tok - q->pos == 1))
        return br_fail(BR_E_MISMATCH, "S-8: segment %d of request %llu is on the wrong side of the decode rows", i, ID(q));
    for (int32_t b = seg->pos / BR_PAGE_TOK; b * BR_PAGE_TOK < end; b++) {
        int32_t page = b < q->n_block ? sched_row_of(s, q)[b] : -1;
        if (page < 0 || s->kv.page.n_ref[page] != 1 || kv_page_indexed(&s->kv, page))
            return br_fail(BR_E_MISMATCH, "S-6: request %llu writes page %d, which is shared or in the index", ID(q), page);
    }
    if (q->keep >= 0 && end != q->n_prefix && (s->opt.state_every <= 0 || end % s->opt.state_every))
        return br_fail(BR_E_MISMATCH, "S-10: request %llu keeps a state at %d", ID(q), end);
    return BR_OK;
}

static br_status check_plan(const sched *s) {
    int32_t n_row = 0, n_planned = 0, n_keep = 0;
    for (int32_t i = 0; i < s->plan.n_seg; i++) {
        BR_TRY(check_seg(s, i));
        n_row += s->seg[i].n_tok;
        n_keep += s->seq[s->seg_seq[i]].keep >= 0;
    }
    for (int32_t i = 0; i < s->n_running; i++)
        n_planned += s->seq[s->running[i]].n_row > 0;
    if (n_row != s->plan.n_row || n_row > s->opt.chunk_tokens || n_planned != s->plan.n_seg)
        return br_fail(BR_E_MISMATCH, "S-8: %d rows of at most %d in %d segments of %d sequences", n_row,
                       s->opt.chunk_tokens, s->plan.n_seg, n_planned);
    if (n_keep != s->plan.n_keep)
        return br_fail(BR_E_MISMATCH, "S-10: %d keeps planned, %d owned", s->plan.n_keep, n_keep);
    if ((s->plan.n_seg == 0 && sched_n_left(s)) || (s->n_running && s->seq[s->running[0]].n_row == 0))
        return br_fail(BR_E_MISMATCH, "S-9: %d requests are left, %d run, and the oldest is not in the plan",
                       sched_n_left(s), s->n_running);
    return BR_OK;
}

/* What sequences hold, counted from their block tables and slots. */
static br_status count_held(const sched *s) {
    memset(s->page_held, 0, sizeof *s->page_held * (size_t)s->opt.n_page);
    memset(s->state_held, 0, sizeof *s->state_held * (size_t)s->opt.n_state);
    for (int32_t i = 0; i < s->n_running; i++) {
        const sched_seq *q = &s->seq[s->running[i]];
        for (int32_t b = 0; b < q->n_block; b++)
            if (sched_row_of(s, q)[b] >= 0)
                s->page_held[sched_row_of(s, q)[b]]++;
        if (s->state_index[q->slot] < 0)
            return br_fail(BR_E_MISMATCH, "K-7: request %llu runs without a state", ID(q));
        s->state_held[s->state_index[q->slot]]++;
        if (q->keep >= 0)
            s->state_held[q->keep]++;
    }
    return BR_OK;
}

br_status sched_check(const sched *s) {
    BR_TRY(check_lists(s));
    BR_TRY(count_held(s));
    for (int32_t i = 0; i < s->n_running; i++)
        BR_TRY(check_running(s, &s->seq[s->running[i]]));
    BR_TRY(kv_check(&s->kv, s->page_held, s->state_held));
    for (int32_t i = 0; !s->opt.prefix_cache && i < s->opt.n_page; i++)
        if (kv_page_indexed(&s->kv, i) || s->kv.page.n_ref[i] > 1)
            return br_fail(BR_E_MISMATCH, "S-11: page %d is shared without a prefix cache", i);
    return s->in_flight ? check_plan(s) : BR_OK;
}
