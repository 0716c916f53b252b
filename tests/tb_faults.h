/* tb_faults: the table of faults: what a peer does wrong in which state, what it is answered, what the worker is like afterwards. Run
 * over every transport that can show the fault. No call of Check: ranks of an MPI job run it too. */
#ifndef TB_FAULTS_H
#define TB_FAULTS_H

#include "tb_rig.h"

enum { OVER_LOOPBACK = 1, OVER_SOCKET = 2, OVER_MPI = 4, OVER_ALL = 7 };

typedef struct tb_fault {
    const char *name;
    int (*act)(rig_peer *p);  /* 1: done */
    rig_state state;          /* in which it happens */
    int answer, code;         /* type of the first answer, 0 none; code of ERROR and W_NACK, status of SCORE_DONE */
    int after;                /* state of the weights when the answer was given; -1: the connection is over */
    uint64_t live;            /* version that serves in the end */
    int exit_code;
    int64_t deadline_ms;      /* for the answer, and for the worker's end when there is none */
    int over;                 /* OVER_ bits */
} tb_fault;

extern const tb_fault tb_faults[];
extern const int tb_fault_count;

/* The trainer's half: reaches the state, does it, checks the answer and the state after, says BYE when it can. Closes the transport.
 * 0: `text` says what was not as the table has it. */
int tb_fault_play(const tb_fault *fault, tb_transport *t, char *text, size_t n_text);
/* Is this how, and how soon, the worker had to end? */
int tb_fault_check(const tb_fault *fault, const rig_outcome *outcome, char *text, size_t n_text);

#endif
