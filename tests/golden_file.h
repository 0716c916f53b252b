/* golden_file: the text form of golden vectors, read and written.
 *
 * Layer: tests; knows no op. A file is lines of text. `#` begins a comment line. `case NAME` begins a case; `in TYPE NAME
 * DIMS` and `out TYPE NAME DIMS` begin an array (DIMS such as 3x20, one to three of them), whose elements follow as words of
 * hex bits, last index fastest. So the file alone defines the case: its inputs are in it.
 * A misuse (a missing array, a wrong type, a file that is cut) ends the running test with a sentence. */
#ifndef GOLDEN_FILE_H
#define GOLDEN_FILE_H

#include "br_mem.h"
#include <stdint.h>

typedef enum golden_type { GOLDEN_U8, GOLDEN_BF16, GOLDEN_I32, GOLDEN_F32, GOLDEN_U64, GOLDEN_TYPES } golden_type;

enum { GOLDEN_NAME_BYTES = 48, GOLDEN_ARRAY_MAX = 24, GOLDEN_CASE_MAX = 48, GOLDEN_ARENA_BYTES = 16 << 20 };

typedef struct golden_array {
    char name[GOLDEN_NAME_BYTES];
    golden_type type;
    int32_t dim[3]; /* at least 1; dimensions that are not there are 1 */
    int32_t n_dim;
    void *data;
} golden_array;

typedef struct golden_case {
    char name[GOLDEN_NAME_BYTES];
    golden_array in[GOLDEN_ARRAY_MAX], out[GOLDEN_ARRAY_MAX];
    int n_in, n_out;
    br_arena *arena; /* owns the data */
} golden_case;

typedef struct golden_set {
    golden_case item[GOLDEN_CASE_MAX];
    int n;
    br_arena arena;
} golden_set;

void golden_open(golden_set *set); /* empty */
void golden_close(golden_set *set);
golden_case *golden_begin(golden_set *set, const char *name, ...) __attribute__((format(printf, 2, 3)));

/* A new array of zeros (in) or poison (out); 0 ends the dimensions. */
void *golden_add_in(golden_case *c, golden_type type, const char *name, int32_t d0, int32_t d1, int32_t d2);
void *golden_add_out(golden_case *c, golden_type type, const char *name, int32_t d0, int32_t d1, int32_t d2);
void golden_add_int(golden_case *c, const char *name, int32_t value);
void golden_add_float(golden_case *c, const char *name, float value);
int64_t golden_count(const golden_array *a);

/* Inputs by name. _int and _float read arrays of one element. */
int golden_has(const golden_case *c, const char *name);
int32_t golden_dim(const golden_case *c, const char *name, int i);
const uint8_t *golden_u8(const golden_case *c, const char *name);
const uint16_t *golden_bf16(const golden_case *c, const char *name);
const int32_t *golden_i32(const golden_case *c, const char *name);
const float *golden_f32(const golden_case *c, const char *name);
const uint64_t *golden_u64(const golden_case *c, const char *name);
int32_t golden_int(const golden_case *c, const char *name);
float golden_float(const golden_case *c, const char *name);

void golden_read(golden_set *set, const char *path);
/* head: the comment lines, each with its end of line. */
void golden_write(const golden_set *set, const char *path, const char *head);

/* The outputs of two runs of one case: names, shapes and every bit. `who` names the run that gave `got`. */
void golden_same(const char *file, const char *who, const golden_case *got, const golden_case *want);

#endif
