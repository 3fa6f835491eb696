/* Where the numbers of packed weights lie.
 *
 * Weights lie in tiles of 16 outputs and one block of inputs (32, or 16 of q6_k); four tiles side by
 * side are a group, and what a call reads is in one piece: group by group, in it chunk by chunk of
 * inputs (256 of K formats, else 32), of each first what scales its tiles (their heads), then block by block the tiles. Heads of more than 64 bytes stand
 * before their own tile's first block instead: processors fetch ahead what is read in order, and where
 * 512 bytes are skipped some stop to (`benchmarks/kernels/skipped_reads.c`). For the same reason tiles
 * that one row reads in turn lie side by side unit by unit (`beside`). `packed_layout.c` lays them so.
 */
#pragma once
#include "packed_vectors.h"

#define TILE 16 /* outputs */
#define GROUP 4 /* tiles */

/* WHOLE ones are what formats of few bits are widened to: 16 bits with a scale, and a minimum. HALVES
 * are BF16 whose inputs are rounded to bfloat16 as well, for processors with such products. */
enum {
    F32, BF16, F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, HALVES, WHOLE,
    WHOLE_MINIMUM, WHOLE_16, FORMATS
};

/* Inputs of a block. */
INLINED int length_of(const int format) { return format == Q6_K || format == WHOLE_16 ? 16 : 32; }

INLINED int is_whole(const int format) { return format >= Q8_0 && format != HALVES; }

INLINED int has_minimum(const int format) {
    switch (format) {
        case Q4_1: case Q5_1: case Q4_K: case Q5_K: case WHOLE_MINIMUM: return 1;
        default: return 0;
    }
}

/* What is taken from a whole number before its scale multiplies it. */
INLINED int centre_of(const int format) {
    switch (format) {
        case Q4_0: return 8;
        case Q5_0: return 16;
        case Q6_K: return 32;
        default: return 0;
    }
}

/* Bytes of a tile's head in a chunk. */
INLINED int64_t head_of(const int format) {
    switch (format) {
        case F32: case BF16: case F16: case HALVES: return 0;
        case Q8_0: case Q4_0: case Q5_0: return 32;
        case Q4_K: case Q5_K: return 256;
        case Q6_K: return 288;
        case WHOLE_MINIMUM: return 128;
        default: return 64;
    }
}

/* Bytes of a tile's block. */
INLINED int64_t data_of(const int format) {
    switch (format) {
        case F32: return 2048;
        case Q8_0: case WHOLE_16: return 512;
        case Q4_0: case Q4_1: case Q4_K: return 256;
        case Q5_0: case Q5_1: case Q5_K: return 320;
        case Q6_K: return 192;
        default: return 1024;
    }
}

/* Whether heads stand before their own tile's first block. */
INLINED int has_heads_apart(const int format) { return head_of(format) > 64; }

/* Bytes from a tile's head to the next one's. */
INLINED int64_t heads_apart(const int format) {
    return head_of(format) + (has_heads_apart(format) ? data_of(format) : 0);
}

/* Where block b of a chunk begins, that is its first tile's numbers. */
INLINED const uint8_t *block_of(const int format, const uint8_t *chunk, int64_t tiles, int64_t b) {
    if (has_heads_apart(format) && !b) return chunk + head_of(format);
    return chunk + tiles * (head_of(format) + b * data_of(format));
}

/* Inputs that are widened without a loop. */
INLINED int unit_of(const int format) {
    switch (format) {
        case BF16: case HALVES: return 2;
        case F32: case F16: case Q8_0: case WHOLE: case WHOLE_MINIMUM: case WHOLE_16: return 4;
        case Q6_K: return 16;
        default: return 8;
    }
}

/* Bytes of a tile's unit. */
INLINED int64_t bytes_of_unit(const int format) {
    return data_of(format) * unit_of(format) / length_of(format);
}

/* Tiles whose units lie side by side, as one row reads them: with fewer a sum waits for itself, with
 * more other rows, which take fewer at once, skip what lies between. */
INLINED int64_t beside(const int format) {
    return is_whole(format) || format == F32 ? 1 : WIDE == 16 ? 4 : 2;
}

/* Bytes of block b that each of its tiles takes. */
INLINED int64_t tiles_apart(const int format, int64_t b) {
    return data_of(format) + (has_heads_apart(format) && !b ? head_of(format) : 0);
}

/* Bytes from block b's first numbers to those of tile t of it. */
INLINED int64_t tile_at(const int format, int64_t b, int64_t t) {
    const int64_t first = t / beside(format) * beside(format);
    return first * tiles_apart(format, b) + (t - first) * bytes_of_unit(format);
}

/* Bytes from a unit of tile t's numbers to the next one's, in a group of so many tiles. */
INLINED int64_t units_apart(const int format, int64_t t, int64_t tiles) {
    const int64_t left = tiles - t / beside(format) * beside(format);
    return (left < beside(format) ? left : beside(format)) * bytes_of_unit(format);
}
