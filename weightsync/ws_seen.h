/* ws_seen: who is told what lies where a value went. Layer: weightsync; includes device (views). */
#ifndef WS_SEEN_H
#define WS_SEEN_H

#include "device_view.h"

/* By number; inside calls on the feed that come later, none of which it makes itself. */
typedef struct ws_seen {
    void (*take)(void *context, int64_t i, const br_seen *seen);
    void *context;
    int64_t i;
} ws_seen;

#endif
