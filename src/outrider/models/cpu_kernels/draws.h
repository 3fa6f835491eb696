/* Draws in proportion to weights, by inverse transform, and the words of noise that they take. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LARGEST_BLOCK 256

static inline uint64_t mixed(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

/* Word `index` of a stream. */
static inline uint64_t word_of(uint64_t key, uint64_t index) {
    return mixed(key + (index + 1) * 0x9E3779B97F4A7C15u);
}

static inline double fine(uint64_t word) { return (double)(word >> 11) * 0x1p-53; }

static inline double at(const void *x, int64_t i, int is_double) {
    return is_double ? ((const double *)x)[i] : ((const float *)x)[i];
}

/* The first place whose running sum is beyond the mark; behind all by rounding: the last one with
 * weight. */
static inline int64_t beyond(const double *upto, int64_t count, double mark) {
    int64_t place = 0;
    while (place < count && upto[place] <= mark) place++;
    if (place == count)
        for (place = 0; upto[place] < upto[count - 1]; place++) {}
    return place;
}

/* An index of a row in proportion to it, given the running sums of its blocks; 0 of nothing. */
static inline int64_t found(
    const void *row, int is_double, int64_t vocab, int64_t block,
    const double *upto, int64_t blocks, double uniform
) {
    double inside[LARGEST_BLOCK], sum = 0, mark = uniform * upto[blocks - 1];
    if (!(upto[blocks - 1] > 0)) return 0;
    int64_t which = beyond(upto, blocks, mark), start = which * block;
    int64_t count = vocab - start < block ? vocab - start : block;
    for (int64_t k = 0; k < count; k++) inside[k] = sum += at(row, start + k, is_double);
    return start + beyond(inside, count, which ? mark - upto[which - 1] : mark);
}
