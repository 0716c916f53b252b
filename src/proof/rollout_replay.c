/* The replay of a file's digests; see rollout_replay.h. Layer: proof. */
#include "rollout_replay.h"
#include "receipt.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct replay {
    const rollout_reader *reader;
    const rollout_meta *meta;
    rollout_replay *out;
} replay;

static void fault(replay *r, int64_t seq, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void fault(replay *r, int64_t seq, const char *format, ...) {
    rollout_replay *out = r->out;
    va_list args;
    va_start(args, format);
    if (out->n_line < REPLAY_LINES_MAX)
        vsnprintf(out->line[out->n_line++], REPLAY_LINE_BYTES, format, args);
    va_end(args);
    if (seq >= 0 && out->first_seq < 0)
        out->first_seq = seq;
    out->n_fault++;
}

/* Writes the names of the groups whose digest is not the stored one; returns how many there are. */
static int differing_parts(const rollout_seq *stored, const uint64_t part[ROLLOUT_PART_COUNT], char *names, size_t n) {
    int count = 0;
    size_t used = 0;
    names[0] = 0;
    for (int p = 0; p < ROLLOUT_PART_COUNT; p++) {
        if (stored->part[p] == part[p])
            continue;
        used += (size_t)snprintf(names + used, n - used, "%s%s", count ? ", " : "", receipt_part_name((rollout_part)p));
        count++;
    }
    return count;
}

/* What is wrong with the fields of one sequence; "" when nothing is. Data that changed move the receipt too; a digest that
 * changed alone does not. */
static void describe_fields(const replay *r, const rollout_seq *stored, char *what, size_t n) {
    uint64_t part[ROLLOUT_PART_COUNT];
    char names[320];
    receipt_parts(r->meta, stored, part);
    int n_part = differing_parts(stored, part, names, sizeof names);
    int receipt_holds = br_digest_equal(receipt_of_parts(r->meta, part), stored->receipt);
    int32_t nan_at = receipt_find_nan(stored);
    what[0] = 0;
    if (n_part > 0)
        snprintf(what, n, "%s%s: does not match its digest", receipt_holds ? "stored digest of " : "", names);
    else if (!receipt_holds)
        snprintf(what, n, "receipt, or the contract or weights digest of the file: they do not match");
    else if (nan_at >= 0)
        snprintf(what, n, "log-probs: NaN or no log-prob in a scored slot, position %d", nan_at);
}

static br_digest link_before(const replay *r, int64_t i) {
    return i ? rollout_reader_link(r->reader, i - 1) : rollout_chain_first(r->meta);
}

static void check_seq(replay *r, int64_t i) {
    rollout_seq seq;
    char what[400];
    rollout_seq_at(r->reader, i, &seq);
    describe_fields(r, &seq, what, sizeof what);
    br_digest link = br_hash_chain(link_before(r, i), &seq.receipt, sizeof seq.receipt);
    if (what[0])
        fault(r, i, "sequence %lld (uid '%.80s', sample %u): %s", (long long)i, seq.uid, seq.sample, what);
    else if (!br_digest_equal(link, rollout_reader_link(r->reader, i)))
        fault(r, i, "sequence %lld (uid '%.80s', sample %u): chain: dropped, inserted or reordered here",
              (long long)i, seq.uid, seq.sample);
}

br_status rollout_replay_check(const rollout_reader *reader, rollout_replay *out) {
    replay r = {.reader = reader, .meta = rollout_reader_meta(reader), .out = out};
    int64_t n_seq = rollout_seq_count(reader);
    *out = (rollout_replay){.n_seq = n_seq, .first_seq = -1};
    if (!br_digest_equal(rollout_meta_digest(r.meta), rollout_reader_meta_digest(reader)))
        fault(&r, -1, "attributes: they do not match their digest");
    if (r.meta->n_seq_closed >= 0 && r.meta->n_seq_closed != n_seq)
        fault(&r, -1, "dropped: the file was closed with %lld sequences and holds %lld", (long long)r.meta->n_seq_closed,
              (long long)n_seq);
    for (int64_t i = 0; i < n_seq; i++)
        check_seq(&r, i);
    out->link = link_before(&r, n_seq);
    if (out->n_fault > 0)
        return br_fail(BR_E_MISMATCH, "%s (%lld fault%s in all)", out->line[0], (long long)out->n_fault,
                       out->n_fault == 1 ? "" : "s");
    return BR_OK;
}
