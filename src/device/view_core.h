/* view_core: elements of views, and their hash, as each thread of either device works on them. Internal to src/device.
 *
 * A view of more than BR_XXH3_SHORT bytes is hashed by threads in teams of 32: of a block of 1,024 bytes thread l reads the pieces of
 * 16 bytes l and l + 32, which feed the accumulators 2 (l % 4) and 2 (l % 4) + 1; the eight threads of equal l % 4 then add theirs up. */
#ifndef VIEW_CORE_H
#define VIEW_CORE_H

#include "br_xxh3.h"
#include "device_view.h"

enum { VIEW_TEAM = 32, VIEW_HALVES = BR_XXH3_PIECE / 2 };

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

/* Where the e-th element lies. */
static inline BR_HD uint16_t *view_at(const br_view *v, uint32_t e) {
    const uint32_t row = e / (uint32_t)v->n_col, col = e % (uint32_t)v->n_col, n_group = (uint32_t)(v->part[0].n_row + v->part[1].n_row);
    const uint32_t group = row / n_group, r = row % n_group, first = (uint32_t)v->part[0].n_row;
    const br_part *p = &v->part[r >= first];
    return p->at + group * p->group + (r >= first ? r - first : r) * p->row + col * p->col;
}

static inline BR_HD uint32_t view_bytes(const br_view *v) {
    return (uint32_t)v->n_row * (uint32_t)v->n_col * (uint32_t)sizeof(uint16_t);
}

/* 16 bytes from element e on, as two words. */
static inline BR_HD void view_read(const br_view *v, view_form form, uint32_t e, uint64_t word[2]) {
    if (form == VIEW_ANY || e % VIEW_HALVES) { /* the last stripe begins anywhere */
        uint64_t *to = word;
        for (uint32_t i = 0; i < VIEW_HALVES; i++) {
            to[i / 4] = (i % 4 ? to[i / 4] : 0) | (uint64_t)*view_at(v, e + i) << 16 * (i % 4);
        }
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

/* The first of four elements whose exponent is all ones; 4: none. */
static inline BR_HD uint32_t view_bad(uint64_t word) {
    uint32_t i = 0;
    while (i < 4 && (word >> 16 * i & 0x7f80) != 0x7f80)
        i++;
    return i;
}
/* Are there any? A carry out of the exponent says so. */
static inline BR_HD int view_has_bad(uint64_t word) {
    return (((word & 0x7f807f807f807f80u) + 0x0080008000800080u) & 0x8000800080008000u) != 0;
}

/* What one thread has seen besides the hash. */
typedef struct view_notes {
    uint32_t first_bad;
    uint64_t any;
} view_notes;

static inline BR_HD void view_note(view_notes *notes, uint32_t e, const uint64_t word[2]) {
    notes->any |= (word[0] | word[1]) & 0x7fff7fff7fff7fffu;
    if (!view_has_bad(word[0]) && !view_has_bad(word[1]))
        return;
    const uint32_t at = view_has_bad(word[0]) ? e + view_bad(word[0]) : e + 4 + view_bad(word[1]);
    notes->first_bad = at < notes->first_bad ? at : notes->first_bad;
}

/* The secrets of thread l: of its stripe l / 4 and of stripe l / 4 + 8. */
typedef struct view_keys {
    uint64_t key[2][2];
} view_keys;

static inline BR_HD view_keys view_keys_of(int l) {
    view_keys keys;
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 2; i++)
            keys.key[j][i] = br_xxh3_secret(8 * (l / 4 + 8 * j) + BR_XXH3_PIECE * (l % 4) + 8 * i);
    return keys;
}

/* Piece j of thread l of a block, in elements. */
static inline BR_HD uint32_t view_piece(uint32_t block, int l, int j) {
    return (block * BR_XXH3_BLOCK + (uint32_t)(l + VIEW_TEAM * j) * BR_XXH3_PIECE) / (uint32_t)sizeof(uint16_t);
}

/* What thread l adds behind the whole blocks: its pieces of the stripes that are left, and, of the last 64 bytes, one of threads 0..3. */
static inline BR_HD void view_rest(const br_view *v, view_form form, int l, const view_keys *keys, uint64_t sum[2], view_notes *notes) {
    const uint32_t n = view_bytes(v), block = br_xxh3_blocks(n);
    uint64_t word[2], key[2];
    for (int j = 0; j < 2; j++) {
        if ((uint32_t)(l / 4 + 8 * j) >= br_xxh3_stripes(n))
            continue;
        const uint32_t e = view_piece(block, l, j);
        view_read(v, form, e, word);
        view_note(notes, e, word);
        br_xxh3_add(sum, word, keys->key[j]);
    }
    if (l >= 4)
        return;
    const uint32_t e = (n - BR_XXH3_STRIPE + BR_XXH3_PIECE * (uint32_t)l) / (uint32_t)sizeof(uint16_t);
    view_read(v, form, e, word);
    view_note(notes, e, word);
    for (int i = 0; i < 2; i++)
        key[i] = br_xxh3_secret(BR_XXH3_LAST + BR_XXH3_PIECE * l + 8 * i);
    br_xxh3_add(sum, word, key);
}

/* A view of at most BR_XXH3_SHORT bytes, by one thread. */
static inline BR_HD br_digest view_short(const br_view *v, view_notes *notes) {
    unsigned char bytes[BR_XXH3_SHORT];
    const uint32_t n = view_bytes(v);
    for (uint32_t e = 0; e < n / 2; e++) {
        const uint16_t x = *view_at(v, e);
        bytes[2 * e] = (unsigned char)x;
        bytes[2 * e + 1] = (unsigned char)(x >> 8);
        notes->any |= x & 0x7fff;
        if ((x & 0x7f80) == 0x7f80 && e < notes->first_bad)
            notes->first_bad = e;
    }
    return br_xxh3_short(bytes, n);
}

/* Element k of a run. */
static inline BR_HD uint16_t view_fill_half(const br_fill *fill, int64_t k) {
    return (uint16_t)(k % 2 ? fill->word >> 16 : fill->word);
}

#endif
