/* Weights in float32, bfloat16 and float16, and what blocks are widened to. */
#include "packed_linear.h"

#ifdef HALF_PRODUCTS
PASSES(HALVES)
#endif
PASSES(F32) PASSES(BF16) PASSES(F16) PASSES(WHOLE) PASSES(WHOLE_MINIMUM) PASSES(WHOLE_16)

Pass *const outrider_dense_passes[FORMATS][MOST] = {
    NAMED(F32), NAMED(BF16), NAMED(F16), NAMED(WHOLE), NAMED(WHOLE_MINIMUM), NAMED(WHOLE_16),
#ifdef HALF_PRODUCTS
    NAMED(HALVES),
#endif
};
