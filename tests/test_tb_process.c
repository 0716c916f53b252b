/* The bridge between real processes: either side killed in each state over a socket, and two ranks under mpirun. Where a process dies is
 * decided by hooks in what it works with, not by time. */
#include "tb_faults.h"
#include "test_support.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GREET_MS = 500 };

static char path[96];

static void make_path(void) {
    snprintf(path, sizeof path, "%s/worker.sock", test_tmp_dir());
}

/* Serves trainer after trainer until one says BYE, as bitroll-worker does; its exit status is that of the last. */
static pid_t start_worker(fake_death death) {
    const pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid != 0)
        return pid;
    rig_worker w;
    tb_listener *listener;
    tb_transport *t;
    int code = 99;
    const int64_t until = tb_now_ms() + 15000;
    if (rig_worker_open(&w) != BR_OK || tb_socket_listen(path, &listener) != BR_OK)
        _exit(98);
    w.weights.death = death;
    tb_session_channel(w.session)->opt.greet_ms = GREET_MS;
    while (code != 0 && tb_now_ms() < until)
        if (tb_socket_accept(listener, 1000, &t) == BR_OK)
            code = rig_serve(&w, t, 100).code;
    tb_listener_close(listener);
    rig_worker_close(&w);
    _exit(code);
}

static int end_of(pid_t pid) {
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void connect_peer(rig_peer *p) {
    tb_transport *t;
    CHECK_OK(tb_socket_connect(path, 3000, &t));
    rig_peer_open(p, t);
}

/* A whole swap as RESYNC to `version`, from a greeting that must say that `live` serves; then BYE. */
static void resync(uint64_t live, uint64_t version) {
    unsigned char bytes[2][FAKE_BYTES];
    rig_peer p;
    tb_message hello = {.hello = rig_hello(TB_TRAINER)}, m;
    tb_buffer raw = {0};
    connect_peer(&p);
    ck_assert(rig_say(&p, TB_HELLO, 0, 0, &hello));
    ck_assert_msg(rig_expect(&p, TB_HELLO_ACK, 3000), "%s", p.text);
    ck_assert_uint_eq(p.message.hello.live_version, live);
    fake_version(live, bytes);
    if (live)
        ck_assert(br_digest_equal(p.message.hello.adapter, fake_digest(bytes)));
    fake_manifest(TB_W_ADAPTER, &raw, &m);
    ck_assert(rig_say(&p, TB_MANIFEST, 0, 0, &m) && rig_expect(&p, TB_MANIFEST_ACK, 3000));
    tb_buffer_close(&raw);
    fake_version(version, bytes);
    ck_assert(rig_say_begin(&p, version, TB_RESYNC));
    for (uint64_t i = 0; i < 2; i++)
        ck_assert(rig_say_chunk(&p, version, i, 0, bytes[i], FAKE_BYTES));
    ck_assert(rig_say_end(&p, version, fake_digest(bytes)));
    ck_assert_msg(rig_expect(&p, TB_W_PREPARED, 3000), "%s", p.text);
    ck_assert(rig_say(&p, TB_W_COMMIT, version, 0, NULL));
    ck_assert_msg(rig_expect(&p, TB_W_COMMITTED, 3000), "%s", p.text);
    ck_assert(br_digest_equal(p.message.w_committed.digest, fake_digest(bytes)));
    ck_assert(rig_say(&p, TB_BYE, 0, 0, NULL) && rig_expect(&p, TB_BYE, 3000));
    rig_peer_close(&p);
}

/* kill -9 of the trainer in each state: what was committed or ordered serves, nothing else, and the next trainer goes on. */
START_TEST(test_killed_trainer) {
    make_path();
    const pid_t worker = start_worker(DIE_NEVER), trainer = fork();
    ck_assert_int_ge(trainer, 0);
    if (trainer == 0) {
        rig_peer p;
        tb_transport *t;
        if (tb_socket_connect(path, 3000, &t) != BR_OK)
            _exit(1);
        rig_peer_open(&p, t);
        if (!rig_reach(&p, (rig_state)_i))
            _exit(2);
        raise(SIGKILL);
    }
    ck_assert_int_eq(end_of(trainer), -SIGKILL);
    resync(_i == AT_COMMITTING ? 1 : 0, 7);
    ck_assert_int_eq(end_of(worker), 0);
}
END_TEST

/* kill -9 of the worker inside each of its ops: the trainer hears of it before its deadline, and a new worker is filled by RESYNC. */
START_TEST(test_killed_worker) {
    rig_peer p;
    make_path();
    const pid_t worker = start_worker((fake_death)_i);
    connect_peer(&p);
    const int64_t begin = tb_now_ms();
    ck_assert(!(rig_reach(&p, AT_PREPARED) && rig_say(&p, TB_W_COMMIT, 1, 0, NULL) && rig_expect(&p, TB_W_COMMITTED, 3000)));
    while (p.frame && p.frame->fault == TB_OK) /* a failed send says less than the stream's end */
        (void)rig_expect_any(&p, 1000);
    ck_assert_ptr_nonnull(p.frame);
    ck_assert_int_eq(p.frame->fault, TB_LOST);
    ck_assert_int_lt(tb_now_ms() - begin, RIG_DEAD_MS);
    rig_peer_close(&p);
    ck_assert_int_eq(end_of(worker), -SIGKILL);
    const pid_t second = start_worker(DIE_NEVER); /* takes the path that the first left behind */
    resync(0, 1);
    ck_assert_int_eq(end_of(second), 0);
}
END_TEST

typedef struct dripper {
    int fd;
    unsigned char head[TB_HEADER_BYTES];
    pthread_t thread;
} dripper;

/* A header that is sound and announces more than will ever come, then byte after byte until nobody takes them. */
static void *drip(void *context) {
    dripper *d = context;
    for (size_t i = 0; send(d->fd, d->head + (i < sizeof d->head ? i : 0), 1, MSG_NOSIGNAL) == 1; i++)
        usleep(5000);
    return NULL;
}

/* Who connects and does not greet is dropped in time, whether it says nothing or does so slowly: a trainer behind it is not refused. */
START_TEST(test_trainer_behind_strangers) {
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .wait_ms = 10000};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const tb_header h = {.major = TB_MAJOR, .type = TB_HELLO, .session = 1, .n_payload = TB_STRANGER_MAX};
    dripper stranger[2];
    tb_transport *t;
    tb_trainer *tr;
    make_path();
    memcpy(address.sun_path, path, sizeof path);
    const pid_t worker = start_worker(DIE_NEVER);
    CHECK_OK(tb_socket_connect(path, 3000, &t)); /* it serves, and drops who hangs up */
    tb_transport_close(t);
    const int64_t begin = tb_now_ms();
    for (int i = 0; i < 2; i++) {
        stranger[i].fd = socket(AF_UNIX, SOCK_STREAM, 0);
        ck_assert_int_eq(connect(stranger[i].fd, (const struct sockaddr *)&address, sizeof address), 0);
        tb_header_write(&h, stranger[i].head);
    }
    ck_assert_int_eq(pthread_create(&stranger[_i].thread, NULL, drip, &stranger[_i]), 0); /* the first in line, or the one behind */
    CHECK_OK(tb_socket_connect(path, 3000, &t));
    CHECK_OK(tb_trainer_open(t, &o, &tr));
    ck_assert_int_ge(tb_now_ms() - begin, 2 * GREET_MS);
    ck_assert_int_lt(tb_now_ms() - begin, 2 * GREET_MS + 3000);
    tb_trainer_close(tr, 1);
    ck_assert_int_eq(end_of(worker), 0);
    pthread_join(stranger[_i].thread, NULL);
    for (int i = 0; i < 2; i++)
        close(stranger[i].fd);
}
END_TEST

/* A second trainer is told at once that another is served, in whatever state, and goes first when that one has hung up. */
START_TEST(test_second_trainer) {
    tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .wait_ms = 5000};
    rig_peer first;
    tb_transport *t;
    tb_trainer *second;
    char who[64];
    make_path();
    snprintf(who, sizeof who, "serves another trainer, pid %d", (int)getpid());
    const pid_t worker = start_worker(DIE_NEVER);
    connect_peer(&first);
    ck_assert_msg(rig_reach(&first, (rig_state)_i), "%s", first.text);
    const int64_t begin = tb_now_ms();
    for (int is_late = 0; is_late < 2; is_late++) { /* late: HELLO meets a connection that is closed */
        CHECK_OK(tb_socket_connect(path, 3000, &t));
        while (is_late && !t->ended)
            tb_transport_pump(t);
        CHECK_FAILS(tb_trainer_open(t, &o, &second), BR_E_LIMIT);
        ck_assert_msg(strstr(br_last_error(), who) != NULL, "%s", br_last_error());
    }
    ck_assert_int_lt(tb_now_ms() - begin, RIG_DEAD_MS);
    rig_peer_close(&first);
    CHECK_OK(tb_socket_connect(path, 3000, &t));
    CHECK_OK(tb_trainer_open(t, &o, &second));
    tb_trainer_close(second, 1);
    ck_assert_int_eq(end_of(worker), 0);
}
END_TEST

START_TEST(test_listening_refuses) {
    tb_listener *l, *m;
    tb_transport *t;
    char longer[200];
    make_path();
    CHECK_OK(tb_socket_listen(path, &l));
    CHECK_FAILS(tb_socket_listen(path, &m), BR_E_IO); /* somebody serves there */
    CHECK_FAILS(tb_socket_accept(l, 10, &t), BR_E_NOT_FOUND);
    tb_listener_close(l);
    CHECK_FAILS(tb_socket_connect(path, 10, &t), BR_E_NOT_FOUND);
    FILE *file = fopen(path, "w"); /* a file that is no socket stays */
    fclose(file);
    CHECK_FAILS(tb_socket_listen(path, &l), BR_E_IO);
    ck_assert_int_eq(access(path, F_OK), 0);
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = 0;
    CHECK_FAILS(tb_socket_listen(longer, &l), BR_E_LIMIT);
}
END_TEST

/* ---- two ranks ----------------------------------------------------------------------------------------------------------- */

/* Output of `mpirun -n 2 tb_mpi_peer what`; returns its status. The time limit is ours: a hang is a failure, not a wait. */
static int run_ranks(const char *options, const char *what, char *out, size_t n_out) {
    char command[1024];
    size_t n = 0;
    snprintf(command, sizeof command, TEST_MPIRUN " %s %s/tb_mpi_peer %s 2>&1", options, BITROLL_BINARY_DIR, what);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    for (size_t got; n + 1 < n_out && (got = fread(out + n, 1, n_out - 1 - n, pipe)) > 0;)
        n += got;
    out[n] = 0;
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#define CHECK_SAYS(text, part) ck_assert_msg(strstr(text, part) != NULL, "'%s' is not in:\n%s", part, text)

START_TEST(test_mpi_round) {
    char out[8192];
    const int code = run_ranks("", "round", out, sizeof out);
    ck_assert_msg(code == 0, "status %d:\n%s", code, out);
    CHECK_SAYS(out, "ok trainer, Open MPI");
    CHECK_SAYS(out, "5 versions");
    CHECK_SAYS(out, "worker: exit code 0, version 5");
}
END_TEST

/* Every row of the table that MPI can show was played. */
START_TEST(test_mpi_faults) {
    char out[16384], wanted[32];
    int n = 0;
    for (int i = 0; i < tb_fault_count; i++)
        n += (tb_faults[i].over & OVER_MPI) != 0;
    ck_assert_int_gt(n, 0);
    snprintf(wanted, sizeof wanted, "ok %d faults\n", n);
    const int code = run_ranks("--enable-recovery", "faults", out, sizeof out);
    ck_assert_msg(code == 0, "status %d:\n%s", code, out);
    CHECK_SAYS(out, wanted);
}
END_TEST

START_TEST(test_mpi_send_given_up) {
    char out[8192];
    const int code = run_ranks("", "give-up", out, sizeof out);
    ck_assert_msg(code == 0, "status %d:\n%s", code, out);
    CHECK_SAYS(out, "given up");
    CHECK_SAYS(out, "whole");
}
END_TEST

START_TEST(test_mpi_killed_worker) {
    char out[8192];
    (void)run_ranks("--enable-recovery", "kill-worker", out, sizeof out);
    CHECK_SAYS(out, "ok silent after");
}
END_TEST

START_TEST(test_mpi_killed_trainer) {
    char out[8192];
    (void)run_ranks("--enable-recovery", "kill-trainer", out, sizeof out);
    CHECK_SAYS(out, "worker: exit code 3, version 1, weights in state 0"); /* 2 was prepared, not ordered */
}
END_TEST

/* By default mpirun ends the job with the dead rank: soon, and with a status that is not 0. */
START_TEST(test_mpi_default_ends_the_job) {
    char out[8192];
    const int64_t begin = tb_now_ms();
    const int code = run_ranks("", "kill-trainer", out, sizeof out);
    ck_assert_int_ne(code, 0);
    ck_assert_int_ne(code, 124);
    ck_assert_int_lt(tb_now_ms() - begin, 20000);
}
END_TEST

Suite *test_tb_process_suite(void) {
    Suite *s = suite_create("tb_process");
    TCase *t = tcase_create("sockets");
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, test_killed_trainer, AT_GREETING, RIG_STATES);
    tcase_add_loop_test(t, test_killed_worker, DIE_IN_BEGIN, DIE_AFTER_COMMIT + 1);
    tcase_add_loop_test(t, test_second_trainer, AT_IDLE, RIG_STATES);
    tcase_add_loop_test(t, test_trainer_behind_strangers, 0, 2);
    tcase_add_test(t, test_listening_refuses);
    suite_add_tcase(s, t);
    t = tcase_create("MPI");
    tcase_set_timeout(t, 120);
    tcase_add_test(t, test_mpi_round);
    tcase_add_test(t, test_mpi_faults);
    tcase_add_test(t, test_mpi_send_given_up);
    tcase_add_test(t, test_mpi_killed_worker);
    tcase_add_test(t, test_mpi_killed_trainer);
    tcase_add_test(t, test_mpi_default_ends_the_job);
    suite_add_tcase(s, t);
    return s;
}
