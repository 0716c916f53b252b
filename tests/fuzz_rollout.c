/* libFuzzer target: damaged rollout files, and dumps of other stacks; the input is a list of changes to a good file of each (h5_fuzz.h). What
 * the reader accepts must be safe to walk, to replay and to compare. A dump has fewer columns of the same form: the good one is the rollout
 * under the other format's name. */
#include "br_file.h"
#include "foreign_hints.h"
#include "h5_fuzz.h"
#include "logprob_digest.h"
#include "parity.h"
#include "receipt.h"
#include "rollout_replay.h"

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
                                        "base_digest", "n_seq_closed",   "meta_digest", "logprob_kind",   "source"};
static const h5_names names = {dataset, sizeof dataset / sizeof dataset[0], attribute, sizeof attribute / sizeof attribute[0]};

static char good_path[64], path[64];
static br_map good;

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

static void call_it_foreign(void) {
    hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
    BR_ASSERT(file >= 0);
    H5Adelete(file, "format");
    put_attribute(file, "format", "foreign-logprobs", 16);
    put_attribute(file, "source", "fuzz", 4);
    H5Fclose(file);
}

/* Everything that the rest of the engine would touch. */
static void use(const rollout_reader *r) {
    static rollout_replay ledger;
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
    (void)rollout_replay_check(r, &ledger);
    BR_ASSERT(logprob_digest_of_file(r, &digest) == BR_OK);
    BR_ASSERT(parity_compare(r, r, &parity) == BR_OK && !parity.passed);
}

static void count_hint(void *context, const char *sentence) {
    *(int *)context += sentence[0] != 0;
}

/* A dump beside itself: whatever it holds, there is a verdict, and a hint where that is no and anything was compared. */
static void use_foreign(const rollout_reader *r) {
    static foreign_result result;
    foreign_files files;
    int n_hint = 0;
    if (foreign_files_open(r, r, &files) != BR_OK)
        return;
    foreign_compare(&files, &result);
    foreign_hints(&files, &result, count_hint, &n_hint);
    BR_ASSERT(result.n_differ == 0 && (result.passed ? n_hint == 0 : n_hint > 0 || result.n_compared == 0) && result.passed == !result.reason[0]);
    foreign_files_close(&files);
}

static void try_change(input in, int foreign) {
    rollout_reader *r;
    BR_ASSERT(br_file_write(path, good.bytes, good.n) == BR_OK);
    if (foreign)
        call_it_foreign();
    h5_fuzz_change(path, &names, &in);
    if ((foreign ? rollout_open_foreign(path, &r) : rollout_open(path, &r)) != BR_OK)
        BR_ASSERT(!r && br_last_error()[0]);
    else if (foreign)
        use_foreign(r);
    else
        use(r);
    rollout_reader_close(r);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const input in = {data, data + size};
    try_change(in, 0);
    try_change(in, 1);
    return 0;
}
