/* Weights that a learner publishes for its collectors: one publisher at a time, any number of readers, and no
 * waiting.
 *
 *     newest = n ──▶ copy n mod 2    complete, read by all
 *                    the other copy  being written, or left incomplete by a publisher that died
 *
 * Publishers hold the lock of the file, which the kernel releases at their death. A publisher writes the copy that
 * is not the newest, and makes it the newest by one store. Until then readers get the previous version. So a
 * publisher that dies leaves the previous version in place, and the next one writes the same version number again.
 *
 * A reader holds no lock. It copies the weights, and uses the copy if the stamp is the same afterwards and the
 * checksum fits. The stamp of a copy changes before its first byte. So a reader that was overtaken by two versions
 * notices it, and begins again with the newest version. */
#include "core/crc32c.h"
#include "core/ring.h"

#include <string.h>

/* Covers a copy and the beginning of its stamp, so that a stamp fits no other bytes. */
static uint32_t checksum_of(const struct shmb_weights_info *info, const unsigned char *copy, uint64_t bytes) {
    return shmb_crc32c(shmb_crc32c(0, info, offsetof(struct shmb_weights_info, crc32c)), copy, bytes);
}

static bool has_version(const struct shmb_weights *page, uint64_t version) {
    return atomic_load_explicit(&page->stamps[version & 1].version, SYNC_WEIGHTS_REUSE_ACQUIRE) == version;
}

/* Under the lock of the file; returns the version. If a recovery has found the newest copy damaged, that copy is
 * overwritten and one number is skipped, because the other copy is the only valid one. */
uint64_t shmb_publish(const struct shmb_weights_map *map, const struct shmb_pieces *pieces, int64_t step, uint64_t pid) {
    struct shmb_weights *page = map->page;
    uint64_t newest = atomic_load_explicit(&page->newest, memory_order_relaxed);
    uint64_t version = newest + (has_version(page, newest) ? 1 : 2), at = (version & 1) * map->bytes;
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
    const struct shmb_weights_info info = {version, step, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), pid, 0};
    stamp->step = step;
    CP(weights_step);
    stamp->time_ns = info.time_ns;
    CP(weights_dated);
    stamp->pid = pid;
    CP(weights_signed);
    stamp->crc32c = checksum_of(&info, map->copies + at, map->bytes);
    CP(weights_checksum);
    atomic_store_explicit(&stamp->version, version, memory_order_relaxed);
    CP(weights_whole);
    atomic_store_explicit(&page->newest, version, SYNC_WEIGHTS_SET_RELEASE);
    CP(weights_published);
    return version;
}

/* Copies the newest weights if their version is greater than `known_version`. SHMB_NOTHING: there are none. SHMB_LAPPED: they
 * were overwritten during every attempt. */
int shmb_read_newest(const struct shmb_weights_map *map, uint64_t known_version, unsigned char *out, struct shmb_weights_info *info) {
    const struct shmb_weights *page = map->page;
    for (int attempt = 0; attempt < SHMB_WEIGHTS_ATTEMPTS; attempt++) {
        uint64_t newest = atomic_load_explicit(&page->newest, SYNC_WEIGHTS_SET_ACQUIRE), version = newest;
        if (version <= known_version) return SHMB_NOTHING;
        if (!has_version(page, version)) {
            /* it is being overwritten */
            if (atomic_load_explicit(&page->newest, SYNC_WEIGHTS_SET_ACQUIRE) != newest) continue;
            version = newest - 1; /* recovery found the newest copy damaged */
            if (version <= known_version || !has_version(page, version)) return SHMB_NOTHING;
        }
        CP(weights_looked);
        const struct shmb_stamp *stamp = &page->stamps[version & 1];
        SHMB_OPTIMISTIC(info->step = stamp->step; info->time_ns = stamp->time_ns; info->pid = stamp->pid;
                        info->crc32c = stamp->crc32c; memcpy(out, map->copies + (version & 1) * map->bytes, map->bytes));
        CP(weights_taken);
        atomic_thread_fence(SYNC_WEIGHTS_REUSE_ACQUIRE);
        if (!has_version(page, version)) continue;
        info->version = version;
        return checksum_of(info, out, map->bytes) == info->crc32c ? SHMB_OK : SHMB_DAMAGED;
    }
    return SHMB_LAPPED;
}
