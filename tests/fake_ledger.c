/* Made-up ledgers; see fake_ledger.h. */
#include "fake_ledger.h"
#include "br_file.h"
#include "ledger_chain.h"
#include "ledger_count.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char config[] = "seed: 1\nsteps: 4\n";

br_ledger_run fake_ledger_run(void) {
    return (br_ledger_run){.contract = br_contract_digest(), .base_rollout = {5, 6}, .base_trainer = {5, 6}, .config = config,
                           .n_config = (int64_t)strlen(config)};
}

static uint32_t some_logprob(uint64_t seed) {
    const float x = -(float)(test_mix(seed) % 100000) / 8192.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void make_seq(int i, int s, fake_step *out) {
    const uint64_t seed = (uint64_t)(1000 * i + 100 * s);
    const int32_t prompt = s ? 2 + (int32_t)(test_mix(seed) % 6) : 1, n = s ? prompt + 4 + (int32_t)(test_mix(seed + 1) % 20) : 1;
    snprintf(out->uid[s], sizeof out->uid[s], "step %d prompt %d", i, s / 2);
    out->seq[s] = (br_ledger_seq){
        .uid = out->uid[s], .sample = (uint32_t)(s % 2), .group = s / 2, .prompt_len = prompt, .n_tok = n, .stop = BR_STOP_LENGTH,
        .temperature = 0.7f, .version_begin = i, .version_end = i, .reward = s % 3 * 0.5, .advantage = s - 1.25, .token = out->token[s],
        .mask = out->mask[s], .rollout = out->logprob[s][0], .again = out->logprob[s][1], .update = out->logprob[s][2]};
    for (int32_t t = 0; t < n; t++) {
        out->token[s][t] = (int32_t)(test_mix(seed + 7 * (uint64_t)t) % 512);
        out->mask[s][t] = t >= prompt && !(s == 1 && t == prompt + 2); /* what the environment said */
        for (int a = 0; a < 3; a++)
            out->logprob[s][a][t] = out->mask[s][t] ? some_logprob(seed + 50 + (uint64_t)t) : BR_UNSCORED;
    }
}

void fake_step_make(int i, fake_step *out) {
    memset(out, 0, sizeof *out);
    out->step = (br_ledger_step){.step = 10 + i, .version = i, .adapter_rollout = {(uint64_t)i, 77}, .adapter_trainer = {(uint64_t)i, 77},
                                 .seq = out->seq, .n_seq = i == 2 ? 0 : FAKE_STEP_SEQS};
    for (int s = 0; s < FAKE_STEP_SEQS; s++)
        make_seq(i, s, out);
}

void fake_step_spoil(fake_step *step, int s) {
    const int32_t t = step->seq[s].prompt_len;
    step->logprob[s][1][t] ^= 4;
    step->logprob[s][2][t] ^= 1;
    step->logprob[s][2][t + 1] ^= 1u << 20;
}

void fake_root(const uint8_t link[BR_LEDGER_LINK_BYTES], char root[65]) {
    for (int i = 0; i < BR_LEDGER_LINK_BYTES; i++)
        snprintf(root + 2 * i, 3, "%02x", link[i]);
}

void fake_ledger_write(const char *path, int n, int spoiled, char root[65]) {
    static fake_step step;
    const br_ledger_run run = fake_ledger_run();
    uint8_t link[BR_LEDGER_LINK_BYTES];
    br_ledger *ledger;
    CHECK_OK(br_ledger_create(path, &run, &ledger));
    for (int i = 0; i < n; i++) {
        fake_step_make(i, &step);
        if (i == spoiled) {
            fake_step_spoil(&step, 1);
            fake_step_spoil(&step, 3);
        }
        CHECK_OK(br_ledger_append(ledger, &step.step, NULL));
    }
    ck_assert_int_eq(br_ledger_step_count(ledger), n);
    br_ledger_root(ledger, link);
    fake_root(link, root);
    CHECK_OK(br_ledger_close(ledger));
}

br_status fake_ledger_verify(const char *path, br_report *report) {
    const br_verify_options options = {.path = path};
    return br_job_verify(&options, NULL, report);
}

void fake_ledger_expect_good(const char *path, int n_step, const char *root) {
    br_report report;
    char head[64];
    CHECK_OK(fake_ledger_verify(path, &report));
    snprintf(head, sizeof head, "ledger: %d steps, 0 of ", n_step);
    ck_assert_msg(strstr(report.summary, head) && strstr(report.summary, "log-probs differ, KL 0 at every step, ") && strstr(report.summary, root),
                  "%s", report.summary);
    br_report_free(&report);
}

void fake_file_copy(const char *from, const char *to, size_t n_max) {
    br_map map;
    CHECK_OK(br_file_map(from, &map));
    CHECK_OK(br_file_write(to, map.bytes, map.n < n_max ? map.n : n_max));
    br_file_unmap(&map);
}

int fake_file_same(const char *a, const char *b) {
    br_map x, y;
    CHECK_OK(br_file_map(a, &x));
    CHECK_OK(br_file_map(b, &y));
    const int same = x.n == y.n && memcmp(x.bytes, y.bytes, x.n) == 0;
    br_file_unmap(&x);
    br_file_unmap(&y);
    return same;
}

/* ---- copies ----------------------------------------------------------------------------------------------------------------- */

void fake_copy_begin(const char *from, const char *to, fake_copy *copy) {
    CHECK_OK(ledger_open(from, &copy->reader));
    const ledger_run *run = ledger_run_of(copy->reader);
    copy->n_seq_max = ledger_seq_count(copy->reader);
    memcpy(copy->link, run->link, sizeof copy->link);
    CHECK_OK(ledger_writer_open(to, run, ledger_config_of(copy->reader), NULL, 0, &copy->writer));
}

void fake_copy_step(fake_copy *copy, int i, int sealed, void (*change)(br_ledger_record *record, ledger_seq *seq)) {
    const int64_t *seq_begin = ledger_seq_begin(copy->reader), *offset = ledger_offset(copy->reader);
    ledger_seq *seq = calloc((size_t)copy->n_seq_max + 1, sizeof *seq);
    br_ledger_record record;
    ledger_record_at(copy->reader, i, &record);
    for (int64_t k = 0; k < record.n_seq; k++)
        ledger_seq_at(copy->reader, seq_begin[i] + k, offset[seq_begin[i] + k], offset[seq_begin[i] + k + 1], &seq[k]);
    if (sealed)
        ledger_count(seq, record.n_seq, &record);
    if (change)
        change(&record, seq);
    if (sealed) {
        for (int64_t k = 0; k < record.n_seq; k++)
            ledger_leaves(&seq[k]);
        ledger_fill_digests(seq, record.n_seq, &record);
        CHECK_OK(ledger_link_record(copy->link, &record, record.link));
    }
    memcpy(copy->link, record.link, sizeof copy->link);
    CHECK_OK(ledger_writer_append(copy->writer, &record, seq));
    free(seq);
}

void fake_copy_end(fake_copy *copy) {
    CHECK_OK(ledger_writer_close(copy->writer));
    ledger_close(copy->reader);
}
