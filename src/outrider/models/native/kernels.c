/* What stands between the products of a Llama's layers, in bfloat16 on a CPU.
 *
 * A row of a call (one token) is computed in one order whatever stands beside it: sums run over
 * sixteen lanes in the order of the slots, and blocks of queries share what they read, not how they
 * add. So a row has the same bits for any number of rows, queries and visible slots. No product
 * may be contracted into a sum but where `fma` says so: compile with -ffp-contract=off.
 *
 * Shapes: B rows, Q queries, H heads, K key/value heads, E numbers a head, W visible slots.
 */
#include "lanes.h"

#define BLOCK 4 /* queries that share what is read */
#define MANY 128 /* queries of a prompt that share what is widened and turned, */
#define PIECE 64 /* so many slots of values at a time */
#define WIDEST 256 /* numbers of a head */

/* Scores of sixteen slots for one query; `keys` [16, E] as float32. */
static inline __attribute__((always_inline)) lanes dots(
    const float *query, const float *keys, const int size) {
    lanes sums[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) {
        lanes sum = {0};
        for (int e = 0; e < size; e += LANES)
            sum = fma_(*(const lanes *)(query + e), *(const lanes *)(keys + k * size + e), sum);
        sums[k] = sum;
    }
    return totals(sums);
}

typedef struct {
    lanes of[BLOCK];
} Few;

static inline __attribute__((always_inline)) Few plus(Few a, Few b) {
    for (int q = 0; q < BLOCK; q++) a.of[q] += b.of[q];
    return a;
}

/* What lane `l` sums up in `dots`, here of sixteen slots at once. */
static inline __attribute__((always_inline)) Few lane(
    const float *queries, const float *turned, const int64_t size, const int l) {
    Few sum = {0};
    for (int64_t e = l; e < size; e += LANES)
        for (int q = 0; q < BLOCK; q++)
            sum.of[q] = fma_(
                all(queries[q * size + e]), *(const lanes *)(turned + e * LANES), sum.of[q]);
    return sum;
}

/* `dots` of BLOCK queries, bit for bit; `turned` [E, 16] are the keys of sixteen slots. */
#define TWO(l) plus(lane(queries, turned, size, l), lane(queries, turned, size, l + 1))
#define FOUR(l) plus(TWO(l), TWO(l + 2))
#define EIGHT(l) plus(FOUR(l), FOUR(l + 4))
static inline __attribute__((always_inline)) Few dots_of(
    const float *queries, const float *turned, const int64_t size) {
    return plus(EIGHT(0), EIGHT(8));
}

/* Sums of weighted values over the first `stop` slots, 16 * `wide` numbers of them each. */
static inline __attribute__((always_inline)) void weigh(
    float *sums, const float *weights, int64_t row, const half *values, int size, int64_t stop,
    const int few, const int wide) {
    lanes sum[BLOCK * 4];
    for (int q = 0; q < few; q++)
        for (int e = 0; e < wide; e++) sum[q * wide + e] = (lanes){0};
    for (int64_t s = 0; s < stop; s++) {
        lanes value[4];
        for (int e = 0; e < wide; e++) value[e] = load(values + s * size + e * LANES);
        for (int q = 0; q < few; q++) {
            lanes weight = all(weights[q * row + s]);
            for (int e = 0; e < wide; e++)
                sum[q * wide + e] = fma_(weight, value[e], sum[q * wide + e]);
        }
    }
    for (int q = 0; q < few; q++)
        for (int e = 0; e < wide; e++) *(lanes *)(sums + q * WIDEST + e * LANES) = sum[q * wide + e];
}

static void weighed(
    float *sums, const float *weights, int64_t row, const half *values, int size, int64_t stop,
    int few) {
    int e = 0;
    for (; e + 4 * LANES <= size; e += 4 * LANES)
        switch (few) {
        case 1: weigh(sums + e, weights, row, values + e, size, stop, 1, 4); break;
        case 2: weigh(sums + e, weights, row, values + e, size, stop, 2, 4); break;
        case 3: weigh(sums + e, weights, row, values + e, size, stop, 3, 4); break;
        default: weigh(sums + e, weights, row, values + e, size, stop, 4, 4);
        }
    for (; e < size; e += LANES)
        for (int q = 0; q < few; q++)
            weigh(sums + e + q * WIDEST, weights + q * row, row, values + e, size, stop, 1, 1);
}

typedef struct {
    int64_t B, Q, H, K, E, W; /* see above */
    int64_t there; /* slots of a row of the cache */
    int64_t seat, head; /* numbers from one row, one head of the cache to the next */
    int64_t threads;
} Sizes;

/* How many slots each node sees, [B, Q], and how many of them come before the first that it does
 * not see; `visible` [B, Q, W]. */
void outrider_reach(const Sizes *at, const uint8_t *visible, int32_t *count, int32_t *ahead) {
    for (int64_t node = 0; node < at->B * at->Q; node++, visible += at->W) {
        int64_t first = 0, seen = 0;
        while (first < at->W && visible[first]) first++;
        for (int64_t s = first; s < at->W; s++) seen += visible[s] != 0;
        ahead[node] = first;
        count[node] = first + seen;
    }
}

static inline void turn(float *to, const half *x, const half *cos, const half *sin, int64_t size) {
    int64_t half_ = size / 2; /* a power of two times eight or more */
    _Alignas(64) float plain[WIDEST], c[WIDEST], s[WIDEST];
    for (int64_t e = 0; e < size; e += LANES) {
        *(lanes *)(plain + e) = load(x + e);
        *(lanes *)(c + e) = load(cos + e);
        *(lanes *)(s + e) = load(sin + e);
    }
    for (int64_t e = 0; e < size; e++)
        to[e] = __builtin_fmaf(plain[e < half_ ? e + half_ : e - half_], s[e], plain[e] * c[e]);
}

/* Write keys and values of the rows' nodes; qkv [B, Q, H + 2 K, E], cos and sin [B, Q, E]. */
static void note(
    const Sizes *at, const half *qkv, const half *cos, const half *sin, const int64_t *slots,
    half *keys, half *values, int64_t b, int64_t k) {
    _Alignas(64) float turned[WIDEST];
    for (int64_t q = 0; q < at->Q; q++) {
        int64_t node = b * at->Q + q;
        const half *key = qkv + (node * (at->H + 2 * at->K) + at->H + k) * at->E;
        int64_t place = b * at->seat + k * at->head + slots[node] * at->E;
        turn(turned, key, cos + node * at->E, sin + node * at->E, at->E);
        for (int64_t e = 0; e < at->E; e += LANES)
            store(keys + place + e, *(lanes *)(turned + e));
        memcpy(values + place, key + at->K * at->E, at->E * sizeof(half));
    }
}

/* The slots that a node sees behind the first that it does not see, in their order. */
static void listed(const uint8_t *visible, int64_t ahead, int64_t count, int32_t *slots) {
    for (int64_t s = ahead; ahead < count; s++)
        if (visible[s]) slots[ahead++] = s;
}

/* Scores of `end` slots, in whole lanes, as weights in their place; and what these sum to. */
static inline float weights_of(float *scores, int64_t end) {
    lanes top = all(-3.0e38f), sum = {0};
    for (int64_t s = 0; s < end; s += LANES) top = widest(top, *(lanes *)(scores + s));
    float best = top[0];
    for (int i = 1; i < LANES; i++) best = top[i] > best ? top[i] : best;
    for (int64_t s = 0; s < end; s += LANES) {
        lanes *here = (lanes *)(scores + s);
        *here = exp_(*here - best);
        sum += *here;
    }
    return total(sum);
}

/* softmax(q k' / sqrt(E)) v for up to BLOCK of the queries over one head of keys and values.
 *
 * What a query sees is counted without gaps: the third slot that it sees is its third, wherever it
 * lies. So a node of a tree adds as it would if its path stood alone. `scores` [BLOCK, W'] and
 * `places` [BLOCK, W'] are room, W' is W in whole lanes. */
static inline __attribute__((always_inline)) void answer(
    const Sizes *at, const int64_t E, const half *qkv, const half *cos, const half *sin,
    const half *keys, const half *values, const uint8_t *visible, const int32_t *count,
    const int32_t *ahead, half *out, int64_t b, int64_t k, int64_t first, int few, float *scores,
    int32_t *places) {
    _Alignas(64) float query[BLOCK][WIDEST], block[LANES * WIDEST], sums[BLOCK * WIDEST];
    const int64_t groups = at->H / at->K, row = (at->W + LANES - 1) / LANES * LANES;
    const float scale = 1.0f / sqrtf((float)E);
    int64_t nodes[BLOCK], heads[BLOCK], sees[BLOCK], most = 0, common = at->W;
    int gaps = 0;
    for (int q = 0; q < few; q++) {
        nodes[q] = b * at->Q + (first + q) / groups;
        heads[q] = k * groups + (first + q) % groups;
        const half *from = qkv + (nodes[q] * (at->H + 2 * at->K) + heads[q]) * E;
        turn(query[q], from, cos + nodes[q] * E, sin + nodes[q] * E, E);
        for (int64_t e = 0; e < E; e++) query[q][e] *= scale;
        int64_t near = ahead[nodes[q]];
        sees[q] = count[nodes[q]];
        if (sees[q] > most) most = sees[q];
        if (near < common) common = near;
        if (near < sees[q]) {
            gaps = 1;
            listed(visible + nodes[q] * at->W, near, sees[q], places + q * row);
        }
    }
    if (!gaps) common = most; /* what some do not see yet has no weight for them */
    for (int q = 0; q < few; q++)
        for (int64_t s = common; s < ahead[nodes[q]]; s++) places[q * row + s] = s;
    keys += b * at->seat + k * at->head;
    values += b * at->seat + k * at->head;
    const marks number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t s = 0; s < common; s += LANES) {
        int64_t there = common - s < LANES ? common - s : LANES;
        for (int64_t e = 0; e < there * E; e += LANES)
            *(lanes *)(block + e) = load(keys + s * E + e);
        for (int64_t e = 0; e < there * E; e += 32) __builtin_prefetch(values + s * E + e);
        memset(block + there * E, 0, (LANES - there) * E * sizeof(float));
        for (int q = 0; q < few; q++)
            *(lanes *)(scores + q * row + s) =
                choose(number < (int32_t)(sees[q] - s), dots(query[q], block, E), all(-INFINITY));
    }
    float rest[BLOCK];
    for (int q = 0; q < few; q++) {
        float *mine = scores + q * row;
        int64_t end = gaps ? sees[q] : most;
        for (int64_t s = common; s < end; s += LANES) { /* none without gaps */
            int64_t there = end - s < LANES ? end - s : LANES;
            for (int64_t i = 0; i < there; i++)
                for (int64_t e = 0; e < E; e += LANES)
                    *(lanes *)(block + i * E + e) = load(keys + places[q * row + s + i] * E + e);
            memset(block + there * E, 0, (LANES - there) * E * sizeof(float));
            lanes score = dots(query[q], block, E);
            memcpy(mine + s, &score, there * sizeof(float));
        }
        for (int64_t s = end; s % LANES; s++) mine[s] = -INFINITY;
        rest[q] = weights_of(mine, end);
    }
    weighed(sums, scores, row, values, E, common, few);
    for (int q = 0; q < few; q++) {
        half *to = out + (nodes[q] * at->H + heads[q]) * E;
        float share = rest[q] == 0 ? 0 : 1 / rest[q]; /* nothing is seen: nothing is said */
        for (int64_t e = 0; e < E; e += LANES) {
            lanes sum = *(lanes *)(sums + q * WIDEST + e);
            for (int64_t s = common; gaps && s < sees[q]; s++)
                sum = fma_(all(scores[q * row + s]), load(values + places[q * row + s] * E + e), sum);
            store(to + e, sum * share);
        }
    }
}

/* Sums of weighted values, [BLOCK, E], go on over `stop` slots; `values` as float32. */
static inline __attribute__((always_inline)) void weigh_some(
    float *sums, const float *weights, int64_t row, const float *values, int64_t size, int64_t stop,
    const int wide) {
    lanes sum[BLOCK * 4];
    for (int q = 0; q < BLOCK; q++)
        for (int e = 0; e < wide; e++)
            sum[q * wide + e] = *(const lanes *)(sums + q * size + e * LANES);
    for (int64_t s = 0; s < stop; s++)
        for (int q = 0; q < BLOCK; q++) {
            lanes weight = all(weights[q * row + s]);
            for (int e = 0; e < wide; e++)
                sum[q * wide + e] = fma_(
                    weight, *(const lanes *)(values + s * size + e * LANES), sum[q * wide + e]);
        }
    for (int q = 0; q < BLOCK; q++)
        for (int e = 0; e < wide; e++) *(lanes *)(sums + q * size + e * LANES) = sum[q * wide + e];
}

static inline void weigh_on(
    float *sums, const float *weights, int64_t row, const float *values, int64_t size, int64_t stop,
    int wide) {
    if (wide == 4)
        weigh_some(sums, weights, row, values, size, stop, 4);
    else
        for (int e = 0; e < wide; e++)
            weigh_some(sums + e * LANES, weights, row, values + e * LANES, size, stop, 1);
}

/* Sixteen rows as columns, to [16, 16]: woven with the row eight below, four times. */
static inline void turned_over(float *to, lanes x[LANES]) {
    lanes y[LANES];
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = woven(x[i], x[i + LANES / 2], 0);
            y[2 * i + 1] = woven(x[i], x[i + LANES / 2], 1);
        }
        memcpy(x, y, sizeof(y));
    }
    memcpy(to, x, sizeof(y));
}

/* What `answer` says, bit for bit, to MANY queries none of which sees behind a gap.
 * `scores` [MANY, W'] and `room` [2 MANY + PIECE, E] are room. */
static inline __attribute__((always_inline)) void answers(
    const Sizes *at, const int64_t E, const half *qkv, const half *cos, const half *sin,
    const half *keys, const half *values, const int32_t *count, half *out, int64_t b, int64_t k,
    int64_t first, float *scores, float *room) {
    float *queries = room, *sums = queries + MANY * E, *piece = sums + MANY * E;
    const int64_t groups = at->H / at->K, row = (at->W + LANES - 1) / LANES * LANES;
    const float scale = 1.0f / sqrtf((float)E);
    int64_t nodes[MANY], heads[MANY], most[MANY / BLOCK] = {0}, all_of = 0;
    for (int q = 0; q < MANY; q++) {
        nodes[q] = b * at->Q + (first + q) / groups;
        heads[q] = k * groups + (first + q) % groups;
        const half *from = qkv + (nodes[q] * (at->H + 2 * at->K) + heads[q]) * E;
        turn(queries + q * E, from, cos + nodes[q] * E, sin + nodes[q] * E, E);
        for (int64_t e = 0; e < E; e++) queries[q * E + e] *= scale;
        if (count[nodes[q]] > most[q / BLOCK]) most[q / BLOCK] = count[nodes[q]];
        if (count[nodes[q]] > all_of) all_of = count[nodes[q]];
    }
    keys += b * at->seat + k * at->head;
    values += b * at->seat + k * at->head;
    memset(sums, 0, MANY * E * sizeof(float));
    const marks number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t s = 0; s < all_of; s += LANES) {
        const int64_t there = all_of - s < LANES ? all_of - s : LANES;
        for (int64_t e = 0; e < E; e += LANES) {
            lanes x[LANES];
            for (int i = 0; i < LANES; i++)
                x[i] = i < there ? load(keys + (s + i) * E + e) : (lanes){0};
            turned_over(piece + e * LANES, x);
        }
        for (int j = 0; j < MANY / BLOCK; j++) {
            if (s >= most[j]) continue;
            Few score = dots_of(queries + j * BLOCK * E, piece, E);
            for (int q = 0; q < BLOCK; q++) {
                int32_t left = count[nodes[j * BLOCK + q]] - s;
                *(lanes *)(scores + (j * BLOCK + q) * row + s) =
                    choose(number < left, score.of[q], all(-INFINITY));
            }
        }
    }
    float rest[MANY];
    for (int q = 0; q < MANY; q++) rest[q] = weights_of(scores + q * row, most[q / BLOCK]);
    for (int64_t s = 0; s < all_of; s += PIECE) {
        const int64_t there = all_of - s < PIECE ? all_of - s : PIECE;
        for (int64_t e = 0; e < there * E; e += LANES)
            *(lanes *)(piece + e) = load(values + s * E + e);
        for (int j = 0; j < MANY / BLOCK; j++) {
            const int64_t seen = most[j] - s < there ? most[j] - s : there;
            for (int64_t e = 0; seen > 0 && e < E; e += 4 * LANES)
                weigh_on(
                    sums + j * BLOCK * E + e, scores + j * BLOCK * row + s, row, piece + e, E, seen,
                    E - e < 4 * LANES ? (E - e) / LANES : 4);
        }
    }
    for (int q = 0; q < MANY; q++) {
        half *to = out + (nodes[q] * at->H + heads[q]) * E;
        const float share = rest[q] == 0 ? 0 : 1 / rest[q];
        for (int64_t e = 0; e < E; e += LANES)
            store(to + e, *(lanes *)(sums + q * E + e) * share);
    }
}

#define ANSWER(size)                                                                             \
    answer(at, size, qkv, cos, sin, keys, values, visible, count, ahead, out, b, k, first,       \
           few, scores, places)
#define ANSWERS(size)                                                                            \
    answers(at, size, qkv, cos, sin, keys, values, count, out, b, k, first, scores, room)

/* Whether some of MANY queries see behind a slot that they do not see. */
static int gaps(
    const Sizes *at, const int32_t *count, const int32_t *ahead, int64_t b, int64_t first) {
    const int64_t groups = at->H / at->K;
    for (int64_t q = first; q < first + MANY; q++)
        if (ahead[b * at->Q + q / groups] < count[b * at->Q + q / groups]) return 1;
    return 0;
}

/* Turn, note and attend: out [B, Q, H, E] for qkv [B, Q, H + 2 K, E].
 * Returns 1 without memory for the scores, 2 for a slot that is not there. */
int outrider_attend(
    const Sizes *at, const half *qkv, const half *cos, const half *sin, const int64_t *slots,
    half *keys, half *values, const uint8_t *visible, const int32_t *count, const int32_t *ahead,
    half *out) {
    const int64_t rows = at->Q * (at->H / at->K), pairs = at->B * at->K;
    const int64_t each = rows < MANY ? BLOCK : MANY, blocks = (rows + each - 1) / each;
    const size_t row = (at->W + LANES - 1) / LANES * LANES;
    int failed = 0;
    for (int64_t node = 0; node < at->B * at->Q; node++)
        if (slots[node] < 0 || slots[node] >= at->there) return 2;
    if (at->W > at->there) return 2;
#pragma omp parallel num_threads(at->threads) if (at->threads > 1)
    {
        const size_t more = each < MANY ? 0 : (2 * MANY + PIECE) * at->E;
        float *scores = aligned_alloc(64, ((each + BLOCK) * row + more) * sizeof(float));
        float *room = scores + each * row;
        int32_t *places = (int32_t *)(room + more);
        if (!scores) failed = 1;
#pragma omp for
        for (int64_t pair = 0; pair < pairs; pair++)
            note(at, qkv, cos, sin, slots, keys, values, pair / at->K, pair % at->K);
#pragma omp for schedule(dynamic, MANY / each > 4 ? 4 : 1)
        for (int64_t task = 0; task < pairs * blocks; task++) {
            const int64_t b = task / blocks / at->K, k = task / blocks % at->K;
            int64_t first = task % blocks * each, end = first + each < rows ? first + each : rows;
            if (!scores) continue;
            if (end - first == MANY && !gaps(at, count, ahead, b, first)) {
                if (at->E == 64)
                    ANSWERS(64);
                else if (at->E == 128)
                    ANSWERS(128);
                else
                    ANSWERS(at->E);
                continue;
            }
            for (; first < end; first += BLOCK) {
                const int few = end - first < BLOCK ? end - first : BLOCK;
                if (at->E == 64)
                    ANSWER(64);
                else if (at->E == 128)
                    ANSWER(128);
                else
                    ANSWER(at->E);
            }
        }
        free(scores);
    }
    return failed;
}

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
