/* tb_link: one end of a connection that two threads use. It numbers and seals what is sent, and its thread keeps the peer from taking
 * a long step for death: it sends HEARTBEAT when nothing else was sent for beat_ms, and takes in what arrives meanwhile.
 *
 * Layer: trainer_bridge; includes base. Reading, checking and deciding are tb_channel's. */
#ifndef TB_LINK_H
#define TB_LINK_H

#include "tb_transport.h"

enum { TB_BEAT_MS = 1000, TB_DEAD_MS = 10000 };

typedef struct tb_link tb_link;

/* beat_ms 0: no thread (loopback tests). stall_ms: how long a send may move nothing. The link owns the transport, also on error. */
br_status tb_link_open(tb_transport *t, int64_t beat_ms, int64_t stall_ms, tb_link **out);
/* Adds a frame to those that go out together: sequence, length, hash and CRC are set here. Sends when a batch is full; what is left waits
 * for tb_link_flush, which the owner calls before it waits for anything. After a failure every call fails with the same sentence. */
br_status tb_link_put(tb_link *link, const tb_header *header, const void *payload, uint64_t n);
br_status tb_link_flush(tb_link *link);
tb_frame *tb_link_receive(tb_link *link, int64_t wait_ms); /* as tb_transport_receive */
int tb_link_ended(tb_link *link);
int64_t tb_link_heard(tb_link *link); /* when anything last arrived, parts of a frame included */
void tb_link_greeted(tb_link *link); /* as tb_transport_greeted */
void tb_link_close(tb_link *link); /* ends the thread, closes the transport; NULL is a no-op */

#endif
