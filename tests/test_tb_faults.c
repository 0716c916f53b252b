/* The table of faults over loopback and over sockets, a thread as the worker; over MPI it is run by test_tb_process. And what only a
 * byte stream can show. */
#include "tb_faults.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct served {
    rig_worker worker;
    tb_transport *t;
    int64_t beat_ms;
    rig_outcome outcome;
    pthread_t thread;
} served;

static void *serve(void *context) {
    served *s = context;
    s->outcome = rig_serve(&s->worker, s->t, s->beat_ms);
    return NULL;
}

static void start(served *s, tb_transport *t, int64_t beat_ms) {
    CHECK_OK(rig_worker_open(&s->worker));
    s->t = t;
    s->beat_ms = beat_ms;
    ck_assert_int_eq(pthread_create(&s->thread, NULL, serve, s), 0);
}

static void stop(served *s) {
    pthread_join(s->thread, NULL);
    rig_worker_close(&s->worker);
}

static void socket_pair(tb_transport *out[2]) {
    int fd[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    for (int i = 0; i < 2; i++)
        CHECK_OK(tb_socket_adopt(fd[i], &out[i]));
}

static void play(const tb_fault *f, int over) {
    static served s;
    tb_transport *end[2];
    char text[600] = "";
    if (over == OVER_LOOPBACK)
        CHECK_OK(tb_loopback_open(end));
    else
        socket_pair(end);
    start(&s, end[0], over == OVER_SOCKET ? 100 : 0);
    const int played = tb_fault_play(f, end[1], text, sizeof text);
    stop(&s);
    ck_assert_msg(played, "%s, in %s: %s", f->name, rig_state_name[f->state], text);
    ck_assert_msg(tb_fault_check(f, &s.outcome, text, sizeof text), "%s, in %s: %s", f->name, rig_state_name[f->state], text);
}

START_TEST(test_fault_over_loopback) {
    if (tb_faults[_i].over & OVER_LOOPBACK)
        play(&tb_faults[_i], OVER_LOOPBACK);
}
END_TEST

START_TEST(test_fault_over_socket) {
    if (tb_faults[_i].over & OVER_SOCKET)
        play(&tb_faults[_i], OVER_SOCKET);
}
END_TEST

/* ---- what only a stream shows -------------------------------------------------------------------------------------------- */

static void hello_bytes(unsigned char *out, size_t *n) {
    tb_buffer payload = {0};
    tb_header h = {.major = TB_MAJOR, .type = TB_HELLO, .session = 9};
    tb_message_encode(TB_HELLO, &(tb_message){.hello = rig_hello(TB_TRAINER)}, &payload);
    tb_header_seal(&h, payload.bytes, payload.n, out);
    memcpy(out + TB_HEADER_BYTES, payload.bytes, payload.n);
    *n = TB_HEADER_BYTES + payload.n;
    tb_buffer_close(&payload);
}

/* A stream cut behind each byte of its first frame: truncated, but for the whole frame and for nothing. */
START_TEST(test_stream_cut_anywhere) {
    static served s;
    unsigned char bytes[512];
    size_t n_whole;
    hello_bytes(bytes, &n_whole);
    for (size_t n = 0; n <= n_whole; n += n < 70 ? 1 : 7) {
        tb_transport *t;
        int fd[2];
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
        CHECK_OK(tb_socket_adopt(fd[0], &t));
        ck_assert_int_eq(write(fd[1], bytes, n), (ssize_t)n);
        close(fd[1]);
        start(&s, t, 0);
        stop(&s);
        ck_assert_msg(s.outcome.code == (n == 0 || n == n_whole ? 3 : 4), "cut at %zu: %d", n, s.outcome.code);
    }
}
END_TEST

/* The next frame of this type, read from the descriptor. */
static void expect_on(int fd, tb_type type) {
    unsigned char head[TB_HEADER_BYTES], payload[512];
    tb_header h;
    do {
        ck_assert_int_eq(recv(fd, head, sizeof head, MSG_WAITALL), sizeof head);
        ck_assert_int_eq(tb_header_read(head, sizeof head, &h), TB_OK);
        ck_assert_uint_le(h.n_payload, sizeof payload);
        ck_assert_int_eq(recv(fd, payload, h.n_payload, MSG_WAITALL), (ssize_t)h.n_payload);
    } while (h.type != type);
}

/* A frame that comes byte by byte is a frame, and its bytes are signs of life. */
START_TEST(test_stream_byte_by_byte) {
    static served s;
    unsigned char bytes[512], ask[TB_HEADER_BYTES];
    tb_header h = {.major = TB_MAJOR, .type = TB_STATS_REQ, .session = 9, .sequence = 1};
    size_t n_whole;
    tb_transport *t;
    int fd[2];
    hello_bytes(bytes, &n_whole);
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    CHECK_OK(tb_socket_adopt(fd[0], &t));
    start(&s, t, 0);
    for (size_t i = 0; i < n_whole; i++)
        ck_assert_int_eq(write(fd[1], bytes + i, 1), 1);
    expect_on(fd[1], TB_HELLO_ACK);
    const int64_t begin = tb_now_ms();
    tb_header_seal(&h, NULL, 0, ask);
    for (size_t i = 0; i < sizeof ask; i++) {
        ck_assert_int_eq(write(fd[1], ask + i, 1), 1);
        while (tb_now_ms() - begin < (int64_t)(i * (RIG_DEAD_MS + 300) / sizeof ask))
            usleep(1000);
    }
    expect_on(fd[1], TB_STATS);
    close(fd[1]);
    stop(&s);
}
END_TEST

/* But none of them buys more time to greet in. */
START_TEST(test_greeting_byte_by_byte) {
    enum { GREET_MS = 200 };
    static served s;
    unsigned char bytes[512];
    size_t n_whole, n = 0;
    int fd[2];
    hello_bytes(bytes, &n_whole);
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    CHECK_OK(rig_worker_open(&s.worker));
    tb_session_channel(s.worker.session)->opt.greet_ms = GREET_MS;
    CHECK_OK(tb_socket_adopt(fd[0], &s.t));
    s.beat_ms = 100;
    ck_assert_int_eq(pthread_create(&s.thread, NULL, serve, &s), 0);
    while (n + 1 < n_whole && send(fd[1], bytes + n, 1, MSG_NOSIGNAL) == 1) {
        n++;
        usleep(20000);
    }
    stop(&s);
    close(fd[1]);
    ck_assert_uint_lt(n, n_whole - 1);
    ck_assert_int_eq(s.outcome.code, 3);
    ck_assert_int_ge(s.outcome.ms, GREET_MS);
    ck_assert_int_lt(s.outcome.ms, RIG_DEAD_MS);
}
END_TEST

/* The peer grants everything and reads nothing: a send gives up after its deadline, and the worker lives on. */
START_TEST(test_reader_that_never_reads) {
    static served s;
    tb_transport *end[2];
    rig_peer p;
    socket_pair(end);
    start(&s, end[0], 100);
    rig_peer_open(&p, end[1]);
    ck_assert_msg(rig_reach(&p, AT_IDLE), "%s", p.text);
    rig_say(&p, TB_CREDIT, 0, 0, &(tb_message){.credit = {.bytes = 1 << 30}});
    for (uint64_t id = 0; id < 8; id++)
        ck_assert(rig_say_request(&p, id, "endless", 1 << 20, 0));
    pthread_join(s.thread, NULL); /* p is not read from */
    ck_assert_int_eq(s.outcome.code, 3);
    ck_assert_msg(strstr(tb_session_channel(s.worker.session)->sentence, "took nothing") != NULL, "%s",
                  tb_session_channel(s.worker.session)->sentence);
    ck_assert_uint_eq(tb_session_stats(s.worker.session).n_running, 0);
    rig_peer_close(&p);
    rig_worker_close(&s.worker);
}
END_TEST

/* Two sides that send at once, each more than the socket holds, both get on: a waiting send takes in what comes. No threads here, they
 * would do it too. */
START_TEST(test_both_send_at_once) {
    enum { N = 8 << 20 };
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    tb_event e;
    unsigned char *big;
    uint32_t n_tok = 0;
    CHECK_OK(br_mem_alloc((void **)&big, N, "a chunk"));
    socket_pair(end);
    start(&s, end[0], 0);
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .beat_ms = -1, .grant_bytes = 1 << 14};
    CHECK_OK(tb_trainer_open(end[1], &o, &tr));
    for (uint64_t id = 0; id < 8; id++) {
        const uint32_t prompt[1] = {1};
        const tb_message m = {.gen_req = {.max_new = 20000, .uid = tb_text_of("x"), .prompt = {prompt, 1}}};
        CHECK_OK(tb_trainer_send(tr, TB_GEN_REQ, 0, id, &m));
    }
    for (int i = 0; i < 4; i++) /* refused, all of them: what is tested is that they arrive */
        CHECK_OK(tb_trainer_send_chunk(tr, 1, 0, 0, big, N));
    for (int n_done = 0; n_done < 8;) {
        CHECK_OK(tb_trainer_next(tr, 20000, &e));
        n_done += e.header.type == TB_GEN_DONE;
        n_tok += e.header.type == TB_GEN_PART ? e.message.gen_part.token.n : 0;
    }
    ck_assert_uint_eq(n_tok, 160000);
    tb_trainer_close(tr, 1);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
    br_mem_free(big);
}
END_TEST

/* No memory for a frame, nor for the news of it: the connection ends at once all the same. */
START_TEST(test_no_memory_for_a_frame) {
    rig_worker w;
    tb_transport *end[2];
    rig_peer p;
    CHECK_OK(rig_worker_open(&w));
    CHECK_OK(tb_loopback_open(end));
    rig_peer_open(&p, end[1]);
    ck_assert(rig_say(&p, TB_HELLO, 0, 0, &(tb_message){.hello = rig_hello(TB_TRAINER)}));
    br_mem_fail_nth(2); /* the link's own block is the first */
    const int64_t begin = tb_now_ms();
    ck_assert_int_eq(rig_serve(&w, end[0], 0).code, 3);
    br_mem_fail_nth(0);
    ck_assert_int_lt(tb_now_ms() - begin, RIG_DEAD_MS / 2);
    rig_peer_close(&p);
    rig_worker_close(&w);
}
END_TEST

/* A trainer that says all it has to say, BYE too, and is gone before the first answer: that is an end as agreed. */
START_TEST(test_bye_before_the_answer) {
    static served s;
    tb_transport *end[2];
    rig_peer p;
    socket_pair(end);
    rig_peer_open(&p, end[1]);
    ck_assert(rig_say(&p, TB_HELLO, 0, 0, &(tb_message){.hello = rig_hello(TB_TRAINER)}) && rig_say(&p, TB_BYE, 0, 0, NULL));
    rig_peer_close(&p);
    start(&s, end[0], 0);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
}
END_TEST

/* Who has not greeted makes nobody allocate much: the stream ends with the header. */
START_TEST(test_stranger_is_not_believed) {
    tb_transport *end[2];
    unsigned char head[TB_HEADER_BYTES];
    const tb_header h = {.major = TB_MAJOR, .type = TB_HELLO, .session = 1, .n_payload = TB_STRANGER_MAX + 1};
    for (int greeted = 0; greeted < 2; greeted++) {
        socket_pair(end);
        if (greeted)
            tb_transport_greeted(end[0]);
        tb_header_write(&h, head);
        CHECK_OK(tb_transport_send(end[1], &(tb_batch){head, sizeof head, NULL, 0}, 1000));
        tb_frame *frame = tb_transport_receive(end[0], 50);
        ck_assert_int_eq(frame != NULL, !greeted);
        if (frame)
            ck_assert_int_eq(frame->fault, TB_BAD_LENGTH);
        tb_frame_free(frame);
        tb_transport_close(end[0]);
        tb_transport_close(end[1]);
    }
}
END_TEST

/* What arrives while the owner of a link computes is taken in by its thread: the sender does not stall. */
START_TEST(test_link_takes_in_what_comes) {
    enum { BIG = 8 << 20 };
    tb_transport *end[2];
    tb_link *link;
    unsigned char head[TB_HEADER_BYTES], *big;
    tb_header h = {.major = TB_MAJOR, .type = TB_W_CHUNK, .session = 1};
    CHECK_OK(br_mem_alloc((void **)&big, BIG, "a chunk"));
    socket_pair(end);
    CHECK_OK(tb_link_open(end[0], 1000, 1000, &link));
    tb_link_greeted(link);
    tb_header_seal(&h, big, BIG, head);
    CHECK_OK(tb_transport_send(end[1], &(tb_batch){head, sizeof head, big, BIG}, 3000));
    tb_frame *frame = tb_link_receive(link, 3000);
    ck_assert_ptr_nonnull(frame);
    ck_assert_int_eq(tb_payload_check(&frame->header, frame->payload, frame->n), TB_OK);
    tb_frame_free(frame);
    tb_link_close(link);
    tb_transport_close(end[1]);
    br_mem_free(big);
}
END_TEST

/* n frames of these lengths, whole and in order, from number `first` on; and no other. */
static void expect_frames(tb_link *link, uint64_t first, const uint64_t *length, int n) {
    for (int i = 0; i < n; i++) {
        tb_frame *frame = tb_link_receive(link, 3000);
        ck_assert_ptr_nonnull(frame);
        ck_assert_msg(frame->fault == TB_OK, "%s", frame->sentence);
        ck_assert_uint_eq(frame->header.sequence, first + (uint64_t)i);
        ck_assert_uint_eq(frame->n, length[i]);
        ck_assert_int_eq(tb_payload_check(&frame->header, frame->payload, frame->n), TB_OK);
        tb_frame_free(frame);
    }
    ck_assert_ptr_null(tb_link_receive(link, 20));
}

static void put_frames(tb_link *link, const unsigned char *bytes, const uint64_t *length, int n) {
    for (int i = 0; i < n; i++)
        CHECK_OK(tb_link_put(link, &(tb_header){.type = TB_W_CHUNK, .session = 1}, bytes + i, length[i]));
}

/* Frames wait for a flush, for a batch that is full, or for a payload that is long; what comes is what was put. */
START_TEST(test_link_gathers) {
    enum { BIG = 100000, SMALL = 32000 };
    const uint64_t few[] = {0, 10, 7}, big[] = {3, BIG}, many[] = {SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL};
    tb_transport *end[2];
    tb_link *link, *other;
    unsigned char *bytes;
    CHECK_OK(br_mem_alloc((void **)&bytes, BIG + 16, "payloads"));
    for (int i = 0; i < BIG + 16; i++)
        bytes[i] = (unsigned char)(i * 7 >> 3);
    if (_i == OVER_LOOPBACK)
        CHECK_OK(tb_loopback_open(end));
    else
        socket_pair(end);
    CHECK_OK(tb_link_open(end[0], 0, 1000, &link));
    CHECK_OK(tb_link_open(end[1], 1000, 1000, &other)); /* its thread takes in what no socket holds */
    put_frames(link, bytes, few, 3);
    expect_frames(other, 0, few, 0);
    CHECK_OK(tb_link_flush(link));
    expect_frames(other, 0, few, 3);
    put_frames(link, bytes, big, 2);
    expect_frames(other, 3, big, 2);
    put_frames(link, bytes, many, 9); /* eight of them make a batch */
    expect_frames(other, 5, many, 8);
    CHECK_OK(tb_link_flush(link));
    expect_frames(other, 13, many, 1);
    tb_link_close(other);
    put_frames(link, bytes, few, 3);
    CHECK_FAILS(tb_link_flush(link), BR_E_IO);
    CHECK_FAILS(tb_link_put(link, &(tb_header){.type = TB_W_CHUNK, .session = 1}, NULL, 0), BR_E_IO);
    tb_link_close(link);
    br_mem_free(bytes);
}
END_TEST

/* What is asked for together begins in one step of the engine, however long the asking takes. */
START_TEST(test_requests_begin_together) {
    enum { N_REQUEST = 8, N_NEW = 12 };
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    tb_event e;
    const uint32_t prompt[1] = {1};
    const tb_message m = {.gen_req = {.max_new = N_NEW, .uid = tb_text_of("together"), .prompt = {prompt, 1}}};
    socket_pair(end);
    start(&s, end[0], 100);
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .beat_ms = 2000};
    CHECK_OK(tb_trainer_open(end[1], &o, &tr));
    while (tb_trainer_requests(tr) < N_REQUEST)
        (void)tb_trainer_next(tr, 1, &e);
    for (uint64_t id = 0; id < N_REQUEST; id++) {
        CHECK_OK(tb_trainer_send(tr, TB_GEN_REQ, 0, id, &m));
        usleep(2000);
    }
    if (_i) /* else the wait for an answer sends them */
        CHECK_OK(tb_trainer_flush(tr));
    for (int n_done = 0; n_done < N_REQUEST; n_done += e.header.type == TB_GEN_DONE)
        CHECK_OK(tb_trainer_next(tr, 3000, &e));
    tb_trainer_close(tr, 1);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
    ck_assert_int_eq(s.worker.engine.n_poll, N_NEW);
}
END_TEST

/* A request that outlives those that came before and behind it is still found. */
START_TEST(test_a_long_request_among_short_ones) {
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    tb_event e;
    const uint32_t prompt[1] = {1};
    const char *const uid[] = {"short", "hold", "short"};
    socket_pair(end);
    start(&s, end[0], 100);
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .beat_ms = 100};
    CHECK_OK(tb_trainer_open(end[1], &o, &tr));
    for (uint64_t id = 0; id < 3; id++) {
        const tb_message m = {.gen_req = {.max_new = 4, .uid = tb_text_of(uid[id]), .prompt = {prompt, 1}}};
        CHECK_OK(tb_trainer_send(tr, TB_GEN_REQ, 0, id, &m));
        if (id == 0)
            continue;
        do
            CHECK_OK(tb_trainer_next(tr, 3000, &e));
        while (e.header.type != TB_GEN_DONE);
        ck_assert_uint_eq(e.header.subject, id == 1 ? 0 : 2);
    }
    CHECK_OK(tb_trainer_send(tr, TB_GEN_ABORT, 0, 1, &(tb_message){.stats = {0}}));
    CHECK_OK(tb_trainer_next(tr, 3000, &e));
    ck_assert_int_eq(e.header.type, TB_GEN_DONE);
    ck_assert_uint_eq(e.header.subject, 1);
    tb_trainer_close(tr, 1);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
}
END_TEST

/* The trainer computes for longer than the deadline: its thread keeps both sides alive. */
START_TEST(test_heartbeats_bridge_a_long_step) {
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    tb_event e;
    socket_pair(end);
    start(&s, end[0], 100);
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .beat_ms = 100, .dead_ms = RIG_DEAD_MS};
    CHECK_OK(tb_trainer_open(end[1], &o, &tr));
    usleep((RIG_DEAD_MS + 700) * 1000);
    CHECK_OK(tb_trainer_send(tr, TB_STATS_REQ, 0, 0, &(tb_message){.stats = {0}}));
    CHECK_OK(tb_trainer_next(tr, 2000, &e));
    ck_assert_int_eq(e.header.type, TB_STATS);
    tb_trainer_close(tr, 1);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
}
END_TEST

START_TEST(test_trainer_hears_why) {
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    tb_trainer_options o = {.me = rig_hello(TB_TRAINER)};
    o.me.config.lo++;
    socket_pair(end);
    start(&s, end[0], 100);
    CHECK_FAILS(tb_trainer_open(end[1], &o, &tr), BR_E_MISMATCH);
    ck_assert_ptr_null(tr);
    ck_assert_msg(strstr(br_last_error(), "config") != NULL, "%s", br_last_error());
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 5);
    socket_pair(end); /* nobody at the other end */
    o.wait_ms = 200;
    CHECK_FAILS(tb_trainer_open(end[1], &o, &tr), BR_E_IO);
    tb_transport_close(end[0]);
}
END_TEST

/* A caller's mistake is the caller's status: nothing goes out, and the session goes on. */
START_TEST(test_trainer_refuses_its_caller) {
    static const char text[BR_UID_BYTES_MAX + 1], one_zero[4] = "a\0b";
    static const uint32_t words[1] = {1};
    const tb_text uid = tb_text_of("u");
    const tb_words prompt = {words, 1};
    const struct {
        tb_type type;
        tb_message m;
        const char *names;
    } wrong[] = {
        {TB_GEN_REQ, {.gen_req = {.max_new = 0, .uid = uid, .prompt = prompt}}, "max_new: 0"},
        {TB_GEN_REQ, {.gen_req = {.max_new = TB_WORDS_MAX + 1, .uid = uid, .prompt = prompt}}, "max_new"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .sample = 1 << 24, .uid = uid, .prompt = prompt}}, "sample"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .uid = {text, 0}, .prompt = prompt}}, "uid"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .uid = {text, sizeof text}, .prompt = prompt}}, "uid"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .uid = {one_zero, 3}, .prompt = prompt}}, "uid"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .uid = {NULL, 3}, .prompt = prompt}}, "uid"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .uid = uid, .prompt = {words, 0}}}, "prompt"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .uid = uid, .prompt = {words, UINT32_MAX}}}, "prompt"},
        {TB_GEN_REQ, {.gen_req = {.max_new = 1, .uid = uid, .prompt = prompt, .stop = {words, BR_STOP_MAX + 1}}}, "stop"},
        {TB_CREDIT, {.credit = {.bytes = UINT64_MAX}}, "bytes"},
        {TB_PAUSE, {.pause = {.mode = TB_PAUSE_MODE_COUNT}}, "mode"},
        {TB_W_IPC, {.w_ipc = {.handle = {(const unsigned char *)text, 3}}}, "handle"},
        {TB_W_CHUNK, {.w_chunk = {.data = {(const unsigned char *)text, UINT64_MAX}}}, "data"},
        {TB_MANIFEST, {.manifest = {.tensors = {{NULL, 0}, 0}}}, "tensors"},
        {TB_MANIFEST, {.manifest = {.tensors = {{(const unsigned char *)text, 5}, 1}}}, "tensors"},
        {TB_GEN_DONE, {.gen_done = {.stop = 0}}, "GEN_DONE"},
        {(tb_type)4242, {.pause = {.mode = 0}}, "4242"},
    };
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    tb_event e;
    socket_pair(end);
    start(&s, end[0], 100);
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .beat_ms = 100};
    CHECK_OK(tb_trainer_open(end[1], &o, &tr));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_FAILS(tb_trainer_send(tr, wrong[i].type, 0, 1, &wrong[i].m), BR_E_ARG);
        ck_assert_msg(strstr(br_last_error(), wrong[i].names) != NULL, "row %zu: %s", i, br_last_error());
    }
    CHECK_FAILS(tb_trainer_send(tr, TB_PAUSE, 0, 0, NULL), BR_E_ARG);
    CHECK_OK(tb_trainer_send(tr, TB_STATS_REQ, 0, 0, NULL));
    CHECK_OK(tb_trainer_next(tr, 2000, &e));
    ck_assert_int_eq(e.header.type, TB_STATS);
    tb_trainer_close(tr, 1);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
}
END_TEST

/* A worker that has yet to load answers late: the greeting has its own deadline. */
static void *serve_late(void *context) {
    usleep(900 * 1000);
    return serve(context);
}

START_TEST(test_worker_that_loads) {
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .beat_ms = 100, .dead_ms = 300, .wait_ms = 8000};
    socket_pair(end);
    CHECK_OK(rig_worker_open(&s.worker));
    s.t = end[0];
    s.beat_ms = 100;
    ck_assert_int_eq(pthread_create(&s.thread, NULL, serve_late, &s), 0);
    CHECK_OK(tb_trainer_open(end[1], &o, &tr));
    tb_trainer_close(tr, 1);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
}
END_TEST

START_TEST(test_trainer_waits_for_credit) {
    static served s;
    tb_transport *end[2];
    tb_trainer *tr;
    const uint32_t prompt[1] = {1};
    const tb_message m = {.gen_req = {.max_new = 4, .uid = tb_text_of("hold"), .prompt = {prompt, 1}}};
    socket_pair(end);
    start(&s, end[0], 100);
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .wait_ms = 1200, .beat_ms = 100};
    CHECK_OK(tb_trainer_open(end[1], &o, &tr));
    for (uint64_t id = 0; id < 8; id++)
        CHECK_OK(tb_trainer_send(tr, TB_GEN_REQ, 0, id, &m));
    CHECK_FAILS(tb_trainer_send(tr, TB_GEN_REQ, 0, 8, &m), BR_E_LIMIT);
    CHECK_OK(tb_trainer_send(tr, TB_GEN_ABORT, 0, 3, &m));
    CHECK_OK(tb_trainer_send(tr, TB_GEN_REQ, 0, 8, &m));
    tb_trainer_close(tr, 1);
    stop(&s);
    ck_assert_int_eq(s.outcome.code, 0);
}
END_TEST

Suite *test_tb_faults_suite(void) {
    Suite *s = suite_create("tb_faults");
    TCase *t = tcase_create("table");
    tcase_set_timeout(t, 20);
    tcase_add_loop_test(t, test_fault_over_loopback, 0, tb_fault_count);
    tcase_add_loop_test(t, test_fault_over_socket, 0, tb_fault_count);
    suite_add_tcase(s, t);
    t = tcase_create("streams");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_stream_cut_anywhere);
    tcase_add_test(t, test_stream_byte_by_byte);
    tcase_add_test(t, test_greeting_byte_by_byte);
    tcase_add_test(t, test_reader_that_never_reads);
    tcase_add_test(t, test_both_send_at_once);
    tcase_add_test(t, test_no_memory_for_a_frame);
    tcase_add_test(t, test_bye_before_the_answer);
    tcase_add_test(t, test_stranger_is_not_believed);
    tcase_add_test(t, test_link_takes_in_what_comes);
    tcase_add_loop_test(t, test_link_gathers, OVER_LOOPBACK, OVER_SOCKET + 1);
    tcase_add_loop_test(t, test_requests_begin_together, 0, 2);
    tcase_add_test(t, test_a_long_request_among_short_ones);
    tcase_add_test(t, test_heartbeats_bridge_a_long_step);
    tcase_add_test(t, test_trainer_hears_why);
    tcase_add_test(t, test_trainer_refuses_its_caller);
    tcase_add_test(t, test_worker_that_loads);
    tcase_add_test(t, test_trainer_waits_for_credit);
    suite_add_tcase(s, t);
    return s;
}
