/* What clang calls for the pragmas of OpenMP, on the threads of an OpenMP that is already there.
 *
 * Shipped libraries are made by a compiler that has no OpenMP library, and none is to be shipped: a
 * second set of threads beside torch's would wait and work against it. torch's own runtime, GCC's or
 * LLVM's, is handed in by its functions with GCC's names, which both have. Without one, one thread.
 *
 * Loops are shared statically or one after the other (dynamic); none may end without its barrier.
 */
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MOST 32 /* variables that a parallel region shares */

typedef void region(int32_t *, int32_t *, ...);

typedef struct {
    region *run;
    void *given[MOST];
    _Atomic int64_t next; /* of a dynamic loop: how many pieces are taken, */
    _Atomic int32_t done; /* and by how many threads its end was seen */
} Team;

typedef struct {
    Team *team;
    int32_t number, count;
    int64_t first, last, step; /* of a dynamic loop */
} Member;

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    void (*barrier)(void);
    int (*number)(void);
    int (*count)(void);
} openmp;

static _Thread_local Team alone;
static _Thread_local Member own = {.count = 1};
static _Thread_local int32_t wanted;

__attribute__((visibility("default"))) int outrider_threads(
    void *parallel, void *barrier, void *number, void *count) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.barrier = (void (*)(void))barrier;
    openmp.number = (int (*)(void))number;
    openmp.count = (int (*)(void))count;
    return 0;
}

#pragma GCC visibility push(hidden)

/* A region takes as many pointers as were given: more are not looked at. They are no variable ones
 * there, which some systems pass elsewhere. */
static void entered(Team *team, int32_t number, int32_t count) {
    typedef void called(
        int32_t *, int32_t *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
        void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
        void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
        void *);
    const Member before = own;
    void **a = team->given;
    int32_t none = 0;
    own = (Member){.team = team, .number = number, .count = count};
    ((called *)team->run)(
        &number, &none, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
        a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24],
        a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
    own = before;
}

static void member(void *team) { entered(team, openmp.number(), openmp.count()); }

void __kmpc_fork_call(void *where, int32_t count, region *run, ...) {
    const int32_t threads = wanted;
    Team team = {.run = run};
    va_list list;
    (void)where;
    if (count > MOST) __builtin_trap();
    va_start(list, run);
    for (int32_t i = 0; i < count; i++) team.given[i] = va_arg(list, void *);
    va_end(list);
    wanted = 0;
    if (openmp.parallel && threads > 1 && !own.team)
        openmp.parallel(member, &team, (unsigned)threads, 0);
    else
        entered(&team, 0, 1);
}

void __kmpc_push_num_threads(void *where, int32_t thread, int32_t count) {
    (void)where, (void)thread;
    wanted = count;
}

int32_t __kmpc_global_thread_num(void *where) {
    (void)where;
    return own.number;
}

void __kmpc_serialized_parallel(void *where, int32_t thread) { (void)where, (void)thread; }

void __kmpc_end_serialized_parallel(void *where, int32_t thread) { (void)where, (void)thread; }

void __kmpc_barrier(void *where, int32_t thread) {
    (void)where, (void)thread;
    if (own.count > 1) openmp.barrier();
}

int omp_get_thread_num(void) { return own.number; }

/* Equal parts, one a thread, in their order. */
void __kmpc_for_static_init_8(
    void *where, int32_t thread, int32_t kind, int32_t *is_last, int64_t *first, int64_t *last,
    int64_t *stride, int64_t step, int64_t chunk) {
    const int64_t all = (*last - *first) / step + 1, each = all / own.count, more = all % own.count;
    const int64_t before = own.number * each + (own.number < more ? own.number : more);
    (void)where, (void)thread, (void)kind, (void)chunk;
    *first += before * step;
    *last = *first + (each + (own.number < more) - 1) * step;
    *stride = all * step;
    *is_last = own.number == own.count - 1;
}

/* The same of unsigned numbers: none of ours is as large as its sign. */
void __kmpc_for_static_init_8u(
    void *where, int32_t thread, int32_t kind, int32_t *is_last, uint64_t *first, uint64_t *last,
    int64_t *stride, int64_t step, int64_t chunk) {
    __kmpc_for_static_init_8(
        where, thread, kind, is_last, (int64_t *)first, (int64_t *)last, stride, step, chunk);
}

void __kmpc_for_static_fini(void *where, int32_t thread) { (void)where, (void)thread; }

void __kmpc_dispatch_init_8(
    void *where, int32_t thread, int32_t kind, int64_t first, int64_t last, int64_t step,
    int64_t chunk) {
    (void)where, (void)thread, (void)kind, (void)chunk;
    own.first = first, own.last = last, own.step = step;
}

/* The next piece, of one step; the last thread that finds none leaves all as it was. */
int32_t __kmpc_dispatch_next_8(
    void *where, int32_t thread, int32_t *is_last, int64_t *first, int64_t *last, int64_t *step) {
    Team *team = own.team ? own.team : &alone;
    const int64_t here = own.first + atomic_fetch_add(&team->next, 1) * own.step;
    (void)where, (void)thread;
    if (own.step > 0 ? here > own.last : here < own.last) {
        if (atomic_fetch_add(&team->done, 1) + 1 == own.count) {
            atomic_store(&team->done, 0);
            atomic_store(&team->next, 0);
        }
        return 0;
    }
    *first = *last = here;
    *step = own.step;
    *is_last = here == own.last;
    return 1;
}

void __kmpc_dispatch_deinit(void *where, int32_t thread) { (void)where, (void)thread; }

#pragma GCC visibility pop
