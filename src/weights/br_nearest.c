/* Edit distance with an early end; see br_nearest.h. */
#include "br_nearest.h"

#include <stdio.h>
#include <string.h>

/* Two names further apart than this share a place in the model by accident only. */
enum { DISTANCE_MAX = 24 };

static const char *plain(const char *name) {
    static const char prefix[] = "language_model.";
    return strncmp(name, prefix, sizeof prefix - 1) == 0 ? name + sizeof prefix - 1 : name;
}

static int32_t min3(int32_t a, int32_t b, int32_t c) {
    int32_t m = a < b ? a : b;
    return m < c ? m : c;
}

/* Insertions, deletions and changes from a to b; `limit` or more is returned as `limit`. Both shorter than BR_NAME_BYTES. */
static int32_t edit_distance(const char *a, const char *b, int32_t limit) {
    while (*a && *a == *b)
        a++, b++;
    int32_t na = (int32_t)strlen(a), nb = (int32_t)strlen(b);
    while (na > 0 && nb > 0 && a[na - 1] == b[nb - 1])
        na--, nb--;
    if (na - nb >= limit || nb - na >= limit)
        return limit;
    int32_t row[BR_NAME_BYTES];
    for (int32_t j = 0; j <= nb; j++)
        row[j] = j;
    for (int32_t i = 1; i <= na; i++) {
        int32_t diagonal = row[0], least = row[0] = i;
        for (int32_t j = 1; j <= nb; j++) {
            int32_t above = row[j];
            row[j] = min3(above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = above;
            least = row[j] < least ? row[j] : least;
        }
        if (least >= limit)
            return limit;
    }
    return row[nb] < limit ? row[nb] : limit;
}

void br_nearest_begin(br_nearest *nearest, const char *target) {
    *nearest = (br_nearest){0};
    snprintf(nearest->target, sizeof nearest->target, "%s", plain(target));
}

void br_nearest_offer(br_nearest *nearest, const char *name) {
    const int full = nearest->n_best == BR_NEAREST_MAX;
    int32_t limit = full ? nearest->distance[BR_NEAREST_MAX - 1] : DISTANCE_MAX;
    if (strlen(name) >= BR_NAME_BYTES)
        return;
    int32_t distance = edit_distance(plain(name), nearest->target, limit);
    if (distance >= limit)
        return;
    int32_t at = full ? BR_NEAREST_MAX - 1 : nearest->n_best++;
    for (; at > 0 && nearest->distance[at - 1] > distance; at--) {
        nearest->distance[at] = nearest->distance[at - 1];
        memcpy(nearest->best[at], nearest->best[at - 1], BR_NAME_BYTES);
    }
    nearest->distance[at] = distance;
    memcpy(nearest->best[at], name, strlen(name) + 1);
}

void br_nearest_text(const br_nearest *nearest, char text[BR_NEAREST_TEXT_BYTES]) {
    size_t n = 0;
    text[0] = 0;
    for (int32_t i = 0; i < nearest->n_best; i++)
        n += (size_t)snprintf(text + n, BR_NEAREST_TEXT_BYTES - n, "%s'%s'", i ? ", " : "; nearest: ", nearest->best[i]);
}
