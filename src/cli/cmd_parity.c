/* bitroll parity: two files, log-prob bits against log-prob bits; of one run of ours, or of any stacks. */
#include "cli.h"

cli_exit cmd_parity(cli *c) {
    br_report report = {0};
    const char *a = c->positional[0], *b = c->positional[1];
    return cli_finish(c, "parity", c->foreign ? br_job_parity_foreign(a, b, &report) : br_job_parity(a, b, &report), &report);
}
