/* Attention over all keys and values of a window, in bfloat16 on a CPU.
 *
 * What is read lies in the order in which it is read and is widened on the way; sums are float32. A
 * query is computed in one order whatever stands beside it: blocks of queries share what they read.
 *
 * Shapes: B rows, Q queries, H heads, E numbers a head, T slots; E and T in whole lanes.
 */
#include "lanes.h"

#define BLOCK 4 /* queries that share what is read */
#define PARTS 4 /* sums of a score: one after the other they would wait for each other */


/* Scores of sixteen slots, out [few, row]; `keys` [E, 16]. */
static inline __attribute__((always_inline)) void scored(
    float *out, int64_t row, const float *query, const half *keys, int64_t size, const int few) {
    lanes sum[BLOCK * PARTS];
#pragma GCC unroll 16
    for (int i = 0; i < few * PARTS; i++) sum[i] = (lanes){0};
    for (int64_t e = 0; e < size; e += PARTS) {
        __builtin_prefetch(keys + e * LANES + FAR / 2);
        __builtin_prefetch(keys + (e + 2) * LANES + FAR / 2);
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            lanes key = load(keys + (e + p) * LANES);
#pragma GCC unroll 4
            for (int q = 0; q < few; q++)
                sum[q * PARTS + p] = fma_(all(query[q * size + e + p]), key, sum[q * PARTS + p]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < few; q++) {
        const lanes *s = sum + q * PARTS;
        *(lanes *)(out + q * row) = (s[0] + s[1]) + (s[2] + s[3]);
    }
}

/* Sums of weighted values, out [few, E], 16 `many` numbers of them; `values` [T, E]. */
static inline __attribute__((always_inline)) void weighed(
    float *out, const float *weights, int64_t row, const half *values, int64_t size, int64_t slots,
    const int few, const int many) {
    lanes sum[BLOCK * 4];
#pragma GCC unroll 16
    for (int i = 0; i < few * many; i++) sum[i] = (lanes){0};
    for (int64_t s = 0; s < slots; s++) {
        __builtin_prefetch(values + s * size + FAR / 2);
        if (many > 2) __builtin_prefetch(values + s * size + 2 * LANES + FAR / 2);
#pragma GCC unroll 4
        for (int e = 0; e < many; e++) {
            lanes value = load(values + s * size + e * LANES);
#pragma GCC unroll 4
            for (int q = 0; q < few; q++)
                sum[q * many + e] = fma_(all(weights[q * row + s]), value, sum[q * many + e]);
        }
    }
    for (int q = 0; q < few; q++)
        for (int e = 0; e < many; e++) *(lanes *)(out + q * size + e * LANES) = sum[q * many + e];
}

/* exp(scores - the best) of `slots` that are there, 0 behind; returns one over the sum. */
static float softened(float *scores, int64_t slots, int64_t row) {
    lanes top = all(-3.0e38f), sum = {0};
    for (int64_t s = slots; s < row; s++) scores[s] = -INFINITY;
    for (int64_t s = 0; s < row; s += LANES) top = widest(top, *(lanes *)(scores + s));
    float best = top[0];
    for (int i = 1; i < LANES; i++) best = top[i] > best ? top[i] : best;
    for (int64_t s = 0; s < row; s += LANES) {
        lanes weight = exp_(*(lanes *)(scores + s) - best);
        sum += weight;
        *(lanes *)(scores + s) = weight;
    }
    return 1 / total(sum);
}

/* Attention of `few` queries [few, E] over one head; `room` [few, T] floats. */
static inline __attribute__((always_inline)) void answered(
    float *out, const float *query, const half *keys, const half *values, int64_t slots,
    int64_t size, float *room, const int few) {
    const int64_t row = (slots + LANES - 1) / LANES * LANES;
    float rest[BLOCK];
    for (int64_t s = 0; s < row; s += LANES)
        scored(room + s, row, query, keys + s * size, size, few);
    for (int q = 0; q < few; q++) rest[q] = softened(room + q * row, slots, row);
    int64_t e = 0;
    for (; e + 4 * LANES <= size; e += 4 * LANES)
        weighed(out + e, room, row, values + e, size, slots, few, 4);
    for (; e < size; e += LANES) weighed(out + e, room, row, values + e, size, slots, few, 1);
    for (int q = 0; q < few; q++)
        for (int64_t i = 0; i < size; i += LANES) *(lanes *)(out + q * size + i) *= rest[q];
}

/* softmax(q k') v over all T slots of each row: out and q [B, Q, H, E'].
 *
 * Keys of a head are [T / 16, E, 16], values [T, E]; `seat` and `head` are numbers from one row, one
 * head to the next. Returns 1 without memory. */
int outrider_cross(
    int64_t batch, int64_t queries, int64_t heads, int64_t size, int64_t slots, int64_t seat,
    int64_t head, int64_t threads, const half *q, const half *keys, const half *values, half *out) {
    const int64_t wide = (size + LANES - 1) / LANES * LANES;
    const int64_t row = (slots + LANES - 1) / LANES * LANES;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *room = aligned_alloc(64, BLOCK * (row + 2 * wide) * sizeof(float));
        if (!room) failed = 1;
#pragma omp for
        for (int64_t task = 0; task < batch * heads; task++) {
            const int64_t b = task / heads, h = task % heads;
            const half *k = keys + b * seat + h * head, *v = values + b * seat + h * head;
            for (int64_t first = 0; room && first < queries; first += BLOCK) {
                int64_t few = queries - first < BLOCK ? queries - first : BLOCK;
                float *query = room + BLOCK * row, *sums = query + BLOCK * wide;
                for (int64_t i = 0; i < few; i++)
                    widen(query + i * wide, q, ((b * queries + first + i) * heads + h) * size, size,
                          wide, 1);
                switch (few) {
                case 1: answered(sums, query, k, v, slots, wide, room, 1); break;
                case 2: answered(sums, query, k, v, slots, wide, room, 2); break;
                case 3: answered(sums, query, k, v, slots, wide, room, 3); break;
                default: answered(sums, query, k, v, slots, wide, room, 4);
                }
                for (int64_t i = 0; i < few; i++)
                    for (int64_t e = 0; e < size; e += LANES) {
                        int64_t there = size - e < LANES ? size - e : LANES;
                        narrow(out, ((b * queries + first + i) * heads + h) * size + e,
                               sums + i * wide + e, there, 1);
                    }
            }
        }
        free(room);
    }
    return failed;
}
