/* resume_check: would a run go on as the file in its place was begun? Layer: engine. */
#ifndef RESUME_CHECK_H
#define RESUME_CHECK_H

#include "rollout_file.h"

/* have: a sequence of the file at `path`; want: the same prompt and sample as this run would begin it. BR_E_ARG names the first of name, adapter,
 * settings and prompt that differs, with both values. */
br_status resume_check(const char *path, const rollout_seq *have, const rollout_seq *want);

#endif
