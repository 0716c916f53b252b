/* One rank of the bridge's MPI tests; test_tb_process runs two of it under mpirun: `tb_mpi_peer faults | round | kill-worker |
 * kill-trainer | give-up`. Rank 0 is the worker, rank 1 the trainer; what is made up is tb_rig's. `tb_mpi_peer engine DIR` is the trainer of a
 * bitroll-worker at rank 0: what comes must be what an engine of its own gives. Rank 1 prints `ok ...` when all is as it should. */
#include "br_file.h"
#include "tb_faults.h"
#include "tb_mpi.h"

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { TAG_OUTCOME = 99, WORKER = 0, TRAINER = 1 };

static int rank;

/* ---- the table of faults ------------------------------------------------------------------------------------------------- */

/* What a fault left under way between the ranks would be the next one's first frame. */
static void drain(void) {
    static char bytes[1 << 20];
    MPI_Status status;
    int there = 1;
    MPI_Barrier(MPI_COMM_WORLD);
    for (int quiet = 0; quiet < 20; quiet = there ? 0 : quiet + 1) {
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &there, &status);
        if (there)
            MPI_Recv(bytes, sizeof bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

static int work_fault(void) {
    rig_worker w;
    tb_transport *t;
    if (rig_worker_open(&w) != BR_OK || tb_mpi_open(TRAINER, &t) != BR_OK)
        return 1;
    const rig_outcome outcome = rig_serve(&w, t, 100);
    rig_worker_close(&w);
    MPI_Send(&outcome, sizeof outcome, MPI_BYTE, TRAINER, TAG_OUTCOME, MPI_COMM_WORLD);
    return 0;
}

static int train_fault(const tb_fault *f) {
    rig_outcome outcome;
    tb_transport *t;
    char text[600] = "";
    if (tb_mpi_open(WORKER, &t) != BR_OK)
        return 1;
    const int played = tb_fault_play(f, t, text, sizeof text);
    MPI_Recv(&outcome, sizeof outcome, MPI_BYTE, WORKER, TAG_OUTCOME, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (played && tb_fault_check(f, &outcome, text, sizeof text))
        return 0;
    printf("%s, in %s: %s\n", f->name, rig_state_name[f->state], text);
    return 1;
}

static int faults(void) {
    int n_wrong = 0, n = 0;
    for (int i = 0; i < tb_fault_count; i++) {
        if (!(tb_faults[i].over & OVER_MPI))
            continue;
        n_wrong += rank == WORKER ? work_fault() : train_fault(&tb_faults[i]);
        n++;
        drain();
    }
    if (rank == TRAINER && n_wrong == 0)
        printf("ok %d faults\n", n);
    tb_mpi_finish(1, 10000, 0);
    return n_wrong != 0;
}

/* ---- whole rounds -------------------------------------------------------------------------------------------------------- */

static int serve(fake_death death) {
    rig_worker w;
    tb_transport *t;
    if (rig_worker_open(&w) != BR_OK || tb_mpi_open(TRAINER, &t) != BR_OK)
        return 1;
    w.weights.death = death;
    const rig_outcome outcome = rig_serve(&w, t, 100);
    printf("worker: exit code %d, version %llu, weights in state %u\n", outcome.code, (unsigned long long)outcome.live, outcome.weights);
    rig_worker_close(&w);
    tb_mpi_finish(outcome.code == 0, 10000, 0);
    return 0;
}

static br_status greet(tb_trainer **tr) {
    const tb_trainer_options o = {.me = rig_hello(TB_TRAINER), .beat_ms = 100, .dead_ms = RIG_DEAD_MS, .wait_ms = 20000};
    tb_transport *t;
    BR_TRY(tb_mpi_open(WORKER, &t));
    return tb_trainer_open(t, &o, tr);
}

static br_status expect(tb_trainer *tr, tb_type type, tb_event *e) {
    do
        BR_TRY(tb_trainer_next(tr, 5000, e));
    while (e->header.type == TB_GEN_PART && type != TB_GEN_PART);
    return e->header.type == type ? BR_OK : br_fail(BR_E_FORMAT, "%s came for %s", tb_type_name(e->header.type), tb_type_name(type));
}

static br_status swap(tb_trainer *tr, uint64_t version, int commit) {
    unsigned char bytes[2][FAKE_BYTES];
    tb_buffer raw = {0};
    tb_message m;
    tb_event e;
    fake_manifest(TB_W_ADAPTER, &raw, &m);
    br_status status = tb_trainer_send(tr, TB_MANIFEST, 0, 0, &m);
    tb_buffer_close(&raw);
    BR_TRY(status);
    BR_TRY(expect(tr, TB_MANIFEST_ACK, &e));
    m = (tb_message){.w_begin = {.kind = TB_W_ADAPTER, .manifest = e.message.manifest_ack.hash}};
    BR_TRY(tb_trainer_send(tr, TB_W_BEGIN, version, 0, &m));
    fake_version(version, bytes);
    for (uint64_t i = 0; i < 2; i++)
        BR_TRY(tb_trainer_send_chunk(tr, version, i, 0, bytes[i], FAKE_BYTES));
    m = (tb_message){.w_digest = {fake_digest(bytes)}};
    BR_TRY(tb_trainer_send(tr, TB_W_END, version, 0, &m));
    BR_TRY(expect(tr, TB_W_PREPARED, &e));
    if (!commit)
        return BR_OK;
    BR_TRY(tb_trainer_send(tr, TB_W_COMMIT, version, 0, &m));
    BR_TRY(expect(tr, TB_W_COMMITTED, &e));
    return br_digest_equal(e.message.w_committed.digest, fake_digest(bytes)) ? BR_OK : br_fail(BR_E_MISMATCH, "another digest is live");
}

static br_status generate(tb_trainer *tr, uint64_t id) {
    const uint32_t prompt[1] = {1}, n = 50;
    tb_message m = {.gen_req = {.flags = TB_CERTIFY, .max_new = n, .uid = tb_text_of("mpi"), .prompt = {prompt, 1}}};
    tb_event e;
    BR_TRY(tb_trainer_send(tr, TB_GEN_REQ, 0, id, &m));
    BR_TRY(expect(tr, TB_GEN_DONE, &e));
    m = (tb_message){.gen_release = {e.message.gen_done.digest}};
    BR_TRY(tb_trainer_send(tr, TB_GEN_RELEASE, 0, id, &m));
    BR_TRY(expect(tr, TB_GEN_HELD, &e));
    for (uint32_t i = 0; i < n; i++)
        if (e.message.gen_held.logprob.p[i] != fake_logprob(fake_uid("mpi"), i))
            return br_fail(BR_E_MISMATCH, "log-prob %u differs", i);
    return e.message.gen_held.equal && e.message.gen_held.n_tok == n ? BR_OK : br_fail(BR_E_MISMATCH, "another certificate");
}

/* A chunk of 64 MiB, which no buffer of MPI holds; refused, since its tensor is none. */
static br_status big_chunk(tb_trainer *tr) {
    const uint64_t n = 64 << 20;
    unsigned char *bytes;
    tb_event e;
    BR_TRY(br_mem_alloc((void **)&bytes, n, "a chunk"));
    br_status status = tb_trainer_send_chunk(tr, 9, 0, 0, bytes, n);
    br_mem_free(bytes);
    BR_TRY(status);
    return expect(tr, TB_W_NACK, &e);
}

static br_status whole_round(void) {
    tb_trainer *tr;
    br_status status = BR_OK;
    BR_TRY(greet(&tr));
    for (uint64_t v = 1; v <= 5 && status == BR_OK; v++) {
        status = swap(tr, v, 1);
        status = status == BR_OK ? generate(tr, v) : status;
    }
    status = status == BR_OK ? big_chunk(tr) : status;
    tb_trainer_close(tr, 1);
    return status;
}

static int train_round(void) {
    char version[128];
    tb_mpi_version(version, sizeof version);
    const br_status status = whole_round();
    printf("%s trainer, %s, rank %d, pid %d: %s\n", status == BR_OK ? "ok" : "failed", version, rank, (int)getpid(),
           status == BR_OK ? "5 versions" : br_last_error());
    tb_mpi_finish(status == BR_OK, 10000, 0);
    return status != BR_OK;
}

/* The worker kills itself in W_END: MPI tells nothing, the deadline does. */
static int train_killed_worker(void) {
    tb_trainer *tr;
    br_status status = greet(&tr);
    const int64_t begin = tb_now_ms();
    if (status == BR_OK) {
        status = swap(tr, 1, 1);
        const int64_t ms = tb_now_ms() - begin;
        const int is_silent = status == BR_E_IO && tb_trainer_end(tr) == TB_SILENT;
        printf("%s silent after %lld ms: %s\n", is_silent && ms >= RIG_DEAD_MS && ms < RIG_DEAD_MS + 1000 ? "ok" : "failed", (long long)ms,
               br_last_error());
        tb_trainer_close(tr, 0);
    }
    tb_mpi_finish(0, 0, 0);
    return 1;
}

static int train_and_die(void) {
    tb_trainer *tr;
    if (greet(&tr) == BR_OK && swap(tr, 1, 1) == BR_OK && swap(tr, 2, 0) == BR_OK)
        raise(SIGKILL);
    printf("failed: %s\n", br_last_error());
    return 1;
}

/* ---- a send that is given up ----------------------------------------------------------------------------------------------- */

enum { GIVEN_UP_BYTES = 8 << 20 };

/* Nobody receives, so the sender gives up, writes over its bytes, frees them and closes. What the receiver takes in later is whole. */
static br_status give_up(void) {
    tb_header h = {.major = TB_MAJOR, .type = TB_W_CHUNK, .session = 1};
    unsigned char head[TB_HEADER_BYTES], *bytes;
    tb_transport *t;
    BR_TRY(br_mem_alloc((void **)&bytes, GIVEN_UP_BYTES, "a chunk"));
    for (size_t i = 0; i < GIVEN_UP_BYTES; i++)
        bytes[i] = (unsigned char)(i * 7 >> 8);
    tb_header_seal(&h, bytes, GIVEN_UP_BYTES, head);
    br_status status = tb_mpi_open(WORKER, &t);
    if (status == BR_OK) {
        status = tb_transport_send(t, &(tb_batch){head, sizeof head, bytes, GIVEN_UP_BYTES}, 200);
        tb_transport_close(t);
    }
    memset(bytes, 0xee, GIVEN_UP_BYTES);
    br_mem_free(bytes);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    return status == BR_E_IO ? BR_OK : br_fail(BR_E_MISMATCH, "the send ended with status %d", (int)status);
}

static br_status take_given_up(void) {
    tb_transport *t;
    MPI_Barrier(MPI_COMM_WORLD);
    BR_TRY(tb_mpi_open(TRAINER, &t));
    tb_transport_greeted(t);
    tb_frame *frame = tb_transport_receive(t, 5000);
    const int is_whole = frame && frame->fault == TB_OK && tb_payload_check(&frame->header, frame->payload, frame->n) == TB_OK;
    tb_frame_free(frame);
    tb_transport_close(t);
    MPI_Barrier(MPI_COMM_WORLD);
    return is_whole ? BR_OK : br_fail(BR_E_MISMATCH, "the frame is not what was sent");
}

static int given_up(void) {
    const br_status status = rank == WORKER ? take_given_up() : give_up();
    printf("%s %s\n", status != BR_OK ? "failed" : rank == WORKER ? "whole" : "given up", status == BR_OK ? "" : br_last_error());
    tb_mpi_finish(1, 10000, 0);
    return status != BR_OK;
}

/* ---- a real engine at the other end ---------------------------------------------------------------------------------------- */

enum { N_NEW = 12 };

static br_status generate_here(br_engine *engine, const int32_t *prompt, int32_t n_prompt, br_token *out) {
    br_request r = {.uid = "here", .prompt = prompt, .n_prompt = n_prompt, .seed = 7, .sampling = br_sampling_default()};
    uint64_t id;
    int32_t n = 0, done = 0;
    r.sampling.max_new = N_NEW;
    r.sampling.ignore_eos = 1;
    BR_TRY(br_submit(engine, &r, &id));
    for (int32_t got; !done; n += got)
        BR_TRY(br_poll(engine, out + n, N_NEW - n, &got, &done));
    return n == N_NEW ? BR_OK : br_fail(BR_E_MISMATCH, "%d tokens", n);
}

static br_status compare_engine(tb_trainer *tr, br_engine *engine) {
    const int32_t prompt[3] = {5, 6, 7};
    br_token here[N_NEW];
    const float one = 1;
    const double all = 1;
    tb_gen_req g = {.seed = 7, .max_new = N_NEW, .ignore_eos = 1, .uid = tb_text_of("here"), .prompt = {(const uint32_t *)prompt, 3}};
    tb_event e;
    uint32_t n = 0;
    memcpy(&g.temperature, &one, sizeof one);
    memcpy(&g.top_p, &all, sizeof all);
    BR_TRY(generate_here(engine, prompt, 3, here));
    BR_TRY(tb_trainer_send(tr, TB_GEN_REQ, 0, 1, &(tb_message){.gen_req = g}));
    while (n < N_NEW) {
        BR_TRY(expect(tr, TB_GEN_PART, &e));
        for (uint32_t i = 0; i < e.message.gen_part.token.n; i++, n++)
            if (e.message.gen_part.token.p[i] != (uint32_t)here[n].token || e.message.gen_part.logprob.p[i] != here[n].logprob)
                return br_fail(BR_E_MISMATCH, "token %u differs", n);
    }
    return expect(tr, TB_GEN_DONE, &e);
}

static br_status with_engine(const char *dir) {
    const br_engine_options eo = {.model_dir = dir, .backend = "oracle", .n_thread = 1};
    tb_trainer_options o = {.me = {.abi = BR_ABI_VERSION, .contract = br_contract_digest()}, .wait_ms = 30000};
    char config[512];
    br_engine *engine;
    tb_transport *t;
    tb_trainer *tr;
    br_map map;
    BR_TRY(br_engine_open(&eo, &engine));
    snprintf(config, sizeof config, "%s/config.json", dir);
    BR_TRY(br_file_map(config, &map));
    o.me.base = br_engine_weights_digest(engine);
    o.me.config = br_hash_bytes(map.bytes, map.n);
    br_file_unmap(&map);
    BR_TRY(tb_mpi_open(WORKER, &t));
    BR_TRY(tb_trainer_open(t, &o, &tr));
    const br_status status = compare_engine(tr, engine);
    tb_trainer_close(tr, status == BR_OK);
    br_engine_close(engine);
    return status;
}

static int train_engine(const char *dir) {
    const br_status status = with_engine(dir);
    printf("%s engine over MPI: %s\n", status == BR_OK ? "ok" : "failed", status == BR_OK ? "the same bits" : br_last_error());
    tb_mpi_finish(status == BR_OK, 10000, 0);
    return status != BR_OK;
}

int main(int argc, char **argv) {
    int n_rank;
    const char *what = argc > 1 ? argv[1] : "";
    if (tb_mpi_start(&argc, &argv, &rank, &n_rank) != BR_OK || n_rank != 2) {
        fprintf(stderr, "tb_mpi_peer: %s; two ranks are needed\n", br_last_error());
        return 1;
    }
    if (strcmp(what, "faults") == 0)
        return faults();
    if (strcmp(what, "give-up") == 0)
        return given_up();
    if (strcmp(what, "engine") == 0)
        return train_engine(argc > 2 ? argv[2] : "");
    if (rank == WORKER)
        return serve(strcmp(what, "kill-worker") == 0 ? DIE_IN_END : DIE_NEVER);
    if (strcmp(what, "round") == 0)
        return train_round();
    return strcmp(what, "kill-worker") == 0 ? train_killed_worker() : train_and_die();
}
