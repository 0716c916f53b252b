/* bitroll parity: two files of one run, log-prob bits against log-prob bits. */
#include "cli.h"

cli_exit cmd_parity(cli *c) {
    br_report report = {0};
    return cli_finish(c, "parity", br_job_parity(c->positional[0], c->positional[1], &report), &report);
}
