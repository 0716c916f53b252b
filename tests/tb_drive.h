/* tb_drive: a worker's session driven by hand, without clock and transport: messages in, answers out, states by name. One at a time. */
#ifndef TB_DRIVE_H
#define TB_DRIVE_H

#include "tb_rig.h"
#include "test_support.h"

enum { LIVE = 5, NEXT = 6, ANSWER_MAX = 256 };

typedef struct answer {
    tb_header header;
    tb_message message;
    unsigned char bytes[2048];
} answer;

extern rig_worker worker;
extern int64_t now;
extern uint64_t sequence, manifest_hash;
extern answer heard[ANSWER_MAX]; /* what the session said since `forget`, without CREDIT; zero behind n_heard */
extern int n_heard;

void give(tb_type type, uint64_t version, uint64_t subject, const tb_message *m); /* a message in, its answers are added */
void say(tb_type type, uint64_t version, uint64_t subject, const tb_message *m);  /* the same, and earlier answers are forgotten */
void settle(void);    /* engine steps and ticks until nothing moves; what it says is added */
void forget(void);
void listen_to(void); /* takes what the session has to say */
const answer *first_of(tb_type type); /* NULL: there is none */
tb_stats state(void);
tb_channel *channel(void);

void open_session(uint64_t live); /* connected, not greeted */
void close_session(void);
void greet(void);
/* An open session with version LIVE serving, in a state of its weights on the way to NEXT. */
void reach(tb_weights_state to);

void credit(uint32_t bytes);
extern uint32_t moved; /* kind of the weights that the calls below are about: TB_W_ADAPTER, until a test says another */
void give_manifest(void);
void give_begin(uint64_t version, uint32_t flags);
void give_chunk(uint64_t version, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n);
void give_end(uint64_t version);
void give_whole(uint64_t version); /* both tensors */
void give_request(uint64_t id, const char *uid, uint32_t max_new, uint32_t flags, uint32_t first_token); /* under "policy" */
void give_score(uint64_t id, const char *adapter, uint32_t first_asked, uint32_t n_tok);

#endif
