/* Products with weights of 8 bits on a CPU.
 *
 * A call of one row takes the time that its weights take to be read: they lie in the order in which
 * they are read, in one stream, and are widened on the way. Sums are float32. A row is computed in
 * one order whatever stands beside it.
 *
 * Shapes: R rows, I inputs and O outputs in whole lanes.
 */
#include "lanes.h"
#include "thread_pool.h"

#define OUTPUTS 4 /* that are read side by side */
#define BLOCK 4 /* rows that share what is read */
#define CHUNK 64 /* rows whose inputs stay near */

typedef int8_t small;

ALWAYS part part_load8(const small *from) {
#if WIDTH == 16
    return (part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif WIDTH == 8
    return (part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(NEON)
    int8x8_t four = vdup_n_s8(0);
    memcpy(&four, from, WIDTH);
    return (part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))));
#else
    return (part){from[0], from[1], from[2], from[3]};
#endif
}

ALWAYS lanes load8(const small *from) { return EACH(lanes, part_load8(from + nth * WIDTH)); }

/* Lanes 0 to 3 are the totals of four sums. */
ALWAYS lanes four_totals(const lanes *x) {
    const lanes none = all(0);
    return totals(fours(x[0], x[1], x[2], x[3]), none, none, none);
}

/* out [few, 4]: `few` rows x [few, I] by four outputs, [I / 16, 4, 16]. */
static inline __attribute__((always_inline)) void tile(
    float *out, const float *x, const small *weight, int64_t inputs, const int few) {
    lanes sum[BLOCK * OUTPUTS];
#pragma GCC unroll 16
    for (int i = 0; i < few * OUTPUTS; i++) sum[i] = all(0);
    for (int64_t i = 0; i < inputs; i += LANES, weight += OUTPUTS * LANES) {
        __builtin_prefetch(weight + FAR);
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) {
            lanes w = load8(weight + o * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < few; r++)
                sum[r * OUTPUTS + o] =
                    fma_(get(x + r * inputs + i), w, sum[r * OUTPUTS + o]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < few; r++) {
        float four[LANES];
        put(four, four_totals(sum + r * OUTPUTS));
        memcpy(out + r * LANES, four, OUTPUTS * sizeof(float));
    }
}

/* Some rows of a call; `each` times LANES outputs are a piece. */
typedef struct {
    int64_t first, some, wide, outputs, is_half, each;
    const float *read;
    const small *weight;
    const float *scale, *bias;
    void *out;
} Part;

static void outputs_of(const Part *p, int64_t o) {
    const int64_t there = p->outputs - o < LANES ? p->outputs - o : LANES, wide = p->wide;
    _Alignas(64) float sums[BLOCK * LANES];
    const lanes by = get(p->scale + o), more = get(p->bias + o);
    for (int64_t r = 0; r < p->some; r += BLOCK) {
        int64_t few = p->some - r < BLOCK ? p->some - r : BLOCK;
        for (int64_t part = 0; part < LANES; part += OUTPUTS) {
            const small *w = p->weight + (o + part) * wide;
            const float *from = p->read + r * wide;
            switch (few) {
            case 1: tile(sums + part, from, w, wide, 1); break;
            case 2: tile(sums + part, from, w, wide, 2); break;
            case 3: tile(sums + part, from, w, wide, 3); break;
            default: tile(sums + part, from, w, wide, 4);
            }
        }
        for (int64_t i = 0; i < few; i++) {
            float *y = sums + i * LANES;
            put(y, fma_(get(y), by, more));
            narrow(p->out, (p->first + r + i) * p->outputs + o, y, there, p->is_half);
        }
    }
}

static void piece_of(void *about, int64_t piece, int64_t thread) {
    const Part *p = about;
    const int64_t first = piece * p->each * LANES, last = first + p->each * LANES;
    (void)thread;
    for (int64_t o = first; o < last && o < p->outputs; o += LANES) outputs_of(p, o);
}

/* out [R, O'] = x [R, I'] weight + bias, in half precision or float32 as x is.
 *
 * `weight` [O / 4, I / 16, 4, 16], `scale` and `bias` [O]; the first I' and O' are there.
 * Returns 1 without memory for the rows. */
int outrider_int8(
    int64_t rows, int64_t inputs, int64_t outputs, int64_t threads, int64_t is_half, const void *x,
    const small *weight, const float *scale, const float *bias, void *out) {
    const int64_t wide = (inputs + LANES - 1) / LANES * LANES, most = rows < CHUNK ? rows : CHUNK;
    float *read = aligned_alloc(64, most * wide * sizeof(float));
    if (!read) return 1;
    if (outputs * inputs <= 65536) threads = 1;
    const int64_t all = (outputs + LANES - 1) / LANES, each = units_of_piece(all, threads);
    for (int64_t first = 0; first < rows; first += CHUNK) {
        int64_t some = rows - first < CHUNK ? rows - first : CHUNK;
        for (int64_t r = 0; r < some; r++)
            widen(read + r * wide, x, (first + r) * inputs, inputs, wide, is_half);
        Part part = {first, some, wide, outputs, is_half, each, read, weight, scale, bias, out};
        outrider_share(threads, (all + each - 1) / each, piece_of, &part);
    }
    free(read);
    return 0;
}
