/* The public ledger of a training run; see bitroll_ledger.h. Layer: engine: records are counted by stats, chained by proof, written by io. */
#include "bitroll_ledger.h"
#include "br_mem.h"
#include "ledger_chain.h"
#include "ledger_count.h"

#include <string.h>

struct br_ledger {
    ledger_writer *writer;
    int64_t n_step, last_step; /* last_step: number of the last record, when there is one */
    uint8_t link[BR_LEDGER_LINK_BYTES];
};

static br_status make_run(const br_ledger_run *run, ledger_run *out) {
    if (run->n_config < 0 || run->n_config > BR_LEDGER_CONFIG_BYTES_MAX || (run->n_config > 0 && !run->config))
        return br_fail(BR_E_LIMIT, "a ledger's config of %lld bytes: expected 0 to %d", (long long)run->n_config, BR_LEDGER_CONFIG_BYTES_MAX);
    *out = (ledger_run){.format = LEDGER_FORMAT, .version = LEDGER_FORMAT_VERSION, .contract = run->contract, .base_rollout = run->base_rollout,
                        .base_trainer = run->base_trainer, .config_digest = br_hash_bytes(run->n_config ? run->config : "", (size_t)run->n_config),
                        .n_config = run->n_config, .n_step_closed = -1};
    return ledger_link_run(out, out->link);
}

static br_status open_ledger(const char *path, const ledger_run *run, const char *config, const ledger_reader *prefix, int64_t n_step,
                             br_ledger **out) {
    br_status status;
    br_ledger *ledger;
    br_ledger_record last;
    BR_TRY(br_mem_alloc((void **)&ledger, sizeof *ledger, "the ledger"));
    memcpy(ledger->link, run->link, sizeof ledger->link);
    ledger->n_step = n_step;
    if (n_step > 0) {
        ledger_record_at(prefix, n_step - 1, &last);
        memcpy(ledger->link, last.link, sizeof ledger->link);
        ledger->last_step = last.step;
    }
    BR_TRY_GOTO(ledger_writer_open(path, run, config, prefix, n_step, &ledger->writer), fail);
    *out = ledger;
    return BR_OK;
fail:
    br_mem_free(ledger);
    return status;
}

br_status br_ledger_create(const char *path, const br_ledger_run *run, br_ledger **out) {
    ledger_run record;
    *out = NULL;
    BR_TRY(make_run(run, &record));
    return open_ledger(path, &record, run->config, NULL, 0, out);
}

static br_status check_same_run(const char *path, const ledger_run *have, const ledger_run *want) {
    const struct { const char *what; br_digest have, want; } pair[] = {
        {"contract digest", have->contract, want->contract},
        {"rollout base digest", have->base_rollout, want->base_rollout},
        {"trainer base digest", have->base_trainer, want->base_trainer},
        {"config digest", have->config_digest, want->config_digest},
    };
    for (size_t i = 0; i < sizeof pair / sizeof pair[0]; i++) {
        char a[BR_DIGEST_TEXT_BYTES], b[BR_DIGEST_TEXT_BYTES];
        br_digest_text(pair[i].have, a);
        br_digest_text(pair[i].want, b);
        if (!br_digest_equal(pair[i].have, pair[i].want))
            return br_fail(BR_E_MISMATCH, "%s: cannot resume: its %s is %s, this run's is %s", path, pair[i].what, a, b);
    }
    return BR_OK;
}

br_status br_ledger_resume(const char *path, const br_ledger_run *run, int64_t n_step, br_ledger **out) {
    br_status status;
    ledger_run record;
    ledger_reader *prefix;
    *out = NULL;
    BR_TRY(make_run(run, &record));
    BR_TRY(ledger_open(path, &prefix));
    BR_TRY_GOTO(check_same_run(path, ledger_run_of(prefix), &record), exit);
    if (n_step < 0 || n_step > ledger_step_count(prefix))
        status = br_fail(BR_E_ARG, "%s: cannot keep %lld steps: it has %lld", path, (long long)n_step, (long long)ledger_step_count(prefix));
    else
        status = open_ledger(path, &record, run->config, prefix, n_step, out);
exit:
    ledger_close(prefix);
    return status;
}

br_status br_ledger_steps(const char *path, int64_t *n_step) {
    ledger_reader *reader;
    *n_step = 0;
    BR_TRY(ledger_open(path, &reader));
    *n_step = ledger_step_count(reader);
    ledger_close(reader);
    return BR_OK;
}

/* ---- steps ------------------------------------------------------------------------------------------------------------------ */

static br_status take_seq(const br_ledger_seq *from, ledger_seq *to) {
    *to = (ledger_seq){.sample = from->sample, .group = from->group, .stop = from->stop, .temperature = from->temperature,
                       .version_begin = from->version_begin, .version_end = from->version_end, .reward = from->reward,
                       .advantage = from->advantage, .prompt_len = from->prompt_len, .n_tok = from->n_tok, .token = from->token,
                       .mask = from->mask, .logprob = {from->rollout, from->again, from->update}};
    const size_t n = strlen(from->uid);
    if (n > BR_UID_BYTES_MAX)
        return br_fail(BR_E_ARG, "uid of %zu bytes: expected 1 to %d", n, BR_UID_BYTES_MAX);
    memcpy(to->uid, from->uid, n);
    BR_TRY(ledger_seq_check(to));
    ledger_leaves(to);
    return BR_OK;
}

static br_status append(br_ledger *ledger, const br_ledger_step *step, ledger_seq *seq, br_ledger_record *record) {
    for (int64_t i = 0; i < step->n_seq; i++) {
        br_status status = take_seq(&step->seq[i], &seq[i]);
        if (status != BR_OK)
            return br_fail_context(status, "step %lld, sequence %lld (uid '%.80s', sample %u)", (long long)step->step, (long long)i,
                                   step->seq[i].uid, step->seq[i].sample);
    }
    *record = (br_ledger_record){.step = step->step, .version = step->version, .adapter_rollout = step->adapter_rollout,
                                 .adapter_trainer = step->adapter_trainer};
    ledger_fill_digests(seq, step->n_seq, record);
    ledger_count(seq, step->n_seq, record);
    BR_TRY(ledger_link_record(ledger->link, record, record->link));
    BR_TRY(ledger_writer_append(ledger->writer, record, seq));
    memcpy(ledger->link, record->link, sizeof ledger->link);
    ledger->last_step = step->step;
    ledger->n_step++;
    return BR_OK;
}

br_status br_ledger_append(br_ledger *ledger, const br_ledger_step *step, br_ledger_record *record) {
    ledger_seq *seq;
    br_ledger_record made;
    if (ledger->n_step > 0 && (step->step <= ledger->last_step || step->step - 1 != ledger->last_step))
        return br_fail(BR_E_ARG, "step %lld cannot follow step %lld: expected the next one", (long long)step->step,
                       (long long)ledger->last_step);
    if (step->n_seq < 0 || step->n_seq > INT32_MAX)
        return br_fail(BR_E_ARG, "step %lld: %lld sequences: expected 0 or more", (long long)step->step, (long long)step->n_seq);
    BR_TRY(br_mem_alloc((void **)&seq, (size_t)step->n_seq * sizeof *seq, "the sequences of a step"));
    br_status status = append(ledger, step, seq, &made);
    br_mem_free(seq);
    if (status == BR_OK && record)
        *record = made;
    return status;
}

int64_t br_ledger_step_count(const br_ledger *ledger) {
    return ledger->n_step;
}

void br_ledger_root(const br_ledger *ledger, uint8_t link[BR_LEDGER_LINK_BYTES]) {
    memcpy(link, ledger->link, sizeof ledger->link);
}

br_status br_ledger_close(br_ledger *ledger) {
    if (!ledger)
        return BR_OK;
    br_status status = ledger_writer_close(ledger->writer);
    br_mem_free(ledger);
    return status;
}
