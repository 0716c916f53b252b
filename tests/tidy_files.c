/* Files for the repository's rules: reading the tree, blanking what is not code; see tidy_rules.h. */
#include "tidy_rules.h"

#include <check.h>
#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { FILE_MAX = 2048, PATH_BYTES = 512 };

static void *need(void *block) {
    ck_assert_ptr_nonnull(block);
    return block;
}

static int ends_with(const char *text, const char *end) {
    const size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

int tidy_is_c(const char *path) {
    return ends_with(path, ".c") || ends_with(path, ".h") || ends_with(path, ".cu") || ends_with(path, ".cuh");
}

void tidy_folder(const char *path, char *folder, size_t n) {
    const char *slash = strrchr(path, '/');
    snprintf(folder, n, "%.*s", slash ? (int)(slash - path) : 0, path);
}

int tidy_in(const char *path, const char *folders) {
    for (const char *at = folders; *at;) {
        const size_t n = strcspn(at, " ");
        if (strncmp(path, at, n) == 0 && (path[n] == '/' || path[n] == 0))
            return 1;
        at += n + (at[n] == ' ');
    }
    return 0;
}

void tidy_say(tidy_report *out, const tidy_file *file, int line, const char *format, ...) {
    const size_t used = strlen(out->text), room = sizeof out->text - used;
    va_list args;
    out->n++;
    int n = snprintf(out->text + used, room, "\n%s:%d: ", file->path, line);
    if (n < 0 || (size_t)n >= room)
        return;
    va_start(args, format);
    vsnprintf(out->text + used + n, room - (size_t)n, format, args);
    va_end(args);
}

/* ---- code without its comments ------------------------------------------------------------------------------------------- */

/* Blanks from *at through the end that `stop` begins; a backslash guards the character behind it. */
static char *blank_quoted(char *at, char quote) {
    *at++ = ' ';
    while (*at && *at != quote && *at != '\n') {
        if (*at == '\\' && at[1] && at[1] != '\n')
            *at++ = ' ';
        *at++ = ' ';
    }
    if (*at == quote)
        *at++ = ' ';
    return at;
}

static char *blank_comment(char *at) {
    const int is_block = at[1] == '*';
    while (*at && !(is_block ? at[0] == '*' && at[1] == '/' && at[-1] != '/' : *at == '\n')) {
        if (*at != '\n')
            *at = ' ';
        at++;
    }
    if (*at && is_block) {
        *at++ = ' ';
        *at++ = ' ';
    }
    return at;
}

/* Names of headers stay: they are quoted, and rules read them. */
static void blank(char *code) {
    for (char *at = code; *at;) {
        if (strncmp(at, "#include", 8) == 0)
            at += strcspn(at, "\n");
        else if (at[0] == '/' && (at[1] == '*' || at[1] == '/'))
            at = blank_comment(at);
        else if (*at == '"' || *at == '\'')
            at = blank_quoted(at, *at);
        else
            at++;
    }
}

tidy_file tidy_plant(const char *path, const char *text) {
    tidy_file file = {.path = path, .text = text};
    if (tidy_is_c(path)) {
        file.code = need(strdup(text));
        blank(file.code);
    }
    return file;
}

const tidy_file *tidy_find(const tidy_tree *tree, const char *path) {
    for (int i = 0; i < tree->n_file; i++)
        if (strcmp(tree->file[i].path, path) == 0)
            return &tree->file[i];
    return NULL;
}

/* ---- the tree ------------------------------------------------------------------------------------------------------------- */

static char *read_text(const char *path, long n) {
    FILE *in = need(fopen(path, "rb"));
    char *text = need(malloc((size_t)n + 1));
    ck_assert_int_eq(fread(text, 1, (size_t)n, in), n);
    text[n] = 0;
    fclose(in);
    return text;
}

/* Results of runs and what git does not keep are nobody's text. */
static int is_skipped(const char *path) {
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    return strcmp(path, ".git") == 0 || tidy_in(path, "out .clangd .cache") || strncmp(path, "build", 5) == 0 ||
           strcmp(name, "results") == 0 || strcmp(name, "__pycache__") == 0 || ends_with(name, ".o");
}

static void add_file(tidy_tree *tree, const char *full, const char *path, long n) {
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    const int is_manifest = strncasecmp(name, "manifest", 8) == 0;
    if (tidy_in(path, "golden") && !is_manifest) {
        ck_assert_int_lt(tree->n_golden, FILE_MAX);
        tree->golden[tree->n_golden++] = need(strdup(path));
        return;
    }
    ck_assert_int_lt(tree->n_file, FILE_MAX);
    tree->file[tree->n_file++] = tidy_plant(need(strdup(path)), read_text(full, n));
}

static void walk(tidy_tree *tree, const char *root, const char *below) {
    char full[PATH_BYTES], path[PATH_BYTES];
    snprintf(full, sizeof full, "%s/%s", root, below);
    DIR *dir = need(opendir(full));
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        ck_assert_int_lt(snprintf(path, sizeof path, "%s%s%s", below, *below ? "/" : "", entry->d_name), PATH_BYTES);
        ck_assert_int_lt(snprintf(full, sizeof full, "%s/%s", root, path), PATH_BYTES);
        if (is_skipped(path) || lstat(full, &info) != 0)
            continue;
        if (S_ISDIR(info.st_mode))
            walk(tree, root, path);
        else if (S_ISREG(info.st_mode))
            add_file(tree, full, path, (long)info.st_size);
    }
    closedir(dir);
}

void tidy_open(const char *root, tidy_tree *tree) {
    *tree = (tidy_tree){.file = need(calloc(FILE_MAX, sizeof *tree->file)), .golden = need(calloc(FILE_MAX, sizeof *tree->golden))};
    walk(tree, root, "");
}

void tidy_close(tidy_tree *tree) {
    for (int i = 0; i < tree->n_file; i++) {
        free((char *)tree->file[i].path);
        free((char *)tree->file[i].text);
        free(tree->file[i].code);
    }
    for (int i = 0; i < tree->n_golden; i++)
        free((char *)tree->golden[i]);
    free(tree->file);
    free(tree->golden);
}
