/* engine_rig: checkpoints made on the spot, sets of requests, and runs of them through the engine and the scorer, in memory.
 * The suites of the whole engine share it: one reference run, then any schedule must give the same tokens and bits. */
#ifndef ENGINE_RIG_H
#define ENGINE_RIG_H

#include "bitroll.h"

enum { RIG_TOK_MAX = 1536, RIG_ADAPTERS = 2, RIG_LOGPROBS = 3 };

typedef struct rig_model {
    char preset[32];
    char dir[256], adapter_dir[RIG_ADAPTERS][256];
    br_adapter_source adapter[RIG_ADAPTERS]; /* "a", "b" */
    int32_t n_vocab;
} rig_model;

/* Makes the preset's checkpoint and two rank-32 adapters below test_tmp_dir(). Call in a fixture of the parent process. */
void rig_model_make(rig_model *model, const char *preset);
/* Options that open it: both adapters, everything else default. */
br_engine_options rig_options(const rig_model *model);

typedef struct rig_request {
    char uid[16];
    uint32_t sample;
    int adapter; /* -1 base, 0 "a", 1 "b" */
    int32_t n_prompt, max_new;
    int32_t prompt[RIG_TOK_MAX];
    float temperature;
    int32_t top_k;
    double top_p;
} rig_request;

typedef struct rig_text {
    br_status error;
    br_stop_reason stop;
    char sentence[192]; /* of an error */
    int32_t n_tok; /* prompt and response */
    int32_t token[RIG_TOK_MAX];
    uint32_t logprob[RIG_LOGPROBS][RIG_TOK_MAX]; /* logprob, raw, kept; 0x7fc00000 where not sampled */
} rig_text;

/* n requests: prompt lengths n_min..n_max, adapters mixed, every third one a further sample of the prompt before it, some with
 * filters. Deterministic in the seed. */
void rig_requests(const rig_model *model, uint64_t seed, int n, int32_t n_min, int32_t n_max, int32_t max_new, rig_request *out);

br_request rig_br_request(const rig_request *r); /* as rig_generate submits it */
/* Runs all requests; order (n) is the order of arrival, NULL: as they are. Fails the test on an engine error. */
void rig_generate(const br_engine_options *options, const rig_request *request, const int *order, int n, rig_text *out);
/* The scorer's log-probs of the given texts, each with its request's adapter and temperature. */
void rig_score(const rig_model *model, int32_t pack, int32_t n_thread, const rig_request *request, const rig_text *text, int n, rig_text *out);

/* Every token and bit equal, else the test fails with the first difference and `what`. */
void rig_expect_equal(const rig_request *request, const rig_text *want, const rig_text *got, int n, const char *what);
/* The scorer's logprob and raw equal those of the sampled tokens. */
void rig_expect_scored(const rig_request *request, const rig_text *sampled, const rig_text *scored, int n, const char *what);

/* Allocates on the test's heap and fails the test when there is none. */
void *rig_alloc(size_t n, size_t bytes);

#endif
