/* Names of the stages, as `dump` prints them. */
#include "br_stage.h"

static const char *const stage_name[BR_STAGE_COUNT] = {
    [BR_STAGE_EMBED] = "embed",         [BR_STAGE_RES_ATTN] = "res_attn", [BR_STAGE_NORM_ATTN] = "norm_attn",
    [BR_STAGE_QKV] = "qkv",             [BR_STAGE_CONV] = "conv",         [BR_STAGE_GATE] = "gate",
    [BR_STAGE_KDA] = "kda",             [BR_STAGE_INDEX_TOPK] = "index_topk", [BR_STAGE_MLA] = "mla",
    [BR_STAGE_ATTN_OUT] = "attn_out",   [BR_STAGE_RES_MLP] = "res_mlp",   [BR_STAGE_NORM_MLP] = "norm_mlp",
    [BR_STAGE_ROUTE] = "route",         [BR_STAGE_EXPERTS] = "experts",   [BR_STAGE_FFN_OUT] = "ffn_out",
    [BR_STAGE_FINAL] = "final",         [BR_STAGE_LOGPROB] = "logprob",
};

const char *br_stage_name(br_stage stage) {
    return stage < BR_STAGE_COUNT ? stage_name[stage] : "unknown";
}
