/* Full weights from memory; see ws_base.h. */
#include "ws_base.h"

#include "br_mem.h"

#include <string.h>

typedef enum base_state { IDLE, RECEIVING, PREPARED } base_state;

struct ws_base {
    br_weights *weights;
    uint64_t *n_in; /* (n_tensor) bytes that came */
    base_state state;
    br_digest digest; /* of prepared ones */
};

static br_status check_call(const ws_base *b, const char *call, base_state wanted) {
    static const char *const STATE[] = {"idle", "receiving", "prepared"};
    if (b->state == wanted)
        return BR_OK;
    return br_fail(BR_E_ARG, "full weights: %s while %s: expected %s", call, STATE[b->state], STATE[wanted]);
}

br_status ws_base_open(const br_weights *like, ws_base **out) {
    br_status status;
    ws_base *b = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&b, sizeof *b, "a stage of full weights"));
    BR_TRY_GOTO(br_weights_like(like, &b->weights), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&b->n_in, (size_t)br_weights_count(like) * sizeof *b->n_in, "a stage of full weights"), exit);
    *out = b;
    b = NULL;
exit:
    ws_base_close(b);
    return status;
}

void ws_base_close(ws_base *b) {
    if (!b)
        return;
    br_weights_close(b->weights);
    br_mem_free(b->n_in);
    br_mem_free(b);
}

const br_weights *ws_base_table(const ws_base *b) {
    return b->weights;
}

br_status ws_base_find(const ws_base *b, const char *name, int64_t *tensor) {
    br_class cls;
    int32_t layer, expert;
    *tensor = -1;
    if (br_weight_parse(br_weights_config(b->weights), name, strlen(name), &cls, &layer, &expert)) {
        const br_tensor *found = br_weights_find(b->weights, cls, layer, expert);
        *tensor = found ? found - br_weights_at(b->weights, 0) : -1;
    }
    return *tensor >= 0 ? BR_OK : br_fail(BR_E_NOT_FOUND, "tensor '%.200s' is not one of this checkpoint", name);
}

br_status ws_base_begin(ws_base *b) {
    BR_TRY(check_call(b, "begin", IDLE));
    BR_TRY(br_weights_take_room(b->weights));
    memset(b->n_in, 0, (size_t)br_weights_count(b->weights) * sizeof *b->n_in);
    b->state = RECEIVING;
    return BR_OK;
}

void ws_base_drop(ws_base *b) {
    br_weights_drop_room(b->weights);
    b->state = IDLE;
}

static br_status take_chunk(ws_base *b, int64_t tensor, uint64_t offset, const void *bytes, size_t n) {
    const int64_t n_tensor = br_weights_count(b->weights);
    if (tensor < 0 || tensor >= n_tensor)
        return br_fail(BR_E_FORMAT, "a chunk of tensor %lld: expected 0 to %lld", (long long)tensor, (long long)n_tensor - 1);
    const br_tensor *t = br_weights_at(b->weights, tensor);
    if (offset != b->n_in[tensor] || n > t->n_byte - offset)
        return br_fail(BR_E_FORMAT, "%s: a chunk of %zu bytes at %llu: expected at most %llu at %llu", t->name, n, (unsigned long long)offset,
                       (unsigned long long)(t->n_byte - b->n_in[tensor]), (unsigned long long)b->n_in[tensor]);
    if (n > 0)
        memcpy(br_weights_room(b->weights, tensor) + offset, bytes, n);
    b->n_in[tensor] += n;
    return BR_OK;
}

br_status ws_base_chunk(ws_base *b, int64_t tensor, uint64_t offset, const void *bytes, size_t n) {
    BR_TRY(check_call(b, "chunk", RECEIVING));
    const br_status status = take_chunk(b, tensor, offset, bytes, n);
    if (status != BR_OK)
        ws_base_drop(b);
    return status;
}

static br_status check_whole(const ws_base *b, br_digest expected, br_digest *digest) {
    char found[BR_DIGEST_TEXT_BYTES], wanted[BR_DIGEST_TEXT_BYTES];
    for (int64_t i = 0; i < br_weights_count(b->weights); i++) {
        const br_tensor *t = br_weights_at(b->weights, i);
        if (b->n_in[i] != t->n_byte)
            return br_fail(BR_E_FORMAT, "%s: %llu of %zu bytes came", t->name, (unsigned long long)b->n_in[i], t->n_byte);
    }
    BR_TRY(br_weights_check_data(b->weights));
    *digest = br_weights_digest(b->weights);
    if (br_digest_equal(*digest, expected))
        return BR_OK;
    br_digest_text(*digest, found);
    br_digest_text(expected, wanted);
    return br_fail(BR_E_MISMATCH, "full weights: their digest is %s: expected %s", found, wanted);
}

br_status ws_base_end(ws_base *b, br_digest expected) {
    BR_TRY(check_call(b, "end", RECEIVING));
    const br_status status = check_whole(b, expected, &b->digest);
    if (status != BR_OK)
        ws_base_drop(b);
    else
        b->state = PREPARED;
    return status;
}

br_status ws_base_weights(const ws_base *b, const br_weights **out, br_digest *digest) {
    *out = NULL;
    BR_TRY(check_call(b, "commit", PREPARED));
    *out = b->weights;
    *digest = b->digest;
    return BR_OK;
}
