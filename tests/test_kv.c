/* Pools, rings, the prefix index, eviction, and the invariants K-1 .. K-8: scripted, against a brute-force look-up, and with
 * each invariant broken once on purpose. */
#include "test_support.h"

#include "br_hash.h"
#include "kv_prefix.h"
#include <inttypes.h>
#include <string.h>

enum { N_PAGE_MAX = 24, N_STATE_MAX = 12, N_TOK_MAX = 6 * BR_PAGE_TOK };

static kv_cache kv;
static void *block;
static int32_t page_held[N_PAGE_MAX], state_held[N_STATE_MAX];
static const br_digest ROOT = {1, 2}, OTHER = {1, 3};

static void open_kv(int32_t n_page, int32_t n_state) {
    br_arena arena = {0};
    kv_layout(&kv, &arena, n_page, n_state);
    CHECK_OK(br_mem_alloc(&block, arena.used, "the test"));
    arena = (br_arena){.base = block, .size = arena.used};
    kv_layout(&kv, &arena, n_page, n_state);
    memset(page_held, 0, sizeof page_held);
    memset(state_held, 0, sizeof state_held);
}

static void close_kv(void) {
    CHECK_OK(kv_check(&kv, page_held, state_held));
    br_mem_free(block);
}

/* A chain of n_tok tokens as a sequence leaves it: its blocks held, a state kept after block b if bit b of states is set. */
typedef struct chain {
    int32_t page[N_TOK_MAX / BR_PAGE_TOK], n_page;
} chain;

static chain build(br_digest root, const int32_t *token, int32_t n_tok, uint32_t states) {
    chain c = {0};
    for (int32_t done = 0; done < n_tok; done += BR_PAGE_TOK) {
        int32_t n = n_tok - done < BR_PAGE_TOK ? n_tok - done : BR_PAGE_TOK, page = kv_page_take(&kv);
        int32_t state = states >> c.n_page & 1 ? kv_state_take(&kv) : -1;
        ck_assert_int_ge(page, 0);
        page = kv_insert(&kv, root, c.n_page ? c.page[c.n_page - 1] : -1, token + done, n, page, state);
        page_held[page]++;
        c.page[c.n_page++] = page;
    }
    return c;
}

static void let_go(chain *c) {
    while (c->n_page > 0) {
        page_held[c->page[--c->n_page]]--;
        kv_page_release(&kv, c->page[c->n_page]);
    }
}

static const int32_t *tokens(int32_t stream) {
    static int32_t token[8][N_TOK_MAX];
    for (int32_t i = 0; i < N_TOK_MAX; i++)
        token[stream][i] = (int32_t)(test_mix((uint64_t)(stream * N_TOK_MAX + i)) % 1000);
    return token[stream];
}

static kv_hit find(br_digest root, const int32_t *token, int32_t n_tok) {
    int32_t page[N_TOK_MAX / BR_PAGE_TOK + 1];
    return kv_find(&kv, root, token, n_tok, page);
}

START_TEST(test_pool_counts_references) {
    open_kv(3, 1);
    ck_assert_int_eq(kv_pool_take(&kv.page), 0);
    ck_assert_int_eq(kv_pool_take(&kv.page), 1);
    kv_pool_hold(&kv.page, 0);
    kv_pool_drop(&kv.page, 0);
    ck_assert_int_eq(kv_pool_take(&kv.page), 2);
    ck_assert_int_eq(kv_pool_take(&kv.page), -1);
    kv_pool_drop(&kv.page, 0);
    ck_assert_int_eq(kv_pool_take(&kv.page), 0);
    for (int32_t i = 0; i < 3; i++)
        kv_pool_drop(&kv.page, i);
    close_kv();
}
END_TEST

START_TEST(test_ring_keeps_its_order) {
    open_kv(4, 1);
    kv_ring *ring = &kv.idle;
    ck_assert_int_eq(kv_ring_first(ring), 4);
    kv_ring_insert(ring, 2, 4);
    kv_ring_insert(ring, 0, 4);
    kv_ring_insert(ring, 3, 0);
    ck_assert(kv_ring_first(ring) == 2 && ring->next[2] == 3 && ring->next[3] == 0 && kv_ring_last(ring) == 0);
    kv_ring_remove(ring, 3);
    ck_assert(ring->next[2] == 0 && !kv_ring_has(ring, 3) && ring->n_in == 2);
    kv_ring_remove(ring, 2);
    kv_ring_remove(ring, 0);
    ck_assert_int_eq(kv_ring_first(ring), 4);
    close_kv();
}
END_TEST

/* A hit is where pages and a state are both present: full pages beyond the last state are no hit. */
START_TEST(test_find_ends_at_a_state) {
    open_kv(16, 8);
    const int32_t *token = tokens(0);
    chain c = build(ROOT, token, 4 * 64, 1 << 1);
    ck_assert_int_eq(find(ROOT, token, N_TOK_MAX).n_tok, 128);
    ck_assert_int_eq(find(ROOT, token, 128).n_tok, 128);
    ck_assert_int_eq(find(ROOT, token, 127).n_tok, 0);
    chain d = build(ROOT, token, 3 * 64 + 10, 1 << 3);
    ck_assert_int_eq(d.page[2], c.page[2]);
    ck_assert_int_eq(find(ROOT, token, N_TOK_MAX).n_tok, 202);
    ck_assert_int_eq(find(ROOT, token, N_TOK_MAX).n_page, 4);
    ck_assert_int_eq(find(ROOT, token, 201).n_tok, 128);
    chain e = build(ROOT, token, 3 * 64 + 20, 1 << 3); /* of two tails the longest that fits */
    ck_assert_int_eq(find(ROOT, token, 212).n_tok, 212);
    ck_assert_int_eq(find(ROOT, token, 211).n_tok, 202);
    ck_assert_int_eq(find(OTHER, token, 256).n_tok, 0);
    let_go(&e);
    let_go(&d);
    let_go(&c);
    close_kv();
}
END_TEST

/* Only tokens decide, and each of them: with few buckets most look-ups walk over strangers. */
START_TEST(test_find_compares_every_token) {
    open_kv(4, 4);
    int32_t token[N_TOK_MAX];
    memcpy(token, tokens(1), sizeof token);
    chain c = build(ROOT, token, 64 + 30, 3);
    for (int32_t i = 0; i < 94; i++) {
        token[i]++;
        ck_assert_int_eq(find(ROOT, token, 100).n_tok, i < 64 ? 0 : 64);
        token[i]--;
    }
    ck_assert_int_eq(find(ROOT, token, 100).n_tok, 94);
    let_go(&c);
    close_kv();
}
END_TEST

START_TEST(test_insert_shares_equal_blocks) {
    open_kv(8, 8);
    const int32_t *token = tokens(2);
    chain a = build(ROOT, token, 130, 0), b = build(ROOT, token, 130, 7), c = build(OTHER, token, 64, 1);
    ck_assert_int_eq(memcmp(a.page, b.page, sizeof a.page), 0);
    ck_assert_int_eq(kv.page.n_free, 8 - 4);
    ck_assert_int_eq(kv.kept.n_in, 4); /* the states of b went to the nodes of a */
    ck_assert_int_ne(c.page[0], a.page[0]);
    chain d = build(ROOT, token, 130, 7);
    ck_assert_int_eq(kv.kept.n_in, 4); /* a second state of one point is given back */
    let_go(&a);
    let_go(&d);
    let_go(&b);
    let_go(&c);
    ck_assert_int_eq(kv.idle.n_in, 4);
    close_kv();
}
END_TEST

/* An idle leaf without a state can never be hit: it goes at once, and its parents with it up to the last state. */
START_TEST(test_release_frees_what_cannot_be_hit) {
    open_kv(8, 8);
    const int32_t *token = tokens(3);
    chain a = build(ROOT, token, 5 * 64, 1 << 1);
    let_go(&a);
    ck_assert_int_eq(kv.idle.n_in, 2);
    ck_assert_int_eq(kv.page.n_free, 6);
    int32_t state[8];
    for (int32_t i = 0; i < 8; i++) { /* the eighth evicts the kept one, and the whole chain with it */
        state[i] = kv_state_take(&kv);
        ck_assert_int_ge(state[i], 0);
    }
    ck_assert_int_eq(kv_state_take(&kv), -1);
    ck_assert(!kv_state_available(&kv));
    ck_assert_int_eq(kv.n_state_evicted, 1);
    ck_assert_int_eq(kv.page.n_free, 8);
    for (int32_t i = 0; i < 8; i++)
        kv_state_release(&kv, state[i]);
    close_kv();
}
END_TEST

START_TEST(test_pages_are_evicted_oldest_use_first) {
    open_kv(6, 8);
    chain a = build(ROOT, tokens(0), 128, 3), b = build(ROOT, tokens(1), 128, 3), c = build(ROOT, tokens(2), 128, 3);
    let_go(&b);
    let_go(&a);
    let_go(&c);
    ck_assert_int_eq(kv_page_available(&kv), 6);
    int32_t held = kv_prefix_node(&kv, ROOT, -1, tokens(1), 64), page[5];
    kv_page_hold(&kv, held); /* b's first block is used again: only its leaf may go */
    page_held[held]++;
    for (int32_t i = 0; i < 5; i++) {
        static const int32_t left[5][3] = {{128, 64, 128}, {64, 64, 128}, {0, 64, 128}, {0, 64, 64}, {0, 64, 0}};
        page[i] = kv_page_take(&kv);
        page_held[page[i]]++;
        for (int32_t k = 0; k < 3; k++)
            ck_assert_msg(find(ROOT, tokens(k), 128).n_tok == left[i][k], "after %d pages chain %d has %d", i + 1, k,
                          find(ROOT, tokens(k), 128).n_tok);
        CHECK_OK(kv_check(&kv, page_held, state_held));
    }
    ck_assert_int_eq(kv_page_take(&kv), -1);
    ck_assert_int_eq(kv.n_page_evicted, 5);
    for (int32_t i = 0; i < 5; i++) {
        page_held[page[i]]--;
        kv_page_release(&kv, page[i]);
    }
    page_held[held]--;
    kv_page_release(&kv, held);
    close_kv();
}
END_TEST

/* States go by last use, a start from one being a use; the very last is handed over instead of copied. */
START_TEST(test_state_start) {
    open_kv(8, 3);
    chain a = build(ROOT, tokens(0), 64, 1), b = build(ROOT, tokens(1), 64, 1);
    int32_t src, live = kv_state_start(&kv, a.page[0], &src);
    ck_assert_int_eq(src, kv.node[a.page[0]].state);
    state_held[live]++;
    int32_t second = kv_state_take(&kv); /* b's, since a's was used later */
    state_held[second]++;
    ck_assert_int_eq(kv.node[b.page[0]].state, -1);
    int32_t kept = kv.node[a.page[0]].state, third = kv_state_start(&kv, a.page[0], &src);
    ck_assert(third == kept && src == -1 && kv.node[a.page[0]].state == -1);
    state_held[third]++;
    CHECK_OK(kv_check(&kv, page_held, state_held));
    state_held[live] = state_held[second] = state_held[third] = 0;
    kv_state_release(&kv, live);
    kv_state_release(&kv, second);
    kv_state_release(&kv, third);
    let_go(&a);
    let_go(&b);
    ck_assert_int_eq(kv.page.n_free, 8);
    close_kv();
}
END_TEST

/* A tail without a state is no place to start from, also while somebody still holds it. */
START_TEST(test_take_back) {
    open_kv(4, 1);
    const int32_t *token = tokens(0);
    chain a = build(ROOT, token, 70, 2), b = build(ROOT, token, 70, 0);
    ck_assert(!kv_take_back(&kv, a.page[1])); /* b holds it too */
    let_go(&b);
    int32_t state = kv_state_take(&kv);
    ck_assert_int_eq(find(ROOT, token, 100).n_tok, 0);
    kv_state_release(&kv, state);
    ck_assert(kv_take_back(&kv, a.page[1]));
    ck_assert(!kv_page_indexed(&kv, a.page[1]));
    CHECK_OK(kv_check(&kv, page_held, state_held));
    let_go(&a);
    ck_assert_int_eq(kv.page.n_free, 4);
    close_kv();
}
END_TEST

/* The longest prefix that ends at a state, by trying every node and walking up from it. */
static int32_t find_slowly(br_digest root, const int32_t *token, int32_t n_tok) {
    int32_t best = 0;
    for (int32_t page = 0; page < kv.page.n; page++) {
        int32_t n = 0, depth = -1, same = kv.node[page].n_tok > 0 && kv.node[page].state >= 0;
        for (int32_t p = page; same && p >= 0; p = kv.node[p].parent)
            depth++;
        for (int32_t p = page; same && p >= 0; p = kv.node[p].parent, depth--) {
            const kv_node *node = &kv.node[p];
            n += node->n_tok;
            same = br_digest_equal(node->root, root) && depth * 64 + node->n_tok <= n_tok &&
                   memcmp(kv.token + p * 64, token + depth * 64, sizeof *token * (size_t)node->n_tok) == 0;
        }
        if (same && n > best)
            best = n;
    }
    return best;
}

static void check_find(uint64_t seed, br_digest root, const int32_t *token, int32_t n_tok) {
    int32_t page[N_TOK_MAX / BR_PAGE_TOK + 1], n = 0, slow = find_slowly(root, token, n_tok), linked = 1;
    kv_hit hit = kv_find(&kv, root, token, n_tok, page);
    for (int32_t i = 0; i < hit.n_page; i++) {
        linked &= kv.node[page[i]].parent == (i ? page[i - 1] : -1);
        n += kv.node[page[i]].n_tok;
    }
    ck_assert_msg(hit.n_tok == slow && n == slow && linked,
                  "BITROLL_TEST_SEED=%" PRIu64 ": hit %d in pages of %d, slowly %d", seed, hit.n_tok, n, slow);
}

/* Random sequences build, share and release chains in a cache too small for them, states come and go. */
static void random_life(uint64_t seed) {
    chain c[4] = {0};
    int32_t owned = -1;
    open_kv(5 + (int32_t)(test_mix(seed) % (N_PAGE_MAX - 5)), 1 + (int32_t)(test_mix(seed + 1) % N_STATE_MAX));
    for (int32_t i = 0; i < 60; i++) {
        uint64_t r = test_mix(seed * 1000 + (uint64_t)i);
        int32_t token[N_TOK_MAX], at = (int32_t)(r % 4), n_tok = 1 + (int32_t)(r >> 8) % (3 * 64);
        if (n_tok < 1)
            n_tok = 1;
        for (int32_t k = 0; k < N_TOK_MAX; k++) /* streams that agree up to a point */
            token[k] = k < (int32_t)(r >> 40) % 200 ? 0 : (int32_t)(r >> 32) % 3;
        br_digest root = r >> 20 & 1 ? ROOT : OTHER;
        check_find(seed, root, token, n_tok);
        let_go(&c[at]);
        if (kv_page_available(&kv) > (n_tok + 63) / 64)
            c[at] = build(root, token, n_tok, (uint32_t)(r >> 24));
        if (owned >= 0) {
            state_held[owned]--;
            kv_state_release(&kv, owned);
        }
        owned = r >> 21 & 1 ? kv_state_take(&kv) : -1;
        if (owned >= 0)
            state_held[owned]++;
        check_find(seed, root, token, N_TOK_MAX - 1);
        br_status status = kv_check(&kv, page_held, state_held);
        ck_assert_msg(status == BR_OK, "BITROLL_TEST_SEED=%" PRIu64 ": %s", seed, br_last_error());
    }
    for (int32_t i = 0; i < 4; i++)
        let_go(&c[i]);
    if (owned >= 0) {
        state_held[owned]--;
        kv_state_release(&kv, owned);
    }
    close_kv();
}

START_TEST(test_random_life_against_slow_look_up) {
    uint64_t seed = test_seed();
    int32_t n = test_is_long() ? 200000 : 2000;
    for (int32_t i = 0; i < n; i++)
        random_life(seed + (uint64_t)i);
}
END_TEST

/* The structure broken at one place, and the invariant that kv_check must name. Pages 0, 1 (tail) are an idle chain with
 * states 0, 1; pages 2, 3 (tail) a held chain of other tokens, 3 with state 2; pages 4, 5 are free; state 3 is owned. */
typedef struct breakage {
    const char *id;
    void (*apply)(void);
} breakage;

static void break_ref(void) { kv.page.n_ref[2]++; }
static void break_stack(void) { kv.page.stack[0] = kv.page.stack[1]; }
static void break_free(void) { kv.page.n_free--; }
static void break_token(void) {
    do /* until it belongs in another bucket */
        kv.token[2 * 64 + 5]++;
    while (kv_prefix_node(&kv, ROOT, -1, kv.token + 2 * 64, 64) == 2);
}
static void break_twin(void) {
    kv.node[0].root = ROOT;
    memcpy(kv.token, kv.token + 2 * 64, 64 * sizeof *kv.token);
}
static void break_child_count(void) { kv.node[2].n_child++; }
static void break_parent_root(void) { kv.node[3].root = OTHER; }
static void break_parent(void) { kv.node[1].parent = 2; }
static void break_idle_missing(void) { kv_ring_remove(&kv.idle, 1); }
static void break_idle_order(void) {
    kv_ring_remove(&kv.idle, 1);
    kv_ring_insert(&kv.idle, 1, kv.idle.n);
}
static void break_idle_count(void) { kv.idle.n_in++; }
static void break_dead_leaf(void) { kv_pool_drop(&kv.state, kv_prefix_detach_state(&kv, 1)); }
static void break_state_owner(void) { state_held[2]++; }
static void break_state_page(void) { kv.state_page[2] = 1; }
static void break_kept_ring(void) { kv_ring_remove(&kv.kept, 2); }
static void break_held_parent(void) {
    page_held[2]--;
    kv_page_release(&kv, 2);
}

static const breakage breaks[] = {
    {"K-1", break_ref},           {"K-2", break_stack},      {"K-2", break_free},         {"K-3", break_token},
    {"K-3", break_twin},          {"K-4", break_child_count}, {"K-3", break_parent_root}, {"K-3", break_parent},
    {"K-5", break_idle_missing},  {"K-5", break_idle_order}, {"K-5", break_idle_count},   {"K-6", break_dead_leaf},
    {"K-7", break_state_owner},   {"K-7", break_state_page}, {"K-7", break_kept_ring},    {"K-8", break_held_parent},
};

START_TEST(test_check_names_what_is_broken) {
    open_kv(6, 4);
    chain a = build(ROOT, tokens(0), 70, 3), b = build(ROOT, tokens(1), 70, 2);
    let_go(&a);
    int32_t owned = kv_state_take(&kv);
    state_held[owned]++;
    ck_assert(owned == 3 && b.page[0] == 2 && b.page[1] == 3);
    CHECK_OK(kv_check(&kv, page_held, state_held));
    breaks[_i].apply();
    CHECK_FAILS(kv_check(&kv, page_held, state_held), BR_E_MISMATCH);
    ck_assert_msg(strncmp(br_last_error(), breaks[_i].id, 3) == 0, "wanted %s: %s", breaks[_i].id, br_last_error());
    br_mem_free(block);
}
END_TEST

Suite *test_kv_suite(void);
Suite *test_kv_suite(void) {
    Suite *suite = suite_create("kv");
    TCase *tcase = tcase_create("kv");
    tcase_set_timeout(tcase, test_is_long() ? 600 : 60);
    tcase_add_test(tcase, test_pool_counts_references);
    tcase_add_test(tcase, test_ring_keeps_its_order);
    tcase_add_test(tcase, test_find_ends_at_a_state);
    tcase_add_test(tcase, test_find_compares_every_token);
    tcase_add_test(tcase, test_insert_shares_equal_blocks);
    tcase_add_test(tcase, test_release_frees_what_cannot_be_hit);
    tcase_add_test(tcase, test_pages_are_evicted_oldest_use_first);
    tcase_add_test(tcase, test_state_start);
    tcase_add_test(tcase, test_take_back);
    tcase_add_test(tcase, test_random_life_against_slow_look_up);
    tcase_add_loop_test(tcase, test_check_names_what_is_broken, 0, (int)(sizeof breaks / sizeof *breaks));
    suite_add_tcase(suite, tcase);
    return suite;
}
