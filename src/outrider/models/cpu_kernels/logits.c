/* What is looked for in a row of logits: in one pass, and by bounds that lose nothing.
 *
 * The answers are those of NumPy (outrider/ops/cpu/top_tokens.py), bit for bit.
 */
#include "draws.h"
#include "lanes.h"

/* The largest; NaN where something is not a number. */
static float highest(const float *z, int64_t vocab) {
    lanes best = all(-INFINITY);
    marks none = no_number(best);
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        const lanes x = get(z + i);
        best = widest(x, best);
        none = either(none, no_number(x));
    }
    int bad = any(none);
    float top = most_of_lanes(best);
    for (; i < vocab; i++) {
        top = z[i] > top ? z[i] : top;
        bad |= z[i] != z[i];
    }
    return bad ? NAN : top;
}

/* Where it stands first. */
static int64_t first(const float *z, float of) {
    int64_t i = 0;
    while (z[i] != of) i++;
    return i;
}

static inline double draw_of(uint64_t key, int64_t token) {
    return ((double)(word_of(key, token) >> 24) + 0.5) * 0x1p-40;
}

/* The tokens that may win the race  z / T - log E,  E = -log(1 - v): some losers are among them.
 *
 * The likeliest token has  m = z / T - log E.  Another beats it only if  E < exp(z / T - m), and v
 * is no more than E. A hundredth, and what float32 may lose of numbers as large, is left over.
 */
int64_t outrider_contenders(
    int64_t vocab, const float *z, float inverse, const uint64_t *key, int64_t *found
) {
    float most = highest(z, vocab);
    if (most != most) return found[0] = 0, 1;
    int64_t top = first(z, most), count = 0, i = 0;
    double beat = (double)(most * inverse) - log(-log1p(-draw_of(*key, top)));
    lanes mark = all((float)(beat - 0.01 - 1e-5 * fabs(beat)));
    for (; i < vocab; i += LANES) {
        float left[LANES] = {0};
        const float *from = z + i;
        int64_t there = vocab - i < LANES ? vocab - i : LANES;
        if (there < LANES) from = memcpy(left, from, there * sizeof(float));
        float v[LANES];
        for (int k = 0; k < LANES; k++)
            v[k] = (float)(int64_t)(word_of(*key, i + k) >> 24) * 0x1p-40f;
        const lanes bound = exp_(sub(mul(get(from), all(inverse)), mark));
        if (!any(at_most(get(v), bound))) continue;
        float most[LANES];
        put(most, bound);
        for (int k = 0; k < there; k++)
            if (v[k] <= most[k]) found[count++] = i + k;
    }
    if (!count) found[count++] = top; /* of nothing at all, or of what is not a number */
    return count;
}

/* The `count` largest of each row that are at most `gap` below its largest and not below its
 * floor, in order, of equals the first, and what they are in `best`; -1 and -inf behind them, and
 * where something is not a number. */
void outrider_likely(
    int64_t rows, int64_t vocab, int64_t count, float gap, const float *logits,
    const float *floors, int64_t *found, float *best
) {
    /* the last of the best is the bar that others must pass */
    for (int64_t r = 0; r < rows; r++, logits += vocab, found += count, best += count) {
        marks none = no_number(all(0));
        int64_t kept = 0;
        for (int64_t k = 0; k < count; k++) best[k] = -INFINITY;
        for (int64_t i = 0; i < vocab; i += LANES) {
            int64_t stop = vocab - i < LANES ? vocab : i + LANES;
            float left[LANES];
            const float *from = logits + i;
            if (stop < i + LANES) {
                for (int k = 0; k < LANES; k++) left[k] = from[i + k < stop ? k : 0];
                from = left;
            }
            const lanes x = get(from);
            none = either(none, no_number(x));
            if (!any(above(x, all(best[count - 1])))) continue;
            for (int64_t t = i; t < stop; t++) {
                float z = logits[t];
                if (!(z > best[count - 1])) continue;
                int64_t at = count - 1;
                for (; at && best[at - 1] < z; at--) {
                    best[at] = best[at - 1];
                    found[at] = found[at - 1];
                }
                best[at] = z;
                found[at] = t;
            }
        }
        float least = any(none) ? NAN : best[0] - gap;
        if (floors && floors[r] > least) least = floors[r];
        while (kept < count && best[kept] > -INFINITY && best[kept] >= least) kept++;
        for (; kept < count; kept++) found[kept] = -1, best[kept] = -INFINITY;
    }
}
