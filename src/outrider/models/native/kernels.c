/* Norms and gates between the products of a Llama's layers, in bfloat16 on a CPU.
 *
 * A row of a call (one token) is computed in one order whatever stands beside it. No product may be
 * contracted into a sum but where `fma` says so: compile with -ffp-contract=off.
 */
#include "lanes.h"

/* sum = state + more (none: state alone), normed = sum / sqrt(mean(sum^2) + eps) * weight. */
void outrider_norm(
    int64_t rows, int64_t width, int64_t threads, float eps, const half *state, const half *more,
    const half *weight, half *sum, half *normed) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > 65536)
    for (int64_t r = 0; r < rows; r++) {
        const half *x = state + r * width;
        lanes squares = {0};
        for (int64_t e = 0; e < width; e += LANES) {
            lanes a = load(x + e);
            if (more) {
                store(sum + r * width + e, a + load(more + r * width + e));
                a = load(sum + r * width + e);
            }
            squares = fma_(a, a, squares);
        }
        float by = 1.0f / sqrtf(total(squares) / (float)width + eps);
        if (more) x = sum + r * width;
        for (int64_t e = 0; e < width; e += LANES)
            store(normed + r * width + e, load(x + e) * by * load(weight + e));
    }
}

/* silu(gate) * up for rows [gate, up] of 2 `width` numbers. */
void outrider_gate(int64_t rows, int64_t width, int64_t threads, const half *both, half *out) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > 65536)
    for (int64_t r = 0; r < rows; r++) {
        const half *gate = both + 2 * r * width, *up = gate + width;
        for (int64_t e = 0; e < width; e += LANES) {
            lanes x = load(gate + e);
            store(out + r * width + e, x / (1.0f + exp_(-x)) * load(up + e));
        }
    }
}
