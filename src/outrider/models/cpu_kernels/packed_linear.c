/* Y[n, O] = X[n, I] W[O, I]^T + bias: weights stay in the type that they came in (`packed_linear.h`),
 * and each row is one sum in one order whatever stands beside it.
 *
 * The order, for weights that are numbers with a point: a block's products, in the order of its
 * inputs, are added by one fma each to a sum that starts from 0, and this is added to what came
 * before. With inputs in bfloat16 they are added two by two, by an instruction for both, to one sum
 * of the whole row. For whole numbers with scales: the block's inputs are rounded to 16 bits by a scale
 * of their own (half a step is 2^-16 of the largest), products are summed as whole numbers, which is
 * exact in any order; this times the inputs' scale, times the weights', is added by one fma to what came
 * before, and then by one more the block's minimum times the total of its inputs.
 *
 * Few rows: a weight is widened in registers for up to six of them, part after part over some inputs
 * of a group that are then close by, while the next part is on its way from memory. Many: those are
 * widened once where that saves something, and the same code reads them.
 */
#include "packed_linear.h"
#include "thread_pool.h"

#define SLAB 256 /* inputs that parts of rows, or rows of a widened group, have in turn */
#define LONG_SLAB 2048 /* where sums stay in registers: as many as a second cache has room for */

/* Rows above which it pays to widen first: few where that takes many instructions, more where vectors
 * are wide, as what is widened comes from a second cache. */
INLINED int64_t many(const int format) {
    switch (format) {
        case Q5_0: case Q5_1: case Q5_K: case Q6_K: return 12;
        case F32: case BF16: case F16: case Q8_0: case HALVES: return INT64_MAX; /* it would save nothing */
        default: return WIDE == 8 ? 20 : 64;
    }
}

/* The format that a widened block of whole numbers is in. */
INLINED int widened(const int format) {
    return has_minimum(format) ? WHOLE_MINIMUM : length_of(format) == 16 ? WHOLE_16 : WHOLE;
}

static Pass *pass_of(int64_t format, int64_t rows) {
    switch (format) {
        case F32: case BF16: case F16: case HALVES: case WHOLE: case WHOLE_MINIMUM: case WHOLE_16:
            return outrider_dense_passes[format][rows - 1];
        case Q4_K: case Q5_K: case Q6_K: return outrider_superblock_passes[format][rows - 1];
        default: return outrider_block_passes[format][rows - 1];
    }
}

/* A chunk's blocks, `per` of them and the first of a given number, to 16 bits: each a chunk. */
INLINED float *widen_chunk(
    const int format, int64_t first, int64_t per, int64_t tiles, const uint8_t *chunk, float *to) {
    const int kind = widened(format), unit = unit_of(format);
    for (int64_t b = first; b < first + per; b++) {
        for (int64_t t = 0; t < tiles; t++) {
            const uint8_t *head = chunk + t * heads_apart(format);
            const uint8_t *data = block_of(format, chunk, tiles, b) + tile_at(format, b, t);
            float *wide_head = to + t * heads_apart(kind) / 4;
            float *first_wide =
                (float *)block_of(kind, (const uint8_t *)to, tiles, 0) + tile_at(kind, 0, t) / 4;
            for (int v = 0; v < VECTORS; v++, wide_head += WIDE) {
                store_f(wide_head, scale(format, head, b, v));
                if (has_minimum(format)) store_f(wide_head + TILE, minimum(format, head, b, v));
            }
#pragma GCC unroll 1
            for (int u = 0; u < length_of(format) / unit; u++)
#pragma GCC unroll 8
                for (int j = 0; j < unit; j += 2) {
                    const int at = u * unit + j;
                    float *wide = first_wide + at / unit_of(kind) * units_apart(kind, t, tiles) / 4;
                    wide += at % unit_of(kind) * bytes_of_unit(kind) / unit_of(kind) / 4;
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++, wide += WIDE) {
                        const vi centre = all_i(centre_of(format) * 0x10001);
                        store_f(wide, (vf)less_pairs(pairs(format, data, u, j / 2, v), centre));
                    }
                }
        }
        to += tiles * (head_of(kind) + data_of(kind)) / 4;
    }
    return to;
}

#define WIDEN(format) \
    case format: return widen_chunk(format, first, per, tiles, chunk, to);

static float *widen(
    int64_t format, int64_t first, int64_t per, int64_t tiles, const uint8_t *chunk, float *to) {
    switch (format) {
        WIDEN(Q4_0) WIDEN(Q4_1) WIDEN(Q5_0) WIDEN(Q5_1) WIDEN(Q4_K) WIDEN(Q5_K) WIDEN(Q6_K)
    }
    return to;
}

/* A row to what whole weights are multiplied with (`Rows`). */
static void round_row(
    const float *x, int64_t blocks, int length, int centre, int16_t *near, float *scales, float *totals,
    int32_t *centres) {
    int32_t whole[32];
    for (int64_t b = 0; b < blocks; b++, x += length, near += length) {
        scales[b] = length == 16 ? rounded(x, 16, 32767, whole) : rounded(x, 32, 32767, whole);
        int32_t total = 0;
        for (int i = 0; i < length; i++) near[i] = (int16_t)whole[i], total += whole[i];
        totals[b] = scales[b] * (float)total;
        centres[b] = centre * total;
    }
}

/* What a call is given; a chunk is of `per` blocks. */
typedef struct {
    int64_t format, outputs, wide, blocks, per, count;
    const float *bias;
    float *y;
    Rows rows;
} Product;

INLINED int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Sums of a group, for rows of y, and from there. */
static void put(const Product *p, int64_t row, int64_t n, int64_t at, const float *acc) {
    const int64_t count = least(GROUP * TILE, p->outputs - at);
    for (float *y = p->y + row * p->wide + at; n--; y += p->wide, acc += GROUP * TILE)
        memcpy(y, acc, count * sizeof(float));
}

static void get(const Product *p, int64_t row, int64_t n, int64_t at, float *acc, int first) {
    const int64_t count = least(GROUP * TILE, p->outputs - at);
    if (first) memset(acc, 0, n * GROUP * TILE * sizeof(float));
    else
        for (const float *y = p->y + row * p->wide + at; n--; y += p->wide, acc += GROUP * TILE)
            memcpy(acc, y, count * sizeof(float));
}

static void add_bias(const Product *p, int64_t row, int64_t n, int64_t at) {
    const int64_t count = least(GROUP * TILE, p->outputs - at);
    for (float *y = p->y + row * p->wide + at; n--; y += p->wide)
        for (int64_t o = 0; o < count; o++) y[o] += p->bias[at + o];
}

/* A part of a group of `tiles`: `chunks` chunks, or of one `per` blocks from `from` on; in the rows the
 * blocks from `done` on. `next` bytes from `behind` on are used after it. */
typedef struct {
    int64_t format, chunks, from, per, tiles, done;
    const uint8_t *chunk, *behind;
    int64_t next;
} Part;

INLINED int64_t bytes_of_part(const int64_t format, int64_t tiles, int64_t chunks, int64_t per) {
    return tiles * chunks * (head_of(format) + per * data_of(format));
}

/* All rows times a part, from output `at` on. */
static void rows_by_parts(const Product *p, const Part *part, int64_t at) {
    _Alignas(64) float acc[MOST * GROUP * TILE];
    const int64_t passes = (p->count + MOST - 1) / MOST, blocks = part->chunks * part->per;
    const int64_t size = bytes_of_part(part->format, part->tiles, part->chunks, part->per);
    Ahead ahead = {part->chunk, part->chunk + AHEAD, 65536};
    if (passes > 1) ahead.next = part->behind, ahead.share = 65536 * part->next / (size * passes);
    for (int64_t row = 0, n; row < p->count; row += n, ahead.next += part->next / passes) {
        const int64_t left = p->count - row;
        n = left <= MOST || left >= 2 * MOST ? least(left, MOST) : (left + 1) / 2; /* none is small */
        Rows rows = rows_from(p->rows, row, part->done, length_of(part->format));
        const int in_place = part->format == HALVES && at + part->tiles * TILE <= p->outputs;
        Sums sums = {acc, GROUP * TILE, 0};
        if (in_place) sums = (Sums){p->y + row * p->wide + at, p->wide, part->done == 0};
        else get(p, row, n, at, acc, part->done == 0);
        pass_of(part->format, n)(
            rows, part->chunks, part->from, part->per, part->tiles, part->chunk, ahead, sums);
        if (!in_place) put(p, row, n, at, acc);
        if (p->bias && part->done + blocks == p->blocks) add_bias(p, row, n, at);
    }
}

/* The outputs of a group, of `tiles`, from output `at` on. */
static void group(const Product *p, int64_t tiles, int64_t at, const uint8_t *weight) {
    _Alignas(64) float slab[SLAB * GROUP * TILE / 2 + SLAB / 16 * GROUP * 2 * TILE];
    const int format = p->format;
    const int64_t size = bytes_of_part(format, tiles, 1, p->per);
    const int64_t most = (format == HALVES ? LONG_SLAB : SLAB) / length_of(format); /* blocks */
    const int64_t chunks = p->per < most ? most / p->per : 1;
    Part part = {format, p->blocks / p->per, 0, p->per, tiles, 0, weight, NULL, 0};
    if (p->count <= MOST) {
        rows_by_parts(p, &part, at);
        return;
    }
    for (int64_t blocks; part.done < p->blocks; part.done += blocks) {
        /* some chunks, or a part of one */
        const int64_t from = part.done % p->per;
        blocks = p->per > most ? least(most, p->per - from) : least(chunks * p->per, p->blocks - part.done);
        const int64_t whole = p->per > most ? 1 : blocks / p->per, per = blocks / whole;
        const uint8_t *chunk = weight + part.done / p->per * size;
        part.format = format, part.chunks = whole, part.from = from, part.per = per, part.chunk = chunk;
        part.next = bytes_of_part(format, tiles, whole, per);
        part.behind = chunk + part.next + tiles * from * data_of(format);
        if (p->count > many(format)) {
            float *to = slab;
            for (int64_t c = 0; c < whole; c++) to = widen(format, from, per, tiles, chunk + c * size, to);
            part.format = widened(format), part.chunks = blocks, part.from = 0, part.per = 1;
            part.chunk = (const uint8_t *)slab;
        }
        rows_by_parts(p, &part, at);
    }
}

/* What a piece of a call is made from: `each` groups of weights, of `size` bytes a tile. */
typedef struct {
    const Product *product;
    const uint8_t *weight;
    int64_t tiles, size, each;
} Groups;

static void groups(void *about, int64_t piece, int64_t thread) {
    const Groups *of = about;
    const int64_t first = piece * of->each * GROUP, last = least(first + of->each * GROUP, of->tiles);
    (void)thread;
    for (int64_t t = first; t < last; t += GROUP)
        group(of->product, least(GROUP, of->tiles - t), t * TILE, of->weight + t * of->size);
}

/* Rows that are rounded ahead of a product, `each` a piece. */
typedef struct {
    const Product *product;
    int64_t each;
} Rounding;

static void rounded_rows(void *about, int64_t piece, int64_t thread) {
    const Rounding *of = about;
    const Product *p = of->product;
    const int64_t first = piece * of->each, last = least(first + of->each, p->count);
    (void)thread;
    for (int64_t r = first; r < last; r++) {
        const Rows row = rows_from(p->rows, r, 0, 0);
#ifdef HALF_PRODUCTS
        if (p->format == HALVES) {
            round_halves(row.x, row.inputs, (int16_t *)row.near);
            continue;
        }
#endif
        round_row(row.x, p->blocks, length_of(p->format), centre_of(p->format), (int16_t *)row.near,
                  (float *)row.scales, (float *)row.totals, (int32_t *)row.centres);
    }
}

/* Groups begin where whole chunks of four tiles end. */
INLINED int64_t bytes_of_tile(int format, int64_t blocks, int64_t per) {
    return blocks / per * head_of(format) + blocks * data_of(format);
}

/* rows of x [rows, inputs] times weights in a format, of whose blocks `per` share a head; rows of y are
 * `wide` apart. inputs are of whole chunks: what is missing is 0. Not 0: 1, there is no memory; 2, no such
 * products are compiled. */
int outrider_packed_linear(
    int64_t format, int64_t per, int64_t rows, int64_t inputs, int64_t outputs, int64_t wide,
    int64_t threads, const float *x, const uint8_t *weight, const float *bias, float *y) {
    const int64_t blocks = inputs / length_of(format), tiles = (outputs + TILE - 1) / TILE;
    const int64_t size = bytes_of_tile(format, blocks, per);
    Product p = {format, outputs, wide, blocks, per, rows, bias, y, {.x = x, .inputs = inputs, .blocks = blocks}};
    const int64_t all = (tiles + GROUP - 1) / GROUP, count = rows * blocks;
    void *near = NULL;
#ifndef HALF_PRODUCTS
    if (format == HALVES) return 2;
#endif
    if (!rows) return 0;
    if (rows * inputs * outputs <= 1 << 18) threads = 1;
    if (is_whole(format) || format == HALVES) {
        near = malloc(rows * inputs * sizeof(int16_t) + 3 * count * sizeof(float) + 1);
        if (!near) return 1;
        p.rows.scales = near, p.rows.totals = p.rows.scales + count;
        p.rows.centres = (const int32_t *)(p.rows.totals + count);
        p.rows.near = (const int16_t *)(p.rows.centres + count);
        const int64_t some = rows * inputs > 1 << 16 ? units_of_piece(rows, threads) : rows;
        outrider_share(threads, (rows + some - 1) / some, rounded_rows, &(Rounding){&p, some});
    }
    const int64_t each = units_of_piece(all, threads);
    outrider_share(threads, (all + each - 1) / each, groups, &(Groups){&p, weight, tiles, size, each});
    free(near);
    return 0;
}

/* Weights of some outputs as float32 [count, inputs], inputs of whole chunks; 2: there is no such output. */
int outrider_packed_rows(
    int64_t format, int64_t per, int64_t count, int64_t inputs, int64_t outputs, const int64_t *ids,
    const uint8_t *weight, float *out) {
    const int64_t blocks = inputs / length_of(format), tiles = (outputs + TILE - 1) / TILE;
    const int64_t size = bytes_of_tile(format, blocks, per);
    const int unit = unit_of(format), whole = is_whole(format), shifts = has_minimum(format);
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= outputs) return 2;
        const int64_t tile = ids[i] / TILE, first = tile / GROUP * GROUP, lane = ids[i] % TILE;
        const int64_t tiles_here = least(GROUP, tiles - first), t = tile - first;
        const int64_t apart = units_apart(format, t, tiles_here);
        const int v = lane / WIDE, l = lane % WIDE;
        const int64_t chunk = tiles_here * (head_of(format) + per * data_of(format));
        for (int64_t b = 0; b < blocks; b++) {
            const uint8_t *from = weight + first * size + b / per * chunk;
            const uint8_t *head = from + t * heads_apart(format);
            const uint8_t *at = block_of(format, from, tiles_here, b % per) + tile_at(format, b % per, t);
            const float s = whole ? scale(format, head, b % per, v)[l] : 1.0f;
            const float m = shifts ? minimum(format, head, b % per, v)[l] : 0.0f;
            for (int k = 0; k < length_of(format); k++) {
                if (!whole) {
                    *out++ = weights(format, at + k / unit * apart, k % unit, v)[l];
                    continue;
                }
                const int32_t both = pairs(format, at, k / unit, k % unit / 2, v)[l];
                const float w = (k & 1 ? both >> 16 : (int16_t)both) - centre_of(format);
                *out++ = shifts ? s * w + m : s * w;
            }
        }
    }
    return 0;
}
