/* device_view: matrices of 16-bit elements that lie in device memory by strides, thousands at a time: written, read back, hashed.
 *
 * Layer: device; includes base. It moves and compares bits: what an element means, and why a matrix lies as it does, is the caller's
 * business. The arrays of jobs lie in device memory themselves (br_mirror), calls are in stream order as those of br_device.h, and
 * nothing waits or allocates. On a host device the same jobs are done at the call. */
#ifndef DEVICE_VIEW_H
#define DEVICE_VIEW_H

#include "bitroll.h"
#include "br_device.h"

/* Element (r, c) of group g at at[g * group + r * row + c * col]. */
typedef struct br_part {
    uint16_t *at;
    int64_t group, row, col; /* elements */
    int32_t n_row;           /* of a group */
} br_part;

/* A matrix (n_row, n_col) in row-major order: of each group of rows the first ones lie in part 0, the others in part 1. A plain one is
 * one group in part 0. n_row * n_col elements, at least 1, are below 2^31. */
typedef struct br_view {
    int32_t n_row, n_col;
    br_part part[2];
} br_view;

/* What a view holds: XXH3-128 of its elements in row-major order, as br_hash_bytes gives it of a dense copy; its first bf16 element that
 * is NaN or Inf, UINT32_MAX when there is none; 1 unless all are zero, of either sign. */
typedef struct br_seen {
    br_digest digest;
    uint32_t first_bad, any;
} br_seen;
/* hash and place: a group of threads a view, in order, so long ones belong first. seen (n) in device memory. n = 0 is a no-op; BR_E_DEVICE. */
br_status br_device_hash(br_device *device, const br_view *view, int32_t n, br_seen *seen);

/* Writes where a view says, then looks at what lies there: seen is read back from its place. src[i] (n_row, n_col) of view i is dense, in device
 * memory, 2-byte aligned. Views and sources of a call do not overlap. */
br_status br_device_place(br_device *device, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen);

/* Runs of one 32-bit word again and again, whatever its place: n_run runs of n_half elements, one every `pitch` elements. */
typedef struct br_fill {
    uint16_t *at;
    int64_t n_run, n_half, pitch;
    uint32_t word;
} br_fill;
br_status br_device_fill(br_device *device, const br_fill *fill, int32_t n);
/* *torn, in device memory, becomes 1 when a run is something else, and stays as it is otherwise. */
br_status br_device_check(br_device *device, const br_fill *fill, int32_t n, uint32_t *torn);

#endif
