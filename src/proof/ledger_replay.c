/* The replay of a training run's ledger; see ledger_replay.h. Layer: proof. */
#include "ledger_replay.h"
#include "br_mem.h"
#include "ledger_repair.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct replay {
    const ledger_reader *reader;
    const br_ledger_record *counted;
    ledger_replay *out;
    uint8_t link[BR_LEDGER_LINK_BYTES]; /* the one that the next record follows, repaired */
    int64_t last_step;           /* number of the record before */
    int64_t seq_begin, tok_begin; /* of the next step, repaired */
} replay;

static void fault(replay *r, int64_t seq, int64_t pos, const char *format, ...) __attribute__((format(printf, 4, 5)));

static void fault(replay *r, int64_t seq, int64_t pos, const char *format, ...) {
    ledger_replay *out = r->out;
    va_list args;
    va_start(args, format);
    if (out->n_line < LEDGER_REPLAY_LINES_MAX)
        vsnprintf(out->line[out->n_line++], LEDGER_REPLAY_LINE_BYTES, format, args);
    va_end(args);
    if (out->n_fault++ == 0) {
        out->first_seq = seq;
        out->first_pos = pos;
    }
}

/* ---- the run ---------------------------------------------------------------------------------------------------------------- */

static void check_run(replay *r) {
    ledger_run run = *ledger_run_of(r->reader);
    ledger_flip flip;
    int in_link;
    memcpy(r->link, run.link, sizeof r->link);
    if (ledger_link_run(&run, r->link) == BR_OK && memcmp(r->link, run.link, sizeof r->link) != 0) {
        const uint8_t zero[BR_LEDGER_LINK_BYTES] = {0};
        if (!ledger_flip_in_record(zero, &run, LEDGER_RUN_BYTES, run.link, ledger_run_field, &flip, &in_link)) {
            fault(r, -1, -1, "run: its record does not match /run/link");
            memcpy(r->link, run.link, sizeof r->link);
            return;
        }
        fault(r, -1, -1, "run: %s: bit %d was flipped", flip.dataset, flip.bit);
        (void)ledger_link_run(&run, r->link);
    }
    const char *config = ledger_config_of(r->reader);
    const size_t n = (size_t)ledger_run_of(r->reader)->n_config;
    if (run.n_config != (int64_t)n || br_digest_equal(br_hash_bytes(config, n), run.config_digest))
        return;
    const int64_t bit = ledger_flip_in_bytes(config, n, run.config_digest);
    if (bit >= 0)
        fault(r, -1, -1, "run: /run/config: byte %lld: bit %d was flipped", (long long)(bit / 8), (int)(bit % 8));
    else
        fault(r, -1, -1, "run: /run/config does not match its digest");
}

/* ---- the chain -------------------------------------------------------------------------------------------------------------- */

/* Does the record follow another link of the file than the one before it? */
static int64_t find_other_link(const replay *r, int64_t i, const br_ledger_record *record) {
    uint8_t made[BR_LEDGER_LINK_BYTES];
    br_ledger_record other;
    for (int64_t j = -1; j < ledger_step_count(r->reader); j++) {
        if (j >= 0)
            ledger_record_at(r->reader, j, &other);
        if (j != i - 1 && ledger_link_record(j < 0 ? ledger_run_of(r->reader)->link : other.link, record, made) == BR_OK &&
            memcmp(made, record->link, sizeof made) == 0)
            return j;
    }
    return -2;
}

/* Repairs a flipped bit of the record; 0 when it is not the one that the chain holds. */
static int check_link(replay *r, int64_t i, br_ledger_record *record) {
    uint8_t before[BR_LEDGER_LINK_BYTES], made[BR_LEDGER_LINK_BYTES];
    ledger_flip flip;
    int in_link;
    memcpy(before, r->link, sizeof before);
    memcpy(r->link, record->link, sizeof r->link);
    if (ledger_link_record(before, record, made) == BR_OK && memcmp(made, record->link, sizeof made) == 0)
        return 1;
    if (ledger_flip_in_record(before, record, LEDGER_RECORD_BYTES, record->link, ledger_record_field, &flip, &in_link)) {
        fault(r, -1, -1, "step %lld: %s: bit %d was flipped", (long long)record->step, flip.dataset, flip.bit);
        if (in_link)
            memcpy(r->link, made, sizeof r->link);
        return 1;
    }
    const int64_t other = find_other_link(r, i, record);
    if (other >= -1)
        fault(r, -1, -1, "step %lld, record %lld: chained behind record %lld, not %lld: steps were dropped, inserted or reordered here",
              (long long)record->step, (long long)i + 1, (long long)other + 1, (long long)i);
    else
        fault(r, -1, -1, "step %lld: its record does not match its link: one of them was changed, or a step before it was dropped or inserted",
              (long long)record->step);
    return 0;
}

/* ---- sequences -------------------------------------------------------------------------------------------------------------- */

typedef struct place {
    int64_t step, in_step, seq; /* seq: of the file */
    const ledger_seq *at;
} place;

static void seq_fault(replay *r, const place *p, int64_t pos, const char *what) {
    char where[40] = "";
    if (pos >= 0)
        snprintf(where, sizeof where, ", position %lld", (long long)pos);
    fault(r, p->seq, pos, "step %lld, sequence %lld (uid '%.80s', sample %u)%s: %s", (long long)p->step, (long long)p->in_step, p->at->uid,
          p->at->sample, where, what);
}

static int leaf_holds(const ledger_seq *seq, int leaf) {
    return br_digest_equal(ledger_leaf_of(seq, leaf), seq->leaf[leaf]);
}

/* A flipped bit of the sequence's end in the file takes tokens away or adds some: the leaf of the tokens tells. */
static void repair_end(replay *r, const place *p, ledger_seq *seq, int64_t *end) {
    const int64_t begin = r->tok_begin;
    char what[80];
    const br_digest made = ledger_leaf_of(seq, LEDGER_LEAF_TOKENS);
    if (br_digest_equal(made, seq->leaf[LEDGER_LEAF_TOKENS]) || ledger_one_bit(&made, &seq->leaf[LEDGER_LEAF_TOKENS], sizeof made) >= 0)
        return;
    for (int bit = 0; bit < 40; bit++) {
        const int64_t other = *end ^ (int64_t)1 << bit;
        ledger_seq moved;
        if (other <= begin || other > ledger_tok_count(r->reader) || other - begin > LEDGER_SEQ_TOK_MAX)
            continue;
        ledger_seq_at(r->reader, p->seq, begin, other, &moved);
        if (!leaf_holds(&moved, LEDGER_LEAF_TOKENS))
            continue;
        *seq = moved;
        *end = other;
        snprintf(what, sizeof what, "/seq/offset behind it: bit %d was flipped", bit);
        seq_fault(r, p, -1, what);
        return;
    }
}

/* Where an array differs from the one that should be equal to it; -1: nowhere. */
static int64_t odd_slot(const ledger_seq *seq, int leaf) {
    const int array = leaf - LEDGER_LEAF_ARRAY;
    for (int32_t t = 0; array >= 0 && t < seq->n_tok; t++)
        if (seq->logprob[array][t] != seq->logprob[(array + 1) % LEDGER_ARRAY_COUNT][t])
            return t;
    return -1;
}

/* 1 when the leaf is that of the bytes. A stored leaf that was flipped is repaired, for the digests over it. */
static int check_leaf(replay *r, const place *p, ledger_seq *seq, int leaf) {
    static const char *const name[LEDGER_LEAF_COUNT] = {"fields of /seq", "prompt length, ids or mask", "/tokens/rollout", "/tokens/again",
                                                        "/tokens/update"};
    char what[160];
    ledger_flip flip;
    const br_digest made = ledger_leaf_of(seq, leaf);
    const int32_t bit = ledger_one_bit(&made, &seq->leaf[leaf], sizeof made);
    if (br_digest_equal(made, seq->leaf[leaf]))
        return 1;
    if (bit >= 0) {
        snprintf(what, sizeof what, "/seq/leaf, the digest of %s: bit %d was flipped", name[leaf], (int)(8 * sizeof made) * leaf + bit);
        seq->leaf[leaf] = made;
        seq_fault(r, p, -1, what);
    } else if (ledger_flip_in_leaf(seq, leaf, &flip)) {
        snprintf(what, sizeof what, "%s: bit %d was flipped", flip.dataset, flip.bit);
        seq_fault(r, p, flip.position, what);
    } else {
        snprintf(what, sizeof what, "%s: changed, and not in a single bit", name[leaf]);
        seq_fault(r, p, odd_slot(seq, leaf), what);
    }
    return 0;
}

/* Returns whether all of it holds. */
static int check_seq(replay *r, const place *p, ledger_seq *seq) {
    int64_t end = ledger_offset(r->reader)[p->seq + 1];
    int holds = 1;
    if (end < r->tok_begin)
        end = r->tok_begin;
    ledger_seq_at(r->reader, p->seq, r->tok_begin, end, seq);
    const int64_t stored_end = end;
    repair_end(r, p, seq, &end);
    r->tok_begin = end;
    for (int leaf = 0; leaf < LEDGER_LEAF_COUNT; leaf++)
        holds &= check_leaf(r, p, seq, leaf);
    if (holds && ledger_seq_check(seq) != BR_OK) {
        seq_fault(r, p, -1, br_last_error());
        holds = 0;
    }
    return holds && end == stored_end;
}

/* ---- steps ------------------------------------------------------------------------------------------------------------------ */

/* Of numbers that a file may hold: they wrap. */
static int64_t sum_of(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

/* The end of a step's sequences: what its record says, where that can be trusted. */
static int64_t end_of_step(replay *r, int64_t i, const br_ledger_record *record, int trusted) {
    const int64_t stored = ledger_seq_begin(r->reader)[i + 1], said = sum_of(r->seq_begin, record->n_seq);
    if (!trusted || stored == said)
        return stored < r->seq_begin ? r->seq_begin : stored;
    const int32_t bit = ledger_one_bit(&stored, &said, sizeof stored);
    if (bit >= 0)
        fault(r, -1, -1, "step %lld: /step/seq_begin behind it: bit %d was flipped", (long long)record->step, bit);
    else
        fault(r, -1, -1, "step %lld: /step/seq_begin behind it is %lld: its record says %lld", (long long)record->step, (long long)stored,
              (long long)said);
    return said >= r->seq_begin && said <= ledger_seq_count(r->reader) ? said : stored;
}

static void check_digests(replay *r, const ledger_seq *seq, int64_t n, br_ledger_record *record) {
    static const char *const name[LEDGER_LEAF_COUNT] = {"/step/sequences", "/step/tokens", "/step/rollout", "/step/again", "/step/update"};
    br_ledger_record made;
    ledger_fill_digests(seq, n, &made);
    for (int leaf = 0; leaf < LEDGER_LEAF_COUNT; leaf++)
        if (!br_digest_equal(*ledger_record_digest(&made, leaf), *ledger_record_digest(record, leaf)))
            fault(r, -1, -1, "step %lld: %s is not the digest of its sequences", (long long)record->step, name[leaf]);
}

static void check_counts(replay *r, const br_ledger_record *counted, const br_ledger_record *record) {
    for (size_t at = offsetof(br_ledger_record, n_seq); at < LEDGER_RECORD_BYTES; at += sizeof(uint64_t)) {
        uint64_t have, want;
        size_t in_row;
        memcpy(&have, (const char *)record + at, sizeof have);
        memcpy(&want, (const char *)counted + at, sizeof want);
        if (have != want)
            fault(r, -1, -1, "step %lld: %s holds %016llx: recomputed it is %016llx", (long long)record->step, ledger_record_field(at, &in_row),
                  (unsigned long long)have, (unsigned long long)want);
    }
}

static br_status check_step(replay *r, int64_t i) {
    br_ledger_record record;
    ledger_seq *seq;
    ledger_record_at(r->reader, i, &record);
    const int trusted = check_link(r, i, &record);
    if (trusted && i > 0 && record.step != sum_of(r->last_step, 1))
        fault(r, -1, -1, "step %lld follows step %lld: expected step %lld", (long long)record.step, (long long)r->last_step,
              (long long)sum_of(r->last_step, 1));
    r->last_step = record.step;
    int holds = r->seq_begin == ledger_seq_begin(r->reader)[i] && r->tok_begin == ledger_offset(r->reader)[r->seq_begin];
    const int64_t begin = r->seq_begin, end = end_of_step(r, i, &record, trusted);
    holds &= end == ledger_seq_begin(r->reader)[i + 1];
    BR_TRY(br_mem_alloc((void **)&seq, (size_t)(end - begin) * sizeof *seq, "the sequences of a step"));
    for (int64_t k = 0; k < end - begin; k++) {
        const place p = {.step = record.step, .in_step = k, .seq = begin + k, .at = &seq[k]};
        holds &= check_seq(r, &p, &seq[k]);
    }
    r->seq_begin = end;
    if (trusted)
        check_digests(r, seq, end - begin, &record);
    if (trusted && holds)
        check_counts(r, &r->counted[i], &record);
    br_mem_free(seq);
    return BR_OK;
}

br_status ledger_replay_check(const ledger_reader *reader, const br_ledger_record *counted, ledger_replay *out) {
    replay r = {.reader = reader, .counted = counted, .out = out};
    memset(out, 0, sizeof *out);
    out->first_seq = out->first_pos = -1;
    check_run(&r);
    for (int64_t i = 0; i < ledger_step_count(reader); i++)
        BR_TRY(check_step(&r, i));
    if (out->n_fault > 0)
        return br_fail(BR_E_MISMATCH, "%s (%lld fault%s in all)", out->line[0], (long long)out->n_fault, out->n_fault == 1 ? "" : "s");
    return BR_OK;
}
