/* Sixteen numbers at a time, with the same bits on every processor.
 *
 * They lie in registers as wide as the processor has them: one of AVX-512, two of AVX2, four of NEON
 * or of whatever else there is (`OUTRIDER_GENERIC`). Every function says what becomes of each lane, and in which order lanes are added up. No
 * product may be contracted into a sum but where `fma_` says so: compile with -ffp-contract=off.
 */
#pragma once
#include "intrinsics.h"

#define LANES 16
#define FAR 2048 /* bytes from what is used to what is fetched */
#define ALWAYS static inline __attribute__((always_inline))

#ifdef OUTRIDER_GENERIC
#define WIDTH 4
#define HELD 3
#elif defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDTH 16 /* lanes of a register */
#define HELD 24  /* sums that leave registers for what is added to them */
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDTH 8
#define HELD 6
#elif defined(__aarch64__)
#define WIDTH 4
#define HELD 6
#define NEON
#else
#define WIDTH 4
#define HELD 3
#endif

#define REGISTERS (LANES / WIDTH)
#define REGISTER(type) type __attribute__((vector_size(WIDTH * sizeof(type))))
#define ANYWHERE(type) \
    type __attribute__((vector_size(WIDTH * sizeof(type)), aligned(1), may_alias))

typedef uint16_t half;
typedef REGISTER(float) part;
typedef REGISTER(int32_t) part_marks;
typedef REGISTER(uint32_t) part_bits;
typedef ANYWHERE(float) part_there;
#ifdef NEON
typedef ANYWHERE(half) halves_there;
#endif

/* EACH(type, x): sixteen lanes, of which x says the nth part; ON(a) is that part of a. */
#define PART(n, x) ({ enum { nth = n }; x; })
#if REGISTERS == 1
typedef part lanes;
typedef part_marks marks;
typedef part_bits bits;
#define ON(a) (a)
#define EACH(type, x) ((type)PART(0, x))
#else
typedef struct { part of[REGISTERS]; } lanes;
typedef struct { part_marks of[REGISTERS]; } marks;
typedef struct { part_bits of[REGISTERS]; } bits;
#define ON(a) ((a).of[nth])
#if REGISTERS == 2
#define EACH(type, x) ((type){{PART(0, x), PART(1, x)}})
#else
#define EACH(type, x) ((type){{PART(0, x), PART(1, x), PART(2, x), PART(3, x)}})
#endif
#endif

/* What is done to registers. */

ALWAYS part part_choose(part_marks here, part yes, part no) {
    return (part)((here & (part_marks)yes) | (~here & (part_marks)no));
}

/* a where it is larger, else b; the same of what is less. */
#if WIDTH == 16
ALWAYS part part_larger(part a, part b) { return (part)_mm512_max_ps((__m512)a, (__m512)b); }
ALWAYS part part_less(part a, part b) { return (part)_mm512_min_ps((__m512)a, (__m512)b); }
#elif WIDTH == 8
ALWAYS part part_larger(part a, part b) { return (part)_mm256_max_ps((__m256)a, (__m256)b); }
ALWAYS part part_less(part a, part b) { return (part)_mm256_min_ps((__m256)a, (__m256)b); }
#else
ALWAYS part part_larger(part a, part b) { return part_choose(a > b, a, b); }
ALWAYS part part_less(part a, part b) { return part_choose(a < b, a, b); }
#endif

#if WIDTH == 16
ALWAYS part part_fma(part a, part b, part sum) {
    return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}

ALWAYS part_bits part_widened(const half *from) {
    return (part_bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

ALWAYS void part_narrowed(half *to, part_bits x) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)x));
}
#elif WIDTH == 8
ALWAYS part part_fma(part a, part b, part sum) {
    return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
}

ALWAYS part_bits part_widened(const half *from) {
    return (part_bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

ALWAYS void part_narrowed(half *to, part_bits x) {
    const __m256i y = (__m256i)x;
    const __m128i lower = _mm256_castsi256_si128(y), upper = _mm256_extracti128_si256(y, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(lower, upper));
}
#elif defined(NEON)
ALWAYS part part_fma(part a, part b, part sum) {
    return (part)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}

ALWAYS part_bits part_widened(const half *from) {
    return (part_bits)vmovl_u16((uint16x4_t)*(const halves_there *)from);
}

ALWAYS void part_narrowed(half *to, part_bits x) {
    *(halves_there *)to = (halves_there)vmovn_u32((uint32x4_t)x);
}
#else
static __attribute__((noinline)) part part_fma(part a, part b, part sum) {
    for (int i = 0; i < WIDTH; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
    return sum;
}

ALWAYS part_bits part_widened(const half *from) {
    return (part_bits){from[0], from[1], from[2], from[3]};
}

ALWAYS void part_narrowed(half *to, part_bits x) {
    for (int i = 0; i < WIDTH; i++) to[i] = (half)x[i];
}
#endif

/* To the nearest, ties to even; what is not a number stays none. */
ALWAYS void part_store(half *to, part x) {
    const part_bits b = (part_bits)x;
    const part_bits near = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    const part_bits none = (part_bits)(x != x);
    part_narrowed(to, (none & ((b >> 16) | 0x40)) | (~none & near));
}

/* e^x to two units in the last place; 0 below -87, as of masked slots; NaN stays NaN. */
ALWAYS part part_exp(part x) {
    const part zero = {0}, low = zero - 87.0f, high = zero + 88.0f, magic = zero + 12582912.0f;
    const part_marks under = x < low;
    x = part_less(high, part_larger(low, x));
    const part n = part_fma(x, zero + 1.44269504f, magic) - magic;
    part r = part_fma(n, zero - 0.693359375f, x);
    r = part_fma(n, zero + 2.12194440e-4f, r);
    part p = zero + 1.9875691500e-4f;
    p = part_fma(p, r, zero + 1.3981999507e-3f);
    p = part_fma(p, r, zero + 8.3334519073e-3f);
    p = part_fma(p, r, zero + 4.1665795894e-2f);
    p = part_fma(p, r, zero + 1.6666665459e-1f);
    p = part_fma(p, r, zero + 5.0000001201e-1f);
    p = part_fma(p * r, r, r) + 1.0f;
#if WIDTH == 16
    return part_choose(under, zero, (part)_mm512_scalef_ps((__m512)p, (__m512)n));
#else
    const part whole = part_choose(x == x, n, zero);
    const part_marks power = (__builtin_convertvector(whole, part_marks) + 127) << 23;
    return part_choose(under, zero, p * (part)power);
#endif
}

/* The natural logarithm of a number above 0 to two units in the last place. */
ALWAYS part part_log(part x) {
    const part zero = {0}, half_ = zero + 0.5f;
    const part_bits b = (part_bits)x;
    part m = (part)((b & 0x7fffff) | 0x3f000000);
    const part_marks low = m < zero + 0.70710678f;
    const part e = __builtin_convertvector((part_marks)(b >> 23) - 126 + low, part);
    m = m + part_choose(low, m, zero) - 1.0f;
    const part z = m * m;
    part p = zero + 7.0376836292e-2f;
    p = part_fma(p, m, zero - 1.1514610310e-1f);
    p = part_fma(p, m, zero + 1.1676998740e-1f);
    p = part_fma(p, m, zero - 1.2420140846e-1f);
    p = part_fma(p, m, zero + 1.4249322787e-1f);
    p = part_fma(p, m, zero - 1.6668057665e-1f);
    p = part_fma(p, m, zero + 2.0000714765e-1f);
    p = part_fma(p, m, zero - 2.4999993993e-1f);
    p = part_fma(p, m, zero + 3.3333331174e-1f);
    p = part_fma(e, zero - 2.12194440e-4f, p * m * z);
    return part_fma(e, zero + 0.693359375f, m + part_fma(zero - half_, z, p));
}

/* log(1 + e^x), x itself above 20; NaN stays NaN. */
ALWAYS part part_softplus(part x) {
    const part zero = {0}, one = zero + 1.0f, u = part_exp(x), w = one + u;
    const part whole = part_choose(w > one, w - one, one); /* u as w has it */
    const part y = part_choose(w > one, part_log(w) * (u / whole), u);
    return part_choose((x > zero + 20.0f) | (x != x), x, y);
}

/* The same of sixteen lanes. */

ALWAYS lanes all(float x) { return EACH(lanes, x - (part){0}); }
ALWAYS lanes add(lanes a, lanes b) { return EACH(lanes, ON(a) + ON(b)); }
ALWAYS lanes sub(lanes a, lanes b) { return EACH(lanes, ON(a) - ON(b)); }
ALWAYS lanes mul(lanes a, lanes b) { return EACH(lanes, ON(a) * ON(b)); }
ALWAYS lanes over(lanes a, lanes b) { return EACH(lanes, ON(a) / ON(b)); }
ALWAYS lanes minus(lanes a) { return EACH(lanes, -ON(a)); }
ALWAYS marks above(lanes a, lanes b) { return EACH(marks, ON(a) > ON(b)); }
ALWAYS marks at_most(lanes a, lanes b) { return EACH(marks, ON(a) <= ON(b)); }
ALWAYS marks no_number(lanes a) { return EACH(marks, ON(a) != ON(a)); }
ALWAYS marks either(marks a, marks b) { return EACH(marks, ON(a) | ON(b)); }

/* a * b + sum, rounded once. */
ALWAYS lanes fma_(lanes a, lanes b, lanes sum) {
    return EACH(lanes, part_fma(ON(a), ON(b), ON(sum)));
}

ALWAYS lanes choose(marks here, lanes yes, lanes no) {
    return EACH(lanes, part_choose(ON(here), ON(yes), ON(no)));
}

ALWAYS lanes widest(lanes a, lanes b) { return EACH(lanes, part_larger(ON(a), ON(b))); }
ALWAYS lanes exp_(lanes x) { return EACH(lanes, part_exp(ON(x))); }
ALWAYS lanes softplus(lanes x) { return EACH(lanes, part_softplus(ON(x))); }
ALWAYS lanes silu(lanes x) { return over(x, add(all(1), exp_(minus(x)))); }

/* The first `count` lanes. */
ALWAYS marks first_lanes(int32_t count) {
    static const int32_t number[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return EACH(marks, *(const part_marks *)(number + nth * WIDTH) < count);
}

/* Numbers of single precision, wherever they lie; and of half precision. */
ALWAYS lanes get(const float *from) {
    return EACH(lanes, *(const part_there *)(from + nth * WIDTH));
}

ALWAYS void put(float *to, lanes x) {
    (void)EACH(lanes, *(part_there *)(to + nth * WIDTH) = ON(x));
}

ALWAYS lanes load(const half *from) {
    return EACH(lanes, (part)(part_widened(from + nth * WIDTH) << 16));
}

ALWAYS void store(half *to, lanes x) {
    (void)EACH(lanes, (part_store(to + nth * WIDTH, ON(x)), ON(x)));
}

/* The lower and the upper of two numbers of half precision that lie in each lane. */
ALWAYS lanes lower_half(lanes x) { return EACH(lanes, (part)((part_bits)ON(x) << 16)); }
ALWAYS lanes upper_half(lanes x) { return EACH(lanes, (part)((part_bits)ON(x) & 0xffff0000)); }

/* The same of a table of either kind, from its number `at` on. */
ALWAYS lanes read_as(const void *table, int64_t at, const int is_half) {
    return is_half ? load((const half *)table + at) : get((const float *)table + at);
}

ALWAYS void write_as(void *table, int64_t at, lanes x, const int is_half) {
    if (is_half) store((half *)table + at, x);
    else put((float *)table + at, x);
}

ALWAYS int any(marks here) {
#if WIDTH == 16
    return _mm512_test_epi32_mask((__m512i)here, (__m512i)here) != 0;
#elif WIDTH == 8
    return _mm256_movemask_ps((__m256)(here.of[0] | here.of[1])) != 0;
#elif defined(NEON)
    return vmaxvq_u32((uint32x4_t)((here.of[0] | here.of[1]) | (here.of[2] | here.of[3]))) != 0;
#else
    const part_marks x = (here.of[0] | here.of[1]) | (here.of[2] | here.of[3]);
    return (x[0] | x[1] | x[2] | x[3]) != 0;
#endif
}

/* Sums of neighbouring lanes: those of a in the lower half, those of b in the upper one. */
ALWAYS lanes pairs(lanes a, lanes b) {
#if WIDTH == 16
    const marks even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#ifdef __clang__
    lanes e = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    lanes o = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    (void)even;
#else
    lanes e = __builtin_shuffle(a, b, even), o = __builtin_shuffle(a, b, even + 1);
#endif
    return e + o;
#elif WIDTH == 8
    const __m256d x = (__m256d)_mm256_hadd_ps((__m256)a.of[0], (__m256)a.of[1]);
    const __m256d y = (__m256d)_mm256_hadd_ps((__m256)b.of[0], (__m256)b.of[1]);
    return (lanes){{(part)_mm256_permute4x64_pd(x, 0xd8), (part)_mm256_permute4x64_pd(y, 0xd8)}};
#else
#ifdef NEON
#define BOTH(x, y) (part)vpaddq_f32((float32x4_t)(x), (float32x4_t)(y))
#else
#define BOTH(x, y) ((part){(x)[0] + (x)[1], (x)[2] + (x)[3], (y)[0] + (y)[1], (y)[2] + (y)[3]})
#endif
    return (lanes){{
        BOTH(a.of[0], a.of[1]), BOTH(a.of[2], a.of[3]),
        BOTH(b.of[0], b.of[1]), BOTH(b.of[2], b.of[3]),
    }};
#endif
}

ALWAYS float first_of(lanes x) {
#if REGISTERS == 1
    return x[0];
#else
    return x.of[0][0];
#endif
}

ALWAYS float total(lanes x) {
    const lanes none = all(0);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x = pairs(x, none);
    return first_of(x);
}

/* The largest of sixteen numbers. */
ALWAYS float most_of_lanes(lanes x) {
#if WIDTH == 16
    return _mm512_reduce_max_ps((__m512)x);
#elif WIDTH == 8
    const __m256 y = _mm256_max_ps((__m256)x.of[0], (__m256)x.of[1]);
    const __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    const __m128 two = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float each[LANES];
    put(each, x);
    float most = each[0];
    for (int i = 1; i < LANES; i++) most = each[i] > most ? each[i] : most;
    return most;
#endif
}

/* Sums of every four lanes of four numbers, in an order of their own; `totals` adds these up: lane
 * 4 i + j of the answer is the total of the j-th number of the i-th sums, as `total` adds. */
#if WIDTH == 8
ALWAYS part part_fours(part a, part b, part c, part d) {
    const __m256 x = _mm256_hadd_ps((__m256)a, (__m256)b), y = _mm256_hadd_ps((__m256)c, (__m256)d);
    return (part)_mm256_hadd_ps(x, y);
}

ALWAYS lanes fours(lanes a, lanes b, lanes c, lanes d) {
    return EACH(lanes, part_fours(ON(a), ON(b), ON(c), ON(d)));
}

ALWAYS part part_halves(part a, part b) {
    const __m256 lower = _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20);
    return (part)_mm256_add_ps(lower, _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31));
}

ALWAYS lanes totals(lanes a, lanes b, lanes c, lanes d) {
    const part lower = part_halves(a.of[0], b.of[0]) + part_halves(a.of[1], b.of[1]);
    return (lanes){{lower, part_halves(c.of[0], d.of[0]) + part_halves(c.of[1], d.of[1])}};
}
#else
ALWAYS lanes fours(lanes a, lanes b, lanes c, lanes d) { return pairs(pairs(a, b), pairs(c, d)); }
ALWAYS lanes totals(lanes a, lanes b, lanes c, lanes d) { return fours(a, b, c, d); }
#endif

/* Four numbers of four rows, each `row` numbers apart from the next, in the quarters of sixteen lanes. */
#if WIDTH == 16
typedef __m512 machine;
#define LOW2(a, b) ((machine)_mm512_unpacklo_pd((__m512d)(a), (__m512d)(b)))
#define HIGH2(a, b) ((machine)_mm512_unpackhi_pd((__m512d)(a), (__m512d)(b)))
#define LOW1(a, b) _mm512_unpacklo_ps(a, b)
#define HIGH1(a, b) _mm512_unpackhi_ps(a, b)

ALWAYS lanes quarters(const float *x, int64_t row) {
    __m512 y = _mm512_castps128_ps512(_mm_loadu_ps(x));
    y = _mm512_insertf32x4(y, _mm_loadu_ps(x + row), 1);
    y = _mm512_insertf32x4(y, _mm_loadu_ps(x + 2 * row), 2);
    return (lanes)_mm512_insertf32x4(y, _mm_loadu_ps(x + 3 * row), 3);
}
#elif WIDTH == 8
typedef __m256 machine;
#define LOW2(a, b) ((machine)_mm256_unpacklo_pd((__m256d)(a), (__m256d)(b)))
#define HIGH2(a, b) ((machine)_mm256_unpackhi_pd((__m256d)(a), (__m256d)(b)))
#define LOW1(a, b) _mm256_unpacklo_ps(a, b)
#define HIGH1(a, b) _mm256_unpackhi_ps(a, b)

ALWAYS part two_quarters(const float *x, int64_t row) {
    const __m256 y = _mm256_castps128_ps256(_mm_loadu_ps(x));
    return (part)_mm256_insertf128_ps(y, _mm_loadu_ps(x + row), 1);
}

ALWAYS lanes quarters(const float *x, int64_t row) {
    return EACH(lanes, two_quarters(x + 2 * nth * row, row));
}
#else
#if defined(NEON)
typedef float32x4_t machine;
#define LOW2(a, b) ((machine)vzip1q_f64((float64x2_t)(a), (float64x2_t)(b)))
#define HIGH2(a, b) ((machine)vzip2q_f64((float64x2_t)(a), (float64x2_t)(b)))
#define LOW1(a, b) vzip1q_f32(a, b)
#define HIGH1(a, b) vzip2q_f32(a, b)
#else
typedef part machine;
#define LOW2(a, b) ((machine){(a)[0], (a)[1], (b)[0], (b)[1]})
#define HIGH2(a, b) ((machine){(a)[2], (a)[3], (b)[2], (b)[3]})
#define LOW1(a, b) ((machine){(a)[0], (b)[0], (a)[1], (b)[1]})
#define HIGH1(a, b) ((machine){(a)[2], (b)[2], (a)[3], (b)[3]})
#endif
ALWAYS lanes quarters(const float *x, int64_t row) {
    return EACH(lanes, *(const part_there *)(x + nth * row));
}
#endif

/* Columns of four rows, in each quarter of sixteen lanes that a register holds. */
ALWAYS void fours_turned(part *x, part a, part b, part c, part d) {
    const machine e = LOW1((machine)a, (machine)b), f = HIGH1((machine)a, (machine)b);
    const machine g = LOW1((machine)c, (machine)d), h = HIGH1((machine)c, (machine)d);
    x[0] = (part)LOW2(e, g), x[1] = (part)HIGH2(e, g);
    x[2] = (part)LOW2(f, h), x[3] = (part)HIGH2(f, h);
}

/* Four columns of sixteen rows, each `row` numbers apart from the next. */
ALWAYS void turned(lanes x[4], const float *from, int64_t row) {
    lanes y[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) y[i] = quarters(from + i * row, 4 * row);
#if REGISTERS == 1
    fours_turned(x, y[0], y[1], y[2], y[3]);
#else
#pragma GCC unroll 4
    for (int r = 0; r < REGISTERS; r++) {
        part z[4];
        fours_turned(z, y[0].of[r], y[1].of[r], y[2].of[r], y[3].of[r]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) x[i].of[r] = z[i];
    }
#endif
}

/* Numbers of a row, half precision or not, as float32; those behind `count` are 0. */
static inline void widen(float *to, const void *from, int64_t at, int64_t count, int64_t room, int is_half) {
    int64_t i = 0;
    if (is_half) {
        for (; i + LANES <= count; i += LANES) put(to + i, load((const half *)from + at + i));
        for (; i < count; i++) {
            const uint32_t one = (uint32_t)((const half *)from)[at + i] << 16;
            memcpy(to + i, &one, sizeof(one));
        }
    } else
        memcpy(to, (const float *)from + at, count * sizeof(float));
    memset(to + count, 0, (room - count) * sizeof(float));
}

static inline void narrow(void *to, int64_t at, const float *from, int64_t count, int is_half) {
    half near[LANES];
    if (!is_half) {
        memcpy((float *)to + at, from, count * sizeof(float));
        return;
    }
    store(near, get(from));
    memcpy((half *)to + at, near, count * sizeof(half));
}
