/* Weights in ggml's blocks of 32 inputs. */
#include "packed_linear.h"

PASSES(Q8_0) PASSES(Q4_0) PASSES(Q4_1) PASSES(Q5_0) PASSES(Q5_1)

Pass *const outrider_block_passes[FORMATS][MOST] = {
    NAMED(Q8_0), NAMED(Q4_0), NAMED(Q4_1), NAMED(Q5_0), NAMED(Q5_1),
};
