/* Layers whose state decays and gains an outer product for each token: S <- decay S + key delta'.
 *
 * Gated delta rules and state space duality (recurrent/outer_product.py). A head's state [K, V]
 * stays near the processor while its nodes are gone through: the settled one is read once a call.
 * A state is advanced by `advanced` alone, and a node's output is summed over K in one order,
 * whatever stands beside it: a text's states have the same bits however it was drafted.
 *
 * Shapes: B rows, N nodes, H heads in G groups that share keys, K and V in whole lanes; float32.
 */
#include "lanes.h"
#include "thread_pool.h"

#define WIDEST_KEY 256
#define MANY 4 /* lanes of values whose sums stay in registers */
#define FEW 64 /* nodes whose states of one row of K and one lane stand side by side */

/* `to` [K, V] = decay from + key delta'; the decay is one number, or one for each of K. */
ALWAYS void advanced(
    float *to, const float *from, const float *decay, int64_t by_channel, const float *key,
    const float *delta, int64_t keys, int64_t values) {
    for (int64_t k = 0; k < keys; k++) {
        const lanes left = all(decay[by_channel ? k : 0]), in = all(key[k]);
        for (int64_t v = k * values, e = 0; e < values; v += LANES, e += LANES)
            put(to + v, fma_(in, get(delta + e), mul(left, get(from + v))));
    }
}

/* `many` lanes of the sums over K of key S and query S, from value `e` on. */
ALWAYS void read_lanes(
    float *known, float *seen, const float *state, const float *key, const float *query,
    int64_t keys, int64_t values, int64_t e, const int many) {
    lanes first[MANY], second[MANY];
#pragma GCC unroll 4
    for (int i = 0; i < many; i++) first[i] = second[i] = all(0);
    for (int64_t k = 0; k < keys; k++) {
        const lanes a = all(key[k]), b = all(query[k]);
#pragma GCC unroll 4
        for (int i = 0; i < many; i++) {
            const lanes s = get(state + k * values + e + i * LANES);
            first[i] = fma_(a, s, first[i]);
            second[i] = fma_(b, s, second[i]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < many; i++) {
        put(known + e + i * LANES, first[i]);
        put(seen + e + i * LANES, second[i]);
    }
}

static void read_state(
    float *known, float *seen, const float *state, const float *key, const float *query,
    int64_t keys, int64_t values) {
    int64_t e = 0;
    for (; e + MANY * LANES <= values; e += MANY * LANES)
        read_lanes(known, seen, state, key, query, keys, values, e, MANY);
    for (; e < values; e += LANES)
        read_lanes(known, seen, state, key, query, keys, values, e, 1);
}

/* What both functions below are given; a piece is one head of a row. */
typedef struct {
    int64_t rows, nodes, heads, groups, keys, values, ring, by_channel, corrects;
    const int64_t *first, *count, *origins, *lines;
    const float *from, *query, *key, *value, *beta, *decay;
    float *to, *room, *delta, *out, *log_decay, *log_key, *log_delta;
} Call;

/* One state advanced by its entries of the log. */
static void settled(const Call *of, int64_t b, int64_t h, const float *state, float *next) {
    const int64_t decays = of->by_channel ? of->keys : 1, g = h / (of->heads / of->groups);
    for (int64_t n = 0; n < of->count[b]; n++, state = next) {
        const int64_t at = b * of->ring + (of->first[b] + n) % of->ring;
        advanced(
            next, state, of->log_decay + (at * of->heads + h) * decays, of->by_channel,
            of->log_key + (at * of->groups + g) * of->keys,
            of->log_delta + (at * of->heads + h) * of->values, of->keys, of->values);
    }
}

static void advance_one(void *about, int64_t pair, int64_t thread) {
    const Call *of = about;
    const int64_t b = pair / of->heads, size = of->keys * of->values;
    const float *state = of->from + pair * size;
    float *next = of->to + pair * size;
    (void)thread;
    if (!of->count[b] && next != state) memcpy(next, state, size * sizeof(float));
    settled(of, b, pair % of->heads, state, next);
}

/* `to` [B, H, K, V] = the states of `from`, which may be the same, advanced by `count` [B] entries
 * of a log each: those of ring places `first` [B] on; decay [B, R, H] or [B, R, H, K], key
 * [B, R, G, K], delta [B, R, H, V]. */
void outrider_advance(
    int64_t rows, int64_t heads, int64_t groups, int64_t keys, int64_t values, int64_t ring,
    int64_t by_channel, int64_t threads, const void *first, const void *count, const void *decay,
    const void *key, const void *delta, const void *from, void *to) {
    Call of = {
        .rows = rows, .heads = heads, .groups = groups, .keys = keys, .values = values, .ring = ring,
        .by_channel = by_channel, .first = first, .count = count, .from = from, .to = to,
        .log_decay = (float *)decay, .log_key = (float *)key, .log_delta = (float *)delta,
    };
    if (rows * heads * keys * values <= 65536) threads = 1;
    outrider_share(threads, rows * heads, advance_one, &of);
}

/* One lane of `seen` [N, V]: sums over K of query S for nodes whose deltas are known ahead. A row
 * of the state is read once, and no state of a node is written. `query` is [N, K], the keys are
 * `apart` numbers from each other; `chain`: each node starts from the one before. */
ALWAYS void read_known(
    float *seen, const float *state, const int64_t *origin, const float *query, const float *key,
    int64_t apart, const float *decay, const float *delta, int64_t heads, int64_t keys,
    int64_t values, const int64_t nodes, const int chain) {
    lanes sums[FEW], made[FEW + 1];
    for (int64_t n = 0; n < nodes; n++) sums[n] = all(0);
    for (int64_t k = 0; k < keys; k++) {
        made[0] = get(state + k * values);
#pragma GCC unroll 8
        for (int64_t n = 0; n < nodes; n++) {
            const lanes from = made[chain ? n : origin[n]];
            sums[n] = fma_(all(query[n * keys + k]), from, sums[n]);
            const lanes kept = mul(all(decay[n * heads]), from);
            made[n + 1] = fma_(all(key[n * apart + k]), get(delta + n * heads * values), kept);
        }
    }
    for (int64_t n = 0; n < nodes; n++) put(seen + n * heads * values, sums[n]);
}

/* The same for all lanes. Of up to four nodes in a chain all sums stay in registers. */
static void read_all_known(
    float *seen, const float *state, const int64_t *origin, const float *query, const float *key,
    int64_t apart, const float *decay, const float *delta, int64_t heads, int64_t keys,
    int64_t values, int64_t nodes) {
    int chain = 1;
    for (int64_t n = 0; n < nodes; n++) chain &= origin[n] == n;
    for (int64_t e = 0; e < values; e += LANES) {
#define READ_KNOWN(N, CHAIN) \
    read_known( \
        seen + e, state + e, origin, query, key, apart, decay, delta + e, heads, keys, values, N, \
        CHAIN)
        if (chain && nodes == 1) READ_KNOWN(1, 1);
        else if (chain && nodes == 2) READ_KNOWN(2, 1);
        else if (chain && nodes == 3) READ_KNOWN(3, 1);
        else if (chain && nodes == 4) READ_KNOWN(4, 1);
        else READ_KNOWN(nodes, 0);
#undef READ_KNOWN
    }
}

static void answer_one(void *about, int64_t pair, int64_t thread) {
    const Call *of = about;
    const int64_t nodes = of->nodes, heads = of->heads, groups = of->groups, keys = of->keys;
    const int64_t values = of->values, ring = of->ring, by_channel = of->by_channel, corrects = of->corrects;
    const int64_t size = keys * values, decays = by_channel ? keys : 1;
    const int64_t b = pair / heads, h = pair % heads, g = h / (heads / groups);
    const int64_t *origin = of->origins + b * nodes;
    float *base = of->to + pair * size, *made = of->room + thread * nodes * size;
    settled(of, b, h, base, base);
    const int known = !corrects && !by_channel && nodes <= FEW;
    for (int64_t n = 0; n < nodes; n++) {
        const int64_t shared = ((b * nodes + n) * groups + g) * keys;
        const int64_t own = (b * nodes + n) * heads + h;
        const float *k = of->key + shared, *q = of->query + shared;
        const float *left = of->decay + own * decays;
        const float *from = origin[n] ? made + (origin[n] - 1) * size : base;
        float keyed[WIDEST_KEY], alone[WIDEST_KEY];
        float *asked = known ? made + n * keys : alone;
        lanes both = all(0);
        for (int64_t e = 0; e < keys; e += LANES) {
            const lanes by = by_channel ? get(left + e) : all(left[0]);
            both = fma_(get(k + e), get(q + e), both);
            put(keyed + e, mul(get(k + e), by));
            put(asked + e, mul(get(q + e), by));
        }
        const lanes self = all(total(both));
        const int64_t place = b * ring + of->lines[b * nodes + n];
        float *noted = of->log_delta + (place * heads + h) * values;
        memcpy(
            of->log_decay + (place * heads + h) * decays, left,
            decays * sizeof(float));
        if (h % (heads / groups) == 0)
            memcpy(of->log_key + (place * groups + g) * keys, k, keys * sizeof(float));
        float *added = of->delta + own * values, *answer = of->out + own * values;
        const float *given = of->value + own * values;
        if (known) {
            memcpy(added, given, values * sizeof(float));
            memcpy(noted, given, values * sizeof(float));
            made[nodes * keys + n] = total(both);
            continue;
        }
        read_state(added, answer, from, keyed, asked, keys, values);
        const lanes share = all(corrects ? of->beta[own] : 1.0f);
        for (int64_t e = 0; e < values; e += LANES) {
            lanes new = get(given + e);
            if (corrects) new = mul(sub(new, get(added + e)), share);
            put(added + e, new);
            put(noted + e, new);
            put(answer + e, fma_(self, new, get(answer + e)));
        }
        int64_t last = nodes - 1;
        while (last > n && origin[last] != n + 1) last--;
        if (last > n)
            advanced(made + n * size, from, left, by_channel, k, added, keys, values);
    }
    if (!known) return;
    const int64_t row = b * nodes * heads + h;
    const float *first_key = of->key + (b * nodes * groups + g) * keys;
    const float *given = of->value + row * values;
    float *answers = of->out + row * values;
    read_all_known(
        answers, base, origin, made, first_key, groups * keys, of->decay + row,
        given, heads, keys, values, nodes);
    for (int64_t n = 0; n < nodes; n++) {
        const lanes self = all(made[nodes * keys + n]);
        const int64_t own = n * heads * values;
        for (int64_t e = 0; e < values; e += LANES)
            put(
                answers + own + e,
                fma_(self, get(given + own + e), get(answers + own + e)));
    }
}

/* Outputs [B, N, H, V] of nodes, each from the state that `origins` [B, N] says: 0 is the row's
 * own of `states`, 1 + n that behind node n. With `corrects`, a node's delta is beta (value - what
 * the state says of its key), else its value; `room` holds [threads, N, K, V] numbers.
 *
 * Ahead of that the states are advanced by `count` [B] entries of the rows' logs from ring places
 * `first` [B] on, and the nodes' entries are written there at places `lines` [B, N]: logs are as in
 * `outrider_advance`. */
void outrider_outer_nodes(
    int64_t rows, int64_t nodes, int64_t heads, int64_t groups, int64_t keys, int64_t values,
    int64_t by_channel, int64_t corrects, int64_t threads, int64_t ring, const void *origins,
    void *states, const void *query, const void *key, const void *value, const void *beta,
    const void *decay, void *room, void *delta, void *out, const void *first, const void *count,
    const void *lines, void *log_decay, void *log_key, void *log_delta) {
    Call of = {
        rows, nodes, heads, groups, keys, values, ring, by_channel, corrects, first, count, origins,
        lines, states, query, key, value, beta, decay, states, room, delta, out, log_decay, log_key,
        log_delta,
    };
    if (rows * heads * keys * values <= 65536) threads = 1;
    outrider_share(threads, rows * heads, answer_one, &of);
}
