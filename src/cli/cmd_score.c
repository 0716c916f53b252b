/* bitroll score: the trainer's forward over given sequences. */
#include "cli.h"

cli_exit cmd_score(cli *c) {
    br_report report = {0};
    const br_watch watch = cli_watch();
    const br_score_options options = {
        .engine = c->engine, .in_path = c->in, .out_path = c->out, .pack_tokens = c->pack_tokens,
        .adapter_override = c->adapter_override,
    };
    return cli_finish(c, "score", br_job_score(&options, &watch, &report), &report);
}
