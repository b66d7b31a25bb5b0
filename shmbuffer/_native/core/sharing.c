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
    struct shmb_source_entry {
        uint64_t source, number; /* 0: an empty entry */
    } *cells;
    uint64_t capacity, used;
};

/* The first row of a source in a batch, whose observation is the next observation of a committed item. */
struct shmb_link_candidate {
    uint64_t slot, word, next, row;
};

/* Plan of the open claim of a handle. Only the thread inside the gate uses it. */
struct shmb_plan {
    struct shmb_table newest; /* 1 + ticket of the last item */
    struct shmb_table last;   /* 1 + row */
    uint64_t *links;         /* `nexts` value of each row; own rows have no number yet */
    uint64_t *row_sources;
    uint64_t *free_rows;          /* numbers of free own rows */
    struct shmb_link_candidate *candidates;
    uint64_t capacity;
    uint64_t needed, count; /* own rows that are needed, and that were found */
    uint64_t n_candidates, cursor;
    bool keeps; /* the claim changes no observation */
};

static struct shmb_source_entry *find_entry(const struct shmb_table *table, uint64_t source) {
    uint64_t at = (source * 0x9E3779B97F4A7C15u) >> 20 & (table->capacity - 1);
    while (table->cells[at].number && table->cells[at].source != source) at = (at + 1) & (table->capacity - 1);
    return &table->cells[at];
}

/* Makes space for `n_more` further sources. */
static bool grow_table(struct shmb_table *table, uint64_t n_more) {
    uint64_t capacity = table->capacity ? table->capacity : 16;
    while (capacity < 2 * (table->used + n_more)) capacity *= 2;
    if (capacity == table->capacity) return true;
    struct shmb_table wider = {calloc(capacity, sizeof *wider.cells), capacity, table->used};
    if (wider.cells == NULL) return false;
    for (uint64_t i = 0; i < table->capacity; i++)
        if (table->cells[i].number) *find_entry(&wider, table->cells[i].source) = table->cells[i];
    free(table->cells);
    *table = wider;
    return true;
}

static void store_number(struct shmb_table *table, uint64_t source, uint64_t number) {
    struct shmb_source_entry *entry = find_entry(table, source);
    table->used += entry->number == 0;
    *entry = (struct shmb_source_entry){source, number};
}

bool shmb_sharing_begin(struct shmb_ring *ring) {
    ring->plan = calloc(1, sizeof *ring->plan);
    if (ring->plan) ring->plan->cursor = (uint64_t)(ring->me - ring->entries) * 7919 % ring->own_rows;
    return ring->plan != NULL;
}

void shmb_sharing_end(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    if (plan == NULL) return;
    free(plan->newest.cells);
    free(plan->last.cells);
    free(plan->links);
    free(plan->row_sources);
    free(plan->free_rows);
    free(plan->candidates);
    free(plan);
}

static bool reserve_rows(struct shmb_plan *plan, uint64_t rows) {
    if (rows <= plan->capacity) return true;
    uint64_t *nexts = realloc(plan->links, rows * sizeof *nexts);
    if (nexts) plan->links = nexts;
    uint64_t *sources = realloc(plan->row_sources, rows * sizeof *sources);
    if (sources) plan->row_sources = sources;
    /* for each slot, and for the item that links to it */
    uint64_t *free_rows = realloc(plan->free_rows, 2 * rows * sizeof *free_rows);
    if (free_rows) plan->free_rows = free_rows;
    struct shmb_link_candidate *candidates = realloc(plan->candidates, rows * sizeof *candidates);
    if (candidates) plan->candidates = candidates;
    if (!nexts || !sources || !free_rows || !candidates) return false;
    plan->capacity = rows;
    return true;
}

void shmb_copy_next(const struct shmb_ring *ring, uint64_t slot, uint64_t next, unsigned char *const *out, uint64_t row) {
    for (unsigned which = 0; which < ring->n_shared; which++) {
        uint64_t bytes = ring->shared[which].bytes;
        memcpy(out[ring->shared[which].leaf] + row * bytes, shmb_next_address(ring, which, slot, next), bytes);
    }
}

static bool is_next_of_row(const struct shmb_ring *ring, const unsigned char *const *from, uint64_t before, uint64_t row) {
    for (unsigned which = 0; which < ring->n_shared; which++) {
        const struct shmb_shared_leaf *shared = &ring->shared[which];
        if (memcmp(from[shared->leaf] + before * shared->bytes, from[shared->root] + row * shared->bytes, shared->bytes) != 0) return false;
    }
    return true;
}

static bool is_next_of(const struct shmb_ring *ring, const struct shmb_link_candidate *candidate, const unsigned char *const *from, uint64_t row) {
    bool same = true;
    for (unsigned which = 0; same && which < ring->n_shared; which++) {
        const struct shmb_shared_leaf *shared = &ring->shared[which];
        const unsigned char *next = shmb_next_address(ring, which, candidate->slot, candidate->next);
        SHMB_OPTIMISTIC(same = memcmp(next, from[shared->root] + row * shared->bytes, shared->bytes) == 0);
    }
    return same;
}

/* True if this row follows the newest item of its source. The commit checks this again. */
static bool is_candidate(const struct shmb_ring *ring, const unsigned char *const *from, uint64_t source, uint64_t row,
                     struct shmb_link_candidate *candidate) {
    uint64_t number = find_entry(&ring->plan->newest, source)->number;
    if (number == 0) return false;
    candidate->slot = (number - 1) % ring->capacity;
    candidate->word = atomic_load_explicit(&ring->words[candidate->slot], SYNC_SLOT_COMMIT_ACQUIRE);
    candidate->next = shmb_read_next(ring, candidate->slot);
    return candidate->word == SHMB_WORD(number - 1, SHMB_COMMITTED) && (candidate->next & SHMB_OWN_ROW) && is_next_of(ring, candidate, from, row);
}

/* False if the slot that holds the own row refers to it. Stores that slot in `*slot`. */
static bool is_free(const struct shmb_ring *ring, uint64_t own_row, uint64_t *slot) {
    *slot = atomic_load_explicit(&ring->holders[own_row], memory_order_relaxed);
    if (*slot >= ring->capacity) return true;
    unsigned state = SHMB_STATE(atomic_load_explicit(&ring->words[*slot], memory_order_relaxed));
    uint64_t next = atomic_load_explicit(&ring->nexts[*slot], memory_order_relaxed);
    return (state != SHMB_COMMITTED && state != SHMB_WRITING) || !(next & SHMB_OWN_ROW) || SHMB_AHEAD_OF(next) != own_row;
}

/* Runs without the mutex, so that a claim need not skip the rows in use while it holds the mutex. */
static void search_own_rows(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    uint64_t slot;
    plan->count = 0;
    for (uint64_t seen = 0; plan->count < plan->needed && seen < ring->own_rows; seen++) {
        if (is_free(ring, plan->cursor, &slot)) plan->free_rows[plan->count++] = plan->cursor;
        plan->cursor = plan->cursor + 1 < ring->own_rows ? plan->cursor + 1 : 0;
    }
}

bool shmb_plan_rows(struct shmb_ring *ring, const struct shmb_rows *rows, uint64_t count, const uint32_t *streams) {
    struct shmb_plan *plan = ring->plan;
    uint64_t skip = count > ring->capacity ? count - ring->capacity : 0;
    if (!reserve_rows(plan, count - skip)) return false;
    if (plan->last.capacity) memset(plan->last.cells, 0, plan->last.capacity * sizeof *plan->last.cells);
    plan->last.used = plan->n_candidates = 0;
    plan->keeps = false;
    plan->needed = count - skip;
    for (uint64_t row = 0; row < count - skip; row++) {
        uint64_t at = skip + row;
        uint64_t source = rows->sources ? rows->sources[at] : shmb_source(ring->incarnation, streams ? streams[at] : 0);
        if (!grow_table(&plan->last, 1)) return false;
        uint64_t number = find_entry(&plan->last, source)->number, before = number - 1;
        plan->row_sources[row] = source;
        plan->links[row] = SHMB_OWN_ROW;
        if (number && rows->from && is_next_of_row(ring, rows->from, skip + before, at)) {
            plan->links[before] = (plan->links[before] & SHMB_BACK_BITS) | (row - before);
            plan->links[row] |= (row - before) << SHMB_NEXT_BITS;
            plan->needed--;
        } else if (!number && rows->from && plan->newest.used) {
            struct shmb_link_candidate *candidate = &plan->candidates[plan->n_candidates];
            candidate->row = row;
            plan->n_candidates += is_candidate(ring, rows->from, source, at, candidate);
        }
        store_number(&plan->last, source, row + 1);
    }
    if (!grow_table(&plan->newest, plan->last.used)) return false;
    search_own_rows(ring);
    return true;
}

/* Plans a write to named slots. Each slot gets an own row, unless no observation changes. */
bool shmb_plan_slots(struct shmb_ring *ring, uint64_t count, bool keeps) {
    struct shmb_plan *plan = ring->plan;
    plan->keeps = keeps;
    plan->n_candidates = plan->last.used = 0;
    return reserve_rows(plan, count);
}

/* True if the claim from ticket `first` on overwrites the slot, so that its own row becomes free. */
static bool is_overwritten_by_claim(const struct shmb_ring *ring, uint64_t slot, uint64_t first) {
    return ring->claim_kind == SHMB_RING_WRITE &&
           (slot + ring->capacity - first % ring->capacity) % ring->capacity < ring->claim_rows;
}

/* Stores nothing, because the claim may still be refused. */
int shmb_claim_own_rows(struct shmb_ring *ring, uint64_t first) {
    struct shmb_plan *plan = ring->plan;
    uint64_t slot, count = plan->count;
    plan->count = 0;
    for (uint64_t i = 0; i < count; i++)
        if (is_free(ring, plan->free_rows[i], &slot)) plan->free_rows[plan->count++] = plan->free_rows[i];
    if (plan->count == plan->needed) return SHMB_OK;
    plan->count = 0; /* few rows are free, or other claims took some of them */
    for (uint64_t seen = 0; plan->count < plan->needed && seen < ring->own_rows; seen++) {
        if (is_free(ring, plan->cursor, &slot) || is_overwritten_by_claim(ring, slot, first)) plan->free_rows[plan->count++] = plan->cursor;
        plan->cursor = plan->cursor + 1 < ring->own_rows ? plan->cursor + 1 : 0;
    }
    shmb_refusal.needed = plan->needed;
    return plan->count == plan->needed ? SHMB_OK : SHMB_NO_OWN_ROWS;
}

/* Searches for a free own row; SHMB_NO_SLOT: there is none. */
static uint64_t find_free_own_row(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    uint64_t slot;
    for (uint64_t seen = 0; seen < ring->own_rows; seen++) {
        uint64_t own_row = plan->cursor;
        plan->cursor = own_row + 1 < ring->own_rows ? own_row + 1 : 0;
        if (is_free(ring, own_row, &slot)) return own_row;
    }
    shmb_refusal.needed = 1;
    return SHMB_NO_SLOT;
}

/* Gives an item an own row with a copy of its next observation, which may be behind a link or in another item's own
 * row. */
static bool give_own_row(struct shmb_ring *ring, uint64_t slot) {
    uint64_t next = shmb_read_next(ring, slot), own_row = find_free_own_row(ring);
    if (own_row == SHMB_NO_SLOT) return false;
    for (unsigned which = 0; which < ring->n_shared; which++) {
        const struct shmb_shared_leaf *shared = &ring->shared[which];
        memcpy(ring->shared[which].own_rows + own_row * shared->bytes, shmb_next_address(ring, which, slot, next), shared->bytes);
        CP(share_copied);
    }
    atomic_store_explicit(&ring->holders[own_row], (uint32_t)slot, memory_order_relaxed);
    CP(share_assigned);
    next = (next & SHMB_BACK_BITS) | SHMB_OWN_ROW | SHMB_UNLINKED_OWN_ROW | own_row;
    atomic_store_explicit(&ring->nexts[slot], next, SYNC_SLOT_NEXT_RELEASE);
    CP(share_own_row);
    return true;
}

static int by_number(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static bool contains(const uint64_t *numbers, uint64_t count, uint64_t number) {
    return count && bsearch(&number, numbers, count, sizeof *numbers, by_number) != NULL;
}

/* The slot whose item links to this slot; SHMB_NO_SLOT: none. */
static uint64_t find_linking_slot(const struct shmb_ring *ring, uint64_t slot) {
    uint64_t distance = SHMB_BACK_OF(atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed));
    if (distance == 0 || distance >= ring->capacity) return SHMB_NO_SLOT;
    uint64_t linking = slot >= distance ? slot - distance : slot + ring->capacity - distance;
    uint64_t next = atomic_load_explicit(&ring->nexts[linking], memory_order_relaxed);
    unsigned state = SHMB_STATE(atomic_load_explicit(&ring->words[linking], memory_order_relaxed));
    bool links = (state == SHMB_COMMITTED || state == SHMB_WRITING) && !(next & SHMB_OWN_ROW) && SHMB_AHEAD_OF(next) == distance;
    return links ? linking : SHMB_NO_SLOT;
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
        uint64_t linking = find_linking_slot(ring, slots[row]);
        if (linking == SHMB_NO_SLOT || contains(slots, rows, linking)) continue;
        if (!give_own_row(ring, linking)) return SHMB_NO_OWN_ROWS;
    }
    plan->needed = rows;
    plan->count = 0;
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t slot = (uint64_t)ring->claim_slots[row], next = shmb_read_next(ring, slot), own_row = SHMB_AHEAD_OF(next);
        bool has_own_row = (next & SHMB_OWN_ROW) && own_row < ring->own_rows && !is_free(ring, own_row, &holder) && holder == slot;
        plan->links[row] = has_own_row ? SHMB_OWN_ROW | own_row : SHMB_NO_SLOT;
    }
    for (uint64_t row = 0, left = ring->own_rows; row < rows; row++) {
        if (plan->links[row] != SHMB_NO_SLOT) continue;
        for (; left && !is_free(ring, plan->cursor, &holder); left--) plan->cursor = plan->cursor + 1 < ring->own_rows ? plan->cursor + 1 : 0;
        shmb_refusal.needed = rows;
        if (left-- == 0) return SHMB_NO_OWN_ROWS;
        plan->links[row] = SHMB_OWN_ROW | plan->cursor;
        plan->cursor = plan->cursor + 1 < ring->own_rows ? plan->cursor + 1 : 0;
    }
    return SHMB_OK;
}

/* The slots say WRITING, so no process reads these values yet. */
void shmb_store_nexts(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    bool ring_write = ring->claim_kind == SHMB_RING_WRITE;
    for (uint64_t row = 0, n = 0; !plan->keeps && row < ring->claim_rows; row++) {
        uint64_t slot = shmb_slot_of_row(ring, row), next = plan->links[row];
        if (next & SHMB_OWN_ROW) {
            if (ring_write) next |= plan->free_rows[n++];
            atomic_store_explicit(&ring->holders[SHMB_AHEAD_OF(next)], (uint32_t)slot, memory_order_relaxed);
            CP(share_holder);
        }
        atomic_store_explicit(&ring->nexts[slot], next, memory_order_relaxed);
        CP(share_next);
        if (ring_write) ring->sources[slot] = plan->row_sources[row];
        CP(share_source);
    }
}

/* Fills the own rows among the claim's rows from `first` on. */
void shmb_fill_nexts(struct shmb_ring *ring, const unsigned char *const *from, uint64_t skip_rows, uint64_t first, uint64_t rows) {
    for (unsigned which = 0; which < ring->n_shared; which++) {
        const struct shmb_shared_leaf *shared = &ring->shared[which];
        for (uint64_t row = first; row < first + rows; row++) {
            uint64_t next = shmb_read_next(ring, shmb_slot_of_row(ring, row));
            /* otherwise the link is damaged */
            if (!(next & SHMB_OWN_ROW) || SHMB_AHEAD_OF(next) >= ring->own_rows) continue;
            memcpy(ring->shared[which].own_rows + SHMB_AHEAD_OF(next) * shared->bytes,
                   from[shared->leaf] + (skip_rows + row) * shared->bytes, shared->bytes);
            CP(share_filled);
        }
    }
}

/* Before the commit: stores in the slots that will become targets of links how far back the linking items are. Those
 * items must still be the ones found when the claim was planned, less than a lap back. */
void shmb_store_back_links(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    uint64_t n = 0;
    if (ring->claim_kind != SHMB_RING_WRITE) plan->n_candidates = 0;
    for (uint64_t i = 0; i < plan->n_candidates; i++) {
        struct shmb_link_candidate candidate = plan->candidates[i];
        uint64_t ahead = ring->claim_first + candidate.row - SHMB_TICKET(candidate.word), slot = shmb_slot_of_row(ring, candidate.row);
        if (!shmb_still_holds(ring, candidate.slot, candidate.word) || !shmb_link_still_holds(ring, candidate.slot, candidate.next)) continue;
        if (ahead >= ring->capacity) continue;
        uint64_t next = shmb_read_next(ring, slot) | ahead << SHMB_NEXT_BITS;
        atomic_store_explicit(&ring->nexts[slot], next, memory_order_relaxed);
        CP(share_back);
        candidate.next = (candidate.next & SHMB_BACK_BITS) | ahead;
        plan->candidates[n++] = candidate;
    }
    plan->n_candidates = n;
}

/* Stores the links after the commit. The own rows of the linking items become free. */
void shmb_store_links(struct shmb_ring *ring) {
    struct shmb_plan *plan = ring->plan;
    for (uint64_t i = 0; i < plan->n_candidates; i++) {
        atomic_store_explicit(&ring->nexts[plan->candidates[i].slot], plan->candidates[i].next, SYNC_SLOT_NEXT_RELEASE);
        CP(share_link);
    }
    for (uint64_t i = 0; plan->last.used && i < plan->last.capacity; i++) {
        const struct shmb_source_entry *last = &plan->last.cells[i];
        if (last->number) store_number(&plan->newest, last->source, ring->claim_first + last->number);
    }
    plan->n_candidates = 0;
}

/* True if the slot's link, or its own row, is valid when `head` is the next ticket. */
bool shmb_is_valid_link(const struct shmb_ring *ring, uint64_t slot, uint64_t head) {
    uint64_t next = atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed), ahead = SHMB_AHEAD_OF(next), holder;
    if (next & SHMB_OWN_ROW) return ahead < ring->own_rows && !is_free(ring, ahead, &holder) && holder == slot;
    /* distance to the newest slot, plus one */
    uint64_t until = ring->capacity - (slot + ring->capacity - head % ring->capacity) % ring->capacity;
    if (next & SHMB_UNLINKED_OWN_ROW || ahead == 0 || ahead >= until) return false;
    uint64_t target = slot + ahead < ring->capacity ? slot + ahead : slot + ahead - ring->capacity;
    uint64_t word = atomic_load_explicit(&ring->words[target], memory_order_relaxed);
    return SHMB_BACK_OF(atomic_load_explicit(&ring->nexts[target], memory_order_relaxed)) == ahead &&
           (SHMB_STATE(word) != SHMB_COMMITTED || ring->sources[target] == ring->sources[slot]);
}

static bool is_committed(const struct shmb_ring *ring, uint64_t slot) {
    return SHMB_STATE(atomic_load_explicit(&ring->words[slot], memory_order_relaxed)) == SHMB_COMMITTED;
}

/* True if the value is impossible, so that even an own row could not be filled from it. */
static bool is_impossible(const struct shmb_ring *ring, uint64_t next) {
    uint64_t ahead = SHMB_AHEAD_OF(next);
    return next & SHMB_OWN_ROW ? ahead >= ring->own_rows : next & SHMB_UNLINKED_OWN_ROW || ahead == 0 || ahead >= ring->capacity;
}

/* Repairs `nexts` if the next ticket changes, or if some pages may be older than others: own rows get their holders,
 * and invalid links become own rows. Returns the number of items for which there was no own row. `drops` removes
 * these items. */
uint64_t shmb_repair_links(struct shmb_ring *ring, uint64_t head, bool drops) {
    uint64_t left = 0, holder;
    const uint64_t reached = shmb_written_slots(ring);
    for (uint64_t slot = 0; slot < reached; slot++) {
        uint64_t next = atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed), own_row = SHMB_AHEAD_OF(next);
        if (!is_committed(ring, slot) || !(next & SHMB_OWN_ROW) || own_row >= ring->own_rows || !is_free(ring, own_row, &holder)) continue;
        atomic_store_explicit(&ring->holders[own_row], (uint32_t)slot, memory_order_relaxed);
        CP(share_restored);
    }
    for (uint64_t slot = 0; slot < reached; slot++) {
        if (!is_committed(ring, slot) || shmb_is_valid_link(ring, slot, head)) continue;
        uint64_t next = atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed);
        if (!is_impossible(ring, next) && give_own_row(ring, slot)) continue;
        left++;
        if (drops) atomic_store_explicit(&ring->words[slot], SHMB_WORD(0, SHMB_EMPTY), memory_order_release);
        CP(share_dropped);
    }
    return left;
}
