/* Persistent workers that spin for a moment before they sleep: a decode step of a small model has hundreds of parallel
 * regions of some 20 us, and waking a sleeping thread alone costs more than that. */
#include "br_pool.h"
#include "br_mem.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { SPIN_ROUNDS = 20000 };

struct br_pool {
    int n_thread, n_started;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int epoch;    /* rises by one for each run */
    atomic_int next_job; /* the job counter of the run */
    atomic_int n_idle;   /* workers that have left the run */
    atomic_int n_asleep;
    atomic_int closing;
    br_pool_job job;
    void *context;
    int n_job;
    pthread_t worker[BR_THREAD_MAX];
    struct { br_pool *pool; int thread; } start[BR_THREAD_MAX];
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_jobs(br_pool *pool, int thread) {
    for (;;) {
        int job = atomic_fetch_add(&pool->next_job, 1);
        if (job >= pool->n_job)
            return;
        pool->job(pool->context, job, thread);
    }
}

static void wait_for_epoch(br_pool *pool, int seen) {
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (atomic_load(&pool->epoch) != seen)
            return;
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->n_asleep, 1);
    while (atomic_load(&pool->epoch) == seen)
        pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->n_asleep, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *argument) {
    br_pool *pool = *(br_pool **)argument;
    int thread = (int)(((char *)argument - (char *)pool->start) / (long)sizeof pool->start[0]);
    int seen = 0;
    for (;;) {
        wait_for_epoch(pool, seen);
        seen++;
        if (atomic_load(&pool->closing))
            return NULL;
        take_jobs(pool, thread);
        atomic_fetch_add(&pool->n_idle, 1);
    }
}

static void start_epoch(br_pool *pool) {
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->n_asleep) > 0) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
}

br_status br_pool_open(int n_thread, br_pool **out) {
    *out = NULL;
    if (n_thread < 1 || n_thread > BR_THREAD_MAX)
        return br_fail(BR_E_ARG, "%d threads: expected 1 to %d", n_thread, BR_THREAD_MAX);
    br_pool *pool;
    BR_TRY(br_mem_alloc((void **)&pool, sizeof *pool, "the thread pool"));
    pool->n_thread = n_thread;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->n_started = 1;
    for (int i = 1; i < n_thread; i++) {
        pool->start[i].pool = pool;
        pool->start[i].thread = i;
        if (pthread_create(&pool->worker[i], NULL, worker_main, &pool->start[i]) != 0) {
            br_pool_close(pool);
            return br_fail(BR_E_NOMEM, "cannot start thread %d of %d", i + 1, n_thread);
        }
        pool->n_started = i + 1;
    }
    *out = pool;
    return BR_OK;
}

void br_pool_close(br_pool *pool) {
    if (!pool)
        return;
    atomic_store(&pool->closing, 1);
    start_epoch(pool);
    for (int i = 1; i < pool->n_started; i++)
        pthread_join(pool->worker[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    br_mem_free(pool);
}

int br_pool_thread_count(const br_pool *pool) {
    return pool->n_thread;
}

void br_pool_run(br_pool *pool, br_pool_job job, void *context, int n_job) {
    if (n_job <= 0)
        return;
    if (pool->n_thread == 1 || n_job == 1) {
        for (int i = 0; i < n_job; i++)
            job(context, i, 0);
        return;
    }
    pool->job = job;
    pool->context = context;
    pool->n_job = n_job;
    atomic_store(&pool->next_job, 0);
    atomic_store(&pool->n_idle, 0);
    start_epoch(pool);
    take_jobs(pool, 0);
    for (int i = 0; atomic_load(&pool->n_idle) < pool->n_thread - 1; i++) {
        relax();
        if (i > SPIN_ROUNDS)
            sched_yield(); /* more threads than cores: let the worker that holds the last job run */
    }
}
