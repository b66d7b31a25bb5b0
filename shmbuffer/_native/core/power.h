/* Powers of priorities, see power.c, and conversions between numbers and their bits. */
#ifndef SHMB_POWER_H
#define SHMB_POWER_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

void shmb_powers_init(void);
extern bool shmb_has_avx2; /* this processor has AVX2, which computes four numbers at a time */
/* out[i] = (raw[i] + eps) ** alpha. `out` must not overlap `raw`. */
extern void (*shmb_powers)(const double *raw, double eps, double alpha, double *out, uint64_t count);

#endif
