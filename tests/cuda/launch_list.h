/* launch_list: which kernels a call launches and how often, as tests write it down: "head 2, head_merge 1"; "" for none. Where the
 * choice is not the test's, as between forms that a library may refuse: "linear_large|linear_tile 1". */
#ifndef LAUNCH_LIST_H
#define LAUNCH_LIST_H

#include <stdio.h>
#include <string.h>

enum { LAUNCH_NAMES_BYTES = 64 };

/* The next names and count; 0 behind the last, -1 where the list is not written so. */
static inline int launch_list_next(const char **at, char names[LAUNCH_NAMES_BYTES], int *n) {
    int used = 0;
    if (!**at)
        return 0;
    if (sscanf(*at, "%63[a-z0-9_|] %d%n", names, n, &used) != 2 || *n < 1)
        return -1;
    *at += used;
    if (!**at)
        return 1;
    if (strncmp(*at, ", ", 2) != 0 || !(*at)[2])
        return -1;
    *at += 2;
    return 1;
}

#endif
