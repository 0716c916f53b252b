/* slow_block: the block of 16, the chain and R, written from CONTRACT.md alone: the second opinion of the
 * suites. Shares no code with kernels_batch_invariant. And the families of inputs that told wrong models from right ones. */
#ifndef SLOW_BLOCK_H
#define SLOW_BLOCK_H

#include <stddef.h>
#include <stdint.h>

uint32_t slow_bits(float x);
float slow_float(uint32_t bits);
float slow_widen(uint16_t x);
uint16_t slow_to_bf16(float x); /* R */

/* block(c, a, b) of N-MMA; a[k * a_stride], b[k * b_stride], k = 0..15. */
float slow_block16(float c, const uint16_t *a, ptrdiff_t a_stride, const uint16_t *b, ptrdiff_t b_stride);
/* The chain of N-CHAIN over n_k products, continued from c; the last block is padded with zeros. */
float slow_chain(float c, const uint16_t *a, ptrdiff_t a_stride, const uint16_t *b, ptrdiff_t b_stride, int n_k);

enum { SLOW_FAMILY_COUNT = 19 };
const char *slow_family_name(int family);
/* n_k pairs of operands and an accumulator of one family, from the seed alone. n_k a multiple of 16. */
void slow_family(int family, uint64_t seed, int n_k, uint16_t *a, uint16_t *b, float *c);

#endif
