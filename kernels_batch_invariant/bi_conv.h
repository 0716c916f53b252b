/* bi_conv: causal depthwise convolution of 4 taps, then SiLU.      Contract: N-CONV
 * x (n_row, n_chan) bf16, row stride x_ld; w (n_chan, 4) f32; y (n_row, n_chan) bf16, row stride y_ld, not x.
 * history: 3 rows of n_chan bf16 a sequence, the inputs at positions pos-3, pos-2, pos-1; read unless before position 0,
 * overwritten with the last three of the segment. bytes: 3 * n_chan * 2 at history (offset already applied to base).
 *
 * bi_conv_group: n calls of bi_conv, as if made in order; none reads what another writes. One launch where the backend can: those of one
 * batch and width, BI_CONV_GROUP_MAX at most. */
#ifndef BI_CONV_H
#define BI_CONV_H
#include "bi_types.h"
enum { BI_CONV_GROUP_MAX = 3 }; /* q, k and v of a layer */
typedef struct bi_conv_args {
    const bi_batch *batch;
    int32_t n_chan;
    const bi_bf16 *x;
    int32_t x_ld;
    const float *w;
    bi_state history;
    bi_bf16 *y;
    int32_t y_ld;
} bi_conv_args;
#endif
