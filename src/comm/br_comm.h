/* br_comm: how ranks exchange rows. It moves bytes and never adds (P-3).
 *
 * Layer: comm; includes base. The model cuts every linear map along its outputs and asks for the whole row here before the
 * next map needs it; each expert hands its vector to the token's owner. With one rank each rank already holds every byte,
 * so both calls return at once. */
#ifndef BR_COMM_H
#define BR_COMM_H

#include "br_status.h"

typedef struct br_comm {
    int32_t rank, n_rank; /* 0 of 1 */
} br_comm;

/* rows (n_row, row_bytes): on return every rank holds every rank's columns. */
static inline br_status br_comm_gather_columns(const br_comm *comm, void *rows, int64_t n_row, int64_t row_bytes) {
    (void)rows, (void)n_row, (void)row_bytes;
    BR_ASSERT(comm->n_rank == 1);
    return BR_OK;
}

/* rows (n_row, n_slot, slot_bytes), one slot a chosen expert: on return the owner of a row holds all its slots. */
static inline br_status br_comm_return_slots(const br_comm *comm, void *rows, int64_t n_row, int64_t n_slot, int64_t slot_bytes) {
    (void)rows, (void)n_row, (void)n_slot, (void)slot_bytes;
    BR_ASSERT(comm->n_rank == 1);
    return BR_OK;
}

#endif
