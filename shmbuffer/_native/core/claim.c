/* The beginning of a claim, W1 to W8: which slots it takes, and what must be true before. The numbers of the steps
 * are those of tests/model/writing.py. */
#include <math.h>
#include <stdlib.h>

#include "core/claimed.h"
#include "core/flow.h"

static bool make_room(struct shmb_ring *ring, uint64_t rows) {
    if (rows <= ring->scratch_rows) return true;
    uint64_t elements = rows * ring->lanes;
    int64_t *slots = realloc(ring->claim_slots, rows * sizeof *slots);
    if (slots) ring->claim_slots = slots;
    double *masses = realloc(ring->masses, elements * sizeof *masses);
    if (masses) ring->masses = masses;
    uint64_t *touched = realloc(ring->touched, elements * sizeof *touched);
    if (touched) ring->touched = touched;
    int64_t *from = ring->bytes ? realloc(ring->claim_from, rows * sizeof *from) : ring->claim_from;
    if (from) ring->claim_from = from;
    if (!slots || !masses || !touched || (ring->bytes && !from)) return false;
    ring->scratch_rows = rows;
    return true;
}

static inline bool is_marked(const struct shmb_ring *ring, uint64_t slot) {
    return SHMB_STATE(atomic_load_explicit(&ring->words[slot], memory_order_relaxed)) == SHMB_WRITING;
}

/* Describes the claim, for a buffer that stores observations once. */
struct claim_plan {
    const struct shmb_rows *rows; /* NULL: a write to named slots */
    uint64_t count;
    const uint32_t *streams;
    bool keeps;
};

static bool is_planned(struct shmb_ring *ring, const struct claim_plan *wanted) {
    if (ring->plan == NULL || wanted == NULL) return true;
    if (wanted->rows == NULL) return shmb_plan_slots(ring, wanted->count, wanted->keeps);
    return shmb_plan_rows(ring, wanted->rows, wanted->count, wanted->streams);
}

/* A claim that is still open was never committed, or its commit was reported as failed. It is aborted first. */
static int begin_claim(struct shmb_ring *ring, struct shmb_call *call, uint64_t rows, const struct claim_plan *wanted) {
    int status = shmb_gate_enter(ring, call, SHMB_FOR_EVER);
    if (status != SHMB_OK) return status;
    bool has_room = is_planned(ring, wanted) && (ring->claimed || make_room(ring, rows));
    status = has_room ? shmb_lock(ring, call) : SHMB_NO_MEMORY;
    if (status != SHMB_OK) goto refused;
    CP(write_locked);
    if (ring->claimed) {
        shmb_abort_claim(ring);
        if (!make_room(ring, rows)) {
            status = SHMB_NO_MEMORY;
            shmb_unlock(ring);
            goto refused;
        }
    }
    bool closed = atomic_load(&ring->runtime->state) >= (uint32_t)SHMB_CLOSING;
    status = !shmb_is_ours(ring) ? SHMB_FENCED : closed ? SHMB_CLOSED : SHMB_OK;
    if (status == SHMB_OK) return SHMB_OK;
    shmb_unlock(ring);
refused:
    shmb_gate_leave(ring);
    return status;
}

static bool has_tickets(uint64_t head, uint64_t count) {
    return head <= SHMB_LAST_TICKET && count <= SHMB_LAST_TICKET - head;
}

static int end_without_claim(struct shmb_ring *ring, int status) {
    shmb_unlock(ring);
    shmb_gate_leave(ring);
    return status;
}

static int end_as_damaged(struct shmb_ring *ring) {
    shmb_refusal.bad_at = SHMB_NO_SLOT;
    return end_without_claim(ring, SHMB_DAMAGED);
}

/* Stores sources and default priorities in slots that say WRITING. NAN stands for the default. `streams` has one
 * entry per row; NULL: stream 0. */
static inline __attribute__((always_inline)) void store_run(struct shmb_ring *ring, struct shmb_claimed claimed, struct shmb_slot_run run,
                                                           const uint32_t *streams) {
    uint64_t *sources = ring->sources + run.slot;
    double *raw = ring->raw + run.slot * claimed.lanes, unknown = NAN;
    /* 0: shmb_store_nexts has stored the sources */
    const uint64_t rows = ring->plan && claimed.slots == NULL ? 0 : run.rows, elements = run.rows * claimed.lanes;
#pragma GCC unroll 4
    for (uint64_t row = 0; row < rows; row++) {
        /* other end: note_moment */
        __atomic_store_n(&sources[row], shmb_source(ring->incarnation, streams ? streams[row] : 0), __ATOMIC_RELAXED);
        CP_ROW(claimed.armed, write_source);
    }
#pragma GCC unroll 4
    for (uint64_t e = 0; e < elements; e++) {
        __atomic_store(&raw[e], &unknown, __ATOMIC_RELAXED); /* other end: masses_stay_finite */
        CP_ROW(claimed.armed, write_raw);
    }
}

/* W9 of a ring write, without a lock. Source and priority of a slot belong to the writer until its word says
 * COMMITTED. */
static inline __attribute__((always_inline)) void store_rows(struct shmb_ring *ring, struct shmb_claimed claimed, const uint32_t *streams) {
    for (uint64_t row = 0; row < claimed.rows;) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, row, claimed.rows);
        store_run(ring, claimed, run, streams ? streams + row : NULL);
        row += run.rows;
    }
}

struct marked {
    uint64_t claimed_slots, removed_items; /* taken: slots; gone: items that were in them */
    bool had_masses;        /* some of those items had a mass */
};

static inline __attribute__((always_inline)) void mark_run(struct shmb_ring *ring, struct shmb_claimed claimed, struct shmb_slot_run run,
                                                           bool prioritized, struct marked *marked) {
    bool in_place = claimed.slots && ring->claim_kind == SHMB_IN_PLACE;
    double *mass = ring->tree.mass + run.slot * claimed.lanes;
    _Atomic uint64_t *words = ring->words + run.slot;
    for (uint64_t row = 0; row < run.rows; row++) {
        uint64_t old = atomic_load_explicit(&words[row], memory_order_relaxed), writing = SHMB_WORD(run.ticket + row, SHMB_WRITING);
        bool committed = SHMB_STATE(old) == SHMB_COMMITTED;
        if (claimed.slots && old == writing) return; /* the slot was named twice: the last row wins */
        atomic_store_explicit(&words[row], writing, memory_order_release);
        CP_ROW(claimed.armed, write_mark);
        marked->removed_items += committed;
        if (claimed.slots && !(in_place && committed)) store_run(ring, claimed, run, NULL); /* the run has one row */
        for (uint64_t e = row * claimed.lanes, end = e + claimed.lanes; e < end; e++) {
            if (prioritized && mass[e] != 0) {
                mass[e] = 0;
                marked->had_masses = true;
                CP_ROW(claimed.armed, write_mass);
            }
        }
    }
    marked->claimed_slots += run.rows;
}

static inline __attribute__((always_inline)) struct marked mark_rows(struct shmb_ring *ring, struct shmb_claimed claimed,
                                                                     bool prioritized) {
    struct marked marked = {0, 0, false};
    for (uint64_t row = 0; row < claimed.rows;) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, row, claimed.rows);
        mark_run(ring, claimed, run, prioritized, &marked);
        row += run.rows;
    }
    return marked;
}

/* W2 to W8. The mutex is held on entry, and released here. `elements` is the increase of write_count. `streams` has
 * one entry per row; NULL: stream 0. */
static void open_claim(struct shmb_ring *ring, uint64_t first, uint64_t count, uint64_t elements, const uint32_t *streams) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_entry *me = ring->me;
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    ring->claim_first = first;
    ring->claim_slot = first % ring->capacity;
    ring->claim_count = count;
    if (ring->claim_reservation) shmb_claim_reservation(ring, ring->claim_reservation);
    if (elements) shmb_begin_pending(ring, elements);
    me->kind = ring->claim_kind;
    CP(write_kind);
    atomic_store_explicit(&me->first, first, memory_order_release);
    CP(write_first);
    atomic_store_explicit(&me->count, count, memory_order_release);
    CP(write_noted);
    atomic_store_explicit(&me->phase, SHMB_MARKING, memory_order_release);
    CP(write_marking);
    atomic_store_explicit(&runtime->head, first + count, memory_order_release);
    CP(write_head);
    uint32_t next = shmb_return_turn(ring);
    ring->claim_checked = false;
    const struct shmb_claimed claimed = shmb_claimed(ring);
    const struct marked marked = SHMB_FOR_CLAIMED(claimed, mark_rows(ring, claimed, prioritized));
    ring->claim_slot_count = marked.claimed_slots;
    if (ring->plan) shmb_store_nexts(ring);
    uint64_t length = atomic_load_explicit(&runtime->length, memory_order_relaxed);
    atomic_store_explicit(&runtime->length, length - marked.removed_items, memory_order_relaxed); /* a repair counts again */
    CP(write_length);
    if (ring->bytes) shmb_claim_bytes(ring);
    if (marked.had_masses) shmb_claim_parents(ring);
    CP(write_claim_parents);
    atomic_store_explicit(&me->phase, SHMB_PAYLOAD, memory_order_release);
    CP(write_payload);
    shmb_unlock(ring);
    atomic_thread_fence(SYNC_SLOT_CLAIM_RELEASE); /* the words say WRITING before any byte of the payload changes */
    ring->claimed = true;
    CP(write_claimed);
    shmb_wake_turn(ring, next);
    if (claimed.slots == NULL) SHMB_FOR_CLAIMED(claimed, store_rows(ring, claimed, streams));
}

/* Decides whether the prepared claim may be opened: it must be within the limits, or use a reservation, and then its
 * items must not be too old at their places. */
static int admit(struct shmb_ring *ring, uint64_t rows, uint64_t elements) {
    const struct shmb_request request = {.rows = rows, .elements = elements, .bytes = ring->bytes ? ring->claim_bytes : 0, .reservation = ring->claim_reservation};
    ring->claim_passes = false;
    if (__builtin_expect(ring->claim_reservation != NULL, 0)) {
        ring->claim_place = atomic_load_explicit(&ring->runtime->write_count, memory_order_relaxed) +
                            atomic_load_explicit(&ring->runtime->pending, memory_order_relaxed);
        if (!shmb_is_claim_fresh(ring)) return SHMB_TOO_OLD;
    }
    return shmb_is_limited(ring) || shmb_is_consumed(ring) ? shmb_admit_insert(ring, &request, &ring->claim_passes) : SHMB_OK;
}

static bool is_blocked(struct shmb_ring *ring, uint64_t slot, uint64_t rows) {
    for (uint64_t end = slot + rows; slot < end; slot++)
        if (is_marked(ring, slot) && shmb_is_being_written(ring, slot)) return true;
    return false;
}

/* Returns the turn, so that other writers do not wait behind one that waits for the other side. */
static int end_limited(struct shmb_ring *ring, int status) {
    uint32_t next = shmb_return_turn(ring);
    status = end_without_claim(ring, status);
    shmb_wake_turn(ring, next);
    return status;
}

/* If there are too few own rows, the write waits while other clients are writing, because they may release some. */
static int end_without_wholes(struct shmb_ring *ring, int status) {
    bool waits = status == SHMB_NO_OWN_ROWS && shmb_others_are_writing(ring);
    return end_without_claim(ring, waits ? SHMB_BLOCKED : status);
}

static int claim_ring(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_batch *batch,
                      const struct shmb_rows *payload, const uint32_t *streams, uint64_t *first) {
    uint64_t rows = count < ring->capacity ? count : ring->capacity;
    const struct claim_plan wanted = {payload, count, streams, false};
    int status = begin_claim(ring, call, rows, &wanted);
    if (status != SHMB_OK) return status;
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    uint64_t ticket = head + (count - rows); /* of a batch larger than the ring only the last items are kept */
    if (!has_tickets(head, count)) return end_without_claim(ring, SHMB_NO_TICKETS);
    if (batch && !shmb_is_valid_span(ring)) return end_as_damaged(ring);
    uint64_t slot = ticket % ring->capacity, left = ring->capacity - slot, before = rows < left ? rows : left;
    bool blocked = shmb_waits_behind_a_turn(ring) || is_blocked(ring, slot, before) || is_blocked(ring, 0, rows - before);
    ring->claim_kind = SHMB_RING_WRITE;
    ring->claim_rows = rows;
    ring->claim_skipped = count - rows;
    if (batch) ring->claim_batch = *batch;
    blocked = blocked || (batch && shmb_bytes_are_being_written(ring));
    if (blocked) return end_without_claim(ring, SHMB_BLOCKED);
    status = shmb_check_reservation(ring, count, batch ? ring->claim_bytes : 0);
    if (status != SHMB_OK) return end_without_claim(ring, status);
    /* other claims must leave the reserved slots free */
    const uint64_t end = slot + rows + (ring->claim_reservation ? 0 : shmb_read_reserved(ring));
    if (shmb_is_unallocated(ring, end)) return end_limited(ring, SHMB_UNALLOCATED);
    if (ring->plan && (status = shmb_claim_own_rows(ring, ticket)) != SHMB_OK) return end_without_wholes(ring, status);
    ring->claim_written = count * ring->lanes;
    if ((status = admit(ring, count, ring->claim_written)) != SHMB_OK) return end_limited(ring, status);
    open_claim(ring, ticket, rows, ring->claim_written, streams ? streams + (count - rows) : NULL);
    *first = head;
    return SHMB_OK;
}

int shmb_claim_ring(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_batch *batch,
                    const uint32_t *streams, uint64_t *first) {
    static const struct shmb_rows unknown = {NULL, NULL};
    return claim_ring(ring, call, count, batch, &unknown, streams, first);
}

/* For a buffer that stores observations once: equal observations in `rows` are stored only once. */
int shmb_claim_rows(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_rows *rows,
                    const uint32_t *streams, uint64_t *first) {
    return claim_ring(ring, call, count, NULL, rows, streams, first);
}

/* If `tickets` is given, only slots that still hold the items of these tickets are claimed. accepted[i] tells which, and
 * `claimed_slots` counts them. If there are none, no claim is open afterwards, and the gate is free. */
int shmb_claim_slots(struct shmb_ring *ring, struct shmb_call *call, const int64_t *slots, uint64_t count,
                     int in_place, const int64_t *tickets, unsigned char *accepted, const struct shmb_batch *batch,
                     uint64_t *claimed_slots) {
    *claimed_slots = 0;
    const struct claim_plan wanted = {NULL, count, NULL, in_place == SHMB_KEEPS_OBSERVATIONS};
    int status = begin_claim(ring, call, count, &wanted);
    if (status != SHMB_OK) return status;
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed), rows = 0, end = 0;
    if (!has_tickets(head, ring->capacity)) return end_without_claim(ring, SHMB_NO_TICKETS);
    if (batch && !shmb_is_valid_span(ring)) return end_as_damaged(ring);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = atomic_load_explicit(&ring->words[slots[i]], memory_order_relaxed);
        bool fits = tickets == NULL || word == SHMB_WORD((uint64_t)tickets[i], SHMB_COMMITTED);
        if (tickets) accepted[i] = fits;
        if (fits && (uint64_t)slots[i] >= end) end = (uint64_t)slots[i] + 1;
        if (fits && batch) ring->claim_from[rows] = (int64_t)i;
        if (fits) ring->claim_slots[rows++] = slots[i];
    }
    ring->claim_rows = rows;
    if (rows == 0 && tickets) return end_without_claim(ring, SHMB_OK);
    bool blocked = shmb_waits_behind_a_turn(ring);
    for (uint64_t row = 0; !blocked && row < rows; row++) blocked = is_blocked(ring, (uint64_t)ring->claim_slots[row], 1);
    ring->claim_kind = in_place ? SHMB_IN_PLACE : SHMB_PLACED;
    if (batch) ring->claim_batch = *batch;
    blocked = blocked || (batch && shmb_bytes_are_being_written(ring));
    if (blocked) return end_without_claim(ring, SHMB_BLOCKED);
    status = shmb_check_reservation(ring, rows, batch ? ring->claim_bytes : 0);
    if (status != SHMB_OK) return end_without_claim(ring, status);
    if (shmb_is_unallocated(ring, end)) return end_limited(ring, SHMB_UNALLOCATED);
    if (in_place) ring->claim_reservation = NULL; /* a write in place adds no items */
    if (ring->plan && (status = shmb_unlink_slots(ring)) != SHMB_OK) return end_without_wholes(ring, status);
    ring->claim_written = in_place ? 0 : rows * ring->lanes;
    if ((status = admit(ring, 0, ring->claim_written)) != SHMB_OK) return end_limited(ring, status);
    *claimed_slots = rows;
    open_claim(ring, head, ring->capacity, ring->claim_written, NULL);
    ring->claim_written = in_place ? 0 : ring->claim_slot_count * ring->lanes;
    return SHMB_OK;
}

/* If the head jumps, the order in which slots are overwritten changes. Links of an open claim could not be checked
 * then, so other claims must end first. */
static bool must_wait(struct shmb_ring *ring) {
    if (ring->plan == NULL) return false;
    if (shmb_others_are_writing(ring)) return true;
    shmb_return_turn(ring);
    return false;
}

int shmb_empty(struct shmb_ring *ring, struct shmb_call *call, bool keep_write_count) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_entry *me = ring->me;
    int status = begin_claim(ring, call, 0, NULL);
    if (status != SHMB_OK) return status;
    CP(empty_locked);
    if (must_wait(ring)) return end_without_claim(ring, SHMB_BLOCKED);
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed);
    uint64_t count = (ring->capacity - head % ring->capacity) % ring->capacity;
    if (!has_tickets(head, count)) return end_without_claim(ring, SHMB_NO_TICKETS);
    atomic_store_explicit(&me->first, head, memory_order_release);
    CP(empty_first);
    atomic_store_explicit(&me->count, count, memory_order_release);
    CP(empty_span);
    atomic_store_explicit(&me->goal, keep_write_count ? atomic_load(&runtime->write_count) : 0, memory_order_release);
    CP(empty_noted);
    atomic_store_explicit(&me->phase, SHMB_EMPTYING, memory_order_release);
    CP(empty_emptying);
    shmb_finish_claim(ring, me);
    if (atomic_load_explicit(&runtime->prioritized, memory_order_relaxed)) shmb_tree_range(&ring->tree, 0, (head < ring->capacity ? head : ring->capacity) * ring->lanes);
    CP(empty_parents);
    atomic_store_explicit(&me->phase, SHMB_IDLE, memory_order_release);
    CP(empty_idle);
    shmb_unlock(ring);
    CP(empty_unlocked);
    shmb_wake_waiters(runtime);
    shmb_gate_leave(ring);
    return SHMB_OK;
}

/* True if the head would pass items, which would become the newest ones. Otherwise their order stays the same. */
static bool would_pass_items(const struct shmb_ring *ring, uint64_t head, uint64_t ticket) {
    for (uint64_t left = (ticket - head) % ring->capacity; left > 0; left--) {
        uint64_t word = atomic_load_explicit(&ring->words[(ticket - left) % ring->capacity], memory_order_relaxed);
        if (SHMB_STATE(word) == SHMB_COMMITTED) return true;
    }
    return false;
}

/* Sets the next ticket, the write count and the largest priority of a buffer that was loaded. Tickets only grow. If
 * the wanted ticket is in the past, the head moves to the next ticket of the same slot. Each store is valid by
 * itself. */
int shmb_restore(struct shmb_ring *ring, struct shmb_call *call, uint64_t wanted, uint64_t write_count,
                 double max_priority) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = begin_claim(ring, call, 0, NULL);
    if (status != SHMB_OK) return status;
    if (must_wait(ring)) return end_without_claim(ring, SHMB_BLOCKED);
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed);
    uint64_t ticket = wanted < head ? shmb_ticket_in_lap(head, wanted % ring->capacity, ring->capacity) : wanted;
    if (!has_tickets(head, ticket - head)) return end_without_claim(ring, SHMB_NO_TICKETS);
    if (shmb_read_limits(runtime) & SHMB_QUEUE) return end_without_claim(ring, SHMB_IN_QUEUE);
    if (ring->plan && would_pass_items(ring, head, ticket) && shmb_repair_links(ring, ticket, false))
        return end_without_claim(ring, SHMB_NO_OWN_ROWS);
    atomic_store_explicit(&runtime->head, ticket, memory_order_release);
    CP(restore_head);
    atomic_store_explicit(&runtime->write_count, write_count, memory_order_release);
    CP(restore_count);
    runtime->max_priority = max_priority;
    CP(restore_max_priority);
    shmb_restart_limiter(ring, write_count, atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes);
    return end_without_claim(ring, SHMB_OK);
}
