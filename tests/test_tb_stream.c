/* What a socket's end makes of a stream that it takes in many frames at once: pieces and cuts of any size give the frames that were whole,
 * in order, and say how the stream ended. */
#include "tb_message.h"
#include "tb_transport.h"
#include "test_support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { AHEAD = 32 << 10 /* what the socket takes in by one call */, FRAMES = 40, WAIT_MS = 3000, STREAM_MAX = 1 << 20 };

/* Payloads around what one call takes in, among small ones. */
static const uint32_t SIZE[] = {0, 1, 900, AHEAD - TB_HEADER_BYTES, 0, AHEAD - 1, 63, AHEAD,
                                AHEAD + 1, 5, AHEAD - TB_HEADER_BYTES - 1, 3 * AHEAD + 7, 64};

static unsigned char stream[STREAM_MAX];
static size_t n_stream, end_of[FRAMES]; /* end_of: behind each frame */

static uint32_t size_of(int frame) {
    return SIZE[(size_t)frame % (sizeof SIZE / sizeof SIZE[0])];
}

static void make_stream(void) {
    n_stream = 0;
    for (int i = 0; i < FRAMES; i++) {
        tb_header h = {.major = TB_MAJOR, .type = TB_HELLO, .session = 1, .sequence = (uint64_t)i};
        unsigned char *payload = stream + n_stream + TB_HEADER_BYTES;
        ck_assert_uint_le(n_stream + TB_HEADER_BYTES + size_of(i), STREAM_MAX);
        for (uint32_t k = 0; k < size_of(i); k++)
            payload[k] = (unsigned char)test_mix((uint64_t)i << 32 | k);
        tb_header_seal(&h, payload, size_of(i), stream + n_stream);
        n_stream += TB_HEADER_BYTES + size_of(i);
        end_of[i] = n_stream;
    }
}

typedef struct writer {
    pthread_t thread;
    tb_transport *t;
    int fd;
    size_t n, piece; /* of the stream; piece 0: of random sizes */
    int stays;       /* the end is not closed */
} writer;

static void *write_all(void *context) {
    const writer *w = context;
    for (size_t at = 0, turn = 0; at < w->n; turn++) {
        const size_t most = w->piece ? w->piece : 1 + test_mix(turn) % (turn % 3 ? 100 : 2 * AHEAD), n = w->n - at < most ? w->n - at : most;
        if (write(w->fd, stream + at, n) != (ssize_t)n)
            abort();
        at += n;
    }
    if (!w->stays)
        close(w->fd);
    return NULL;
}

static void start(writer *w) {
    int fd[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    CHECK_OK(tb_socket_adopt(fd[0], &w->t));
    w->fd = fd[1];
    ck_assert_int_eq(pthread_create(&w->thread, NULL, write_all, w), 0);
}

static void expect_frame(tb_transport *t, int i, int64_t wait_ms) {
    tb_frame *frame = tb_transport_receive(t, wait_ms);
    ck_assert_msg(frame && frame->fault == TB_OK, "frame %d: %s", i, frame ? frame->sentence : "none");
    ck_assert_uint_eq(frame->header.sequence, (uint64_t)i);
    ck_assert_uint_eq(frame->n, size_of(i));
    ck_assert_int_eq(tb_payload_check(&frame->header, frame->payload, frame->n), TB_OK);
    tb_frame_free(frame);
}

static void expect_end(tb_transport *t, size_t n_over) {
    char text[64];
    tb_frame *frame = tb_transport_receive(t, WAIT_MS);
    snprintf(text, sizeof text, n_over ? "in the middle of a frame, %zu bytes" : "the peer closed", n_over);
    ck_assert_ptr_nonnull(frame);
    ck_assert_int_eq(frame->fault, n_over ? TB_TRUNCATED : TB_LOST);
    ck_assert_msg(strstr(frame->sentence, text) != NULL, "%s: wanted %s", frame->sentence, text);
    tb_frame_free(frame);
    ck_assert(tb_transport_ended(t) && !tb_transport_receive(t, 0));
    tb_transport_close(t);
}

static void cut_at(size_t n, size_t piece) {
    writer w = {.n = n, .piece = piece};
    int i = 0;
    start(&w);
    for (; i < FRAMES && end_of[i] <= n; i++)
        expect_frame(w.t, i, WAIT_MS);
    expect_end(w.t, n - (i ? end_of[i - 1] : 0));
    pthread_join(w.thread, NULL);
}

START_TEST(pieces_of_any_size) {
    static const size_t PIECE[] = {0, 7, 63, 64, 65, 1000, AHEAD - 1, AHEAD, AHEAD + 1, STREAM_MAX};
    make_stream();
    for (size_t i = 0; i < sizeof PIECE / sizeof PIECE[0]; i++)
        cut_at(n_stream, PIECE[i]);
}
END_TEST

/* Around the ends of frames and headers, and around what one call takes in. */
START_TEST(cuts_behind_several_frames) {
    make_stream();
    for (int i = 0; i < 14; i++) {
        const size_t begin = i ? end_of[i - 1] : 0;
        const size_t at[] = {begin, begin + TB_HEADER_BYTES, begin + AHEAD, begin / AHEAD * AHEAD};
        for (size_t k = 0; k < sizeof at / sizeof at[0]; k++)
            for (size_t n = at[k] ? at[k] - 1 : 0; n <= at[k] + 1 && n <= n_stream; n++)
                cut_at(n, k % 2 ? 0 : STREAM_MAX);
    }
    for (size_t n = 0; n < end_of[2]; n++) /* every byte of small ones */
        cut_at(n, STREAM_MAX);
}
END_TEST

/* An inbox without room leaves frames to the end, which has taken them in already: whoever receives gets them without waiting, though the
 * descriptor has nothing more to say. */
START_TEST(frames_taken_in_are_not_slept_over) {
    enum { SMALL = 3 };
    writer w = {.piece = STREAM_MAX, .stays = 1};
    make_stream();
    w.n = end_of[SMALL - 1];
    start(&w);
    pthread_join(w.thread, NULL);
    w.t->n_inbox = TB_INBOX_MAX - 1; /* room for one frame at a time */
    for (int i = 0; i < SMALL; i++) {
        char byte;
        expect_frame(w.t, i, 0);
        ck_assert_int_eq(recv(w.fd, &byte, 1, MSG_DONTWAIT), -1);
        tb_transport_pump(w.t);
    }
    ck_assert_ptr_null(tb_transport_receive(w.t, 0));
    close(w.fd);
    expect_end(w.t, 0);
}
END_TEST

Suite *test_tb_stream_suite(void) {
    Suite *suite = suite_create("tb_stream");
    TCase *tcase = tcase_create("tb_stream");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, pieces_of_any_size);
    tcase_add_test(tcase, cuts_behind_several_frames);
    tcase_add_test(tcase, frames_taken_in_are_not_slept_over);
    suite_add_tcase(suite, tcase);
    return suite;
}
