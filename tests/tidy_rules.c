/* The rules of the repository; see tidy_rules.h. Words that a rule looks for are written here in pieces. */
#include "tidy_rules.h"

#include <ctype.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

enum { LINES_MAX = 600, FUNCTION_LINES_MAX = 70, WIDTH_MAX = 150, NAME_BYTES = 256 };

#define PRODUCT "src kernels_batch_invariant lora weightsync trainer_bridge"
#define KERNELS "kernels_batch_invariant"
#define NUMERIC "kernels_batch_invariant/numeric"

static int line_of(const char *text, const char *at) {
    int line = 1;
    for (; text < at; text++)
        line += *text == '\n';
    return line;
}

static int is_word_char(char c) {
    return isalnum((unsigned char)c) || c == '_';
}

/* The next place of `word` in text that is not part of a longer word; NULL when there is none. */
static const char *find_word(const char *text, const char *from, const char *word) {
    const size_t n = strlen(word);
    for (const char *at = strstr(from, word); at; at = strstr(at + 1, word))
        if ((at == text || !is_word_char(at[-1])) && !is_word_char(at[n]))
            return at;
    return NULL;
}

/* Is `name` one of the words of the list? */
static int is_listed(const char *list, const char *name) {
    const size_t n = strlen(name);
    for (const char *at = strstr(list, name); at; at = strstr(at + 1, name))
        if ((at == list || at[-1] == ' ') && (at[n] == ' ' || at[n] == 0))
            return 1;
    return 0;
}

static const char *base_name(const char *path) {
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

/* ---- who may include whom ------------------------------------------------------------------------------------------------- */

/* Folders, and single headers of other folders. bitroll.h, the types of the interface, is for everyone; the command sees
 * nothing else. What stands in no line of this table has no place in the tree. */
static const struct {
    const char *folder, *may;
} layer[] = {
    {"src", "bi_grad.h br_config.h"}, /* bitroll_ops.h: the structs of the ops are written down once */
    {"src/base", ""},
    {NUMERIC, "src/base bi_contract.h"},
    {KERNELS, "src/base br_device.h bi_grad.h " NUMERIC}, /* the last for what a build without CUDA says */
    {KERNELS "/backward", "src/base br_device.h " KERNELS " " NUMERIC},
    {"src/device", "src/base"},
    {"src/io", "src/base bitroll_ledger.h"},
    {"src/comm", "src/base"},
    {"src/kv", "src/base"},
    {"src/sched", "src/base src/kv"},
    {"src/weights", "src/base safetensors.h st_index.h bi_weightgen.h"},
    {"lora", "src/base src/weights safetensors.h json_scope.h recipe_json.h bi_weightgen.h"},
    {"src/model", "src/base br_device.h device_view.h src/weights src/kv src/comm " KERNELS " " NUMERIC " lora_slots.h"},
    {"src/logprob", "src/base " KERNELS},
    {"src/ops", "src/base br_device.h config_json.h br_model.h bitroll_ops.h " KERNELS " " KERNELS "/backward"},
    {"src/proof", "src/base src/io bitroll_ledger.h"},
    {"src/stats", "src/base src/io bitroll_ledger.h"},
    {"weightsync", "src/base br_device.h device_view.h src/weights lora"},
    {"src/engine", "bitroll_ledger.h src/base src/device src/io src/comm src/kv src/sched src/weights src/model src/logprob src/proof src/stats lora "
                   "weightsync " KERNELS " " NUMERIC},
    {"src/bench", "src/base src/device src/io src/model src/weights src/engine " KERNELS " " NUMERIC},
    {"src/cli", ""},
    {"trainer_bridge", "src/base"},
};

static const char *may_include(const char *folder) {
    for (size_t i = 0; i < sizeof layer / sizeof layer[0]; i++)
        if (strcmp(layer[i].folder, folder) == 0)
            return layer[i].may;
    return NULL;
}

/* Where the tree has a header of this name; "" when nowhere. */
static void header_folder(const tidy_tree *tree, const char *name, char folder[NAME_BYTES]) {
    folder[0] = 0;
    for (int i = 0; i < tree->n_file; i++)
        if (strcmp(base_name(tree->file[i].path), name) == 0)
            tidy_folder(tree->file[i].path, folder, NAME_BYTES);
}

static void check_include(const tidy_tree *tree, const tidy_file *file, int line, const char *name, tidy_report *out) {
    char from[NAME_BYTES], to[NAME_BYTES];
    tidy_folder(file->path, from, sizeof from);
    header_folder(tree, name, to);
    const char *may = may_include(from);
    const int is_free = tidy_in(from, "tests experiments");
    if (strchr(name, '/'))
        tidy_say(out, file, line, "\"%s\": expected a bare file name", name);
    else if (!to[0])
        tidy_say(out, file, line, "\"%s\": no such header in the tree", name);
    else if (is_free || strcmp(from, to) == 0 || strcmp(name, "bitroll.h") == 0)
        return;
    else if (!may)
        tidy_say(out, file, line, "folder '%s' has no line in the table of layers", from);
    else if (!is_listed(may, to) && !is_listed(may, name))
        tidy_say(out, file, line, "'%s' may not include %s of '%s'", from, name, to);
}

/* Calls check for each #include with the given opening character; returns where to go on. */
static const char *next_include(const char *at, char open, char close, char name[NAME_BYTES]) {
    while ((at = strstr(at, "#include"))) {
        at += strlen("#include");
        at += strspn(at, " ");
        const char *end = strchr(at, close);
        if (*at != open || !end || (open == close && (end = strchr(at + 1, close)) == NULL))
            continue;
        snprintf(name, NAME_BYTES, "%.*s", (int)(end - at - 1), at + 1);
        return at;
    }
    return NULL;
}

void tidy_rule_layering(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    char name[NAME_BYTES];
    for (const char *at = file->code; at && (at = next_include(at, '"', '"', name));)
        check_include(tree, file, line_of(file->code, at), name, out);
}

void tidy_rule_system_headers(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const struct {
        const char *header, *folders;
    } owner[] = {
        {"hdf5.h", "src/io"},
        {"jansson.h", "src/io lora"},
        {"openssl/evp.h", "src/proof"},
        {"xxhash.h", "src/base"},
        {"pthread.h", "src/base src/engine trainer_bridge"},
        {"mpi.h", "trainer_bridge"},
        {"time.h", "src/engine src/bench src/device trainer_bridge"},
        {"sys/random.h", "src/engine trainer_bridge"},
        {"math.h", KERNELS " src/io src/logprob src/stats src/cli lora"},
        {"immintrin.h", NUMERIC},
        {"cuda_runtime.h", KERNELS " src/device"},
        {"cublasLt.h", KERNELS},
    };
    char name[NAME_BYTES];
    (void)tree;
    for (const char *at = file->code; at && tidy_in(file->path, PRODUCT) && (at = next_include(at, '<', '>', name));)
        for (size_t i = 0; i < sizeof owner / sizeof owner[0]; i++)
            if (strcmp(owner[i].header, name) == 0 && !tidy_in(file->path, owner[i].folders))
                tidy_say(out, file, line_of(file->code, at), "<%s> belongs to: %s", name, owner[i].folders);
}

/* ---- names and sizes ------------------------------------------------------------------------------------------------------ */

static void stem_of(const char *path, char stem[NAME_BYTES]) {
    const char *name = base_name(path);
    snprintf(stem, NAME_BYTES, "%.*s", (int)strcspn(name, "."), name);
}

static int has_stem_rule(const char *path) {
    const char *name = base_name(path);
    return tidy_is_c(path) || strstr(name, ".sh") || (strstr(name, ".py") && strcmp(name, "__init__.py") != 0);
}

void tidy_rule_stems(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    char stem[NAME_BYTES], folder[NAME_BYTES], other_stem[NAME_BYTES], other_folder[NAME_BYTES];
    stem_of(file->path, stem);
    tidy_folder(file->path, folder, sizeof folder);
    for (int i = 0; i < tree->n_file && has_stem_rule(file->path); i++) {
        const char *other = tree->file[i].path;
        stem_of(other, other_stem);
        tidy_folder(other, other_folder, sizeof other_folder);
        if (has_stem_rule(other) && strcmp(stem, other_stem) == 0 && strcmp(folder, other_folder) != 0)
            tidy_say(out, file, 1, "the stem '%s' is that of %s too", stem, other);
    }
}

/* The installed package has this name: a folder of the tree would hide it from Python, or be a copy of it. */
void tidy_rule_folders(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const char package[] = "megatron";
    const size_t n = strlen(package);
    (void)tree;
    for (const char *at = file->path, *slash; (slash = strchr(at, '/')); at = slash + 1)
        if ((size_t)(slash - at) == n && strncasecmp(at, package, n) == 0)
            tidy_say(out, file, 1, "a folder '%.*s': the trainer uses the installed package", (int)n, at);
}

void tidy_rule_sizes(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    int line = 0;
    (void)tree;
    for (const char *at = file->text; *at; line++) {
        const size_t n = strcspn(at, "\n");
        if (n > WIDTH_MAX && tidy_is_c(file->path))
            tidy_say(out, file, line + 1, "%zu columns: expected at most %d", n, WIDTH_MAX);
        at += n + (at[n] == '\n');
    }
    if (line > LINES_MAX)
        tidy_say(out, file, line, "%d lines: expected at most %d", line, LINES_MAX);
}

/* From a line that begins in the first column, through its braces: a function when there are parentheses before the first
 * brace and no '='. */
void tidy_rule_functions(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    int line = 1, depth = 0, begin = 0, is_function = 0;
    (void)tree;
    for (const char *at = file->code; at && *at; at++) {
        const int at_first_column = at == file->code || at[-1] == '\n';
        if (*at == '\n')
            line++;
        if (at_first_column && *at == '#') { /* a directive with its continued lines; the loop's step takes the newline */
            for (; at[1] && !(at[1] == '\n' && *at != '\\'); at++)
                line += at[1] == '\n';
            continue;
        }
        if (at_first_column && depth == 0 && is_word_char(*at)) {
            begin = line;
            is_function = 0;
        }
        if (depth == 0 && *at == '(')
            is_function = 1;
        if (depth == 0 && *at == '=')
            is_function = 0;
        depth += *at == '{';
        depth -= *at == '}';
        if (*at == '}' && depth == 0 && is_function && line - begin + 1 > FUNCTION_LINES_MAX)
            tidy_say(out, file, begin, "a function of %d lines: expected at most %d", line - begin + 1, FUNCTION_LINES_MAX);
    }
}

void tidy_rule_first_comment(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    (void)tree;
    if (tidy_is_c(file->path) && strncmp(file->text, "/* ", 3) != 0)
        tidy_say(out, file, 1, "expected a comment first: what the file owns, and its layer");
}

/* ---- banned words --------------------------------------------------------------------------------------------------------- */

static int is_call(const char *word_end) {
    return word_end[strspn(word_end, " ")] == '(';
}

static void ban(const tidy_file *file, const char *text, const char *word, int calls_only, const char *why, tidy_report *out) {
    for (const char *at = text; (at = find_word(text, at, word)); at++)
        if (!calls_only || is_call(at + strlen(word)))
            tidy_say(out, file, line_of(text, at), "'%s': %s", word, why);
}

void tidy_rule_calls(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const struct {
        const char *word, *home, *why;
    } banned[] = {
        {"malloc", "src/base/br_mem.c", "memory comes from br_mem"},
        {"calloc", "src/base/br_mem.c", "memory comes from br_mem"},
        {"realloc", "src/base/br_mem.c", "memory comes from br_mem"},
        {"free", "src/base/br_mem.c", "memory goes back to br_mem"},
        {"aligned_alloc", "src/base/br_mem.c", "memory comes from br_mem"},
        {"posix_memalign", "src/base/br_mem.c", "memory comes from br_mem"},
        {"strdup", "", "memory comes from br_mem"},
        {"getenv", "", "options come through bitroll.h"},
        {"exit", "", "a library returns a status"},
        {"abort", "src/base/br_status.c src/base/br_mem.c", "a library returns a status; BR_ASSERT is for a programmer's error"},
        {"alloca", "", "stack sizes are fixed"},
        {"rand", "", "random numbers have a seed and a counter"},
        {"sprintf", "", "bytes are bounded"},
        {"gets", "", "bytes are bounded"},
    };
    (void)tree;
    for (size_t i = 0; i < sizeof banned / sizeof banned[0]; i++)
        if (file->code && tidy_in(file->path, PRODUCT) && !tidy_in(file->path, "src/cli") &&
            !is_listed(banned[i].home, file->path))
            ban(file, file->code, banned[i].word, 1, banned[i].why, out);
}

/* libm's own results are not specified to the bit, and fminf and fmaxf do not say which of two zeros comes out. */
void tidy_rule_float_functions(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const char *const banned[] = {
        "fminf", "fmaxf", "fmin", "fmax", "exp", "expf", "exp2", "exp2f", "log", "logf", "log2", "log2f", "log1p", "log1pf",
        "expm1f", "tanh", "tanhf", "pow", "powf", "rsqrt", "rsqrtf", "__expf", "__logf", "__powf", "__tanhf", "__frsqrt_rn",
        "__fdividef", "fdividef", "_mm_rsqrt_ps", "_mm256_rsqrt_ps", "_mm512_rsqrt14_ps", "_mm_rcp_ps", "_mm256_rcp_ps",
    };
    const char *const may = strcmp(file->path, KERNELS "/bi_attn_fused.cuh") == 0 ? "fmaxf" : ""; /* says at each of them why no bit moves */
    (void)tree;
    if (!file->code || !tidy_in(file->path, PRODUCT) || tidy_in(file->path, KERNELS "/backward")) /* gradients are under no bit contract */
        return;
    for (size_t i = 0; i < sizeof banned / sizeof banned[0]; i++)
        if (!is_listed(may, banned[i]))
            ban(file, file->code, banned[i], 1, "its bits depend on the library; numeric/ has our own", out);
}

static int is_float_literal(const char *at) {
    const size_t n = strspn(at, "0123456789");
    return n > 0 && at[n] == '.' && isdigit((unsigned char)at[n + 1]);
}

/* The first group decides and moves: no float at all. The second passes buffers of floats to ops: it may name the type, but
 * neither make a float nor work on one. */
void tidy_rule_float_words(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    (void)tree;
    if (file->code && tidy_in(file->path, "src/sched src/kv src/proof src/comm trainer_bridge")) {
        ban(file, file->code, "float", 0, "this folder knows integers and bytes only", out);
        ban(file, file->code, "double", 0, "this folder knows integers and bytes only", out);
    }
    if (!file->code || !tidy_in(file->path, "src/sched src/kv src/proof src/comm src/model src/weights"))
        return;
    for (const char *at = file->code; *at; at++) {
        const int begins = at == file->code || !is_word_char(at[-1]);
        if (begins && (strncmp(at, "(float)", 7) == 0 || strncmp(at, "(double)", 8) == 0))
            tidy_say(out, file, line_of(file->code, at), "a cast to floating point: arithmetic is for the ops");
        if (begins && at > file->code && at[-1] != '.' && is_float_literal(at))
            tidy_say(out, file, line_of(file->code, at), "a floating-point constant: arithmetic is for the ops");
    }
}

void tidy_rule_flags(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const char *const banned[] = {
        "-f" "fast-math", "-O" "fast", "-f" "unsafe-math-optimizations", "-f" "associative-math", "-f" "reciprocal-math",
        "-f" "finite-math-only", "-m" "recip", "-ffp-contract=" "fast", "-ffp-contract=" "on", "--use_" "fast_math",
        "-use_" "fast_math", "--ftz=" "true", "FP_CONTRACT " "ON", "__attribute__((" "optimize", "GCC " "optimize",
    };
    const char *const strict = "-ffp-contract=" "off";
    (void)tree;
    for (size_t i = 0; i < sizeof banned / sizeof banned[0]; i++) {
        const char *at = strstr(file->text, banned[i]);
        if (at)
            tidy_say(out, file, line_of(file->text, at), "'%s' lets the compiler change bits", banned[i]);
    }
    if (strcmp(file->path, "CMakeLists.txt") == 0 && !strstr(file->text, strict))
        tidy_say(out, file, 1, "'%s' is missing: without it products and sums contract", strict);
}

void tidy_rule_words(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const char *const banned[] = {
        "TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK", "st" "ub", "st" "ubs", "place" "holder", "not " "implemented", "for " "now",
    };
    (void)tree;
    for (size_t i = 0; i < sizeof banned / sizeof banned[0]; i++)
        ban(file, file->text, banned[i], 0, "finish it, or file an issue", out);
}

void tidy_rule_paths(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const char *const banned[] = {"/wo" "rk/", "/ho" "me/", "/ro" "ot/", "/Us" "ers/", "/mn" "t/"};
    (void)tree;
    for (size_t i = 0; i < sizeof banned / sizeof banned[0]; i++) {
        const char *at = strstr(file->text, banned[i]);
        if (at && (at == file->text || !is_word_char(at[-1])))
            tidy_say(out, file, line_of(file->text, at), "'%s' is a path of one machine", banned[i]);
    }
}

/* ---- launches that overlap -------------------------------------------------------------------------------------------------- */

/* Behind the bracket that closes the one at `at`; the end of the text when none does. */
static const char *behind(const char *at, char open, char close) {
    int depth = 0;
    for (; *at; at++) {
        depth += *at == open;
        depth -= *at == close;
        if (depth == 0)
            return at + 1;
    }
    return at;
}

static const char *skip_blanks(const char *at) {
    return at + strspn(at, " \n");
}

static int is_directive(const char *text, const char *at) {
    while (at > text && at[-1] != '\n')
        at--;
    return *at == '#';
}

/* From behind the word that makes a kernel: its name, and the place of its parameters; NULL: no kernel. */
static const char *kernel_name(const char *at, char name[NAME_BYTES]) {
    for (at = skip_blanks(at); isalpha((unsigned char)*at) || *at == '_'; at = skip_blanks(at)) {
        const char *end = at;
        while (is_word_char(*end))
            end++;
        snprintf(name, NAME_BYTES, "%.*s", (int)(end - at), at);
        at = skip_blanks(end);
        if (*at == '(' && !is_listed("__launch_bounds__ __cluster_dims__", name))
            return at;
        if (*at == '(')
            at = behind(at, '(', ')');
    }
    return NULL;
}

/* Does the text launch the kernel by <<< >>>? */
static int is_launched_plainly(const char *text, const char *name) {
    for (const char *at = text; (at = find_word(text, at, name)); at++) {
        const char *next = skip_blanks(at + strlen(name));
        if (*next == '<' && strncmp(next, "<<<", 3) != 0)
            next = skip_blanks(behind(next, '<', '>'));
        if (strncmp(next, "<<<", 3) == 0)
            return 1;
    }
    return 0;
}

static int is_plain(const tidy_tree *tree, const tidy_file *file, const char *name) {
    char folder[NAME_BYTES];
    int n = is_launched_plainly(file->code, name);
    for (int i = 0; i < tree->n_file && !n; i++) {
        tidy_folder(tree->file[i].path, folder, sizeof folder);
        n = tree->file[i].code && strcmp(folder, KERNELS) == 0 && is_launched_plainly(tree->file[i].code, name);
    }
    return n;
}

/* Does a bi_cuda_launch or bi_cuda_launch_on of the text name it? */
static int is_launched_early(const char *text, const char *name) {
    static const char *const launcher[] = {"bi_cuda_launch", "bi_cuda_launch_on"};
    for (int i = 0; i < 2; i++)
        for (const char *at = text; (at = find_word(text, at, launcher[i])); at++) {
            const char *open = skip_blanks(at + strlen(launcher[i])), *word = *open == '(' ? find_word(text, open, name) : NULL;
            if (word && word < behind(open, '(', ')'))
                return 1;
        }
    return 0;
}

/* A kernel that another launch may overlap waits first: see bi_cuda_begin. Those that are launched by <<< >>> need not, nor these:
 * stream_kernel, both wide_kernels, index_score_wide and few_kernel fetch what no launch that may still run writes, or multiply what none
 * makes, and wait then; kda_general is launched by <<< >>> through a table. */
void tidy_rule_launches(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    static const char *const maker[] = {"__global__", "BI_ROW_KERNEL"};
    static const char *const late = "stream_kernel wide_kernel index_score_wide few_kernel", *const by_table = "kda_general";
    char folder[NAME_BYTES], name[NAME_BYTES];
    tidy_folder(file->path, folder, sizeof folder);
    if (!file->code || strcmp(folder, KERNELS) != 0)
        return;
    if (strcmp(base_name(file->path), "bi_cuda.cuh") != 0 && strstr(file->text, "grid" "depcontrol"))
        tidy_say(out, file, line_of(file->text, strstr(file->text, "grid" "depcontrol")), "expected the helpers of bi_cuda.cuh");
    for (int i = 0; i < 2; i++)
        for (const char *at = file->code; (at = find_word(file->code, at, maker[i])); at++) {
            const char *open = is_directive(file->code, at) ? NULL : kernel_name(at + strlen(maker[i]), name);
            const char *body = open ? skip_blanks(behind(open, '(', ')')) : NULL;
            if (!body || *body != '{' || strncmp(skip_blanks(body + 1), "bi_cuda_begin();", 16) == 0)
                continue;
            const int waits = is_listed(late, name) && strstr(file->code, "bi_cuda_await_before();");
            if (!waits && !is_listed(by_table, name) && (is_launched_early(file->code, name) || !is_plain(tree, file, name)))
                tidy_say(out, file, line_of(file->code, at), "%s: expected bi_cuda_begin() first", name);
        }
}

/* ---- nothing lies about --------------------------------------------------------------------------------------------------- */

static int is_suite(const char *name) {
    return strncmp(name, "test_", 5) == 0 && strcmp(name, "test_main.c") != 0 && strcmp(name, "test_support.c") != 0;
}

/* A source that no target names is never compiled, a suite that is not listed never runs. Fuzz targets are found by name, and
 * test_library.c builds the examples against an installed tree. */
void tidy_rule_built(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    const char *name = base_name(file->path), *end = strrchr(name, '.');
    const tidy_file *cmake = tidy_find(tree, "CMakeLists.txt"), *suites = tidy_find(tree, "tests/suites.h");
    char line[NAME_BYTES];
    if (!end || (strcmp(end, ".c") != 0 && strcmp(end, ".cu") != 0) || !cmake || !suites)
        return;
    if (strncmp(file->path, "tests/fuzz_", 11) != 0 && !tidy_in(file->path, "examples") && !strstr(cmake->text, file->path))
        tidy_say(out, file, 1, "CMakeLists.txt does not name it");
    if (!tidy_in(file->path, "tests") || !is_suite(name))
        return;
    snprintf(line, sizeof line, "SUITE(%.*s)\n", (int)(end - name) - 5, name + 5);
    if (!strstr(suites->text, line))
        tidy_say(out, file, 1, "tests/suites.h has no %.*s", (int)strlen(line) - 1, line);
}

/* A manifest names files from its own folder on, one a line, first word; a name may be a pattern. */
static int manifest_names(const tidy_file *manifest, const char *path) {
    char folder[NAME_BYTES], pattern[2 * NAME_BYTES];
    tidy_folder(manifest->path, folder, sizeof folder);
    for (const char *at = manifest->text; *at;) {
        snprintf(pattern, sizeof pattern, "%s/%.*s", folder, (int)strcspn(at, " \t\n"), at);
        if (*at != '#' && fnmatch(pattern, path, FNM_PATHNAME) == 0)
            return 1;
        at += strcspn(at, "\n");
        at += *at == '\n';
    }
    return 0;
}

static int is_manifest(const tidy_file *file) {
    return tidy_in(file->path, "golden") && strncasecmp(base_name(file->path), "manifest", 8) == 0;
}

static int is_named(const tidy_tree *tree, const char *golden) {
    for (int i = 0; i < tree->n_file; i++)
        if (is_manifest(&tree->file[i]) && manifest_names(&tree->file[i], golden))
            return 1;
    return 0;
}

/* Runs once, on golden/MANIFEST, for all golden files. */
void tidy_rule_golden(const tidy_tree *tree, const tidy_file *file, tidy_report *out) {
    if (strcmp(file->path, "golden/MANIFEST") != 0)
        return;
    for (int i = 0; i < tree->n_golden; i++)
        if (!is_named(tree, tree->golden[i]))
            tidy_say(out, file, 1, "no manifest names %s", tree->golden[i]);
}
