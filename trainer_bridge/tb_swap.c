/* Weights by the swaps of bitroll.h: one adapter of an engine, whose tensors a trainer sends. Layer: trainer_bridge. */
#include "tb_worker.h"

#include <string.h>

static br_status check_adapter(const tb_swap *w, tb_text adapter) {
    if (adapter.n && !tb_text_equal(adapter, tb_text_of(w->adapter)))
        return br_fail(BR_E_NOT_FOUND, "adapter '%.*s': this worker swaps '%s'", (int)adapter.n, adapter.p, w->adapter);
    return BR_OK;
}

static br_status swap_describe(void *context, tb_text adapter, tb_buffer *raw, uint32_t *n_tensor) {
    const tb_swap *w = context;
    br_swap_tensor ours;
    br_digest digest;
    int64_t n;
    BR_TRY(check_adapter(w, adapter));
    BR_TRY(br_swap_manifest(w->engine, w->adapter, &n, &digest));
    for (int64_t i = 0; i < n; i++) {
        BR_TRY(br_swap_tensor_at(w->engine, w->adapter, i, &ours));
        const tb_tensor t = {.name = tb_text_of(ours.name), .dtype = TB_BF16, .kind = ours.is_b ? TB_LORA_B : TB_LORA_A, .n_dim = 2,
                             .dim = {(uint64_t)ours.n_row, (uint64_t)ours.n_col}};
        tb_tensor_add(raw, &t);
    }
    *n_tensor = (uint32_t)n;
    return BR_OK;
}

static br_status swap_manifest(void *context, const tb_manifest *manifest) {
    const tb_swap *w = context;
    br_swap_status status;
    br_swap_tensor ours;
    tb_tensor t;
    int64_t i = 0;
    BR_TRY(br_swap_status_of(w->engine, w->adapter, &status));
    const int64_t n = status.n_tensor;
    for (uint64_t at = 0; tb_tensor_next(&manifest->tensors, &at, &t); i++) {
        if (i == n)
            return br_fail(BR_E_NOT_FOUND, "%.*s: the adapter '%s' has %lld tensors, this is one more", (int)t.name.n, t.name.p, w->adapter,
                           (long long)n);
        BR_TRY(br_swap_tensor_at(w->engine, w->adapter, i, &ours));
        if (!tb_text_equal(t.name, tb_text_of(ours.name)))
            return br_fail(BR_E_NOT_FOUND, "tensor %lld is %.*s: expected %s", (long long)i, (int)t.name.n, t.name.p, ours.name);
        if (t.dtype != TB_BF16 || t.kind != (ours.is_b ? TB_LORA_B : TB_LORA_A) || t.n_dim != 2 || t.dim[0] != (uint64_t)ours.n_row ||
            t.dim[1] != (uint64_t)ours.n_col)
            return br_fail(BR_E_SHAPE, "%s: expected bf16, %d x %d, as %s", ours.name, ours.n_row, ours.n_col, ours.is_b ? "B" : "A");
    }
    return i == n ? BR_OK : br_fail(BR_E_NOT_FOUND, "the manifest ends after %lld of %lld tensors", (long long)i, (long long)n);
}

static br_status swap_begin(void *context, uint64_t version, const tb_w_begin *begin) {
    tb_swap *w = context;
    br_swap_answer answer;
    BR_TRY(check_adapter(w, begin->adapter));
    if (version > INT64_MAX)
        return br_fail(BR_E_ARG, "version %llu: above 2^63 - 1", (unsigned long long)version);
    BR_TRY(br_swap_begin(w->engine, w->adapter, (int64_t)version, begin->flags, &answer));
    if (answer == BR_SWAP_COMMITTED)
        return br_fail(BR_E_ARG, "version %llu is live already: when its digest is another one, send the bytes under another version",
                       (unsigned long long)version);
    w->version = (int64_t)version;
    return BR_OK;
}

static br_status swap_chunk(void *context, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    const tb_swap *w = context;
    if (tensor > INT64_MAX)
        return br_fail(BR_E_ARG, "tensor %llu: there is none", (unsigned long long)tensor);
    return br_swap_chunk(w->engine, w->adapter, (int64_t)tensor, offset, bytes, n);
}

static br_status swap_ipc(void *context, uint64_t tensor, const br_ipc *from) {
    const tb_swap *w = context;
    if (tensor > INT64_MAX)
        return br_fail(BR_E_ARG, "tensor %llu: there is none", (unsigned long long)tensor);
    return br_swap_ipc(w->engine, w->adapter, (int64_t)tensor, from);
}

static br_status swap_end(void *context, br_digest digest) {
    const tb_swap *w = context;
    return br_swap_end(w->engine, w->adapter, digest);
}

static br_status swap_live(void *context, br_digest *digest) {
    const tb_swap *w = context;
    return br_engine_adapter_live_digest(w->engine, w->adapter, digest);
}

static br_status swap_commit(void *context, tb_pause_mode mode, uint64_t *step, br_digest *digest) {
    tb_swap *w = context;
    br_swap_answer answer;
    _Static_assert((int)TB_DRAIN == (int)BR_SWAP_DRAIN && (int)TB_STOP == (int)BR_SWAP_STOP && (int)TB_FINISH_OLD == (int)BR_SWAP_FINISH_OLD &&
                   (int)TB_IN_FLIGHT == (int)BR_SWAP_IN_FLIGHT, "the modes of the wire are those of bitroll.h");
    _Static_assert((int)TB_INITIAL == (int)BR_SWAP_INITIAL && (int)TB_RESYNC == (int)BR_SWAP_RESYNC, "and so are the flags");
    const br_status status = br_swap_commit(w->engine, w->adapter, w->version, (br_swap_mode)mode, &answer);
    *step = answer == BR_SWAP_COMMITTED ? ++w->n_commit : 0; /* also when what follows the change fails */
    BR_TRY(status);
    if (answer == BR_SWAP_WAITS)
        return br_fail(BR_E_LIMIT, "sequences of the version before have to end");
    return swap_live(context, digest);
}

static void swap_abort(void *context) {
    const tb_swap *w = context;
    (void)br_swap_abort(w->engine, w->adapter); /* nothing to abort is no error */
}

tb_weights_ops tb_weights_of(tb_swap *swap) {
    return (tb_weights_ops){swap, swap_manifest, swap_begin, swap_chunk, swap_end, swap_commit, swap_abort, swap_live, swap_describe, swap_ipc};
}
