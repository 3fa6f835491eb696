/* Block verification of drafted chains, from weights exp(z / T) that others have computed.
 *
 * Every number has the bits of the walk in NumPy (outrider/ops/cpu/block.py), which is the
 * specification and judges the rows that are left to it: sums are NumPy's pairwise ones in
 * float32, what is made of them is float64. Compile with -ffp-contract=off.
 */
#include "lanes.h"

#define WIDE 8    /* sums that run side by side */
#define LEAF 128  /* numbers that are added up without being halved */
#define BLOCK 64  /* numbers of a block of a draw: ops/cpu/rows.py */
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

static float sum(const float *x, int64_t count) {
    if (count > LEAF) {
        int64_t half = count / 2;
        half -= half % WIDE;
        return sum(x, half) + sum(x + half, count - half);
    }
    int64_t i = 0;
    float total = 0;
    if (count >= WIDE) {
        eight r = *(const eight *)x;
        for (i = WIDE; i < count - count % WIDE; i += WIDE) r += *(const eight *)(x + i);
        total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    }
    for (; i < count; i++) total += x[i];
    return total;
}

static float common(
    const float *p, const float *q, float factor, int64_t count, float *restrict room
) {
    for (int64_t i = 0; i < count; i++) {
        float drawn = q[i] * factor;
        room[i] = p[i] < drawn ? p[i] : drawn;
    }
    return sum(room, count);
}

static void surplus(
    const float *p, const float *q, float factor, int64_t count, float *restrict room
) {
    for (int64_t i = 0; i < count; i++) {
        float left = p[i] - q[i] * factor;
        room[i] = left > 0 ? left : 0;
    }
}

static uint64_t mixed(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

static uint64_t word(int64_t seed, int64_t position, uint64_t purpose, uint64_t index) {
    uint64_t golden = 0x9E3779B97F4A7C15u, key = mixed((uint64_t)seed + purpose * golden);
    key = mixed(key ^ ((uint64_t)position * 0xBF58476D1CE4E5B9u));
    return mixed(key + (index + 1) * golden);
}

/* A token in proportion to the weights, by inverse transform, a block first; and their sum. */
static int64_t picked(const float *row, int64_t vocab, double uniform, double *mass) {
    int64_t blocks = (vocab + BLOCK - 1) / BLOCK, at = 0, place = 0;
    double upto[blocks];
    for (int64_t k = 0; k < blocks; k++) {
        const float *part = row + k * BLOCK;
        int64_t count = vocab - k * BLOCK < BLOCK ? vocab - k * BLOCK : BLOCK;
        float block = part[0];
        if (count > 1) block += sum(part + 1, count - 1);
        upto[k] = k ? upto[k - 1] + block : block;
    }
    double whole = *mass = upto[blocks - 1];
    if (!(whole > 0)) return 0;
    double mark = uniform * whole;
    while (at < blocks && upto[at] <= mark) at++;
    if (at == blocks) /* rounding at the end: the last block with weight */
        for (at = 0; upto[at] < whole; at++) {}
    if (at) mark -= upto[at - 1];
    row += at * BLOCK;
    int64_t count = vocab - at * BLOCK < BLOCK ? vocab - at * BLOCK : BLOCK;
    double inside[BLOCK];
    for (int64_t k = 0; k < count; k++) inside[k] = k ? inside[k - 1] + row[k] : row[k];
    while (place < count && inside[place] <= mark) place++;
    if (place == count)
        for (place = 0; inside[place] < inside[count - 1]; place++) {}
    return at * BLOCK + place;
}

/* One row; 0 leaves it to others. */
static int judged(
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
            if (shared) known = (float)(common(p, q, (float)(mass / whole), vocab, room) / mass);
        }
        if (length) {
            double keep = 1;
            if (to < limits->nothing) excess = 0;
            else if (!placed && to < 1) {
                double factor = mass / fmax(whole * to, 1e-300);
                surplus(p, q, (float)fmin(factor, limits->factor), vocab, room);
                excess = sum(room, vocab) * to / mass;
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
            surplus(p, q, (float)fmin(factor, limits->factor), vocab, room);
        }
    }
    uniform = (double)(word(draft->seeds[b], draft->starts[b], RESIDUAL, 0) >> 11) * 0x1p-53;
    double got;
    *next = picked(left, vocab, uniform, &got);
    if (!(got > limits->empty * mass)) *next = picked(p, vocab, uniform, &got);
    for (int64_t k = best; k < n->depth; k++) path[k] = -1;
    for (int64_t k = best < length ? best + 1 : length; shared && k < n->depth; k++)
        shared[k] = NAN;
    *count = best;
    return 1;
}

/* Rows first..stop; `done` says which were judged. `shared` is sum min(p, q), or NULL. */
void outrider_block(
    const Limits *limits, const Sizes *n, const Draft *draft, const float *weights,
    int64_t *path, int64_t *count, int64_t *next, float *shared, uint8_t *done
) {
    for (int64_t b = n->first; b < n->stop; b++) {
        done[b] = judged(
            limits, n, draft, weights + (b - n->first) * n->nodes * n->vocab, b,
            path + b * n->depth, count + b, next + b, shared ? shared + b * n->depth : NULL);
    }
}
