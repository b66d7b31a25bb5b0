/* Removal of a client: it leaves, or it is proven dead and reaped. */
#include "core/reservations.h"

/* Closes the handle: waits for writes of other threads, aborts an open claim, ends reservations, and frees the
 * entry. Returns SHMB_LOCK_TIMEOUT if a thread may still take the mutex. The entry then stays until the process ends
 * and is reaped. */
int shmb_leave(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_gate_enter(ring, call, call->timeout_ns);
    if (status != SHMB_OK) return status;
    status = shmb_lock(ring, call);
    if (status == SHMB_LEFT && shmb_is_ours(ring)) { /* a previous attempt could not free the entry */
        status = shmb_disable_lock(ring, call) ? SHMB_OK : SHMB_LOCK_TIMEOUT;
        if (status == SHMB_OK) atomic_store_explicit(&ring->me->state, SHMB_FREE, memory_order_release);
        CP(leave_freed);
    } else if (status == SHMB_OK) {
        bool mine = shmb_is_ours(ring);
        if (ring->claimed) shmb_abort_claim(ring);
        if (mine) shmb_end_reservations(ring, ring->me);
        if (mine) shmb_return_turn(ring);
        if (mine) shmb_clear_waiting(ring, ring->me, SHMB_FOR_SAMPLES | SHMB_FOR_INSERTS);
        CP(leave_claim);
        /* Before the clock is read, because the first store to a clean page changes the times of the file
         * (restored.py). */
        if (mine) atomic_store_explicit(&ring->me->last_seen_ns, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), memory_order_relaxed);
        CP(leave_claim);
        shmb_store_touch_time(ring->runtime);
        shmb_unlock(ring);
        shmb_wake_waiters(ring->runtime);
        if (!shmb_disable_lock(ring, call)) {
            mine = false;
            status = SHMB_LOCK_TIMEOUT;
        }
        if (mine) atomic_store_explicit(&ring->me->state, SHMB_FREE, memory_order_release);
        CP(leave_freed);
    }
    shmb_gate_leave(ring);
    return status;
}

/* Frees the entry of a client that the caller has proven dead. `incarnation` is compared again under the mutex,
 * because another process may have reaped the client, and the entry may be in use again. */
int shmb_reap(struct shmb_ring *ring, struct shmb_call *call, uint32_t index, uint64_t incarnation, bool *freed) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_entry *entry = &ring->entries[index];
    *freed = false;
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    CP(reap_locked);
    if (atomic_load_explicit(&entry->incarnation, memory_order_relaxed) == incarnation &&
        atomic_load_explicit(&entry->state, memory_order_relaxed) == SHMB_LIVE) {
        if (atomic_load_explicit(&entry->phase, memory_order_relaxed) != SHMB_IDLE) {
            shmb_finish_claim(ring, entry);
            if (atomic_load_explicit(&runtime->prioritized, memory_order_relaxed)) shmb_ring_parents(ring);
            CP(reap_parents);
            atomic_store_explicit(&entry->phase, SHMB_IDLE, memory_order_release);
        }
        CP(reap_idle);
        shmb_end_pending(ring, entry);
        shmb_end_reservations(ring, entry);
        shmb_clear_waiting(ring, entry, SHMB_FOR_SAMPLES | SHMB_FOR_INSERTS);
        if (atomic_load_explicit(&entry->turn, memory_order_relaxed) != 0) {
            atomic_store_explicit(&entry->turn, 0, memory_order_release);
            CP(turn_returned);
            atomic_fetch_sub(&runtime->waiters, 1);
            CP(turn_returned);
        }
        atomic_store_explicit(&entry->state, SHMB_FREE, memory_order_release);
        CP(reap_freed);
        atomic_fetch_add_explicit(&runtime->reaped, 1, memory_order_relaxed);
        CP(count_added);
        *freed = true;
    }
    shmb_unlock(ring);
    CP(reap_unlocked);
    shmb_wake_waiters(runtime);
    return SHMB_OK;
}
