/* Which log-probs of two files are of one quantity; see foreign_pair.h. Layer: stats. */
#include "foreign_pair.h"

#include <string.h>

static const char *const quantity_name[FOREIGN_QUANTITY_COUNT] = {"full_softmax_over_T", "raw", "processed"};

const char *foreign_quantity_name(foreign_quantity quantity) {
    return quantity_name[quantity];
}

double foreign_temperature(const rollout_seq *seq) {
    return seq->temperature == 0 ? 1 : seq->temperature;
}

static int is_kind(const rollout_meta *meta, foreign_quantity quantity) {
    return strcmp(meta->logprob_kind, quantity_name[quantity]) == 0;
}

const uint32_t *foreign_bits(const rollout_meta *meta, const rollout_seq *seq, foreign_quantity quantity) {
    if (!meta->is_foreign) {
        if (quantity == FOREIGN_PROCESSED)
            return strcmp(meta->producer, "rollout") == 0 ? seq->logprob_kept : NULL; /* a scorer drops no token */
        return quantity == FOREIGN_RAW ? seq->logprob_raw : seq->logprob;
    }
    const int softmax = is_kind(meta, FOREIGN_OVER_T) || is_kind(meta, FOREIGN_RAW);
    const int same = quantity != FOREIGN_PROCESSED && softmax && foreign_temperature(seq) == 1;
    return is_kind(meta, quantity) || same ? seq->logprob : NULL;
}

/* Of every joined pair: both hold it, at one temperature where that enters. *i: the first pair that does not. */
static int is_common(foreign_files *files, foreign_quantity quantity, int64_t *i) {
    foreign_pair pair;
    files->quantity = quantity;
    for (*i = 0; *i < files->join.n_a; ++*i)
        if (foreign_pair_at(files, *i, &pair) &&
            (!pair.bits_a || !pair.bits_b ||
             (quantity != FOREIGN_RAW && foreign_temperature(&pair.a) != foreign_temperature(&pair.b))))
            return 0;
    return 1;
}

static br_status refuse(foreign_files *files) {
    foreign_pair pair;
    int64_t i;
    for (int q = 0; q < FOREIGN_QUANTITY_COUNT; q++) {
        if (!is_common(files, q, &i) && foreign_pair_at(files, i, &pair) && pair.bits_a && pair.bits_b)
            return br_fail(BR_E_ARG, "uid '%.80s', sample %u: temperature %.9g in the first file, %.9g in the second: expected one in both",
                           pair.a.uid, pair.a.sample, (double)pair.a.temperature, (double)pair.b.temperature);
    }
    return br_fail(BR_E_ARG,
                   "the first file (%s) holds log-probs of kind %s, the second (%s) of kind %s: expected one of full_softmax_over_T, raw "
                   "and processed in both",
                   files->meta_a->source, files->meta_a->logprob_kind, files->meta_b->source, files->meta_b->logprob_kind);
}

br_status foreign_files_open(const rollout_reader *a, const rollout_reader *b, foreign_files *out) {
    int64_t i;
    *out = (foreign_files){.a = a, .b = b, .meta_a = rollout_reader_meta(a), .meta_b = rollout_reader_meta(b)};
    BR_TRY(parity_join_open(a, b, &out->join));
    for (int q = 0; q < FOREIGN_QUANTITY_COUNT; q++)
        if (is_common(out, q, &i))
            return BR_OK;
    br_status status = refuse(out);
    foreign_files_close(out);
    return status;
}

void foreign_files_close(foreign_files *files) {
    parity_join_close(&files->join);
}

static int32_t first_masked(const rollout_seq *seq, int32_t n) {
    int32_t t = 0;
    while (t < n && !seq->mask[t])
        t++;
    return t;
}

int foreign_pair_at(const foreign_files *files, int64_t i, foreign_pair *out) {
    const int64_t k = files->join.in_b[i];
    if (k < 0)
        return 0;
    rollout_seq_at(files->a, i, &out->a);
    rollout_seq_at(files->b, k, &out->b);
    out->bits_a = foreign_bits(files->meta_a, &out->a, files->quantity);
    out->bits_b = foreign_bits(files->meta_b, &out->b, files->quantity);
    const int32_t n = out->a.n_tok < out->b.n_tok ? out->a.n_tok : out->b.n_tok;
    for (out->n = 0; out->n < n && out->a.token[out->n] == out->b.token[out->n];)
        out->n++;
    out->begin_a = first_masked(&out->a, out->n);
    out->begin_b = first_masked(&out->b, out->n);
    return 1;
}

int foreign_slot(const foreign_pair *pair, int32_t t) {
    return pair->a.mask[t] || pair->b.mask[t];
}
