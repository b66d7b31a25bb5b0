/* W9: fills a claim's payload, priorities and checksums. No lock is held, because the slots belong to the writer. */
#include <string.h>

#include "core/claimed.h"
#include "core/crc32c.h"
#include "core/pool.h"

#define PARALLEL_ROWS 32 /* rows whose checksums are computed at the same time */
#define CHECKED_BYTES 64 /* salt, ticket and the overhead per row take as long as copying so many bytes */
#define MAX_ATTEMPTS 8 /* most attempts to read a next observation that moves; it moves at most twice while its item exists */

/* Starts checksums over salt, ticket and bytes of each row; complemented, see crc32c.h. */
static void begin_checksums(const struct shmb_ring *ring, const uint64_t *tickets, uint64_t rows, uint32_t *crc) {
    for (uint64_t row = 0; row < rows; row++) crc[row] = ~ring->salt;
    shmb_crc32c_rows(crc, (const unsigned char *)tickets, rows, sizeof *tickets);
}

/* For consecutive slots. */
static void add_to_checksums(const struct shmb_ring *ring, unsigned leaf, uint64_t slot, uint64_t rows, uint32_t *crc) {
    uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
    shmb_crc32c_rows(crc, ring->leaves[leaf].base + slot * bytes, rows, bytes);
}

/* Leaves that are stored once come last. False: a next observation moved during the computation, so the result may
 * be wrong. */
static bool add_nexts_to_checksums(const struct shmb_ring *ring, uint64_t slot, uint64_t rows, uint32_t *crc) {
    uint64_t nexts[PARALLEL_ROWS];
    bool stable = true;
    for (uint64_t row = 0; row < rows; row++) nexts[row] = shmb_read_next(ring, slot + row);
    for (unsigned which = 0; which < ring->n_shared; which++)
        for (uint64_t row = 0; row < rows; row++)
            shmb_crc32c_rows(&crc[row], shmb_next_address(ring, which, slot + row, nexts[row]), 1, ring->shared[which].bytes);
    atomic_thread_fence(SYNC_SLOT_NEXT_ACQUIRE);
    for (uint64_t row = 0; row < rows; row++) stable = stable && shmb_link_still_holds(ring, slot + row, nexts[row]);
    return stable;
}

static void checksums_of(const struct shmb_ring *ring, uint64_t slot, const uint64_t *tickets, uint64_t rows, uint32_t *crc) {
    int attempts = 0;
    do {
        begin_checksums(ring, tickets, rows, crc);
        for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) add_to_checksums(ring, leaf, slot, rows, crc);
    } while (ring->plan && !add_nexts_to_checksums(ring, slot, rows, crc) && ++attempts < MAX_ATTEMPTS);
}

uint32_t shmb_row_checksum(const struct shmb_ring *ring, uint64_t slot, uint64_t ticket) {
    uint32_t crc;
    checksums_of(ring, slot, &ticket, 1, &crc);
    crc = ~crc;
    if (ring->bytes) {
        struct shmb_extent extent = ring->extents[slot];
        if (!shmb_is_valid_extent(ring, extent)) return ~ring->checksums[slot];
        crc = shmb_crc32c(crc, shmb_record_at(ring, extent.position), extent.bytes);
    }
    return crc;
}

/* Long rows of leaves that are larger than any cache: written rows leave the cache before they would be read for the
 * checksum. */
#define LONG_ROW 1024
#define LARGE_LEAF (64u << 20)

static bool bypasses_cache(const struct shmb_ring *ring, unsigned leaf) {
    uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
    return bytes >= LONG_ROW && bytes % SHMB_MOVED_LINE == 0 && bytes * ring->capacity >= LARGE_LEAF;
}

static void store_checksums(const struct shmb_ring *ring, struct shmb_slot_run run, const uint32_t *crc) {
    uint32_t *checksums = ring->checksums + run.slot;
    bool armed = SHMB_ARMED;
    for (uint64_t row = 0; row < run.rows; row++) {
        checksums[row] = ~crc[row];
        CP_ROW(armed, write_checksum);
    }
}

/* Arguments of a fill. */
struct filling {
    struct shmb_ring *ring;
    const unsigned char *const *sources;
    uint64_t skip_rows;
};

/* W9 of a ring write with leaves of this kind: copies and computes checksums in one pass. */
static void fill_and_check(void *context, uint64_t begin, uint64_t end) {
    const struct filling *filling = context;
    struct shmb_ring *ring = filling->ring;
    const unsigned char *const *sources = filling->sources;
    const struct shmb_claimed claimed = shmb_claimed(ring);
    uint64_t tickets[4], rows, skip_rows = filling->skip_rows;
    uint32_t crc[4];
    for (uint64_t first = begin; first < end; first += rows) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, first, end - first < 4 ? end : first + 4);
        uint64_t slot = run.slot;
        rows = run.rows;
        for (uint64_t row = 0; row < rows; row++) tickets[row] = run.ticket + row;
        begin_checksums(ring, tickets, rows, crc);
        for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
            uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
            const unsigned char *from = sources[leaf] + (skip_rows + first) * bytes;
            unsigned char *to = ring->leaves[leaf].base + slot * bytes;
            if (bytes == 0) continue;
            if (rows == 4 && bypasses_cache(ring, leaf)) {
                shmb_crc32c_move(to, from, bytes, crc);
                CP(write_copy);
            } else {
                memcpy(to, from, rows * bytes);
                CP(write_copy);
                add_to_checksums(ring, leaf, slot, rows, crc);
            }
        }
        if (ring->plan) shmb_fill_nexts(ring, sources, skip_rows, first, rows);
        for (unsigned which = 0; which < ring->n_shared; which++) {
            const struct shmb_shared_leaf *shared = &ring->shared[which];
            shmb_crc32c_rows(crc, sources[shared->leaf] + (skip_rows + first) * shared->bytes, rows, shared->bytes);
        }
        store_checksums(ring, run, crc);
    }
}

static void fill_rows(void *context, uint64_t first, uint64_t end) {
    const struct filling *filling = context;
    const struct shmb_ring *ring = filling->ring;
    uint64_t slot = shmb_slot_of_row(ring, first), left = ring->capacity - slot, rows = end - first;
    uint64_t before = rows < left ? rows : left;
    for (unsigned leaf = 0; leaf < ring->n_leaves; leaf++) {
        uint64_t bytes = ring->leaves[leaf].element_bytes * ring->lanes;
        unsigned char *base = ring->leaves[leaf].base;
        const unsigned char *from = filling->sources[leaf] + (filling->skip_rows + first) * bytes;
        if (bytes == 0) continue;
        if (ring->claim_kind == SHMB_RING_WRITE) {
            memcpy(base + slot * bytes, from, before * bytes);
            CP(write_copy);
            if (before == rows) continue;
            memcpy(base, from + before * bytes, (rows - before) * bytes);
            CP(write_copy);
        } else {
            for (uint64_t row = 0; row < rows; row++) {
                memcpy(base + (uint64_t)ring->claim_slots[first + row] * bytes, from + row * bytes, bytes);
                CP(write_copy);
            }
        }
    }
}

/* W9: no lock is held, because the slots are ours. `sources` has the address of the first row of each leaf. The
 * first `skip_rows` rows of a batch that is larger than the ring are skipped. */
void shmb_fill(struct shmb_ring *ring, const unsigned char *const *sources, uint64_t skip_rows) {
    if (ring->claim_rows == 0) return;
    struct filling filling = {ring, sources, skip_rows};
    for (unsigned leaf = 0; ring->checksum && ring->claim_kind == SHMB_RING_WRITE && leaf < ring->n_leaves; leaf++)
        if (bypasses_cache(ring, leaf)) {
            if (ring->plan) /* links of a row lead to earlier rows, so this is not divided */
                fill_and_check(&filling, 0, ring->claim_rows);
            else
                shmb_divide(fill_and_check, &filling, ring->claim_rows, ring->row_bytes);
            ring->claim_checked = true;
            return;
        }
    if (ring->plan) shmb_fill_nexts(ring, sources, skip_rows, 0, ring->claim_rows);
    if (ring->claim_kind == SHMB_RING_WRITE)
        shmb_divide(fill_rows, &filling, ring->claim_rows, ring->row_bytes);
    else /* a slot that was named twice must hold the last of its rows */
        fill_rows(&filling, 0, ring->claim_rows);
}

/* Copies a piece of a record, and returns the checksum including its bytes. */
static uint32_t fill_piece(const struct shmb_ring *ring, uint64_t position, const unsigned char *from, uint64_t bytes, uint32_t crc) {
    unsigned char *body = shmb_record_at(ring, position);
    if (ring->checksum)
        crc = shmb_crc32c_copy(body, from, bytes, crc, ring->max_bytes >= LARGE_LEAF);
    else if (bytes)
        memcpy(body, from, bytes);
    CP(write_copy);
    return crc;
}

/* W9 for the bodies of records. Their checksums are computed during the copy. */
static void fill_records(void *what, uint64_t begin, uint64_t end) {
    const struct shmb_ring *ring = what;
    const struct shmb_batch *batch = &ring->claim_batch;
    const struct shmb_claimed claimed = shmb_claimed(ring);
    for (uint64_t row = begin; row < end; row++) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, row, row + 1);
        const uint64_t of = shmb_batch_row(ring, row), size = (uint64_t)batch->sizes[of], header = sizeof(struct shmb_record);
        const unsigned char *from = batch->data + batch->starts[of] + header;
        const uint64_t position = ring->extents[run.slot].position;
        uint64_t at = header;
        uint32_t crc = 0;
        if (ring->checksum) begin_checksums(ring, &run.ticket, 1, &crc), crc = shmb_crc32c(~crc, shmb_record_at(ring, position), header);
        for (uint64_t i = 0; i < batch->each; i++) {
            const struct shmb_outside piece = batch->outside[of * batch->each + i];
            const uint64_t before = (uint64_t)piece.offset - at;
            crc = fill_piece(ring, position + at, from, before, crc);
            crc = fill_piece(ring, position + (uint64_t)piece.offset, (const unsigned char *)(uintptr_t)piece.address, (uint64_t)piece.bytes, crc);
            from += before;
            at = (uint64_t)(piece.offset + piece.bytes);
        }
        crc = ~fill_piece(ring, position + at, from, size - at, crc);
        if (ring->checksum) store_checksums(ring, run, &crc);
    }
}

void shmb_fill_records(struct shmb_ring *ring) {
    shmb_divide(fill_records, ring, ring->claim_rows, ring->claim_rows ? ring->claim_bytes / ring->claim_rows + CHECKED_BYTES : 0);
    ring->claim_checked = ring->checksum;
}

static inline __attribute__((always_inline)) void fill_priorities(struct shmb_ring *ring, struct shmb_claimed claimed,
                                                                  const double *from) {
    for (uint64_t row = 0; row < claimed.rows;) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, row, claimed.rows);
        double *raw = ring->raw + run.slot * claimed.lanes;
        for (uint64_t e = 0; e < run.rows * claimed.lanes; e++) {
            double priority = *from++; /* a copy, because clang does not accept const double * here */
            __atomic_store(&raw[e], &priority, __ATOMIC_RELAXED); /* other end: masses_stay_finite */
            CP_ROW(claimed.armed, write_priority);
        }
        row += run.rows;
    }
}

void shmb_fill_priorities(struct shmb_ring *ring, const double *priorities, uint64_t skip_rows) {
    const struct shmb_claimed claimed = shmb_claimed(ring);
    SHMB_FOR_CLAIMED(claimed, fill_priorities(ring, claimed, priorities + skip_rows * claimed.lanes));
}

static void fill_checksums(void *context, uint64_t begin, uint64_t end) {
    const struct shmb_ring *ring = context;
    bool single = ring->claim_kind != SHMB_RING_WRITE;
    const struct shmb_claimed claimed = shmb_claimed(ring);
    uint64_t tickets[PARALLEL_ROWS], max_rows = single ? 1 : PARALLEL_ROWS;
    uint32_t crc[PARALLEL_ROWS];
    for (uint64_t row = begin; row < end;) {
        const struct shmb_slot_run run = shmb_run_from(&claimed, row, end - row < max_rows ? end : row + max_rows);
        for (uint64_t i = 0; i < run.rows; i++) tickets[i] = run.ticket + i;
        if (single)
            crc[0] = ~shmb_row_checksum(ring, run.slot, run.ticket);
        else
            checksums_of(ring, run.slot, tickets, run.rows, crc);
        store_checksums(ring, run, crc);
        row += run.rows;
    }
}

/* Computes the checksums of the items in these slots, in a ring that no other process uses. */
void shmb_seal(struct shmb_ring *ring, uint64_t first, uint64_t count) {
    uint64_t tickets[PARALLEL_ROWS], max_rows = ring->bytes ? 1 : PARALLEL_ROWS;
    uint32_t crc[PARALLEL_ROWS];
    for (uint64_t slot = first, end = first + count; slot < end;) {
        struct shmb_slot_run run = {.slot = slot, .rows = 0};
        for (; run.rows < max_rows && slot + run.rows < end; run.rows++) {
            uint64_t word = atomic_load_explicit(&ring->words[slot + run.rows], memory_order_relaxed);
            if (SHMB_STATE(word) != SHMB_COMMITTED) break;
            tickets[run.rows] = SHMB_TICKET(word);
        }
        if (run.rows && ring->bytes)
            crc[0] = ~shmb_row_checksum(ring, slot, tickets[0]);
        else if (run.rows)
            checksums_of(ring, slot, tickets, run.rows, crc);
        store_checksums(ring, run, crc);
        slot += run.rows ? run.rows : 1;
    }
}

void shmb_fill_checksums(struct shmb_ring *ring) {
    if (!ring->checksum || ring->claim_checked) return;
    if (ring->claim_kind == SHMB_RING_WRITE)
        shmb_divide(fill_checksums, ring, ring->claim_rows, ring->row_bytes + CHECKED_BYTES);
    else
        fill_checksums(ring, 0, ring->claim_rows);
}
