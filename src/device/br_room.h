/* br_room: what is going to be taken of a device's memory, part by part, added up before any of it is taken.
 *
 * Layer: device; includes base. */
#ifndef BR_ROOM_H
#define BR_ROOM_H

#include "br_device.h"

enum { BR_ROOM_PARTS = 12 };

typedef struct br_room {
    int32_t n;
    struct {
        const char *what; /* a literal */
        size_t bytes;
    } part[BR_ROOM_PARTS];
    size_t taken; /* lies there already, beside the parts: only named */
} br_room;

/* Bytes of an equal name add up. */
void br_room_add(br_room *room, const char *what, size_t bytes);
size_t br_room_sum(const br_room *room); /* without what is taken */
/* BR_E_NOMEM when the sum does not fit into what is free; the sentence has each part in GB, 10^9 bytes. */
br_status br_room_check(const br_room *room, br_device *device);

#endif
