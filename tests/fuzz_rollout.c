/* libFuzzer target: damaged rollout files. The input is a list of changes to a good file, made through HDF5 itself: bytes of
 * a dataset, another type, rank or size, a missing dataset or attribute, another text, a commit record with a valid check.
 * So the fuzzer spends its time in our checks and not in HDF5's own parser, which is not ours to mend. What the reader
 * accepts must be safe to walk, to replay and to compare. */
#include "br_file.h"
#include "ledger.h"
#include "logprob_digest.h"
#include "parity.h"
#include "receipt.h"

#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const dataset[] = {
    "/commit",          "/seq/offset",       "/seq/chain",
    "/seq/uid",         "/seq/prompt_index", "/seq/sample",
    "/seq/seed",        "/seq/adapter_name", "/seq/adapter_digest",
    "/seq/temperature", "/seq/top_p",        "/seq/n_stop",
    "/seq/stop_token",  "/seq/ignore_eos",   "/seq/prompt_len",
    "/seq/status",      "/seq/stop",         "/seq/error_code",
    "/seq/part_digest", "/seq/receipt",      "/tokens/id",
    "/tokens/mask",     "/tokens/logprob",   "/tokens/logprob_raw",
    "/tokens/entropy",  "/tokens/top_id",    "/tokens/top_logprob",
};
static const char *const attribute[] = {"format",      "format_version", "producer",    "producer_stamp", "run_uid",
                                        "base_digest", "n_seq_closed",   "meta_digest", "logprob_kind"};
enum { N_DATASET = sizeof dataset / sizeof dataset[0], N_ATTRIBUTE = sizeof attribute / sizeof attribute[0] };

static char good_path[64], path[64];
static br_map good;

typedef struct input {
    const uint8_t *at, *end;
} input;

static uint64_t take(input *in, int n) {
    uint64_t value = 0;
    for (int i = 0; i < n && in->at < in->end; i++)
        value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

static void write_good(void) {
    rollout_meta meta = {.producer = "rollout", .producer_stamp = "fuzz", .run_uid = {1, 2}, .has_entropy = 1, .n_top = 2};
    int32_t token[5] = {1, 2, 3, 4, 5}, top[10] = {0};
    uint32_t bits[10] = {BR_UNSCORED, BR_UNSCORED, 0xbf800000u, 0xbf800001u, 0xbf800002u};
    uint8_t mask[5] = {0, 0, 1, 1, 1};
    rollout_writer *w;
    BR_ASSERT(rollout_create(good_path, &meta, &w) == BR_OK);
    for (uint32_t i = 0; i < 3; i++) {
        rollout_seq seq = {.uid = "u",
                           .adapter = "base",
                           .sample = i,
                           .temperature = 1,
                           .top_p = 1,
                           .prompt_len = 2,
                           .n_tok = 5,
                           .token = token,
                           .logprob = bits,
                           .logprob_raw = bits,
                           .logprob_kept = bits,
                           .entropy = bits,
                           .mask = mask,
                           .top_token = top,
                           .top_logprob = bits};
        for (int k = 0; k < BR_STOP_MAX; k++)
            seq.stop_token[k] = -1;
        BR_ASSERT(receipt_make(&meta, &seq) == BR_OK && rollout_append(w, &seq) == BR_OK);
    }
    BR_ASSERT(rollout_close(w) == BR_OK);
    BR_ASSERT(br_file_map(good_path, &good) == BR_OK);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    H5dont_atexit(); /* HDF5 leaks blocks of metadata that it could not read, and says so at exit */
    snprintf(good_path, sizeof good_path, "/dev/shm/fuzz-rollout-%d-good.h5", (int)getpid());
    snprintf(path, sizeof path, "/dev/shm/fuzz-rollout-%d.h5", (int)getpid());
    write_good();
    unlink(good_path);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    return 0;
}

static void change_bytes(hid_t file, input *in) {
    const char *name = dataset[take(in, 1) % N_DATASET];
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

static void replace_dataset(hid_t file, input *in) {
    const char *name = dataset[take(in, 1) % N_DATASET];
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

static void set_attribute(hid_t file, input *in) {
    const char *name = attribute[take(in, 1) % N_ATTRIBUTE];
    size_t n = (size_t)take(in, 1) % 48;
    char text[64] = {0};
    H5Adelete(file, name);
    if (n == 0)
        return;
    for (size_t i = 0; i < n; i++)
        text[i] = (char)take(in, 1);
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    H5Tset_size(type, n);
    hid_t made = H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(made, type, text);
    H5Aclose(made);
    H5Sclose(space);
    H5Tclose(type);
}

static void set_commit(hid_t file, input *in) {
    uint64_t commit[4] = {take(in, 1), take(in, 2), 1, 0};
    if (commit[0] == 255)
        commit[0] = take(in, 8);
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

static void change_file(input *in) {
    hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
    BR_ASSERT(file >= 0);
    for (int i = 0; i < 8 && in->at < in->end; i++) {
        switch (take(in, 1) % 5) {
        case 0: change_bytes(file, in); break;
        case 1: replace_dataset(file, in); break;
        case 2: set_attribute(file, in); break;
        case 3: set_commit(file, in); break;
        case 4: H5Ldelete(file, dataset[take(in, 1) % N_DATASET], H5P_DEFAULT); break;
        }
    }
    H5Fclose(file);
}

/* Everything that the rest of the engine would touch. */
static void use(const rollout_reader *r) {
    static ledger_result ledger;
    static parity_result parity;
    br_digest digest;
    int64_t n_tok = 0;
    for (int64_t i = 0; i < rollout_seq_count(r); i++) {
        rollout_seq seq;
        rollout_seq_at(r, i, &seq);
        BR_ASSERT(seq.n_tok >= 1 && seq.prompt_len >= 1 && seq.prompt_len <= seq.n_tok);
        BR_ASSERT(strnlen(seq.uid, sizeof seq.uid) < sizeof seq.uid && seq.n_stop >= 0 && seq.n_stop <= BR_STOP_MAX);
        n_tok += seq.n_tok;
    }
    BR_ASSERT(n_tok == rollout_tok_count(r));
    (void)ledger_check(r, &ledger);
    BR_ASSERT(logprob_digest_of_file(r, &digest) == BR_OK);
    BR_ASSERT(parity_compare(r, r, &parity) == BR_OK && !parity.passed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    rollout_reader *r;
    BR_ASSERT(br_file_write(path, good.bytes, good.n) == BR_OK);
    change_file(&in);
    if (rollout_open(path, &r) == BR_OK)
        use(r);
    else
        BR_ASSERT(!r && br_last_error()[0]);
    rollout_reader_close(r);
    unlink(path);
    return 0;
}
