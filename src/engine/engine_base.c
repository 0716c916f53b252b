/* Other base weights for an engine that stays open: from a folder, or from memory. Layer: engine; the calls are those of bitroll.h. */
#include "engine_parts.h"
#include "ws_base.h"

#include <stdio.h>
#include <string.h>

static br_status check_idle(const br_engine *e) {
    if (sched_n_left(e->sched) > 0)
        return br_fail(BR_E_LIMIT, "%d requests run: weights are changed when none does", sched_n_left(e->sched));
    return BR_OK;
}

/* What was computed under the weights before is never found again. */
static br_status put(br_engine *e, const br_weights *weights, br_digest digest) {
    int32_t changed = 0;
    const br_status status = br_loaded_put(&e->loaded, weights, digest, &changed);
    if (status != BR_OK && changed)
        e->broken = status;
    engine_bind_roots(e);
    return status;
}

br_status br_engine_reload(br_engine *e, const char *model_dir, const br_digest *expected) {
    br_status status;
    br_weights *weights = NULL;
    if (!model_dir)
        return br_fail(BR_E_ARG, "no model folder given");
    BR_TRY(check_idle(e));
    BR_TRY_GOTO(br_loaded_open_like(&e->loaded, model_dir, &weights), exit);
    BR_TRY_GOTO(br_weights_check_data(weights), exit);
    const br_digest digest = br_weights_digest(weights);
    if (expected && !br_digest_equal(digest, *expected)) {
        char found[BR_DIGEST_TEXT_BYTES], wanted[BR_DIGEST_TEXT_BYTES];
        br_digest_text(digest, found);
        br_digest_text(*expected, wanted);
        status = br_fail(BR_E_MISMATCH, "%s: the digest of its weights is %s: expected %s", model_dir, found, wanted);
        goto exit;
    }
    status = put(e, weights, digest);
exit:
    br_weights_close(weights);
    return status;
}

/* ---- from memory ----------------------------------------------------------------------------------------------------------- */

struct br_base {
    br_engine *engine;
    ws_base *stage;
};

br_status br_base_open(br_engine *e, const char *model_dir, br_base **out) {
    br_status status;
    br_weights *weights = NULL;
    br_base *base = NULL;
    *out = NULL;
    if (!model_dir)
        return br_fail(BR_E_ARG, "no model folder given");
    BR_TRY_GOTO(br_loaded_open_like(&e->loaded, model_dir, &weights), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&base, sizeof *base, "full weights"), exit);
    base->engine = e;
    BR_TRY_GOTO(ws_base_open(weights, &base->stage), exit);
    *out = base;
    base = NULL;
exit:
    br_weights_close(weights);
    br_base_close(base);
    return status;
}

void br_base_close(br_base *base) {
    if (!base)
        return;
    ws_base_close(base->stage);
    br_mem_free(base);
}

int64_t br_base_count(const br_base *base) {
    return br_weights_count(ws_base_table(base->stage));
}

br_status br_base_tensor_at(const br_base *base, int64_t tensor, br_base_tensor *out) {
    static const char *const DTYPE[] = {[BR_DTYPE_BF16] = "BF16", [BR_DTYPE_F32] = "F32", [BR_DTYPE_U8] = "U8"};
    _Static_assert((int)BR_BASE_NAME_BYTES == (int)BR_NAME_BYTES && sizeof out->dim == sizeof ((br_tensor *)0)->dim, "of equal room");
    if (tensor < 0 || tensor >= br_base_count(base))
        return br_fail(BR_E_ARG, "tensor number %lld: expected 0 to %lld", (long long)tensor, (long long)br_base_count(base) - 1);
    const br_tensor *t = br_weights_at(ws_base_table(base->stage), tensor);
    *out = (br_base_tensor){.n_dim = t->n_dim, .n_byte = t->n_byte};
    snprintf(out->name, sizeof out->name, "%s", t->name);
    snprintf(out->dtype, sizeof out->dtype, "%s", DTYPE[t->dtype]);
    memcpy(out->dim, t->dim, sizeof out->dim);
    return BR_OK;
}

br_status br_base_find(const br_base *base, const char *name, int64_t *tensor) {
    return ws_base_find(base->stage, name, tensor);
}

br_status br_base_begin(br_base *base) {
    return ws_base_begin(base->stage);
}

br_status br_base_chunk(br_base *base, int64_t tensor, uint64_t offset, const void *bytes, size_t n) {
    return ws_base_chunk(base->stage, tensor, offset, bytes, n);
}

br_status br_base_end(br_base *base, br_digest expected) {
    return ws_base_end(base->stage, expected);
}

br_status br_base_commit(br_base *base) {
    const br_weights *weights;
    br_digest digest;
    BR_TRY(ws_base_weights(base->stage, &weights, &digest));
    BR_TRY(check_idle(base->engine));
    const br_status status = put(base->engine, weights, digest);
    ws_base_drop(base->stage);
    return status;
}

void br_base_abort(br_base *base) {
    ws_base_drop(base->stage);
}
