/* The one table of options, and the parser that walks it. */
#include "cli.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INIT = 1, GENERATE = 2, SCORE = 4, PARITY = 8, VERIFY = 16, DUMP = 32, INSPECT = 64, DIGEST = 128, BENCH = 256 };
enum { RUNS = GENERATE | SCORE | VERIFY | DUMP, ENGINE = GENERATE | DUMP, ALL = 511 };

typedef enum kind { FLAG, I32, U64, F32, F64, TEXT, ADAPTER, IDS } kind;

typedef struct option {
    const char *name, *value;
    kind kind;
    int verbs, needed_by;
    size_t at;             /* in cli */
    double min, max, also; /* numbers from min to max, and one more */
    const char *help;
} option;

#define AT(field) offsetof(cli, field)
#define ANY 0, 0, 0
#define RANGE(min, max) min, max, min
#define ABOVE_0 0x1p-1074 /* the least number that is not 0, as a prompts file takes it */
#define RANGE_OR(also, min, max) min, max, also

/* A name may stand twice, for verbs to which it means different things. */
static const option options[] = {
    {"--preset", "P", TEXT, INIT, 0, AT(init.preset), ANY,
     "pico, nano, mini, small, k3-nano, kimi-linear-nano; layer-full, slice-full or kimi-linear-48b, always as a recipe; "
     "needed unless --lora-only"},
    {"--seed", "S", U64, INIT, 0, AT(seed), ANY, "seed of the weights [0]"},
    {"--out", "DIR", TEXT, INIT, INIT, AT(out), ANY, "folder of the checkpoint"},
    {"--lora-rank", "R", I32, INIT, 0, AT(init.lora_rank), RANGE(1, 256),
     "write a PEFT adapter of this rank on every map [none]"},
    {"--lora-out", "DIR", TEXT, INIT, 0, AT(init.lora_out_dir), ANY, "folder of that adapter [none]"},
    {"--lora-seed", "S", U64, INIT, 0, AT(init.lora_seed), ANY, "seed of that adapter [0]"},
    {"--lora-only", "", FLAG, INIT, 0, AT(init.lora_only), ANY,
     "leave the checkpoint in --out as it is, add an adapter for it"},
    {"--recipe", "", FLAG, INIT, 0, AT(init.recipe), ANY, "write the seed in place of tensors: each opening makes the same bytes again"},
    {"--model", "DIR", TEXT, RUNS | INSPECT, GENERATE | SCORE | DUMP, AT(engine.model_dir), ANY,
     "checkpoint folder: config.json and safetensors"},
    {"--adapter", "NAME=DIR", ADAPTER, RUNS, 0, 0, ANY,
     "PEFT adapter folder under a name; may be given again, 64 at most [none]"},
    {"--allow-zero-adapter", "", FLAG, RUNS, 0, AT(engine.allow_zero_adapter), ANY, "accept an adapter whose B is all zero"},
    {"--backend", "NAME", TEXT, RUNS, 0, AT(engine.backend), ANY, "oracle, or cuda on an H100 or H200 [cuda where one is]"},
    {"--threads", "N", I32, RUNS, 0, AT(engine.n_thread), RANGE(1, 256), "threads [all cores]"},
    {"--prompts", "F.jsonl", TEXT, GENERATE, GENERATE, AT(prompts), ANY,
     "one {\"prompt\": [ids], \"uid\"?, \"adapter\"?, \"n\"?, \"seed\"?, sampling...} a line"},
    {"--in", "FILE", TEXT, SCORE | DUMP, SCORE | DUMP, AT(in), ANY, "rollout .h5, or token ids as .jsonl"},
    {"--out", "FILE", TEXT, GENERATE | SCORE, GENERATE | SCORE, AT(out), ANY, "rollout .h5 to write"},
    {"--n", "N", I32, GENERATE, 0, AT(n_sample), RANGE(1, 16777215), "samples a prompt [1]"},
    {"--max-new", "N", I32, GENERATE, 0, AT(sampling.max_new), RANGE(1, 1048576), "most tokens to sample [16]"},
    {"--min-new", "N", I32, GENERATE, 0, AT(sampling.min_new), RANGE(0, 1048576),
     "tokens before end-of-sequence and stop tokens end the text [0]"},
    {"--temperature", "T", F32, GENERATE, 0, AT(sampling.temperature), RANGE_OR(0, 0x1p-10, 0x1p10),
     "0 greedy, else 2^-10 to 2^10 [1]"},
    {"--top-k", "K", I32, GENERATE, 0, AT(sampling.top_k), RANGE(0, INT_MAX), "keep the K best; 0 off [0]"},
    {"--top-p", "P", F64, GENERATE, 0, AT(sampling.top_p), RANGE(ABOVE_0, 1),
     "keep the smallest set of at least this probability; 1 off [1]"},
    {"--min-p", "P", F32, GENERATE, 0, AT(sampling.min_p), RANGE(0, 1),
     "keep what has at least this share of the best one's probability; 0 off [0]"},
    {"--seed", "S", U64, GENERATE, 0, AT(seed), ANY, "seed of the sampler [0]"},
    {"--stop", "ID,ID,..", IDS, GENERATE, 0, AT(sampling.stop), ANY, "token ids that end the text, 16 at most [none]"},
    {"--ignore-eos", "", FLAG, GENERATE, 0, AT(sampling.ignore_eos), ANY, "the end-of-sequence token does not end the text"},
    {"--top-logprobs", "N", I32, GENERATE, 0, AT(sampling.top_logprobs), RANGE(0, BR_TOP_LOGPROBS_MAX),
     "record the N best alternatives of each token [0]"},
    {"--entropy", "", FLAG, GENERATE, 0, AT(sampling.entropy), ANY, "record the entropy of each distribution"},
    {"--max-seqs", "N", I32, ENGINE, 0, AT(engine.max_seqs), RANGE(1, 16384), "sequences that run at once [64]"},
    {"--chunk-tokens", "N", I32, ENGINE, 0, AT(engine.chunk_tokens), RANGE(1, 1048576),
     "tokens of one step, decoded and prefilled [256, at least --max-seqs]"},
    {"--kv-pages", "N", I32, ENGINE, 0, AT(engine.kv_pages), RANGE(1, 1048576),
     "cache pages of 64 tokens [16 for each of --max-seqs]"},
    {"--state-every", "N", I32, ENGINE, 0, AT(engine.state_every), RANGE_OR(-1, 64, 1048576),
     "keep a KDA state every N tokens, a multiple of 64; -1 only at prompt_len - 1 [256]"},
    {"--shuffle-seed", "S", U64, GENERATE, 0, AT(shuffle_seed), ANY,
     "requests arrive in an order drawn by S; 0 file order [0]"},
    {"--preempt-every", "N", I32, ENGINE, 0, AT(engine.preempt_every), RANGE(0, INT_MAX),
     "test aid: preempt a sequence at every N-th step; 0 never [0]"},
    {"--no-prefix-cache", "", FLAG, GENERATE, 0, AT(engine.no_prefix_cache), ANY, "sequences share nothing"},
    {"--commit-every", "N", I32, GENERATE, 0, AT(commit_every), RANGE(1, INT_MAX), "finished sequences a commit [1]"},
    {"--resume", "", FLAG, GENERATE, 0, AT(resume), ANY, "go on with the file of a killed run of the same settings"},
    {"--pack-tokens", "N", I32, SCORE, 0, AT(pack_tokens), RANGE(1, 1048576),
     "tokens scored at once; a longer sequence makes room for itself [2048]"},
    {"--adapter-override", "NAME", TEXT, SCORE | DUMP, 0, AT(adapter_override), ANY,
     "run every sequence with this adapter, or base [its own]"},
    {"--foreign", "", FLAG, PARITY, 0, AT(foreign), ANY,
     "files of any stacks, from python -m bitroll.importers.NAME or ours: what differs, and what simple mistake explains it"},
    {"--recompute", "K", I32, VERIFY, 0, AT(recompute), RANGE(1, INT_MAX),
     "with --model: sequences to compute again [4]; of a ledger, of each step [all]"},
    {"--seed", "S", U64, VERIFY, 0, AT(seed), ANY, "draws the sequences to compute again [0]"},
    {"--stage-hash", "", FLAG, DUMP, DUMP, AT(stage_hash), ANY,
     "a line a (sequence, position, layer, stage): a 64-bit hash of the bits"},
    {"--choices", "", FLAG, DUMP, 0, AT(choices), ANY, "with the chosen experts and index positions"},
    {"--as", "WAY", TEXT, DUMP, 0, AT(as), ANY, "score: whole sequences; generate: through the paged engine [score]"},
    {"--seq", "I", I32, DUMP, 0, AT(seq), RANGE(0, INT_MAX), "only the I-th sequence of the file, from 0 [all]"},
    {"--pos-min", "P", I32, DUMP, 0, AT(pos_min), RANGE(0, INT_MAX), "only positions from P [0]"},
    {"--pos-max", "P", I32, DUMP, 0, AT(pos_max), RANGE(0, INT_MAX), "only positions up to P [the last]"},
    {"--rows", "PREFIX,..", TEXT, BENCH, 0, AT(bench.rows), ANY, "only rows whose names begin so [all]"},
    {"--list", "", FLAG, BENCH, 0, AT(bench.list), ANY, "only the names of the rows; measures nothing"},
    {"--quick", "", FLAG, BENCH, 0, AT(bench.quick), ANY, "fewer and shorter repetitions: for a look, not for a record"},
    {"--csv", "FILE", TEXT, BENCH, 0, AT(bench.csv_path), ANY, "append the rows to this table [none]"},
    {"--commit", "TEXT", TEXT, BENCH, 0, AT(bench.commit), ANY, "what the table says under commit [nothing]"},
    {"--peer", "CMD", TEXT, BENCH, 0, AT(bench.peer), ANY,
     "process that times library calls in turn with ours, or none [python3 experiments/bench/peer.py, where it is and runs]"},
    {"--backend", "NAME", TEXT, BENCH, 0, AT(bench.backend), ANY, "cuda, or oracle with --scale tiny [cuda]"},
    {"--scale", "NAME", TEXT, BENCH, 0, AT(bench.scale), ANY, "full, or tiny: a dry run in small shapes [full]"},
    {"--threads", "N", I32, BENCH, 0, AT(bench.n_thread), RANGE(1, 256), "threads of the oracle [all cores]"},
    {"--json", "", FLAG, ALL, 0, AT(json), ANY, "the last line of stdout is one JSON object"},
};

enum { OPTION_COUNT = sizeof options / sizeof options[0] };

static int complain(const char *what, const char *option_name, const char *found) {
    fprintf(stderr, "bitroll: %s: %s, found '%s'\n", option_name, what, found);
    return 0;
}

static int in_range(const option *o, double x, const char *text) {
    char what[96], also[32] = "";
    if (o->min == ABOVE_0 && !(x >= o->min && x <= o->max)) {
        snprintf(what, sizeof what, "expected a number above 0, at most %.10g", o->max);
        return complain(what, o->name, text);
    }
    if ((x >= o->min && x <= o->max) || x == o->also)
        return 1;
    if (o->also < o->min)
        snprintf(also, sizeof also, "%.10g, or ", o->also);
    snprintf(what, sizeof what, "expected %sa number from %.10g to %.10g", also, o->min, o->max);
    return complain(what, o->name, text);
}

static int parse_whole(const option *o, const char *text, int32_t *out) {
    char *end;
    errno = 0;
    const long long whole = strtoll(text, &end, 10);
    if (end == text || *end || errno)
        return complain("expected a whole number", o->name, text);
    *out = (int32_t)whole; /* every range lies within int32_t */
    return in_range(o, (double)whole, text);
}

/* strtoull takes "-1", and behind a space too, for 2^64 - 1. */
static int parse_u64(const option *o, const char *text, uint64_t *out) {
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno)
        return complain("expected a whole number from 0 to 2^64 - 1", o->name, text);
    return 1;
}

/* -0 becomes 0, which has one pattern in digests. */
static int parse_real(const option *o, const char *text, double *out) {
    char *end;
    const double real = strtod(text, &end);
    if (end == text || *end || real != real)
        return complain("expected a number", o->name, text);
    *out = real == 0 ? 0 : real;
    return in_range(o, *out, text);
}

/* Decimal to binary64 to binary32, as in a prompts file. */
static int parse_real32(const option *o, const char *text, float *out) {
    double real;
    if (!parse_real(o, text, &real))
        return 0;
    *out = (float)real;
    return 1;
}

static int parse_ids(const option *o, const char *text, br_sampling *sampling) {
    char *end;
    for (const char *at = text;; at = end + 1) {
        const long id = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || id < 0 || id > INT_MAX)
            return complain("expected token ids with commas between", o->name, text);
        if (sampling->n_stop == BR_STOP_MAX)
            return complain("expected at most 16 tokens", o->name, text);
        sampling->stop[sampling->n_stop++] = (int32_t)id;
        if (!*end)
            return 1;
    }
}

static int parse_adapter(const option *o, char *text, cli *c) {
    char *equals = strchr(text, '=');
    if (!equals || equals == text || !equals[1])
        return complain("expected NAME=DIR", o->name, text);
    if (c->engine.n_adapter == CLI_ADAPTER_MAX)
        return complain("expected at most 64 adapters", o->name, text);
    *equals = 0;
    c->adapter[c->engine.n_adapter++] = (br_adapter_source){.name = text, .dir = equals + 1};
    return 1;
}

/* An empty text, or the next option in its place, is a value that a script left out. */
static int parse_text(const option *o, const char *text, const char **out) {
    *out = text;
    return text[0] && strncmp(text, "--", 2) != 0 ? 1 : complain("expected a value", o->name, text);
}

static int parse_value(const option *o, char *text, cli *c) {
    void *place = (char *)c + o->at;
    switch (o->kind) {
    case FLAG: *(int32_t *)place = 1; return 1;
    case TEXT: return parse_text(o, text, place);
    case I32: return parse_whole(o, text, place);
    case U64: return parse_u64(o, text, place);
    case F32: return parse_real32(o, text, place);
    case F64: return parse_real(o, text, place);
    case ADAPTER: return parse_adapter(o, text, c);
    case IDS: return parse_ids(o, text, &c->sampling);
    }
    return 0;
}

static int find_option(const char *name, int verb_bit) {
    for (int i = 0; i < OPTION_COUNT; i++)
        if ((options[i].verbs & verb_bit) && strcmp(options[i].name, name) == 0)
            return i;
    return -1;
}

static int verb_bit_of(const cli_verb *verb) {
    return 1 << (verb - cli_verbs);
}

static int add_positional(cli *c, const cli_verb *verb, const char *text) {
    if (!text[0])
        return complain("expected a path", verb->name, text);
    if (c->n_positional == verb->n_positional)
        return complain("expected an option", verb->name, text);
    c->positional[c->n_positional++] = text;
    return 1;
}

/* argv[*i] is an option; *i ends on its value. */
static int add_option(cli *c, const cli_verb *verb, char seen[OPTION_COUNT], int argc, char **argv, int *i) {
    const int found = find_option(argv[*i], verb_bit_of(verb));
    if (found < 0) {
        fprintf(stderr, "bitroll: %s has no option '%s'; see bitroll %s --help\n", verb->name, argv[*i], verb->name);
        return 0;
    }
    const option *o = &options[found];
    if (seen[found] && o->kind != ADAPTER) {
        fprintf(stderr, "bitroll: %s stands twice\n", o->name);
        return 0;
    }
    seen[found] = 1;
    if (o->kind == FLAG)
        return parse_value(o, argv[*i], c);
    if (*i + 1 == argc) {
        fprintf(stderr, "bitroll: %s needs a value: %s\n", o->name, o->value);
        return 0;
    }
    return parse_value(o, argv[++*i], c);
}

static int is_complete(const cli *c, const cli_verb *verb, const char seen[OPTION_COUNT]) {
    if (c->n_positional < verb->n_positional) {
        fprintf(stderr, "bitroll: %s needs %s: bitroll %s %s\n", verb->name,
                verb->n_positional == 1 ? "a path" : "two paths", verb->name, verb->arguments);
        return 0;
    }
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!(options[i].needed_by & verb_bit_of(verb)) || seen[i])
            continue;
        fprintf(stderr, "bitroll: %s needs %s%s%s\n", verb->name, options[i].name, *options[i].value ? " " : "", options[i].value);
        return 0;
    }
    return 1;
}

int cli_parse(cli *c, const cli_verb *verb, int argc, char **argv) {
    char seen[OPTION_COUNT] = {0};
    for (int i = 0; i < argc; i++)
        if (!(argv[i][0] == '-' ? add_option(c, verb, seen, argc, argv, &i) : add_positional(c, verb, argv[i])))
            return 0;
    c->engine.adapter = c->adapter;
    return is_complete(c, verb, seen);
}

static void print_option(const option *o, int verb_bit) {
    char left[64];
    snprintf(left, sizeof left, "%s %s", o->name, o->value);
    printf("  %-26s %s%s\n", left, o->help, o->needed_by & verb_bit ? " (needed)" : "");
}

void cli_verb_help(const cli_verb *verb) {
    printf("bitroll %s %s\n\n%s\n\n", verb->name, verb->arguments, verb->help);
    for (int i = 0; i < OPTION_COUNT; i++)
        if (options[i].verbs & verb_bit_of(verb))
            print_option(&options[i], verb_bit_of(verb));
    printf("\n[x]: what holds when the option is left out; a flag is off then\n");
}

void cli_help(void) {
    printf("bitroll %s: rollouts whose log-probs are the same bytes as the trainer's\n\n", br_version());
    printf("usage: bitroll VERB [options]; bitroll VERB --help; bitroll --version\n\n");
    for (int32_t i = 0; i < cli_verb_count; i++)
        printf("  %-10s %s\n", cli_verbs[i].name, cli_verbs[i].help);
    printf("\nexit 0: all done; 1: a check failed, or a request ended in error; 2: usage or environment\n");
}
