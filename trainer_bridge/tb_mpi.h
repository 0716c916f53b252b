/* tb_mpi: frames between two ranks of one MPI job. Layer: trainer_bridge; the only folder that knows MPI.
 *
 * Linked into bitroll-worker, its test and the trainer's bridge library, never into libbitroll. After tb_mpi_start no MPI call of ours
 * blocks: receives are matched probes, everything is tested in a loop that yields the processor for 1 ms after anything has moved and
 * naps from then on, 50 us to 1 ms. Deadlines are those of tb_transport. MPI says nothing when a peer dies: silence is found by
 * tb_channel's heartbeat. */
#ifndef TB_MPI_H
#define TB_MPI_H

#include "tb_transport.h"

#ifdef __GNUC__
#pragma GCC visibility push(default) /* for the trainer's bridge library */
#endif

/* MPI_Init_thread with MPI_THREAD_SERIALIZED, the least that two threads under one lock need. BR_E_UNSUPPORTED: less is provided.
 * BR_E_IO: MPI failed. */
br_status tb_mpi_start(int *argc, char ***argv, int *rank, int *n_rank);
void tb_mpi_version(char *out, size_t n); /* library, one line */
/* At most one connection a pair of ranks. BR_E_ARG: no such rank, or this one. */
br_status tb_mpi_open(int peer, tb_transport **out);
/* clean 1: both sides know that it is over, MPI_Finalize is called, and left to itself after wait_ms by ending the process with this
 * status. clean 0: the peer is lost; MPI_Finalize would wait for it, so this ends the process. Status 0 is to mpirun no failure. */
void tb_mpi_finish(int clean, int64_t wait_ms, int status);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#endif
