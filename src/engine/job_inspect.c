/* `bitroll inspect`: the limits, layouts and constants of this build, and what a checkpoint holds, as lines of text.
 *
 * Layer: engine. Opens headers only, so it works on sparse checkpoints whose data are absent. The lines are compared as text
 * with golden files: a change here is a change there. Sizes are those of the formats, before a backend packs them. */
#include "bi_contract.h"
#include "br_pool.h"
#include "checkpoint.h"
#include "config_json.h"
#include "lora_slots.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LINE_BYTES = 512, LIST_MAX = 20 };

typedef struct sink {
    br_line line;
    void *context;
} sink;

static void say(const sink *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(const sink *out, const char *format, ...) {
    char text[LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    out->line(out->context, text);
}

static void say_limits(const sink *out) {
    say(out, "limits");
    say(out, "  layers               %d", BR_LAYER_MAX);
    say(out, "  vocabulary           %d", BR_VOCAB_MAX);
    say(out, "  d_model              %d", BR_D_MODEL_MAX);
    say(out, "  heads                %d", BR_HEAD_MAX);
    say(out, "  experts              %d", BR_EXPERT_MAX);
    say(out, "  experts a token      %d", BR_EXPERT_TOPK_MAX);
    say(out, "  bank rows            %d", BR_BANK_MAX);
    say(out, "  positions            %d", BR_POSITION_MAX);
    say(out, "  adapters             %d", LORA_ADAPTER_MAX);
    say(out, "  adapter rank         %d", LORA_RANK_MAX);
    say(out, "  stop tokens          %d", BR_STOP_MAX);
    say(out, "  top log-probs        %d", BR_TOP_LOGPROBS_MAX);
    say(out, "  uid bytes            %d", BR_UID_BYTES_MAX);
    say(out, "  threads              %d", BR_THREAD_MAX);
}

static void say_layouts(const sink *out) {
    say(out, "layouts");
    say(out, "  page                 %d positions of one sequence, all MLA layers", BR_PAGE_TOK);
    say(out, "  latent row           (d_kv_latent + d_rope) bf16 a position and MLA layer");
    say(out, "  index row            d_index e4m3 and one f32 scale a position and MLA layer with an indexer");
    say(out, "  KDA state            n_head * d_head * d_head f32 a sequence and KDA layer");
    say(out, "  conv history         3 streams * %d rows * n_head * d_head bf16 a sequence and KDA layer", BR_CONV_TAP - 1);
    say(out, "  expert MXFP4         two E2M1 codes a byte, low nibble first; one E8M0 byte 0..252 for 32 values");
    say(out, "  attention            blocks of %d entries, parts of %d", BI_ATT_BLOCK, BI_ATT_PART);
}

static void say_contract(const sink *out) {
    char text[LINE_BYTES], digest[BR_DIGEST_TEXT_BYTES];
    say(out, "contract version %d", BI_CONTRACT_VERSION);
    for (int i = 0; bi_contract_line(i, text, sizeof text); i++)
        say(out, "  %s", text);
    br_digest_text(bi_contract_digest(), digest);
    say(out, "contract digest %s", digest);
}

static void say_config(const sink *out, const br_config *c) {
    static const char *const ARCH[] = {
        [BR_ARCH_KIMI_K31] = "KimiK31", [BR_ARCH_KIMI_K3] = "KimiK3", [BR_ARCH_KIMI_LINEAR] = "KimiLinear"};
    say(out, "model %s", ARCH[c->arch]);
    say(out, "  layers               %d: %d KDA, %d MLA; the first %d with a dense MLP", c->n_layer, c->n_kda_layer,
        c->n_mla_layer, c->n_dense_layer);
    say(out, "  vocabulary           %d, d_model %d, positions %d, eos %d", c->n_vocab, c->d_model, c->position_max,
        c->eos_id);
    say(out, "  KDA                  %d heads * %d, %s decay, %s gate", c->kda_n_head, c->kda_d_head,
        c->kda_bounded ? "bounded" : "softplus", c->kda_full_gate ? "full-rank" : "low-rank");
    say(out, "  MLA                  %d heads, d_nope %d, d_rope %d, d_v %d, latents q %d kv %d, %s", c->n_head, c->d_nope,
        c->d_rope, c->d_v, c->d_q_latent, c->d_kv_latent, c->mla_gate ? "output gate" : "no gate");
    if (c->index_n_head)
        say(out, "  indexer              %d heads * %d, top-k %d", c->index_n_head, c->index_d_head, c->index_topk);
    say(out, "  experts              %d, %d a token, width %d, ff %d, %s; %d shared", c->n_expert, c->n_expert_topk,
        br_config_expert_width(c), c->d_expert_ff, c->experts_fp4 ? "MXFP4" : "bf16", c->n_shared_expert);
    say(out, "  dense ff             %d", c->d_ff);
    say(out, "  residual             %s", c->res_block ? "bank" : "plain");
    if (c->res_block)
        say(out, "  bank write           before every %d layers", c->res_block);
}

/* One line a class; returns the bytes of all. */
static int64_t say_classes(const sink *out, const br_weights *w) {
    int64_t total = 0, i = 0;
    const int64_t n = br_weights_count(w);
    say(out, "tensors by class     count          bytes");
    while (i < n) {
        const br_class cls = br_weights_at(w, i)->cls;
        int64_t count = 0, bytes = 0;
        for (; i < n && br_weights_at(w, i)->cls == cls; i++, count++)
            bytes += (int64_t)br_weights_at(w, i)->n_byte;
        say(out, "  %-18s %6lld %14lld", br_class_name(cls), (long long)count, (long long)bytes);
        total += bytes;
    }
    return total;
}

static void say_strays(const sink *out, const br_weights *w) {
    if (br_weights_origin(w)) {
        say(out, "tensors              %lld generated, in no file: %s", (long long)br_weights_count(w), br_weights_origin(w));
        return;
    }
    const int64_t n_unknown = br_weights_unknown_count(w), n_missing = br_weights_missing_count(w);
    const int64_t n_all = br_weights_count(w) + br_weights_skipped(w) + n_unknown;
    say(out, "tensors              %lld in %d shards: %lld text, %lld vision (skipped), %lld unknown; %lld missing",
        (long long)n_all, br_weights_shard_count(w), (long long)br_weights_count(w), (long long)br_weights_skipped(w),
        (long long)n_unknown, (long long)n_missing);
    for (int64_t i = 0; i < n_unknown && i < LIST_MAX; i++)
        say(out, "  unknown            %s", br_weights_unknown_at(w, i));
    for (int64_t i = 0; i < n_missing && i < LIST_MAX; i++) {
        char name[BR_NAME_BYTES];
        br_weights_missing_at(w, i, name);
        say(out, "  missing            %s", name);
    }
    if (n_unknown > LIST_MAX || n_missing > LIST_MAX)
        say(out, "  ...                only the first %d of each are listed", LIST_MAX);
}

/* bf16 bytes that one rank of an adapter on the classes `from` to `end` - 1 adds. */
static int64_t adapter_bytes(const br_config *c, int from, int end) {
    int64_t bytes = 0;
    for (int cls = from; cls < end; cls++) {
        for (int32_t l = 0; l < c->n_layer; l++) {
            int32_t n_out, n_in;
            const int64_t n_map = cls >= BR_W_EXPERT_W1 ? c->n_expert : 1;
            if (br_linear_shape(c, (br_class)cls, l, &n_out, &n_in))
                bytes += n_map * ((int64_t)n_out + n_in) * 2;
        }
    }
    return bytes;
}

static void say_memory(const sink *out, const br_config *c, int64_t weight_bytes) {
    const int64_t width = br_config_kda_width(c);
    const int64_t latent = (int64_t)c->n_mla_layer * br_config_latent_dim(c) * 2;
    const int64_t index = c->index_n_head ? (int64_t)c->n_mla_layer * (c->index_d_head + 4) : 0;
    const int64_t state = c->n_kda_layer * width * c->kda_d_head * 4;
    const int64_t history = c->n_kda_layer * 3 * (BR_CONV_TAP - 1) * width * 2;
    say(out, "memory               bytes");
    say(out, "  weights            %lld", (long long)weight_bytes);
    say(out, "  cache a token      %lld: latent %lld, index %lld", (long long)(latent + index), (long long)latent,
        (long long)index);
    say(out, "  cache a page       %lld", (long long)((latent + index) * BR_PAGE_TOK));
    say(out, "  state a sequence   %lld: KDA %lld, conv %lld", (long long)(state + history), (long long)state,
        (long long)history);
    say(out, "  adapter a rank     %lld: attention %lld, other dense %lld, routed experts %lld",
        (long long)adapter_bytes(c, 0, BR_CLASS_LORA_END), (long long)adapter_bytes(c, 0, BR_W_MLP_GATE),
        (long long)adapter_bytes(c, BR_W_MLP_GATE, BR_W_EXPERT_W1),
        (long long)adapter_bytes(c, BR_W_EXPERT_W1, BR_CLASS_LORA_END));
}

br_status br_job_inspect(const char *model_dir, br_line line, void *context) {
    const sink out = {.line = line, .context = context};
    br_config config;
    br_weights *weights;
    if (!model_dir) {
        say(&out, "bitroll %s, ABI %d", BR_VERSION_TEXT, BR_ABI_VERSION);
        say_limits(&out);
        say_layouts(&out);
        say_contract(&out);
        return BR_OK;
    }
    BR_TRY(br_config_read(model_dir, &config));
    say_config(&out, &config);
    BR_TRY(checkpoint_survey(model_dir, &config, &weights));
    int64_t bytes = say_classes(&out, weights);
    say_strays(&out, weights);
    say_memory(&out, &config, bytes);
    br_status status = br_weights_complete(weights);
    br_weights_close(weights);
    return status;
}
