/* The command as a process: what a user types, reads and gets as an exit code. Usage errors, help, every verb once on pico,
 * the three exit codes, the summary line and its JSON form, bars on terminals only. */
#include "br_device.h"
#include "h5_edit.h"
#include "test_support.h"

#include <jansson.h>
#include <pty.h>
#include <regex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TEXT_BYTES = 1 << 17, LINE_BYTES = 1024 };

static char folder[128];
static char out[TEXT_BYTES], err[TEXT_BYTES]; /* of the last run */

static void read_output(const char *name, char text[TEXT_BYTES]) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    const size_t n = fread(text, 1, TEXT_BYTES - 1, file);
    ck_assert_msg(n < TEXT_BYTES - 1, "%s holds more than a test reads", name);
    text[n] = 0;
    fclose(file);
}

/* Runs `bitroll ARGUMENTS` in the folder of the test; returns the exit code. */
static int bitroll(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int bitroll(const char *format, ...) {
    char arguments[LINE_BYTES], command[2 * LINE_BYTES];
    va_list args;
    va_start(args, format);
    ck_assert_int_lt(vsnprintf(arguments, sizeof arguments, format, args), LINE_BYTES);
    va_end(args);
    snprintf(command, sizeof command, "cd %s && exec %s/bitroll %s >stdout.txt 2>stderr.txt </dev/null", folder, BITROLL_BINARY_DIR,
             arguments);
    const int status = system(command);
    ck_assert_msg(WIFEXITED(status), "bitroll %s: ended by signal %d", arguments, WTERMSIG(status));
    read_output("stdout.txt", out);
    read_output("stderr.txt", err);
    return WEXITSTATUS(status);
}

#define EXPECT(code, ...)                                                                       \
    do {                                                                                        \
        const int expect_code_ = bitroll(__VA_ARGS__);                                          \
        ck_assert_msg(expect_code_ == (code), "exit %d, expected %d: %s", expect_code_, (code), err); \
    } while (0)

static void write_file(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
}

static const char *last_line(const char *text) {
    const size_t n = strlen(text);
    ck_assert_msg(n > 0 && text[n - 1] == '\n', "the output does not end with a line: '%s'", text);
    const char *at = text + n - 1;
    while (at > text && at[-1] != '\n')
        at--;
    return at;
}

static void expect_match(const char *text, const char *pattern) {
    regex_t regex;
    ck_assert_int_eq(regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB), 0);
    const int found = regexec(&regex, text, 0, NULL, 0) == 0;
    regfree(&regex);
    ck_assert_msg(found, "expected %s, found '%s'", pattern, text);
}

#define HEX "[0-9a-f]{32}"
#define PROMPTS                                               \
    "{\"prompt\": [5, 6, 7, 8, 9], \"uid\": \"one\"}\n"       \
    "{\"prompt\": [50, 61, 72], \"adapter\": \"red\"}\n"      \
    "{\"prompt\": [200, 100, 10, 1], \"temperature\": 0.5}\n"

/* One checkpoint, adapter, rollout and score for all tests. */
static void make_run(void) {
    snprintf(folder, sizeof folder, "%s", test_tmp_dir());
    write_file("prompts.jsonl", PROMPTS);
    EXPECT(0, "init --preset pico --seed 3 --out pico --lora-rank 16 --lora-seed 1 --lora-out red");
    EXPECT(0, "generate --model pico --adapter red=red --prompts prompts.jsonl --n 2 --max-new 9 --ignore-eos --seed 4 --out r.h5");
    EXPECT(0, "score --model pico --adapter red=red --in r.h5 --out t.h5 --threads 1 --pack-tokens 20");
}

/* ---- usage ---------------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *arguments, *sentence;
} wrong[] = {
    {"", "expected a verb"},
    {"frobnicate", "no verb 'frobnicate'"},
    {"--json", "no verb '--json'"},
    {"generate --modell pico", "generate has no option '--modell'"},
    {"generate --pack-tokens 3", "generate has no option '--pack-tokens'"},
    {"score --top-k 3", "score has no option '--top-k'"},
    {"generate --n=3", "generate has no option '--n=3'"},
    {"generate --prompts p.jsonl --out r2.h5", "generate needs --model DIR"},
    {"generate --model pico --out r2.h5", "generate needs --prompts F.jsonl"},
    {"score --model pico --in r.h5", "score needs --out FILE"},
    {"dump --model pico --in r.h5", "dump needs --stage-hash"},
    {"dump --stage-hash --model pico --in r.h5 --as trainer", "--as: expected score or generate, found 'trainer'"},
    {"verify", "verify needs a path: bitroll verify F.h5"},
    {"verify r.h5 --recompute 2", "verify needs --model DIR"},
    {"parity r.h5", "parity needs two paths"},
    {"parity r.h5 t.h5 t.h5", "parity: expected an option, found 't.h5'"},
    {"inspect pico", "inspect: expected an option, found 'pico'"},
    {"generate --model", "--model needs a value: DIR"},
    {"generate --model '' ", "--model: expected a value"},
    {"generate --out --json", "--out: expected a value, found '--json'"},
    {"generate --n 2 --n 3", "--n stands twice"},
    {"generate --n 0", "--n: expected a number from 1 to 16777215, found '0'"},
    {"generate --n 16777216", "--n: expected a number from 1 to 16777215"},
    {"generate --n 2x", "--n: expected a whole number, found '2x'"},
    {"generate --n ''", "--n: expected a whole number"},
    {"generate --n 99999999999999999999", "--n: expected a whole number"},
    {"generate --max-new 4294967297", "--max-new: expected a number from 1"},
    {"generate --model pico --prompts prompts.jsonl --out r2.h5 --min-new 17", "--min-new: expected at most --max-new, 16, found 17"},
    {"generate --seed ' -1'", "--seed: expected a whole number from 0 to 2^64 - 1"},
    {"generate --seed 18446744073709551616", "--seed: expected a whole number from 0 to 2^64 - 1"},
    {"generate --temperature nan", "--temperature: expected a number, found 'nan'"},
    {"generate --temperature inf", "--temperature: expected 0, or a number from 0.0009765625 to 1024"},
    {"generate --temperature 0.0001", "--temperature: expected 0, or a number from 0.0009765625 to 1024"},
    {"generate --top-p 0", "--top-p: expected a number above 0, at most 1, found '0'"},
    {"generate --top-p 1e-320", "generate needs --model"}, /* a prompts file takes it as well */
    {"generate --top-p 1.01", "--top-p: expected a number above 0, at most 1, found '1.01'"},
    {"generate --min-p -0.1", "--min-p: expected a number from 0 to 1"},
    {"generate --top-logprobs 21", "--top-logprobs: expected a number from 0 to 20"},
    {"generate --state-every 0", "--state-every: expected -1, or a number from 64"},
    {"generate --model pico --prompts prompts.jsonl --out r2.h5 --state-every 65", "state_every is 65"},
    {"generate --stop 1,,2", "--stop: expected token ids with commas between"},
    {"generate --stop 1,2,", "--stop: expected token ids with commas between"},
    {"generate --stop 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17", "--stop: expected at most 16 tokens"},
    {"generate --adapter red", "--adapter: expected NAME=DIR, found 'red'"},
    {"generate --adapter =red", "--adapter: expected NAME=DIR"},
    {"generate --model pico --prompts prompts.jsonl --out r2.h5 --adapter base=red", "base"},
    {"generate --model pico --prompts prompts.jsonl --out r2.h5 --backend quantum", "backend 'quantum': expected oracle or cuda"},
    {"init --out p2", "init needs --preset P"},
    {"init --preset huge --out p2", "preset 'huge': expected one of pico, nano, mini, small, k3-nano, kimi-linear-nano"},
    {"init --preset pico --out p2 --lora-rank 4", "an adapter needs both --lora-rank R and --lora-out DIR"},
    {"init --preset pico --out p2 --lora-out a2", "an adapter needs both --lora-rank R and --lora-out DIR"},
    {"init --out pico --lora-only", "an adapter needs both --lora-rank R and --lora-out DIR"},
    /* the environment */
    {"inspect --model nowhere", "nowhere/config.json"},
    {"digest nowhere", "nowhere"},
    {"digest r.h5", "r.h5: a file: expected a folder, to open r.h5/config.json"},
    {"digest pico/config.json", "pico/config.json: a file: expected a folder, to open pico/config.json/config.json"},
    {"inspect --model r.h5", "r.h5: a file: expected a folder, to open r.h5/config.json"},
    {"generate --model pico --adapter red=r.h5 --prompts prompts.jsonl --out r2.h5", "r.h5: a file: expected a folder, to open r.h5/adapter_model"},
    {"init --preset pico --out r.h5", "r.h5: a file: expected a folder, to create "},
    {"help nothing", "no verb 'nothing'; see bitroll --help"},
    {"verify nowhere.h5", "nowhere.h5"},
    {"parity prompts.jsonl t.h5", "prompts.jsonl"},
    {"score --model pico --in nowhere.h5 --out t2.h5", "nowhere.h5"},
    {"score --model pico --in r.h5 --out nofolder/t2.h5", "nofolder/t2.h5"},
    {"generate --model pico --prompts nowhere.jsonl --out r2.h5", "nowhere.jsonl"},
    {"generate --model nowhere --prompts prompts.jsonl --out r2.h5", "nowhere/config.json"},
    {"generate --model pico --adapter red=pico --prompts prompts.jsonl --out r2.h5", "pico/adapter_model.safetensors"},
};

enum { N_WRONG = sizeof wrong / sizeof wrong[0] };

START_TEST(wrong_usage) {
    EXPECT(2, "%s", wrong[_i].arguments);
    ck_assert_msg(strstr(err, wrong[_i].sentence) != NULL, "expected '%s', found '%s'", wrong[_i].sentence, err);
    ck_assert_msg(strncmp(err, "bitroll: ", 9) == 0 && strchr(err, '\n') == err + strlen(err) - 1, "not one sentence: '%s'", err);
    ck_assert_str_eq(out, "");
}
END_TEST

static const char *const on_gpu[] = {
    "generate --model pico --prompts prompts.jsonl --out gpu.h5 --backend cuda",
    "score --model pico --in r.h5 --out gpu.h5 --backend cuda",
    "verify r.h5 --model pico --adapter red=red --backend cuda",
    "bench --peer none",
};

enum { N_ON_GPU = sizeof on_gpu / sizeof on_gpu[0] };

/* A build without CUDA, or a machine without a GPU: no other backend steps in, and nothing is written. */
START_TEST(a_gpu_that_is_not_there) {
    char wanted[LINE_BYTES], path[256];
    br_device *device;
    const br_status status = br_device_open("cuda", &device);
    if (status == BR_OK) { /* it is there */
        br_device_close(device);
        return;
    }
    ck_assert(status == BR_E_DEVICE || status == BR_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(br_last_error(), status == BR_E_DEVICE ? "no CUDA device: " : ""));
    snprintf(wanted, sizeof wanted, "bitroll: %.*s: %s: %s without a GPU\n", (int)strcspn(on_gpu[_i], " "), on_gpu[_i], br_last_error(),
             strncmp(on_gpu[_i], "bench", 5) == 0 ? "--backend oracle --scale tiny is a dry run" : "backend oracle computes the same bits");
    snprintf(path, sizeof path, "%s/gpu.h5", folder);
    EXPECT(2, "%s", on_gpu[_i]);
    ck_assert_str_eq(err, wanted);
    ck_assert_ptr_null(strstr(out, "tokens"));
    ck_assert_int_ne(access(path, F_OK), 0);
}
END_TEST

static const char *const to_stdout[] = {"--help", "verify --help", "inspect", "inspect --json", "digest pico", "parity r.h5 t.h5", "verify r.h5",
                                        "dump --stage-hash --model pico --adapter red=red --in r.h5"};

enum { N_TO_STDOUT = sizeof to_stdout / sizeof to_stdout[0] };

START_TEST(full_output) {
    char command[LINE_BYTES];
    snprintf(command, sizeof command, "cd %s && %s/bitroll %s >/dev/full 2>stderr.txt", folder, BITROLL_BINARY_DIR, to_stdout[_i]);
    const int status = system(command);
    read_output("stderr.txt", err);
    ck_assert_int_eq(WEXITSTATUS(status), 2);
    ck_assert_str_eq(last_line(err), "bitroll: cannot write to standard output\n");
}
END_TEST

/* ---- help ----------------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *verb, *options;
} documented[] = {
    {"init", "--preset --seed --out --lora-rank --lora-out --lora-seed --lora-only --recipe --json"},
    {"generate", "--model --adapter --prompts --out --n --max-new --min-new --temperature --top-k --top-p --min-p --seed --stop "
                 "--ignore-eos --top-logprobs --entropy --max-seqs --chunk-tokens --kv-pages --state-every --threads "
                 "--shuffle-seed --preempt-every --no-prefix-cache --backend --resume --allow-zero-adapter --commit-every --json"},
    {"score", "--model --adapter --in --out --pack-tokens --threads --backend --adapter-override --allow-zero-adapter --json"},
    {"parity", "--json"},
    {"verify", "--model --adapter --recompute --seed --threads --backend --json"},
    {"dump", "--stage-hash --model --adapter --in --as --choices --seq --pos-min --pos-max --threads --adapter-override --json"},
    {"inspect", "--model --json"},
    {"digest", "--json"},
    {"bench", "--rows --list --quick --csv --commit --peer --backend --scale --threads --json"},
};

enum { N_DOCUMENTED = sizeof documented / sizeof documented[0] };

/* Option lines are "  --name VALUE   text"; what takes a value names its default in brackets, or that it is needed. */
static void check_option_line(const char *line) {
    const char *value = line + 2 + strcspn(line + 2, " ");
    if (value[1] == ' ')
        return; /* a flag */
    ck_assert_msg(strchr(line, '[') || strstr(line, "needed") || strstr(line, "--model") || strstr(line, "--prompts"),
                  "no default: '%s'", line);
}

START_TEST(verb_help) {
    char name[64], line[LINE_BYTES];
    int n = 0;
    EXPECT(0, "%s --help", documented[_i].verb);
    ck_assert_str_eq(err, "");
    for (const char *at = documented[_i].options; *at; n++) {
        snprintf(name, sizeof name, "\n  %.*s ", (int)strcspn(at, " "), at);
        ck_assert_msg(strstr(out, name) != NULL, "%s --help does not tell of%s", documented[_i].verb, name + 2);
        at += strcspn(at, " ");
        at += *at == ' ';
    }
    for (const char *at = strstr(out, "\n  --"); at; at = strstr(at + 1, "\n  --")) {
        snprintf(line, sizeof line, "%.*s", (int)strcspn(at + 1, "\n"), at + 1);
        check_option_line(line);
    }
}
END_TEST

static void check_same_output(const char *a, const char *b) {
    static char said[TEXT_BYTES];
    EXPECT(0, "%s", a);
    memcpy(said, out, sizeof said);
    EXPECT(0, "%s", b);
    ck_assert_str_eq(out, said);
    ck_assert_str_eq(err, "");
}

START_TEST(top_help) {
    EXPECT(0, "--help");
    for (int i = 0; i < N_DOCUMENTED; i++) {
        char name[64];
        snprintf(name, sizeof name, "\n  %s ", documented[i].verb);
        ck_assert_ptr_nonnull(strstr(out, name));
    }
    ck_assert_ptr_nonnull(strstr(out, "exit 0"));
    check_same_output("--help", "help");
    check_same_output("--help", "help --help");
    check_same_output("--help", "help help");
    check_same_output("--help", "help version");
    check_same_output("verify --help", "help verify");
    check_same_output("--version", "version");
    expect_match(out, "^bitroll [0-9]+\\.[0-9]+\\.[0-9]+\n$");
}
END_TEST

/* ---- every verb ----------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name, *arguments, *summary;
} verb[] = {
    {"init", "init --preset pico --seed 3 --out again --lora-rank 16 --lora-seed 1 --lora-out again-red",
     "^init: weights " HEX ", adapter lora " HEX ", contract " HEX "\n$"},
    {"generate", "generate --model pico --adapter red=red --prompts prompts.jsonl --n 2 --max-new 9 --ignore-eos --out r3.h5",
     "^generate: 54 tokens, [0-9.]+ tok/s, weights " HEX ", adapter red " HEX ", contract " HEX ", log-probs " HEX "\n$"},
    {"score", "score --model pico --adapter red=red --in r.h5 --out t3.h5",
     "^score: 78 tokens, [0-9.]+ tok/s, weights " HEX ", adapter red " HEX ", contract " HEX ", log-probs " HEX "\n$"},
    {"parity", "parity r.h5 t.h5", "^parity: 0 of 54 log-probs differ, KL 0\n$"},
    {"verify", "verify r.h5 --model pico --adapter red=red --recompute 6",
     "^verify: [0-9]+ tokens, [0-9.]+ tok/s, weights " HEX ", adapter red " HEX ", contract " HEX ", log-probs " HEX "\n$"},
    {"dump", "dump --stage-hash --model pico --adapter red=red --in r.h5 --seq 0 --pos-max 2",
     "^dump: weights " HEX ", adapter red " HEX ", contract " HEX "\n$"},
    {"inspect", "inspect --model pico", "^inspect: contract " HEX "\n$"},
    {"digest", "digest pico", "^digest: weights " HEX ", contract " HEX "\n$"},
    {"digest", "digest red", "^digest: contract " HEX "\n$"},
};

enum { N_VERB = sizeof verb / sizeof verb[0] };

static json_t *last_json(void) {
    json_error_t error;
    json_t *object = json_loads(last_line(out), JSON_REJECT_DUPLICATES, &error);
    ck_assert_msg(json_is_object(object), "not a JSON object: %s: %s", error.text, last_line(out));
    return object;
}

static void expect_keys(const json_t *object, const char *const *key, size_t n) {
    for (size_t i = 0; i < n; i++)
        ck_assert_msg(json_object_get(object, key[i]) != NULL, "no \"%s\" in %s", key[i], last_line(out));
}

/* A digest that there is none of was shown as zeros. */
static void expect_shown(const json_t *object, const char *key, int is_there) {
    const json_t *digest = json_object_get(object, key);
    if (is_there)
        expect_match(json_string_value(digest), "^[0-9a-f]*[1-9a-f][0-9a-f]*$");
    else
        ck_assert_msg(json_is_null(digest), "\"%s\" is not null in %s", key, last_line(out));
}

START_TEST(summary_and_json) {
    static const char *const all[] = {"n_tok", "tok_per_s", "weights_digest", "adapter_digests", "contract_digest", "logprob_digest"};
    static const char *const comparison[] = {"n_compared", "n_differ", "first", "max_ulp", "k1", "k3"};
    const int is_dump = strcmp(verb[_i].name, "dump") == 0; /* compared with diff: what is not a hash goes to stderr */
    EXPECT(0, "%s", verb[_i].arguments);
    ck_assert_msg(is_dump || !*err, "%s", err);
    expect_match(is_dump ? err : last_line(out), verb[_i].summary);
    EXPECT(0, "%s --json", verb[_i].arguments);
    json_t *object = last_json();
    expect_keys(object, all, sizeof all / sizeof all[0]);
    ck_assert(json_is_object(json_object_get(object, "adapter_digests")));
    expect_shown(object, "weights_digest", strstr(verb[_i].summary, "weights ") || strcmp(verb[_i].name, "parity") == 0);
    expect_shown(object, "logprob_digest", strstr(verb[_i].summary, "log-probs ") != NULL);
    expect_match(json_string_value(json_object_get(object, "contract_digest")), "^" HEX "$");
    if (strcmp(verb[_i].name, "parity") == 0)
        expect_keys(object, comparison, sizeof comparison / sizeof comparison[0]);
    if (strcmp(verb[_i].name, "generate") == 0) /* few and short: all run at once */
        ck_assert_int_eq(json_integer_value(json_object_get(object, "peak_seqs")), json_integer_value(json_object_get(object, "n_seq")));
    if (strcmp(verb[_i].name, "score") == 0) {
        const double forward = json_number_value(json_object_get(object, "forward_seconds"));
        ck_assert(forward > 0 && forward <= json_number_value(json_object_get(object, "seconds")));
    }
    json_decref(object);
}
END_TEST

/* The text behind `key` up to the next blank, comma or line's end. */
static void word_after(const char *text, const char *key, char word[64]) {
    const char *at = strstr(text, key);
    ck_assert_msg(at != NULL, "no '%s' in '%s'", key, text);
    at += strlen(key);
    snprintf(word, 64, "%.*s", (int)strcspn(at, " ,\n"), at);
}

START_TEST(init_gives_the_same_bytes) {
    char first[64], again[64], other[64];
    EXPECT(0, "init --preset pico --seed 8 --out b1");
    word_after(last_line(out), "weights ", first);
    EXPECT(0, "init --preset pico --seed 8 --out b2");
    word_after(last_line(out), "weights ", again);
    EXPECT(0, "init --preset pico --seed 9 --out b3");
    word_after(last_line(out), "weights ", other);
    ck_assert_str_eq(first, again);
    ck_assert_str_ne(first, other);
}
END_TEST

/* Whatever the schedule, the digest over prompts in file order is the same; a second seed gives another. */
START_TEST(digest_ignores_the_schedule) {
    static const char *const way[] = {
        "", "--shuffle-seed 5 --threads 1", "--max-seqs 2 --chunk-tokens 3 --preempt-every 3", "--no-prefix-cache --kv-pages 3 --max-seqs 3",
        "--state-every -1 --commit-every 4",
    };
    char first[64] = "", digest[64];
    for (size_t i = 0; i < sizeof way / sizeof way[0]; i++) {
        EXPECT(0, "generate --model pico --adapter red=red --prompts prompts.jsonl --n 2 --max-new 9 --seed 4 --out w.h5 %s", way[i]);
        word_after(last_line(out), "log-probs ", digest);
        ck_assert_msg(!*first || strcmp(first, digest) == 0, "%s: %s, without it %s", way[i], digest, first);
        memcpy(first, digest, sizeof first);
    }
    EXPECT(0, "generate --model pico --adapter red=red --prompts prompts.jsonl --n 2 --max-new 9 --seed 5 --out w.h5");
    word_after(last_line(out), "log-probs ", digest);
    ck_assert_str_ne(first, digest);
}
END_TEST

/* Both forwards of one rollout, line by line. */
START_TEST(dumps_compare_with_diff) {
    static char scored[TEXT_BYTES];
    EXPECT(0, "dump --stage-hash --model pico --adapter red=red --in r.h5 --seq 2");
    memcpy(scored, out, sizeof scored);
    ck_assert_ptr_nonnull(strstr(out, " logprob "));
    EXPECT(0, "dump --stage-hash --model pico --adapter red=red --in r.h5 --seq 2 --as generate --chunk-tokens 2 --max-seqs 1");
    ck_assert_str_eq(scored, out);
    EXPECT(2, "dump --stage-hash --model pico --adapter red=red --in r.h5 --seq 99");
    ck_assert_str_eq(err, "bitroll: dump: r.h5: sequence 99: expected 0 to 5\n");
    EXPECT(2, "dump --stage-hash --model pico --adapter red=red --in r.h5 --seq 0 --pos-min 4 --pos-max 2");
    ck_assert_str_eq(err, "bitroll: dump: positions 4 to 2: expected the first not behind the last\n");
    EXPECT(2, "dump --stage-hash --model pico --adapter red=red --in r.h5 --seq 0 --pos-min 2000");
    ck_assert_str_eq(err, "bitroll: dump: r.h5: no row is within what --seq, --pos-min, --pos-max select\n");
}
END_TEST

/* ---- exit codes ----------------------------------------------------------------------------------------------------------- */

START_TEST(request_in_error_is_one) {
    write_file("some.jsonl", PROMPTS "{\"prompt\": [5, 256], \"uid\": \"far\"}\n{\"prompt\": [5], \"adapter\": \"blue\", \"uid\": \"sky\"}\n");
    EXPECT(1, "generate --model pico --adapter red=red --prompts some.jsonl --max-new 4 --ignore-eos --out e.h5");
    ck_assert_ptr_nonnull(strstr(out, "error: far#0: "));
    ck_assert_ptr_nonnull(strstr(out, "token 256 at position 1: expected 0 to 255"));
    ck_assert_ptr_nonnull(strstr(out, "error: sky#0: adapter 'blue' is not loaded"));
    expect_match(last_line(out), "^generate: 12 tokens");
    EXPECT(1, "generate --json --model pico --adapter red=red --prompts some.jsonl --max-new 4 --ignore-eos --out e.h5");
    json_t *object = last_json();
    ck_assert_int_eq(json_integer_value(json_object_get(object, "n_error")), 2);
    json_decref(object);
}
END_TEST

START_TEST(difference_is_one) {
    EXPECT(1, "parity r.h5 r.h5");
    expect_match(last_line(out), "^parity: 0 of 54 log-probs differ, KL 0, but the files do not pass: r.h5 and r.h5: both files have ");
    EXPECT(0, "score --model pico --adapter red=red --in r.h5 --out base.h5 --adapter-override base");
    EXPECT(1, "parity r.h5 base.h5");
    expect_match(last_line(out), "^parity: [1-9][0-9]* of 54 log-probs differ, KL [0-9.e-]*[1-9]");
    ck_assert_ptr_nonnull(strstr(err, "adapter"));
    EXPECT(1, "parity --json r.h5 base.h5");
    json_t *object = last_json();
    const json_int_t n_differ = json_integer_value(json_object_get(object, "n_differ"));
    ck_assert_int_gt(n_differ, 9);
    ck_assert_int_le(n_differ, 18); /* the red prompt's two samples of nine tokens */
    ck_assert(json_is_object(json_object_get(object, "first")));
    ck_assert(json_real_value(json_object_get(object, "k3")) > 0);
    json_decref(object);
    EXPECT(1, "parity r.h5 r.h5");
    ck_assert_ptr_nonnull(strstr(err, "producer stamp"));
}
END_TEST

START_TEST(damaged_file_is_one) {
    char path[256];
    snprintf(path, sizeof path, "%s/bent.h5", folder);
    EXPECT(0, "generate --model pico --adapter red=red --prompts prompts.jsonl --max-new 9 --ignore-eos --max-seqs 1 --out bent.h5");
    EXPECT(0, "verify bent.h5");
    h5_edit_flip(path, "/tokens/logprob", 4 * 6, 0); /* the second sampled token of the first sequence: one at a time they end in order */
    EXPECT(1, "verify bent.h5");
    ck_assert_ptr_nonnull(strstr(err, "one"));
    expect_match(last_line(out), "^verify: ");
}
END_TEST

/* A file that HDF5 cannot read is one sentence on stderr, ours, whatever HDF5 has to say when the process exits. */
static const char *const object[] = {"/", "/seq", "/tokens", "/commit", "/seq/offset", "/seq/max_new", "/tokens/logprob"};

START_TEST(unreadable_file_is_one_line) {
    static const char *const command[] = {"verify", "parity r.h5"};
    static const char *const reader[] = {"verify", "parity"};
    char path[256], cp[600], begin[64];
    snprintf(path, sizeof path, "%s/bent.h5", folder);
    snprintf(cp, sizeof cp, "cp %s/r.h5 %s", folder, path);
    ck_assert_int_eq(system(cp), 0);
    h5_edit_break_header(path, object[_i]);
    for (int i = 0; i < 2; i++) {
        EXPECT(2, "%s bent.h5", command[i]);
        const int n = snprintf(begin, sizeof begin, "bitroll: %s: bent.h5: ", reader[i]);
        ck_assert_msg(strncmp(err, begin, (size_t)n) == 0 && strchr(err, '\n') == err + strlen(err) - 1, "%s: '%s'", object[_i], err);
        ck_assert_str_eq(out, "");
    }
}
END_TEST

START_TEST(resume_of_a_whole_file) {
    char first[64], again[64];
    const char *const command = "generate --model pico --adapter red=red --prompts prompts.jsonl --n 2 --max-new 9 --out whole.h5";
    EXPECT(0, "%s", command);
    word_after(last_line(out), "log-probs ", first);
    EXPECT(0, "%s --resume", command);
    word_after(last_line(out), "log-probs ", again);
    ck_assert_str_eq(first, again);
    EXPECT(2, "%s --resume --seed 99", command);
    ck_assert_ptr_nonnull(strstr(err, "cannot resume"));
}
END_TEST

/* ---- terminals ------------------------------------------------------------------------------------------------------------ */

START_TEST(bars_on_terminals_only) {
    char text[TEXT_BYTES];
    int terminal, status;
    size_t n = 0;
    EXPECT(0, "generate --model pico --prompts prompts.jsonl --adapter red=red --max-new 9 --out bar.h5");
    ck_assert_str_eq(err, "");
    const pid_t child = forkpty(&terminal, NULL, NULL, NULL);
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        if (chdir(folder) == 0)
            execl(BITROLL_BINARY_DIR "/bitroll", "bitroll", "generate", "--model", "pico", "--prompts", "prompts.jsonl", "--adapter",
                  "red=red", "--max-new", "9", "--out", "bar.h5", (char *)NULL);
        _exit(127);
    }
    for (ssize_t got = 1; got > 0 && n < sizeof text - 1; n += got > 0 ? (size_t)got : 0)
        got = read(terminal, text + n, sizeof text - 1 - n); /* fails with EIO when the child has gone */
    text[n] = 0;
    close(terminal);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    expect_match(text, "\\[#+\\.*\\] [0-9]+ of [0-9]+ tokens");
    expect_match(text, "\ngenerate: [0-9]+ tokens"); /* the summary begins a line of its own */
}
END_TEST

Suite *test_cli_suite(void) {
    Suite *suite = suite_create("cli");
    TCase *tcase = tcase_create("cli");
    tcase_set_timeout(tcase, 60);
    tcase_add_unchecked_fixture(tcase, make_run, NULL);
    tcase_add_loop_test(tcase, wrong_usage, 0, N_WRONG);
    tcase_add_loop_test(tcase, a_gpu_that_is_not_there, 0, N_ON_GPU);
    tcase_add_loop_test(tcase, full_output, 0, N_TO_STDOUT);
    tcase_add_loop_test(tcase, verb_help, 0, N_DOCUMENTED);
    tcase_add_test(tcase, top_help);
    tcase_add_loop_test(tcase, summary_and_json, 0, N_VERB);
    tcase_add_test(tcase, init_gives_the_same_bytes);
    tcase_add_test(tcase, digest_ignores_the_schedule);
    tcase_add_test(tcase, dumps_compare_with_diff);
    tcase_add_test(tcase, request_in_error_is_one);
    tcase_add_test(tcase, difference_is_one);
    tcase_add_test(tcase, damaged_file_is_one);
    tcase_add_loop_test(tcase, unreadable_file_is_one_line, 0, sizeof object / sizeof object[0]);
    tcase_add_test(tcase, resume_of_a_whole_file);
    tcase_add_test(tcase, bars_on_terminals_only);
    suite_add_tcase(suite, tcase);
    return suite;
}
