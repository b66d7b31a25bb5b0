/* Rolls the unfinished work of dead clients back or forward. Everything in this file is idempotent: if a process
 * dies in it, another one repeats it. The mutex is held. */
#include "core/ledger.h"
#include "core/reservations.h"

static void clear_masses(struct shmb_ring *ring, uint64_t slot) {
    if (!atomic_load_explicit(&ring->runtime->prioritized, memory_order_relaxed)) return;
    for (uint64_t e = slot * ring->lanes, end = e + ring->lanes; e < end; e++) {
        ring->tree.mass[e] = 0;
        CP(reap_mass);
    }
}

/* The slot has no item, and no claim covers it. */
static void abort_slot(struct shmb_ring *ring, uint64_t ticket) {
    clear_masses(ring, ticket % ring->capacity);
    CP(reap_leaf);
    atomic_store_explicit(&ring->words[ticket % ring->capacity], SHMB_WORD(ticket, SHMB_ABORTED), memory_order_release);
    CP(reap_word);
}

static void roll_back(struct shmb_ring *ring, uint64_t ticket) {
    if (atomic_load_explicit(&ring->words[ticket % ring->capacity], memory_order_relaxed) != SHMB_WORD(ticket, SHMB_WRITING)) return;
    abort_slot(ring, ticket);
    atomic_fetch_add_explicit(&ring->runtime->rolled_back, 1, memory_order_relaxed);
    CP(count_added);
}

static void roll_forward(struct shmb_ring *ring, uint64_t ticket) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t slot = ticket % ring->capacity;
    if (atomic_load_explicit(&ring->words[slot], memory_order_relaxed) != SHMB_WORD(ticket, SHMB_WRITING)) return;
    if (atomic_load_explicit(&runtime->prioritized, memory_order_relaxed))
        for (uint64_t e = slot * ring->lanes, end = e + ring->lanes; e < end; e++) {
            if (!(ring->raw[e] >= 0)) ring->raw[e] = shmb_default_priority(runtime);
            CP(reap_default);
            ring->tree.mass[e] = shmb_mass(runtime, ring->raw[e]);
            CP(reap_mass);
        }
    CP(reap_leaf);
    atomic_store_explicit(&ring->words[slot], SHMB_WORD(ticket, SHMB_COMMITTED), SYNC_SLOT_COMMIT_RELEASE);
    CP(reap_word);
    atomic_fetch_add_explicit(&runtime->length, 1, memory_order_relaxed);
    CP(reap_length);
    atomic_fetch_add_explicit(&runtime->rolled_forward, 1, memory_order_relaxed);
    CP(count_added);
}

/* Slots that a writer is filling are left alone: their items are committed after the emptying. */
static void empty_slot(struct shmb_ring *ring, uint64_t slot) {
    unsigned state = SHMB_STATE(atomic_load_explicit(&ring->words[slot], memory_order_relaxed));
    if (state != SHMB_COMMITTED && state != SHMB_ABORTED) return;
    clear_masses(ring, slot);
    CP(empty_leaf);
    atomic_store_explicit(&ring->words[slot], SHMB_WORD(0, SHMB_EMPTY), memory_order_release);
    CP(empty_word);
    if (state == SHMB_COMMITTED) atomic_fetch_sub_explicit(&ring->runtime->length, 1, memory_order_relaxed);
    CP(empty_length);
}

/* A claim has at most as many tickets as there are slots. It begins at the head of that time, or after the skipped
 * rows of its batch. Other values are damage and no claim, so the slots that they seem to cover are free. */
#define LARGEST_BATCH ((uint64_t)1 << 40)

static bool can_be_a_claim(const struct shmb_ring *ring, uint64_t first, uint64_t count) {
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    return count <= ring->capacity && first <= SHMB_LAST_TICKET - count && (first <= head || first - head <= LARGEST_BATCH);
}

/* The head advances past slots that the dead writer had not marked yet. Their items are removed. Otherwise they
 * would count as the newest ones, behind items that were written after them. If observations are stored once, they
 * would outlive their targets. */
static void evict_unmarked(struct shmb_ring *ring, const struct shmb_entry *entry, uint64_t first, uint64_t end) {
    uint32_t phase = atomic_load_explicit(&entry->phase, memory_order_relaxed);
    if (phase != SHMB_MARKING || entry->kind != SHMB_RING_WRITE) return;
    for (uint64_t ticket = first; ticket < end; ticket++) {
        uint64_t word = atomic_load_explicit(&ring->words[ticket % ring->capacity], memory_order_relaxed);
        if (SHMB_STATE(word) == SHMB_COMMITTED && SHMB_TICKET(word) < ticket) abort_slot(ring, ticket);
    }
}

/* The caller recomputes the parents, and sets the phase to IDLE after that. */
void shmb_finish_claim(struct shmb_ring *ring, struct shmb_entry *entry) {
    struct shmb_runtime *runtime = ring->runtime;
    uint32_t phase = atomic_load_explicit(&entry->phase, memory_order_relaxed);
    uint64_t first = atomic_load_explicit(&entry->first, memory_order_relaxed);
    uint64_t end = first + atomic_load_explicit(&entry->count, memory_order_relaxed);
    if (phase == SHMB_IDLE || !can_be_a_claim(ring, first, end - first)) return;
    if (atomic_load_explicit(&runtime->head, memory_order_relaxed) < end)
        atomic_store_explicit(&runtime->head, end, memory_order_release);
    if (phase == SHMB_EMPTYING) {
        CP(empty_head);
        runtime->max_priority = -1; /* the largest priority of the removed items */
        CP(empty_max_priority);
        shmb_restart_limiter(ring, atomic_load_explicit(&entry->goal, memory_order_relaxed), 0);
        /* the slots that shmb_written_slots returned then */
        for (uint64_t slot = 0; slot < ring->capacity && slot < first; slot++) empty_slot(ring, slot);
        shmb_skip_emptied(ring);
        if (shmb_is_consumed(ring)) shmb_repair_ledger(ring);
    } else {
        CP(reap_head);
        evict_unmarked(ring, entry, first, end);
        for (uint64_t ticket = first; ticket < end; ticket++)
            (phase == SHMB_COMMITTING ? roll_forward : roll_back)(ring, ticket);
    }
    if (phase == SHMB_EMPTYING || phase == SHMB_COMMITTING)
        atomic_store_explicit(&runtime->write_count, atomic_load_explicit(&entry->goal, memory_order_relaxed),
                              memory_order_release);
    if (phase == SHMB_EMPTYING)
        CP(empty_count);
    else
        CP(reap_count);
    if (phase != SHMB_COMMITTING) return;
    shmb_set_base(ring);
    shmb_spend_client_reservations(ring, entry);
}

/* EOWNERDEAD: the last owner of the mutex died while holding it. The claim in a phase that exists only under the
 * mutex is its own. The leaves and `length` are not trusted, and are recomputed from the words and the raw
 * priorities. */
void shmb_repair(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    uint32_t waiters = 0;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        uint32_t phase = atomic_load_explicit(&ring->entries[i].phase, memory_order_relaxed);
        if (phase != SHMB_IDLE && phase != SHMB_PAYLOAD) {
            shmb_finish_claim(ring, &ring->entries[i]);
            CP(repair_claims);
        }
        waiters += atomic_load_explicit(&ring->entries[i].turn, memory_order_relaxed) != 0;
    }
    atomic_store_explicit(&runtime->waiters, waiters, memory_order_relaxed);
    CP(repair_waiters);
    atomic_fetch_add_explicit(&runtime->alpha_version, 1, memory_order_relaxed);
    CP(repair_version);
    shmb_ring_leaves(ring);
    CP(repair_leaves);
    if (atomic_load_explicit(&runtime->prioritized, memory_order_relaxed)) shmb_ring_parents(ring);
    CP(repair_parents);
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        uint32_t phase = atomic_load_explicit(&ring->entries[i].phase, memory_order_relaxed);
        if (phase != SHMB_IDLE && phase != SHMB_PAYLOAD)
            atomic_store_explicit(&ring->entries[i].phase, SHMB_IDLE, memory_order_release);
        CP(repair_idle);
    }
    shmb_recount_pending(ring);
    shmb_recount_reserved(ring);
    shmb_repair_ledger(ring);
    atomic_fetch_add_explicit(&runtime->repairs, 1, memory_order_relaxed);
    CP(count_added);
}
