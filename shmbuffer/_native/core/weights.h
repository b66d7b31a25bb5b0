/* Published weights: the calls on their file. */
#ifndef SHMB_WEIGHTS_H
#define SHMB_WEIGHTS_H

#include "core/layout.h"

/* A mapping of the weights file, which does not depend on a ring. */
struct shmb_weights_map {
    struct shmb_weights *page;
    unsigned char *copies; /* two copies */
    uint64_t bytes;        /* of each copy */
};
struct shmb_pieces {
    const uint64_t *from, *sizes, *places; /* addresses, sizes in bytes, offsets within a copy */
    uint64_t count;
};
struct shmb_weights_info { /* the fields of a stamp */
    uint64_t version;
    int64_t step;
    uint64_t time_ns, pid;
    uint32_t crc32c;
};
enum { SHMB_WEIGHTS_ATTEMPTS = 64 }; /* attempts of a reader before it gives up */
uint64_t shmb_publish(const struct shmb_weights_map *map, const struct shmb_pieces *pieces, int64_t step, uint64_t pid);
int shmb_read_newest(const struct shmb_weights_map *map, uint64_t known_version, unsigned char *out, struct shmb_weights_info *info);

#endif
