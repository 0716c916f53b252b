/* Views on the host device; see device_view.h. The hash is made as the threads of a GPU make it, one after the other. */
#include "device_parts.h"
#include "view_core.h"

br_status br_device_host_place(br_device *device, const br_view *view, const uint16_t *const *src, int32_t n) {
    (void)device;
    for (int32_t i = 0; i < n; i++)
        for (uint32_t e = 0; e < view_bytes(&view[i]) / sizeof(uint16_t); e++)
            *view_at(&view[i], e) = src[i][e];
    return BR_OK;
}

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

static br_digest hash_long(const br_view *v, view_notes *notes) {
    const view_form form = view_form_of(v);
    const uint32_t n_block = br_xxh3_blocks(view_bytes(v));
    uint64_t acc[BR_XXH3_LANES];
    for (int i = 0; i < BR_XXH3_LANES; i++)
        acc[i] = br_xxh3_start(i);
    for (uint32_t block = 0; block <= n_block; block++) {
        uint64_t sum[BR_XXH3_LANES] = {0};
        for (int l = 0; l < VIEW_TEAM; l++) {
            const view_keys keys = view_keys_of(l);
            uint64_t *mine = &sum[2 * (l % 4)], word[2];
            for (int j = 0; j < 2 && block < n_block; j++) {
                const uint32_t e = view_piece(block, l, j);
                view_read(v, form, e, word);
                view_note(notes, e, word);
                br_xxh3_add(mine, word, keys.key[j]);
            }
            if (block == n_block)
                view_rest(v, form, l, &keys, mine, notes);
        }
        for (int i = 0; i < BR_XXH3_LANES; i++)
            acc[i] = block < n_block ? br_xxh3_step(acc[i], sum[i], br_xxh3_step_key(i)) : acc[i] + sum[i];
    }
    return br_xxh3_long(acc, view_bytes(v));
}

br_status br_device_host_hash(br_device *device, const br_view *view, int32_t n, br_seen *seen) {
    (void)device;
    for (int32_t i = 0; i < n; i++) {
        view_notes notes = {.first_bad = UINT32_MAX};
        seen[i].digest = view_bytes(&view[i]) <= BR_XXH3_SHORT ? view_short(&view[i], &notes) : hash_long(&view[i], &notes);
        seen[i].first_bad = notes.first_bad;
        seen[i].any = notes.any != 0;
    }
    return BR_OK;
}
