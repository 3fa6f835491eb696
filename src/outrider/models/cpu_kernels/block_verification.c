/* Block verification of drafted chains, from weights exp(z / T) that others have computed.
 *
 * Every number has the bits of the walk in NumPy (outrider/ops/cpu/block.py), which is the
 * specification and verifies the rows that are left to it: sums are NumPy's pairwise ones in
 * float32, what is made of them is float64. Compile with -ffp-contract=off.
 */
#include "draws.h"

#define WIDE 8    /* sums that run side by side */
#define LEAF 128  /* numbers that are added up without being halved */
#define BLOCK 64  /* numbers of a block of a draw: ops/cpu/law_slices.py */
#define ACCEPT 2  /* purposes of noise.py */
#define RESIDUAL 3
#define FIXED 0   /* a placed child: types/drafts.py */

typedef float eight __attribute__((vector_size(WIDE * 4), aligned(4)));

typedef struct {
    double least, most; /* of a row's sum; others are computed again with the maximum taken off */
    double factor;      /* the largest of a row */
    double nothing;     /* a reach below keeps nothing */
    double empty;       /* of a law, is nothing */
} Limits;

typedef struct {
    int64_t first, stop; /* rows of the batch whose weights these are */
    int64_t batch, nodes, vocab, draws, laws, depth;
    int64_t shared;      /* whether one table of draws serves all rows */
} Sizes;

typedef struct {
    const int64_t *tokens, *kids, *kinds, *laws, *seeds, *starts;
    const float *const *drawn; /* a law of the draft each, [B, V], its rows `stride` apart */
    const int64_t *stride;
    const double *sums; /* [laws, B] */
} Draft;

typedef int32_t signs __attribute__((vector_size(WIDE * 4)));

enum { ALONE, COMMON, SURPLUS }; /* p, min(p, f q), (p - f q)+ */

static inline float one(int how, float p, float drawn) {
    if (how == ALONE) return p;
    if (how == COMMON) return p < drawn ? p : drawn;
    return p - drawn > 0 ? p - drawn : 0;
}

static inline eight some(int how, const float *p, const float *q, float factor) {
    eight mine = *(const eight *)p;
    if (how == ALONE) return mine;
    eight drawn = *(const eight *)q * factor, left = mine - drawn;
    signs less = how == COMMON ? mine < drawn : left > (eight){0};
    if (how == COMMON) return (eight)((less & (signs)mine) | (~less & (signs)drawn));
    return (eight)(less & (signs)left);
}

/* The sum of what `how` makes of each pair; nothing but p is read for the first. */
__attribute__((always_inline)) static inline float leaf(
    int how, const float *p, const float *q, float factor, int64_t count
) {
    int64_t i = 0;
    float total = 0;
    if (count >= WIDE) {
        eight r = some(how, p, q, factor);
        for (i = WIDE; i < count - count % WIDE; i += WIDE)
            r += some(how, p + i, how ? q + i : q, factor);
        total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    }
    for (; i < count; i++) total += one(how, p[i], how ? q[i] * factor : 0);
    return total;
}

static float summed(int how, const float *p, const float *q, float factor, int64_t count) {
    if (count > LEAF) {
        int64_t half = count / 2;
        half -= half % WIDE;
        float first = summed(how, p, q, factor, half);
        return first + summed(how, p + half, how ? q + half : q, factor, count - half);
    }
    if (how == ALONE) return leaf(ALONE, p, q, factor, count);
    return leaf(how == COMMON ? COMMON : SURPLUS, p, q, factor, count);
}

static float sum(const float *x, int64_t count) { return summed(ALONE, x, NULL, 0, count); }

static uint64_t word(int64_t seed, int64_t position, uint64_t purpose, uint64_t index) {
    uint64_t key = mixed((uint64_t)seed + purpose * 0x9E3779B97F4A7C15u);
    return word_of(mixed(key ^ ((uint64_t)position * 0xBF58476D1CE4E5B9u)), index);
}

/* A token in proportion to the weights, by inverse transform, a block first; and their sum. */
static int64_t picked(const float *row, int64_t vocab, double uniform, double *mass) {
    int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    double upto[blocks];
    for (int64_t k = 0; k < blocks; k++) {
        const float *part = row + k * BLOCK;
        int64_t count = vocab - k * BLOCK < BLOCK ? vocab - k * BLOCK : BLOCK;
        float block = part[0];
        if (count > 1) block += sum(part + 1, count - 1);
        upto[k] = k ? upto[k - 1] + block : block;
    }
    *mass = upto[blocks - 1];
    return found(row, 0, vocab, BLOCK, upto, blocks, uniform);
}

/* One row; 0 leaves it to others. */
static int verified(
    const Limits *limits, const Sizes *n, const Draft *draft, const float *weights, int64_t b,
    int64_t *path, int64_t *count, int64_t *next, float *shared
) {
    int64_t vocab = n->vocab, wide = n->draws, table = n->shared ? 0 : b * n->nodes * wide;
    const int64_t *tokens = draft->tokens + b * n->nodes, *kids = draft->kids + table;
    const int64_t *kinds = draft->kinds + table, *laws = draft->laws + table;
    int64_t length = 0, best = 0, node = 0, before = 0;
    double reach[n->depth + 1], uniform, mass, whole = 1;
    float room[vocab];
    const float *p, *q = NULL;
    reach[0] = 1;
    for (;;) {
        double to = reach[length];
        if (length) uniform = (double)(
            word(draft->seeds[b], draft->starts[b], ACCEPT, before * wide) >> 40) * 0x1p-24;
        int more = wide && length < n->depth && kids[node * wide] >= 0;
        if (!more && length && uniform < to) best = length;
        if (!more || !(to > 0)) break;
        int64_t kid = kids[node * wide], law = laws[node * wide];
        if (kid >= n->nodes || tokens[kid] < 0 || tokens[kid] >= vocab) return 0;
        int64_t token = tokens[kid];
        int placed = !draft->drawn || kinds[node * wide] == FIXED;
        if (!placed && (law < 0 || law >= n->laws)) return 0;
        p = weights + node * vocab;
        mass = sum(p, vocab);
        if (!(limits->least < mass && mass < limits->most)) return 0;
        double owed = p[token] / mass, against = 1, excess = to * (1 - owed);
        float known = (float)owed;
        if (!placed) {
            q = draft->drawn[law] + b * draft->stride[law];
            whole = draft->sums[law * n->batch + b];
            if (!(whole > limits->least)) return 0;
            against = q[token] / whole;
            if (shared) known = (float)(
                summed(COMMON, p, q, (float)(mass / whole), vocab) / mass);
        }
        if (length) {
            double keep = 1;
            if (to < limits->nothing) excess = 0;
            else if (!placed && to < 1) {
                double factor = mass / fmax(whole * to, 1e-300);
                float by = (float)fmin(factor, limits->factor);
                excess = summed(SURPLUS, p, q, by, vocab) * to / mass;
            }
            if (to < 1) {
                double bottom = excess + 1 - to;
                keep = bottom > 0 ? excess / bottom : 1;
            }
            if (uniform < keep) best = length;
        }
        double after = against > 0 ? to * owed / against : owed > 0;
        before = node;
        if (shared) shared[length] = known;
        path[length++] = node = kid;
        reach[length] = after < 1 ? after : 1;
    }
    node = best ? path[best - 1] : 0;
    p = weights + node * vocab;
    mass = sum(p, vocab);
    if (!(limits->least < mass && mass < limits->most)) return 0;
    const float *left = p;
    if (best < length) {
        left = room;
        if (!draft->drawn || kinds[node * wide] == FIXED) {
            memcpy(room, p, vocab * sizeof(float));
            room[tokens[path[best]]] = 0;
        } else {
            int64_t law = laws[node * wide];
            whole = draft->sums[law * n->batch + b];
            q = draft->drawn[law] + b * draft->stride[law];
            double factor = mass / fmax(whole * reach[best], 1e-300);
            float by = (float)fmin(factor, limits->factor);
            for (int64_t i = 0; i < vocab; i++) room[i] = one(SURPLUS, p[i], q[i] * by);
        }
    }
    uniform = fine(word(draft->seeds[b], draft->starts[b], RESIDUAL, 0));
    double got;
    *next = picked(left, vocab, uniform, &got);
    if (!(got > limits->empty * mass)) *next = picked(p, vocab, uniform, &got);
    for (int64_t k = best; k < n->depth; k++) path[k] = -1;
    for (int64_t k = best < length ? best + 1 : length; shared && k < n->depth; k++)
        shared[k] = NAN;
    *count = best;
    return 1;
}

/* Rows first..stop; `done` says which were verified. `shared` is sum min(p, q), or NULL. */
void outrider_block(
    const Limits *limits, const Sizes *n, const Draft *draft, const float *weights,
    int64_t *path, int64_t *count, int64_t *next, float *shared, uint8_t *done
) {
    for (int64_t b = n->first; b < n->stop; b++) {
        done[b] = verified(
            limits, n, draft, weights + (b - n->first) * n->nodes * n->vocab, b,
            path + b * n->depth, count + b, next + b, shared ? shared + b * n->depth : NULL);
    }
}
