/* The search for a flipped bit; see ledger_repair.h. Layer: proof. */
#include "ledger_repair.h"
#include "br_mem.h"

#include <string.h>

/* Trying every bit of n bytes hashes 8 n^2 of them: a few seconds at most, enough for texts of 11,000 tokens. */
static const uint64_t tried_bytes_max = (uint64_t)1 << 34;

static void flip(unsigned char *bytes, int64_t bit) {
    bytes[bit / 8] = (unsigned char)(bytes[bit / 8] ^ (1u << (bit % 8)));
}

int32_t ledger_one_bit(const void *a, const void *b, size_t n) {
    const unsigned char *x = a, *y = b;
    int32_t found = -1;
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < 8; k++) {
            if (!((x[i] ^ y[i]) >> k & 1))
                continue;
            if (found >= 0)
                return -1;
            found = (int32_t)(8 * i) + k;
        }
    return found;
}

static int64_t try_bits(unsigned char *bytes, size_t n, int64_t begin, int64_t end, br_digest want) {
    int64_t found = -1;
    for (int64_t bit = begin; bit < end && found < 0; bit++) {
        flip(bytes, bit);
        if (br_digest_equal(br_hash_bytes(bytes, n), want))
            found = bit;
        flip(bytes, bit);
    }
    return found;
}

static int64_t try_all_bits(unsigned char *bytes, size_t n, br_digest want) {
    return (uint64_t)n * n * 8 <= tried_bytes_max ? try_bits(bytes, n, 0, (int64_t)n * 8, want) : -1;
}

int64_t ledger_flip_in_bytes(const void *bytes, size_t n, br_digest want) {
    unsigned char *copy;
    if (br_mem_alloc((void **)&copy, n, "bytes to try") != BR_OK)
        return -1;
    memcpy(copy, bytes, n);
    const int64_t found = try_all_bits(copy, n, want);
    br_mem_free(copy);
    return found;
}

/* In a run without mismatches the slot where one array differs from the two others is the one, however long the text is. */
static int64_t try_odd_slots(const ledger_seq *seq, int array, unsigned char *bytes, size_t n, br_digest want) {
    const uint32_t *own = seq->logprob[array], *other = seq->logprob[(array + 1) % LEDGER_ARRAY_COUNT];
    int64_t found = -1, tried = 0;
    for (int64_t t = 0; t < seq->n_tok && found < 0; t++)
        if (own[t] != other[t] && (uint64_t)n * 32 * (uint64_t)++tried <= tried_bytes_max)
            found = try_bits(bytes, n, 32 * t, 32 * t + 32, want);
    return found;
}

static void name_flip(const ledger_piece *piece, int n_piece, int64_t bit, ledger_flip *out) {
    int i = 0;
    for (; i + 1 < n_piece && bit >= (int64_t)piece[i].n * 8; i++)
        bit -= (int64_t)piece[i].n * 8;
    const int64_t row_bits = (int64_t)piece[i].row_bytes * 8;
    *out = (ledger_flip){.dataset = piece[i].dataset, .position = row_bits ? bit / row_bits : -1, .bit = (int32_t)(row_bits ? bit % row_bits : bit)};
}

int ledger_flip_in_leaf(const ledger_seq *seq, int leaf, ledger_flip *out) {
    ledger_piece piece[LEDGER_PIECES_MAX];
    unsigned char *bytes;
    const int n_piece = ledger_leaf_pieces(seq, leaf, piece);
    size_t n = 0;
    int64_t found = -1;
    for (int i = 0; i < n_piece; i++)
        n += piece[i].n;
    if (br_mem_alloc((void **)&bytes, n, "bytes to try") != BR_OK)
        return 0;
    for (size_t i = 0, at = 0; i < (size_t)n_piece; at += piece[i++].n)
        memcpy(bytes + at, piece[i].at, piece[i].n);
    if (leaf >= LEDGER_LEAF_ARRAY)
        found = try_odd_slots(seq, leaf - LEDGER_LEAF_ARRAY, bytes, n, seq->leaf[leaf]);
    if (found < 0)
        found = try_all_bits(bytes, n, seq->leaf[leaf]);
    br_mem_free(bytes);
    if (found >= 0)
        name_flip(piece, n_piece, found, out);
    return found >= 0;
}

int ledger_flip_in_record(const uint8_t before[BR_LEDGER_LINK_BYTES], void *bytes, size_t n, const uint8_t link[BR_LEDGER_LINK_BYTES],
                          const char *(*field)(size_t at, size_t *in_row), ledger_flip *out, int *in_link) {
    uint8_t made[BR_LEDGER_LINK_BYTES];
    size_t in_row;
    *in_link = 0;
    if (ledger_link(before, bytes, n, made) != BR_OK)
        return 0;
    *out = (ledger_flip){.position = -1, .bit = ledger_one_bit(made, link, sizeof made)};
    if (out->bit >= 0) {
        out->dataset = field(n, &in_row);
        return *in_link = 1;
    }
    for (int64_t bit = 0; bit < (int64_t)n * 8; bit++) {
        flip(bytes, bit);
        if (ledger_link(before, bytes, n, made) != BR_OK)
            return 0;
        if (memcmp(made, link, sizeof made) == 0) {
            out->dataset = field((size_t)bit / 8, &in_row);
            out->bit = (int32_t)(8 * in_row) + (int32_t)(bit % 8);
            return 1;
        }
        flip(bytes, bit);
    }
    return 0;
}
