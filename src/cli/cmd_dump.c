/* bitroll dump: a line a (sequence, position, layer, stage). */
#include "cli.h"

#include <stdio.h>
#include <string.h>

cli_exit cmd_dump(cli *c) {
    br_report report = {0};
    const int through_engine = c->as && strcmp(c->as, "generate") == 0;
    if (c->as && !through_engine && strcmp(c->as, "score") != 0) {
        fprintf(stderr, "bitroll: --as: expected score or generate, found '%s'\n", c->as);
        return CLI_USAGE;
    }
    const br_dump_options options = {
        .engine = c->engine, .in_path = c->in, .through_engine = through_engine, .choices = c->choices, .seq = c->seq,
        .pos_min = c->pos_min, .pos_max = c->pos_max, .adapter_override = c->adapter_override,
    };
    return cli_finish(c, "dump", br_job_dump(&options, cli_print_line, NULL, &report), &report);
}
