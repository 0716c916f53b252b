/* Both ends of a connection in one process, for tests: what one end sends waits in the other's line until it pumps.
 * Layer: trainer_bridge. */
#include "tb_transport.h"

#include "br_mem.h"

#include <string.h>
#include <time.h>

/* The lock of an end is taken before the lock of the pair, never after it. */
typedef struct pair {
    pthread_mutex_t lock;
    int n_open;
} pair;

typedef struct sent {
    struct sent *next;
    uint64_t n_frames, n_body;
    unsigned char bytes[]; /* frames, body */
} sent;

typedef struct loopback {
    tb_transport t;
    pair *both;
    struct loopback *peer; /* NULL: closed */
    sent *first, **end;    /* what the peer sent */
} loopback;

static void deliver(loopback *l, sent *s) {
    tb_header last;
    if (!tb_inbox_put_batch(&l->t, s->bytes, s->n_frames, &last))
        return;
    tb_frame *frame = tb_inbox_frame(&l->t, &last, s->n_body);
    if (!frame)
        return;
    if (s->n_body)
        memcpy(frame->payload, s->bytes + s->n_frames, s->n_body);
    tb_inbox_put(&l->t, frame);
}

static void loopback_pump(tb_transport *t) {
    loopback *l = (loopback *)t;
    pthread_mutex_lock(&l->both->lock);
    while (l->first && tb_inbox_has_room(t)) {
        sent *s = l->first;
        l->first = s->next;
        l->end = l->first ? l->end : &l->first;
        deliver(l, s);
        br_mem_free(s);
    }
    if (!l->first && !l->peer)
        tb_inbox_end(t, TB_LOST, "loopback: the peer closed");
    pthread_mutex_unlock(&l->both->lock);
}

static br_status loopback_push(tb_transport *t, const tb_batch *batch, int *done) {
    loopback *l = (loopback *)t;
    sent *s;
    br_status status = br_mem_alloc((void **)&s, sizeof *s + batch->n_frames + batch->n_body, "frames on their way");
    if (status != BR_OK)
        return status;
    memcpy(s->bytes, batch->frames, batch->n_frames);
    if (batch->n_body)
        memcpy(s->bytes + batch->n_frames, batch->body, batch->n_body);
    s->n_frames = batch->n_frames;
    s->n_body = batch->n_body;
    *done = 1;
    t->n_moved += s->n_frames + s->n_body;
    pthread_mutex_lock(&l->both->lock);
    if (l->peer) {
        *l->peer->end = s;
        l->peer->end = &s->next;
    } else {
        br_mem_free(s);
        status = br_fail(BR_E_IO, "loopback: the peer closed");
    }
    pthread_mutex_unlock(&l->both->lock);
    return status;
}

static void loopback_wait(tb_transport *t, int64_t ms, int to_send) {
    const struct timespec nap = {0, 200000};
    (void)t, (void)ms, (void)to_send;
    nanosleep(&nap, NULL);
}

static void loopback_close(tb_transport *t) {
    loopback *l = (loopback *)t;
    pthread_mutex_lock(&l->both->lock);
    if (l->peer)
        l->peer->peer = NULL;
    const int n_open = --l->both->n_open;
    pthread_mutex_unlock(&l->both->lock);
    while (l->first) {
        sent *next = l->first->next;
        br_mem_free(l->first);
        l->first = next;
    }
    if (n_open == 0) {
        pthread_mutex_destroy(&l->both->lock);
        br_mem_free(l->both);
    }
}

static const tb_transport_ops loopback_ops = {"loopback", loopback_pump, loopback_push, loopback_wait, loopback_close};

br_status tb_loopback_open(tb_transport *out[2]) {
    loopback *l[2] = {NULL, NULL};
    pair *both = NULL;
    br_status status;
    out[0] = out[1] = NULL;
    BR_TRY_GOTO(br_mem_alloc((void **)&both, sizeof *both, "a loopback"), fail);
    for (int i = 0; i < 2; i++)
        BR_TRY_GOTO(br_mem_alloc((void **)&l[i], sizeof *l[i], "a loopback"), fail);
    pthread_mutex_init(&both->lock, NULL);
    both->n_open = 2;
    for (int i = 0; i < 2; i++) {
        tb_transport_init(&l[i]->t, &loopback_ops);
        l[i]->both = both;
        l[i]->peer = l[1 - i];
        l[i]->end = &l[i]->first;
        out[i] = &l[i]->t;
    }
    return BR_OK;
fail:
    br_mem_free(l[0]);
    br_mem_free(both);
    return status;
}
