/* bitroll VERB [options]: finds the verb, parses its options, runs it. */
#include "cli.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

/* In the order of the verb bits in cli_options.c. */
const cli_verb cli_verbs[] = {
    {"init", "--preset P --seed S --out DIR [--lora-rank R --lora-out DIR]",
     "write a random checkpoint and adapter, the same bytes on every machine", 0, cmd_init},
    {"generate", "--model DIR [--adapter NAME=DIR]... --prompts F.jsonl --out R.h5 [options]",
     "roll out prompts into an HDF5 file", 0, cmd_generate},
    {"score", "--model DIR [--adapter NAME=DIR]... --in R.h5|F.jsonl --out T.h5 [options]",
     "log-probs of whole sequences by the trainer's forward", 0, cmd_score},
    {"parity", "[--foreign] A.h5 B.h5", "compare the log-prob bits of two files of one run", 2, cmd_parity},
    {"verify", "F.h5 [--model DIR --adapter NAME=DIR --recompute K]",
     "replay the hash chain of a rollout file or of a run's ledger; with a model, compute sequences again", 1, cmd_verify},
    {"dump", "--stage-hash --model DIR [--adapter NAME=DIR]... --in R.h5|F.jsonl [options]",
     "a hash of every stage of every row, to find the first different bit", 0, cmd_dump},
    {"inspect", "[--model DIR]", "limits, layouts and contract constants; of a model its tensors", 0, cmd_inspect},
    {"digest", "DIR", "digests of the tensors of a checkpoint or adapter", 1, cmd_digest},
    {"bench", "[--rows PREFIX,..] [--csv FILE] [options]", "times of the ops on an H100 or H200, beside the card's limits and a peer", 0,
     cmd_bench},
};

const int32_t cli_verb_count = sizeof cli_verbs / sizeof cli_verbs[0];

static const cli_verb *find_verb(const char *name) {
    for (int32_t i = 0; i < cli_verb_count; i++)
        if (strcmp(cli_verbs[i].name, name) == 0)
            return &cli_verbs[i];
    return NULL;
}

static int is_help(const char *text) {
    return strcmp(text, "--help") == 0 || strcmp(text, "-h") == 0;
}

static int is_version(const char *text) {
    return strcmp(text, "--version") == 0 || strcmp(text, "version") == 0;
}

/* `bitroll help`, and `bitroll help VERB` for `bitroll VERB --help`; the verbs of this file are told of by the first. */
static cli_exit help(const char *name) {
    if (name && (is_help(name) || is_version(name) || strcmp(name, "help") == 0))
        name = NULL;
    const cli_verb *verb = name ? find_verb(name) : NULL;
    if (name && !verb) {
        fprintf(stderr, "bitroll: no verb '%s'; see bitroll --help\n", name);
        return CLI_USAGE;
    }
    if (verb)
        cli_verb_help(verb);
    else
        cli_help();
    return CLI_DONE;
}

static cli_exit run(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "bitroll: expected a verb; see bitroll --help\n");
        return CLI_USAGE;
    }
    if (is_help(argv[1]))
        return help(NULL);
    if (strcmp(argv[1], "help") == 0)
        return help(argc > 2 ? argv[2] : NULL);
    if (is_version(argv[1])) {
        printf("bitroll %s\n", br_version());
        return CLI_DONE;
    }
    const cli_verb *verb = find_verb(argv[1]);
    if (!verb) {
        fprintf(stderr, "bitroll: no verb '%s'; see bitroll --help\n", argv[1]);
        return CLI_USAGE;
    }
    for (int i = 2; i < argc; i++) {
        if (is_help(argv[i])) {
            cli_verb_help(verb);
            return CLI_DONE;
        }
    }
    static cli c;
    c.sampling = br_sampling_default();
    c.seq = c.pos_min = c.pos_max = -1;
    if (!cli_parse(&c, verb, argc - 2, argv + 2))
        return CLI_USAGE;
    return verb->run(&c);
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN); /* a limit of file size is then a failed write with a sentence, as a full disk is */
    const cli_exit code = run(argc, argv);
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    fprintf(stderr, "bitroll: cannot write to standard output\n");
    return CLI_USAGE;
}
