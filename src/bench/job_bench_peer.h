/* job_bench_peer: a child process that times library calls on the same GPU, in turn with ours.
 *
 * Layer: bench; knows no op. One request a line, one answer a line. The child first says `ready NAME`. An answer is a number of
 * microseconds for one call, or `error SENTENCE`. The child keeps the operands of its last request, so that asking again
 * times again. */
#ifndef JOB_BENCH_PEER_H
#define JOB_BENCH_PEER_H

#include "br_status.h"

typedef struct bench_peer bench_peer;

enum { BENCH_PEER_LINE_BYTES = 1 << 16 };

/* Runs `sh -c command`. BR_E_NOT_FOUND: it ended, or did not say that it is ready. */
br_status bench_peer_open(const char *command, bench_peer **out);
void bench_peer_close(bench_peer *peer); /* NULL is a no-op */
const char *bench_peer_name(const bench_peer *peer); /* what it calls itself */
/* BR_E_UNSUPPORTED: it cannot; BR_E_IO: it is gone. */
br_status bench_peer_time(bench_peer *peer, const char *request, double *microseconds);

#endif
