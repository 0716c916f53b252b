/* Leaves, digests and links of a training run's ledger; see ledger_chain.h. Layer: proof. */
#include "ledger_chain.h"

#include <openssl/evp.h>
#include <string.h>

#define VALUE(name) {"/seq/" #name, &seq->name, sizeof seq->name, 0}

int ledger_leaf_pieces(const ledger_seq *seq, int leaf, ledger_piece piece[LEDGER_PIECES_MAX]) {
    static const char *const array[LEDGER_ARRAY_COUNT] = {"/tokens/rollout", "/tokens/again", "/tokens/update"};
    const size_t n = (size_t)seq->n_tok;
    if (leaf == LEDGER_LEAF_SEQUENCE) {
        const ledger_piece all[] = {VALUE(uid), VALUE(sample), VALUE(group), VALUE(stop), VALUE(temperature),
                                    VALUE(version_begin), VALUE(version_end), VALUE(reward), VALUE(advantage)};
        memcpy(piece, all, sizeof all);
        return sizeof all / sizeof all[0];
    }
    if (leaf == LEDGER_LEAF_TOKENS) {
        const ledger_piece all[] = {VALUE(prompt_len), VALUE(n_tok), {"/tokens/id", seq->token, n * sizeof *seq->token, sizeof *seq->token},
                                    {"/tokens/mask", seq->mask, n, 1}};
        memcpy(piece, all, sizeof all);
        return sizeof all / sizeof all[0];
    }
    const int which = leaf - LEDGER_LEAF_ARRAY;
    piece[0] = (ledger_piece){array[which], seq->logprob[which], n * sizeof(uint32_t), sizeof(uint32_t)};
    return 1;
}

br_digest ledger_leaf_of(const ledger_seq *seq, int leaf) {
    ledger_piece piece[LEDGER_PIECES_MAX];
    br_hash_stream s;
    const int n = ledger_leaf_pieces(seq, leaf, piece);
    br_hash_begin(&s);
    for (int i = 0; i < n; i++)
        br_hash_add(&s, piece[i].at, piece[i].n);
    return br_hash_end(&s);
}

void ledger_leaves(ledger_seq *seq) {
    for (int leaf = 0; leaf < LEDGER_LEAF_COUNT; leaf++)
        seq->leaf[leaf] = ledger_leaf_of(seq, leaf);
}

br_digest *ledger_record_digest(br_ledger_record *record, int leaf) {
    br_digest *const digest[LEDGER_LEAF_COUNT] = {&record->sequences, &record->tokens, &record->rollout, &record->again, &record->update};
    return digest[leaf];
}

void ledger_fill_digests(const ledger_seq *seq, int64_t n, br_ledger_record *record) {
    for (int leaf = 0; leaf < LEDGER_LEAF_COUNT; leaf++) {
        br_hash_stream s;
        br_hash_begin(&s);
        for (int64_t i = 0; i < n; i++)
            br_hash_add(&s, &seq[i].leaf[leaf], sizeof seq[i].leaf[leaf]);
        *ledger_record_digest(record, leaf) = br_hash_end(&s);
    }
}

/* ---- what a sequence may hold ----------------------------------------------------------------------------------------------- */

static int is_nan(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

/* Of 4 or 8 bytes, by the exponent. */
static int is_finite(const void *number, size_t n) {
    uint16_t top;
    memcpy(&top, (const char *)number + n - sizeof top, sizeof top);
    const unsigned exponent = n == 8 ? 0x7ff0u : 0x7f80u;
    return (top & exponent) != exponent;
}

static br_status check_token(const ledger_seq *seq, int32_t t) {
    static const char *const name[LEDGER_ARRAY_COUNT] = {"rollout", "again", "update"};
    if (seq->token[t] < 0)
        return br_fail(BR_E_ARG, "position %d: token %d: expected 0 or more", t, seq->token[t]);
    if (seq->mask[t] > (t >= seq->prompt_len))
        return br_fail(BR_E_ARG, "position %d: mask %d: expected %s", t, seq->mask[t], t < seq->prompt_len ? "0 in a prompt" : "0 or 1");
    for (int a = 0; a < LEDGER_ARRAY_COUNT; a++) {
        const uint32_t bits = seq->logprob[a][t];
        if (seq->mask[t] && is_nan(bits))
            return br_fail(BR_E_NAN, "position %d: %s log-prob %08x: expected a number in a scored slot", t, name[a], bits);
        if (!seq->mask[t] && bits != BR_UNSCORED)
            return br_fail(BR_E_ARG, "position %d: %s log-prob %08x: expected %08x where nothing was sampled", t, name[a], bits, BR_UNSCORED);
    }
    return BR_OK;
}

br_status ledger_seq_check(const ledger_seq *seq) {
    if (!seq->uid[0])
        return br_fail(BR_E_ARG, "uid is empty: expected 1 to %d bytes", BR_UID_BYTES_MAX);
    if (seq->sample >= LEDGER_SAMPLE_END)
        return br_fail(BR_E_ARG, "sample %u: expected less than 2^24", seq->sample);
    if (seq->group < 0)
        return br_fail(BR_E_ARG, "group %d: expected 0 or more", seq->group);
    if (seq->stop < 0 || seq->stop > BR_STOP_ERROR)
        return br_fail(BR_E_ARG, "stop %d: expected 0 to %d", seq->stop, BR_STOP_ERROR);
    if (seq->n_tok < 1 || seq->n_tok > LEDGER_SEQ_TOK_MAX)
        return br_fail(BR_E_ARG, "n_tok %d: expected 1 to 2^20", seq->n_tok);
    if (seq->prompt_len < 1 || seq->prompt_len > seq->n_tok)
        return br_fail(BR_E_ARG, "prompt_len %d: expected 1 to n_tok %d", seq->prompt_len, seq->n_tok);
    if (!is_finite(&seq->temperature, sizeof seq->temperature))
        return br_fail(BR_E_NAN, "temperature: expected a finite number");
    if (!is_finite(&seq->reward, sizeof seq->reward) || !is_finite(&seq->advantage, sizeof seq->advantage))
        return br_fail(BR_E_NAN, "reward or advantage: expected finite numbers");
    for (int32_t t = 0; t < seq->n_tok; t++)
        BR_TRY(check_token(seq, t));
    return BR_OK;
}

/* ---- links ------------------------------------------------------------------------------------------------------------------ */

br_status ledger_link(const uint8_t before[BR_LEDGER_LINK_BYTES], const void *bytes, size_t n, uint8_t out[BR_LEDGER_LINK_BYTES]) {
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    const int done = sha && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) && EVP_DigestUpdate(sha, before, BR_LEDGER_LINK_BYTES) &&
                     EVP_DigestUpdate(sha, bytes, n) && EVP_DigestFinal_ex(sha, out, NULL);
    EVP_MD_CTX_free(sha);
    return done ? BR_OK : br_fail(BR_E_NOMEM, "libcrypto cannot compute SHA-256");
}

br_status ledger_link_run(const ledger_run *run, uint8_t out[BR_LEDGER_LINK_BYTES]) {
    const uint8_t zero[BR_LEDGER_LINK_BYTES] = {0};
    return ledger_link(zero, run, LEDGER_RUN_BYTES, out);
}
