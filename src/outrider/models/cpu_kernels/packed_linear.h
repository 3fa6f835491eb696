/* Tiles of packed weights (`packed_tiles.h`), widened in registers and multiplied with up to six rows:
 * what each format's `Pass` does. Formats are compiled apart (`packed_dense.c` and those beside it), and
 * `packed_linear.c` says in which order a row is summed.
 */
#pragma once

#include "packed_tiles.h"

#ifdef PLAIN_C
#define MOST 1
#else
#define MOST 6 /* rows that one pass over the weights serves */
#endif
#define VECTORS (TILE / WIDE)
#define AHEAD 4096 /* bytes from what is used to what is fetched: a group's chunk, at least */

INLINED vi moved(vi x, const int left) { return left < 0 ? x >> -left : x << left; }

/* Weights of vector v of a tile, for input j of a unit. */
INLINED vf weights(const int format, const uint8_t *unit, const int j, const int v) {
    const uint8_t *four = unit + 4 * WIDE * v;
    switch (format) {
        case BF16: return j ? (vf)(load_i(four) & (int32_t)0xffff0000) : (vf)(load_i(four) << 16);
        case F16: return halves_f(unit + 32 * j + 2 * WIDE * v);
        default: return load_f(unit + 64 * j + 4 * WIDE * v);
    }
}

/* Whole numbers of vector v of a tile, for inputs 2 p and 2 p + 1 of unit u, of 16 bits each: from
 * words of eight numbers of 4 bits those of which the lower ones are all 2 p, the upper 2 p + 1. A unit
 * of q6_k is two such words, and one of sixteen numbers' upper 2 bits. */
INLINED vi pairs(const int format, const uint8_t *data, const int u, const int p, const int v) {
    const uint8_t *four = data + 64 * u + 4 * WIDE * v;
    switch (format) {
        case Q8_0: return byte_pairs(data + 64 * u + 32 * p + 2 * WIDE * v);
        case WHOLE: case WHOLE_MINIMUM: case WHOLE_16:
            return load_i(data + 128 * u + 64 * p + 4 * WIDE * v);
        case Q5_0: case Q5_1: case Q5_K: {
            vi high = ubytes_i(data + 256 + 16 * u + WIDE * v);
            high |= high << 12; /* of the upper four 16 bits from the lower four */
            return (load_i(four) >> (4 * p) & 0x000f000f) | (moved(high, 4 - p) & 0x00100010);
        }
        case Q6_K: {
            const vi low = load_i(four + 64 * (p / 4)), high = load_i(data + 128 + 4 * WIDE * v);
            return (low >> (4 * (p % 4)) & 0x000f000f) | (moved(high, 4 - 2 * p) & 0x00300030);
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
        case WHOLE: case WHOLE_MINIMUM: case WHOLE_16:
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
        case WHOLE_MINIMUM: return load_f(head + 64 + 4 * WIDE * v);
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

/* Whether the numbers of g tiles abreast are all that is read, in the order in which it lies: then a
 * processor fetches ahead by itself, and is slower where it is told to as well. */
INLINED int in_order(const int format, const int g) { return !is_whole(format) && g == beside(format); }

/* `blocks` blocks of g tiles of a group of `tiles`, in products of two bfloat16 numbers, for n rows: sums
 * stay in registers. A tile's units are `step` apart; `here` is what is fetched ahead from. */
INLINED void halves(
    const int n, const int g, const uint8_t *data, const uint8_t *here, int64_t blocks, int64_t tiles,
    int64_t step, Rows rows, Ahead ahead, Sums sums) {
    const int64_t next = tiles * data_of(HALVES);
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
    for (int64_t b = 0; b < blocks; b++, data += next, here += next)
#pragma GCC unroll 1
        for (int u = 0; u < length_of(HALVES) / 2; u++, at += 2) {
            if (!in_order(HALVES, g)) fetch_ahead(HALVES, ahead, here + 64 * u * g, g);
            vi w[GROUP][VECTORS];
#pragma GCC unroll 8
            for (int t = 0; t < g; t++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++)
                    w[t][v] = load_i(data + tile_at(HALVES, 0, t) + u * step + 4 * WIDE * v);
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

/* Block b of g tiles, whose units are `step` apart, for n rows, added to acc[n][GROUP * TILE]. `here` is
 * what is fetched ahead from. */
INLINED void block(
    const int format, const int n, const int g, const uint8_t *heads, int64_t b, const uint8_t *data,
    const uint8_t *here, int64_t step, Rows rows, Ahead ahead, float *acc) {
    const int lines = bytes_of_unit(format) / 64;
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
        if (!in_order(format, g)) fetch_ahead(format, ahead, here + 64 * u * g * lines, g * lines);
#pragma GCC unroll 32
        for (int q = 0; q < unit_of(format) / at_once * g; q++) {
            const int j = q / g, t = q % g, at = u * unit_of(format) + j * at_once;
            const uint8_t *tile = data + tile_at(format, b, t);
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
                for (int v = 0; v < VECTORS; v++) w[v] = weights(format, tile + u * step, j, v);
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
 * no more: what is read in turn and does not lie so is as many streams from memory. Whole numbers are
 * added in one cycle. */
INLINED int abreast(const int format, const int n) {
#ifdef PLAIN_C
    return 1;
#endif
    if (is_whole(format)) return WIDE < 16 && n <= 2 && data_of(format) < 512 && !has_heads_apart(format) ? 2 : 1;
    return WIDE == 16 || n <= 2 ? beside(format) : 1;
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
            halves(n, g, chunk + tile_at(format, 0, t), chunk + t * data_of(format), chunks, tiles,
                   units_apart(format, t, tiles), rows, ahead, sums);
        }
        return t;
    }
    for (int64_t c = 0; c < chunks; c++) {
        for (int64_t b = from; b < from + per; b++) {
            const uint8_t *data = block_of(format, chunk, tiles, b);
            for (t = first; t + g <= tiles; t += g)
                block(format, n, g, chunk + t * heads_apart(format), b, data + tile_at(format, b, t),
                      data + t * tiles_apart(format, b), units_apart(format, t, tiles), rows, ahead,
                      sums.at + t * TILE);
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
