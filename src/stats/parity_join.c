/* Two sorted lists of names, walked once; see parity_join.h. Layer: stats. */
#include "parity_join.h"
#include "br_mem.h"

#include <stdlib.h>
#include <string.h>

/* The hash of a uid sorts; two uids with one hash (2^-64) are told apart when a pair is made. */
typedef struct key {
    uint64_t uid_hash;
    uint32_t sample;
    int32_t file; /* 0: a, 1: b */
    int64_t index;
} key;

static int by_name(const void *left, const void *right) {
    const key *a = left, *b = right;
    if (a->uid_hash != b->uid_hash)
        return a->uid_hash < b->uid_hash ? -1 : 1;
    if (a->sample != b->sample)
        return a->sample < b->sample ? -1 : 1;
    if (a->file != b->file)
        return a->file - b->file;
    return (a->index > b->index) - (a->index < b->index);
}

static int same_name(const key *a, const key *b) {
    return a->uid_hash == b->uid_hash && a->sample == b->sample;
}

static void take_keys(const rollout_reader *reader, int32_t file, key *out) {
    for (int64_t i = 0; i < rollout_seq_count(reader); i++) {
        rollout_seq seq;
        rollout_seq_at(reader, i, &seq);
        out[i] = (key){.uid_hash = seq.uid_hash, .sample = seq.sample, .file = file, .index = i};
    }
}

static int same_uid(const rollout_reader *a, int64_t i, const rollout_reader *b, int64_t k) {
    rollout_seq left, right;
    rollout_seq_at(a, i, &left);
    rollout_seq_at(b, k, &right);
    return strcmp(left.uid, right.uid) == 0;
}

static void note_only_b(parity_join *join, int64_t index) {
    join->n_only_b++;
    if (join->only_b < 0 || index < join->only_b)
        join->only_b = index;
}

/* key[begin .. end - 1] share a name: at most one of each file, those of a first. */
static void join_group(const rollout_reader *a, const rollout_reader *b, const key *group, int64_t n, parity_join *join) {
    const key *of[2] = {NULL, NULL};
    for (int64_t i = 0; i < n; i++) {
        if (of[group[i].file])
            join->n_doubled++;
        else
            of[group[i].file] = &group[i];
    }
    if (of[0] && of[1] && same_uid(a, of[0]->index, b, of[1]->index)) {
        join->in_b[of[0]->index] = of[1]->index;
        join->n_joined++;
        return;
    }
    join->n_only_a += of[0] != NULL;
    if (of[1])
        note_only_b(join, of[1]->index);
}

br_status parity_join_open(const rollout_reader *a, const rollout_reader *b, parity_join *out) {
    br_status status;
    key *keys = NULL;
    int64_t n_a = rollout_seq_count(a), n_b = rollout_seq_count(b), n = n_a + n_b;
    *out = (parity_join){.n_a = n_a, .only_b = -1};
    BR_TRY_GOTO(br_mem_alloc((void **)&out->in_b, (size_t)n_a * sizeof out->in_b[0], "the join of two files"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&keys, (size_t)n * sizeof keys[0], "the names of two files"), exit);
    take_keys(a, 0, keys);
    take_keys(b, 1, keys + n_a);
    qsort(keys, (size_t)n, sizeof keys[0], by_name);
    for (int64_t i = 0; i < n_a; i++)
        out->in_b[i] = -1;
    for (int64_t begin = 0, end; begin < n; begin = end) {
        end = begin + 1;
        while (end < n && same_name(&keys[begin], &keys[end]))
            end++;
        join_group(a, b, keys + begin, end - begin, out);
    }
exit:
    br_mem_free(keys);
    if (status != BR_OK)
        parity_join_close(out);
    return status;
}

void parity_join_close(parity_join *join) {
    br_mem_free(join->in_b);
    join->in_b = NULL;
}
