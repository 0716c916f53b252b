/* ws_long: which tensors, of several that a device is given, go first. Layer: weightsync; includes nothing of ours. */
#ifndef WS_LONG_H
#define WS_LONG_H

#include <stdint.h>

/* At least twice the mean of the n tensors whose bytes are sum: begun late, it is what the device would still be at when done with all others. */
static inline int ws_is_long(uint64_t bytes, uint64_t sum, uint64_t n) { return bytes * n >= 2 * sum; }

#endif
