/* Layers whose state decays and gains an outer product for each token: S <- decay S + key delta'.
 *
 * Gated delta rules and state space duality (recurrent/outer_product.py). A head's state [K, V]
 * stays near the processor while its nodes are gone through: the settled one is read once a call.
 * A state is advanced by `advanced` alone, and a node's output is summed over K in one order,
 * whatever stands beside it: a text's states have the same bits however it was drafted.
 *
 * Shapes: B rows, N nodes, H heads in G groups that share keys, K and V in whole lanes; float32.
 */
#include "lanes.h"

#define WIDEST_KEY 256
#define MANY 4 /* lanes of values whose sums stay in registers */

/* `to` [K, V] = decay from + key delta'; the decay is one number, or one for each of K. */
ALWAYS void advanced(
    float *to, const float *from, const float *decay, int64_t by_channel, const float *key,
    const float *delta, int64_t keys, int64_t values) {
    for (int64_t k = 0; k < keys; k++) {
        const lanes left = all(decay[by_channel ? k : 0]), in = all(key[k]);
        for (int64_t v = k * values, e = 0; e < values; v += LANES, e += LANES)
            put(to + v, fma_(in, get(delta + e), mul(left, get(from + v))));
    }
}

/* `many` lanes of the sums over K of key S and query S, from value `e` on. */
ALWAYS void read_lanes(
    float *known, float *seen, const float *state, const float *key, const float *query,
    int64_t keys, int64_t values, int64_t e, const int many) {
    lanes first[MANY], second[MANY];
#pragma GCC unroll 4
    for (int i = 0; i < many; i++) first[i] = second[i] = all(0);
    for (int64_t k = 0; k < keys; k++) {
        const lanes a = all(key[k]), b = all(query[k]);
#pragma GCC unroll 4
        for (int i = 0; i < many; i++) {
            const lanes s = get(state + k * values + e + i * LANES);
            first[i] = fma_(a, s, first[i]);
            second[i] = fma_(b, s, second[i]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < many; i++) {
        put(known + e + i * LANES, first[i]);
        put(seen + e + i * LANES, second[i]);
    }
}

static void read_state(
    float *known, float *seen, const float *state, const float *key, const float *query,
    int64_t keys, int64_t values) {
    int64_t e = 0;
    for (; e + MANY * LANES <= values; e += MANY * LANES)
        read_lanes(known, seen, state, key, query, keys, values, e, MANY);
    for (; e < values; e += LANES)
        read_lanes(known, seen, state, key, query, keys, values, e, 1);
}

/* `to` [B, H, K, V] = the states of `from`, which may be the same, advanced by `count` [B] entries
 * of a log each: those of ring places `first` [B] on; decay [B, R, H] or [B, R, H, K], key
 * [B, R, G, K], delta [B, R, H, V]. */
void outrider_advance(
    int64_t rows, int64_t heads, int64_t groups, int64_t keys, int64_t values, int64_t ring,
    int64_t by_channel, int64_t threads, const void *first, const void *count, const void *decay,
    const void *key, const void *delta, const void *from, void *to) {
    const int64_t size = keys * values, decays = by_channel ? keys : 1;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * heads * size > 65536)
    for (int64_t pair = 0; pair < rows * heads; pair++) {
        const int64_t b = pair / heads, h = pair % heads, g = h / (heads / groups);
        const int64_t start = ((const int64_t *)first)[b], many = ((const int64_t *)count)[b];
        const float *state = (const float *)from + pair * size;
        float *next = (float *)to + pair * size;
        if (!many && next != state) memcpy(next, state, size * sizeof(float));
        for (int64_t n = 0; n < many; n++, state = next) {
            const int64_t at = b * ring + (start + n) % ring;
            advanced(
                next, state, (const float *)decay + (at * heads + h) * decays, by_channel,
                (const float *)key + (at * groups + g) * keys,
                (const float *)delta + (at * heads + h) * values, keys, values);
        }
    }
}

/* Outputs [B, N, H, V] of nodes, each from the state that `origins` [B, N] says: 0 is the row's
 * own of `states`, 1 + n that behind node n. With `corrects`, a node's delta is beta (value - what
 * the state says of its key), else its value; `room` holds [threads, N, K, V] numbers. */
void outrider_outer_nodes(
    int64_t rows, int64_t nodes, int64_t heads, int64_t groups, int64_t keys, int64_t values,
    int64_t by_channel, int64_t corrects, int64_t threads, const void *origins, const void *states,
    const void *query, const void *key, const void *value, const void *beta, const void *decay,
    void *room, void *delta, void *out) {
    const int64_t size = keys * values, decays = by_channel ? keys : 1, pairs = rows * heads;
#pragma omp parallel for num_threads(threads) if (threads > 1 && pairs * size > 65536)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *made = (float *)room + thread * nodes * size;
        for (int64_t pair = thread; pair < pairs; pair += threads) {
            const int64_t b = pair / heads, h = pair % heads, g = h / (heads / groups);
            const int64_t *origin = (const int64_t *)origins + b * nodes;
            for (int64_t n = 0; n < nodes; n++) {
                const int64_t shared = ((b * nodes + n) * groups + g) * keys;
                const int64_t own = (b * nodes + n) * heads + h;
                const float *k = (const float *)key + shared, *q = (const float *)query + shared;
                const float *left = (const float *)decay + own * decays;
                const float *from = origin[n] ? made + (origin[n] - 1) * size
                                              : (const float *)states + pair * size;
                float keyed[WIDEST_KEY], asked[WIDEST_KEY];
                lanes both = all(0);
                for (int64_t e = 0; e < keys; e += LANES) {
                    const lanes by = by_channel ? get(left + e) : all(left[0]);
                    both = fma_(get(k + e), get(q + e), both);
                    put(keyed + e, mul(get(k + e), by));
                    put(asked + e, mul(get(q + e), by));
                }
                const lanes self = all(total(both));
                float *added = (float *)delta + own * values, *answer = (float *)out + own * values;
                const float *given = (const float *)value + own * values;
                read_state(added, answer, from, keyed, asked, keys, values);
                const lanes share = all(corrects ? ((const float *)beta)[own] : 1.0f);
                for (int64_t e = 0; e < values; e += LANES) {
                    lanes new = get(given + e);
                    if (corrects) new = mul(sub(new, get(added + e)), share);
                    put(added + e, new);
                    put(answer + e, fma_(self, new, get(answer + e)));
                }
                int64_t last = nodes - 1;
                while (last > n && origin[last] != n + 1) last--;
                if (last > n)
                    advanced(made + n * size, from, left, by_channel, k, added, keys, values);
            }
        }
    }
}
