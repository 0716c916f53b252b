/* Full weights by br_base of bitroll.h: every tensor of the base, which a trainer sends. Layer: trainer_bridge. */
#include "tb_worker.h"

#include "br_mem.h"

#include <string.h>

static br_status check_tensor(const tb_base *w, const tb_tensor *t, int64_t place) {
    static const char *const DTYPE[] = {[TB_BF16] = "BF16", [TB_F32] = "F32", [TB_F8_E4M3] = "F8_E4M3", [TB_U8] = "U8"};
    br_base_tensor ours;
    BR_TRY(br_base_tensor_at(w->base, place, &ours));
    int same = strcmp(DTYPE[t->dtype], ours.dtype) == 0 && t->kind == TB_BASE && t->n_dim == (uint32_t)ours.n_dim;
    for (int32_t d = 0; same && d < ours.n_dim; d++)
        same = t->dim[d] == (uint64_t)ours.dim[d];
    if (same)
        return BR_OK;
    return br_fail(BR_E_SHAPE, "%s: expected a tensor of the base, %s, %d dimensions from %lld on, as in the checkpoint that is loaded", ours.name,
                   ours.dtype, ours.n_dim, (long long)ours.dim[0]);
}

/* Tensors come in the trainer's order; place says which of ours each is. */
static br_status take_tensors(tb_base *w, const tb_manifest *manifest, unsigned char *seen) {
    char name[BR_BASE_NAME_BYTES];
    tb_tensor t;
    int64_t i = 0;
    for (uint64_t at = 0; tb_tensor_next(&manifest->tensors, &at, &t); i++) {
        if (t.name.n >= sizeof name)
            return br_fail(BR_E_NOT_FOUND, "tensor %lld: a name of %u bytes is none of this checkpoint", (long long)i, t.name.n);
        memcpy(name, t.name.p, t.name.n);
        name[t.name.n] = 0;
        BR_TRY(br_base_find(w->base, name, &w->place[i]));
        BR_TRY(check_tensor(w, &t, w->place[i]));
        if (seen[w->place[i]]++)
            return br_fail(BR_E_FORMAT, "%s comes twice", name);
    }
    if (i != br_base_count(w->base))
        return br_fail(BR_E_NOT_FOUND, "the manifest has %lld tensors: expected all %lld of the checkpoint", (long long)i,
                       (long long)br_base_count(w->base));
    w->n_tensor = i;
    return BR_OK;
}

/* The list of tensors is read when the first manifest comes: a worker that gets none keeps none. */
static br_status base_manifest(void *context, const tb_manifest *manifest) {
    tb_base *w = context;
    br_status status;
    unsigned char *seen = NULL;
    w->n_tensor = 0;
    if (!w->base)
        BR_TRY(br_base_open(w->engine, w->model_dir, &w->base));
    br_mem_free(w->place);
    w->place = NULL;
    BR_TRY_GOTO(br_mem_alloc((void **)&w->place, manifest->tensors.n * sizeof *w->place, "a manifest"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&seen, (size_t)br_base_count(w->base), "a manifest"), exit);
    status = take_tensors(w, manifest, seen);
exit:
    br_mem_free(seen);
    return status;
}

static br_status base_begin(void *context, uint64_t version, const tb_w_begin *begin) {
    const tb_base *w = context;
    (void)version, (void)begin;
    return br_base_begin(w->base);
}

static br_status base_chunk(void *context, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    const tb_base *w = context;
    if (tensor >= (uint64_t)w->n_tensor)
        return br_fail(BR_E_ARG, "tensor %llu: expected 0 to %lld", (unsigned long long)tensor, (long long)w->n_tensor - 1);
    return br_base_chunk(w->base, w->place[tensor], offset, bytes, n);
}

static br_status base_end(void *context, br_digest digest) {
    const tb_base *w = context;
    return br_base_end(w->base, digest);
}

/* After a failure the engine says itself whether it can go on with the weights before. */
static br_status base_commit(void *context, tb_pause_mode mode, uint64_t *step, br_digest *digest) {
    tb_base *w = context;
    br_token none;
    int32_t n, done;
    (void)mode; /* the engine waits until nothing runs, in every mode */
    *step = 0;
    const br_status status = br_base_commit(w->base);
    *digest = br_engine_weights_digest(w->engine);
    if (status == BR_E_LIMIT)
        return status;
    const br_failure failure = br_failure_keep(status);
    if (status == BR_OK || br_poll(w->engine, &none, 0, &n, &done) != BR_OK)
        *step = ++w->n_commit;
    if (status == BR_OK)
        return BR_OK;
    br_fail_again(&failure);
    return br_fail_context(status, "full weights could not be put in place of those that are loaded");
}

static void base_abort(void *context) {
    const tb_base *w = context;
    br_base_abort(w->base);
}

void tb_base_close(tb_base *w) {
    br_base_close(w->base);
    br_mem_free(w->place);
    w->base = NULL;
    w->place = NULL;
}

tb_weights_ops tb_full_of(tb_base *base) {
    return (tb_weights_ops){.context = base, .manifest = base_manifest, .ws_begin = base_begin, .ws_chunk = base_chunk, .ws_end = base_end,
                            .ws_commit = base_commit, .ws_abort = base_abort};
}
