/* Numbering, sealing, heartbeat; see tb_link.h. Layer: trainer_bridge. */
#include "tb_link.h"

#include "br_mem.h"
#include "tb_message.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { PUMP_MS = 20 }; /* how long arrivals may wait while the owner computes */

struct tb_link {
    tb_transport *t;
    int64_t beat_ms, stall_ms;
    pthread_mutex_t send_lock; /* of the fields below, over a whole send */
    uint64_t sequence, session; /* session 0: no frame was sent, so no HEARTBEAT is either */
    int64_t sent_ms;
    br_status broken;
    char sentence[256];
    pthread_mutex_t stop_lock;
    pthread_cond_t stop_signal;
    int stop, has_thread;
    pthread_t thread;
};

/* send_lock is held. */
static br_status send_sealed(tb_link *l, const tb_header *header, const void *payload, uint64_t n) {
    unsigned char head[TB_HEADER_BYTES];
    tb_header h = *header;
    if (l->broken != BR_OK)
        return br_fail(l->broken, "%s", l->sentence);
    h.major = TB_MAJOR;
    h.minor = TB_MINOR;
    h.sequence = l->sequence++;
    tb_header_seal(&h, payload, n, head);
    l->broken = tb_transport_send(l->t, head, payload, n, l->stall_ms);
    if (l->broken != BR_OK)
        snprintf(l->sentence, sizeof l->sentence, "%s", br_last_error());
    l->session = h.session;
    l->sent_ms = tb_now_ms();
    return l->broken;
}

br_status tb_link_send(tb_link *link, const tb_header *header, const void *payload, uint64_t n) {
    pthread_mutex_lock(&link->send_lock);
    const br_status status = send_sealed(link, header, payload, n);
    pthread_mutex_unlock(&link->send_lock);
    return status;
}

/* A send that is under way is itself a sign of life. */
static void beat(tb_link *l) {
    if (pthread_mutex_trylock(&l->send_lock) != 0)
        return;
    if (l->session && l->broken == BR_OK && tb_now_ms() - l->sent_ms >= l->beat_ms)
        (void)send_sealed(l, &(tb_header){.type = TB_HEARTBEAT, .session = l->session}, NULL, 0);
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
    br_mem_free(link);
}
