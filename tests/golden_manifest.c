/* golden/MANIFEST read, written and compared with the folder; see golden_manifest.h. */
#include "golden_manifest.h"

#include "bi_contract.h"
#include "br_mem.h"
#include "test_support.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void map_file(const char *dir, const char *file, br_map *map) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, dir, file));
    CHECK_OK(br_file_map(path, map));
}

void golden_file_digest(const char *dir, const char *file, char digest[BR_DIGEST_TEXT_BYTES]) {
    br_map map;
    map_file(dir, file, &map);
    br_digest_text(br_hash_bytes(map.bytes, map.n), digest);
    br_file_unmap(&map);
}

/* ---- the text --------------------------------------------------------------------------------------------------------- */

static void read_line(golden_manifest *manifest, const char *line) {
    golden_entry e;
    if (line[0] == '#' || line[0] == 0 || sscanf(line, "contract %32s", manifest->contract) == 1)
        return;
    int n = sscanf(line, "%127s %32s %127s %127s %127s", e.file, e.digest, e.op, e.clauses, e.agreed);
    if (n == 5 && strcmp(e.digest, "-") == 0)
        return;
    if (n != 5 || manifest->n == GOLDEN_ENTRY_MAX)
        ck_abort_msg("MANIFEST: expected `contract DIGEST` or five words, at most %d times, found '%s'", GOLDEN_ENTRY_MAX,
                     line);
    manifest->entry[manifest->n++] = e;
}

void golden_manifest_read(const char *dir, golden_manifest *manifest) {
    br_map map;
    memset(manifest, 0, sizeof *manifest);
    map_file(dir, "MANIFEST", &map);
    const char *at = (const char *)map.bytes, *end = at + map.n;
    while (at < end) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        stop = stop ? stop : end;
        char line[1024];
        ck_assert_int_lt(stop - at, (int)sizeof line);
        snprintf(line, sizeof line, "%.*s", (int)(stop - at), at);
        read_line(manifest, line);
        at = stop + 1;
    }
    br_file_unmap(&map);
}

/* What the folder holds besides vectors: no digest, since its own suites read it. */
static const char others[] = "bugs/README.md - - - text\n"
                             "configs/*.json - - - inputs\n"
                             "names/*.txt - - - inputs\n"
                             "seeds/*/* - - - inputs\n";

static int by_file(const void *a, const void *b) {
    return strcmp(((const golden_entry *)a)->file, ((const golden_entry *)b)->file);
}

void golden_manifest_write(const char *dir, golden_manifest *manifest) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, dir, "MANIFEST"));
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    ck_assert_ptr_nonnull(out);
    qsort(manifest->entry, (size_t)manifest->n, sizeof manifest->entry[0], by_file);
    br_digest_text(bi_contract_digest(), manifest->contract);
    fprintf(out,
            "# Golden data: file, XXH3-128 of the file, op, clauses of CONTRACT.md, who gave these bits. Written by "
            "golden_write.\ncontract %s\n%s",
            manifest->contract, others);
    for (int i = 0; i < manifest->n; i++) {
        const golden_entry *e = &manifest->entry[i];
        fprintf(out, "%s %s %s %s %s\n", e->file, e->digest, e->op, e->clauses, e->agreed);
    }
    ck_assert_int_eq(fclose(out), 0);
    CHECK_OK(br_file_write(path, text, n));
    free(text);
}

/* ---- the folder ------------------------------------------------------------------------------------------------------- */

static int is_text(const char *name) {
    size_t n = strlen(name);
    return n > 4 && strcmp(name + n - 4, ".txt") == 0;
}

/* Adds the text files of dir/folder and of its folders; a folder that is not there has none. */
static int add_folder(const char *dir, const char *folder, char file[GOLDEN_ENTRY_MAX][GOLDEN_FIELD_BYTES], int n) {
    char path[BR_PATH_BYTES], name[GOLDEN_FIELD_BYTES + 256];
    CHECK_OK(br_file_join(path, dir, folder));
    DIR *open = opendir(path);
    if (!open)
        return n;
    for (struct dirent *entry; (entry = readdir(open)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", folder, entry->d_name);
        if (!is_text(name)) {
            n = add_folder(dir, name, file, n);
            continue;
        }
        ck_assert_int_lt(n, GOLDEN_ENTRY_MAX);
        ck_assert_uint_lt(strlen(name), GOLDEN_FIELD_BYTES);
        strcpy(file[n++], name);
    }
    closedir(open);
    return n;
}

static int by_name(const void *a, const void *b) {
    return strcmp(a, b);
}

int golden_files(const char *dir, char file[GOLDEN_ENTRY_MAX][GOLDEN_FIELD_BYTES]) {
    int n = add_folder(dir, "bugs", file, 0);
    n = add_folder(dir, "hw_probe", file, n);
    n = add_folder(dir, "ops", file, n);
    ck_assert_int_lt(n, GOLDEN_ENTRY_MAX);
    strcpy(file[n++], "inspect.txt");
    qsort(file, (size_t)n, sizeof file[0], by_name);
    return n;
}

/* ---- inspect ---------------------------------------------------------------------------------------------------------- */

typedef struct text_so_far {
    char *text;
    size_t n;
} text_so_far;

static void take_line(void *context, const char *line) {
    text_so_far *so_far = context;
    size_t n = strlen(line);
    CHECK_OK(br_mem_grow((void **)&so_far->text, so_far->n ? so_far->n + 1 : 0, so_far->n + n + 2, "the output of inspect"));
    memcpy(so_far->text + so_far->n, line, n);
    so_far->n += n;
    so_far->text[so_far->n++] = '\n';
}

char *golden_inspect_text(void) {
    text_so_far so_far = {NULL, 0};
    CHECK_OK(br_job_inspect(NULL, take_line, &so_far));
    return so_far.text;
}
