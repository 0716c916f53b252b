/* The engine: open, submit, abort, poll, close. The step itself is engine_step.c. */
#include "engine_parts.h"

#include "bi_contract.h"
#include "sampling.h"

#include <stdio.h>
#include <string.h>

enum { DEFAULT_MAX_SEQS = 64, DEFAULT_CHUNK = 256, DEFAULT_STATE_EVERY = 256, DEFAULT_TOK_A_SEQ = 1024 };
enum { KEPT_STATES_EXTRA = 16, SWAP_ALPHA_MAX = 65536 }; /* of alpha: as in files */

static void fill_defaults(br_engine_options *o) {
    if (!o->max_seqs)
        o->max_seqs = DEFAULT_MAX_SEQS;
    if (!o->chunk_tokens)
        o->chunk_tokens = o->max_seqs > DEFAULT_CHUNK ? o->max_seqs : DEFAULT_CHUNK;
    if (!o->kv_pages)
        o->kv_pages = o->max_seqs * (DEFAULT_TOK_A_SEQ / BR_PAGE_TOK);
    const int64_t room = (int64_t)o->kv_pages * BR_PAGE_TOK; /* no sequence can be longer than the whole cache */
    if (room > 0 && (!o->max_tok || o->max_tok > room))
        o->max_tok = room > BR_POSITION_MAX ? BR_POSITION_MAX : (int32_t)room;
    if (!o->state_every)
        o->state_every = DEFAULT_STATE_EVERY;
    if (o->swap_alpha == 0)
        o->swap_alpha = 2 * o->swap_rank;
}

static br_status check_options(const br_engine_options *o) {
    if (o->max_seqs < 1 || o->max_seqs > ENGINE_REQUEST_MAX / 4)
        return br_fail(BR_E_ARG, "max_seqs %d: expected 1 to %d", o->max_seqs, ENGINE_REQUEST_MAX / 4);
    if (o->chunk_tokens < 1 || o->chunk_tokens > BR_POSITION_MAX)
        return br_fail(BR_E_ARG, "chunk_tokens %d: expected 1 to %d", o->chunk_tokens, BR_POSITION_MAX);
    if (o->kv_pages < 1 || o->kv_pages > BR_POSITION_MAX)
        return br_fail(BR_E_ARG, "kv_pages %d: expected 1 to %d", o->kv_pages, BR_POSITION_MAX);
    if (o->max_tok < 0)
        return br_fail(BR_E_ARG, "max_tok %d: expected 0 or more", o->max_tok);
    if (!(o->swap_alpha >= -SWAP_ALPHA_MAX && o->swap_alpha <= SWAP_ALPHA_MAX))
        return br_fail(BR_E_ARG, "swap_alpha %g: expected -%d to %d", o->swap_alpha, SWAP_ALPHA_MAX, SWAP_ALPHA_MAX);
    return BR_OK;
}

static void lay_out(void *owner, br_arena *arena) {
    br_engine *e = owner;
    e->request = BR_ARENA_ARRAY(arena, engine_request, e->n_request_max);
    e->queue = BR_ARENA_ARRAY(arena, br_token, e->n_queue_max);
    e->root = BR_ARENA_ARRAY(arena, br_digest, br_model_slot_count(e->loaded.model) + 1);
    e->outcome = BR_ARENA_ARRAY(arena, sched_outcome, e->options.max_seqs);
    e->sample_seg = BR_ARENA_ARRAY(arena, int32_t, e->options.max_seqs);
}

static int32_t state_count(const br_engine *e) {
    return 2 * e->options.max_seqs + KEPT_STATES_EXTRA;
}

static size_t page_bytes(const br_engine *e) {
    return e->loaded.size.page * (size_t)e->options.kv_pages;
}

static size_t state_bytes(const br_engine *e) {
    return e->loaded.size.state * (size_t)state_count(e);
}

static size_t fault_bytes(const br_engine *e) {
    return (size_t)e->options.max_seqs * sizeof(bi_first_fault);
}

/* All that open_parts takes of the device. */
static void add_room(br_engine *e) {
    const br_engine_options *o = &e->options;
    br_loaded *loaded = &e->loaded;
    br_room_add(&loaded->room, "cache pages", page_bytes(e));
    br_room_add(&loaded->room, "KDA states", state_bytes(e));
    draw_room(loaded, o->max_seqs);
    score_rows_room(loaded, o->chunk_tokens);
    br_room_add(&loaded->room, "rows of a step", step_rows_bytes(o->chunk_tokens, o->max_seqs, sched_table_ld(e->sched)) + fault_bytes(e));
    engine_swap_room(loaded);
}

static br_status open_caches(br_engine *e) {
    void *block;
    BR_TRY(br_device_alloc(e->loaded.device, page_bytes(e), "cache pages", &block));
    e->pages = block;
    BR_TRY(br_device_alloc(e->loaded.device, state_bytes(e), "KDA states", &block));
    e->states = block;
    return BR_OK;
}

void engine_bind_root(br_engine *e, int32_t slot, uint64_t epoch) {
    struct { br_digest adapter, contract; uint64_t epoch; } part = {br_loaded_adapter_digest(&e->loaded, slot), br_contract_digest(), epoch};
    e->root[slot + 1] = br_hash_chain(e->loaded.weights_digest, &part, sizeof part);
}

void engine_bind_roots(br_engine *e) {
    for (int32_t slot = -1; slot < br_model_slot_count(e->loaded.model); slot++)
        engine_bind_root(e, slot, 0);
    if (e->swap)
        engine_swap_bind_roots(e);
}

static br_status open_sched(br_engine *e) {
    const br_engine_options *o = &e->options;
    e->n_request_max = 2 * o->max_seqs;
    e->n_queue_max = 2 * e->n_request_max + o->chunk_tokens; /* a step's tokens, and the ends of all that are aborted before the next */
    sched_options options = {
        .n_seq_max = o->max_seqs, .chunk_tokens = o->chunk_tokens, .n_page = o->kv_pages, .n_state = state_count(e),
        .n_queue_max = e->n_request_max, .n_tok_max = e->loaded.n_pos_max, .state_every = o->state_every,
        .preempt_every = o->preempt_every, .prefix_cache = !o->no_prefix_cache,
    };
    return sched_open(&options, &e->sched);
}

static br_status open_parts(br_engine *e) {
    const br_engine_options *o = &e->options;
    BR_TRY(br_arena_open(&e->arena, lay_out, e, "buffers of the engine"));
    BR_TRY(open_caches(e));
    BR_TRY(step_rows_open(&e->rows, e->loaded.device, o->chunk_tokens, o->max_seqs, sched_table_ld(e->sched)));
    BR_TRY(draw_open(&e->draw, &e->loaded, o->max_seqs));
    BR_TRY(score_rows_open(&e->score, &e->loaded, o->chunk_tokens));
    BR_TRY(br_mirror_open(e->loaded.device, fault_bytes(e), "faults", &e->fault));
    engine_bind_roots(e);
    return e->options.swap_rank ? engine_swap_open(e) : BR_OK;
}

br_status br_engine_open(const br_engine_options *options, br_engine **out) {
    br_status status;
    br_engine *e = NULL;
    *out = NULL;
    br_engine_options filled = *options;
    fill_defaults(&filled);
    BR_TRY(check_options(&filled));
    BR_TRY(br_mem_alloc((void **)&e, sizeof *e, "the engine"));
    e->options = filled;
    BR_TRY_GOTO(br_loaded_prepare(&filled, filled.chunk_tokens, filled.max_tok, 0, &e->loaded), exit);
    e->n_tok_max = options->max_tok && options->max_tok < e->loaded.config.position_max ? options->max_tok : e->loaded.config.position_max;
    BR_TRY_GOTO(open_sched(e), exit);
    add_room(e);
    BR_TRY_GOTO(br_loaded_pack(&e->loaded), exit);
    BR_TRY_GOTO(open_parts(e), exit);
    *out = e;
exit:
    if (status != BR_OK)
        br_engine_close(e);
    return status;
}

void br_engine_close(br_engine *e) {
    if (!e)
        return;
    if (e->loaded.device) {
        for (int32_t i = 0; i < e->n_graph; i++)
            br_graph_free(e->graph[i].graph);
        draw_close(&e->draw);
        score_rows_close(&e->score);
        step_rows_close(&e->rows);
        br_mirror_close(e->loaded.device, &e->fault);
        br_device_free(e->loaded.device, e->pages);
        br_device_free(e->loaded.device, e->states);
    }
    engine_swap_close(e);
    sched_close(e->sched);
    br_loaded_close(&e->loaded);
    br_mem_free(e->arena.base);
    br_mem_free(e);
}

br_digest br_contract_digest(void) {
    return bi_contract_digest();
}

int32_t br_abi_version(void) {
    return BR_ABI_VERSION;
}

const char *br_version(void) {
    return BR_VERSION_TEXT;
}

br_digest br_engine_weights_digest(const br_engine *e) {
    return e->loaded.weights_digest;
}

br_status br_engine_adapter_digest(const br_engine *e, const char *name, br_digest *out) {
    int32_t index;
    BR_TRY(br_loaded_name(&e->loaded, name, &index));
    *out = br_loaded_adapter_digest(&e->loaded, br_loaded_live_slot(&e->loaded, index));
    return BR_OK;
}

engine_request *engine_find(const br_engine *e, uint64_t id) {
    const int32_t index = engine_request_index(id);
    return id && index < e->n_request_max && e->request[index].id == id ? &e->request[index] : NULL;
}

static br_status check_request(const br_engine *e, const br_request *r) {
    size_t uid_bytes = r->uid ? strlen(r->uid) : 0;
    if (uid_bytes < 1 || uid_bytes > BR_UID_BYTES_MAX)
        return br_fail(BR_E_ARG, "uid of %zu bytes: expected 1 to %d", uid_bytes, BR_UID_BYTES_MAX);
    if (!r->prompt || r->n_prompt < 1)
        return br_fail(BR_E_ARG, "prompt '%s' is empty: expected at least one token", r->uid);
    if (r->sample >= 1u << 24)
        return br_fail(BR_E_ARG, "sample number %u of '%s': expected less than 2^24", r->sample, r->uid);
    for (int32_t i = 0; i < r->n_prompt; i++) {
        if (r->prompt[i] < 0 || r->prompt[i] >= e->loaded.config.n_vocab)
            return br_fail(BR_E_ARG, "prompt '%s': token %d at position %d: expected 0 to %d", r->uid, r->prompt[i], i, e->loaded.config.n_vocab - 1);
    }
    if (r->score_from && (r->score_from < 1 || r->score_from >= r->n_prompt))
        return br_fail(BR_E_ARG, "prompt '%s' is scored from position %d: expected 1 to %d, its last", r->uid, r->score_from, r->n_prompt - 1);
    return r->score_from ? sampling_check_scored(&r->sampling) : sampling_check(&r->sampling, e->loaded.config.n_vocab);
}

/* The longest sequence is what the cache holds, unless the caller or the model says less: then the pages that it needs are named. */
static br_status check_pages(const br_engine *e, const br_request *r) {
    const int64_t n_tok = (int64_t)r->n_prompt + (r->score_from ? 0 : r->sampling.max_new), n_page = (n_tok + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
    if (n_page <= e->options.kv_pages || n_tok > e->n_tok_max)
        return BR_OK;
    return br_fail(BR_E_CAPACITY, "a prompt of %d tokens and a response of %lld need kv_pages %lld, there are %d", r->n_prompt,
                   (long long)(n_tok - r->n_prompt), (long long)n_page, e->options.kv_pages);
}

static bi_sampling setting_of(const br_request *r) {
    const br_sampling *s = &r->sampling;
    return (bi_sampling){
        .temperature = s->temperature, .min_p = s->min_p, .top_k = s->top_k, .top_p_q32 = bi_sample_top_p(s->top_p),
        .n_top = s->top_logprobs, .entropy = s->entropy, .seed = r->seed, .uid_hash = br_hash_xxh64(r->uid, strlen(r->uid)), .sample = r->sample,
    };
}

static br_status submit(br_engine *e, const br_request *r, const int32_t *forced, uint64_t *id) {
    int32_t index = 0, name, slot;
    *id = 0;
    BR_TRY(check_request(e, r));
    BR_TRY(check_pages(e, r));
    BR_TRY(br_loaded_name(&e->loaded, r->adapter, &name));
    BR_TRY(engine_swap_admit(e, name));
    BR_TRY(br_loaded_slot(&e->loaded, r->adapter, &slot));
    while (index < e->n_request_max && e->request[index].id)
        index++;
    if (index == e->n_request_max)
        return br_fail(BR_E_LIMIT, "%d requests are held: poll first", e->n_request_max);
    const uint64_t fresh = (e->n_submitted + 1) << ENGINE_INDEX_BITS | (uint64_t)index;
    sched_request request = {.id = fresh, .token = r->prompt, .n_prompt = r->n_prompt, .max_new = r->score_from ? 0 : r->sampling.max_new,
                             .score_from = r->score_from, .adapter = slot, .root = e->root[slot + 1]};
    BR_TRY(sched_submit(e->sched, &request));
    e->n_submitted++;
    engine_request *held = &e->request[index];
    *held = (engine_request){.id = fresh, .setting = setting_of(r), .first = r->score_from ? r->score_from : r->n_prompt,
                             .score_from = r->score_from, .sampling = r->sampling, .forced = forced, .slot = slot,
                             .versions = {.n_run = 1, .certified = 1}};
    held->versions.run[0].version = engine_swap_version(e, name);
    *id = fresh;
    return BR_OK;
}

static br_status submit_sealed(br_engine *e, const br_request *r, const int32_t *forced, uint64_t *id) {
    const char *outer = br_mem_seal("submit");
    br_status status = submit(e, r, forced, id);
    br_mem_unseal(outer);
    return status;
}

br_status br_submit(br_engine *engine, const br_request *request, uint64_t *id) {
    return submit_sealed(engine, request, NULL, id);
}

br_status engine_submit_forced(br_engine *engine, const br_request *request, const int32_t *response, uint64_t *id) {
    return submit_sealed(engine, request, response, id);
}

void engine_end(engine_request *request, br_status error) {
    request->ended = 1;
    request->error = error;
    if (error != BR_OK)
        snprintf(request->sentence, sizeof request->sentence, "%s", br_last_error());
}

void engine_push(br_engine *e, const br_token *token) {
    BR_ASSERT(e->queue_count < e->n_queue_max);
    e->queue[(e->queue_first + e->queue_count++) % e->n_queue_max] = *token;
}

void engine_push_end(br_engine *e, const engine_request *request, br_stop_reason stop) {
    const br_token token = {.request = request->id, .token = -1, .position = request->first + request->n_new, .logprob = BR_UNSCORED,
                            .logprob_raw = BR_UNSCORED, .logprob_kept = BR_UNSCORED, .entropy = BR_UNSCORED, .last = 1, .stop = stop};
    engine_push(e, &token);
}

br_status br_abort(br_engine *e, uint64_t id) {
    engine_request *request = engine_find(e, id);
    if (!request || request->ended)
        return br_fail(BR_E_NOT_FOUND, "request %llu is not running", (unsigned long long)id);
    BR_TRY(sched_abort(e->sched, id));
    engine_end(request, br_fail(BR_E_ABORTED, "aborted by its owner"));
    engine_push_end(e, request, BR_STOP_ABORT);
    return engine_swap_settle(e);
}

/* Requests whose last token went out in an earlier poll make room. */
static void forget_ended(br_engine *e) {
    for (int32_t i = 0; i < e->n_request_max; i++)
        if (e->request[i].ended == 2)
            e->request[i].id = 0;
}

br_status br_poll(br_engine *e, br_token *out, int32_t n_max, int32_t *n_out, int32_t *done) {
    *n_out = 0;
    *done = 0;
    if (e->broken != BR_OK)
        return br_fail(e->broken, "an earlier step of this engine failed; it can only be closed");
    forget_ended(e);
    if (e->queue_count == 0) {
        const char *outer = br_mem_seal("step");
        e->broken = engine_step(e);
        if (e->broken == BR_OK)
            e->broken = engine_swap_settle(e);
        br_mem_unseal(outer);
        if (e->broken != BR_OK)
            return e->broken;
    }
    while (*n_out < n_max && e->queue_count > 0) {
        const br_token *token = &e->queue[e->queue_first];
        if (token->last)
            engine_find(e, token->request)->ended = 2;
        out[(*n_out)++] = *token;
        e->queue_first = (e->queue_first + 1) % e->n_queue_max;
        e->queue_count--;
    }
    *done = e->queue_count == 0 && sched_n_left(e->sched) == 0;
    return BR_OK;
}

br_status br_request_error(const br_engine *e, uint64_t id, const char **sentence) {
    const engine_request *request = engine_find(e, id);
    *sentence = request ? request->sentence : "no such request";
    return request ? request->error : BR_E_NOT_FOUND;
}

int32_t br_top_logprobs(const br_engine *e, uint64_t id, br_top_logprob out[BR_TOP_LOGPROBS_MAX]) {
    const engine_request *request = engine_find(e, id);
    if (!request)
        return 0;
    memcpy(out, request->top, (size_t)request->n_top * sizeof *out);
    return request->n_top;
}
