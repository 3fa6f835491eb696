/* Threads that take pieces of work from one that does not wait for them.
 *
 * Who calls puts down how many pieces there are, takes one after the other, and waits at the end for
 * those alone that another thread has begun. A thread that sleeps, or that the system gives no core,
 * is so much help less and holds nobody up, where a team that shares work in equal parts is as slow
 * as its last one: a decoder's step has two hundred products of 0.05 ms, and beside a busy neighbour
 * each of them would wait for a core. A helper looks for more for PATIENCE after its last piece, as
 * to be woken takes longer than a product does, and then sleeps. Where those
 * that have begun are waited for longer than their pieces can take, their core has others: if that takes
 * a third of the time, jobs are done alone for a while, and for longer each time it happens again.
 *
 * One job at a time: another thread that calls meanwhile does its work alone. After a fork there are
 * no helpers, and new ones are started.
 */
#define _GNU_SOURCE
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#define MOST 255       /* threads */
#define PATIENCE 200000 /* nanoseconds */
#define LOOKS 64       /* between two looks at the clock */
#define LATE 300000    /* nanoseconds that are waited for a helper, if they are also more than the job has taken */
#define LEAST_ALONE 20000000
#define MOST_ALONE 1000000000

/* What is left to do: number of the job (32 bits), threads it is for (8), pieces not yet taken (24).
 * One word: who takes a piece knows that its job is not over, and may read what else is put down. */
#define LEFT(work) ((int64_t)((work) & 0xffffff))
#define THREADS(work) ((int64_t)((work) >> 24 & 0xff))

static struct {
    _Alignas(64) _Atomic uint64_t work; /* in a line of its own, as all helpers look at it */
    _Alignas(64) _Atomic int64_t done;  /* pieces */
    _Alignas(64) _Atomic int64_t asleep; /* helpers */
    _Atomic int core; /* where who has put the job down runs */
    Piece *run;
    void *about;
    int64_t pieces, helpers;
    int64_t shared, lost; /* nanoseconds of jobs lately, and of waiting for who was late */
    int64_t alone_until, alone_for;
    pthread_mutex_t busy, sleep;
    pthread_cond_t more;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static int64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* Take pieces until there are none for this thread, and say how many these were. */
static int64_t taken(int64_t thread) {
    int64_t count = 0;
    uint64_t work = atomic_load(&pool.work);
    while (LEFT(work) && thread < THREADS(work)) {
        if (!atomic_compare_exchange_weak(&pool.work, &work, work - 1)) continue;
        pool.run(pool.about, pool.pieces - LEFT(work), thread);
        atomic_fetch_add(&pool.done, 1);
        count++;
        work = atomic_load(&pool.work);
    }
    return count;
}

static int core(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Leave the core of the one that is helped: systems put a thread where it was woken from, and leave
 * it there for longer than a job takes. */
static void move_away(void) {
#if defined(__linux__)
    const int taken_core = atomic_load(&pool.core);
    cpu_set_t all, others;
    if (core() != taken_core || taken_core < 0 || taken_core >= CPU_SETSIZE) return;
    if (sched_getaffinity(0, sizeof(all), &all)) return;
    others = all;
    CPU_CLR(taken_core, &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof(others), &others))
        sched_setaffinity(0, sizeof(all), &all);
#endif
}

static void *help(void *given) {
    const int64_t thread = (int64_t)(intptr_t)given;
    for (int64_t until = now() + PATIENCE;;) {
        move_away();
        for (int i = 0; i < LOOKS; i++) {
            if (taken(thread)) until = now() + PATIENCE;
            relax();
        }
        if (now() < until) continue;
        pthread_mutex_lock(&pool.sleep);
        atomic_fetch_add(&pool.asleep, 1);
        const uint64_t work = atomic_load(&pool.work);
        if (LEFT(work) && thread < THREADS(work)) /* put down before anybody knew that this one sleeps */
            atomic_fetch_sub(&pool.asleep, 1);
        else
            pthread_cond_wait(&pool.more, &pool.sleep); /* who wakes it takes it off the count */
        pthread_mutex_unlock(&pool.sleep);
        until = now() + PATIENCE;
    }
    return 0;
}

static void forked(void) {
    static const pthread_mutex_t open = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t none = PTHREAD_COND_INITIALIZER;
    pool.helpers = 0;
    pool.busy = open, pool.sleep = open, pool.more = none;
    atomic_store(&pool.work, 0);
    atomic_store(&pool.asleep, 0);
}

/* Start what is missing to so many helpers; signals are for other threads. */
static void hire(int64_t wanted) {
    static int told;
    sigset_t every, before;
    pthread_attr_t apart;
    if (pool.helpers >= wanted) return;
    if (!told) told = !pthread_atfork(0, 0, forked);
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    pthread_attr_init(&apart);
    pthread_attr_setdetachstate(&apart, PTHREAD_CREATE_DETACHED);
    while (pool.helpers < wanted) {
        pthread_t one;
        if (pthread_create(&one, &apart, help, (void *)(intptr_t)(pool.helpers + 1))) break;
        pool.helpers++;
    }
    pthread_attr_destroy(&apart);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Do without helpers for a while where more is lost by waiting for them than they do. */
static void note_lateness(int64_t started, int64_t ready, int64_t over) {
    const int64_t late = over - ready;
    pool.shared += ready - started;
    if (late > LATE && late > ready - started) pool.lost += late;
    if (pool.lost > 4 * LATE && 2 * pool.lost > pool.shared) {
        pool.alone_for = pool.alone_for ? 2 * pool.alone_for : LEAST_ALONE;
        if (pool.alone_for > MOST_ALONE) pool.alone_for = MOST_ALONE;
        pool.alone_until = over + pool.alone_for;
    } else if (pool.shared > LEAST_ALONE)
        pool.alone_for = 0;
    else
        return;
    pool.shared = pool.lost = 0;
}

void outrider_share(int64_t threads, int64_t pieces, Piece *run, void *about) {
    const int64_t most = pieces > 4 ? (pieces + 1) / 2 : pieces; /* more would be in each other's way */
    if (threads > most) threads = most;
    if (threads > MOST) threads = MOST;
    int alone = threads < 2 || pieces < 2 || pieces > 0xffffff || pthread_mutex_trylock(&pool.busy);
    const int64_t started = alone ? 0 : now();
    if (!alone && started < pool.alone_until) alone = 1, pthread_mutex_unlock(&pool.busy);
    if (alone) {
        for (int64_t piece = 0; piece < pieces; piece++) run(about, piece, 0);
        return;
    }
    hire(threads - 1);
    pool.run = run, pool.about = about, pool.pieces = pieces;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.core, core());
    const uint64_t job = (atomic_load(&pool.work) >> 32) + 1;
    atomic_store(&pool.work, job << 32 | (uint64_t)threads << 24 | (uint64_t)pieces);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.sleep);
        atomic_store(&pool.asleep, 0);
        pthread_cond_broadcast(&pool.more);
        pthread_mutex_unlock(&pool.sleep);
    }
    taken(0);
    const int64_t ready = now();
    for (int i = 0; atomic_load(&pool.done) < pieces; i++)
        if (i % LOOKS == LOOKS - 1) sched_yield(); /* to one that has begun and has no core */
        else relax();
    note_lateness(started, ready, now());
    pthread_mutex_unlock(&pool.busy);
}
