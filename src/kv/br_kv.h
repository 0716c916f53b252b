/* br_kv: which cache page and which KDA state belongs to what, and the index of prefixes that are already computed.
 *
 * Layer: kv; includes base. Integers only: it knows page numbers, state numbers, token ids and root digests; it moves no
 * bytes and never sees a tensor, a clock or a request.
 *
 * A page holds BR_PAGE_TOK positions of one sequence for all MLA layers (latent rows and index keys have one number). A
 * state is the KDA state of all layers at one point of a sequence. A block row of the index is {page, optional state}: the
 * page of one block of tokens, its parent (the block before it) and the state after its last token. So the index is a forest
 * of blocks, and since a page is in it at most once, its nodes are simply the page numbers. Full nodes have BR_PAGE_TOK
 * tokens and may have children; tail nodes have fewer and are always leaves: they are the points prompt_len - 1.
 *
 * Life of a page: free -> taken by one sequence, which writes it -> put into the index, from then on immutable and shared
 * -> held by no sequence: idle, evicted when room is needed, oldest use first, children before parents -> free.
 * A kept state may be evicted at any time, since sequences start from a copy.
 *
 * Invariants, checked by kv_check:
 *   K-1  references of a page = block table entries of sequences that name it + 1 when it is in the index
 *   K-2  the free stack holds exactly the numbers without references, each once
 *   K-3  a node is found through its hash bucket, and no other node has the same root, parent and tokens
 *   K-4  a parent is a full node of the same root; n_child counts the nodes that name it
 *   K-5  a node is in the ring of idle nodes exactly when no sequence holds it; there every child stands before its parent
 *   K-6  an idle leaf has a state: without one no lookup could end at it, so it is freed at once
 *   K-7  a used state is kept by one node or owned by one sequence, never both; the ring of kept states holds the former
 *   K-8  a sequence that holds a node holds its parent: no idle node has a child in use */
#ifndef BR_KV_H
#define BR_KV_H

#include "br_config.h"
#include "kv_pool.h"

typedef struct kv_node {
    br_digest root;
    int32_t parent;  /* page of the block before it; -1: first block */
    int32_t n_child;
    int32_t n_tok;   /* 0: this page is not in the index */
    int32_t state;   /* kept state after its last token; -1: none */
    int32_t next;    /* in its hash bucket; -1: end */
} kv_node;

typedef struct kv_cache {
    kv_pool page, state;
    kv_node *node;        /* (n_page) */
    int32_t *token;       /* (n_page, BR_PAGE_TOK): the tokens of each node, compared exactly */
    int32_t *bucket;      /* (n_bucket) first node; -1: empty */
    int32_t n_bucket;     /* a power of two */
    kv_ring idle;         /* nodes that no sequence holds, least recently used first */
    kv_ring kept;         /* states of nodes, least recently used first */
    int32_t *state_page;  /* (n_state) the node that keeps it; -1 */
    int32_t *mark;        /* (the larger of n_page and n_state) scratch of kv_check */
    int64_t n_page_evicted, n_state_evicted;
} kv_cache;

void kv_layout(kv_cache *kv, br_arena *arena, int32_t n_page, int32_t n_state);

/* A page with one reference, evicting the least recently used idle node when none is free; -1: all are in use. */
int32_t kv_page_take(kv_cache *kv);
void kv_page_hold(kv_cache *kv, int32_t page);
void kv_page_release(kv_cache *kv, int32_t page); /* a sequence releases its pages last block first (K-5) */
int32_t kv_page_available(const kv_cache *kv);    /* how many kv_page_take in a row would succeed */
int kv_page_indexed(const kv_cache *kv, int32_t page);

/* A state owned by the caller, evicting the least recently used kept one when none is free; -1: all are owned. */
int32_t kv_state_take(kv_cache *kv);
void kv_state_release(kv_cache *kv, int32_t state);
int kv_state_available(const kv_cache *kv);
/* A state for a sequence that goes on from the state kept at `page`, which the sequence holds. *src is the state to copy
 * from, or -1 when the kept state itself was handed over because it was the last one to be had. */
int32_t kv_state_start(kv_cache *kv, int32_t page, int32_t *src);

/* The deepest point at most n_tok tokens deep from which a sequence can go on. */
typedef struct kv_hit {
    int32_t n_tok;  /* 0: none */
    int32_t n_page; /* pages that hold them, the last one may be a tail */
} kv_hit;
/* page (n_tok / BR_PAGE_TOK + 1) receives the pages; nothing is held yet. */
kv_hit kv_find(const kv_cache *kv, br_digest root, const int32_t *token, int32_t n_tok, int32_t *page);
/* Puts a computed page that only the caller holds into the index, with the state after its last token (-1: none; else the
 * index owns it now). parent: -1 or a node that the caller holds. Returns the page that stands for the block from now on:
 * when equal tokens are there already, the caller's page is released and the other one held instead. */
int32_t kv_insert(kv_cache *kv, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok, int32_t page,
                  int32_t state);
/* Takes a tail that only the caller holds out of the index, so that the caller may write it; its state is dropped.
 * 0: others hold it too, nothing is done. */
int kv_take_back(kv_cache *kv, int32_t page);

/* page_held (n_page), state_held (n_state): references by sequences. BR_E_MISMATCH: its sentence begins with the id. */
br_status kv_check(const kv_cache *kv, const int32_t *page_held, const int32_t *state_held);

#endif
