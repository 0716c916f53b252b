/* Frames over a UNIX stream socket. Layer: trainer_bridge.
 *
 * The descriptor does not block. A frame is taken apart piece by piece: its header first, and only when that is sound its payload. Nothing is
 * allocated for damage, and until the greeting no payload of more than TB_STRANGER_MAX.
 *
 * An end that a listener accepted also answers for that listener while it takes in what arrives: once its peer has greeted, that is served
 * and others are not. Until then nobody knows whether it is a trainer, and others wait in the backlog. */
#include "tb_transport.h"

#include "br_mem.h"
#include "tb_message.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { AHEAD_BYTES = 32 << 10 /* taken in by one call: most frames are small */ };

typedef struct socket_end {
    tb_transport t;
    int fd;
    uint32_t ahead_at, n_ahead; /* of `ahead`, which is empty before anything is taken in */
    uint64_t n_out; /* bytes of the batch being sent that are out */
    unsigned char head[TB_HEADER_BYTES];
    uint64_t n_in; /* bytes of the frame being received that are in, header included */
    tb_frame *coming; /* once its header is in */
    const tb_listener *listener; /* that accepted it, NULL: it connected */
    unsigned char ahead[AHEAD_BYTES];
} socket_end;

struct tb_listener {
    int fd;
    struct sockaddr_un address;
};

static void end_of_stream(socket_end *s, ssize_t got, int error) {
    char text[128];
    if (got < 0)
        snprintf(text, sizeof text, "socket: cannot receive: %s", strerror(error));
    else if (s->n_in)
        snprintf(text, sizeof text, "socket: the peer closed in the middle of a frame, %llu bytes of it came", (unsigned long long)s->n_in);
    else
        snprintf(text, sizeof text, "socket: the peer closed");
    tb_inbox_end(&s->t, got == 0 && s->n_in ? TB_TRUNCATED : TB_LOST, text);
}

/* Up to n bytes of the stream to `at`; 0 when none is there now or ever. */
static uint64_t receive(socket_end *s, unsigned char *at, uint64_t n) {
    const ssize_t got = recv(s->fd, at, n, 0);
    if (got > 0) {
        s->t.heard_ms = tb_now_ms();
        return (uint64_t)got;
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        end_of_stream(s, got, errno);
    return 0;
}

/* Up to n bytes of a frame; what is long goes where it belongs without a copy. */
static uint64_t take_bytes(socket_end *s, unsigned char *at, uint64_t n) {
    if (s->ahead_at == s->n_ahead && n < AHEAD_BYTES) {
        s->ahead_at = 0;
        s->n_ahead = (uint32_t)receive(s, s->ahead, AHEAD_BYTES);
    }
    const uint32_t left = s->n_ahead - s->ahead_at;
    const uint64_t got = left == 0 && n >= AHEAD_BYTES ? receive(s, at, n) : n < left ? n : left;
    if (left) {
        memcpy(at, s->ahead + s->ahead_at, got);
        s->ahead_at += (uint32_t)got;
    }
    s->n_in += got;
    return got;
}

static int header_is_in(socket_end *s) {
    tb_header header;
    const tb_code code = tb_header_read(s->head, sizeof s->head, &header);
    if (code != TB_OK)
        tb_inbox_end(&s->t, code, br_last_error());
    else
        s->coming = tb_inbox_frame(&s->t, &header, header.n_payload);
    return s->coming != NULL;
}

/* The refusal: a fatal ERROR in front of any session. A caller that is gone again misses nothing. */
static void say_busy(const socket_end *s, int fd) {
    struct ucred peer = {.pid = 0};
    tb_buffer error = {0}, frame = {0};
    char sentence[128];
    (void)getsockopt(s->fd, SOL_SOCKET, SO_PEERCRED, &peer, &(socklen_t){sizeof peer});
    snprintf(sentence, sizeof sentence, "this worker serves another trainer, pid %d: wait for its end, or use another worker", (int)peer.pid);
    tb_message_encode(TB_ERROR, &(tb_message){.error = {.code = TB_BUSY, .fatal = 1, .text = tb_text_of(sentence)}}, &error);
    tb_header_add(&(tb_header){.type = TB_ERROR}, error.bytes, error.n, &frame);
    tb_buffer_add(&frame, error.bytes, error.n);
    if (error.failed == BR_OK && frame.failed == BR_OK)
        (void)send(fd, frame.bytes, frame.n, MSG_NOSIGNAL | MSG_DONTWAIT);
    tb_buffer_close(&error);
    tb_buffer_close(&frame);
}

/* Whoever calls after the served peer has hung up is not refused: the listener accepts it next. */
static void turn_others_away(const socket_end *s) {
    enum { CALLS, SERVED };
    struct pollfd p[] = {{.fd = s->listener->fd, .events = POLLIN}, {.fd = s->fd, .events = POLLRDHUP}};
    int fd;
    while (poll(p, 2, 0) > 0 && p[CALLS].revents && !p[SERVED].revents &&
           (fd = accept4(s->listener->fd, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
        say_busy(s, fd);
        close(fd);
    }
}

static void take_in(tb_transport *t) {
    socket_end *s = (socket_end *)t;
    while (tb_inbox_has_room(t)) {
        if (s->n_in < TB_HEADER_BYTES) {
            if (!take_bytes(s, s->head + s->n_in, TB_HEADER_BYTES - s->n_in))
                return;
            if (s->n_in < TB_HEADER_BYTES)
                continue;
            if (!header_is_in(s))
                return;
        }
        const uint64_t n_body = s->n_in - TB_HEADER_BYTES;
        if (n_body < s->coming->n && !take_bytes(s, s->coming->payload + n_body, s->coming->n - n_body))
            return;
        if (s->n_in - TB_HEADER_BYTES < s->coming->n)
            continue;
        tb_inbox_put(t, s->coming);
        s->coming = NULL;
        s->n_in = 0;
    }
}

static void socket_pump(tb_transport *t) {
    const socket_end *s = (const socket_end *)t;
    take_in(t);
    if (s->listener && t->greeted)
        turn_others_away(s);
}

static br_status socket_push(tb_transport *t, const tb_batch *batch, int *done) {
    socket_end *s = (socket_end *)t;
    for (;;) {
        struct iovec piece[2];
        struct msghdr message = {.msg_iov = piece};
        const uint64_t in_body = s->n_out > batch->n_frames ? s->n_out - batch->n_frames : 0;
        if (s->n_out < batch->n_frames)
            piece[message.msg_iovlen++] = (struct iovec){(void *)(uintptr_t)(batch->frames + s->n_out), batch->n_frames - s->n_out};
        if (in_body < batch->n_body)
            piece[message.msg_iovlen++] = (struct iovec){(void *)((uintptr_t)batch->body + in_body), batch->n_body - in_body};
        if (message.msg_iovlen == 0) {
            s->n_out = 0;
            *done = 1;
            return BR_OK;
        }
        const ssize_t n = sendmsg(s->fd, &message, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return BR_OK;
        if (n < 0)
            return br_fail(BR_E_IO, "socket: cannot send: %s", strerror(errno));
        s->n_out += (uint64_t)n;
        t->n_moved += (uint64_t)n;
    }
}

static void socket_wait(tb_transport *t, int64_t ms, int to_send) {
    const socket_end *s = (const socket_end *)t;
    struct pollfd p = {.fd = s->fd, .events = (short)(POLLIN | (to_send ? POLLOUT : 0))};
    const int64_t slice = ms < 50 ? ms : 50;
    const int n = poll(&p, 1, (int)slice);
    if (n > 0 && to_send && !(p.revents & POLLOUT)) { /* the inbox is full, or the other thread took it: do not spin */
        const struct timespec nap = {0, 50000};
        nanosleep(&nap, NULL);
    }
}

static void socket_close(tb_transport *t) {
    socket_end *s = (socket_end *)t;
    tb_frame_free(s->coming);
    close(s->fd);
}

static const tb_transport_ops socket_ops = {"socket", socket_pump, socket_push, socket_wait, socket_close};

br_status tb_socket_adopt(int fd, tb_transport **out) {
    socket_end *s;
    *out = NULL;
    br_status status = br_mem_alloc((void **)&s, sizeof *s, "a socket");
    if (status == BR_OK && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) {
        br_mem_free(s);
        status = br_fail(BR_E_IO, "socket: %s", strerror(errno));
    }
    if (status != BR_OK) {
        close(fd);
        return status;
    }
    tb_transport_init(&s->t, &socket_ops);
    s->fd = fd;
    *out = &s->t;
    return BR_OK;
}

/* ---- addresses ----------------------------------------------------------------------------------------------------------- */

static br_status address_of(const char *path, struct sockaddr_un *out) {
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof out->sun_path)
        return br_fail(BR_E_LIMIT, "socket %.60s...: %zu bytes, at most %zu are possible", path, strlen(path), sizeof out->sun_path - 1);
    memcpy(out->sun_path, path, strlen(path) + 1);
    return BR_OK;
}

static br_status open_socket(int *fd) {
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return *fd < 0 ? br_fail(BR_E_IO, "socket: %s", strerror(errno)) : BR_OK;
}

/* A socket file that a killed worker left behind is removed; anything else at the path is not ours. */
static void remove_unserved(const struct sockaddr_un *address) {
    struct stat info;
    int fd;
    if (lstat(address->sun_path, &info) != 0 || !S_ISSOCK(info.st_mode) || open_socket(&fd) != BR_OK)
        return;
    if (connect(fd, (const struct sockaddr *)address, sizeof *address) != 0 && errno == ECONNREFUSED)
        unlink(address->sun_path);
    close(fd);
}

br_status tb_socket_listen(const char *path, tb_listener **out) {
    br_status status;
    tb_listener *l;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&l, sizeof *l, "a listening socket"));
    l->fd = -1;
    BR_TRY_GOTO(address_of(path, &l->address), fail);
    BR_TRY_GOTO(open_socket(&l->fd), fail);
    remove_unserved(&l->address);
    if (bind(l->fd, (const struct sockaddr *)&l->address, sizeof l->address) != 0 || listen(l->fd, 4) != 0) {
        status = br_fail(BR_E_IO, "socket %s: cannot listen: %s", path, strerror(errno));
        goto fail;
    }
    *out = l;
    return BR_OK;
fail:
    if (l->fd >= 0)
        close(l->fd);
    br_mem_free(l);
    return status;
}

void tb_listener_close(tb_listener *listener) {
    if (!listener)
        return;
    unlink(listener->address.sun_path);
    close(listener->fd);
    br_mem_free(listener);
}

br_status tb_socket_accept(tb_listener *listener, int64_t wait_ms, tb_transport **out) {
    struct pollfd p = {.fd = listener->fd, .events = POLLIN};
    *out = NULL;
    if (poll(&p, 1, (int)wait_ms) <= 0)
        return br_fail(BR_E_NOT_FOUND, "socket %s: nobody connected within %lld ms", listener->address.sun_path, (long long)wait_ms);
    char byte;
    const int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return br_fail(BR_E_NOT_FOUND, "socket %s: %s", listener->address.sun_path, strerror(errno));
    if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) { /* somebody looked whether the path is served */
        close(fd);
        return br_fail(BR_E_NOT_FOUND, "socket %s: a connection closed before it began", listener->address.sun_path);
    }
    BR_TRY(tb_socket_adopt(fd, out));
    ((socket_end *)*out)->listener = listener;
    return BR_OK;
}

br_status tb_socket_connect(const char *path, int64_t wait_ms, tb_transport **out) {
    struct sockaddr_un address;
    const struct timespec nap = {0, 1000000};
    const int64_t until = tb_now_ms() + wait_ms;
    *out = NULL;
    BR_TRY(address_of(path, &address));
    for (;;) {
        int fd;
        BR_TRY(open_socket(&fd));
        if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0)
            return tb_socket_adopt(fd, out);
        const int error = errno;
        close(fd);
        if (tb_now_ms() >= until)
            return br_fail(BR_E_NOT_FOUND, "socket %s: nobody listens: %s", path, strerror(error));
        nanosleep(&nap, NULL);
    }
}
