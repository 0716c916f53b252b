/* bitroll digest: the tensors of a checkpoint or adapter, one digest each, and their Merkle root. */
#include "cli.h"

cli_exit cmd_digest(cli *c) {
    br_report report = {0};
    return cli_finish(c, "digest", br_job_digest(c->positional[0], cli_print_line, NULL, &report), &report);
}
