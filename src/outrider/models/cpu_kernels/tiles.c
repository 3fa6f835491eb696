/* Products with bfloat16 weights on processors that have tiles (Intel's AMX).
 *
 * Every number of the answer is one sum in float32 over the inputs in their order, 32 at a time,
 * whatever stands beside it: so a row has the same bits in calls of any number of rows.
 *
 * Shapes: R rows, I inputs in whole steps, O outputs; weights [O, I] as they lie in a model.
 */
#include "thread_pool.h"
#include "tiles.h"

#ifdef WITH_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST 0x1023 /* of arch_prctl(2): leave to use a feature, */
#define TILES 18       /* which is this one */

/* Rows as a first factor: [R' / 16, I / 32, 16, 32], zero behind the last. */
static void lined(const half *x, int64_t rows, int64_t inputs, half *out) {
    for (int64_t i = 0; i < inputs; i += STEP)
        for (int64_t r = 0; r < TILE; r++, out += STEP)
            _mm512_store_si512(out, r < rows ? _mm512_loadu_si512(x + r * inputs + i)
                                             : _mm512_setzero_si512());
}

/* A group's weights as a second factor: [I / 32, 2, 16, 16, 2], of `inputs` out of `all`. */
static void laid(const half *weight, int64_t outputs, int64_t inputs, int64_t all, half *out) {
    for (int64_t i = 0; i < inputs; i += STEP)
        for (int64_t o = 0; o < GROUP; o += TILE, out += PAIR / 2) {
            for (int64_t n = o; n < o + TILE; n++)
                __builtin_prefetch(weight + n * all + i + AHEAD / GROUP * STEP);
            __m512i a[TILE];
#pragma GCC unroll 16
            for (int64_t n = 0; n < TILE; n++)
                a[n] = o + n < outputs ? _mm512_loadu_si512(weight + (o + n) * all + i)
                                       : _mm512_setzero_si512();
            crossed(a, out);
        }
}

/* Where an answer goes: [R, O] in half precision or float32, with a bias [O] or none. */
typedef struct {
    void *at;
    int64_t outputs, is_half;
    const half *bias;
} Out;

static inline __m512 biased(const Out *out, int64_t o, __mmask16 wanted) {
    if (!out->bias) return _mm512_setzero_ps();
    __m256i some = _mm256_maskz_loadu_epi16(wanted, out->bias + o);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16);
}

/* Sixteen outputs of some rows: row r's output o is at sums[r * down + o * right]. */
static void told(
    const Out *out, int64_t row, int64_t rows, int64_t o, const float *sums, int down, int right) {
    const int64_t there = out->outputs - o;
    if (there <= 0) return;
    const __mmask16 wanted = there < TILE ? (1u << there) - 1 : -1;
    const __m512i each = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set1_epi32(right));
    const __m512 bias = biased(out, o, wanted);
    for (int64_t r = 0; r < rows; r++, sums += down) {
        const int64_t to = (row + r) * out->outputs + o;
        __m512 x = right == 1 ? _mm512_loadu_ps(sums) : _mm512_i32gather_ps(each, sums, 4);
        x += bias;
        if (out->is_half)
            _mm256_mask_storeu_epi16((half *)out->at + to, wanted, (__m256i)_mm512_cvtneps_pbh(x));
        else
            _mm512_mask_storeu_ps((float *)out->at + to, wanted, x);
    }
}

/* Ask for tiles; 0: this process may use them from now on. */
int outrider_no_tiles(int64_t unused) {
    (void)unused;
    return syscall(SYS_arch_prctl, REQUEST, TILES) != 0;
}

/* Up to 32 rows, turned: the weights from output `o` on that are read at once. */
static void few(
    const half *x, int64_t rows, int64_t inputs, const half *weight, int64_t o, const Out *out) {
    _Alignas(64) float sums[4][TILE * TILE];
    const int64_t upper = rows < TILE ? rows : TILE, lower = rows - upper;
    const half *below = x + upper * inputs;
    weight += o * inputs;
    if (lower && o + GROUP <= out->outputs) {
        some_rows(x, below, lower, inputs, weight, sums);
        for (int t = 0; t < 2; t++) {
            told(out, 0, upper, o + t * TILE, sums[t], 1, upper);
            told(out, upper, lower, o + t * TILE, sums[2 + t], 1, lower);
        }
    } else if (!lower && o + BLOCK <= out->outputs) {
        few_rows(x, rows, inputs, weight, sums);
        for (int t = 0; t < 4; t++) told(out, 0, rows, o + t * TILE, sums[t], 1, rows);
    } else {
        for (; o < out->outputs; o += TILE, weight += TILE * inputs) {
            const int64_t left = out->outputs - o, outputs = left < TILE ? left : TILE;
            for_few(upper, 0, outputs);
            few_outputs(x, upper, inputs, weight, sums[0]);
            told(out, 0, upper, o, sums[0], 1, upper);
            if (!lower) continue;
            for_few(lower, 0, outputs);
            few_outputs(below, lower, inputs, weight, sums[0]);
            told(out, upper, lower, o, sums[0], 1, lower);
        }
        for_few(upper, lower, TILE);
    }
}

/* More rows, lined up, by the outputs from `o` on that are multiplied at once. */
static void many(
    const half *x, int64_t rows, int64_t inputs, const half *weight, int64_t o, half *room,
    const Out *out) {
    const int64_t deep = inputs <= 2 * DEEP ? inputs : DEEP;
    const int64_t here = out->outputs - o < WIDE ? out->outputs - o : WIDE;
    float *sums = (float *)(room + WIDE * 2 * DEEP);
    weight += o * inputs;
    for (int64_t first = 0; first < rows; first += TALL)
        for (int64_t i = 0; i < inputs; i += deep) {
            const int64_t some = inputs - i < deep ? inputs - i : deep;
            const int64_t stop = rows - first < TALL ? rows : first + TALL;
            float *at = sums;
            for (int64_t g = 0; g < here; g += GROUP)
                laid(weight + g * inputs + i, here - g, some, inputs, room + g * deep);
            for (int64_t r = first; r < stop; r += 2 * TILE) {
                const half *upper = x + r * inputs + i * TILE, *lower = upper + TILE * inputs;
                const int64_t few = stop - r < TILE ? stop - r : TILE, left = stop - r - few;
                const int64_t more = left < TILE ? left : TILE;
                for (int64_t g = 0; g < here; g += GROUP, at += GROUP * GROUP) {
                    tiled(upper, more ? lower : upper, some, room + g * deep, !i, at);
                    if (i + some < inputs) continue;
                    for (int t = 0; t < 2; t++) {
                        const float *one = at + t * TILE * TILE;
                        told(out, r, few, o + g + t * TILE, one, TILE, 1);
                        told(out, r + TILE, more, o + g + t * TILE, one + GROUP * TILE, TILE, 1);
                    }
                }
            }
        }
}

/* Halves of room that a thread needs for many rows. */
#define ROOM (WIDE * 2 * DEEP + 2 * TALL * WIDE)

typedef struct {
    int64_t rows, inputs, at_once, each; /* `each` times as many outputs are a piece, or tiles of rows */
    const half *x, *weight;
    half *room;
    const Out *out;
} Call;

static void lined_up(void *about, int64_t piece, int64_t thread) {
    const Call *of = about;
    const int64_t first = piece * of->each * TILE, last = first + of->each * TILE;
    (void)thread;
    for (int64_t r = first; r < last && r < of->rows; r += TILE)
        lined(of->x + r * of->inputs, of->rows - r, of->inputs, of->room + r * of->inputs);
}

static void outputs_of(void *about, int64_t piece, int64_t thread) {
    const Call *of = about;
    const int64_t upper = of->rows < TILE ? of->rows : TILE, all = (of->rows + TILE - 1) / TILE * TILE;
    const int64_t first = piece * of->each * of->at_once, last = first + of->each * of->at_once;
    half *mine = of->room + all * of->inputs + thread * ROOM;
    if (of->rows <= 2 * TILE) for_few(upper, of->rows - upper, TILE);
    else for_many();
    for (int64_t o = first; o < last && o < of->out->outputs; o += of->at_once) {
        if (of->rows <= 2 * TILE) few(of->rows > 1 ? of->room : of->x, of->rows, of->inputs, of->weight, o, of->out);
        else many(of->room, of->rows, of->inputs, of->weight, o, mine, of->out);
    }
    _tile_release();
}

/* out [R, O] = x [R, I] weight + bias, in half precision or float32.
 *
 * `room` is for R I halves of up to 32 rows; of more for R' I, R' in whole tiles, and ROOM of each
 * thread behind these. */
void outrider_tiles(
    int64_t rows, int64_t inputs, int64_t outputs, int64_t threads, int64_t is_half, const half *x,
    const half *weight, const half *bias, half *room, void *at) {
    const Out out = {at, outputs, is_half, bias};
    const int64_t at_once = rows <= TILE ? BLOCK : rows <= 2 * TILE ? GROUP : WIDE;
    const int64_t upper = rows < TILE ? rows : TILE, lines = (rows + TILE - 1) / TILE;
    const int64_t parts = (outputs + at_once - 1) / at_once;
    if (rows < 1) return;
    if (rows > 1 && rows <= 2 * TILE) {
        uint32_t *to = (uint32_t *)room, pairs = inputs / 2;
        crossed_pairs((const uint32_t *)x, upper, pairs, to);
        crossed_pairs((const uint32_t *)x + upper * pairs, rows - upper, pairs, to + upper * pairs);
    }
    if (outputs * inputs <= 65536) threads = 1;
    Call of = {rows, inputs, at_once, units_of_piece(lines, threads), x, weight, room, &out};
    if (rows > 2 * TILE) outrider_share(threads, (lines + of.each - 1) / of.each, lined_up, &of);
    of.each = units_of_piece(parts, threads);
    outrider_share(threads, (parts + of.each - 1) / of.each, outputs_of, &of);
}
#else
int outrider_no_tiles(int64_t unused) { return unused >= 0; }

void outrider_tiles(
    int64_t rows, int64_t inputs, int64_t outputs, int64_t threads, int64_t is_half, const half *x,
    const half *weight, const half *bias, half *room, void *at) {
    (void)rows, (void)inputs, (void)outputs, (void)threads, (void)is_half;
    (void)x, (void)weight, (void)bias, (void)room, (void)at;
}
#endif
