/* Scripts that take hours on a machine with a GPU: what cannot be meant is said in one sentence, with status 2, before any work; and what
 * sanitize.sh makes of reports. */
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#define CUDA BITROLL_SOURCE_DIR "/tests/cuda/"
#define BUILD BITROLL_BINARY_DIR
#define PROMPTS(settings) "awk " settings " -f " BITROLL_SOURCE_DIR "/tests/prompts.awk"

static const struct {
    const char *command, *sentence;
} wrong[] = {
    {CUDA "all.sh", "all.sh: expected OUT [PART..]\n"},
    {CUDA "all.sh out suites frob", "all.sh: there is no part 'frob': expected some of suites ends slice "},
    {CUDA "all.sh out 'suites ends'", "all.sh: there is no part 'suites ends'"},
    {"BUILD=/nowhere " CUDA "all.sh out suites", "all.sh: /nowhere: no bitroll in it: expected BUILD"},
    {CUDA "pack.sh", "pack.sh: expected BUILD OUT\n"},
    {CUDA "pack.sh " BUILD, "pack.sh: expected BUILD OUT\n"},
    {CUDA "pack.sh /nowhere out", "pack.sh: /nowhere: no bitroll in it: expected BUILD"},
    {"PACK_PARTS=swaps " CUDA "pack.sh " BUILD " out", "pack.sh: PACK_PARTS: there is no part 'swaps'"},
    {CUDA "slice.sh", "slice.sh: '': expected BITROLL"},
    {CUDA "slice.sh " BUILD "/bitroll --oracles", "slice.sh: '--oracles': expected --oracle or nothing"},
    {CUDA "end_to_end.sh /nowhere", "end_to_end.sh: '/nowhere': expected BITROLL"},
    {CUDA "sanitize.sh", "sanitize.sh: '': expected RUNNER"},
    {CUDA "sanitize.sh " BUILD "/bitroll frobcheck", "sanitize.sh: there is no tool 'frobcheck'"},
    {"SUITES='row rows' " CUDA "sanitize.sh " BUILD "/bitroll racecheck", "sanitize.sh: there is no suite 'rows'"},
    {"CASES='ties|' SUITES=row " CUDA "sanitize.sh " BUILD "/bitroll racecheck", "sanitize.sh: no case of these suites is called 'ties|'"},
    {PROMPTS(""), "prompts.awk: n is '': expected a whole number from 0\n"},
    {PROMPTS("-v n=two -v low=1 -v high=2 -v vocab=9 -v names=-"), "prompts.awk: n is 'two'"},
    {PROMPTS("-v n=2 -v low=0 -v high=2 -v vocab=9 -v names=-"), "prompts.awk: low is '0': expected a whole number from 1\n"},
    {PROMPTS("-v n=2 -v low=7 -v high=2 -v vocab=9 -v names=-"), "prompts.awk: high is '2': expected a whole number from 7\n"},
    {PROMPTS("-v n=2 -v low=1 -v high=2 -v vocab=3 -v names=-"), "prompts.awk: vocab is '3': expected a whole number from 4\n"},
    {PROMPTS("-v n=2 -v low=1 -v high=2 -v vocab=9"), "prompts.awk: number of names is '0'"},
};

START_TEST(what_cannot_be_meant_is_said) {
    char command[1024], said[4096];
    snprintf(command, sizeof command, "cd %s && { %s; } 2>&1 >stdout", test_tmp_dir(), wrong[_i].command);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    said[fread(said, 1, sizeof said - 1, pipe)] = 0;
    const int status = pclose(pipe);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 2, "%s: status %d: %s", wrong[_i].command, status, said);
    ck_assert_msg(strncmp(said, wrong[_i].sentence, strlen(wrong[_i].sentence)) == 0, "%s: %s", wrong[_i].command, said);
    ck_assert_msg(strchr(said, '\n') == said + strlen(said) - 1, "not one sentence: %s", said);
    snprintf(command, sizeof command, "cd %s && test \"$(ls)\" = stdout && test ! -s stdout", test_tmp_dir());
    ck_assert_msg(system(command) == 0, "%s: something was written", wrong[_i].command);
}
END_TEST

#define RACE(level, access) "========= " level ": Race reported between " access "\n"
#define AND(access) "=========     and " access " [8 hazards]\n"
#define SUM(n) "========= RACECHECK SUMMARY: " n " hazards displayed (" n " errors, 0 warnings)\n"
#define COPY "Write access at copy16(unsigned int, const void *, bool)+0x10 in bi_experts_pipe.cuh:70"
#define MATRIX "Read access at ldmatrix4(unsigned int, unsigned int (&)[4])+0x20 in bi_experts_product.cuh:30"
#define PREPARE "Write access at void kda_prepare<kda_tile<(int)6>>(const kda_launch &)::[lambda(bi_seg)]::operator ()(bi_seg) const+0x10 in a.cu:3"
#define VALUE "Read access at bi_widen(unsigned short)+0x30 in bi_bits.h:60"
#define NVJET "Write access at nvjet_sm90_tst_128x8_64x12_4x1_v_bz_TNT+0x9b0"

/* What a report of a tool must be taken for: "" as nothing, else as what is said to be judged by nobody. */
static const struct {
    const char *tool, *report, *sentence;
} report[] = {
    {"racecheck", SUM("0"), ""},
    {"racecheck", RACE("Error", COPY) AND(MATRIX) AND(MATRIX) "=========\n" RACE("Warning", PREPARE) AND(VALUE) RACE("Error", NVJET) AND(NVJET)
     "=========     Host Frame: main [0x1]\n========= \n" SUM("3"), ""},
    {"racecheck", RACE("Error", COPY) AND(MATRIX) AND(VALUE) SUM("1"), "    copy16 -> bi_widen, 1 times\n"},
    {"racecheck", RACE("Error", COPY) AND(COPY) SUM("1"), "    copy16 -> copy16, 1 times\n"},
    {"racecheck", RACE("Error", NVJET) AND(VALUE) SUM("1"), "    nvjet_sm90_tst_128x8_64x12_4x1_v_bz_TNT -> bi_widen, 1 times\n"},
    {"racecheck", RACE("Error", "Write access at copy16_more(int)+0x9 in a.cu:1") AND(MATRIX) SUM("1"), "    copy16_more -> ldmatrix4, 1 times\n"},
    {"racecheck", RACE("Error", COPY) "=========\n" SUM("1"), "    copy16 -> ?, 1 times\n"},
    {"racecheck", RACE("Error", "an access") SUM("1"), "    ? -> ?, 1 times\n"},
    {"racecheck", RACE("Error", "Write access at (anonymous namespace)::k(int)+0x9 in a.cu:1") SUM("1"), "    ? -> ?, 1 times\n"},
    {"racecheck", RACE("Error", COPY) AND("Read access at void fp4_load(const multiplier &, fp4_stage &)+0x8 in a.cuh:73") SUM("1"), ""},
    {"racecheck", "========= Warning: Maximum number of hazards reached.\n" SUM("1"), "    Warning: Maximum number of hazards reached.\n"},
    {"racecheck", "========= Internal Sanitizer Error\n" SUM("0"), "    Internal Sanitizer Error\n"},
    {"racecheck", RACE("Error", COPY) AND(MATRIX) SUM("2"), "    2 reports, of which 1 were seen\n"},
    {"racecheck", SUM("3"), "    3 reports, of which 0 were seen\n"},
    {"racecheck", "", "    no summary\n"},
    {"memcheck", "========= ERROR SUMMARY: 0 errors\n", ""},
    {"memcheck", "========= Warning: Leaked memory is left out\n========= ERROR SUMMARY: 0 errors\n", "    Warning: Leaked memory is left out\n"},
};

START_TEST(races_are_judged) {
    char command[1024], said[4096];
    snprintf(command, sizeof command, "%s/report", test_tmp_dir());
    FILE *file = fopen(command, "w");
    ck_assert_ptr_nonnull(file);
    fputs(report[_i].report, file);
    fclose(file);
    snprintf(command, sizeof command,
             "cd %s && printf '#!/bin/sh\ncat report\n' >compute-sanitizer && chmod +x compute-sanitizer && "
             "PATH=.:$PATH SUITES=row CASES=attnres " CUDA "sanitize.sh " BUILD "/bitroll %s",
             test_tmp_dir(), report[_i].tool);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    said[fread(said, 1, sizeof said - 1, pipe)] = 0;
    const int status = pclose(pipe), is_judged = !*report[_i].sentence;
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == !is_judged, "status %d: %s", status, said);
    ck_assert_msg(strstr(said, report[_i].sentence) && (strstr(said, "not judged") == NULL) == is_judged, "%s", said);
}
END_TEST

Suite *test_scripts_suite(void) {
    Suite *suite = suite_create("scripts");
    TCase *tcase = tcase_create("scripts");
    tcase_add_loop_test(tcase, what_cannot_be_meant_is_said, 0, sizeof wrong / sizeof wrong[0]);
    tcase_add_loop_test(tcase, races_are_judged, 0, sizeof report / sizeof report[0]);
    suite_add_tcase(suite, tcase);
    return suite;
}
