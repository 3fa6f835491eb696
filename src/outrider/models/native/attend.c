/* Attention of a Llama's layers over a cache of slots, in bfloat16 on a CPU.
 *
 * A row of a call (one token) is computed in one order whatever stands beside it: sums run over
 * sixteen lanes in the order of the slots, and queries share what they read, not how they add. So a
 * row has the same bits for any number of rows, queries and visible slots. No product may be
 * contracted into a sum but where `fma` says so: compile with -ffp-contract=off.
 *
 * Shapes are those of attend.h; W' are visible slots in whole lanes. Where the processor has tiles
 * for such heads, queries are answered by attend_tiles.c.
 */
#include "attend.h"

#define BLOCK 4 /* queries whose sums are held side by side */
#define FEW BLOCK /* queries for which keys are read as they lie; for more they are turned over first */
#define PIECE 64 /* so many slots of values at a time */

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
        for (int e = 0; e < wide; e++) *(lanes *)(sums + q * size + e * LANES) = sum[q * wide + e];
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
            weigh(sums + e + q * size, weights + q * row, row, values + e, size, stop, 1, 1);
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

/* Sixteen rows as columns: woven with the row eight below, four times. */
static inline __attribute__((always_inline)) void turned_over(lanes x[LANES]) {
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
}

/* Keys of sixteen slots, [E, 16], from [16, E] of which `there` are; two numbers are turned as one. */
static inline __attribute__((always_inline)) void turned_keys(
    float *to, const half *keys, const int64_t E, int64_t there) {
    int64_t e = 0;
    lanes x[LANES];
    for (; e + 2 * LANES <= E; e += 2 * LANES) {
        for (int i = 0; i < LANES; i++)
            x[i] = i < there ? *(const floats *)(keys + i * E + e) : (lanes){0};
        turned_over(x);
        for (int i = 0; i < LANES; i++) {
            *(bits *)(to + (e + 2 * i) * LANES) = (bits)x[i] << 16;
            *(bits *)(to + (e + 2 * i + 1) * LANES) = (bits)x[i] & 0xffff0000;
        }
    }
    for (; e < E; e += LANES) {
        for (int i = 0; i < LANES; i++) x[i] = i < there ? load(keys + i * E + e) : (lanes){0};
        turned_over(x);
        memcpy(to + e * LANES, x, sizeof(x));
    }
}

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

/* Queries of one head of keys and values, and what they see. */
typedef struct {
    int64_t some, nodes[MANY], heads[MANY], sees[MANY];
    int gaps;       /* whether one of them sees slots behind one that it does not see */
    int64_t common; /* slots that are read for all: with gaps, what all see ahead of the first */
} Asked;

/* Room for a task, in whole blocks of queries. */
typedef struct {
    int64_t row;              /* W' */
    float *scores;            /* [queries, W'] */
    float *queries, *sums;    /* [queries, E] */
    float *piece;             /* [PIECE, E] */
    int32_t *places;          /* [queries, W'] */
} Room;

static inline __attribute__((always_inline)) void asked(
    Asked *asks, const Sizes *at, const int64_t E, const half *qkv, const half *cos,
    const half *sin, const uint8_t *visible, const int32_t *count, const int32_t *ahead, int64_t b,
    int64_t k, int64_t first, int64_t some, const Room *room) {
    const int64_t groups = at->H / at->K;
    const float scale = 1.0f / sqrtf((float)E);
    int64_t most = 0, common = at->W;
    asks->some = some, asks->gaps = 0;
    for (int64_t q = 0; q < some; q++) {
        const int64_t node = asks->nodes[q] = b * at->Q + (first + q) / groups;
        const int64_t head = asks->heads[q] = k * groups + (first + q) % groups;
        const half *from = qkv + (node * (at->H + 2 * at->K) + head) * E;
        float *query = room->queries + q * E;
        turn(query, from, cos + node * E, sin + node * E, E);
        for (int64_t e = 0; e < E; e++) query[e] *= scale;
        const int64_t sees = asks->sees[q] = count[node];
        if (sees > most) most = sees;
        if (ahead[node] < common) common = ahead[node];
        if (ahead[node] < sees) {
            asks->gaps = 1;
            listed(visible + node * at->W, ahead[node], sees, room->places + q * room->row);
        }
    }
    asks->common = asks->gaps ? common : most; /* what some do not see yet has no weight for them */
    for (int64_t q = 0; asks->gaps && q < some; q++)
        for (int64_t s = common; s < ahead[asks->nodes[q]]; s++)
            room->places[q * room->row + s] = s;
    for (int64_t q = some; q % BLOCK; q++) { /* nobody: the last block is whole */
        asks->sees[q] = 0;
        memset(room->queries + q * E, 0, E * sizeof(float));
    }
}

static const marks number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Scores of the common slots, keys as they lie. */
static inline __attribute__((always_inline)) void score_few(
    const Asked *asks, const int64_t E, const half *keys, const half *values, const Room *room) {
    for (int64_t s = 0; s < asks->common; s += LANES) {
        int64_t there = asks->common - s < LANES ? asks->common - s : LANES;
        for (int64_t e = 0; e < there * E; e += LANES)
            *(lanes *)(room->piece + e) = load(keys + s * E + e);
        for (int64_t e = 0; e < there * E; e += 32) __builtin_prefetch(values + s * E + e);
        memset(room->piece + there * E, 0, (LANES - there) * E * sizeof(float));
        for (int64_t q = 0; q < asks->some; q++)
            *(lanes *)(room->scores + q * room->row + s) = choose(
                number < (int32_t)(asks->sees[q] - s), dots(room->queries + q * E, room->piece, E),
                all(-INFINITY));
    }
}

/* Common slots that a block of queries reads. */
static inline int64_t read_by(const Asked *asks, int64_t block) {
    int64_t most = 0;
    if (asks->gaps) return asks->common;
    for (int q = 0; q < BLOCK; q++)
        if (asks->sees[block * BLOCK + q] > most) most = asks->sees[block * BLOCK + q];
    return most;
}

/* The same, keys turned over: a block's sums are ready as they end. */
static inline __attribute__((always_inline)) void score_many(
    const Asked *asks, const int64_t E, const half *keys, const Room *room) {
    const int64_t blocks = (asks->some + BLOCK - 1) / BLOCK;
    for (int64_t s = 0; s < asks->common; s += LANES) {
        turned_keys(room->piece, keys + s * E, E, asks->common - s);
        for (int64_t j = 0; j < blocks; j++) {
            if (s >= read_by(asks, j)) continue;
            Few score = dots_of(room->queries + j * BLOCK * E, room->piece, E);
            for (int q = 0; q < BLOCK; q++)
                *(lanes *)(room->scores + (j * BLOCK + q) * room->row + s) = choose(
                    number < (int32_t)(asks->sees[j * BLOCK + q] - s), score.of[q],
                    all(-INFINITY));
        }
    }
}

/* One query's scores of what it sees behind the common slots. */
static inline __attribute__((always_inline)) void score_behind(
    const Asked *asks, const int64_t E, const half *keys, int64_t q, const Room *room) {
    const int32_t *places = room->places + q * room->row;
    for (int64_t s = asks->common; s < asks->sees[q]; s += LANES) {
        int64_t there = asks->sees[q] - s < LANES ? asks->sees[q] - s : LANES;
        for (int64_t i = 0; i < there; i++)
            for (int64_t e = 0; e < E; e += LANES)
                *(lanes *)(room->piece + i * E + e) = load(keys + places[s + i] * E + e);
        memset(room->piece + there * E, 0, (LANES - there) * E * sizeof(float));
        lanes score = dots(room->queries + q * E, room->piece, E);
        memcpy(room->scores + q * room->row + s, &score, there * sizeof(float));
    }
}

/* Sums of weighted values over the common slots, which are widened once for all. */
static inline __attribute__((always_inline)) void weigh_many(
    const Asked *asks, const int64_t E, const half *values, const Room *room) {
    const int64_t blocks = (asks->some + BLOCK - 1) / BLOCK;
    memset(room->sums, 0, blocks * BLOCK * E * sizeof(float));
    for (int64_t s = 0; s < asks->common; s += PIECE) {
        const int64_t there = asks->common - s < PIECE ? asks->common - s : PIECE;
        for (int64_t e = 0; e < there * E; e += LANES)
            *(lanes *)(room->piece + e) = load(values + s * E + e);
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t left = read_by(asks, j) - s, seen = left < there ? left : there;
            for (int64_t e = 0; seen > 0 && e < E; e += 4 * LANES)
                weigh_on(
                    room->sums + j * BLOCK * E + e, room->scores + j * BLOCK * room->row + s,
                    room->row, room->piece + e, E, seen, E - e < 4 * LANES ? (E - e) / LANES : 4);
        }
    }
}

/* softmax(q k' / sqrt(E)) v for some queries over one head of keys and values.
 *
 * What a query sees is counted without gaps: the third slot that it sees is its third, wherever it
 * lies. So a node of a tree adds as it would if its path stood alone. */
static inline __attribute__((always_inline)) void answer(
    const Sizes *at, const int64_t E, const half *qkv, const half *cos, const half *sin,
    const half *keys, const half *values, const uint8_t *visible, const int32_t *count,
    const int32_t *ahead, half *out, int64_t b, int64_t k, int64_t first, int64_t some,
    const Room *room) {
    Asked asks;
    float rest[MANY];
    asked(&asks, at, E, qkv, cos, sin, visible, count, ahead, b, k, first, some, room);
    keys += b * at->seat + k * at->head;
    values += b * at->seat + k * at->head;
    if (some > FEW) score_many(&asks, E, keys, room);
    else score_few(&asks, E, keys, values, room);
    for (int64_t q = 0; q < some; q++) {
        float *mine = room->scores + q * room->row;
        int64_t end = asks.gaps ? asks.sees[q] : some > FEW ? read_by(&asks, q / BLOCK) : asks.common;
        if (asks.gaps) score_behind(&asks, E, keys, q, room);
        for (int64_t s = end; s % LANES; s++) mine[s] = -INFINITY;
        rest[q] = weights_of(mine, end);
    }
    if (some > FEW) weigh_many(&asks, E, values, room);
    else
        for (int64_t q = 0; q < some; q += BLOCK)
            weighed(
                room->sums + q * E, room->scores + q * room->row, room->row, values, E, asks.common,
                some - q < BLOCK ? some - q : BLOCK);
    for (int64_t q = 0; q < some; q++) {
        half *to = out + (asks.nodes[q] * at->H + asks.heads[q]) * E;
        const float *weights = room->scores + q * room->row;
        const int32_t *places = room->places + q * room->row;
        float share = rest[q] == 0 ? 0 : 1 / rest[q]; /* nothing is seen: nothing is said */
        for (int64_t e = 0; e < E; e += LANES) {
            lanes sum = *(lanes *)(room->sums + q * E + e);
            for (int64_t s = asks.common; asks.gaps && s < asks.sees[q]; s++)
                sum = fma_(all(weights[s]), load(values + places[s] * E + e), sum);
            store(to + e, sum * share);
        }
    }
}

#define ANSWER(size)                                                                             \
    answer(at, size, qkv, cos, sin, keys, values, visible, count, ahead, out, b, k, first, some, &room)

/* Queries of a task: in whole blocks, and so that each thread has two tasks or more. */
static int64_t at_once(int64_t rows, int64_t pairs, int64_t threads) {
    int64_t parts = threads > 1 ? (2 * threads + pairs - 1) / pairs : 1;
    int64_t each = ((rows + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK;
    return each < MANY ? each : MANY;
}

/* Turn, note and attend: out [B, Q, H, E] for qkv [B, Q, H + 2 K, E].
 * Returns 1 without memory for the scores, 2 for a slot that is not there. */
int outrider_attend(
    const Sizes *at, const half *qkv, const half *cos, const half *sin, const int64_t *slots,
    half *keys, half *values, const uint8_t *visible, const int32_t *count, const int32_t *ahead,
    half *out) {
    const int64_t rows = at->Q * (at->H / at->K), pairs = at->B * at->K;
    if (!rows || !pairs) return 0;
    const int64_t each = at_once(rows, pairs, at->threads), blocks = (rows + each - 1) / each;
    const int64_t tiled = at->tiles ? outrider_tiles_room(at) : 0;
    const Asks asks = {qkv, cos, sin, keys, values, visible, count, ahead, out};
    int failed = 0;
    for (int64_t node = 0; node < at->B * at->Q; node++)
        if (slots[node] < 0 || slots[node] >= at->there) return 2;
    if (at->W > at->there) return 2;
#pragma omp parallel num_threads(at->threads) if (at->threads > 1)
    {
        Room room = {.row = (at->W + LANES - 1) / LANES * LANES};
        room.scores = aligned_alloc(
            64, tiled ? tiled : (2 * each * room.row + (2 * each + PIECE) * at->E) * sizeof(float));
        room.queries = room.scores + each * room.row;
        room.sums = room.queries + each * at->E;
        room.piece = room.sums + each * at->E;
        room.places = (int32_t *)(room.piece + PIECE * at->E);
        if (!room.scores) failed = 1;
#pragma omp for
        for (int64_t pair = 0; pair < pairs; pair++)
            note(at, qkv, cos, sin, slots, keys, values, pair / at->K, pair % at->K);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < pairs * blocks; task++) {
            const int64_t b = task / blocks / at->K, k = task / blocks % at->K;
            const int64_t first = task % blocks * each;
            const int64_t some = rows - first < each ? rows - first : each;
            if (!room.scores) continue;
            if (tiled)
                outrider_tiles_answer(at, &asks, b, k, first, some, room.scores);
            else if (at->E == 64)
                ANSWER(64);
            else if (at->E == 128)
                ANSWER(128);
            else
                ANSWER(at->E);
        }
        free(room.scores);
    }
    return failed;
}
