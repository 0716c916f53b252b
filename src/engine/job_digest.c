/* `bitroll digest`: the digest of each tensor of a checkpoint, by name, and their Merkle root.
 *
 * Layer: engine. Two checkpoints are compared with plain `diff` of the lines. An adapter has no digest without the model it
 * belongs to (its ranks and scales by map count as well), so an adapter folder is refused by name. */
#include "bi_contract.h"
#include "br_file.h"
#include "br_weights.h"
#include "config_json.h"

#include <stdio.h>
#include <string.h>

typedef struct digest_lines {
    br_line line;
    void *context;
} digest_lines;

static void say_tensor(void *context, const br_tensor *tensor, br_digest digest) {
    const digest_lines *out = context;
    char text[BR_DIGEST_TEXT_BYTES + BR_NAME_BYTES + 8], hex[BR_DIGEST_TEXT_BYTES], plain[BR_NAME_BYTES];
    br_weight_plain_name(tensor->name, strlen(tensor->name), plain);
    br_digest_text(digest, hex);
    snprintf(text, sizeof text, "%s  %s", hex, plain);
    out->line(out->context, text);
}

static br_status refuse_adapter(const char *dir) {
    char config[BR_PATH_BYTES], adapter[BR_PATH_BYTES];
    BR_TRY(br_file_join(config, dir, "config.json"));
    BR_TRY(br_file_join(adapter, dir, "adapter_config.json"));
    if (!br_file_exists(config) && br_file_exists(adapter))
        return br_fail(BR_E_UNSUPPORTED,
                       "%s: an adapter folder; its digest comes with the model it is loaded on, as in generate and score",
                       dir);
    return BR_OK;
}

br_status br_job_digest(const char *dir, br_line line, void *context, br_report *report) {
    digest_lines lines = {.line = line, .context = context};
    br_config config;
    br_weights *weights;
    char text[64], hex[BR_DIGEST_TEXT_BYTES];
    *report = (br_report){.first_seq = -1, .first_pos = -1, .contract_digest = bi_contract_digest()};
    BR_TRY(refuse_adapter(dir));
    BR_TRY(br_config_read(dir, &config));
    BR_TRY(br_weights_open(dir, &config, &weights));
    report->weights_digest = br_weights_digest_each(weights, say_tensor, &lines);
    br_digest_text(report->weights_digest, hex);
    snprintf(text, sizeof text, "weights %s", hex);
    line(context, text);
    br_weights_close(weights);
    return BR_OK;
}
