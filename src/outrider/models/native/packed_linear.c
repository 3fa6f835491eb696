/* Y[n, O] = X[n, I] W[O, I]^T + bias: activations and sums are float32, weights stay in the type
 * that they came in, and each row is one sum in one order whatever stands beside it.
 *
 * Weights lie in tiles of 16 outputs and one block of inputs (32, or 16 of q6_k); four tiles side by
 * side are a group, and what a call reads is in one piece: group by group, in it chunk by chunk of
 * inputs (256 of K formats, else 32), of each first what scales its tiles, then the tiles.
 * `packed_linear.py` lays them so.
 *
 * The order: a block's products are added by one fma each to a sum that starts from 0, this is
 * multiplied by the block's scale and added to what came before by one fma (without a scale: added),
 * and so is a block's minimum times the total of its inputs. Few rows: a weight is widened in registers
 * for all of them. More: the tiles of a group and some hundred inputs are widened to float32 once,
 * and the same code reads those.
 */
#include <stdlib.h>

#include "packed_vectors.h"

#define TILE 16  /* outputs */
#define GROUP 4  /* tiles */
#define MOST 6   /* rows that one pass over the weights serves */
#define SLAB 256 /* inputs that are widened at once */
#define VECTORS (TILE / WIDE)
#define AHEAD 2048 /* bytes from what is used to what is fetched */

enum { F32, BF16, F16, Q8_0, Q4_0, Q4_1, SCALED, SHIFTED };

/* What a format's chunk is made of. SCALED and SHIFTED are float32 with a scale, and with a minimum. */
INLINED int length_of(const int format) { return 32 + 0 * format; }
INLINED int blocks_of(const int format) { return 1 + 0 * format; }
INLINED int has_scale(const int format) { return format >= Q8_0; }
INLINED int has_minimum(const int format) { return format == Q4_1 || format == SHIFTED; }

INLINED int64_t head_of(const int format) {
    switch (format) {
        case Q8_0: case Q4_0: return 32;
        case Q4_1: return 64;
        case SCALED: return 64;
        case SHIFTED: return 128;
        default: return 0;
    }
}

INLINED int64_t data_of(const int format) {
    switch (format) {
        case BF16: case F16: return 1024;
        case Q8_0: return 512;
        case Q4_0: case Q4_1: return 256;
        default: return 2048;
    }
}

/* Inputs that are widened without a loop. */
INLINED int unit_of(const int format) {
    switch (format) {
        case BF16: return 2;
        case Q4_0: case Q4_1: return 8;
        default: return 4;
    }
}

/* Weights of vector v of a tile, for input j of unit u. */
INLINED vf weights(const int format, const uint8_t *data, const int u, const int j, const int v) {
    const uint8_t *four = data + 64 * u + 4 * WIDE * v;
    switch (format) {
        case BF16: return j ? (vf)(load_i(four) & (int32_t)0xffff0000) : (vf)(load_i(four) << 16);
        case F16: return halves_f(data + 32 * (4 * u + j) + 2 * WIDE * v);
        case Q8_0: return as_f(bytes_i(data + 16 * (4 * u + j) + WIDE * v));
        case Q4_0: return as_f(load_i(four) << (28 - 4 * j) >> 28);
        case Q4_1: return as_f(load_i(four) >> (4 * j) & 15);
        default: return load_f(data + 64 * (4 * u + j) + 4 * WIDE * v);
    }
}

INLINED vf scale(const int format, const uint8_t *head, const int v) {
    if (format >= SCALED) return load_f(head + 4 * WIDE * v);
    return halves_f(head + 2 * WIDE * v);
}

INLINED vf minimum(const int format, const uint8_t *head, const int v) {
    if (format == SHIFTED) return load_f(head + 64 + 4 * WIDE * v);
    return halves_f(head + 32 + 2 * WIDE * v);
}

/* A block of g tiles beside each other, for n rows, added to acc[n][GROUP * TILE]. */
INLINED void block(
    const int format, const int n, const int g, const uint8_t *heads, const uint8_t *data,
    const float *x, int64_t inputs, const float *totals, int64_t blocks, float *acc) {
    vf sum[MOST][GROUP][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
#pragma GCC unroll 8
        for (int t = 0; t < g; t++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sum[r][t][v] = (vf){0};
#pragma GCC unroll 1
    for (int u = 0; u < length_of(format) / unit_of(format); u++) {
#pragma GCC unroll 8
        for (int t = 0; t < g; t++) fetch(data + t * data_of(format) + 64 * u + AHEAD);
#pragma GCC unroll 8
        for (int j = 0; j < unit_of(format); j++)
#pragma GCC unroll 8
            for (int t = 0; t < g; t++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    vf w = weights(format, data + t * data_of(format), u, j, v);
#pragma GCC unroll 8
                    for (int r = 0; r < n; r++)
                        sum[r][t][v] = fma_f(every(x[r * inputs + unit_of(format) * u + j]), w, sum[r][t][v]);
                }
    }
#pragma GCC unroll 8
    for (int t = 0; t < g; t++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            vf s = {0}, m = {0};
            if (has_scale(format)) s = scale(format, heads + t * head_of(format), v);
            if (has_minimum(format)) m = minimum(format, heads + t * head_of(format), v);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                float *at = acc + r * GROUP * TILE + t * TILE + v * WIDE;
                vf all = load_f(at);
                all = has_scale(format) ? fma_f(s, sum[r][t][v], all) : all + sum[r][t][v];
                if (has_minimum(format)) all = fma_f(m, every(totals[r * blocks]), all);
                store_f(at, all);
            }
        }
}

/* Blocks in a row of x, and where its numbers and its totals are. */
typedef struct {
    const float *x, *totals;
    int64_t inputs, blocks;
} Rows;

/* `chunks` of a group of `tiles`, for n rows. */
INLINED void pass(
    const int format, const int n, const int g, Rows rows, int64_t chunks, int64_t tiles,
    const uint8_t *weight, float *acc) {
    const int length = length_of(format);
    for (int64_t c = 0; c < chunks; c++) {
        const uint8_t *data = weight + tiles * head_of(format);
        int64_t t = 0;
        for (; t + g <= tiles; t += g)
            block(format, n, g, weight + t * head_of(format), data + t * data_of(format),
                  rows.x + c * length, rows.inputs, rows.totals + c, rows.blocks, acc + t * TILE);
        for (; g > 1 && t < tiles; t++)
            block(format, n, 1, weight + t * head_of(format), data + t * data_of(format),
                  rows.x + c * length, rows.inputs, rows.totals + c, rows.blocks, acc + t * TILE);
        weight = data + tiles * data_of(format);
    }
}

/* Tiles at once: enough sums for a core to add to while one is still being added to. */
#if WIDE == 8
#define ABREAST(n) ((n) == 1 ? 4 : (n) <= 3 ? 2 : 1)
#elif WIDE == 16
#define ABREAST(n) 4
#else
#define ABREAST(n) ((n) <= 2 ? 2 : 1)
#endif

typedef void Pass(Rows rows, int64_t chunks, int64_t tiles, const uint8_t *weight, float *acc);

#define ONE(format, n) \
    static void format##_##n( \
        Rows rows, int64_t chunks, int64_t tiles, const uint8_t *weight, float *acc) { \
        pass(format, n, ABREAST(n), rows, chunks, tiles, weight, acc); \
    }
#define ALL(format) \
    ONE(format, 1) ONE(format, 2) ONE(format, 3) ONE(format, 4) ONE(format, 5) ONE(format, 6)
#define NAMES(format) \
    { format##_1, format##_2, format##_3, format##_4, format##_5, format##_6 }

ALL(F32) ALL(BF16) ALL(F16) ALL(Q8_0) ALL(Q4_0) ALL(Q4_1) ALL(SCALED) ALL(SHIFTED)

static Pass *const PASSES[][MOST] = {
    [F32] = NAMES(F32), [BF16] = NAMES(BF16), [F16] = NAMES(F16), [Q8_0] = NAMES(Q8_0),
    [Q4_0] = NAMES(Q4_0), [Q4_1] = NAMES(Q4_1), [SCALED] = NAMES(SCALED), [SHIFTED] = NAMES(SHIFTED),
};

/* The format that a widened block is in. */
INLINED int widened(const int format) {
    return has_minimum(format) ? SHIFTED : has_scale(format) ? SCALED : F32;
}

INLINED void widen(const int format, int64_t chunks, int64_t tiles, const uint8_t *weight, float *to) {
    const int kind = widened(format);
    for (int64_t c = 0; c < chunks; c++) {
        const uint8_t *data = weight + tiles * head_of(format);
        float *heads = to, *wide = to + tiles * head_of(kind) / 4;
        for (int64_t t = 0; t < tiles; t++) {
            const uint8_t *head = weight + t * head_of(format), *tile = data + t * data_of(format);
            for (int v = 0; v < VECTORS; v++) {
                float *h = heads + t * head_of(kind) / 4 + v * WIDE;
                if (has_scale(format)) store_f(h, scale(format, head, v));
                if (has_minimum(format)) store_f(h + TILE, minimum(format, head, v));
            }
#pragma GCC unroll 1
            for (int u = 0; u < length_of(format) / unit_of(format); u++)
#pragma GCC unroll 8
                for (int j = 0; j < unit_of(format); j++)
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++)
                        store_f(
                            wide + t * data_of(kind) / 4 + (u * unit_of(format) + j) * TILE + v * WIDE,
                            weights(format, tile, u, j, v));
        }
        weight = data + tiles * data_of(format);
        to = wide + tiles * data_of(kind) / 4;
    }
}

#define WIDENED(format) \
    case format: widen(format, chunks, tiles, weight, to); break;

static void widen_any(int64_t format, int64_t chunks, int64_t tiles, const uint8_t *weight, float *to) {
    switch (format) {
        WIDENED(BF16) WIDENED(F16) WIDENED(Q8_0) WIDENED(Q4_0) WIDENED(Q4_1)
    }
}

/* Totals of the blocks of a row, each in one order. */
static void total(const float *x, int64_t count, int length, float *to) {
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    for (int64_t i = 0; i < count; i++, x += length) {
        four sum = *(const four *)x;
        for (int e = 4; e < length; e += 4) sum += *(const four *)(x + e);
        to[i] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    }
}

/* What a call is given. */
typedef struct {
    int64_t format, inputs, outputs, wide, chunks;
    const uint8_t *weight;
    const float *bias;
    float *y;
} Product;

INLINED int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Sums of a group to rows of y, or from there. */
static void put(const Product *p, int64_t n, int64_t at, const float *acc, float *y, int last) {
    int64_t count = least(GROUP * TILE, p->outputs - at);
    for (int64_t r = 0; r < n; r++, y += p->wide, acc += GROUP * TILE)
        if (last && p->bias)
            for (int64_t o = 0; o < count; o++) y[at + o] = acc[o] + p->bias[at + o];
        else
            memcpy(y + at, acc, count * sizeof(float));
}

static void get(const Product *p, int64_t n, int64_t at, float *acc, const float *y, int first) {
    int64_t count = least(GROUP * TILE, p->outputs - at);
    if (first)
        memset(acc, 0, n * GROUP * TILE * sizeof(float));
    else
        for (int64_t r = 0; r < n; r++) memcpy(acc + r * GROUP * TILE, y + r * p->wide + at, count * sizeof(float));
}

/* Rows of the next pass: parts of one size rather than one that is small. */
INLINED int64_t part(int64_t left) { return left >= 2 * MOST || left <= MOST ? least(left, MOST) : (left + 1) / 2; }

static void few(const Product *p, Rows rows, int64_t n, int64_t at, int64_t tiles, const uint8_t *weight) {
    _Alignas(64) float acc[MOST * GROUP * TILE];
    get(p, n, at, acc, p->y, 1);
    PASSES[p->format][n - 1](rows, p->chunks, tiles, weight, acc);
    put(p, n, at, acc, p->y, 1);
}

static void many(
    const Product *p, Rows rows, int64_t n, int64_t at, int64_t tiles, const uint8_t *weight) {
    _Alignas(64) float acc[MOST * GROUP * TILE];
    _Alignas(64) float slab[SLAB * GROUP * TILE + SLAB / 32 * GROUP * 32];
    const int format = p->format, kind = widened(format), length = length_of(format);
    const int64_t most = SLAB / length, size = tiles * (head_of(format) + data_of(format));
    for (int64_t c = 0; c < p->chunks; c += most) {
        const int64_t chunks = least(most, p->chunks - c), last = c + chunks == p->chunks;
        const uint8_t *wide = (const uint8_t *)slab;
        if (format == F32)
            wide = weight;
        else
            widen_any(format, chunks, tiles, weight, slab);
        for (int64_t r = 0, m; r < n; r += m) {
            float *y = p->y + r * p->wide;
            Rows these = {
                rows.x + r * rows.inputs + c * length, rows.totals + r * rows.blocks + c, rows.inputs,
                rows.blocks};
            m = part(n - r);
            get(p, m, at, acc, y, c == 0);
            PASSES[kind][m - 1](these, chunks, tiles, wide, acc);
            put(p, m, at, acc, y, last);
        }
        weight += chunks * size;
    }
}

/* rows of x [rows, inputs], inputs of whole blocks (what is missing is 0), times weights in a format;
 * rows of y are `wide` apart. Not 0: there is no memory. */
int outrider_packed_linear(
    int64_t format, int64_t rows, int64_t inputs, int64_t outputs, int64_t wide, int64_t threads,
    const float *x, const uint8_t *weight, const float *bias, float *y) {
    const int64_t chunks = inputs / length_of(format), tiles = (outputs + TILE - 1) / TILE;
    const int64_t size = chunks * (head_of(format) + data_of(format));
    const Product p = {format, inputs, outputs, wide, chunks, weight, bias, y};
    Rows all = {x, x, inputs, chunks};
    float *totals = NULL;
    if (has_minimum(format)) {
        totals = malloc(rows * chunks * sizeof(float));
        if (!totals) return 1;
        for (int64_t r = 0; r < rows; r++)
            total(x + r * inputs, chunks, length_of(format), totals + r * chunks);
        all.totals = totals;
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * inputs * outputs > 1 << 18)
    for (int64_t t = 0; t < tiles; t += GROUP)
        (rows <= MOST ? few : many)(&p, all, rows, t * TILE, least(GROUP, tiles - t), weight + t * size);
    free(totals);
    return 0;
}

/* Weights of some outputs as float32 [count, inputs], inputs of whole blocks. */
int outrider_packed_rows(
    int64_t format, int64_t count, int64_t inputs, int64_t outputs, const int64_t *ids,
    const uint8_t *weight, float *out) {
    const int64_t chunks = inputs / length_of(format), tiles = (outputs + TILE - 1) / TILE;
    const int64_t head = head_of(format), data = data_of(format);
    const int unit = unit_of(format);
    for (int64_t i = 0; i < count; i++) {
        const int64_t tile = ids[i] / TILE, first = tile / GROUP * GROUP, lane = ids[i] % TILE;
        const int64_t beside = least(GROUP, tiles - first);
        const int v = lane / WIDE;
        const uint8_t *at = weight + first * chunks * (head + data);
        for (int64_t c = 0; c < chunks; c++, at += beside * (head + data)) {
            const uint8_t *h = at + (tile - first) * head;
            const uint8_t *d = at + beside * head + (tile - first) * data;
            const float s = has_scale(format) ? scale(format, h, v)[lane % WIDE] : 1.0f;
            const float m = has_minimum(format) ? minimum(format, h, v)[lane % WIDE] : 0.0f;
            for (int k = 0; k < length_of(format); k++) {
                const float w = weights(format, d, k / unit, k % unit, v)[lane % WIDE];
                *out++ = has_minimum(format) ? s * w + m : has_scale(format) ? s * w : w;
            }
        }
    }
    return 0;
}
