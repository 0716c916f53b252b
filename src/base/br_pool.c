/* Persistent workers that spin for a moment before they sleep: a decode step of a small model has hundreds of parallel
 * regions of some 20 us, and waking a sleeping thread alone costs more than that. A run waits for its jobs, never for its
 * workers: with more threads than cores most of them are not there in time (256 on 2 cores: 25 ms a region when each had to
 * be seen, spinning in the others' way). */
#include "br_pool.h"
#include "br_mem.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

enum { SPIN_ROUNDS = 2000 }; /* about 0.1 ms of pauses: the serial gaps of a step are shorter */

struct br_pool {
    int n_thread, n_started;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int n_spin;         /* rounds before sleep: none when the threads outnumber the cores */
    atomic_int n_left;  /* jobs of the run that nobody has taken */
    atomic_int n_open;  /* jobs of the run that have not ended */
    atomic_int n_asleep;
    atomic_int closing;
    br_pool_job job;    /* of the run; written only while no job is open, read only by who holds a job */
    void *context;
    int n_job;
    pthread_t worker[BR_THREAD_MAX];
    struct pool_start { br_pool *pool; int thread; } start[BR_THREAD_MAX];
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_jobs(br_pool *pool, int thread) {
    for (int left = atomic_load(&pool->n_left); left > 0;) {
        if (!atomic_compare_exchange_weak(&pool->n_left, &left, left - 1))
            continue;
        pool->job(pool->context, pool->n_job - left, thread);
        atomic_fetch_sub(&pool->n_open, 1);
        left = atomic_load(&pool->n_left);
    }
}

static int is_idle(br_pool *pool) {
    return atomic_load(&pool->n_left) == 0 && !atomic_load(&pool->closing);
}

static void wait_for_jobs(br_pool *pool) {
    for (int i = 0; i < pool->n_spin; i++) {
        if (!is_idle(pool))
            return;
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->n_asleep, 1);
    while (is_idle(pool))
        pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->n_asleep, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *argument) {
    const struct pool_start *start = argument;
    br_pool *pool = start->pool;
    br_mem_seal("a job of the pool");
    while (!atomic_load(&pool->closing)) {
        take_jobs(pool, start->thread);
        wait_for_jobs(pool);
    }
    return NULL;
}

/* Wakes up to n workers. One that is about to sleep counts itself before it looks at n_left, so it is seen or it sees. */
static void wake(br_pool *pool, int n) {
    if (atomic_load(&pool->n_asleep) == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    const int n_asleep = atomic_load(&pool->n_asleep);
    for (int i = 0; i < n && i < n_asleep; i++)
        pthread_cond_signal(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

int br_pool_core_count(void) {
    cpu_set_t set;
    const long n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > BR_THREAD_MAX ? BR_THREAD_MAX : (int)n;
}

br_status br_pool_open(int n_thread, br_pool **out) {
    *out = NULL;
    if (n_thread < 1 || n_thread > BR_THREAD_MAX)
        return br_fail(BR_E_ARG, "%d threads: expected 1 to %d", n_thread, BR_THREAD_MAX);
    br_pool *pool;
    BR_TRY(br_mem_alloc((void **)&pool, sizeof *pool, "the thread pool"));
    pool->n_thread = n_thread;
    pool->n_spin = n_thread <= br_pool_core_count() ? SPIN_ROUNDS : 0;
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
    wake(pool, pool->n_started);
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
    atomic_store(&pool->n_open, n_job);
    atomic_store(&pool->n_left, n_job);
    wake(pool, n_job - 1);
    take_jobs(pool, 0);
    for (int i = 0; atomic_load(&pool->n_open) > 0; i++) {
        relax();
        if (i >= pool->n_spin)
            sched_yield(); /* let the worker that holds the last job run */
    }
}
