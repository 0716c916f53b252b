/* golden_make: the inputs of the golden cases.
 *
 * Layer: tests, of the writer alone. Regular and ragged shapes, corners and plateaus of each op; small, and chosen so that
 * every constant of the contract decides a bit somewhere. */
#ifndef GOLDEN_MAKE_H
#define GOLDEN_MAKE_H

#include "golden_file.h"
#include "row_case.h"

typedef struct golden_maker {
    const char *op;
    void (*make)(golden_set *set);
} golden_maker;

/* Each table ends with a NULL. */
extern const golden_maker golden_make_numeric[], golden_make_row[], golden_make_mat[], golden_make_head[];

/* A new input of one family. */
static inline void golden_fill_bf16(golden_case *c, const char *name, row_family family, uint64_t key, int32_t d0, int32_t d1,
                                    int32_t d2) {
    int64_t n = (int64_t)d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1);
    row_case_fill_bf16(golden_add_in(c, GOLDEN_BF16, name, d0, d1, d2), n, family, key);
}

static inline void golden_fill_f32(golden_case *c, const char *name, row_family family, uint64_t key, int32_t d0, int32_t d1,
                                   int32_t d2) {
    int64_t n = (int64_t)d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1);
    row_case_fill_f32(golden_add_in(c, GOLDEN_F32, name, d0, d1, d2), n, family, key);
}

static inline void golden_list_i32(golden_case *c, const char *name, const int32_t *value, int32_t n) {
    memcpy(golden_add_in(c, GOLDEN_I32, name, n, 0, 0), value, sizeof *value * (size_t)n);
}

/* Families that no op turns into a fault or a NaN. */
static const struct golden_family {
    const char *name;
    row_family family;
} golden_families[] = {{"normal", ROW_NORMAL}, {"wide", ROW_WIDE}, {"plateau", ROW_PLATEAU}, {"zeros", ROW_ZEROS},
                       {"subnormal", ROW_SUBNORMAL}};
enum { GOLDEN_FAMILIES = 5 };

#endif
