/* Sixteen numbers at a time, with the same bits on every processor.
 *
 * No product may be contracted into a sum but where `fma_` says so: compile with -ffp-contract=off.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define FAR 2048 /* bytes from what is used to what is fetched */
#define LIKE(type) type __attribute__((vector_size(LANES * 4)))

typedef uint16_t half;
typedef LIKE(float) lanes;
typedef float floats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef LIKE(int32_t) marks;
typedef LIKE(uint32_t) bits;
typedef half halves __attribute__((vector_size(LANES * 2), aligned(2)));

static inline lanes all(float x) { return x - (lanes){0}; }

static inline lanes choose(marks here, lanes yes, lanes no) {
    return (lanes)((here & (marks)yes) | (~here & (marks)no));
}

#ifdef __AVX512F__
static inline lanes fma_(lanes a, lanes b, lanes sum) {
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}

static inline bits widened(const half *from) {
    return (bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

static inline int any(marks here) { return _mm512_test_epi32_mask((__m512i)here, (__m512i)here); }

static inline void narrowed(half *to, bits x) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)x));
}
#else /* the same numbers, by what the compiler makes of it */
static inline lanes fma_(lanes a, lanes b, lanes sum) {
    for (int i = 0; i < LANES; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
    return sum;
}

static inline int any(marks here) {
    int found = 0;
    for (int i = 0; i < LANES; i++) found |= here[i];
    return found;
}

static inline bits widened(const half *from) {
    return __builtin_convertvector(*(const halves *)from, bits);
}

static inline void narrowed(half *to, bits x) {
    *(halves *)to = __builtin_convertvector(x, halves);
}
#endif

static inline lanes load(const half *from) { return (lanes)(widened(from) << 16); }

/* To the nearest, ties to even; what is not a number stays none. */
static inline void store(half *to, lanes x) {
    bits b = (bits)x;
    bits near = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    marks none = x != x;
    narrowed(to, ((bits)none & ((b >> 16) | 0x40)) | (~(bits)none & near));
}

static inline lanes widest(lanes a, lanes b) { return choose(a > b, a, b); }

/* e^x to two units in the last place; 0 below -87, as of masked slots; NaN stays NaN. */
static inline lanes exp_(lanes x) {
    const lanes low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f);
    marks under = x < low;
    x = choose(under, low, x);
    x = choose(x > high, high, x);
    lanes n = fma_(x, all(1.44269504f), magic) - magic;
    lanes r = fma_(n, all(-0.693359375f), x);
    r = fma_(n, all(2.12194440e-4f), r);
    lanes p = all(1.9875691500e-4f);
    p = fma_(p, r, all(1.3981999507e-3f));
    p = fma_(p, r, all(8.3334519073e-3f));
    p = fma_(p, r, all(4.1665795894e-2f));
    p = fma_(p, r, all(1.6666665459e-1f));
    p = fma_(p, r, all(5.0000001201e-1f));
    p = fma_(p * r, r, r) + 1.0f;
    marks power = (__builtin_convertvector(choose(x == x, n, all(0)), marks) + 127) << 23;
    return choose(under, all(0), p * (lanes)power);
}

/* Sums of neighbouring lanes: those of a in the lower half, those of b in the upper one. */
static inline lanes pairs(lanes a, lanes b) {
    const marks even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#ifdef __clang__
    lanes e = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    lanes o = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    (void)even;
#else
    lanes e = __builtin_shuffle(a, b, even), o = __builtin_shuffle(a, b, even + 1);
#endif
    return e + o;
}

/* Lanes of a and b in turn: of their lower halves, or of their upper ones. */
static inline lanes woven(lanes a, lanes b, const int upper) {
#ifdef __clang__
    if (upper)
        return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
    const marks lower = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return __builtin_shuffle(a, b, upper ? lower + 8 : lower);
#endif
}

static inline float total(lanes x) {
    lanes none = {0};
    for (int i = 0; i < 4; i++) x = pairs(x, none);
    return x[0];
}

/* Lane i of the answer is the total of x[i]. */
static inline lanes totals(lanes x[LANES]) {
#pragma GCC unroll 4
    for (int left = LANES; left > 1; left /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < left / 2; i++) x[i] = pairs(x[2 * i], x[2 * i + 1]);
    return x[0];
}

/* Numbers of a row, half precision or not, as float32; those behind `count` are 0. */
static inline void widen(float *to, const void *from, int64_t at, int64_t count, int64_t room, int is_half) {
    if (is_half)
        for (int64_t i = 0; i < count; i++) {
            bits one = {(uint32_t)((const half *)from)[at + i] << 16};
            to[i] = ((lanes)one)[0];
        }
    else
        memcpy(to, (const float *)from + at, count * sizeof(float));
    memset(to + count, 0, (room - count) * sizeof(float));
}

static inline void narrow(void *to, int64_t at, const float *from, int64_t count, int is_half) {
    _Alignas(64) half near[LANES];
    if (!is_half) {
        memcpy((float *)to + at, from, count * sizeof(float));
        return;
    }
    store(near, *(const lanes *)from);
    memcpy((half *)to + at, near, count * sizeof(half));
}
