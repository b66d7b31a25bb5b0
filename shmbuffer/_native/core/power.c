/* A power that gives the same bits with every C library, compiler and processor. It uses only operations that IEEE
 * 754 rounds in one way, no product is fused into a sum, and the loop runs two or four numbers at a time.
 *
 *     x = 2^e * m, m from sqrt(1/2) to sqrt(2)        log2(m) = 2 / ln(2) * artanh(s), s = (m - 1) / (m + 1)
 *     x ** alpha = 2^(alpha * e + alpha * log2(m))    2^n * e^(t), t from -ln(2)/2 to ln(2)/2
 *
 * The product of the head of alpha and e is exact, so the error does not grow with x. It is at most 1.5 units in the
 * last place for alpha up to 1, and one more for each further 1 of alpha. The power is exact for alpha 0 and 1. It
 * takes a third of the time of libm's pow. */
#include "core/power.h"

#include <float.h>
#include <math.h>

struct exponent {
    double whole, head, tail; /* the head times the exponent of a number is exact */
};

static inline struct exponent exponent_of(double alpha) {
    double head = from_bits(bits_of(alpha) & ~(uint64_t)0x7FF);
    return (struct exponent){alpha, head, alpha - head};
}

#define ROUNDING 0x1.8p52 /* adding it to a number leaves the nearest integer in the low bits */
#define MAX_EXPONENT 1021.0       /* largest binary exponent of a power that the fast loop computes */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* x ** alpha = the result * 2 ** (*rounded - ROUNDING). `high_bits` is added to the binary exponent of x. */
ALWAYS_INLINE double fraction_of(double x, double high_bits, struct exponent alpha, double *rounded) {
    const uint64_t root = 0x3FE6A09E667F3BCDu, one = 0x3FF0000000000000u, whole = 0x4330000000000000u; /* sqrt(1/2); 1; 2^52 */
    uint64_t bits = bits_of(x), biased = (bits + (one - root)) >> 52;
    double e = from_bits(whole | biased) - (0x1p52 + 1023) + high_bits, m = from_bits(bits - (biased << 52) + one);
    double s = (m - 1) / (m + 1), z = s * s, z2 = z * z, z4 = z2 * z2;
#define LOG2(n) (2.8853900817779268 / (n))
    double series = ((LOG2(3) + z * LOG2(5)) + z2 * (LOG2(7) + z * LOG2(9))) +
                    z4 * ((LOG2(11) + z * LOG2(13)) + z2 * (LOG2(15) + z * LOG2(17))) + (z4 * z4) * (LOG2(19) + z * LOG2(21));
    double part = alpha.head * e, rest = alpha.tail * e + alpha.whole * (s * LOG2(1) + s * z * series);
#undef LOG2
    *rounded = (part + rest) + ROUNDING;
    double t = ((part - (*rounded - ROUNDING)) + rest) * 0.69314718055994531, t2 = t * t, t4 = t2 * t2;
    double high = ((1. / 2 + t * (1. / 6)) + t2 * (1. / 24 + t * (1. / 120))) +
                  t4 * ((1. / 720 + t * (1. / 5040)) + t2 * (1. / 40320 + t * (1. / 362880))) +
                  (t4 * t4) * ((1. / 3628800 + t * (1. / 39916800)) + t2 * (1. / 479001600 + t * (1. / 6227020800)));
    return 1 + (t + t2 * high);
}

/* For any number, including those without a logarithm and those too small or too large for the fast loop. */
static double any_power(double x, struct exponent alpha) {
    double rounded, result;
    if (alpha.whole == 0) return 1;
    if (x == 0 || x == INFINITY) return x;
    if (!(x > 0)) return NAN;
    result = x < DBL_MIN ? fraction_of(x * 0x1p54, -54, alpha, &rounded) : fraction_of(x, 0, alpha, &rounded);
    double n = rounded - ROUNDING;
    if (n > -2000 && n < 2000) return ldexp(result, (int)n);
    return n > 0 ? INFINITY : n < 0 ? 0 : NAN;
}

ALWAYS_INLINE void powers(const double *restrict raw, double eps, double alpha, double *restrict out, uint64_t count) {
    const struct exponent exponent = exponent_of(alpha);
    uint64_t odd = 0;
    for (uint64_t i = 0; i < count; i++) {
        double x = raw[i] + eps, rounded, result = fraction_of(x, 0, exponent, &rounded), n = rounded - ROUNDING;
        /* Sums of numbers, because SSE2 has no comparison whose result is a 64-bit integer. */
        odd |= bits_of((x >= DBL_MIN ? 0. : 1.) + (x <= DBL_MAX ? 0. : 1.) + (n > -MAX_EXPONENT ? 0. : 1.) + (n < MAX_EXPONENT ? 0. : 1.));
        out[i] = result * from_bits((bits_of(rounded) + 1023) << 52);
    }
    for (uint64_t i = 0; odd && i < count; i++) out[i] = any_power(raw[i] + eps, exponent);
    for (uint64_t i = 0; alpha == 1 && i < count; i++) out[i] = raw[i] + eps;
}

static void powers_by_two(const double *raw, double eps, double alpha, double *out, uint64_t count) {
    powers(raw, eps, alpha, out, count);
}

bool shmb_has_avx2 = false;
void (*shmb_powers)(const double *, double, double, double *, uint64_t) = powers_by_two;

#if defined(__x86_64__)
#include <cpuid.h>

__attribute__((target("avx2"))) static void powers_by_four(const double *raw, double eps, double alpha, double *out, uint64_t count) {
    powers(raw, eps, alpha, out, count);
}

/* True if the processor has AVX2, and the kernel saves its registers. */
static bool has_avx2(void) {
    unsigned a, b, c, d, enabled, high_bits;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    __asm__("xgetbv" : "=a"(enabled), "=d"(high_bits) : "c"(0));
    return (enabled & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#endif

void shmb_powers_init(void) {
#if defined(__x86_64__)
    shmb_has_avx2 = has_avx2();
    if (shmb_has_avx2) shmb_powers = powers_by_four;
#endif
}
