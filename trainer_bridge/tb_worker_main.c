/* bitroll-worker: an engine behind the bridge, in a process of its own. Layer: trainer_bridge; the engine through bitroll.h alone.
 *
 * Over a socket it serves trainer after trainer until one says BYE; over MPI it serves rank --mpi once and then ends, once MPI has
 * started with status 0 whatever happened, unless --own-status: to mpirun anything else is a reason to kill the job. */
#include "br_file.h"
#include "br_hash.h"
#include "tb_mpi.h"
#include "tb_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    ADAPTER_MAX = 64, GRANT_BYTES = 64 << 20, ACCEPT_MS = 1000, FINISH_MS = 10000, GREET_SECONDS = 10, GREET_MPI_SECONDS = 600, USAGE = 2,
    TRAINER_LOST = 3, NUMBER_MAX = 1 << 20
};

typedef struct args {
    br_engine_options engine;
    br_adapter_source adapter[ADAPTER_MAX];
    const char *socket, *live;
    char alpha[32]; /* of an adapter that starts empty */
    int mpi, rank, requests, greet, once, own_status, protocol, help; /* mpi: the trainer's rank, -1 none */
} args;

static const struct {
    const char *name, *help;
} help[] = {
    {"--model DIR", "checkpoint folder"},
    {"--adapter NAME=DIR", "PEFT adapter folder under a name, DIR empty: starts empty; may be given again"},
    {"--live NAME", "the adapter that the trainer swaps [the first]"},
    {"--swap-rank R", "adapters can be swapped, up to this rank; one that starts empty has it [never]"},
    {"--swap-alpha A", "lora_alpha of an adapter that starts empty [2 R]"},
    {"--socket PATH", "serve at this UNIX socket"},
    {"--mpi RANK", "serve the trainer at this rank of the MPI job"},
    {"--backend NAME", "oracle or cuda [cuda where one is]"},
    {"--threads N", "threads of the oracle [all cores]"},
    {"--max-seqs N", "sequences that run at once [64]"},
    {"--chunk-tokens N", "rows of a step [256]"},
    {"--kv-pages N", "cache pages of 64 tokens [16 for each of --max-seqs]"},
    {"--requests N", "requests held at once; a training run needs prompts x samples x turns of a step, and one more [64]"},
    {"--greet SECONDS", "how long a trainer may take to greet [600 with --mpi, where it has yet to start; 10 with --socket]"},
    {"--allow-zero-adapter", "accept an adapter whose B is all zero"},
    {"--once", "with --socket: end with the first connection"},
    {"--own-status", "with --mpi: end with the status that --socket gives, for a launcher that keeps it from mpirun"},
    {"--protocol", "print the table of messages and end"},
    {"--help", "print this and end"},
    {"exit 0", "a trainer said BYE; with --mpi, without --own-status: whatever happened once MPI had started"},
    {"exit 1", "MPI could not be started"},
    {"exit 2", "wrong usage, or the model, an adapter or the socket could not be opened"},
    {"exit 3", "the trainer is lost or was silent; with --socket this, 4 and 5 end the worker only if --once is given"},
    {"exit 4", "the trainer broke the protocol"},
    {"exit 5", "the trainer runs another model, or sends other adapters"},
    {"exit 6", "the engine failed"},
};

/* ---- arguments ----------------------------------------------------------------------------------------------------------- */

static void print_help(void) {
    for (size_t i = 0; i < sizeof help / sizeof help[0]; i++)
        printf("  %-22s %s\n", help[i].name, help[i].help);
}

static int fail(const char *what) {
    fprintf(stderr, "bitroll-worker: %s\n", what);
    return USAGE;
}

static int needs(const char *what) {
    fprintf(stderr, "bitroll-worker: %s is needed\nusage: bitroll-worker --model DIR (--socket PATH | --mpi RANK) [options]; see --help\n", what);
    return USAGE;
}

/* 0: the option was not taken. */
static int complain(const char *name, const char *expected, const char *found) {
    fprintf(stderr, "bitroll-worker: %s: expected %s, found '%s'\n", name, expected, found);
    return 0;
}

static int add_adapter(args *a, char *text) {
    char *equals = strchr(text, '='), expected[64];
    snprintf(expected, sizeof expected, "at most %d adapters", ADAPTER_MAX);
    if (!equals || equals == text)
        return complain("--adapter", "NAME=DIR", text);
    if (a->engine.n_adapter == ADAPTER_MAX)
        return complain("--adapter", expected, text);
    *equals = 0;
    a->adapter[a->engine.n_adapter++] = (br_adapter_source){.name = text, .dir = equals[1] ? equals + 1 : NULL};
    return 1;
}

static int take_number(const char *name, const char *text, int min, int32_t *out) {
    char *end, expected[64];
    const long n = strtol(text, &end, 10);
    snprintf(expected, sizeof expected, "a whole number from %d to %d", min, NUMBER_MAX);
    if (*end || end == text || n < min || n > NUMBER_MAX)
        return complain(name, expected, text);
    *out = (int32_t)n;
    return 1;
}

static int take_alpha(const char *text, br_engine_options *out) {
    char *end, expected[64];
    snprintf(expected, sizeof expected, "a number above 0, at most %d", NUMBER_MAX);
    out->swap_alpha = strtod(text, &end);
    if (!*end && end != text && out->swap_alpha > 0 && out->swap_alpha <= NUMBER_MAX)
        return 1;
    return complain("--swap-alpha", expected, text);
}

static int take_text(const char *name, const char *text, const char **out) {
    *out = text;
    return text[0] && !(text[0] == '-' && text[1] == '-') ? 1 : complain(name, "a value", text);
}

static int take_flag(args *a, const char *name) {
    if (strcmp(name, "--once") == 0)
        a->once = 1;
    else if (strcmp(name, "--own-status") == 0)
        a->own_status = 1;
    else if (strcmp(name, "--protocol") == 0)
        a->protocol = 1;
    else if (strcmp(name, "--help") == 0)
        a->help = 1;
    else if (strcmp(name, "--allow-zero-adapter") == 0)
        a->engine.allow_zero_adapter = 1;
    else
        return 0;
    return 1;
}

static int take_option(args *a, const char *name, char *value) {
    const struct {
        const char *name;
        const char **text;
        int32_t *number;
        int min;
    } option[] = {
        {"--model", &a->engine.model_dir, NULL, 0},   {"--live", &a->live, NULL, 0},
        {"--socket", &a->socket, NULL, 0},            {"--backend", &a->engine.backend, NULL, 0},
        {"--mpi", NULL, &a->mpi, 0},                  {"--threads", NULL, &a->engine.n_thread, 1},
        {"--max-seqs", NULL, &a->engine.max_seqs, 1}, {"--chunk-tokens", NULL, &a->engine.chunk_tokens, 1},
        {"--kv-pages", NULL, &a->engine.kv_pages, 1}, {"--swap-rank", NULL, &a->engine.swap_rank, 1},
        {"--requests", NULL, &a->requests, 1},
        {"--greet", NULL, &a->greet, 1},
    };
    const size_t n = sizeof option / sizeof option[0];
    const int is_adapter = strcmp(name, "--adapter") == 0, is_alpha = strcmp(name, "--swap-alpha") == 0;
    size_t i = 0;
    while (i < n && strcmp(option[i].name, name) != 0)
        i++;
    if (i == n && !is_adapter && !is_alpha) {
        fprintf(stderr, "bitroll-worker: no option '%s'; see bitroll-worker --help\n", name);
        return 0;
    }
    if (!value) {
        fprintf(stderr, "bitroll-worker: %s needs a value\n", name);
        return 0;
    }
    if (is_adapter)
        return add_adapter(a, value);
    if (is_alpha)
        return take_alpha(value, &a->engine);
    return option[i].number ? take_number(name, value, option[i].min, option[i].number) : take_text(name, value, option[i].text);
}

static int parse(args *a, int argc, char **argv) {
    a->mpi = -1;
    a->engine.adapter = a->adapter;
    for (int i = 1; i < argc; i++) {
        if (take_flag(a, argv[i]))
            continue;
        if (!take_option(a, argv[i], i + 1 < argc ? argv[i + 1] : NULL))
            return USAGE;
        i++;
    }
    if (a->protocol || a->help)
        return 0;
    if (!a->engine.model_dir)
        return needs("--model DIR");
    if ((a->mpi >= 0) == (a->socket != NULL))
        return a->socket ? fail("--socket and --mpi: expected one of them") : needs("one of --socket and --mpi");
    a->greet = a->greet ? a->greet : a->socket ? GREET_SECONDS : GREET_MPI_SECONDS;
    a->engine.swap_alpha = a->engine.swap_alpha > 0 ? a->engine.swap_alpha : 2 * a->engine.swap_rank;
    snprintf(a->alpha, sizeof a->alpha, "%.17g", a->engine.swap_alpha);
    return 0;
}

static void print_protocol(void) {
    char line[512];
    printf("version %d.%d: type, name, sender, payload bytes, fields\n", TB_MAJOR, TB_MINOR);
    for (int32_t i = 0; i < tb_spec_count; i++) {
        tb_spec_line(&tb_specs[i], line, sizeof line);
        printf("%s\n", line);
    }
}

/* The status of a process that was asked for a text on stdout. */
static int print_and_end(const args *a) {
    if (a->help)
        print_help();
    else
        print_protocol();
    if (fflush(stdout) == 0 && !ferror(stdout))
        return 0;
    fprintf(stderr, "bitroll-worker: cannot write to standard output\n");
    return USAGE;
}

/* ---- who we are ---------------------------------------------------------------------------------------------------------- */

/* Digest of a file of the model's folder; 0, 0 when it is not there. */
static br_status digest_file(const char *dir, const char *name, br_digest *out) {
    char path[BR_PATH_BYTES];
    br_map map;
    *out = (br_digest){0, 0};
    BR_TRY(br_file_join(path, dir, name));
    if (!br_file_exists(path))
        return BR_OK;
    BR_TRY(br_file_map(path, &map));
    *out = br_hash_bytes(map.bytes, map.n);
    br_file_unmap(&map);
    return BR_OK;
}

static const char *live_name(const args *a) {
    return a->live ? a->live : a->engine.n_adapter ? a->adapter[0].name : "base";
}

static int can_swap(const args *a) {
    return a->engine.swap_rank && strcmp(live_name(a), "base") != 0;
}

static br_status introduce(const args *a, const br_engine *engine, tb_session_options *o) {
    br_swap_status swap = {.live_version = 0};
    tb_hello *me = &o->channel.me;
    *me = (tb_hello){.role = TB_WORKER, .abi = BR_ABI_VERSION, .pid = (uint32_t)getpid()};
    me->can = TB_CAN_GENERATE | TB_CAN_SCORE | TB_CAN_CERTIFY | TB_CAN_FULL;
    me->build = tb_text_of(BR_VERSION_TEXT);
    me->contract = br_contract_digest();
    me->base = br_engine_weights_digest(engine);
    BR_TRY(digest_file(a->engine.model_dir, "config.json", &me->config));
    BR_TRY(digest_file(a->engine.model_dir, "tokenizer.json", &me->tokenizer));
    if (can_swap(a)) {
        BR_TRY(br_swap_status_of(engine, live_name(a), &swap));
        me->can |= TB_CAN_SWAP | (br_swap_takes_ipc(engine) ? TB_CAN_IPC : 0);
    }
    o->empty = swap.live_version < 0;
    if (o->empty) { /* one of a folder has a rank and an alpha of its own */
        me->rank = (uint32_t)a->engine.swap_rank;
        me->alpha = tb_text_of(a->alpha);
    }
    me->live_version = swap.live_version > 0 ? (uint64_t)swap.live_version : 0;
    return br_engine_adapter_digest(engine, live_name(a), &me->adapter);
}

/* ---- serving ------------------------------------------------------------------------------------------------------------- */

static const tb_worker_options timing = {.beat_ms = TB_BEAT_MS, .stall_ms = TB_DEAD_MS};

/* One connection; returns the process's status. */
static int serve(tb_session *s, tb_transport *t) {
    const tb_channel *c = tb_session_channel(s);
    const br_status engine = tb_worker_serve(s, t, &timing);
    const tb_stats stats = tb_session_stats(s);
    printf("bitroll-worker: %s: %s; version %llu live, %llu requests, %llu tokens\n", tb_code_name(c->end),
           engine == BR_OK ? c->sentence : br_last_error(), (unsigned long long)stats.live_version, (unsigned long long)stats.n_done,
           (unsigned long long)stats.n_tok);
    fflush(stdout);
    return tb_worker_exit_code(c->end, engine);
}

static int serve_socket(const args *a, tb_session *s) {
    tb_listener *listener;
    tb_transport *t;
    int code = USAGE;
    if (tb_socket_listen(a->socket, &listener) != BR_OK)
        return fail(br_last_error());
    printf("bitroll-worker: pid %d serves at %s\n", (int)getpid(), a->socket);
    fflush(stdout);
    do {
        if (tb_socket_accept(listener, ACCEPT_MS, &t) == BR_OK)
            code = serve(s, t);
    } while (code == USAGE || (!a->once && code != 0 && code != 6));
    tb_listener_close(listener);
    return code;
}

static int serve_mpi(const args *a, tb_session *s) {
    char version[128];
    tb_transport *t;
    if (tb_mpi_open(a->mpi, &t) != BR_OK) {
        fprintf(stderr, "bitroll-worker: %s\n", br_last_error());
        return 1;
    }
    tb_mpi_version(version, sizeof version);
    printf("bitroll-worker: %s, rank %d of the job serves rank %d, pid %d\n", version, a->rank, a->mpi, (int)getpid());
    fflush(stdout);
    return serve(s, t);
}

static int run(const args *a) {
    br_engine *engine = NULL;
    tb_session *s = NULL;
    tb_session_options o = {.n_request_max = a->requests, .channel = {.dead_ms = TB_DEAD_MS, .grant_bytes = GRANT_BYTES}};
    tb_base base = {.model_dir = a->engine.model_dir};
    int code = USAGE;
    br_status status;
    o.channel.greet_ms = a->greet * (int64_t)1000;
    BR_TRY_GOTO(br_engine_open(&a->engine, &engine), fail);
    BR_TRY_GOTO(introduce(a, engine, &o), fail);
    const tb_engine_ops ops = tb_engine_of(engine);
    tb_swap swap = {.engine = engine, .adapter = live_name(a)};
    const tb_weights_ops weights = tb_weights_of(&swap);
    o.engine = &ops;
    o.weights = can_swap(a) ? &weights : NULL;
    base.engine = engine;
    const tb_weights_ops full = tb_full_of(&base);
    o.full = &full;
    BR_TRY_GOTO(tb_session_open(&o, &s), fail);
    code = a->socket ? serve_socket(a, s) : serve_mpi(a, s);
    goto end;
fail:
    fprintf(stderr, "bitroll-worker: %s: %s\n", br_status_name(status), br_last_error());
end:
    tb_session_close(s);
    tb_base_close(&base);
    br_engine_close(engine);
    return code;
}

int main(int argc, char **argv) {
    static args a;
    int n_rank, code = parse(&a, argc, argv);
    if (code != 0)
        return code;
    if (a.help || a.protocol)
        return print_and_end(&a);
    if (a.socket)
        return run(&a);
    if (tb_mpi_start(&argc, &argv, &a.rank, &n_rank) != BR_OK) {
        fprintf(stderr, "bitroll-worker: %s\n", br_last_error());
        return 1;
    }
    code = run(&a);
    const int is_clean = code != TRAINER_LOST;
    code = a.own_status ? code : 0;
    tb_mpi_finish(is_clean, FINISH_MS, code);
    return code;
}
