/* cli: what the verbs of the command share: options in, summary line out. Layer: cli; includes bitroll.h and libc only. */
#ifndef CLI_H
#define CLI_H

#include "bitroll.h"

enum { CLI_ADAPTER_MAX = 64 };

typedef enum cli_exit { CLI_DONE = 0, CLI_CHECK_FAILED = 1, CLI_USAGE = 2 } cli_exit;

/* Every option of every verb has its place here; the table in cli_options.c says which verb takes which. */
typedef struct cli {
    br_engine_options engine;
    br_sampling sampling;
    br_adapter_source adapter[CLI_ADAPTER_MAX];
    br_init_options init;
    br_bench_options bench;
    const char *prompts, *in, *out, *adapter_override, *as;
    const char *positional[2];
    int32_t n_positional;
    int32_t n_sample, pack_tokens, commit_every, recompute, resume, foreign, json, stage_hash, choices, seq, pos_min, pos_max;
    uint64_t seed, shuffle_seed;
} cli;

typedef struct cli_verb {
    const char *name, *arguments, *help; /* arguments: of the usage line */
    int32_t n_positional;                /* how many it needs */
    cli_exit (*run)(cli *c);
} cli_verb;

extern const cli_verb cli_verbs[];
extern const int32_t cli_verb_count;

cli_exit cmd_init(cli *c);
cli_exit cmd_generate(cli *c);
cli_exit cmd_score(cli *c);
cli_exit cmd_parity(cli *c);
cli_exit cmd_verify(cli *c);
cli_exit cmd_dump(cli *c);
cli_exit cmd_inspect(cli *c);
cli_exit cmd_digest(cli *c);
cli_exit cmd_bench(cli *c);

/* Fills *c from the arguments after the verb. 0 and a sentence on stderr when something is wrong. */
int cli_parse(cli *c, const cli_verb *verb, int argc, char **argv);
void cli_help(void);
void cli_verb_help(const cli_verb *verb);

/* Prints the report's lines and the summary line (or the JSON object), and turns the status into an exit code. */
cli_exit cli_finish(const cli *c, const char *verb, br_status status, br_report *report);
/* A bar on stderr when that is a terminal, else nothing. */
br_watch cli_watch(void);
void cli_print_line(void *context, const char *line);

#endif
