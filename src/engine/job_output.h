/* job_output: may a job write where it is told to? Layer: engine. Asked before anything is loaded. */
#ifndef JOB_OUTPUT_H
#define JOB_OUTPUT_H

#include "rollout_file.h"

/* A rollout file ends in a rename over `path`, which replaces whatever stands there: BR_E_ARG unless that is nothing, an empty
 * file, or an HDF5 file other than `input`. BR_E_IO: no regular file, or a folder that cannot be written. */
br_status job_output_check(const char *path, const char *input);
/* Ends the file of a job that is done. One in which every sequence ended in error is worth no older file: it is not written then. */
int job_output_is_worth(const br_report *report);
br_status job_output_close(rollout_writer *file, const br_report *report);

#endif
