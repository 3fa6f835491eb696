/* Runs recorded calls of a library of kernels, and writes what they leave in memory:
 *
 *     driver LIBRARY CALLS OUT
 *
 * `recorded_calls.py` writes CALLS and reads OUT. All is in eight bytes each, or bytes. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 20

/* Whole numbers and pointers are passed in one order, numbers with a point in another. */
typedef int call(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float);

static FILE *calls;

static void check(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static int64_t number(void) {
    int64_t x;
    check(fread(&x, sizeof x, 1, calls) == 1, "the calls end too early");
    return x;
}

static void bytes(void *to, int64_t count) {
    check((int64_t)fread(to, 1, count, calls) == count, "the calls end too early");
}

int main(int count, char **given) {
    check(count == 4, "driver LIBRARY CALLS OUT");
    void *library = dlopen(given[1], RTLD_NOW);
    check(library != NULL, library ? "" : dlerror());
    calls = fopen(given[2], "rb");
    FILE *out = fopen(given[3], "wb");
    check(calls && out, "no such file");
    for (int64_t left = number(); left > 0; left--) {
        char name[64] = {0};
        int64_t size = number(), a[MOST] = {0}, *sizes;
        float f[2] = {0};
        uint8_t **buffers;
        check(size < (int64_t)sizeof name, "a long name");
        bytes(name, size);
        const int64_t many = number();
        sizes = calloc(many, sizeof *sizes);
        buffers = calloc(many, sizeof *buffers);
        for (int64_t i = 0; i < many; i++) { /* as far from a whole line as it was */
            sizes[i] = number();
            const int64_t from = number();
            buffers[i] = (uint8_t *)aligned_alloc(64, (sizes[i] + from + 127) / 64 * 64) + from;
            bytes(buffers[i], sizes[i]);
        }
        /* Addresses in buffers: these are of the process that has made the calls. */
        const int64_t inside = number();
        int64_t *places = calloc(3 * inside + 1, sizeof *places);
        for (int64_t i = 0; i < 3 * inside; i += 3) {
            uint8_t *at = buffers[places[i] = number()] + (places[i + 1] = number());
            memcpy(&places[i + 2], at, 8);
            int64_t to = (int64_t)buffers[number()];
            to += number();
            memcpy(at, &to, 8);
        }
        int whole = 0, broken = 0;
        for (int64_t arguments = number(); arguments > 0; arguments--) {
            const int64_t kind = number(), value = number();
            check(whole < MOST && broken < 2, "too many arguments");
            if (kind == 0)
                a[whole++] = value;
            else if (kind == 1)
                memcpy(&f[broken++], &value, sizeof(float));
            else
                a[whole++] = (int64_t)(buffers[value] + number());
        }
        call *run = (call *)dlsym(library, name);
        check(run != NULL, name);
        run(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
            a[14], a[15], a[16], a[17], a[18], a[19], f[0], f[1]);
        for (int64_t i = 0; i < 3 * inside; i += 3) memcpy(buffers[places[i]] + places[i + 1], &places[i + 2], 8);
        for (int64_t i = 0; i < many; i++) fwrite(buffers[i], 1, sizes[i], out);
    }
    return fclose(out);
}
