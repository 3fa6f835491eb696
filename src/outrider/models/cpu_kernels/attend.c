/* Attention of a Llama's layers over a cache of slots, in bfloat16 or float32 on a CPU.
 *
 * Keys and values are read once for all queries of a task, CHUNK slots at a time; a chunk's values are
 * fetched while its scores are computed, and the next one's keys while its values are summed up.
 * Weights are exponentials beside the largest score so far, and where a chunk has a larger one what was
 * summed up is made smaller (softmax online: Milakov and Gimelshein 2018).
 *
 * A row of a call (one token) is computed in one order whatever stands beside it: sums run over the
 * slots that it sees in their order, chunks are cut by how many of these there are, and queries share
 * what they read, not how they add. So a row has the same bits for any number of rows, queries and
 * visible slots. Sums are float32. No product may be contracted into a sum but where `fma` says so:
 * compile with -ffp-contract=off.
 *
 * Shapes are those of attend.h. Where the processor has tiles for such heads, queries of bfloat16 are
 * answered by attend_tiles.c.
 */
#include "attend.h"
#include "attend_sums.h"
#include "thread_pool.h"

#define FEW BLOCK /* queries for which values of half precision are widened as often as they are read */
/* Queries for which keys are read as they lie; for more they are turned over first. */
#define AS_THEY_LIE(is_half) ((is_half) || WIDTH < 16 ? BLOCK : 3 * BLOCK)
#define CHUNK 256 /* slots of a query whose weights are made at a time */
#define PIECE 64 /* slots whose values stay near for all queries */
#define LEAST -3.0e38f /* scores are larger */

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

/* What all layers ask of nodes: in `room` their rotary factors, each [B, Q, E], from tables of so
 * many places, and how far they see, each [B, Q]. 2: there is no such place. */
int outrider_nodes(
    const Sizes *at, const uint8_t *visible, const int64_t *positions, int64_t places,
    const void *cos, const void *sin, void *room) {
    const int64_t nodes = at->B * at->Q, bytes = at->E * (at->is_half ? sizeof(half) : sizeof(float));
    char *to_cos = room, *to_sin = to_cos + nodes * bytes;
    for (int64_t node = 0; node < nodes; node++) {
        const int64_t place = positions[node];
        if (place < 0 || place >= places) return 2;
        memcpy(to_cos + node * bytes, (const char *)cos + place * bytes, bytes);
        memcpy(to_sin + node * bytes, (const char *)sin + place * bytes, bytes);
    }
    int32_t *count = (int32_t *)(to_sin + nodes * bytes);
    outrider_reach(at, visible, count, count + nodes);
    return 0;
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

/* Queries of one head of keys and values, and what they see. */
typedef struct {
    int64_t some, nodes[MANY], heads[MANY], sees[MANY], ahead[MANY];
    int64_t most;   /* slots that one of them sees, at most */
    int64_t common; /* slots that are read for all: with gaps, what all see ahead of the first */
    float top[MANY]; /* the largest score so far */
} Asked;

/* Room for a task, in whole blocks of queries. */
typedef struct {
    int64_t behind;         /* slots that a node sees behind a gap, at most */
    float *queries, *sums;  /* [queries, E] */
    float *scores;          /* [queries, CHUNK], then weights */
    float *rest;            /* [queries, 16]: sums of weights */
    float *turned;          /* [ABREAST, E, 16]: keys */
    float *rows;            /* [16, E]: keys, too */
    float *values;          /* [PIECE, E] */
    int32_t *places;        /* [queries, behind]: slots behind the first gap */
} Room;

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

ALWAYS void asked(
    Asked *mine, const Sizes *at, const Asks *asks, int64_t b, int64_t k, int64_t first,
    int64_t some, const Room *room, const int is_half) {
    const int64_t groups = at->H / at->K, E = at->E;
    const lanes scale = all(1.0f / sqrtf((float)E));
    int64_t most = 0, common = at->W, gaps = 0;
    mine->some = some;
    for (int64_t q = 0; q < some; q++) {
        const int64_t node = mine->nodes[q] = b * at->Q + (first + q) / groups;
        const int64_t head = mine->heads[q] = k * groups + (first + q) % groups;
        const int64_t from = (node * (at->H + 2 * at->K) + head) * E;
        const int64_t ahead = mine->ahead[q] = asks->ahead[node], sees = asks->count[node];
        float *query = room->queries + q * E;
        turn(query, asks->qkv, from, asks->cos, asks->sin, node * E, E, is_half);
        for (int64_t e = 0; e < E; e += LANES) put(query + e, mul(get(query + e), scale));
        mine->sees[q] = sees;
        mine->top[q] = LEAST;
        if (sees > most) most = sees;
        common = lesser(ahead, common);
        if (ahead < sees) gaps = 1;
        const uint8_t *visible = asks->visible + node * at->W;
        int32_t *places = room->places + q * room->behind;
        for (int64_t s = ahead, i = ahead; i < sees; s++)
            if (visible[s]) places[i++ - ahead] = s;
    }
    mine->most = most;
    mine->common = gaps ? common : most; /* what some do not see yet has no weight for them */
    for (int64_t q = some; q % BLOCK; q++) /* nobody: the last block is whole */
        memset(room->queries + q * E, 0, E * sizeof(float));
    memset(room->sums, 0, some * E * sizeof(float));
    memset(room->rest, 0, some * LANES * sizeof(float));
}

/* A head of the cache: keys and values from number `from` on. */
typedef struct {
    const void *keys, *values;
    int64_t from;
} Head;

/* Slots that a block of queries sees, at most. */
static int64_t most_seen(const Asked *mine, int64_t block) {
    int64_t most = 0;
    for (int64_t q = block * BLOCK; q < lesser(mine->some, (block + 1) * BLOCK); q++)
        most = mine->sees[q] > most ? mine->sees[q] : most;
    return most;
}

/* Scores of the common slots from `chunk` to `stop`, keys as they lie. */
ALWAYS void score_few(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, int64_t chunk,
    int64_t stop, const int is_half) {
    const int64_t bytes = is_half ? sizeof(half) : sizeof(float), all_of = LANES * E * bytes;
    const int64_t lines = (mine->some + PAIR - 1) / PAIR * FETCHED(E, 1) < all_of ? 2 : 1;
    for (int64_t s = chunk; s < stop; s += LANES) {
        const int64_t there = lesser(stop - s, LANES), from = head->from + s * E;
        const float *keys = room->rows;
        if (is_half || there < LANES) {
            for (int64_t e = 0; e < there * E; e += LANES)
                put(room->rows + e, read_as(head->keys, from + e, is_half));
            memset(room->rows + there * E, 0, (LANES - there) * E * sizeof(float));
        } else
            keys = (const float *)head->keys + from;
        const char *next = (const char *)head->values + from * bytes;
        int64_t done = 0;
        for (int64_t q = 0, some; q < mine->some; q += some, done += FETCHED(E, lines)) {
            some = lesser(PAIR, mine->some - q);
            dots(room->scores + q * CHUNK + s - chunk, CHUNK, room->queries + q * E, keys, E, some,
                 next + done, done < all_of ? lines : 0);
        }
    }
}

/* The same, keys turned over: a block's sums are ready as they end. */
ALWAYS void score_many(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, int64_t chunk,
    int64_t stop, const int is_half) {
    const int64_t bytes = is_half ? sizeof(half) : sizeof(float);
    const int64_t blocks = (mine->some + BLOCK - 1) / BLOCK;
    for (int64_t s = chunk, wide; s < stop; s += wide * LANES) {
        wide = stop - s > LANES ? ABREAST : 1;
        for (int64_t i = 0; i < wide; i++) {
            const int64_t at = s + i * LANES;
            turned_keys(
                room->turned + i * LANES * E, head->keys, head->from + at * E, E,
                lesser(stop - at, LANES), room->rows, is_half);
        }
        const int64_t each = (wide * E * bytes + blocks * LINE - 1) / (blocks * LINE);
        for (int64_t j = 0; j < blocks; j++) {
            if (s >= most_seen(mine, j)) continue;
            const char *next = (const char *)head->values + (head->from + s * E) * bytes;
            dots_of(
                room->scores + j * BLOCK * CHUNK + s - chunk, CHUNK, room->queries + j * BLOCK * E,
                room->turned, E, wide, next + j * each * LANES * LINE, each);
        }
    }
}

/* A few queries' sums of weighted values, [few, E], go on. */
ALWAYS void weigh_few(
    float *sums, const float *weights, const void *values, int64_t at, const int64_t E, int64_t slots,
    int64_t few, const int is_half, Next next) {
    switch (few) {
    case 1: weigh_all(sums, weights, CHUNK, values, at, E, slots, 1, 1, is_half, next); break;
    case 2: weigh_all(sums, weights, CHUNK, values, at, E, slots, 2, 1, is_half, next); break;
    case 3: weigh_all(sums, weights, CHUNK, values, at, E, slots, 3, 1, is_half, next); break;
    default: weigh_all(sums, weights, CHUNK, values, at, E, slots, 4, 1, is_half, next);
    }
}

/* Each compiled once. */
static __attribute__((noinline)) void weigh_floats(
    float *sums, const float *weights, const void *values, int64_t at, int64_t E, int64_t slots,
    int64_t few, Next next) {
    weigh_few(sums, weights, values, at, E, slots, few, 0, next);
}

static __attribute__((noinline)) void weigh_halves(
    float *sums, const float *weights, const void *values, int64_t at, int64_t E, int64_t slots,
    int64_t few, Next next) {
    weigh_few(sums, weights, values, at, E, slots, few, 1, next);
}

/* Sums of weighted values over the common slots: widened once for all where there are many. */
ALWAYS void weigh_common(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, int64_t chunk,
    int64_t stop, const int is_half) {
    const int64_t bytes = is_half ? sizeof(half) : sizeof(float);
    const int widens = is_half && (mine->some > FEW || WIDTH < 16); /* narrow registers read in parts */
    for (int64_t s = chunk; s < stop; s += PIECE) {
        const int64_t from = head->from + s * E, there = lesser(stop - s, PIECE);
        Next next = {(const char *)head->keys + (from + lesser(CHUNK, mine->common - s) * E) * bytes,
                     0, (mine->some + BLOCK - 1) / BLOCK};
        for (int64_t e = 0; widens && e < there * E; e += LANES)
            put(room->values + e, read_as(head->values, from + e, is_half));
        for (int64_t j = 0; j < next.parts; j++) {
            const int64_t seen = lesser(most_seen(mine, j) - s, there);
            const int64_t few = lesser(mine->some - j * BLOCK, BLOCK);
            float *sums = room->sums + j * BLOCK * E;
            const float *weights = room->scores + j * BLOCK * CHUNK + s - chunk;
            next.part = j;
            if (seen <= 0) continue;
            if (widens) weigh_floats(sums, weights, room->values, 0, E, seen, few, next);
            else if (is_half) weigh_halves(sums, weights, head->values, from, E, seen, few, next);
            else weigh_floats(sums, weights, head->values, from, E, seen, few, next);
        }
    }
}

/* Queries from `q` on of one node, which see the same. */
static int64_t of_a_node(const Asked *mine, int64_t q) {
    int64_t few = 1;
    while (few < BLOCK && q + few < mine->some && mine->nodes[q + few] == mine->nodes[q]) few++;
    return few;
}

/* Rows [there, E] of the cache, widened: of what a query sees, from its `i`-th slot on. */
ALWAYS void gathered(
    float *to, const Asked *mine, const Room *room, const void *table, const Head *head,
    const int64_t E, int64_t q, int64_t i, int64_t there, const int is_half) {
    for (const int64_t stop = i + there; i < stop; i++, to += E) {
        const int64_t place =
            i < mine->ahead[q] ? i : room->places[q * room->behind + i - mine->ahead[q]];
        for (int64_t e = 0; e < E; e += LANES)
            put(to + e, read_as(table, head->from + place * E + e, is_half));
    }
}

/* Scores of what queries see behind the common slots, from their `from`-th to their `stop`-th. */
ALWAYS void score_behind(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, int64_t chunk,
    int64_t from, int64_t stop, const int is_half) {
    for (int64_t q = 0, few; q < mine->some; q += few) {
        few = of_a_node(mine, q);
        for (int64_t s = from; s < lesser(mine->sees[q], stop); s += LANES) {
            const int64_t there = lesser(lesser(mine->sees[q], stop) - s, LANES);
            float scores[LANES];
            gathered(room->rows, mine, room, head->keys, head, E, q, s, there, is_half);
            memset(room->rows + there * E, 0, (LANES - there) * E * sizeof(float));
            for (int64_t i = q; i < q + few; i++) {
                dots(scores, 0, room->queries + i * E, room->rows, E, 1, 0, 0);
                memcpy(room->scores + i * CHUNK + s - chunk, scores, there * sizeof(float));
            }
        }
    }
}

/* Their values, weighted. */
ALWAYS void weigh_behind(
    const Asked *mine, const int64_t E, const Head *head, const Room *room, int64_t chunk,
    int64_t from, int64_t stop, const int is_half) {
    for (int64_t q = 0, few; q < mine->some; q += few) {
        few = of_a_node(mine, q);
        for (int64_t s = from; s < lesser(mine->sees[q], stop); s += PIECE) {
            const int64_t there = lesser(lesser(mine->sees[q], stop) - s, PIECE);
            gathered(room->values, mine, room, head->values, head, E, q, s, there, is_half);
            weigh_floats(room->sums + q * E, room->scores + q * CHUNK + s - chunk, room->values, 0, E,
                         there, few, (Next){(char *)room->values, 0, 1});
        }
    }
}

/* A query's first `end` scores of a chunk, in whole lanes, as weights. */
ALWAYS void softened(Asked *mine, const Room *room, const int64_t E, int64_t q, const int64_t end) {
    float *scores = room->scores + q * CHUNK, *sums = room->sums + q * E;
    const lanes before = all(mine->top[q]);
    lanes tops[4] = {before, before, before, before}, rest = get(room->rest + q * LANES);
    int64_t at = 0;
    for (; at + 4 * LANES <= end; at += 4 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) tops[i] = widest(get(scores + at + i * LANES), tops[i]);
    for (; at < end; at += LANES) tops[0] = widest(get(scores + at), tops[0]);
    const float most = most_of_lanes(widest(widest(tops[0], tops[1]), widest(tops[2], tops[3])));
    const lanes best = all(most);
    if (most != mine->top[q]) {
        const lanes less = exp_(sub(all(mine->top[q]), best));
        rest = mul(rest, less);
        for (int64_t e = 0; e < E; e += LANES) put(sums + e, mul(get(sums + e), less));
        mine->top[q] = most;
    }
#pragma GCC unroll 4
    for (int64_t s = 0; s < end; s += LANES) {
        const lanes weight = exp_(sub(get(scores + s), best));
        put(scores + s, weight);
        rest = add(rest, weight);
    }
    put(room->rest + q * LANES, rest);
}

/* Its scores of `seen` slots as weights; what lies behind has none. */
static void soften(Asked *mine, const Room *room, const int64_t E, int64_t q, int64_t seen) {
    float *scores = room->scores + q * CHUNK;
    if (seen >= CHUNK) {
        softened(mine, room, E, q, CHUNK);
        return;
    }
    const int64_t some = seen < 0 ? 0 : seen, end = (some + LANES - 1) / LANES * LANES;
    for (int64_t s = some; s < end; s++) scores[s] = -INFINITY;
    memset(scores + end, 0, (CHUNK - end) * sizeof(float));
    if (some) softened(mine, room, E, q, end);
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
    asked(&mine, at, asks, b, k, first, some, room, is_half);
    for (int64_t chunk = 0; chunk < mine.most; chunk += CHUNK) {
        const int64_t stop = lesser(chunk + CHUNK, mine.most), end = lesser(stop, mine.common);
        const int64_t from = chunk > mine.common ? chunk : mine.common;
        if (some > AS_THEY_LIE(is_half)) score_many(&mine, E, &head, room, chunk, end, is_half);
        else score_few(&mine, E, &head, room, chunk, end, is_half);
        score_behind(&mine, E, &head, room, chunk, from, stop, is_half);
        for (int64_t q = 0; q < some; q++) soften(&mine, room, E, q, mine.sees[q] - chunk);
        weigh_common(&mine, E, &head, room, chunk, end, is_half);
        weigh_behind(&mine, E, &head, room, chunk, from, stop, is_half);
    }
    for (int64_t q = 0; q < some; q++) {
        const int64_t to = (mine.nodes[q] * at->H + mine.heads[q]) * E;
        const float rest = total(get(room->rest + q * LANES));
        const lanes share = all(rest == 0 ? 0 : 1 / rest); /* sees nothing: says nothing */
        for (int64_t e = 0; e < E; e += LANES)
            write_as(asks->out, to + e, mul(get(room->sums + q * E + e), share), is_half);
    }
}

/* Queries of a task. Many are cut so that each thread has two tasks or more; few as far as there
 * are threads without a task, as each task reads all keys and values. */
static int64_t at_once(int64_t rows, int64_t pairs, int64_t threads) {
    const int64_t tasks = rows > MANY / 2 ? 2 * threads : threads;
    const int64_t parts = threads > 1 ? (tasks + pairs - 1) / pairs : 1;
    return lesser((rows + parts - 1) / parts, MANY);
}

/* A task's room in one piece, each part in whole lines; its bytes if there is no piece yet. */
static int64_t placed(Room *room, char *piece, int64_t each, int64_t E) {
    int64_t at = 0;
    each = (each + BLOCK - 1) / BLOCK * BLOCK;
#define PLACE(name, count) \
    room->name = (void *)(piece + at), at += ((count) * sizeof(*room->name) + 63) / 64 * 64
    PLACE(queries, each * E);
    PLACE(sums, each * E);
    PLACE(scores, each * CHUNK);
    PLACE(rest, each * LANES);
    PLACE(turned, ABREAST * E * LANES);
    PLACE(rows, LANES * E);
    PLACE(values, PIECE * E);
    PLACE(places, each * room->behind);
#undef PLACE
    return at;
}

/* A call: first each row's heads are noted, then its tasks, `each` queries of a head, are answered. */
typedef struct {
    const Sizes *at;
    const Asks *asks;
    const int64_t *slots;
    int64_t each, blocks, bytes, tiled; /* `bytes` of a thread's room */
    int64_t behind; /* slots that a node sees behind a gap, at most */
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
    const int64_t first = task % of->blocks * of->each, some = lesser(rows - first, of->each);
    char *piece = of->rooms + thread * of->bytes;
    Room room = {.behind = of->behind};
    if (of->tiled) {
        outrider_tiles_answer(at, of->asks, b, k, first, some, piece);
        return;
    }
    placed(&room, piece, of->each, at->E);
    if (at->is_half) answer(at, of->asks, b, k, first, some, &room, 1);
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
    const Asks asks = {qkv, cos, sin, keys, values, visible, count, ahead, out};
    Room room = {0};
    for (int64_t node = 0; node < at->B * at->Q; node++) {
        if (slots[node] < 0 || slots[node] >= at->there) return 2;
        if (count[node] - ahead[node] > room.behind) room.behind = count[node] - ahead[node];
    }
    if (at->W > at->there) return 2;
    const int64_t bytes = tiled ? (tiled + 63) / 64 * 64 : placed(&room, 0, each, at->E);
    Call call = {at, &asks, slots, each, blocks, bytes, tiled, room.behind,
                 aligned_alloc(64, threads * bytes)};
    if (!call.rooms) return 1;
    outrider_share(threads, pairs, note_pair, &call);
    outrider_share(threads, pairs * blocks, answer_task, &call);
    free(call.rooms);
    return 0;
}
