/* Views on the host device; see device_view.h. The hash is made of the pieces that the threads of a GPU make it of, one after the other. */
#include "device_parts.h"
#include "view_core.h"

br_status br_device_host_fill(br_device *device, const br_fill *fill, int32_t n) {
    (void)device;
    for (int32_t i = 0; i < n; i++)
        for (int64_t run = 0; run < fill[i].n_run; run++)
            for (int64_t k = 0; k < fill[i].n_half; k++)
                fill[i].at[run * fill[i].pitch + k] = view_fill_half(&fill[i], k);
    return BR_OK;
}

br_status br_device_host_check(br_device *device, const br_fill *fill, int32_t n, uint32_t *torn) {
    (void)device;
    for (int32_t i = 0; i < n; i++)
        for (int64_t run = 0; run < fill[i].n_run; run++)
            for (int64_t k = 0; k < fill[i].n_half; k++)
                if (fill[i].at[run * fill[i].pitch + k] != view_fill_half(&fill[i], k))
                    *torn = 1;
    return BR_OK;
}

static br_seen hash_long(const br_view *v) {
    const view_form form = view_form_of(v);
    const uint32_t n = view_bytes(v), n_block = br_xxh3_blocks(n);
    uint64_t acc[BR_XXH3_LANES];
    view_flags flags = {0, 0};
    br_seen seen = {.first_bad = UINT32_MAX};
    for (int i = 0; i < BR_XXH3_LANES; i++)
        acc[i] = br_xxh3_start(i);
    for (uint32_t block = 0; block <= n_block; block++) {
        uint64_t sum[BR_XXH3_LANES] = {0};
        for (uint32_t s = 0; s <= VIEW_STRIPES; s++)
            for (int p = 0; p < VIEW_PIECES; p++) {
                if (block == n_block)
                    view_rest(v, form, s, p, &sum[2 * p], &flags);
                else if (s < VIEW_STRIPES)
                    view_take(v, form, block * BR_XXH3_BLOCK + s * BR_XXH3_STRIPE, 8 * (int)s, p, &sum[2 * p], &flags);
            }
        for (int i = 0; i < BR_XXH3_LANES; i++)
            acc[i] = block < n_block ? br_xxh3_step(acc[i], sum[i], br_xxh3_step_key(i)) : acc[i] + sum[i];
    }
    for (uint32_t e = 0; view_has_bad(flags) && seen.first_bad == UINT32_MAX; e++)
        if (view_is_bad(v, e))
            seen.first_bad = e;
    seen.any = view_any(flags);
    seen.digest = br_xxh3_long(acc, n);
    return seen;
}

br_status br_device_host_hash(br_device *device, const br_view *view, int32_t n, br_seen *seen) {
    (void)device;
    for (int32_t i = 0; i < n; i++)
        seen[i] = view_bytes(&view[i]) <= BR_XXH3_SHORT ? view_short(&view[i]) : hash_long(&view[i]);
    return BR_OK;
}

br_status br_device_host_place(br_device *device, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen) {
    for (int32_t i = 0; i < n; i++)
        for (uint32_t e = 0; e < view_bytes(&view[i]) / sizeof(uint16_t); e++)
            *view_at(&view[i], e) = src[i][e];
    return br_device_host_hash(device, view, n, seen);
}
