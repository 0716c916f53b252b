/* Weights made by recipe on the GPU: the bytes of the same recipe written out, packed and uploaded. */
#include "br_device.h"
#include "cuda_case.h"
#include "test_support.h"
#include "twin.h"

#include <stdlib.h>
#include <string.h>

static const bi_limits LIMITS = {.n_row = 1, .d_in = 8192, .d_out = 8192};

typedef struct rig {
    twin twin;
    bi_backend *cuda;
    void *packed, *made; /* device memory, zeroed for each case */
    unsigned char *host[2];
    size_t size;
} rig;

static void open_rig(rig *r, size_t size) {
    memset(r, 0, sizeof *r);
    twin_open(&r->twin, &LIMITS, 4096);
    r->cuda = &r->twin.backend[TWIN_CUDA];
    r->size = size;
    CHECK_OK(br_device_alloc(r->twin.device, size, "a packed matrix", &r->packed));
    CHECK_OK(br_device_alloc(r->twin.device, size, "a made matrix", &r->made));
    for (int i = 0; i < 2; i++) {
        r->host[i] = calloc(size, 1);
        ck_assert_ptr_nonnull(r->host[i]);
    }
}

static void close_rig(rig *r) {
    br_device_free(r->twin.device, r->packed);
    br_device_free(r->twin.device, r->made);
    free(r->host[0]);
    free(r->host[1]);
    twin_close(&r->twin);
}

static void clear(rig *r, size_t bytes) {
    ck_assert_uint_le(bytes, r->size);
    memset(r->host[0], 0, bytes);
    CHECK_OK(br_device_upload(r->twin.device, r->packed, r->host[0], bytes));
    CHECK_OK(br_device_upload(r->twin.device, r->made, r->host[0], bytes));
    CHECK_OK(br_device_wait(r->twin.device));
}

static void compare(rig *r, size_t bytes, const char *what, int32_t n_out, int32_t n_in) {
    CHECK_OK(br_device_download(r->twin.device, r->host[0], r->packed, bytes));
    CHECK_OK(br_device_download(r->twin.device, r->host[1], r->made, bytes));
    CHECK_OK(br_device_wait(r->twin.device));
    for (size_t i = 0; i < bytes; i++)
        if (r->host[0][i] != r->host[1][i])
            ck_abort_msg("%s (%d, %d): byte %zu of %zu is %02x, packed %02x", what, n_out, n_in, i, bytes, r->host[1][i], r->host[0][i]);
}

static void check_bf16(rig *r, bi_mat_generate_args args) {
    const int32_t n_out = args.to.n_out, n_in = args.to.n_in;
    const size_t bytes = r->cuda->op->mat_bytes(BI_FORM_BF16, n_out, n_in);
    bi_bf16 *source = calloc((size_t)n_out * (size_t)n_in, sizeof *source);
    ck_assert_ptr_nonnull(source);
    for (int64_t o = 0; o < args.have_out; o++)
        for (int64_t i = 0; i < args.have_in; i++)
            source[o * n_in + i] = bi_round(bi_weightgen_value(&args.gen, args.first + (uint64_t)(o * args.stride_out + i * args.stride_in)));
    clear(r, bytes);
    args.to.data = r->made;
    CHECK_OK(r->cuda->op->mat_pack_bf16(r->cuda->ctx, r->packed, n_out, n_in, source, n_in, 1));
    CHECK_OK(r->cuda->op->mat_generate(r->cuda->ctx, &args));
    compare(r, bytes, "bf16", n_out, n_in);
    free(source);
}

static void check_fp4(rig *r, int32_t n_out, int32_t n_in, uint64_t first) {
    const size_t bytes = r->cuda->op->mat_bytes(BI_FORM_FP4, n_out, n_in), n = (size_t)n_out * (size_t)n_in;
    uint8_t *code = calloc(n / 2, 1), *scale = calloc(n / 32, 1);
    ck_assert(code && scale);
    const bi_mat_generate_args args = {
        .to = {.data = r->made, .n_out = n_out, .n_in = n_in, .form = BI_FORM_FP4}, .have_out = n_out, .have_in = n_in, .first = first,
        .gen = bi_weightgen_make(bi_weightgen_key(3, "codes"), BI_WEIGHTGEN_FP4, 0, 1.2f, n_in),
        .gen_scale = bi_weightgen_make(bi_weightgen_key(3, "scales"), BI_WEIGHTGEN_FP4, 0, 1.2f, n_in),
    };
    bi_weightgen_fill_fp4(&args.gen, first / 2, code, n / 2);
    bi_weightgen_fill_scale(&args.gen_scale, first / 32, scale, n / 32);
    clear(r, bytes);
    CHECK_OK(r->cuda->op->mat_pack_fp4(r->cuda->ctx, r->packed, n_out, n_in, code, scale));
    CHECK_OK(r->cuda->op->mat_generate(r->cuda->ctx, &args));
    compare(r, bytes, "fp4", n_out, n_in);
    free(code);
    free(scale);
}

START_TEST(ragged_matrices) {
    static const int32_t SIZE[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130};
    enum { N = sizeof SIZE / sizeof SIZE[0] };
    const bi_weightgen gen = bi_weightgen_make(bi_weightgen_key(2, "w"), BI_WEIGHTGEN_NORMAL, 0.25f, 2.0f, 5);
    const bi_weightgen uniform = bi_weightgen_make(bi_weightgen_key(2, "u"), BI_WEIGHTGEN_UNIFORM, -2.0f, 2.25f, 1);
    rig r;
    open_rig(&r, 1 << 20);
    for (int o = 0; o < N; o++)
        for (int i = 0; i < N; i++) {
            const bi_mat to = {.n_out = SIZE[o], .n_in = SIZE[i]};
            check_bf16(&r, (bi_mat_generate_args){.to = to, .have_out = to.n_out, .have_in = to.n_in, .first = 99, .stride_out = to.n_in,
                                                  .stride_in = 1, .gen = uniform});
            check_bf16(&r, (bi_mat_generate_args){.to = to, .have_out = to.n_out - 1, .have_in = to.n_in / 2, .first = 1ull << 40, .stride_out = 1,
                                                  .stride_in = 777, .gen = gen}); /* transposed, zeros behind, far numbers */
            check_fp4(&r, SIZE[o], 32 * (i + 1), (uint64_t)(32 * (i + 1)) * (uint64_t)(3 * o));
        }
    close_rig(&r);
}
END_TEST

START_TEST(full_matrices) {
    const bi_weightgen gen = bi_weightgen_make(bi_weightgen_key(4, "w"), BI_WEIGHTGEN_NORMAL, 0, 1.0f, 7168);
    rig r;
    open_rig(&r, (size_t)7168 * 3584 * 2);
    check_fp4(&r, 3072, 3584, 0);
    check_fp4(&r, 3584, 3072, 0);
    check_bf16(&r, (bi_mat_generate_args){.to = {.n_out = 3584, .n_in = 7168}, .have_out = 3584, .have_in = 7168, .stride_out = 7168,
                                          .stride_in = 1, .gen = gen});
    check_bf16(&r, (bi_mat_generate_args){.to = {.n_out = 512, .n_in = 128}, .have_out = 512, .have_in = 128, .first = 95ull * 256 * 512,
                                          .stride_out = 1, .stride_in = 512, .gen = gen}); /* the last head of kv_b, transposed */
    close_rig(&r);
}
END_TEST

START_TEST(vectors) {
    enum { N = 70001, FIRST = 1 << 20 };
    static const size_t SIZE[] = {[BI_GENERATE_F32] = 4, [BI_GENERATE_F32_WIDENED] = 4, [BI_GENERATE_BF16] = 2};
    const bi_weightgen gen[2] = {bi_weightgen_make(bi_weightgen_key(5, "v"), BI_WEIGHTGEN_NORMAL, 1.0f, 0.1f, 1),
                                 bi_weightgen_make(bi_weightgen_key(5, "u"), BI_WEIGHTGEN_UNIFORM, 0, 2.0f, 1)};
    rig r;
    open_rig(&r, 4 * N);
    for (int g = 0; g < 2; g++)
        for (int as = 0; as <= BI_GENERATE_BF16; as++) {
            const size_t bytes = SIZE[as] * N;
            bi_vector_generate_args args = {.dst = r.made, .n = N, .as = (bi_generate_as)as, .first = FIRST, .gen = gen[g]};
            clear(&r, 4 * N);
            CHECK_OK(r.cuda->op->vector_generate(r.cuda->ctx, &args));
            args.dst = r.host[0];
            CHECK_OK(r.twin.backend[TWIN_ORACLE].op->vector_generate(r.twin.backend[TWIN_ORACLE].ctx, &args));
            CHECK_OK(br_device_download(r.twin.device, r.host[1], r.made, 4 * N));
            CHECK_OK(br_device_wait(r.twin.device));
            memset(r.host[0] + bytes, 0, 4 * N - bytes); /* nothing behind the end is written */
            ck_assert_msg(memcmp(r.host[0], r.host[1], 4 * N) == 0, "as %d, kind %d", as, g);
        }
    close_rig(&r);
}
END_TEST

START_TEST(refusals) {
    const bi_weightgen gen = bi_weightgen_make(1, BI_WEIGHTGEN_NORMAL, 0, 1.0f, 1);
    rig r;
    open_rig(&r, 4096);
    bi_mat_generate_args args = {.to = {.data = r.made, .n_out = 0, .n_in = 32}, .gen = gen};
    CHECK_FAILS(r.cuda->op->mat_generate(r.cuda->ctx, &args), BR_E_SHAPE);
    args.to.n_out = 8;
    args.have_out = 9;
    CHECK_FAILS(r.cuda->op->mat_generate(r.cuda->ctx, &args), BR_E_SHAPE);
    args.to.form = BI_FORM_FP4;
    args.have_out = 7;
    CHECK_FAILS(r.cuda->op->mat_generate(r.cuda->ctx, &args), BR_E_SHAPE);
    const bi_vector_generate_args none = {.n = 0}, bad = {.n = -1};
    CHECK_OK(r.cuda->op->vector_generate(r.cuda->ctx, &none));
    CHECK_FAILS(r.cuda->op->vector_generate(r.cuda->ctx, &bad), BR_E_SHAPE);
    close_rig(&r);
}
END_TEST

Suite *cuda_generate_suite(void) {
    Suite *suite = suite_create("cuda_generate");
    CUDA_CASE(suite, ragged_matrices);
    CUDA_CASE(suite, full_matrices);
    CUDA_CASE(suite, vectors);
    CUDA_CASE(suite, refusals);
    return suite;
}
