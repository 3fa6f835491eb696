/* A token of every urn (outrider/ops/cpu/batched_without_replacement.py), in the bits of its draw of one. */
#include "draws.h"

void outrider_draw(
    int64_t rows, int64_t vocab, int64_t block, int64_t blocks, int64_t is_double,
    const void *weights, const void *sums, const uint64_t *keys, int64_t index,
    int64_t *tokens, double *masses
) {
    double upto[blocks];
    for (int64_t b = 0; b < rows; b++) {
        const char *row = (const char *)weights + b * vocab * (is_double ? 8 : 4);
        double sum = 0;
        for (int64_t k = 0; k < blocks; k++) upto[k] = sum += at(sums, b * blocks + k, is_double);
        double uniform = fine(word_of(keys[b], index));
        tokens[b] = found(row, is_double, vocab, block, upto, blocks, uniform);
        masses[b] = sum > 0 ? at(row, tokens[b], is_double) : 0;
    }
}
