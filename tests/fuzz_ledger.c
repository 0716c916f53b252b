/* libFuzzer target: damaged ledgers of training runs; the input is a list of changes to a good one (h5_fuzz.h). What the reader accepts must
 * be safe to count and to replay, the search for a flipped bit included. */
#include "br_file.h"
#include "br_mem.h"
#include "h5_fuzz.h"
#include "ledger_chain.h"
#include "ledger_count.h"
#include "ledger_replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const dataset[] = {
    "/commit",          "/run/config",      "/run/n_config",  "/run/n_step_closed", "/run/link",      "/run/config_digest",
    "/step/seq_begin",  "/step/n_seq",      "/step/n_tok",    "/step/first_seq",    "/step/first_pos", "/step/step",
    "/step/rollout",    "/step/link",       "/seq/offset",    "/seq/uid",           "/seq/prompt_len", "/seq/leaf",
    "/seq/reward",      "/seq/stop",        "/tokens/id",     "/tokens/mask",       "/tokens/rollout", "/tokens/again",
};
static const char *const attribute[] = {"format", "format_version"};
static const h5_names names = {dataset, sizeof dataset / sizeof dataset[0], attribute, sizeof attribute / sizeof attribute[0]};

static char good_path[64], path[64];
static br_map good;

static void write_good(void) {
    static const int32_t token[5] = {1, 2, 3, 4, 5};
    static const uint32_t bits[5] = {BR_UNSCORED, BR_UNSCORED, 0xbf800000u, 0xbf800001u, 0xbf800002u};
    static const uint8_t mask[5] = {0, 0, 1, 1, 1};
    ledger_run run = {.format = LEDGER_FORMAT, .version = 1, .config_digest = br_hash_bytes("a: 1", 4), .n_config = 4};
    ledger_writer *w;
    uint8_t link[BR_LEDGER_LINK_BYTES];
    BR_ASSERT(ledger_link_run(&run, run.link) == BR_OK && ledger_writer_open(good_path, &run, "a: 1", NULL, 0, &w) == BR_OK);
    memcpy(link, run.link, sizeof link);
    for (int i = 0; i < 3; i++) {
        ledger_seq seq[2] = {{.uid = "u", .prompt_len = 2, .n_tok = 5, .token = token, .mask = mask, .logprob = {bits, bits, bits}}};
        seq[1] = seq[0];
        ledger_leaves(&seq[0]);
        ledger_leaves(&seq[1]);
        br_ledger_record record = {.step = i};
        ledger_fill_digests(seq, 2, &record);
        ledger_count(seq, 2, &record);
        BR_ASSERT(ledger_link_record(link, &record, record.link) == BR_OK && ledger_writer_append(w, &record, seq) == BR_OK);
        memcpy(link, record.link, sizeof link);
    }
    BR_ASSERT(ledger_writer_close(w) == BR_OK && br_file_map(good_path, &good) == BR_OK);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    H5dont_atexit(); /* HDF5 leaks blocks of metadata that it could not read, and says so at exit */
    snprintf(good_path, sizeof good_path, "/dev/shm/fuzz-ledger-%d-good.h5", (int)getpid());
    snprintf(path, sizeof path, "/dev/shm/fuzz-ledger-%d.h5", (int)getpid());
    write_good();
    unlink(good_path);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    return 0;
}

static void use(const ledger_reader *r) {
    static ledger_replay replay;
    const int64_t n_step = ledger_step_count(r), *begin = ledger_seq_begin(r), *offset = ledger_offset(r);
    br_ledger_record *counted = calloc((size_t)n_step + 1, sizeof *counted);
    for (int64_t i = 0; i < n_step; i++) {
        ledger_seq *seq = calloc((size_t)(begin[i + 1] - begin[i]) + 1, sizeof *seq);
        for (int64_t k = begin[i]; k < begin[i + 1]; k++)
            ledger_seq_at(r, k, offset[k], offset[k + 1], &seq[k - begin[i]]);
        ledger_count(seq, begin[i + 1] - begin[i], &counted[i]);
        free(seq);
    }
    const br_status status = ledger_replay_check(r, counted, &replay);
    BR_ASSERT((status == BR_OK) == (replay.n_fault == 0));
    free(counted);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    ledger_reader *r;
    BR_ASSERT(br_file_write(path, good.bytes, good.n) == BR_OK);
    h5_fuzz_change(path, &names, &in);
    if (ledger_open(path, &r) == BR_OK)
        use(r);
    else
        BR_ASSERT(!r && br_last_error()[0]);
    ledger_close(r);
    unlink(path);
    return 0;
}
