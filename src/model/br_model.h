/* br_model: the forward pass, written once against the op table.
 *
 * Layer: model; includes base, br_device.h, bi_*.h, weights, lora_slots.h, comm. A straight list of op calls with the shapes at each line:
 * no arithmetic, no branch on the batch, no allocation after open. It may not know where rows come from: the scheduler's
 * pages and the scorer's contiguous rows look alike through bi_cache and bi_state. */
#ifndef BR_MODEL_H
#define BR_MODEL_H

#include "bi_backend.h"
#include "br_comm.h"
#include "br_device.h"
#include "br_mem.h"
#include "br_stage.h"
#include "br_weights.h"
#include "lora_slots.h"

typedef struct br_model br_model;

typedef struct br_model_options {
    const br_config *config;
    const br_weights *weights; /* read at open only: everything is packed */
    const lora_set *adapters;  /* NULL: none */
    bi_backend backend;
    br_device *device;         /* the backend's */
    br_pool *pool;             /* packs in parallel */
    br_comm comm;
    int32_t n_row_max;         /* rows of a step */
} br_model_options;

/* The largest shapes the backend will see; call before it is opened. */
bi_limits br_model_limits(const br_config *config, int32_t rank_max, int32_t n_slot, int32_t n_row_max, int32_t n_pos_max);

br_status br_model_open(const br_model_options *options, br_model **out);
void br_model_close(br_model *model);

/* One cache page holds BR_PAGE_TOK positions of every MLA layer; one state holds every KDA layer of a sequence. */
size_t br_model_page_bytes(const br_model *model);
size_t br_model_state_bytes(const br_model *model);

/* Pointers are the device's, but for batch and trace. */
typedef struct br_step {
    const bi_batch *batch;
    const int32_t *token;    /* (n_row) */
    const int32_t *row_slot; /* (n_row) adapter slot, -1 base */
    unsigned char *page_base;
    const int32_t *page_table; /* (n_seq, page_ld) page numbers; or NULL with page_first (n_seq) */
    int32_t page_ld;
    const int32_t *page_first;
    unsigned char *state_base;
    const int32_t *state_index; /* (n_seq) */
    uint32_t *row_fault;        /* (n_row), zeroed by the caller */
    const br_trace *trace;      /* NULL: nobody watches */
} br_step;

/* *final: (n_row, d_model) bf16 after the last norm, the model's memory, valid until the next forward. */
br_status br_model_forward(br_model *model, const br_step *step, const bi_bf16 **final);

/* logit (n_row, n_vocab) f32 of rows x (n_row, d_model). A fault is written to row_fault. n_row <= n_row_max. */
br_status br_model_logits(br_model *model, int32_t n_row, const bi_bf16 *x, float *logit, uint32_t *row_fault);
/* Log-probs of given tokens; arrays as bi_score. */
br_status br_model_score(br_model *model, int32_t n_row, const bi_bf16 *x, const int32_t *token, const float *temperature,
                         float *logprob, float *logprob_raw, float *entropy, uint32_t *row_fault);

const bi_ops *br_model_ops(const br_model *model);

#endif
