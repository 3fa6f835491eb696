/* Attention of a Llama's layers in tiles (Intel's AMX); shapes are those of attend.h.
 *
 * Scores and sums of weighted values are products of tiles; queries and weights are rounded to half
 * precision for them. A query adds 32 of the slots that it sees at a time, in their order, whatever
 * lies between them and whoever asks beside it: so it has the same bits in any call, and a node of
 * a tree those of its path alone.
 *
 * Tiles hold sixteen queries. W' are slots in whole steps of 32, or of 64 for scores.
 */
#include "attend.h"
#include "tiles.h"

#ifdef WITH_TILES
#define TWO 2 /* tiles of queries that share what is read */
#define LOW -3.0e38f

typedef struct {
    half *values;   /* [E / 32, W' / 32, 2, 16, 16, 2], of all that the task's queries share */
    float *scores;  /* [2, W', 16] */
    half *weights;  /* [2, W' / 32, 16, 32] */
    float *sums;    /* [E / 32, 2, 2, 16, 16] */
    half *queries;  /* [16, E], and turned [E / 2, 16, 2] */
    half *spare;    /* keys [16, E], or one step of values [E / 32, 2, 16, 16, 2] */
    int32_t *places; /* [W'] */
} Room;

static float scale_of(int64_t E) { return 1.0f / sqrtf((float)E); }

static int64_t in_whole(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

int64_t outrider_tiles_room(const Sizes *at) {
    const int64_t W = in_whole(at->W, BLOCK), E = at->E;
    if (E % STEP) return 0;
    return W * E * sizeof(half) + TWO * W * TILE * (sizeof(float) + sizeof(half)) +
           E * TWO * TILE * sizeof(float) + 4 * TILE * E * sizeof(half) + W * sizeof(int32_t);
}

static Room divided(const Sizes *at, void *room) {
    const int64_t W = in_whole(at->W, BLOCK), E = at->E;
    Room r = {.values = room};
    r.scores = (float *)(r.values + W * E);
    r.weights = (half *)(r.scores + TWO * W * TILE);
    r.sums = (float *)(r.weights + TWO * W * TILE);
    r.queries = (half *)(r.sums + E * TWO * TILE);
    r.spare = r.queries + 2 * TILE * E;
    r.places = (int32_t *)(r.spare + 2 * TILE * E);
    return r;
}

/* What a tile's queries see: slots below `sees` in their order, and others behind these. */
typedef struct {
    int64_t some, nodes[TILE], heads[TILE];
    marks sees;
} Seen;

/* Pairs of rows woven: columns of 16 pairs [16, 16, 2], twice; the largest of all and `most`. */
static inline __m512i woven_pairs(const half *const rows[STEP], int64_t e, half *to, __m512i most) {
    const __m512i size = _mm512_set1_epi16(0x7fff);
    const __m512i lower = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
        3, 34, 2, 33, 1, 32, 0);
    const __m512i upper = _mm512_add_epi16(lower, _mm512_set1_epi16(TILE));
#pragma GCC unroll 4
    for (int p = 0; p < TILE; p++) {
        const half *a = rows[2 * p], *b = rows[2 * p + 1];
        __m512i x = a ? _mm512_loadu_si512(a + e) : _mm512_setzero_si512();
        __m512i y = b ? _mm512_loadu_si512(b + e) : _mm512_setzero_si512();
        most = _mm512_max_epu16(most, _mm512_and_si512(x, size));
        most = _mm512_max_epu16(most, _mm512_and_si512(y, size));
        _mm512_store_si512(to + p * STEP, _mm512_permutex2var_epi16(x, lower, y));
        _mm512_store_si512(to + PAIR / 2 + p * STEP, _mm512_permutex2var_epi16(x, upper, y));
    }
    return most;
}

/* Values of the first `slots` slots as a second factor; whether all are finite. */
static int laid_values(const half *values, int64_t slots, int64_t E, half *to) {
    const int64_t steps = in_whole(slots, STEP) / STEP;
    __m512i most = _mm512_setzero_si512();
    for (int64_t s = 0; s < steps; s++) {
        const half *rows[STEP];
        for (int64_t i = 0; i < STEP; i++)
            rows[i] = s * STEP + i < slots ? values + (s * STEP + i) * E : NULL;
        for (int64_t e = 0; e < E; e += GROUP)
            most = woven_pairs(rows, e, to + (e / GROUP * steps + s) * PAIR, most);
    }
    return !_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7f80));
}

/* Queries of a tile, turned, as a second factor. */
static void laid_queries(const Sizes *at, const Asks *asks, const Seen *seen, const Room *room) {
    const int64_t E = at->E;
    _Alignas(64) float query[WIDEST];
    memset(room->queries, 0, TILE * E * sizeof(half));
    for (int64_t q = 0; q < seen->some; q++) {
        const int64_t node = seen->nodes[q];
        const int64_t from = (node * (at->H + 2 * at->K) + seen->heads[q]) * E;
        turn(query, asks->qkv, from, asks->cos, asks->sin, node * E, E, 1);
        for (int64_t e = 0; e < E; e += LANES)
            store(room->queries + q * E + e, *(lanes *)(query + e));
    }
    crossed_pairs((uint32_t *)room->queries, TILE, E / 2, (uint32_t *)(room->queries + TILE * E));
}

/* Scores [W', 16] of the first `slots` slots. */
static void scored(const half *keys, int64_t slots, int64_t E, const Room *room, float *scores) {
    const half *queries = room->queries + TILE * E;
    int64_t s = 0;
    for (; s + BLOCK <= slots; s += BLOCK)
        few_rows(queries, TILE, E, keys + s * E, (float(*)[TILE * TILE])(scores + s * TILE));
    for (; s < slots; s += TILE) {
        const int64_t there = slots - s < TILE ? slots - s : TILE;
        const half *from = keys + s * E;
        if (there < TILE) { /* the cache may end here */
            memset(room->spare, 0, TILE * E * sizeof(half));
            memcpy(room->spare, from, there * E * sizeof(half));
            from = room->spare;
        }
        few_outputs(queries, TILE, E, from, scores + s * TILE);
    }
}

/* Slots that a query sees behind those in order. */
static int64_t listed(const Sizes *at, const Asks *asks, const Seen *seen, int64_t q, int32_t *slots) {
    const uint8_t *visible = asks->visible + seen->nodes[q] * at->W;
    const int64_t rest = asks->count[seen->nodes[q]] - seen->sees[q];
    int64_t found = 0;
    for (int64_t s = seen->sees[q]; found < rest; s++)
        if (visible[s]) slots[found++] = s;
    return rest;
}

static inline lanes score_of(const float *scores, int64_t s, marks sees) {
    return choose((marks){0} + (int32_t)s < sees, *(const lanes *)(scores + s * TILE), all(LOW));
}

/* The largest score of each query. */
static lanes tops(
    const Sizes *at, const Asks *asks, const Seen *seen, int64_t slots, const float *scores,
    const Room *room) {
    lanes top = all(LOW);
    for (int64_t s = 0; s < slots; s++) top = widest(top, score_of(scores, s, seen->sees));
    for (int64_t q = 0; q < seen->some; q++) {
        const int64_t rest = listed(at, asks, seen, q, room->places);
        for (int64_t i = 0; i < rest; i++) {
            const float score = scores[room->places[i] * TILE + q];
            top[q] = top[q] > score ? top[q] : score;
        }
    }
    return top;
}

#define QUARTER 4 /* queries for which four slots are weighed as one */

/* Weights of four slots; those of up to four queries alone are worked out side by side. */
static inline __attribute__((always_inline)) void weigh(
    const float *scores, lanes top, float scale, const int few, lanes out[QUARTER]) {
    if (few) {
        __m512 x = _mm512_loadu_ps(scores);
        x = _mm512_insertf32x4(x, _mm_loadu_ps(scores + TILE), 1);
        x = _mm512_insertf32x4(x, _mm_loadu_ps(scores + 2 * TILE), 2);
        x = _mm512_insertf32x4(x, _mm_loadu_ps(scores + 3 * TILE), 3);
        x = (__m512)exp_(((lanes)x - top) * scale);
        out[0] = (lanes)_mm512_zextps128_ps512(_mm512_castps512_ps128(x));
        out[1] = (lanes)_mm512_zextps128_ps512(_mm512_extractf32x4_ps(x, 1));
        out[2] = (lanes)_mm512_zextps128_ps512(_mm512_extractf32x4_ps(x, 2));
        out[3] = (lanes)_mm512_zextps128_ps512(_mm512_extractf32x4_ps(x, 3));
    } else {
        for (int i = 0; i < QUARTER; i++)
            out[i] = exp_((*(const lanes *)(scores + i * TILE) - top) * scale);
    }
}

/* Weights of slots in order as a first factor, `slots` in whole steps; and what they sum to. */
static inline __attribute__((always_inline)) lanes weights_of(
    const float *scores, lanes top, marks sees, int64_t slots, float scale, const int few,
    half *weights) {
    const __m512i woven = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
        3, 18, 2, 17, 1, 16, 0);
    lanes sum = {0};
    if (few) top = (lanes)_mm512_broadcast_f32x4(_mm512_castps512_ps128((__m512)top));
    for (int64_t s = 0; s < slots; s += STEP) {
        __m512i pairs[TILE];
        for (int p = 0; p < TILE; p += 2) {
            lanes some[QUARTER];
            weigh(scores + (s + 2 * p) * TILE, top, scale, few, some);
            for (int i = 0; i < QUARTER; i++) {
                const marks seen = (marks){0} + (int32_t)(s + 2 * p + i) < sees;
                some[i] = choose(seen, some[i], all(0));
                sum += some[i];
            }
            for (int i = 0; i < 2; i++)
                pairs[p + i] = _mm512_permutexvar_epi16(
                    woven, (__m512i)_mm512_cvtne2ps_pbh((__m512)some[2 * i + 1], (__m512)some[2 * i]));
        }
        crossed(pairs, weights + s * TILE);
    }
    return sum;
}

/* Add what the queries `first` to `stop`, of one node, see behind the slots in order. */
static void add_rest(
    const Sizes *at, const Asks *asks, const Seen *seen, const half *values, int64_t first,
    int64_t stop, const float *scores, lanes top, lanes *sum, float *sums, const Room *room) {
    const int64_t rest = listed(at, asks, seen, first, room->places), E = at->E;
    const float scale = scale_of(E);
    _Alignas(64) half weights[TILE * STEP];
    _Alignas(64) float theirs[TILE * TILE];
    for (int64_t s = 0; s < rest; s += STEP) {
        const half *rows[STEP];
        memset(weights, 0, sizeof(weights));
        for (int64_t i = 0; i < STEP; i++)
            rows[i] = s + i < rest ? values + room->places[s + i] * E : NULL;
        for (int64_t q = first; q < stop; q++)
            for (int64_t i = 0; i < STEP; i += LANES) {
                lanes some = all(LOW);
                for (int64_t j = 0; j < LANES && s + i + j < rest; j++)
                    some[j] = scores[room->places[s + i + j] * TILE + q];
                some = exp_((some - top[q]) * scale);
                for (int64_t j = 0; j < LANES && s + i + j < rest; j++) (*sum)[q] += some[j];
                for (int64_t j = rest - s - i > 0 ? rest - s - i : 0; j < LANES; j++) some[j] = 0;
                _mm256_store_si256(
                    (__m256i *)(weights + q * STEP + i), (__m256i)_mm512_cvtneps_pbh((__m512)some));
            }
        written();
        _tile_loadd(4, weights, STEP * sizeof(half));
        for (int64_t e = 0; e < E; e += GROUP, sums += TWO * GROUP * TILE) {
            woven_pairs(rows, e, room->spare, _mm512_setzero_si512());
            written();
            for (int t = 0; t < 2; t++) {
                float *mine = sums + t * TILE * TILE;
                _tile_loadd(0, mine, TILE * sizeof(float));
                _tile_loadd(6, room->spare + t * (PAIR / 2), STEP * sizeof(half));
                _tile_dpbf16ps(0, 4, 6);
                _tile_stored(0, theirs, TILE * sizeof(float)); /* others' may be no numbers now */
                memcpy(mine + first * TILE, theirs + first * TILE, (stop - first) * TILE * sizeof(float));
            }
        }
        sums -= E * TWO * TILE;
    }
}

static void told(
    const Sizes *at, const Asks *asks, const Seen *seen, lanes sum, const float *sums) {
    for (int64_t q = 0; q < seen->some; q++) {
        half *to = (half *)asks->out + (seen->nodes[q] * at->H + seen->heads[q]) * at->E;
        const float share = sum[q] == 0 ? 0 : 1 / sum[q]; /* nothing is seen: nothing is said */
        for (int64_t e = 0; e < at->E; e += TILE) {
            const float *mine = sums + e / GROUP * TWO * GROUP * TILE + e % GROUP * TILE;
            store(to + e, *(const lanes *)(mine + q * TILE) * share);
        }
    }
}

/* Sixteen queries from `first` on, and how many slots they see in order: none if those hold what is
 * no number, which others must not be given even a weight of 0 for. */
static Seen asked(
    const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first, int64_t some, int finite) {
    const int64_t groups = at->H / at->K;
    Seen seen = {.some = some < 0 ? 0 : some < TILE ? some : TILE};
    for (int64_t q = 0; q < seen.some; q++) {
        const int64_t node = seen.nodes[q] = b * at->Q + (first + q) / groups;
        const int64_t ahead = asks->ahead[node], gaps = ahead < asks->count[node];
        seen.heads[q] = k * groups + (first + q) % groups;
        seen.sees[q] = finite ? gaps ? ahead / STEP * STEP : ahead : 0;
    }
    return seen;
}

static int64_t most_of(marks sees) {
    int64_t most = 0;
    for (int q = 0; q < TILE; q++)
        if (sees[q] > most) most = sees[q];
    return most;
}

/* The last slot that any of a tile's queries sees, and one. */
static int64_t reach(const Sizes *at, const Asks *asks, const Seen *seen) {
    int64_t last = most_of(seen->sees);
    for (int64_t q = 0; q < seen->some; q++) {
        const uint8_t *visible = asks->visible + seen->nodes[q] * at->W;
        int64_t s = asks->count[seen->nodes[q]] > seen->sees[q] ? at->W : 0;
        while (s > last && !visible[s - 1]) s--;
        if (s > last) last = s;
    }
    return last;
}

/* Two tiles of queries; `laid` slots of values are. */
static void answer(
    const Sizes *at, const Asks *asks, const Seen *seen, const half *keys, const half *values,
    int64_t laid, const Room *room) {
    const int64_t E = at->E, W = in_whole(at->W, BLOCK);
    const int64_t upper = most_of(seen[0].sees), lower = most_of(seen[1].sees);
    const int64_t most = in_whole(upper > lower ? upper : lower, STEP);
    const float scale = scale_of(E);
    lanes top[TWO], sum[TWO];
    for (int t = 0; t < TWO && seen[t].some; t++) {
        float *scores = room->scores + t * W * TILE;
        half *weights = room->weights + t * W * TILE;
        laid_queries(at, asks, seen + t, room);
        scored(keys, reach(at, asks, seen + t), E, room, scores);
        top[t] = tops(at, asks, seen + t, t ? lower : upper, scores, room);
        sum[t] = seen[t].some <= QUARTER
                     ? weights_of(scores, top[t], seen[t].sees, most, scale, 1, weights)
                     : weights_of(scores, top[t], seen[t].sees, most, scale, 0, weights);
    }
    const half *below = room->weights + (seen[1].some ? W * TILE : 0);
    for (int64_t g = 0; g < E / GROUP; g++)
        tiled(room->weights, below, most, room->values + g * laid * GROUP, 1,
              room->sums + g * TWO * GROUP * TILE);
    for (int t = 0; t < TWO && seen[t].some; t++) {
        float *sums = room->sums + t * GROUP * TILE;
        for (int64_t q = 0, stop; q < seen[t].some; q = stop) {
            for (stop = q + 1; stop < seen[t].some && seen[t].nodes[stop] == seen[t].nodes[q];) stop++;
            if (asks->count[seen[t].nodes[q]] > seen[t].sees[q])
                add_rest(
                    at, asks, seen + t, values, q, stop, room->scores + t * W * TILE, top[t], sum + t,
                    sums, room);
        }
        told(at, asks, seen + t, sum[t], sums);
    }
}

void outrider_tiles_answer(
    const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first, int64_t some,
    void *whole) {
    const Room room = divided(at, whole);
    const half *keys = (const half *)asks->keys + b * at->seat + k * at->head;
    const half *values = (const half *)asks->values + b * at->seat + k * at->head;
    int64_t most = 0;
    for (int64_t q = 0; q < some; q += TILE) {
        const Seen seen = asked(at, asks, b, k, first + q, some - q, 1);
        if (most_of(seen.sees) > most) most = most_of(seen.sees);
    }
    const int finite = laid_values(values, most, at->E, room.values);
    for_many();
    for (int64_t q = 0; q < some; q += TWO * TILE) {
        const Seen seen[TWO] = {
            asked(at, asks, b, k, first + q, some - q, finite),
            asked(at, asks, b, k, first + q + TILE, some - q - TILE, finite),
        };
        answer(at, asks, seen, keys, values, in_whole(most, STEP), &room);
    }
    _tile_release();
}
#else
int64_t outrider_tiles_room(const Sizes *at) { return 0 * at->E; }

void outrider_tiles_answer(
    const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first, int64_t some,
    void *whole) {
    (void)at, (void)asks, (void)b, (void)k, (void)first, (void)some, (void)whole;
}
#endif
