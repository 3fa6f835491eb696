/* Work in pieces, done by the thread that calls and by whichever others are awake. */
#pragma once
#include <stdint.h>

/* Piece number `piece`, on thread number `thread` of those that share the work. */
typedef void Piece(void *about, int64_t piece, int64_t thread);

/* Do all pieces, in any order, on up to so many threads; each is done when this returns. */
__attribute__((visibility("hidden"))) void outrider_share(
    int64_t threads, int64_t pieces, Piece *run, void *about);

/* How many of `all` units are a piece: several pieces a thread, so that none waits for long. */
static inline int64_t units_of_piece(int64_t all, int64_t threads) {
    const int64_t each = threads > 1 ? all / (4 * threads) : all;
    return each > 1 ? each : 1;
}
