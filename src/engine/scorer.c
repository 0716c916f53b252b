/* Packs of whole sequences through the model; see scorer.h. */
#include "scorer.h"

#include "rollout_file.h"

#include <string.h>

struct scorer {
    br_loaded *loaded;
    int32_t n_block_max;
    bi_seg seg[SCORER_PACK_MAX];
    int32_t page_first[SCORER_PACK_MAX];
    bi_batch batch;
    int32_t *row_seg, *token, *row_slot, *next_token;
    uint32_t *row_fault, *score_fault;
    float *temperature, *logprob, *logprob_raw, *entropy;
    bi_bf16 *score_x;
    unsigned char *pages, *states;
    br_arena arena;
};

static int32_t block_count(int32_t n_tok) {
    return (n_tok + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
}

static void lay_out(void *owner, br_arena *arena) {
    scorer *s = owner;
    const br_model *model = s->loaded->model;
    const size_t n = (size_t)s->loaded->n_row_max, d = (size_t)s->loaded->config.d_model;
    s->row_seg = BR_ARENA_ARRAY(arena, int32_t, n);
    s->token = BR_ARENA_ARRAY(arena, int32_t, n);
    s->row_slot = BR_ARENA_ARRAY(arena, int32_t, n);
    s->next_token = BR_ARENA_ARRAY(arena, int32_t, n);
    s->row_fault = BR_ARENA_ARRAY(arena, uint32_t, n);
    s->score_fault = BR_ARENA_ARRAY(arena, uint32_t, n);
    s->temperature = BR_ARENA_ARRAY(arena, float, n);
    s->logprob = BR_ARENA_ARRAY(arena, float, n);
    s->logprob_raw = BR_ARENA_ARRAY(arena, float, n);
    s->entropy = BR_ARENA_ARRAY(arena, float, n);
    s->score_x = BR_ARENA_ARRAY(arena, bi_bf16, n * d);
    s->pages = br_arena_take(arena, br_model_page_bytes(model) * (size_t)s->n_block_max, 64);
    s->states = br_arena_take(arena, br_model_state_bytes(model) * SCORER_PACK_MAX, 64);
}

br_status scorer_open(br_loaded *loaded, scorer **out) {
    scorer *s = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&s, sizeof *s, "the scorer"));
    s->loaded = loaded;
    s->n_block_max = block_count(loaded->n_row_max) + SCORER_PACK_MAX; /* each sequence wastes less than one */
    br_status status = br_arena_open(&s->arena, lay_out, s, "the scorer's caches");
    if (status != BR_OK) {
        scorer_close(s);
        return status;
    }
    *out = s;
    return BR_OK;
}

void scorer_close(scorer *s) {
    if (!s)
        return;
    br_mem_free(s->arena.base);
    br_mem_free(s);
}

br_status scorer_fit(const scorer *s, const scorer_seq *seq, int32_t n, int32_t *n_fit) {
    int32_t rows = 0;
    *n_fit = 0;
    for (int32_t i = 0; i < n && i < SCORER_PACK_MAX && seq[i].n_tok <= s->loaded->n_row_max - rows; i++) {
        rows += seq[i].n_tok;
        *n_fit = i + 1;
    }
    if (n > 0 && *n_fit == 0)
        return br_fail(BR_E_LIMIT, "a sequence of %d tokens does not fit into a pack of %d", seq[0].n_tok, s->loaded->n_row_max);
    return BR_OK;
}

static void lay_out_rows(scorer *s, const scorer_seq *seq, int32_t n) {
    int32_t row = 0, block = 0;
    for (int32_t i = 0; i < n; i++) {
        s->seg[i] = (bi_seg){.seq = i, .row = row, .n_row = seq[i].n_tok, .pos = 0};
        s->page_first[i] = block;
        for (int32_t t = 0; t < seq[i].n_tok; t++) {
            s->row_seg[row + t] = i;
            s->token[row + t] = seq[i].token[t];
            s->row_slot[row + t] = seq[i].slot;
            s->row_fault[row + t] = 0;
        }
        row += seq[i].n_tok;
        block += block_count(seq[i].n_tok);
    }
    BR_ASSERT(block <= s->n_block_max);
    s->batch = (bi_batch){.n_row = row, .n_seg = n, .seg = s->seg, .row_seg = s->row_seg};
}

static void note_fault(scorer_seq *seq, uint32_t code, int32_t position) {
    if (code && (!seq->fault || position < seq->fault_pos)) {
        seq->fault = code;
        seq->fault_pos = position;
    }
}

br_status scorer_forward(scorer *s, scorer_seq *seq, int32_t n, const br_trace *trace, const bi_bf16 **final) {
    lay_out_rows(s, seq, n);
    br_step step = {
        .batch = &s->batch, .token = s->token, .row_slot = s->row_slot, .page_base = s->pages, .page_first = s->page_first,
        .state_base = s->states, .row_fault = s->row_fault, .trace = trace,
    };
    BR_TRY(br_model_forward(s->loaded->model, &step, final));
    for (int32_t i = 0; i < n; i++) {
        seq[i].fault = 0;
        for (int32_t t = 0; t == 0 || t + 1 < seq[i].n_tok; t++)
            note_fault(&seq[i], s->row_fault[s->seg[i].row + t], t);
    }
    return BR_OK;
}

const bi_batch *scorer_batch(const scorer *s) {
    return &s->batch;
}

br_status scorer_logprobs(scorer *s, scorer_seq *seq, int32_t n, const bi_bf16 *final) {
    const size_t d = (size_t)s->loaded->config.d_model;
    int32_t n_score = 0, want_entropy = 0;
    for (int32_t i = 0; i < n; i++) {
        want_entropy |= seq[i].entropy != NULL;
        for (int32_t t = 0; t + 1 < seq[i].n_tok; t++, n_score++) { /* row t predicts token t + 1 */
            memcpy(s->score_x + (size_t)n_score * d, final + (size_t)(s->seg[i].row + t) * d, d * sizeof *final);
            s->next_token[n_score] = seq[i].token[t + 1];
            s->temperature[n_score] = seq[i].temperature;
            s->score_fault[n_score] = 0;
        }
    }
    BR_TRY(br_model_score(s->loaded->model, n_score, s->score_x, s->next_token, s->temperature, s->logprob, s->logprob_raw,
                          want_entropy ? s->entropy : NULL, s->score_fault));
    for (int32_t i = 0, at = 0; i < n; i++) {
        for (int32_t t = 0; t + 1 < seq[i].n_tok; t++, at++) {
            memcpy(&seq[i].logprob[t + 1], &s->logprob[at], sizeof(float));
            memcpy(&seq[i].logprob_raw[t + 1], &s->logprob_raw[at], sizeof(float));
            if (seq[i].entropy)
                memcpy(&seq[i].entropy[t + 1], &s->entropy[at], sizeof(float));
            if (!s->score_fault[at])
                continue;
            seq[i].logprob[t + 1] = seq[i].logprob_raw[t + 1] = BR_UNSCORED;
            if (t + 1 >= seq[i].first_asked)
                note_fault(&seq[i], s->score_fault[at], t);
        }
    }
    return BR_OK;
}

br_status scorer_logits(scorer *s, const bi_bf16 *final, int32_t first_row, int32_t n_row, float *logit, uint32_t *row_fault) {
    const size_t d = (size_t)s->loaded->config.d_model;
    memset(row_fault, 0, (size_t)n_row * sizeof *row_fault);
    return br_model_logits(s->loaded->model, n_row, final + (size_t)first_row * d, logit, row_fault);
}
