/* The order in which the slots of a ring follow each other: by stream, by the age of the source in it, and by age within a source. */
#ifndef SHMB_ORDER_H
#define SHMB_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#define SHMB_NO_SOURCE UINT64_MAX /* of slots that come behind all others */

struct shmb_group {
    uint64_t source, count;
};

/* Of at most INT32_MAX slots: half the memory is half the time. */
bool shmb_order(const uint64_t *sources, uint64_t count, uint64_t start, int32_t *order, int32_t *rows,
                struct shmb_group **groups, uint64_t *n_groups);

#endif
