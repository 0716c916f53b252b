/* bi_contract: every constant of CONTRACT.md that can move a bit, in one place, and the digest over them.
 *
 * Layer: numeric's only include from the folder above it; includes the public header for br_digest alone.
 * A change of any value here is a new contract version with new golden files. The list BI_CONTRACT_CONSTANTS names each
 * constant once; the digest hashes its names and values, and tests/mutants changes each in turn and expects a named test to
 * fail. Polynomial coefficients stand in BI_FN_COEFFICIENTS of numeric/bi_fn.h, hashed as well. */
#ifndef BI_CONTRACT_H
#define BI_CONTRACT_H

#include "bitroll.h"
#include <assert.h>

#define BI_CONTRACT_VERSION 2

/* N-MMA, N-CHAIN */
#define BI_MMA_K 16             /* products of one block */
#define BI_MMA_FRACTION 25      /* fraction bits kept after alignment, F */
#define BI_MMA_EXP_MIN (-133)   /* lower bound of the block's exponent */
/* N-LORA */
#define BI_LORA_RANK_PAD 16
/* N-SUM */
#define BI_SUM_LANES 256
/* N-FN */
#define BI_SOFTPLUS_LINEAR 20.0f
/* N-CONV */
#define BI_CONV_TAPS 4
/* N-KDA: lane l owns keys KEYS*LANES*(n/KEYS) + KEYS*l + n%KEYS */
#define BI_KDA_LANES 8
#define BI_KDA_KEYS 4
#define BI_KDA_CHAINS 2
#define BI_KDA_L2_EPS 1e-6f
/* N-ATT: list entries of a block and of a part */
#define BI_ATT_BLOCK 64
#define BI_ATT_PART 2048
/* N-IDX */
#define BI_IDX_AMAX_MIN 1e-4f
#define BI_IDX_E4M3_MAX 448.0f
#define BI_IDX_CHAINS 4
#define BI_IDX_PAIR 2   /* neighbouring heads of one chain: h is of chain (h / PAIR) % CHAINS */
/* N-ROUTE */
#define BI_ROUTE_SUM_EPS 1e-20f
/* N-HEAD */
#define BI_HEAD_BLOCK 128
#define BI_HEAD_Z_MAX 0x1p118f   /* |z| is cut here: finite logits never overflow in x / T or in their spread */
/* N-SAMPLE */
#define BI_SAMPLE_WEIGHT_BITS 40
#define BI_SAMPLE_P_BITS 32
/* N-RNG */
#define BI_PHILOX_ROUNDS 10
#define BI_PHILOX_MUL0 0xd2511f53u
#define BI_PHILOX_MUL1 0xcd9e8d57u
#define BI_PHILOX_WEYL0 0x9e3779b9u
#define BI_PHILOX_WEYL1 0xbb67ae85u
#define BI_RNG_PURPOSES 256     /* counter word 1 = sample number * PURPOSES + purpose */
#define BI_RNG_PURPOSE_SAMPLE 0

/* Each constant once, all exact in binary64: the digest hashes names and values, `inspect` prints them. */
#define BI_CONTRACT_CONSTANTS(X)                                                                                        \
    X(BI_CONTRACT_VERSION)                                                                                              \
    X(BI_MMA_K) X(BI_MMA_FRACTION) X(BI_MMA_EXP_MIN)                                                                    \
    X(BI_LORA_RANK_PAD)                                                                                                 \
    X(BI_SUM_LANES)                                                                                                     \
    X(BI_SOFTPLUS_LINEAR)                                                                                               \
    X(BI_CONV_TAPS)                                                                                                     \
    X(BI_KDA_LANES) X(BI_KDA_KEYS) X(BI_KDA_CHAINS) X(BI_KDA_L2_EPS)                                                    \
    X(BI_ATT_BLOCK) X(BI_ATT_PART)                                                                                      \
    X(BI_IDX_AMAX_MIN) X(BI_IDX_E4M3_MAX) X(BI_IDX_CHAINS) X(BI_IDX_PAIR)                                               \
    X(BI_ROUTE_SUM_EPS)                                                                                                 \
    X(BI_HEAD_BLOCK) X(BI_HEAD_Z_MAX)                                                                                   \
    X(BI_SAMPLE_WEIGHT_BITS) X(BI_SAMPLE_P_BITS)                                                                        \
    X(BI_PHILOX_ROUNDS) X(BI_PHILOX_MUL0) X(BI_PHILOX_MUL1) X(BI_PHILOX_WEYL0) X(BI_PHILOX_WEYL1)                       \
    X(BI_RNG_PURPOSES) X(BI_RNG_PURPOSE_SAMPLE)

static_assert(BI_ATT_BLOCK % BI_MMA_K == 0, "an attention block is whole k-blocks");
static_assert(BI_ATT_PART % BI_ATT_BLOCK == 0, "a part is whole blocks");
static_assert(BI_LORA_RANK_PAD % BI_MMA_K == 0, "an adapter is whole k-blocks");
static_assert(BI_SUM_LANES % (2 * BI_HEAD_BLOCK) == 0, "SUM128 is a fold of SUM");

/* Of each constant in turn: its name, a zero byte, its value as the 8 bytes of a binary64, low byte first. No text of a
 * number is hashed: C libraries and locales spell numbers differently. */
br_digest bi_contract_digest(void);
/* One "NAME value" line a constant, for `inspect`; i from 0; 0 past the end. An integer is decimal, any other value a
 * hexadecimal significand and a power of two; the same text in every locale. */
int bi_contract_line(int i, char *line, int n);

#endif
