/* A consistent copy of the whole ring.
 *
 * It is made in rounds, as in the live migration of a virtual machine. Each round copies what has changed since the
 * previous one, without a lock. The last round copies the rest under the mutex. */
#include <string.h>

#include "core/ring.h"

static void copy_slot(const struct shmb_ring *ring, uint64_t slot, uint64_t next, unsigned char *const *out) {
    if (ring->plan) shmb_copy_next(ring, slot, next, out, slot);
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
        uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
        if (bytes) memcpy(out[leaf] + slot * bytes, ring->leaves[leaf].base + slot * bytes, bytes);
    }
}

static int64_t ticket_of(uint64_t word) { return SHMB_STATE(word) == SHMB_COMMITTED ? (int64_t)SHMB_TICKET(word) : -1; }

/* One round, without the lock. tickets[slot] is the ticket of the item in `out`, or -1. Returns the number of slots
 * that had changed. */
uint64_t shmb_copy_slots(struct shmb_ring *ring, uint64_t first, uint64_t count, unsigned char *const *out,
                         int64_t *tickets) {
    uint64_t changed = 0;
    for (uint64_t slot = first; slot < first + count; slot++) {
        uint64_t word = atomic_load_explicit(&ring->words[slot], SYNC_SLOT_COMMIT_ACQUIRE);
        int64_t now = ticket_of(word);
        if (now == tickets[slot]) continue;
        changed++;
        uint64_t next = shmb_read_next(ring, slot);
        if (now >= 0) SHMB_OPTIMISTIC(copy_slot(ring, slot, next, out));
        atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
        bool valid = now >= 0 && shmb_link_still_holds(ring, slot, next) && shmb_still_holds(ring, slot, word);
        tickets[slot] = valid ? now : -1;
    }
    return changed;
}

/* Copies the other data of the items while the mutex is held. For slots that are being written they are meaningless.
 * For slots that were never written they stay as the caller initialised them. */
static void copy_item_data(const struct shmb_ring *ring, uint64_t *sources, double *raw, struct shmb_snapshot_counters *counters) {
    uint64_t reached = shmb_written_slots(ring);
    for (uint64_t slot = 0; slot < reached; slot++) sources[slot] = __atomic_load_n(&ring->sources[slot], __ATOMIC_RELAXED);
    for (uint64_t e = 0; e < reached * ring->lanes; e++) __atomic_load(&ring->raw[e], &raw[e], __ATOMIC_RELAXED);
    counters->head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    counters->write_count = atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed);
    counters->max_priority = ring->runtime->max_priority;
    CP(copy_snapshot);
}

/* The last round. Claims are impossible meanwhile, so committed items do not change. */
int shmb_finish_snapshot(struct shmb_ring *ring, struct shmb_call *call, unsigned char *const *out, int64_t *tickets,
                     uint64_t *sources, double *raw, struct shmb_snapshot_counters *counters) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    for (uint64_t slot = 0, reached = shmb_written_slots(ring); slot < reached; slot++) {
        int64_t now = ticket_of(atomic_load_explicit(&ring->words[slot], memory_order_relaxed));
        if (now >= 0 && now != tickets[slot]) copy_slot(ring, slot, shmb_read_next(ring, slot), out);
        tickets[slot] = now;
    }
    copy_item_data(ring, sources, raw, counters);
    shmb_unlock(ring);
    return SHMB_OK;
}

static int report_damage(struct shmb_ring *ring) {
    shmb_refusal.bad_at = SHMB_NO_SLOT;
    shmb_unlock(ring);
    return SHMB_DAMAGED;
}

/* span: the tail, the position below which no claim is writing, and the head. */
int shmb_read_span(struct shmb_ring *ring, struct shmb_call *call, uint64_t span[3]) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (!shmb_is_valid_span(ring)) return report_damage(ring);
    span[0] = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    span[1] = span[2] = atomic_load_explicit(&ring->runtime->byte_head, memory_order_relaxed);
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        if (atomic_load_explicit(&entry->phase, memory_order_relaxed) != SHMB_PAYLOAD) continue;
        uint64_t first = atomic_load_explicit(&entry->byte_first, memory_order_relaxed);
        if (first < span[1]) span[1] = first;
    }
    /* a dead writer whose reaper died may have an older position: the tail has passed its bytes */
    if (span[1] < span[0]) span[1] = span[0];
    shmb_unlock(ring);
    return SHMB_OK;
}

/* Copies everything under one lock, except bytes below `from`, which were copied before. SHMB_NO_ROOM: there are
 * more than `space` bytes from there on. */
int shmb_finish_records_snapshot(struct shmb_ring *ring, struct shmb_call *call, uint64_t from, unsigned char *out, uint64_t space,
                        int64_t *tickets, struct shmb_extent *extents, uint64_t *sources, double *raw,
                        struct shmb_snapshot_counters *counters) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (!shmb_is_valid_span(ring)) return report_damage(ring);
    counters->byte_tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    counters->byte_head = atomic_load_explicit(&ring->runtime->byte_head, memory_order_relaxed);
    if (from < counters->byte_tail) from = counters->byte_tail;
    uint64_t needed = counters->byte_head - from;
    if (needed > space) {
        shmb_refusal.needed = needed;
        shmb_unlock(ring);
        return SHMB_NO_ROOM;
    }
    /* includes records that are being written, which have no ticket */
    SHMB_OPTIMISTIC(memcpy(out, shmb_record_at(ring, from), needed));
    const uint64_t reached = shmb_written_slots(ring);
    for (uint64_t slot = 0; slot < reached; slot++)
        tickets[slot] = ticket_of(atomic_load_explicit(&ring->words[slot], memory_order_relaxed));
    memcpy(extents, ring->extents, reached * sizeof *extents);
    copy_item_data(ring, sources, raw, counters);
    shmb_unlock(ring);
    return SHMB_OK;
}
