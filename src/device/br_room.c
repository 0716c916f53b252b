/* Adding up, and one sentence; see br_room.h. */
#include "br_room.h"

#include <stdio.h>
#include <string.h>

void br_room_add(br_room *room, const char *what, size_t bytes) {
    int32_t i = 0;
    while (i < room->n && strcmp(room->part[i].what, what) != 0)
        i++;
    BR_ASSERT(i < BR_ROOM_PARTS);
    room->n = i < room->n ? room->n : i + 1;
    room->part[i].what = what;
    room->part[i].bytes += bytes;
}

size_t br_room_sum(const br_room *room) {
    size_t sum = 0;
    for (int32_t i = 0; i < room->n; i++)
        sum += room->part[i].bytes;
    return sum;
}

static double gb(size_t bytes) {
    return 1e-9 * (double)bytes;
}

/* Host memory is handed out before it is there, and a cache of files counts as used: only what never fits is refused. */
br_status br_room_check(const br_room *room, br_device *device) {
    char parts[640] = "";
    size_t bytes_free, bytes_total, used = 0;
    BR_TRY(br_device_memory(device, &bytes_free, &bytes_total));
    const size_t sum = br_room_sum(room), limit = br_device_is_host(device) ? bytes_total : bytes_free;
    if (sum <= limit)
        return BR_OK;
    for (int32_t i = 0; i < room->n && used < sizeof parts; i++)
        used += (size_t)snprintf(parts + used, sizeof parts - used, "%s%s %.3f GB", i ? ", " : "", room->part[i].what, gb(room->part[i].bytes));
    if (room->taken && used < sizeof parts)
        snprintf(parts + used, sizeof parts - used, "; scratch of the ops, %.3f GB, is taken already", gb(room->taken));
    return br_fail(BR_E_NOMEM, "%.3f GB of %s memory wanted, %.3f GB %s: %s", gb(sum), br_device_is_host(device) ? "host" : "GPU", gb(limit),
                   br_device_is_host(device) ? "are there" : "are free", parts);
}
