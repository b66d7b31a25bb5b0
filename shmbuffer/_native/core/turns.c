/* Writers that wait for a slot: whom they wait for, the order of their turns, and the futex on which they sleep. */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/ring.h"

/* The entry with the earliest turn before `than`; SHMB_ENTRIES: none. */
static uint32_t first_in_turn(const struct shmb_ring *ring, uint64_t than) {
    uint32_t entry = SHMB_ENTRIES, left = atomic_load_explicit(&ring->runtime->waiters, memory_order_relaxed);
    for (uint32_t i = 0; i < SHMB_ENTRIES && left > 0; i++) {
        uint64_t turn = atomic_load_explicit(&ring->entries[i].turn, memory_order_relaxed);
        left -= turn != 0;
        if (turn && turn < than) than = turn, entry = i;
    }
    return entry;
}

/* Returns our turn. The time of the next turn begins now, so that other writers may still pass for a while. */
uint32_t shmb_give_back_turn(struct shmb_ring *ring) {
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
    uint64_t mine = atomic_load_explicit(&ring->me->turn, memory_order_relaxed);
    if (atomic_load_explicit(&ring->runtime->waiters, memory_order_relaxed) <= (mine ? 1u : 0u)) return false;
    uint32_t entry = first_in_turn(ring, mine ? mine : UINT64_MAX);
    if (entry == SHMB_ENTRIES) return false;
    uint64_t since = atomic_load_explicit(&ring->entries[entry].turn_ns, memory_order_relaxed);
    if ((uint64_t)shmb_now_ns() - since < TURN_COUNTS_FROM_NS) return false;
    note_blocker(ring, entry, true);
    return true;
}

bool shmb_is_being_written(struct shmb_ring *ring, uint64_t slot) {
    uint64_t word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
    uint32_t whose = 0;
    if (__builtin_expect(!shmb_claim_covers(ring, word, &whose), 1)) return false;
    note_blocker(ring, whose, false);
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

int shmb_give_up_turn(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (shmb_is_ours(ring)) shmb_give_back_turn(ring);
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
#define FOR_THE_OTHER_SIDE (1u << 31)

static uint32_t for_claim_of(uint64_t entry) { return 1u << entry % 8; }

static uint32_t for_turn_of(uint64_t entry) { return 1u << (8 + entry % 23); }

static uint64_t our_entry(const struct shmb_ring *ring) { return (uint64_t)(ring->me - ring->entries); }

static void wake(struct shmb_runtime *runtime, uint32_t whom) {
    if (atomic_load_explicit(&runtime->waiters, memory_order_relaxed) == 0) whom &= FOR_THE_OTHER_SIDE;
    if (atomic_load_explicit(&runtime->limited, memory_order_relaxed) == 0) whom &= ~FOR_THE_OTHER_SIDE;
    if (whom == 0) return;
    atomic_fetch_add(&runtime->progress, 1);
    CP(wake_progress);
    syscall(SYS_futex, &runtime->progress, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, whom);
}

/* Called after unlocking by a process that changed what waiters wait for. If the process dies before this call, they
 * sleep until their slice of a few milliseconds ends. */
void shmb_wake_waiters(struct shmb_runtime *runtime) { wake(runtime, FUTEX_BITSET_MATCH_ANY); }

/* The same after only our claim has ended. */
void shmb_wake_behind(struct shmb_ring *ring) {
    wake(ring->runtime, for_claim_of(our_entry(ring)) | FOR_THE_OTHER_SIDE);
}

/* After our turn was returned. */
void shmb_wake_in_turn(struct shmb_ring *ring, uint32_t entry) {
    if (__builtin_expect(entry < SHMB_ENTRIES, 0)) wake(ring->runtime, for_turn_of(entry));
}

/* Sleeps until the reason of this thread's last refusal may have ended, at most `timeout_ns`. */
int shmb_wait_progress(struct shmb_ring *ring, uint32_t seen, int64_t timeout_ns) {
    uint32_t what = shmb_refusal.why != SHMB_SLOT_IS_TAKEN ? FOR_THE_OTHER_SIDE
                    : shmb_refusal.blocker.by_turn          ? for_turn_of(our_entry(ring))
                                                            : for_claim_of(shmb_refusal.blocker.entry);
    int64_t end_ns = shmb_now_ns() + timeout_ns; /* FUTEX_WAIT_BITSET takes an absolute time */
    struct timespec end = {end_ns / 1000000000, end_ns % 1000000000};
    return (int)syscall(SYS_futex, &ring->runtime->progress, FUTEX_WAIT_BITSET, seen, &end, NULL, what);
}
