/* Observations that are stored once: the next observation of an item is the observation of the item that follows it.
 *
 *     slot  17    18    19      20        leaf "next" has no column; nexts[slot] locates each next observation
 *     obs   a     b     c       x         a link      its distance in slots: it is in the column of "obs" there
 *     next  ─▶18  ─▶19  own row ...       an own row  a row outside the ring: for an observation that differs, or the newest
 *
 * The following item is the next one of the same source. A source is written by one handle, so only this handle
 * knows the newest item of the source: `newest`. If the handle dies, that item keeps its own row.
 *
 * Always true while the mutex is not held
 *   1. The bytes that nexts[slot] leads to are those written with the item, as long as the item exists.
 *   2. A link leads forward in the order in which the ring overwrites slots, so its target is overwritten after it. Only a
 *      write to a named slot could overwrite the target earlier, and it gives the item an own row first. It finds the item
 *      because the target slot stores the distance back.
 *   3. An own row is in use if the slot that it was last assigned to (`holders`) is being written or committed, and refers to
 *      it. There is no list of free rows, so no row can be lost or be free twice.
 * If a writer dies: its claim is rolled back or forward like any other. Own rows assigned to it become free with its
 * slots. A link is one store, made after its target was published. */
#include <stdlib.h>
#include <string.h>

#include "core/claimed.h"

/* A hash table from source to number, with open addressing. At most half of its entries are used. Numbers start at
 * 1. */
struct shmb_table {
    struct shmb_known {
        uint64_t source, number; /* 0: an empty entry */
    } *known;
    uint64_t room, used;
};

/* The first row of a source in a batch, whose observation is the next observation of a committed item. */
struct shmb_joint {
    uint64_t slot, word, next, row;
};

/* Plan of the open claim of a handle. Only the thread inside the gate uses it. */
struct shmb_plan {
    struct shmb_table newest; /* 1 + ticket of the last item */
    struct shmb_table last;   /* 1 + row */
    uint64_t *wanted;         /* `nexts` value of each row; own rows have no number yet */
    uint64_t *whose;
    uint64_t *found;          /* numbers of free own rows */
    struct shmb_joint *joints;
    uint64_t room;
    uint64_t needed, count; /* own rows that are needed, and that were found */
    uint64_t n_joints, hand;
    bool keeps; /* the claim changes no observation */
};

static struct shmb_known *find_known(const struct shmb_table *table, uint64_t source) {
    uint64_t at = (source * 0x9E3779B97F4A7C15u) >> 20 & (table->room - 1);
    while (table->known[at].number && table->known[at].source != source) at = (at + 1) & (table->room - 1);
    return &table->known[at];
}

/* Makes space for `more` further sources. */
static bool widen(struct shmb_table *table, uint64_t more) {
    uint64_t room = table->room ? table->room : 16;
    while (room < 2 * (table->used + more)) room *= 2;
    if (room == table->room) return true;
    struct shmb_table wider = {calloc(room, sizeof *wider.known), room, table->used};
    if (wider.known == NULL) return false;
    for (uint64_t i = 0; i < table->room; i++)
        if (table->known[i].number) *find_known(&wider, table->known[i].source) = table->known[i];
    free(table->known);
    *table = wider;
    return true;
}

static void note(struct shmb_table *table, uint64_t source, uint64_t number) {
    struct shmb_known *known = find_known(table, source);
    table->used += known->number == 0;
    *known = (struct shmb_known){source, number};
}

bool shmb_sharing_begin(struct shmb_ring *ring) {
    ring->plan = calloc(1, sizeof *ring->plan);
    if (ring->plan) ring->plan->hand = (uint64_t)(ring->me - ring->entries) * 7919 % ring->wholes;
    return ring->plan != NULL;
}

void shmb_sharing_end(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    if (plan == NULL) return;
    free(plan->newest.known);
    free(plan->last.known);
    free(plan->wanted);
    free(plan->whose);
    free(plan->found);
    free(plan->joints);
    free(plan);
}

static bool has_room_for(struct shmb_plan *plan, uint64_t rows) {
    if (rows <= plan->room) return true;
    uint64_t *nexts = realloc(plan->wanted, rows * sizeof *nexts);
    if (nexts) plan->wanted = nexts;
    uint64_t *sources = realloc(plan->whose, rows * sizeof *sources);
    if (sources) plan->whose = sources;
    /* for each slot, and for the item that links to it */
    uint64_t *found = realloc(plan->found, 2 * rows * sizeof *found);
    if (found) plan->found = found;
    struct shmb_joint *joints = realloc(plan->joints, rows * sizeof *joints);
    if (joints) plan->joints = joints;
    if (!nexts || !sources || !found || !joints) return false;
    plan->room = rows;
    return true;
}

void shmb_copy_next(const struct shmb_ring *ring, uint64_t slot, uint64_t next, unsigned char *const *out, uint64_t row) {
    for (unsigned which = 0; which < ring->n_once; which++) {
        uint64_t bytes = ring->once[which].bytes;
        memcpy(out[ring->once[which].leaf] + row * bytes, shmb_next_at(ring, which, slot, next), bytes);
    }
}

static bool is_next_of_row(const struct shmb_ring *ring, const unsigned char *const *from, uint64_t before, uint64_t row) {
    for (unsigned which = 0; which < ring->n_once; which++) {
        const struct shmb_once *once = &ring->once[which];
        if (memcmp(from[once->leaf] + before * once->bytes, from[once->root] + row * once->bytes, once->bytes) != 0) return false;
    }
    return true;
}

static bool is_next_of(const struct shmb_ring *ring, const struct shmb_joint *joint, const unsigned char *const *from, uint64_t row) {
    bool same = true;
    for (unsigned which = 0; same && which < ring->n_once; which++) {
        const struct shmb_once *once = &ring->once[which];
        const unsigned char *next = shmb_next_at(ring, which, joint->slot, joint->next);
        SHMB_OPTIMISTIC(same = memcmp(next, from[once->root] + row * once->bytes, once->bytes) == 0);
    }
    return same;
}

/* True if this row follows the newest item of its source. The commit checks this again. */
static bool is_joint(const struct shmb_ring *ring, const unsigned char *const *from, uint64_t source, uint64_t row,
                     struct shmb_joint *joint) {
    uint64_t number = find_known(&ring->plan->newest, source)->number;
    if (number == 0) return false;
    joint->slot = (number - 1) % ring->capacity;
    joint->word = atomic_load_explicit(&ring->words[joint->slot], SYNC_SLOT_COMMIT_ACQUIRE);
    joint->next = shmb_next_of(ring, joint->slot);
    return joint->word == SHMB_WORD(number - 1, SHMB_COMMITTED) && (joint->next & SHMB_WHOLE) && is_next_of(ring, joint, from, row);
}

/* False if the slot that holds the own row refers to it. Stores that slot in `*slot`. */
static bool is_free(const struct shmb_ring *ring, uint64_t whole, uint64_t *slot) {
    *slot = atomic_load_explicit(&ring->holders[whole], memory_order_relaxed);
    if (*slot >= ring->capacity) return true;
    unsigned state = SHMB_STATE(atomic_load_explicit(&ring->words[*slot], memory_order_relaxed));
    uint64_t next = atomic_load_explicit(&ring->nexts[*slot], memory_order_relaxed);
    return (state != SHMB_COMMITTED && state != SHMB_WRITING) || !(next & SHMB_WHOLE) || SHMB_AHEAD_OF(next) != whole;
}

/* Runs without the mutex, so that a claim need not skip the rows in use while it holds the mutex. */
static void search_wholes(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    uint64_t slot;
    plan->count = 0;
    for (uint64_t seen = 0; plan->count < plan->needed && seen < ring->wholes; seen++) {
        if (is_free(ring, plan->hand, &slot)) plan->found[plan->count++] = plan->hand;
        plan->hand = plan->hand + 1 < ring->wholes ? plan->hand + 1 : 0;
    }
}

bool shmb_plan_rows(struct shmb_ring *ring, const struct shmb_rows *rows, uint64_t count, const uint32_t *streams) {
    struct shmb_plan *plan = ring->plan;
    uint64_t skip = count > ring->capacity ? count - ring->capacity : 0;
    if (!has_room_for(plan, count - skip)) return false;
    if (plan->last.room) memset(plan->last.known, 0, plan->last.room * sizeof *plan->last.known);
    plan->last.used = plan->n_joints = 0;
    plan->keeps = false;
    plan->needed = count - skip;
    for (uint64_t row = 0; row < count - skip; row++) {
        uint64_t at = skip + row;
        uint64_t source = rows->sources ? rows->sources[at] : shmb_source(ring->incarnation, streams ? streams[at] : 0);
        if (!widen(&plan->last, 1)) return false;
        uint64_t number = find_known(&plan->last, source)->number, before = number - 1;
        plan->whose[row] = source;
        plan->wanted[row] = SHMB_WHOLE;
        if (number && rows->from && is_next_of_row(ring, rows->from, skip + before, at)) {
            plan->wanted[before] = (plan->wanted[before] & SHMB_BACK_BITS) | (row - before);
            plan->wanted[row] |= (row - before) << SHMB_NEXT_BITS;
            plan->needed--;
        } else if (!number && rows->from && plan->newest.used) {
            struct shmb_joint *joint = &plan->joints[plan->n_joints];
            joint->row = row;
            plan->n_joints += is_joint(ring, rows->from, source, at, joint);
        }
        note(&plan->last, source, row + 1);
    }
    if (!widen(&plan->newest, plan->last.used)) return false;
    search_wholes(ring);
    return true;
}

/* Plans a write to named slots. Each slot gets an own row, unless no observation changes. */
bool shmb_plan_slots(struct shmb_ring *ring, uint64_t count, bool keeps) {
    struct shmb_plan *plan = ring->plan;
    plan->keeps = keeps;
    plan->n_joints = plan->last.used = 0;
    return has_room_for(plan, count);
}

/* True if the claim from ticket `first` on overwrites the slot, so that its own row becomes free. */
static bool goes_with(const struct shmb_ring *ring, uint64_t slot, uint64_t first) {
    return ring->claim_kind == SHMB_RING_WRITE &&
           (slot + ring->capacity - first % ring->capacity) % ring->capacity < ring->claim_rows;
}

/* Stores nothing, because the claim may still be refused. */
int shmb_claim_wholes(struct shmb_ring *ring, uint64_t first) {
    struct shmb_plan *plan = ring->plan;
    uint64_t slot, count = plan->count;
    plan->count = 0;
    for (uint64_t i = 0; i < count; i++)
        if (is_free(ring, plan->found[i], &slot)) plan->found[plan->count++] = plan->found[i];
    if (plan->count == plan->needed) return SHMB_OK;
    plan->count = 0; /* few rows are free, or other claims took some of them */
    for (uint64_t seen = 0; plan->count < plan->needed && seen < ring->wholes; seen++) {
        if (is_free(ring, plan->hand, &slot) || goes_with(ring, slot, first)) plan->found[plan->count++] = plan->hand;
        plan->hand = plan->hand + 1 < ring->wholes ? plan->hand + 1 : 0;
    }
    shmb_refusal.needed = plan->needed;
    return plan->count == plan->needed ? SHMB_OK : SHMB_NO_WHOLES;
}

/* Searches for a free own row; SHMB_NO_SLOT: there is none. */
static uint64_t find_free_whole(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    uint64_t slot;
    for (uint64_t seen = 0; seen < ring->wholes; seen++) {
        uint64_t whole = plan->hand;
        plan->hand = whole + 1 < ring->wholes ? whole + 1 : 0;
        if (is_free(ring, whole, &slot)) return whole;
    }
    shmb_refusal.needed = 1;
    return SHMB_NO_SLOT;
}

/* Gives an item an own row with a copy of its next observation, which may be behind a link or in another item's own
 * row. */
static bool make_whole(struct shmb_ring *ring, uint64_t slot) {
    uint64_t next = shmb_next_of(ring, slot), whole = find_free_whole(ring);
    if (whole == SHMB_NO_SLOT) return false;
    for (unsigned which = 0; which < ring->n_once; which++) {
        const struct shmb_once *once = &ring->once[which];
        memcpy(ring->once[which].wholes + whole * once->bytes, shmb_next_at(ring, which, slot, next), once->bytes);
        CP(share_copied);
    }
    atomic_store_explicit(&ring->holders[whole], (uint32_t)slot, memory_order_relaxed);
    CP(share_held);
    next = (next & SHMB_BACK_BITS) | SHMB_WHOLE | SHMB_UNLINKED_WHOLE | whole;
    atomic_store_explicit(&ring->nexts[slot], next, SYNC_SLOT_NEXT_RELEASE);
    CP(share_made);
    return true;
}

static int by_number(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static bool is_one_of(const uint64_t *numbers, uint64_t count, uint64_t number) {
    return count && bsearch(&number, numbers, count, sizeof *numbers, by_number) != NULL;
}

/* The slot whose item links to this slot; SHMB_NO_SLOT: none. */
static uint64_t slot_behind(const struct shmb_ring *ring, uint64_t slot) {
    uint64_t back = SHMB_BACK_OF(atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed));
    if (back == 0 || back >= ring->capacity) return SHMB_NO_SLOT;
    uint64_t behind = slot >= back ? slot - back : slot + ring->capacity - back;
    uint64_t next = atomic_load_explicit(&ring->nexts[behind], memory_order_relaxed);
    unsigned state = SHMB_STATE(atomic_load_explicit(&ring->words[behind], memory_order_relaxed));
    bool links = (state == SHMB_COMMITTED || state == SHMB_WRITING) && !(next & SHMB_WHOLE) && SHMB_AHEAD_OF(next) == back;
    return links ? behind : SHMB_NO_SLOT;
}

/* Gives own rows to items that link to the named slots, before these are marked. Items that are overwritten
 * themselves need none, and the named slots keep own rows that they have. If the claim is refused afterwards, the
 * changes are still valid. */
int shmb_unlink_slots(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    uint64_t rows = ring->claim_rows, *slots = ring->touched, holder;
    if (plan->keeps) return SHMB_OK;
    for (uint64_t row = 0; row < rows; row++) slots[row] = (uint64_t)ring->claim_slots[row];
    qsort(slots, rows, sizeof *slots, by_number);
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t behind = slot_behind(ring, slots[row]);
        if (behind == SHMB_NO_SLOT || is_one_of(slots, rows, behind)) continue;
        if (!make_whole(ring, behind)) return SHMB_NO_WHOLES;
    }
    plan->needed = rows;
    plan->count = 0;
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t slot = (uint64_t)ring->claim_slots[row], next = shmb_next_of(ring, slot), whole = SHMB_AHEAD_OF(next);
        bool has_one = (next & SHMB_WHOLE) && whole < ring->wholes && !is_free(ring, whole, &holder) && holder == slot;
        plan->wanted[row] = has_one ? SHMB_WHOLE | whole : SHMB_NO_SLOT;
    }
    for (uint64_t row = 0, left = ring->wholes; row < rows; row++) {
        if (plan->wanted[row] != SHMB_NO_SLOT) continue;
        for (; left && !is_free(ring, plan->hand, &holder); left--) plan->hand = plan->hand + 1 < ring->wholes ? plan->hand + 1 : 0;
        shmb_refusal.needed = rows;
        if (left-- == 0) return SHMB_NO_WHOLES;
        plan->wanted[row] = SHMB_WHOLE | plan->hand;
        plan->hand = plan->hand + 1 < ring->wholes ? plan->hand + 1 : 0;
    }
    return SHMB_OK;
}

/* The slots say WRITING, so no process reads these values yet. */
void shmb_note_nexts(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    bool ring_write = ring->claim_kind == SHMB_RING_WRITE;
    for (uint64_t row = 0, n = 0; !plan->keeps && row < ring->claim_rows; row++) {
        uint64_t slot = shmb_slot_of_row(ring, row), next = plan->wanted[row];
        if (next & SHMB_WHOLE) {
            if (ring_write) next |= plan->found[n++];
            atomic_store_explicit(&ring->holders[SHMB_AHEAD_OF(next)], (uint32_t)slot, memory_order_relaxed);
            CP(share_holder);
        }
        atomic_store_explicit(&ring->nexts[slot], next, memory_order_relaxed);
        CP(share_next);
        if (ring_write) ring->sources[slot] = plan->whose[row];
        CP(share_source);
    }
}

/* Fills the own rows among the claim's rows from `first` on. */
void shmb_fill_nexts(struct shmb_ring *ring, const unsigned char *const *from, uint64_t skip_rows, uint64_t first, uint64_t rows) {
    for (unsigned which = 0; which < ring->n_once; which++) {
        const struct shmb_once *once = &ring->once[which];
        for (uint64_t row = first; row < first + rows; row++) {
            uint64_t next = shmb_next_of(ring, shmb_slot_of_row(ring, row));
            /* otherwise the link is damaged */
            if (!(next & SHMB_WHOLE) || SHMB_AHEAD_OF(next) >= ring->wholes) continue;
            memcpy(ring->once[which].wholes + SHMB_AHEAD_OF(next) * once->bytes,
                   from[once->leaf] + (skip_rows + row) * once->bytes, once->bytes);
            CP(share_filled);
        }
    }
}

/* Before the commit: stores in the slots that will become targets of links how far back the linking items are. Those
 * items must still be the ones found when the claim was planned, less than a lap back. */
void shmb_join_back(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    uint64_t n = 0;
    if (ring->claim_kind != SHMB_RING_WRITE) plan->n_joints = 0;
    for (uint64_t i = 0; i < plan->n_joints; i++) {
        struct shmb_joint joint = plan->joints[i];
        uint64_t ahead = ring->claim_first + joint.row - SHMB_TICKET(joint.word), slot = shmb_slot_of_row(ring, joint.row);
        if (!shmb_still_holds(ring, joint.slot, joint.word) || !shmb_next_holds(ring, joint.slot, joint.next)) continue;
        if (ahead >= ring->capacity) continue;
        uint64_t next = shmb_next_of(ring, slot) | ahead << SHMB_NEXT_BITS;
        atomic_store_explicit(&ring->nexts[slot], next, memory_order_relaxed);
        CP(share_back);
        joint.next = (joint.next & SHMB_BACK_BITS) | ahead;
        plan->joints[n++] = joint;
    }
    plan->n_joints = n;
}

/* Stores the links after the commit. The own rows of the linking items become free. */
void shmb_join(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    for (uint64_t i = 0; i < plan->n_joints; i++) {
        atomic_store_explicit(&ring->nexts[plan->joints[i].slot], plan->joints[i].next, SYNC_SLOT_NEXT_RELEASE);
        CP(share_link);
    }
    for (uint64_t i = 0; plan->last.used && i < plan->last.room; i++) {
        const struct shmb_known *last = &plan->last.known[i];
        if (last->number) note(&plan->newest, last->source, ring->claim_first + last->number);
    }
    plan->n_joints = 0;
}

/* True if the slot's link, or its own row, is valid when `head` is the next ticket. */
bool shmb_link_in_order(const struct shmb_ring *ring, uint64_t slot, uint64_t head) {
    uint64_t next = atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed), ahead = SHMB_AHEAD_OF(next), holder;
    if (next & SHMB_WHOLE) return ahead < ring->wholes && !is_free(ring, ahead, &holder) && holder == slot;
    /* distance to the newest slot, plus one */
    uint64_t until = ring->capacity - (slot + ring->capacity - head % ring->capacity) % ring->capacity;
    if (next & SHMB_UNLINKED_WHOLE || ahead == 0 || ahead >= until) return false;
    uint64_t there = slot + ahead < ring->capacity ? slot + ahead : slot + ahead - ring->capacity;
    uint64_t word = atomic_load_explicit(&ring->words[there], memory_order_relaxed);
    return SHMB_BACK_OF(atomic_load_explicit(&ring->nexts[there], memory_order_relaxed)) == ahead &&
           (SHMB_STATE(word) != SHMB_COMMITTED || ring->sources[there] == ring->sources[slot]);
}

static bool is_committed(const struct shmb_ring *ring, uint64_t slot) {
    return SHMB_STATE(atomic_load_explicit(&ring->words[slot], memory_order_relaxed)) == SHMB_COMMITTED;
}

/* True if the value is impossible, so that even an own row could not be filled from it. */
static bool leads_nowhere(const struct shmb_ring *ring, uint64_t next) {
    uint64_t ahead = SHMB_AHEAD_OF(next);
    return next & SHMB_WHOLE ? ahead >= ring->wholes : next & SHMB_UNLINKED_WHOLE || ahead == 0 || ahead >= ring->capacity;
}

/* Repairs `nexts` if the next ticket changes, or if some pages may be older than others: own rows get their holders,
 * and invalid links become own rows. Returns the number of items for which there was no own row. `drops` removes
 * these items. */
uint64_t shmb_mend_links(struct shmb_ring *ring, uint64_t head, bool drops) {
    uint64_t left = 0, holder;
    const uint64_t reached = shmb_reached(ring);
    for (uint64_t slot = 0; slot < reached; slot++) {
        uint64_t next = atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed), whole = SHMB_AHEAD_OF(next);
        if (!is_committed(ring, slot) || !(next & SHMB_WHOLE) || whole >= ring->wholes || !is_free(ring, whole, &holder)) continue;
        atomic_store_explicit(&ring->holders[whole], (uint32_t)slot, memory_order_relaxed);
        CP(share_found);
    }
    for (uint64_t slot = 0; slot < reached; slot++) {
        if (!is_committed(ring, slot) || shmb_link_in_order(ring, slot, head)) continue;
        uint64_t next = atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed);
        if (!leads_nowhere(ring, next) && make_whole(ring, slot)) continue;
        left++;
        if (drops) atomic_store_explicit(&ring->words[slot], SHMB_WORD(0, SHMB_EMPTY), memory_order_release);
        CP(share_dropped);
    }
    return left;
}
