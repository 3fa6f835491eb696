/* Vectors of float32 as wide as the processor has them: sixteen lanes with AVX-512, eight with AVX2,
 * four with NEON or with whatever else a compiler finds.
 *
 * Lanes are outputs, so what a lane holds does not depend on how many there are.
 */
#pragma once
#include "intrinsics.h"

#if defined(OUTRIDER_GENERIC)
#define PLAIN_C
#endif

#if defined(PLAIN_C)
#define WIDE 4
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WIDE 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 8
#else
#define WIDE 4
#if !defined(__aarch64__)
#define PLAIN_C
#endif
#endif

#define INLINED static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(WIDE * 4)));
typedef int32_t vi __attribute__((vector_size(WIDE * 4)));
typedef float vf_any __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));

INLINED vf load_f(const void *from) { return *(const vf_any *)from; }
INLINED vi load_i(const void *from) { return *(const vi_any *)from; }
INLINED void store_f(float *to, vf x) { *(vf_any *)to = x; }
INLINED vi all_i(int32_t x) { return (vi){0} + x; }
INLINED vf as_f(vi x) { return __builtin_convertvector(x, vf); }
INLINED void fetch(const void *far) { __builtin_prefetch(far, 0, 3); }
INLINED void fetch_near(const void *far) { __builtin_prefetch(far, 0, 2); } /* to the second cache */

#if WIDE == 16
INLINED vf every(float x) { return (vf)_mm512_set1_ps(x); }
INLINED vf fma_f(vf a, vf b, vf sum) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
INLINED vi bytes_i(const void *from) {
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
}
INLINED vi ubytes_i(const void *from) {
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
INLINED vi bytes_of(uint64_t low, uint64_t high, const int v) {
    return (vi)_mm512_cvtepu8_epi32(_mm_set_epi64x(high, low)) + 0 * v;
}
INLINED vf halves_f(const void *from) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
#elif WIDE == 8
INLINED vf every(float x) { return (vf)_mm256_set1_ps(x); }
INLINED vf fma_f(vf a, vf b, vf sum) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
INLINED vi bytes_i(const void *from) {
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
INLINED vi ubytes_i(const void *from) {
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
INLINED vi bytes_of(uint64_t low, uint64_t high, const int v) {
    return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(v ? high : low));
}
INLINED vf halves_f(const void *from) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
#else
INLINED vi bytes_i(const void *from) {
    const int8_t *b = from;
    return (vi){b[0], b[1], b[2], b[3]};
}
INLINED vi ubytes_i(const void *from) {
    const uint8_t *b = from;
    return (vi){b[0], b[1], b[2], b[3]};
}
INLINED vi bytes_of(uint64_t low, uint64_t high, const int v) {
    uint32_t b = (v < 2 ? low : high) >> 32 * (v & 1);
    return (vi){b & 255, b >> 8 & 255, b >> 16 & 255, b >> 24};
}
#if !defined(PLAIN_C)
INLINED vf every(float x) { return (vf)vdupq_n_f32(x); }
INLINED vf fma_f(vf a, vf b, vf sum) {
    return (vf)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}
INLINED vf halves_f(const void *from) {
    float16x4_t h;
    memcpy(&h, from, sizeof(h));
    return (vf)vcvt_f32_f16(h);
}
#else /* right, not fast */
INLINED vf every(float x) { return (vf){x, x, x, x}; }
static __attribute__((noinline, unused)) vf fma_f(vf a, vf b, vf sum) {
    for (int i = 0; i < WIDE; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
    return sum;
}
static inline float half_f(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, low = h & 0x7fff, b;
    float x;
    if (low >= 0x7c00) b = sign | 0x7f800000 | (low & 0x3ff) << 13;
    else if (low >= 0x400) b = sign | ((low << 13) + (112u << 23));
    else {
        x = (float)low * 0x1p-24f;
        return sign ? -x : x;
    }
    memcpy(&x, &b, sizeof(x));
    return x;
}
INLINED vf halves_f(const void *from) {
    const uint16_t *h = from;
    return (vf){half_f(h[0]), half_f(h[1]), half_f(h[2]), half_f(h[3])};
}
#endif
#endif

/* Two numbers of 16 bits a lane, from bytes with a sign. */
INLINED vi byte_pairs(const void *from) {
#if WIDE == 16
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
#elif WIDE == 8
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#elif defined(PLAIN_C)
    const int8_t *b = from;
    vi pairs;
    for (int i = 0; i < WIDE; i++) pairs[i] = (b[2 * i] & 0xffff) | (int32_t)((uint32_t)b[2 * i + 1] << 16);
    return pairs;
#else
    return (vi)vmovl_s8(vld1_s8(from));
#endif
}

/* a - b, of both numbers of a lane. */
INLINED vi less_pairs(vi a, vi b) {
    typedef int16_t vs __attribute__((vector_size(WIDE * 4)));
    return (vi)((vs)a - (vs)b);
}

/* sum + both products of a lane's two numbers. */
INLINED vi add_products(vi sum, vi a, vi b) {
#if WIDE == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif WIDE == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif WIDE == 8 /* as written: compilers make many products before they add any, and spill them */
    vi both;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(both) : "x"(a), "x"(b));
    return sum;
#elif defined(PLAIN_C)
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#else
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    int32x4_t both = vmlal_s16(
        (int32x4_t)sum, vget_low_s16(vuzp1q_s16(x, x)), vget_low_s16(vuzp1q_s16(y, y)));
    return (vi)vmlal_s16(both, vget_low_s16(vuzp2q_s16(x, x)), vget_low_s16(vuzp2q_s16(y, y)));
#endif
}

/* sum + both products of a lane's two bfloat16 numbers, and float32 rounded to such. */
#if WIDE == 16 && defined(__AVX512BF16__)
#define HALF_PRODUCTS
INLINED vf add_half_products(vf sum, vi a, vi b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
static inline void round_halves(const float *x, int64_t count, int16_t *to) {
    for (int64_t i = 0; i < count; i += WIDE)
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh((__m512)load_f(x + i)));
}
#else
INLINED vf add_half_products(vf sum, vi a, vi b) { return sum + 0 * as_f(a + b); } /* in no call */
#endif

/* Vector v of sixteen numbers of 4 bits: the lower half of each byte, then the upper one. */
INLINED vi nibbles_i(uint64_t all, const int v) {
    const uint64_t low = 0x0f0f0f0f0f0f0f0f;
    return bytes_of(all & low, all >> 4 & low, v);
}

/* sum += a * b, rounded once. */
#if WIDE == 8 /* as written: compilers shuffle sums from register to register, and then spill them */
#define ADD_PRODUCT(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#else
#define ADD_PRODUCT(sum, a, b) sum = fma_f(a, b, sum)
#endif
