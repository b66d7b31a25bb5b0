/* Claim, fill, commit, abort: how items get into slots. Steps are named as in memory/slots.py. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "ring.h"

static bool ours(const struct shmb_ring *ring) {
    return atomic_load_explicit(&ring->me->incarnation, memory_order_relaxed) == ring->incarnation &&
           atomic_load_explicit(&ring->me->state, memory_order_relaxed) == SHMB_LIVE;
}

/* Row k of the open claim: its slot and its ticket. A placed write has the tickets of one lap, in which each
 * slot occurs once; a ring write has consecutive ones, not more than there are slots. */
static inline uint64_t slot_of_row(const struct shmb_ring *ring, uint64_t row) {
    if (ring->claim_kind != SHMB_RING_WRITE) return (uint64_t)ring->claim_slots[row];
    uint64_t slot = ring->claim_slot + row;
    return slot < ring->capacity ? slot : slot - ring->capacity;
}

static inline uint64_t ticket_in_lap(uint64_t head, uint64_t slot, uint64_t capacity) {
    return head + (slot + capacity - head % capacity) % capacity;
}

static inline uint64_t ticket_of_row(const struct shmb_ring *ring, uint64_t row) {
    return ring->claim_kind == SHMB_RING_WRITE
               ? ring->claim_first + row
               : ticket_in_lap(ring->claim_first, (uint64_t)ring->claim_slots[row], ring->capacity);
}

uint64_t shmb_slot_of_row(const struct shmb_ring *ring, uint64_t row) { return slot_of_row(ring, row); }
uint64_t shmb_ticket_of_row(const struct shmb_ring *ring, uint64_t row) { return ticket_of_row(ring, row); }

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

/* Parents of the claim's elements: consecutive for a ring write (in two pieces around the end), else listed. */
static void claim_parents(struct shmb_ring *ring) {
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
        for (uint64_t lane = 0; lane < lanes; lane++) ring->touched[n++] = (uint64_t)ring->claim_slots[row] * lanes + lane;
    shmb_tree_touched(&ring->tree, ring->touched, n);
}

static void give_back_turn(struct shmb_ring *ring) {
    if (atomic_load_explicit(&ring->me->turn, memory_order_relaxed) == 0) return;
    atomic_store_explicit(&ring->me->turn, 0, memory_order_release);
    CP(turn_returned);
    atomic_fetch_sub(&ring->runtime->waiters, 1);
    CP(turn_returned);
}

static void take_turn(struct shmb_ring *ring) {
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
    if (by_turn) take_turn(ring);
}

/* W1: somebody with an earlier turn goes first, once he has waited for a while. Before that whoever comes may
 * pass: were turns strict, each write would cost a wake-up as soon as all writers queue, and they would queue for
 * ever. */
#define TURN_COUNTS_FROM_NS 1000000

static bool waits_behind_a_turn(struct shmb_ring *ring) {
    uint64_t mine = atomic_load_explicit(&ring->me->turn, memory_order_relaxed);
    uint64_t earliest = mine ? mine : UINT64_MAX;
    uint32_t entry = SHMB_ENTRIES;
    if (atomic_load_explicit(&ring->runtime->waiters, memory_order_relaxed) <= (mine ? 1u : 0u)) return false;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        uint64_t turn = atomic_load_explicit(&ring->entries[i].turn, memory_order_relaxed);
        if (turn && turn < earliest) earliest = turn, entry = i;
    }
    if (entry == SHMB_ENTRIES) return false;
    uint64_t since = atomic_load_explicit(&ring->entries[entry].turn_ns, memory_order_relaxed);
    if ((uint64_t)shmb_now_ns() - since < TURN_COUNTS_FROM_NS) return false;
    note_blocker(ring, entry, true);
    return true;
}

static inline bool is_marked(const struct shmb_ring *ring, uint64_t slot) {
    return SHMB_STATE(atomic_load_explicit(&ring->words[slot], memory_order_relaxed)) == SHMB_WRITING;
}

/* W1: does an open claim cover this word? A WRITING word that none covers is nobody's and may be taken. */
bool shmb_claim_covers(const struct shmb_ring *ring, uint64_t word, uint32_t *whose) {
    if (__builtin_expect(SHMB_STATE(word) != SHMB_WRITING, 1)) return false;
    for (uint32_t i = 0; i < SHMB_ENTRIES; i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        if (atomic_load_explicit(&entry->phase, memory_order_relaxed) != SHMB_PAYLOAD) continue;
        uint64_t first = atomic_load_explicit(&entry->first, memory_order_relaxed);
        if (SHMB_TICKET(word) - first < atomic_load_explicit(&entry->count, memory_order_relaxed)) {
            if (whose) *whose = i;
            return true;
        }
    }
    return false;
}

bool shmb_is_being_written(struct shmb_ring *ring, uint64_t slot) {
    uint64_t word = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
    uint32_t whose = 0;
    if (__builtin_expect(!shmb_claim_covers(ring, word, &whose), 1)) return false;
    note_blocker(ring, whose, false);
    take_turn(ring);
    return true;
}

static void abort_claim(struct shmb_ring *ring) {
    struct shmb_entry *me = ring->me;
    ring->claimed = false;
    if (!ours(ring) || atomic_load_explicit(&me->phase, memory_order_relaxed) != SHMB_PAYLOAD) return;
    for (uint64_t row = 0; row < ring->claim_rows; row++) {
        atomic_store_explicit(&ring->words[slot_of_row(ring, row)], SHMB_WORD(ticket_of_row(ring, row), SHMB_ABORTED),
                              memory_order_release);
        CP(abort_word);
    }
    atomic_store_explicit(&me->phase, SHMB_IDLE, memory_order_release);
    CP(abort_idle);
    shmb_settle(ring, me);
    atomic_fetch_add_explicit(&me->aborts, ring->claim_slots_taken * ring->lanes, memory_order_relaxed);
    CP(count_added);
}

/* A claim that is still there was never committed, or its commit was reported as failed: its items are absent. */
static int begin_claim(struct shmb_ring *ring, struct shmb_call *call, uint64_t rows) {
    int status = shmb_gate_enter(ring, call, SHMB_FOR_EVER);
    if (status != SHMB_OK) return status;
    status = ring->claimed || make_room(ring, rows) ? shmb_lock(ring, call) : SHMB_NO_MEMORY;
    if (status != SHMB_OK) goto refused;
    CP(write_locked);
    if (ring->claimed) {
        abort_claim(ring);
        if (!make_room(ring, rows)) {
            status = SHMB_NO_MEMORY;
            shmb_unlock(ring);
            goto refused;
        }
    }
    status = !ours(ring)                                                      ? SHMB_FENCED
             : atomic_load(&ring->runtime->state) == (uint32_t)SHMB_CLOSING ? SHMB_CLOSING_STATUS
                                                                              : SHMB_OK;
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

/* After a signal handler raised nobody may ever come back to this claim, so it is given back whatever comes. */
static bool never(struct shmb_call *call) { return false; }

static int give_claim_back(struct shmb_ring *ring, struct shmb_call *call) {
    bool (*interrupted)(struct shmb_call *) = call->interrupted;
    call->interrupted = never;
    int status = shmb_lock(ring, call);
    if (status == SHMB_OK) {
        abort_claim(ring);
        shmb_unlock(ring);
        shmb_wake_waiters(ring->runtime);
    }
    call->interrupted = interrupted;
    return status;
}

/* W2 to W8. The mutex is held; it is released here. write_count is to grow by so many elements. */
static void open_claim(struct shmb_ring *ring, uint64_t first, uint64_t count, uint64_t elements) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_entry *me = ring->me;
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0, unmassed = false;
    ring->claim_first = first;
    ring->claim_slot = first % ring->capacity;
    ring->claim_count = count;
    if (elements) shmb_promise(ring, elements);
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
    give_back_turn(ring);
    ring->claim_slots_taken = 0;
    ring->claim_checked = false;
    uint64_t gone = 0;
    for (uint64_t row = 0; row < ring->claim_rows; row++) {
        uint64_t slot = slot_of_row(ring, row), writing = SHMB_WORD(ticket_of_row(ring, row), SHMB_WRITING);
        uint64_t old = atomic_load_explicit(&ring->words[slot], memory_order_relaxed);
        bool committed = SHMB_STATE(old) == SHMB_COMMITTED;
        if (old == writing) continue; /* named twice: the last row wins */
        ring->claim_slots_taken++;
        atomic_store_explicit(&ring->words[slot], writing, memory_order_release);
        CP(write_mark);
        bool stays = ring->claim_kind == SHMB_IN_PLACE && committed; /* the item: its source and its priority too */
        gone += committed;
        if (!stays) ring->sources[slot] = ring->incarnation;
        CP(write_source);
        for (uint64_t e = slot * ring->lanes, end = e + ring->lanes; e < end; e++) {
            if (!stays) ring->raw[e] = NAN; /* the default, unless given */
            CP(write_raw);
            if (prioritized && ring->tree.mass[e] != 0) {
                ring->tree.mass[e] = 0;
                unmassed = true;
                CP(write_unmassed);
            }
        }
    }
    atomic_fetch_sub_explicit(&runtime->length, gone, memory_order_relaxed); /* a repair counts anew */
    CP(write_length);
    if (ring->bytes) shmb_take_bytes(ring);
    if (unmassed) claim_parents(ring);
    CP(write_claim_parents);
    atomic_store_explicit(&me->phase, SHMB_PAYLOAD, memory_order_release);
    CP(write_payload);
    shmb_unlock(ring);
    /* SYNC slot-claim: the words must say WRITING before a byte of payload changes. Other end: still_holds. */
    atomic_thread_fence(memory_order_release);
    ring->claimed = true;
    CP(write_claimed);
}

/* Nobody has to wait behind who waits for the other side. */
static int end_limited(struct shmb_ring *ring, int status) {
    give_back_turn(ring);
    return end_without_claim(ring, status);
}

static inline bool is_limited(const struct shmb_ring *ring) {
    return __builtin_expect(atomic_load_explicit(&ring->runtime->limiter_version, memory_order_relaxed) != 0, 0);
}

int shmb_claim_ring(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_batch *batch,
                    uint64_t *first) {
    uint64_t rows = count < ring->capacity ? count : ring->capacity;
    int status = begin_claim(ring, call, rows);
    if (status != SHMB_OK) return status;
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    uint64_t ticket = head + (count - rows); /* of more items than slots only the last stay */
    if (!has_tickets(head, count)) return end_without_claim(ring, SHMB_NO_TICKETS);
    if (batch && !shmb_span_in_order(ring)) return end_as_damaged(ring);
    bool blocked = waits_behind_a_turn(ring);
    for (uint64_t row = 0, slot = ticket % ring->capacity; !blocked && row < rows; row++) {
        blocked = is_marked(ring, slot) && shmb_is_being_written(ring, slot);
        slot = slot + 1 < ring->capacity ? slot + 1 : 0;
    }
    ring->claim_kind = SHMB_RING_WRITE;
    ring->claim_rows = rows;
    ring->claim_skipped = count - rows;
    if (batch) ring->claim_batch = *batch;
    blocked = blocked || (batch && shmb_bytes_are_being_written(ring));
    if (blocked) return end_without_claim(ring, SHMB_BLOCKED);
    ring->claim_written = count * ring->lanes;
    if (is_limited(ring) && (status = shmb_admit_insert(ring, count, ring->claim_written)) != SHMB_OK)
        return end_limited(ring, status);
    open_claim(ring, ticket, rows, ring->claim_written);
    *first = head;
    return SHMB_OK;
}

/* With `tickets` only slots that still hold the item of that ticket are taken: kept[i] says which, `taken` how many
 * rows. None of them: no claim is open afterwards, and the gate is another thread's to enter. */
int shmb_claim_slots(struct shmb_ring *ring, struct shmb_call *call, const int64_t *slots, uint64_t count,
                     bool in_place, const int64_t *tickets, unsigned char *kept, const struct shmb_batch *batch,
                     uint64_t *taken) {
    *taken = 0;
    int status = begin_claim(ring, call, count);
    if (status != SHMB_OK) return status;
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed), rows = 0;
    if (!has_tickets(head, ring->capacity)) return end_without_claim(ring, SHMB_NO_TICKETS);
    if (batch && !shmb_span_in_order(ring)) return end_as_damaged(ring);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = atomic_load_explicit(&ring->words[slots[i]], memory_order_relaxed);
        bool take = tickets == NULL || word == SHMB_WORD((uint64_t)tickets[i], SHMB_COMMITTED);
        if (tickets) kept[i] = take;
        if (take && batch) ring->claim_from[rows] = (int64_t)i;
        if (take) ring->claim_slots[rows++] = slots[i];
    }
    ring->claim_rows = rows;
    if (rows == 0 && tickets) return end_without_claim(ring, SHMB_OK);
    bool blocked = waits_behind_a_turn(ring);
    for (uint64_t row = 0; !blocked && row < rows; row++) blocked = shmb_is_being_written(ring, (uint64_t)ring->claim_slots[row]);
    ring->claim_kind = in_place ? SHMB_IN_PLACE : SHMB_PLACED;
    if (batch) ring->claim_batch = *batch;
    blocked = blocked || (batch && shmb_bytes_are_being_written(ring));
    if (blocked) return end_without_claim(ring, SHMB_BLOCKED);
    uint64_t elements = in_place ? 0 : rows * ring->lanes;
    if (is_limited(ring) && (status = shmb_admit_insert(ring, 0, elements)) != SHMB_OK) return end_limited(ring, status);
    *taken = rows;
    open_claim(ring, head, ring->capacity, elements);
    ring->claim_written = in_place ? 0 : ring->claim_slots_taken * ring->lanes;
    return SHMB_OK;
}

#define SIDE_BY_SIDE 32 /* rows whose checksums are computed at the same time */

/* Over salt, ticket and bytes of each row. */
static void begin_checksums(const struct shmb_ring *ring, const uint64_t *tickets, uint64_t rows, uint32_t *crc) {
    const unsigned char *at[SIDE_BY_SIDE];
    for (uint64_t row = 0; row < rows; row++) {
        crc[row] = ring->salt;
        at[row] = (const unsigned char *)&tickets[row];
    }
    shmb_crc32c_rows(crc, at, rows, sizeof *tickets);
}

static void add_to_checksums(const struct shmb_ring *ring, unsigned leaf, const uint64_t *slots, uint64_t rows, uint32_t *crc) {
    const unsigned char *at[SIDE_BY_SIDE];
    uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
    for (uint64_t row = 0; row < rows; row++) at[row] = ring->leaves[leaf].base + slots[row] * bytes;
    shmb_crc32c_rows(crc, at, rows, bytes);
}

static void checksums_of(const struct shmb_ring *ring, const uint64_t *slots, const uint64_t *tickets, uint64_t rows,
                         uint32_t *crc) {
    begin_checksums(ring, tickets, rows, crc);
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) add_to_checksums(ring, leaf, slots, rows, crc);
}

uint32_t shmb_row_checksum(const struct shmb_ring *ring, uint64_t slot, uint64_t ticket) {
    uint32_t crc;
    checksums_of(ring, &slot, &ticket, 1, &crc);
    if (ring->bytes) {
        struct shmb_extent extent = ring->extents[slot];
        if (!shmb_extent_in_order(ring, extent)) return ~ring->checksums[slot];
        crc = shmb_crc32c(crc, shmb_record_at(ring, extent.position), extent.bytes);
    }
    return crc;
}

/* Long rows of a leaf that no cache holds: what is written there has gone to memory before it is read. */
#define LONG_ROW 1024
#define LARGE_LEAF (64u << 20)

static bool is_moved_past_the_cache(const struct shmb_ring *ring, unsigned leaf) {
    uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
    return bytes >= LONG_ROW && bytes % SHMB_MOVED_LINE == 0 && bytes * ring->capacity >= LARGE_LEAF;
}

/* W9 of a ring write with such leaves: the checksums come with the bytes. */
static void fill_and_check(struct shmb_ring *ring, const unsigned char *const *sources, uint64_t skip_rows) {
    uint64_t slots[4], tickets[4], rows;
    uint32_t crc[4];
    for (uint64_t first = 0; first < ring->claim_rows; first += rows) {
        uint64_t slot = slot_of_row(ring, first), left = ring->capacity - slot;
        rows = ring->claim_rows - first < 4 ? ring->claim_rows - first : 4;
        rows = rows < left ? rows : left;
        for (uint64_t row = 0; row < rows; row++) {
            slots[row] = slot + row;
            tickets[row] = ticket_of_row(ring, first + row);
        }
        begin_checksums(ring, tickets, rows, crc);
        for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
            uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
            const unsigned char *from = sources[leaf] + (skip_rows + first) * bytes;
            unsigned char *to = ring->leaves[leaf].base + slot * bytes;
            if (bytes == 0) continue;
            if (rows == 4 && is_moved_past_the_cache(ring, leaf)) {
                shmb_crc32c_move(to, from, bytes, crc);
                CP(write_copy);
            } else {
                memcpy(to, from, rows * bytes);
                CP(write_copy);
                add_to_checksums(ring, leaf, slots, rows, crc);
            }
        }
        for (uint64_t row = 0; row < rows; row++) {
            ring->checksums[slots[row]] = crc[row];
            CP(write_checksum);
        }
    }
    ring->claim_checked = true;
}

/* W9: no lock is held; the slots are ours. `sources` has one address a leaf, of its first row; of a batch
 * larger than the ring the first `skip_rows` are left out. */
void shmb_fill(struct shmb_ring *ring, const unsigned char *const *sources, uint64_t skip_rows) {
    if (ring->claim_rows == 0) return;
    for (unsigned leaf = 0; ring->checksum && ring->claim_kind == SHMB_RING_WRITE && leaf < ring->n_leaves; leaf++)
        if (is_moved_past_the_cache(ring, leaf)) return fill_and_check(ring, sources, skip_rows);
    uint64_t slot = slot_of_row(ring, 0), left = ring->capacity - slot;
    uint64_t before = ring->claim_rows < left ? ring->claim_rows : left;
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
        uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
        unsigned char *base = ring->leaves[leaf].base;
        const unsigned char *from = sources[leaf] + skip_rows * bytes;
        if (bytes == 0) continue;
        if (ring->claim_kind == SHMB_RING_WRITE) {
            memcpy(base + slot * bytes, from, before * bytes);
            CP(write_copy);
            if (before == ring->claim_rows) continue;
            memcpy(base, from + before * bytes, (ring->claim_rows - before) * bytes);
            CP(write_copy);
        } else {
            for (uint64_t row = 0; row < ring->claim_rows; row++) {
                memcpy(base + (uint64_t)ring->claim_slots[row] * bytes, from + row * bytes, bytes);
                CP(write_copy);
            }
        }
    }
}

void shmb_fill_priorities(struct shmb_ring *ring, const double *priorities, uint64_t skip_rows) {
    const double *from = priorities + skip_rows * ring->lanes;
    for (uint64_t row = 0; row < ring->claim_rows; row++)
        for (uint64_t e = slot_of_row(ring, row) * ring->lanes, end = e + ring->lanes; e < end; e++, from++) {
            __atomic_store(&ring->raw[e], from, __ATOMIC_RELAXED); /* other end: masses_stay_finite */
            CP(write_priority);
        }
}

static void fill_checksums(struct shmb_ring *ring) {
    uint64_t slots[SIDE_BY_SIDE], tickets[SIDE_BY_SIDE], most = ring->bytes ? 1 : SIDE_BY_SIDE;
    uint32_t crc[SIDE_BY_SIDE];
    for (uint64_t first = 0, rows; ring->checksum && !ring->claim_checked && first < ring->claim_rows; first += rows) {
        rows = ring->claim_rows - first < most ? ring->claim_rows - first : most;
        for (uint64_t row = 0; row < rows; row++) {
            slots[row] = slot_of_row(ring, first + row);
            tickets[row] = ticket_of_row(ring, first + row);
        }
        if (ring->bytes)
            crc[0] = shmb_row_checksum(ring, slots[0], tickets[0]);
        else
            checksums_of(ring, slots, tickets, rows, crc);
        for (uint64_t row = 0; row < rows; row++) {
            ring->checksums[slots[row]] = crc[row];
            CP(write_checksum);
        }
    }
}

static void end_claim(struct shmb_ring *ring) {
    ring->claimed = false;
    shmb_gate_leave(ring);
}

/* Masses are powers, 20 to 50 ns each: computed before locking where priorities differ. */
static double masses_of_given(struct shmb_ring *ring) {
    double greatest = -1;
    for (uint64_t row = 0, n = 0; row < ring->claim_rows; row++)
        for (uint64_t e = slot_of_row(ring, row) * ring->lanes, end = e + ring->lanes; e < end; e++, n++) {
            double raw = ring->raw[e];
            ring->masses[n] = raw >= 0 ? shmb_mass(ring->runtime, raw) : 0;
            greatest = raw > greatest ? raw : greatest;
        }
    return greatest;
}

/* They were when the priorities were given; but alpha may have changed since. */
static bool masses_in_order(const struct shmb_ring *ring) {
    for (uint64_t n = 0; n < ring->claim_rows * ring->lanes; n++)
        if (!(ring->masses[n] <= shmb_largest_mass(ring))) {
            shmb_refusal.bad_at = n + (ring->claim_kind == SHMB_RING_WRITE ? ring->claim_skipped * ring->lanes : 0);
            return false;
        }
    return true;
}

int shmb_commit(struct shmb_ring *ring, struct shmb_call *call, bool given) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_entry *me = ring->me;
    fill_checksums(ring);
    bool mixed = given || ring->claim_kind == SHMB_IN_PLACE;
    uint64_t version = atomic_load(&runtime->alpha_version);
    double greatest = mixed ? masses_of_given(ring) : -1;
    bool in_order = !mixed || masses_in_order(ring);
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) { /* if it stays even so, the next one of this handle, or a reaper, rolls it back */
        if (status == SHMB_INTERRUPTED) give_claim_back(ring, call);
        shmb_gate_leave(ring);
        return status;
    }
    CP(write_relocked);
    if (!ours(ring) || atomic_load_explicit(&me->phase, memory_order_relaxed) != SHMB_PAYLOAD) {
        shmb_unlock(ring);
        end_claim(ring);
        return SHMB_FENCED;
    }
    if (mixed && version != atomic_load_explicit(&runtime->alpha_version, memory_order_relaxed)) {
        masses_of_given(ring);
        in_order = masses_in_order(ring);
    }
    if (!in_order) {
        abort_claim(ring);
        shmb_unlock(ring);
        shmb_wake_waiters(runtime);
        shmb_gate_leave(ring);
        return SHMB_BAD_PRIORITY;
    }
    bool prioritized = atomic_load_explicit(&runtime->prioritized, memory_order_relaxed) != 0;
    if (given && greatest > runtime->max_priority) runtime->max_priority = greatest;
    CP(write_max_priority);
    double fallback = shmb_default_priority(runtime);
    double fallback_mass = prioritized && !given ? shmb_mass(runtime, fallback) : 0; /* a power; of given ones none needs it */
    uint64_t goal = atomic_load_explicit(&runtime->write_count, memory_order_relaxed) + ring->claim_written;
    atomic_store_explicit(&me->goal, goal, memory_order_release);
    CP(write_goal);
    bool limited = is_limited(ring);
    if (limited) shmb_note_base(ring);
    atomic_store_explicit(&me->phase, SHMB_COMMITTING, memory_order_release);
    CP(write_committing);
    for (uint64_t row = 0; row < ring->claim_rows; row++) {
        uint64_t slot = slot_of_row(ring, row), committed = SHMB_WORD(ticket_of_row(ring, row), SHMB_COMMITTED);
        if (atomic_load_explicit(&ring->words[slot], memory_order_relaxed) == committed) continue; /* named twice */
        for (uint64_t lane = 0; prioritized && lane < ring->lanes; lane++) {
            uint64_t e = slot * ring->lanes + lane;
            bool has_own = mixed && ring->raw[e] >= 0;
            if (!has_own) ring->raw[e] = fallback;
            CP(write_default);
            ring->tree.mass[e] = has_own ? ring->masses[row * ring->lanes + lane] : fallback_mass;
            CP(write_leaf);
        }
        /* SYNC slot-commit: the payload must be visible before the word says COMMITTED. Other end: still_holds. */
        atomic_store_explicit(&ring->words[slot], committed, memory_order_release);
        CP(write_commit);
    }
    atomic_fetch_add_explicit(&runtime->length, ring->claim_slots_taken, memory_order_relaxed);
    CP(write_lengthened);
    if (prioritized) claim_parents(ring);
    CP(write_commit_parents);
    atomic_store_explicit(&runtime->write_count, goal, memory_order_release);
    CP(write_count);
    if (limited) shmb_set_base(ring);
    atomic_store_explicit(&me->phase, SHMB_IDLE, memory_order_release);
    CP(write_idle);
    shmb_settle(ring, me);
    atomic_fetch_add_explicit(&me->inserts, ring->claim_slots_taken * ring->lanes, memory_order_relaxed);
    CP(count_added);
    shmb_unlock(ring);
    CP(write_done);
    shmb_wake_waiters(runtime);
    end_claim(ring);
    return SHMB_OK;
}

int shmb_abort(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_lock(ring, call);
    if (status == SHMB_OK) {
        CP(abort_locked);
        abort_claim(ring);
        shmb_unlock(ring);
        shmb_wake_waiters(ring->runtime);
    } else if (status == SHMB_INTERRUPTED) {
        give_claim_back(ring, call);
    }
    shmb_gate_leave(ring);
    return status;
}

/* The handle is done: waits for a write that another thread is in, gives back what is open, frees the entry. LOCK_TIMEOUT
 * where a thread of ours may take the mutex still: then the entry stays, and is reaped with the process. */
int shmb_leave(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_gate_enter(ring, call, call->timeout_ns);
    if (status != SHMB_OK) return status;
    status = shmb_lock(ring, call);
    if (status == SHMB_LEFT && ours(ring)) { /* it could not be freed the last time */
        status = shmb_lock_no_more(ring, call) ? SHMB_OK : SHMB_LOCK_TIMEOUT;
        if (status == SHMB_OK) atomic_store_explicit(&ring->me->state, SHMB_FREE, memory_order_release);
        CP(leave_freed);
    } else if (status == SHMB_OK) {
        bool mine = ours(ring);
        if (ring->claimed) abort_claim(ring);
        if (mine) give_back_turn(ring);
        if (mine) shmb_wait_no_more(ring, ring->me, SHMB_FOR_SAMPLES | SHMB_FOR_INSERTS);
        CP(leave_claim);
        /* Before the clock is read: the first store into a page that is clean changes the file's times (restored.py). */
        if (mine) atomic_store_explicit(&ring->me->last_seen_ns, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), memory_order_relaxed);
        CP(leave_claim);
        shmb_touch(ring->runtime);
        shmb_unlock(ring);
        shmb_wake_waiters(ring->runtime);
        if (!shmb_lock_no_more(ring, call)) {
            mine = false;
            status = SHMB_LOCK_TIMEOUT;
        }
        if (mine) atomic_store_explicit(&ring->me->state, SHMB_FREE, memory_order_release);
        CP(leave_freed);
    }
    shmb_gate_leave(ring);
    return status;
}

int shmb_give_up_turn(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_lock(ring, call);
    if (status != SHMB_OK) return status;
    if (ours(ring)) give_back_turn(ring);
    shmb_unlock(ring);
    shmb_wake_waiters(ring->runtime);
    return SHMB_OK;
}

/* Sends somebody who does not use his turn to the end of the queue. */
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

int shmb_empty(struct shmb_ring *ring, struct shmb_call *call, bool keep_write_count) {
    struct shmb_runtime *runtime = ring->runtime;
    struct shmb_entry *me = ring->me;
    int status = begin_claim(ring, call, 0);
    if (status != SHMB_OK) return status;
    CP(empty_locked);
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
    if (atomic_load_explicit(&runtime->prioritized, memory_order_relaxed)) shmb_tree_parents(&ring->tree);
    CP(empty_parents);
    atomic_store_explicit(&me->phase, SHMB_IDLE, memory_order_release);
    CP(empty_idle);
    shmb_unlock(ring);
    CP(empty_unlocked);
    shmb_wake_waiters(runtime);
    shmb_gate_leave(ring);
    return SHMB_OK;
}

/* Where the next item goes, what was counted, and the largest priority seen: of a buffer that is loaded. Tickets
 * only grow, so the head moves on to the next one of that slot. Each store is right by itself. */
int shmb_restore(struct shmb_ring *ring, struct shmb_call *call, uint64_t slot, uint64_t write_count,
                 double max_priority) {
    struct shmb_runtime *runtime = ring->runtime;
    int status = begin_claim(ring, call, 0);
    if (status != SHMB_OK) return status;
    uint64_t head = atomic_load_explicit(&runtime->head, memory_order_relaxed);
    uint64_t ticket = ticket_in_lap(head, slot, ring->capacity);
    if (!has_tickets(head, ticket - head)) return end_without_claim(ring, SHMB_NO_TICKETS);
    if (shmb_limits(runtime) & SHMB_QUEUE) return end_without_claim(ring, SHMB_IN_QUEUE);
    atomic_store_explicit(&runtime->head, ticket, memory_order_release);
    CP(restore_head);
    atomic_store_explicit(&runtime->write_count, write_count, memory_order_release);
    CP(restore_count);
    runtime->max_priority = max_priority;
    CP(restore_max_priority);
    shmb_start_anew(ring, write_count, atomic_load_explicit(&runtime->length, memory_order_relaxed) * ring->lanes);
    return end_without_claim(ring, SHMB_OK);
}
