/* bi_sample, oracle.      Contract: N-HEAD, N-SAMPLE, N-RNG, P-4
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. One job a row, one slice of scratch a thread.
 * Every filter keeps a prefix of the P-4 order, so what is kept is one bound, and filters in turn are the stricter of two
 * bounds: nothing is ever sorted. Top-p finds its bound by histograms of integer weights, which have no order either. */
#include "bi_oracle.h"

#include "bi_head_row.h"
#include "bi_order.h"
#include "bi_philox.h"

#define NOT_ASKED 0x7fc00000u
#define MINUS_INF 0xff800000u
#define TOP_P_OFF ((uint64_t)1 << BI_SAMPLE_P_BITS)

/* Kept: every entry with a larger z, and those of equal z up to this index. */
typedef struct bound {
    float z;
    int32_t index;
} bound;

/* One row in flight. z and e reach to the end of the last sub-block. */
typedef struct row_work {
    int32_t n_vocab, n_block;
    float *z;
    float *e;                /* exp(RN(z - m)), +0 where dropped */
    bi_head_part *part;      /* (n_block), at the row's temperature */
    uint64_t *block_weight;  /* (n_block) */
    uint64_t weight_sum;     /* W */
    bound kept;
} row_work;

static inline bi_head_row row_softmax(row_work *row, const float *logit, float temperature, int want_dot, int keep_z) {
    float other[BI_HEAD_BLOCK];
    for (int32_t b = 0; b < row->n_block; b++) {
        int32_t first = b * BI_HEAD_BLOCK, n = bi_head_block_size(row->n_vocab, b);
        float *z = keep_z ? row->z + first : other;
        bi_head_z_block(logit + first, n, temperature, z);
        row->part[b] = bi_head_block_part(z, n, want_dot);
    }
    return bi_head_merge(row->part, row->n_block);
}

/* The first k entries of the row in P-4 order, best first. A block is entered only if its maximum beats the worst one. */
static void best_of_row(const row_work *row, int32_t k, int32_t *index) {
    int32_t n = 0;
    for (int32_t b = 0; b < row->n_block; b++) {
        if (n == k && row->part[b].max <= row->z[index[k - 1]])
            continue;
        int32_t first = b * BI_HEAD_BLOCK, end = first + bi_head_block_size(row->n_vocab, b);
        for (int32_t i = first; i < end; i++) {
            if (n == k && row->z[i] <= row->z[index[k - 1]])
                continue;
            int32_t at = n < k ? n++ : k - 1;
            for (; at > 0 && row->z[index[at - 1]] < row->z[i]; at--)
                index[at] = index[at - 1];
            index[at] = i;
        }
    }
}

static inline int keeps(bound kept, float z, int32_t index) {
    return (z > kept.z) | ((z == kept.z) & (index <= kept.index));
}

static inline bound stricter(bound a, bound b) {
    return a.z > b.z || (a.z == b.z && a.index < b.index) ? a : b;
}

static inline uint64_t weight_of(float e) {
    return (uint64_t)(int64_t)BI_MUL(e, (float)((uint64_t)1 << BI_SAMPLE_WEIGHT_BITS));
}

static bound bound_min_p(float max, float min_p) {
    bound kept = {BI_ADD(max, bi_log(min_p)), INT32_MAX};
    return kept;
}

static bound bound_top_k(const row_work *row, int32_t k) {
    int32_t n_tie, i = 0;
    uint32_t kth = bi_order_kth(row->z, row->n_vocab, k, &n_tie);
    for (;; i++)
        if (bi_order_key(row->z[i]) == kth && --n_tie == 0)
            break;
    bound kept = {row->z[i], i};
    return kept;
}

/* The key at which the weights, summed in P-4 order, first reach *target, 1 <= *target <= W; *target becomes what is still
 * missing when only larger keys are counted. Three digits of the key, largest first. */
static uint32_t key_reaching(const row_work *row, uint64_t *target) {
    static const int shift[3] = {21, 10, 0}, width[3] = {11, 11, 10};
    uint32_t prefix = 0, mask = 0;
    for (int pass = 0; pass < 3; pass++) {
        uint64_t sum[BI_ORDER_BINS];
        memset(sum, 0, sizeof sum);
        uint32_t bin_mask = (1u << width[pass]) - 1;
        for (int32_t i = 0; i < row->n_vocab; i++) {
            uint32_t key = bi_order_key(row->z[i]);
            if ((key & mask) == prefix)
                sum[(key >> shift[pass]) & bin_mask] += weight_of(row->e[i]);
        }
        uint32_t bin = bin_mask;
        while (sum[bin] < *target)
            *target -= sum[bin--];
        prefix |= bin << shift[pass];
        mask |= bin_mask << shift[pass];
    }
    return prefix;
}

/* The shortest P-4 prefix whose weight is at least ceil(P * W / 2^32). */
static bound bound_top_p(const row_work *row, uint64_t top_p) {
    unsigned __int128 scaled = (unsigned __int128)top_p * row->weight_sum + (TOP_P_OFF - 1);
    uint64_t target = (uint64_t)(scaled >> BI_SAMPLE_P_BITS);
    uint32_t key = key_reaching(row, &target);
    for (int32_t i = 0;; i++) {
        if (bi_order_key(row->z[i]) != key)
            continue;
        uint64_t weight = weight_of(row->e[i]);
        if (weight >= target) {
            bound kept = {row->z[i], i};
            return kept;
        }
        target -= weight;
    }
}

/* Drops what lies outside the bound, and sums the weights of the rest by sub-block. */
static void sum_weights(row_work *row) {
    row->weight_sum = 0;
    for (int32_t b = 0; b < row->n_block; b++) {
        int32_t first = b * BI_HEAD_BLOCK;
        float *e = row->e + first;
        uint64_t sum = 0;
        for (int32_t i = 0; i < BI_HEAD_BLOCK; i++)
            e[i] = keeps(row->kept, row->z[first + i], first + i) ? e[i] : 0.0f;
        for (int32_t i = 0; i < BI_HEAD_BLOCK; i++)
            sum += weight_of(e[i]);
        row->block_weight[b] = sum;
        row->weight_sum += sum;
    }
}

static void filter_row(row_work *row, const bi_sampling *set, float max) {
    for (int32_t i = 0; i < row->n_block * BI_HEAD_BLOCK; i++)
        row->e[i] = bi_exp(BI_SUB(row->z[i], max));
    /* Without a filter the bound is the last entry: what follows it in the last sub-block is padding. */
    bound kept = {-BI_HEAD_Z_MAX, row->n_vocab - 1};
    if (set->min_p > 0.0f)
        kept = stricter(kept, bound_min_p(max, set->min_p));
    if (set->top_k > 0 && set->top_k < row->n_vocab)
        kept = stricter(kept, bound_top_k(row, set->top_k));
    row->kept = kept;
    sum_weights(row);
    if (set->top_p_q32 < TOP_P_OFF) {
        row->kept = bound_top_p(row, set->top_p_q32);
        sum_weights(row);
    }
}

/* The first id whose inclusive prefix sum exceeds r = floor(u * W / 2^64). */
static int32_t draw(const row_work *row, const bi_sampling *set) {
    uint64_t u = bi_rng_u64(set->seed, (uint32_t)set->position, set->sample, BI_RNG_PURPOSE_SAMPLE, set->uid_hash);
    uint64_t left = (uint64_t)(((unsigned __int128)u * row->weight_sum) >> 64);
    int32_t block = 0;
    for (; left >= row->block_weight[block]; block++)
        left -= row->block_weight[block];
    int32_t i = block * BI_HEAD_BLOCK;
    for (; left >= weight_of(row->e[i]); i++)
        left -= weight_of(row->e[i]);
    return i;
}

/* RN(RN(z - m) - log(RN(W) * 2^-40)). W < 2^61, so the signed conversion is exact in meaning and one instruction. */
static float kept_logprob(const row_work *row, float max, int32_t token) {
    if (!keeps(row->kept, row->z[token], token))
        return bi_f32_of(MINUS_INF);
    float sum = BI_MUL((float)(int64_t)row->weight_sum, 1.0f / (float)((uint64_t)1 << BI_SAMPLE_WEIGHT_BITS));
    return BI_SUB(BI_SUB(row->z[token], max), bi_log(sum));
}

static int32_t choose_greedy(row_work *row, int32_t forced, float *logprob_kept) {
    int32_t best;
    best_of_row(row, 1, &best);
    int32_t token = forced >= 0 ? forced : best;
    *logprob_kept = token == best ? 0.0f : bi_f32_of(MINUS_INF);
    return token;
}

static int32_t choose_drawn(row_work *row, const bi_sampling *set, float max, int32_t forced, float *logprob_kept) {
    filter_row(row, set, max);
    int32_t token = forced >= 0 ? forced : draw(row, set);
    *logprob_kept = kept_logprob(row, max, token);
    return token;
}

static void write_top(const row_work *row, const bi_head_row *softmax, int32_t n_top, bi_top *top) {
    int32_t index[BR_TOP_LOGPROBS_MAX];
    best_of_row(row, n_top, index);
    for (int32_t i = 0; i < n_top; i++) {
        top[i].token = index[i];
        top[i].logprob = bi_head_logprob(softmax, row->z[index[i]]);
    }
}

static void skip_row(const bi_sample_args *a, int32_t t) {
    a->token[t] = -1;
    a->logprob[t] = a->logprob_raw[t] = a->logprob_kept[t] = 0.0f;
    a->entropy[t] = bi_f32_of(NOT_ASKED);
}

static void sample_row(const bi_sample_args *a, int32_t t, row_work *row) {
    const bi_sampling *set = &a->setting[t];
    const float *logit = a->logit + t * a->logit_ld;
    float temperature = bi_head_score_temperature(set->temperature);
    bi_head_row raw = {0.0f, 0.0f, 0.0f};
    if (temperature != 1.0f)
        raw = row_softmax(row, logit, 1.0f, 0, 0);
    bi_head_row softmax = row_softmax(row, logit, temperature, set->entropy, 1);
    if (!bi_is_finite(softmax.log_sum)) { /* a NaN among the logits: integer weights have no value for it */
        skip_row(a, t);
        return;
    }
    int32_t forced = a->forced ? a->forced[t] : -1;
    int32_t token = set->temperature == 0.0f ? choose_greedy(row, forced, &a->logprob_kept[t])
                                             : choose_drawn(row, set, softmax.max, forced, &a->logprob_kept[t]);
    a->token[t] = token;
    a->logprob[t] = bi_head_logprob(&softmax, row->z[token]);
    a->logprob_raw[t] = temperature == 1.0f ? a->logprob[t] : bi_head_logprob(&raw, bi_head_z(logit[token], 1.0f));
    a->entropy[t] = set->entropy ? softmax.entropy : bi_f32_of(NOT_ASKED);
    if (set->n_top > 0)
        write_top(row, &softmax, set->n_top, a->top + (int64_t)t * a->top_ld);
}

typedef struct sample_job {
    bi_ctx *ctx;
    const bi_sample_args *args;
} sample_job;

static void run_job(void *context, int t, int thread) {
    const sample_job *job = context;
    const bi_sample_args *a = job->args;
    if (a->row_fault && a->row_fault[t]) {
        skip_row(a, t);
        return;
    }
    row_work row = {.n_vocab = a->n_vocab, .n_block = bi_head_block_count(a->n_vocab)};
    size_t n_entry = (size_t)row.n_block * BI_HEAD_BLOCK;
    row.z = (float *)bi_thread_scratch(job->ctx, thread, bi_sample_row_bytes(a->n_vocab));
    row.e = row.z + n_entry;
    row.block_weight = (uint64_t *)(row.e + n_entry);
    row.part = (bi_head_part *)(row.block_weight + row.n_block);
    sample_row(a, t, &row);
}

static br_status check_setting(const bi_sample_args *a, int32_t t) {
    const bi_sampling *s = &a->setting[t];
    if (!bi_head_temperature_ok(s->temperature))
        return br_fail(BR_E_ARG, "sample: row %d has temperature %g: expected 0 or 2^-10 to 2^10", t,
                       (double)s->temperature);
    if (!(s->min_p >= 0.0f && s->min_p <= 1.0f) || s->top_k < 0 || s->top_p_q32 < 1 || s->top_p_q32 > TOP_P_OFF)
        return br_fail(BR_E_ARG, "sample: row %d has min_p %g, top_k %d, top_p %llu/2^32: expected 0 to 1, >= 0, 1 to 2^32",
                       t, (double)s->min_p, s->top_k, (unsigned long long)s->top_p_q32);
    if (s->n_top < 0 || s->n_top > BR_TOP_LOGPROBS_MAX || s->n_top > a->n_vocab || (s->n_top > 0 && s->n_top > a->top_ld))
        return br_fail(BR_E_SHAPE, "sample: row %d asks for the best %d of %d tokens in %d places: expected 0 to %d", t,
                       s->n_top, a->n_vocab, a->top_ld, BR_TOP_LOGPROBS_MAX);
    if (a->forced && a->forced[t] >= a->n_vocab)
        return br_fail(BR_E_SHAPE, "sample: row %d forces token %d: expected up to %d", t, a->forced[t], a->n_vocab - 1);
    return BR_OK;
}

br_status BI_FN(bi_sample)(bi_ctx *ctx, const bi_sample_args *a) {
    if (a->n_row < 0 || a->n_vocab < 1 || a->n_vocab > ctx->limits.n_vocab || a->logit_ld < a->n_vocab)
        return br_fail(BR_E_SHAPE,
                       "sample: %d rows of %d logits at stride %lld: expected n_row >= 0, 1 to %d logits, stride >= them",
                       a->n_row, a->n_vocab, (long long)a->logit_ld, ctx->limits.n_vocab);
    for (int32_t t = 0; t < a->n_row; t++)
        BR_TRY(check_setting(a, t));
    sample_job job = {ctx, a};
    br_pool_run(ctx->pool, run_job, &job, a->n_row);
    return BR_OK;
}
