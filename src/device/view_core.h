/* view_core: elements of views, and their hash, as each thread of either device works on them. Internal to src/device.
 *
 * A view of more than BR_XXH3_SHORT bytes is hashed stripe by stripe: piece p of each, 16 bytes, feeds the accumulators 2p and 2p + 1. What is
 * seen besides, of all elements at once, are two flags; where a NaN or Inf lies is looked for once more when there is one. */
#ifndef VIEW_CORE_H
#define VIEW_CORE_H

#include "br_xxh3.h"
#include "device_view.h"

enum { VIEW_HALVES = BR_XXH3_PIECE / 2, VIEW_STRIPES = BR_XXH3_BLOCK / BR_XXH3_STRIPE, VIEW_PIECES = BR_XXH3_STRIPE / BR_XXH3_PIECE };

typedef enum view_form {
    VIEW_DENSE, /* elements follow each other: pieces of 16 bytes, aligned */
    VIEW_ROWS,  /* pieces of 16 bytes lie within rows, aligned */
    VIEW_ANY    /* element by element */
} view_form;

static inline BR_HD int view_part_is_wide(const br_part *p) {
    return p->n_row == 0 || (p->col == 1 && p->row % VIEW_HALVES == 0 && p->group % VIEW_HALVES == 0 && (uintptr_t)p->at % BR_XXH3_PIECE == 0);
}

static inline BR_HD view_form view_form_of(const br_view *v) {
    const br_part *p = &v->part[0];
    if (p->n_row == v->n_row && p->col == 1 && (p->row == v->n_col || v->n_row == 1) && (uintptr_t)p->at % BR_XXH3_PIECE == 0)
        return VIEW_DENSE;
    return v->n_col % VIEW_HALVES == 0 && view_part_is_wide(p) && view_part_is_wide(&v->part[1]) ? VIEW_ROWS : VIEW_ANY;
}

/* Where an element lies, and how far the next one of its row is. */
typedef struct view_place {
    uint16_t *at;
    int64_t step;
} view_place;

static inline BR_HD view_place view_place_of(const br_view *v, uint32_t e) {
    const uint32_t row = e / (uint32_t)v->n_col, col = e % (uint32_t)v->n_col, n_group = (uint32_t)(v->part[0].n_row + v->part[1].n_row);
    const uint32_t group = row / n_group, r = row % n_group, first = (uint32_t)v->part[0].n_row;
    const br_part *p = &v->part[r >= first];
    view_place place;
    place.at = p->at + group * p->group + (r >= first ? r - first : r) * p->row + col * p->col;
    place.step = p->col;
    return place;
}
static inline BR_HD uint16_t *view_at(const br_view *v, uint32_t e) {
    return view_place_of(v, e).at;
}

static inline BR_HD uint32_t view_bytes(const br_view *v) {
    return (uint32_t)v->n_row * (uint32_t)v->n_col * (uint32_t)sizeof(uint16_t);
}

/* 16 bytes from element e on, as two words. A piece within a row is located once. */
static inline BR_HD void view_read(const br_view *v, view_form form, uint32_t e, uint64_t word[2]) {
    if (form == VIEW_ANY || e % VIEW_HALVES) {
        const int in_row = v->n_col % VIEW_HALVES == 0 && e % VIEW_HALVES == 0; /* the last stripe begins anywhere */
        const view_place first = view_place_of(v, e);
        word[0] = word[1] = 0;
        for (uint32_t i = 0; i < VIEW_HALVES; i++)
            word[i / 4] |= (uint64_t)(in_row ? first.at[i * first.step] : *view_at(v, e + i)) << 16 * (i % 4);
        return;
    }
    const uint16_t *at = form == VIEW_DENSE ? v->part[0].at + e : view_at(v, e);
#if defined(__CUDA_ARCH__)
    const ulonglong2 wide = *(const ulonglong2 *)at;
    word[0] = wide.x;
    word[1] = wide.y;
#else
    memcpy(word, at, BR_XXH3_PIECE);
#endif
}

/* Of elements, two a word. any: their bits. bad: bits 15 and 31 where one more in the exponent's last bit carries into the sign, which it does
 * only when all bits of the exponent are set; into the upper element only a bad lower one carries. */
typedef struct view_flags {
    uint32_t any, bad;
} view_flags;

static inline BR_HD void view_flag(view_flags *flags, const uint64_t word[2]) {
    for (int i = 0; i < 4; i++) {
        const uint32_t x = (uint32_t)(word[i / 2] >> 32 * (i % 2));
        flags->any |= x;
        flags->bad |= (x + 0x00800080u) ^ x;
    }
}
static inline BR_HD uint32_t view_any(view_flags flags) {
    return (flags.any & 0x7fff7fffu) != 0;
}
static inline BR_HD uint32_t view_has_bad(view_flags flags) {
    return (flags.bad & 0x80008000u) != 0;
}
static inline BR_HD int view_is_bad(const br_view *v, uint32_t e) {
    return (*view_at(v, e) & 0x7f80) == 0x7f80;
}

/* Piece p of the stripe that begins at this byte, whose secret begins at `secret`. */
static inline BR_HD void view_take(const br_view *v, view_form form, uint32_t byte, int secret, int p, uint64_t sum[2], view_flags *flags) {
    const uint64_t key[2] = {br_xxh3_secret(secret + BR_XXH3_PIECE * p), br_xxh3_secret(secret + BR_XXH3_PIECE * p + 8)};
    uint64_t word[2];
    view_read(v, form, (byte + (uint32_t)(BR_XXH3_PIECE * p)) / (uint32_t)sizeof(uint16_t), word);
    view_flag(flags, word);
    br_xxh3_add(sum, word, key);
}

/* Piece p of stripe s behind the whole blocks; stripe VIEW_STRIPES is the last 64 bytes. */
static inline BR_HD void view_rest(const br_view *v, view_form form, uint32_t s, int p, uint64_t sum[2], view_flags *flags) {
    const uint32_t n = view_bytes(v), begins = br_xxh3_blocks(n) * BR_XXH3_BLOCK;
    if (s < br_xxh3_stripes(n))
        view_take(v, form, begins + s * BR_XXH3_STRIPE, 8 * (int)s, p, sum, flags);
    if (s == VIEW_STRIPES)
        view_take(v, form, n - BR_XXH3_STRIPE, BR_XXH3_LAST, p, sum, flags);
}

/* A view of at most BR_XXH3_SHORT bytes, by one thread. */
static inline BR_HD br_seen view_short(const br_view *v) {
    unsigned char bytes[BR_XXH3_SHORT];
    const uint32_t n = view_bytes(v);
    br_seen seen;
    seen.first_bad = UINT32_MAX;
    seen.any = 0;
    for (uint32_t e = 0; e < n / 2; e++) {
        const uint16_t x = *view_at(v, e);
        bytes[2 * e] = (unsigned char)x;
        bytes[2 * e + 1] = (unsigned char)(x >> 8);
        seen.any |= (x & 0x7fff) != 0;
        if (view_is_bad(v, e) && seen.first_bad == UINT32_MAX)
            seen.first_bad = e;
    }
    seen.digest = br_xxh3_short(bytes, n);
    return seen;
}

/* Element k of a run. */
static inline BR_HD uint16_t view_fill_half(const br_fill *fill, int64_t k) {
    return (uint16_t)(k % 2 ? fill->word >> 16 : fill->word);
}

#endif
