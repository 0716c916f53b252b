/* job_bench_floor: the least time a step of a model can take on the card, from bytes and operations alone.
 *
 * Layer: bench. Each kernel's floor is the larger of its bytes over the copy bandwidth and its operations over the matrix rate,
 * both measured in the same run; a step's is their sum. Weights are read once a step, activations are counted where they
 * matter, launches take no time, routing is uniform. */
#ifndef JOB_BENCH_FLOOR_H
#define JOB_BENCH_FLOOR_H

#include "br_config.h"
#include "job_bench.h"

/* Microseconds; 0 where a rate is not known. Decode: n sequences at `context` tokens, of which lora_rows[i] use adapter i of rank 32. Score:
 * one sequence of n tokens. */
double bench_floor_decode(const bench *b, const br_config *config, int32_t n, int32_t context, const int32_t *lora_rows, int32_t n_lora);
double bench_floor_score(const bench *b, const br_config *config, int32_t n, int with_lora);

#endif
