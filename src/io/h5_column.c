/* Types and sizes of columns, and what surrounds HDF5's calls; see h5_column.h. Layer: io. */
#include "h5_column.h"
#include "br_hash.h"
#include "br_mem.h"

#include <stdarg.h>
#include <stdio.h>

size_t h5_column_row_bytes(const h5_column *column) {
    static const uint8_t element_bytes[] = {1, 4, 4, 8, 8, 4, 8, 1};
    return element_bytes[column->type] * (size_t)column->width;
}

int64_t h5_column_chunk_rows(const h5_column *column) {
    return column->many ? H5_CHUNK_MANY : H5_CHUNK_FEW;
}

hid_t h5_column_type(const h5_column *column) {
    switch (column->type) {
    case H5_U8: return H5Tcopy(H5T_STD_U8LE);
    case H5_I32: return H5Tcopy(H5T_STD_I32LE);
    case H5_U32: return H5Tcopy(H5T_STD_U32LE);
    case H5_I64: return H5Tcopy(H5T_STD_I64LE);
    case H5_U64: return H5Tcopy(H5T_STD_U64LE);
    case H5_F32: return H5Tcopy(H5T_IEEE_F32LE);
    case H5_F64: return H5Tcopy(H5T_IEEE_F64LE);
    case H5_TEXT: break;
    }
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, (size_t)column->width);
    H5Tset_strpad(type, H5T_STR_NULLPAD);
    return type;
}

uint64_t h5_commit_check(const uint64_t commit[H5_COMMIT_WORDS]) {
    return br_hash_u64(commit, H5_SPACE_MAX * sizeof commit[0]);
}

h5_scope h5_scope_begin(void) {
    h5_scope scope = {.phase = br_mem_exempt_begin()};
    H5Eget_auto2(H5E_DEFAULT, &scope.print, &scope.print_context);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    return scope;
}

void h5_scope_end(h5_scope scope) {
    H5Eset_auto2(H5E_DEFAULT, scope.print, scope.print_context);
    br_mem_exempt_end(scope.phase);
}

static herr_t take_innermost(unsigned n, const H5E_error2_t *error, void *context) {
    if (n == 0 && error->desc)
        snprintf(context, 256, "%s", error->desc);
    return 0;
}

br_status h5_fail(br_status status, const char *path, const char *format, ...) {
    char doing[256], said[256] = "no reason given";
    va_list args;
    va_start(args, format);
    vsnprintf(doing, sizeof doing, format, args);
    va_end(args);
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_innermost, said);
    return br_fail(status, "%s: cannot %s: %s", path, doing, said);
}
