/* Attention of a Llama's layers over a cache of slots, in bfloat16 or float32 on a CPU.
 *
 * A row of a call (one token) is computed in one order whatever stands beside it: sums run over
 * sixteen lanes in the order of the slots, and queries share what they read, not how they add. So a
 * row has the same bits for any number of rows, queries and visible slots. Sums are float32. No
 * product may be contracted into a sum but where `fma` says so: compile with -ffp-contract=off.
 *
 * Shapes are those of attend.h; W' are visible slots in whole lanes. Where the processor has tiles
 * for such heads, queries of bfloat16 are answered by attend_tiles.c.
 */
#include "attend.h"
#include "thread_pool.h"

#define BLOCK 4 /* queries whose sums are held side by side */
#define FEW BLOCK /* queries for which keys are read as they lie; for more they are turned over first */
#define PIECE 64 /* so many slots of values at a time */

/* Usual sizes of heads have code of their own, made once. */
#define SIZED(run) (size == 64 ? run(64) : size == 128 ? run(128) : run(size))

ALWAYS lanes sized_dots(const float *query, const float *keys, const int64_t size) {
    lanes four[LANES / 4];
#pragma GCC unroll 4
    for (int k = 0; k < LANES; k += 4) {
        lanes sum[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[i] = all(0);
        for (int64_t e = 0; e < size; e += LANES)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                sum[i] = fma_(get(query + e), get(keys + (k + i) * size + e), sum[i]);
        four[k / 4] = fours(sum[0], sum[1], sum[2], sum[3]);
    }
    return totals(four[0], four[1], four[2], four[3]);
}

/* Scores of sixteen slots for one query; `keys` [16, E] as float32. */
static __attribute__((noinline)) lanes dots(const float *query, const float *keys, int64_t size) {
#define RUN(size) sized_dots(query, keys, size)
    return SIZED(RUN);
#undef RUN
}

typedef struct {
    lanes of[BLOCK];
} Few;

ALWAYS Few plus(Few a, Few b) {
#pragma GCC unroll 4
    for (int q = 0; q < BLOCK; q++) a.of[q] = add(a.of[q], b.of[q]);
    return a;
}

/* What lane `l` sums up in `dots`, here of sixteen slots at once. */
ALWAYS Few lane(const float *queries, const float *turned, const int64_t size, const int l) {
    Few sum;
#pragma GCC unroll 4
    for (int q = 0; q < BLOCK; q++) sum.of[q] = all(0);
    for (int64_t e = l; e < size; e += LANES)
#pragma GCC unroll 4
        for (int q = 0; q < BLOCK; q++)
            sum.of[q] = fma_(all(queries[q * size + e]), get(turned + e * LANES), sum.of[q]);
    return sum;
}

#define TWO(l) plus(lane(queries, turned, size, l), lane(queries, turned, size, l + 1))
ALWAYS Few sized_dots_of(const float *queries, const float *turned, const int64_t size) {
    Few four[LANES / 4];
#pragma GCC unroll 1
    for (int l = 0; l < LANES; l += 4) four[l / 4] = plus(TWO(l), TWO(l + 2));
    return plus(plus(four[0], four[1]), plus(four[2], four[3]));
}

/* `dots` of BLOCK queries, bit for bit; `turned` [E, 16] are the keys of sixteen slots. */
static __attribute__((noinline)) Few dots_of(
    const float *queries, const float *turned, int64_t size) {
#define RUN(size) sized_dots_of(queries, turned, size)
    return SIZED(RUN);
#undef RUN
}

/* Lanes of values that so many queries read at once: their sums stay in registers. */
#define WIDE(few) (HELD / (few) >= 4 ? 4 : HELD / (few) >= 2 ? 2 : 1)

/* Sums of weighted values, [few, E], 16 * `wide` numbers of them, go on from what they are or begin
 * with 0; `values` from number `at` on, slots `size` apart. */
ALWAYS void weigh(
    float *sums, const float *weights, int64_t row, const void *values, int64_t at, int64_t size,
    int64_t stop, const int few, const int wide, const int on, const int is_half) {
    lanes sum[BLOCK * 4];
#pragma GCC unroll 4
    for (int q = 0; q < few; q++)
#pragma GCC unroll 4
        for (int e = 0; e < wide; e++)
            sum[q * wide + e] = on ? get(sums + q * size + e * LANES) : all(0);
    for (int64_t s = 0; s < stop; s++) {
#pragma GCC unroll 4
        for (int e = 0; e < wide; e++) {
            const lanes value = read_as(values, at + s * size + e * LANES, is_half);
#pragma GCC unroll 4
            for (int q = 0; q < few; q++)
                sum[q * wide + e] = fma_(all(weights[q * row + s]), value, sum[q * wide + e]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < few; q++)
#pragma GCC unroll 4
        for (int e = 0; e < wide; e++) put(sums + q * size + e * LANES, sum[q * wide + e]);
}

/* All E numbers of them. */
ALWAYS void weigh_all(
    float *sums, const float *weights, int64_t row, const void *values, int64_t at,
    const int64_t size, int64_t stop, const int few, const int on, const int is_half) {
    int64_t e = 0;
    for (; e + WIDE(few) * LANES <= size; e += WIDE(few) * LANES)
        weigh(sums + e, weights, row, values, at + e, size, stop, few, WIDE(few), on, is_half);
    for (; e < size; e += LANES)
        weigh(sums + e, weights, row, values, at + e, size, stop, few, 1, on, is_half);
}

ALWAYS void weigh_few(
    float *sums, const float *weights, int64_t row, const void *values, int64_t at,
    const int64_t size, int64_t stop, int few, const int is_half) {
    switch (few) {
    case 1: weigh_all(sums, weights, row, values, at, size, stop, 1, 0, is_half); break;
    case 2: weigh_all(sums, weights, row, values, at, size, stop, 2, 0, is_half); break;
    case 3: weigh_all(sums, weights, row, values, at, size, stop, 3, 0, is_half); break;
    default: weigh_all(sums, weights, row, values, at, size, stop, 4, 0, is_half);
    }
}

/* Keys of sixteen slots, [E, 16], from [16, E] of which `there` are; of half precision two numbers
 * are turned as one. */
ALWAYS void turned_keys(
    float *to, const void *keys, int64_t at, const int64_t E, int64_t there, const int is_half) {
    int64_t e = 0;
    lanes x[LANES];
    const int little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    for (; is_half && little && e + 2 * LANES <= E; e += 2 * LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            x[i] = i < there ? get((const float *)((const half *)keys + at + i * E + e)) : all(0);
        turned_over(x);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            put(to + (e + 2 * i) * LANES, lower_half(x[i]));
            put(to + (e + 2 * i + 1) * LANES, upper_half(x[i]));
        }
    }
    for (; e < E; e += LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            x[i] = i < there ? read_as(keys, at + i * E + e, is_half) : all(0);
        turned_over(x);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) put(to + (e + i) * LANES, x[i]);
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

/* Write keys and values of the rows' nodes. */
ALWAYS void note(
    const Sizes *at, const Asks *asks, const int64_t *slots, int64_t b, int64_t k,
    const int is_half) {
    const int64_t E = at->E, bytes = is_half ? sizeof(half) : sizeof(float);
    float turned[WIDEST];
    for (int64_t q = 0; q < at->Q; q++) {
        const int64_t node = b * at->Q + q;
        const int64_t key = (node * (at->H + 2 * at->K) + at->H + k) * E;
        const int64_t place = b * at->seat + k * at->head + slots[node] * E;
        turn(turned, asks->qkv, key, asks->cos, asks->sin, node * E, E, is_half);
        for (int64_t e = 0; e < E; e += LANES)
            write_as(asks->keys, place + e, get(turned + e), is_half);
        memcpy(
            (char *)asks->values + place * bytes,
            (const char *)asks->qkv + (key + at->K * E) * bytes, E * bytes);
    }
}

/* The slots that a node sees behind the first that it does not see, in their order. */
static void listed(const uint8_t *visible, int64_t ahead, int64_t count, int32_t *slots) {
    for (int64_t s = ahead; ahead < count; s++)
        if (visible[s]) slots[ahead++] = s;
}

/* Scores of `end` slots, in whole lanes, as weights in their place; and what these sum to. */
static inline float weights_of(float *scores, int64_t end) {
    lanes top = all(-3.0e38f), sum = all(0);
    for (int64_t s = 0; s < end; s += LANES) top = widest(top, get(scores + s));
    const lanes best = all(most_of_lanes(top));
    for (int64_t s = 0; s < end; s += LANES) {
        const lanes weight = exp_(sub(get(scores + s), best));
        put(scores + s, weight);
        sum = add(sum, weight);
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

ALWAYS void asked(
    Asked *mine, const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first,
    int64_t some, const Room *room, const int is_half) {
    const int64_t groups = at->H / at->K, E = at->E;
    const lanes scale = all(1.0f / sqrtf((float)E));
    int64_t most = 0, common = at->W;
    mine->some = some, mine->gaps = 0;
    for (int64_t q = 0; q < some; q++) {
        const int64_t node = mine->nodes[q] = b * at->Q + (first + q) / groups;
        const int64_t head = mine->heads[q] = k * groups + (first + q) % groups;
        const int64_t from = (node * (at->H + 2 * at->K) + head) * E;
        const int64_t ahead = asks->ahead[node];
        float *query = room->queries + q * E;
        turn(query, asks->qkv, from, asks->cos, asks->sin, node * E, E, is_half);
        for (int64_t e = 0; e < E; e += LANES) put(query + e, mul(get(query + e), scale));
        const int64_t sees = mine->sees[q] = asks->count[node];
        if (sees > most) most = sees;
        if (ahead < common) common = ahead;
        if (ahead < sees) {
            mine->gaps = 1;
            listed(asks->visible + node * at->W, ahead, sees, room->places + q * room->row);
        }
    }
    mine->common = mine->gaps ? common : most; /* what some do not see yet has no weight for them */
    for (int64_t q = 0; mine->gaps && q < some; q++)
        for (int64_t s = common; s < asks->ahead[mine->nodes[q]]; s++)
            room->places[q * room->row + s] = s;
    for (int64_t q = some; q % BLOCK; q++) { /* nobody: the last block is whole */
        mine->sees[q] = 0;
        memset(room->queries + q * E, 0, E * sizeof(float));
    }
}

/* A head of the cache: keys and values from number `from` on. */
typedef struct {
    const void *keys, *values;
    int64_t from;
} Head;

/* Scores of the slots from `s` on that a query sees. */
ALWAYS void note_scores(
    const Asked *mine, const Room *room, int64_t q, int64_t s, lanes scores) {
    const marks seen = first_lanes((int32_t)(mine->sees[q] - s));
    put(room->scores + q * room->row + s, choose(seen, scores, all(-INFINITY)));
}

/* Scores of the common slots, keys as they lie. */
ALWAYS void score_few(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, const int is_half) {
    const int64_t bytes = is_half ? sizeof(half) : sizeof(float);
    for (int64_t s = 0; s < mine->common; s += LANES) {
        const int64_t there = mine->common - s < LANES ? mine->common - s : LANES;
        const int64_t from = head->from + s * E;
        const float *keys = room->piece;
        for (int64_t e = 0; e < there * E; e += 64 / bytes)
            __builtin_prefetch((const char *)head->values + (from + e) * bytes);
        if (is_half || there < LANES) {
            for (int64_t e = 0; e < there * E; e += LANES)
                put(room->piece + e, read_as(head->keys, from + e, is_half));
            memset(room->piece + there * E, 0, (LANES - there) * E * sizeof(float));
        } else
            keys = (const float *)head->keys + from;
        for (int64_t q = 0; q < mine->some; q++)
            note_scores(mine, room, q, s, dots(room->queries + q * E, keys, E));
    }
}

/* Common slots that a block of queries reads. */
static inline int64_t read_by(const Asked *mine, int64_t block) {
    int64_t most = 0;
    if (mine->gaps) return mine->common;
    for (int q = 0; q < BLOCK; q++)
        if (mine->sees[block * BLOCK + q] > most) most = mine->sees[block * BLOCK + q];
    return most;
}

/* The same, keys turned over: a block's sums are ready as they end. */
ALWAYS void score_many(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, const int is_half) {
    const int64_t blocks = (mine->some + BLOCK - 1) / BLOCK;
    for (int64_t s = 0; s < mine->common; s += LANES) {
        turned_keys(room->piece, head->keys, head->from + s * E, E, mine->common - s, is_half);
        for (int64_t j = 0; j < blocks; j++) {
            if (s >= read_by(mine, j)) continue;
            const Few score = dots_of(room->queries + j * BLOCK * E, room->piece, E);
#pragma GCC unroll 4
            for (int q = 0; q < BLOCK; q++)
                note_scores(mine, room, j * BLOCK + q, s, score.of[q]);
        }
    }
}

/* One query's scores of what it sees behind the common slots. */
ALWAYS void score_behind(
    const Asked *mine, const int64_t E, const Head *head, int64_t q, const Room *room,
    const int is_half) {
    const int32_t *places = room->places + q * room->row;
    for (int64_t s = mine->common; s < mine->sees[q]; s += LANES) {
        int64_t there = mine->sees[q] - s < LANES ? mine->sees[q] - s : LANES;
        float score[LANES];
        for (int64_t i = 0; i < there; i++)
            for (int64_t e = 0; e < E; e += LANES)
                put(room->piece + i * E + e,
                    read_as(head->keys, head->from + places[s + i] * E + e, is_half));
        memset(room->piece + there * E, 0, (LANES - there) * E * sizeof(float));
        put(score, dots(room->queries + q * E, room->piece, E));
        memcpy(room->scores + q * room->row + s, score, there * sizeof(float));
    }
}

/* Sums of weighted values over the common slots, which are widened once for all. */
ALWAYS void weigh_many(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, const int is_half) {
    const int64_t blocks = (mine->some + BLOCK - 1) / BLOCK;
    memset(room->sums, 0, blocks * BLOCK * E * sizeof(float));
    for (int64_t s = 0; s < mine->common; s += PIECE) {
        const int64_t there = mine->common - s < PIECE ? mine->common - s : PIECE;
        const float *values = room->piece;
        if (is_half)
            for (int64_t e = 0; e < there * E; e += LANES)
                put(room->piece + e, read_as(head->values, head->from + s * E + e, 1));
        else
            values = (const float *)head->values + head->from + s * E;
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t left = read_by(mine, j) - s, seen = left < there ? left : there;
            if (seen > 0)
                weigh_all(
                    room->sums + j * BLOCK * E, room->scores + j * BLOCK * room->row + s, room->row,
                    values, 0, E, seen, BLOCK, 1, 0);
        }
    }
}

/* softmax(q k' / sqrt(E)) v for some queries over one head of keys and values.
 *
 * What a query sees is counted without gaps: the third slot that it sees is its third, wherever it
 * lies. So a node of a tree adds as it would if its path stood alone. */
ALWAYS void answer(
    const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first, int64_t some,
    const Room *room, const int is_half) {
    const int64_t E = at->E;
    const Head head = {asks->keys, asks->values, b * at->seat + k * at->head};
    Asked mine;
    float rest[MANY];
    asked(&mine, at, asks, b, k, first, some, room, is_half);
    if (some > FEW) score_many(&mine, E, &head, room, is_half);
    else score_few(&mine, E, &head, room, is_half);
    for (int64_t q = 0; q < some; q++) {
        float *scores = room->scores + q * room->row;
        int64_t end = mine.gaps ? mine.sees[q] : some > FEW ? read_by(&mine, q / BLOCK) : mine.common;
        if (mine.gaps) score_behind(&mine, E, &head, q, room, is_half);
        for (int64_t s = end; s % LANES; s++) scores[s] = -INFINITY;
        rest[q] = weights_of(scores, end);
    }
    if (some > FEW) weigh_many(&mine, E, &head, room, is_half);
    else
        weigh_few(
            room->sums, room->scores, room->row, head.values, head.from, E, mine.common, some,
            is_half);
    for (int64_t q = 0; q < some; q++) {
        const int64_t to = (mine.nodes[q] * at->H + mine.heads[q]) * E;
        const float *weights = room->scores + q * room->row;
        const int32_t *places = room->places + q * room->row;
        const lanes share = all(rest[q] == 0 ? 0 : 1 / rest[q]); /* sees nothing: says nothing */
        for (int64_t e = 0; e < E; e += LANES) {
            lanes sum = get(room->sums + q * E + e);
            for (int64_t s = mine.common; mine.gaps && s < mine.sees[q]; s++) {
                const lanes value = read_as(head.values, head.from + places[s] * E + e, is_half);
                sum = fma_(all(weights[s]), value, sum);
            }
            write_as(asks->out, to + e, mul(sum, share), is_half);
        }
    }
}

/* Queries of a task: in whole blocks, and so that each thread has two tasks or more. */
static int64_t at_once(int64_t rows, int64_t pairs, int64_t threads) {
    int64_t parts = threads > 1 ? (2 * threads + pairs - 1) / pairs : 1;
    int64_t each = ((rows + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK;
    return each < MANY ? each : MANY;
}

/* A call: first each row's heads are noted, then its tasks, `each` queries of a head, are answered. */
typedef struct {
    const Sizes *at;
    const Asks *asks;
    const int64_t *slots;
    int64_t each, blocks, bytes, tiled; /* `bytes` of a thread's room */
    char *rooms;
} Call;

static void note_pair(void *about, int64_t pair, int64_t thread) {
    const Call *of = about;
    (void)thread;
    if (of->at->is_half) note(of->at, of->asks, of->slots, pair / of->at->K, pair % of->at->K, 1);
    else note(of->at, of->asks, of->slots, pair / of->at->K, pair % of->at->K, 0);
}

static void answer_task(void *about, int64_t task, int64_t thread) {
    const Call *of = about;
    const Sizes *at = of->at;
    const int64_t rows = at->Q * (at->H / at->K), b = task / of->blocks / at->K, k = task / of->blocks % at->K;
    const int64_t first = task % of->blocks * of->each;
    const int64_t some = rows - first < of->each ? rows - first : of->each;
    Room room = {.row = (at->W + LANES - 1) / LANES * LANES, .scores = (float *)(of->rooms + thread * of->bytes)};
    room.queries = room.scores + of->each * room.row;
    room.sums = room.queries + of->each * at->E;
    room.piece = room.sums + of->each * at->E;
    room.places = (int32_t *)(room.piece + PIECE * at->E);
    if (of->tiled) outrider_tiles_answer(at, of->asks, b, k, first, some, room.scores);
    else if (at->is_half) answer(at, of->asks, b, k, first, some, &room, 1);
    else answer(at, of->asks, b, k, first, some, &room, 0);
}

/* Turn, note and attend: out [B, Q, H, E] for qkv [B, Q, H + 2 K, E], all of half precision or all
 * float32. Returns 1 without memory for the scores, 2 for a slot that is not there. */
int outrider_attend(
    const Sizes *at, const void *qkv, const void *cos, const void *sin, const int64_t *slots,
    void *keys, void *values, const uint8_t *visible, const int32_t *count, const int32_t *ahead,
    void *out) {
    const int64_t rows = at->Q * (at->H / at->K), pairs = at->B * at->K;
    if (!rows || !pairs) return 0;
    const int64_t threads = rows * pairs * at->W * at->E > 65536 ? at->threads : 1;
    const int64_t each = at_once(rows, pairs, threads), blocks = (rows + each - 1) / each;
    const int64_t tiled = at->tiles && at->is_half ? outrider_tiles_room(at) : 0;
    const int64_t row = (at->W + LANES - 1) / LANES * LANES;
    const int64_t wanted = tiled ? tiled : (2 * each * row + (2 * each + PIECE) * at->E) * (int64_t)sizeof(float);
    const int64_t bytes = (wanted + 63) / 64 * 64;
    const Asks asks = {qkv, cos, sin, keys, values, visible, count, ahead, out};
    for (int64_t node = 0; node < at->B * at->Q; node++)
        if (slots[node] < 0 || slots[node] >= at->there) return 2;
    if (at->W > at->there) return 2;
    Call call = {at, &asks, slots, each, blocks, bytes, tiled, aligned_alloc(64, threads * bytes)};
    if (!call.rooms) return 1;
    outrider_share(threads, pairs, note_pair, &call);
    outrider_share(threads, pairs * blocks, answer_task, &call);
    free(call.rooms);
    return 0;
}
