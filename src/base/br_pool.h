/* br_pool: one thread pool. Layer: base. Its size never changes a bit: jobs are independent and write disjoint places. */
#ifndef BR_POOL_H
#define BR_POOL_H

#include "br_status.h"

typedef struct br_pool br_pool;
/* job: 0..n_job-1, each run once, on any thread. thread: 0..n_thread-1, which scratch slice the job may use. */
typedef void (*br_pool_job)(void *context, int job, int thread);

br_status br_pool_open(int n_thread, br_pool **out); /* 1..BR_THREAD_MAX, BR_E_ARG otherwise. The caller is thread 0. */
void br_pool_close(br_pool *pool);                   /* NULL is a no-op */
int br_pool_thread_count(const br_pool *pool);
int br_pool_core_count(void); /* cores that this process may use, 1..BR_THREAD_MAX */
void br_pool_run(br_pool *pool, br_pool_job job, void *context, int n_job); /* returns when all are done; not reentrant */

enum { BR_THREAD_MAX = 256 };

#endif
