/* engine_swap: adapters that change while the engine runs: one stage of weightsync a name, the model's slots behind it, and what
 * becomes of running requests. The calls themselves are those of bitroll.h.
 *
 * Layer: engine. A commit is between two steps, since it is between two polls. */
#ifndef ENGINE_SWAP_H
#define ENGINE_SWAP_H

#include "br_loaded.h"

typedef struct engine_swap engine_swap;

void engine_swap_room(br_loaded *loaded); /* adds to loaded->room what open will take */
/* After the model, and before any request. */
br_status engine_swap_open(br_engine *engine);
void engine_swap_close(br_engine *engine); /* without one a no-op */
void engine_swap_bind_roots(br_engine *engine); /* of the live slots of all names */
/* Commits what was waiting for sequences that have ended by now. */
br_status engine_swap_settle(br_engine *engine);
/* May a request start under this adapter name (-1: base)? BR_E_LIMIT: it drains. */
br_status engine_swap_admit(const br_engine *engine, int32_t name);
int64_t engine_swap_version(const br_engine *engine, int32_t name); /* -1: base, or nothing is swapped here */

#endif
