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
#include "device_view.h"
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
    int32_t swap_rank;         /* 0: adapters stay as they are; else see model_adapter below */
} br_model_options;

/* The largest shapes the backend will see; call before it is opened. */
bi_limits br_model_limits(const br_config *config, int32_t rank_max, int32_t n_slot, int32_t n_row_max, int32_t n_pos_max);

/* What a model takes of its device, known before it is opened: the packed weights and adapters, the work buffers; and what its owner may want to
 * know then: br_model_page_bytes, br_model_state_bytes, br_model_adapter_values. */
typedef struct br_model_sizes {
    size_t weights, work, page, state, adapter_values;
} br_model_sizes;
void br_model_measure(const br_model_options *options, br_model_sizes *out);

br_status br_model_open(const br_model_options *options, br_model **out);
void br_model_close(br_model *model);
/* Other weights of the same config, put where the model's lie now; adapters keep what they hold. options: as at open, but for the
 * weights. No forward may be under way. *changed 1 on error: some weights are new, some old, the model can only be closed. */
br_status br_model_reload(br_model *model, const br_model_options *options, int32_t *changed);

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

/* ---- adapters that change while the model is open (model_adapter.c) -------------------------------------------------------
 * With swap_rank every adapter name owns BR_MODEL_WAYS slots, name * BR_MODEL_WAYS + way, whose stacks have that rank on every map that
 * can carry an adapter, at addresses that stay. Way 0 begins as the adapter that was opened, way 1 empty: zeros, which give the base bits.
 * Without it slot = name. Ops read the slot of a row from row_slot, so writing one that no row has disturbs nobody. */
enum { BR_MODEL_WAYS = 2 };
int32_t br_model_slot_count(const br_model *model);

typedef struct br_model_matrix {
    int32_t slot;
    br_class cls;
    int32_t layer, expert; /* -1: not of an expert */
    int32_t is_b, rank;    /* A (rank, n_in), B (n_out, rank); rank at most swap_rank, the room behind it is zero */
} br_model_matrix;

/* value: row-major bf16 in host memory, NULL with rank 0: all zero. Only with swap_rank. Errors of the backend. */
br_status br_model_adapter_write(br_model *model, const br_model_matrix *at, const uint16_t *value);
/* s of one map. rank 0 gives 0. */
br_status br_model_adapter_scale(br_model *model, const br_model_matrix *at, double alpha, int32_t rslora);

/* The way back, out of the memory that forwards read: value (as above) receives the matrix. *intact 0: something besides those values
 * is not as write leaves it: the room behind the rank, the backend's other copies of an element, the copy that an absorbed map keeps,
 * or s, which is looked at with A. rank 0: nothing is written to value, all must be zero. */
typedef struct br_model_reader br_model_reader;
br_status br_model_reader_open(br_model *model, br_model_reader **out);
void br_model_reader_close(br_model_reader *reader); /* NULL is a no-op */
br_status br_model_adapter_read(br_model_reader *reader, const br_model_matrix *at, double alpha, int32_t rslora, uint16_t *value, int32_t *intact);
size_t br_model_adapter_values(const br_model *model); /* the most values of a matrix */

/* ---- the same without the processor (model_view.c) ------------------------------------------------------------------------
 * Where the backend's form is rows of bf16 (bi_ops.mat_row), device_view.h writes and reads adapters in place, all at once. */
int br_model_has_views(const br_model *model);
/* Where the matrix (rank at->rank) lies: n views, 0 (rank 0, or nothing reserved), 1, or of an absorbed map's A both copies. */
int32_t br_model_adapter_views(const br_model *model, const br_model_matrix *at, br_view view[2]);
/* What surrounds it, which has to be zero, and s with A: each is handed to `each`, owner 0, until one fails. */
typedef br_status (*br_model_each_fill)(void *context, const br_fill *fill);
br_status br_model_adapter_room(const br_model *model, const br_model_matrix *at, br_model_each_fill each, void *context);
br_status br_model_adapter_scales(const br_model *model, const br_model_matrix *at, double alpha, int32_t rslora, br_model_each_fill each,
                                  void *context);

#endif
