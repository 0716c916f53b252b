/* rollout_read: what the writer's copies need of a reader. Layer: io, private to rollout_*.c. */
#ifndef ROLLOUT_READ_H
#define ROLLOUT_READ_H

#include "rollout_layout.h"

const void *rollout_reader_column(const rollout_reader *reader, int column); /* all rows; NULL when the column is absent */

#endif
