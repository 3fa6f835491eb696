/* What stands between the products of a layer with a state: its short convolution, and norms of
 * which some are gated.
 *
 * A node is computed in one order whatever stands beside it. No product may be contracted into a
 * sum but where `fma_` says so: compile with -ffp-contract=off.
 */
#include "lanes.h"

#define MOST_TAPS 16

/* `is_half` is of all tables. A place is a line [C] of a row's `slots` of `source`. */
typedef struct {
    int64_t rows, nodes, channels, taps, slots, is_half, activates;
    int64_t x_row, x_node; /* numbers from row to row, and from node to node */
    const int64_t *places, *lines;
    const uint8_t *there;
    const void *x, *weight, *bias;
    void *source, *out;
} Windows;

/* Sixteen channels from `c` on, of all nodes. */
ALWAYS void convolved(const Windows *of, int64_t c, const int64_t taps, const int is_half) {
    const int64_t nodes = of->nodes, channels = of->channels;
    float given[MOST_TAPS * LANES], tap[MOST_TAPS * LANES];
    lanes by[MOST_TAPS];
    widen(given, of->weight, c * taps, taps * LANES, taps * LANES, is_half);
    for (int64_t i = 0; i < LANES; i++)
        for (int64_t k = 0; k < taps; k++) tap[k * LANES + i] = given[i * taps + k];
    for (int64_t k = 0; k < taps; k++) by[k] = get(tap + k * LANES);
    for (int64_t n = 0; n < of->rows * nodes; n++) {
        const int64_t row = n / nodes * of->slots;
        lanes sum = all(0);
#pragma GCC unroll 4
        for (int64_t k = 0; k < taps; k++) {
            const int64_t at = n * taps + k;
            lanes x = read_as(of->source, (row + of->places[at]) * channels + c, is_half);
            if (of->there && !of->there[at]) x = all(0);
            sum = k ? add(sum, mul(x, by[k])) : mul(x, by[k]);
        }
        if (of->bias) sum = add(sum, read_as(of->bias, c, is_half));
        /* as torch's operators: rounded ahead of the activation */
        write_as(of->out, n * channels + c, sum, is_half);
        if (!of->activates) continue;
        const lanes rounded = read_as(of->out, n * channels + c, is_half);
        write_as(of->out, n * channels + c, silu(rounded), is_half);
    }
}

/* out [B, N, C] = what a convolution over time has of nodes whose windows lie at `places` [B, N, K]
 * of `source` [B, slots, C]; what is not `there` [B, N, K] (null: all is) counts as 0. The weight is
 * [C, K], the bias [C] or null. Ahead of that x [B, N, C] is written to `lines` [B, N], unless these
 * are null. There are sixteen channels at least. */
void outrider_short_conv(const void *windows) {
    const Windows *of = windows;
    const int64_t channels = of->channels, size = of->is_half ? sizeof(half) : sizeof(float);
    if (of->lines)
        for (int64_t n = 0; n < of->rows * of->nodes; n++) {
            const int64_t row = n / of->nodes, to = row * of->slots + of->lines[n];
            memcpy(
                (char *)of->source + to * channels * size,
                (const char *)of->x + (row * of->x_row + n % of->nodes * of->x_node) * size,
                channels * size);
        }
    for (int64_t at = 0; at < channels; at += LANES) {
        const int64_t c = at + LANES > channels ? channels - LANES : at; /* some once more */
        if (of->is_half) convolved(of, c, of->taps, 1);
        else if (of->taps == 4) convolved(of, c, 4, 0);
        else if (of->taps == 3) convolved(of, c, 3, 0);
        else convolved(of, c, of->taps, 0);
    }
}

/* out = weight x / sqrt(mean(x^2) + eps) for groups of `group` numbers of rows [width], with `one`
 * 1 + weight. With a gate, whose rows are `apart` numbers from each other, x is multiplied by
 * silu(gate) `ahead` of that, else the answer is. Groups are whole lanes. */
void outrider_gated_norm(
    int64_t rows, int64_t width, int64_t group, int64_t apart, int64_t ahead, int64_t one, float eps,
    const float *x, const float *gate, const float *weight, float *out) {
    const lanes more = all(one ? 1.0f : 0.0f);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < width; g += group) {
            const float *from = x + r * width + g, *by = gate + r * apart + g;
            float *to = out + r * width + g;
            lanes squares = all(0);
            for (int64_t e = 0; e < group; e += LANES) {
                lanes a = get(from + e);
                if (gate && ahead) a = mul(a, silu(get(by + e)));
                squares = fma_(a, a, squares);
                put(to + e, a);
            }
            const lanes scale = all(1.0f / sqrtf(total(squares) / (float)group + eps));
            for (int64_t e = 0; e < group; e += LANES) {
                lanes a = mul(get(to + e), scale);
                a = mul(a, one ? add(more, get(weight + g + e)) : get(weight + g + e));
                if (gate && !ahead) a = mul(a, silu(get(by + e)));
                put(to + e, a);
            }
        }
}
