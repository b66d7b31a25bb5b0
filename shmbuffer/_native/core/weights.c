/* The weights that a learner hands to its collectors: one publisher at a time, any number of readers, and nobody waits.
 *
 *     newest = n ──▶ copy n mod 2   whole, read
 *                    the other one  being written, or left half-way by a publisher that died
 *
 * Publishers hold the lock of the file, which their death frees. One writes the copy that does not count, and makes it
 * the newest with one store; until then readers have the one before. So a publisher that dies here leaves what was there,
 * and the next one begins the same version again.
 *
 * A reader holds nothing. It copies out, and keeps the copy if the stamp is the same afterwards and the checksum fits.
 * The stamp of a copy changes before its first byte does: a reader that was so slow that two versions were published
 * meanwhile sees it, and begins again with the newest. */
#include "core/crc32c.h"
#include "core/ring.h"

#include <string.h>

/* Over a copy and its stamp as it begins, so that no stamp goes with other bytes than its own. */
static uint32_t checksum_of(const struct shmb_weights_info *told, const unsigned char *copy, uint64_t bytes) {
    return shmb_crc32c(shmb_crc32c(0, told, offsetof(struct shmb_weights_info, crc32c)), copy, bytes);
}

static bool holds(const struct shmb_weights *page, uint64_t version) {
    return atomic_load_explicit(&page->stamps[version & 1].version, SYNC_WEIGHTS_REUSE_ACQUIRE) == version;
}

/* Under the lock of the file; returns the version. Where a recovery has found the newest damaged its copy is written, and
 * a number left out, because the other copy is the only one that is whole. */
uint64_t shmb_publish(const struct shmb_weights_map *map, const struct shmb_pieces *pieces, int64_t step, uint64_t pid) {
    struct shmb_weights *page = map->page;
    uint64_t newest = atomic_load_explicit(&page->newest, memory_order_relaxed);
    uint64_t version = newest + (holds(page, newest) ? 1 : 2), at = (version & 1) * map->bytes;
    struct shmb_stamp *stamp = &page->stamps[version & 1];
    atomic_store_explicit(&stamp->version, 0, SYNC_WEIGHTS_REUSE_RELEASE);
    CP(weights_begun);
    atomic_thread_fence(SYNC_WEIGHTS_REUSE_RELEASE);
    for (uint64_t i = 0; i < pieces->count; i++) {
        if (pieces->sizes[i] == 0) continue;
        const void *from = (const void *)(uintptr_t)pieces->from[i];
        memcpy(map->copies + at + pieces->places[i], from, pieces->sizes[i]);
        CP(weights_copied);
    }
    const struct shmb_weights_info told = {version, step, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), pid, 0};
    stamp->step = step;
    CP(weights_step);
    stamp->time_ns = told.time_ns;
    CP(weights_dated);
    stamp->pid = pid;
    CP(weights_signed);
    stamp->crc32c = checksum_of(&told, map->copies + at, map->bytes);
    CP(weights_checksum);
    atomic_store_explicit(&stamp->version, version, memory_order_relaxed);
    CP(weights_whole);
    atomic_store_explicit(&page->newest, version, SYNC_WEIGHTS_SET_RELEASE);
    CP(weights_published);
    return version;
}

/* Copies out what is newer than `than`. SHMB_NOTHING: nothing is. SHMB_LAPPED: it was written over, each time. */
int shmb_newest(const struct shmb_weights_map *map, uint64_t than, unsigned char *out, struct shmb_weights_info *found) {
    const struct shmb_weights *page = map->page;
    for (int look = 0; look < SHMB_WEIGHTS_LOOKS; look++) {
        uint64_t newest = atomic_load_explicit(&page->newest, SYNC_WEIGHTS_SET_ACQUIRE), version = newest;
        if (version <= than) return SHMB_NOTHING;
        if (!holds(page, version)) {
            if (atomic_load_explicit(&page->newest, SYNC_WEIGHTS_SET_ACQUIRE) != newest) continue; /* it is written over */
            version = newest - 1; /* a recovery has found the newest damaged */
            if (version <= than || !holds(page, version)) return SHMB_NOTHING;
        }
        CP(weights_looked);
        const struct shmb_stamp *stamp = &page->stamps[version & 1];
        SHMB_OPTIMISTIC(found->step = stamp->step; found->time_ns = stamp->time_ns; found->pid = stamp->pid;
                        found->crc32c = stamp->crc32c; memcpy(out, map->copies + (version & 1) * map->bytes, map->bytes));
        CP(weights_taken);
        atomic_thread_fence(SYNC_WEIGHTS_REUSE_ACQUIRE);
        if (!holds(page, version)) continue;
        found->version = version;
        return checksum_of(found, out, map->bytes) == found->crc32c ? SHMB_OK : SHMB_DAMAGED;
    }
    return SHMB_LAPPED;
}
