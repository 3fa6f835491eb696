/* Tiles of packed weights, widened in registers and multiplied with up to six rows: what each format's
 * `Pass` does. Formats are compiled apart (`packed_dense.c` and those beside it), and `packed_linear.c`
 * says in which order a row is summed.
 *
 * Weights lie in tiles of 16 outputs and one block of inputs (32, or 16 of q6_k); four tiles side by
 * side are a group, and what a call reads is in one piece: group by group, in it chunk by chunk of
 * inputs (256 of K formats, as many as share a scale of int8 and int4, else 32), of each first what
 * scales its tiles (their heads), then block by block the tiles. `packed_formats.py` lays them so.
 */
#pragma once
#include <stdlib.h>

#include "packed_vectors.h"

#define TILE 16 /* outputs */
#define GROUP 4 /* tiles */
#ifdef PLAIN_C
#define MOST 1
#else
#define MOST 6 /* rows that one pass over the weights serves */
#endif
#define VECTORS (TILE / WIDE)
#define AHEAD 4096 /* bytes from what is used to what is fetched: a group's chunk, at least */

/* SCALED and SHIFTED are what blocks are widened to: float32 with a scale, and with a minimum. */
enum {
    F32, BF16, F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, INT8, INT4, INT4_ZERO,
    SCALED, SHIFTED, SHIFTED_16, FORMATS
};

/* Inputs of a block. */
INLINED int length_of(const int format) { return format == Q6_K || format == SHIFTED_16 ? 16 : 32; }

INLINED int has_scale(const int format) { return format >= Q8_0; }

INLINED int has_minimum(const int format) {
    switch (format) {
        case Q4_1: case Q5_0: case Q5_1: case Q4_K: case Q5_K: case Q6_K: case INT4_ZERO:
        case SHIFTED: case SHIFTED_16: return 1;
        default: return 0;
    }
}

/* What is taken from a whole number before its scale multiplies it; in sums it is a minimum. */
INLINED int centre_of(const int format) { return format == Q5_0 ? 16 : format == Q6_K ? 32 : 0; }

/* Bytes of a tile's head in a chunk. */
INLINED int64_t head_of(const int format) {
    switch (format) {
        case F32: case BF16: case F16: return 0;
        case Q8_0: case Q4_0: case Q5_0: return 32;
        case Q4_K: case Q5_K: return 256;
        case Q6_K: return 288;
        case INT4_ZERO: case SHIFTED: case SHIFTED_16: return 128;
        default: return 64;
    }
}

/* Bytes of a tile's block. */
INLINED int64_t data_of(const int format) {
    switch (format) {
        case BF16: case F16: case SHIFTED_16: return 1024;
        case Q8_0: case INT8: return 512;
        case Q4_0: case Q4_1: case Q4_K: case INT4: case INT4_ZERO: return 256;
        case Q5_0: case Q5_1: case Q5_K: return 320;
        case Q6_K: return 192;
        default: return 2048;
    }
}

/* Inputs that are widened without a loop. */
INLINED int unit_of(const int format) {
    switch (format) {
        case BF16: return 2;
        case F32: case F16: case Q8_0: case INT8: case SCALED: case SHIFTED: case SHIFTED_16: return 4;
        default: return 8;
    }
}

INLINED vi moved(vi x, const int left) { return left < 0 ? x >> -left : x << left; }

/* Weights of vector v of a tile, for input j of unit u. */
INLINED vf weights(const int format, const uint8_t *data, const int u, const int j, const int v) {
    const uint8_t *four = data + 64 * u + 4 * WIDE * v;
    switch (format) {
        case BF16: return j ? (vf)(load_i(four) & (int32_t)0xffff0000) : (vf)(load_i(four) << 16);
        case F16: return halves_f(data + 32 * (4 * u + j) + 2 * WIDE * v);
        case Q8_0: case INT8: return as_f(bytes_i(data + 16 * (4 * u + j) + WIDE * v));
        case Q4_0: case INT4: return as_f(load_i(four) << (28 - 4 * j) >> 28);
        case Q4_1: case Q4_K: case INT4_ZERO: return as_f(load_i(four) >> (4 * j) & 15);
        case Q5_0: case Q5_1: case Q5_K: {
            vi high = ubytes_i(data + 256 + 16 * u + WIDE * v);
            return as_f((load_i(four) >> (4 * j) & 15) | (moved(high, 4 - j) & 16));
        }
        case Q6_K: {
            vi high = uwords_i(data + 128 + 32 * u + 2 * WIDE * v);
            return as_f((load_i(four) >> (4 * j) & 15) | (moved(high, 4 - 2 * j) & 48));
        }
        default: return load_f(data + 64 * (4 * u + j) + 4 * WIDE * v);
    }
}

/* What multiplies vector v of a tile in block b of a chunk. */
INLINED vf scale(const int format, const uint8_t *head, int64_t b, const int v) {
    switch (format) {
        case Q4_K: case Q5_K:
            return halves_f(head + 2 * WIDE * v) * as_f(ubytes_i(head + 64 + 24 * b + WIDE * v) & 63);
        case Q6_K: return halves_f(head + 2 * WIDE * v) * as_f(bytes_i(head + 32 + 16 * b + WIDE * v));
        case INT8: case INT4: case INT4_ZERO: case SCALED: case SHIFTED: case SHIFTED_16:
            return load_f(head + 4 * WIDE * v);
        default: return halves_f(head + 2 * WIDE * v);
    }
}

/* What each of its inputs adds. */
INLINED vf minimum(const int format, const uint8_t *head, int64_t b, const int v) {
    switch (format) {
        case Q5_0: case Q6_K: return scale(format, head, b, v) * (float)-centre_of(format);
        case Q4_K: case Q5_K: {
            uint64_t upper;
            memcpy(&upper, head + 64 + 24 * b + 16, 8);
            vi low = ubytes_i(head + 64 + 24 * b + WIDE * v) >> 6;
            return halves_f(head + 32 + 2 * WIDE * v) * -as_f(low | nibbles_i(upper, v) << 2);
        }
        case INT4_ZERO: case SHIFTED: case SHIFTED_16: return load_f(head + 64 + 4 * WIDE * v);
        default: return halves_f(head + 32 + 2 * WIDE * v);
    }
}

/* Rows of x, `inputs` apart, and the totals of their blocks, `blocks` apart. */
typedef struct {
    const float *x, *totals;
    int64_t inputs, blocks;
} Rows;

/* Block b of g tiles beside each other, for n rows, added to acc[n][GROUP * TILE]. */
INLINED void block(
    const int format, const int n, const int g, const uint8_t *heads, int64_t b, const uint8_t *data,
    Rows rows, float *acc) {
    const int lines = data_of(format) * unit_of(format) / length_of(format) / 64;
    vf sum[MOST][GROUP][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
#pragma GCC unroll 8
        for (int t = 0; t < g; t++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sum[r][t][v] = (vf){0};
#pragma GCC unroll 1
    for (int u = 0; u < length_of(format) / unit_of(format); u++) {
        /* line by line, whatever the tiles: a processor keeps up with one stream, not with four */
#pragma GCC unroll 16
        for (int i = 0; i < g * lines; i++) fetch(data + AHEAD + 64 * (u * g * lines + i));
#pragma GCC unroll 32
        for (int q = 0; q < unit_of(format) * g; q++) {
            const int j = q / g, t = q % g;
            vf w[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                w[v] = weights(format, data + t * data_of(format), u, j, v);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                vf input = every(rows.x[r * rows.inputs + u * unit_of(format) + j]);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) ADD_PRODUCT(sum[r][t][v], input, w[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < g; t++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            vf s = {0}, m = {0};
            if (has_scale(format)) s = scale(format, heads + t * head_of(format), b, v);
            if (has_minimum(format)) m = minimum(format, heads + t * head_of(format), b, v);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                float *at = acc + r * GROUP * TILE + t * TILE + v * WIDE;
                vf all = load_f(at);
                all = has_scale(format) ? fma_f(s, sum[r][t][v], all) : all + sum[r][t][v];
                if (has_minimum(format)) all = fma_f(m, every(rows.totals[r * rows.blocks]), all);
                store_f(at, all);
            }
        }
}

/* Tiles at once: enough sums that a core has one to add to while another is still being added to. */
#ifdef PLAIN_C
#define ABREAST(n) 1
#elif WIDE == 16
#define ABREAST(n) 4
#elif WIDE == 8
#define ABREAST(n) ((n) == 1 ? 4 : (n) == 2 ? 2 : 1)
#else
#define ABREAST(n) ((n) <= 2 ? 2 : 1)
#endif

/* The first tiles of each block and g more, as often as there are as many; how many that were. */
INLINED int64_t pass(
    const int format, const int n, const int g, Rows rows, int64_t chunks, int64_t per, int64_t tiles,
    int64_t first, const uint8_t *heads, const uint8_t *data, float *acc) {
    int64_t t = first;
    for (int64_t c = 0; c < chunks; c++) {
        for (int64_t b = 0; b < per; b++) {
            for (t = first; t + g <= tiles; t += g)
                block(format, n, g, heads + t * head_of(format), b, data + t * data_of(format), rows,
                      acc + t * TILE);
            data += tiles * data_of(format);
            rows.x += length_of(format);
            rows.totals++;
        }
        heads = data;
        data += tiles * head_of(format);
    }
    return t;
}

/* `chunks` of `per` blocks each, of a group of `tiles`, for n rows. */
typedef void Pass(
    Rows rows, int64_t chunks, int64_t per, int64_t tiles, const uint8_t *heads, const uint8_t *data,
    float *acc);

#define PASS(format, n) \
    static void format##_##n( \
        Rows rows, int64_t chunks, int64_t per, int64_t tiles, const uint8_t *heads, \
        const uint8_t *data, float *acc) { \
        int64_t done = pass(format, n, ABREAST(n), rows, chunks, per, tiles, 0, heads, data, acc); \
        if (ABREAST(n) > 1 && done < tiles) format##_rest(rows, n, chunks, per, tiles, done, heads, data, acc); \
    }

/* Tiles that are too few for all that go abreast: row by row. */
#define REST(format) \
    static void format##_rest( \
        Rows rows, int64_t n, int64_t chunks, int64_t per, int64_t tiles, int64_t first, \
        const uint8_t *heads, const uint8_t *data, float *acc) { \
        for (; n--; rows.x += rows.inputs, rows.totals += rows.blocks, acc += GROUP * TILE) \
            pass(format, 1, 1, rows, chunks, per, tiles, first, heads, data, acc); \
    }

#ifdef PLAIN_C
#define PASSES(format) REST(format) PASS(format, 1)
#define NAMED(format) [format] = {format##_1}
#else
#define PASSES(format) \
    REST(format) \
    PASS(format, 1) PASS(format, 2) PASS(format, 3) PASS(format, 4) PASS(format, 5) PASS(format, 6)
#define NAMED(format) \
    [format] = {format##_1, format##_2, format##_3, format##_4, format##_5, format##_6}
#endif

#define OWN __attribute__((visibility("hidden"))) /* of this library alone */

extern OWN Pass *const outrider_dense_passes[FORMATS][MOST];
extern OWN Pass *const outrider_block_passes[FORMATS][MOST];
extern OWN Pass *const outrider_superblock_passes[FORMATS][MOST];
extern OWN Pass *const outrider_group_passes[FORMATS][MOST];
