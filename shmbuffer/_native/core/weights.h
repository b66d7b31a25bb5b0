/* Weights that are published: the calls of their file. */
#ifndef SHMB_WEIGHTS_H
#define SHMB_WEIGHTS_H

#include "core/layout.h"

/* Knows no ring. Each call is one of the file's own, which is mapped here */
struct shmb_weights_map {
    struct shmb_weights *page;
    unsigned char *copies; /* two of them */
    uint64_t bytes;        /* of each */
};
struct shmb_pieces {
    const uint64_t *from, *sizes, *places; /* addresses, bytes, offsets within a copy */
    uint64_t count;
};
struct shmb_weights_info { /* what a stamp says */
    uint64_t version;
    int64_t step;
    uint64_t time_ns, pid;
    uint32_t crc32c;
};
enum { SHMB_WEIGHTS_LOOKS = 64 }; /* so often a reader begins again before it gives up */
uint64_t shmb_publish(const struct shmb_weights_map *map, const struct shmb_pieces *pieces, int64_t step, uint64_t pid);
int shmb_newest(const struct shmb_weights_map *map, uint64_t than, unsigned char *out, struct shmb_weights_info *found);

#endif
