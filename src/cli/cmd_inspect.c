/* bitroll inspect: what this build, or a checkpoint, is made of. */
#include "cli.h"

cli_exit cmd_inspect(cli *c) {
    br_report report = {.contract_digest = br_contract_digest()};
    return cli_finish(c, "inspect", br_job_inspect(c->engine.model_dir, cli_print_line, NULL), &report);
}
