/* golden_manifest: golden/MANIFEST, which names each file of golden vectors, its digest, its op and clauses, and who agreed.
 *
 * Layer: tests. Lines of text: `contract DIGEST`, then `FILE DIGEST OP CLAUSES AGREED` in the order of the names. A line
 * whose digest is `-` only says that other files belong here; readers skip it. */
#ifndef GOLDEN_MANIFEST_H
#define GOLDEN_MANIFEST_H

#include "br_file.h"
#include "br_hash.h"

enum { GOLDEN_FIELD_BYTES = 128, GOLDEN_ENTRY_MAX = 96 };

typedef struct golden_entry {
    char file[GOLDEN_FIELD_BYTES], digest[BR_DIGEST_TEXT_BYTES], op[GOLDEN_FIELD_BYTES], clauses[GOLDEN_FIELD_BYTES];
    char agreed[GOLDEN_FIELD_BYTES];
} golden_entry;

typedef struct golden_manifest {
    char contract[BR_DIGEST_TEXT_BYTES];
    golden_entry entry[GOLDEN_ENTRY_MAX];
    int n;
} golden_manifest;

void golden_manifest_read(const char *dir, golden_manifest *manifest);
/* Sorts the entries; the contract digest is that of this build. */
void golden_manifest_write(const char *dir, golden_manifest *manifest);

/* XXH3-128 of dir/file as text. */
void golden_file_digest(const char *dir, const char *file, char digest[BR_DIGEST_TEXT_BYTES]);
/* The files under dir that a manifest must name, sorted. Returns how many. */
int golden_files(const char *dir, char file[GOLDEN_ENTRY_MAX][GOLDEN_FIELD_BYTES]);
/* What `bitroll inspect` prints without a model; from br_mem. */
char *golden_inspect_text(void);

#endif
