/* The checkpoint table: what the loader accepts, what it refuses by name, and digests. */
#include "br_mem.h"
#include "br_nearest.h"
#include "checkpoint_rig.h"

#include <stdlib.h>
#include <string.h>

START_TEST(good_checkpoints_open) {
    for (int form = 0; form < 4; form++) {
        draft *d = draft_new(form & 1 ? TINY_LINEAR : TINY_K31, form & 2);
        const int64_t one[2] = {2, 2};
        draft_add(d, "vision_tower.encoder.weight", "F16", 2, one);
        draft_add(d, "mm_projector.linear.weight", "F16", 2, one);
        draft_add(d, "multi_modal_projector.linear.weight", "I64", 2, one);
        draft_write(d);
        br_weights *w;
        CHECK_OK(br_weights_open(d->dir, &d->config, &w));
        CHECK_OK(br_weights_check_data(w));
        ck_assert_int_eq(br_weights_count(w), d->n - 3);
        ck_assert_int_eq(br_weights_count(w), br_weight_expect_count(&d->config));
        ck_assert_int_eq(br_weights_skipped(w), 3);
        ck_assert_int_eq(br_weights_shard_count(w), d->n_shard);
        for (int64_t i = 0; i < br_weights_count(w); i++) {
            const br_tensor *t = br_weights_at(w, i);
            int at = draft_find(d, t->name);
            ck_assert_ptr_eq(br_weights_find(w, t->cls, t->layer, t->expert), t);
            ck_assert_int_eq(br_weight_slot(&d->config, t->cls, t->layer, t->expert), i);
            ck_assert_uint_eq(t->n_byte, d->out[at].n_byte);
            ck_assert_mem_eq(t->data, d->data[at], t->n_byte);
            ck_assert_mem_eq(t->dim, d->out[at].dim, sizeof(int64_t) * (size_t)t->n_dim);
        }
        ck_assert_ptr_null(br_weights_find(w, BR_W_EMBED, 0, -1));
        ck_assert_ptr_null(br_weights_find(w, BR_W_MLA_G, 0, -1));
        br_weights_close(w);
        draft_free(d);
    }
}
END_TEST

START_TEST(allowed_forms_open) {
    draft *d = draft_new(TINY_K31, 1);
    const int64_t conv[3] = {32, 1, 4}, a_log[1] = {1}, a_log_4[4] = {1, 1, 1, 1}, norm[1] = {32}, key[1] = {16};
    int at = draft_find(d, "self_attn.A_log");
    ck_assert_int_eq(d->out[at].dim[0], 128); /* written padded, as published */
    draft_resize(d, at, "F32", 1, a_log);
    CHECK_OK(draft_status(d));
    draft_resize(d, at, "F32", 4, a_log_4);
    CHECK_OK(draft_status(d));
    draft_resize(d, draft_find(d, "q_conv1d.weight"), "F32", 3, conv);
    draft_resize(d, draft_find(d, "o_norm.weight"), "F32", 1, norm);
    draft_resize(d, draft_find(d, "k_norm.weight"), "F32", 1, key);
    CHECK_OK(draft_status(d));
    draft_remove(d, draft_find(d, "k_norm.bias")); /* optional */
    CHECK_OK(draft_status(d));
    draft_free(d);
}
END_TEST

/* A checkpoint renamed by a wrapper is the same checkpoint; one changed bit, name or shape is another. */
START_TEST(digests) {
    draft *d = draft_new(TINY_K31, 1);
    br_digest digest = draft_digest(d);
    for (int i = 0; i < d->n; i++) { /* other shards, no prefix */
        d->shard[i] = d->in_index[i] = i % 3 == 0;
        memmove(d->name[i], d->name[i] + strlen("language_model."), BR_NAME_BYTES - strlen("language_model."));
    }
    ck_assert(br_digest_equal(digest, draft_digest(d)));
    int at = draft_find(d, "layers.1.self_attn.o_proj.weight");
    snprintf(d->name[at], BR_NAME_BYTES, "language_model.model.layers.1.self_attn.o_proj.base_layer.weight");
    ck_assert(br_digest_equal(digest, draft_digest(d)));
    for (int i = 0; i < d->n; i++) {
        unsigned char *last = &d->data[i][d->out[i].n_byte - 1];
        if (strstr(d->name[i], "A_log"))
            last = d->data[i]; /* the rest must stay zero */
        *last ^= 1;
        ck_assert_msg(!br_digest_equal(digest, draft_digest(d)), "a bit of %s is not in the digest", d->name[i]);
        *last ^= 1;
    }
    const int64_t reshaped[4] = {1, 1, 1, 1}, flat[1] = {1};
    at = draft_find(d, "self_attn.A_log");
    draft_resize(d, at, "F32", 1, flat);
    digest = draft_digest(d);
    draft_resize(d, at, "F32", 4, reshaped);
    ck_assert(!br_digest_equal(digest, draft_digest(d))); /* same bytes, other shape */
    draft_free(d);
}
END_TEST

/* What the loader never lets differ alone: dtype and shape of equal bytes. */
START_TEST(tensor_digest_covers_the_form) {
    static const unsigned char BYTES[24] = {1, 2, 3};
    const br_tensor good = {
        .dtype = BR_DTYPE_BF16, .n_dim = 2, .dim = {3, 4, 1}, .data = BYTES, .n_byte = 24, .name = "lm_head.weight"};
    const br_digest digest = br_tensor_digest(&good);
    br_tensor other = good;
    other.dtype = BR_DTYPE_F16;
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.dim[0] = 4;
    other.dim[1] = 3;
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.n_dim = 3;
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.name = "model.norm.weight";
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.name = "language_model.lm_head.weight";
    other.shard = 7;
    ck_assert(br_digest_equal(digest, br_tensor_digest(&other)));
}
END_TEST

START_TEST(nearest_names) {
    static const struct {
        const char *target, *name;
        int32_t distance;
    } PAIR[] = {
        {"kitten", "sitting", 3}, {"saturday", "sunday", 3}, {"abcdef", "abcdef", 0}, {"abc", "", 3},
        {"", "abc", 3},           {"axbycz", "abc", 3},      {"xaybzc", "1a2b3c", 3}, {"ab", "ba", 2},
    };
    br_nearest nearest;
    for (size_t i = 0; i < sizeof PAIR / sizeof PAIR[0]; i++) {
        br_nearest_begin(&nearest, PAIR[i].target);
        br_nearest_offer(&nearest, PAIR[i].name);
        ck_assert_int_eq(nearest.n_best, 1);
        ck_assert_msg(nearest.distance[0] == PAIR[i].distance, "%s, %s: %d", PAIR[i].target, PAIR[i].name,
                      nearest.distance[0]);
    }
    static const char *const OFFER[] = {
        "abcdXXX", "abcdefX", "abXXefg", "language_model.abcdefg", "abcXefg", "aXcdefg", "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq"};
    char text[BR_NEAREST_TEXT_BYTES];
    br_nearest_begin(&nearest, "abcdefg");
    br_nearest_text(&nearest, text);
    ck_assert_str_eq(text, "");
    for (size_t i = 0; i < sizeof OFFER / sizeof OFFER[0]; i++)
        br_nearest_offer(&nearest, OFFER[i]);
    br_nearest_text(&nearest, text); /* the best three, of equal ones the first offered */
    ck_assert_str_eq(text, "; nearest: 'language_model.abcdefg', 'abcdefX', 'abcXefg'");
    br_nearest_begin(&nearest, "abcdefg");
    br_nearest_offer(&nearest, OFFER[6]);
    ck_assert_int_eq(nearest.n_best, 0); /* nothing similar */
}
END_TEST

START_TEST(doubled_tensors_are_refused) {
    draft *d = draft_new(TINY_K31, 1);
    int at = draft_find(d, "lm_head.weight");
    draft_add(d, "lm_head.weight", "BF16", 2, d->out[at].dim); /* the other spelling */
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("twice");
    CHECK_SAYS("lm_head.weight");
    draft_free(d);
}
END_TEST

START_TEST(unknown_tensors_are_refused_with_their_nearest) {
    const int64_t dim[1] = {32};
    draft *d = draft_new(TINY_K31, 1);
    int at = draft_find(d, "layers.1.self_attn.kv_a_proj_with_mqa.weight");
    /* a typing error */
    snprintf(d->name[at], BR_NAME_BYTES, "language_model.model.layers.1.self_attn.kv_a_proj_with_mpa.weight");
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("kv_a_proj_with_mpa.weight");
    CHECK_SAYS("1 unknown, 1 missing");
    CHECK_SAYS("nearest: 'language_model.model.layers.1.self_attn.kv_a_proj_with_mqa.weight'");
    draft_free(d);
    d = draft_new(TINY_K31, 0);
    draft_add(d, "model.layers.2.input_layernorm.weight", "BF16", 1, dim); /* a layer too many */
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("1 unknown, 0 missing");
    CHECK_SAYS("'language_model.model.layers.0.input_layernorm.weight'");
    draft_add(d, "no.relation.whatsoever.at.all", "BF16", 1, dim);
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("2 unknown");
    draft_free(d);
}
END_TEST

START_TEST(missing_tensors_are_refused) {
    for (int i = 0;; i++) {
        draft *d = draft_new(TINY_K31, i % 2);
        if (i == d->n) {
            draft_free(d);
            break;
        }
        char name[BR_NAME_BYTES];
        memcpy(name, d->name[i], sizeof name);
        draft_remove(d, i);
        if (strstr(name, "k_norm.bias")) {
            CHECK_OK(draft_status(d));
        } else {
            CHECK_FAILS(draft_status(d), BR_E_FORMAT);
            CHECK_SAYS(name);
            CHECK_SAYS("1 missing");
        }
        if (strstr(name, "experts.1.w1.weight_packed"))
            CHECK_SAYS("nearest: 'language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed'");
        draft_free(d);
    }
}
END_TEST

/* Every tensor, with a wrong dtype and with each dimension one larger. */
START_TEST(misshaped_tensors_are_refused) {
    draft *d = draft_new(TINY_K31, 1);
    for (int i = 0; i < d->n; i++) {
        const st_out good = d->out[i];
        unsigned char *data = d->data[i];
        d->data[i] = NULL;
        for (int32_t dim = 0; dim < good.n_dim; dim++) {
            int64_t wrong[4];
            memcpy(wrong, good.dim, sizeof wrong);
            wrong[dim]++;
            if (strstr(d->name[i], "A_log"))
                wrong[dim] = BR_HEAD_MAX + 1; /* any padding up to the most heads is fine */
            draft_resize(d, i, good.dtype, good.n_dim, wrong);
            CHECK_FAILS(draft_status(d), BR_E_FORMAT);
            CHECK_SAYS(d->name[i]);
            CHECK_SAYS("shape [");
        }
        draft_resize(d, i, "F16", good.n_dim, good.dim);
        CHECK_FAILS(draft_status(d), BR_E_FORMAT);
        CHECK_SAYS(d->name[i]);
        CHECK_SAYS("dtype F16, expected");
        free(d->data[i]);
        d->data[i] = data;
        d->out[i] = good;
    }
    int at = draft_find(d, "self_attn.A_log");
    const int64_t none[1] = {0};
    draft_resize(d, at, "F32", 1, none);
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    draft_free(d);
}
END_TEST

static void put_u16(unsigned char *at, uint16_t bits) {
    memcpy(at, &bits, sizeof bits);
}

static void put_u32(unsigned char *at, uint32_t bits) {
    memcpy(at, &bits, sizeof bits);
}

/* NaN, Inf and -Inf at the first, a middle and the last element of every tensor of numbers. */
START_TEST(values_that_are_not_numbers_are_refused) {
    static const uint32_t BAD[] = {0x7fc00000u, 0x7f800000u, 0xff800000u, 0xff810000u};
    draft *d = draft_new(TINY_K31, 1);
    int n_checked = 0;
    for (int i = 0; i < d->n; i++) {
        const int is_bf16 = strcmp(d->out[i].dtype, "BF16") == 0;
        const uint64_t size = is_bf16 ? 2 : 4, n = d->out[i].n_byte / size, place[3] = {0, n / 2, n - 1};
        if (strcmp(d->out[i].dtype, "U8") == 0)
            continue;
        const int p = n_checked++ % 3; /* each place and pattern is met many times over the tensors */
        unsigned char *at = d->data[i] + place[p] * size, kept[4];
        memcpy(kept, at, size);
        if (is_bf16)
            put_u16(at, (uint16_t)(BAD[n_checked % 4] >> 16));
        else
            put_u32(at, BAD[n_checked % 4]);
        CHECK_FAILS(draft_status(d), BR_E_FORMAT);
        CHECK_SAYS(d->name[i]);
        char where[64];
        snprintf(where, sizeof where, "element %llu is NaN or Inf", (unsigned long long)place[p]);
        CHECK_SAYS(where);
        memcpy(at, kept, size);
    }
    ck_assert_int_gt(n_checked, 40);
    int at = draft_find(d, "layers.1.input_layernorm.weight"); /* the largest finite numbers and subnormals are fine */
    put_u16(d->data[at], 0x7f7f);
    put_u16(d->data[at] + 2, 0x0001);
    at = draft_find(d, "dt_bias");
    put_u32(d->data[at], 0xff7fffffu);
    CHECK_OK(draft_status(d));
    draft_free(d);
}
END_TEST

START_TEST(scale_bytes_and_padding_are_checked) {
    draft *d = draft_new(TINY_K31, 0);
    static const char *const SCALE[] = {"experts.0.w1.weight_scale", "experts.1.w2.weight_scale",
                                        "experts.2.w3.weight_scale"};
    for (size_t s = 0; s < 3; s++) {
        int at = draft_find(d, SCALE[s]);
        unsigned char *last = &d->data[at][d->out[at].n_byte - 1];
        for (int byte = 252; byte <= 255; byte++) {
            *last = (unsigned char)byte;
            br_status status = draft_status(d);
            ck_assert_msg(status == (byte == 252 ? BR_OK : BR_E_FORMAT), "scale byte %d: %s", byte, br_status_name(status));
            if (byte > 252)
                CHECK_SAYS(SCALE[s]);
        }
        *last = 0;
        CHECK_OK(draft_status(d));
    }
    int codes = draft_find(d, "experts.0.w1.weight_packed");
    memset(d->data[codes], 0xff, d->out[codes].n_byte); /* every code is a number */
    CHECK_OK(draft_status(d));
    int at = draft_find(d, "self_attn.A_log");
    put_u32(d->data[at] + 4, 0x80000000u); /* -0 is a zero */
    CHECK_OK(draft_status(d));
    put_u32(d->data[at] + 127 * 4, 1);
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("element 127 is not zero");
    draft_free(d);
}
END_TEST

/* ---- index and shards ------------------------------------------------------------------------------------------------ */

START_TEST(index_and_shards_must_agree) {
    draft *d = draft_new(TINY_K31, 1);
    br_weights *w;
    d->in_index[5] = 1 - d->in_index[5];
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS(d->name[5]);
    CHECK_SAYS("index.json says");
    d->in_index[5] = -1;
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("not listed");
    d->in_index[5] = d->shard[5];
    d->shard[5] = 2; /* listed, written nowhere */
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("not in its shard");
    d->shard[5] = d->in_index[5];
    CHECK_OK(draft_status(d));
    draft_drop(d, "model-00002-of-00002.safetensors");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_NOT_FOUND);
    CHECK_SAYS("model-00002-of-00002.safetensors");
    draft_write_text(d, "model-00002-of-00002.safetensors", "short");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_FORMAT);
    draft_drop(d, "model.safetensors.index.json");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_NOT_FOUND);
    CHECK_SAYS("neither");
    draft_write_text(d, "model.safetensors.index.json", "{\"weight_map\":{}}");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_FORMAT);
    CHECK_SAYS("at least one");
    static const char *const ESCAPE[] = {"../model.safetensors", "/etc/passwd", "a/../../b", ""};
    for (size_t i = 0; i < sizeof ESCAPE / sizeof ESCAPE[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"weight_map\":{\"lm_head.weight\":\"%s\"}}", ESCAPE[i]);
        draft_write_text(d, "model.safetensors.index.json", text);
        CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_FORMAT);
        CHECK_SAYS("relative path inside");
    }
    draft_free(d);
}
END_TEST

START_TEST(faults_end_in_a_status) {
    draft *d = draft_new(TINY_K31, 1);
    draft_write(d);
    for (int kind = 0; kind < 2; kind++) { /* allocations, reads */
        long n = 1;
        for (;; n++) {
            br_weights *w;
            (kind ? br_file_fail_nth_read : br_mem_fail_nth)(n);
            br_status status = br_weights_open(d->dir, &d->config, &w);
            if (status == BR_OK) {
                br_weights_close(w);
                break;
            }
            ck_assert_int_eq(status, kind ? BR_E_IO : BR_E_NOMEM);
            ck_assert_ptr_null(w);
        }
        br_mem_fail_nth(0);
        br_file_fail_nth_read(0);
        /* reads: index and two shards; allocations: three of the index, three a shard, seven of the table */
        ck_assert_int_eq(n, kind ? 4 : 17);
    }
    draft_free(d);
}
END_TEST

Suite *test_weights_suite(void) {
    Suite *suite = suite_create("weights");
    TCase *open = tcase_create("open"), *refused = tcase_create("refused");
    tcase_set_timeout(open, 60);
    tcase_set_timeout(refused, 60);
    tcase_add_test(open, good_checkpoints_open);
    tcase_add_test(open, allowed_forms_open);
    tcase_add_test(open, digests);
    tcase_add_test(open, tensor_digest_covers_the_form);
    tcase_add_test(refused, nearest_names);
    tcase_add_test(refused, doubled_tensors_are_refused);
    tcase_add_test(refused, unknown_tensors_are_refused_with_their_nearest);
    tcase_add_test(refused, missing_tensors_are_refused);
    tcase_add_test(refused, misshaped_tensors_are_refused);
    tcase_add_test(refused, values_that_are_not_numbers_are_refused);
    tcase_add_test(refused, scale_bytes_and_padding_are_checked);
    tcase_add_test(refused, index_and_shards_must_agree);
    tcase_add_test(refused, faults_end_in_a_status);
    suite_add_tcase(suite, open);
    suite_add_tcase(suite, refused);
    return suite;
}
