/* bi_philox: Philox4x32-10, the counter-based generator behind every draw.      Contract: N-RNG
 *
 * Layer: numeric. A draw is a function of key and counter alone, so a sample is as batch-invariant as its logits. */
#ifndef BI_PHILOX_H
#define BI_PHILOX_H

#include "bi_bits.h"
#include "bi_contract.h"

typedef struct bi_philox4 {
    uint32_t word[4];
} bi_philox4;

static inline BI_HD bi_philox4 bi_philox(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    for (int round = 0; round < BI_PHILOX_ROUNDS; round++) {
        uint64_t left = (uint64_t)BI_PHILOX_MUL0 * c0, right = (uint64_t)BI_PHILOX_MUL1 * c2;
        c0 = (uint32_t)(right >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)right;
        c2 = (uint32_t)(left >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)left;
        key0 += BI_PHILOX_WEYL0;
        key1 += BI_PHILOX_WEYL1;
    }
    bi_philox4 out = {{c0, c1, c2, c3}};
    return out;
}

/* u of N-RNG: out0 + 2^32 * out1 at (seed; position, sample * BI_RNG_PURPOSES + purpose, uid_hash). */
static inline BI_HD uint64_t bi_rng_u64(uint64_t seed, uint32_t position, uint32_t sample, uint32_t purpose,
                                        uint64_t uid_hash) {
    bi_philox4 out = bi_philox((uint32_t)seed, (uint32_t)(seed >> 32), position, sample * BI_RNG_PURPOSES + purpose,
                               (uint32_t)uid_hash, (uint32_t)(uid_hash >> 32));
    return out.word[0] | (uint64_t)out.word[1] << 32;
}

#endif
