#include <stdlib.h>
#include <string.h>

#include "core/claimed.h"
#include "core/flow.h"
#include "core/reserve.h"
#include "roles.h"

#define ROWS 24 /* most rows of one write */

static void may_block(struct shmb_call *call) {}
static bool interrupted(struct shmb_call *call) { return false; }

struct shmb_call a_call(void) { return (struct shmb_call){may_block, interrupted, (int64_t)60 * 1000 * 1000 * 1000}; }

/* Waits like ring.py: reaps the blocking client if it is dead, and waits for it otherwise. */
static void wait_for_blocker(struct shmb_ring *ring, uint64_t waited) {
    struct shmb_call call = a_call();
    uint32_t entry = shmb_refusal.blocker.entry;
    COUNT(blocked, 1);
    if (atomic_load(&world.dead[entry]) == shmb_refusal.blocker.incarnation) {
        bool freed;
        expect(shmb_reap(ring, &call, entry, shmb_refusal.blocker.incarnation, &freed), "reap of a blocker");
        if (freed) COUNT(reaped, 1);
        return;
    }
    shmb_wait_progress(ring, shmb_refusal.blocker.progress, 2 * 1000 * 1000);
    if (shmb_refusal.blocker.by_turn && waited > 20)
        expect(shmb_forfeit_turn(ring, &call, entry, shmb_refusal.blocker.turn), "forfeit");
}

static void acknowledge(const uint64_t *slots, const uint64_t *tickets, uint64_t rows) {
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t mine = tickets[row] + 1, known = atomic_load(&world.acknowledged[slots[row]]);
        while (known < mine && !atomic_compare_exchange_weak(&world.acknowledged[slots[row]], &known, mine)) {
        }
    }
}

static void fill_rows(struct shmb_ring *ring) {
    uint64_t lanes = ring->lanes, rows = ring->claim_rows;
    const unsigned char *sources[LEAVES];
    unsigned char *held[LEAVES];
    for (unsigned leaf = 0; leaf < LEAVES; leaf++) {
        uint64_t bytes = ring->leaves[leaf].element_bytes;
        held[leaf] = malloc(rows * lanes * bytes + 1);
        if (held[leaf] == NULL) fail("malloc");
        for (uint64_t row = 0; row < rows; row++)
            for (uint64_t lane = 0; lane < lanes; lane++)
                item_fill(held[leaf] + (row * lanes + lane) * bytes, leaf, shmb_ticket_of_row(ring, row), lane, bytes);
        sources[leaf] = held[leaf];
    }
    shmb_fill(ring, sources, 0);
    for (unsigned leaf = 0; leaf < LEAVES; leaf++) free(held[leaf]);
}

/* A batch of records, one after the other. */
struct records {
    unsigned char data[ROWS * 192];
    int64_t starts[ROWS], sizes[ROWS];
    struct shmb_batch batch;
    uint64_t bytes;
};

static void lay_out(struct records *records, uint64_t count) {
    uint64_t header = sizeof(struct shmb_record), at = 0;
    for (uint64_t i = 0; i < count; i++) {
        records->starts[i] = (int64_t)at;
        records->sizes[i] = (int64_t)(header + 1 + random_below(128));
        at += ((uint64_t)records->sizes[i] + 7) & ~(uint64_t)7;
    }
    records->bytes = count ? (uint64_t)(records->starts[count - 1] + records->sizes[count - 1]) : 0;
    records->batch = (struct shmb_batch){records->data, records->starts, records->sizes, count, NULL, 0};
}

static void fill_records(struct shmb_ring *ring, struct records *records) {
    uint64_t header = sizeof(struct shmb_record);
    for (uint64_t row = 0; row < ring->claim_rows; row++) {
        uint64_t i = ring->claim_kind == SHMB_RING_WRITE ? ring->claim_skipped + row : (uint64_t)ring->claim_from[row];
        record_fill(records->data + records->starts[i] + header, shmb_ticket_of_row(ring, row), header, (uint64_t)records->sizes[i] - header);
    }
    shmb_fill_records(ring);
}

/* If there are more rows than slots, the last rows are written. */
static void require_streams(const struct shmb_ring *ring, const uint32_t *streams, uint64_t count) {
    for (uint64_t row = 0; row < ring->claim_rows; row++) {
        uint32_t stream = streams ? streams[count - ring->claim_rows + row] : 0;
        if (ring->sources[shmb_slot_of_row(ring, row)] != shmb_source(ring->incarnation, stream))
            fail("row %llu is not in its stream", (unsigned long long)row);
    }
}

/* Reserves space for at least the next claim of this thread; returns false if it is refused too often. */
static bool reserve(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t bytes) {
    struct shmb_request request = {.rows = count + random_below(3), .bytes = bytes, .expires_ns = UINT64_MAX};
    if (request.rows > ring->capacity) request.rows = count;
    if (random_below(8) == 0) request.expires_ns = shmb_boot_ns() + random_below(100 * 1000);
    request.elements = request.rows * ring->lanes;
    uint32_t place = 0;
    uint64_t id = 0;
    for (uint64_t waited = 0;; waited++) {
        int status = shmb_reserve(ring, call, request, &place, &id);
        if (status == SHMB_OK) break;
        if (status != SHMB_LIMITED) expect(status, "reserve");
        COUNT(limited, 1);
        if (waited == 4) expect(shmb_stop_waiting(ring, call, SHMB_FOR_SAMPLES), "give_up_waiting");
        if (waited == 4) return false;
        shmb_wait_progress(ring, shmb_refusal.blocker.progress, 1000 * 1000);
    }
    COUNT(reserved, 1);
    static _Thread_local uint64_t versions[ROWS];
    static _Thread_local unsigned char young[ROWS];
    for (uint64_t i = 0; i < ROWS; i++) versions[i] = atomic_load(&ring->runtime->consumer_version);
    shmb_selected_reservation = (struct shmb_selected_reservation){ring, place, id, random_below(2) ? NULL : versions, young, count};
    return true;
}

/* Returns the space that was not used. The reservation may have expired. */
static void give_back(struct shmb_ring *ring, struct shmb_call *call) {
    struct shmb_selected_reservation hold = shmb_selected_reservation;
    shmb_selected_reservation.ring = NULL;
    if (hold.ring == NULL) return;
    int status = shmb_cancel_reservation(ring, call, hold.place, hold.id);
    if (status != SHMB_NO_RESERVATION) expect(status, "give_back");
    COUNT(given_back, 1);
}

static uint64_t claim(struct shmb_ring *ring, struct shmb_call *call, enum shmb_claim_kind kind, int64_t *slots,
                      uint64_t count, const struct shmb_batch *batch) {
    int64_t tickets[ROWS];
    uint32_t given[ROWS], *streams = random_below(2) ? given : NULL;
    unsigned char kept[ROWS];
    for (uint64_t i = 0; i < count; i++) given[i] = (uint32_t)random_below(SHMB_STREAMS);
    bool if_still_there = kind == SHMB_IN_PLACE && random_below(2);
    uint64_t first, taken = count;
    for (uint64_t i = 0; if_still_there && i < count; i++) {
        uint64_t word = atomic_load(&ring->words[slots[i]]);
        tickets[i] = (int64_t)SHMB_TICKET(word);
    }
    for (uint64_t waited = 0;; waited++) {
        int status = kind == SHMB_RING_WRITE
                         ? shmb_claim_ring(ring, call, count, batch, streams, &first)
                         : shmb_claim_slots(ring, call, slots, count, kind == SHMB_IN_PLACE,
                                            if_still_there ? tickets : NULL, if_still_there ? kept : NULL, batch, &taken);
        if (status == SHMB_OK && kind == SHMB_RING_WRITE) require_streams(ring, streams, count);
        if (status == SHMB_OK) return taken;
        if (status == SHMB_IN_QUEUE && world.options.limited) return 0;
        if (status == SHMB_NO_RESERVATION && shmb_selected_reservation.ring) return 0; /* the reservation has expired */
        if (status == SHMB_TOO_OLD) COUNT(refused, 1);
        if (status == SHMB_TOO_OLD) return 0;
        if (status == SHMB_LIMITED && waited < 4) {
            COUNT(limited, 1);
            shmb_wait_progress(ring, shmb_refusal.blocker.progress, 1000 * 1000);
            continue;
        }
        if (status == SHMB_LIMITED) {
            expect(shmb_stop_waiting(ring, call, SHMB_FOR_SAMPLES), "give_up_waiting");
            return 0;
        }
        if (status != SHMB_BLOCKED) expect(status, "claim");
        wait_for_blocker(ring, waited);
    }
}

/* Chooses slots in ascending order, as records require. Slots of rows may occur twice. */
static uint64_t choose_slots(const struct shmb_ring *ring, int64_t *slots) {
    uint64_t count = 1 + random_below(4), n = 0;
    int64_t slot = (int64_t)random_below(ring->capacity);
    for (; n < count && (uint64_t)slot < ring->capacity; slot += (int64_t)random_below(4) + (ring->bytes != NULL)) slots[n++] = slot;
    return n;
}

void write_once(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    struct records records;
    double priorities[ROWS * 4];
    int64_t slots[ROWS];
    uint64_t took_slots[ROWS], took_tickets[ROWS];
    uint64_t choice = world.options.once || world.options.consumed ? 9 : random_below(10), most = ring->capacity + 2 < ROWS ? ring->capacity + 2 : ROWS;
    enum shmb_claim_kind kind = choice == 0 ? SHMB_PLACED : choice == 1 ? SHMB_IN_PLACE : SHMB_RING_WRITE;
    uint64_t count = kind == SHMB_RING_WRITE ? 1 + random_below(random_below(8) ? 3 : most) : choose_slots(ring, slots);
    if (world.options.once && atomic_load(&ring->runtime->head) + 16 * ROWS > ring->capacity) return;
    bool given = random_below(3) == 0 && kind != SHMB_IN_PLACE && !world.options.once;
    if (ring->bytes) lay_out(&records, count);
    if (ring->bytes) expect(shmb_check_batch(ring, &records.batch, records.bytes), "batch");
    for (uint64_t i = 0; i < count * ring->lanes; i++) priorities[i] = (double)(1 + random_below(100)) / 10;
    if (given) expect(shmb_check_priorities(ring, priorities, count * ring->lanes), "priorities");
    bool reserves = kind == SHMB_RING_WRITE && count <= ring->capacity && random_below(4) == 0;
    uint64_t room = ring->bytes && random_below(2) ? (records.bytes + 7) & ~(uint64_t)7 : 0;
    if (reserves && !reserve(ring, &call, count, room)) return;
    if (claim(ring, &call, kind, slots, count, ring->bytes ? &records.batch : NULL) == 0) {
        give_back(ring, &call);
        return;
    }
    uint64_t rows = ring->claim_rows, written = ring->claim_written;
    for (uint64_t row = 0; row < rows; row++) {
        took_slots[row] = shmb_slot_of_row(ring, row);
        took_tickets[row] = shmb_ticket_of_row(ring, row);
    }
    if (ring->bytes)
        fill_records(ring, &records);
    else
        fill_rows(ring);
    if (given) shmb_fill_priorities(ring, priorities, 0);
    if (random_below(16) == 0) {
        expect(shmb_abort(ring, &call), "abort");
        give_back(ring, &call);
        COUNT(aborts, 1);
        return;
    }
    atomic_fetch_add(&world.offered_elements, written);
    int status = shmb_commit(ring, &call, given);
    if (status == SHMB_TOO_OLD) {
        give_back(ring, &call);
        COUNT(refused, 1);
        return;
    }
    expect(status, "commit");
    atomic_fetch_add(&world.acknowledged_elements, written);
    acknowledge(took_slots, took_tickets, rows);
    for (uint64_t row = 0; world.options.consumed && row < rows; row++)
        if (took_tickets[row] < MOST_TICKETS) atomic_store(&world.committed[took_tickets[row]], 1);
    COUNT(writes, 1);
    COUNT(items, rows * ring->lanes);
}
