/* Deadlines, back-off and the inbox of every transport; see tb_transport.h. Layer: trainer_bridge. */
#include "tb_transport.h"

#include "br_mem.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

int64_t tb_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void tb_frame_free(tb_frame *frame) {
    if (frame)
        br_mem_free(frame->payload);
    br_mem_free(frame);
}

void tb_transport_init(tb_transport *t, const tb_transport_ops *ops) {
    t->ops = ops;
    t->heard_ms = tb_now_ms();
    pthread_mutex_init(&t->lock, NULL);
}

void tb_transport_close(tb_transport *t) {
    if (!t)
        return;
    t->ops->close(t);
    while (t->first) {
        tb_frame *next = t->first->next;
        tb_frame_free(t->first);
        t->first = next;
    }
    pthread_mutex_destroy(&t->lock);
    br_mem_free(t);
}

/* ---- inbox, under the lock ----------------------------------------------------------------------------------------------- */

int tb_inbox_has_room(const tb_transport *t) {
    return !t->ended && t->n_inbox < TB_INBOX_MAX;
}

void tb_inbox_put(tb_transport *t, tb_frame *frame) {
    frame->at_ms = t->heard_ms = tb_now_ms();
    frame->next = NULL;
    if (t->last)
        t->last->next = frame;
    else
        t->first = frame;
    t->last = frame;
    t->n_inbox += sizeof *frame + frame->n;
}

tb_frame *tb_inbox_frame(tb_transport *t, const tb_header *header, uint64_t n) {
    tb_frame *frame;
    if (n > TB_STRANGER_MAX && !t->greeted) {
        (void)tb_fail(TB_BAD_LENGTH, "a frame of %llu bytes came before the greeting: at most %llu", (unsigned long long)n,
                      (unsigned long long)TB_STRANGER_MAX);
        tb_inbox_end(t, TB_BAD_LENGTH, br_last_error());
        return NULL;
    }
    if (br_mem_alloc((void **)&frame, sizeof *frame, "a frame") != BR_OK) {
        t->ended = 1;
        return NULL;
    }
    frame->header = *header;
    frame->n = n;
    if (n == 0 || br_mem_alloc((void **)&frame->payload, n, "a frame's payload") == BR_OK)
        return frame;
    br_mem_free(frame);
    tb_inbox_end(t, TB_FAILED, br_last_error());
    return NULL;
}

void tb_inbox_end(tb_transport *t, tb_code code, const char *sentence) {
    static const tb_header none;
    const int64_t heard = t->heard_ms;
    if (t->ended)
        return;
    tb_frame *frame = tb_inbox_frame(t, &none, 0);
    t->ended = 1;
    if (!frame)
        return;
    frame->fault = code;
    snprintf(frame->sentence, sizeof frame->sentence, "%s", sentence);
    tb_inbox_put(t, frame);
    t->heard_ms = heard; /* the end is no sign of life */
}

int tb_inbox_put_batch(tb_transport *t, const unsigned char *frames, uint64_t n, tb_header *last) {
    for (uint64_t at = 0; at < n;) {
        tb_frame *frame;
        const tb_code code = tb_header_read(frames + at, n - at, last);
        if (code != TB_OK) {
            tb_inbox_end(t, code, br_last_error());
            return 0;
        }
        at += TB_HEADER_BYTES;
        if (at == n && last->n_payload)
            return 1;
        if (last->n_payload > n - at) {
            (void)tb_fail(TB_TRUNCATED, "%llu bytes of a payload came where %llu were announced", (unsigned long long)(n - at),
                          (unsigned long long)last->n_payload);
            tb_inbox_end(t, TB_TRUNCATED, br_last_error());
            return 0;
        }
        if (!(frame = tb_inbox_frame(t, last, last->n_payload)))
            return 0;
        if (frame->n)
            memcpy(frame->payload, frames + at, frame->n);
        at += frame->n;
        tb_inbox_put(t, frame);
    }
    return 0;
}

static tb_frame *inbox_take(tb_transport *t) {
    tb_frame *frame = t->first;
    if (frame) {
        t->first = frame->next;
        t->last = t->first ? t->last : NULL;
        t->n_inbox -= sizeof *frame + frame->n;
    }
    return frame;
}

/* ---- what callers use ---------------------------------------------------------------------------------------------------- */

void tb_transport_pump(tb_transport *t) {
    pthread_mutex_lock(&t->lock);
    t->ops->pump(t);
    pthread_mutex_unlock(&t->lock);
}

void tb_transport_greeted(tb_transport *t) {
    pthread_mutex_lock(&t->lock);
    t->greeted = 1;
    pthread_mutex_unlock(&t->lock);
}

int tb_transport_ended(tb_transport *t) {
    pthread_mutex_lock(&t->lock);
    const int ended = t->ended && !t->first;
    pthread_mutex_unlock(&t->lock);
    return ended;
}

int64_t tb_transport_heard(tb_transport *t) {
    pthread_mutex_lock(&t->lock);
    const int64_t heard = t->heard_ms;
    pthread_mutex_unlock(&t->lock);
    return heard;
}

tb_frame *tb_transport_receive(tb_transport *t, int64_t wait_ms) {
    const int64_t until = tb_now_ms() + wait_ms;
    for (;;) {
        pthread_mutex_lock(&t->lock);
        if (!t->first)
            t->ops->pump(t);
        tb_frame *frame = inbox_take(t);
        const int ended = t->ended;
        pthread_mutex_unlock(&t->lock);
        const int64_t left = until - tb_now_ms();
        if (frame || ended || left <= 0)
            return frame;
        t->ops->wait(t, left, 0);
    }
}

br_status tb_transport_send(tb_transport *t, const tb_batch *batch, int64_t stall_ms) {
    int64_t moved_ms = tb_now_ms();
    uint64_t n_moved = 0;
    for (int first = 1;; first = 0) {
        int done = 0;
        pthread_mutex_lock(&t->lock);
        if (first)
            n_moved = t->n_moved;
        br_status status = t->ops->push(t, batch, &done);
        if (status == BR_OK && !done)
            t->ops->pump(t);
        const int moved = t->n_moved != n_moved;
        n_moved = t->n_moved;
        pthread_mutex_unlock(&t->lock);
        if (status != BR_OK || done)
            return status;
        const int64_t now = tb_now_ms();
        moved_ms = moved ? now : moved_ms;
        if (now - moved_ms >= stall_ms)
            return br_fail(BR_E_IO, "%s: the peer took nothing for %lld ms", t->ops->name, (long long)stall_ms);
        t->ops->wait(t, stall_ms - (now - moved_ms), 1);
    }
}
