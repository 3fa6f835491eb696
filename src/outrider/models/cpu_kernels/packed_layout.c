/* Blocks of a GGUF file's rows (ggml's, https://github.com/ggml-org/llama.cpp, ggml-common.h) laid in
 * tiles: `packed_tiles.h` says where each lies.
 *
 * Of 16 outputs the same element stands side by side. Numbers of 4 bits come to words of eight inputs,
 * the even ones below the odd ones, and so do the bits that formats of 5 and 6 keep elsewhere.
 */

#include "packed_tiles.h"
#include "thread_pool.h"

typedef const uint8_t *const *Outputs; /* a chunk of each of a tile's outputs */

/* So many elements of `size` bytes, from byte `from` of each row on. */
INLINED void turn(uint8_t *out, Outputs of, int64_t from, int64_t count, const int size) {
    for (int64_t i = 0; i < count; i++)
        for (int o = 0; o < TILE; o++)
            memcpy(out + (i * TILE + o) * size, of[o] + from + i * size, (size_t)size);
}

INLINED uint64_t eight_at(const uint8_t *bytes) {
    uint64_t x;
    memcpy(&x, bytes, 8);
    return x;
}

/* Lower or upper halves of eight bytes. */
INLINED uint64_t half_bytes(uint64_t x, int upper) { return x >> 4 * upper & 0x0f0f0f0f0f0f0f0full; }

/* Eight numbers of 4 bits, a byte each, as a word: 0, 2, 4, 6, 1, 3, 5, 7. */
INLINED uint32_t word_of(uint64_t eight) {
    const uint64_t x = eight | eight >> 12; /* bytes 0, 1, 4, 5 have two of them each */
    return (uint32_t)((x & 0xff) | (x >> 24 & 0xff00) | (x << 8 & 0xff0000) | (x >> 16 & 0xff000000));
}

/* Of a word's eight numbers the lowest bit each: a byte. */
INLINED uint8_t single_bits(uint32_t x) {
    x &= 0x11111111;
    x = (x | x >> 3) & 0x03030303;
    x = (x | x >> 6) & 0x000f000f;
    return (uint8_t)(x | x >> 12);
}

/* The lowest two bits each: of the even ones in the lowest byte, of the odd ones 16 bits above. */
INLINED uint32_t double_bits(uint32_t x) {
    x &= 0x33333333;
    x = (x | x >> 2) & 0x0f0f0f0f;
    return (x | x >> 4) & 0x00ff00ff;
}

/* A byte's bits in a word's order. */
INLINED uint8_t even_first(uint8_t bits) {
    uint32_t x = (bits & 0x55u) | (bits & 0xaau) << 15; /* odd ones 16 bits above */
    x = (x | x >> 1) & 0x00330033;
    x = (x | x >> 2) & 0x000f000f;
    return (uint8_t)(x | x >> 12);
}

INLINED void put_word(uint8_t *data, int64_t word, int o, uint32_t x) {
    memcpy(data + 4 * (word * TILE + o), &x, 4);
}

/* Of Q4_K and Q5_K: two scales, and for each block a scale and a minimum of 6 bits: 16 bytes have
 * scales and minima's lowest two bits, eight the rest of two outputs each. */
static void superblock_head(uint8_t *head, Outputs of) {
    turn(head, of, 0, 2, 2);
    for (int b = 0; b < 8; b++) {
        uint8_t least[TILE], *out = head + 64 + 24 * b;
        for (int o = 0; o < TILE; o++) {
            const uint8_t *d = of[o] + 4 + b % 4, *m = d + 4, both = d[8];
            const uint8_t scale = b < 4 ? *d & 63 : (uint8_t)((both & 15) | (*d >> 2 & 48));
            least[o] = b < 4 ? *m & 63 : (uint8_t)(both >> 4 | (*m >> 2 & 48));
            out[o] = (uint8_t)(scale | (least[o] & 3) << 6);
        }
        for (int o = 0; o < 8; o++) out[TILE + o] = (uint8_t)(least[o] >> 2 | least[o + 8] >> 2 << 4);
    }
}

static void lay_head(const int format, uint8_t *head, Outputs of) {
    switch (format) {
        case F32: case BF16: case F16: break;
        case Q4_1: case Q5_1: turn(head, of, 0, 2, 2); break;
        case Q4_K: case Q5_K: superblock_head(head, of); break;
        case Q6_K: turn(head, of, 208, 1, 2); turn(head + 32, of, 192, 16, 1); break;
        default: turn(head, of, 0, 1, 2);
    }
}

/* Numbers of 4 bits and what is above them, of block b. */
INLINED void lay_words(const int format, uint8_t *data, Outputs of, int64_t b) {
    const int words = length_of(format) / 8;
    for (int o = 0; o < TILE; o++) {
        uint32_t upper = 0; /* of q6_k, both words' */
        for (int w = 0; w < words; w++) {
            const uint8_t *row = of[o];
            const int64_t at = 8 * w;
            switch (format) {
                case Q4_0: case Q4_1: case Q5_0: case Q5_1: {
                    const int scales = has_minimum(format) ? 4 : 2, high = format >= Q5_0 ? 4 : 0;
                    put_word(data, w, o, word_of(half_bytes(eight_at(row + scales + high + at % 16), w > 1)));
                    if (high) data[256 + w * TILE + o] = even_first(row[scales + w]);
                    break;
                }
                case Q4_K: case Q5_K: {
                    const uint8_t *low = row + (format == Q4_K ? 16 : 48) + b / 2 * 32 + at;
                    put_word(data, w, o, word_of(half_bytes(eight_at(low), b % 2)));
                    if (format == Q5_K)
                        data[256 + w * TILE + o] = single_bits(word_of(
                            eight_at(row + 16 + at) >> b & 0x0101010101010101ull));
                    break;
                }
                case Q6_K: { /* halves of 128 inputs: 64 bytes of lower bits, 32 of upper ones */
                    const int64_t in = (16 * b + at) % 128, half = (16 * b + at) / 128;
                    put_word(data, w, o, word_of(half_bytes(eight_at(row + 64 * half + in % 64), in >= 64)));
                    const uint64_t high = eight_at(row + 128 + 32 * half + in % 32) >> in / 32 * 2;
                    upper |= double_bits(word_of(high & 0x0303030303030303ull)) << 8 * w;
                    put_word(data, 2, o, upper);
                    break;
                }
            }
        }
    }
}

/* Numbers with a point: unit by unit. */
INLINED void lay_units(const int format, uint8_t *data, Outputs of, int64_t apart) {
    const int size = format == F16 ? 2 : 4, many = (int)bytes_of_unit(format) / TILE / size;
    for (int u = 0; u < length_of(format) / unit_of(format); u++, data += apart)
        turn(data, of, u * many * size, many, size);
}

INLINED void lay_block(const int format, uint8_t *data, Outputs of, int64_t b, int64_t apart) {
    switch (format) {
        case F32: case BF16: case F16: lay_units(format, data, of, apart); break;
        case Q8_0: turn(data, of, 2, 16, 2); break;
        default: lay_words(format, data, of, b);
    }
}

typedef struct {
    int64_t per, outputs, chunks, block, row;
    const uint8_t *rows, *none;
    uint8_t *panels, *ends;
} Layout;

/* A group's tiles, chunk by chunk. Outputs that are not there, and inputs behind the last, are 0. */
INLINED void lay_group(const int format, const Layout *of, int64_t group, int64_t thread) {
    const int64_t all = (of->outputs + TILE - 1) / TILE, first = group * GROUP;
    const int64_t tiles = all - first < GROUP ? all - first : GROUP;
    const int64_t size = head_of(format) + of->per * data_of(format);
    uint8_t *ends = of->ends + thread * TILE * of->block;
    for (int64_t c = 0; c < of->chunks; c++) {
        uint8_t *chunk = of->panels + (first * of->chunks + c * tiles) * size;
        const int64_t there = of->row - c * of->block;
        for (int64_t t = 0; t < tiles; t++) {
            const uint8_t *each[TILE];
            for (int o = 0; o < TILE; o++) {
                const int64_t output = (first + t) * TILE + o;
                each[o] = of->none;
                if (output >= of->outputs) continue;
                each[o] = of->rows + output * of->row + c * of->block;
                if (there >= of->block) continue;
                uint8_t *end = ends + o * of->block;
                memcpy(end, each[o], (size_t)there);
                memset(end + there, 0, (size_t)(of->block - there));
                each[o] = end;
            }
            lay_head(format, chunk + t * heads_apart(format), each);
            for (int64_t b = 0; b < of->per; b++) {
                const uint8_t *data = block_of(format, chunk, tiles, b) + tile_at(format, b, t);
                lay_block(format, chunk + (data - chunk), each, b, units_apart(format, t, tiles));
            }
        }
    }
}

#define LAYING(name)                                                                      \
    static void lay_##name(void *about, int64_t group, int64_t thread) {                  \
        lay_group(name, about, group, thread);                                            \
    }
LAYING(F32) LAYING(BF16) LAYING(F16) LAYING(Q8_0) LAYING(Q4_0) LAYING(Q4_1) LAYING(Q5_0)
LAYING(Q5_1) LAYING(Q4_K) LAYING(Q5_K) LAYING(Q6_K)

static Piece *const layings[] = {
    lay_F32, lay_BF16, lay_F16, lay_Q8_0, lay_Q4_0, lay_Q4_1, lay_Q5_0, lay_Q5_1, lay_Q4_K,
    lay_Q5_K, lay_Q6_K,
};

/* Bytes of a tile's chunk of so many blocks. */
int outrider_packed_chunk(int64_t format, int64_t per) {
    return (int)(head_of((int)format) + per * data_of((int)format));
}

/* Outputs of `row` bytes, of which each chunk has `block` (the last one perhaps fewer), as panels; 1
 * where there is no memory for it. */
int outrider_packed_layout(
    int64_t format, int64_t per, int64_t outputs, int64_t chunks, int64_t block, int64_t row,
    int64_t threads, const uint8_t *rows, uint8_t *panels) {
    uint8_t *room = calloc((size_t)(block * (1 + TILE * threads)), 1);
    if (!room) return 1;
    Layout of = {per, outputs, chunks, block, row, rows, room, panels, room + block};
    const int64_t groups = (outputs + TILE * GROUP - 1) / (TILE * GROUP);
    outrider_share(threads, groups, layings[format], &of);
    free(room);
    return 0;
}
