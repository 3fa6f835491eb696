/* Prints a digest of what kernels make of numbers that are made up: one line a call.
 *
 * The lines are the same for every processor: kernel_digests.txt.
 */
#include <stdio.h>

#include "attend.h"

void outrider_reach(const Sizes *, const uint8_t *, int32_t *, int32_t *);
int outrider_attend(
    const Sizes *, const void *, const void *, const void *, const int64_t *, void *, void *,
    const uint8_t *, const int32_t *, const int32_t *, void *);
void outrider_norm(
    int64_t, int64_t, int64_t, int64_t, float, const void *, const void *, const void *, void *,
    void *);
void outrider_gate(int64_t, int64_t, int64_t, int64_t, const void *, void *);
int outrider_cross(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float,
    const int64_t *, const void *, const void *, const void *, void *);
int outrider_int8(
    int64_t, int64_t, int64_t, int64_t, int64_t, const void *, const int8_t *, const float *,
    const float *, void *);

static uint64_t state;

static uint32_t word(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 32;
}

/* Numbers of either kind of very different size, like those of a bell: sums show their order. */
static void *made(int64_t count, float scale, int is_half) {
    float *x = malloc(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++) sum += (float)(word() >> 8) * 0x1p-24f - 0.5f;
        x[i] = sum * scale * (float)(1 << word() % 6) * 0.125f;
    }
    if (!is_half) return x;
    half *y = malloc(count * sizeof(half));
    for (int64_t i = 0; i < count; i++) {
        uint32_t b;
        memcpy(&b, x + i, 4);
        y[i] = b >> 16;
    }
    free(x);
    return y;
}

static uint64_t digest(const void *from, int64_t bytes) {
    uint64_t found = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < bytes; i++)
        found = (found ^ ((const uint8_t *)from)[i]) * 0x100000001b3u;
    return found;
}

static void attention(
    int64_t B, int64_t Q, int64_t H, int64_t K, int64_t E, int64_t W, int tree, int is_half) {
    state = Q * E + W;
    const int64_t one = is_half ? 2 : 4, there = W + 9;
    Sizes at = {.B = B, .Q = Q, .H = H, .K = K, .E = E, .W = W, .there = there, .threads = 1};
    at.is_half = is_half;
    at.head = there * E, at.seat = K * at.head;
    void *qkv = made(B * Q * (H + 2 * K) * E, 2, is_half), *cos = made(B * Q * E, 1, is_half);
    void *sin = made(B * Q * E, 1, is_half), *keys = made(B * at.seat, 1, is_half);
    void *values = made(B * at.seat, 1, is_half), *out = calloc(B * Q * H * E, one);
    int64_t *slots = calloc(B * Q, 8);
    uint8_t *visible = calloc(B * Q, W);
    int32_t *count = calloc(B * Q, 4), *ahead = calloc(B * Q, 4);
    for (int64_t b = 0; b < B; b++) {
        const int64_t text = W > Q ? word() % (W - Q) : 0;
        for (int64_t q = 0; q < Q; q++) {
            uint8_t *sees = visible + (b * Q + q) * W;
            slots[b * Q + q] = text + q;
            for (int64_t s = 0; s <= text + q; s++)
                sees[s] = s < text || s == text + q || !tree || word() % 2;
        }
    }
    outrider_reach(&at, visible, count, ahead);
    const int failed = outrider_attend(
        &at, qkv, cos, sin, slots, keys, values, visible, count, ahead, out);
    printf("attend %d %ld/%ld/%ld/%ld/%ld/%ld %d: %d %016lx %016lx %016lx\n", is_half, (long)B,
           (long)Q, (long)H, (long)K, (long)E, (long)W, tree, failed,
           (long)digest(out, B * Q * H * E * one), (long)digest(keys, B * at.seat * one),
           (long)digest(values, B * at.seat * one));
    free(qkv), free(cos), free(sin), free(keys), free(values), free(out), free(slots);
    free(visible), free(count), free(ahead);
}

static void between(int64_t rows, int64_t width, int is_half) {
    state = width;
    const int64_t bytes = rows * width * (is_half ? 2 : 4);
    void *x = made(rows * width, 3, is_half), *more = made(rows * width, 3, is_half);
    void *weight = made(width, 1, is_half), *both = made(2 * rows * width, 20, is_half);
    void *sum = malloc(bytes), *normed = malloc(bytes), *out = malloc(bytes);
    outrider_norm(rows, width, 1, is_half, 1e-5f, x, more, weight, sum, normed);
    outrider_gate(rows, width, 1, is_half, both, out);
    printf("between %d %ld/%ld: %016lx %016lx %016lx\n", is_half, (long)rows, (long)width,
           (long)digest(sum, bytes), (long)digest(normed, bytes), (long)digest(out, bytes));
    free(x), free(more), free(weight), free(both), free(sum), free(normed), free(out);
}

static void across(int64_t B, int64_t Q, int64_t H, int64_t E, int64_t T, int is_half) {
    state = T;
    const int64_t wide = (E + 15) / 16 * 16, row = (T + 15) / 16 * 16, head = wide * row;
    const int64_t bytes = B * Q * H * E * (is_half ? 2 : 4);
    void *q = made(B * Q * H * E, 0.5f, is_half), *keys = made(B * H * head, 1, is_half);
    void *values = made(B * H * head, 1, is_half), *out = malloc(bytes);
    int64_t slots[B];
    for (int64_t b = 0; b < B; b++) slots[b] = T;
    outrider_cross(B, Q, H, E, T, H * head, head, 1, is_half, 1, slots, q, keys, values, out);
    printf("cross %d %ld/%ld/%ld/%ld/%ld: %016lx\n", is_half, (long)B, (long)Q, (long)H, (long)E,
           (long)T, (long)digest(out, bytes));
    free(q), free(keys), free(values), free(out);
}

static void eight_bits(int64_t rows, int64_t inputs, int64_t outputs, int is_half) {
    state = rows;
    const int64_t wide = (inputs + 15) / 16 * 16, room = (outputs + 15) / 16 * 16;
    const int64_t bytes = rows * outputs * (is_half ? 2 : 4);
    void *x = made(rows * inputs, 1, is_half), *out = malloc(bytes);
    float *scale = made(room, 1, 0), *bias = made(room, 1, 0);
    int8_t *weight = malloc(room * wide);
    for (int64_t i = 0; i < room * wide; i++) weight[i] = word() % 255 - 127;
    outrider_int8(rows, inputs, outputs, 1, is_half, x, weight, scale, bias, out);
    printf("int8 %d %ld/%ld/%ld: %016lx\n", is_half, (long)rows, (long)inputs, (long)outputs,
           (long)digest(out, bytes));
    free(x), free(out), free(scale), free(bias), free(weight);
}

int main(void) {
    for (int is_half = 1; is_half >= 0; is_half--)
        for (int tree = 0; tree < 2; tree++) {
            attention(3, 1, 4, 4, 64, 200, tree, is_half);
            attention(2, 5, 9, 3, 64, 333, tree, is_half);
            attention(2, 2, 2, 2, 128, 100, tree, is_half);
            attention(1, 40, 4, 1, 80, 150, tree, is_half);
            attention(2, 70, 6, 3, 64, 170, tree, is_half);
            attention(1, 9, 4, 4, 32, 64, tree, is_half);
            attention(1, 20, 2, 1, 256, 90, tree, is_half);
            attention(1, 3, 2, 2, 16, 40, tree, is_half);
            attention(2, 3, 6, 2, 64, 900, tree, is_half);
        }
    for (int is_half = 1; is_half >= 0; is_half--) {
        between(3, 48, is_half);
        between(2, 576, is_half);
    }
    for (int is_half = 1; is_half >= 0; is_half--)
        for (int64_t queries = 1; queries < 14; queries++)
            across(2, queries, 2, queries % 3 ? 64 : 40, 90 + queries, is_half);
    for (int is_half = 1; is_half >= 0; is_half--)
        for (int64_t rows = 1; rows < 8; rows++) eight_bits(rows, 100, 90, is_half);
    return 0;
}
