/* Norms and gates between the products of a Llama's layers, in bfloat16 or float32 on a CPU.
 *
 * A row of a call (one token) is computed in one order whatever stands beside it. No product may be
 * contracted into a sum but where `fma` says so: compile with -ffp-contract=off.
 */
#include "lanes.h"
#include "thread_pool.h"

ALWAYS void normed_row(
    int64_t at, int64_t width, float eps, const void *state, const void *more, const void *weight,
    void *sum, void *normed, const int is_half) {
    lanes squares = all(0);
    for (int64_t e = 0; e < width; e += LANES) {
        lanes a = read_as(state, at + e, is_half);
        if (more) {
            write_as(sum, at + e, add(a, read_as(more, at + e, is_half)), is_half);
            a = read_as(sum, at + e, is_half);
        }
        squares = fma_(a, a, squares);
    }
    const lanes by = all(1.0f / sqrtf(total(squares) / (float)width + eps));
    if (more) state = sum;
    for (int64_t e = 0; e < width; e += LANES) {
        const lanes scaled = mul(read_as(state, at + e, is_half), by);
        write_as(normed, at + e, mul(scaled, read_as(weight, e, is_half)), is_half);
    }
}

typedef struct {
    int64_t rows, width, each, is_half;
    float eps;
    const void *state, *more, *weight;
    void *sum, *out;
} RowWise;

/* How many rows are a piece, and that many threads: one for what is soon done. */
static int64_t rows_of_piece(int64_t rows, int64_t width, int64_t *threads) {
    if (rows * width <= 65536) *threads = 1;
    return units_of_piece(rows, *threads);
}

static void normed_rows(void *about, int64_t piece, int64_t thread) {
    const RowWise *of = about;
    (void)thread;
    for (int64_t r = piece * of->each; r < of->rows && r < (piece + 1) * of->each; r++) {
        const int64_t at = r * of->width;
        if (of->is_half) normed_row(at, of->width, of->eps, of->state, of->more, of->weight, of->sum, of->out, 1);
        else normed_row(at, of->width, of->eps, of->state, of->more, of->weight, of->sum, of->out, 0);
    }
}

/* sum = state + more (none: state alone), normed = sum / sqrt(mean(sum^2) + eps) * weight; all are
 * bfloat16 or, without `is_half`, float32. */
void outrider_norm(
    int64_t rows, int64_t width, int64_t threads, int64_t is_half, float eps, const void *state,
    const void *more, const void *weight, void *sum, void *normed) {
    const int64_t each = rows_of_piece(rows, width, &threads);
    RowWise of = {rows, width, each, is_half, eps, state, more, weight, sum, normed};
    outrider_share(threads, (rows + each - 1) / each, normed_rows, &of);
}

ALWAYS void gated_row(int64_t r, int64_t width, const void *both, void *out, const int is_half) {
    const int64_t gate = 2 * r * width, up = gate + width;
    for (int64_t e = 0; e < width; e += LANES) {
        const lanes x = read_as(both, gate + e, is_half);
        write_as(out, r * width + e, mul(silu(x), read_as(both, up + e, is_half)), is_half);
    }
}

static void gated_rows(void *about, int64_t piece, int64_t thread) {
    const RowWise *of = about;
    (void)thread;
    for (int64_t r = piece * of->each; r < of->rows && r < (piece + 1) * of->each; r++) {
        if (of->is_half) gated_row(r, of->width, of->state, of->out, 1);
        else gated_row(r, of->width, of->state, of->out, 0);
    }
}

/* silu(gate) * up for rows [gate, up] of 2 `width` numbers. */
void outrider_gate(
    int64_t rows, int64_t width, int64_t threads, int64_t is_half, const void *both, void *out) {
    const int64_t each = rows_of_piece(rows, width, &threads);
    RowWise of = {.rows = rows, .width = width, .each = each, .is_half = is_half, .state = both, .out = out};
    outrider_share(threads, (rows + each - 1) / each, gated_rows, &of);
}
