/* safetensors: what the reader refuses, what the writer writes, and the index of shards. */
#include "safetensors.h"
#include "test_support.h"

#include "br_mem.h"
#include "st_index.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- reading --------------------------------------------------------------------------------------------------------- */

/* Length, header and n_data bytes of data. The caller frees *bytes. */
static size_t make_file(const char *header, size_t n_header, size_t n_data, unsigned char **bytes) {
    *bytes = calloc(1, 8 + n_header + n_data + 1);
    for (int i = 0; i < 8; i++)
        (*bytes)[i] = (unsigned char)((uint64_t)n_header >> (8 * i));
    memcpy(*bytes + 8, header, n_header);
    return 8 + n_header + n_data;
}

static br_status parse_header(const char *header, size_t n_data, st_file *out) {
    unsigned char *bytes;
    size_t n = make_file(header, strlen(header), n_data, &bytes);
    br_status status = st_parse("file", bytes, n, out);
    free(bytes);
    return status;
}

START_TEST(entries_are_read) {
    st_file f;
    CHECK_OK(parse_header("{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                          "\"__metadata__\":{\"format\":\"pt\"},"
                          "\"a\":{\"data_offsets\":[0,4],\"shape\":[],\"dtype\":\"F32\"},"
                          "\"e\":{\"dtype\":\"U8\",\"shape\":[0,7],\"data_offsets\":[4,4]},"
                          "\"f\":{\"dtype\":\"F4\",\"shape\":[2,1,1,1,3],\"data_offsets\":[16,19]}}  ",
                          19, &f));
    ck_assert_int_eq(f.n_entry, 4);
    ck_assert_ptr_null(f.map.bytes);
    ck_assert_str_eq(f.path, "file");
    ck_assert_str_eq(f.entry[0].name, "a"); /* in the order of the data */
    ck_assert_int_eq(f.entry[0].n_dim, 0);
    ck_assert_str_eq(f.entry[1].name, "e");
    ck_assert_uint_eq(f.entry[1].n_byte, 0);
    ck_assert_str_eq(f.entry[2].name, "b");
    ck_assert_str_eq(f.entry[2].dtype, "BF16");
    ck_assert(f.entry[2].n_dim == 2 && f.entry[2].dim[0] == 2 && f.entry[2].dim[1] == 3);
    ck_assert_uint_eq(f.entry[2].begin - f.entry[0].begin, 4);
    ck_assert_uint_eq(f.entry[2].n_byte, 12);
    ck_assert(f.entry[3].n_dim == 5 && f.entry[3].n_byte == 3);
    st_close(&f);
    st_close(&f); /* closing twice is harmless */
    CHECK_OK(parse_header("{}", 0, &f));
    ck_assert_int_eq(f.n_entry, 0);
    st_close(&f);
}
END_TEST

#define U8_4(begin, end) "{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" #begin "," #end "]}"

static const struct {
    const char *header;
    size_t n_data;
    const char *says;
} REFUSED[] = {
    {"", 0, "not JSON"},
    {"[]", 0, "object"},
    {"{", 0, "not JSON"},
    {"{\"a\":3}", 0, "'a'"},
    {"{\"a\":{}}", 0, "'a'"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, "data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0]}}", 4, "data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,4]}}", 4, "data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0.0,4]}}", 4, "data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":4,\"data_offsets\":[0,4]}}", 4, "shape"},
    {"{\"a\":{\"dtype\":4,\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "dtype"},
    {"{\"a\":{\"dtype\":\"U9\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "'U9' is unknown"},
    {"{\"a\":{\"dtype\":\"BF16BF16BF16\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "unknown"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]}}", 4, "dimension 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4.0],\"data_offsets\":[0,4]}}", 4, "dimension 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,4]}}", 4, "9 dimensions"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "whole count"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775807,4],\"data_offsets\":[0,4]}}", 4, "whole count"}, /* 2^65 - 4 */
    {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0,
     "whole count"}, /* 2^64 bytes */
    {"{\"a\":" U8_4(-4, 0) "}", 4, "bytes -4 to 0"},
    {"{\"a\":" U8_4(4, 0) "}", 4, "bytes 4 to 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5]}}", 4, "holds 4 bytes"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "4 bytes, expected 8"},
    {"{\"a\":" U8_4(1, 5) "}", 5, "a gap"},
    {"{\"a\":" U8_4(0, 4) ",\"b\":" U8_4(5, 9) "}", 9, "'b' begins at byte 5 of the data, expected 4: a gap"},
    {"{\"a\":" U8_4(0, 4) ",\"b\":" U8_4(3, 7) "}", 7, "'b' begins at byte 3 of the data, expected 4: it overlaps"},
    {"{\"a\":" U8_4(0, 4) ",\"b\":" U8_4(0, 4) "}", 4, "overlaps"},
    {"{\"a\":" U8_4(0, 4) "}", 5, "after the last tensor"},
    {"{}", 1, "after the last tensor"},
    {"{\"twin\":" U8_4(0, 4) ",\"twin\":" U8_4(4, 8) "}", 8, "twin"},
};

START_TEST(broken_headers_are_refused) {
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++) {
        st_file f;
        br_status status = parse_header(REFUSED[i].header, REFUSED[i].n_data, &f);
        ck_assert_msg(status == BR_E_FORMAT, "%s: %s", REFUSED[i].header, br_status_name(status));
        ck_assert_msg(strncmp(br_last_error(), "file: ", 6) == 0 && strstr(br_last_error(), REFUSED[i].says),
                      "%s: '%s' lacks '%s'", REFUSED[i].header, br_last_error(), REFUSED[i].says);
        ck_assert(!f.path && !f.entry && !f.names);
    }
}
END_TEST

START_TEST(lengths_are_checked) {
    static const char HEADER[] = "{\"a\":" U8_4(0, 4) "}";
    unsigned char *bytes;
    st_file f;
    size_t n = make_file(HEADER, strlen(HEADER), 4, &bytes);
    for (size_t cut = 0; cut < n; cut++) { /* every truncation, read from memory of just that size */
        unsigned char *part = malloc(cut ? cut : 1);
        memcpy(part, bytes, cut);
        CHECK_FAILS(st_parse("file", part, cut, &f), BR_E_FORMAT);
        if (cut < 8 + strlen(HEADER))
            ck_assert_ptr_nonnull(strstr(br_last_error(), cut < 8 ? "at least the 8" : "truncated"));
        free(part);
    }
    bytes[3] = 0x06; /* a header of 100,663,296 bytes and more */
    CHECK_FAILS(st_parse("file", bytes, n, &f), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "at most 100000000"));
    memset(bytes, 0xff, 8);
    CHECK_FAILS(st_parse("file", bytes, n, &f), BR_E_FORMAT);
    free(bytes);
}
END_TEST

/* ---- writing --------------------------------------------------------------------------------------------------------- */

static unsigned char byte_of(int64_t entry, uint64_t offset) {
    return (unsigned char)test_mix((uint64_t)entry << 40 | offset);
}

typedef struct fill_log {
    int64_t n_call, fail_at, last_entry;
    uint64_t next_offset;
} fill_log;

static br_status fill(void *context, int64_t entry, uint64_t offset, unsigned char *bytes, size_t n) {
    fill_log *log = context;
    ck_assert(n > 0 && n <= ST_WRITE_BYTES);
    ck_assert(entry == log->last_entry ? offset == log->next_offset : entry > log->last_entry && offset == 0);
    log->last_entry = entry;
    log->next_offset = offset + n;
    if (++log->n_call == log->fail_at)
        return br_fail(BR_E_ABORTED, "stopped");
    for (size_t i = 0; i < n; i++)
        bytes[i] = byte_of(entry, offset + i);
    return BR_OK;
}

static const st_out OUT[] = {
    {"first", "BF16", 2, {3, 5}, 30},
    {"empty", "F32", 3, {4, 0, 2}, 0},
    {"large", "U8", 1, {2 * ST_WRITE_BYTES + 12345}, 2 * ST_WRITE_BYTES + 12345},
    {"scalar", "F32", 0, {0}, 4},
};
enum { N_OUT = sizeof OUT / sizeof OUT[0] };

static void tmp_path(char path[BR_PATH_BYTES], const char *name) {
    CHECK_OK(br_file_join(path, test_tmp_dir(), name));
}

START_TEST(written_files_read_back) {
    char path[BR_PATH_BYTES], part[BR_PATH_BYTES + 8];
    fill_log log = {.last_entry = -1};
    st_file f;
    tmp_path(path, "out.safetensors");
    CHECK_OK(st_write(path, OUT, N_OUT, fill, &log));
    ck_assert_int_eq(log.n_call, 5); /* one, none, three, one: nothing is asked twice */
    CHECK_OK(st_open(path, &f));
    ck_assert_int_eq(f.n_entry, N_OUT);
    ck_assert_uint_eq(f.entry[0].begin % 8, 0);
    for (int i = 0; i < N_OUT; i++) {
        const st_entry *e = &f.entry[i];
        ck_assert_str_eq(e->name, OUT[i].name);
        ck_assert_str_eq(e->dtype, OUT[i].dtype);
        ck_assert_int_eq(e->n_dim, OUT[i].n_dim);
        ck_assert_mem_eq(e->dim, OUT[i].dim, sizeof(int64_t) * (size_t)e->n_dim);
        ck_assert_uint_eq(e->n_byte, OUT[i].n_byte);
        uint64_t same = 0;
        while (same < e->n_byte && f.map.bytes[e->begin + same] == byte_of(i, same))
            same++;
        ck_assert_uint_eq(same, e->n_byte);
    }
    st_close(&f);
    for (int64_t n = 0; n <= 8; n++) { /* every remainder of the header's length is padded */
        char name[16];
        const st_out one = {name, "U8", 1, {3}, 3};
        snprintf(name, sizeof name, "%.*s", (int)n + 1, "nnnnnnnnnn");
        log = (fill_log){.last_entry = -1};
        CHECK_OK(st_write(path, &one, 1, fill, &log));
        CHECK_OK(st_open(path, &f));
        ck_assert_uint_eq(f.entry[0].begin % 8, 0);
        ck_assert_str_eq(f.entry[0].name, name);
        st_close(&f);
    }
    CHECK_OK(st_write(path, NULL, 0, fill, &log));
    CHECK_OK(st_open(path, &f));
    ck_assert_int_eq(f.n_entry, 0);
    st_close(&f);
    snprintf(part, sizeof part, "%s.part", path);
    ck_assert(!br_file_exists(part));
}
END_TEST

START_TEST(failed_writes_leave_the_old_file) {
    char path[BR_PATH_BYTES], part[BR_PATH_BYTES + 8];
    st_file f;
    fill_log log = {.last_entry = -1};
    tmp_path(path, "kept.safetensors");
    snprintf(part, sizeof part, "%s.part", path);
    CHECK_OK(st_write(path, OUT, 1, fill, &log));
    for (int64_t at = 1; at <= 5; at++) {
        log = (fill_log){.last_entry = -1, .fail_at = at};
        CHECK_FAILS(st_write(path, OUT, N_OUT, fill, &log), BR_E_ABORTED);
    }
    for (long n = 1; n <= 2; n++) { /* header, buffer */
        br_mem_fail_nth(n);
        log = (fill_log){.last_entry = -1};
        CHECK_FAILS(st_write(path, OUT, N_OUT, fill, &log), BR_E_NOMEM);
    }
    br_mem_fail_nth(0);
    static const st_out BAD[] = {
        {"x", "U8", 1, {4}, 5},    {"x", "U9", 1, {4}, 4},    {"x\"y", "U8", 1, {4}, 4},
        {"x\\y", "U8", 1, {4}, 4}, {"x\ny", "U8", 1, {4}, 4}, {"x", "U8", 1, {-4}, 4},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++)
        CHECK_FAILS(st_write(path, &BAD[i], 1, fill, &log), BR_E_ARG);
    ck_assert(!br_file_exists(part));
    CHECK_OK(st_open(path, &f));
    ck_assert_int_eq(f.n_entry, 1);
    st_close(&f);
    CHECK_FAILS(st_write("/nowhere/at/all", OUT, 1, fill, &log), BR_E_IO);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "/nowhere/at/all"));
}
END_TEST

/* How many maps of this process are of the file. */
static int map_count(const char *path) {
    char line[BR_PATH_BYTES + 128];
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    ck_assert_ptr_nonnull(maps);
    while (fgets(line, sizeof line, maps))
        n += strstr(line, path) != NULL;
    fclose(maps);
    return n;
}

START_TEST(opening_fails_cleanly) {
    char path[BR_PATH_BYTES];
    st_file f;
    fill_log log = {.last_entry = -1};
    long n;
    tmp_path(path, "faults.safetensors");
    CHECK_FAILS(st_open(path, &f), BR_E_NOT_FOUND);
    CHECK_FAILS(st_open(test_tmp_dir(), &f), BR_E_IO);
    CHECK_OK(st_write(path, OUT, N_OUT, fill, &log));
    br_file_fail_nth_read(1);
    CHECK_FAILS(st_open(path, &f), BR_E_IO);
    br_file_fail_nth_read(0);
    for (n = 1;; n++) {
        br_mem_fail_nth(n);
        br_status status = st_open(path, &f);
        if (status == BR_OK)
            break;
        ck_assert_int_eq(status, BR_E_NOMEM);
        ck_assert(!f.path && !f.map.bytes);
        ck_assert_int_eq(map_count(path), 0);
    }
    br_mem_fail_nth(0);
    ck_assert_int_eq(n, 4); /* path, names, entries */
    ck_assert_int_eq(map_count(path), 1);
    st_close(&f);
    ck_assert_int_eq(map_count(path), 0);
}
END_TEST

/* ---- index ----------------------------------------------------------------------------------------------------------- */

static br_status parse_index(const char *text, st_index *out) {
    return st_index_parse("index", text, strlen(text), out);
}

START_TEST(index_is_read) {
    st_index index;
    CHECK_OK(parse_index(
        "{\"metadata\":{\"total_size\":9},\"weight_map\":{\"z\":\"b\",\"m\":\"a\",\"c\":\"b\",\"a\":\"c\"}}", &index));
    ck_assert(index.n_file == 3 && index.n_entry == 4);
    static const struct { const char *name, *file; } WANT[] = {{"a", "c"}, {"c", "b"}, {"m", "a"}, {"z", "b"}};
    for (int i = 0; i < 4; i++) {
        ck_assert_str_eq(index.entry[i].name, WANT[i].name);
        ck_assert_str_eq(index.file[index.entry[i].file], WANT[i].file);
        ck_assert_ptr_eq(st_index_find(&index, WANT[i].name), &index.entry[i]);
    }
    ck_assert_ptr_null(st_index_find(&index, "b"));
    st_index_close(&index);
    CHECK_OK(parse_index("{\"weight_map\":{}}", &index));
    ck_assert_ptr_null(st_index_find(&index, "b"));
    st_index_close(&index);
}
END_TEST

START_TEST(broken_indices_are_refused) {
    static const struct {
        const char *text, *says;
    } BROKEN[] = {
        {"", "not JSON"},
        {"[]", "object"},
        {"{}", "weight_map"},
        {"{\"weight_map\":[]}", "weight_map"},
        {"{\"weight_map\":{\"a\":1}}", "'a'"},
        {"{\"weight_map\":{\"twin\":\"x\",\"twin\":\"y\"}}", "twin"},
    };
    st_index index;
    for (size_t i = 0; i < sizeof BROKEN / sizeof BROKEN[0]; i++) {
        CHECK_FAILS(parse_index(BROKEN[i].text, &index), BR_E_FORMAT);
        ck_assert_msg(strstr(br_last_error(), BROKEN[i].says) != NULL, "'%s' lacks '%s'", br_last_error(), BROKEN[i].says);
        ck_assert(!index.entry && !index.names && !index.file);
    }
    for (long n = 1; n <= 3; n++) { /* names, entries, files */
        br_mem_fail_nth(n);
        CHECK_FAILS(parse_index("{\"weight_map\":{\"a\":\"x\"}}", &index), BR_E_NOMEM);
    }
    br_mem_fail_nth(0);
    char *text = malloc(ST_SHARD_MAX * 32 + 64);
    for (int extra = 0; extra < 2; extra++) { /* as many shards as allowed, and one more */
        size_t used = (size_t)sprintf(text, "{\"weight_map\":{");
        for (int i = 0; i < ST_SHARD_MAX + extra; i++)
            used += (size_t)sprintf(text + used, "%s\"t%d\":\"s%d\"", i ? "," : "", i, i);
        strcpy(text + used, "}}");
        ck_assert_int_eq(parse_index(text, &index), extra ? BR_E_LIMIT : BR_OK);
        st_index_close(&index);
    }
    free(text);
}
END_TEST

Suite *test_safetensors_suite(void) {
    Suite *suite = suite_create("safetensors");
    TCase *reader = tcase_create("reader"), *writer = tcase_create("writer"), *index = tcase_create("index");
    tcase_set_timeout(reader, 20);
    tcase_set_timeout(writer, 60);
    tcase_set_timeout(index, 20);
    tcase_add_test(reader, entries_are_read);
    tcase_add_test(reader, broken_headers_are_refused);
    tcase_add_test(reader, lengths_are_checked);
    tcase_add_test(writer, written_files_read_back);
    tcase_add_test(writer, failed_writes_leave_the_old_file);
    tcase_add_test(writer, opening_fails_cleanly);
    tcase_add_test(index, index_is_read);
    tcase_add_test(index, broken_indices_are_refused);
    suite_add_tcase(suite, reader);
    suite_add_tcase(suite, writer);
    suite_add_tcase(suite, index);
    return suite;
}
