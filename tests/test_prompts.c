/* Prompts: what a line may say, what it may not, and that the refusal names the line. Sampling settings as the engine checks
 * them. */
#include "br_file.h"
#include "br_mem.h"
#include "prompts.h"
#include "sampling.h"
#include "test_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static br_status parse(const char *text, prompts **out) {
    br_sampling defaults = br_sampling_default();
    defaults.temperature = 0.75f;
    defaults.max_new = 33;
    defaults.n_stop = 1;
    defaults.stop[0] = 5;
    return prompts_parse("file.jsonl", text, strlen(text), &defaults, out);
}

static const prompt_line *one(const char *text, prompts **out) {
    CHECK_OK(parse(text, out));
    ck_assert_int_eq(prompts_count(*out), 1);
    return prompts_at(*out, 0);
}

START_TEST(a_bare_line_takes_the_defaults) {
    prompts *p;
    const prompt_line *l = one("{\"prompt\": [1, 0, 1048575]}", &p);
    ck_assert_str_eq(l->uid, "0");
    ck_assert_ptr_null(l->adapter);
    ck_assert_int_eq(l->n_token, 3);
    ck_assert(l->token[0] == 1 && l->token[1] == 0 && l->token[2] == 1048575);
    ck_assert(l->has == 0 && l->n_sample == 0 && l->seed == 0);
    ck_assert(l->sampling.temperature == 0.75f && l->sampling.max_new == 33 && l->sampling.top_p == 1);
    ck_assert(l->sampling.n_stop == 1 && l->sampling.stop[0] == 5);
    prompts_close(p);
}
END_TEST

START_TEST(a_full_line_sets_everything) {
    prompts *p;
    const prompt_line *l =
        one("{\"prompt\":[7],\"uid\":\"q \\u00e4/1\","
            "\"adapter\":\"math\",\"n\":8,\"seed\":9223372036854775807,\"temperature\":0.1,"
            "\"top_k\":40,\"top_p\":0.95,\"min_p\":0.1,\"max_new\":5,\"min_new\":2,\"stop\":[3,4],\"ignore_eos\":true}",
            &p);
    ck_assert_str_eq(l->uid, "q \xc3\xa4/1");
    ck_assert_str_eq(l->adapter, "math");
    ck_assert_int_eq(l->has, PROMPT_HAS_N | PROMPT_HAS_SEED);
    ck_assert_int_eq(l->n_sample, 8);
    ck_assert_uint_eq(l->seed, INT64_MAX);
    ck_assert(l->sampling.temperature == 0.1f && l->sampling.min_p == 0.1f && l->sampling.top_p == 0.95);
    ck_assert(l->sampling.top_k == 40 && l->sampling.max_new == 5 && l->sampling.min_new == 2 &&
              l->sampling.ignore_eos == 1);
    ck_assert(l->sampling.n_stop == 2 && l->sampling.stop[0] == 3 && l->sampling.stop[1] == 4 && l->sampling.stop[2] == 0);
    prompts_close(p);
}
END_TEST

START_TEST(seeds_cover_64_bits) {
    static const struct { const char *text; uint64_t seed;
    } given[] = {
        {"0", 0},
        {"17", 17},
        {"\"0\"", 0},
        {"\"18446744073709551615\"", UINT64_MAX},
        {"\"9223372036854775808\"", 1ull << 63},
        {"\"007\"", 7},
    };
    char line[128];
    prompts *p;
    for (size_t i = 0; i < sizeof given / sizeof given[0]; i++) {
        snprintf(line, sizeof line, "{\"prompt\": [1], \"seed\": %s}", given[i].text);
        const prompt_line *l = one(line, &p);
        ck_assert_msg(l->seed == given[i].seed && l->has == PROMPT_HAS_SEED, "%s", given[i].text);
        prompts_close(p);
    }
}
END_TEST

START_TEST(small_things_mean_what_they_say) {
    prompts *p;
    const prompt_line *l = one(
        "{\"prompt\": [1], \"adapter\": \"base\", \"uid\": null, \"stop\": [], \"temperature\": -0.0, \"min_p\": -0.0}", &p);
    ck_assert_ptr_null(l->adapter);
    ck_assert_str_eq(l->uid, "0");
    ck_assert_int_eq(l->sampling.n_stop, 0);
    ck_assert(!signbit(l->sampling.temperature) && !signbit(l->sampling.min_p) && l->sampling.temperature == 0);
    prompts_close(p);
    l = one("{\"prompt\": [1], \"temperature\": 1, \"top_p\": 1}", &p);
    ck_assert(l->sampling.temperature == 1 && l->sampling.top_p == 1);
    prompts_close(p);
    l = one("{\"prompt\": [1], \"temperature\": 0.0009765625}", &p); /* 2^-10 */
    ck_assert(l->sampling.temperature == 0x1p-10f);
    prompts_close(p);
    l = one("{\"prompt\": [1], \"temperature\": 0.30000001192092896}", &p);
    ck_assert(l->sampling.temperature == 0.3f);
    prompts_close(p);
}
END_TEST

START_TEST(blank_lines_count) {
    prompts *p;
    CHECK_OK(parse("\n{\"prompt\": [1]}\r\n \t\n\n{\"prompt\": [2], \"uid\": \"x\"}\n{\"prompt\": [3]}", &p));
    ck_assert_int_eq(prompts_count(p), 3);
    ck_assert_str_eq(prompts_at(p, 0)->uid, "1");
    ck_assert_str_eq(prompts_at(p, 1)->uid, "x");
    ck_assert_str_eq(prompts_at(p, 2)->uid, "5");
    ck_assert(prompts_at(p, 0)->token[0] == 1 && prompts_at(p, 1)->token[0] == 2 && prompts_at(p, 2)->token[0] == 3);
    prompts_close(p);
}
END_TEST

/* Blocks grow while lines are read: every pointer has to be right at the end. */
START_TEST(many_lines_keep_their_places) {
    prompts *p;
    enum { N = 3000, LINE = 64 };
    char *text = malloc(N * LINE);
    size_t n = 0;
    for (int i = 0; i < N; i++)
        n += (size_t)snprintf(text + n, LINE, "{\"prompt\": [%d, %d], \"uid\": \"u%d\", \"adapter\": \"a%d\"}\n", i, i + 1,
                              i, i % 7);
    CHECK_OK(parse(text, &p));
    ck_assert_int_eq(prompts_count(p), N);
    for (int i = 0; i < N; i++) {
        char uid[16], adapter[16];
        const prompt_line *l = prompts_at(p, i);
        snprintf(uid, sizeof uid, "u%d", i);
        snprintf(adapter, sizeof adapter, "a%d", i % 7);
        ck_assert(strcmp(l->uid, uid) == 0 && strcmp(l->adapter, adapter) == 0 && l->token[0] == i && l->token[1] == i + 1);
    }
    prompts_close(p);
    free(text);
}
END_TEST

START_TEST(what_a_line_may_not_say) {
    static const struct { const char *text, *said;
    } given[] = {
        {"", "0 prompts"},
        {"\n \n", "0 prompts"},
        {"{\"prompt\": [1]}\n{\"prompt\": [1]", "line 2"},
        {"[1, 2]", "expected a JSON object"},
        {"{\"prompt\": [1]} x", "line 1"},
        {"{\"prompt\": [1], \"prompt\": [2]}", "line 1"},
        {"{\"prompt\": [1], \"propmt\": [2]}", "unknown key 'propmt'"},
        {"{}", "prompt: expected a list"},
        {"{\"prompt\": []}", "prompt: expected a list of 1"},
        {"{\"prompt\": \"text\"}", "prompt: expected a list"},
        {"{\"prompt\": [1, -1]}", "entry 1: expected a token id"},
        {"{\"prompt\": [1048576]}", "entry 0: expected a token id"},
        {"{\"prompt\": [1.0]}", "entry 0: expected a token id"},
        {"{\"prompt\": [\"1\"]}", "entry 0: expected a token id"},
        {"{\"prompt\": [99999999999999999999]}", "line 1"},
        {"{\"prompt\": [1], \"uid\": \"\"}", "uid of 0 bytes"},
        {"{\"prompt\": [1], \"uid\": 7}", "uid: expected text"},
        {"{\"prompt\": [1], \"uid\": \"a\\nb\"}", "control character"},
        {"{\"prompt\": [1], \"uid\": \"a\\u0000b\"}", "line 1"},
        {"{\"prompt\": [1], \"uid\": \"\x80\"}", "line 1"},
        {"{\"prompt\": [1], \"adapter\": \"\"}", "adapter of 0 bytes"},
        {"{\"prompt\": [1], \"adapter\": \"0123456789012345678901234567890123456789012345678901234567890123\"}",
         "adapter of 64 bytes"},
        {"{\"prompt\": [1], \"n\": 0}", "n: expected an integer 1"},
        {"{\"prompt\": [1], \"n\": 16777217}", "n: expected an integer 1"},
        {"{\"prompt\": [1], \"seed\": -1}", "seed: expected"},
        {"{\"prompt\": [1], \"seed\": 1.5}", "seed: expected"},
        {"{\"prompt\": [1], \"seed\": 9223372036854775808}", "line 1"},
        {"{\"prompt\": [1], \"seed\": \"18446744073709551616\"}", "seed: expected"},
        {"{\"prompt\": [1], \"seed\": \"99999999999999999999\"}", "seed: expected"},
        {"{\"prompt\": [1], \"seed\": \"\"}", "seed: expected"},
        {"{\"prompt\": [1], \"seed\": \" 1\"}", "seed: expected"},
        {"{\"prompt\": [1], \"seed\": \"0x1\"}", "seed: expected"},
        {"{\"prompt\": [1], \"temperature\": -1}", "temperature: expected"},
        {"{\"prompt\": [1], \"temperature\": 1024.5}", "temperature: expected"},
        {"{\"prompt\": [1], \"temperature\": 1e-50}", "temperature: expected 0 or 2^-10"},
        {"{\"prompt\": [1], \"temperature\": 0.0009}", "temperature: expected 0 or 2^-10"},
        {"{\"prompt\": [1], \"temperature\": \"1\"}", "temperature: expected"},
        {"{\"prompt\": [1], \"temperature\": 1e999}", "line 1"},
        {"{\"prompt\": [1], \"temperature\": NaN}", "line 1"},
        {"{\"prompt\": [1], \"top_p\": 1.01}", "top_p: expected a number above 0, at most 1"},
        {"{\"prompt\": [1], \"top_p\": -1}", "top_p: expected a number above 0, at most 1"},
        {"{\"prompt\": [1], \"top_p\": 0}", "top_p: expected a number above 0, at most 1"},
        {"{\"prompt\": [1], \"min_p\": 1.01}", "min_p: expected"},
        {"{\"prompt\": [1], \"min_p\": true}", "min_p: expected"},
        {"{\"prompt\": [1], \"top_k\": -1}", "top_k: expected"},
        {"{\"prompt\": [1], \"top_k\": 2147483648}", "top_k: expected"},
        {"{\"prompt\": [1], \"max_new\": 0}", "max_new: expected"},
        {"{\"prompt\": [1], \"max_new\": 1048577}", "max_new: expected"},
        {"{\"prompt\": [1], \"min_new\": -1}", "min_new: expected"},
        {"{\"prompt\": [1], \"ignore_eos\": 1}", "ignore_eos: expected true or false"},
        {"{\"prompt\": [1], \"stop\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}", "stop: expected a list of 1 to 16"},
        {"{\"prompt\": [1], \"stop\": [-1]}", "stop: entry 0"},
        {"{\"prompt\": [1], \"stop\": 5}", "stop: expected a list"},
        {"{\"prompt\": [1], \"uid\": \"a\"}\n\n{\"prompt\": [2], \"uid\": \"a\"}", "line 3: uid 'a' is that of line 1"},
        {"{\"prompt\": [1], \"uid\": \"1\"}\n{\"prompt\": [2]}", "line 2: uid '1' is that of line 1"},
    };
    for (size_t i = 0; i < sizeof given / sizeof given[0]; i++) {
        prompts *p;
        ck_assert_msg(parse(given[i].text, &p) == BR_E_FORMAT, "case %zu: %s", i, given[i].text);
        ck_assert_ptr_null(p);
        ck_assert_msg(strstr(br_last_error(), given[i].said) && strstr(br_last_error(), "file.jsonl"), "case %zu: %s: %s", i,
                      given[i].text, br_last_error());
    }
}
END_TEST

START_TEST(a_long_uid_is_bounded) {
    char line[512], uid[300];
    prompts *p;
    memset(uid, 'u', sizeof uid);
    uid[255] = 0;
    snprintf(line, sizeof line, "{\"prompt\": [1], \"uid\": \"%s\"}", uid);
    ck_assert_str_eq(one(line, &p)->uid, uid);
    prompts_close(p);
    uid[255] = 'u', uid[256] = 0;
    snprintf(line, sizeof line, "{\"prompt\": [1], \"uid\": \"%s\"}", uid);
    CHECK_FAILS(parse(line, &p), BR_E_FORMAT);
}
END_TEST

START_TEST(files_are_read_and_missing_ones_named) {
    br_sampling defaults = br_sampling_default();
    char path[512];
    prompts *p;
    snprintf(path, sizeof path, "%s/p.jsonl", test_tmp_dir());
    CHECK_FAILS(prompts_read(path, &defaults, &p), BR_E_NOT_FOUND);
    CHECK_OK(br_file_write(path, "", 0));
    CHECK_FAILS(prompts_read(path, &defaults, &p), BR_E_FORMAT);
    CHECK_OK(br_file_write(path, "{\"prompt\": [1]}\n", 16));
    br_file_fail_nth_read(1);
    CHECK_FAILS(prompts_read(path, &defaults, &p), BR_E_IO);
    CHECK_OK(prompts_read(path, &defaults, &p));
    ck_assert_int_eq(prompts_count(p), 1);
    prompts_close(p);
}
END_TEST

START_TEST(memory_that_runs_out_is_a_status) {
    br_status status = BR_E_NOMEM;
    prompts *p;
    int n = 0;
    for (; status != BR_OK; n++) {
        br_mem_fail_nth(n + 1);
        status = parse("{\"prompt\": [1], \"adapter\": \"x\", \"stop\": [2]}\n{\"prompt\": [1]}", &p);
        ck_assert(status == BR_OK || (status == BR_E_NOMEM && !p));
    }
    ck_assert_int_gt(n, 4);
    br_mem_fail_nth(0);
    prompts_close(p);
}
END_TEST

/* ---- settings --------------------------------------------------------------------------------------------------------- */

START_TEST(settings_have_ranges) {
    br_sampling s = br_sampling_default();
    CHECK_OK(sampling_check(&s, 100));
#define REFUSED(change, word)                                                                      \
    do {                                                                                           \
        s = br_sampling_default();                                                                 \
        change;                                                                                    \
        CHECK_FAILS(sampling_check(&s, 100), BR_E_ARG);                                            \
        ck_assert_msg(strstr(br_last_error(), word) != NULL, "%s: %s", #change, br_last_error());  \
    } while (0)
#define TAKEN(change)                       \
    do {                                    \
        s = br_sampling_default();          \
        change;                             \
        CHECK_OK(sampling_check(&s, 100));  \
    } while (0)
    TAKEN(s.temperature = 0);
    TAKEN(s.temperature = 0x1p-10f);
    TAKEN(s.temperature = 0x1p10f);
    REFUSED(s.temperature = nextafterf(0x1p-10f, 0), "temperature");
    REFUSED(s.temperature = nextafterf(0x1p10f, 2000), "temperature");
    REFUSED(s.temperature = -0.0f, "temperature");
    REFUSED(s.temperature = -1, "temperature");
    REFUSED(s.temperature = NAN, "temperature");
    REFUSED(s.temperature = INFINITY, "temperature");
    TAKEN(s.min_p = 1);
    REFUSED(s.min_p = nextafterf(1, 2), "min_p");
    REFUSED(s.min_p = -0.0f, "min_p");
    REFUSED(s.min_p = NAN, "min_p");
    TAKEN(s.top_p = 1e-300);
    REFUSED(s.top_p = 0, "top_p");
    REFUSED(s.top_p = nextafter(1, 2), "top_p");
    REFUSED(s.top_p = (double)NAN, "top_p");
    TAKEN(s.top_k = INT32_MAX);
    REFUSED(s.top_k = -1, "top_k");
    REFUSED(s.max_new = 0, "max_new");
    REFUSED(s.max_new = (1 << 20) + 1, "max_new");
    TAKEN(s.min_new = s.max_new);
    REFUSED(s.min_new = s.max_new + 1, "min_new");
    REFUSED(s.min_new = -1, "min_new");
    REFUSED(s.ignore_eos = 2, "ignore_eos");
    REFUSED(s.n_stop = 17, "stop tokens");
    REFUSED(s.n_stop = -1, "stop tokens");
    TAKEN((s.n_stop = 16, s.stop[15] = 99));
    REFUSED((s.n_stop = 1, s.stop[0] = 100), "stop token 100");
    REFUSED((s.n_stop = 1, s.stop[0] = -1), "stop token -1");
    TAKEN(s.stop[0] = -1); /* not used */
    TAKEN(s.top_logprobs = 20);
    REFUSED(s.top_logprobs = 21, "top_logprobs");
    REFUSED(s.top_logprobs = -1, "top_logprobs");
    REFUSED(s.entropy = 2, "entropy");
}
END_TEST

Suite *test_prompts_suite(void) {
    Suite *suite = suite_create("prompts");
    TCase *all = tcase_create("prompts");
    tcase_set_timeout(all, 20);
    tcase_add_test(all, a_bare_line_takes_the_defaults);
    tcase_add_test(all, a_full_line_sets_everything);
    tcase_add_test(all, seeds_cover_64_bits);
    tcase_add_test(all, small_things_mean_what_they_say);
    tcase_add_test(all, blank_lines_count);
    tcase_add_test(all, many_lines_keep_their_places);
    tcase_add_test(all, what_a_line_may_not_say);
    tcase_add_test(all, a_long_uid_is_bounded);
    tcase_add_test(all, files_are_read_and_missing_ones_named);
    tcase_add_test(all, memory_that_runs_out_is_a_status);
    tcase_add_test(all, settings_have_ranges);
    suite_add_tcase(suite, all);
    return suite;
}
