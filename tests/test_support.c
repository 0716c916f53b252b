/* Shared helpers of the suites; see test_support.h. */
#include "test_support.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int test_is_long(void) {
    const char *text = getenv("BITROLL_TEST_LONG");
    return text && text[0] == '1';
}

int test_thread_count(void) {
    return 2;
}

const char *test_source_dir(void) {
    return BITROLL_SOURCE_DIR;
}

static char tmp_dir[64];
static pid_t tmp_owner;

static int remove_entry(const char *path, const struct stat *info, int flag, struct FTW *walk) {
    (void)info, (void)flag, (void)walk;
    return remove(path);
}

static void remove_tmp_dir(void) {
    if (tmp_owner == getpid())
        nftw(tmp_dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

const char *test_tmp_dir(void) {
    if (tmp_owner != getpid()) {
        snprintf(tmp_dir, sizeof tmp_dir, "/tmp/bitroll-test-XXXXXX");
        if (!mkdtemp(tmp_dir))
            abort();
        tmp_owner = getpid();
        atexit(remove_tmp_dir);
    }
    return tmp_dir;
}

uint64_t test_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

uint64_t test_seed(void) {
    const char *text = getenv("BITROLL_TEST_SEED");
    if (text)
        return strtoull(text, NULL, 0);
    return test_is_long() ? (uint64_t)time(NULL) : 1;
}
