/* The random cases and the hash device; see sim_sched.h. */
#include "sim_sched.h"

#include "br_config.h"
#include "br_hash.h"
#include "test_support.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- drawing a case --------------------------------------------------------------------------------------------------- */

typedef struct dice {
    uint64_t seed, n;
} dice;

static uint64_t roll(dice *d) {
    return test_mix(d->seed + d->n++);
}

static int32_t between(dice *d, int32_t low, int32_t high) {
    return low + (int32_t)(roll(d) % (uint64_t)(high - low + 1));
}

static int32_t pick(dice *d, const int32_t *list, int32_t n) {
    return list[between(d, 0, n - 1)];
}

/* Lengths around the places where something changes: page ends, and prompt_len - 1 on them. */
static int32_t draw_length(dice *d, int32_t high) {
    static const int32_t edge[] = {1, 2, 3, 62, 63, 64, 65, 66, 127, 128, 129, 130, 192, 193};
    int32_t n = between(d, 0, 2) ? pick(d, edge, (int32_t)(sizeof edge / sizeof *edge)) : between(d, 1, high);
    return n < high ? n : high;
}

static void draw_options(dice *d, sim_case *c, int32_t n_tok_max, int crowd) {
    static const int32_t chunk[] = {1, 2, 3, 5, 16, 40, 64, 65, 100, 200};
    static const int32_t every[] = {-1, 64, 64, 128, 192};
    static const int32_t force[] = {0, 0, 0, 0, 0, 1, 2, 3, 5, 11};
    int32_t n_block = (n_tok_max + BR_PAGE_TOK - 2) / BR_PAGE_TOK; /* of the longest sequence but its last token */
    sched_options *o = &c->opt;
    o->n_seq_max = crowd ? 5 : between(d, 1, 5);
    o->chunk_tokens = chunk[between(d, n_tok_max > 100 ? 3 : 0, 9)];
    o->n_page = (n_block ? n_block : 1) + (crowd ? between(d, 0, 5) : between(d, 0, 2) * between(d, 0, 7));
    o->n_state = between(d, crowd ? 4 : 1, o->n_seq_max + 3);
    o->n_queue_max = crowd ? 8 : between(d, 1, 8);
    o->n_tok_max = n_tok_max;
    o->state_every = pick(d, every, 5);
    o->preempt_every = pick(d, force, 10);
    o->prefix_cache = between(d, 0, 4) > 0;
}

/* Prompts come from two streams of few tokens, so that prefixes, whole prompts and even responses coincide often. A crowd is
 * many short prompts at once with long responses: it starts in few pages and then outgrows them. */
static void draw_request(dice *d, const sim_case *c, sim_request *r, const sim_request *before, int crowd) {
    int32_t n_prompt = draw_length(d, crowd && c->opt.n_tok_max > 71 ? 70 : c->opt.n_tok_max - 1);
    uint64_t stream = roll(d) % 2, twist = roll(d) % 4 ? 0 : roll(d);
    r->n_prompt = n_prompt;
    for (int32_t i = 0; i < n_prompt; i++)
        r->token[i] = (int32_t)(test_mix(d->seed ^ stream ^ (uint64_t)(i / 7)) % (uint64_t)c->n_vocab);
    if (twist)
        for (int32_t i = (int32_t)(twist % (uint64_t)n_prompt); i < n_prompt; i += 1 + (int32_t)(twist >> 60))
            r->token[i] = (int32_t)(test_mix(twist + (uint64_t)i) % (uint64_t)c->n_vocab);
    r->root = between(d, 0, 3) == 0;
    r->arrival = crowd ? 0 : between(d, 0, 3) * between(d, 0, 6);
    if (before && between(d, 0, 1)) { /* another sample of the prompt before, perhaps at once */
        memcpy(r->token, before->token, sizeof r->token);
        r->n_prompt = n_prompt = before->n_prompt;
        r->root = before->root;
        r->arrival = before->arrival + (between(d, 0, 2) ? 0 : between(d, 0, 9));
    }
    int32_t room = c->opt.n_tok_max - n_prompt, most = crowd || between(d, 0, 3) == 0 ? room : 8;
    if (c->opt.preempt_every == 1 && most > 30) /* each of its tokens may cost a prefill */
        most = 30;
    r->max_new = between(d, most > 8 ? most / 2 : 1, room < most ? room : most);
    r->text = between(d, 0, 2) ? roll(d) : 0;
    r->abort_step = between(d, 0, 9) ? -1 : r->arrival + between(d, 0, 12);
    r->abort_inside = between(d, 0, 1);
    r->fail_pos = between(d, 0, 9) ? -1 : between(d, 0, n_prompt + r->max_new - 2);
    if (n_prompt > 1 && between(d, 0, 3) == 0) {
        r->score_from = between(d, 1, n_prompt - 1);
        r->max_new = 0;
    } else {
        r->score_from = 0;
    }
}

void sim_case_draw(uint64_t seed, sim_case *out) {
    dice d = {.seed = test_mix(seed) << 16};
    static const int32_t longest[] = {8, 65, 66, 100, 128, 129, 130, 194, 250};
    int crowd = between(&d, 0, 3) == 0;
    *out = (sim_case){.n_vocab = between(&d, 1, 3)};
    draw_options(&d, out, crowd ? between(&d, 150, 250) : pick(&d, longest, 9), crowd);
    out->n_request = between(&d, crowd ? 3 : 1, crowd ? 6 : SIM_REQUEST_MAX);
    for (int32_t i = 0; i < out->n_request; i++)
        draw_request(&d, out, &out->request[i], i ? &out->request[i - 1] : NULL, crowd);
}

/* ---- the device ------------------------------------------------------------------------------------------------------- */

typedef enum phase { COMING, HELD, OVER } phase;

typedef struct mirror { /* what the simulator knows about a request by itself */
    phase phase;
    int32_t started, n_tok;
    int32_t next_row; /* of a scored one: the first that is asked for and not computed */
    int32_t token[SIM_TOK_MAX];
    uint64_t prefix[SIM_TOK_MAX + 1]; /* prefix[i]: hash of its first i tokens under its root */
} mirror;

typedef struct sim {
    const sim_case *c;
    sim_fault fault;
    dice plant; /* where and when to do wrong */
    sched *sched;
    const sched_plan *plan;
    sched_seg seg[SIM_SEQ_MAX];
    int32_t table[SIM_SEQ_MAX * 8], table_before[SIM_SEQ_MAX * 8], state_index[SIM_SEQ_MAX];
    uint64_t cell[SIM_PAGE_MAX][BR_PAGE_TOK], state[SIM_STATE_MAX];
    mirror m[SIM_REQUEST_MAX];
    sched_outcome outcome[SIM_SEQ_MAX];
    sim_report *report;
} sim;

__attribute__((format(printf, 2, 3))) static int found(sim *s, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = snprintf(s->report->sentence, SIM_SENTENCE, "step %d: ", s->report->n_step);
    vsnprintf(s->report->sentence + n, SIM_SENTENCE - (size_t)n, format, args);
    va_end(args);
    return 0;
}

static uint64_t next_hash(uint64_t before, int32_t token) {
    return test_mix(before * 3 + (uint64_t)token);
}

static void append(mirror *m, int32_t token) {
    m->token[m->n_tok] = token;
    m->prefix[m->n_tok + 1] = next_hash(m->prefix[m->n_tok], token);
    m->n_tok++;
}

/* Does wrong at about every third chance, so that faults meet every phase of a run. */
static int plants(sim *s, sim_fault fault) {
    if (s->fault != fault || roll(&s->plant) % 3)
        return 0;
    s->report->n_planted++;
    return 1;
}

static void copy_pages(sim *s) {
    for (int32_t i = 0; i < s->plan->n_page_copy; i++)
        if (!plants(s, SIM_FAULT_SKIP_PAGE_COPY))
            memcpy(s->cell[s->plan->page_copy[i].dst], s->cell[s->plan->page_copy[i].src], sizeof s->cell[0]);
}

static void copy_states(sim *s) {
    for (int32_t i = 0; i < s->plan->n_state_copy; i++)
        if (!plants(s, SIM_FAULT_SKIP_STATE_COPY))
            s->state[s->plan->state_copy[i].dst] = s->state[s->plan->state_copy[i].src];
}

static void keep_states(sim *s) {
    for (int32_t i = 0; i < s->plan->n_keep; i++)
        if (!plants(s, SIM_FAULT_SKIP_KEEP))
            s->state[s->plan->keep[i].dst] = s->state[s->plan->keep[i].src];
}

/* The plan as the device is told it: a copy, so that it can be told wrongly. */
static void receive_plan(sim *s) {
    const sched_plan *plan = s->plan;
    int32_t n_entry = s->c->opt.n_seq_max * plan->table_ld, last = s->c->opt.n_seq_max - 1;
    memcpy(s->seg, plan->seg, sizeof *s->seg * (size_t)plan->n_seg);
    memcpy(s->table, plan->table, sizeof *s->table * (size_t)n_entry);
    memcpy(s->state_index, plan->state_index, sizeof *s->state_index * (size_t)s->c->opt.n_seq_max);
    if (plants(s, SIM_FAULT_STALE_TABLE))
        memcpy(s->table, s->table_before, sizeof *s->table * (size_t)n_entry);
    memcpy(s->table_before, plan->table, sizeof *s->table * (size_t)n_entry);
    if (s->state_index[0] >= 0 && last > 0 && s->state_index[last] >= 0 && plants(s, SIM_FAULT_STATE_INDEX)) {
        s->state_index[0] = plan->state_index[last];
        s->state_index[last] = plan->state_index[0];
    }
    for (int32_t i = 0; i < plan->n_seg; i++) {
        sched_seg *seg = &s->seg[i];
        int32_t *entry = &s->table[seg->slot * plan->table_ld + seg->pos / BR_PAGE_TOK];
        if (s->c->opt.n_page > 1 && plants(s, SIM_FAULT_TABLE_ENTRY))
            *entry = (*entry + 1) % s->c->opt.n_page;
        if (plants(s, SIM_FAULT_POSITION))
            seg->pos++;
    }
}

/* Everything that the rows of a segment would read must be this request's own prefix. */
static int check_prefix(sim *s, const sched_seg *seg) {
    const mirror *m = &s->m[seg->id];
    const int32_t *row = s->table + seg->slot * s->plan->table_ld;
    for (int32_t done = 0; done < seg->pos; done += BR_PAGE_TOK) {
        int32_t n = seg->pos - done < BR_PAGE_TOK ? seg->pos - done : BR_PAGE_TOK, page = row[done / BR_PAGE_TOK];
        if (page < 0 || page >= s->c->opt.n_page)
            return found(s, "request %d: page %d for positions from %d", (int)seg->id, page, done);
        if (memcmp(s->cell[page], &m->prefix[done + 1], sizeof m->prefix[0] * (size_t)n))
            return found(s, "request %d at %d: page %d does not hold its positions from %d", (int)seg->id, seg->pos, page,
                         done);
    }
    for (int32_t b = seg->pos / BR_PAGE_TOK; b * BR_PAGE_TOK < seg->pos + seg->n_tok; b++)
        if (row[b] < 0 || row[b] >= s->c->opt.n_page)
            return found(s, "request %d: page %d for block %d, which it writes", (int)seg->id, row[b], b);
    int32_t state = s->state_index[seg->slot];
    if (state < 0 || state >= s->c->opt.n_state)
        return found(s, "request %d: state %d", (int)seg->id, state);
    if (seg->pos > 0 && s->state[state] != m->prefix[seg->pos])
        return found(s, "request %d: state %d is not its state at %d", (int)seg->id, state, seg->pos);
    return 1;
}

static int check_segment(sim *s, const sched_seg *seg) {
    if (seg->id >= (uint64_t)s->c->n_request || s->m[seg->id].phase != HELD)
        return found(s, "a segment of request %d, which is not held", (int)seg->id);
    const mirror *m = &s->m[seg->id];
    int32_t end = seg->pos + seg->n_tok;
    if (seg->slot < 0 || seg->slot >= s->c->opt.n_seq_max || seg->pos < 0 || seg->n_tok < 1 || end > m->n_tok ||
        seg->sample != (end == m->n_tok) || seg->adapter != s->c->request[seg->id].root)
        return found(s, "request %d: segment %d + %d of %d tokens", (int)seg->id, seg->pos, seg->n_tok, m->n_tok);
    if (s->c->request[seg->id].score_from && seg->pos > m->next_row)
        return found(s, "request %d: row %d is asked for, the segment begins at %d", (int)seg->id, m->next_row, seg->pos);
    if (memcmp(seg->token, m->token + seg->pos, sizeof *m->token * (size_t)seg->n_tok))
        return found(s, "request %d: tokens from %d are not its own", (int)seg->id, seg->pos);
    return check_prefix(s, seg);
}

/* Positions before the first row that is asked for. */
static int32_t prefix_of(const sim_request *r) {
    return (r->score_from ? r->score_from : r->n_prompt) - 1;
}

/* Older requests that never ran may only be passed by while an older one with an equal prompt is on its way. */
static int check_start(sim *s, int32_t id) {
    for (int32_t i = 0; i < s->c->n_request; i++) {
        const sim_request *late = &s->c->request[i];
        int excused = 0;
        if (i >= id || s->m[i].phase != HELD || s->m[i].started)
            continue;
        for (int32_t k = 0; k < i; k++) {
            const sim_request *r = &s->c->request[k];
            excused |= s->m[k].phase == HELD && s->m[k].started && prefix_of(r) == prefix_of(late) && r->root == late->root &&
                       memcmp(r->token, late->token, sizeof r->token[0] * (size_t)prefix_of(r)) == 0;
        }
        if (!excused || !s->c->opt.prefix_cache)
            return found(s, "request %d starts before request %d", id, i);
    }
    return 1;
}

static int check_starts(sim *s) {
    int32_t fresh[SIM_SEQ_MAX], n_fresh = 0;
    for (int32_t i = 0; i < s->plan->n_seg; i++) {
        int32_t id = (int32_t)s->plan->seg[i].id;
        if (!s->m[id].started)
            fresh[n_fresh++] = id;
        s->m[id].started = 1;
    }
    for (int32_t i = 0; i < n_fresh; i++)
        if (!check_start(s, fresh[i]))
            return 0;
    return 1;
}

static void compute(sim *s, const sched_seg *seg) {
    const mirror *m = &s->m[seg->id];
    uint64_t *state = &s->state[s->state_index[seg->slot]];
    uint64_t hash = seg->pos ? *state : m->prefix[0];
    for (int32_t i = 0; i < seg->n_tok; i++) {
        int32_t pos = seg->pos + i, page = s->table[seg->slot * s->plan->table_ld + pos / BR_PAGE_TOK];
        hash = next_hash(hash, seg->token[i]);
        s->cell[page][pos % BR_PAGE_TOK] = hash;
    }
    *state = hash;
}

static void poison(sim *s, const sched_seg *seg) {
    for (int32_t pos = seg->pos; pos < seg->pos + seg->n_tok; pos++)
        s->cell[s->table[seg->slot * s->plan->table_ld + pos / BR_PAGE_TOK]][pos % BR_PAGE_TOK] = 0;
    s->state[s->state_index[seg->slot]] = 0;
}

/* ---- a run ------------------------------------------------------------------------------------------------------------ */

static int fails(const sim *s, const sched_seg *seg) {
    int32_t pos = s->c->request[seg->id].fail_pos;
    return pos >= seg->pos && pos < seg->pos + seg->n_tok;
}

/* What the request says next, and whether it stops there, depend on its own prefix only. */
static void decide(sim *s, const sched_seg *seg, sched_outcome *out) {
    const sim_request *r = &s->c->request[seg->id];
    mirror *m = &s->m[seg->id];
    *out = (sched_outcome){.verdict = SCHED_GO_ON};
    if (fails(s, seg)) {
        out->verdict = plants(s, SIM_FAULT_HIDDEN_FAIL) && !seg->sample ? SCHED_GO_ON : SCHED_FAIL;
        if (out->verdict == SCHED_FAIL) {
            m->phase = OVER;
            s->report->n_failed++;
        }
        return;
    }
    if (r->score_from) {
        m->next_row = seg->pos + seg->n_tok > m->next_row ? seg->pos + seg->n_tok : m->next_row;
        out->verdict = m->next_row == r->n_prompt - 1 ? SCHED_END : SCHED_GO_ON;
        m->phase = out->verdict == SCHED_END ? OVER : HELD;
        s->report->n_ended += out->verdict == SCHED_END;
        return;
    }
    if (!seg->sample)
        return;
    uint64_t draw = test_mix(m->prefix[m->n_tok] ^ r->text);
    out->token = (int32_t)(draw % (uint64_t)s->c->n_vocab);
    append(m, out->token);
    if (m->n_tok == r->n_prompt + r->max_new || (draw >> 32) % 128 == 0) {
        out->verdict = SCHED_END;
        m->phase = OVER;
        s->report->n_ended++;
    } else if (plants(s, SIM_FAULT_LOST_TOKEN)) {
        out->token++;
    }
}

static int run_plan(sim *s) {
    int32_t n_row = 0;
    if (!check_starts(s))
        return 0;
    receive_plan(s);
    int late = s->plan->n_page_copy && plants(s, SIM_FAULT_LATE_COPY);
    int early = s->plan->n_keep && plants(s, SIM_FAULT_EARLY_KEEP);
    if (!late)
        copy_pages(s);
    copy_states(s);
    if (early)
        keep_states(s);
    for (int32_t i = 0; i < s->plan->n_seg; i++) {
        if (!check_segment(s, &s->seg[i]))
            return 0;
        n_row += s->seg[i].n_tok;
    }
    if (n_row != s->plan->n_row || n_row > s->c->opt.chunk_tokens)
        return found(s, "%d rows planned, %d counted, at most %d allowed", s->plan->n_row, n_row, s->c->opt.chunk_tokens);
    for (int32_t i = 0; i < s->plan->n_seg; i++)
        compute(s, &s->seg[i]);
    for (int32_t i = 0; i < s->plan->n_seg; i++)
        if (fails(s, &s->seg[i]))
            poison(s, &s->seg[i]);
    if (late)
        copy_pages(s);
    if (!early)
        keep_states(s);
    return 1;
}

static void hash_plan(sim *s) {
    const sched_plan *p = s->plan;
    uint64_t hash = s->report->plan_hash;
    for (int32_t i = 0; i < p->n_seg; i++)
        hash = test_mix(hash ^ (p->seg[i].id << 40 | (uint64_t)p->seg[i].slot << 32 | (uint64_t)p->seg[i].pos << 16 |
                                (uint64_t)p->seg[i].n_tok));
    hash ^= br_hash_u64(p->page_copy, sizeof *p->page_copy * (size_t)p->n_page_copy);
    hash = test_mix(hash) ^ br_hash_u64(p->state_copy, sizeof *p->state_copy * (size_t)p->n_state_copy);
    hash = test_mix(hash) ^ br_hash_u64(p->keep, sizeof *p->keep * (size_t)p->n_keep);
    s->report->plan_hash = hash ^ br_hash_u64(p->table, sizeof *p->table * (size_t)(p->table_ld * s->c->opt.n_seq_max));
}

static int submit_due(sim *s, int32_t *next) {
    for (; *next < s->c->n_request && s->c->request[*next].arrival <= s->report->n_step; ++*next) {
        const sim_request *r = &s->c->request[*next];
        mirror *m = &s->m[*next];
        uint64_t root = s->fault == SIM_FAULT_SHARED_ROOT ? 0 : (uint64_t)r->root;
        sched_request request = {.id = (uint64_t)*next, .token = r->token, .n_prompt = r->n_prompt, .max_new = r->max_new,
                                 .score_from = r->score_from, .adapter = r->root, .root = {.lo = 7, .hi = root}};
        br_status status = sched_submit(s->sched, &request);
        if (status == BR_E_LIMIT && sched_n_left(s->sched) == s->c->opt.n_queue_max)
            return 1;
        if (status != BR_OK)
            return found(s, "request %d is refused: %s", *next, br_last_error());
        s->report->n_planted += s->fault == SIM_FAULT_SHARED_ROOT && r->root;
        m->phase = HELD;
        m->n_tok = 0;
        m->prefix[0] = test_mix((uint64_t)r->root + 99);
        m->next_row = prefix_of(r);
        for (int32_t i = 0; i < r->n_prompt - (r->score_from > 0); i++)
            append(m, r->token[i]);
    }
    return 1;
}

static int check_inside(sim *s) {
    return sched_check(s->sched) == BR_OK || found(s, "%s", br_last_error());
}

/* abort_step counts from when it may be too late: a request over by then is not known any more. */
static int abort_due(sim *s, int inside) {
    for (int32_t i = 0; i < s->c->n_request; i++) {
        const sim_request *r = &s->c->request[i];
        if (r->abort_step != s->report->n_step || r->abort_inside != inside || s->m[i].phase == COMING)
            continue;
        br_status status = sched_abort(s->sched, (uint64_t)i);
        if (status != (s->m[i].phase == HELD ? BR_OK : BR_E_NOT_FOUND))
            return found(s, "abort of request %d: %s", i, br_status_name(status));
        s->report->n_aborted += s->m[i].phase == HELD;
        s->m[i].phase = OVER;
        if (!check_inside(s))
            return 0;
    }
    return 1;
}

static int step(sim *s) {
    if (!abort_due(s, 0))
        return 0;
    s->plan = sched_plan_step(s->sched);
    hash_plan(s);
    if (!check_inside(s) || !run_plan(s) || !abort_due(s, 1))
        return 0;
    for (int32_t i = 0; i < s->plan->n_seg; i++) {
        s->outcome[i] = (sched_outcome){.verdict = SCHED_GO_ON};
        if (s->m[s->seg[i].id].phase == HELD)
            decide(s, &s->seg[i], &s->outcome[i]);
    }
    if (sched_result(s->sched, s->outcome, s->plan->n_seg) != BR_OK)
        return found(s, "%s", br_last_error());
    return check_inside(s);
}

/* Far above what any schedule needs, so a run that reaches it makes no progress. */
static int32_t step_bound(const sim_case *c) {
    int32_t bound = 100;
    for (int32_t i = 0; i < c->n_request; i++) {
        const int32_t n_new = c->request[i].score_from ? 1 : c->request[i].max_new;
        bound += 4 * (c->request[i].n_prompt + n_new) * (c->opt.preempt_every ? n_new : 1);
    }
    return bound;
}

static int run(sim *s) {
    int32_t next = 0, bound = step_bound(s->c);
    while (next < s->c->n_request || sched_n_left(s->sched)) {
        if (!submit_due(s, &next) || !step(s))
            return 0;
        if (++s->report->n_step > bound)
            return found(s, "no end in sight: %d requests left", sched_n_left(s->sched));
    }
    for (int32_t i = 0; i < s->c->n_request; i++)
        if (s->m[i].phase != OVER)
            return found(s, "request %d is lost", i);
    return 1;
}

int sim_case_run(const sim_case *c, uint64_t seed, sim_fault fault, sim_report *report) {
    static sim s; /* cells of the run before are as good as any: nothing may be read that was not written */
    *report = (sim_report){0};
    s.c = c;
    s.fault = fault;
    s.plant = (dice){.seed = test_mix(seed ^ 0xf001)};
    s.report = report;
    memset(s.m, 0, sizeof s.m);
    if (sched_open(&c->opt, &s.sched) != BR_OK)
        return found(&s, "%s", br_last_error());
    int ok = run(&s);
    report->stats = sched_stats_of(s.sched);
    sched_close(s.sched);
    return ok;
}
