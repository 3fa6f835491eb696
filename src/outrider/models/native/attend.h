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
    int64_t tiles; /* whether they may be used */
} Sizes;

/* One call: qkv [B, Q, H + 2 K, E], cos and sin [B, Q, E], keys and values of the cache, what nodes
 * see [B, Q, W], how many slots and how many ahead of the first gap [B, Q]; out [B, Q, H, E]. */
typedef struct {
    const half *qkv, *cos, *sin, *keys, *values;
    const uint8_t *visible;
    const int32_t *count, *ahead;
    half *out;
} Asks;

static inline void turn(float *to, const half *x, const half *cos, const half *sin, int64_t size) {
    int64_t half_ = size / 2;
    _Alignas(64) float plain[WIDEST], c[WIDEST], s[WIDEST];
    for (int64_t e = 0; e < size; e += LANES) {
        *(lanes *)(plain + e) = load(x + e);
        *(lanes *)(c + e) = load(cos + e);
        *(lanes *)(s + e) = load(sin + e);
    }
    for (int64_t e = 0; e < size; e++)
        to[e] = __builtin_fmaf(plain[e < half_ ? e + half_ : e - half_], s[e], plain[e] * c[e]);
}

/* Room that a thread of attend_tiles.c needs, and its answer to `some` queries of one head of keys
 * and values from query `first` on; no room: there are no tiles for such heads. */
int64_t outrider_tiles_room(const Sizes *at);
void outrider_tiles_answer(
    const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first, int64_t some, void *room);
