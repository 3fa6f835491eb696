/* The sums of attend.c: scores of sixteen slots by one query or a block of them, with the same bits, and
 * weighted values; keys turned over for a block.
 */
#pragma once
#include "lanes.h"

/* Fetch a line while there is something to compute: what is read next does not wait for memory then.
 * Into the first cache, out of which it falls into the second: asked for there alone, lines come slower.
 * Memory takes so many at a time, and what is asked for at once keeps the work behind it waiting: all
 * queries ask for a part. */
#define FETCH(from) __builtin_prefetch(from, 0, 3)
#define LINE 64

/* Usual sizes of heads have code of their own, made once. */
#define SIZED(run) (size == 64 ? run(64) : size == 128 ? run(128) : run(size))

#define PAIR (WIDTH == 16 ? 2 : 1) /* queries that share the keys they read as they lie */

ALWAYS void sized_dots(
    float *to, int64_t row, const float *query, const float *keys, const int64_t size,
    const int some, const char *fetch, int64_t lines) {
    lanes four[PAIR][LANES / 4];
#pragma GCC unroll 4
    for (int k = 0; k < LANES; k += 4) {
        lanes sum[PAIR][4];
#pragma GCC unroll 2
        for (int q = 0; q < some; q++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sum[q][i] = all(0);
        for (int64_t e = 0; e < size; e += LANES, fetch += lines * LINE) {
            if (lines > 0) FETCH(fetch);
            if (lines > 1) FETCH(fetch + LINE);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
                for (int q = 0; q < some; q++)
                    sum[q][i] = fma_(get(query + q * size + e), get(keys + (k + i) * size + e), sum[q][i]);
        }
#pragma GCC unroll 2
        for (int q = 0; q < some; q++)
            four[q][k / 4] = fours(sum[q][0], sum[q][1], sum[q][2], sum[q][3]);
    }
#pragma GCC unroll 2
    for (int q = 0; q < some; q++)
        put(to + q * row, totals(four[q][0], four[q][1], four[q][2], four[q][3]));
}

/* Scores of sixteen slots for some queries, PAIR or one, each to a `row`; `keys` [16, E] as float32.
 * FETCHED(size, lines) bytes are fetched meanwhile, two lines at most at a time. */
#define FETCHED(size, lines) (16 * (size) * (lines))
static __attribute__((noinline)) void dots(
    float *to, int64_t row, const float *query, const float *keys, int64_t size, int64_t some,
    const void *fetch, int64_t lines) {
#define RUN(size) \
    (some == PAIR ? sized_dots(to, row, query, keys, size, PAIR, fetch, lines) \
                  : sized_dots(to, row, query, keys, size, 1, fetch, lines))
    SIZED(RUN);
#undef RUN
}

#define BLOCK 4 /* queries whose sums are held side by side */
#define ABREAST (WIDTH == 16 ? 2 : 1) /* times sixteen slots whose keys a block reads at once */

typedef struct {
    lanes of[BLOCK * ABREAST];
} Few;

ALWAYS Few plus(Few a, Few b) {
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK * ABREAST; i++) a.of[i] = add(a.of[i], b.of[i]);
    return a;
}

/* What lane `l` sums up in `dots`, here of `wide` times sixteen slots at once; its `lines` of what is
 * fetched are meanwhile. */
ALWAYS Few lane(
    const float *queries, const float *turned, const int64_t size, const int l, const int wide,
    const char *fetch, int64_t lines) {
    Few sum;
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK * ABREAST; i++) sum.of[i] = all(0);
    for (int64_t i = 0; i < lines; i++) FETCH(fetch + (l * lines + i) * LINE);
    for (int64_t e = l; e < size; e += LANES) {
#pragma GCC unroll 4
        for (int q = 0; q < BLOCK; q++)
#pragma GCC unroll 2
            for (int s = 0; s < wide; s++)
                sum.of[q * ABREAST + s] = fma_(
                    all(queries[q * size + e]), get(turned + (s * size + e) * LANES),
                    sum.of[q * ABREAST + s]);
    }
    return sum;
}

#define LANE(l) lane(queries, turned, size, l, wide, fetch, lines)
#define TWO(l) plus(LANE(l), LANE(l + 1))
ALWAYS void sized_dots_of(
    float *to, int64_t row, const float *queries, const float *turned, const int64_t size,
    const int wide, const char *fetch, int64_t lines) {
    Few four[LANES / 4];
#pragma GCC unroll 1
    for (int l = 0; l < LANES; l += 4) four[l / 4] = plus(TWO(l), TWO(l + 2));
    const Few score = plus(plus(four[0], four[1]), plus(four[2], four[3]));
#pragma GCC unroll 4
    for (int q = 0; q < BLOCK; q++)
#pragma GCC unroll 2
        for (int s = 0; s < wide; s++) put(to + q * row + s * LANES, score.of[q * ABREAST + s]);
}

/* `dots` of BLOCK queries, bit for bit, each to a `row`; `turned` [wide, E, 16] are the keys of sixteen
 * slots each. From `fetch` on, LANES * `lines` lines are fetched meanwhile. */
static __attribute__((noinline)) void dots_of(
    float *to, int64_t row, const float *queries, const float *turned, int64_t size, int64_t wide,
    const void *fetch, int64_t lines) {
#define RUN(size) \
    (wide == ABREAST ? sized_dots_of(to, row, queries, turned, size, ABREAST, fetch, lines) \
                     : sized_dots_of(to, row, queries, turned, size, 1, fetch, lines))
    SIZED(RUN);
#undef RUN
}

/* Lanes of values that so many queries read at once: their sums stay in registers. */
#define WIDE(few) (HELD / (few) >= 4 ? 4 : HELD / (few) >= 2 ? 2 : 1)

/* Sums of weighted values, [few, E], 16 * `wide` numbers of them, go on from what they are or begin
 * with 0; `values` from number `at` on, slots `size` apart. From `fetch` on, `step` bytes for each lane that
 * is read are fetched meanwhile. */
ALWAYS void weigh(
    float *sums, const float *weights, int64_t row, const void *values, int64_t at, int64_t size,
    int64_t stop, const int few, const int wide, const int on, const int is_half,
    const char *fetch, int64_t step) {
    lanes sum[BLOCK * 4];
#pragma GCC unroll 4
    for (int q = 0; q < few; q++)
#pragma GCC unroll 4
        for (int e = 0; e < wide; e++)
            sum[q * wide + e] = on ? get(sums + q * size + e * LANES) : all(0);
    for (int64_t s = 0; s < stop; s++) {
#pragma GCC unroll 4
        for (int e = 0; e < wide; e++) {
            const lanes value = read_as(values, at + s * size + e * LANES, is_half);
            FETCH(fetch + (s * wide + e) * step);
#pragma GCC unroll 4
            for (int q = 0; q < few; q++)
                sum[q * wide + e] = fma_(all(weights[q * row + s]), value, sum[q * wide + e]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < few; q++)
#pragma GCC unroll 4
        for (int e = 0; e < wide; e++) put(sums + q * size + e * LANES, sum[q * wide + e]);
}

/* What is fetched meanwhile: the `part`-th of so many parts of as many bytes as the values have. */
typedef struct {
    const char *from;
    int64_t part, parts;
} Next;

/* All E numbers of them. */
ALWAYS void weigh_all(
    float *sums, const float *weights, int64_t row, const void *values, int64_t at,
    const int64_t size, int64_t stop, const int few, const int on, const int is_half, Next next) {
    const int64_t wide = WIDE(few) * LANES;
    const int64_t step = LANES * (is_half ? sizeof(half) : sizeof(float)) / next.parts;
    const char *fetch = next.from + next.part * (size / LANES) * stop * step;
    int64_t e = 0;
    for (; e + wide <= size; e += wide, fetch += stop * WIDE(few) * step)
        weigh(sums + e, weights, row, values, at + e, size, stop, few, WIDE(few), on, is_half, fetch, step);
    for (; e < size; e += LANES, fetch += stop * step)
        weigh(sums + e, weights, row, values, at + e, size, stop, few, 1, on, is_half, fetch, step);
}

/* Keys of sixteen slots, [E, 16], from [16, E] of which `there` are, by way of `room` [16, E]. Of half
 * precision two numbers are turned as one. */
ALWAYS void turned_keys(
    float *to, const void *keys, int64_t at, int64_t E, int64_t there, void *room,
    const int is_half) {
    const int little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    const int64_t bytes = is_half ? sizeof(half) : sizeof(float), row = E * bytes / sizeof(float);
    const float *from = (const float *)((const char *)keys + at * bytes);
    if (there < LANES) {
        memmove(room, from, there * E * bytes);
        memset((char *)room + there * E * bytes, 0, (LANES - there) * E * bytes);
        from = room;
    }
    for (int64_t e = 0; e < row; e += 4) {
        lanes x[4];
        turned(x, from + e, row);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            float *column = to + (e + i) * (is_half ? 2 : 1) * LANES;
            put(column, is_half ? (little ? lower_half(x[i]) : upper_half(x[i])) : x[i]);
            if (is_half) put(column + LANES, little ? upper_half(x[i]) : lower_half(x[i]));
        }
    }
}
