/* The ops by name, for callers outside the engine; see bitroll_ops.h.
 *
 * Layer: ops; includes base, device, io's config_json, model (limits), kernels_batch_invariant. No arithmetic. */
#include "bitroll_ops.h"

#include "bi_cuda_open.h"
#include "br_device.h"
#include "br_hash.h"
#include "br_mem.h"
#include "br_model.h"
#include "br_pool.h"
#include "config_json.h"

#include <stdio.h>
#include <string.h>

struct br_ops {
    br_pool *pool;
    br_device *device;
    bi_backend backend;
    bi_grad grad; /* op NULL: opened without */
};

/* Forward ops that take (ctx, args), and gradients. */
#define FORWARD(X)                                                                                                                     \
    X(embed, bi_embed_args) X(rmsnorm, bi_norm_args) X(layernorm, bi_norm_args) X(linear, bi_linear_args) X(conv, bi_conv_args)        \
    X(kda_gate, bi_kda_gate_args) X(kda, bi_kda_args) X(kda_norm, bi_kda_norm_args) X(latent_store, bi_latent_store_args)              \
    X(attn, bi_attn_args) X(attn_gate, bi_attn_gate_args) X(index_store, bi_index_store_args) X(index_select, bi_index_select_args)    \
    X(route, bi_route_args) X(experts, bi_experts_args) X(combine, bi_combine_args) X(glu, bi_glu_args) X(attnres, bi_attnres_args)    \
    X(residual, bi_residual_args) X(score, bi_score_args) X(mat_pack_f32, bi_mat_pack_f32_args) X(mat_unpack, bi_mat_unpack_args)
#define GRADIENT(X) \
    X(rmsnorm, norm) X(linear, linear) X(conv, conv) X(kda_gate, kda_gate) X(kda, kda) X(kda_norm, kda_norm) X(attn, attn)             \
    X(attn_gate, attn_gate) X(route, route) X(experts, experts) X(combine, combine) X(glu, glu) X(attnres, attnres) X(score, score)

#define CALL_FORWARD(name, type)                                                      \
    static br_status call_##name(br_ops *ops, const void *args) {                     \
        return ops->backend.op->name(ops->backend.ctx, (const type *)args);           \
    }
FORWARD(CALL_FORWARD)
static br_status call_linear_group(br_ops *ops, const void *args) {
    const br_linear_group_args *group = args;
    return ops->backend.op->linear_group(ops->backend.ctx, group->map, group->n);
}
#define CALL_GRADIENT(name, type)                                                     \
    static br_status call_grad_##name(br_ops *ops, const void *args) {                \
        return ops->grad.op->name(ops->grad.ctx, (const bi_grad_##type##_args *)args); \
    }
GRADIENT(CALL_GRADIENT)

static const struct {
    const char *name;
    size_t args_bytes;
    int32_t is_gradient;
    br_status (*call)(br_ops *ops, const void *args);
} table[] = {
#define ROW_FORWARD(name, type) {#name, sizeof(type), 0, call_##name},
    FORWARD(ROW_FORWARD)
    {"linear_group", sizeof(br_linear_group_args), 0, call_linear_group},
#define ROW_GRADIENT(name, type) {"grad_" #name, sizeof(bi_grad_##type##_args), 1, call_grad_##name},
    GRADIENT(ROW_GRADIENT)
};

br_status br_ops_config(const char *model_dir, br_config *out) {
    return br_config_read(model_dir, out);
}

br_status br_ops_limits(const br_config *config, int32_t rank_max, int32_t n_slot, int32_t n_row_max, int32_t n_pos_max, bi_limits *out) {
    if (rank_max < 0 || n_slot < 0 || n_row_max < 1 || n_pos_max < 1)
        return br_fail(BR_E_ARG, "limits of ops for rank %d, %d adapters, %d rows, %d positions: expected at least 0, 0, 1 and 1", rank_max,
                       n_slot, n_row_max, n_pos_max);
    *out = br_model_limits(config, rank_max, n_slot, n_row_max, n_pos_max);
    return BR_OK;
}

static br_status open_parts(br_ops *ops, const bi_limits *limits, int32_t gradients) {
    if (br_device_is_host(ops->device)) {
        BR_TRY(bi_backend_oracle_open(limits, ops->pool, NULL, &ops->backend));
        return gradients ? bi_grad_host_open(limits, ops->pool, &ops->grad) : BR_OK;
    }
    BR_TRY(bi_backend_cuda_open(limits, ops->device, &ops->backend));
    return gradients ? bi_grad_cuda_open(limits, ops->device, &ops->grad) : BR_OK;
}

br_status br_ops_open(const char *backend, const bi_limits *limits, int32_t n_thread, void *stream, int32_t gradients, br_ops **out) {
    br_ops *ops = NULL;
    br_status status = BR_OK;
    const int oracle = strcmp(backend, "oracle") == 0;
    *out = NULL;
    if (!oracle && strcmp(backend, "cuda") != 0)
        return br_fail(BR_E_ARG, "ops on backend '%s': expected oracle or cuda", backend);
    BR_TRY(br_mem_alloc((void **)&ops, sizeof *ops, "the ops"));
    BR_TRY_GOTO(br_pool_open(n_thread ? n_thread : br_pool_core_count(), &ops->pool), fail);
    BR_TRY_GOTO(br_device_open_on(oracle ? "host" : "cuda", stream, &ops->device), fail);
    BR_TRY_GOTO(open_parts(ops, limits, gradients), fail);
    *out = ops;
    return BR_OK;
fail:
    br_ops_close(ops);
    return status;
}

void br_ops_close(br_ops *ops) {
    if (!ops)
        return;
    bi_grad_close(&ops->grad);
    bi_backend_close(&ops->backend);
    if (ops->device)
        br_device_close(ops->device);
    br_pool_close(ops->pool);
    br_mem_free(ops);
}

br_status br_ops_call(br_ops *ops, const char *op, const void *args, size_t args_bytes) {
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strcmp(table[i].name, op) != 0)
            continue;
        if (args_bytes != table[i].args_bytes)
            return br_fail(BR_E_ARG, "op %s: arguments of %zu bytes: expected %zu: the caller was built for another version", op, args_bytes,
                           table[i].args_bytes);
        if (table[i].is_gradient && !ops->grad.op)
            return br_fail(BR_E_ARG, "op %s: these ops were opened without gradients", op);
        return table[i].call(ops, args);
    }
    return br_fail(BR_E_ARG, "op '%s': there is none of this name", op);
}

br_status br_ops_wait(br_ops *ops) {
    return br_device_wait(ops->device);
}

size_t br_ops_mat_bytes(const br_ops *ops, bi_form form, int32_t n_out, int32_t n_in) {
    return ops->backend.op->mat_bytes(form, n_out, n_in);
}

br_status br_ops_mat_pack_bf16(br_ops *ops, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out,
                               int64_t stride_in) {
    return ops->backend.op->mat_pack_bf16(ops->backend.ctx, dst, n_out, n_in, src, stride_out, stride_in);
}

br_status br_ops_mat_pack_fp4(br_ops *ops, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale) {
    return ops->backend.op->mat_pack_fp4(ops->backend.ctx, dst, n_out, n_in, code, scale);
}

br_status br_ops_attnres_weight(br_ops *ops, float *w, const float *norm, const float *proj, int32_t d) {
    return ops->backend.op->attnres_weight(ops->backend.ctx, w, norm, proj, d);
}

size_t br_ops_kda_state_bytes(const br_ops *ops, int32_t n_head, int32_t d) {
    return ops->backend.op->kda_state_bytes(n_head, d);
}

size_t br_ops_latent_block_bytes(const br_ops *ops, int32_t d_latent) {
    return ops->backend.op->latent_block_bytes(d_latent);
}

size_t br_ops_index_block_bytes(const br_ops *ops, int32_t d) {
    return ops->backend.op->index_block_bytes(d);
}

br_digest br_ops_hash(const void *bytes, size_t n) {
    return br_hash_bytes(bytes, n);
}

float br_ops_attn_alpha(int32_t d_nope, int32_t d_rope) {
    return bi_const_attn_alpha(d_nope, d_rope);
}

float br_ops_index_c(int32_t n_head, int32_t d) {
    return bi_const_index_c(n_head, d);
}

float br_ops_kda_scale(int32_t d) {
    return bi_const_kda_scale(d);
}

float br_ops_lora_s(double alpha, int32_t rank, int32_t rslora) {
    return bi_const_lora_s(alpha, rank, rslora);
}
