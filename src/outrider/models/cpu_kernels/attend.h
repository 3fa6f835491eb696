/* What attention over a cache of slots is asked for, in whatever way it is computed.
 *
 * Shapes: B rows, Q queries, H heads, K key/value heads, E numbers a head, W visible slots.
 */
#pragma once
#include "lanes.h"

#define MANY 128 /* queries of a task, at most */
#define WIDEST 256 /* numbers of a head */

typedef struct {
    int64_t B, Q, H, K, E, W; /* see above */
    int64_t there; /* slots of a row of the cache */
    int64_t seat, head; /* numbers from one row, one head of the cache to the next */
    int64_t threads;
    int64_t tiles; /* whether they may be used, for half precision */
    int64_t is_half; /* what all numbers are; else float32 */
} Sizes;

/* One call: qkv [B, Q, H + 2 K, E], cos and sin [B, Q, E], keys and values of the cache, what nodes
 * see [B, Q, W], how many slots and how many ahead of the first gap [B, Q]; out [B, Q, H, E]. */
typedef struct {
    const void *qkv, *cos, *sin;
    void *keys, *values;
    const uint8_t *visible;
    const int32_t *count, *ahead;
    void *out;
} Asks;

/* A query or key [E] from number `at` on, turned by the factors of a place. */
ALWAYS void turn(
    float *to, const void *x, int64_t at, const void *cos, const void *sin, int64_t place,
    const int64_t size, const int is_half) {
    const int64_t half_ = size / 2;
    float plain[2 * WIDEST], c[WIDEST], s[WIDEST]; /* the lower half once more behind the upper */
    for (int64_t e = 0; e < size; e += LANES) {
        const lanes here = read_as(x, at + e, is_half);
        put(plain + e, here);
        put(c + e, read_as(cos, place + e, is_half));
        put(s + e, read_as(sin, place + e, is_half));
    }
    for (int64_t e = 0; e < half_; e++) plain[size + e] = plain[e];
    for (int64_t e = 0; e < size; e += LANES)
        put(to + e, fma_(get(plain + half_ + e), get(s + e), mul(get(plain + e), get(c + e))));
}

/* Room that a thread of attend_tiles.c needs, and its answer to `some` queries of one head of keys
 * and values from query `first` on; no room: there are no tiles for such heads. */
int64_t outrider_tiles_room(const Sizes *at);
void outrider_tiles_answer(
    const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first, int64_t some, void *room);
