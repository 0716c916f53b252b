/* Stage, check, commit; see ws_stage.h. */
#include "ws_stage.h"

#include "br_mem.h"
#include "lora_file.h"

#include <string.h>

enum { WAYS = 2 };

struct ws_stage {
    const char *name;
    const br_config *config;
    int32_t rank_max;
    ws_target target;
    ws_manifest next;        /* of what comes in */
    lora_scale *plan[WAYS];  /* (n_map) what each way holds */
    uint8_t *written[WAYS];  /* (n_map) not all zero, where the target has no begin */
    uint8_t *whole;          /* (2 * n_map) */
    unsigned char *part;     /* a tensor that comes in pieces */
    br_swap_state state;
    int32_t live_way, has_effect;
    uint32_t flags;
    int64_t live_version, version, n_whole;
    int64_t n_seen;     /* tensors that somebody looked at where they lie */
    int64_t bad_tensor; /* the first that is not finite; -1: none so far */
    uint32_t bad_element;
    int64_t part_tensor; /* -1: none is under way */
    uint64_t part_bytes;
    br_digest live_digest, digest;
};

/* ---- what a state allows --------------------------------------------------------------------------------------------------- */

typedef enum ws_call { CALL_BEGIN, CALL_CHUNK, CALL_END, CALL_COMMIT, CALL_ABORT, CALL_DEFINE, CALL_COUNT } ws_call;
typedef enum ws_rule { NO, GO, SAME, BUSY } ws_rule; /* refused; goes on to its own checks; only what is live already; not yet */

static const ws_rule RULE[BR_SWAP_STATE_COUNT][CALL_COUNT] = {
    [BR_SWAP_IDLE] = {[CALL_BEGIN] = GO, [CALL_COMMIT] = SAME, [CALL_ABORT] = GO, [CALL_DEFINE] = GO},
    [BR_SWAP_RECEIVING] = {[CALL_CHUNK] = GO, [CALL_END] = GO, [CALL_ABORT] = GO},
    [BR_SWAP_PREPARED] = {[CALL_COMMIT] = GO, [CALL_ABORT] = GO},
    [BR_SWAP_DRAINING] = {[CALL_BEGIN] = BUSY, [CALL_COMMIT] = GO, [CALL_ABORT] = GO},
};

static br_status check_call(const ws_stage *s, ws_call call) {
    static const char *const CALL[] = {"begin", "chunk", "end", "commit", "abort", "define"};
    static const char *const STATE[] = {"idle", "receiving", "prepared", "draining"};
    const ws_rule rule = RULE[s->state][call];
    if (rule == BUSY)
        return br_fail(BR_E_LIMIT, "adapter '%s': version %lld waits for sequences to end: poll first", s->name, (long long)s->version);
    if (rule == NO)
        return br_fail(BR_E_ARG, "adapter '%s': %s while %s: not a call of this state", s->name, CALL[call], STATE[s->state]);
    return BR_OK;
}

static void to_idle(ws_stage *s) {
    s->state = BR_SWAP_IDLE;
    s->version = s->part_tensor = -1;
    s->digest = (br_digest){0};
    s->n_whole = 0;
}

/* The target lets go of values that it holds on to. */
static br_status flush(ws_stage *s) {
    return s->target.flush ? s->target.flush(s->target.context) : BR_OK;
}

/* A refusal of what comes in: the version is dropped. */
static br_status drop(ws_stage *s, br_status status) {
    if (status == BR_OK)
        return BR_OK;
    const br_failure failure = br_failure_keep(status);
    flush(s); /* a failure of its own will show again */
    br_fail_again(&failure);
    br_fail_context(status, "adapter '%s', version %lld", s->name, (long long)s->version);
    to_idle(s);
    return status;
}

/* ---- open ------------------------------------------------------------------------------------------------------------------ */

static uint64_t tensor_bytes_max(const br_config *config, int32_t rank) {
    uint64_t most = 0;
    for (int32_t layer = 0; layer < config->n_layer; layer++) {
        for (int cls = 0; cls < BR_CLASS_LORA_END; cls++) {
            int32_t n_out, n_in;
            if (!br_linear_shape(config, (br_class)cls, layer, &n_out, &n_in))
                continue;
            const uint64_t n = (uint64_t)rank * (uint64_t)(n_out > n_in ? n_out : n_in) * sizeof(uint16_t);
            most = n > most ? n : most;
        }
    }
    return most;
}

static br_status alloc(ws_stage *s) {
    const size_t n = (size_t)s->next.n_map;
    for (int way = 0; way < WAYS; way++) {
        BR_TRY(br_mem_alloc((void **)&s->plan[way], n * sizeof *s->plan[way], "a plan of an adapter"));
        BR_TRY(br_mem_alloc((void **)&s->written[way], n, "a plan of an adapter"));
    }
    BR_TRY(br_mem_alloc((void **)&s->whole, 2 * n, "flags of tensors"));
    return br_mem_alloc((void **)&s->part, tensor_bytes_max(s->config, s->rank_max), "a tensor that comes in pieces");
}

br_status ws_open(const ws_options *o, ws_stage **out) {
    br_status status;
    ws_stage *s = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&s, sizeof *s, "a stage of weights"));
    s->name = o->name;
    s->config = o->config;
    s->rank_max = o->rank_max;
    s->target = o->target;
    s->live_version = -1;
    to_idle(s);
    BR_TRY_GOTO(ws_manifest_open(&s->next, o->config), exit);
    BR_TRY_GOTO(alloc(s), exit);
    BR_TRY_GOTO(ws_define(s, o->next), exit);
    if (o->live) {
        BR_TRY_GOTO(lora_plan_check_rank(s->config, o->live, s->rank_max), exit);
        memcpy(s->plan[0], o->live, (size_t)s->next.n_map * sizeof *s->plan[0]);
        for (int64_t i = 0; i < s->next.n_map; i++)
            s->written[0][i] = o->live[i].rank != 0;
        s->live_version = 0;
        s->live_digest = o->live_digest;
    }
    *out = s;
exit:
    if (status != BR_OK)
        ws_close(s);
    return status;
}

void ws_close(ws_stage *s) {
    if (!s)
        return;
    for (int way = 0; way < WAYS; way++) {
        br_mem_free(s->plan[way]);
        br_mem_free(s->written[way]);
    }
    br_mem_free(s->whole);
    br_mem_free(s->part);
    ws_manifest_close(&s->next);
    br_mem_free(s);
}

br_status ws_define(ws_stage *s, const lora_scale *plan) {
    BR_TRY(check_call(s, CALL_DEFINE));
    BR_TRY(lora_plan_check_rank(s->config, plan, s->rank_max));
    ws_manifest_set(&s->next, plan);
    return BR_OK;
}

const ws_manifest *ws_manifest_of(const ws_stage *s) {
    return &s->next;
}

/* ---- begin ----------------------------------------------------------------------------------------------------------------- */

static br_status check_version(const ws_stage *s, int64_t version, uint32_t flags) {
    if (flags & ~(uint32_t)(BR_SWAP_INITIAL | BR_SWAP_RESYNC))
        return br_fail(BR_E_ARG, "adapter '%s': flags %x: expected those of br_swap_flag", s->name, flags);
    if (version < 0)
        return br_fail(BR_E_ARG, "adapter '%s': version %lld: expected 0 or more", s->name, (long long)version);
    if (version == INT64_MAX)
        return br_fail(BR_E_ARG, "adapter '%s': version %lld: expected one that another can follow", s->name, (long long)version);
    if ((flags & BR_SWAP_INITIAL) && version != 0)
        return br_fail(BR_E_ARG, "adapter '%s': an initial version is number 0, not %lld", s->name, (long long)version);
    return BR_OK;
}

br_status ws_begin(ws_stage *s, int64_t version, uint32_t flags, int32_t n_old, br_swap_answer *answer) {
    *answer = BR_SWAP_REFUSED;
    const br_status status = check_call(s, CALL_BEGIN);
    *answer = status == BR_E_LIMIT ? BR_SWAP_BUSY : BR_SWAP_REFUSED;
    BR_TRY(status);
    BR_TRY(check_version(s, version, flags));
    if (version == s->live_version && !(flags & BR_SWAP_RESYNC)) {
        *answer = BR_SWAP_COMMITTED;
        return BR_OK;
    }
    if (!(flags & BR_SWAP_RESYNC) && version - 1 != s->live_version)
        return br_fail(BR_E_ARG, "adapter '%s': version %lld after %lld: expected %lld, or the flag resync", s->name, (long long)version,
                       (long long)s->live_version, (long long)(s->live_version + 1));
    if (n_old > 0) {
        *answer = BR_SWAP_BUSY;
        return br_fail(BR_E_LIMIT, "adapter '%s': %d sequences run on the version before the live one: poll first", s->name, n_old);
    }
    if (s->target.begin)
        BR_TRY(s->target.begin(s->target.context, !s->live_way, s->next.plan));
    memset(s->whole, 0, 2 * (size_t)s->next.n_map);
    s->state = BR_SWAP_RECEIVING;
    s->version = version;
    s->flags = flags;
    s->has_effect = 0;
    s->bad_tensor = -1;
    s->n_seen = 0;
    *answer = BR_SWAP_DONE;
    return BR_OK;
}

/* ---- chunks ---------------------------------------------------------------------------------------------------------------- */

static void look(const uint16_t *value, int64_t n, br_seen *seen) {
    uint16_t any = 0;
    *seen = (br_seen){.first_bad = UINT32_MAX};
    for (int64_t k = 0; k < n && seen->first_bad == UINT32_MAX; k++) {
        if ((value[k] & 0x7f80) == 0x7f80)
            seen->first_bad = (uint32_t)k;
        any |= value[k] & 0x7fff;
    }
    seen->any = any != 0;
    seen->digest = lora_digest_matrix(value, n);
}

/* What lies where tensor i went. */
static void take_seen(void *context, int64_t i, const br_seen *seen) {
    ws_stage *s = context;
    s->n_seen++;
    if (seen->first_bad != UINT32_MAX && (s->bad_tensor < 0 || i < s->bad_tensor)) {
        s->bad_tensor = i;
        s->bad_element = seen->first_bad;
    }
    s->has_effect |= i % 2 && seen->any && s->next.plan[s->next.touched[i / 2]].alpha != 0; /* A, then B of each map */
    lora_text_put(&s->next.text, i / 2, i % 2, seen->digest);
}

static br_status check_finite(const ws_stage *s) {
    char name[BR_NAME_BYTES];
    if (s->bad_tensor < 0)
        return BR_OK;
    ws_manifest_name(&s->next, s->bad_tensor, name);
    return br_fail(BR_E_FORMAT, "tensor '%s': element %lld is NaN or Inf", name, (long long)s->bad_element);
}

/* A whole tensor goes to its place, and s with A. */
static br_status take_whole(ws_stage *s, int64_t i, const ws_tensor *t, const uint16_t *value, int32_t stays) {
    const int32_t way = !s->live_way;
    const ws_seen told = {take_seen, s, i};
    if (!s->target.flush) {
        br_seen seen;
        look(value, (int64_t)t->n_row * t->n_col, &seen);
        take_seen(s, i, &seen);
        if (!stays) /* of what comes all at once, the first of all is named, whatever the order */
            BR_TRY(check_finite(s));
    }
    s->written[way][t->map] = 1;
    BR_TRY(s->target.put(s->target.context, way, t, value, stays, &told));
    if (!t->is_b && !s->target.begin)
        BR_TRY(s->target.scale(s->target.context, way, t, &s->next.plan[t->map]));
    s->whole[i] = 1;
    s->n_whole++;
    return BR_OK;
}

static const char *name_of(const ws_stage *s, int64_t i, char name[BR_NAME_BYTES]) {
    ws_manifest_name(&s->next, i, name);
    return name;
}

static br_status check_chunk(const ws_stage *s, int64_t i, const ws_tensor *t, uint64_t offset, const void *bytes, size_t n) {
    const uint64_t size = ws_tensor_bytes(t), have = s->part_tensor == i ? s->part_bytes : 0;
    char name[BR_NAME_BYTES];
    if (s->whole[i])
        return br_fail(BR_E_FORMAT, "tensor '%s' comes twice", name_of(s, i, name));
    if (!bytes || n == 0)
        return br_fail(BR_E_FORMAT, "tensor '%s': a chunk of 0 bytes: expected at least 1", name_of(s, i, name));
    if (offset > size || n > size - offset)
        return br_fail(BR_E_FORMAT, "tensor '%s': %llu bytes at byte %llu: expected to end at %llu", name_of(s, i, name), (unsigned long long)n,
                       (unsigned long long)offset, (unsigned long long)size);
    if (s->part_tensor >= 0 && s->part_tensor != i)
        return br_fail(BR_E_FORMAT, "tensor '%s' begins before number %lld is whole, which has %llu bytes so far", name_of(s, i, name),
                       (long long)s->part_tensor, (unsigned long long)s->part_bytes);
    if (offset != have)
        return br_fail(BR_E_FORMAT, "tensor '%s': a chunk at byte %llu %s: expected one at %llu", name_of(s, i, name), (unsigned long long)offset,
                       offset < have ? "overlaps what came before" : "leaves a gap", (unsigned long long)have);
    return BR_OK;
}

static br_status check_number(const ws_stage *s, int64_t i) {
    if (i < 0 || i >= s->next.n_tensor)
        return br_fail(BR_E_FORMAT, "tensor number %lld: expected 0 to %lld", (long long)i, (long long)s->next.n_tensor - 1);
    return BR_OK;
}

static br_status take_at_once(ws_stage *s, int64_t i, const uint16_t *value) {
    BR_TRY(check_number(s, i));
    const ws_tensor t = ws_manifest_at(&s->next, i);
    BR_TRY(check_chunk(s, i, &t, 0, value, ws_tensor_bytes(&t)));
    return take_whole(s, i, &t, value, 1);
}

static br_status take_inside(ws_stage *s, int64_t i, const void *block, size_t block_bytes, uint64_t offset) {
    char name[BR_NAME_BYTES];
    BR_TRY(check_number(s, i));
    const ws_tensor t = ws_manifest_at(&s->next, i);
    const uint64_t size = ws_tensor_bytes(&t);
    if (offset > block_bytes || size > block_bytes - offset)
        return br_fail(BR_E_FORMAT, "tensor '%s': %llu bytes at byte %llu of a block: expected to end inside its %llu bytes", name_of(s, i, name),
                       (unsigned long long)size, (unsigned long long)offset, (unsigned long long)block_bytes);
    if (offset % sizeof(uint16_t))
        return br_fail(BR_E_FORMAT, "tensor '%s' at byte %llu of a block: expected an even one", name_of(s, i, name), (unsigned long long)offset);
    return take_at_once(s, i, (const uint16_t *)(const void *)((const unsigned char *)block + offset));
}

static br_status take_chunk(ws_stage *s, int64_t i, uint64_t offset, const void *bytes, size_t n) {
    BR_TRY(check_number(s, i));
    const ws_tensor t = ws_manifest_at(&s->next, i);
    const uint64_t size = ws_tensor_bytes(&t);
    BR_TRY(check_chunk(s, i, &t, offset, bytes, n));
    if (n == size && (uintptr_t)bytes % sizeof(uint16_t) == 0)
        return take_whole(s, i, &t, bytes, 0);
    memcpy(s->part + offset, bytes, n);
    s->part_tensor = i;
    s->part_bytes = offset + n;
    if (s->part_bytes < size)
        return BR_OK;
    s->part_tensor = -1;
    return take_whole(s, i, &t, (const uint16_t *)(const void *)s->part, 0);
}

br_status ws_chunk(ws_stage *s, int64_t tensor, uint64_t offset, const void *bytes, size_t n) {
    BR_TRY(check_call(s, CALL_CHUNK));
    return drop(s, take_chunk(s, tensor, offset, bytes, n));
}

br_status ws_whole(ws_stage *s, int64_t tensor, const uint16_t *value) {
    BR_TRY(check_call(s, CALL_CHUNK));
    return drop(s, take_at_once(s, tensor, value));
}

br_status ws_inside(ws_stage *s, int64_t tensor, const void *block, size_t block_bytes, uint64_t offset) {
    BR_TRY(check_call(s, CALL_CHUNK));
    return drop(s, take_inside(s, tensor, block, block_bytes, offset));
}

/* ---- end ------------------------------------------------------------------------------------------------------------------- */

static br_status check_all_whole(const ws_stage *s) {
    for (int64_t i = 0; i < s->next.n_tensor; i++) {
        char name[BR_NAME_BYTES];
        if (s->whole[i])
            continue;
        ws_manifest_name(&s->next, i, name);
        return br_fail(BR_E_FORMAT, "tensor '%s' is missing: %lld of %lld came, and %llu bytes of it", name, (long long)s->n_whole,
                       (long long)s->next.n_tensor, (unsigned long long)(s->part_tensor == i ? s->part_bytes : 0));
    }
    return BR_OK;
}

/* Where several names share a feed, a failure at one of them may cost others their values. */
static br_status check_all_seen(const ws_stage *s) {
    if (s->n_seen == s->next.n_tensor)
        return BR_OK;
    return br_fail(BR_E_DEVICE, "%lld of %lld tensors were lost on their way when the device failed at another adapter: send the version again",
                   (long long)(s->next.n_tensor - s->n_seen), (long long)s->next.n_tensor);
}

/* Maps that this version leaves alone but an earlier one in this place did not. */
static br_status clear_left_alone(ws_stage *s) {
    const int32_t way = !s->live_way;
    for (int64_t i = 0; i < s->next.n_map; i++) {
        const lora_scale *scale = &s->next.plan[i];
        const lora_map *map = &s->next.map[i];
        if (scale->rank || !s->written[way][i])
            continue;
        ws_tensor t = {.map = i, .cls = map->cls, .layer = map->layer, .expert = map->expert};
        for (; t.is_b < 2; t.is_b++)
            BR_TRY(s->target.put(s->target.context, way, &t, NULL, 0, NULL));
        t.is_b = 0;
        BR_TRY(s->target.scale(s->target.context, way, &t, scale));
        s->written[way][i] = 0;
    }
    return BR_OK;
}

static br_status take_end(ws_stage *s, const br_digest *expected) {
    BR_TRY(check_all_whole(s));
    if (!s->target.begin)
        BR_TRY(clear_left_alone(s));
    memcpy(s->plan[!s->live_way], s->next.plan, (size_t)s->next.n_map * sizeof *s->next.plan);
    BR_TRY(flush(s));
    BR_TRY(check_finite(s));
    BR_TRY(check_all_seen(s));
    if (!s->has_effect && !(s->flags & BR_SWAP_INITIAL))
        return br_fail(BR_E_FORMAT, "every B or its alpha is zero: expected an adapter that has an effect, or the flag initial at version 0");
    s->digest = lora_text_digest(&s->next.text);
    if (expected && !br_digest_equal(s->digest, *expected)) {
        char found[BR_DIGEST_TEXT_BYTES], wanted[BR_DIGEST_TEXT_BYTES];
        br_digest_text(s->digest, found);
        br_digest_text(*expected, wanted);
        return br_fail(BR_E_MISMATCH, "its digest is %s: expected %s", found, wanted);
    }
    s->state = BR_SWAP_PREPARED;
    return BR_OK;
}

br_status ws_end(ws_stage *s, const br_digest *expected) {
    BR_TRY(check_call(s, CALL_END));
    return drop(s, take_end(s, expected));
}

/* ---- commit, abort --------------------------------------------------------------------------------------------------------- */

br_status ws_commit(ws_stage *s, int64_t version, int32_t n_wait, br_swap_answer *answer) {
    *answer = BR_SWAP_REFUSED;
    BR_TRY(check_call(s, CALL_COMMIT));
    const int64_t expected = s->state == BR_SWAP_IDLE ? s->live_version : s->version;
    if (version != expected || version < 0)
        return br_fail(BR_E_ARG, "adapter '%s': commit of version %lld: %s is %lld", s->name, (long long)version,
                       s->state == BR_SWAP_IDLE ? "nothing is prepared, live" : "prepared", (long long)expected);
    *answer = BR_SWAP_COMMITTED;
    if (s->state == BR_SWAP_IDLE)
        return BR_OK;
    if (n_wait > 0) {
        s->state = BR_SWAP_DRAINING;
        *answer = BR_SWAP_WAITS;
        return BR_OK;
    }
    s->live_way = !s->live_way;
    s->live_version = s->version;
    s->live_digest = s->digest;
    to_idle(s);
    return BR_OK;
}

void ws_abort(ws_stage *s) {
    if (check_call(s, CALL_ABORT) != BR_OK)
        return;
    flush(s); /* a failure of it will show again */
    to_idle(s);
}

ws_status ws_status_of(const ws_stage *s) {
    return (ws_status){.state = s->state, .live_way = s->live_way, .live_version = s->live_version, .version = s->version,
                       .live_digest = s->live_digest, .digest = s->digest, .n_tensor = s->next.n_tensor, .n_whole = s->n_whole};
}

const lora_scale *ws_live_plan(const ws_stage *s) {
    return s->plan[s->live_way];
}
