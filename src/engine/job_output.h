/* job_output: may a job write where it is told to? Layer: engine. Asked before anything is loaded. */
#ifndef JOB_OUTPUT_H
#define JOB_OUTPUT_H

#include "br_status.h"

/* A rollout file ends in a rename over `path`, which replaces whatever stands there: BR_E_ARG unless that is nothing, an empty
 * file, or an HDF5 file other than `input`. BR_E_IO: no regular file, or a folder that cannot be written. */
br_status job_output_check(const char *path, const char *input);

#endif
