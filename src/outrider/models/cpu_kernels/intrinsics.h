/* Instructions by name, and what kernels use of C's library: no code of ours, as a build reads this
 * once for all sources (build_process.py). */
#ifndef OUTRIDER_INTRINSICS
#define OUTRIDER_INTRINSICS
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(OUTRIDER_GENERIC)
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif
