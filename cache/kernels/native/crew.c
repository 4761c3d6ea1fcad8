/* Threads for jobs that are too short for a barrier.
 *
 * The pieces of a job are claimed one by one, so a helper that does not get a core costs nothing: the caller does all of
 * the work itself. It waits only for a piece that a helper has begun. (OpenMP waits for every thread of its team to
 * come by, which takes milliseconds where processes share cores.)
 *
 * `ticket` holds the number of the job, and below it how many of its pieces are not yet claimed. A claim is one
 * compare-and-swap of both, so none can be for another job than the one that the claimer read; and piece and job are
 * only written while nothing is left to claim.
 */
#define _GNU_SOURCE
#include "crew.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 64, SPINS_BEFORE_YIELD = 64 };
static const int64_t SPIN_NANOSECONDS = 200000; /* of a helper without work; between two kernels of a step it stays awake */

typedef struct {
    Crew shown;
    _Atomic uint64_t ticket;
    _Atomic(Piece) piece;
    _Atomic(const void *) job;
    atomic_int unfinished; /* pieces of the job, whoever has them */
    atomic_uint jobs;      /* the futex that helpers sleep on */
    atomic_int sleepers;
    atomic_flag taken; /* by a thread that runs a job */
    int num_helpers;
} Whole;

typedef struct {
    Whole *crew;
    int number;
} Helper;

static void pause_a_little(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int work_on_one(Whole *crew) {
    uint64_t ticket = atomic_load(&crew->ticket);
    while ((uint32_t)ticket) {
        const Piece piece = atomic_load(&crew->piece);
        const void *const job = atomic_load(&crew->job);
        if (atomic_compare_exchange_weak(&crew->ticket, &ticket, ticket - 1)) {
            piece(job, (int32_t)(uint32_t)ticket - 1);
            atomic_fetch_sub(&crew->unfinished, 1);
            return 1;
        }
    }
    return 0;
}

static void *help(void *argument) {
    const Helper helper = *(Helper *)argument;
    Whole *const crew = helper.crew;
    free(argument);
    int64_t idle_since = 0;
    for (unsigned spins = 0;; spins++) {
        const unsigned jobs = atomic_load(&crew->jobs);
        if (helper.number < crew->shown.threads - 1 && work_on_one(crew)) {
            idle_since = 0;
            continue;
        }
        pause_a_little();
        if (spins % SPINS_BEFORE_YIELD) continue;
        sched_yield(); /* whoever else needs this core goes first */
        const int64_t now = nanoseconds();
        if (!idle_since) idle_since = now;
        if (now - idle_since < SPIN_NANOSECONDS) continue;
        atomic_fetch_add(&crew->sleepers, 1);
        syscall(SYS_futex, &crew->jobs, FUTEX_WAIT_PRIVATE, jobs, NULL, NULL, 0);
        atomic_fetch_sub(&crew->sleepers, 1);
        idle_since = 0;
    }
    return NULL;
}

static void run_alone(Piece piece, const void *job, int32_t count) {
    for (int32_t i = 0; i < count; i++) piece(job, i);
}

static void run(Crew *shown, Piece piece, const void *job, int32_t count) {
    Whole *const crew = (Whole *)shown;
    /* Another thread that runs a job has the helpers: this one goes without. */
    if (count < 2 || shown->threads < 2 || atomic_flag_test_and_set(&crew->taken)) {
        run_alone(piece, job, count);
        return;
    }
    atomic_store(&crew->piece, piece);
    atomic_store(&crew->job, job);
    atomic_store(&crew->unfinished, count);
    const unsigned number = atomic_fetch_add(&crew->jobs, 1) + 1;
    atomic_store(&crew->ticket, (uint64_t)number << 32 | (uint32_t)count);
    if (atomic_load(&crew->sleepers))
        syscall(SYS_futex, &crew->jobs, FUTEX_WAKE_PRIVATE, shown->threads - 1, NULL, NULL, 0);
    while (work_on_one(crew)) {
    }
    for (unsigned spins = 1; atomic_load(&crew->unfinished); spins++) {
        pause_a_little();
        if (spins % SPINS_BEFORE_YIELD == 0) sched_yield(); /* to the helper, if it waits for this core */
    }
    atomic_flag_clear(&crew->taken);
}

/* A crew of one thread, or NULL without memory. It lives as long as the process. */
Crew *new_crew(void) {
    Whole *const crew = calloc(1, sizeof *crew);
    if (!crew) return NULL;
    atomic_flag_clear(&crew->taken);
    crew->shown.run = run;
    crew->shown.threads = 1;
    return &crew->shown;
}

/* Lets at most `threads` work at a time, the caller included; what it really is after that. Not while a job runs. */
int32_t set_crew_threads(Crew *shown, int32_t threads) {
    Whole *const crew = (Whole *)shown;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    while (crew->num_helpers < threads - 1) {
        Helper *const helper = malloc(sizeof *helper);
        pthread_t thread;
        if (!helper) break;
        *helper = (Helper){crew, crew->num_helpers};
        if (pthread_create(&thread, NULL, help, helper)) {
            free(helper);
            break;
        }
        pthread_detach(thread);
        crew->num_helpers++;
    }
    shown->threads = threads - 1 < crew->num_helpers ? threads : crew->num_helpers + 1;
    return shown->threads;
}
