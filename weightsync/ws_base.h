/* ws_base: full weights come in: every tensor of the checkpoint, into host memory, checked whole. What becomes of them is the engine's.
 *
 * Layer: weightsync; includes base, weights. A state machine over bytes, as ws_stage is for adapters:
 *
 *              idle      receiving              prepared
 *   begin      checked   refused                refused
 *   chunk      refused   checked                refused
 *   end        refused   checked                refused
 *   weights    refused   refused                the staged table
 *   drop       nothing   idle                   idle
 *
 * A refused chunk or end in `receiving` leads to idle, every other refusal leaves the state as it is. */
#ifndef WS_BASE_H
#define WS_BASE_H

#include "bitroll.h"
#include "br_weights.h"

typedef struct ws_base ws_base;

br_status ws_base_open(const br_weights *like, ws_base **out); /* like: what the tensors are called, and their shapes */
void ws_base_close(ws_base *base);                             /* NULL is a no-op */
const br_weights *ws_base_table(const ws_base *base);
br_status ws_base_find(const ws_base *base, const char *name, int64_t *tensor); /* BR_E_NOT_FOUND */

br_status ws_base_begin(ws_base *base); /* takes the memory: BR_E_NOMEM */
/* Tensors in any order, each in chunks of rising offset without gaps. BR_E_FORMAT. */
br_status ws_base_chunk(ws_base *base, int64_t tensor, uint64_t offset, const void *bytes, size_t n);
br_status ws_base_end(ws_base *base, br_digest expected); /* BR_E_FORMAT: not whole, NaN or Inf; BR_E_MISMATCH */
br_status ws_base_weights(const ws_base *base, const br_weights **out, br_digest *digest); /* valid until drop or the next begin */
void ws_base_drop(ws_base *base); /* gives the memory back */

#endif
