/* The end of a claim, W10 to W14: its items are committed, or its slots are released. */
#include "core/claimed.h"
#include "core/flow.h"
#include "core/pool.h"
#include "core/power.h"

/* Recomputes the parents of the claim's elements. They are consecutive for a ring write (in two parts around the
 * end), and listed otherwise. */
void shmb_claim_parents(struct shmb_ring *ring) {
    uint64_t lanes = ring->lanes;
    if (ring->claim_kind == SHMB_RING_WRITE) {
        uint64_t slot = ring->claim_slot, left = ring->capacity - slot;
        uint64_t before = ring->claim_rows < left ? ring->claim_rows : left;
        shmb_tree_range(&ring->tree, slot * lanes, before * lanes);
        if (before < ring->claim_rows) shmb_tree_range(&ring->tree, 0, (ring->claim_rows - before) * lanes);
        return;
    }
    uint64_t n = 0;
    for (uint64_t row = 0; row < ring->claim_rows; row++)
        for (uint64_t lane = 0; lane < lanes; lane++)
            ring->touched[n++] = (uint64_t)ring->claim_slots[row] * lanes + lane;
    shmb_tree_update(&ring->tree, ring->touched, n);
}

void shmb_abort_claim(struct shmb_ring *ring) {
    struct shmb_entry *me = ring->me;
    ring->claimed = false;
    if (!shmb_is_ours(ring) || atomic_load_explicit(&me->phase, memory_order_relaxed) != SHMB_PAYLOAD) return;
    for (uint64_t row = 0; row < ring->claim_rows; row++) {
        uint64_t aborted = SHMB_WORD(shmb_ticket_of_row(ring, row), SHMB_ABORTED);
        atomic_store_explicit(&ring->words[shmb_slot_of_row(ring, row)], aborted, memory_order_release);
        CP(abort_word);
    }
    atomic_store_explicit(&me->phase, SHMB_IDLE, memory_order_release);
    CP(abort_idle);
    shmb_end_pending(ring, me);
    if (ring->claim_reservation) shmb_reopen_reservation(ring, ring->claim_reservation);
    atomic_fetch_add_explicit(&me->aborts, ring->claim_slot_count * ring->lanes, memory_order_relaxed);
    CP(count_added);
}

/* After a signal handler raised, the caller may never return to this claim, so the abort must not be interrupted. */
static bool never_interrupted(struct shmb_call *call) { return false; }

static int abort_interrupted_claim(struct shmb_ring *ring, struct shmb_call *call) {
    bool (*interrupted)(struct shmb_call *) = call->interrupted;
    call->interrupted = never_interrupted;
    int status = shmb_lock(ring, call);
    if (status == SHMB_OK) {
        shmb_abort_claim(ring);
        shmb_unlock(ring);
        shmb_wake_after_claim(ring);
    }
    call->interrupted = interrupted;
    return status;
}

static void end_claim(struct shmb_ring *ring) {
    ring->claimed = false;
    shmb_gate_leave(ring);
}

struct powers {
    struct shmb_ring *ring;
    _Atomic double greatest;
};

static void compute_row_masses(void *context, uint64_t first, uint64_t end) {
    struct powers *powers = context;
    struct shmb_ring *ring = powers->ring;
    const struct shmb_claimed claimed = shmb_claimed(ring);
    double greatest = -1;
    for (uint64_t row = first; row < end;) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, row, end);
        const double *raw = ring->raw + run.slot * claimed.lanes;
        double *masses = ring->masses + row * claimed.lanes;
        uint64_t count = run.rows * claimed.lanes;
        shmb_masses(ring->runtime, raw, masses, count);
        for (uint64_t n = 0; n < count; n++) masses[n] = raw[n] >= 0 ? masses[n] : 0;
        for (uint64_t n = 0; n < count; n++) greatest = raw[n] > greatest ? raw[n] : greatest;
        row += run.rows;
    }
    double seen = atomic_load_explicit(&powers->greatest, memory_order_relaxed);
    while (greatest > seen && !atomic_compare_exchange_weak(&powers->greatest, &seen, greatest)) continue;
}

/* Masses are powers, which take some nanoseconds each. If the priorities differ, they are computed before locking. */
static double compute_masses(struct shmb_ring *ring) {
    struct powers powers = {ring, -1};
    shmb_divide(compute_row_masses, &powers, ring->claim_rows, ring->lanes * SHMB_POWER_BYTES);
    return powers.greatest;
}

/* False if a mass is too large. The priorities were valid when they were given, but alpha may have changed since. */
static bool are_masses_valid(const struct shmb_ring *ring) {
    double largest = shmb_largest_mass(ring);
    uint64_t count = ring->claim_rows * ring->lanes, at = 0;
    if (shmb_greatest_bits(ring->masses, count) <= bits_of(largest)) return true;
    /* true also for a negative mass, which only damage can cause */
    while (bits_of(ring->masses[at]) <= bits_of(largest)) at++;
    shmb_refusal.bad_at = at + (ring->claim_kind == SHMB_RING_WRITE ? ring->claim_skipped * ring->lanes : 0);
    return false;
}

struct commitment {
    /* prioritized: masses are maintained; mixed: some rows have priorities of their own */
    bool prioritized, mixed;
    double fallback, fallback_mass; /* for the other rows */
};

/* `masses` are those of the run's elements. */
static inline __attribute__((always_inline)) void commit_run(struct shmb_ring *ring, struct shmb_claimed claimed, struct shmb_slot_run run,
                                                             const double *masses, struct commitment with) {
    _Atomic uint64_t *words = ring->words + run.slot;
    double *raw = ring->raw + run.slot * claimed.lanes;
    double *mass = ring->tree.mass + run.slot * claimed.lanes;
    for (uint64_t row = 0; row < run.rows; row++) {
        uint64_t committed = SHMB_WORD(run.ticket + row, SHMB_COMMITTED);
        /* the slot was named twice */
        if (claimed.slots && atomic_load_explicit(&words[row], memory_order_relaxed) == committed) return;
        for (uint64_t e = row * claimed.lanes, end = e + claimed.lanes; with.prioritized && e < end; e++) {
            bool has_own = with.mixed && raw[e] >= 0;
            if (!has_own) raw[e] = with.fallback;
            CP_ROW(claimed.armed, write_default);
            mass[e] = has_own ? masses[e] : with.fallback_mass;
            CP_ROW(claimed.armed, write_leaf);
        }
        atomic_store_explicit(&words[row], committed, SYNC_SLOT_COMMIT_RELEASE); /* the payload is stored before */
        CP_ROW(claimed.armed, write_commit);
    }
}

static inline __attribute__((always_inline)) void commit_rows(struct shmb_ring *ring, struct shmb_claimed claimed,
                                                              struct commitment with) {
    for (uint64_t row = 0; row < claimed.rows;) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, row, claimed.rows);
        commit_run(ring, claimed, run, ring->masses + row * claimed.lanes, with);
        row += run.rows;
    }
}

int shmb_commit(struct shmb_ring *ring, struct shmb_call *call, bool has_priorities) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_entry *me = ring->me;
    const struct shmb_claimed claimed = shmb_claimed(ring);
    shmb_fill_checksums(ring);
    bool mixed = has_priorities || ring->claim_kind == SHMB_IN_PLACE;
    uint64_t version = atomic_load(&runtime->alpha_version);
    double greatest = mixed ? compute_masses(ring) : -1;
    bool masses_valid = !mixed || are_masses_valid(ring);
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) { /* a claim that stays open is rolled back by the handle's next claim, or by a reaper */
        if (status == SHMB_INTERRUPTED) abort_interrupted_claim(ring, call);
        shmb_gate_leave(ring);
        return status;
    }
    CP(write_relocked);
    if (!shmb_is_ours(ring) || atomic_load_explicit(&me->phase, memory_order_relaxed) != SHMB_PAYLOAD) {
        shmb_unlock(ring);
        end_claim(ring);
        return SHMB_FENCED;
    }
    if (mixed && version != atomic_load_explicit(&runtime->alpha_version, memory_order_relaxed)) {
        compute_masses(ring);
        masses_valid = are_masses_valid(ring);
    }
    /* the items were young at the claim; a new version may have been published since */
    bool too_old = __builtin_expect(ring->claim_reservation != NULL, 0) && !shmb_is_claim_fresh(ring);
    if (!masses_valid || too_old) {
        shmb_abort_claim(ring);
        shmb_unlock(ring);
        shmb_wake_after_claim(ring);
        shmb_gate_leave(ring);
        return masses_valid ? SHMB_TOO_OLD : SHMB_BAD_PRIORITY;
    }
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    if (has_priorities && greatest > runtime->max_priority) runtime->max_priority = greatest;
    CP(write_max_priority);
    double fallback = shmb_default_priority(runtime);
    /* a power; not needed if every item has a priority */
    double fallback_mass = prioritized && !has_priorities ? shmb_mass(runtime, fallback) : 0;
    uint64_t goal = atomic_load_explicit(&runtime->write_count, memory_order_relaxed) + ring->claim_written;
    atomic_store_explicit(&me->goal, goal, memory_order_release);
    CP(write_goal);
    bool limited = shmb_is_limited(ring);
    if (limited) shmb_prepare_base(ring);
    if (ring->plan) shmb_store_back_links(ring);
    atomic_store_explicit(&me->phase, SHMB_COMMITTING, memory_order_release);
    CP(write_committing);
    const struct commitment with = {prioritized, mixed, fallback, fallback_mass};
    SHMB_FOR_CLAIMED(claimed, commit_rows(ring, claimed, with));
    uint64_t length = atomic_load_explicit(&runtime->length, memory_order_relaxed);
    atomic_store_explicit(&runtime->length, length + ring->claim_slot_count, memory_order_relaxed);
    CP(write_lengthened);
    if (ring->plan) shmb_store_links(ring);
    if (prioritized) shmb_claim_parents(ring);
    CP(write_commit_parents);
    atomic_store_explicit(&runtime->write_count, goal, memory_order_release);
    CP(write_count);
    if (limited) shmb_set_base(ring);
    if (ring->claim_reservation) {
        shmb_spend_reservation(ring->claim_reservation);
        shmb_selected_reservation.ring = NULL;
    }
    atomic_store_explicit(&me->phase, SHMB_IDLE, memory_order_release);
    CP(write_idle);
    shmb_end_pending(ring, me);
    uint64_t elements = ring->claim_slot_count * ring->lanes;
    if (shmb_bypass == SHMB_PASSES)
        atomic_fetch_add_explicit(&runtime->loaded, elements, memory_order_relaxed);
    else
        atomic_fetch_add_explicit(&me->inserts, elements, memory_order_relaxed);
    CP(count_added);
    shmb_unlock(ring);
    CP(write_done);
    shmb_wake_after_claim(ring);
    end_claim(ring);
    return SHMB_OK;
}

int shmb_abort(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_lock(ring, call);
    if (status == SHMB_OK) {
        CP(abort_locked);
        shmb_abort_claim(ring);
        shmb_unlock(ring);
        shmb_wake_after_claim(ring);
    } else if (status == SHMB_INTERRUPTED) {
        abort_interrupted_claim(ring, call);
    }
    shmb_gate_leave(ring);
    return status;
}
