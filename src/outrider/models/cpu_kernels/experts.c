/* What a mixture of experts does beside its products, in float32 on a CPU: which experts a token gets, the
 * products of those with their rows, and the sum of what they give.
 *
 * A token is computed in one order whatever stands beside it. No product may be contracted into a sum:
 * compile with -ffp-contract=off.
 */
#include "experts.h"
#include "thread_pool.h"

void outrider_gate(int64_t, int64_t, int64_t, int64_t, const void *, void *);

/* e^(x - most) of `count` numbers; their sum. */
static float exponentials(int64_t count, const float *x, float *out) {
    float most = x[0], sum = 0;
    for (int64_t e = 1; e < count; e++) most = x[e] > most ? x[e] : most;
    for (int64_t e = 0; e < count; e += LANES) {
        float some[LANES] = {0};
        const int64_t n = count - e < LANES ? count - e : LANES;
        memcpy(some, x + e, n * sizeof(float));
        put(some, exp_(sub(get(some), all(most))));
        memcpy(out + e, some, n * sizeof(float));
    }
    for (int64_t e = 0; e < count; e++) sum += out[e];
    return sum;
}

/* Of each token's scores [experts] the `chosen` most likely experts, the first of equals first, and their
 * probabilities; `whole`: divided by their sum. 1: there is no memory. */
static int choose_experts(
    int64_t tokens, int64_t experts, int64_t chosen, int64_t whole, const float *scores, int64_t *ids,
    float *weights) {
    float *likely = malloc(experts * sizeof(float));
    if (!likely) return 1;
    for (int64_t t = 0; t < tokens; t++, scores += experts, ids += chosen, weights += chosen) {
        float sum = exponentials(experts, scores, likely), part = 0;
        for (int64_t j = 0; j < chosen; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++)
                if (likely[e] >= 0 && (best < 0 || likely[e] > likely[best])) best = e;
            if (best < 0) best = 0; /* none is a number */
            ids[j] = best, weights[j] = likely[best] / sum, part += weights[j];
            likely[best] = -1; /* taken */
        }
        for (int64_t j = 0; whole && j < chosen; j++) weights[j] /= part;
    }
    free(likely);
    return 0;
}

/* Pairs of a token and an expert, sorted by expert: order[place[pair]] = pair, and where each one's pairs end.
 * Pairs of no expert here come last. */
void outrider_experts_sort(
    int64_t pairs, int64_t experts, const int64_t *ids, int64_t *order, int64_t *place, int64_t *ends) {
    memset(ends, 0, experts * sizeof(int64_t));
    for (int64_t i = 0; i < pairs; i++)
        if (ids[i] >= 0 && ids[i] < experts) ends[ids[i]]++;
    int64_t first = 0;
    for (int64_t e = 0; e < experts; e++) { /* for now where it begins */
        const int64_t count = ends[e];
        ends[e] = first, first += count;
    }
    for (int64_t i = 0; i < pairs; i++) {
        const int here = ids[i] >= 0 && ids[i] < experts;
        place[i] = here ? ends[ids[i]]++ : first++;
        order[place[i]] = i;
    }
}

/* `outrider_packed_linear` with the weights of several experts: of rows that are sorted by expert the first
 * ends[0] times the first one's, those from there to ends[1] times the second's, and so on; rows behind the
 * last end are left. */
int outrider_packed_experts(
    int64_t format, int64_t per, int64_t experts, int64_t inputs, int64_t outputs, int64_t wide, int64_t threads,
    const int64_t *ends, const float *x, const uint8_t *const *weights, float *y) {
    for (int64_t e = 0, first = 0; e < experts; first = ends[e++]) {
        if (ends[e] == first) continue;
        const int failed = outrider_packed_linear(
            format, per, ends[e] - first, inputs, outputs, wide, threads, x + first * inputs, weights[e], NULL,
            y + first * wide);
        if (failed) return failed;
    }
    return 0;
}

/* Where tokens' sums are made from. */
typedef struct {
    int64_t tokens, chosen, width, each;
    const int64_t *place;
    const float *weights, *given, *shared, *gates;
    float *out;
} Sums;

static void summed(void *about, int64_t piece, int64_t thread) {
    const Sums *of = about;
    (void)thread;
    for (int64_t t = piece * of->each; t < of->tokens && t < (piece + 1) * of->each; t++) {
        float *out = of->out + t * of->width;
        for (int64_t j = 0; j < of->chosen; j++) {
            const float *given = of->given + of->place[t * of->chosen + j] * of->width;
            const float by = of->weights[t * of->chosen + j];
            for (int64_t i = 0; i < of->width; i++) out[i] = j ? out[i] + by * given[i] : by * given[i];
        }
        if (!of->shared) continue;
        const float *given = of->shared + t * of->width;
        const float by = of->gates ? 1 / (1 + first_of(exp_(all(-of->gates[t])))) : 1;
        for (int64_t i = 0; i < of->width; i++) out[i] += by * given[i];
    }
}

/* out [tokens, width]: what a token's experts give, by its weights and in the order of its choice, and behind it
 * what one gives that all tokens share, by the logistic function of its gate. */
void outrider_experts_sum(
    int64_t tokens, int64_t chosen, int64_t width, int64_t threads, const int64_t *place, const float *weights,
    const float *given, const float *shared, const float *gates, float *out) {
    if (tokens * chosen * width <= 65536) threads = 1;
    const int64_t each = units_of_piece(tokens, threads);
    Sums of = {tokens, chosen, width, each, place, weights, given, shared, gates, out};
    outrider_share(threads, (tokens + each - 1) / each, summed, &of);
}

/* Rows of pairs, sorted by expert, times the weights of theirs. */
static int multiplied_by_expert(
    const Experts *e, int64_t experts, int64_t threads, const int64_t *ends, const float *x, float *y) {
    for (int64_t i = 0; i < e->parts; y += e->of[i++].outputs) {
        const ExpertsPart *p = e->of + i;
        const int failed = outrider_packed_experts(
            p->format, p->per, experts, e->inputs, p->outputs, e->outputs, threads, ends, x, p->weights, y);
        if (failed) return failed;
    }
    return 0;
}

/* What each token x [tokens, inputs] gets of its experts: out [tokens, inputs].
 *
 * Returns 1 without memory, 2 for what is not compiled. */
int outrider_mixture(const Mixture *m, int64_t tokens, int64_t threads, const float *x, float *out) {
    const int64_t width = m->route.inputs, pairs = tokens * m->chosen;
    const int64_t inner = m->down.inputs, shared = m->shared_down.parts ? m->shared_down.inputs : 0;
    const int64_t most = shared * tokens > inner * pairs ? shared * tokens : inner * pairs;
    const int64_t whole = 3 * pairs + m->experts;
    float *room = numbers(
        2 * pairs * width + tokens * width + 3 * most + tokens * (m->experts + 1) + pairs + 2 * whole);
    if (!room) return 1;
    float *taken = room, *given = taken + pairs * width, *common = given + pairs * width;
    float *both = common + tokens * width, *gated = both + 2 * most, *scores = gated + most;
    float *gates = scores + tokens * m->experts, *weights = gates + tokens;
    int64_t *ids = (int64_t *)(weights + pairs + (weights + pairs - room) % 2);
    int64_t *order = ids + pairs, *place = order + pairs, *ends = place + pairs;
    int failed = multiplied(&m->route, tokens, threads, x, scores);
    if (!failed) failed = choose_experts(tokens, m->experts, m->chosen, m->whole, scores, ids, weights);
    if (!failed) {
        outrider_experts_sort(pairs, m->experts, ids, order, place, ends);
        for (int64_t i = 0; i < pairs; i++)
            memcpy(taken + i * width, x + order[i] / m->chosen * width, width * sizeof(float));
        failed = multiplied_by_expert(&m->gate_up, m->experts, threads, ends, taken, both);
    }
    if (!failed) {
        outrider_gate(pairs, inner, threads, 0, both, gated);
        failed = multiplied_by_expert(&m->down, m->experts, threads, ends, gated, given);
    }
    if (!failed && shared) {
        failed = multiplied(&m->shared_gate_up, tokens, threads, x, both);
        if (!failed) outrider_gate(tokens, shared, threads, 0, both, gated);
        if (!failed) failed = multiplied(&m->shared_down, tokens, threads, gated, common);
        if (!failed && m->gate.parts) failed = multiplied(&m->gate, tokens, threads, x, gates);
    }
    if (!failed)
        outrider_experts_sum(
            tokens, m->chosen, width, threads, place, weights, given, shared ? common : NULL,
            m->gate.parts ? gates : NULL, out);
    free(room);
    return failed;
}
