/* Powers of priorities: see power.c. And the bits of a number, which every power of ours is made of. */
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
extern bool shmb_by_four; /* this processor does four numbers at a time, with AVX2 */
/* out[i] = (raw[i] + eps) ** alpha; in other memory. */
extern void (*shmb_powers)(const double *raw, double eps, double alpha, double *out, uint64_t count);

#endif
