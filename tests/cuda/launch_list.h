/* launch_list: which kernels a call launches and how often, as tests write it down: "head 2, head_merge 1"; "" for none. */
#ifndef LAUNCH_LIST_H
#define LAUNCH_LIST_H

#include <stdio.h>
#include <string.h>

enum { LAUNCH_NAME_BYTES = 32 };

/* The next name and count; 0 behind the last one, -1 where the list is not written so. */
static inline int launch_list_next(const char **at, char name[LAUNCH_NAME_BYTES], int *n) {
    int used = 0;
    if (!**at)
        return 0;
    if (sscanf(*at, "%31[a-z0-9_] %d%n", name, n, &used) != 2 || *n < 1)
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
