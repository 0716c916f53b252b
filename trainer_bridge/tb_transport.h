/* tb_transport: how frames get from one process to the other. One interface, three forms: loopback (both ends in one process, for
 * tests), a UNIX socket, MPI.
 *
 * Layer: trainer_bridge; includes base. A form offers steps that never wait; deadlines, back-off and the queue of what has arrived are
 * here, once. No call of this file blocks without a deadline. While a send waits it takes in what arrives, so that two sides that send
 * to each other both get on. Any thread may call; a frame's bytes never mix with another's because tb_link lets one send at a time. */
#ifndef TB_TRANSPORT_H
#define TB_TRANSPORT_H

#include "tb_frame.h"

#include <pthread.h>

int64_t tb_now_ms(void); /* monotonic */

/* One frame that came, or the end of the stream: `fault` then says how it ended, and nothing comes behind it. */
typedef struct tb_frame {
    struct tb_frame *next; /* of the queue */
    tb_header header;
    unsigned char *payload; /* 64-byte aligned; NULL when n is 0 */
    uint64_t n;
    int64_t at_ms;
    tb_code fault;
    char sentence[256];
} tb_frame;

void tb_frame_free(tb_frame *frame); /* NULL is a no-op */

typedef struct tb_transport tb_transport;

/* Frames that are sent as one: a message costs far more than its bytes. All of them lie in `frames`, but the payload of the last, when it
 * is long, is `body`. */
typedef struct tb_batch {
    const unsigned char *frames;
    uint64_t n_frames; /* bytes, at most TB_BATCH_MAX */
    const void *body;
    uint64_t n_body;
} tb_batch;

typedef struct tb_transport_ops {
    const char *name;
    /* Moves what has arrived into the inbox until that holds TB_INBOX_MAX bytes, so at most these and one batch. The end of the stream
     * goes there too. */
    void (*pump)(tb_transport *t);
    /* Begins or continues to send; *done when all is out. BR_E_IO: the peer is gone. */
    br_status (*push)(tb_transport *t, const tb_batch *batch, int *done);
    /* Until something may have changed, `ms` at most; may return early. Called without the lock. */
    void (*wait)(tb_transport *t, int64_t ms, int to_send);
    void (*close)(tb_transport *t);
} tb_transport_ops;

#define TB_BATCH_MAX ((uint64_t)256 << 10)
#define TB_INBOX_MAX ((uint64_t)256 << 20)
#define TB_STRANGER_MAX ((uint64_t)1 << 20) /* payload bytes of a frame until tb_transport_greeted */

/* Forms begin with this. */
struct tb_transport {
    const tb_transport_ops *ops;
    pthread_mutex_t lock;
    tb_frame *first, *last;
    uint64_t n_inbox;       /* bytes queued: payloads, and the frames that hold them */
    int greeted;
    int ended;              /* the inbox holds, or held, the end of the stream */
    uint64_t n_moved;       /* bytes sent: a send gives up only when none moves */
    int64_t heard_ms;       /* when anything last arrived */
};

void tb_transport_init(tb_transport *t, const tb_transport_ops *ops);
/* Sends frames, whatever they say. BR_E_IO: the peer is gone, or no byte moved for stall_ms. */
br_status tb_transport_send(tb_transport *t, const tb_batch *batch, int64_t stall_ms);
/* The oldest frame that has arrived; NULL when none came within wait_ms. The caller frees it. After the end of the stream always NULL. */
tb_frame *tb_transport_receive(tb_transport *t, int64_t wait_ms);
void tb_transport_pump(tb_transport *t);
int tb_transport_ended(tb_transport *t); /* 1: nothing is queued and nothing will come */
int64_t tb_transport_heard(tb_transport *t);
void tb_transport_greeted(tb_transport *t); /* the peer is who it should be: frames of TB_PAYLOAD_MAX from here on */
void tb_transport_close(tb_transport *t); /* NULL is a no-op; frees it */

/* For forms; the lock is held. */
int tb_inbox_has_room(const tb_transport *t);
/* A frame for this header with room for n payload bytes; NULL after it ended the stream: no memory, or too much
 * for a stranger. */
tb_frame *tb_inbox_frame(tb_transport *t, const tb_header *header, uint64_t n);
void tb_inbox_put(tb_transport *t, tb_frame *frame);
/* The frames of a batch. 1: the payload of the last, whose header is *last, lies outside. 0: it is whole, or it ended the stream. */
int tb_inbox_put_batch(tb_transport *t, const unsigned char *frames, uint64_t n, tb_header *last);
void tb_inbox_end(tb_transport *t, tb_code code, const char *sentence); /* once; later calls are no-ops */

/* ---- forms --------------------------------------------------------------------------------------------------------------- */

br_status tb_loopback_open(tb_transport *out[2]); /* BR_E_NOMEM */

typedef struct tb_listener tb_listener;
/* A socket at `path`, which must not exist or be a socket that nobody serves. BR_E_IO, BR_E_LIMIT (a path above 107 bytes). */
br_status tb_socket_listen(const char *path, tb_listener **out);
/* BR_E_NOT_FOUND: nobody came. Who else connects waits until *out is closed, which is before the listener is; from tb_transport_greeted on
 * it is refused by a fatal ERROR of code TB_BUSY whenever something is received. */
br_status tb_socket_accept(tb_listener *listener, int64_t wait_ms, tb_transport **out);
void tb_listener_close(tb_listener *listener); /* removes the path; NULL is a no-op */
#ifdef __GNUC__
#pragma GCC visibility push(default) /* for the trainer's bridge library */
#endif
/* Tries again until wait_ms is over. BR_E_NOT_FOUND: nobody listens. */
br_status tb_socket_connect(const char *path, int64_t wait_ms, tb_transport **out);
#ifdef __GNUC__
#pragma GCC visibility pop
#endif
br_status tb_socket_adopt(int fd, tb_transport **out); /* one end of a socketpair; the transport owns fd, also on error */

#endif
