/* Tiles of packed weights, widened in registers and multiplied with up to six rows: what each format's
 * `Pass` does. Formats are compiled apart (`packed_dense.c` and those beside it), and `packed_linear.c`
 * says in which order a row is summed.
 *
 * Weights lie in tiles of 16 outputs and one block of inputs (32, or 16 of q6_k); four tiles side by
 * side are a group, and what a call reads is in one piece: group by group, in it chunk by chunk of
 * inputs (256 of K formats, as many as share a scale of int8 and int4, else 32), of each first what
 * scales its tiles (their heads), then block by block the tiles. Heads of more than 64 bytes stand
 * before their own tile's first block instead: processors fetch ahead what is read in order, and where
 * 512 bytes are skipped some stop to (`benchmarks/kernels/skipped_reads.c`). `packed_linear.py`
 * lays them so.
 */
#pragma once

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

/* WHOLE ones are what formats of few bits are widened to: 16 bits with a scale, and a minimum. HALVES
 * are BF16 whose inputs are rounded to bfloat16 as well, for processors with such products. */
enum {
    F32, BF16, F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, INT8, INT4, INT4_ZERO, HALVES,
    WHOLE, WHOLE_MINIMUM, WHOLE_16, FORMATS
};

/* Inputs of a block. */
INLINED int length_of(const int format) { return format == Q6_K || format == WHOLE_16 ? 16 : 32; }

INLINED int is_whole(const int format) { return format >= Q8_0 && format != HALVES; }

INLINED int has_minimum(const int format) {
    switch (format) {
        case Q4_1: case Q5_1: case Q4_K: case Q5_K: case INT4_ZERO: case WHOLE_MINIMUM: return 1;
        default: return 0;
    }
}

/* What is taken from a whole number before its scale multiplies it. */
INLINED int centre_of(const int format) {
    switch (format) {
        case Q4_0: case INT4: return 8;
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
        case INT4_ZERO: case WHOLE_MINIMUM: return 128;
        default: return 64;
    }
}

/* Bytes of a tile's block. */
INLINED int64_t data_of(const int format) {
    switch (format) {
        case F32: return 2048;
        case Q8_0: case INT8: case WHOLE_16: return 512;
        case Q4_0: case Q4_1: case Q4_K: case INT4: case INT4_ZERO: return 256;
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

/* Bytes from a tile's numbers to the next one's in block b. */
INLINED int64_t tiles_apart(const int format, int64_t b) {
    return data_of(format) + (has_heads_apart(format) && !b ? head_of(format) : 0);
}

/* Inputs that are widened without a loop. */
INLINED int unit_of(const int format) {
    switch (format) {
        case BF16: case HALVES: return 2;
        case F32: case F16: case Q8_0: case INT8: case WHOLE: case WHOLE_MINIMUM: case WHOLE_16: return 4;
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
        default: return load_f(data + 64 * (4 * u + j) + 4 * WIDE * v);
    }
}

/* Whole numbers of vector v of a tile, for inputs 2 p and 2 p + 1 of unit u, of 16 bits each: from
 * words of eight numbers of 4 bits those of which the lower ones are all 2 p, the upper 2 p + 1. */
INLINED vi pairs(const int format, const uint8_t *data, const int u, const int p, const int v) {
    const uint8_t *four = data + 64 * u + 4 * WIDE * v;
    switch (format) {
        case Q8_0: case INT8: return byte_pairs(data + 64 * u + 32 * p + 2 * WIDE * v);
        case WHOLE: case WHOLE_MINIMUM: case WHOLE_16:
            return load_i(data + 128 * u + 64 * p + 4 * WIDE * v);
        case Q5_0: case Q5_1: case Q5_K: {
            vi high = ubytes_i(data + 256 + 16 * u + WIDE * v);
            high |= high << 12; /* of the upper four 16 bits from the lower four */
            return (load_i(four) >> (4 * p) & 0x000f000f) | (moved(high, 4 - p) & 0x00100010);
        }
        case Q6_K: {
            vi high = uwords_i(data + 128 + 32 * u + 2 * WIDE * v);
            high |= high << 8;
            return (load_i(four) >> (4 * p) & 0x000f000f) | (moved(high, 4 - 2 * p) & 0x00300030);
        }
        default: return load_i(four) >> (4 * p) & 0x000f000f;
    }
}

/* What multiplies vector v of a tile in block b of a chunk. */
INLINED vf scale(const int format, const uint8_t *head, int64_t b, const int v) {
    switch (format) {
        case Q4_K: case Q5_K:
            return halves_f(head + 2 * WIDE * v) * as_f(ubytes_i(head + 64 + 24 * b + WIDE * v) & 63);
        case Q6_K: return halves_f(head + 2 * WIDE * v) * as_f(bytes_i(head + 32 + 16 * b + WIDE * v));
        case INT8: case INT4: case INT4_ZERO: case WHOLE: case WHOLE_MINIMUM: case WHOLE_16:
            return load_f(head + 4 * WIDE * v);
        default: return halves_f(head + 2 * WIDE * v);
    }
}

/* What each of its inputs adds. */
INLINED vf minimum(const int format, const uint8_t *head, int64_t b, const int v) {
    switch (format) {
        case Q4_K: case Q5_K: {
            uint64_t upper;
            memcpy(&upper, head + 64 + 24 * b + 16, 8);
            vi low = ubytes_i(head + 64 + 24 * b + WIDE * v) >> 6;
            return halves_f(head + 32 + 2 * WIDE * v) * -as_f(low | nibbles_i(upper, v) << 2);
        }
        case INT4_ZERO: case WHOLE_MINIMUM: return load_f(head + 64 + 4 * WIDE * v);
        default: return halves_f(head + 32 + 2 * WIDE * v);
    }
}

/* Numbers of a block to whole ones of at most `most` (ties to even), and what these are multiplied
 * with: NaN where one is not finite. */
INLINED float rounded(const float *x, const int length, const int most, int32_t *whole) {
    vi top = {0}; /* numbers without their signs are in the order of their bits */
#pragma GCC unroll 8
    for (int i = 0; i < length; i += WIDE) {
        const vi size = load_i(x + i) & 0x7fffffff, more = size > top;
        top = (size & more) | (top & ~more);
    }
    int32_t each[WIDE], bits = 0;
    memcpy(each, &top, sizeof(each));
    for (int i = 0; i < WIDE; i++) bits = each[i] > bits ? each[i] : bits;
    const int bad = bits >= 0x7f800000, none = bits < 0x08000000; /* 1 / x would be inf */
    float largest;
    memcpy(&largest, &bits, 4);
    const float by = bad || none ? 0 : most / largest;
#pragma GCC unroll 8
    for (int i = 0; i < length; i += WIDE) {
        const vf near = load_f(x + i) * every(by) + 12582912.0f;
        const vi one = bad ? (vi){0} : (vi)near - 0x4b400000;
        memcpy(whole + i, &one, sizeof(one));
    }
    return bad ? __builtin_nanf("") : none ? 0 : largest / most;
}

/* Rows of x, `inputs` apart, of which only a format's own are there: x as it is; x in bfloat16; or for
 * whole numbers x in 16 bits, of each block what these are multiplied with, `blocks` apart, their total times that,
 * and their total times what is the weights' centre. */
typedef struct {
    const float *x;
    const int16_t *near;
    const float *scales, *totals;
    const int32_t *centres;
    int64_t inputs, blocks;
} Rows;

/* What is fetched while a part of a group is multiplied. Where one pass serves all rows: what comes
 * AHEAD bytes behind what is used. Where there are several each fetches its share of the part behind
 * this one, so that memory is read at one pace, and not by the first pass alone while it waits. */
typedef struct {
    const uint8_t *part, *next;
    int64_t share; /* of `next` to a byte of the part, in 65536ths */
} Ahead;

/* `lines` lines of 64 bytes are used from here on. A part of whole numbers has room in the first cache
 * beside the next one, others have in the second. */
INLINED void fetch_ahead(const int format, Ahead ahead, const uint8_t *here, const int lines) {
    const uint8_t *from = ahead.next + ((here - ahead.part) * ahead.share >> 16);
    if (ahead.share == 65536)
#pragma GCC unroll 16
        for (int i = 0; i < lines; i++) fetch(from + 64 * i);
    else
#pragma GCC unroll 16
        for (int i = 0; i < (lines + 1) / 2; i++) {
            if (is_whole(format)) fetch(from + 64 * i);
            else fetch_near(from + 64 * i);
        }
}

INLINED Rows rows_from(Rows rows, int64_t row, int64_t block, int64_t length) {
    rows.x += row * rows.inputs + block * length;
    rows.near += row * rows.inputs + block * length;
    rows.scales += row * rows.blocks + block;
    rows.totals += row * rows.blocks + block;
    rows.centres += row * rows.blocks + block;
    return rows;
}

/* x of row r in block b that a pair of weights is multiplied with. */
INLINED vi input_pair(Rows rows, int64_t r, int64_t at) {
    int32_t both;
    memcpy(&both, rows.near + r * rows.inputs + at, 4);
    return all_i(both);
}

/* Where n rows of a group's sums are. Those that stay in registers are put where they belong, rows of
 * y, and begin from 0 where they are the first; others lie beside each other meanwhile. */
typedef struct {
    float *at;
    int64_t wide; /* from row to row */
    int first;
} Sums;

/* Lines of 64 bytes that a tile's numbers of one unit of inputs take. */
INLINED int lines_of(const int format) {
    return data_of(format) * unit_of(format) / length_of(format) / 64;
}

/* `blocks` blocks of g tiles whose blocks are `tiles` tiles long, in products of two bfloat16 numbers,
 * for n rows: sums stay in registers. */
INLINED void halves(
    const int n, const int g, const uint8_t *data, int64_t blocks, int64_t tiles, Rows rows, Ahead ahead,
    Sums sums) {
    const int64_t apart = data_of(HALVES);
    vf sum[MOST][GROUP][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
#pragma GCC unroll 8
        for (int t = 0; t < g; t++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                sum[r][t][v] =
                    sums.first ? (vf){0} : load_f(sums.at + r * sums.wide + t * TILE + v * WIDE);
    int64_t at = 0;
#pragma GCC unroll 1
    for (int64_t b = 0; b < blocks; b++, data += tiles * apart)
#pragma GCC unroll 1
        for (int u = 0; u < length_of(HALVES) / 2; u++, at += 2) {
            fetch_ahead(HALVES, ahead, data + 64 * u * g, g);
            vi w[GROUP][VECTORS];
#pragma GCC unroll 8
            for (int t = 0; t < g; t++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) w[t][v] = load_i(data + t * apart + 64 * u + 4 * WIDE * v);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                vi input = input_pair(rows, r, at);
#pragma GCC unroll 8
                for (int t = 0; t < g; t++)
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++)
                        sum[r][t][v] = add_half_products(sum[r][t][v], w[t][v], input);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
#pragma GCC unroll 8
        for (int t = 0; t < g; t++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                store_f(sums.at + r * sums.wide + t * TILE + v * WIDE, sum[r][t][v]);
}

/* Block b of g tiles, so far `apart`, for n rows, added to acc[n][GROUP * TILE]. */
INLINED void block(
    const int format, const int n, const int g, const uint8_t *heads, int64_t b, const uint8_t *data,
    int64_t apart, Rows rows, Ahead ahead, float *acc) {
    const int lines = lines_of(format);
    const int at_once = is_whole(format) ? 2 : 1; /* inputs */
    vf sum[MOST][GROUP][VECTORS];
    vi whole[MOST][GROUP][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
#pragma GCC unroll 8
        for (int t = 0; t < g; t++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sum[r][t][v] = (vf){0}, whole[r][t][v] = (vi){0};
#pragma GCC unroll 1
    for (int u = 0; u < length_of(format) / unit_of(format); u++) {
        /* line by line, whatever the tiles: a processor keeps up with one stream, not with four */
        fetch_ahead(format, ahead, data + 64 * u * g * lines, g * lines);
#pragma GCC unroll 32
        for (int q = 0; q < unit_of(format) / at_once * g; q++) {
            const int j = q / g, t = q % g, at = u * unit_of(format) + j * at_once;
            const uint8_t *tile = data + t * apart;
            if (is_whole(format)) {
                vi w[VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) w[v] = pairs(format, tile, u, j, v);
#pragma GCC unroll 8
                for (int r = 0; r < n; r++) {
                    vi input = input_pair(rows, r, at);
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++)
                        whole[r][t][v] = add_products(whole[r][t][v], w[v], input);
                }
            } else {
                vf w[VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) w[v] = weights(format, tile, u, j, v);
#pragma GCC unroll 8
                for (int r = 0; r < n; r++) {
                    vf input = every(rows.x[r * rows.inputs + at]);
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++) ADD_PRODUCT(sum[r][t][v], input, w[v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < g; t++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            vf s = {0}, m = {0};
            if (is_whole(format)) s = scale(format, heads + t * heads_apart(format), b, v);
            if (has_minimum(format)) m = minimum(format, heads + t * heads_apart(format), b, v);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                float *at = acc + r * GROUP * TILE + t * TILE + v * WIDE;
                vf all = load_f(at);
                if (is_whole(format)) {
                    vi one = whole[r][t][v];
                    if (centre_of(format)) one -= all_i(rows.centres[r * rows.blocks]);
                    all = fma_f(s, as_f(one) * every(rows.scales[r * rows.blocks]), all);
                } else
                    all += sum[r][t][v];
                if (has_minimum(format)) all = fma_f(m, every(rows.totals[r * rows.blocks]), all);
                store_f(at, all);
            }
        }
}

/* Tiles at once: enough sums that a core has one to add to while another is still being added to, and
 * no more: tiles that are read in turn are as many streams from memory. Whole numbers are added in one
 * cycle. */
INLINED int abreast(const int format, const int n) {
#ifdef PLAIN_C
    return 1;
#endif
    if (is_whole(format)) return WIDE < 16 && n <= 2 && !has_heads_apart(format) ? 2 : 1;
    if (WIDE == 16 || (WIDE == 8 && n == 1)) return 4;
    return n <= 2 ? 2 : 1;
}

/* The first tiles of each block and g more, as often as there are as many; how many that were. Of the
 * first chunk the blocks from `from` on, of each `per`. */
INLINED int64_t pass(
    const int format, const int n, const int g, Rows rows, int64_t chunks, int64_t from, int64_t per,
    int64_t tiles, int64_t first, const uint8_t *chunk, Ahead ahead, Sums sums) {
    int64_t t = first;
    if (format == HALVES) {
        float *const at = sums.at;
        for (; t + g <= tiles; t += g) {
            sums.at = at + t * TILE;
            halves(n, g, chunk + t * data_of(format), chunks, tiles, rows, ahead, sums);
        }
        return t;
    }
    for (int64_t c = 0; c < chunks; c++) {
        for (int64_t b = from; b < from + per; b++) {
            const uint8_t *data = block_of(format, chunk, tiles, b);
            const int64_t apart = tiles_apart(format, b);
            for (t = first; t + g <= tiles; t += g)
                block(format, n, g, chunk + t * heads_apart(format), b, data + t * apart, apart, rows,
                      ahead, sums.at + t * TILE);
            rows = rows_from(rows, 0, 1, length_of(format));
        }
        chunk += tiles * (head_of(format) + per * data_of(format));
    }
    return t;
}

/* `chunks` of a group of `tiles`, for n rows: `per` blocks of each from block `from` on, which are all
 * of them where there is more than one chunk. */
typedef void Pass(
    Rows rows, int64_t chunks, int64_t from, int64_t per, int64_t tiles, const uint8_t *chunk, Ahead ahead,
    Sums sums);

#define PASS(format, n) \
    static void format##_##n( \
        Rows rows, int64_t chunks, int64_t from, int64_t per, int64_t tiles, const uint8_t *chunk, \
        Ahead ahead, Sums sums) { \
        int64_t done = \
            pass(format, n, abreast(format, n), rows, chunks, from, per, tiles, 0, chunk, ahead, sums); \
        if (abreast(format, n) > 1 && done < tiles) \
            format##_rest(rows, n, chunks, from, per, tiles, done, chunk, ahead, sums); \
    }

/* Tiles that are too few for all that go abreast: row by row. */
#define REST(format) \
    static void format##_rest( \
        Rows rows, int64_t n, int64_t chunks, int64_t from, int64_t per, int64_t tiles, int64_t first, \
        const uint8_t *chunk, Ahead ahead, Sums sums) { \
        for (; n--; rows = rows_from(rows, 1, 0, 0), sums.at += sums.wide) \
            pass(format, 1, 1, rows, chunks, from, per, tiles, first, chunk, ahead, sums); \
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
