/* Powers of priorities: see power.c. */
#ifndef SHMB_POWER_H
#define SHMB_POWER_H

#include <stdint.h>

void shmb_powers_init(void);
/* out[i] = (raw[i] + eps) ** alpha; in other memory. */
extern void (*shmb_powers)(const double *raw, double eps, double alpha, double *out, uint64_t count);

#endif
