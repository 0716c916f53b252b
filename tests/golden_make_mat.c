/* Golden inputs of the ops on matrices; see golden_make.h. */
#include "golden_make.h"
#include "op_rig.h"

#include <stdio.h>

/* About normal, unlike a family: products of two matrices should stay in range. */
static bi_bf16 *fill(golden_case *c, const char *name, op_random *random, float scale, int32_t d0, int32_t d1, int32_t d2) {
    bi_bf16 *x = golden_add_in(c, GOLDEN_BF16, name, d0, d1, d2);
    op_random_bf16s(random, scale, x, d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1));
    return x;
}

/* Codes and scales of n_map matrices; the scale bytes are around 2^middle. */
static void fill_fp4(golden_case *c, const char *name, op_random *random, int middle, int32_t n_map, int32_t n_out,
                     int32_t n_in) {
    char full[GOLDEN_NAME_BYTES];
    snprintf(full, sizeof full, "%s_code", name);
    uint8_t *code = golden_add_in(c, GOLDEN_U8, full, n_map, n_out, n_in / 2);
    snprintf(full, sizeof full, "%s_scale", name);
    uint8_t *scale = golden_add_in(c, GOLDEN_U8, full, n_map, n_out, n_in / 32);
    for (int32_t i = 0; i < n_map * n_out * n_in / 2; i++)
        code[i] = (uint8_t)op_random_u64(random);
    for (int32_t i = 0; i < n_map * n_out * n_in / 32; i++)
        scale[i] = (uint8_t)(127 + middle + op_random_below(random, 3) - 1);
}

/* n_slot adapters on each of n_map maps; the last one of all is absent. */
static void fill_lora(golden_case *c, const char *suffix, op_random *random, int32_t n, int32_t rank, int32_t n_out,
                      int32_t n_in) {
    char name[GOLDEN_NAME_BYTES];
    snprintf(name, sizeof name, "a%s", suffix);
    fill(c, name, random, 0.3f, n, rank, n_in);
    snprintf(name, sizeof name, "b%s", suffix);
    fill(c, name, random, 0.3f, n, n_out, rank);
    snprintf(name, sizeof name, "s%s", suffix);
    float *s = golden_add_in(c, GOLDEN_F32, name, n, 0, 0);
    snprintf(name, sizeof name, "absent%s", suffix);
    int32_t *absent = golden_add_in(c, GOLDEN_I32, name, n, 0, 0);
    for (int32_t i = 0; i < n; i++) {
        s[i] = i % 2 ? 0.3f : 2.0f;
        absent[i] = i > 0 && i == n - 1;
    }
}

/* ---- linear ----------------------------------------------------------------------------------------------------------- */

static golden_case *linear_case(golden_set *set, const char *name, uint64_t seed, int32_t n, int32_t n_head, int32_t n_in,
                                int32_t n_out) {
    golden_case *c = golden_begin(set, "%s", name);
    op_random random = {seed, 0};
    fill(c, "x", &random, 1.0f, n, n_head, n_in);
    fill(c, "w", &random, 1.0f, n_head, n_out, n_in);
    golden_add_int(c, "check_logits", 0);
    return c;
}

static void add_lora(golden_case *c, const int32_t *row_slot, int32_t n_slot, int32_t rank) {
    op_random random = {7, 0};
    golden_list_i32(c, "row_slot", row_slot, golden_dim(c, "x", 0));
    fill_lora(c, "", &random, n_slot * golden_dim(c, "x", 1), rank, golden_dim(c, "w", 1), golden_dim(c, "w", 2));
}

static void make_linear(golden_set *set) {
    static const int32_t row_slot[] = {-1, 1, 0, 0, 1};
    linear_case(set, "regular", 1, 3, 1, 64, 32);
    linear_case(set, "ragged", 2, 2, 1, 37, 35);
    linear_case(set, "deep", 3, 1, 1, 400, 3);
    linear_case(set, "heads", 4, 2, 3, 24, 9);
    add_lora(linear_case(set, "lora-rank-16", 5, 5, 1, 48, 20), row_slot, 2, 16);
    add_lora(linear_case(set, "lora-rank-5", 6, 4, 1, 20, 33), row_slot, 2, 5);
    add_lora(linear_case(set, "lora-heads-rank-20", 7, 3, 2, 18, 7), row_slot, 2, 20);
    golden_case *c = linear_case(set, "lora-zero-b", 8, 3, 1, 32, 16); /* the bits of the base */
    add_lora(c, row_slot, 2, 8);
    memset((void *)(uintptr_t)golden_bf16(c, "b"), 0, sizeof(bi_bf16) * 2 * 16 * 8);
    c = linear_case(set, "lora-fault", 9, 3, 1, 16, 8);
    add_lora(c, row_slot, 2, 8);
    ((float *)(uintptr_t)golden_f32(c, "s"))[0] = 0x1.8p127f; /* the third row's T is infinite */
    ((bi_bf16 *)c->in[0].data)[2 * 16] = 0x4280;
    c = linear_case(set, "logits-fault", 10, 2, 1, 16, 4);
    ((int32_t *)(uintptr_t)golden_i32(c, "check_logits"))[0] = 1;
    ((bi_bf16 *)c->in[0].data)[16] = 0x7f80;
    c = linear_case(set, "zeros", 11, 2, 1, 20, 6);
    row_case_fill_bf16(c->in[0].data, 40, ROW_ZEROS, 3);
    row_case_fill_bf16(c->in[1].data, 120, ROW_ZEROS, 4);
    c = linear_case(set, "subnormal", 12, 2, 1, 32, 6);
    row_case_fill_bf16(c->in[0].data, 64, ROW_SUBNORMAL, 5);
    c = linear_case(set, "wide", 13, 2, 1, 48, 6);
    row_case_fill_bf16(c->in[0].data, 96, ROW_WIDE, 6);
    row_case_fill_bf16(c->in[1].data, 288, ROW_WIDE, 7);
    op_random random = {14, 0};
    c = golden_begin(set, "mxfp4");
    fill(c, "x", &random, 1.0f, 3, 1, 64);
    fill_fp4(c, "w", &random, 0, 1, 18, 64);
    golden_add_int(c, "check_logits", 0);
}

/* ---- router ----------------------------------------------------------------------------------------------------------- */

static golden_case *route_case(golden_set *set, const char *name, int32_t n_expert, int32_t topk, int32_t renormalize,
                               float spread) {
    golden_case *c = golden_begin(set, "%s", name);
    op_random random = {200 + (uint64_t)set->n, 0};
    fill(c, "x", &random, 1.0f, 4, 20, 0);
    fill(c, "w", &random, spread, n_expert, 20, 0);
    op_random_normals(&random, 0.2f, golden_add_in(c, GOLDEN_F32, "bias", n_expert, 0, 0), n_expert);
    golden_add_int(c, "topk", topk);
    golden_add_int(c, "renormalize", renormalize);
    golden_add_float(c, "scale", renormalize ? 2.446f : 2.5f);
    return c;
}

static void make_route(golden_set *set) {
    route_case(set, "renormalised", 24, 6, 1, 0.3f);
    route_case(set, "plain", 24, 4, 0, 0.3f);
    route_case(set, "one-expert", 1, 1, 1, 0.3f);
    golden_case *c = route_case(set, "plateau", 33, 5, 1, 0.0f); /* the lowest ids win */
    memset(c->in[2].data, 0, sizeof(float) * 33);
    c = route_case(set, "ties", 16, 6, 1, 0.2f); /* s + bias rounds to a few values */
    for (int e = 0; e < 16; e++)
        ((float *)c->in[2].data)[e] = e % 3 ? 0x1p22f : -0x1p22f;
    c = route_case(set, "vanishing", 12, 3, 1,
                   0.0f); /* every score is about 1e-20, as large as what is added to their sum */
    for (int i = 0; i < 12 * 20; i++)
        ((bi_bf16 *)c->in[1].data)[i] = i % 20 ? 0 : (bi_bf16)(0xc238 - i / 20); /* about -46 */
    for (int t = 0; t < 4; t++)
        ((bi_bf16 *)c->in[0].data)[t * 20] = (bi_bf16)(0x3f80 + t);
    memset(c->in[2].data, 0, sizeof(float) * 12);
    c = route_case(set, "fault", 8, 2, 1, 0.3f);
    ((bi_bf16 *)c->in[0].data)[20] = 0x7f80;
}

/* ---- experts ---------------------------------------------------------------------------------------------------------- */

enum { ROWS = 3, TOPK = 2, EXPERTS = 3 };

static golden_case *experts_case(golden_set *set, const char *name, int32_t d, int32_t d_ff, int situ, int fp4,
                                 int32_t rank) {
    static const int32_t expert[ROWS * TOPK] = {0, 2, 1, 2, 0, 1}, row_slot[ROWS] = {0, -1, 1};
    static const char *const matrix[3] = {"w1", "w3", "w2"}, *const suffix[3] = {"1", "3", "2"};
    golden_case *c = golden_begin(set, "%s", name);
    op_random random = {300 + (uint64_t)set->n, 0};
    fill(c, "x", &random, 1.0f, ROWS, d, 0);
    memcpy(golden_add_in(c, GOLDEN_I32, "expert", ROWS, TOPK, 0), expert, sizeof expert);
    for (int m = 0; m < 3; m++) {
        int32_t n_out = m == 2 ? d : d_ff, n_in = m == 2 ? d_ff : d;
        if (fp4)
            fill_fp4(c, matrix[m], &random, -3, EXPERTS, n_out, n_in);
        else
            fill(c, matrix[m], &random, 0.3f, EXPERTS, n_out, n_in);
        if (rank)
            fill_lora(c, suffix[m], &random, 2 * EXPERTS, rank, n_out, n_in);
    }
    if (rank)
        golden_list_i32(c, "row_slot", row_slot, ROWS);
    golden_add_int(c, "situ", situ);
    golden_add_float(c, "beta", situ ? 4.0f : 0.0f);
    golden_add_float(c, "linear_beta", situ ? 25.0f : 0.0f);
    return c;
}

static void make_experts(golden_set *set) {
    experts_case(set, "situ", 32, 20, 1, 0, 0);
    experts_case(set, "silu", 17, 13, 0, 0, 0);
    experts_case(set, "situ-lora", 20, 16, 1, 0, 6);
    experts_case(set, "situ-mxfp4", 32, 32, 1, 1, 0);
    golden_case *c = experts_case(set, "plateau", 16, 16, 1, 0, 0);
    row_case_fill_bf16(c->in[0].data, ROWS * 16, ROW_PLATEAU, 1);
    c = experts_case(set, "lora-fault", 8, 8, 1, 0, 4);
    ((float *)(uintptr_t)golden_f32(c, "s1"))[3 + 0] = 0x1.8p127f; /* slot 1 of expert 0, which row 2 takes */
    ((bi_bf16 *)c->in[0].data)[2 * 8] = 0x4280;
}

static void make_combine(golden_set *set) {
    for (int f = 0; f < GOLDEN_FAMILIES; f++) {
        golden_case *c = golden_begin(set, "%s", golden_families[f].name);
        int32_t topk = f == 0 ? 8 : 1 + f;
        golden_fill_bf16(c, "e", golden_families[f].family, 131, 3, topk, 25);
        golden_fill_f32(c, "p", f == 3 ? ROW_ZEROS : ROW_NORMAL, 132, 3, topk, 0);
    }
}

const golden_maker golden_make_mat[] = {
    {"linear", make_linear}, {"route", make_route}, {"experts", make_experts}, {"combine", make_combine}, {NULL, NULL},
};
