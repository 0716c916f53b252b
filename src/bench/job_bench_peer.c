/* The child process that times library calls; see job_bench_peer.h.
 *
 * One socket carries both directions: writing to a child that is gone is then an error and no signal. */
#include "job_bench_peer.h"

#include "br_mem.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { PATIENCE_MS = 300000 }; /* 59 GB of random weights take a while */

struct bench_peer {
    pid_t pid;
    int fd;
    size_t used; /* bytes behind the last line that was read */
    char name[128];
    char line[BENCH_PEER_LINE_BYTES];
};

static br_status spawn(const char *command, int fd, pid_t *pid) {
    posix_spawn_file_actions_t actions;
    char *const argv[] = {(char *)"sh", (char *)"-c", (char *)(uintptr_t)command, NULL};
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, fd, STDOUT_FILENO);
    const int error = posix_spawn(pid, "/bin/sh", &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    return error ? br_fail(BR_E_NOT_FOUND, "cannot start: %s", strerror(error)) : BR_OK;
}

static br_status send_line(bench_peer *peer, const char *text) {
    size_t n = strlen(text);
    for (; n > 0;) {
        const ssize_t done = send(peer->fd, text, n, MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return br_fail(BR_E_IO, "the peer takes no more requests: %s", strerror(errno));
        text += done;
        n -= (size_t)done;
    }
    return BR_OK;
}

/* More of the child's output behind what is there; *n 0 when it has ended. */
static br_status receive(bench_peer *peer, ssize_t *n) {
    struct pollfd wait = {.fd = peer->fd, .events = POLLIN};
    int ready;
    do
        ready = poll(&wait, 1, PATIENCE_MS);
    while (ready < 0 && errno == EINTR);
    if (ready <= 0)
        return br_fail(BR_E_IO, "the peer did not answer within %d s", PATIENCE_MS / 1000);
    do
        *n = recv(peer->fd, peer->line + peer->used, sizeof peer->line - 1 - peer->used, 0);
    while (*n < 0 && errno == EINTR);
    return *n < 0 ? br_fail(BR_E_IO, "the peer's answer cannot be read: %s", strerror(errno)) : BR_OK;
}

/* The next line, without its end, into out; what lies behind it stays for the next call. */
static br_status read_line(bench_peer *peer, char *out, size_t out_bytes) {
    for (;;) {
        peer->line[peer->used] = 0;
        char *end = strchr(peer->line, '\n');
        if (end) {
            const size_t n = (size_t)(end - peer->line), keep = n < out_bytes ? n : out_bytes - 1;
            memcpy(out, peer->line, keep);
            out[keep] = 0;
            memmove(peer->line, end + 1, peer->used - n - 1);
            peer->used -= n + 1;
            return BR_OK;
        }
        ssize_t n = 0;
        if (peer->used == sizeof peer->line - 1)
            return br_fail(BR_E_IO, "the peer's answer has no end");
        BR_TRY(receive(peer, &n));
        if (n == 0)
            return br_fail(BR_E_IO, "the peer has ended");
        peer->used += (size_t)n;
    }
}

br_status bench_peer_open(const char *command, bench_peer **out) {
    br_status status;
    int pair[2];
    char hello[256];
    *out = NULL;
    bench_peer *peer = NULL;
    BR_TRY(br_mem_alloc((void **)&peer, sizeof *peer, "the peer"));
    peer->fd = -1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        status = br_fail(BR_E_IO, "no socket for the peer: %s", strerror(errno));
        goto fail;
    }
    peer->fd = pair[0];
    status = spawn(command, pair[1], &peer->pid);
    close(pair[1]);
    if (status != BR_OK)
        goto fail;
    BR_TRY_GOTO(read_line(peer, hello, sizeof hello), fail);
    if (strncmp(hello, "ready ", 6) != 0) {
        status = br_fail(BR_E_NOT_FOUND, "expected 'ready NAME', found '%.100s'", hello);
        goto fail;
    }
    snprintf(peer->name, sizeof peer->name, "%.*s", (int)sizeof peer->name - 1, hello + 6);
    *out = peer;
    return BR_OK;
fail:
    bench_peer_close(peer);
    return br_fail_context(BR_E_NOT_FOUND, "peer '%s'", command);
}

void bench_peer_close(bench_peer *peer) {
    if (!peer)
        return;
    if (peer->fd >= 0)
        close(peer->fd);
    if (peer->pid > 0) {
        kill(peer->pid, SIGTERM); /* the end of its input ends it too, unless it hangs */
        waitpid(peer->pid, NULL, 0);
    }
    br_mem_free(peer);
}

const char *bench_peer_name(const bench_peer *peer) {
    return peer->name;
}

br_status bench_peer_time(bench_peer *peer, const char *request, double *microseconds) {
    char answer[512], *end;
    *microseconds = 0;
    BR_TRY(send_line(peer, request));
    BR_TRY(send_line(peer, "\n"));
    BR_TRY(read_line(peer, answer, sizeof answer));
    const double x = strtod(answer, &end);
    if (end == answer || *end || !(x > 0))
        return br_fail(BR_E_UNSUPPORTED, "the peer answers '%.200s'", answer);
    *microseconds = x;
    return BR_OK;
}
