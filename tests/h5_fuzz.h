/* h5_fuzz: changes in a good HDF5 file, made through HDF5 itself, as a fuzzer's input says: bytes of a dataset, another type, rank or size, a
 * missing dataset or attribute, another text, a commit record with a valid check. So a fuzzer spends its time in our checks and not in
 * HDF5's own parser, which is not ours to mend. For the fuzz targets, each of which is one source. */
#ifndef H5_FUZZ_H
#define H5_FUZZ_H

#include "br_hash.h"
#include "br_status.h"

#include <hdf5.h>

/* What may be changed. */
typedef struct h5_names {
    const char *const *dataset;
    uint64_t n_dataset;
    const char *const *attribute;
    uint64_t n_attribute;
} h5_names;

typedef struct input {
    const uint8_t *at, *end;
} input;

static uint64_t take(input *in, int n) {
    uint64_t value = 0;
    for (int i = 0; i < n && in->at < in->end; i++)
        value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

static void change_bytes(hid_t file, const h5_names *names, input *in) {
    const char *name = names->dataset[take(in, 1) % names->n_dataset];
    unsigned char bytes[4096] = {0};
    hid_t set = H5Dopen2(file, name, H5P_DEFAULT);
    if (set < 0)
        return;
    hid_t type = H5Dget_type(set), space = H5Dget_space(set);
    size_t n = (size_t)H5Sget_simple_extent_npoints(space) * H5Tget_size(type);
    size_t at = (size_t)take(in, 2), n_new = (size_t)take(in, 1) % 17;
    if (n <= sizeof bytes && H5Tget_class(type) != H5T_VLEN &&
        H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes) >= 0) {
        for (size_t i = 0; i < n_new && n > 0; i++)
            bytes[(at + i) % n] = (unsigned char)take(in, 1);
        H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes);
    }
    H5Sclose(space);
    H5Tclose(type);
    H5Dclose(set);
}

static hid_t some_type(uint64_t choice) {
    const hid_t plain[] = {H5T_STD_U8LE,  H5T_STD_I32LE,  H5T_STD_U32LE,  H5T_STD_I64LE,
                           H5T_STD_U64LE, H5T_IEEE_F32LE, H5T_IEEE_F64LE, H5T_STD_I32BE};
    if (choice % 10 == 8)
        return H5Tvlen_create(H5T_STD_I32LE);
    hid_t type = H5Tcopy(choice % 10 == 9 ? H5T_C_S1 : plain[choice % 8]);
    if (choice % 10 == 9)
        H5Tset_size(type, 1 + choice / 10);
    return type;
}

static void replace_dataset(hid_t file, const h5_names *names, input *in) {
    const char *name = names->dataset[take(in, 1) % names->n_dataset];
    hsize_t size[3];
    hid_t type = some_type(take(in, 2));
    int rank = (int)take(in, 1) % 4;
    for (int i = 0; i < 3; i++)
        size[i] = take(in, 1) == 255 ? 1ull << (20 + take(in, 1) % 30) : take(in, 1) % 32;
    H5Ldelete(file, name, H5P_DEFAULT);
    hid_t space = H5Screate_simple(rank, size, NULL),
          set = H5Dcreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    if (set >= 0)
        H5Dclose(set);
    H5Sclose(space);
    H5Tclose(type);
}

static void put_attribute(hid_t file, const char *name, const char *text, size_t n) {
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    H5Tset_size(type, n);
    hid_t made = H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(made, type, text);
    H5Aclose(made);
    H5Sclose(space);
    H5Tclose(type);
}

static void set_attribute(hid_t file, const h5_names *names, input *in) {
    const char *name = names->attribute[take(in, 1) % names->n_attribute];
    size_t n = (size_t)take(in, 1) % 48;
    char text[64] = {0};
    H5Adelete(file, name);
    for (size_t i = 0; i < n; i++)
        text[i] = (char)take(in, 1);
    if (n > 0)
        put_attribute(file, name, text, n);
}

static void set_commit(hid_t file, input *in) {
    uint64_t commit[4] = {take(in, 1), take(in, 2), 1, 0};
    if (commit[0] == 255)
        commit[0] = take(in, 8);
    else if (commit[0] == 254) /* three counts, as a ledger has */
        commit[0] = take(in, 1), commit[2] = take(in, 2);
    commit[3] = br_hash_u64(commit, 24);
    hid_t set = H5Dopen2(file, "/commit", H5P_DEFAULT);
    if (set >= 0) {
        hid_t space = H5Dget_space(set);
        if (H5Sget_simple_extent_npoints(space) == 4) /* an earlier change may have put another shape there */
            H5Dwrite(set, H5T_STD_U64LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, commit);
        H5Sclose(space);
        H5Dclose(set);
    }
}

static void h5_fuzz_change(const char *path, const h5_names *names, input *in) {
    hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
    BR_ASSERT(file >= 0);
    for (int i = 0; i < 8 && in->at < in->end; i++) {
        switch (take(in, 1) % 5) {
        case 0: change_bytes(file, names, in); break;
        case 1: replace_dataset(file, names, in); break;
        case 2: set_attribute(file, names, in); break;
        case 3: set_commit(file, in); break;
        case 4: H5Ldelete(file, names->dataset[take(in, 1) % names->n_dataset], H5P_DEFAULT); break;
        }
    }
    H5Fclose(file);
}

#endif
