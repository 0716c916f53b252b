/* Frames over MPI: a message a batch, and one more for a payload that lies outside of it; see tb_mpi.h. Layer: trainer_bridge. */
#include "tb_mpi.h"

#include "br_mem.h"

#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TAG_FRAMES = 7201, TAG_BODY = 7202, EAGER_US = 1000, NAP_MIN_US = 50, NAP_MAX_US = 1000 };

typedef enum phase { NOTHING, FRAMES_COME, BODY_AWAITED, BODY_COMES } phase;

/* All that MPI may still read or write when the connection is closed. */
typedef struct flight {
    struct flight *next; /* of those that are kept */
    MPI_Request in, out[2];
    tb_buffer frames_in;
    tb_frame *coming; /* its payload is a message of its own */
    tb_buffer sent;   /* frames and body: the caller's may be gone when a send that was given up completes after all */
} flight;

typedef struct mpi_end {
    tb_transport t;
    flight *f;
    int peer;
    phase phase;
    int sending;
    _Atomic int64_t moved_us;
    atomic_int nap_us;
} mpi_end;

static flight *kept;

static br_status mpi_fail(int error, const char *doing) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    MPI_Error_string(error, text, &n);
    return br_fail(BR_E_IO, "MPI: %s: %.200s", doing, text);
}

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Where something has moved more will soon. */
static void moved(mpi_end *m) {
    atomic_store(&m->moved_us, now_us());
    atomic_store(&m->nap_us, NAP_MIN_US);
}

static void heard(mpi_end *m) {
    m->t.heard_ms = tb_now_ms();
    moved(m);
}

static void lost(mpi_end *m, int error, const char *doing) {
    (void)mpi_fail(error, doing);
    tb_inbox_end(&m->t, TB_LOST, br_last_error());
}

/* ---- receiving ----------------------------------------------------------------------------------------------------------- */

static void wrong_length(mpi_end *m, int count, uint64_t min, uint64_t max) {
    char text[128];
    if (min == max)
        snprintf(text, sizeof text, "MPI: a message of %d bytes came where %llu were announced", count, (unsigned long long)max);
    else
        snprintf(text, sizeof text, "MPI: frames of %d bytes came in one message: expected %llu to %llu", count, (unsigned long long)min,
                 (unsigned long long)max);
    tb_inbox_end(&m->t, TB_TRUNCATED, text);
}

/* Takes the next message of this tag if one is there and begins to receive it: frames, or the payload that is awaited. A wrong length
 * ends the stream. */
static int begin(mpi_end *m, int tag) {
    const int is_body = tag == TAG_BODY;
    const uint64_t min = is_body ? m->f->coming->n : TB_HEADER_BYTES, max = is_body ? min : TB_BATCH_MAX;
    MPI_Message message;
    MPI_Status status;
    int there = 0, count = 0;
    int error = MPI_Improbe(m->peer, tag, MPI_COMM_WORLD, &there, &message, &status);
    if (error != MPI_SUCCESS) {
        lost(m, error, "probe");
        return 0;
    }
    if (!there)
        return 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    if ((uint64_t)count < min || (uint64_t)count > max) {
        wrong_length(m, count, min, max);
        return 0;
    }
    m->f->frames_in.n = 0;
    void *at = is_body ? m->f->coming->payload : tb_buffer_take(&m->f->frames_in, (size_t)count);
    if (!at) {
        tb_inbox_end(&m->t, TB_FAILED, br_last_error());
        return 0;
    }
    error = MPI_Imrecv(at, count, MPI_BYTE, &message, &m->f->in);
    if (error != MPI_SUCCESS)
        lost(m, error, "receive");
    heard(m);
    return error == MPI_SUCCESS;
}

static int received(mpi_end *m) {
    int done = 0;
    const int error = MPI_Test(&m->f->in, &done, MPI_STATUS_IGNORE);
    if (error != MPI_SUCCESS) {
        lost(m, error, "receive");
        return 0;
    }
    if (done)
        heard(m);
    return done;
}

static void frames_are_in(mpi_end *m) {
    tb_header last;
    m->phase = NOTHING;
    if (tb_inbox_put_batch(&m->t, m->f->frames_in.bytes, m->f->frames_in.n, &last) &&
        (m->f->coming = tb_inbox_frame(&m->t, &last, last.n_payload)))
        m->phase = BODY_AWAITED;
}

static void body_is_in(mpi_end *m) {
    tb_inbox_put(&m->t, m->f->coming);
    m->f->coming = NULL;
    m->phase = NOTHING;
}

static void mpi_pump(tb_transport *t) {
    mpi_end *m = (mpi_end *)t;
    while (tb_inbox_has_room(t)) {
        switch (m->phase) {
        case NOTHING:
            if (!begin(m, TAG_FRAMES))
                return;
            m->phase = FRAMES_COME;
            break;
        case FRAMES_COME:
            if (!received(m))
                return;
            frames_are_in(m);
            break;
        case BODY_AWAITED:
            if (!begin(m, TAG_BODY))
                return;
            m->phase = BODY_COMES;
            break;
        case BODY_COMES:
            if (!received(m))
                return;
            body_is_in(m);
            break;
        }
    }
}

/* ---- sending ------------------------------------------------------------------------------------------------------------- */

static br_status mpi_push(tb_transport *t, const tb_batch *batch, int *done) {
    mpi_end *m = (mpi_end *)t;
    flight *f = m->f;
    int error = MPI_SUCCESS;
    if (!m->sending) {
        f->sent.n = 0;
        tb_buffer_add(&f->sent, batch->frames, batch->n_frames);
        tb_buffer_add(&f->sent, batch->body, batch->n_body);
        BR_TRY(f->sent.failed);
        error = MPI_Isend(f->sent.bytes, (int)batch->n_frames, MPI_BYTE, m->peer, TAG_FRAMES, MPI_COMM_WORLD, &f->out[0]);
        if (error == MPI_SUCCESS && batch->n_body)
            error = MPI_Isend(f->sent.bytes + batch->n_frames, (int)batch->n_body, MPI_BYTE, m->peer, TAG_BODY, MPI_COMM_WORLD, &f->out[1]);
        if (error != MPI_SUCCESS)
            return mpi_fail(error, "send");
        m->sending = 1;
        moved(m);
    }
    error = MPI_Testall(2, f->out, done, MPI_STATUSES_IGNORE);
    if (error != MPI_SUCCESS)
        return mpi_fail(error, "send");
    if (*done) {
        m->sending = 0;
        t->n_moved += batch->n_frames + batch->n_body;
        moved(m);
    }
    return BR_OK;
}

static void mpi_wait(tb_transport *t, int64_t ms, int to_send) {
    mpi_end *m = (mpi_end *)t;
    const int us = atomic_load(&m->nap_us);
    const struct timespec nap = {0, (ms < 1 ? NAP_MIN_US : us) * 1000L};
    (void)to_send;
    if (now_us() - atomic_load(&m->moved_us) < EAGER_US) {
        sched_yield();
        return;
    }
    nanosleep(&nap, NULL);
    atomic_store(&m->nap_us, us * 2 < NAP_MAX_US ? us * 2 : NAP_MAX_US);
}

static int is_active(MPI_Request *request) {
    int done = 0;
    return *request != MPI_REQUEST_NULL && (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done);
}

/* What is not complete is never freed: no call of MPI takes a message back for sure (a receive that was matched cannot be cancelled at all),
 * so that MPI may read or write there as long as the process lives. */
static void mpi_close(tb_transport *t) {
    flight *f = ((mpi_end *)t)->f;
    const int in = is_active(&f->in), frames = is_active(&f->out[0]), body = is_active(&f->out[1]);
    if (in || frames || body) {
        f->next = kept;
        kept = f;
        return;
    }
    tb_frame_free(f->coming);
    tb_buffer_close(&f->frames_in);
    tb_buffer_close(&f->sent);
    br_mem_free(f);
}

static const tb_transport_ops mpi_ops = {"MPI", mpi_pump, mpi_push, mpi_wait, mpi_close};

br_status tb_mpi_open(int peer, tb_transport **out) {
    int rank, n_rank;
    mpi_end *m;
    *out = NULL;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_rank);
    if (peer < 0 || peer >= n_rank || peer == rank)
        return br_fail(BR_E_ARG, "MPI: rank %d of %d cannot talk to rank %d", rank, n_rank, peer);
    BR_TRY(br_mem_alloc((void **)&m, sizeof *m, "an MPI connection"));
    br_status status = br_mem_alloc((void **)&m->f, sizeof *m->f, "an MPI connection");
    if (status != BR_OK) {
        br_mem_free(m);
        return status;
    }
    tb_transport_init(&m->t, &mpi_ops);
    m->peer = peer;
    m->f->in = m->f->out[0] = m->f->out[1] = MPI_REQUEST_NULL;
    atomic_store(&m->nap_us, NAP_MIN_US);
    *out = &m->t;
    return BR_OK;
}

/* ---- the job ------------------------------------------------------------------------------------------------------------- */

br_status tb_mpi_start(int *argc, char ***argv, int *rank, int *n_rank) {
    int provided;
    int error = MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
    if (error != MPI_SUCCESS)
        return br_fail(BR_E_IO, "MPI: start failed (%d)", error);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, n_rank);
    if (provided < MPI_THREAD_SERIALIZED)
        return br_fail(BR_E_UNSUPPORTED, "MPI: thread level %d, the bridge needs MPI_THREAD_SERIALIZED (%d)", provided, MPI_THREAD_SERIALIZED);
    return BR_OK;
}

void tb_mpi_version(char *out, size_t n) {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(text, &length);
    snprintf(out, n, "%.*s", (int)strcspn(text, ",\n"), text);
}

static volatile sig_atomic_t status_late;

static void leave(int signal_number) {
    (void)signal_number;
    _exit(status_late);
}

void tb_mpi_finish(int clean, int64_t wait_ms, int status) {
    fflush(NULL);
    if (!clean)
        _exit(status);
    status_late = status;
    signal(SIGALRM, leave);
    alarm((unsigned)((wait_ms + 999) / 1000));
    MPI_Finalize();
    alarm(0);
}
