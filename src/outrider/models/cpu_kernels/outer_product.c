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
#define MANY 4 /* lanes of values whose sums, and entries of a log that, stay in registers */
#define FEW 64 /* nodes whose states of one row of K and one lane stand side by side */

/* What a state gains: its decay is one number, or one for each of K. */
typedef struct { const float *decay, *key, *delta; } Entry;

/* `to` [K, V] = decay from + key delta', for `many` entries one after the other. */
ALWAYS void advanced(
    float *to, const float *from, const Entry *by, int64_t by_channel, int64_t keys, int64_t values,
    const int many) {
    for (int64_t k = 0; k < keys; k++)
        for (int64_t v = k * values, e = 0; e < values; v += LANES, e += LANES) {
            lanes x = get(from + v);
#pragma GCC unroll 4
            for (int i = 0; i < many; i++) {
                const lanes kept = mul(all(by[i].decay[by_channel ? k : 0]), x);
                x = fma_(all(by[i].key[k]), get(by[i].delta + e), kept);
            }
            put(to + v, x);
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
    int64_t rows, nodes, heads, groups, keys, values, ring, by_channel, corrects, apart;
    const int64_t *first, *count, *origins, *lines;
    const float *from, *query, *key, *value, *beta, *decay;
    float *to, *room, *delta, *out, *log_decay, *log_key, *log_delta;
} Call;

/* One state advanced by its entries of the log. */
static void settled(const Call *of, int64_t b, int64_t h, const float *state, float *next) {
    const int64_t decays = of->by_channel ? of->keys : 1, g = h / (of->heads / of->groups);
    for (int64_t n = 0; n < of->count[b]; state = next) {
        Entry by[MANY];
        int many = 0;
        for (; many < MANY && n < of->count[b]; many++, n++) {
            const int64_t at = b * of->ring + (of->first[b] + n) % of->ring;
            by[many] = (Entry){
                of->log_decay + (at * of->heads + h) * decays,
                of->log_key + (at * of->groups + g) * of->keys,
                of->log_delta + (at * of->heads + h) * of->values};
        }
        if (many == 1) advanced(next, state, by, of->by_channel, of->keys, of->values, 1);
        else if (many == 2) advanced(next, state, by, of->by_channel, of->keys, of->values, 2);
        else if (many == 3) advanced(next, state, by, of->by_channel, of->keys, of->values, 3);
        else advanced(next, state, by, of->by_channel, of->keys, of->values, MANY);
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
        __builtin_prefetch(state + (keys + k) * values); /* the next head's */
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

/* The same for all lanes. Of up to eight nodes all sums stay in registers. */
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
#define UNROLLED(N) case N: if (chain) READ_KNOWN(N, 1); else READ_KNOWN(N, 0); break
        switch (nodes) {
            UNROLLED(1); UNROLLED(2); UNROLLED(3); UNROLLED(4);
            UNROLLED(5); UNROLLED(6); UNROLLED(7); UNROLLED(8);
            default: READ_KNOWN(nodes, 0);
        }
#undef UNROLLED
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
    float *base = of->to + pair * size, *made = of->room + thread * of->apart;
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
            advanced(
                made + n * size, from, &(Entry){left, k, added}, by_channel, keys, values, 1);
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
        rows, nodes, heads, groups, keys, values, ring, by_channel, corrects, nodes * keys * values,
        first, count, origins, lines, states, query, key, value, beta, decay, states, room, delta, out, log_decay, log_key,
        log_delta,
    };
    if (rows * heads * keys * values <= 65536) threads = 1;
    outrider_share(threads, rows * heads, answer_one, &of);
}

/* A call of state space duality, with tables as mixers have them: x [B, N, H, P], dt [B, N, H], b and
 * c [B, N, G, K] in bfloat16 (`is_half`) or float32, whose rows and nodes are so many numbers apart;
 * a, bias and skip [H] float32, the last two perhaps null. */
typedef struct {
    int64_t rows, nodes, heads, groups, keys, values, ring, threads, is_half, plus;
    int64_t x_row, x_node, dt_row, dt_node, b_row, b_node, c_row, c_node;
    const void *x, *dt, *b, *c;
    const float *a, *bias, *skip;
    const int64_t *origins, *first, *count, *lines;
    float *states, *log_decay, *log_key, *log_delta, *work, *out;
    float low, high;
} Scan;

/* `decay` [H] and what multiplies x of one node: dt + bias, by `plus` log(1 + e^dt), cut to limits.
 * In half precision each step is rounded, as it is by torch's operators. */
static void steps_of(const Scan *of, int64_t at, float *decay, float *step) {
    for (int64_t h = 0; h < of->heads; h += LANES) {
        const int64_t few = of->heads - h < LANES ? of->heads - h : LANES;
        float some[LANES] = {0};
        half near[LANES];
        widen(some, of->dt, at + h, few, LANES, of->is_half);
        lanes dt = get(some);
        if (of->bias) {
            memcpy(some, of->bias + h, few * sizeof(float));
            lanes bias = get(some);
            if (of->is_half) {
                store(near, bias);
                store(near, add(dt, load(near)));
                dt = load(near);
            } else dt = add(dt, bias);
        }
        if (of->plus) dt = softplus(dt);
        if (of->is_half && of->plus) {
            store(near, dt);
            dt = load(near);
        }
        dt = choose(above(all(of->low), dt), all(of->low), dt);
        dt = choose(above(dt, all(of->high)), all(of->high), dt);
        put(some, dt);
        memcpy(step + h, some, few * sizeof(float));
        memcpy(some, of->a + h, few * sizeof(float));
        put(some, exp_(mul(dt, get(some))));
        memcpy(decay + h, some, few * sizeof(float));
    }
}

/* Outputs [B, N, H, P] float32 of a call's nodes, D x included; states, logs, origins and what is
 * due are as in `outrider_outer_nodes`. `work` holds B N (2 G K + 2 H P + 2 H) numbers and, for each
 * thread, N (K + 1), or N K P of more than FEW nodes. */
void outrider_ssd(const void *scan) {
    const Scan *of = scan;
    const int64_t all_nodes = of->rows * of->nodes, heads = of->heads, values = of->values;
    const int64_t shared = of->groups * of->keys, own = heads * values;
    float *query = of->work, *key = query + all_nodes * shared, *value = key + all_nodes * shared;
    float *delta = value + all_nodes * own, *decay = delta + all_nodes * own;
    float *step = decay + all_nodes * heads, *room = step + all_nodes * heads;
    for (int64_t n = 0; n < all_nodes; n++) {
        const int64_t row = n / of->nodes, node = n % of->nodes;
        widen(query + n * shared, of->c, row * of->c_row + node * of->c_node, shared, shared, of->is_half);
        widen(key + n * shared, of->b, row * of->b_row + node * of->b_node, shared, shared, of->is_half);
        steps_of(of, row * of->dt_row + node * of->dt_node, decay + n * heads, step + n * heads);
        const int64_t x = row * of->x_row + node * of->x_node;
        for (int64_t e = 0; e < own; e += LANES)
            put(
                value + n * own + e,
                mul(read_as(of->x, x + e, of->is_half), all(step[n * heads + e / values])));
    }
    Call call = {
        of->rows, of->nodes, heads, of->groups, of->keys, values, of->ring, 0, 0,
        of->nodes * (of->nodes > FEW ? of->keys * values : of->keys + 1), of->first, of->count,
        of->origins, of->lines, of->states, query, key, value, 0, decay, of->states, room, delta,
        of->out, of->log_decay, of->log_key, of->log_delta,
    };
    const int64_t threads = of->rows * own * of->keys <= 65536 ? 1 : of->threads;
    outrider_share(threads, of->rows * heads, answer_one, &call);
    if (!of->skip) return;
    for (int64_t n = 0; n < all_nodes; n++) {
        const int64_t x = n / of->nodes * of->x_row + n % of->nodes * of->x_node;
        for (int64_t e = 0; e < own; e += LANES) {
            const lanes kept = mul(read_as(of->x, x + e, of->is_half), all(of->skip[e / values]));
            put(of->out + n * own + e, add(get(of->out + n * own + e), kept));
        }
    }
}
