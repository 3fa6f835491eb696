/* Attention over all keys and values of a source, in bfloat16 or float32 on a CPU.
 *
 * What is read lies in the order in which it is read and is widened on the way; sums are float32. A
 * query is computed in one order whatever stands beside it: blocks of queries share what they read.
 *
 * Shapes: B rows, Q queries, H heads, E numbers a head, T slots; E and T in whole lanes.
 */
#include "lanes.h"
#include "thread_pool.h"

#define BLOCK 6 /* queries that share what is read: as many as leave their sums in registers */
#define PARTS 4 /* sums of a score: one after the other they would wait for each other */

/* Parts, or lanes of values, whose sums for so many queries stay in registers. */
#define WIDE(few) (HELD / (few) >= 4 ? 4 : HELD / (few) >= 2 ? 2 : 1)

/* Fetch the `part`-th lanes of what will be read from `at` on: a line holds one of float32, two of
 * half precision. */
ALWAYS void soon(const void *table, int64_t at, const int part, const int is_half) {
    if (part % 2 == 0 || !is_half)
        __builtin_prefetch((const char *)table + (at + part * LANES) * (is_half ? 2 : 4) + FAR);
}

/* `wide` parts of the scores of sixteen slots, from part `first` on: sum [few, PARTS]. */
ALWAYS void scored_parts(
    lanes *sum, const float *query, const void *keys, int64_t at, int64_t size, const int first,
    const int few, const int wide, const int is_half) {
#pragma GCC unroll 6
    for (int q = 0; q < few; q++)
#pragma GCC unroll 4
        for (int p = first; p < first + wide; p++) sum[q * PARTS + p] = all(0);
    for (int64_t e = 0; e < size; e += PARTS) {
#pragma GCC unroll 4
        for (int p = first; p < first + wide; p++) {
            soon(keys, at + e * LANES, p, is_half);
            const lanes key = read_as(keys, at + (e + p) * LANES, is_half);
#pragma GCC unroll 6
            for (int q = 0; q < few; q++)
                sum[q * PARTS + p] = fma_(all(query[q * size + e + p]), key, sum[q * PARTS + p]);
        }
    }
}

/* Scores of sixteen slots, out [few, row]; `keys` [E, 16]. */
ALWAYS void scored(
    float *out, int64_t row, const float *query, const void *keys, int64_t at, int64_t size,
    const int few, const int is_half) {
    lanes sum[BLOCK * PARTS];
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p += WIDE(few))
        scored_parts(sum, query, keys, at, size, p, few, WIDE(few), is_half);
#pragma GCC unroll 6
    for (int q = 0; q < few; q++) {
        const lanes *s = sum + q * PARTS;
        put(out + q * row, add(add(s[0], s[1]), add(s[2], s[3])));
    }
}

/* Sums of weighted values, out [few, E], 16 `many` numbers of them; `values` [T, E]. */
ALWAYS void weighed(
    float *out, const float *weights, int64_t row, const void *values, int64_t at, int64_t size,
    int64_t slots, const int few, const int many, const int is_half) {
    lanes sum[BLOCK * 4];
#pragma GCC unroll 24
    for (int i = 0; i < few * many; i++) sum[i] = all(0);
    for (int64_t s = 0; s < slots; s++) {
#pragma GCC unroll 4
        for (int e = 0; e < many; e++) {
            soon(values, at + s * size, e, is_half);
            const lanes value = read_as(values, at + s * size + e * LANES, is_half);
#pragma GCC unroll 6
            for (int q = 0; q < few; q++)
                sum[q * many + e] = fma_(all(weights[q * row + s]), value, sum[q * many + e]);
        }
    }
#pragma GCC unroll 6
    for (int q = 0; q < few; q++)
#pragma GCC unroll 4
        for (int e = 0; e < many; e++) put(out + q * size + e * LANES, sum[q * many + e]);
}

/* exp(scores - the best) of `slots` that are there, 0 behind; returns one over the sum. */
static float softened(float *scores, int64_t slots, int64_t row) {
    lanes top = all(-3.0e38f), sum = all(0);
    for (int64_t s = slots; s < row; s++) scores[s] = -INFINITY;
    for (int64_t s = 0; s < row; s += LANES) top = widest(top, get(scores + s));
    const lanes best = all(most_of_lanes(top));
    for (int64_t s = 0; s < row; s += LANES) {
        const lanes weight = exp_(sub(get(scores + s), best));
        sum = add(sum, weight);
        put(scores + s, weight);
    }
    return 1 / total(sum);
}

/* Attention of `few` queries [few, E] over the head from number `at` on; `room` [few, T] floats. */
ALWAYS void answered(
    float *out, const float *query, const void *keys, const void *values, int64_t at, int64_t slots,
    int64_t size, float *room, const int few, const int is_half) {
    const int64_t row = (slots + LANES - 1) / LANES * LANES;
    float rest[BLOCK];
    for (int64_t s = 0; s < row; s += LANES)
        scored(room + s, row, query, keys, at + s * size, size, few, is_half);
    for (int q = 0; q < few; q++) rest[q] = softened(room + q * row, slots, row);
    int64_t e = 0;
    for (; e + WIDE(few) * LANES <= size; e += WIDE(few) * LANES)
        weighed(out + e, room, row, values, at + e, size, slots, few, WIDE(few), is_half);
    for (; e < size; e += LANES)
        weighed(out + e, room, row, values, at + e, size, slots, few, 1, is_half);
    for (int q = 0; q < few; q++)
        for (int64_t i = q * size; i < (q + 1) * size; i += LANES)
            put(out + i, mul(get(out + i), all(rest[q])));
}

/* The same for any few, of either kind: each its own code. */
static void answer(
    float *out, const float *query, const void *keys, const void *values, int64_t at, int64_t slots,
    int64_t size, float *room, int few, int is_half) {
#define FEW(count)                                                                   \
    if (is_half) answered(out, query, keys, values, at, slots, size, room, count, 1); \
    else answered(out, query, keys, values, at, slots, size, room, count, 0);         \
    break
    switch (few) {
    case 1: FEW(1);
    case 2: FEW(2);
    case 3: FEW(3);
    case 4: FEW(4);
    case 5: FEW(5);
    default: FEW(6);
    }
#undef FEW
}

/* A piece is one head of a row. */
typedef struct {
    int64_t queries, heads, size, wide, row, seat, head, is_half;
    float scale;
    const int64_t *slots;
    const void *q, *keys, *values;
    void *out;
    float *rooms;
} Call;

static void one_head(void *about, int64_t task, int64_t thread) {
    const Call *of = about;
    const int64_t b = task / of->heads, h = task % of->heads, at = b * of->seat + h * of->head, wide = of->wide;
    float *room = of->rooms + thread * BLOCK * (of->row + 2 * wide);
    float *query = room + BLOCK * of->row, *sums = query + BLOCK * wide;
    int64_t blocks = (of->queries + BLOCK - 1) / BLOCK, few = 0; /* as even as can be */
    for (int64_t first = 0; first < of->queries; first += few, blocks--) {
        const int64_t lies = ((b * of->queries + first) * of->heads + h) * of->size, apart = of->heads * of->size;
        few = (of->queries - first + blocks - 1) / blocks;
        for (int64_t i = 0; i < few; i++)
            widen(query + i * wide, of->q, lies + i * apart, of->size, wide, of->is_half);
        for (int64_t i = 0; i < few * wide; i += LANES) put(query + i, mul(get(query + i), all(of->scale)));
        answer(sums, query, of->keys, of->values, at, of->slots[b], wide, room, few, of->is_half);
        for (int64_t i = 0; i < few; i++)
            for (int64_t e = 0; e < of->size; e += LANES) {
                int64_t left = of->size - e < LANES ? of->size - e : LANES;
                narrow(of->out, lies + i * apart + e, sums + i * wide + e, left, of->is_half);
            }
    }
}

/* softmax(scale q k') v over the first `slots` [B] of each row, of T: out and q [B, Q, H, E'].
 *
 * Keys of a head are [T / 16, E, 16], values [T, E]; `seat` and `head` are numbers from one row, one
 * head to the next. All are bfloat16 or, without `is_half`, float32. Returns 1 without memory. */
int outrider_cross(
    int64_t batch, int64_t queries, int64_t heads, int64_t size, int64_t most, int64_t seat,
    int64_t head, int64_t threads, int64_t is_half, float scale, const int64_t *slots,
    const void *q, const void *keys, const void *values, void *out) {
    const int64_t wide = (size + LANES - 1) / LANES * LANES;
    const int64_t row = (most + LANES - 1) / LANES * LANES;
    float *rooms = aligned_alloc(64, threads * BLOCK * (row + 2 * wide) * sizeof(float));
    Call call = {queries, heads, size, wide, row, seat, head, is_half, scale, slots, q, keys, values, out, rooms};
    if (!rooms) return 1;
    outrider_share(threads, batch * heads, one_head, &call);
    free(rooms);
    return 0;
}
