/* tidy_rules: the rules of the repository as functions from a file to its violations. A rule looks at one file, with the
 * tree at hand; test_tidy.c runs every rule over the tree, and over planted files to prove that it fires. */
#ifndef TIDY_RULES_H
#define TIDY_RULES_H

#include <stddef.h>

typedef struct tidy_file {
    const char *path; /* from the root of the repository */
    const char *text;
    char *code;       /* the text with comments and quoted text blanked; of C files only, else NULL */
} tidy_file;

typedef struct tidy_tree {
    tidy_file *file;
    int n_file;
    const char **golden; /* paths of the golden files, manifests left out */
    int n_golden;
} tidy_tree;

typedef struct tidy_report {
    int n;
    char text[4096]; /* the first violations, a line each */
} tidy_report;

typedef void (*tidy_rule)(const tidy_tree *tree, const tidy_file *file, tidy_report *out);

/* Reads every source, script and text of the repository. Dies when it cannot. */
void tidy_open(const char *root, tidy_tree *tree);
void tidy_close(tidy_tree *tree);
/* A file that is not on disk: text and path are static. */
tidy_file tidy_plant(const char *path, const char *text);
const tidy_file *tidy_find(const tidy_tree *tree, const char *path);
void tidy_say(tidy_report *out, const tidy_file *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

int tidy_is_c(const char *path);                           /* .c, .h, .cu, .cuh */
void tidy_folder(const char *path, char *folder, size_t n); /* of "src/io/prompts.c": "src/io"; of "run": "" */
int tidy_in(const char *path, const char *folders);        /* lies in or below one of them, blanks between */

void tidy_rule_layering(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_system_headers(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_stems(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_folders(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_sizes(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_functions(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_first_comment(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_calls(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_float_functions(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_float_words(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_flags(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_words(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_paths(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_built(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_launches(const tidy_tree *tree, const tidy_file *file, tidy_report *out);
void tidy_rule_golden(const tidy_tree *tree, const tidy_file *file, tidy_report *out);

#endif
