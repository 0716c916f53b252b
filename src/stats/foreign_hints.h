/* foreign_hints: what simple mistake would explain the differences of two files? Layer: stats; includes base and io.
 *
 * An explanation is another reading of one file, such as "each log-prob belongs to the token before". It is put forward when it brings
 * the mean |d| of at least half of the compared slots down to a tenth: then it, and not the engines, made most of the difference. The
 * facts below it are read off the log-probs themselves. */
#ifndef FOREIGN_HINTS_H
#define FOREIGN_HINTS_H

#include "foreign_parity.h"

enum { FOREIGN_HINT_SLOTS_MIN = 8 }; /* fewer agree by chance */

typedef void (*foreign_say)(void *context, const char *sentence);
/* At least one sentence when log-probs were compared and did not pass. */
void foreign_hints(const foreign_files *files, const foreign_result *result, foreign_say say, void *context);

#endif
