/* Gradient of the delta rule on the GPU.      Contract: N-KDA-2, N-KDA-4
 *
 * The formulas are those of bi_grad_kda_host.c. A head's state, keys by value columns, is cut into parts of 32 columns, a block each with
 * d threads. A warp has 32 keys, a thread 8 of them by 4 columns in registers: lane 8 g + c the keys 8 g .. and the columns 4 c ..
 *   norms    a warp a head of a row: 1 / norm of k and of q
 *   states   a block a part of a head of a segment: the state before every CHUNK-th token, into scratch
 *   back     a cluster of blocks, one a part, a head of a segment at a time (their number is bounded by scratch): the chunks from the last to
 *            the first. A chunk is run forward once, which leaves the states before its groups of SUB tokens in scratch; then each group, from
 *            the last, is run forward from there with the states kept in shared memory (72 KB at d = 128, three blocks an SM), and back.
 *   finish   a warp a head of a row: through the normalisation, in place; zeros for rows of no segment
 * Orders: a sum over keys goes 8 keys of a thread, lanes by halves, warps rising; one over columns 4 columns of a thread, lanes by halves,
 * parts rising, which the blocks of a cluster read from each other's shared memory. q carries its scale until `finish`. */
#include "bi_grad_cuda.cuh"
#include "bi_grad_kda_check.h"

enum {
    CHUNK = 32,
    SUB = 4,
    COLUMNS = KDA_D_MIN, /* of a part */
    KEYS = 8,            /* of a thread */
    COLS = 4,
    D_FAST = 128,
    ROW_THREADS = 256,
    ROW_WARPS = ROW_THREADS / 32
};
static const size_t SLOTS_WANTED = (size_t)128 << 20; /* bytes: 292 clusters at d = 128, twice what runs at a time */

typedef struct kda_args {
    const bi_seg *seg;
    const int32_t *row_seg;
    const bi_bf16 *q, *k, *v;
    const float *a, *beta, *d_o;
    float *dq, *dk, *dv, *da, *dbeta;
    float2 *norm;        /* (n_row, n_head): 1 / norm of k, of q */
    float4 *kept, *slot; /* states, see kept_at and slot_at */
    int32_t n_row, n_seg, n_head, d, ld;
    float scale;
} kda_args;

/* Which part of which head a block works on. */
typedef struct place {
    int head, part, n_part;
} place;

/* ---- shared memory --------------------------------------------------------------------------------------------------------------- */

/* A group of SUB tokens. */
typedef struct tile {
    float4 *kept;                /* (SUB, KEYS, d): a thread's own states; behind them its dq, dk, da of a token */
    float *k, *a, *q;            /* (SUB, d), k and q normalised, q scaled */
    float *partial;              /* (2, d / 32, COLUMNS), two sums in turn */
    float *v, *d_o, *u, *v_r;    /* (SUB, COLUMNS), v_r = v - r */
    float *beta, *dbeta;         /* (SUB) */
} tile;

static size_t tile_bytes(int d, int keep) {
    return sizeof(float) * (size_t)(keep * SUB * KEYS * COLS * d + 3 * SUB * d + 2 * d + 4 * SUB * COLUMNS + 2 * SUB);
}

static __device__ __forceinline__ tile tile_of(float4 *memory, int d, int keep) {
    tile m;
    m.kept = memory;
    m.k = (float *)(memory + keep * SUB * KEYS * d);
    m.a = m.k + SUB * d;
    m.q = m.a + SUB * d;
    m.partial = m.q + SUB * d;
    m.v = m.partial + 2 * d;
    m.d_o = m.v + SUB * COLUMNS;
    m.u = m.d_o + SUB * COLUMNS;
    m.v_r = m.u + SUB * COLUMNS;
    m.beta = m.v_r + SUB * COLUMNS;
    m.dbeta = m.beta + SUB;
    return m;
}

static __device__ __forceinline__ void cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait(void) {
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

/* What the cluster's block `rank` has at the place of `own`. */
static __device__ __forceinline__ float4 remote4(const float4 *own, int rank) {
    float4 x;
    asm volatile("{.reg .u32 at;\nmapa.shared::cluster.u32 at, %4, %5;\nld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [at];}\n"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(rank)
                 : "memory");
    return x;
}

static __device__ __forceinline__ float remote1(const float *own, int rank) {
    float x;
    asm volatile("{.reg .u32 at;\nmapa.shared::cluster.u32 at, %1, %2;\nld.shared::cluster.f32 %0, [at];}\n"
                 : "=f"(x)
                 : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(rank)
                 : "memory");
    return x;
}

/* ---- operands of a group, loaded while the one before is worked on --------------------------------------------------------------- */

template <int D> struct staged {
    static constexpr int PIECES = D ? (SUB * COLUMNS + D - 1) / D : SUB; /* of v and do, a thread: the smallest d is one warp */
    bi_bf16 k[SUB], q[SUB], v[PIECES];
    float a[SUB], d_o[PIECES], beta;
    float2 norm[SUB];
};

/* At most n tokens from `row` on; the others become zeros. */
template <int D> static __device__ __forceinline__ void fetch(const kda_args &g, place p, int row, int n, staged<D> &s) {
    const int d = D ? D : g.d, i = (int)threadIdx.x;
    n = n < SUB ? n : SUB;
#pragma unroll
    for (int j = 0; j < SUB; j++) {
        const int64_t head = (int64_t)(row + j) * g.n_head + p.head, at = (int64_t)(row + j) * g.ld + (int64_t)p.head * d + i;
        const bool is = j < n;
        s.k[j] = is ? g.k[at] : (bi_bf16)0;
        s.q[j] = is ? g.q[at] : (bi_bf16)0;
        s.a[j] = is ? g.a[head * d + i] : 0.0f;
        s.norm[j] = is ? g.norm[head] : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int piece = 0; piece < staged<D>::PIECES; piece++) {
        const int j = i / COLUMNS + piece * (d / COLUMNS), column = p.part * COLUMNS + i % COLUMNS;
        const bool is = j < n;
        s.v[piece] = is ? g.v[(int64_t)(row + j) * g.ld + (int64_t)p.head * d + column] : (bi_bf16)0;
        s.d_o[piece] = is ? g.d_o[((int64_t)(row + j) * g.n_head + p.head) * d + column] : 0.0f;
    }
    s.beta = i < n ? g.beta[(int64_t)(row + i) * g.n_head + p.head] : 0.0f;
}

template <int D> static __device__ __forceinline__ void put(const kda_args &g, const staged<D> &s, const tile &m) {
    const int d = D ? D : g.d, i = (int)threadIdx.x;
    __syncthreads(); /* the group before is done with */
#pragma unroll
    for (int j = 0; j < SUB; j++) {
        m.k[j * d + i] = bi_widen(s.k[j]) * s.norm[j].x;
        m.q[j * d + i] = bi_widen(s.q[j]) * s.norm[j].y * g.scale;
        m.a[j * d + i] = s.a[j];
    }
#pragma unroll
    for (int piece = 0; piece < staged<D>::PIECES; piece++) {
        const int at = piece * d + i; /* token at / COLUMNS */
        if (at < SUB * COLUMNS) {
            m.v[at] = bi_widen(s.v[piece]);
            m.d_o[at] = s.d_o[piece];
        }
    }
    if (i < SUB)
        m.beta[i] = s.beta;
    __syncthreads();
}

/* ---- one token ------------------------------------------------------------------------------------------------------------------- */

typedef float state[KEYS][COLS];

/* n floats, a multiple of 4, at a sixteen-byte address. */
template <int N> static __device__ __forceinline__ void load(const float *from, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 x = *(const float4 *)(from + i);
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
}

/* The 8 keys of this thread from an array of d. */
static __device__ __forceinline__ void load_keys(const float *from, float (&to)[KEYS]) {
    load(from + threadIdx.x / 32 * 32 + threadIdx.x % 32 / 8 * KEYS, to);
}

/* Its 4 columns from an array of COLUMNS. */
static __device__ __forceinline__ void load_cols(const float *from, float (&to)[COLS]) {
    load(from + threadIdx.x % 8 * COLS, to);
}

static __device__ __forceinline__ float dot(const float (&x)[COLS], const float (&y)[COLS]) {
    return fmaf(x[3], y[3], fmaf(x[2], y[2], fmaf(x[1], y[1], x[0] * y[0])));
}

/* One half of the values stays, the other goes to the lane that differs in `bit`. */
template <int N> static __device__ __forceinline__ void fold(float *p, int bit) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float gone = upper ? p[i] : p[i + N / 2];
        p[i] = (upper ? p[i + N / 2] : p[i]) + __shfl_xor_sync(0xffffffffu, gone, bit);
    }
}

/* Sums over all keys, from those of each thread; every thread gets its columns. One barrier: the sums of two calls lie apart. */
template <int D> static __device__ __forceinline__ void sum_keys(const tile &m, int n_thread, float (&p)[COLS], int &turn) {
    const int d = D ? D : n_thread, lane = (int)threadIdx.x % 32;
    float *partial = m.partial + turn * d;
    fold<4>(p, 16);
    fold<2>(p, 8);
    partial[threadIdx.x / 32 * COLUMNS + lane % 8 * COLS + lane / 8] = p[0];
    __syncthreads();
    load_cols(partial, p);
#pragma unroll
    for (int w = 1; w < d / 32; w++) {
        float next[COLS];
        load_cols(partial + w * COLUMNS, next);
#pragma unroll
        for (int c = 0; c < COLS; c++)
            p[c] += next[c];
    }
    turn ^= 1;
}

/* Sums over the columns of this part, of 8 keys; a thread gets that of key threadIdx.x. */
static __device__ __forceinline__ float sum_columns(float (&p)[KEYS]) {
    fold<8>(p, 4);
    fold<4>(p, 2);
    fold<2>(p, 1);
    return p[0];
}

template <int D, bool KEEP> static __device__ __forceinline__ void forward(const kda_args &g, const tile &m, int j, state s, int &turn) {
    const int d = D ? D : g.d, i = (int)threadIdx.x;
    float k[KEYS], a[KEYS], p[COLS] = {0.0f}, u[COLS];
    load_keys(m.k + j * d, k);
    load_keys(m.a + j * d, a);
#pragma unroll
    for (int key = 0; key < KEYS; key++) {
        if (KEEP)
            m.kept[(j * KEYS + key) * d + i] = make_float4(s[key][0], s[key][1], s[key][2], s[key][3]);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            s[key][c] *= a[key];
            p[c] = fmaf(k[key], s[key][c], p[c]);
        }
    }
    sum_keys<D>(m, d, p, turn);
    load_cols(m.v + j * COLUMNS, u);
    const float beta = m.beta[j];
#pragma unroll
    for (int c = 0; c < COLS; c++) {
        p[c] = u[c] - p[c];
        u[c] = beta * p[c];
    }
    if (KEEP && i < COLUMNS / COLS) {
        *(float4 *)(m.v_r + j * COLUMNS + i * COLS) = make_float4(p[0], p[1], p[2], p[3]);
        *(float4 *)(m.u + j * COLUMNS + i * COLS) = make_float4(u[0], u[1], u[2], u[3]);
    }
#pragma unroll
    for (int key = 0; key < KEYS; key++)
#pragma unroll
        for (int c = 0; c < COLS; c++)
            s[key][c] = fmaf(k[key], u[c], s[key][c]);
}

/* dv and this part of dbeta; du comes in, dr goes out. The first warp does it. */
static __device__ __forceinline__ void backward_row(const kda_args &g, place p, const tile &m, int j, int row, int d, float (&du)[COLS]) {
    const int lane = (int)threadIdx.x % 32, kind = lane / 8;
    const float beta = m.beta[j];
    if (threadIdx.x < 32) {
        const float mine = kind == 0 ? du[0] : kind == 1 ? du[1] : kind == 2 ? du[2] : du[3];
        float v_r[COLS], sum;
        load_cols(m.v_r + j * COLUMNS, v_r);
        sum = dot(du, v_r);
        for (int h = 4; h > 0; h >>= 1)
            sum += __shfl_xor_sync(0xffffffffu, sum, h);
        if (lane == 0)
            m.dbeta[j] = sum;
        g.dv[((int64_t)row * g.n_head + p.head) * d + p.part * COLUMNS + lane % 8 * COLS + kind] = beta * mine;
    }
#pragma unroll
    for (int c = 0; c < COLS; c++)
        du[c] *= -beta;
}

/* slope: D of the token behind comes in, of this one goes out. */
template <int D>
static __device__ __forceinline__ void backward(const kda_args &g, place p, const tile &m, int j, int row, state slope, int &turn) {
    const int d = D ? D : g.d, i = (int)threadIdx.x;
    float k[KEYS], a[KEYS], dq[KEYS], dk[KEYS], da[KEYS], d_o[COLS], u[COLS], dr[COLS] = {0.0f};
    load_keys(m.k + j * d, k);
    load_keys(m.q + j * d, dq); /* q itself, until dq takes its place */
    load_cols(m.d_o + j * COLUMNS, d_o);
#pragma unroll
    for (int key = 0; key < KEYS; key++)
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            slope[key][c] = fmaf(dq[key], d_o[c], slope[key][c]);
            dr[c] = fmaf(k[key], slope[key][c], dr[c]);
        }
    sum_keys<D>(m, d, dr, turn);
    backward_row(g, p, m, j, row, d, dr);
    load_keys(m.a + j * d, a);
    load_cols(m.u + j * COLUMNS, u);
    const float u_do = dot(u, d_o);
#pragma unroll
    for (int key = 0; key < KEYS; key++) {
        float s[COLS];
        load((const float *)&m.kept[(j * KEYS + key) * d + i], s);
        const float s_dr = dot(s, dr);
        dq[key] = fmaf(a[key], dot(s, d_o), k[key] * u_do);
        dk[key] = fmaf(a[key], s_dr, dot(slope[key], u));
        da[key] = fmaf(k[key], s_dr, dot(slope[key], s));
#pragma unroll
        for (int c = 0; c < COLS; c++)
            slope[key][c] = a[key] * fmaf(k[key], dr[c], slope[key][c]);
    }
    const float sum_q = sum_columns(dq), sum_k = sum_columns(dk), sum_a = sum_columns(da);
    m.kept[j * KEYS * d + i] = make_float4(sum_q, sum_k, sum_a, 0.0f);
}

/* Adds the parts of n tokens; each of the cluster's blocks takes some of the tokens. Ends with an arrival: who writes `kept` again waits. */
template <int D> static __device__ __forceinline__ void add_parts(const kda_args &g, place p, const tile &m, int row, int n) {
    const int d = D ? D : g.d, i = (int)threadIdx.x;
    cluster_arrive();
    cluster_wait();
    for (int j = p.part; j < n; j += p.n_part) {
        const int64_t head = (int64_t)(row + j) * g.n_head + p.head, at = head * d + i;
        float q = 0.0f, k = 0.0f, a = 0.0f, beta = 0.0f;
        for (int part = 0; part < p.n_part; part++) {
            const float4 x = remote4(&m.kept[j * KEYS * d + i], part);
            q += x.x;
            k += x.y;
            a += x.z;
        }
        g.dq[at] = q;
        g.dk[at] = k;
        g.da[at] = a;
        if (i == 0) {
            for (int part = 0; part < p.n_part; part++)
                beta += remote1(&m.dbeta[j], part);
            g.dbeta[head] = beta;
        }
    }
    __syncwarp();
    cluster_arrive();
}

/* ---- states in scratch: a block's part as (KEYS, d) of float4 --------------------------------------------------------------------- */

/* The state before token CHUNK * (i + 1) of a segment. A segment of n rows has (n - 1) / CHUNK of them, so they never reach those of the
 * next, and row / CHUNK is where they begin. */
static __device__ __forceinline__ float4 *kept_at(const kda_args &g, place p, int seg_row, int i) {
    return g.kept + (((int64_t)(seg_row / CHUNK + i) * g.n_head + p.head) * p.n_part + p.part) * KEYS * blockDim.x;
}

/* The state before group i + 1 of the chunk that cluster c is in. */
static __device__ __forceinline__ float4 *slot_at(const kda_args &g, place p, int c, int i) {
    return g.slot + (((int64_t)c * (CHUNK / SUB - 1) + i) * p.n_part + p.part) * KEYS * blockDim.x;
}

static __device__ __forceinline__ void save(float4 *to, const state s) {
#pragma unroll
    for (int key = 0; key < KEYS; key++)
        to[key * blockDim.x + threadIdx.x] = make_float4(s[key][0], s[key][1], s[key][2], s[key][3]);
}

/* NULL: zeros. */
static __device__ __forceinline__ void restore(const float4 *from, state s) {
#pragma unroll
    for (int key = 0; key < KEYS; key++) {
        const float4 x = from ? from[key * blockDim.x + threadIdx.x] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        s[key][0] = x.x, s[key][1] = x.y, s[key][2] = x.z, s[key][3] = x.w;
    }
}

/* ---- kernels --------------------------------------------------------------------------------------------------------------------- */

#define KDA_KERNEL(D) static __global__ void __launch_bounds__((D) ? (D) : KDA_D_MAX, (D) == D_FAST ? 3 : 1)

static __device__ __forceinline__ float warp_sum(float p) {
    for (int h = 16; h > 0; h >>= 1)
        p += __shfl_xor_sync(0xffffffffu, p, h);
    return p;
}

static __global__ void __launch_bounds__(ROW_THREADS) norms_kernel(kda_args g) {
    const int64_t head = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32, at = head / g.n_head * g.ld + head % g.n_head * g.d;
    float k_sum = 0.0f, q_sum = 0.0f;
    if (head >= (int64_t)g.n_row * g.n_head)
        return;
    for (int i = (int)threadIdx.x % 32; i < g.d; i += 32) {
        const float k = bi_widen(g.k[at + i]), q = bi_widen(g.q[at + i]);
        k_sum = fmaf(k, k, k_sum);
        q_sum = fmaf(q, q, q_sum);
    }
    k_sum = warp_sum(k_sum);
    q_sum = warp_sum(q_sum);
    if (threadIdx.x % 32 == 0)
        g.norm[head] = make_float2(1.0f / sqrtf(k_sum + BI_KDA_L2_EPS), 1.0f / sqrtf(q_sum + BI_KDA_L2_EPS));
}

template <int D> KDA_KERNEL(D) states_kernel(kda_args g) {
    extern __shared__ float4 memory[];
    const int d = D ? D : g.d, n_part = d / COLUMNS, job = (int)blockIdx.x / n_part;
    const place p = {job % g.n_head, (int)blockIdx.x % n_part, n_part};
    const bi_seg seg = g.seg[job / g.n_head];
    const int end = seg.n_row > 0 ? (seg.n_row - 1) / CHUNK * CHUNK : 0;
    const tile m = tile_of(memory, d, 0);
    staged<D> next;
    state s = {{0.0f}};
    int turn = 0;
    if (end == 0)
        return;
    fetch<D>(g, p, seg.row, SUB, next);
    for (int t = 0; t < end; t += SUB) {
        put<D>(g, next, m);
        if (t + SUB < end)
            fetch<D>(g, p, seg.row + t + SUB, SUB, next);
        for (int j = 0; j < SUB; j++)
            forward<D, false>(g, m, j, s, turn);
        if ((t + SUB) % CHUNK == 0)
            save(kept_at(g, p, seg.row, t / CHUNK), s);
    }
}

/* One chunk of a segment, its tokens begin .. end - 1, by cluster c; its first group is staged, and the first one of the chunk before is
 * when it is done. */
template <int D>
static __device__ void chunk_back(const kda_args &g, place p, int c, const bi_seg &seg, int begin, int end, const tile &m, staged<D> &next,
                                  state slope) {
    const float4 *first = begin ? kept_at(g, p, seg.row, begin / CHUNK - 1) : NULL;
    const int last = (end - 1) / SUB * SUB;
    state s;
    int turn = 0;
    restore(first, s);
    for (int t = begin; t < last; t += SUB) {
        put<D>(g, next, m);
        fetch<D>(g, p, seg.row + t + SUB, end - t - SUB, next);
        for (int j = 0; j < SUB; j++)
            forward<D, false>(g, m, j, s, turn);
        save(slot_at(g, p, c, (t - begin) / SUB), s);
    }
    for (int t = last; t >= begin; t -= SUB) {
        const int n = end - t < SUB ? end - t : SUB, before = t > begin ? t - SUB : t - CHUNK;
        if (t < last)
            restore(t > begin ? slot_at(g, p, c, (t - begin) / SUB - 1) : first, s);
        put<D>(g, next, m);
        if (before >= 0)
            fetch<D>(g, p, seg.row + before, SUB, next);
        cluster_wait();
        for (int j = 0; j < n; j++)
            forward<D, true>(g, m, j, s, turn);
        for (int j = n - 1; j >= 0; j--)
            backward<D>(g, p, m, j, seg.row + t + j, slope, turn);
        add_parts<D>(g, p, m, seg.row + t, n);
    }
}

template <int D> KDA_KERNEL(D) back_kernel(kda_args g) {
    extern __shared__ float4 memory[];
    const int d = D ? D : g.d, n_part = d / COLUMNS, c = (int)blockIdx.x / n_part, n_cluster = (int)gridDim.x / n_part;
    const tile m = tile_of(memory, d, 1);
    cluster_arrive(); /* nobody reads `kept` yet */
    for (int64_t job = c; job < (int64_t)g.n_seg * g.n_head; job += n_cluster) {
        const place p = {(int)(job % g.n_head), (int)blockIdx.x % n_part, n_part};
        const bi_seg seg = g.seg[job / g.n_head];
        const int last = seg.n_row > 0 ? (seg.n_row - 1) / CHUNK * CHUNK : -1;
        staged<D> next;
        state slope = {{0.0f}};
        if (last >= 0)
            fetch<D>(g, p, seg.row + last, seg.n_row - last, next);
        for (int begin = last; begin >= 0; begin -= CHUNK)
            chunk_back<D>(g, p, c, seg, begin, begin == last ? seg.n_row : begin + CHUNK, m, next, slope);
    }
    cluster_wait();
}

/* Through x / norm, of one head: (dx - n (n.dx)) / norm with the normalised row n. */
static __device__ __forceinline__ void through_norm(const bi_bf16 *x, float inverse, float scale, int d, float *dx) {
    float along = 0.0f;
    for (int i = (int)threadIdx.x % 32; i < d; i += 32)
        along = fmaf(bi_widen(x[i]) * inverse, scale * dx[i], along);
    along = warp_sum(along);
    for (int i = (int)threadIdx.x % 32; i < d; i += 32)
        dx[i] = (scale * dx[i] - bi_widen(x[i]) * inverse * along) * inverse;
}

static __global__ void __launch_bounds__(ROW_THREADS) finish_kernel(kda_args g) {
    const int64_t head = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32, row = head / g.n_head, at = head * g.d;
    const int lane = (int)threadIdx.x % 32;
    if (head >= (int64_t)g.n_row * g.n_head)
        return;
    if (g.row_seg[row] >= 0) {
        const int64_t from = row * g.ld + head % g.n_head * g.d;
        through_norm(g.k + from, g.norm[head].x, 1.0f, g.d, g.dk + at);
        through_norm(g.q + from, g.norm[head].y, g.scale, g.d, g.dq + at);
        return;
    }
    for (int i = lane; i < g.d; i += 32)
        g.dq[at + i] = g.dk[at + i] = g.dv[at + i] = g.da[at + i] = 0.0f;
    if (lane == 0)
        g.dbeta[head] = 0.0f;
}

/* ---- host ------------------------------------------------------------------------------------------------------------------------ */

static size_t slot_bytes(int32_t d) {
    return sizeof(float) * (size_t)(CHUNK / SUB - 1) * (size_t)d * (size_t)d;
}

/* Bytes of all slots: as many as may be wanted at once, at least one. */
static size_t slots_bytes(const bi_limits *limits) {
    const size_t one = slot_bytes(limits->kda_d_head), all = one * (size_t)limits->n_row * (size_t)limits->kda_n_head;
    const size_t most = one > SLOTS_WANTED ? one : SLOTS_WANTED;
    return all < most ? all : most;
}

static void carve(bi_carver *carver, const bi_limits *limits, int32_t n_row, int32_t n_head, int32_t d, kda_args *g) {
    const size_t heads = (size_t)n_row * (size_t)n_head;
    g->norm = (float2 *)bi_carve(carver, sizeof(float2) * heads);
    g->kept = (float4 *)bi_carve(carver, sizeof(float) * (size_t)(n_row / CHUNK) * (size_t)n_head * (size_t)d * (size_t)d);
    g->slot = (float4 *)bi_carve(carver, slots_bytes(limits));
}

size_t bi_grad_kda_cuda_scratch(const bi_limits *limits) {
    bi_carver carver = {NULL, 0, 0};
    kda_args g;
    if (limits->kda_n_head > 0)
        carve(&carver, limits, limits->n_row, limits->kda_n_head, limits->kda_d_head, &g);
    return carver.used;
}

/* Both passes over the segments. */
template <int D> static br_status run(cudaStream_t stream, const kda_args &g, int64_t n_slot) {
    const int64_t n_part = g.d / COLUMNS, n_job = (int64_t)g.n_seg * g.n_head;
    const size_t bytes = tile_bytes(g.d, 1);
    cudaLaunchAttribute cluster[1] = {};
    cudaLaunchConfig_t config = {};
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = (unsigned)n_part;
    cluster[0].val.clusterDim.y = cluster[0].val.clusterDim.z = 1;
    config.gridDim = dim3((unsigned)((n_job < n_slot ? n_job : n_slot) * n_part));
    config.blockDim = dim3((unsigned)g.d);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = cluster;
    config.numAttrs = 1;
    states_kernel<D><<<(unsigned)(n_job * n_part), (unsigned)g.d, tile_bytes(g.d, 0), stream>>>(g);
    BR_TRY(bi_grad_launched("kda"));
    if (cudaFuncSetAttribute(back_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes) == cudaSuccess)
        cudaLaunchKernelEx(&config, back_kernel<D>, g);
    return bi_grad_launched("kda");
}

br_status bi_grad_kda_cuda(bi_grad_ctx *ctx, const bi_grad_kda_args *a) {
    const bi_batch *batch = a->batch;
    const bi_limits *limits = &ctx->cuda->limits;
    kda_args g = {batch->seg, batch->row_seg, a->q, a->k, a->v, a->a, a->beta, a->d_o, a->dq, a->dk, a->dv, a->da, a->dbeta, NULL, NULL, NULL,
                  batch->n_row, batch->n_seg, a->n_head, a->d, a->ld, a->scale};
    BR_TRY(bi_grad_check_kda(limits, a));
    if (batch->n_row == 0)
        return BR_OK;
    bi_carver carver = bi_grad_cuda_carver(ctx);
    carve(&carver, limits, batch->n_row, a->n_head, a->d, &g);
    const int64_t n_slot = (int64_t)(slots_bytes(limits) / slot_bytes(a->d));
    const unsigned row_blocks = (unsigned)bi_ceil_div((int64_t)batch->n_row * a->n_head, ROW_WARPS);
    norms_kernel<<<row_blocks, ROW_THREADS, 0, ctx->cuda->stream>>>(g);
    BR_TRY(bi_grad_launched("kda"));
    if (batch->n_seg > 0 && a->d == D_FAST)
        BR_TRY(run<D_FAST>(ctx->cuda->stream, g, n_slot));
    else if (batch->n_seg > 0)
        BR_TRY(run<0>(ctx->cuda->stream, g, n_slot));
    finish_kernel<<<row_blocks, ROW_THREADS, 0, ctx->cuda->stream>>>(g);
    return bi_grad_launched("kda");
}
