/* Products with bfloat16 weights on processors that have tiles (Intel's AMX).
 *
 * Every number of the answer is one sum in float32 over the inputs in their order, 32 at a time,
 * whatever stands beside it: so a row has the same bits in calls of any number of rows.
 *
 * Shapes: R rows, I inputs in whole steps, O outputs; weights [O' / 32, I / 32, 2, 16, 16, 2] and
 * bias [O'], with O' in whole groups.
 */
#include "lanes.h"

#define TILE 16  /* rows that a tile holds, and outputs */
#define STEP 32  /* inputs that it holds */
#define GROUP 32 /* outputs of two tiles, side by side */
#define PAIR (GROUP * STEP)
#define AHEAD (8 * PAIR) /* numbers from what is used to what is fetched */

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST 0x1023 /* of arch_prctl(2): leave to use a feature, */
#define TILES 18       /* which is this one */

typedef struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

/* Tiles of the set `upper` hold `few` rows, those of `lower` `more`, all others sixteen. */
static void configured(int upper, int few, int lower, int more) {
    Config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.bytes[t] = STEP * sizeof(half);
        config.rows[t] = upper >> t & 1 ? few : lower >> t & 1 ? more : TILE;
    }
    _tile_loadconfig(&config);
}

static inline void fetched(const half *weight) {
#pragma GCC unroll 32
    for (int i = 0; i < PAIR; i += 32) __builtin_prefetch(weight + i);
}

static inline void cleared(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static inline void kept(float sums[4][TILE * TILE]) {
    _tile_stored(0, sums[0], TILE * sizeof(float));
    _tile_stored(1, sums[1], TILE * sizeof(float));
    _tile_stored(2, sums[2], TILE * sizeof(float));
    _tile_stored(3, sums[3], TILE * sizeof(float));
}

/* Up to 16 rows by two groups: a call of so few takes the time that its weights take to be read. */
static void few_rows(
    const half *x, int64_t inputs, const half *weight, const half *next, float sums[4][TILE * TILE]) {
    const int64_t wide = STEP * sizeof(half);
    cleared();
    for (int64_t i = 0; i < inputs; i += STEP, weight += PAIR, next += PAIR) {
        fetched(weight + AHEAD);
        fetched(next + AHEAD);
        _tile_loadd(4, x + i, inputs * sizeof(half));
        _tile_loadd(5, weight, wide);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, weight + PAIR / 2, wide);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, next, wide);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, next + PAIR / 2, wide);
        _tile_dpbf16ps(3, 4, 5);
    }
    kept(sums);
}

/* Twice up to 16 rows by one group. */
static void more_rows(
    const half *x, const half *below, int64_t inputs, const half *weight, int first,
    float sums[4][TILE * TILE]) {
    const int64_t wide = STEP * sizeof(half);
    cleared();
    for (int64_t i = 0; i < inputs; i += STEP, weight += PAIR) {
        if (first) fetched(weight + AHEAD);
        _tile_loadd(6, weight, wide);
        _tile_loadd(4, x + i, inputs * sizeof(half));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + PAIR / 2, wide);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below + i, inputs * sizeof(half));
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    kept(sums);
}

/* Where an answer goes: [R, O] in half precision or float32. */
typedef struct {
    void *at;
    int64_t outputs, is_half;
} Out;

/* Rows of one group of the answer, from row `r` and output `o` on. */
static inline void told(
    const Out *out, int64_t r, int64_t o, int64_t rows, const float *left, const float *right,
    const float *bias) {
    const __m512 low = _mm512_loadu_ps(bias + o), high = _mm512_loadu_ps(bias + o + TILE);
    const int64_t there = out->outputs - o;
    const __mmask32 wanted = there < GROUP ? (1u << there) - 1 : -1;
    for (const int64_t stop = r + rows; r < stop; r++, left += TILE, right += TILE) {
        const __m512 x = _mm512_load_ps(left) + low, y = _mm512_load_ps(right) + high;
        const int64_t to = r * out->outputs + o;
        if (out->is_half) {
            const __m512i near = (__m512i)_mm512_cvtne2ps_pbh(y, x);
            _mm512_mask_storeu_epi16((half *)out->at + to, wanted, near);
        } else {
            _mm512_mask_storeu_ps((float *)out->at + to, wanted, x);
            _mm512_mask_storeu_ps((float *)out->at + to + TILE, wanted >> TILE, y);
        }
    }
}

/* Ask for tiles; 0: they may be used from now on, in all threads to come. */
int outrider_no_tiles(int64_t unused) {
    (void)unused;
    return syscall(SYS_arch_prctl, REQUEST, TILES) != 0;
}

/* out [R, O] = x [R, I] weight + bias, in half precision or float32. */
void outrider_tiles(
    int64_t rows, int64_t inputs, int64_t outputs, int64_t threads, int64_t is_half, const half *x,
    const half *weight, const float *bias, void *at) {
    const Out out = {at, outputs, is_half};
    const int64_t groups = (outputs + GROUP - 1) / GROUP, at_once = rows > TILE ? 1 : 2;
    if (rows < 1) return;
#pragma omp parallel num_threads(threads) if (threads > 1 && outputs * inputs > 65536)
    {
        _Alignas(64) float sums[4][TILE * TILE];
        if (rows <= TILE) configured(0x1f, rows, 0, 0);
#pragma omp for
        for (int64_t g = 0; g < groups; g += at_once) {
            const half *w = weight + g * GROUP * inputs;
            const int64_t o = g * GROUP;
            if (rows <= TILE) {
                int two = g + 1 < groups;
                few_rows(x, inputs, w, two ? w + GROUP * inputs : w, sums);
                told(&out, 0, o, rows, sums[0], sums[1], bias);
                if (two) told(&out, 0, o + GROUP, rows, sums[2], sums[3], bias);
                continue;
            }
            for (int64_t r = 0, shape = 0; r < rows; r += 2 * TILE) {
                int64_t few = rows - r < TILE ? rows - r : TILE, more = rows - r - few;
                if (more > TILE) more = TILE;
                const int64_t below = more ? r + TILE : r, lower = more ? more : few;
                if (shape != few * GROUP + lower) configured(0x13, few, 0x2c, lower);
                shape = few * GROUP + lower;
                more_rows(x + r * inputs, x + below * inputs, inputs, w, !r, sums);
                told(&out, r, o, few, sums[0], sums[1], bias);
                told(&out, below, o, more, sums[2], sums[3], bias);
            }
        }
        _tile_release();
    }
}
#else
int outrider_no_tiles(int64_t unused) { return unused >= 0; }

void outrider_tiles(
    int64_t rows, int64_t inputs, int64_t outputs, int64_t threads, int64_t is_half, const half *x,
    const half *weight, const float *bias, void *at) {
    (void)rows, (void)inputs, (void)outputs, (void)threads, (void)is_half;
    (void)x, (void)weight, (void)bias, (void)at;
}
#endif
