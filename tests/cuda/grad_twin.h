/* grad_twin: one gradient op in both forms. All arrays come from a twin (twin.h). The GPU runs twice from the same memory, and every
 * byte must come out equal, the bytes outside the outputs as they went in; then the host runs, and each output of the GPU must be
 * within 4e-3 of the host's, norm of the difference over the norm, and each element within the bound of grad_bound.h. */
#ifndef GRAD_TWIN_H
#define GRAD_TWIN_H

#include "bi_grad.h"
#include "twin.h"

enum { GRAD_TWIN_OUT_MAX = 64 };

typedef struct grad_twin {
    twin t;
    bi_grad grad[2]; /* TWIN_ORACLE: host, TWIN_CUDA: cuda */
    struct {
        const char *name;
        float *host;
        int64_t n, width;
    } out[GRAD_TWIN_OUT_MAX];
    int n_out;
} grad_twin;

typedef br_status (*grad_twin_call)(const bi_grad *grad, const grad_twin *g, twin_side side, void *context);

void grad_twin_open(grad_twin *g, const bi_limits *limits, size_t bytes);
void grad_twin_close(grad_twin *g);
void grad_twin_reset(grad_twin *g);
/* An output of n floats in rows of width, poisoned with NaN: every one must be written. */
float *grad_twin_out(grad_twin *g, const char *name, int64_t n, int64_t width);
void grad_twin_run(grad_twin *g, const char *what, grad_twin_call call, void *context);

#endif
