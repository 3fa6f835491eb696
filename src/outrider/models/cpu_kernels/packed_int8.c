/* Y[n, O] = X[n, I] W[O, I]^T + bias with q8_0 weights and activations rounded to 8 bits (7 where the
 * processor adds products of bytes in 16 bits), each row and block of 32 inputs by a scale of its own:
 * for many rows at once (prompts, encoders).
 *
 * A block's products are summed as whole numbers, which is exact in any order; times both scales this
 * is added to what came before by one fma, block after block. So a row does not depend on others here
 * either. Weights are laid out anew, some hundred inputs of a group at a time: `STEP` inputs of an
 * output side by side, as the processor's instruction takes them.
 */
#include "packed_linear.h"
#include "thread_pool.h"


typedef uint32_t one __attribute__((may_alias));

#if WIDE >= 8
#define STEP 4 /* bytes: activations from 0 on (ABOVE more than they are), weights with their sign */
typedef int8_t part;
#if defined(__AVX512VNNI__)
#define MOST_WHOLE 127
INLINED vi dot(vi sum, vi w, uint32_t x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
}
#elif defined(__AVXVNNI__)
#define MOST_WHOLE 127
INLINED vi dot(vi sum, vi w, uint32_t x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(x), (__m256i)w);
}
#else /* sums of two products saturate at 16 bits: activations of 7 bits stay below */
#define MOST_WHOLE 63
#if WIDE == 16
INLINED vi dot(vi sum, vi w, uint32_t x) {
    const __m512i two = _mm512_maddubs_epi16(_mm512_set1_epi32(x), (__m512i)w);
    return sum + (vi)_mm512_madd_epi16(two, _mm512_set1_epi16(1));
}
#else
INLINED vi dot(vi sum, vi w, uint32_t x) {
    const __m256i two = _mm256_maddubs_epi16(_mm256_set1_epi32(x), (__m256i)w);
    return sum + (vi)_mm256_madd_epi16(two, _mm256_set1_epi16(1));
}
#endif
#endif
#define ABOVE (MOST_WHOLE + 1)
#else
#define STEP 2 /* of 16 bits */
#define MOST_WHOLE 127
#define ABOVE 0
typedef int16_t part;
INLINED vi dot(vi sum, vi w, uint32_t x) {
    return sum + (w << 16 >> 16) * (int32_t)(int16_t)x + (w >> 16) * ((int32_t)x >> 16);
}
#endif

#if WIDE == 16
#define ROWS 6
#define SIDE 2 /* tiles */
#else
#define ROWS (WIDE == 8 ? 4 : 2)
#define SIDE 1
#endif
#define NEAR (16 * ROWS) /* rows whose sums stay near */

#define BLOCKS ((int)(16 / sizeof(part))) /* that are laid at a time: a tile of them stays in the first cache */
#define APART (BLOCKS * TILE) /* from an output to that of the next tile */

/* Some hundred inputs of a group: parts[tile][block][step][output][STEP], scales[tile][block][output],
 * and what each block's sum starts from. What a tile reads is in one piece, lest it all falls on the
 * same few lines of a cache. */
typedef struct {
    part parts[BLOCKS * GROUP * TILE * 32];
    float scales[BLOCKS * GROUP * TILE];
    int32_t starts[BLOCKS * GROUP * TILE];
} Laid;

/* The weight of input k and output o of a tile. */
INLINED int8_t of(const int8_t *data, int k, int o) { return data[(k / 2 * TILE + o) * 2 + k % 2]; }

static void lay(Laid *to, int64_t blocks, int64_t tiles, const uint8_t *weight) {
    for (int64_t b = 0; b < blocks; b++, weight += tiles * (32 + 512))
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t at = t * BLOCKS + b;
            const int8_t *from = (const int8_t *)weight + tiles * 32 + t * 512;
            part *parts = to->parts + at * TILE * 32;
            for (int v = 0; v < VECTORS; v++)
                store_f(to->scales + at * TILE + v * WIDE, halves_f(weight + 32 * t + 2 * WIDE * v));
            for (int s = 0; s < 32 / STEP; s++)
                for (int o = 0; o < TILE; o++)
                    for (int e = 0; e < STEP; e++)
                        parts[(s * TILE + o) * STEP + e] = of(from, s * STEP + e, o);
            int32_t *start = to->starts + at * TILE;
            memset(start, 0, TILE * sizeof(int32_t));
            if (ABOVE)
                for (int k = 0; k < 32; k++)
                    for (int o = 0; o < TILE; o++) start[o] -= ABOVE * of(from, k, o);
        }
}

/* A row to whole numbers, and a scale for each of its blocks. */
static void round_row(const float *x, int64_t blocks, part *to, float *scales) {
    int32_t whole[32];
    for (int64_t b = 0; b < blocks; b++, x += 32, to += 32) {
        scales[b] = rounded(x, 32, MOST_WHOLE, whole);
        for (int i = 0; i < 32; i++) to[i] = (part)(whole[i] + ABOVE);
    }
}

/* n rows and g tiles from the first on, all blocks of a slab. */
INLINED void tile(
    const int n, const int g, const Laid *w, int64_t first, int64_t blocks, const part *x, int64_t inputs,
    const float *scales, int64_t all, float *acc) {
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = (first * BLOCKS + b) * TILE;
        vi sum[ROWS][SIDE][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < n; r++)
#pragma GCC unroll 8
            for (int q = 0; q < g * VECTORS; q++)
                sum[r][q / VECTORS][q % VECTORS] =
                    load_i(w->starts + at + q / VECTORS * APART + q % VECTORS * WIDE);
#pragma GCC unroll 4
        for (int s = 0; s < 32 / STEP; s++) {
            vi some[SIDE][VECTORS];
#pragma GCC unroll 8
            for (int q = 0; q < g * VECTORS; q++)
                some[q / VECTORS][q % VECTORS] = load_i(
                    w->parts + (at + q / VECTORS * APART) * 32 + (s * TILE + q % VECTORS * WIDE) * STEP);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                const uint32_t input = *(const one *)(x + r * inputs + b * 32 + s * STEP);
#pragma GCC unroll 8
                for (int q = 0; q < g * VECTORS; q++)
                    sum[r][q / VECTORS][q % VECTORS] =
                        dot(sum[r][q / VECTORS][q % VECTORS], some[q / VECTORS][q % VECTORS], input);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < g * VECTORS; q++) {
            const int64_t o = q / VECTORS * TILE + q % VECTORS * WIDE;
            vf s = load_f(w->scales + at + q / VECTORS * APART + q % VECTORS * WIDE);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                float *to = acc + r * GROUP * TILE + o;
                vf both = s * every(scales[r * all + b]);
                store_f(to, fma_f(as_f(sum[r][q / VECTORS][q % VECTORS]), both, load_f(to)));
            }
        }
    }
}

INLINED int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* What a call is given, with activations as they were rounded. */
typedef struct {
    int64_t rows, inputs, outputs, wide;
    const part *x;
    const float *scales, *bias;
    float *y;
} Product;

/* Rows of a group's tiles, blocks from `done` on: some rows at a time, of them tile by tile, so that what
 * a tile holds stays in the first cache. */
static void rows_of(const Product *p, const Laid *w, int64_t done, int64_t blocks, int64_t tiles, int64_t at) {
    const int64_t all = p->inputs / 32, count = least(GROUP * TILE, p->outputs - at);
    const int last = done + blocks == all && p->bias;
    _Alignas(64) float acc[NEAR * GROUP * TILE];
    for (int64_t first = 0, some; first < p->rows; first += some) {
        some = least(NEAR, p->rows - first);
        const part *x = p->x + first * p->inputs + done * 32;
        const float *scales = p->scales + first * all + done;
        float *y = p->y + first * p->wide + at;
        memset(acc, 0, some * GROUP * TILE * sizeof(float));
        if (done)
            for (int64_t r = 0; r < some; r++)
                memcpy(acc + r * GROUP * TILE, y + r * p->wide, count * sizeof(float));
        for (int64_t t = 0; t < tiles; t += SIDE) {
            float *to = acc + t * TILE;
            int64_t r = 0;
            for (; r + ROWS <= some; r += ROWS)
                tile(ROWS, SIDE, w, t, blocks, x + r * p->inputs, p->inputs, scales + r * all, all,
                     to + r * GROUP * TILE);
            for (; r < some; r++)
                tile(1, SIDE, w, t, blocks, x + r * p->inputs, p->inputs, scales + r * all, all,
                     to + r * GROUP * TILE);
        }
        for (int64_t r = 0; r < some; r++) {
            float *to = y + r * p->wide, *from = acc + r * GROUP * TILE;
            if (last)
                for (int64_t o = 0; o < count; o++) from[o] += p->bias[at + o];
            memcpy(to, from, count * sizeof(float));
        }
    }
}

static void group(const Product *p, int64_t tiles, int64_t at, const uint8_t *weight) {
    _Alignas(64) Laid laid;
    const int64_t all = p->inputs / 32;
    if (tiles % SIDE) memset(&laid, 0, sizeof(laid));
    for (int64_t done = 0, blocks; done < all; done += blocks) {
        blocks = least(BLOCKS, all - done);
        lay(&laid, blocks, tiles, weight + done * tiles * (32 + 512));
        rows_of(p, &laid, done, blocks, tiles, at);
    }
}

/* What pieces are made from: rows to be rounded, then groups of weights; `each` of them a piece. */
typedef struct {
    const Product *product;
    const float *x;
    const uint8_t *weight;
    part *near;
    float *scales;
    int64_t each;
} Call;

static void rounded_rows(void *about, int64_t piece, int64_t thread) {
    const Call *of = about;
    const int64_t inputs = of->product->inputs, blocks = inputs / 32;
    (void)thread;
    for (int64_t r = piece * of->each; r < least((piece + 1) * of->each, of->product->rows); r++)
        round_row(of->x + r * inputs, blocks, of->near + r * inputs, of->scales + r * blocks);
}

static void groups(void *about, int64_t piece, int64_t thread) {
    const Call *of = about;
    const int64_t tiles = (of->product->outputs + TILE - 1) / TILE, size = of->product->inputs / 32 * (32 + 512);
    const int64_t first = piece * of->each * GROUP, last = least(first + of->each * GROUP, tiles);
    (void)thread;
    for (int64_t t = first; t < last; t += GROUP)
        group(of->product, least(GROUP, tiles - t), t * TILE, of->weight + t * size);
}

/* rows of x [rows, inputs] times q8_0 weights; rows of y are `wide` apart. Not 0: there is no memory. */
int outrider_packed_int8(
    int64_t rows, int64_t inputs, int64_t outputs, int64_t wide, int64_t threads, const float *x,
    const uint8_t *weight, const float *bias, float *y) {
    const int64_t blocks = inputs / 32, all = (outputs + TILE * GROUP - 1) / (TILE * GROUP);
    part *near = malloc(rows * inputs * sizeof(part) + 1);
    float *scales = malloc(rows * blocks * sizeof(float) + 1);
    const int none = !near || !scales;
    if (!none) {
        const Product p = {rows, inputs, outputs, wide, near, scales, bias, y};
        Call of = {&p, x, weight, near, scales, units_of_piece(rows, threads)};
        outrider_share(threads, (rows + of.each - 1) / of.each, rounded_rows, &of);
        of.each = units_of_piece(all, threads);
        outrider_share(threads, (all + of.each - 1) / of.each, groups, &of);
    }
    free(near);
    free(scales);
    return none;
}
