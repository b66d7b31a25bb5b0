/* Writers that wait for a slot: whom they wait for, the order of their turns, and the futex on which they sleep. */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/ring.h"

/* The entry with the earliest turn before `before`; SHMB_ENTRIES: none. */
static uint32_t first_in_turn(const struct shmb_ring *ring, uint64_t before) {
    uint32_t entry = SHMB_ENTRIES, left = atomic_load_explicit(&ring->runtime->waiters, memory_order_relaxed);
    for (uint32_t i = 0; i < SHMB_ENTRIES && left > 0; i++) {
        uint64_t turn = atomic_load_explicit(&ring->entries[i].turn, memory_order_relaxed);
        left -= turn != 0;
        if (turn && turn < before) before = turn, entry = i;
    }
    return entry;
}

/* Returns our turn. The time of the next turn begins now, so that other writers may still pass for a while. */
uint32_t shmb_return_turn(struct shmb_ring *ring) {
    if (atomic_load_explicit(&ring->me->turn, memory_order_relaxed) == 0) return SHMB_ENTRIES;
    atomic_store_explicit(&ring->me->turn, 0, memory_order_release);
    CP(turn_returned);
    atomic_fetch_sub(&ring->runtime->waiters, 1);
    CP(turn_returned);
    uint32_t next = first_in_turn(ring, UINT64_MAX);
    if (next == SHMB_ENTRIES) return next;
    atomic_store_explicit(&ring->entries[next].turn_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
    CP(turn_dated);
    return next;
}

static void enter_queue(struct shmb_ring *ring) {
    if (atomic_load_explicit(&ring->me->turn, memory_order_relaxed) != 0) return;
    uint64_t turn = atomic_fetch_add(&ring->runtime->next_turn, 1) + 1;
    CP(turn_numbered);
    atomic_store_explicit(&ring->me->turn_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
    CP(turn_dated);
    atomic_store_explicit(&ring->me->turn, turn, memory_order_release);
    CP(turn_noted);
    atomic_fetch_add(&ring->runtime->waiters, 1);
    CP(wait_turn);
}

static void note_blocker(struct shmb_ring *ring, uint32_t entry, bool by_turn) {
    shmb_refusal.blocker.entry = entry;
    shmb_refusal.blocker.incarnation = atomic_load_explicit(&ring->entries[entry].incarnation, memory_order_relaxed);
    shmb_refusal.blocker.turn = atomic_load_explicit(&ring->entries[entry].turn, memory_order_relaxed);
    shmb_refusal.blocker.progress = atomic_load(&ring->runtime->progress);
    shmb_refusal.blocker.by_turn = by_turn;
    shmb_refusal.why = SHMB_SLOT_IS_TAKEN;
    if (by_turn) enter_queue(ring);
}

/* W1: a writer with an earlier turn goes first, but only after it has waited for a while. Before that any writer may
 * pass. With strict turns every write would cost a wake-up as soon as all writers queue, and they would queue
 * forever. */
#define TURN_COUNTS_FROM_NS 1000000

bool shmb_waits_behind_a_turn(struct shmb_ring *ring) {
    uint64_t own_turn = atomic_load_explicit(&ring->me->turn, memory_order_relaxed);
    if (atomic_load_explicit(&ring->runtime->waiters, memory_order_relaxed) <= (own_turn ? 1u : 0u)) return false;
    uint32_t entry = first_in_turn(ring, own_turn ? own_turn : UINT64_MAX);
    if (entry == SHMB_ENTRIES) return false;
    uint64_t since = atomic_load_explicit(&ring->entries[entry].turn_ns, memory_order_relaxed);
    if ((uint64_t)shmb_now_ns() - since < TURN_COUNTS_FROM_NS) return false;
    note_blocker(ring, entry, true);
    return true;
}

bool shmb_is_being_written(struct shmb_ring *ring, uint64_t slot) {
    uint64_t word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
    uint32_t entry = 0;
    if (__builtin_expect(!shmb_claim_covers(ring, word, &entry), 1)) return false;
    note_blocker(ring, entry, false);
    enter_queue(ring);
    return true;
}

/* True if another client is between claim and commit, so that space may become free soon. */
bool shmb_others_are_writing(struct shmb_ring *ring) {
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        if (&ring->entries[i] == ring->me) continue;
        if (atomic_load_explicit(&ring->entries[i].phase, memory_order_relaxed) != SHMB_PAYLOAD) continue;
        note_blocker(ring, i, false);
        enter_queue(ring);
        return true;
    }
    return false;
}

int shmb_cancel_turn(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (shmb_is_ours(ring)) shmb_return_turn(ring);
    shmb_unlock(ring);
    shmb_wake_waiters(ring->runtime);
    return SHMB_OK;
}

/* Moves a writer that does not use its turn to the end of the queue. */
int shmb_forfeit_turn(struct shmb_ring *ring, struct shmb_call *call, uint32_t entry, uint64_t turn) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (turn && atomic_load_explicit(&ring->entries[entry].turn, memory_order_relaxed) == turn) {
        uint64_t later = atomic_fetch_add(&ring->runtime->next_turn, 1) + 1;
        CP(turn_numbered);
        atomic_store_explicit(&ring->entries[entry].turn_ns, (uint64_t)shmb_now_ns(), memory_order_relaxed);
        CP(turn_dated);
        atomic_store_explicit(&ring->entries[entry].turn, later, memory_order_release);
        CP(wait_forfeit);
    }
    shmb_unlock(ring);
    return SHMB_OK;
}

/* All waiters sleep on one word. A bit tells what each one waits for: the other side, the end of one client's claim,
 * or its own turn. If every change woke all waiters, 64 writers behind a slow one would do nothing else. Several
 * clients share a bit, so some wake up for nothing. */
#define OTHER_SIDE_BIT (1u << 31)

static uint32_t claim_bit(uint64_t entry) { return 1u << entry % 8; }

static uint32_t turn_bit(uint64_t entry) { return 1u << (8 + entry % 23); }

static uint64_t own_entry(const struct shmb_ring *ring) { return (uint64_t)(ring->me - ring->entries); }

static void wake(struct shmb_runtime *runtime, uint32_t bits) {
    if (atomic_load_explicit(&runtime->waiters, memory_order_relaxed) == 0) bits &= OTHER_SIDE_BIT;
    if (atomic_load_explicit(&runtime->limited, memory_order_relaxed) == 0) bits &= ~OTHER_SIDE_BIT;
    if (bits == 0) return;
    atomic_fetch_add(&runtime->progress, 1);
    CP(wake_progress);
    syscall(SYS_futex, &runtime->progress, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

/* Called after unlocking by a process that changed what waiters wait for. If the process dies before this call, they
 * sleep until their slice of a few milliseconds ends. */
void shmb_wake_waiters(struct shmb_runtime *runtime) { wake(runtime, FUTEX_BITSET_MATCH_ANY); }

/* The same after only our claim has ended. */
void shmb_wake_after_claim(struct shmb_ring *ring) {
    wake(ring->runtime, claim_bit(own_entry(ring)) | OTHER_SIDE_BIT);
}

/* After our turn was returned. */
void shmb_wake_turn(struct shmb_ring *ring, uint32_t entry) {
    if (__builtin_expect(entry < SHMB_ENTRIES, 0)) wake(ring->runtime, turn_bit(entry));
}

/* Sleeps until the reason of this thread's last refusal may have ended, at most `timeout_ns`. */
int shmb_wait_progress(struct shmb_ring *ring, uint32_t seen, int64_t timeout_ns) {
    uint32_t bits = shmb_refusal.why != SHMB_SLOT_IS_TAKEN ? OTHER_SIDE_BIT
                    : shmb_refusal.blocker.by_turn          ? turn_bit(own_entry(ring))
                                                            : claim_bit(shmb_refusal.blocker.entry);
    int64_t end_ns = shmb_now_ns() + timeout_ns; /* FUTEX_WAIT_BITSET takes an absolute time */
    struct timespec end = {end_ns / 1000000000, end_ns % 1000000000};
    return (int)syscall(SYS_futex, &ring->runtime->progress, FUTEX_WAIT_BITSET, seen, &end, NULL, bits);
}
