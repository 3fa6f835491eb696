/* Weights in ggml's blocks of 256 inputs ("K"). */
#include "packed_linear.h"

PASSES(Q4_K) PASSES(Q5_K) PASSES(Q6_K)

Pass *const outrider_superblock_passes[FORMATS][MOST] = {NAMED(Q4_K), NAMED(Q5_K), NAMED(Q6_K)};
