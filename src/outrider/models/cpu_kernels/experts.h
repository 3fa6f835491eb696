/* Products of packed weights as compiled layers take them, and mixtures of experts of those. */
#pragma once
#include "lanes.h"

#define PARTS 3 /* weights of one product, at most */

typedef struct {
    int64_t format, per, outputs;
    const uint8_t *weight;
} Part; /* of a product: packed_linear.c */

typedef struct {
    int64_t parts, inputs, outputs;
    Part of[PARTS];
    const float *bias; /* or NULL */
} Linear;

typedef struct {
    int64_t format, per, outputs;
    const uint8_t *const *weights; /* of each expert */
} ExpertsPart;

typedef struct {
    int64_t parts, inputs, outputs;
    ExpertsPart of[PARTS];
} Experts;

typedef struct {
    int64_t experts, chosen, whole; /* `whole`: weights of those chosen are divided by their sum */
    Linear route;
    Experts gate_up, down;
    Linear shared_gate_up, shared_down, gate; /* of one that all tokens share; without parts: none */
} Mixture;

int outrider_packed_linear(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const float *, const uint8_t *,
    const float *, float *);
int outrider_mixture(const Mixture *, int64_t, int64_t, const float *, float *);

/* So many numbers, in whole lines. */
static inline float *numbers(int64_t count) {
    return aligned_alloc(64, (count + LANES) * sizeof(float) / 64 * 64 + 64);
}

static inline int multiplied(const Linear *l, int64_t rows, int64_t threads, const float *x, float *y) {
    const float *bias = l->bias;
    for (int64_t i = 0; i < l->parts; i++) {
        const Part *p = l->of + i;
        const int failed = outrider_packed_linear(
            p->format, p->per, rows, l->inputs, p->outputs, l->outputs, threads, x, p->weight, bias, y);
        if (failed) return failed;
        y += p->outputs;
        if (bias) bias += p->outputs;
    }
    return 0;
}
