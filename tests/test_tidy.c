/* The rules of the repository as tests: layers, names, sizes, banned words, nothing unbuilt, nothing unnamed. Each rule runs
 * over the tree, which must be clean, and over planted files: one that breaks it must be caught, its lawful twin must not. */
#include "test_support.h"
#include "tidy_rules.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static tidy_tree tree;

static void read_tree(void) {
    tidy_open(test_source_dir(), &tree);
}

static void drop_tree(void) {
    tidy_close(&tree);
}

static const struct {
    const char *name;
    tidy_rule rule;
} rules[] = {
    {"layering", tidy_rule_layering},
    {"system headers", tidy_rule_system_headers},
    {"stems", tidy_rule_stems},
    {"folders", tidy_rule_folders},
    {"sizes", tidy_rule_sizes},
    {"functions", tidy_rule_functions},
    {"first comment", tidy_rule_first_comment},
    {"calls", tidy_rule_calls},
    {"float functions", tidy_rule_float_functions},
    {"float words", tidy_rule_float_words},
    {"flags", tidy_rule_flags},
    {"words", tidy_rule_words},
    {"paths", tidy_rule_paths},
    {"built", tidy_rule_built},
    {"launches", tidy_rule_launches},
    {"golden", tidy_rule_golden},
};

enum { N_RULE = sizeof rules / sizeof rules[0] };

START_TEST(tree_is_clean) {
    tidy_report report = {0};
    for (int i = 0; i < tree.n_file; i++)
        rules[_i].rule(&tree, &tree.file[i], &report);
    ck_assert_msg(report.n == 0, "%s: %d violations:%s", rules[_i].name, report.n, report.text);
}
END_TEST

/* A walk that saw nothing would find every rule kept. */
START_TEST(tree_is_seen) {
    static const char *const expected[] = {
        "run", ".ci/run", "README.md", "CMakeLists.txt", "src/bitroll.h", "src/cli/cli_main.c", "src/sched/br_sched.c",
        "kernels_batch_invariant/numeric/bi_chain.c", "lora/lora_slots.c", "tests/test_tidy.c", "golden/MANIFEST",
        "experiments/hw_probe/hw_probe.cu",
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        ck_assert_msg(tidy_find(&tree, expected[i]) != NULL, "the walk did not find %s", expected[i]);
    ck_assert_int_gt(tree.n_golden, 10);
}
END_TEST

#define KERNEL(body) "static __global__ void __launch_bounds__(256, 2) new_kernel(const int a) {\n" body "}\n"
#define TEN "x;\n\n\n\n\n\n\n\n\n\n"
#define SEVENTY TEN TEN TEN TEN TEN TEN TEN
#define SIX_HUNDRED SEVENTY SEVENTY SEVENTY SEVENTY SEVENTY SEVENTY SEVENTY SEVENTY TEN TEN TEN TEN
#define WIDE "0123456789012345678901234567890123456789012345678901234567890123456789012345"

/* `says`: part of what the rule must say; NULL: a lawful file, on which it must be silent. */
static const struct {
    tidy_rule rule;
    const char *path, *text, *says;
} planted[] = {
    {tidy_rule_layering, "src/sched/new_thing.c", "#include \"bi_attn.h\"\n", "'src/sched' may not include bi_attn.h"},
    {tidy_rule_layering, "src/sched/new_thing.c", "#include \"br_kv.h\"\n", NULL},
    {tidy_rule_layering, "src/sched/new_thing.c", "/* #include \"bi_attn.h\" */\n", NULL},
    {tidy_rule_layering, "src/cli/new_thing.c", "#include \"br_status.h\"\n", "'src/cli' may not include br_status.h"},
    {tidy_rule_layering, "src/cli/new_thing.c", "#include \"cli.h\"\n#include \"bitroll.h\"\n", NULL},
    {tidy_rule_layering, "src/engine/new_thing.c", "#include \"test_support.h\"\n", "may not include test_support.h of 'tests'"},
    {tidy_rule_layering, "src/weights/new_thing.c", "#include \"safetensors.h\"\n", NULL},
    {tidy_rule_layering, "src/weights/new_thing.c", "#include \"prompts.h\"\n", "'src/weights' may not include prompts.h"},
    {tidy_rule_layering, "src/base/new_thing.c", "#  include \"br_kv.h\"\n", NULL},
    {tidy_rule_layering, "src/base/new_thing.c", "\n#include \"br_kv.h\"\n", ":2: 'src/base' may not include br_kv.h of 'src/kv'"},
    {tidy_rule_layering, "src/model/new_thing.c", "#include \"lora_file.h\"\n", "'src/model' may not include lora_file.h"},
    {tidy_rule_layering, "kernels_batch_invariant/numeric/n.c", "#include \"bi_backend.h\"\n", "may not include bi_backend.h"},
    {tidy_rule_layering, "src/kv/new_thing.c", "#include \"../sched/br_sched.h\"\n", "expected a bare file name"},
    {tidy_rule_layering, "src/kv/new_thing.c", "#include \"no_such_thing.h\"\n", "no such header"},
    {tidy_rule_layering, "src/newfolder/new_thing.c", "#include \"br_status.h\"\n", "no line in the table of layers"},
    {tidy_rule_layering, "tests/new_thing.c", "#include \"bi_attn.h\"\n#include \"br_sched.h\"\n", NULL},

    {tidy_rule_system_headers, "src/engine/new_thing.c", "#include <hdf5.h>\n", "<hdf5.h> belongs to: src/io"},
    {tidy_rule_system_headers, "src/io/new_thing.c", "#include <hdf5.h>\n#include <stdio.h>\n", NULL},
    {tidy_rule_system_headers, "src/sched/new_thing.c", "#include <time.h>\n", "<time.h> belongs to: src/engine"},
    {tidy_rule_system_headers, "src/model/new_thing.c", "#include <math.h>\n", "<math.h> belongs to"},

    {tidy_rule_stems, "src/io/br_kv.c", "/* */\n", "the stem 'br_kv' is that of src/kv/br_kv"},
    {tidy_rule_stems, "src/kv/br_kv.cu", "/* */\n", NULL},

    {tidy_rule_folders, "trainer_bridge/megatron/core/x.py", "", "a folder 'megatron'"},
    {tidy_rule_folders, "Megatron/x.py", "", "a folder 'Megatron'"},
    {tidy_rule_folders, "trainer_bridge/megatron_core/megatron", "", NULL},

    {tidy_rule_sizes, "src/kv/long.c", SIX_HUNDRED "x;\n", "601 lines"},
    {tidy_rule_sizes, "src/kv/long.c", SIX_HUNDRED, NULL},
    {tidy_rule_sizes, "src/kv/wide.c", "x;\n" WIDE WIDE "\n", ":2: 152 columns"},
    {tidy_rule_sizes, "README.md", WIDE WIDE "\n", NULL},

    {tidy_rule_functions, "src/kv/f.c", "static int f(int a,\n             int b) {\n" SEVENTY "}\n", ":1: a function of 73 lines"},
    {tidy_rule_functions, "src/kv/f.c", "#define G(a) \\\n  { a\nint f(void) {\n" SEVENTY "}\n", ":3: a function of 72 lines"},
    {tidy_rule_functions, "tests/f.c", "START_TEST(f) {\n" SEVENTY "}\nEND_TEST\n", ":1: a function of 72 lines"},
    {tidy_rule_functions, "src/kv/f.c", "int f(void) {\n" TEN "}\n\nint g(void) {\n" TEN TEN TEN TEN TEN TEN "}\n", NULL},
    {tidy_rule_functions, "src/kv/f.c", "static const int table[] = {\n" SEVENTY "};\nstruct s {\n" SEVENTY "};\n", NULL},
    {tidy_rule_functions, "src/kv/f.c", "int f(void) {\n  g(\"}\"); /* } */ h('}');\n" SEVENTY "}\n", "a function of 73 lines"},

    {tidy_rule_first_comment, "src/kv/f.c", "#include <stdio.h>\n", "expected a comment first"},
    {tidy_rule_first_comment, "src/kv/f.c", "/* Owns nothing. */\n", NULL},

    {tidy_rule_calls, "src/kv/f.c", "void *p = malloc (4);\n", "'malloc': memory comes from br_mem"},
    {tidy_rule_calls, "lora/f.c", "  free(p);\n", "'free'"},
    {tidy_rule_calls, "src/engine/f.c", "char *x = strdup(y);\n", "'strdup'"},
    {tidy_rule_calls, "src/engine/f.c", "getenv(\"X\");\n", "'getenv'"},
    {tidy_rule_calls, "kernels_batch_invariant/f.c", "exit(2);\n", "'exit'"},
    {tidy_rule_calls, "src/engine/f.c", "BR_TRY_GOTO(f(), exit);\nexit:\n  x->free = 1; br_mem_free(p); /* malloc(1) */\n", NULL},
    {tidy_rule_calls, "src/base/br_mem.c", "void *p = malloc(4);\n", NULL},
    {tidy_rule_calls, "src/cli/f.c", "void *p = malloc(4);\n", NULL},

    {tidy_rule_float_functions, "kernels_batch_invariant/f.c", "y = expf(x);\n", "'expf'"},
    {tidy_rule_float_functions, "kernels_batch_invariant/f.cu", "y = __expf(x);\n", "'__expf'"},
    {tidy_rule_float_functions, "src/stats/f.c", "y = fmaxf(x, 0);\n", "'fmaxf'"},
    {tidy_rule_float_functions, "kernels_batch_invariant/f.c", "y = bi_exp(x) + fmaf(a, b, c) + sqrtf(d); log_sum(x);\n", NULL},

    {tidy_rule_float_words, "src/sched/f.c", "int x; float y;\n", "'float'"},
    {tidy_rule_float_words, "src/kv/f.c", "double y;\n", "'double'"},
    {tidy_rule_float_words, "src/proof/f.c", "/* float */ int x = 3; int float_count;\n", NULL},
    {tidy_rule_float_words, "src/model/f.c", "y = x * 0.5f;\n", "a floating-point constant"},
    {tidy_rule_float_words, "src/model/f.c", "y = (float)n;\n", "a cast to floating point"},
    {tidy_rule_float_words, "src/model/f.c", "const float *x = m->x; y = n * sizeof(float); z = a1.b2;\n", NULL},

    {tidy_rule_flags, "CMakeLists.txt", "-ffp-contract=" "off -f" "fast-math\n", "fast-math' lets the compiler change bits"},
    {tidy_rule_flags, "CMakeLists.txt", "-ffp-contract=" "off -fno-fast-math\n", NULL},
    {tidy_rule_flags, "CMakeLists.txt", "-O3\n", "off' is missing"},
    {tidy_rule_flags, "src/kv/f.c", "#pragma STDC FP_CONTRACT " "ON\n", "FP_CONTRACT"},

    {tidy_rule_words, "src/kv/f.c", "/* TO" "DO: later */\n", "finish it"},
    {tidy_rule_words, "README.md", "This is a st" "ub.\n", "finish it"},
    {tidy_rule_words, "src/kv/f.c", "mkdtemp(\"/tmp/x-XXXXXX\");\n", NULL},

    {tidy_rule_paths, "README.md", "see /ho" "me/someone/x\n", "a path of one machine"},
    {tidy_rule_paths, "README.md", "see src/work/x\n", NULL},

    {tidy_rule_built, "src/kv/unbuilt.c", "/* */\n", "CMakeLists.txt does not name it"},
    {tidy_rule_built, "tests/test_unlisted.c", "/* */\n", "tests/suites.h has no SUITE(unlisted)"},
    {tidy_rule_built, "src/kv/br_kv.c", "/* */\n", NULL},

    {tidy_rule_launches, "kernels_batch_invariant/f.cu", KERNEL("    x(a);\n    bi_cuda_begin();\n"), ":1: new_kernel: expected bi_cuda_begin()"},
    {tidy_rule_launches, "kernels_batch_invariant/f.cuh", "template <int N>\nBI_ROW_KERNEL new_kernel(int a) {\n}\n", ":2: new_kernel: expected"},
    {tidy_rule_launches, "kernels_batch_invariant/f.cu", KERNEL("    /* first */ bi_cuda_begin();\n    x(a);\n"), NULL},
    {tidy_rule_launches, "kernels_batch_invariant/f.cu", KERNEL("    x(a);\n") "void f(void) { new_kernel<4, g<2>><<<1, 32>>>(0); }\n", NULL},
    {tidy_rule_launches, "kernels_batch_invariant/f.cu",
     KERNEL("    x(a);\n") "void f(void) { new_kernel<<<1, 32>>>(0);\n bi_cuda_launch(ctx, new_kernel, 1, 32, 0, 0); }\n", "new_kernel: expected"},
    {tidy_rule_launches, "kernels_batch_invariant/f.cu", "__global__ void wide_kernel(int a) {\n    x(a);\n    bi_cuda_await_before();\n}\n", NULL},
    {tidy_rule_launches, "kernels_batch_invariant/f.cu", "__global__ void wide_kernel(int a) {\n    x(a);\n}\n", "wide_kernel: expected"},
    {tidy_rule_launches, "kernels_batch_invariant/f.cu", "void f() { asm(\"grid" "depcontrol.wait;\"); }\n", ":1: expected the helpers"},
};

enum { N_PLANTED = sizeof planted / sizeof planted[0] };

START_TEST(planted_file) {
    tidy_report report = {0};
    tidy_file file = tidy_plant(planted[_i].path, planted[_i].text);
    planted[_i].rule(&tree, &file, &report);
    free(file.code);
    if (planted[_i].says)
        ck_assert_msg(strstr(report.text, planted[_i].says) != NULL, "expected '%s', the rule says:%s", planted[_i].says, report.text);
    else
        ck_assert_msg(report.n == 0, "a lawful file, the rule says:%s", report.text);
}
END_TEST

START_TEST(every_rule_has_its_violation) {
    for (int r = 0; r < N_RULE; r++) {
        int n = rules[r].rule == tidy_rule_golden; /* has no file to plant: see the next test */
        for (int i = 0; i < N_PLANTED; i++)
            n += planted[i].rule == rules[r].rule && planted[i].says;
        ck_assert_msg(n > 0, "no planted file breaks the rule '%s'", rules[r].name);
    }
}
END_TEST

START_TEST(golden_file_without_a_name) {
    tidy_file file[2] = {tidy_plant("golden/MANIFEST", "# ops/lost\nops/add-*  ours\n"), tidy_plant("golden/deep/manifest.txt", "inner ours\n")};
    const char *named[] = {"golden/ops/add-1", "golden/deep/inner"}, *lost[] = {"golden/ops/lost", "golden/ops/sub/add-1", "golden/inner"};
    tidy_report clean = {0}, report = {0};
    tidy_rule_golden(&(tidy_tree){.file = file, .n_file = 2, .golden = named, .n_golden = 2}, &file[0], &clean);
    ck_assert_msg(clean.n == 0, "%s", clean.text);
    tidy_rule_golden(&(tidy_tree){.file = file, .n_file = 2, .golden = lost, .n_golden = 3}, &file[0], &report);
    ck_assert_int_eq(report.n, 3);
    ck_assert_ptr_nonnull(strstr(report.text, "no manifest names golden/ops/lost"));
}
END_TEST

Suite *test_tidy_suite(void) {
    Suite *suite = suite_create("tidy");
    TCase *tcase = tcase_create("tidy");
    tcase_set_timeout(tcase, 15);
    tcase_add_unchecked_fixture(tcase, read_tree, drop_tree);
    tcase_add_test(tcase, tree_is_seen);
    tcase_add_loop_test(tcase, tree_is_clean, 0, N_RULE);
    tcase_add_loop_test(tcase, planted_file, 0, N_PLANTED);
    tcase_add_test(tcase, every_rule_has_its_violation);
    tcase_add_test(tcase, golden_file_without_a_name);
    suite_add_tcase(suite, tcase);
    return suite;
}
