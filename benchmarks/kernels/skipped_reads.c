/* What it costs to skip bytes while memory is read in order: GB/s by bytes skipped and bytes read.
 *
 *     cc -O2 -march=native benchmarks/kernels/skipped_reads.c -o /tmp/skipped_reads && /tmp/skipped_reads
 *
 * Processors fetch ahead what is read in order; some stop to where too much is left out, and packed
 * weights lie so that nothing is (`packed_tiles.h`). One thread, its own clock, the best of four.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#define SIZE ((size_t)192 << 20)
#define PAGE ((size_t)2 << 20)

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* What the bytes that are read add up to, lest nobody reads them. */
static uint64_t read_some(const char *from, size_t skipped, size_t read, size_t *all) {
    uint64_t sum = 0;
    for (size_t at = 0; at + skipped + read < SIZE; at += skipped + read, *all += skipped + read) {
        const uint64_t *numbers = (const uint64_t *)(from + at + skipped);
        for (size_t i = 0; i < read / 8; i++) sum += numbers[i];
    }
    return sum;
}

int main(void) {
    const size_t skips[] = {0, 256, 512, 1024}, reads[] = {1024, 8192, 49152};
    char *memory = mmap(0, SIZE + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    memory += PAGE - (uintptr_t)memory % PAGE;
    madvise(memory, SIZE, MADV_HUGEPAGE);
    for (size_t at = 0; at < SIZE; at += 64) memory[at] = (char)at;
    uint64_t seen = 0;
    for (int s = 0; s < 4; s++)
        for (int r = 0; r < 3; r++) {
            double best = 1e9;
            size_t all = 0;
            for (int turn = 0; turn < 4; turn++) {
                all = 0;
                const double start = seconds();
                seen += read_some(memory, skips[s], reads[r], &all);
                const double took = seconds() - start;
                if (took < best) best = took;
            }
            printf("skip %4zu, read %5zu: %4.1f GB/s\n", skips[s], reads[r], all / best / 1e9);
        }
    return seen == 1; /* it never is */
}
