/* Weights of 8 and 4 bits, of which any number of inputs have one scale. */
#include "packed_linear.h"

PASSES(INT8) PASSES(INT4) PASSES(INT4_ZERO)

Pass *const outrider_group_passes[FORMATS][MOST] = {NAMED(INT8), NAMED(INT4), NAMED(INT4_ZERO)};
