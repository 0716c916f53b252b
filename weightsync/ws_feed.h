/* ws_feed: values of many matrices into device memory at the speed of the bus, each to where its view says, and looked at there.
 *
 * Layer: weightsync; includes base, device. Values are gathered in slots: while one crosses the bus the next is filled, by several threads;
 * page-locked memory crosses from where it lies, and what is on the device already does not cross at all. Behind a slot's transfer its
 * values are placed and hashed: the digest is one of the memory that forwards read. Each slot has a lane of the device (br_device_lane_open),
 * so that one crosses while the other is placed. Everything is allocated at open. */
#ifndef WS_FEED_H
#define WS_FEED_H

#include "br_pool.h"
#include "ws_seen.h"

typedef struct ws_feed ws_feed;

size_t ws_feed_bytes(size_t slot_bytes, int32_t n_view); /* of the device's memory */
/* slot_bytes: at least the largest matrix. n_view: writes between two flushes that need no third. The device and pool stay the caller's. */
br_status ws_feed_open(br_device *device, br_pool *pool, size_t slot_bytes, int32_t n_view, ws_feed **out);
void ws_feed_close(ws_feed *feed); /* NULL is a no-op */

/* Nothing that the device has still to do may read or write where the view lies, nor write the value: lanes do not wait for its stream, nor
 * for each other, so that views of two writes without a flush between them do not overlap. value: dense, 2-byte aligned, host or device memory.
 * stays 1: it is as it is until the next flush; 0: read before the call returns. seen: NULL: nobody; told at the next flush at the latest. */
br_status ws_feed_write(ws_feed *feed, const br_view *to, const uint16_t *value, int32_t stays, const ws_seen *seen);
/* Waits until all of this is done and told; where it fails, nothing of it is under way any more either. Due after a write that failed, too. After
 * a failure of either, values and results of some writes before it never come, whoever wrote them, whatever later flushes return. */
br_status ws_feed_flush(ws_feed *feed);

#endif
