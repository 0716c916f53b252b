/* bitroll_ops: the ops of the engine, one at a time, on the caller's arrays: how a trainer computes the same bits.
 *
 * Public, C99, for those who build a model out of the ops (the Python package does, through ctypes). An op is named by its field in
 * bi_ops or, behind "grad_", in bi_grad_ops; its arguments are bi_<op>_args or bi_grad_<op>_args of the op's header, which says shapes,
 * clauses of CONTRACT.md and errors. On backend "oracle" every pointer is host memory and the call returns when the work is done; on
 * "cuda" every pointer but those that a header calls host memory is memory of the GPU, and the work lies on the stream given at open. */
#ifndef BITROLL_OPS_H
#define BITROLL_OPS_H

#include "bi_grad.h"
#include "bitroll.h"
#include "br_config.h"

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

typedef struct br_ops br_ops;

/* Arguments of the op linear_group. */
typedef struct br_linear_group_args {
    const bi_linear_args *map; /* (n), host memory */
    int32_t n;
} br_linear_group_args;

/* What a checkpoint's config.json says, and the limits that its ops need for rows, sequences of n_pos, ranks and adapters. Errors:
 * those of the file. */
br_status br_ops_config(const char *model_dir, br_config *out);
br_status br_ops_limits(const br_config *config, int32_t rank_max, int32_t n_slot, int32_t n_row_max, int32_t n_pos_max, bi_limits *out);

/* backend: "oracle" or "cuda". stream: a cudaStream_t that outlives the ops, NULL the default stream; the oracle ignores it. n_thread 0:
 * all cores. gradients 0: only the forward ops. Allocates; no later call does. Errors: BR_E_ARG, BR_E_UNSUPPORTED, BR_E_DEVICE,
 * BR_E_NOMEM. *out is NULL on error. */
br_status br_ops_open(const char *backend, const bi_limits *limits, int32_t n_thread, void *stream, int32_t gradients, br_ops **out);
void br_ops_close(br_ops *ops); /* NULL is a no-op */

/* args_bytes: sizeof of the struct as the caller knows it. Errors: BR_E_ARG (no such op, another size), and those of the op. */
br_status br_ops_call(br_ops *ops, const char *op, const void *args, size_t args_bytes);
br_status br_ops_wait(br_ops *ops); /* until all work is done */

/* Packed matrices from host memory, and sizes: as the fields of bi_ops of these names. */
size_t br_ops_mat_bytes(const br_ops *ops, bi_form form, int32_t n_out, int32_t n_in);
br_status br_ops_mat_pack_bf16(br_ops *ops, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out, int64_t stride_in);
br_status br_ops_mat_pack_fp4(br_ops *ops, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale);
br_status br_ops_attnres_weight(br_ops *ops, float *w, const float *norm, const float *proj, int32_t d);
size_t br_ops_kda_state_bytes(const br_ops *ops, int32_t n_head, int32_t d);
size_t br_ops_latent_block_bytes(const br_ops *ops, int32_t d_latent);
size_t br_ops_index_block_bytes(const br_ops *ops, int32_t d);

/* The digest that the engine's files and dumps use (XXH3, 128 bits), of bytes in host memory. */
br_digest br_ops_hash(const void *bytes, size_t n);

/* Constants of a model that the contract rounds once. */
float br_ops_attn_alpha(int32_t d_nope, int32_t d_rope);
float br_ops_index_c(int32_t n_head, int32_t d);
float br_ops_kda_scale(int32_t d);
float br_ops_lora_s(double alpha, int32_t rank, int32_t rslora);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif
