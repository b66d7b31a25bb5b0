/* Follows the items of a ring, so that a process that keeps a table about items reads only the new ones. All of it
 * is private: writers do not know the followers, and the death of a follower leaves nothing behind. The cost of a
 * poll is proportional to the added and removed items, and the unfinished writes.
 *
 *     front ─────────────────────▶ at ──────▶ end                  end mod capacity == head mod capacity
 *       items that were reported     to be reported (`next`)
 *       holes                        written since, or behind a slot whose unfinished write has ended
 *
 * Places count slots by age, the oldest first. A write at the head of the ring advances `end`. A write to named
 * slots uses the tickets of a lap and no places. Always true between two polls
 *
 *   1. A slot is held if its item was reported, and its removal was not.
 *   2. The item of a held slot has a ticket below `seen`, and a later item in the slot has a ticket from `seen` on. So the
 *      tickets need not be stored: a COMMITTED word with a smaller ticket means that the item is still present.
 *   3. Every ticket below `seen` is held, removed, or that of a pending slot.
 *   4. Every place from `front` on without an item is in one of the holes.
 *
 * Words are read without the mutex. A claim moves the head before it marks its slots, so a poll ends at the
 * beginning of a claim that is being marked. So an item that is stored later has a ticket from `seen` on, in any
 * slot. Data that are read for an item may belong to its successor in the slot. Its ticket then differs, too, and
 * samplers compare the tickets. */
#include <stdlib.h>
#include <string.h>

#include "core/ring.h"
#include "tables/follower.h"

static inline uint64_t word_of(const struct shmb_ring *ring, uint64_t slot) {
    return atomic_load_explicit(&ring->words[slot], SYNC_SLOT_COMMIT_ACQUIRE);
}

static inline bool is_reported(const struct shmb_follower *f, uint64_t slot) { return f->reported[slot / 64] >> slot % 64 & 1; }

static inline void set_reported(struct shmb_follower *f, uint64_t slot, bool reported) {
    uint64_t bit = (uint64_t)1 << slot % 64;
    f->reported[slot / 64] = reported ? f->reported[slot / 64] | bit : f->reported[slot / 64] & ~bit;
}

static inline uint64_t slot_at(const struct shmb_follower *f, uint64_t place) { return place % f->ring->capacity; }

static bool push_pair(struct shmb_follower *f, struct shmb_pairs *pairs, uint64_t first, uint64_t second) {
    if (pairs->begin + pairs->count == pairs->capacity) {
        if (pairs->begin > pairs->count) {
            memmove(pairs->at, pairs->at + pairs->begin, pairs->count * sizeof *pairs->at);
            pairs->begin = 0;
        } else {
            uint64_t capacity = pairs->capacity ? 2 * pairs->capacity : 64;
            struct shmb_pair *at = realloc(pairs->at, capacity * sizeof *at);
            if (at == NULL) return f->failed = true, false;
            pairs->at = at;
            pairs->capacity = capacity;
        }
    }
    pairs->at[pairs->begin + pairs->count++] = (struct shmb_pair){first, second};
    return true;
}

static inline struct shmb_pair *pair(const struct shmb_pairs *pairs, uint64_t i) { return &pairs->at[pairs->begin + i]; }

/* Consecutive slots are merged into one pair. */
static void add_removed(struct shmb_follower *f, uint64_t slot, uint64_t count) {
    struct shmb_pair *last = f->removed.count > f->n_overwritten ? pair(&f->removed, f->removed.count - 1) : NULL;
    if (last && last->first + last->second == slot)
        last->second += count;
    else
        push_pair(f, &f->removed, slot, count);
}

static void report_removed(struct shmb_follower *f, uint64_t slot) {
    set_reported(f, slot, false);
    add_removed(f, slot, 1);
}

/* Removes overwritten items, from the oldest place on. Usually all 64 slots of a bitmap word are held. */
static void report_overwritten(struct shmb_follower *f, uint64_t oldest) {
    const uint64_t capacity = f->ring->capacity;
    for (uint64_t slot = slot_at(f, f->front), count; f->front < oldest; f->front += count) {
        count = 1;
        if (slot % 64 == 0 && oldest - f->front >= 64 && capacity - slot >= 64 && f->reported[slot / 64] == UINT64_MAX) {
            count = 64;
            f->reported[slot / 64] = 0;
            add_removed(f, slot, count);
        } else if (is_reported(f, slot)) {
            report_removed(f, slot);
        }
        slot = slot + count < capacity ? slot + count : 0;
    }
    f->n_overwritten = f->removed.count;
}

static void note_hole(struct shmb_follower *f, uint64_t place) {
    struct shmb_pairs *holes = &f->holes;
    if (holes->count && pair(holes, holes->count - 1)->second + 1 == place)
        pair(holes, holes->count - 1)->second = place;
    else
        push_pair(f, holes, place, place);
}

static void forget_holes_from(struct shmb_follower *f, uint64_t place) {
    struct shmb_pairs *holes = &f->holes;
    while (holes->count && pair(holes, holes->count - 1)->first >= place) holes->count--;
    if (holes->count && pair(holes, holes->count - 1)->second >= place) pair(holes, holes->count - 1)->second = place - 1;
}

/* Number of places before this one without a hole; the capacity, if there is no hole. */
static uint64_t reach_of(const struct shmb_follower *f, uint64_t place) {
    uint64_t low = 0, high = f->holes.count;
    /* the usual case: the place is after the last hole */
    if (high && pair(&f->holes, high - 1)->second < place) low = high;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (pair(&f->holes, middle)->second < place)
            low = middle + 1;
        else
            high = middle;
    }
    return low ? place - pair(&f->holes, low - 1)->second - 1 : f->ring->capacity;
}

bool shmb_follower_make(struct shmb_follower *f, const struct shmb_ring *ring) {
    *f = (struct shmb_follower){.ring = ring};
    f->reported = calloc(ring->capacity / 64 + 1, sizeof *f->reported);
    return f->reported != NULL;
}

void shmb_follower_free(struct shmb_follower *f) {
    free(f->reported);
    free(f->removed.at);
    free(f->changed.at);
    free(f->pending.at);
    free(f->holes.at);
    *f = (struct shmb_follower){0};
}

void shmb_follower_forget(struct shmb_follower *f) { f->started = false; }

/* The first ticket that this poll does not process. At most one claim is being marked, and it is the newest one. */
static uint64_t find_end_of_poll(const struct shmb_follower *f) {
    const struct shmb_ring *ring = f->ring;
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_acquire);
    for (uint32_t i = 0; i < SHMB_ENTRIES && (head != f->seen || !f->started); i++) {
        const struct shmb_entry *entry = &ring->entries[i];
        if (atomic_load_explicit(&entry->phase, memory_order_acquire) != SHMB_MARKING) continue;
        uint64_t first = atomic_load_explicit(&entry->first, memory_order_relaxed);
        if (first < head) head = first;
    }
    return head;
}

static void start_over(struct shmb_follower *f, uint64_t head) {
    uint64_t capacity = f->ring->capacity;
    memset(f->reported, 0, (capacity / 64 + 1) * sizeof *f->reported);
    f->pending.begin = f->pending.count = f->holes.begin = f->holes.count = 0;
    f->end = head + capacity;
    f->front = f->at = f->end - (head < capacity ? head : capacity);
    f->ticket = 0;
    f->started = true;
    f->in_order = true;
}

/* Checks slots whose writes were unfinished at the previous poll. Returns the first place that holds an item now, or
 * `until`. With in_turn, any finished write counts. */
static uint64_t settle_pending(struct shmb_follower *f, uint64_t until, uint64_t oldest) {
    uint64_t remaining = 0;
    for (uint64_t i = 0; i < f->pending.count; i++) {
        struct shmb_pair one = *pair(&f->pending, i);
        uint64_t word = word_of(f->ring, slot_at(f, one.first));
        uint64_t from = one.first < oldest ? oldest : one.first;
        if (from == one.first && word == one.second)
            *pair(&f->pending, remaining++) = one;
        else if (from < until && (f->reports_in_order || (from == one.first && SHMB_STATE(word) == SHMB_COMMITTED)))
            until = from;
    }
    f->pending.count = remaining;
    return until;
}

/* True if all of 64 slots, from a multiple of 64 on, are held and unchanged. */
static bool are_unchanged(const struct shmb_follower *f, uint64_t slot, uint64_t before) {
    if (f->reported[slot / 64] != UINT64_MAX) return false;
    uint64_t others = 0;
    for (uint64_t i = slot; i < slot + 64; i++) {
        uint64_t word = atomic_load_explicit(&f->ring->words[i], memory_order_relaxed);
        others |= (uint64_t)(word >= before) | (uint64_t)(SHMB_STATE(word) ^ SHMB_COMMITTED);
    }
    return others == 0;
}

/* Scans all slots from the oldest on, after writes to named slots may have changed any of them. Returns the same as
 * `settle_pending`. */
static uint64_t scan_slots(struct shmb_follower *f, uint64_t from, uint64_t until, uint64_t head) {
    const uint64_t before = SHMB_WORD(f->seen, 0), begun = SHMB_WORD(head, 0);
    f->pending.begin = f->pending.count = 0;
    for (uint64_t place = from, slot = slot_at(f, from); place < until; place++) {
        while (slot % 64 == 0 && until - place > 64 && f->ring->capacity - slot > 64 && are_unchanged(f, slot, before)) {
            place += 64;
            slot += 64;
        }
        uint64_t word = word_of(f->ring, slot);
        unsigned state = SHMB_STATE(word);
        bool reported = is_reported(f, slot);
        if (word >= begun) {
            /* the next poll processes it */
        } else if (reported && state == SHMB_COMMITTED) {
            if (word >= before) push_pair(f, &f->changed, slot, place);
        } else if (reported || state == SHMB_COMMITTED) {
            until = place; /* items are reported again from here on */
        } else if (state == SHMB_WRITING) {
            push_pair(f, &f->pending, place, word);
        }
        slot = slot + 1 < f->ring->capacity ? slot + 1 : 0;
    }
    return until;
}

/* Polls the ring. Afterwards `removed` has the slots whose items are gone, `changed` has slots with a new item in the
 * same place, and `shmb_follower_next` reports new items. False: nothing has changed. `restarted`: all earlier
 * reports are void. */
bool shmb_follower_poll(struct shmb_follower *f, bool *restarted) {
    const struct shmb_ring *ring = f->ring;
    const uint64_t head = find_end_of_poll(f);
    const uint64_t capacity = ring->capacity, written = head - f->seen;
    f->removed.begin = f->removed.count = f->changed.begin = f->changed.count = f->n_overwritten = 0;
    *restarted = !f->started || f->failed || head < f->seen || f->at != f->end;
    uint64_t tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    if (*restarted) {
        f->failed = false;
        start_over(f, head);
        f->seen = head;
        f->tail = tail;
        return true;
    }
    const uint64_t until = f->end, end = until + written % capacity, oldest = end - capacity;
    bool rescan = written >= capacity || (ring->bytes && !f->in_order && tail != f->tail);
    uint64_t at = settle_pending(f, until, oldest);
    if (rescan) at = scan_slots(f, oldest, at, head);
    if (rescan && f->changed.count) f->in_order = false;
    report_overwritten(f, oldest);
    for (; f->front < at; f->front++) { /* evicted or emptied */
        uint64_t slot = slot_at(f, f->front);
        if (!is_reported(f, slot)) continue;
        if (SHMB_STATE(word_of(ring, slot)) == SHMB_COMMITTED) break;
        report_removed(f, slot);
    }
    if (at < oldest) at = oldest;
    if (at < f->front) f->front = at; /* an unfinished write has ended */
    for (uint64_t place = until; place > at; place--)
        if (is_reported(f, slot_at(f, place - 1))) report_removed(f, slot_at(f, place - 1));
    forget_holes_from(f, at);
    while (f->changed.count && pair(&f->changed, f->changed.count - 1)->second >= at) f->changed.count--;
    while (f->changed.count && pair(&f->changed, 0)->second < f->front) f->changed.begin++, f->changed.count--;
    uint64_t remaining = 0;
    for (uint64_t i = 0; i < f->pending.count; i++)
        if (pair(&f->pending, i)->first < at) *pair(&f->pending, remaining++) = *pair(&f->pending, i);
    f->pending.count = remaining;
    while (f->holes.count && pair(&f->holes, 0)->second < oldest) f->holes.begin++, f->holes.count--;
    f->at = at;
    f->end = end;
    f->seen = head;
    f->tail = tail;
    return f->removed.count || f->changed.count || f->at < f->end;
}

/* True if each of 64 slots, from a multiple of 64 on, holds a new item, in the order of tickets from *ticket on.
 * *ticket becomes that of the last one. */
static bool are_all_new(const struct shmb_follower *f, uint64_t slot, uint64_t *ticket) {
    uint64_t before = SHMB_WORD(*ticket, SHMB_COMMITTED), others = 0;
    for (uint64_t i = slot; i < slot + 64; i++) {
        uint64_t word = atomic_load_explicit(&f->ring->words[i], memory_order_relaxed);
        others |= (uint64_t)(word < before) | (uint64_t)(SHMB_STATE(word) ^ SHMB_COMMITTED);
        before = word;
    }
    atomic_thread_fence(SYNC_SLOT_COMMIT_ACQUIRE);
    if (others || SHMB_TICKET(before) >= f->seen) return false;
    *ticket = SHMB_TICKET(before);
    return true;
}

/* Reports the next new items, oldest first: their slots, and, unless `reach` is NULL, the number of places before
 * each one without a hole. 0: there are no more. */
uint64_t shmb_follower_next(struct shmb_follower *f, int64_t *slots, int64_t *reach, uint64_t max_count) {
    const uint64_t capacity = f->ring->capacity, seen = f->seen, end = f->end;
    uint64_t count = 0, place = f->at, ticket = f->ticket, settled_before = f->pending.count ? 0 : max_count;
    for (uint64_t slot = slot_at(f, place); place < end && count < max_count; place++) {
        bool aligned = slot % 64 == 0 && end - place >= 64 && max_count - count >= 64 && capacity - slot >= 64 && !(reach && f->holes.count);
        if (aligned && are_all_new(f, slot, &ticket)) {
            f->reported[slot / 64] = UINT64_MAX;
            for (uint64_t i = 0; i < 64; i++) slots[count + i] = (int64_t)(slot + i);
            for (uint64_t i = 0; i < 64 && reach; i++) reach[count + i] = (int64_t)capacity;
            count += 64;
            place += 63;
            slot = slot + 64 < capacity ? slot + 64 : 0;
            continue;
        }
        uint64_t word = word_of(f->ring, slot);
        bool ours = SHMB_TICKET(word) < seen;
        if (ours && SHMB_STATE(word) == SHMB_COMMITTED) {
            if (SHMB_TICKET(word) < ticket) f->in_order = false;
            ticket = SHMB_TICKET(word);
            if (reach) reach[count] = (int64_t)(f->holes.count ? reach_of(f, place) : capacity);
            slots[count++] = (int64_t)slot;
            set_reported(f, slot, true);
        } else {
            if (ours && SHMB_STATE(word) == SHMB_WRITING && push_pair(f, &f->pending, place, word) && count < settled_before)
                settled_before = count;
            note_hole(f, place);
        }
        slot = slot + 1 < capacity ? slot + 1 : 0;
    }
    f->settled = count < settled_before ? count : settled_before;
    f->ticket = ticket;
    f->at = place;
    return count;
}

/* Number of places before a held slot without a hole. */
uint64_t shmb_follower_read_reach(const struct shmb_follower *f, uint64_t slot) {
    uint64_t capacity = f->ring->capacity;
    return reach_of(f, f->end - 1 - (f->end - 1 + capacity - slot) % capacity);
}
