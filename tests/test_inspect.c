/* The verbs `inspect` and `digest`, also on full-size checkpoints that hold headers only. */
#include "checkpoint_rig.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- inspect and digest ---------------------------------------------------------------------------------------------- */

typedef struct lines {
    char *text;
    size_t n, n_max;
} lines;

static void take_line(void *context, const char *line) {
    lines *l = context;
    size_t n = strlen(line);
    ck_assert_ptr_null(strchr(line, '\n'));
    if (l->n + n + 2 > l->n_max)
        l->text = realloc(l->text, l->n_max = 2 * l->n_max + n + 2);
    memcpy(l->text + l->n, line, n);
    memcpy(l->text + l->n + n, "\n", 2);
    l->n += n + 1;
}

#define CHECK_LINE(l, line) ck_assert_msg(strstr((l).text, line "\n") != NULL, "no line '%s' in\n%s", line, (l).text)

START_TEST(inspect_without_a_model) {
    lines l = {0};
    CHECK_OK(br_job_inspect(NULL, take_line, &l));
    CHECK_LINE(l, "  layers               128");
    CHECK_LINE(l, "  page                 64 positions of one sequence, all MLA layers");
    CHECK_LINE(l, "  BI_MMA_FRACTION 25");
    CHECK_LINE(l, "  BI_ATT_PART 2048");
    CHECK_LINE(l, "contract version 2");
    ck_assert_ptr_nonnull(strstr(l.text, "contract digest "));
    free(l.text);
}
END_TEST

START_TEST(inspect_lists_strays) {
    const int64_t dim[1] = {32};
    draft *d = draft_new(TINY_K31, 1);
    lines l = {0};
    draft_write(d);
    CHECK_OK(br_job_inspect(d->dir, take_line, &l));
    CHECK_LINE(l, "model KimiK31");
    CHECK_LINE(l, "tensors              73 in 2 shards: 73 text, 0 vision (skipped), 0 unknown; 0 missing");
    CHECK_LINE(l, "  expert_w1               3           1536");    /* 32 * 16 bytes each */
    CHECK_LINE(l, "  cache a token      116: latent 96, index 20"); /* (32+16)*2 + 16+4 */
    CHECK_LINE(l, "  state a sequence   4672: KDA 4096, conv 576"); /* 32*32*4; 3*3*32*2 */
    l.n = 0;
    draft_remove(d, draft_find(d, "experts.1.w3.weight_scale"));
    draft_add(d, "model.strange", "F64", 1, dim);
    draft_write(d);
    CHECK_FAILS(br_job_inspect(d->dir, take_line, &l), BR_E_FORMAT);
    CHECK_LINE(l, "  unknown            model.strange");
    CHECK_LINE(l, "  missing            language_model.model.layers.1.block_sparse_moe.experts.1.w3.weight_scale");
    CHECK_LINE(l, "tensors              73 in 2 shards: 72 text, 0 vision (skipped), 1 unknown; 1 missing");
    free(l.text);
    draft_free(d);
}
END_TEST

START_TEST(digest_job) {
    draft *d = draft_new(TINY_LINEAR, 1);
    lines l = {0};
    br_report report;
    char hex[BR_DIGEST_TEXT_BYTES], last[80];
    br_digest digest = draft_digest(d);
    CHECK_OK(br_job_digest(d->dir, take_line, &l, &report));
    ck_assert(br_digest_equal(report.weights_digest, digest));
    br_digest_text(digest, hex);
    snprintf(last, sizeof last, "weights, Merkle root %s\n", hex);
    ck_assert_str_eq(l.text + l.n - strlen(last), last);
    int n_line = 0;
    char previous[BR_NAME_BYTES] = "";
    for (char *at = strtok(l.text, "\n"); at; at = strtok(NULL, "\n"), n_line++) {
        if (n_line == d->n)
            break;
        const char *name = strstr(at, "  ") + 2;
        ck_assert_str_lt(previous, name); /* by name */
        snprintf(previous, sizeof previous, "%s", name);
    }
    ck_assert_int_eq(n_line, d->n);
    free(l.text);
    l = (lines){0};
    draft_write_text(d, "adapter_config.json", "{}");
    draft_drop(d, "config.json");
    CHECK_FAILS(br_job_digest(d->dir, take_line, &l, &report), BR_E_NOT_FOUND);
    CHECK_SAYS("adapter_model.safetensors");
    draft_drop(d, "adapter_config.json");
    CHECK_FAILS(br_job_digest(d->dir, take_line, &l, &report), BR_E_NOT_FOUND);
    draft_free(d);
}
END_TEST

/* ---- full-size checkpoints that hold headers only -------------------------------------------------------------------- */

enum { SPARSE_SHARDS = 96, VISION_TENSORS = 168 };

/* Shards and index of every tensor the config asks for; with_bias 0 leaves the optional ones out. */
static void write_sparse(const char *dir, const br_config *c, int with_bias) {
    static shard_text shard[SPARSE_SHARDS];
    char path[BR_PATH_BYTES + 64], name[BR_NAME_BYTES];
    const int64_t n = br_weight_expect_count(c), vision[4] = {1152, 3, 14, 14};
    br_expect want;
    memset(shard, 0, sizeof shard);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    FILE *index = fopen(path, "wb");
    ck_assert_ptr_nonnull(index);
    fprintf(index, "{\"weight_map\":{");
    for (int64_t i = 0; br_weight_expect(c, i, &want); i++) {
        const int s = (int)(i * SPARSE_SHARDS / n);
        if (want.optional && !with_bias)
            continue;
        br_weight_name(c, want.cls, want.layer, want.expert, name);
        const char *dtype = want.dtypes & 1u << BR_DTYPE_F32 ? "F32" : want.dtypes & 1u << BR_DTYPE_BF16 ? "BF16" : "U8";
        shard_add(&shard[s], name, dtype, want.dim, want.n_dim);
        fprintf(index, "\"%s\":\"s%d.safetensors\",", name, s);
    }
    for (int i = 0; i < VISION_TENSORS; i++) {
        snprintf(name, sizeof name, "vision_tower.part.%d.weight", i);
        shard_add(&shard[i % SPARSE_SHARDS], name, "BF16", vision, 4);
        fprintf(index, "\"%s\":\"s%d.safetensors\"%s", name, i % SPARSE_SHARDS, i == VISION_TENSORS - 1 ? "}}" : ",");
    }
    fclose(index);
    for (int s = 0; s < SPARSE_SHARDS; s++) {
        snprintf(path, sizeof path, "%s/s%d.safetensors", dir, s);
        FILE *file = shard_begin(path, &shard[s]);
        ck_assert_int_eq(fflush(file), 0);
        ck_assert_int_eq(ftruncate(fileno(file), (off_t)(8 + shard[s].n + shard[s].n_data)), 0); /* the data are a hole */
        fclose(file);
    }
}

static void copy_config(const char *model, const char *dir) {
    char from[BR_PATH_BYTES], to[BR_PATH_BYTES];
    br_map map;
    snprintf(from, sizeof from, "%s/golden/configs/%s.json", test_source_dir(), model);
    CHECK_OK(br_file_map(from, &map));
    CHECK_OK(br_file_join(to, dir, "config.json"));
    rig_write_file(to, (const char *)map.bytes, map.n);
    br_file_unmap(&map);
}

/* 1.56 TB by their sizes, about 100 MB on disk: opening must read headers only, and take seconds (4 of a busy core). The
 * bound leaves room for sanitizers and catches what is quadratic in half a million. */
static void check_sparse(const char *model, int with_bias, const char *tensors, const char *weights) {
    char dir[BR_PATH_BYTES];
    br_config c;
    lines l = {0};
    struct timespec begin, end;
    rig_read_golden_config(model, &c);
    snprintf(dir, sizeof dir, "%s/%s-%d", test_tmp_dir(), model, with_bias);
    CHECK_OK(br_file_make_dir(dir));
    copy_config(model, dir);
    write_sparse(dir, &c, with_bias);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    CHECK_OK(br_job_inspect(dir, take_line, &l));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    ck_assert_msg(seconds < 40, "inspect took %.1f s of processor time", seconds);
    ck_assert_msg(strstr(l.text, tensors) != NULL, "no '%s' in\n%s", tensors, l.text);
    ck_assert_msg(strstr(l.text, weights) != NULL, "no '%s' in\n%s", weights, l.text);
    free(l.text);
}

START_TEST(full_size_kimi_k3_opens) {
    check_sparse("kimi-k3", 1,
                 "tensors              497220 in 96 shards: 497052 text, 168 vision (skipped), 0 unknown; 0 missing\n",
                 "  weights            1559");
}
END_TEST

START_TEST(full_size_kimi_k31_opens) {
    if (!test_is_long())
        return;
    check_sparse("kimi-k31", 0,
                 "tensors              497316 in 96 shards: 497148 text, 168 vision (skipped), 0 unknown; 0 missing\n",
                 "  weights            1560");
    check_sparse("kimi-k31", 1,
                 "tensors              497340 in 96 shards: 497172 text, 168 vision (skipped), 0 unknown; 0 missing\n",
                 "  weights            1560");
}
END_TEST

Suite *test_inspect_suite(void) {
    Suite *suite = suite_create("inspect");
    TCase *jobs = tcase_create("jobs"), *full = tcase_create("full size");
    tcase_set_timeout(jobs, 30);
    tcase_set_timeout(full, 300);
    tcase_add_test(jobs, inspect_without_a_model);
    tcase_add_test(jobs, inspect_lists_strays);
    tcase_add_test(jobs, digest_job);
    tcase_add_test(full, full_size_kimi_k3_opens);
    tcase_add_test(full, full_size_kimi_k31_opens);
    suite_add_tcase(suite, jobs);
    suite_add_tcase(suite, full);
    return suite;
}
