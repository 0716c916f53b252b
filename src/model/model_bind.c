/* model_bind: the checkpoint's tensors, packed for the backend, in device memory at fixed addresses.
 *
 * The layout code runs twice: on measuring arenas it counts bytes and packing jobs, on the real ones it hands out memory and
 * lists the jobs, which the pool then runs (pack_jobs.c). Structs lie in host memory, all that ops read in the device's.
 * Nothing here rounds: values are widened exactly or packed by bi_ ops. */
#include "pack_jobs.h"

typedef struct binder {
    br_model *model;
    const br_weights *weights;
    const lora_set *adapters;
    br_arena *arena;  /* structs, host */
    br_arena *memory; /* of the device */
    pack_jobs jobs;
    int32_t base_only; /* adapters keep what they hold: their memory is passed by */
    int32_t at_adapter;
    size_t weight_bytes;
} binder;

enum { MEMORY_ALIGN = 256 };

#define STRUCTS(b, type, count) BR_ARENA_ARRAY((b)->arena, type, count)
#define MEMORY(b, type, count) ((type *)br_arena_take((b)->memory, sizeof(type) * (size_t)(count), MEMORY_ALIGN))

static int is_real(const binder *b) {
    return b->arena->base != NULL;
}

static const br_tensor *tensor_of(const binder *b, br_class cls, int32_t layer, int32_t expert) {
    const br_tensor *tensor = br_weights_find(b->weights, cls, layer, expert);
    BR_ASSERT(tensor); /* the loader has checked that all are there */
    return tensor;
}

/* Room for a stack of n packed matrices. */
static bi_mat take_stack(binder *b, bi_form form, int32_t n, int32_t n_out, int32_t n_in) {
    const size_t stride = b->model->backend.op->mat_bytes(form, n_out, n_in);
    return (bi_mat){.data = MEMORY(b, unsigned char, stride * (size_t)n), .n_out = n_out, .n_in = n_in, .form = form, .stride = stride};
}

static pack_source source_of(const br_tensor *t) {
    return (pack_source){.data = t->data, .gen = t->gen};
}

static void add_job(binder *b, pack_job job) {
    if (!(b->base_only && b->at_adapter))
        pack_jobs_add(&b->jobs, job);
}

/* Fills matrix i of a stack. */
static void fill(binder *b, const bi_mat *stack, int32_t i, pack_job source) {
    source.to = is_real(b) ? bi_mat_at(stack, i) : *stack;
    add_job(b, source);
}

/* n_out rows of n_in elements, one after the other. */
static pack_job rows_of(pack_source src, int32_t n_out, int32_t n_in) {
    return (pack_job){.kind = PACK_BF16, .src = src, .have_out = n_out, .have_in = n_in, .stride_out = n_in, .stride_in = 1};
}

/* Of n_in rows of n_out elements the transpose. */
static pack_job columns_of(pack_source src, int32_t n_out, int32_t n_in) {
    return (pack_job){.kind = PACK_BF16, .src = src, .have_out = n_out, .have_in = n_in, .stride_out = 1, .stride_in = n_out};
}

static bi_mat bind_mat(binder *b, br_class cls, int32_t layer) {
    const br_tensor *t = tensor_of(b, cls, layer, -1);
    const int32_t n_out = (int32_t)t->dim[0], n_in = (int32_t)t->dim[1];
    bi_mat mat = take_stack(b, BI_FORM_BF16, 1, n_out, n_in);
    fill(b, &mat, 0, rows_of(source_of(t), n_out, n_in));
    return mat;
}

/* The first n elements as f32, widened exactly. */
static const float *bind_vector(binder *b, br_class cls, int32_t layer, int64_t n) {
    const br_tensor *t = tensor_of(b, cls, layer, -1);
    float *out = MEMORY(b, float, n);
    add_job(b, (pack_job){.kind = t->dtype == BR_DTYPE_F32 ? PACK_F32 : PACK_WIDEN, .dst = out, .src = source_of(t), .n = n});
    return out;
}

/* ---- adapters ------------------------------------------------------------------------------------------------------------- */

/* What a slot begins with: of the two of a swapped adapter the second one is empty. */
static lora_pair pair_of(const binder *b, int32_t slot, br_class cls, int32_t layer, int32_t i, int per_expert) {
    const int32_t n_way = b->model->swap_rank ? BR_MODEL_WAYS : 1;
    return slot % n_way ? (lora_pair){0} : lora_pair_of(b->adapters, slot / n_way, cls, layer, per_expert ? i : -1);
}

static pack_source a_of(const lora_pair *pair) {
    return (pack_source){.data = pair->a, .gen = pair->gen_a};
}

static pack_source b_of(const lora_pair *pair) {
    return (pack_source){.data = pair->b, .gen = pair->gen_b};
}

/* s of n maps. */
static const float *bind_s(binder *b, int32_t slot, br_class cls, int32_t layer, int32_t n, int per_expert) {
    float *s = STRUCTS(b, float, n), *out = MEMORY(b, float, n);
    for (int32_t i = 0; i < n && is_real(b); i++) {
        const lora_pair pair = pair_of(b, slot, cls, layer, i, per_expert);
        if (pair.rank) /* others stay zero */
            s[i] = bi_const_lora_s(pair.alpha, pair.rank, pair.rslora);
    }
    add_job(b, (pack_job){.kind = PACK_F32, .dst = out, .src = {.data = s}, .n = n});
    return out;
}

/* One adapter on n maps: stacks of the largest rank, or of swap_rank, lower ones and maps that it leaves alone filled up with zeros; an A that all
 * maps share lies there once. */
static bi_adapter bind_adapter(binder *b, int32_t slot, br_class cls, int32_t layer, int32_t n, int per_expert) {
    lora_pair most = {.rank = b->model->swap_rank};
    int shared = n > 1 && !most.rank; /* the next version need not share it */
    if (most.rank)
        br_linear_shape(&b->model->config, cls, layer, &most.n_out, &most.n_in);
    for (int32_t i = 0; i < n; i++) {
        const lora_pair pair = pair_of(b, slot, cls, layer, i, per_expert), first = pair_of(b, slot, cls, layer, 0, per_expert);
        most = pair.rank > most.rank ? pair : most;
        shared = shared && pack_source_is_equal(a_of(&pair), a_of(&first));
    }
    if (!most.rank)
        return (bi_adapter){0};
    bi_adapter adapter = {.a = take_stack(b, BI_FORM_BF16, shared ? 1 : n, most.rank, most.n_in),
                          .b = take_stack(b, BI_FORM_BF16, n, most.n_out, most.rank)};
    adapter.a.stride = shared ? 0 : adapter.a.stride;
    for (int32_t i = 0; i < n; i++) {
        const lora_pair p = pair_of(b, slot, cls, layer, i, per_expert);
        if (i == 0 || !shared)
            fill(b, &adapter.a, i, rows_of(a_of(&p), p.rank, p.n_in));
        fill(b, &adapter.b, i, rows_of(b_of(&p), p.n_out, p.rank));
    }
    adapter.s = bind_s(b, slot, cls, layer, n, per_expert);
    return adapter;
}

/* (n_slot) adapters on n maps of one class; per_expert 0 for a map that is not an expert's. NULL: no slot touches it. */
static const bi_adapter *bind_adapters(binder *b, br_class cls, int32_t layer, int32_t n, int per_expert) {
    const int32_t n_slot = b->model->n_slot;
    int any = b->model->swap_rank && n_slot;
    for (int32_t i = 0; i < n_slot * n && !any; i++)
        any = pair_of(b, i / n, cls, layer, i % n, per_expert).rank != 0;
    if (!any)
        return NULL;
    bi_adapter *slot = STRUCTS(b, bi_adapter, n_slot);
    b->at_adapter = 1;
    for (int32_t i = 0; i < n_slot; i++) {
        const bi_adapter adapter = bind_adapter(b, i, cls, layer, n, per_expert);
        if (is_real(b))
            slot[i] = adapter;
    }
    b->at_adapter = 0;
    return slot;
}

static model_map bind_map(binder *b, br_class cls, int32_t layer) {
    return (model_map){.w = bind_mat(b, cls, layer), .lora = bind_adapters(b, cls, layer, 1, 0)};
}

/* ---- layers --------------------------------------------------------------------------------------------------------------- */

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
 * d_kv_latent. B of an adapter splits the same way, and its A, one for all heads, serves W_UK transposed (N-LORA, absorbed). */
static void bind_kv_b_slot(binder *b, int32_t layer, int32_t slot, bi_adapter *uk, bi_adapter *uv) {
    const br_config *c = &b->model->config;
    const lora_pair pair = pair_of(b, slot, BR_W_MLA_KV_B, layer, 0, 0);
    const int32_t n_head = c->n_head, have = pair.rank, rank = b->model->swap_rank ? b->model->swap_rank : have, latent = c->d_kv_latent;
    if (!rank)
        return;
    bi_adapter k = {.a = take_stack(b, BI_FORM_BF16, n_head, rank, c->d_nope), .b = take_stack(b, BI_FORM_BF16, 1, latent, rank)};
    bi_adapter v = {.a = take_stack(b, BI_FORM_BF16, 1, rank, latent), .b = take_stack(b, BI_FORM_BF16, n_head, c->d_v, rank)};
    fill(b, &k.b, 0, columns_of(a_of(&pair), latent, have));
    fill(b, &v.a, 0, rows_of(a_of(&pair), have, latent));
    k.b.stride = v.a.stride = 0;
    for (int32_t h = 0; h < n_head; h++) {
        const pack_source rows = pack_source_from(b_of(&pair), (size_t)h * (size_t)(c->d_nope + c->d_v) * (size_t)have);
        fill(b, &k.a, h, columns_of(rows, have, c->d_nope));
        fill(b, &v.b, h, rows_of(pack_source_from(rows, (size_t)c->d_nope * (size_t)have), c->d_v, have));
    }
    float *s = STRUCTS(b, float, n_head), *s_device = MEMORY(b, float, n_head);
    for (int32_t h = 0; h < n_head && is_real(b); h++)
        s[h] = have ? bi_const_lora_s(pair.alpha, have, pair.rslora) : 0;
    add_job(b, (pack_job){.kind = PACK_F32, .dst = s_device, .src = {.data = s}, .n = n_head});
    k.s = v.s = s_device;
    if (is_real(b)) {
        uk[slot] = k;
        uv[slot] = v;
    }
}

static void bind_kv_b(binder *b, int32_t layer, mla_weights *w) {
    const br_config *c = &b->model->config;
    const int32_t n_slot = b->model->n_slot, per_head = c->d_nope + c->d_v, latent = c->d_kv_latent;
    const br_tensor *t = tensor_of(b, BR_W_MLA_KV_B, layer, -1);
    w->w_uk = take_stack(b, BI_FORM_BF16, c->n_head, latent, c->d_nope);
    w->w_uv = take_stack(b, BI_FORM_BF16, c->n_head, c->d_v, latent);
    for (int32_t h = 0; h < c->n_head; h++) {
        const pack_source rows = pack_source_from(source_of(t), (size_t)h * (size_t)per_head * (size_t)latent);
        fill(b, &w->w_uk, h, columns_of(rows, latent, c->d_nope));
        fill(b, &w->w_uv, h, rows_of(pack_source_from(rows, (size_t)c->d_nope * (size_t)latent), c->d_v, latent));
    }
    int any = b->model->swap_rank && n_slot;
    for (int32_t i = 0; i < n_slot && !any; i++)
        any = pair_of(b, i, BR_W_MLA_KV_B, layer, 0, 0).rank != 0;
    if (!any)
        return;
    bi_adapter *uk = STRUCTS(b, bi_adapter, n_slot), *uv = STRUCTS(b, bi_adapter, n_slot);
    b->at_adapter = 1;
    for (int32_t i = 0; i < n_slot; i++)
        bind_kv_b_slot(b, layer, i, uk, uv);
    b->at_adapter = 0;
    w->lora_uk = uk;
    w->lora_uv = uv;
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

static bi_mat bind_experts(binder *b, int32_t layer, br_class cls, br_class scale, int32_t n_out, int32_t n_in) {
    const br_config *c = &b->model->config;
    const bi_mat stack = take_stack(b, c->experts_fp4 ? BI_FORM_FP4 : BI_FORM_BF16, c->n_expert, n_out, n_in);
    for (int32_t e = 0; e < c->n_expert; e++) {
        const br_tensor *t = tensor_of(b, cls, layer, e);
        if (c->experts_fp4)
            fill(b, &stack, e, (pack_job){.kind = PACK_FP4, .src = source_of(t), .scale = source_of(tensor_of(b, scale, layer, e)),
                                          .have_out = n_out, .have_in = n_in});
        else
            fill(b, &stack, e, rows_of(source_of(t), n_out, n_in));
    }
    return stack;
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
    float *w = MEMORY(b, float, d);
    const float *norm_row = bind_vector(b, norm, layer, d), *proj_row = bind_vector(b, proj, layer, d);
    pack_jobs_add_last(&b->jobs, (pack_job){.kind = PACK_RES, .dst = w, .src = {.data = norm_row}, .scale = {.data = proj_row}, .n = d});
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

enum { CACHE_ALIGN = 128 };

static size_t take_offset(br_arena *measure, size_t bytes) {
    br_arena_take(measure, bytes, CACHE_ALIGN);
    return measure->used - bytes;
}

/* Where each layer's part lies in a page and in a state. */
static void lay_out_caches(br_model *m) {
    const br_config *c = &m->config;
    const bi_ops *op = m->backend.op;
    br_arena page = {0}, state = {0};
    for (int32_t l = 0; l < c->n_layer; l++) {
        model_layer ignored, *w = m->layer ? &m->layer[l] : &ignored; /* when nothing but sizes is wanted */
        if (!c->layer_is_mla[l]) {
            w->kda.history_offset = take_offset(&state, 3 * model_history_bytes(c));
            w->kda.state_offset = take_offset(&state, op->kda_state_bytes(c->kda_n_head, c->kda_d_head));
            continue;
        }
        w->mla.latent_offset = take_offset(&page, op->latent_block_bytes(br_config_latent_dim(c)));
        if (c->index_topk)
            w->mla.index_offset = take_offset(&page, op->index_block_bytes(c->index_d_head));
    }
    m->page_bytes = take_offset(&page, 0);
    m->state_bytes = take_offset(&state, 0);
}

static void bind_work(binder *b) {
    br_model *m = b->model;
    const br_config *c = &m->config;
    model_work *w = &m->work;
    const size_t n = (size_t)m->n_row_max, width = (size_t)br_config_kda_width(c), d = (size_t)c->d_model;
    const size_t d_value = (size_t)c->n_head * (size_t)c->d_v, mixed = width > d_value ? width : d_value;
    const size_t d_expert = (size_t)br_config_expert_width(c), shared_ff = (size_t)c->n_shared_expert * (size_t)c->d_expert_ff;
    const size_t d_ff = (size_t)c->d_ff > shared_ff ? (size_t)c->d_ff : shared_ff;
    const size_t n_bank = c->res_block ? (size_t)((c->n_layer + c->res_block - 1) / c->res_block) : 0;
    for (size_t i = 0; i < n_bank; i++)
        w->bank_room[i] = MEMORY(b, bi_bf16, n * d);
    bi_bf16 **rows[] = {&w->p, &w->x, &w->normed, &w->branch, &w->shared};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        *rows[i] = MEMORY(b, bi_bf16, n * d);
    bi_bf16 **wide[] = {&w->q_in, &w->k_in, &w->v_in, &w->q, &w->k, &w->v, &w->f};
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++)
        *wide[i] = MEMORY(b, bi_bf16, n * width);
    w->low = MEMORY(b, bi_bf16, n * (size_t)c->kda_d_gate_low);
    w->gate_low = MEMORY(b, bi_bf16, n * (size_t)c->kda_d_gate_low);
    w->b = MEMORY(b, bi_bf16, n * (size_t)c->kda_n_head);
    w->beta = MEMORY(b, float, n * (size_t)c->kda_n_head);
    w->decay = MEMORY(b, float, n * width);
    w->gate = MEMORY(b, bi_bf16, n * mixed);
    w->mixed = MEMORY(b, bi_bf16, n * mixed);
    w->o = MEMORY(b, float, n * mixed);
    w->cq = MEMORY(b, bi_bf16, n * (size_t)c->d_q_latent);
    w->query = MEMORY(b, bi_bf16, n * (size_t)(c->n_head * (c->d_nope + c->d_rope)));
    w->latent = MEMORY(b, bi_bf16, n * (size_t)br_config_latent_dim(c));
    w->absorbed = MEMORY(b, bi_bf16, n * (size_t)(c->n_head * c->d_kv_latent));
    w->z = MEMORY(b, bi_bf16, n * (size_t)(c->n_head * c->d_kv_latent));
    w->index_q = MEMORY(b, bi_bf16, n * (size_t)(c->index_n_head * c->index_d_head));
    w->index_k = MEMORY(b, bi_bf16, n * (size_t)c->index_d_head);
    w->index_w = MEMORY(b, float, n * (size_t)c->index_n_head);
    w->select = MEMORY(b, int32_t, n * (size_t)c->index_topk);
    w->n_select = MEMORY(b, int32_t, n);
    w->gate_f32 = MEMORY(b, float, n * d_ff);
    w->up_f32 = MEMORY(b, float, n * d_ff);
    w->act = MEMORY(b, bi_bf16, n * d_ff);
    w->expert = MEMORY(b, int32_t, n * (size_t)c->n_expert_topk);
    w->p_expert = MEMORY(b, float, n * (size_t)c->n_expert_topk);
    w->down_in = MEMORY(b, bi_bf16, n * d_expert);
    w->slots = MEMORY(b, bi_bf16, n * (size_t)c->n_expert_topk * d_expert);
    w->combined = MEMORY(b, bi_bf16, n * d_expert);
}

static void bind_all(binder *b) {
    br_model *m = b->model;
    const br_config *c = &m->config;
    const br_tensor *embed = tensor_of(b, BR_W_EMBED, -1, -1);
    const int64_t n_embed = (int64_t)c->n_vocab * c->d_model;
    m->layer = STRUCTS(b, model_layer, c->n_layer);
    m->embed = MEMORY(b, bi_bf16, n_embed);
    add_job(b, (pack_job){.kind = PACK_COPY, .dst = (void *)(uintptr_t)m->embed, .src = source_of(embed), .n = n_embed});
    m->head = bind_mat(b, BR_W_HEAD, -1);
    m->final_norm = bind_vector(b, BR_W_FINAL_NORM, -1, c->d_model);
    if (c->res_block)
        m->out_res = bind_res(b, BR_W_OUT_RES_NORM, BR_W_OUT_RES_PROJ, -1);
    for (int32_t l = 0; l < c->n_layer; l++) {
        model_layer ignored = {0}; /* the measuring pass has no layer array yet */
        bind_layer(b, l, is_real(b) ? &m->layer[l] : &ignored);
    }
    b->weight_bytes = b->memory->used;
    bind_work(b);
}

void model_measure(br_model *model, const br_model_options *options, br_model_sizes *out) {
    br_arena structs = {0}, memory = {0};
    binder b = {.model = model, .weights = options->weights, .adapters = options->adapters, .arena = &structs, .memory = &memory};
    bind_all(&b);
    lay_out_caches(model);
    *out = (br_model_sizes){.weights = b.weight_bytes, .work = memory.used - b.weight_bytes, .page = model->page_bytes, .state = model->state_bytes};
}

br_status model_bind(br_model *model, const br_model_options *options) {
    br_status status;
    br_arena structs = {0}, memory = {0};
    void *block = NULL;
    binder b = {.model = model, .weights = options->weights, .adapters = options->adapters, .arena = &structs, .memory = &memory};
    bind_all(&b);
    BR_TRY_GOTO(pack_jobs_open(&b.jobs), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&model->arena.base, structs.used, "the model's tables"), exit);
    BR_TRY_GOTO(br_device_alloc(model->device, memory.used, "packed weights and work buffers", &block), exit);
    model->arena.size = structs.used;
    model->memory = (br_arena){.base = block, .size = memory.used};
    b.arena = &model->arena;
    b.memory = &model->memory;
    bind_all(&b);
    lay_out_caches(model);
    status = pack_jobs_run(&b.jobs, &model->backend, model->device, options->pool);
exit:
    pack_jobs_close(&b.jobs);
    return status;
}

/* An optional tensor takes room: it must be there, or not, in both. */
static br_status check_same_tensors(const br_model *m, const br_weights *weights) {
    for (int32_t l = 0; l < m->config.n_layer; l++) {
        const int have = m->layer[l].mla.index_norm_bias != NULL, has = br_weights_find(weights, BR_W_INDEX_K_NORM_BIAS, l, -1) != NULL;
        if (have != has)
            return br_fail(BR_E_FORMAT, "layer %d: the indexer's norm has %s bias: expected %s, as in the weights that are loaded", l,
                           has ? "a" : "no", have ? "one" : "none");
    }
    return BR_OK;
}

br_status br_model_reload(br_model *model, const br_model_options *options, int32_t *changed) {
    br_arena structs = {0}, memory = {0};
    binder b = {.model = model, .weights = options->weights, .adapters = options->adapters, .arena = &structs, .memory = &memory, .base_only = 1};
    *changed = 0;
    BR_TRY(check_same_tensors(model, options->weights));
    bind_all(&b); /* counts the jobs, and forgets where things lie */
    BR_ASSERT(structs.used == model->arena.size && memory.used == model->memory.size);
    br_status status = pack_jobs_open(&b.jobs);
    if (status != BR_OK) {
        pack_jobs_close(&b.jobs);
        b.jobs = (pack_jobs){0};
    }
    model->arena.used = model->memory.used = 0; /* the same order gives the same addresses again */
    b.arena = &model->arena;
    b.memory = &model->memory;
    bind_all(&b);
    lay_out_caches(model);
    if (status == BR_OK) {
        *changed = 1;
        status = pack_jobs_run(&b.jobs, &model->backend, model->device, options->pool);
    }
    pack_jobs_close(&b.jobs);
    return status;
}
