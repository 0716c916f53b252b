/* bitroll bench: times of the ops beside the limits of the card and a peer. */
#include "cli.h"

#include <stdio.h>

/* A run takes minutes: each row is shown when it is there, through a pipe too. */
static void print_row(void *context, const char *line) {
    cli_print_line(context, line);
    fflush(stdout);
}

cli_exit cmd_bench(cli *c) {
    br_report report = {0};
    return cli_finish(c, "bench", br_job_bench(&c->bench, print_row, NULL, &report), &report);
}
