/* A ring of full records to the writing thread and a stack of empty ones back; see record_writer.h. */
#include "record_writer.h"

#include "br_mem.h"

#include <pthread.h>
#include <string.h>

struct record_writer {
    rollout_writer *file;
    int32_t n_record, n_tok_max, n_top, commit_every;
    record *all;
    record **empty, **full; /* stack; ring */
    int32_t n_empty, full_first, n_full, n_writing;
    int32_t closing;
    int64_t n_finished; /* without error; of the writing thread alone */
    br_status status;
    char sentence[512];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    br_arena arena;
};

static void lay_out(void *owner, br_arena *arena) {
    record_writer *w = owner;
    const size_t n = (size_t)w->n_tok_max, n_top = n * (size_t)w->n_top;
    record *all = BR_ARENA_ARRAY(arena, record, w->n_record);
    w->all = all;
    w->empty = BR_ARENA_ARRAY(arena, record *, w->n_record);
    w->full = BR_ARENA_ARRAY(arena, record *, w->n_record);
    for (int32_t i = 0; i < w->n_record; i++) {
        record r = {.token = BR_ARENA_ARRAY(arena, int32_t, n), .logprob = BR_ARENA_ARRAY(arena, uint32_t, n)};
        r.logprob_raw = BR_ARENA_ARRAY(arena, uint32_t, n);
        r.logprob_kept = BR_ARENA_ARRAY(arena, uint32_t, n);
        r.entropy = BR_ARENA_ARRAY(arena, uint32_t, n);
        r.mask = BR_ARENA_ARRAY(arena, uint8_t, n);
        r.top_token = BR_ARENA_ARRAY(arena, int32_t, n_top);
        r.top_logprob = BR_ARENA_ARRAY(arena, uint32_t, n_top);
        if (!arena->base)
            continue;
        all[i] = r;
        w->empty[w->n_empty++] = &all[i];
    }
}

static br_status write_one(record_writer *w, record *r, int32_t *n_pending) {
    BR_TRY(rollout_append(w->file, &r->seq));
    w->n_finished += r->seq.status == 0;
    if (++*n_pending < w->commit_every || w->n_finished == 0)
        return BR_OK;
    *n_pending = 0;
    return rollout_commit(w->file);
}

static void note(record_writer *w, br_status status) {
    if (status == BR_OK || w->status != BR_OK)
        return;
    w->status = status;
    strncpy(w->sentence, br_last_error(), sizeof w->sentence - 1);
}

static void *writer_main(void *argument) {
    record_writer *w = argument;
    int32_t n_pending = 0;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (w->n_full == 0 && !w->closing)
            pthread_cond_wait(&w->changed, &w->lock);
        if (w->n_full == 0)
            break;
        record *r = w->full[w->full_first];
        w->full_first = (w->full_first + 1) % w->n_record;
        w->n_full--;
        w->n_writing = 1;
        const int broken = w->status != BR_OK; /* after a failed write the rest is only taken back */
        pthread_mutex_unlock(&w->lock);
        br_status status = broken ? BR_OK : write_one(w, r, &n_pending);
        pthread_mutex_lock(&w->lock);
        note(w, status);
        w->n_writing = 0;
        w->empty[w->n_empty++] = r;
        pthread_cond_broadcast(&w->changed);
    }
    if (w->status == BR_OK && w->n_finished > 0)
        note(w, rollout_commit(w->file));
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

br_status record_writer_open(rollout_writer *file, int32_t n_record, int32_t n_tok_max, int32_t n_top, int32_t commit_every, record_writer **out) {
    record_writer *w = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&w, sizeof *w, "the record writer"));
    *w = (record_writer){.file = file, .n_record = n_record, .n_tok_max = n_tok_max, .n_top = n_top,
                         .commit_every = commit_every > 0 ? commit_every : 1};
    br_status status = br_arena_open(&w->arena, lay_out, w, "records of running sequences");
    if (status != BR_OK) {
        br_mem_free(w);
        return status;
    }
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    if (pthread_create(&w->thread, NULL, writer_main, w) != 0) {
        status = br_fail(BR_E_NOMEM, "cannot start the writing thread");
        br_mem_free(w->arena.base);
        br_mem_free(w);
        return status;
    }
    *out = w;
    return BR_OK;
}

static br_status status_of(const record_writer *w) {
    return w->status == BR_OK ? BR_OK : br_fail(w->status, "%s", w->sentence);
}

br_status record_writer_close(record_writer *w) {
    if (!w)
        return BR_OK;
    pthread_mutex_lock(&w->lock);
    w->closing = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    br_status status = status_of(w);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    br_mem_free(w->arena.base);
    br_mem_free(w);
    return status;
}

static void blank(record_writer *w, record *r) {
    const size_t n = (size_t)w->n_tok_max;
    uint32_t *bits[] = {r->logprob, r->logprob_raw, r->logprob_kept, r->entropy};
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++)
        for (size_t t = 0; t < n; t++)
            bits[i][t] = BR_UNSCORED;
    memset(r->mask, 0, n);
    for (size_t t = 0; t < n * (size_t)w->n_top; t++) {
        r->top_token[t] = -1;
        r->top_logprob[t] = BR_UNSCORED;
    }
    r->seq = (rollout_seq){
        .token = r->token, .logprob = r->logprob, .logprob_raw = r->logprob_raw, .logprob_kept = r->logprob_kept, .entropy = r->entropy,
        .mask = r->mask, .top_token = w->n_top ? r->top_token : NULL, .top_logprob = w->n_top ? r->top_logprob : NULL,
    };
}

br_status record_take(record_writer *w, record **out) {
    *out = NULL;
    pthread_mutex_lock(&w->lock);
    int32_t held = w->n_record - w->n_empty - w->n_full - w->n_writing;
    while (w->n_empty == 0 && held < w->n_record) {
        pthread_cond_wait(&w->changed, &w->lock);
        held = w->n_record - w->n_empty - w->n_full - w->n_writing;
    }
    if (w->n_empty > 0)
        *out = w->empty[--w->n_empty];
    pthread_mutex_unlock(&w->lock);
    if (!*out)
        return br_fail(BR_E_LIMIT, "all %d records are in use", w->n_record);
    blank(w, *out);
    return BR_OK;
}

br_status record_return(record_writer *w, record *r) {
    pthread_mutex_lock(&w->lock);
    w->empty[w->n_empty++] = r;
    br_status status = status_of(w);
    pthread_mutex_unlock(&w->lock);
    return status;
}

br_status record_give(record_writer *w, record *r) {
    pthread_mutex_lock(&w->lock);
    w->full[(w->full_first + w->n_full) % w->n_record] = r;
    w->n_full++;
    br_status status = status_of(w);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    return status;
}
