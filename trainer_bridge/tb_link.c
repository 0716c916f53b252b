/* Numbering, sealing, heartbeat; see tb_link.h. Layer: trainer_bridge. */
#include "tb_link.h"

#include "br_mem.h"
#include "tb_message.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    PUMP_MS = 20,            /* how long arrivals may wait while the owner computes */
    INLINE_BYTES = 32 << 10  /* a longer payload is not copied: it ends its batch */
};

struct tb_link {
    tb_transport *t;
    int64_t beat_ms, stall_ms;
    pthread_mutex_t send_lock; /* of the fields below, over a whole send */
    tb_buffer batch;            /* frames that are not sent yet */
    uint64_t sequence, session; /* session 0: there was no frame, so no HEARTBEAT is sent either */
    int64_t sent_ms;
    br_status broken;
    char sentence[256];
    pthread_mutex_t stop_lock;
    pthread_cond_t stop_signal;
    int stop, has_thread;
    pthread_t thread;
};

/* ---- sending, under send_lock -------------------------------------------------------------------------------------------- */

static br_status break_off(tb_link *l, br_status status) {
    if (status != BR_OK)
        snprintf(l->sentence, sizeof l->sentence, "%s", br_last_error());
    return l->broken = status;
}

/* The batch; `body` is the last payload where it is not in there. */
static br_status send_batch(tb_link *l, const void *body, uint64_t n_body) {
    const tb_batch batch = {l->batch.bytes, l->batch.n, body, n_body};
    if (l->broken != BR_OK)
        return br_fail(l->broken, "%s", l->sentence);
    if (l->batch.n == 0)
        return BR_OK;
    l->batch.n = 0;
    const br_status status = break_off(l, tb_transport_send(l->t, &batch, l->stall_ms));
    l->sent_ms = tb_now_ms();
    return status;
}

static br_status put(tb_link *l, const tb_header *header, const void *payload, uint64_t n) {
    const uint64_t n_inline = n <= INLINE_BYTES ? n : 0;
    tb_header h = *header;
    if (l->batch.n + TB_HEADER_BYTES + n_inline > TB_BATCH_MAX)
        (void)send_batch(l, NULL, 0);
    if (l->broken != BR_OK)
        return br_fail(l->broken, "%s", l->sentence);
    h.sequence = l->sequence++;
    l->session = h.session;
    tb_header_add(&h, payload, n, &l->batch);
    tb_buffer_add(&l->batch, payload, n_inline);
    if (l->batch.failed != BR_OK)
        return break_off(l, l->batch.failed);
    return n_inline == n ? BR_OK : send_batch(l, payload, n);
}

br_status tb_link_put(tb_link *link, const tb_header *header, const void *payload, uint64_t n) {
    pthread_mutex_lock(&link->send_lock);
    const br_status status = put(link, header, payload, n);
    pthread_mutex_unlock(&link->send_lock);
    return status;
}

br_status tb_link_flush(tb_link *link) {
    pthread_mutex_lock(&link->send_lock);
    const br_status status = send_batch(link, NULL, 0);
    pthread_mutex_unlock(&link->send_lock);
    return status;
}

/* ---- life ---------------------------------------------------------------------------------------------------------------- */

/* A send that is under way is itself a sign of life. */
static void beat(tb_link *l) {
    if (pthread_mutex_trylock(&l->send_lock) != 0)
        return;
    if (l->session && l->broken == BR_OK && tb_now_ms() - l->sent_ms >= l->beat_ms) {
        (void)put(l, &(tb_header){.type = TB_HEARTBEAT, .session = l->session}, NULL, 0);
        (void)send_batch(l, NULL, 0);
    }
    pthread_mutex_unlock(&l->send_lock);
}

static void *beat_loop(void *context) {
    tb_link *l = context;
    struct timespec until;
    pthread_mutex_lock(&l->stop_lock);
    while (!l->stop) {
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += PUMP_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(&l->stop_signal, &l->stop_lock, &until);
        if (l->stop)
            break;
        pthread_mutex_unlock(&l->stop_lock);
        tb_transport_pump(l->t);
        beat(l);
        pthread_mutex_lock(&l->stop_lock);
    }
    pthread_mutex_unlock(&l->stop_lock);
    return NULL;
}

br_status tb_link_open(tb_transport *t, int64_t beat_ms, int64_t stall_ms, tb_link **out) {
    tb_link *l;
    pthread_condattr_t clock;
    *out = NULL;
    const br_status status = br_mem_alloc((void **)&l, sizeof *l, "a link");
    if (status != BR_OK) {
        tb_transport_close(t);
        return status;
    }
    l->t = t;
    l->beat_ms = beat_ms;
    l->stall_ms = stall_ms;
    pthread_mutex_init(&l->send_lock, NULL);
    pthread_mutex_init(&l->stop_lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&l->stop_signal, &clock);
    pthread_condattr_destroy(&clock);
    const int error = beat_ms ? pthread_create(&l->thread, NULL, beat_loop, l) : 0;
    l->has_thread = beat_ms && !error;
    if (error) {
        tb_link_close(l);
        return br_fail(BR_E_NOMEM, "cannot start the heartbeat's thread: %s", strerror(error));
    }
    *out = l;
    return BR_OK;
}

tb_frame *tb_link_receive(tb_link *link, int64_t wait_ms) {
    return tb_transport_receive(link->t, wait_ms);
}

int tb_link_ended(tb_link *link) {
    return tb_transport_ended(link->t);
}

int64_t tb_link_heard(tb_link *link) {
    return tb_transport_heard(link->t);
}

void tb_link_greeted(tb_link *link) {
    tb_transport_greeted(link->t);
}

void tb_link_close(tb_link *link) {
    if (!link)
        return;
    pthread_mutex_lock(&link->stop_lock);
    link->stop = 1;
    pthread_cond_signal(&link->stop_signal);
    pthread_mutex_unlock(&link->stop_lock);
    if (link->has_thread)
        pthread_join(link->thread, NULL);
    pthread_cond_destroy(&link->stop_signal);
    pthread_mutex_destroy(&link->stop_lock);
    pthread_mutex_destroy(&link->send_lock);
    tb_transport_close(link->t);
    tb_buffer_close(&link->batch);
    br_mem_free(link);
}
