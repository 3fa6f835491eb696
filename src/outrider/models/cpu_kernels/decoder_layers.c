/* The layers of a decoder, one after the other, in float32 on a CPU: products, norms, gates and
 * attention in one call. Decoders with cross attention are BART's and its like, others Llama's.
 *
 * A row of a call (one token) is computed in one order whatever stands beside it, as in every part.
 * No product may be contracted into a sum but where `fma_` says so: compile with -ffp-contract=off.
 *
 * Shapes: B rows, Q queries, H heads, E numbers of a state, I of what lies between `up` and `down`.
 */
#include "attend.h"
#include "experts.h"
#include "thread_pool.h"

enum { RELU, SILU, GELU };

typedef struct {
    const float *weight, *bias;
    float eps;
} LayerNorm;

typedef struct {
    Linear qkv, out, query, cross_out, up, down;
    LayerNorm text, source, after; /* behind self attention, cross attention and the gate */
} DecoderLayer;

typedef struct {
    int64_t layers, width, inner, act;
    int64_t ahead; /* whether sums go on as they are (pre-norm); else their norms do */
    float scale;   /* of queries to the source */
    const DecoderLayer *layer;
} Decoder;

/* Keys and values of the sources: cross.c. */
typedef struct {
    int64_t most, plane, seat, head; /* numbers from one plane, row, head to the next */
    const float *table;
    const int64_t *slots;
} Sources;

int outrider_attend(
    const Sizes *, const void *, const void *, const void *, const int64_t *, void *, void *,
    const uint8_t *, const int32_t *, const int32_t *, void *);
int outrider_cross(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float,
    const int64_t *, const void *, const void *, const void *, void *);
void outrider_norm(
    int64_t, int64_t, int64_t, int64_t, float, const void *, const void *, const void *, void *, void *);
void outrider_gate(int64_t, int64_t, int64_t, int64_t, const void *, void *);

/* state + more, and the norm of it over its mean and variance: each [rows, E]. With `ahead` the sum
 * goes on as the state, else the norm does. */
static void joined(
    const LayerNorm *norm, int64_t rows, int64_t width, int64_t ahead, float *state,
    const float *more, float *x) {
    for (int64_t r = 0; r < rows; r++, state += width, more += width, x += width) {
        lanes sum = all(0), squares = all(0);
        for (int64_t e = 0; e < width; e += LANES) {
            const lanes a = add(get(state + e), get(more + e));
            put(state + e, a);
            sum = add(sum, a);
        }
        const lanes mean = all(total(sum) / (float)width);
        for (int64_t e = 0; e < width; e += LANES) {
            const lanes a = sub(get(state + e), mean);
            squares = fma_(a, a, squares);
        }
        const lanes by = all(1.0f / sqrtf(total(squares) / (float)width + norm->eps));
        for (int64_t e = 0; e < width; e += LANES) {
            const lanes a = mul(sub(get(state + e), mean), by);
            const lanes normed = fma_(a, get(norm->weight + e), get(norm->bias + e));
            put(x + e, normed);
            if (!ahead) put(state + e, normed);
        }
    }
}

/* erf to 1.5e-7: Abramowitz and Stegun 7.1.26. */
ALWAYS lanes erf_(lanes x) {
    const marks below = above(all(0), x);
    const lanes size = choose(below, minus(x), x);
    const lanes t = over(all(1), fma_(all(0.3275911f), size, all(1)));
    lanes p = fma_(all(1.061405429f), t, all(-1.453152027f));
    p = fma_(p, t, all(1.421413741f));
    p = fma_(p, t, all(-0.284496736f));
    p = fma_(p, t, all(0.254829592f));
    const lanes far = mul(mul(p, t), exp_(minus(mul(size, size))));
    const lanes found = sub(all(1), far);
    return choose(below, minus(found), found);
}

/* What the activation makes of `count` numbers, in place. */
ALWAYS void gated(float *x, int64_t count, const int act) {
    for (int64_t i = 0; i < count; i += LANES) {
        const lanes a = get(x + i);
        lanes made;
        if (act == RELU) made = choose(either(above(a, all(0)), no_number(a)), a, all(0));
        else if (act == SILU) made = over(a, add(all(1), exp_(minus(a))));
        else made = mul(mul(a, all(0.5f)), add(all(1), erf_(mul(a, all(0.70710678f)))));
        put(x + i, made);
    }
}

static void activated(float *x, int64_t count, int64_t act) {
    if (act == RELU) gated(x, count, RELU);
    else if (act == SILU) gated(x, count, SILU);
    else gated(x, count, GELU);
}

/* All layers over state and x [B, Q, E], the first of which are embeddings and what the first layer
 * reads of them. Behind the last they hold the state and what the output layer reads. `kept` [layers]
 * are where the states ahead of each layer go, or NULL, as it may be itself; keys and values [layers]
 * are the cache's.
 *
 * Returns 1 without memory, 2 for a slot that is not there, 3 for what is not compiled. */
int outrider_decoder(
    const Decoder *d, const Sizes *at, const Sources *from, const void *cos, const void *sin,
    const int64_t *slots, void *const *keys, void *const *values, const uint8_t *visible,
    const int32_t *count, const int32_t *ahead, float *const *kept, float *state, float *x) {
    const int64_t rows = at->B * at->Q, width = d->width, all_of = rows * width;
    const int64_t threads = at->threads;
    float *room = numbers(rows * (5 * width + d->inner));
    if (!room) return 1;
    float *qkv = room, *heads = qkv + 3 * all_of, *more = heads + all_of, *inner = more + all_of;
    int failed = 0;
    for (int64_t i = 0; i < d->layers; i++) {
        const DecoderLayer *l = d->layer + i;
        const float *planes = from->table + 2 * i * from->plane;
        if (kept && kept[i]) memcpy(kept[i], state, all_of * sizeof(float));
        if ((failed = multiplied(&l->qkv, rows, threads, x, qkv))) break;
        if ((failed = outrider_attend(
                 at, qkv, cos, sin, slots, keys[i], values[i], visible, count, ahead, heads)))
            break;
        if ((failed = multiplied(&l->out, rows, threads, heads, more))) break;
        joined(&l->text, rows, width, d->ahead, state, more, x);
        if ((failed = multiplied(&l->query, rows, threads, x, qkv))) break;
        if ((failed = outrider_cross(
                 at->B, at->Q, at->H, at->E, from->most, from->seat, from->head, threads, 0, d->scale,
                 from->slots, qkv, planes, planes + from->plane, heads)))
            break;
        if ((failed = multiplied(&l->cross_out, rows, threads, heads, more))) break;
        joined(&l->source, rows, width, d->ahead, state, more, x);
        if ((failed = multiplied(&l->up, rows, threads, x, inner))) break;
        activated(inner, rows * d->inner, d->act);
        if ((failed = multiplied(&l->down, rows, threads, inner, more))) break;
        joined(&l->after, rows, width, d->ahead, state, more, x);
    }
    free(room);
    return failed;
}

typedef struct {
    Linear qkv, out, gate_up, down; /* the last two where there are no experts */
    const Mixture *mixture;
    const float *before, *between; /* norms [E], ahead of attention and of the gate */
    const float *queries, *keys;   /* norms of heads, or NULL */
} LlamaLayer;

typedef struct {
    int64_t layers, width, inner;
    float eps;
    const float *behind; /* the norm behind all of them */
    const LlamaLayer *layer;
} Llama;

/* Rows of queries, keys and values whose queries and keys are normed head by head, `each` a piece. */
typedef struct {
    const Sizes *at;
    const LlamaLayer *layer;
    float eps, *qkv;
    int64_t rows, each;
} HeadNorms;

static void normed_heads(void *about, int64_t piece, int64_t thread) {
    const HeadNorms *of = about;
    const Sizes *at = of->at;
    (void)thread;
    for (int64_t r = piece * of->each; r < of->rows && r < (piece + 1) * of->each; r++) {
        float *q = of->qkv + r * (at->H + 2 * at->K) * at->E, *k = q + at->H * at->E;
        outrider_norm(at->H, at->E, 1, 0, of->eps, q, NULL, of->layer->queries, NULL, q);
        outrider_norm(at->K, at->E, 1, 0, of->eps, k, NULL, of->layer->keys, NULL, k);
    }
}

/* All layers over the embeddings `state` [B, Q, E], which are written over, and the norm behind them
 * of each row's last `last` states: x [B, last, E]. The other arguments are as above.
 *
 * Returns 1 without memory, 2 for a slot that is not there, 3 for what is not compiled. */
int outrider_llama(
    const Llama *d, const Sizes *at, const void *cos, const void *sin, const int64_t *slots,
    void *const *keys, void *const *values, const uint8_t *visible, const int32_t *count,
    const int32_t *ahead, float *const *kept, int64_t last, float *state, float *x) {
    const int64_t rows = at->B * at->Q, width = d->width, threads = at->threads;
    const int64_t heads = at->H * at->E, wide = heads + 2 * at->K * at->E;
    const int64_t shared = wide + heads > 3 * d->inner ? wide + heads : 3 * d->inner;
    float *room = numbers(rows * (2 * width + shared));
    if (!room) return 1;
    float *normed = room, *more = normed + rows * width, *qkv = more + rows * width;
    float *attended = qkv + rows * wide, *both = qkv, *inner = both + rows * 2 * d->inner;
    const float *left = NULL; /* what is not yet added to the state */
    int failed = 0;
    for (int64_t i = 0; i < d->layers; i++) {
        const LlamaLayer *l = d->layer + i;
        const int64_t each = units_of_piece(rows, threads);
        HeadNorms norms = {at, l, d->eps, qkv, rows, each};
        outrider_norm(rows, width, threads, 0, d->eps, state, left, l->before, state, normed);
        if (kept && kept[i]) memcpy(kept[i], state, rows * width * sizeof(float));
        if ((failed = multiplied(&l->qkv, rows, threads, normed, qkv))) break;
        if (l->queries) outrider_share(rows > 64 ? threads : 1, (rows + each - 1) / each, normed_heads, &norms);
        if ((failed = outrider_attend(
                 at, qkv, cos, sin, slots, keys[i], values[i], visible, count, ahead, attended)))
            break;
        if ((failed = multiplied(&l->out, rows, threads, attended, more))) break;
        outrider_norm(rows, width, threads, 0, d->eps, state, more, l->between, state, normed);
        left = more;
        if (l->mixture) {
            if ((failed = outrider_mixture(l->mixture, rows, threads, normed, more))) break;
            continue;
        }
        if ((failed = multiplied(&l->gate_up, rows, threads, normed, both))) break;
        outrider_gate(rows, d->inner, threads, 0, both, inner);
        if ((failed = multiplied(&l->down, rows, threads, inner, more))) break;
    }
    for (int64_t b = 0; b < at->B && !failed; b++) {
        const int64_t from = (b * at->Q + at->Q - last) * width;
        outrider_norm(
            last, width, threads, 0, d->eps, state + from, left ? left + from : NULL, d->behind,
            state + from, x + b * last * width);
    }
    free(room);
    return failed;
}
