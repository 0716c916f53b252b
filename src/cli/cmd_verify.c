/* bitroll verify: is a rollout file whole, and does the model say what it says? */
#include "cli.h"

#include <stdio.h>

cli_exit cmd_verify(cli *c) {
    br_report report = {0};
    const br_watch watch = cli_watch();
    if (!c->engine.model_dir && (c->recompute || c->engine.n_adapter)) {
        fprintf(stderr, "bitroll: verify needs --model DIR to compute sequences again\n");
        return CLI_USAGE;
    }
    const br_verify_options options = {
        .engine = c->engine, .path = c->positional[0], .n_recompute = c->recompute, .seed = c->seed,
    };
    return cli_finish(c, "verify", br_job_verify(&options, &watch, &report), &report);
}
