/* br_xxh3: XXH3-128 with the default secret, in pieces that several threads can share. Layer: base; the same code on the host and on a GPU.
 *
 * Long inputs go through 8 accumulators in stripes of 64 bytes and blocks of 16 stripes. What a block adds does not depend on what came
 * before it, so blocks are summed anywhere and in any order, piece by piece; only what ends a block, one step an accumulator, is a chain.
 * After the specification of xxHash; the test compares every length with the library. */
#ifndef BR_XXH3_H
#define BR_XXH3_H

#include "bitroll.h"

#include <string.h>

#if defined(__CUDACC__)
#define BR_HD __host__ __device__
#else
#define BR_HD
#endif

enum {
    BR_XXH3_SHORT = 240,  /* bytes up to which br_xxh3_short has the answer */
    BR_XXH3_LANES = 8,    /* accumulators */
    BR_XXH3_STRIPE = 64,  /* bytes, one word an accumulator */
    BR_XXH3_BLOCK = 1024, /* bytes between two steps of the chain */
    BR_XXH3_PIECE = 16,   /* bytes that feed accumulators 2p and 2p + 1 */
    BR_XXH3_LAST = 121    /* where the secret of the last stripe begins */
};

#define BR_XXH3_P32_1 0x9e3779b1u
#define BR_XXH3_P32_2 0x85ebca77u
#define BR_XXH3_P32_3 0xc2b2ae3du
#define BR_XXH3_P64_1 0x9e3779b185ebca87u
#define BR_XXH3_P64_2 0xc2b2ae3d27d4eb4fu
#define BR_XXH3_P64_3 0x165667b19e3779f9u
#define BR_XXH3_P64_4 0x85ebca77c2b2ae63u
#define BR_XXH3_P64_5 0x27d4eb2f165667c5u

#define BR_XXH3_SECRET                                                                                                                    \
    {0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u, 0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u,        \
     0x8e2443f7744608b8u, 0x4c263a81e69035e0u, 0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,        \
     0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u, 0xc3ebd33483acc5eau, 0xeb6313faffa081c5u,        \
     0x49daf0b751dd0d17u, 0x9e68d429265516d3u, 0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu}
static const uint64_t br_xxh3_words[24] = BR_XXH3_SECRET;
#if defined(__CUDACC__)
static __device__ const uint64_t br_xxh3_words_device[24] = BR_XXH3_SECRET;
#endif

/* 8 bytes of the secret from byte `at` on, at most 184. */
static inline BR_HD uint64_t br_xxh3_secret(int at) {
#if defined(__CUDA_ARCH__)
    const uint64_t *word = br_xxh3_words_device;
#else
    const uint64_t *word = br_xxh3_words;
#endif
    const int shift = at % 8 * 8;
    return shift ? word[at / 8] >> shift | word[at / 8 + 1] << (64 - shift) : word[at / 8];
}

/* ---- long inputs ---------------------------------------------------------------------------------------------------------------- */

static inline BR_HD uint64_t br_xxh3_start(int lane) {
    switch (lane) {
    case 0: return BR_XXH3_P32_3;
    case 1: return BR_XXH3_P64_1;
    case 2: return BR_XXH3_P64_2;
    case 3: return BR_XXH3_P64_3;
    case 4: return BR_XXH3_P64_4;
    case 5: return BR_XXH3_P32_2;
    case 6: return BR_XXH3_P64_5;
    default: return BR_XXH3_P32_1;
    }
}

/* What 16 bytes of a stripe add to their two accumulators. key: the secret of that stripe, 8 bytes further a stripe, at these bytes. */
static inline BR_HD void br_xxh3_add(uint64_t sum[2], const uint64_t word[2], const uint64_t key[2]) {
    const uint64_t x = word[0] ^ key[0], y = word[1] ^ key[1];
    sum[0] += word[1] + (uint64_t)(uint32_t)x * (x >> 32);
    sum[1] += word[0] + (uint64_t)(uint32_t)y * (y >> 32);
}

/* The end of a block, for the accumulator `lane`. */
static inline BR_HD uint64_t br_xxh3_step(uint64_t acc, uint64_t sum, uint64_t key) {
    acc += sum;
    return ((acc ^ acc >> 47) ^ key) * BR_XXH3_P32_1;
}
static inline BR_HD uint64_t br_xxh3_step_key(int lane) {
    return br_xxh3_secret(128 + 8 * lane);
}

static inline BR_HD uint64_t br_xxh3_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    return (uint64_t)((unsigned __int128)a * b >> 64);
#endif
}

static inline BR_HD uint64_t br_xxh3_fold(uint64_t a, uint64_t b) {
    return a * b ^ br_xxh3_high(a, b);
}

static inline BR_HD uint64_t br_xxh3_mixed(uint64_t x) {
    x = (x ^ x >> 37) * 0x165667919e3779f9u;
    return x ^ x >> 32;
}

static inline BR_HD uint64_t br_xxh3_merge(const uint64_t acc[BR_XXH3_LANES], int at, uint64_t start) {
    for (int i = 0; i < BR_XXH3_LANES; i += 2)
        start += br_xxh3_fold(acc[i] ^ br_xxh3_secret(at + 8 * i), acc[i + 1] ^ br_xxh3_secret(at + 8 * i + 8));
    return br_xxh3_mixed(start);
}

/* From the accumulators after the last stripe, of n > BR_XXH3_SHORT bytes. */
static inline BR_HD br_digest br_xxh3_long(const uint64_t acc[BR_XXH3_LANES], uint64_t n) {
    br_digest d;
    d.lo = br_xxh3_merge(acc, 11, n * BR_XXH3_P64_1);
    d.hi = br_xxh3_merge(acc, 117, ~(n * BR_XXH3_P64_2));
    return d;
}

/* n > BR_XXH3_SHORT bytes are so many whole blocks, then so many stripes, then the last 64 bytes once more as a stripe. */
static inline BR_HD uint32_t br_xxh3_blocks(uint32_t n) {
    return (n - 1) / BR_XXH3_BLOCK;
}
static inline BR_HD uint32_t br_xxh3_stripes(uint32_t n) {
    return (n - 1) % BR_XXH3_BLOCK / BR_XXH3_STRIPE;
}

/* ---- short inputs, in memory --------------------------------------------------------------------------------------------------------- */

static inline BR_HD uint64_t br_xxh3_read(const unsigned char *p, int n) {
    uint64_t x = 0;
    for (int i = 0; i < n; i++)
        x |= (uint64_t)p[i] << 8 * i;
    return x;
}

static inline BR_HD uint64_t br_xxh3_swapped(uint64_t x) {
    uint64_t y = 0;
    for (int i = 0; i < 8; i++)
        y |= (x >> 8 * i & 255) << (56 - 8 * i);
    return y;
}

static inline BR_HD uint64_t br_xxh3_mixed64(uint64_t x) {
    x = (x ^ x >> 33) * BR_XXH3_P64_2;
    x = (x ^ x >> 29) * BR_XXH3_P64_3;
    return x ^ x >> 32;
}

static inline BR_HD br_digest br_xxh3_to_3(const unsigned char *p, uint32_t n) {
    const uint32_t low = (uint32_t)p[0] << 16 | (uint32_t)p[n / 2] << 24 | p[n - 1] | n << 8;
    const uint32_t turned = (uint32_t)(br_xxh3_swapped(low) >> 32), high = turned << 13 | turned >> 19;
    br_digest d;
    d.lo = br_xxh3_mixed64(low ^ (uint64_t)((uint32_t)br_xxh3_secret(0) ^ (uint32_t)br_xxh3_secret(4)));
    d.hi = br_xxh3_mixed64(high ^ (uint64_t)((uint32_t)br_xxh3_secret(8) ^ (uint32_t)br_xxh3_secret(12)));
    return d;
}

static inline BR_HD br_digest br_xxh3_to_8(const unsigned char *p, uint32_t n) {
    const uint64_t x = br_xxh3_read(p, 4) + (br_xxh3_read(p + n - 4, 4) << 32);
    const uint64_t keyed = x ^ br_xxh3_secret(16) ^ br_xxh3_secret(24), by = BR_XXH3_P64_1 + (n << 2);
    uint64_t low = keyed * by, high = br_xxh3_high(keyed, by) + (low << 1);
    low ^= high >> 3;
    low = (low ^ low >> 35) * 0x9fb21c651e98df25u;
    br_digest d;
    d.lo = low ^ low >> 28;
    d.hi = br_xxh3_mixed(high);
    return d;
}

static inline BR_HD br_digest br_xxh3_to_16(const unsigned char *p, uint32_t n) {
    const uint64_t first = br_xxh3_read(p, 8), last = br_xxh3_read(p + n - 8, 8);
    const uint64_t keyed = first ^ last ^ br_xxh3_secret(32) ^ br_xxh3_secret(40), turned = last ^ br_xxh3_secret(48) ^ br_xxh3_secret(56);
    uint64_t low = keyed * BR_XXH3_P64_1 + ((uint64_t)(n - 1) << 54), high = br_xxh3_high(keyed, BR_XXH3_P64_1);
    high += turned + (uint64_t)(uint32_t)turned * (BR_XXH3_P32_2 - 1);
    low ^= br_xxh3_swapped(high);
    br_digest d;
    d.lo = br_xxh3_mixed(low * BR_XXH3_P64_2);
    d.hi = br_xxh3_mixed(br_xxh3_high(low, BR_XXH3_P64_2) + high * BR_XXH3_P64_2);
    return d;
}

static inline BR_HD uint64_t br_xxh3_mix16(const unsigned char *p, int at) {
    return br_xxh3_fold(br_xxh3_read(p, 8) ^ br_xxh3_secret(at), br_xxh3_read(p + 8, 8) ^ br_xxh3_secret(at + 8));
}

static inline BR_HD br_digest br_xxh3_mix32(br_digest acc, const unsigned char *a, const unsigned char *b, int at) {
    acc.lo = (acc.lo + br_xxh3_mix16(a, at)) ^ (br_xxh3_read(b, 8) + br_xxh3_read(b + 8, 8));
    acc.hi = (acc.hi + br_xxh3_mix16(b, at + 16)) ^ (br_xxh3_read(a, 8) + br_xxh3_read(a + 8, 8));
    return acc;
}

/* 1 <= n <= BR_XXH3_SHORT */
static inline BR_HD br_digest br_xxh3_short(const unsigned char *p, uint32_t n) {
    br_digest acc;
    if (n <= 16)
        return n <= 3 ? br_xxh3_to_3(p, n) : n <= 8 ? br_xxh3_to_8(p, n) : br_xxh3_to_16(p, n);
    acc.lo = n * BR_XXH3_P64_1;
    acc.hi = 0;
    if (n <= 128) { /* from both ends towards the middle, the innermost pair first */
        for (int i = (int)(n - 1) / 32; i >= 0; i--)
            acc = br_xxh3_mix32(acc, p + 16 * i, p + n - 16 * i - 16, 32 * i);
    } else {
        for (int i = 0; i < (int)n / 32; i++) {
            acc = br_xxh3_mix32(acc, p + 32 * i, p + 32 * i + 16, i < 4 ? 32 * i : 3 + 32 * (i - 4));
            acc.lo = i == 3 ? br_xxh3_mixed(acc.lo) : acc.lo;
            acc.hi = i == 3 ? br_xxh3_mixed(acc.hi) : acc.hi;
        }
        acc = br_xxh3_mix32(acc, p + n - 16, p + n - 32, 103);
    }
    br_digest d;
    d.lo = br_xxh3_mixed(acc.lo + acc.hi);
    d.hi = 0 - br_xxh3_mixed(acc.lo * BR_XXH3_P64_1 + acc.hi * BR_XXH3_P64_4 + n * BR_XXH3_P64_2);
    return d;
}

#endif
