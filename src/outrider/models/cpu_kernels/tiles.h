/* Products of tiles (Intel's AMX) that linear layers and attention are made of.
 *
 * Every number of an answer is one sum in float32 over the inputs in their order, 32 at a time.
 */
#pragma once
#include "lanes.h"

#define TILE 16  /* rows that a tile holds, and outputs */
#define STEP 32  /* inputs that it holds */
#define GROUP 32 /* outputs of two tiles */
#define BLOCK 64 /* outputs of four */
#define WIDE 128 /* outputs that many rows are multiplied with at once, */
#define DEEP 1024 /* by so many inputs at once, or up to twice as many if there are no more, */
#define TALL 512 /* and so many rows */
#define PAIR (GROUP * STEP)
#define AHEAD 128 /* lines of memory from what is used to what is fetched */

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__) && \
    defined(__AVX512BW__) && defined(__AVX512VL__)
typedef struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

/* GCC believes that eight bytes are read, and may leave out the others. */
static inline void configured(const Config *config) {
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
}

/* GCC believes that loading a tile reads nothing: what is written before is to be written. */
static inline void written(void) { __asm__ volatile("" : : : "memory"); }

/* Tiles 0 to 3 are sums [16, R], 4 holds R rows, others `outputs` outputs; with `more` rows 2 and 3
 * are sums of these, which 7 holds. */
static void for_few(int rows, int more, int outputs) {
    Config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        const int others = more && (t == 2 || t == 3 || t == 7), weights = t > 4 && !others;
        config.bytes[t] = weights ? STEP * sizeof(half) : (others ? more : rows) * sizeof(float);
        config.rows[t] = t == 4 || (others && t == 7) ? TILE : outputs;
    }
    configured(&config);
}

/* All tiles are full. */
static void for_many(void) { for_few(TILE, 0, TILE); }

static inline void cleared(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static inline void kept(float sums[4][TILE * TILE], int64_t upper, int64_t lower) {
    _tile_stored(0, sums[0], upper * sizeof(float));
    _tile_stored(1, sums[1], upper * sizeof(float));
    _tile_stored(2, sums[2], lower * sizeof(float));
    _tile_stored(3, sums[3], lower * sizeof(float));
}

/* What `outputs` rows of weights need some steps later, in the next such rows at their end. */
static inline void fetched(const half *weight, int64_t at, int64_t inputs, int outputs) {
    const int64_t ahead = AHEAD / outputs * STEP;
    const half *next = weight + ahead + (at + ahead < inputs ? 0 : (outputs - 1) * inputs);
#pragma GCC unroll 16
    for (int o = 0; o < outputs; o++) __builtin_prefetch(next + o * inputs);
}

/* The weights of a block by up to 16 rows: the weights are the first factor, as they lie. A call of
 * so few rows takes the time that its weights take to be read. */
static void few_rows(
    const half *x, int64_t rows, int64_t inputs, const half *weight, float sums[4][TILE * TILE]) {
    const int64_t wide = inputs * sizeof(half), narrow = rows * sizeof(float), down = TILE * inputs;
    cleared();
    for (int64_t i = 0; i < inputs; i += STEP, weight += STEP, x += STEP * rows) {
        fetched(weight, i, inputs, BLOCK);
        _tile_loadd(4, x, narrow);
        _tile_loadd(5, weight, wide);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, weight + down, wide);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(7, weight + 2 * down, wide);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, weight + 3 * down, wide);
        _tile_dpbf16ps(3, 5, 4);
    }
    kept(sums, rows, rows);
}

/* The weights of a group by 17 to 32 rows, sixteen of them in `x`. */
static void some_rows(
    const half *x, const half *below, int64_t more, int64_t inputs, const half *weight,
    float sums[4][TILE * TILE]) {
    const int64_t wide = inputs * sizeof(half);
    cleared();
    for (int64_t i = 0; i < inputs; i += STEP, weight += STEP) {
        fetched(weight, i, inputs, GROUP);
        _tile_loadd(4, x + i * TILE, TILE * sizeof(float));
        _tile_loadd(5, weight, wide);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, weight + TILE * inputs, wide);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(7, below + i * more, more * sizeof(float));
        _tile_dpbf16ps(2, 5, 7);
        _tile_dpbf16ps(3, 6, 7);
    }
    kept(sums, TILE, more);
}

/* The same of one tile of weights by up to 16 rows. */
static void few_outputs(
    const half *x, int64_t rows, int64_t inputs, const half *weight, float sums[TILE * TILE]) {
    _tile_zero(0);
    for (int64_t i = 0; i < inputs; i += STEP, x += STEP * rows) {
        _tile_loadd(4, x, rows * sizeof(float));
        _tile_loadd(5, weight + i, inputs * sizeof(half));
        _tile_dpbf16ps(0, 5, 4);
    }
    _tile_stored(0, sums, rows * sizeof(float));
}

/* 32 rows by one group, both laid: what `inputs` of them add to the sums, or begin. */
static void tiled(
    const half *x, const half *below, int64_t inputs, const half *laid, int begins, float *sums) {
    const int64_t wide = STEP * sizeof(half);
    if (begins) {
        cleared();
    } else {
        _tile_loadd(0, sums, wide);
        _tile_loadd(1, sums + TILE * TILE, wide);
        _tile_loadd(2, sums + 2 * TILE * TILE, wide);
        _tile_loadd(3, sums + 3 * TILE * TILE, wide);
    }
    for (int64_t i = 0; i < inputs; i += STEP, laid += PAIR, x += PAIR / 2, below += PAIR / 2) {
        _tile_loadd(6, laid, wide);
        _tile_loadd(4, x, wide);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, laid + PAIR / 2, wide);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below, wide);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    kept((float(*)[TILE * TILE])sums, TILE, TILE);
}

/* Pairs of inputs, next to each other those of all rows: [R, I / 2] -> [I / 2, R]. */
static void crossed_pairs(const uint32_t *x, int64_t rows, int64_t pairs, uint32_t *out) {
    for (int64_t i = 0; i < pairs; i++)
        for (int64_t r = 0; r < rows; r++) out[i * rows + r] = x[r * pairs + i];
}

/* Sixteen rows of sixteen pairs as columns. */
static inline __attribute__((always_inline)) void crossed(__m512i a[TILE], half *to) {
    __m512i b[TILE];
#pragma GCC unroll 8
    for (int o = 0; o < TILE; o += 2) {
        b[o] = _mm512_unpacklo_epi32(a[o], a[o + 1]);
        b[o + 1] = _mm512_unpackhi_epi32(a[o], a[o + 1]);
    }
#pragma GCC unroll 4
    for (int o = 0; o < TILE; o += 4) {
        a[o] = _mm512_unpacklo_epi64(b[o], b[o + 2]);
        a[o + 1] = _mm512_unpackhi_epi64(b[o], b[o + 2]);
        a[o + 2] = _mm512_unpacklo_epi64(b[o + 1], b[o + 3]);
        a[o + 3] = _mm512_unpackhi_epi64(b[o + 1], b[o + 3]);
    }
#pragma GCC unroll 4
    for (int o = 0; o < 4; o++) {
        b[o] = _mm512_shuffle_i32x4(a[o], a[o + 4], 0x88);
        b[o + 4] = _mm512_shuffle_i32x4(a[o], a[o + 4], 0xdd);
        b[o + 8] = _mm512_shuffle_i32x4(a[o + 8], a[o + 12], 0x88);
        b[o + 12] = _mm512_shuffle_i32x4(a[o + 8], a[o + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int o = 0; o < TILE / 2; o++) {
        _mm512_store_si512(to + o * STEP, _mm512_shuffle_i32x4(b[o], b[o + 8], 0x88));
        _mm512_store_si512(to + (o + 8) * STEP, _mm512_shuffle_i32x4(b[o], b[o + 8], 0xdd));
    }
}
#define WITH_TILES
#endif
