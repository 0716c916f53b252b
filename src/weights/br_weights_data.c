/* What is asked of the data themselves: no value that is not a number, and the digests; see br_weights.h. */
#include "br_weights.h"

#include "br_weights_table.h"

#include <stdlib.h>
#include <string.h>

enum { FP4_SCALE_MAX = 252 };

/* Values are tested in blocks without a branch, and one by one only in a block that failed: a checkpoint is read at the
 * speed of memory. The data may be unaligned, hence the copies. */
enum { BLOCK = 1024 };

static inline uint32_t bad_bf16(const unsigned char *bytes, size_t i) {
    uint16_t x;
    memcpy(&x, bytes + 2 * i, sizeof x);
    return (x & 0x7f80u) == 0x7f80u;
}

static inline uint32_t bad_f32(const unsigned char *bytes, size_t i) {
    uint32_t x;
    memcpy(&x, bytes + 4 * i, sizeof x);
    return (x & 0x7f800000u) == 0x7f800000u;
}

static inline uint32_t bad_scale(const unsigned char *bytes, size_t i) {
    return bytes[i] > FP4_SCALE_MAX;
}

/* Index of the first bad value, n when there is none. */
#define FIRST_BAD(name, bad)                                    \
    static size_t name(const unsigned char *bytes, size_t n) {  \
        for (size_t begin = 0; begin < n; begin += BLOCK) {     \
            size_t end = n - begin < BLOCK ? n : begin + BLOCK; \
            uint32_t any = 0;                                   \
            for (size_t i = begin; i < end; i++)                \
                any |= bad(bytes, i);                           \
            for (size_t i = begin; any && i < end; i++) {       \
                if (bad(bytes, i))                              \
                    return i;                                   \
            }                                                   \
        }                                                       \
        return n;                                               \
    }

FIRST_BAD(first_bad_bf16, bad_bf16)
FIRST_BAD(first_bad_f32, bad_f32)
FIRST_BAD(first_bad_scale, bad_scale)

static const char *path_of(const br_weights *w, const br_tensor *t) {
    return t->shard < 0 ? "weights from memory" : w->shard[t->shard].path;
}

static br_status check_finite(const br_weights *w, const br_tensor *t) {
    const size_t size = t->dtype == BR_DTYPE_BF16 ? 2 : 4, n = t->n_byte / size;
    size_t at = t->dtype == BR_DTYPE_BF16 ? first_bad_bf16(t->data, n) : first_bad_f32(t->data, n);
    if (at < n)
        return br_fail(BR_E_FORMAT, "%s: tensor '%s': element %zu is NaN or Inf", path_of(w, t), t->name, at);
    return BR_OK;
}

/* Padding that holds numbers means another head count than the config's. */
static br_status check_a_log(const br_weights *w, const br_tensor *t) {
    const size_t n = t->n_byte / sizeof(uint32_t);
    for (size_t i = (size_t)w->config.kda_n_head; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, (const unsigned char *)t->data + i * sizeof bits, sizeof bits);
        if (bits << 1)
            return br_fail(BR_E_FORMAT, "%s: tensor '%s': element %zu is not zero, expected zeros after the %d heads",
                           path_of(w, t), t->name, i, w->config.kda_n_head);
    }
    return BR_OK;
}

static int is_scale(br_class cls) {
    return cls == BR_W_EXPERT_W1_SCALE || cls == BR_W_EXPERT_W3_SCALE || cls == BR_W_EXPERT_W2_SCALE;
}

br_status br_weights_check_data(const br_weights *weights) {
    for (int64_t i = 0; i < weights->n_tensor; i++) {
        const br_tensor *t = &weights->tensor[i];
        if (t->gen)
            continue;
        if (t->dtype == BR_DTYPE_BF16 || t->dtype == BR_DTYPE_F32)
            BR_TRY(check_finite(weights, t));
        if (t->cls == BR_W_KDA_A_LOG)
            BR_TRY(check_a_log(weights, t));
        if (!is_scale(t->cls))
            continue;
        size_t at = first_bad_scale(t->data, t->n_byte);
        if (at < t->n_byte)
            return br_fail(BR_E_FORMAT, "%s: tensor '%s': scale byte %zu is %u, expected 0 to %d",
                           path_of(weights, t), t->name, at, ((const unsigned char *)t->data)[at], FP4_SCALE_MAX);
    }
    return BR_OK;
}

static void add_recipe(br_hash_stream *stream, const br_tensor *tensor) {
    const bi_weightgen *gen = tensor->gen;
    const uint64_t number[4] = {gen->key, (uint64_t)gen->kind, gen->scale_byte, tensor->n_drawn};
    const uint32_t bits[2] = {bi_u32_of(gen->offset), bi_u32_of(gen->unit)};
    br_hash_add(stream, "generated", sizeof "generated");
    br_hash_add(stream, number, sizeof number);
    br_hash_add(stream, bits, sizeof bits);
}

br_digest br_tensor_digest(const br_tensor *tensor) {
    br_hash_stream stream;
    char plain[BR_NAME_BYTES];
    const int32_t form[2] = {(int32_t)tensor->dtype, tensor->n_dim};
    BR_ASSERT(br_weight_plain_name(tensor->name, strlen(tensor->name), plain));
    br_hash_begin(&stream);
    br_hash_add(&stream, plain, strlen(plain) + 1);
    br_hash_add(&stream, form, sizeof form);
    br_hash_add(&stream, tensor->dim, (size_t)tensor->n_dim * sizeof tensor->dim[0]);
    if (tensor->gen)
        add_recipe(&stream, tensor);
    else
        br_hash_add(&stream, tensor->data, tensor->n_byte);
    return br_hash_end(&stream);
}

static int by_plain_name(const void *a, const void *b) {
    const br_tensor *x = *(const br_tensor *const *)a, *y = *(const br_tensor *const *)b;
    char plain_x[BR_NAME_BYTES], plain_y[BR_NAME_BYTES];
    br_weight_plain_name(x->name, strlen(x->name), plain_x);
    br_weight_plain_name(y->name, strlen(y->name), plain_y);
    return strcmp(plain_x, plain_y);
}

br_digest br_weights_digest_each(const br_weights *weights, br_tensor_seen seen, void *context) {
    const size_t n = (size_t)weights->n_tensor;
    for (size_t i = 0; i < n; i++)
        weights->by_name[i] = &weights->tensor[i];
    qsort(weights->by_name, n, sizeof weights->by_name[0], by_plain_name);
    for (size_t i = 0; i < n; i++) {
        weights->leaf[i] = br_tensor_digest(weights->by_name[i]);
        if (seen)
            seen(context, weights->by_name[i], weights->leaf[i]);
    }
    const br_digest root = br_hash_merkle(weights->leaf, n);
    return weights->gen ? br_hash_chain(weights->identity, &root, sizeof root) : root;
}

br_digest br_weights_digest(const br_weights *weights) {
    return br_weights_digest_each(weights, NULL, NULL);
}
