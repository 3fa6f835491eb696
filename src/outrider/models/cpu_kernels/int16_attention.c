/* Attention of a window to itself, softmax(q k') v without a mask, with products of whole numbers of 16
 * bits: what an encoder in 8 bits runs, twice as fast as float32 where a processor has AVX2.
 *
 * Queries, keys and values are rounded to -2047..2047, a query and a key by a scale of its own, values by
 * one for each number and 32 slots; softmax's weights to 0..32767. Sums of whole numbers are exact, in 32
 * bits at most, so nothing depends on the order. That is eleven bits, as half precision has.
 *
 * Shapes: T slots (in whole blocks of 32 here), H heads, E numbers a head (whole lanes).
 */
#include "lanes.h"
#include "thread_pool.h"

#define NEAREST 2047 /* the largest whole number of queries, keys and values */
#define HEAVIEST 32767 /* and of weights: 32 products of both are below 2^31, as are 512 of the former */
#define BLOCK 32 /* slots that share a scale of values, and whose sums are added as whole numbers */
#define QUERIES 12 /* that share what is read */
#define MAGIC 12582912.0f /* above which float32 are whole numbers, in their last bits */
#define NEAR 8 /* blocks of slots that stay near */
#if WIDTH == 16
#define ROWS 12 /* whose sums stay in registers */
#else
#define ROWS 4
#endif

typedef int32_t two __attribute__((may_alias, aligned(2)));
typedef ANYWHERE(int32_t) part_twos;
typedef int32_t bits_there __attribute__((may_alias));

/* sum + the products of two numbers of 16 bits in each lane. */
ALWAYS part_marks part_dot(part_marks sum, part_marks a, part_marks b) {
#if WIDTH == 16 && defined(__AVX512VNNI__)
    return (part_marks)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif WIDTH == 16
    return sum + (part_marks)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (part_marks)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif WIDTH == 8
    return sum + (part_marks)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* Products of `few` rows of pairs, `row` numbers apart, and sixteen columns of them [steps, 16, 2]. */
ALWAYS void products(
    marks *sum, const int16_t *rows, int64_t row, const int16_t *columns, int64_t steps, const int few) {
#pragma GCC unroll 12
    for (int r = 0; r < few; r++) sum[r] = EACH(marks, (part_marks){0});
#pragma GCC unroll 4
    for (int64_t s = 0; s < steps; s++) {
        const marks column = EACH(marks, *(const part_twos *)(columns + 32 * s + 2 * nth * WIDTH));
#pragma GCC unroll 12
        for (int r = 0; r < few; r++) {
            const part_marks both = *(const two *)(rows + r * row + 2 * s) + (part_marks){0};
            sum[r] = EACH(marks, part_dot(ON(sum[r]), ON(column), both));
        }
    }
}

ALWAYS lanes floats(marks x) { return EACH(lanes, __builtin_convertvector(ON(x), part)); }

/* The nearest whole numbers, ties to even. */
ALWAYS lanes whole(lanes x) { return sub(add(x, all(MAGIC)), all(MAGIC)); }

/* Sixteen whole numbers in 16 bits. */
ALWAYS void store_whole(int16_t *to, lanes x) {
    int32_t each[LANES];
    (void)EACH(lanes, (*(part_twos *)(each + nth * WIDTH) = __builtin_convertvector(ON(x), part_marks), ON(x)));
    for (int i = 0; i < LANES; i++) to[i] = (int16_t)each[i];
}

/* What whole numbers up to NEAREST multiply to give x, and its inverse: NaN and 0 if x has no end. */
ALWAYS float scale_of(float most, float *inverse) {
    const int bad = !(most <= 3.4e38f);
    *inverse = most > 0 && !bad ? NEAREST / most : 0;
    return bad ? __builtin_nanf("") : most / NEAREST;
}

ALWAYS lanes size_of(lanes x) { return choose(above(x, all(0)), x, minus(x)); }

/* The larger; what is no number stays. */
ALWAYS lanes more_of(lanes a, lanes b) { return choose(either(above(a, b), no_number(a)), a, b); }

/* A row of E to whole numbers; returns its scale. */
ALWAYS float rounded(int16_t *to, const float *x, int64_t size) {
    lanes top = all(0);
    for (int64_t e = 0; e < size; e += LANES) top = more_of(top, size_of(get(x + e)));
    float each[LANES], most = 0, by;
    put(each, top);
    for (int i = 0; i < LANES; i++) most = most != most || each[i] <= most ? most : each[i];
    const float scale = scale_of(most, &by);
    for (int64_t e = 0; e < size; e += LANES)
        store_whole(to + e, by == 0 ? all(0) : whole(mul(get(x + e), all(by))));
    return scale;
}

/* What one head's window is laid out to. */
typedef struct {
    int64_t slots, room, size; /* T, in whole blocks, E */
    int16_t *keys; /* [T / 16, E / 2, 16, 2] */
    int16_t *values; /* [E / 16, T / 2, 16, 2] */
    float *key_scales; /* [T] */
    float *value_scales; /* [E / 16, T / 32, 16] */
    int16_t *queries; /* [QUERIES, E] */
    int16_t *weights; /* [QUERIES, T] */
    float *scores; /* [QUERIES, T] */
    float *sums; /* [QUERIES, E] */
} Head;

/* Fetch what will be read: rows lie in pages of their own. */
ALWAYS void soon(const float *x, int64_t size) {
    for (int64_t e = 0; e < size; e += LANES) __builtin_prefetch(x + e);
}

/* Keys of a head, `row` numbers from slot to slot. */
static void lay_keys(const Head *h, const float *x, int64_t row) {
    memset(h->keys, 0, h->room * h->size * sizeof(int16_t));
    memset(h->key_scales, 0, h->room * sizeof(float));
    for (int64_t t = 0; t < h->slots; t++) {
        int16_t *to = h->keys + t / LANES * LANES * h->size + t % LANES * 2;
        soon(x + (t + QUERIES) * row, h->size);
        h->key_scales[t] = rounded(h->queries, x + t * row, h->size);
        for (int64_t e = 0; e < h->size; e += 2) memcpy(to + e * LANES, h->queries + e, 4);
    }
}

static void lay_values(const Head *h, const float *x, int64_t row) {
    memset(h->values, 0, h->room * h->size * sizeof(int16_t));
    for (int64_t e = 0; e < h->size; e += LANES)
        for (int64_t first = 0; first < h->room; first += BLOCK) {
            const int64_t last = first + BLOCK < h->slots ? first + BLOCK : h->slots;
            float *scales = h->value_scales + (e / LANES * h->room / BLOCK + first / BLOCK) * LANES;
            float by[LANES];
            lanes top = all(0);
            if (e == 0)
                for (int64_t t = first; t < last; t++) soon(x + (t + BLOCK) * row, h->size);
            for (int64_t t = first; t < last; t++) top = more_of(top, size_of(get(x + t * row + e)));
            put(scales, top);
            for (int i = 0; i < LANES; i++) scales[i] = scale_of(scales[i], by + i);
            const marks none = at_most(get(by), all(0));
            for (int64_t t = first; t < last; t++) {
                int16_t near[LANES], *to = h->values + e * h->room + t / 2 * 2 * LANES + t % 2;
                store_whole(near, choose(none, all(0), whole(mul(get(x + t * row + e), get(by)))));
                for (int i = 0; i < LANES; i++) to[2 * i] = near[i];
            }
        }
}

/* Scores of `few` queries from number q on over all slots. */
ALWAYS void scored(const Head *h, int64_t q, int64_t slot, const float *scales, const int few) {
    marks sum[ROWS];
    products(sum, h->queries + q * h->size, h->size, h->keys + slot * h->size, h->size / 2, few);
    const lanes by = get(h->key_scales + slot);
#pragma GCC unroll 12
    for (int r = 0; r < few; r++)
        put(h->scores + (q + r) * h->room + slot, mul(floats(sum[r]), mul(by, all(scales[q + r]))));
}

/* HEAVIEST 2^x to whole numbers, for x up to 0, as float32 above MAGIC: the least of them are 0. */
ALWAYS part part_weight(part x) {
    const part zero = {0}, least = zero - 30.0f;
    x = part_choose(x > least, x, least);
    const part n = x + MAGIC, r = x - (n - MAGIC);
    part p = zero + 1.33976099e-3f; /* of 2^r - 1 from -1/2 to 1/2, to 2^-22 */
    p = part_fma(p, r, zero + 9.61815100e-3f);
    p = part_fma(p, r, zero + 5.55034000e-2f);
    p = part_fma(p, r, zero + 2.40226500e-1f);
    p = part_fma(p, r, zero + 6.93147180e-1f);
    p = part_fma(p, r, zero + 1.0f);
    p = (part)((part_marks)p + ((part_marks)n << 23));
    return part_fma(p, zero + HEAVIEST, zero + MAGIC);
}

/* Scores, which are logarithms to base 2, to weights from 0 to HEAVIEST; returns one over their sum, NaN
 * if a score is no number. */
static float softened(const Head *h, int64_t q) {
    float *scores = h->scores + q * h->room;
    int16_t *weights = h->weights + q * h->room;
    lanes top = all(-3.0e38f), sum = all(0);
    marks none = above(sum, sum);
    for (int64_t s = h->slots; s < h->room; s++) scores[s] = -3.0e38f;
    for (int64_t s = 0; s < h->room; s += LANES) {
        const lanes score = get(scores + s);
        none = either(none, no_number(score));
        top = widest(score, top);
    }
    const float most = most_of_lanes(top);
    if (any(none) || !(most <= 3.0e38f)) return __builtin_nanf("");
    const lanes best = all(most);
    for (int64_t s = 0; s < h->room; s += LANES) {
        const lanes score = sub(get(scores + s), best), weight = EACH(lanes, part_weight(ON(score)));
        sum = add(sum, sub(weight, all(MAGIC)));
        put(scores + s, weight);
    }
    const bits_there *whole_ones = (const bits_there *)scores;
    for (int64_t s = 0; s < h->room; s++) weights[s] = (int16_t)whole_ones[s];
    return 1 / total(sum);
}

/* Sums of weighted values of some blocks of slots, sixteen numbers from e on. */
ALWAYS void weighed(const Head *h, int64_t q, int64_t e, int64_t first, int64_t blocks, const int few) {
    const float *scales = h->value_scales + (e / LANES * h->room / BLOCK + first) * LANES;
    for (int64_t b = first; b < first + blocks; b++, scales += LANES) {
        marks sum[ROWS];
        products(sum, h->weights + q * h->room + b * BLOCK, h->room,
                 h->values + e * h->room + b * BLOCK * LANES, BLOCK / 2, few);
        const lanes by = get(scales);
#pragma GCC unroll 12
        for (int r = 0; r < few; r++) {
            float *to = h->sums + (q + r) * h->size + e;
            put(to, fma_(floats(sum[r]), by, get(to)));
        }
    }
}

/* Attention of up to QUERIES queries, rows of q and out. */
static void answered(
    const Head *h, float scale, const float *q, int64_t row, int64_t few, float *out, int64_t out_row) {
    float scales[QUERIES] = {0}, rest[QUERIES];
    memset(h->queries, 0, QUERIES * h->size * sizeof(int16_t));
    memset(h->sums, 0, QUERIES * h->size * sizeof(float));
    for (int64_t i = 0; i < few; i++) {
        soon(q + (i + QUERIES) * row, h->size);
        scales[i] = 1.44269504f * scale * rounded(h->queries + i * h->size, q + i * row, h->size);
    }
    for (int64_t s = 0; s < h->room; s += LANES)
        for (int64_t i = 0; i < few; i += ROWS) scored(h, i, s, scales, ROWS);
    for (int64_t i = 0; i < few; i++) rest[i] = softened(h, i);
    for (int64_t e = 0; e < h->size; e += LANES)
        for (int64_t b = 0; b < h->room / BLOCK; b += NEAR)
            for (int64_t i = 0; i < few; i += ROWS)
                weighed(h, i, e, b, h->room / BLOCK - b < NEAR ? h->room / BLOCK - b : NEAR, ROWS);
    for (int64_t i = 0; i < few; i++)
        for (int64_t e = 0; e < h->size; e += LANES)
            put(out + i * out_row + e, mul(get(h->sums + i * h->size + e), all(rest[i])));
}

/* A head's tables in one piece, each in whole lines; its bytes if there is no piece yet. */
static int64_t placed(Head *h, char *piece) {
    int64_t at = 0;
#define PLACE(name, count)                                                         \
    h->name = (void *)(piece + at), at += ((count) * sizeof(*h->name) + 63) / 64 * 64
    PLACE(keys, h->room * h->size);
    PLACE(values, h->room * h->size);
    PLACE(key_scales, h->room);
    PLACE(value_scales, h->room / BLOCK * h->size);
    PLACE(queries, QUERIES * h->size);
    PLACE(weights, QUERIES * h->room);
    PLACE(scores, QUERIES * h->room);
    PLACE(sums, QUERIES * h->size);
#undef PLACE
    return at;
}

typedef struct {
    Head alike;     /* but for its tables, which lie in a room of their thread */
    char *rooms;
    int64_t heads, room;
    float scale;
    const float *qkv;
    float *out;
} Call;

static void one_head(void *about, int64_t head, int64_t thread) {
    const Call *of = about;
    const int64_t size = of->alike.size, slots = of->alike.slots, wide = of->heads * size, row = 3 * wide;
    const float *q = of->qkv + head * size;
    Head h = of->alike;
    placed(&h, of->rooms + thread * of->room);
    memset(h.weights, 0, QUERIES * h.room * sizeof(int16_t)); /* of rows that are not there */
    lay_keys(&h, q + wide, row);
    lay_values(&h, q + 2 * wide, row);
    for (int64_t t = 0; t < slots; t += QUERIES)
        answered(&h, of->scale, q + t * row, row, slots - t < QUERIES ? slots - t : QUERIES,
                 of->out + t * wide + head * size, wide);
}

/* softmax(scale q k') v, out [T, H, E] of qkv [T, 3, H, E], all float32. Returns 1 without memory. */
int outrider_int16_attention(
    int64_t slots, int64_t heads, int64_t size, int64_t threads, float scale, const float *qkv, float *out) {
    const Head alike = {.slots = slots, .room = (slots + BLOCK - 1) / BLOCK * BLOCK, .size = size};
    Head head = alike;
    const int64_t room = placed(&head, 0);
    char *rooms = aligned_alloc(64, threads * room);
    if (!rooms) return 1;
    outrider_share(threads, heads, one_head, &(Call){alike, rooms, heads, room, scale, qkv, out});
    free(rooms);
    return 0;
}
