/* model_bind: the checkpoint's tensors, packed for the backend, in one arena at fixed addresses.
 *
 * The layout code runs twice: on a measuring arena it counts bytes and packing jobs, on the real one it hands out memory and
 * lists the jobs, which the pool then runs. Nothing here rounds: values are widened exactly or packed by bi_ ops. */
#include "model_parts.h"

#include "bi_bits.h"

#include <string.h>

typedef struct pack_job {
    void *dst;
    int32_t n_out, n_in;
    const bi_bf16 *src; /* bf16, or */
    int64_t stride_out, stride_in;
    const uint8_t *code, *scale; /* MXFP4 */
} pack_job;

typedef struct binder {
    br_model *model;
    const br_weights *weights;
    const lora_set *adapters;
    br_arena *arena;
    int real; /* second pass */
    pack_job *job;
    int32_t n_job;
    br_status status; /* of a packing that failed */
} binder;

/* Packing jobs run on several threads, and a thread keeps its sentence to itself: the caller gets a new one. */
static void note(binder *b, br_status status) {
    if (status != BR_OK)
        __atomic_store_n(&b->status, status, __ATOMIC_RELAXED);
}

static const br_tensor *tensor_of(binder *b, br_class cls, int32_t layer, int32_t expert) {
    const br_tensor *tensor = br_weights_find(b->weights, cls, layer, expert);
    BR_ASSERT(tensor); /* the loader has checked that all are there */
    return tensor;
}

/* One packed matrix of elements src[o * stride_out + i * stride_in], or MXFP4 when code is given. */
static bi_mat pack(binder *b, int32_t n_out, int32_t n_in, pack_job source) {
    const bi_ops *op = b->model->backend.op;
    void *data = br_arena_take(b->arena, op->mat_bytes(n_out, n_in), 64);
    if (b->real) {
        source.dst = data;
        source.n_out = n_out;
        source.n_in = n_in;
        b->job[b->n_job] = source;
    }
    b->n_job++;
    return (bi_mat){.data = data, .n_out = n_out, .n_in = n_in};
}

static bi_mat pack_rows(binder *b, const void *src, int32_t n_out, int32_t n_in) {
    return pack(b, n_out, n_in, (pack_job){.src = src, .stride_out = n_in, .stride_in = 1});
}

static bi_mat bind_mat(binder *b, br_class cls, int32_t layer) {
    const br_tensor *t = tensor_of(b, cls, layer, -1);
    return pack_rows(b, t->data, (int32_t)t->dim[0], (int32_t)t->dim[1]);
}

/* The first n elements as f32, widened exactly. */
static const float *bind_vector(binder *b, br_class cls, int32_t layer, int64_t n) {
    float *out = BR_ARENA_ARRAY(b->arena, float, n);
    if (!b->real)
        return NULL;
    const br_tensor *t = tensor_of(b, cls, layer, -1);
    if (t->dtype == BR_DTYPE_F32) {
        memcpy(out, t->data, (size_t)n * sizeof(float));
        return out;
    }
    for (int64_t i = 0; i < n; i++) {
        bi_bf16 x;
        memcpy(&x, (const unsigned char *)t->data + (size_t)i * sizeof x, sizeof x);
        out[i] = bi_widen(x);
    }
    return out;
}

static bi_adapter bind_adapter(binder *b, lora_pair pair) {
    if (!pair.a)
        return (bi_adapter){0};
    return (bi_adapter){.a = pack_rows(b, pair.a, pair.rank, pair.n_in), .b = pack_rows(b, pair.b, pair.n_out, pair.rank),
                        .s = bi_const_lora_s(pair.alpha, pair.rank, pair.rslora)};
}

/* (n_slot, n_expert) adapters of one class; n_expert 1 and expert -1 for a map that is not an expert's. NULL: no slot touches it. */
static const bi_adapter *bind_adapters(binder *b, br_class cls, int32_t layer, int32_t n_expert, int per_expert) {
    int any = 0;
    const int32_t n_slot = b->model->n_slot;
    for (int32_t i = 0; i < n_slot * n_expert && !any; i++)
        any = lora_pair_of(b->adapters, i / n_expert, cls, layer, per_expert ? i % n_expert : -1).a != NULL;
    if (!any)
        return NULL;
    bi_adapter *slot = BR_ARENA_ARRAY(b->arena, bi_adapter, n_slot * n_expert);
    for (int32_t i = 0; i < n_slot * n_expert; i++) {
        bi_adapter adapter = bind_adapter(b, lora_pair_of(b->adapters, i / n_expert, cls, layer, per_expert ? i % n_expert : -1));
        if (b->real)
            slot[i] = adapter;
    }
    return slot;
}

static model_map bind_map(binder *b, br_class cls, int32_t layer) {
    return (model_map){.w = bind_mat(b, cls, layer), .lora = bind_adapters(b, cls, layer, 1, 0)};
}

static void bind_kda(binder *b, int32_t layer, kda_weights *w) {
    const br_config *c = &b->model->config;
    const int32_t width = br_config_kda_width(c);
    w->q = bind_map(b, BR_W_KDA_Q, layer);
    w->k = bind_map(b, BR_W_KDA_K, layer);
    w->v = bind_map(b, BR_W_KDA_V, layer);
    w->f_a = bind_map(b, BR_W_KDA_F_A, layer);
    w->f_b = bind_map(b, BR_W_KDA_F_B, layer);
    w->b = bind_map(b, BR_W_KDA_B, layer);
    w->o = bind_map(b, BR_W_KDA_O, layer);
    if (c->kda_full_gate) {
        w->g = bind_map(b, BR_W_KDA_G, layer);
    } else {
        w->g_a = bind_map(b, BR_W_KDA_G_A, layer);
        w->g_b = bind_map(b, BR_W_KDA_G_B, layer);
    }
    w->conv_q = bind_vector(b, BR_W_KDA_CONV_Q, layer, (int64_t)width * BR_CONV_TAP);
    w->conv_k = bind_vector(b, BR_W_KDA_CONV_K, layer, (int64_t)width * BR_CONV_TAP);
    w->conv_v = bind_vector(b, BR_W_KDA_CONV_V, layer, (int64_t)width * BR_CONV_TAP);
    w->a_log = bind_vector(b, BR_W_KDA_A_LOG, layer, c->kda_n_head); /* files pad it to 128 */
    w->dt_bias = bind_vector(b, BR_W_KDA_DT_BIAS, layer, width);
    w->o_norm = bind_vector(b, BR_W_KDA_O_NORM, layer, c->kda_d_head);
}

/* kv_b rows of head h: d_nope of W_UK, then d_v of W_UV, each d_kv_latent long. W_UK is used transposed: it maps d_nope to
 * d_kv_latent. B of an adapter splits the same way, and its A serves W_UK transposed (N-LORA, absorbed kv_b). */
static void bind_kv_b(binder *b, int32_t layer, mla_weights *w) {
    const br_config *c = &b->model->config;
    const int32_t n_slot = b->model->n_slot, per_head = c->d_nope + c->d_v, latent = c->d_kv_latent;
    const br_tensor *t = tensor_of(b, BR_W_MLA_KV_B, layer, -1);
    bi_mat *uk = BR_ARENA_ARRAY(b->arena, bi_mat, c->n_head), *uv = BR_ARENA_ARRAY(b->arena, bi_mat, c->n_head);
    for (int32_t h = 0; h < c->n_head; h++) {
        const bi_bf16 *rows = (const bi_bf16 *)t->data + (size_t)h * (size_t)per_head * (size_t)latent;
        bi_mat k = pack(b, latent, c->d_nope, (pack_job){.src = rows, .stride_out = 1, .stride_in = latent});
        bi_mat v = pack_rows(b, rows + (size_t)c->d_nope * (size_t)latent, c->d_v, latent);
        if (b->real) {
            uk[h] = k;
            uv[h] = v;
        }
    }
    w->w_uk = uk;
    w->w_uv = uv;
    int any = 0;
    for (int32_t i = 0; i < n_slot && !any; i++)
        any = lora_pair_of(b->adapters, i, BR_W_MLA_KV_B, layer, -1).a != NULL;
    if (!any)
        return;
    bi_adapter *k_slot = BR_ARENA_ARRAY(b->arena, bi_adapter, n_slot * c->n_head), *v_slot = BR_ARENA_ARRAY(b->arena, bi_adapter, n_slot * c->n_head);
    w->lora_uk = k_slot;
    w->lora_uv = v_slot;
    for (int32_t i = 0; i < n_slot; i++) {
        lora_pair pair = lora_pair_of(b->adapters, i, BR_W_MLA_KV_B, layer, -1);
        if (!pair.a)
            continue;
        const float s = bi_const_lora_s(pair.alpha, pair.rank, pair.rslora);
        const bi_mat a = pack_rows(b, pair.a, pair.rank, latent);
        const bi_mat a_turned = pack(b, latent, pair.rank, (pack_job){.src = pair.a, .stride_out = 1, .stride_in = latent});
        for (int32_t h = 0; h < c->n_head; h++) {
            const bi_bf16 *rows = pair.b + (size_t)h * (size_t)per_head * (size_t)pair.rank;
            bi_mat k_turned = pack(b, pair.rank, c->d_nope, (pack_job){.src = rows, .stride_out = 1, .stride_in = pair.rank});
            bi_mat v = pack_rows(b, rows + (size_t)c->d_nope * (size_t)pair.rank, c->d_v, pair.rank);
            if (b->real) {
                k_slot[i * c->n_head + h] = (bi_adapter){.a = k_turned, .b = a_turned, .s = s};
                v_slot[i * c->n_head + h] = (bi_adapter){.a = a, .b = v, .s = s};
            }
        }
    }
}

static void bind_mla(binder *b, int32_t layer, mla_weights *w) {
    const br_config *c = &b->model->config;
    if (c->d_q_latent) {
        w->q_a = bind_map(b, BR_W_MLA_Q_A, layer);
        w->q_norm = bind_vector(b, BR_W_MLA_Q_NORM, layer, c->d_q_latent);
        w->q_b = bind_map(b, BR_W_MLA_Q_B, layer);
    } else {
        w->q = bind_map(b, BR_W_MLA_Q, layer);
    }
    w->kv_a = bind_map(b, BR_W_MLA_KV_A, layer);
    w->kv_norm = bind_vector(b, BR_W_MLA_KV_NORM, layer, c->d_kv_latent);
    bind_kv_b(b, layer, w);
    if (c->mla_gate)
        w->g = bind_map(b, BR_W_MLA_G, layer);
    w->o = bind_map(b, BR_W_MLA_O, layer);
    if (!c->index_topk)
        return;
    w->index_q = bind_mat(b, BR_W_INDEX_Q, layer);
    w->index_k = bind_mat(b, BR_W_INDEX_K, layer);
    w->index_weight = bind_mat(b, BR_W_INDEX_WEIGHT, layer);
    w->index_norm = bind_vector(b, BR_W_INDEX_K_NORM, layer, c->index_d_head);
    if (br_weights_find(b->weights, BR_W_INDEX_K_NORM_BIAS, layer, -1))
        w->index_norm_bias = bind_vector(b, BR_W_INDEX_K_NORM_BIAS, layer, c->index_d_head);
}

static void bind_mlp(binder *b, int32_t layer, br_class gate, mlp_weights *w) {
    w->gate = bind_map(b, gate, layer); /* the classes gate, up, down follow each other */
    w->up = bind_map(b, (br_class)(gate + 1), layer);
    w->down = bind_map(b, (br_class)(gate + 2), layer);
    w->d_ff = w->gate.w.n_out;
}

static const bi_mat *bind_experts(binder *b, int32_t layer, br_class cls, br_class scale, int32_t n_out, int32_t n_in) {
    const br_config *c = &b->model->config;
    bi_mat *mat = BR_ARENA_ARRAY(b->arena, bi_mat, c->n_expert);
    for (int32_t e = 0; e < c->n_expert; e++) {
        const br_tensor *t = tensor_of(b, cls, layer, e);
        bi_mat packed = c->experts_fp4 ? pack(b, n_out, n_in, (pack_job){.code = t->data, .scale = tensor_of(b, scale, layer, e)->data})
                                       : pack_rows(b, t->data, n_out, n_in);
        if (b->real)
            mat[e] = packed;
    }
    return mat;
}

static void bind_moe(binder *b, int32_t layer, moe_weights *w) {
    const br_config *c = &b->model->config;
    const int32_t width = br_config_expert_width(c);
    w->router = bind_mat(b, BR_W_ROUTER, layer);
    w->router_bias = bind_vector(b, BR_W_ROUTER_BIAS, layer, c->n_expert);
    if (c->d_latent) {
        w->latent_down = bind_map(b, BR_W_LATENT_DOWN, layer);
        w->latent_up = bind_map(b, BR_W_LATENT_UP, layer);
        if (c->latent_norm)
            w->latent_norm = bind_vector(b, BR_W_LATENT_NORM, layer, c->d_latent);
    }
    w->w1 = bind_experts(b, layer, BR_W_EXPERT_W1, BR_W_EXPERT_W1_SCALE, c->d_expert_ff, width);
    w->w3 = bind_experts(b, layer, BR_W_EXPERT_W3, BR_W_EXPERT_W3_SCALE, c->d_expert_ff, width);
    w->w2 = bind_experts(b, layer, BR_W_EXPERT_W2, BR_W_EXPERT_W2_SCALE, width, c->d_expert_ff);
    w->lora1 = bind_adapters(b, BR_W_EXPERT_W1, layer, c->n_expert, 1);
    w->lora3 = bind_adapters(b, BR_W_EXPERT_W3, layer, c->n_expert, 1);
    w->lora2 = bind_adapters(b, BR_W_EXPERT_W2, layer, c->n_expert, 1);
    bind_mlp(b, layer, BR_W_SHARED_GATE, &w->shared);
}

static const float *bind_res(binder *b, br_class norm, br_class proj, int32_t layer) {
    const int32_t d = b->model->config.d_model;
    float *w = BR_ARENA_ARRAY(b->arena, float, d);
    const float *norm_row = bind_vector(b, norm, layer, d), *proj_row = bind_vector(b, proj, layer, d);
    if (b->real)
        note(b, b->model->backend.op->attnres_weight(b->model->backend.ctx, w, norm_row, proj_row, d));
    return w;
}

static void bind_layer(binder *b, int32_t layer, model_layer *w) {
    const br_config *c = &b->model->config;
    w->input_norm = bind_vector(b, BR_W_INPUT_NORM, layer, c->d_model);
    w->post_norm = bind_vector(b, BR_W_POST_NORM, layer, c->d_model);
    if (c->res_block) {
        w->attn_res = bind_res(b, BR_W_ATTN_RES_NORM, BR_W_ATTN_RES_PROJ, layer);
        w->mlp_res = bind_res(b, BR_W_MLP_RES_NORM, BR_W_MLP_RES_PROJ, layer);
    }
    if (c->layer_is_mla[layer])
        bind_mla(b, layer, &w->mla);
    else
        bind_kda(b, layer, &w->kda);
    if (layer < c->n_dense_layer)
        bind_mlp(b, layer, BR_W_MLP_GATE, &w->mlp);
    else
        bind_moe(b, layer, &w->moe);
}

/* Where each layer's part lies in a page and in a state. */
static void lay_out_caches(br_model *m) {
    const br_config *c = &m->config;
    const bi_ops *op = m->backend.op;
    br_arena page = {0}, state = {0};
    for (int32_t l = 0; l < c->n_layer; l++) {
        model_layer *w = &m->layer[l];
        if (!c->layer_is_mla[l]) {
            br_arena_take(&state, 0, 64);
            w->kda.state_offset = (state.used + 63) & ~(size_t)63;
            br_arena_take(&state, 3 * model_history_bytes(c), 64);
            br_arena_take(&state, (size_t)br_config_kda_width(c) * (size_t)c->kda_d_head * sizeof(float), 4);
            continue;
        }
        w->mla.latent_offset = (page.used + 63) & ~(size_t)63;
        br_arena_take(&page, op->latent_block_bytes(br_config_latent_dim(c)), 64);
        w->mla.index_offset = (page.used + 63) & ~(size_t)63;
        if (c->index_topk)
            br_arena_take(&page, op->index_block_bytes(c->index_d_head), 64);
    }
    m->page_bytes = (page.used + 63) & ~(size_t)63;
    m->state_bytes = (state.used + 63) & ~(size_t)63;
}

static void bind_work(binder *b) {
    br_model *m = b->model;
    const br_config *c = &m->config;
    model_work *w = &m->work;
    br_arena *arena = b->arena;
    const size_t n = (size_t)m->n_row_max, width = (size_t)br_config_kda_width(c), d = (size_t)c->d_model;
    const size_t d_value = (size_t)c->n_head * (size_t)c->d_v, mixed = width > d_value ? width : d_value;
    const size_t d_expert = (size_t)br_config_expert_width(c), shared_ff = (size_t)c->n_shared_expert * (size_t)c->d_expert_ff;
    const size_t d_ff = (size_t)c->d_ff > shared_ff ? (size_t)c->d_ff : shared_ff;
    const size_t n_bank = c->res_block ? (size_t)((c->n_layer + c->res_block - 1) / c->res_block) : 0;
    for (size_t i = 0; i < n_bank; i++)
        w->bank[i] = BR_ARENA_ARRAY(arena, bi_bf16, n * d);
    bi_bf16 **rows[] = {&w->p, &w->x, &w->normed, &w->branch, &w->shared};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        *rows[i] = BR_ARENA_ARRAY(arena, bi_bf16, n * d);
    bi_bf16 **wide[] = {&w->q_in, &w->k_in, &w->v_in, &w->q, &w->k, &w->v, &w->f};
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++)
        *wide[i] = BR_ARENA_ARRAY(arena, bi_bf16, n * width);
    w->low = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)c->kda_d_gate_low);
    w->b = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)c->kda_n_head);
    w->beta = BR_ARENA_ARRAY(arena, float, n * (size_t)c->kda_n_head);
    w->decay = BR_ARENA_ARRAY(arena, float, n * width);
    w->gate = BR_ARENA_ARRAY(arena, bi_bf16, n * mixed);
    w->mixed = BR_ARENA_ARRAY(arena, bi_bf16, n * mixed);
    w->o = BR_ARENA_ARRAY(arena, float, n * mixed);
    w->cq = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)c->d_q_latent);
    w->query = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)(c->n_head * (c->d_nope + c->d_rope)));
    w->latent = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)br_config_latent_dim(c));
    w->absorbed = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)(c->n_head * c->d_kv_latent));
    w->z = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)(c->n_head * c->d_kv_latent));
    w->index_q = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)(c->index_n_head * c->index_d_head));
    w->index_k = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)c->index_d_head);
    w->index_w = BR_ARENA_ARRAY(arena, float, n * (size_t)c->index_n_head);
    w->select = BR_ARENA_ARRAY(arena, int32_t, n * (size_t)c->index_topk);
    w->n_select = BR_ARENA_ARRAY(arena, int32_t, n);
    w->gate_f32 = BR_ARENA_ARRAY(arena, float, n * d_ff);
    w->up_f32 = BR_ARENA_ARRAY(arena, float, n * d_ff);
    w->act = BR_ARENA_ARRAY(arena, bi_bf16, n * d_ff);
    w->expert = BR_ARENA_ARRAY(arena, int32_t, n * (size_t)c->n_expert_topk);
    w->p_expert = BR_ARENA_ARRAY(arena, float, n * (size_t)c->n_expert_topk);
    w->down_in = BR_ARENA_ARRAY(arena, bi_bf16, n * d_expert);
    w->slots = BR_ARENA_ARRAY(arena, bi_bf16, n * (size_t)c->n_expert_topk * d_expert);
    w->combined = BR_ARENA_ARRAY(arena, bi_bf16, n * d_expert);
}

static void bind_all(binder *b) {
    br_model *m = b->model;
    const br_config *c = &m->config;
    const br_tensor *embed = tensor_of(b, BR_W_EMBED, -1, -1);
    m->layer = BR_ARENA_ARRAY(b->arena, model_layer, c->n_layer);
    bi_bf16 *table = BR_ARENA_ARRAY(b->arena, bi_bf16, (size_t)c->n_vocab * (size_t)c->d_model);
    m->embed = table;
    if (b->real)
        memcpy(table, embed->data, (size_t)c->n_vocab * (size_t)c->d_model * sizeof(bi_bf16));
    m->head = bind_mat(b, BR_W_HEAD, -1);
    m->final_norm = bind_vector(b, BR_W_FINAL_NORM, -1, c->d_model);
    if (c->res_block)
        m->out_res = bind_res(b, BR_W_OUT_RES_NORM, BR_W_OUT_RES_PROJ, -1);
    for (int32_t l = 0; l < c->n_layer; l++) {
        model_layer ignored = {0}; /* the measuring pass has no layer array yet */
        bind_layer(b, l, b->real ? &m->layer[l] : &ignored);
    }
    bind_work(b);
}

static void run_pack_job(void *context, int i, int thread) {
    (void)thread;
    binder *b = context;
    const pack_job *job = &b->job[i];
    const bi_backend *to = &b->model->backend;
    if (job->code)
        note(b, to->op->mat_pack_fp4(to->ctx, job->dst, job->n_out, job->n_in, job->code, job->scale));
    else
        note(b, to->op->mat_pack_bf16(to->ctx, job->dst, job->n_out, job->n_in, job->src, job->stride_out, job->stride_in));
}

br_status model_bind(br_model *model, const br_model_options *options) {
    br_arena measure = {0};
    binder b = {.model = model, .weights = options->weights, .adapters = options->adapters, .arena = &measure};
    bind_all(&b);
    BR_TRY(br_mem_alloc((void **)&b.job, (size_t)b.n_job * sizeof(pack_job), "the list of matrices to pack"));
    model->arena.size = measure.used;
    br_status status = br_mem_alloc((void **)&model->arena.base, measure.used, "packed weights and work buffers");
    if (status == BR_OK) {
        b.arena = &model->arena;
        b.real = 1;
        b.n_job = 0;
        bind_all(&b);
        lay_out_caches(model);
        br_pool_run(options->pool, run_pack_job, &b, b.n_job);
        if (b.status != BR_OK)
            status = br_fail(b.status, "the backend could not pack the weights: %s", br_status_name(b.status));
    }
    br_mem_free(b.job);
    return status;
}
