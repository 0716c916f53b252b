/* The stage of weightsync by itself: its states against a table written by hand, every refusal with its sentence, the digest against
 * its definition, and each allocation of open failing once. Values go to a target in memory. */
#include "br_mem.h"
#include "config_json.h"
#include "init_presets.h"
#include "test_support.h"
#include "ws_long.h"
#include "ws_source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAPS_MAX = 4096, RANK = 4, ALPHA = 8 };

typedef struct kept {
    uint64_t hash[2][MAPS_MAX][2]; /* of what was put last, by way, map, half; 0: nothing yet */
    lora_scale scale[2][MAPS_MAX];
    int64_t n_put, fail_at; /* fail_at: the put that fails; 0: none */
} kept;

static struct {
    br_config config;
    lora_scale plan[MAPS_MAX];
    kept kept;
    ws_stage *stage;
    uint16_t *value[2 * MAPS_MAX]; /* by tensor of the manifest */
    br_digest digest;
} t;

static const char TWO_CLASSES[] = "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"o_proj\", \"kv_b_proj\"]}";

static br_status fake_put(void *context, int32_t way, const ws_tensor *tensor, const uint16_t *value, int32_t stays, const ws_seen *seen) {
    (void)stays;
    (void)seen;
    kept *k = context;
    const int64_t n = (int64_t)tensor->n_row * tensor->n_col;
    k->n_put++;
    if (k->n_put == k->fail_at)
        return br_fail(BR_E_DEVICE, "the device is gone");
    k->hash[way][tensor->map][tensor->is_b] = value ? br_hash_u64(value, (size_t)n * sizeof *value) : 0;
    return BR_OK;
}

static br_status fake_scale(void *context, int32_t way, const ws_tensor *tensor, const lora_scale *scale) {
    kept *k = context;
    k->scale[way][tensor->map] = *scale;
    return BR_OK;
}

static ws_options stage_options(void) {
    return (ws_options){.name = "math", .config = &t.config, .rank_max = RANK, .next = t.plan,
                        .target = {.context = &t.kept, .put = fake_put, .scale = fake_scale}};
}

static void make_values(uint64_t seed) {
    const ws_manifest *m = ws_manifest_of(t.stage);
    for (int64_t i = 0; i < m->n_tensor; i++) {
        const ws_tensor tensor = ws_manifest_at(m, i);
        const int64_t n = (int64_t)tensor.n_row * tensor.n_col;
        free(t.value[i]);
        t.value[i] = calloc((size_t)n, sizeof **t.value);
        for (int64_t k = 0; k < n; k++)
            t.value[i][k] = (uint16_t)(0x3c00 + (test_mix(seed * 1000003 + (uint64_t)(i << 20 | k)) & 0x81ff));
    }
}

/* The definition, written out once more. */
static br_digest digest_by_hand(void) {
    const ws_manifest *m = ws_manifest_of(t.stage);
    unsigned char *bytes = calloc((size_t)m->n_tensor, 512);
    size_t n = 0;
    for (int64_t i = 0; i < m->n_tensor; i += 2) {
        char name[BR_NAME_BYTES];
        const ws_tensor a = ws_manifest_at(m, i), b = ws_manifest_at(m, i + 1);
        const int32_t number[2] = {a.rank, 0};
        const double alpha = ALPHA;
        const br_digest matrix[2] = {br_hash_bytes(t.value[i], ws_tensor_bytes(&a)), br_hash_bytes(t.value[i + 1], ws_tensor_bytes(&b))};
        ws_manifest_name(m, i, name);
        const char *module = name + strlen("base_model.model.");
        const size_t n_module = strlen(module) - strlen(".lora_A.weight");
        memcpy(bytes + n, module, n_module);
        n += n_module + 1;
        memcpy(bytes + n, number, sizeof number);
        memcpy(bytes + n + 8, &alpha, sizeof alpha);
        memcpy(bytes + n + 16, matrix, sizeof matrix);
        n += 48;
    }
    const br_digest digest = br_hash_bytes(bytes, n);
    free(bytes);
    return digest;
}

static void begin(void) {
    const init_preset *preset = init_preset_find("pico");
    memset(&t.kept, 0, sizeof t.kept);
    CHECK_OK(br_config_parse("pico", preset->config_json, strlen(preset->config_json), &t.config));
    ck_assert_int_le(lora_map_count(&t.config), MAPS_MAX);
    CHECK_OK(lora_plan_parse(&t.config, "test", TWO_CLASSES, strlen(TWO_CLASSES), t.plan));
    const ws_options options = stage_options();
    CHECK_OK(ws_open(&options, &t.stage));
    make_values(1);
    t.digest = digest_by_hand();
}

static void end(void) {
    ws_close(t.stage);
    for (int i = 0; i < 2 * MAPS_MAX; i++) {
        free(t.value[i]);
        t.value[i] = NULL;
    }
}

static void send(int64_t i) {
    const ws_tensor tensor = ws_manifest_at(ws_manifest_of(t.stage), i);
    CHECK_OK(ws_chunk(t.stage, i, 0, t.value[i], ws_tensor_bytes(&tensor)));
}

static void send_all(void) {
    for (int64_t i = 0; i < ws_manifest_of(t.stage)->n_tensor; i++)
        send(i);
}

static void receive(int64_t version) {
    br_swap_answer answer;
    CHECK_OK(ws_begin(t.stage, version, 0, 0, &answer));
    ck_assert_int_eq(answer, BR_SWAP_DONE);
}

static void commit(int64_t version) {
    br_swap_answer answer;
    receive(version);
    send_all();
    CHECK_OK(ws_end(t.stage, &t.digest));
    CHECK_OK(ws_commit(t.stage, version, 0, &answer));
    ck_assert_int_eq(answer, BR_SWAP_COMMITTED);
}

/* ---- every call in every state --------------------------------------------------------------------------------------------- */

enum { IN_IDLE, IN_RECEIVING, IN_FULL, IN_PREPARED, IN_DRAINING, PLACES };
enum {
    DEFINE, BEGIN_NEXT, BEGIN_LIVE, BEGIN_FAR, BEGIN_FAR_RESYNC, BEGIN_NEXT_OLD, BEGIN_LIVE_OLD, CHUNK, CHUNK_BAD, END, END_OTHER,
    COMMIT, COMMIT_WAIT, COMMIT_LIVE, COMMIT_FAR, ABORT, CALLS
};

/* A cell: status (. fine, a argument, l limit, f format, m mismatch), answer (D done, C committed, W waits, B busy, R refused, - none),
 * state after (I, R, P, D), live version after. Live before is version 1, 2 comes in. */
static const char *const WANTED[PLACES][CALLS] = {
    [IN_IDLE] = {".-I1", ".DR1", ".CI1", "aRI1", ".DR1", "lBI1", ".CI1", "a-I1", "a-I1", "a-I1", "a-I1", "aRI1", "aRI1", ".CI1", "aRI1", ".-I1"},
    [IN_RECEIVING] = {"a-R1", "aRR1", "aRR1", "aRR1", "aRR1", "aRR1", "aRR1", ".-R1", "f-I1", "f-I1", "f-I1", "aRR1", "aRR1", "aRR1", "aRR1", ".-I1"},
    [IN_FULL] = {"a-R1", "aRR1", "aRR1", "aRR1", "aRR1", "aRR1", "aRR1", "f-I1", "f-I1", ".-P1", "m-I1", "aRR1", "aRR1", "aRR1", "aRR1", ".-I1"},
    [IN_PREPARED] = {"a-P1", "aRP1", "aRP1", "aRP1", "aRP1", "aRP1", "aRP1", "a-P1", "a-P1", "a-P1", "a-P1", ".CI2", ".WD1", "aRP1", "aRP1", ".-I1"},
    [IN_DRAINING] = {"a-D1", "lBD1", "lBD1", "lBD1", "lBD1", "lBD1", "lBD1", "a-D1", "a-D1", "a-D1", "a-D1", ".CI2", ".WD1", "aRD1", "aRD1", ".-I1"},
};

static void go_to(int place) {
    br_swap_answer answer;
    commit(0);
    commit(1);
    if (place == IN_IDLE)
        return;
    receive(2);
    if (place == IN_RECEIVING)
        return;
    send_all();
    if (place == IN_FULL)
        return;
    CHECK_OK(ws_end(t.stage, &t.digest));
    if (place == IN_DRAINING)
        CHECK_OK(ws_commit(t.stage, 2, 5, &answer));
}

static br_status call(int which, int *answer) {
    br_swap_answer a = BR_SWAP_REFUSED;
    br_status status = BR_OK;
    const br_digest other = {1, 2};
    const ws_tensor first = ws_manifest_at(ws_manifest_of(t.stage), 0);
    *answer = -1;
    switch (which) {
    case DEFINE: return ws_define(t.stage, t.plan);
    case CHUNK: return ws_chunk(t.stage, 0, 0, t.value[0], ws_tensor_bytes(&first));
    case CHUNK_BAD: return ws_chunk(t.stage, -1, 0, t.value[0], 2);
    case END: return ws_end(t.stage, &t.digest);
    case END_OTHER: return ws_end(t.stage, &other);
    case ABORT: ws_abort(t.stage); return BR_OK;
    case BEGIN_NEXT: status = ws_begin(t.stage, 2, 0, 0, &a); break;
    case BEGIN_LIVE: status = ws_begin(t.stage, 1, 0, 0, &a); break;
    case BEGIN_FAR: status = ws_begin(t.stage, 7, 0, 0, &a); break;
    case BEGIN_FAR_RESYNC: status = ws_begin(t.stage, 7, BR_SWAP_RESYNC, 0, &a); break;
    case BEGIN_NEXT_OLD: status = ws_begin(t.stage, 2, 0, 3, &a); break;
    case BEGIN_LIVE_OLD: status = ws_begin(t.stage, 1, 0, 3, &a); break;
    case COMMIT: status = ws_commit(t.stage, 2, 0, &a); break;
    case COMMIT_WAIT: status = ws_commit(t.stage, 2, 3, &a); break;
    case COMMIT_LIVE: status = ws_commit(t.stage, 1, 0, &a); break;
    default: status = ws_commit(t.stage, 7, 0, &a); break;
    }
    *answer = (int)a;
    return status;
}

static char status_char(br_status status) {
    static const struct { br_status status; char c; } NAME[] = {
        {BR_OK, '.'}, {BR_E_ARG, 'a'}, {BR_E_LIMIT, 'l'}, {BR_E_FORMAT, 'f'}, {BR_E_MISMATCH, 'm'}};
    for (size_t i = 0; i < sizeof NAME / sizeof NAME[0]; i++)
        if (NAME[i].status == status)
            return NAME[i].c;
    return '?';
}

START_TEST(every_call_in_every_state) {
    for (int place = 0; place < PLACES; place++) {
        for (int which = 0; which < CALLS; which++) {
            int answer;
            begin();
            go_to(place);
            const br_status status = call(which, &answer);
            const ws_status after = ws_status_of(t.stage);
            const char found[] = {status_char(status), answer < 0 ? '-' : "DCWBR"[answer], "IRPD"[after.state], (char)('0' + after.live_version), 0};
            ck_assert_msg(strcmp(found, WANTED[place][which]) == 0, "place %d, call %d: %s, wanted %s: %s", place, which, found,
                          WANTED[place][which], status == BR_OK ? "" : br_last_error());
            ck_assert_int_eq(after.version, after.state == BR_SWAP_IDLE ? -1 : which == BEGIN_FAR_RESYNC && place == IN_IDLE ? 7 : 2);
            ck_assert(br_digest_equal(after.live_digest, t.digest));
            ws_abort(t.stage);
            commit(after.live_version + 1); /* whatever happened, the next version comes in */
            end();
        }
    }
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------------------------------------- */

/* The version that came in is dropped, the live one is as before. */
static void check_dropped(br_status status, br_status wanted, const char *sentence) {
    ck_assert_msg(status == wanted && strstr(br_last_error(), sentence), "%s: %s; wanted %s: %s", br_status_name(status), br_last_error(),
                  br_status_name(wanted), sentence);
    const ws_status after = ws_status_of(t.stage);
    ck_assert_int_eq(after.state, BR_SWAP_IDLE);
    ck_assert_int_eq(after.live_version, 0);
    ck_assert(br_digest_equal(after.live_digest, t.digest));
    receive(1);
}

START_TEST(chunks_are_refused_with_a_sentence) {
    begin();
    commit(0);
    receive(1);
    const int64_t last = ws_manifest_of(t.stage)->n_tensor - 1;
    const ws_tensor first = ws_manifest_at(ws_manifest_of(t.stage), 0);
    const uint64_t size = ws_tensor_bytes(&first);
    const uint16_t *v = t.value[0];
    check_dropped(ws_chunk(t.stage, last + 1, 0, v, 2), BR_E_FORMAT, "tensor number");
    check_dropped(ws_chunk(t.stage, 0, 0, v, 0), BR_E_FORMAT, "a chunk of 0 bytes");
    check_dropped(ws_chunk(t.stage, 0, 0, v, size + 2), BR_E_FORMAT, "expected to end at");
    check_dropped(ws_chunk(t.stage, 0, size + 2, v, 2), BR_E_FORMAT, "expected to end at");
    check_dropped(ws_chunk(t.stage, 0, UINT64_MAX, v, 2), BR_E_FORMAT, "expected to end at");
    check_dropped(ws_chunk(t.stage, 0, 2, v, UINT64_MAX), BR_E_FORMAT, "expected to end at");
    check_dropped(ws_chunk(t.stage, 0, 2, v, 2), BR_E_FORMAT, "leaves a gap: expected one at 0");
    CHECK_OK(ws_chunk(t.stage, 0, 0, v, 8));
    check_dropped(ws_chunk(t.stage, 0, 6, v, 4), BR_E_FORMAT, "overlaps what came before: expected one at 8");
    CHECK_OK(ws_chunk(t.stage, 0, 0, v, 8));
    check_dropped(ws_chunk(t.stage, 0, 0, v, 8), BR_E_FORMAT, "overlaps");
    CHECK_OK(ws_chunk(t.stage, 0, 0, v, 8));
    check_dropped(ws_chunk(t.stage, 0, 10, v, 2), BR_E_FORMAT, "leaves a gap: expected one at 8");
    CHECK_OK(ws_chunk(t.stage, 0, 0, v, 8));
    check_dropped(ws_chunk(t.stage, 1, 0, v, 2), BR_E_FORMAT, "before number 0 is whole, which has 8 bytes");
    send(0);
    check_dropped(ws_chunk(t.stage, 0, 0, v, size), BR_E_FORMAT, "comes twice");
    for (int kind = 0; kind < 3; kind++) {
        t.value[1][5] = (uint16_t[]){0x7f80, 0xff80, 0x7fc1}[kind];
        const ws_tensor second = ws_manifest_at(ws_manifest_of(t.stage), 1);
        check_dropped(ws_chunk(t.stage, 1, 0, t.value[1], ws_tensor_bytes(&second)), BR_E_FORMAT, "element 5 is NaN or Inf");
    }
    t.kept.fail_at = t.kept.n_put + 1;
    check_dropped(ws_chunk(t.stage, 0, 0, v, size), BR_E_DEVICE, "the device is gone");
    end();
}
END_TEST

START_TEST(ends_are_refused_with_a_sentence) {
    begin();
    commit(0);
    receive(1);
    const int64_t n = ws_manifest_of(t.stage)->n_tensor;
    check_dropped(ws_end(t.stage, &t.digest), BR_E_FORMAT, "is missing: 0 of");
    for (int64_t i = 0; i < n - 1; i++)
        send(i);
    CHECK_OK(ws_chunk(t.stage, n - 1, 0, t.value[n - 1], 6));
    check_dropped(ws_end(t.stage, &t.digest), BR_E_FORMAT, "and 6 bytes of it");
    send_all();
    const br_digest other = {t.digest.lo ^ 1, t.digest.hi};
    check_dropped(ws_end(t.stage, &other), BR_E_MISMATCH, "its digest is");
    for (int64_t i = 1; i < n; i += 2) { /* every B zero, one of them minus zero */
        const ws_tensor b = ws_manifest_at(ws_manifest_of(t.stage), i);
        memset(t.value[i], 0, ws_tensor_bytes(&b));
    }
    t.value[1][0] = 0x8000;
    send_all();
    check_dropped(ws_end(t.stage, NULL), BR_E_FORMAT, "every B or its alpha is zero");
    t.value[1][0] = 1; /* the smallest number */
    send_all();
    CHECK_OK(ws_end(t.stage, NULL));
    end();
}
END_TEST

/* A block of another process: what its sender says of the place is checked against the block. */
START_TEST(what_leaves_its_block_is_refused) {
    char wanted[BR_NAME_BYTES + 128], name[BR_NAME_BYTES];
    begin();
    commit(0);
    receive(1);
    const int64_t last = ws_manifest_of(t.stage)->n_tensor - 1;
    const ws_tensor first = ws_manifest_at(ws_manifest_of(t.stage), 0);
    const size_t size = ws_tensor_bytes(&first);
    unsigned char *block = calloc(1, size + 8);
    ck_assert_ptr_nonnull(block);
    memcpy(block + 8, t.value[0], size);
    ws_manifest_name(ws_manifest_of(t.stage), 0, name);
    snprintf(wanted, sizeof wanted, "'%s': %zu bytes at byte 10 of a block: expected to end inside its %zu bytes", name, size, size + 8);
    check_dropped(ws_inside(t.stage, 0, block, size + 8, 10), BR_E_FORMAT, wanted);
    check_dropped(ws_inside(t.stage, 0, block, size + 7, 8), BR_E_FORMAT, "expected to end inside");
    check_dropped(ws_inside(t.stage, 0, block, size - 2, 0), BR_E_FORMAT, "expected to end inside");
    check_dropped(ws_inside(t.stage, 0, block, size + 8, size + 10), BR_E_FORMAT, "expected to end inside");
    check_dropped(ws_inside(t.stage, 0, block, size + 8, UINT64_MAX - 1), BR_E_FORMAT, "expected to end inside");
    check_dropped(ws_inside(t.stage, 0, block, size + 8, 7), BR_E_FORMAT, "at byte 7 of a block: expected an even one");
    check_dropped(ws_inside(t.stage, last + 1, block, size + 8, 8), BR_E_FORMAT, "tensor number");
    CHECK_OK(ws_inside(t.stage, 0, block, size + 8, 8)); /* its last byte is the block's */
    for (int64_t i = 1; i <= last; i++)
        send(i);
    CHECK_OK(ws_end(t.stage, &t.digest));
    free(block);
    end();
}
END_TEST

/* Long tensors come in first, but of several that are not finite, or not there, the first of the manifest is named. */
START_TEST(the_first_bad_tensor_is_named) {
    br_swap_answer answer;
    begin();
    lora_plan_all(&t.config, (lora_scale){.rank = RANK, .alpha = ALPHA}, t.plan);
    CHECK_OK(ws_define(t.stage, t.plan));
    make_values(1);
    const ws_manifest *m = ws_manifest_of(t.stage);
    int64_t k = 0;
    while (k < m->n_tensor - 2 && m->order[k] < m->order[k + 1])
        k++;
    const int32_t second = m->order[k], first = m->order[k + 1];
    ck_assert_int_lt(first, second);
    char name[BR_NAME_BYTES];
    t.value[first][3] = t.value[second][1] = 0x7f80;
    ws_manifest_name(m, first, name);
    CHECK_FAILS(ws_from_memory(t.stage, (const uint16_t *const *)t.value, m->n_tensor, NULL, 0, 0, 0, &answer), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), name) && strstr(br_last_error(), "element 3 is NaN"), "%s: wanted %s", br_last_error(), name);
    ck_assert_int_eq(ws_status_of(t.stage).state, BR_SWAP_IDLE);
    const uint16_t *value[2 * MAPS_MAX];
    memcpy(value, t.value, sizeof value);
    value[first] = value[second] = NULL;
    CHECK_FAILS(ws_from_memory(t.stage, value, m->n_tensor, NULL, 0, 0, 0, &answer), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), name) && strstr(br_last_error(), "0 bytes"), "%s: wanted %s", br_last_error(), name);
    ck_assert(answer == BR_SWAP_REFUSED && ws_status_of(t.stage).state == BR_SWAP_IDLE);
    end();
}
END_TEST

START_TEST(long_is_twice_the_mean) {
    ck_assert(ws_is_long(4, 4, 2) && !ws_is_long(3, 4, 2));
    ck_assert(ws_is_long(3, 4, 3) && !ws_is_long(2, 4, 3)); /* of a mean that is no whole number too */
    ck_assert(!ws_is_long(7, 7, 1));
}
END_TEST

START_TEST(versions_follow_each_other) {
    br_swap_answer answer;
    begin();
    CHECK_FAILS(ws_begin(t.stage, 1, 0, 0, &answer), BR_E_ARG);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "expected 0, or the flag resync"));
    CHECK_FAILS(ws_begin(t.stage, -1, BR_SWAP_RESYNC, 0, &answer), BR_E_ARG);
    CHECK_FAILS(ws_begin(t.stage, 1, BR_SWAP_INITIAL | BR_SWAP_RESYNC, 0, &answer), BR_E_ARG);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "an initial version is number 0"));
    CHECK_FAILS(ws_begin(t.stage, 0, 4, 0, &answer), BR_E_ARG);
    CHECK_FAILS(ws_commit(t.stage, -1, 0, &answer), BR_E_ARG); /* nothing is live, and that is no version */
    const int64_t n = ws_manifest_of(t.stage)->n_tensor;
    for (int64_t i = 1; i < n; i += 2) {
        const ws_tensor b = ws_manifest_at(ws_manifest_of(t.stage), i);
        memset(t.value[i], 0, ws_tensor_bytes(&b));
    }
    CHECK_OK(ws_begin(t.stage, 0, BR_SWAP_INITIAL, 0, &answer)); /* as training begins */
    send_all();
    CHECK_OK(ws_end(t.stage, NULL));
    CHECK_OK(ws_commit(t.stage, 0, 0, &answer));
    CHECK_FAILS(ws_begin(t.stage, 5, 0, 0, &answer), BR_E_ARG);
    CHECK_OK(ws_begin(t.stage, 5, BR_SWAP_RESYNC, 0, &answer));
    make_values(2);
    send_all();
    CHECK_OK(ws_end(t.stage, NULL));
    CHECK_OK(ws_commit(t.stage, 5, 0, &answer));
    CHECK_OK(ws_begin(t.stage, 5, 0, 0, &answer));
    ck_assert_int_eq(answer, BR_SWAP_COMMITTED);
    CHECK_OK(ws_begin(t.stage, 5, BR_SWAP_RESYNC, 0, &answer)); /* the same number once more, from its bytes */
    ck_assert_int_eq(answer, BR_SWAP_DONE);
    ws_abort(t.stage);
    end();
}
END_TEST

/* ---- values ---------------------------------------------------------------------------------------------------------------- */

START_TEST(any_cut_into_chunks_gives_the_same) {
    br_swap_answer answer;
    uint64_t whole[MAPS_MAX][2];
    begin();
    commit(0);
    const int32_t way = ws_status_of(t.stage).live_way;
    memcpy(whole, t.kept.hash[way], sizeof whole);
    receive(1);
    unsigned char odd[1 << 16];
    const int64_t n = ws_manifest_of(t.stage)->n_tensor;
    for (int64_t k = 0; k < n; k++) {
        const int64_t i = n - 1 - k; /* any order of tensors */
        const ws_tensor tensor = ws_manifest_at(ws_manifest_of(t.stage), i);
        const uint64_t size = ws_tensor_bytes(&tensor), piece = k % 3 ? 1 + test_mix((uint64_t)k) % 97 : size;
        for (uint64_t at = 0; at < size; at += piece) {
            const uint64_t m = size - at < piece ? size - at : piece;
            ck_assert_uint_lt(m, sizeof odd);
            memcpy(odd + 1, (const unsigned char *)t.value[i] + at, m); /* from an odd address */
            CHECK_OK(ws_chunk(t.stage, i, at, odd + 1, m));
        }
    }
    CHECK_OK(ws_end(t.stage, &t.digest));
    CHECK_OK(ws_commit(t.stage, 1, 0, &answer));
    ck_assert_int_eq(ws_status_of(t.stage).live_way, !way);
    ck_assert_int_eq(memcmp(whole, t.kept.hash[!way], sizeof whole), 0);
    end();
}
END_TEST

/* What an earlier or a dropped version left in the place of the next one is zeroed where that one leaves the map alone. */
START_TEST(a_narrower_version_leaves_nothing_behind) {
    static const char ONE_CLASS[] = "{\"r\": 2, \"lora_alpha\": 4, \"use_rslora\": true, \"target_modules\": [\"kv_b_proj\"]}";
    lora_scale narrow[MAPS_MAX];
    br_swap_answer answer;
    begin();
    commit(0); /* into way 1 */
    receive(1);
    send(0);
    send(1);
    ws_abort(t.stage); /* way 0 holds a part */
    CHECK_OK(lora_plan_parse(&t.config, "test", ONE_CLASS, strlen(ONE_CLASS), narrow));
    for (int64_t version = 1; version < 3; version++) {
        CHECK_OK(ws_define(t.stage, narrow));
        make_values((uint64_t)version);
        receive(version);
        send_all();
        CHECK_OK(ws_end(t.stage, NULL));
        CHECK_OK(ws_commit(t.stage, version, 0, &answer));
        const int32_t way = ws_status_of(t.stage).live_way;
        for (int64_t i = 0; i < lora_map_count(&t.config); i++) {
            ck_assert_int_eq(t.kept.hash[way][i][0] != 0, narrow[i].rank != 0);
            ck_assert_int_eq(t.kept.hash[way][i][1] != 0, narrow[i].rank != 0);
            ck_assert(t.kept.scale[way][i].rank == narrow[i].rank && t.kept.scale[way][i].rslora == narrow[i].rslora);
        }
    }
    end();
}
END_TEST

START_TEST(manifests_name_every_tensor) {
    int64_t found;
    begin();
    const ws_manifest *m = ws_manifest_of(t.stage);
    const br_digest digest = m->digest;
    for (int64_t i = 0; i < m->n_tensor; i++) {
        char name[BR_NAME_BYTES];
        ws_manifest_name(m, i, name);
        CHECK_OK(ws_manifest_find(m, name, &found));
        ck_assert_int_eq(found, i);
    }
    CHECK_FAILS(ws_manifest_find(m, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", &found), BR_E_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "does not touch its module"));
    CHECK_FAILS(ws_manifest_find(m, "base_model.model.model.layers.0.self_attn.o_proj.lora_A", &found), BR_E_NOT_FOUND);
    CHECK_FAILS(ws_manifest_find(m, "base_model.model.model.layers.0.self_attn.p_proj.lora_A.weight", &found), BR_E_NOT_FOUND);
    CHECK_FAILS(ws_manifest_find(m, "base_model.model.model.layers.1.block_sparse_moe.gate.lora_A.weight", &found), BR_E_NOT_FOUND);
    CHECK_FAILS(ws_manifest_find(m, "base_model.model.model.layers.1.block_sparse_moe.experts.w1.lora_A.weight", &found), BR_E_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "experts share"));
    t.plan[m->touched[0]].alpha = 9;
    CHECK_OK(ws_define(t.stage, t.plan));
    ck_assert(!br_digest_equal(digest, m->digest));
    t.plan[m->touched[0]].alpha = ALPHA;
    CHECK_OK(ws_define(t.stage, t.plan));
    ck_assert(br_digest_equal(digest, m->digest));
    t.plan[m->touched[1]].rank = RANK + 1;
    CHECK_FAILS(ws_define(t.stage, t.plan), BR_E_LIMIT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "rank 5 on"));
    end();
}
END_TEST

START_TEST(plans_are_refused_with_a_sentence) {
    static const struct {
        const char *json, *sentence;
        br_status status;
    } CASE[] = {
        {"{\"r\": 4, \"lora_alpha\": 8}", "target_modules: expected a list", BR_E_FORMAT},
        {"{\"r\": 4, \"lora_alpha\": 8, \"target_modules\": \"all-linear\"}", "target_modules: expected a list", BR_E_FORMAT},
        {"{\"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"o_proj\"], \"layers_to_transform\": [1]}", "takes modules away", BR_E_FORMAT},
        {"{\"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"nothing\"]}", "names no map", BR_E_FORMAT},
        {"{\"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"o_proj\"], \"rank_pattern\": {\"q_proj\": 2}}", "matches no module", BR_E_FORMAT},
        {"{\"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"gate\"]}", "stay frozen", BR_E_UNSUPPORTED},
        {"{\"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"o_proj\"], \"use_dora\": true}", "use_dora", BR_E_UNSUPPORTED},
        {"[]", "test", BR_E_FORMAT},
    };
    begin();
    for (size_t i = 0; i < sizeof CASE / sizeof CASE[0]; i++) {
        const br_status status = lora_plan_parse(&t.config, "test", CASE[i].json, strlen(CASE[i].json), t.plan);
        ck_assert_msg(status == CASE[i].status && strstr(br_last_error(), CASE[i].sentence), "case %zu: %s: %s", i, br_status_name(status),
                      br_last_error());
    }
    end();
}
END_TEST

START_TEST(every_allocation_of_open_may_fail) {
    ws_stage *stage = NULL;
    br_status status = BR_E_NOMEM;
    long n = 1;
    begin();
    const ws_options options = stage_options();
    for (; status != BR_OK; n++) {
        br_mem_fail_nth(n);
        status = ws_open(&options, &stage);
        br_mem_fail_nth(0);
        ck_assert(status == BR_OK || (status == BR_E_NOMEM && !stage));
    }
    ck_assert_int_ge(n, 9);
    ws_close(stage);
    ws_close(NULL);
    end();
}
END_TEST

Suite *test_weightsync_suite(void) {
    Suite *suite = suite_create("weightsync");
    TCase *tcase = tcase_create("stage");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, every_call_in_every_state);
    tcase_add_test(tcase, chunks_are_refused_with_a_sentence);
    tcase_add_test(tcase, ends_are_refused_with_a_sentence);
    tcase_add_test(tcase, what_leaves_its_block_is_refused);
    tcase_add_test(tcase, the_first_bad_tensor_is_named);
    tcase_add_test(tcase, long_is_twice_the_mean);
    tcase_add_test(tcase, versions_follow_each_other);
    tcase_add_test(tcase, any_cut_into_chunks_gives_the_same);
    tcase_add_test(tcase, a_narrower_version_leaves_nothing_behind);
    tcase_add_test(tcase, manifests_name_every_tensor);
    tcase_add_test(tcase, plans_are_refused_with_a_sentence);
    tcase_add_test(tcase, every_allocation_of_open_may_fail);
    suite_add_tcase(suite, tcase);
    return suite;
}
