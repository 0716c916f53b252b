/* ws_reader: what many matrices in device memory hold, all hashed at once where they lie, and whether what surrounds them is as it should
 * be. Layer: weightsync; includes base, device. Everything is allocated at open. */
#ifndef WS_READER_H
#define WS_READER_H

#include "device_view.h"

typedef struct ws_reader ws_reader;

size_t ws_reader_bytes(int32_t n_view_max, int32_t n_owner); /* of the device's memory */
br_status ws_reader_open(br_device *device, int32_t n_view_max, int32_t n_owner, ws_reader **out);
void ws_reader_close(ws_reader *reader); /* NULL is a no-op */
void ws_reader_begin(ws_reader *reader);
/* The number of the view: 0, 1, .. */
int32_t ws_reader_see(ws_reader *reader, const br_view *view);
/* fill->owner: 0 .. n_owner - 1 */
br_status ws_reader_check(ws_reader *reader, const br_fill *fill);
/* seen by number; torn[owner] 1: a fill of that owner is something else. Both until the next begin. */
br_status ws_reader_end(ws_reader *reader, const br_seen **seen, const uint32_t **torn);

#endif
