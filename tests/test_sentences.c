/* What the command says where something is not as it was wanted: on stderr, with the cause and the way out; and what it leaves alone then. */
#include "br_device.h"
#include "test_support.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SAID_BYTES = 1 << 14 };

static char folder[128];
static char said[SAID_BYTES]; /* by the last command, on stderr */

/* A shell command in the folder of the test, in which $B is the folder of the build. */
static int shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int shell(const char *format, ...) {
    char line[1024], command[2048];
    va_list args;
    va_start(args, format);
    ck_assert_int_lt(vsnprintf(line, sizeof line, format, args), (int)sizeof line);
    va_end(args);
    snprintf(command, sizeof command, "cd %s && B=%s && { %s; } 2>&1 >stdout", folder, BITROLL_BINARY_DIR, line);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    said[fread(said, 1, sizeof said - 1, pipe)] = 0;
    const int status = pclose(pipe);
    ck_assert_msg(WIFEXITED(status), "%s: ended by a signal", line);
    return WEXITSTATUS(status);
}

#define EXPECT(code, ...)                                                                               \
    do {                                                                                                \
        const int expect_code_ = shell(__VA_ARGS__);                                                    \
        ck_assert_msg(expect_code_ == (code), "exit %d, expected %d: %s", expect_code_, (code), said);  \
    } while (0)
#define SAYS(part) ck_assert_msg(strstr(said, part) != NULL, "'%s' lacks '%s'", said, part)
#define GENERATE "$B/bitroll generate --model pico --adapter red=red --ignore-eos "

static void make_run(void) {
    snprintf(folder, sizeof folder, "%s", test_tmp_dir());
    EXPECT(0, "$B/bitroll init --preset pico --seed 3 --out pico --lora-rank 16 --lora-seed 1 --lora-out red");
    EXPECT(0, "printf '%%s\\n' '{\"prompt\": [5, 6, 7], \"uid\": \"one\"}' '{\"prompt\": [50, 61], \"adapter\": \"red\"}' >good.jsonl");
    EXPECT(0, GENERATE "--prompts good.jsonl --max-new 6 --out good.h5");
    EXPECT(0, "$B/bitroll score --model pico --adapter red=red --in good.h5 --out good-t.h5");
}

/* ---- requests in error ---------------------------------------------------------------------------------------------------- */

/* A misspelt adapter cost the rollout that stood at the same path. */
static const struct {
    const char *prompts, *options, *sentence;
} refused[] = {
    {"{\"prompt\": [5], \"adapter\": \"blue\"}", "",
     "0#0: adapter 'blue' is not loaded: --adapter blue=DIR loads it; loaded are: base, red; nothing is written\n"},
    {"{\"prompt\": [5, 256]}", "", "0#0: prompt '0': token 256 at position 1: expected 0 to 255; nothing is written\n"},
    {"{\"prompt\": [5]}", "--max-new 1048576", "; nothing is written\n"},
    {"{\"prompt\": [5], \"uid\": \"far\", \"n\": 3, \"stop\": [999]}", "", "bitroll: generate: 3 of 3 sequences ended in error, the first: far#0: "},
};

enum { N_REFUSED = sizeof refused / sizeof refused[0] };

START_TEST(requests_in_error_replace_nothing) {
    EXPECT(0, "cp good.h5 older.h5 && printf '%%s\\n' '%s' >bad.jsonl", refused[_i].prompts);
    EXPECT(1, GENERATE "--prompts bad.jsonl %s --out older.h5", refused[_i].options);
    SAYS(refused[_i].sentence);
    ck_assert_ptr_eq(strchr(said, '\n'), said + strlen(said) - 1);
    EXPECT(0, "cmp good.h5 older.h5");
    EXPECT(1, GENERATE "--prompts bad.jsonl %s --out fresh.h5", refused[_i].options);
    EXPECT(0, "test \"$(ls | grep -c -e fresh -e part)\" = 0");
}
END_TEST

START_TEST(a_scoring_in_error_replaces_nothing) {
    EXPECT(0, "cp good-t.h5 older.h5 && printf '%%s\\n' '{\"prompt\": [5, 256]}' >bad.jsonl");
    EXPECT(1, "$B/bitroll score --model pico --in bad.jsonl --out older.h5 >summary");
    SAYS("bitroll: score: 1 of 1 sequence ended in error, the first: 0#0: token 256 at position 1: expected 0 to 255; nothing is written\n");
    EXPECT(0, "grep -q weights summary && ! grep log-probs summary && cmp good-t.h5 older.h5");
}
END_TEST

/* They ended with 1 and said nothing. */
START_TEST(errors_in_files_are_told) {
    EXPECT(0, "{ cat good.jsonl; printf '%%s\\n' '{\"prompt\": [256], \"uid\": \"far\"}' '{\"prompt\": [5], \"adapter\": \"blue\"}'; } >some.jsonl");
    EXPECT(1, GENERATE "--prompts some.jsonl --max-new 6 --out some.h5");
    SAYS("bitroll: generate: 2 of 4 sequences ended in error, the first: far#0: prompt 'far': token 256 at position 0: expected 0 to 255\n");
    EXPECT(1, GENERATE "--prompts some.jsonl --max-new 6 --out some.h5 --resume"); /* of a file that is whole: its errors are the run's */
    ck_assert_str_eq(said, "bitroll: generate: 2 of 4 sequences ended in error, the first: far#0: bad argument\n");
    EXPECT(1, "$B/bitroll score --model pico --adapter red=red --in some.h5 --out some-t.h5");
    SAYS("bitroll: score: 2 of 4 sequences ended in error, the first: far#0: ");
    EXPECT(1, "$B/bitroll verify some.h5");
    ck_assert_str_eq(said, "bitroll: verify: 2 of 4 sequences ended in error, the first: far#0: bad argument\n");
    EXPECT(1, "$B/bitroll verify some.h5 --model pico --adapter red=red");
    ck_assert_str_eq(said, "bitroll: verify: 2 of 4 sequences ended in error, the first: far#0: bad argument\n");
    EXPECT(1, "$B/bitroll parity some.h5 some-t.h5 >parity");
    SAYS("bitroll: parity: 2 of 4 sequences ended in error, the first: far#0: ");
    EXPECT(0, "tail -n 1 parity | grep -q ', KL 0, but the files do not pass: 2 of 4 sequences ended in error, the first: far#0: '");
}
END_TEST

/* ---- --resume -------------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *options, *sentence;
} other[] = {
    {"--max-new 7", "good.h5: cannot resume: the max_new of one#0 is 6 there, 7 in this run\n"},
    {"--max-new 6 --seed 9", "the seed of one#0 is 0 there, 9 in this run\n"},
    {"--max-new 6 --temperature 0.5", "the temperature of one#0 is 1 there, 0.5 in this run\n"},
    {"--max-new 6 --stop 3", "the number of stop tokens of one#0 is 0 there, 1 in this run\n"},
    {"--max-new 6 --n 2", "of what it does not hold yet, prompts, samples, settings or adapters are others than when it was begun\n"},
    {"--max-new 6 --entropy", "it is of a rollout with entropy 0 and 0 alternatives, this run of a rollout with 1 and 0\n"},
    {"--max-new 6 --prompts other.jsonl", "the uid of one#0 is 'one' there, 'two' in this run\n"},
    {"--max-new 6 --prompts longer.jsonl", "the first other prompt token of one#0 is 6 there, 9 in this run\n"},
    {"--max-new 6 --model pico4", "its weights digest is "},
    {"--max-new 6 --adapter red=red2", "the digest of its adapter of 1#0 is "},
};

enum { N_OTHER = sizeof other / sizeof other[0] };

/* Two hashes, and a summary of 0 tokens, were all that it said. */
START_TEST(resume_names_what_differs) {
    const char *options = other[_i].options;
    EXPECT(0, "sed s/one/two/ good.jsonl >other.jsonl && sed s/6,/9,/ good.jsonl >longer.jsonl");
    EXPECT(0, "$B/bitroll init --preset pico --seed 4 --out pico4 --lora-rank 16 --lora-seed 2 --lora-out red2");
    EXPECT(2, "$B/bitroll generate --ignore-eos %s %s %s --out good.h5 --resume %s", strstr(options, "--model") ? "" : "--model pico",
           strstr(options, "--adapter") ? "" : "--adapter red=red", strstr(options, "--prompts") ? "" : "--prompts good.jsonl", options);
    SAYS("bitroll: generate: good.h5: cannot resume: ");
    SAYS(other[_i].sentence);
    ck_assert_ptr_eq(strchr(said, '\n'), said + strlen(said) - 1);
    EXPECT(0, "test ! -s stdout");
    EXPECT(0, GENERATE "--prompts good.jsonl --max-new 6 --out good.h5 --resume");
}
END_TEST

/* ---- dumps, devices, the runner --------------------------------------------------------------------------------------------- */

/* Speeds stood in the last line: plain diff of two equal dumps found it. */
START_TEST(equal_dumps_are_equal_files) {
    EXPECT(0, "for n in 1 2; do $B/bitroll dump --stage-hash --model pico --adapter red=red --in good.h5 --threads $n >$n.txt || exit 9; done");
    SAYS("dump: weights ");
    EXPECT(0, "diff 1.txt 2.txt && grep -q '^one#0 0 ' 1.txt && ! grep -v '#' 1.txt");
}
END_TEST

/* A build that was told to leave CUDA out said that there was no nvcc; a machine without a driver was told to get a newer one. */
START_TEST(why_there_is_no_gpu) {
    br_device *device;
    const br_status status = br_device_open("cuda", &device);
    const int is_off = system("grep -q '^BITROLL_CUDA:BOOL=OFF' " BITROLL_BINARY_DIR "/CMakeCache.txt") == 0;
    const char *sentence = br_last_error();
    if (status == BR_OK)
        br_device_close(device);
    if (is_off)
        ck_assert_str_eq(sentence, "this build has no CUDA: it was configured with -DBITROLL_CUDA=OFF");
    else if (status == BR_E_DEVICE && access("/proc/driver/nvidia/version", F_OK) != 0)
        ck_assert_str_eq(sentence, "no CUDA device: there is no NVIDIA driver here");
}
END_TEST

START_TEST(the_runner_lists_its_suites) {
    EXPECT(2, "$B/bitroll_tests parityy");
    SAYS("bitroll_tests: no suite 'parityy'\nusage: bitroll_tests [SUITE...]; the suites:\n hw_probe numeric ");
    SAYS(" parity ");
    EXPECT(0, "$B/bitroll_tests --help && grep -q ' parity ' stdout");
}
END_TEST

Suite *test_sentences_suite(void) {
    Suite *suite = suite_create("sentences");
    TCase *tcase = tcase_create("sentences");
    tcase_set_timeout(tcase, 60);
    tcase_add_unchecked_fixture(tcase, make_run, NULL);
    tcase_add_loop_test(tcase, requests_in_error_replace_nothing, 0, N_REFUSED);
    tcase_add_test(tcase, a_scoring_in_error_replaces_nothing);
    tcase_add_test(tcase, errors_in_files_are_told);
    tcase_add_loop_test(tcase, resume_names_what_differs, 0, N_OTHER);
    tcase_add_test(tcase, equal_dumps_are_equal_files);
    tcase_add_test(tcase, why_there_is_no_gpu);
    tcase_add_test(tcase, the_runner_lists_its_suites);
    suite_add_tcase(suite, tcase);
    return suite;
}
