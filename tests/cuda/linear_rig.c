/* Cases of bi_linear; see linear_rig.h. */
#include "linear_rig.h"

#include "test_support.h"

#include <stdio.h>
#include <string.h>

static const int RANK[] = {8, 16, 32, 40, 1, 17};

void linear_fill(op_random *random, linear_family family, bi_bf16 *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const uint64_t u = op_random_u64(random);
        const uint16_t sign = (uint16_t)(u & 0x8000), fraction = (uint16_t)(u >> 16 & 127), draw = (uint16_t)(u >> 32 & 1023);
        if (family == LINEAR_NORMAL) /* four uniforms of 16 bits: variance about 1/3 */
            x[i] = bi_round((float)((int64_t)(u & 0xffff) + (int64_t)(u >> 16 & 0xffff) + (int64_t)(u >> 32 & 0xffff) +
                                    (int64_t)(u >> 48) - 2 * 65535) * 0x1p-16f);
        else if (draw < 200)
            x[i] = (bi_bf16)(draw % 2 ? sign : sign | (family == LINEAR_TINY ? fraction : 0));
        else
            x[i] = (bi_bf16)(sign | fraction | (family == LINEAR_WIDE ? 111 + draw % 33 : draw % 130) << 7);
    }
}

static twin_mat random_stack(twin *t, op_random *random, linear_family family, int n, int n_out, int n_in, int inf) {
    const size_t count = (size_t)n * (size_t)n_out * (size_t)n_in;
    bi_bf16 *w = TWIN_ARRAY(t, bi_bf16, "weights", count);
    linear_fill(random, family, w, count);
    if (inf)
        w[count / 2] = 0x7f80;
    return twin_stack(t, w, n, n_out, n_in);
}

static void set_adapters(twin *t, op_random *random, const linear_case *c, linear_setup *s) {
    int32_t *row_slot = TWIN_ARRAY(t, int32_t, "row_slot", c->n_row);
    memset(s->slot, 0, sizeof s->slot);
    for (int i = 0; i < c->n_row; i++)
        row_slot[i] = c->run && i % c->run ? row_slot[i - 1] : op_random_below(random, c->slots_used + 1) - 1;
    for (int i = 0; i < c->n_slot; i++) {
        const int rank = RANK[i % 6];
        if (c->n_slot > 2 && i == 1)
            continue; /* leaves the map alone */
        twin_mat a = random_stack(t, random, c->family, c->n_head, rank, c->n_in, 0);
        twin_mat b = random_stack(t, random, c->family, c->n_head, c->n_out, rank, c->bad_b && i == 0);
        float *scale = TWIN_ARRAY(t, float, "s", c->n_head);
        op_random_normals(random, 0.7f, scale, c->n_head);
        for (int side = 0; side < 2; side++)
            s->slot[side][i] = (bi_adapter){a.side[side], b.side[side], twin_at(t, (twin_side)side, scale)};
    }
    for (int side = 0; side < 2; side++)
        s->args[side].lora = (bi_lora){s->slot[side], c->n_slot, twin_at(t, (twin_side)side, row_slot)};
}

void linear_set_up(twin *t, op_random *random, const linear_case *c, linear_setup *s) {
    const int64_t x_head = c->heads_apart ? (int64_t)c->n_row * (c->n_in + c->x_gap) : c->n_in + (c->n_head > 1 ? c->x_gap : 0);
    const int64_t x_ld = c->heads_apart ? c->n_in + c->x_gap : x_head * c->n_head + (c->n_head > 1 ? 0 : c->x_gap);
    const int64_t y_head = c->heads_apart ? (int64_t)c->n_row * (c->n_out + c->y_gap) : c->n_out;
    const int64_t y_ld = c->heads_apart ? c->n_out + c->y_gap : y_head * c->n_head + c->y_gap;
    const size_t n_x = (size_t)(c->n_row * (int64_t)c->n_head * (c->n_in + c->x_gap)) + (size_t)c->x_shift;
    const size_t n_y = (size_t)(c->n_row * (int64_t)c->n_head * (c->n_out + c->y_gap));
    bi_bf16 *x = TWIN_ARRAY(t, bi_bf16, "x", n_x);
    void *y = twin_take(t, "y", n_y * (c->y_f32 ? sizeof(float) : sizeof(bi_bf16)));
    uint32_t *fault = TWIN_ARRAY(t, uint32_t, "faults", c->n_row);
    linear_fill(random, c->family, x, n_x);
    if (c->bad_row >= 0)
        x[c->x_shift + c->bad_row * x_ld + (c->n_in - 1)] = c->bad_row % 2 ? 0x7f80 : 0x7fff;
    for (int i = 0; i < c->n_row; i++)
        fault[i] = i % 5 == 4 ? 3 : 0;
    twin_mat w = random_stack(t, random, c->family, c->n_head, c->n_out, c->n_in, 0);
    for (int side = 0; side < 2; side++)
        s->args[side] = (bi_linear_args){
            .n_row = c->n_row, .n_head = c->n_head, .x = (const bi_bf16 *)twin_at(t, (twin_side)side, x) + c->x_shift, .x_ld = x_ld,
            .x_head_ld = x_head, .w = w.side[side], .y = twin_at(t, (twin_side)side, y), .y_ld = y_ld, .y_head_ld = y_head,
            .y_f32 = c->y_f32, .check_logits = c->check, .fault = {twin_at(t, (twin_side)side, fault), 9}};
    if (c->n_slot)
        set_adapters(t, random, c, s);
}

br_status linear_run(twin *t, const linear_setup *s, twin_side side) {
    return t->backend[side].op->linear(t->backend[side].ctx, &s->args[side]);
}

void linear_run_case(twin *t, op_random *random, const linear_case *c) {
    char what[200];
    linear_setup s;
    twin_reset(t);
    linear_set_up(t, random, c, &s);
    snprintf(what, sizeof what, "%d rows, %d maps (%d, %d), f32 %d, slots %d of %d, shift %d gaps %d %d, family %d, apart %d", c->n_row, c->n_head,
             c->n_out, c->n_in, c->y_f32, c->slots_used, c->n_slot, c->x_shift, c->x_gap, c->y_gap, (int)c->family, c->heads_apart);
    twin_begin(t);
    TWIN_RUNS(t, side)
        CHECK_OK(linear_run(t, &s, side));
    twin_compare(t, what);
}
