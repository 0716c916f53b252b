/* Edits of HDF5 files; see h5_edit.h. */
#include "h5_edit.h"
#include "test_support.h"

#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static hid_t open_file(const char *path) {
    hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
    ck_assert_msg(file >= 0, "cannot open %s", path);
    return file;
}

static size_t bytes_of(hid_t set, hid_t type) {
    hid_t space = H5Dget_space(set);
    size_t n = (size_t)H5Sget_simple_extent_npoints(space) * H5Tget_size(type);
    H5Sclose(space);
    return n;
}

/* Calls `edit` with the bytes of the dataset and writes them back when it says so. */
static void with_dataset(const char *path, const char *dataset, int write_back,
                         void (*edit)(unsigned char *, size_t, void *), void *context) {
    hid_t file = open_file(path), set = H5Dopen2(file, dataset, H5P_DEFAULT);
    ck_assert_msg(set >= 0, "no %s", dataset);
    hid_t type = H5Dget_type(set);
    size_t n = bytes_of(set, type);
    unsigned char *bytes = calloc(n + 1, 1);
    ck_assert(H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes) >= 0);
    edit(bytes, n, context);
    if (write_back)
        ck_assert(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes) >= 0);
    free(bytes);
    H5Tclose(type);
    H5Dclose(set);
    ck_assert(H5Fclose(file) >= 0);
}

static void take_size(unsigned char *bytes, size_t n, void *context) {
    (void)bytes;
    *(size_t *)context = n;
}

static void take_bytes(unsigned char *bytes, size_t n, void *context) {
    memcpy(context, bytes, n);
}

typedef struct put {
    const void *bytes;
} put;

static void put_bytes(unsigned char *bytes, size_t n, void *context) {
    memcpy(bytes, ((put *)context)->bytes, n);
}

typedef struct flip {
    size_t byte;
    int bit;
} flip;

static void flip_bit(unsigned char *bytes, size_t n, void *context) {
    const flip *f = context;
    ck_assert_uint_lt(f->byte, n);
    bytes[f->byte] = (unsigned char)(bytes[f->byte] ^ (1 << f->bit));
}

size_t h5_edit_bytes(const char *path, const char *dataset) {
    size_t n = 0;
    with_dataset(path, dataset, 0, take_size, &n);
    return n;
}

void h5_edit_read(const char *path, const char *dataset, void *bytes) {
    with_dataset(path, dataset, 0, take_bytes, bytes);
}

void h5_edit_write(const char *path, const char *dataset, const void *bytes) {
    put p = {bytes};
    with_dataset(path, dataset, 1, put_bytes, &p);
}

void h5_edit_flip(const char *path, const char *dataset, size_t byte, int bit) {
    flip f = {byte, bit};
    with_dataset(path, dataset, 1, flip_bit, &f);
}

static void with_attribute(const char *path, const char *name, int write_back, void (*edit)(unsigned char *, size_t, void *),
                           void *context) {
    hid_t file = open_file(path), attribute = H5Aopen(file, name, H5P_DEFAULT), type = H5Aget_type(attribute);
    size_t n = H5Tget_size(type);
    unsigned char *bytes = calloc(n + 1, 1);
    ck_assert(H5Aread(attribute, type, bytes) >= 0);
    edit(bytes, n, context);
    if (write_back)
        ck_assert(H5Awrite(attribute, type, bytes) >= 0);
    free(bytes);
    H5Tclose(type);
    H5Aclose(attribute);
    ck_assert(H5Fclose(file) >= 0);
}

size_t h5_edit_attribute_bytes(const char *path, const char *name) {
    size_t n = 0;
    with_attribute(path, name, 0, take_size, &n);
    return n;
}

void h5_edit_attribute_flip(const char *path, const char *name, size_t byte, int bit) {
    flip f = {byte, bit};
    with_attribute(path, name, 1, flip_bit, &f);
}

void h5_edit_attribute_add(const char *path, const char *name, const char *text) {
    hid_t file = open_file(path), type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    H5Tset_size(type, strlen(text) + 1);
    hid_t attribute = H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert(H5Awrite(attribute, type, text) >= 0);
    H5Aclose(attribute);
    H5Sclose(space);
    H5Tclose(type);
    ck_assert(H5Fclose(file) >= 0);
}

void h5_edit_attribute_set(const char *path, const char *name, const char *text) {
    hid_t file = open_file(path);
    ck_assert(H5Adelete(file, name) >= 0);
    ck_assert(H5Fclose(file) >= 0);
    if (text)
        h5_edit_attribute_add(path, name, text);
}

void h5_edit_unlink(const char *path, const char *dataset) {
    hid_t file = open_file(path);
    ck_assert(H5Ldelete(file, dataset, H5P_DEFAULT) >= 0);
    ck_assert(H5Fclose(file) >= 0);
}

static hid_t type_of(const char *name) {
    if (strcmp(name, "vlen") == 0)
        return H5Tvlen_create(H5T_STD_I32LE);
    return H5Tcopy(strcmp(name, "i32") == 0     ? H5T_STD_I32LE
                   : strcmp(name, "i64") == 0   ? H5T_STD_I64LE
                   : strcmp(name, "u64") == 0   ? H5T_STD_U64LE
                   : strcmp(name, "f64") == 0   ? H5T_IEEE_F64LE
                   : strcmp(name, "f32be") == 0 ? H5T_IEEE_F32BE
                                                : H5T_STD_U8LE);
}

void h5_edit_replace(const char *path, const char *dataset, const char *type_name, int rank, const uint64_t *size) {
    hsize_t n[3] = {0, 0, 0};
    for (int i = 0; i < rank; i++)
        n[i] = size[i];
    h5_edit_unlink(path, dataset);
    hid_t file = open_file(path), type = type_of(type_name), space = H5Screate_simple(rank, n, NULL);
    hid_t set = H5Dcreate2(file, dataset, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert(set >= 0);
    H5Dclose(set);
    H5Sclose(space);
    H5Tclose(type);
    ck_assert(H5Fclose(file) >= 0);
}

void h5_edit_link_away(const char *path, const char *dataset) {
    hid_t file = open_file(path);
    ck_assert(H5Lmove(file, dataset, file, "/elsewhere", H5P_DEFAULT, H5P_DEFAULT) >= 0);
    ck_assert(H5Lcreate_soft("/elsewhere", file, dataset, H5P_DEFAULT, H5P_DEFAULT) >= 0);
    ck_assert(H5Fclose(file) >= 0);
}

void h5_edit_break_header(const char *path, const char *object) {
    enum { INSIDE = 8 }; /* behind the signature */
    H5O_info_t info;
    hid_t file = open_file(path);
    ck_assert(H5Oget_info_by_name(file, object, &info, H5P_DEFAULT) >= 0);
    ck_assert(H5Fclose(file) >= 0);
    FILE *bytes = fopen(path, "r+b");
    ck_assert_ptr_nonnull(bytes);
    ck_assert_int_eq(fseek(bytes, (long)info.addr + INSIDE, SEEK_SET), 0);
    const int byte = fgetc(bytes);
    ck_assert_int_eq(fseek(bytes, (long)info.addr + INSIDE, SEEK_SET), 0);
    ck_assert_int_eq(fputc(byte ^ 4, bytes), byte ^ 4);
    ck_assert_int_eq(fclose(bytes), 0);
}
