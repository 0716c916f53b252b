/* bitroll generate: prompts in, rollouts out. */
#include "cli.h"

#include <stdio.h>

cli_exit cmd_generate(cli *c) {
    br_report report = {0};
    const br_watch watch = cli_watch();
    if (c->sampling.min_new > c->sampling.max_new) {
        fprintf(stderr, "bitroll: --min-new: expected at most --max-new, %d, found %d\n", c->sampling.max_new,
                c->sampling.min_new);
        return CLI_USAGE;
    }
    const br_generate_options options = {
        .engine = c->engine, .prompts_path = c->prompts, .out_path = c->out, .sampling = c->sampling,
        .n_sample = c->n_sample, .seed = c->seed, .shuffle_seed = c->shuffle_seed, .resume = c->resume,
        .commit_every = c->commit_every,
    };
    return cli_finish(c, "generate", br_job_generate(&options, &watch, &report), &report);
}
