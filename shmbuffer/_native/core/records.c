/* The byte ring: where the bytes of a record go, and which older records are evicted for them.
 *
 * Bytes are allocated in the order of tickets and freed in the same order. The tail advances from header to header,
 * and evicts each item that it passes. Records without an item (overwritten, aborted, emptied) are skipped. The
 * mutex is held meanwhile. The record bodies are copied without it. */
#include <string.h>

#include "core/claimed.h"

#define HEADER sizeof(struct shmb_record)
#define LAST_POSITION ((uint64_t)1 << 62)
#define MAX_TRIMMED 64   /* records without an item that each claim skips in addition */
#define EVICTION_BATCH 256  /* elements whose parents are recomputed together */

static inline uint64_t align8(uint64_t bytes) { return (bytes + 7) & ~(uint64_t)7; }

static inline struct shmb_record *header_at(const struct shmb_ring *ring, uint64_t position) {
    return (struct shmb_record *)shmb_record_at(ring, position);
}

/* True if the record belongs to the slot's item, or to the item that is being written there. */
static inline bool is_in_slot(const struct shmb_ring *ring, const struct shmb_record *record, enum shmb_state state) {
    uint64_t slot = record->ticket % ring->capacity;
    return atomic_load_explicit(&ring->words[slot], memory_order_relaxed) == SHMB_WORD(record->ticket, state) &&
           ring->extents[slot].position == record->position;
}

/* A damaged size could lead to the header of a later record, so the size in the slot must be the same. */
static inline bool is_valid_header(const struct shmb_ring *ring, const struct shmb_record *record, uint64_t at, uint64_t end) {
    const struct shmb_extent extent = ring->extents[record->ticket % ring->capacity];
    return record->position == at && record->bytes >= HEADER && record->bytes <= end - at && align8(record->bytes) <= end - at &&
           (extent.position != at || extent.bytes == record->bytes);
}

/* True if a record of the slot's present or future item is at that position. A slot that was just marked still has
 * the extent of its previous item. */
static inline bool is_record_position(const struct shmb_ring *ring, uint64_t slot, uint64_t position) {
    unsigned state = SHMB_STATE(atomic_load_explicit(&ring->words[slot], memory_order_relaxed));
    return state == SHMB_COMMITTED || (state == SHMB_WRITING && position % 8 == 0 &&
                                       is_in_slot(ring, header_at(ring, position), SHMB_WRITING));
}

/* The position of the next header. If memory is damaged and a header does not lead to the next one, the slots are
 * searched. */
static uint64_t next_record(const struct shmb_ring *ring, uint64_t at, uint64_t head) {
    const struct shmb_record *record = header_at(ring, at);
    if (__builtin_expect(is_valid_header(ring, record, at, head), 1)) return at + align8(record->bytes);
    uint64_t next = head;
    for (uint64_t slot = 0, reached = shmb_written_slots(ring); slot < reached; slot++) {
        uint64_t position = ring->extents[slot].position;
        if (position > at && position < next && is_record_position(ring, slot, position)) next = position;
    }
    return next;
}

/* Returns how many bytes of a record are in the data of its batch; -1 if its other pieces overlap or leave the record. */
static int64_t bytes_in_data(const struct shmb_batch *batch, uint64_t row) {
    int64_t size = batch->sizes[row], at = HEADER, within = size;
    for (uint64_t i = 0; i < batch->each; i++) {
        const struct shmb_outside piece = batch->outside[row * batch->each + i];
        if (piece.bytes < 0 || piece.offset < at || piece.offset > size || piece.bytes > size - piece.offset) return -1;
        at = piece.offset + piece.bytes;
        within -= piece.bytes;
    }
    return within;
}

/* Checks that every record is within the caller's batch. Returns SHMB_BAD_BATCH if one is not (see
 * shmb_refusal.bad_at), and SHMB_TOO_LARGE if the ring is too small. */
int shmb_check_batch(struct shmb_ring *ring, const struct shmb_batch *batch, uint64_t bytes) {
    const uint64_t skipped = batch->count > ring->capacity ? batch->count - ring->capacity : 0;
    uint64_t needed = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        uint64_t start = (uint64_t)batch->starts[i], size = (uint64_t)batch->sizes[i];
        shmb_refusal.bad_at = i;
        int64_t within = size < HEADER || size > INT64_MAX ? -1 : bytes_in_data(batch, i);
        if (start % 8 || start > bytes || within < (int64_t)HEADER || (uint64_t)within > bytes - start) return SHMB_BAD_BATCH;
        if (i >= skipped) needed += align8(size);
    }
    shmb_refusal.needed = needed;
    return needed > ring->max_bytes ? SHMB_TOO_LARGE : SHMB_OK;
}

static inline uint64_t size_of_row(const struct shmb_ring *ring, uint64_t row) {
    return (uint64_t)ring->claim_batch.sizes[shmb_batch_row(ring, row)];
}

static uint64_t bytes_of_claim(const struct shmb_ring *ring) {
    uint64_t needed = 0;
    for (uint64_t row = 0; row < ring->claim_rows; row++) needed += align8(size_of_row(ring, row));
    return needed;
}

static inline bool has_room(const struct shmb_ring *ring, uint64_t tail, uint64_t head, uint64_t needed) {
    return head + needed - tail <= ring->max_bytes;
}

/* W1 for bytes: counts the needed bytes, and returns true if a live claim is filling bytes that must be freed. */
bool shmb_bytes_are_being_written(struct shmb_ring *ring) {
    uint64_t needed = ring->claim_bytes = bytes_of_claim(ring);
    uint64_t head = atomic_load_explicit(&ring->runtime->byte_head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    for (; !has_room(ring, tail, head, needed); tail = next_record(ring, tail, head)) {
        const struct shmb_record *record = header_at(ring, tail);
        if (is_in_slot(ring, record, SHMB_WRITING) && shmb_is_being_written(ring, record->ticket % ring->capacity))
            return true;
    }
    return false;
}

/* True if a claim of so many bytes, including the reserved bytes, would evict an item of a queue or a consumer at
 * `place` or later. */
bool shmb_evicts_from(const struct shmb_ring *ring, uint64_t place, uint64_t since, uint64_t bytes) {
    uint64_t head = atomic_load_explicit(&ring->runtime->byte_head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    if (bytes > ring->max_bytes) return true;
    for (; !has_room(ring, tail, head, bytes); tail = next_record(ring, tail, head)) {
        const struct shmb_record *record = header_at(ring, tail);
        uint64_t item_place = shmb_place_since(record->ticket, since, ring->capacity);
        if (is_in_slot(ring, record, SHMB_COMMITTED) && item_place >= place) return true;
    }
    return false;
}

static void evict(struct shmb_ring *ring, uint64_t slot, uint64_t *touched, uint64_t *count) {
    if (ring->tree.mass[slot] != 0) {
        ring->tree.mass[slot] = 0;
        CP(write_evict_leaf);
        touched[(*count)++] = slot;
    }
    atomic_store_explicit(&ring->words[slot], SHMB_WORD(0, SHMB_EMPTY), memory_order_release);
    CP(write_evict);
    atomic_fetch_sub_explicit(&ring->runtime->length, 1, memory_order_relaxed);
    CP(write_evicted);
    atomic_fetch_add_explicit(&ring->runtime->evicted, 1, memory_order_relaxed);
    CP(count_added);
    if (*count == EVICTION_BATCH) {
        shmb_tree_update(&ring->tree, touched, *count);
        *count = 0;
    }
}

/* Advances the tail as far as needed, and past further records without an item. */
static uint64_t move_tail(struct shmb_ring *ring, uint64_t head, uint64_t needed) {
    uint64_t touched[EVICTION_BATCH], count = 0;
    uint64_t tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    for (; !has_room(ring, tail, head, needed); tail = next_record(ring, tail, head)) {
        const struct shmb_record *record = header_at(ring, tail);
        if (is_in_slot(ring, record, SHMB_COMMITTED)) evict(ring, record->ticket % ring->capacity, touched, &count);
    }
    if (count) shmb_tree_update(&ring->tree, touched, count);
    for (uint64_t left = ring->claim_rows + MAX_TRIMMED; tail < head && left > 0; left--) {
        const struct shmb_record *record = header_at(ring, tail);
        if (is_in_slot(ring, record, SHMB_COMMITTED) || is_in_slot(ring, record, SHMB_WRITING)) break;
        tail = next_record(ring, tail, head);
    }
    return tail;
}

/* Allocates the bytes of a claim that is being marked. Positions are in the order of tickets. The slots of a placed
 * write ascend, but its lap may begin at a slot in the middle. If a process dies before the head moves, it leaves
 * bytes that no slot refers to. If it dies afterwards, it leaves records of slots that are rolled back. */
void shmb_claim_bytes(struct shmb_ring *ring) {
    struct shmb_runtime *runtime = ring->runtime;
    uint64_t head = atomic_load_explicit(&runtime->byte_head, memory_order_relaxed), rows = ring->claim_rows, begin = 0;
    atomic_store_explicit(&runtime->byte_tail, move_tail(ring, head, ring->claim_bytes), memory_order_release);
    CP(write_tail);
    /* words say EMPTY or WRITING before any byte of their records changes */
    atomic_thread_fence(SYNC_SLOT_CLAIM_RELEASE);
    atomic_store_explicit(&ring->me->byte_first, head, memory_order_relaxed);
    CP(write_byte_first);
    if (ring->claim_kind != SHMB_RING_WRITE)
        while (begin < rows && (uint64_t)ring->claim_slots[begin] < ring->claim_first % ring->capacity) begin++;
    uint64_t position = head;
    for (uint64_t i = 0; i < rows; i++) {
        uint64_t row = (begin + i) % rows, slot = shmb_slot_of_row(ring, row), bytes = size_of_row(ring, row);
        *header_at(ring, position) = (struct shmb_record){shmb_ticket_of_row(ring, row), position, bytes};
        CP(write_header);
        ring->extents[slot] = (struct shmb_extent){position, bytes};
        CP(write_extent);
        position += align8(bytes);
    }
    atomic_store_explicit(&runtime->byte_head, position, memory_order_release);
    CP(write_bytes);
}

/* True if the extent is possible. After a power cut shared memory may contain any values. */
bool shmb_is_valid_extent(const struct shmb_ring *ring, struct shmb_extent extent) {
    return extent.bytes >= HEADER && extent.bytes <= ring->max_bytes && extent.position % 8 == 0 &&
           extent.position <= UINT64_MAX / 2;
}

/* True if the extent is between tail and head. */
bool shmb_is_extent_in_use(const struct shmb_ring *ring, struct shmb_extent extent) {
    uint64_t head = atomic_load_explicit(&ring->runtime->byte_head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    return shmb_is_valid_extent(ring, extent) && extent.position >= tail && extent.position + extent.bytes <= head &&
           head - tail <= ring->max_bytes;
}

/* True if the values of tail and head are possible. */
bool shmb_is_valid_span(const struct shmb_ring *ring) {
    uint64_t head = atomic_load_explicit(&ring->runtime->byte_head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    return head % 8 == 0 && tail % 8 == 0 && head - tail <= ring->max_bytes && head <= LAST_POSITION;
}

/* No item has a smaller ticket, except for items of the last lap. */
uint64_t shmb_oldest_ticket(const struct shmb_ring *ring) {
    uint64_t head = atomic_load_explicit(&ring->runtime->byte_head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->runtime->byte_tail, memory_order_relaxed);
    return tail < head && shmb_is_valid_span(ring) ? header_at(ring, tail)->ticket : 0;
}

static void remove_item(struct shmb_ring *ring, uint64_t slot) {
    atomic_store_explicit(&ring->words[slot], SHMB_WORD(0, SHMB_EMPTY), memory_order_release);
    CP(relink_forgotten);
}

/* True if the header of the item agrees with its slot. */
static bool is_item_at(const struct shmb_ring *ring, struct shmb_extent extent) {
    const struct shmb_record *record = header_at(ring, extent.position);
    return record->bytes == extent.bytes && is_valid_header(ring, record, extent.position, extent.position + ring->max_bytes);
}

/* Restores the chain of headers from the oldest item to the newest. Recovery calls this while no client is alive,
 * and only items are left in the slots. `slots` are in the order of their positions. Items that overlap another
 * record are removed. Returns their number. Each gap gets a header without an item. */
uint64_t shmb_relink(struct shmb_ring *ring, const int64_t *slots, uint64_t count) {
    uint64_t forgotten = 0, end = 0, tail = 0, at = 0;
    bool begun = false;
    for (uint64_t i = 0; i < count; i++) {
        const struct shmb_extent extent = ring->extents[slots[i]];
        if (is_item_at(ring, extent) && extent.position + align8(extent.bytes) > end) end = extent.position + align8(extent.bytes);
    }
    for (uint64_t i = 0; i < count; i++) {
        const struct shmb_extent extent = ring->extents[slots[i]];
        const uint64_t position = extent.position;
        if (!is_item_at(ring, extent) || end - position > ring->max_bytes || (begun && position != at && position < at + HEADER)) {
            remove_item(ring, (uint64_t)slots[i]);
            forgotten++;
            continue;
        }
        if (!begun)
            tail = position;
        else if (position > at) {
            *header_at(ring, at) = (struct shmb_record){0, at, position - at};
            CP(relink_header);
        }
        begun = true;
        at = position + align8(extent.bytes);
    }
    atomic_store(&ring->runtime->byte_tail, tail);
    CP(relink_tail);
    atomic_store(&ring->runtime->byte_head, at);
    CP(relink_head);
    return forgotten;
}
