/* br_nearest: the names most like a given one, for sentences about unknown and missing tensors.
 * Layer: weights; includes base. Plain edit distance; "language_model." is left out of the comparison. Only runs on the way
 * to an error, over up to half a million names, so hopeless candidates are dropped early. */
#ifndef BR_NEAREST_H
#define BR_NEAREST_H

#include "br_weights.h"

enum { BR_NEAREST_MAX = 3, BR_NEAREST_TEXT_BYTES = BR_NEAREST_MAX * (BR_NAME_BYTES + 4) + 16 };

typedef struct br_nearest {
    char target[BR_NAME_BYTES];
    char best[BR_NEAREST_MAX][BR_NAME_BYTES]; /* ascending distance; of equal ones the first offered */
    int32_t distance[BR_NEAREST_MAX];
    int32_t n_best;
} br_nearest;

void br_nearest_begin(br_nearest *nearest, const char *target);
void br_nearest_offer(br_nearest *nearest, const char *name);
/* "; nearest: 'a', 'b'", or nothing when no offer is similar. */
void br_nearest_text(const br_nearest *nearest, char text[BR_NEAREST_TEXT_BYTES]);

#endif
