/* Frames over MPI: two messages a frame, header and payload; see tb_mpi.h. Layer: trainer_bridge. */
#include "tb_mpi.h"

#include "br_mem.h"

#include <mpi.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TAG_HEAD = 7201, TAG_BODY = 7202, NAP_MIN_US = 50, NAP_MAX_US = 1000 };

typedef enum phase { NOTHING, HEAD_COMES, BODY_AWAITED, BODY_COMES } phase;

/* All that MPI may still read or write when the connection is closed. */
typedef struct flight {
    struct flight *next; /* of those that are kept */
    MPI_Request in, out[2];
    tb_frame *coming;
    tb_buffer body; /* of the frame being sent: the caller's may be gone when a send that was given up completes after all */
    unsigned char head_in[TB_HEADER_BYTES], head_out[TB_HEADER_BYTES];
} flight;

typedef struct mpi_end {
    tb_transport t;
    flight *f;
    int peer;
    phase phase;
    int sending;
    atomic_int nap_us;
} mpi_end;

static flight *kept;

static br_status mpi_fail(int error, const char *doing) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    MPI_Error_string(error, text, &n);
    return br_fail(BR_E_IO, "MPI: %s: %.200s", doing, text);
}

static void moved(mpi_end *m) {
    m->t.heard_ms = tb_now_ms();
    atomic_store(&m->nap_us, NAP_MIN_US);
}

static void lost(mpi_end *m, int error, const char *doing) {
    (void)mpi_fail(error, doing);
    tb_inbox_end(&m->t, TB_LOST, br_last_error());
}

/* ---- receiving ----------------------------------------------------------------------------------------------------------- */

/* Takes the next message of this tag if one is there and begins to receive it into `at`. A wrong length ends the stream. */
static int begin(mpi_end *m, int tag, void *at, uint64_t n) {
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
    if ((uint64_t)count != n) {
        char text[128];
        snprintf(text, sizeof text, "MPI: a message of %d bytes came where %llu were announced", count, (unsigned long long)n);
        tb_inbox_end(&m->t, TB_TRUNCATED, text);
        return 0;
    }
    error = MPI_Imrecv(at, count, MPI_BYTE, &message, &m->f->in);
    if (error != MPI_SUCCESS)
        lost(m, error, "receive");
    moved(m);
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
        moved(m);
    return done;
}

static void deliver(mpi_end *m) {
    tb_inbox_put(&m->t, m->f->coming);
    m->f->coming = NULL;
    m->phase = NOTHING;
}

static int head_is_in(mpi_end *m) {
    tb_header header;
    const tb_code code = tb_header_read(m->f->head_in, sizeof m->f->head_in, &header);
    if (code != TB_OK)
        tb_inbox_end(&m->t, code, br_last_error());
    else
        m->f->coming = tb_inbox_frame(&m->t, &header, header.n_payload);
    m->phase = BODY_AWAITED;
    if (m->f->coming && m->f->coming->n == 0)
        deliver(m);
    return !m->t.ended;
}

static void mpi_pump(tb_transport *t) {
    mpi_end *m = (mpi_end *)t;
    while (tb_inbox_has_room(t)) {
        switch (m->phase) {
        case NOTHING:
            if (!begin(m, TAG_HEAD, m->f->head_in, TB_HEADER_BYTES))
                return;
            m->phase = HEAD_COMES;
            break;
        case HEAD_COMES:
            if (!received(m) || !head_is_in(m))
                return;
            break;
        case BODY_AWAITED:
            if (!begin(m, TAG_BODY, m->f->coming->payload, m->f->coming->n))
                return;
            m->phase = BODY_COMES;
            break;
        case BODY_COMES:
            if (!received(m))
                return;
            deliver(m);
            break;
        }
    }
}

/* ---- sending ------------------------------------------------------------------------------------------------------------- */

static br_status mpi_push(tb_transport *t, const unsigned char *head, const void *body, uint64_t n_body, int *done) {
    mpi_end *m = (mpi_end *)t;
    flight *f = m->f;
    int error = MPI_SUCCESS;
    if (!m->sending) {
        memcpy(f->head_out, head, sizeof f->head_out);
        f->body.n = 0;
        tb_buffer_add(&f->body, body, n_body);
        BR_TRY(f->body.failed);
        error = MPI_Isend(f->head_out, TB_HEADER_BYTES, MPI_BYTE, m->peer, TAG_HEAD, MPI_COMM_WORLD, &f->out[0]);
        if (error == MPI_SUCCESS && n_body)
            error = MPI_Isend(f->body.bytes, (int)n_body, MPI_BYTE, m->peer, TAG_BODY, MPI_COMM_WORLD, &f->out[1]);
        if (error != MPI_SUCCESS)
            return mpi_fail(error, "send");
        m->sending = 1;
    }
    error = MPI_Testall(2, f->out, done, MPI_STATUSES_IGNORE);
    if (error != MPI_SUCCESS)
        return mpi_fail(error, "send");
    if (*done) {
        m->sending = 0;
        t->n_moved += TB_HEADER_BYTES + n_body;
        atomic_store(&m->nap_us, NAP_MIN_US);
    }
    return BR_OK;
}

static void mpi_wait(tb_transport *t, int64_t ms, int to_send) {
    mpi_end *m = (mpi_end *)t;
    const int us = atomic_load(&m->nap_us);
    const struct timespec nap = {0, (ms < 1 ? NAP_MIN_US : us) * 1000L};
    (void)to_send;
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
    const int in = is_active(&f->in), head = is_active(&f->out[0]), body = is_active(&f->out[1]);
    if (in || head || body) {
        f->next = kept;
        kept = f;
        return;
    }
    tb_frame_free(f->coming);
    tb_buffer_close(&f->body);
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

static void leave(int signal_number) {
    (void)signal_number;
    _exit(0);
}

void tb_mpi_finish(int clean, int64_t wait_ms) {
    fflush(NULL);
    if (!clean)
        _exit(0);
    signal(SIGALRM, leave);
    alarm((unsigned)((wait_ms + 999) / 1000));
    MPI_Finalize();
    alarm(0);
}
