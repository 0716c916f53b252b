/* bi_cuda: what the CUDA backend's op files share. Internal to bi_*.cu; nobody else includes it.
 *
 * Every op launches on the context's stream and returns; nothing here waits, allocates, or reads device memory from the host. One
 * exception: a cuBLASLt plan is proved on a side stream, and waited for, the first time its shape comes (bi_linear_lt.cu).
 * Numbers of a launch (grid, tile, stages) may depend on anything, because no bit does: the order inside a row is written in
 * CONTRACT.md and in the first comment of each .cu file.
 *
 * Arithmetic is BI_ADD, BI_FMA and so on, never an operator on floats that could be contracted; the build compiles with
 * --fmad=false as well, and both give the same code. */
#ifndef BI_CUDA_CUH
#define BI_CUDA_CUH

#include <assert.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifndef _Noreturn
#define _Noreturn [[noreturn]]
#endif
#ifndef restrict
#define restrict __restrict__
#endif
extern "C" {
#include "bi_cuda_open.h"
#include "bi_act.h"
#include "bi_block.h"
#include "bi_fn.h"
#include "br_mem.h"
#include "bi_order.h"
#include "bi_philox.h"
}

/* Every kernel launch is counted under one of these names. */
#define BI_CUDA_KERNELS(X)                                                                                                              \
    X(embed) X(rmsnorm) X(layernorm) X(linear_small) X(linear_large) X(linear_tile) X(linear_wide) X(linear_check) X(lora_t) X(conv)    \
    X(kda_gate) X(kda_decode) X(kda_decode_ring) X(kda_prefill) X(kda_general) X(kda_norm) X(latent_store) X(attn_score) X(attn_value)  \
    X(attn_fused) X(attn_merge) X(attn_gate) X(index_store) X(index_query) X(index_score) X(index_topk) X(route) X(experts_plan)        \
    X(experts_t) X(experts_up) X(experts_down) X(combine) X(glu) X(attnres) X(attnres_weight) X(residual) X(gather) X(seg_fault)        \
    X(head) X(head_merge) X(sample) X(generate_mat) X(generate_vector) X(mat_pack_f32) X(mat_unpack)

typedef enum bi_cuda_kernel {
#define BI_CUDA_ENUM(name) BI_K_##name,
    BI_CUDA_KERNELS(BI_CUDA_ENUM)
#undef BI_CUDA_ENUM
    BI_K_COUNT
} bi_cuda_kernel;

enum { BI_CUDA_SLOT_MAX = 16 }; /* adapters: kernels take their pointers by value */

struct bi_ctx {
    bi_limits limits;
    br_device *device;
    cudaStream_t stream;
    int n_sm;
    unsigned char *scratch; /* one op at a time uses it; in stream order, so ops may follow each other freely */
    size_t scratch_bytes;
    void *dense;            /* state of bi_linear.cu: library handles and chosen algorithms */
    int64_t launch[BI_K_COUNT];
};

/* Device scratch of each op family at given limits; the backend takes the largest. Each in its own file. */
size_t bi_cuda_linear_scratch(const bi_limits *limits);
size_t bi_cuda_experts_scratch(const bi_limits *limits);
size_t bi_cuda_kda_scratch(const bi_limits *limits);
size_t bi_cuda_attn_scratch(const bi_limits *limits);
size_t bi_cuda_index_scratch(const bi_limits *limits);
size_t bi_cuda_route_scratch(const bi_limits *limits);
size_t bi_cuda_head_scratch(const bi_limits *limits);
size_t bi_cuda_sample_scratch(const bi_limits *limits);

/* Made when the backend opens, after scratch: what needs more than scratch. */
br_status bi_cuda_linear_open(bi_ctx *ctx);
void bi_cuda_linear_close(bi_ctx *ctx);
void bi_cuda_linear_note(const bi_ctx *ctx, char *note, size_t n);

/* Counts the launch just made and turns a refused one into a status. */
static inline br_status bi_cuda_launched(bi_ctx *ctx, bi_cuda_kernel kernel, const char *op) {
    cudaError_t error = cudaGetLastError();
    ctx->launch[kernel]++;
    return error == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "%s: the GPU refused the launch: %s", op, cudaGetErrorString(error));
}

/* Carves the scratch in 256-byte steps; asserts that the op's own measure was right. */
typedef struct bi_carver {
    unsigned char *base;
    size_t used, size; /* base NULL: only measures */
} bi_carver;
static inline void *bi_carve(bi_carver *carver, size_t bytes) {
    unsigned char *at = carver->base ? carver->base + carver->used : NULL;
    carver->used += (bytes + 255) / 256 * 256;
    BR_ASSERT(!carver->base || carver->used <= carver->size);
    return at;
}
static inline bi_carver bi_cuda_scratch(bi_ctx *ctx) {
    bi_carver carver = {ctx->scratch, 0, ctx->scratch_bytes};
    return carver;
}

static inline int64_t bi_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

#ifdef __CUDACC__

/* Launches overlap: one may start while the one ahead still runs, but no block of it ends before that one is complete, so whoever awaits a launch
 * has awaited all ahead of it. Before it awaits, a thread reads nothing that the launch ahead writes, and of those ahead of that one only
 * where each block of it awaits before it lets the next start; it writes nothing that any of them touches but faults. A launch that lets the
 * next start before it awaits is a plain one, or has none behind it that reads early what may still be written. Reads before the wait rest on
 * an SM's L1 being empty of old lines, as after any wait of that SM. */
static __device__ __forceinline__ void bi_cuda_await_before() {
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
}
/* The next launch may take the places that this one leaves free. */
static __device__ __forceinline__ void bi_cuda_let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
/* First in a kernel of bi_cuda_launch, unless it awaits later by that rule; each of its threads that ends has awaited. */
static __device__ __forceinline__ void bi_cuda_begin() {
    bi_cuda_await_before();
    bi_cuda_let_next_start();
}

/* Launches a kernel that keeps that rule. */
template <class... TAKEN, class... GIVEN>
static void bi_cuda_launch_on(cudaStream_t stream, void (*kernel)(TAKEN...), dim3 grid, dim3 block, size_t shared_bytes, GIVEN... given) {
    cudaLaunchAttribute early;
    cudaLaunchConfig_t config = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, given...);
}
template <class... TAKEN, class... GIVEN>
static void bi_cuda_launch(const bi_ctx *ctx, void (*kernel)(TAKEN...), dim3 grid, dim3 block, size_t shared_bytes, GIVEN... given) {
    bi_cuda_launch_on(ctx->stream, kernel, grid, block, shared_bytes, given...);
}

/* Marks the row unless it is marked or the value is finite. */
static __device__ __forceinline__ void bi_cuda_fault(bi_fault fault, int32_t row, float value) {
    if (fault.row && !bi_is_finite(value))
        atomicCAS(&fault.row[row], 0u, fault.code);
}

/* The fold of N-SUM over 256 partials, one a thread of a block of 256: p_i += p_(i+h), h = 128 .. 1. Every thread gets the sum.
 * shared: 256 floats; the caller need not synchronise around it. */
static __device__ __forceinline__ float bi_cuda_sum256(float p, float *shared) {
    const int i = (int)threadIdx.x;
    shared[i] = p;
    __syncthreads();
    if (i < 128)
        shared[i] = p = BI_ADD(p, shared[i + 128]);
    __syncthreads();
    if (i < 64)
        shared[i] = p = BI_ADD(p, shared[i + 64]);
    __syncthreads();
    if (i < 32) {
        p = BI_ADD(p, shared[i + 32]);
        for (int h = 16; h > 0; h >>= 1)
            p = BI_ADD(p, __shfl_down_sync(0xffffffffu, p, h));
        if (i == 0)
            shared[0] = p;
    }
    __syncthreads();
    p = shared[0];
    __syncthreads();
    return p;
}

/* d = a (16, 16) x b (16, 8) + c, one block of N-MMA an element, on one warp: fragments as mma.sync.m16n8k16 lays them out. */
static __device__ __forceinline__ void bi_cuda_mma16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ const unsigned char *bi_cuda_cache_block(bi_cache c, int32_t seq, int32_t block) {
    int64_t at = c.table ? c.table[(int64_t)seq * c.table_ld + block] : (int64_t)c.first[seq] + block;
    return c.base + c.block_bytes * (size_t)at;
}

static __device__ __forceinline__ unsigned char *bi_cuda_state(bi_state s, int32_t seq) {
    return s.base + s.seq_bytes * (size_t)(s.index ? s.index[seq] : seq);
}

#endif

/* The ops, one file a family. */
size_t bi_cuda_mat_bytes(bi_form form, int32_t n_out, int32_t n_in);
int64_t bi_cuda_mat_row(int32_t n_in);
size_t bi_cuda_fp4_bytes(int32_t n_out, int32_t n_in);
br_status bi_cuda_mat_pack_bf16(bi_ctx *, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out, int64_t stride_in);
br_status bi_cuda_mat_pack_fp4(bi_ctx *, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale);
br_status bi_cuda_mat_generate(bi_ctx *, const bi_mat_generate_args *);
br_status bi_cuda_vector_generate(bi_ctx *, const bi_vector_generate_args *);
size_t bi_cuda_kda_state_bytes(int32_t n_head, int32_t d);
size_t bi_cuda_latent_block_bytes(int32_t d_latent);
size_t bi_cuda_index_block_bytes(int32_t d);
br_status bi_cuda_embed(bi_ctx *, const bi_embed_args *);
br_status bi_cuda_rmsnorm(bi_ctx *, const bi_norm_args *);
br_status bi_cuda_layernorm(bi_ctx *, const bi_norm_args *);
br_status bi_cuda_linear(bi_ctx *, const bi_linear_args *);
br_status bi_cuda_linear_group(bi_ctx *, const bi_linear_args *, int32_t n);
br_status bi_cuda_conv(bi_ctx *, const bi_conv_args *);
br_status bi_cuda_conv_group(bi_ctx *, const bi_conv_args *, int32_t n);
br_status bi_cuda_kda_gate(bi_ctx *, const bi_kda_gate_args *);
br_status bi_cuda_kda(bi_ctx *, const bi_kda_args *);
br_status bi_cuda_kda_norm(bi_ctx *, const bi_kda_norm_args *);
br_status bi_cuda_latent_store(bi_ctx *, const bi_latent_store_args *);
br_status bi_cuda_attn(bi_ctx *, const bi_attn_args *);
br_status bi_cuda_attn_gate(bi_ctx *, const bi_attn_gate_args *);
br_status bi_cuda_index_store(bi_ctx *, const bi_index_store_args *);
br_status bi_cuda_index_select(bi_ctx *, const bi_index_select_args *);
br_status bi_cuda_route(bi_ctx *, const bi_route_args *);
br_status bi_cuda_experts(bi_ctx *, const bi_experts_args *);
br_status bi_cuda_combine(bi_ctx *, const bi_combine_args *);
br_status bi_cuda_glu(bi_ctx *, const bi_glu_args *);
br_status bi_cuda_attnres(bi_ctx *, const bi_attnres_args *);
br_status bi_cuda_attnres_weight(bi_ctx *, float *w, const float *norm, const float *proj, int32_t d);
br_status bi_cuda_residual(bi_ctx *, const bi_residual_args *);
br_status bi_cuda_gather(bi_ctx *, const bi_gather_args *);
br_status bi_cuda_seg_fault(bi_ctx *, const bi_seg_fault_args *);
br_status bi_cuda_score(bi_ctx *, const bi_score_args *);
br_status bi_cuda_sample(bi_ctx *, const bi_sample_args *);
br_status bi_cuda_mat_pack_f32(bi_ctx *, const bi_mat_pack_f32_args *);
br_status bi_cuda_mat_unpack(bi_ctx *, const bi_mat_unpack_args *);

#endif
