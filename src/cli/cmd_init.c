/* bitroll init: a random checkpoint and adapter. */
#include "cli.h"

#include <stdio.h>

cli_exit cmd_init(cli *c) {
    br_report report = {0};
    const br_watch watch = cli_watch();
    c->init.out_dir = c->out;
    c->init.seed = c->seed;
    if (!c->init.preset && !c->init.lora_only) {
        fprintf(stderr, "bitroll: init needs --preset P, or --lora-only to leave the checkpoint as it is\n");
        return CLI_USAGE;
    }
    if (!c->init.lora_rank != !c->init.lora_out_dir || (c->init.lora_only && !c->init.lora_rank)) {
        fprintf(stderr, "bitroll: an adapter needs both --lora-rank R and --lora-out DIR\n");
        return CLI_USAGE;
    }
    return cli_finish(c, "init", br_job_init(&c->init, &watch, &report), &report);
}
