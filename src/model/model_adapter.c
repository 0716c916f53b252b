/* model_adapter: one matrix of an adapter into the packed memory of its slot, and back out of it; see br_model.h.
 *
 * Layer: model. Values are packed by the backend's ops, never changed. kv_b is used absorbed: its A lies in two places, plain for W_UV
 * and transposed for W_UK, and its B is cut into the heads' parts of both. */
#include "br_model.h"
#include "model_parts.h"

#include <stddef.h>
#include <string.h>

/* Where a layer keeps the slots of a class; kv_b has a place of its own. */
static const struct {
    br_class cls;
    size_t offset;
} PLACE[] = {
    {BR_W_KDA_Q, offsetof(model_layer, kda.q.lora)},
    {BR_W_KDA_K, offsetof(model_layer, kda.k.lora)},
    {BR_W_KDA_V, offsetof(model_layer, kda.v.lora)},
    {BR_W_KDA_G, offsetof(model_layer, kda.g.lora)},
    {BR_W_KDA_G_A, offsetof(model_layer, kda.g_a.lora)},
    {BR_W_KDA_G_B, offsetof(model_layer, kda.g_b.lora)},
    {BR_W_KDA_F_A, offsetof(model_layer, kda.f_a.lora)},
    {BR_W_KDA_F_B, offsetof(model_layer, kda.f_b.lora)},
    {BR_W_KDA_B, offsetof(model_layer, kda.b.lora)},
    {BR_W_KDA_O, offsetof(model_layer, kda.o.lora)},
    {BR_W_MLA_Q, offsetof(model_layer, mla.q.lora)},
    {BR_W_MLA_Q_A, offsetof(model_layer, mla.q_a.lora)},
    {BR_W_MLA_Q_B, offsetof(model_layer, mla.q_b.lora)},
    {BR_W_MLA_KV_A, offsetof(model_layer, mla.kv_a.lora)},
    {BR_W_MLA_G, offsetof(model_layer, mla.g.lora)},
    {BR_W_MLA_O, offsetof(model_layer, mla.o.lora)},
    {BR_W_MLP_GATE, offsetof(model_layer, mlp.gate.lora)},
    {BR_W_MLP_UP, offsetof(model_layer, mlp.up.lora)},
    {BR_W_MLP_DOWN, offsetof(model_layer, mlp.down.lora)},
    {BR_W_SHARED_GATE, offsetof(model_layer, moe.shared.gate.lora)},
    {BR_W_SHARED_UP, offsetof(model_layer, moe.shared.up.lora)},
    {BR_W_SHARED_DOWN, offsetof(model_layer, moe.shared.down.lora)},
    {BR_W_LATENT_DOWN, offsetof(model_layer, moe.latent_down.lora)},
    {BR_W_LATENT_UP, offsetof(model_layer, moe.latent_up.lora)},
    {BR_W_EXPERT_W1, offsetof(model_layer, moe.lora1)},
    {BR_W_EXPERT_W3, offsetof(model_layer, moe.lora3)},
    {BR_W_EXPERT_W2, offsetof(model_layer, moe.lora2)},
};

/* The adapter of a slot on a class; one whose data is NULL where nothing was reserved. */
bi_adapter model_adapter_of(const br_model *m, const br_model_matrix *at) {
    const model_layer *layer = &m->layer[at->layer];
    for (size_t i = 0; i < sizeof PLACE / sizeof PLACE[0]; i++) {
        const bi_adapter *slot;
        if (PLACE[i].cls != at->cls)
            continue;
        memcpy(&slot, (const unsigned char *)layer + PLACE[i].offset, sizeof slot);
        return slot ? slot[at->slot] : (bi_adapter){0};
    }
    return (bi_adapter){0};
}

bi_adapter model_absorbed_of(const bi_adapter *slot, const br_model_matrix *at) {
    return slot ? slot[at->slot] : (bi_adapter){0};
}

/* (rows, columns) of the matrix at the given rank. */
void model_adapter_shape(const br_model *m, const br_model_matrix *at, int32_t rank, int32_t *n_row, int32_t *n_col) {
    int32_t n_out = 0, n_in = 0;
    const int found = br_linear_shape(&m->config, at->cls, at->layer, &n_out, &n_in);
    BR_ASSERT(found && at->slot < m->n_slot);
    *n_row = at->is_b ? n_out : rank;
    *n_col = at->is_b ? rank : n_in;
}

int32_t br_model_slot_count(const br_model *model) {
    return model->n_slot;
}

static int32_t rank_max(const br_model *m) {
    return m->swap_rank ? m->swap_rank : LORA_RANK_MAX;
}

size_t br_model_adapter_values(const br_model *m) {
    size_t most = 0;
    for (int32_t layer = 0; layer < m->config.n_layer; layer++) {
        for (int cls = 0; cls < BR_CLASS_LORA_END; cls++) {
            int32_t n_out, n_in;
            if (!br_linear_shape(&m->config, (br_class)cls, layer, &n_out, &n_in))
                continue;
            const size_t n = (size_t)rank_max(m) * (size_t)(n_out > n_in ? n_out : n_in);
            most = n > most ? n : most;
        }
    }
    return most;
}

/* ---- in ------------------------------------------------------------------------------------------------------------------- */

static br_status pack(br_model *m, bi_mat to, const uint16_t *src, int64_t stride_out, int64_t stride_in) {
    return m->backend.op->mat_pack_bf16(m->backend.ctx, (void *)(uintptr_t)to.data, to.n_out, to.n_in, src, stride_out, stride_in);
}

/* full: A (rank, latent) or B (n_head * (d_nope + d_v), rank) at the rank of the stacks. */
static br_status pack_kv_b(br_model *m, const br_model_matrix *at, const uint16_t *full) {
    const br_config *c = &m->config;
    const mla_weights *w = &m->layer[at->layer].mla;
    const bi_adapter k = model_absorbed_of(w->lora_uk, at), v = model_absorbed_of(w->lora_uv, at);
    const int64_t rank = m->swap_rank, latent = c->d_kv_latent;
    if (!at->is_b) {
        BR_TRY(pack(m, k.b, full, 1, latent));
        return pack(m, v.a, full, latent, 1);
    }
    for (int32_t h = 0; h < c->n_head; h++) {
        const uint16_t *rows = full + (int64_t)h * (c->d_nope + c->d_v) * rank;
        BR_TRY(pack(m, bi_mat_at(&k.a, h), rows, 1, rank));
        BR_TRY(pack(m, bi_mat_at(&v.b, h), rows + (int64_t)c->d_nope * rank, rank, 1));
    }
    return BR_OK;
}

br_status br_model_adapter_write(br_model *m, const br_model_matrix *at, const uint16_t *value) {
    int32_t n_row, n_col, have_row, have_col;
    BR_ASSERT(m->swap_rank && at->rank <= m->swap_rank);
    model_adapter_shape(m, at, m->swap_rank, &n_row, &n_col);
    model_adapter_shape(m, at, at->rank, &have_row, &have_col);
    uint16_t *full = m->swap_full;
    memset(full, 0, sizeof *full * (size_t)n_row * (size_t)n_col);
    for (int32_t r = 0; r < have_row && at->rank; r++)
        memcpy(full + (int64_t)r * n_col, value + (int64_t)r * have_col, sizeof *full * (size_t)have_col);
    if (at->cls == BR_W_MLA_KV_B)
        return pack_kv_b(m, at, full);
    const bi_adapter adapter = model_adapter_of(m, at);
    const bi_mat *stack = at->is_b ? &adapter.b : &adapter.a;
    return pack(m, bi_mat_at(stack, at->expert < 0 ? 0 : at->expert), full, n_col, 1);
}

/* Where s of a map lies, one or, for the heads of kv_b, several. */
const float *model_adapter_s(const br_model *m, const br_model_matrix *at, int32_t *n) {
    *n = at->cls == BR_W_MLA_KV_B ? m->config.n_head : 1;
    if (at->cls == BR_W_MLA_KV_B)
        return model_absorbed_of(m->layer[at->layer].mla.lora_uk, at).s;
    const float *s = model_adapter_of(m, at).s;
    return s && at->expert > 0 ? s + at->expert : s;
}

float model_adapter_scale(const br_model_matrix *at, double alpha, int32_t rslora) {
    return at->rank ? bi_const_lora_s(alpha, at->rank, rslora) : 0;
}

br_status br_model_adapter_scale(br_model *m, const br_model_matrix *at, double alpha, int32_t rslora) {
    int32_t n;
    const float *s = model_adapter_s(m, at, &n), value = model_adapter_scale(at, alpha, rslora);
    for (int32_t i = 0; i < n; i++)
        BR_TRY(br_device_upload(m->device, (void *)(uintptr_t)(s + i), &value, sizeof value));
    return br_device_wait(m->device);
}

/* ---- out ------------------------------------------------------------------------------------------------------------------ */

struct br_model_reader {
    br_model *model;
    size_t pack_bytes;            /* of the largest stack element */
    uint16_t *rows, *other;       /* host: a matrix as it lies there, and the other copy of an absorbed A */
    unsigned char *live, *again;  /* host: a packed matrix, and the same values packed once more */
    void *rows_device, *pack_device;
};

static size_t pack_bytes_max(const br_model *m) {
    const bi_ops *op = m->backend.op;
    size_t most = 0;
    for (int32_t layer = 0; layer < m->config.n_layer; layer++) {
        for (int cls = 0; cls < BR_CLASS_LORA_END; cls++) {
            int32_t n_out, n_in;
            if (!br_linear_shape(&m->config, (br_class)cls, layer, &n_out, &n_in))
                continue;
            const size_t a = op->mat_bytes(BI_FORM_BF16, rank_max(m), n_in), b = op->mat_bytes(BI_FORM_BF16, n_out, rank_max(m));
            const size_t b_turned = op->mat_bytes(BI_FORM_BF16, rank_max(m), n_out), a_turned = op->mat_bytes(BI_FORM_BF16, n_in, rank_max(m));
            const size_t plain = a > b ? a : b, turned = a_turned > b_turned ? a_turned : b_turned;
            most = plain > most ? plain : most;
            most = turned > most ? turned : most;
        }
    }
    return most;
}

br_status br_model_reader_open(br_model *model, br_model_reader **out) {
    br_status status;
    br_model_reader *r = NULL;
    const size_t row_bytes = br_model_adapter_values(model) * sizeof(uint16_t);
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&r, sizeof *r, "a reader of adapters"));
    r->model = model;
    r->pack_bytes = pack_bytes_max(model);
    BR_TRY_GOTO(br_mem_alloc((void **)&r->rows, row_bytes, "a matrix of an adapter"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&r->other, row_bytes, "a matrix of an adapter"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&r->live, r->pack_bytes, "a packed matrix"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&r->again, r->pack_bytes, "a packed matrix"), exit);
    BR_TRY_GOTO(br_device_alloc(model->device, row_bytes, "a matrix of an adapter", &r->rows_device), exit);
    BR_TRY_GOTO(br_device_alloc(model->device, r->pack_bytes, "a packed matrix", &r->pack_device), exit);
    *out = r;
exit:
    if (status != BR_OK)
        br_model_reader_close(r);
    return status;
}

void br_model_reader_close(br_model_reader *r) {
    if (!r)
        return;
    br_device_free(r->model->device, r->pack_device);
    br_device_free(r->model->device, r->rows_device);
    br_mem_free(r->again);
    br_mem_free(r->live);
    br_mem_free(r->other);
    br_mem_free(r->rows);
    br_mem_free(r);
}

/* One packed matrix, row-major; and is it, bit by bit, what packing these values gives? */
static br_status unpack(br_model_reader *r, bi_mat from, uint16_t *out, int32_t *intact) {
    br_model *m = r->model;
    const size_t n = (size_t)from.n_out * (size_t)from.n_in, bytes = m->backend.op->mat_bytes(BI_FORM_BF16, from.n_out, from.n_in);
    const bi_mat_unpack_args args = {.n = 1, .from = from, .dst = r->rows_device};
    BR_ASSERT(bytes <= r->pack_bytes);
    memset(r->again, 0, bytes);
    BR_TRY(br_device_upload(m->device, r->pack_device, r->again, bytes)); /* what packing does not touch is zero in both */
    BR_TRY(m->backend.op->mat_unpack(m->backend.ctx, &args));
    BR_TRY(br_device_download(m->device, out, r->rows_device, n * sizeof *out));
    BR_TRY(br_device_download(m->device, r->live, from.data, bytes));
    BR_TRY(br_device_wait(m->device));
    BR_TRY(m->backend.op->mat_pack_bf16(m->backend.ctx, r->pack_device, from.n_out, from.n_in, out, from.n_in, 1));
    BR_TRY(br_device_download(m->device, r->again, r->pack_device, bytes));
    BR_TRY(br_device_wait(m->device));
    *intact &= memcmp(r->live, r->again, bytes) == 0;
    return BR_OK;
}

/* Both copies of A, plain (rank, latent) in rows; or B out of the heads' parts, (n_out, rank). stack_rank: of the stacks. */
static br_status read_kv_b(br_model_reader *r, const br_model_matrix *at, int32_t *stack_rank, int32_t *intact) {
    const br_config *c = &r->model->config;
    const mla_weights *w = &r->model->layer[at->layer].mla;
    const bi_adapter k = model_absorbed_of(w->lora_uk, at), v = model_absorbed_of(w->lora_uv, at);
    const int64_t rank = v.a.n_out, latent = c->d_kv_latent;
    *stack_rank = (int32_t)rank;
    if (!v.a.data)
        return BR_OK;
    if (!at->is_b) {
        BR_TRY(unpack(r, v.a, r->rows, intact));
        BR_TRY(unpack(r, k.b, r->other, intact));
        for (int64_t i = 0; i < rank * latent; i++)
            *intact &= r->rows[i] == r->other[i % latent * rank + i / latent];
        return BR_OK;
    }
    for (int32_t h = 0; h < c->n_head; h++) {
        uint16_t *rows = r->rows + (int64_t)h * (c->d_nope + c->d_v) * rank;
        BR_TRY(unpack(r, bi_mat_at(&k.a, h), r->other, intact));
        for (int64_t i = 0; i < c->d_nope * rank; i++)
            rows[i] = r->other[i % rank * c->d_nope + i / rank];
        BR_TRY(unpack(r, bi_mat_at(&v.b, h), rows + c->d_nope * rank, intact));
    }
    return BR_OK;
}

static br_status read_plain(br_model_reader *r, const br_model_matrix *at, int32_t *stack_rank, int32_t *intact) {
    const bi_adapter adapter = model_adapter_of(r->model, at);
    const bi_mat *stack = at->is_b ? &adapter.b : &adapter.a;
    *stack_rank = adapter.a.n_out;
    return adapter.a.data ? unpack(r, bi_mat_at(stack, at->expert < 0 ? 0 : at->expert), r->rows, intact) : BR_OK;
}

static br_status check_scale(br_model_reader *r, const br_model_matrix *at, double alpha, int32_t rslora, int32_t *intact) {
    int32_t n;
    const float *s = model_adapter_s(r->model, at, &n), wanted = model_adapter_scale(at, alpha, rslora);
    for (int32_t i = 0; s && i < n; i++) {
        float found;
        BR_TRY(br_device_download(r->model->device, &found, s + i, sizeof found));
        BR_TRY(br_device_wait(r->model->device));
        *intact &= memcmp(&found, &wanted, sizeof found) == 0;
    }
    return BR_OK;
}

br_status br_model_adapter_read(br_model_reader *r, const br_model_matrix *at, double alpha, int32_t rslora, uint16_t *value, int32_t *intact) {
    int32_t stack_rank, n_row, n_col, have_row, have_col;
    *intact = 1;
    BR_TRY(at->cls == BR_W_MLA_KV_B ? read_kv_b(r, at, &stack_rank, intact) : read_plain(r, at, &stack_rank, intact));
    BR_ASSERT(at->rank <= stack_rank);
    model_adapter_shape(r->model, at, stack_rank, &n_row, &n_col);
    model_adapter_shape(r->model, at, at->rank, &have_row, &have_col);
    for (int64_t row = 0; row < n_row; row++) {
        for (int64_t col = 0; col < n_col; col++) {
            const uint16_t found = r->rows[row * n_col + col];
            if (row < have_row && col < have_col)
                value[row * have_col + col] = found;
            else
                *intact &= found == 0;
        }
    }
    return at->is_b ? BR_OK : check_scale(r, at, alpha, rslora, intact);
}
