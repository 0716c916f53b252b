/* The table of names: every published tensor has its slot, its shape and its spelling, and nothing else has. */
#include "checkpoint_rig.h"

#include <stdlib.h>
#include <string.h>

typedef struct name_line {
    char name[BR_NAME_BYTES], dtype[8];
    int32_t n_dim;
    int64_t dim[4];
    long long count;
} name_line;

static void parse_line(const char *text, name_line *line) {
    char shape[64];
    ck_assert_int_eq(sscanf(text, "%159s %7s %63s %lld", line->name, line->dtype, shape, &line->count), 4);
    line->n_dim = 0;
    for (char *at = shape; line->n_dim < 4; at++) {
        line->dim[line->n_dim++] = strtoll(at, &at, 10);
        if (*at != 'x')
            break;
    }
}

static int in_set(const br_config *c, const char *pattern, int32_t layer) {
    if (strstr(pattern, "{kda}"))
        return !c->layer_is_mla[layer];
    if (strstr(pattern, "{mla}"))
        return c->layer_is_mla[layer];
    if (strstr(pattern, "{dense}"))
        return layer < c->n_dense_layer;
    if (strstr(pattern, "{moe}"))
        return layer >= c->n_dense_layer;
    return 1;
}

/* The pattern with a layer and an expert put in. */
static void fill_pattern(const char *pattern, int32_t layer, int32_t expert, char name[BR_NAME_BYTES]) {
    size_t n = 0;
    while (*pattern && n < BR_NAME_BYTES - 1) {
        if (*pattern != '{') {
            name[n++] = *pattern++;
            continue;
        }
        n += (size_t)snprintf(name + n, BR_NAME_BYTES - n, "%d", pattern[1] == 'e' ? expert : layer);
        pattern = strchr(pattern, '}') + 1;
    }
    name[n] = 0;
}

/* A published name is a slot of the table, of that shape, and the table names it so. One assertion a name: there are half a
 * million, and each costs a system call. */
static void check_name(const br_config *c, const name_line *line, const char *name, unsigned char *seen) {
    char ours[BR_NAME_BYTES] = "";
    br_class cls;
    int32_t layer, expert;
    br_expect want = {.n_dim = -1};
    const br_dtype dtype = line->dtype[0] == 'U' ? BR_DTYPE_U8 : line->dtype[0] == 'F' ? BR_DTYPE_F32 : BR_DTYPE_BF16;
    int64_t slot = -1;
    if (br_weight_parse(c, name, strlen(name), &cls, &layer, &expert)) {
        br_weight_name(c, cls, layer, expert, ours);
        slot = br_weight_slot(c, cls, layer, expert);
        br_weight_expect(c, slot, &want);
    }
    const int good = slot >= 0 && !seen[slot] && strcmp(ours, name) == 0 && want.cls == cls && want.layer == layer &&
                     want.expert == expert && want.n_dim == line->n_dim && want.dtypes & 1u << dtype &&
                     memcmp(want.dim, line->dim, sizeof(int64_t) * (size_t)line->n_dim) == 0;
    if (!good)
        ck_abort_msg("%s: slot %lld, our name '%s', %d dims, first %lld", name, (long long)slot, ours, want.n_dim,
                     (long long)want.dim[0]);
    seen[slot] = 1;
}

static int64_t check_line(const br_config *c, const name_line *line, unsigned char *seen) {
    char name[BR_NAME_BYTES];
    int64_t count = 0;
    const int layered = strchr(line->name, '{') != NULL, experts = strstr(line->name, "{e}") != NULL;
    for (int32_t l = 0; l < (layered ? c->n_layer : 1); l++) {
        if (layered && !in_set(c, line->name, l))
            continue;
        for (int32_t e = 0; e < (experts ? c->n_expert : 1); e++, count++) {
            fill_pattern(line->name, l, e, name);
            check_name(c, line, name, seen);
        }
    }
    ck_assert_msg(count == line->count, "%s: %lld names, published %lld", line->name, (long long)count, line->count);
    return count;
}

static const struct {
    const char *model;
    int64_t n_tensor;
} PUBLISHED[] = {
    {"kimi-k3", 497220 - 168},        /* 168 of the published count belong to the vision part */
    {"kimi-k31", 497220 - 168 + 120}, /* four weights and a bias in each of 24 layers */
    {"kimi-linear-48b-a3b", 20493},
};

START_TEST(names_are_the_published_ones) {
    const char *model = PUBLISHED[_i].model;
    char path[BR_PATH_BYTES], text[512];
    br_config c;
    int64_t count = 0;
    rig_read_golden_config(model, &c);
    const int64_t n_slot = br_weight_expect_count(&c);
    ck_assert_int_eq(n_slot, PUBLISHED[_i].n_tensor);
    unsigned char *seen = calloc((size_t)n_slot, 1);
    snprintf(path, sizeof path, "%s/golden/names/%s.txt", test_source_dir(), model);
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    while (fgets(text, sizeof text, file)) {
        name_line line;
        if (text[0] == '#')
            continue;
        parse_line(text, &line);
        count += check_line(&c, &line, seen);
    }
    fclose(file);
    free(seen);
    ck_assert_int_eq(count, n_slot); /* each slot once, so all of them */
    br_expect past;
    ck_assert(!br_weight_expect(&c, n_slot, &past));
}
END_TEST

START_TEST(other_names_are_unknown) {
    static const char *const STRANGE[] = {
        "",
        "model",
        "lm_head",
        "lm_head.weight.x",
        "model.layers.0.self_attn.q_proj",
        "model.layers.93.input_layernorm.weight",
        "model.layers.00.input_layernorm.weight",
        "model.layers.-1.input_layernorm.weight",
        "model.layers..input_layernorm.weight",
        "model.layers.12345.input_layernorm.weight",
        "model.layers.1x.input_layernorm.weight",
        "model.layers.input_layernorm.weight",
        "model.layers.0.self_attn.q_a_proj.weight" /* a KDA layer */,
        "model.layers.3.self_attn.k_proj.weight" /* an MLA layer */,
        "model.layers.1.mlp.gate_proj.weight" /* MoE */,
        "model.layers.0.block_sparse_moe.gate.weight" /* dense */,
        "model.layers.1.block_sparse_moe.experts.896.w1.weight_packed",
        "model.layers.1.block_sparse_moe.experts.01.w1.weight_packed",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight" /* not MXFP4 */,
        "model.layers.1.block_sparse_moe.experts.0.w4.weight_packed",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed_",
        "model.layers.1.w1.weight_packed",
        "language_model.language_model.lm_head.weight",
        "model.layers.3.self_attn.q_proj.weight" /* there is a query latent */,
        "model.layers.1.block_sparse_moe.experts.0.w1.weight_shape",
        "model.layers.1.block_sparse_moe.experts.0.input_layernorm.weight",
        "model.layers.0.self_attn.g_a_proj.weight" /* the gate is full-rank */,
        "model.layers.0.self_attn.q_proj.base_layerx.weight",
        "model.layers.0.self_attn.q.base_layer_proj.weight",
        "model.layers.1xinput_layernorm.weight",
    };
    br_config c;
    br_class cls;
    int32_t layer, expert;
    rig_read_golden_config("kimi-k31", &c);
    for (size_t i = 0; i < sizeof STRANGE / sizeof STRANGE[0]; i++)
        ck_assert_msg(!br_weight_parse(&c, STRANGE[i], strlen(STRANGE[i]), &cls, &layer, &expert), "known: '%s'",
                      STRANGE[i]);
    char endless[4096];
    memset(endless, 'a', sizeof endless);
    ck_assert(!br_weight_parse(&c, endless, sizeof endless, &cls, &layer, &expert));
    /* with and without prefix and wrapper; only n bytes are read */
    static const char *const KNOWN[] = {
        "model.layers.3.self_attn.q_b_proj.weight",
        "language_model.model.layers.3.self_attn.q_b_proj.weight",
        "language_model.model.layers.3.self_attn.q_b_proj.base_layer.weight",
        "model.layers.3.self_attn.base_layer.q_b_proj.weight",
    };
    for (size_t i = 0; i < sizeof KNOWN / sizeof KNOWN[0]; i++) {
        ck_assert_msg(br_weight_parse(&c, KNOWN[i], strlen(KNOWN[i]), &cls, &layer, &expert), "%s", KNOWN[i]);
        ck_assert(cls == BR_W_MLA_Q_B && layer == 3 && expert == -1);
        ck_assert(!br_weight_parse(&c, KNOWN[i], strlen(KNOWN[i]) - 1, &cls, &layer, &expert));
    }
}
END_TEST

START_TEST(linear_shapes) {
    br_config c;
    int32_t n_out = 0, n_in = 0;
    rig_read_golden_config("kimi-k31", &c);
    ck_assert(br_linear_shape(&c, BR_W_EXPERT_W2, 1, &n_out, &n_in) && n_out == 3584 && n_in == 3072); /* unpacked */
    ck_assert(br_linear_shape(&c, BR_W_MLA_KV_B, 92, &n_out, &n_in) && n_out == 24576 && n_in == 512);
    ck_assert(!br_linear_shape(&c, BR_W_MLA_KV_B, 0, &n_out, &n_in));
    ck_assert(!br_linear_shape(&c, BR_W_EXPERT_W2, 0, &n_out, &n_in));
    ck_assert(!br_linear_shape(&c, BR_W_MLA_Q, 3, &n_out, &n_in));
    ck_assert(!br_linear_shape(&c, BR_W_ROUTER, 1, &n_out, &n_in)); /* carries no adapter */
    ck_assert(!br_linear_shape(&c, BR_W_MLA_KV_B, 93, &n_out, &n_in) &&
              !br_linear_shape(&c, BR_W_MLA_KV_B, -1, &n_out, &n_in));
    ck_assert_int_eq(br_weight_slot(&c, BR_W_EXPERT_W1, 1, 896), -1);
    ck_assert_int_eq(br_weight_slot(&c, BR_W_EXPERT_W1, 1, -1), -1);
    ck_assert_int_eq(br_weight_slot(&c, BR_W_EMBED, 0, -1), -1);
    ck_assert_int_eq(br_weight_slot(&c, BR_W_ROUTER, 1, 0), -1);
}
END_TEST

Suite *test_names_suite(void) {
    Suite *suite = suite_create("names");
    TCase *names = tcase_create("names");
    tcase_set_timeout(names, 60);
    tcase_add_loop_test(names, names_are_the_published_ones, 0, sizeof PUBLISHED / sizeof PUBLISHED[0]);
    tcase_add_test(names, other_names_are_unknown);
    tcase_add_test(names, linear_shapes);
    suite_add_tcase(suite, names);
    return suite;
}
