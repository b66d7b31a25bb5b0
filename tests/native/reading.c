#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/flow.h"
#include "roles.h"

#define BATCH 32

/* A buffer for the data of a read: rows of leaves, or records one after the other. */
struct place {
    unsigned char *leaves[LEAVES], *data;
    int64_t starts[BATCH], sizes[BATCH];
    uint64_t positions[BATCH];
    struct shmb_arena arena;
};

static void place_make(struct place *place, const struct shmb_ring *ring, uint64_t rows, uint64_t room) {
    memset(place, 0, sizeof *place);
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++)
        if ((place->leaves[leaf] = malloc(rows * ring->leaves[leaf].element_bytes + 1)) == NULL) fail("malloc");
    if (ring->bytes && (place->data = malloc(room)) == NULL) fail("malloc");
    place->arena = (struct shmb_arena){place->data, room, 0, place->starts, place->sizes, place->positions};
}

static void place_free(struct place *place) {
    for (unsigned leaf = 0; leaf < LEAVES; leaf++) free(place->leaves[leaf]);
    free(place->data);
}

static void check_row(const struct shmb_ring *ring, const struct place *place, uint64_t row, uint64_t lane, int64_t ticket,
                      const char *who) {
    const unsigned char *at[LEAVES];
    for (unsigned leaf = 0; leaf < LEAVES; leaf++) at[leaf] = place->leaves[leaf] + row * ring->leaves[leaf].element_bytes;
    item_check(at, (uint64_t)ticket, lane, who);
}

static void check_batch(const struct shmb_ring *ring, const struct place *place, const int64_t *index, const int64_t *tickets,
                        uint64_t count, const char *who) {
    uint64_t head = atomic_load(&ring->runtime->head);
    for (uint64_t row = 0; row < count; row++) {
        uint64_t ticket = (uint64_t)tickets[row], slot = shmb_slot_of(ring, (uint64_t)index[row]);
        if (tickets[row] < 0) continue;
        if (ticket >= head || ticket % ring->capacity != slot) fail("%s: ticket %llu in slot %llu", who, (unsigned long long)ticket, (unsigned long long)slot);
        if (ring->bytes)
            record_check(place->data + place->starts[row], (uint64_t)place->sizes[row], ticket, who);
        else
            check_row(ring, place, row, (uint64_t)index[row] % ring->lanes, tickets[row], who);
    }
}

static void check_totals(const struct shmb_ring *ring, const struct shmb_totals *totals, const char *who) {
    bool by_mass = totals->mass > 0 && totals->least > 0 && totals->least <= totals->mass;
    bool alike = totals->mass == 0 && totals->least == 0;
    if (totals->length > ring->elements || !(by_mass || alike))
        fail("%s: %llu items weigh %g, the least of them %g", who, (unsigned long long)totals->length, totals->mass, totals->least);
}

void learn_once(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    struct place place;
    int64_t index[BATCH], tickets[BATCH];
    float weights[BATCH];
    double priorities[BATCH];
    uint64_t redrawn, applied, count = 1 + random_below(BATCH);
    bool prioritized = random_below(2);
    place_make(&place, ring, BATCH, random_below(8) ? 64 * 1024 : 256);
    int status = shmb_sample(ring, &call, count, random_below(UINT64_MAX), ring->bytes ? NULL : place.leaves, index, tickets,
                             weights, 0.5, prioritized, &redrawn, ring->bytes ? &place.arena : NULL);
    if (status == SHMB_NO_ROOM) COUNT(no_room, 1);
    if (status != SHMB_OK && status != SHMB_NOTHING && status != SHMB_NO_ROOM) expect(status, "sample");
    if (status == SHMB_OK) {
        check_batch(ring, &place, index, tickets, count, "sample");
        check_totals(ring, &shmb_last_draw_totals, "sample");
        if (shmb_last_draw_totals.length == 0 || (!prioritized && shmb_last_draw_totals.mass)) fail("sample: not what was drawn from");
        for (uint64_t row = 0; row < count; row++) {
            if (!(weights[row] > 0 && weights[row] <= 1)) fail("sample: a weight is %g", (double)weights[row]);
            priorities[row] = (double)random_below(50) / 10;
        }
        expect(shmb_update(ring, &call, index, random_below(4) ? tickets : NULL, priorities, count, &applied), "update");
        COUNT(samples, 1);
        COUNT(updates, applied);
    }
    place_free(&place);
}

/* Items that were taken from a queue stay in their slots until they are released, unless the queue is replaced. */
static void take_once(struct shmb_ring *ring, struct shmb_call *call, uint64_t count) {
    struct place place;
    int64_t index[BATCH], took[BATCH], tickets[BATCH];
    uint64_t missing = 0;
    uint32_t version = atomic_load(&ring->runtime->limiter_version);
    int status = shmb_dequeue(ring, call, count, index, took);
    if (status == SHMB_LIMITED) expect(shmb_stop_waiting(ring, call, SHMB_FOR_INSERTS), "give_up_waiting");
    if (status == SHMB_LIMITED || status == SHMB_NOTHING) return;
    expect(status, "take");
    place_make(&place, ring, BATCH, 64 * 1024);
    status = ring->bytes ? shmb_read_records(ring, call, index, count, &place.arena, tickets)
                         : shmb_read(ring, call, index, count, place.leaves, tickets, &missing);
    expect(status, "read of what was taken");
    check_batch(ring, &place, index, tickets, count, "take");
    bool stays = version == atomic_load(&ring->runtime->limiter_version) && !world.options.upkeep;
    for (uint64_t row = 0; stays && row < count; row++) {
        if (tickets[row] != took[row]) fail("take: ticket %lld was written over", (long long)took[row]);
        if (row && shmb_queue_place(ring, (uint64_t)took[row]) < shmb_queue_place(ring, (uint64_t)took[row - 1]))
            fail("take: ticket %lld comes too late", (long long)took[row]);
    }
    place_free(&place);
    expect(shmb_release(ring, call), "release");
    COUNT(taken, count);
}

void draw_once(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    uint64_t count = 1 + random_below(4), counted = 0;
    int status = shmb_admit_sample(ring, &call, count, random_below(4), false, &counted);
    if (status == SHMB_LIMITED) {
        COUNT(limited, 1);
        expect(shmb_stop_waiting(ring, &call, SHMB_FOR_INSERTS), "give_up_waiting");
        return;
    }
    expect(status, "admit_sample");
    COUNT(admitted, 1);
    if (shmb_read_limits(ring->runtime) & SHMB_QUEUE)
        take_once(ring, &call, count);
    else if (random_below(8))
        learn_once(ring);
    else
        expect(shmb_cancel_draw(ring, &call, counted, 0), "cancel");
}

void read_once(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    struct place place;
    int64_t index[BATCH], tickets[BATCH];
    uint64_t known[BATCH], missing = 0, count = 1 + random_below(BATCH);
    place_make(&place, ring, BATCH, 64 * 1024);
    for (uint64_t row = 0; row < count; row++) {
        index[row] = (int64_t)random_below(ring->elements);
        known[row] = atomic_load(&world.acknowledged[shmb_slot_of(ring, (uint64_t)index[row])]);
    }
    int status = ring->bytes ? shmb_read_records(ring, &call, index, count, &place.arena, tickets)
                             : shmb_read(ring, &call, index, count, place.leaves, tickets, &missing);
    if (status == SHMB_NO_ROOM) COUNT(no_room, 1);
    if (status != SHMB_NO_ROOM) {
        expect(status, "read");
        check_batch(ring, &place, index, tickets, count, "read");
        for (uint64_t row = 0; row < count; row++)
            if (tickets[row] >= 0 && (uint64_t)tickets[row] + 1 < known[row])
                fail("read: slot %lld gave an item older than one that was acknowledged", (long long)index[row]);
        COUNT(missing, missing);
    }
    place_free(&place);
}

/* Makes a consistent snapshot: two rounds without the lock, and a last one with it. */
static void copy_rows_of_a_moment(struct shmb_ring *ring, int64_t *tickets, uint64_t *sources, double *raw) {
    struct shmb_call call = a_call();
    struct shmb_snapshot_counters moment;
    struct place place;
    place_make(&place, ring, ring->elements, 0);
    for (int round = 0; round < 2; round++) shmb_copy_slots(ring, 0, ring->capacity, place.leaves, tickets);
    expect(shmb_finish_snapshot(ring, &call, place.leaves, tickets, sources, raw, &moment), "finish_snapshot");
    for (uint64_t slot = 0; slot < ring->capacity; slot++)
        for (uint64_t lane = 0; tickets[slot] >= 0 && lane < ring->lanes; lane++)
            check_row(ring, &place, slot * ring->lanes + lane, lane, tickets[slot], "copy");
    place_free(&place);
}

static void copy_records_of_a_moment(struct shmb_ring *ring, int64_t *tickets, uint64_t *sources, double *raw) {
    struct shmb_call call = a_call();
    struct shmb_snapshot_counters moment;
    uint64_t span[3], room = ring->max_bytes;
    unsigned char *bytes = malloc(room);
    struct shmb_extent *extents = malloc(ring->capacity * sizeof *extents);
    if (!bytes || !extents) fail("malloc");
    expect(shmb_read_span(ring, &call, span), "span");
    if (span[0] > span[1] || span[1] > span[2] || span[2] - span[0] > ring->max_bytes) fail("span: not in order");
    expect(shmb_finish_records_snapshot(ring, &call, 0, bytes, room, tickets, extents, sources, raw, &moment), "records_moment");
    for (uint64_t slot = 0; slot < ring->capacity; slot++) {
        if (tickets[slot] < 0) continue;
        if (extents[slot].position < moment.byte_tail || extents[slot].position + extents[slot].bytes > moment.byte_head)
            fail("records_moment: an item outside the bytes in use");
        record_check(bytes + (extents[slot].position - moment.byte_tail), extents[slot].bytes, (uint64_t)tickets[slot], "copy");
    }
    free(bytes);
    free(extents);
}

void copy_once(struct shmb_ring *ring) {
    int64_t *tickets = malloc(ring->capacity * sizeof *tickets);
    uint64_t *sources = malloc(ring->capacity * sizeof *sources);
    double *raw = malloc(ring->elements * sizeof *raw);
    if (!tickets || !sources || !raw) fail("malloc");
    for (uint64_t slot = 0; slot < ring->capacity; slot++) tickets[slot] = -1;
    (ring->bytes ? copy_records_of_a_moment : copy_rows_of_a_moment)(ring, tickets, sources, raw);
    free(tickets), free(sources), free(raw);
    COUNT(copies, 1);
}

void check_whole(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    struct shmb_check found;
    expect(shmb_check(ring, &call, true, 0, &found), "check");
    if (found.wrong_nodes | found.wrong_leaves | found.wrong_length | found.wrong_words | found.wrong_extents | found.orphans |
        found.wrong_ledger)
        fail("check: %llu nodes, %llu leaves, length %llu, %llu words, %llu extents, %llu orphans, %llu of the ledger",
             (unsigned long long)found.wrong_nodes, (unsigned long long)found.wrong_leaves,
             (unsigned long long)found.wrong_length, (unsigned long long)found.wrong_words,
             (unsigned long long)found.wrong_extents, (unsigned long long)found.orphans,
             (unsigned long long)found.wrong_ledger);
    COUNT(checks, 1);
}

void reap_the_dead(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    for (uint32_t entry = 0; entry < SHMB_ENTRIES; entry++) {
        uint64_t incarnation = atomic_load(&world.dead[entry]);
        bool freed = false;
        if (incarnation == 0) continue;
        expect(shmb_reap(ring, &call, entry, incarnation, &freed), "reap");
        if (freed) COUNT(reaped, 1);
    }
}

/* Raises the largest priority, as if another ring had seen it. */
static void raise_once(struct shmb_ring *ring, struct shmb_call *call) {
    struct shmb_totals totals;
    expect(shmb_raise_max_priority(ring, call, (double)random_below(120) / 10), "raise_max_priority");
    expect(shmb_read_totals(ring, call, &totals), "totals");
    check_totals(ring, &totals, "totals");
}

static void restore_once(struct shmb_ring *ring, struct shmb_call *call) {
    int status = shmb_restore(ring, call, random_below(ring->capacity), random_below(1000), -1);
    if (status != SHMB_IN_QUEUE || !world.options.limited) expect(status, "restore");
}

static void limit_once(struct shmb_ring *ring, struct shmb_call *call) {
    struct shmb_limiter limiter = {.min_size = 1 + random_below(ring->capacity), .when_no_peer = SHMB_ALONE_WAIT};
    limiter.limits = (uint32_t)random_below(5);
    if (limiter.limits == 4) limiter = (struct shmb_limiter){.error_buffer = 1 << 30, .limits = SHMB_QUOTA};
    limiter.samples_per_insert = limiter.limits & SHMB_RATIO ? (double)(1 + random_below(8)) / 4 : 0;
    if (limiter.limits & SHMB_RATIO) limiter.error_buffer = 64;
    limiter.max_times_sampled = limiter.limits & SHMB_QUEUE ? 1 + random_below(3) : 0;
    if (random_below(4) == 0) limiter.limits |= SHMB_AGES;
    const struct shmb_ages ages = {random_below(3), random_below(2) ? 1 + random_below(64) : 0, 0, 0};
    expect(shmb_limit(ring, call, &limiter, &ages), "limit");
    shmb_consumer_version(ring->runtime, SHMB_VERSION_ADD, 1 + random_below(4));
    COUNT(limiters, 1);
}

/* After any deaths, the counters in the runtime page match the registry. */
static void check_flow(struct shmb_ring *ring) {
    uint64_t pending = 0, limited = 0;
    for (uint32_t entry = 0; entry < SHMB_ENTRIES; entry++) {
        pending += atomic_load(&ring->entries[entry].pending);
        limited += atomic_load(&ring->entries[entry].waits_for) != 0;
    }
    if (pending != atomic_load(&ring->runtime->pending)) fail("pending is %llu", (unsigned long long)ring->runtime->pending);
    if (limited != atomic_load(&ring->runtime->limited)) fail("limited is %u", ring->runtime->limited);
    if (shmb_count_reservation_faults(ring)) fail("reserved is %llu", (unsigned long long)ring->runtime->reserved);
}

void check_flow_once(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    expect(shmb_lock(ring, &call), "lock");
    check_flow(ring);
    shmb_unlock(ring);
}

void look_after_once(struct shmb_ring *ring) {
    struct shmb_call call = a_call();
    reap_the_dead(ring);
    check_whole(ring);
    check_flow_once(ring);
    if (random_below(4) == 0) {
        expect(shmb_set_alpha(ring, &call, (double)(4 + random_below(8)) / 10, 0.01, false), "set_alpha");
        COUNT(alphas, 1);
    }
    if (world.options.upkeep && random_below(4) == 0) {
        expect(shmb_empty(ring, &call, random_below(2)), "empty");
        COUNT(empties, 1);
    }
    if (world.options.upkeep && random_below(4) == 0)
        restore_once(ring, &call);
    if (random_below(4) == 0) raise_once(ring, &call);
    if (world.options.limited && random_below(8) == 0) limit_once(ring, &call);
    expect(shmb_cancel_turn(ring, &call), "give_up_turn");
}
