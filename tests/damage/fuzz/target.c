/* Runs one input of the fuzzer: overwrites numbers in shared memory, and then calls the core on it.
 *
 *     byte 0        bit 0: items are records; bits 1-2: lanes - 1; bit 3: priorities are kept
 *     byte 1        number of changes, of ten bytes each: kind, offset (u16), where (u8), value (six bytes)
 *     the rest      one call per byte
 *
 * With any input, no call accesses other memory, ends the process, or runs for ever. The areas are allocated
 * separately, so that AddressSanitizer notices accesses between them. LLVMFuzzerTestOneInput is the name that
 * libFuzzer requires. driver.c is our own driver. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/check.h"
#include "core/ring.h"

#define CAPACITY 20u
#define RECORD_BYTES 8192u
#define ROW_BYTES 24u
#define MOST_LANES 3u
#define BATCH 6u
#define CHANGE 10u

static void never_blocks(struct shmb_call *call) {}
static bool never_interrupted(struct shmb_call *call) { return false; }

static struct shmb_call call = {never_blocks, never_interrupted, 1000};

struct specimen {
    struct shmb_ring ring;
    struct shmb_sections sections;
    unsigned char *control, *slots, *payload; /* shared memory */
    uint64_t payload_bytes;
    unsigned char *whole; /* all shared memory, before any damage */
};

static unsigned char rows[BATCH * MOST_LANES * ROW_BYTES], bodies[BATCH * 256];
static int64_t starts[BATCH], sizes[BATCH];
static double priorities[BATCH * MOST_LANES];

static void *need(void *memory) {
    if (memory == NULL || memory == MAP_FAILED) abort();
    return memory;
}

/* Maps the byte ring twice in a row between pages without access. */
static unsigned char *two_maps(void) {
    int fd = memfd_create("records", 0);
    if (fd < 0 || ftruncate(fd, RECORD_BYTES) != 0) abort();
    char *at = need(mmap(NULL, 2 * RECORD_BYTES + 2 * SHMB_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    for (int i = 0; i < 2; i++)
        need(mmap(at + SHMB_PAGE + i * RECORD_BYTES, RECORD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0));
    close(fd);
    return (unsigned char *)at + SHMB_PAGE;
}

static void commit_or_abort(struct shmb_ring *ring, bool commit) {
    if (commit)
        shmb_commit(ring, &call, true);
    else
        shmb_abort(ring, &call);
}

static void fill(struct shmb_ring *ring, uint64_t skip) {
    const unsigned char *sources[] = {rows};
    if (ring->bytes)
        shmb_fill_records(ring);
    else
        shmb_fill(ring, sources, skip);
    shmb_fill_priorities(ring, priorities, skip);
}

static struct shmb_batch batch_of(uint64_t count) { return (struct shmb_batch){bodies, starts, sizes, count, NULL, 0}; }

static void write_some(struct shmb_ring *ring, uint64_t count, bool commit) {
    struct shmb_batch batch = batch_of(count);
    uint64_t first;
    if (ring->bytes && shmb_check_batch(ring, &batch, sizeof bodies) != SHMB_OK) return;
    if (shmb_claim_ring(ring, &call, count, ring->bytes ? &batch : NULL, NULL, &first) != SHMB_OK) return;
    fill(ring, 0);
    commit_or_abort(ring, commit);
}

static void place_some(struct shmb_ring *ring, uint64_t slot, bool in_place) {
    int64_t slots[] = {(int64_t)(slot % CAPACITY), (int64_t)((slot + 3) % CAPACITY)};
    struct shmb_batch batch = batch_of(2);
    uint64_t taken;
    if (slots[0] > slots[1]) slots[0] ^= slots[1], slots[1] ^= slots[0], slots[0] ^= slots[1];
    if (ring->bytes && shmb_check_batch(ring, &batch, sizeof bodies) != SHMB_OK) return;
    if (shmb_claim_slots(ring, &call, slots, 2, in_place, NULL, NULL, ring->bytes ? &batch : NULL, &taken) != SHMB_OK) return;
    if (taken == 0) return;
    fill(ring, 0);
    commit_or_abort(ring, true);
}

static void sample_some(struct shmb_ring *ring, uint64_t key, bool prioritized) {
    enum { COUNT = 40 };
    static int64_t index[COUNT], tickets[COUNT], begin[COUNT], size[COUNT];
    static uint64_t positions[COUNT];
    static float weights[COUNT];
    static unsigned char out[COUNT * ROW_BYTES], records[RECORD_BYTES];
    unsigned char *leaves[] = {out};
    struct shmb_arena arena = {records, sizeof records, 0, begin, size, positions};
    uint64_t redrawn;
    int status = shmb_sample(ring, &call, COUNT, key, ring->bytes ? NULL : leaves, index, tickets, weights, 0.5, prioritized,
                             &redrawn, ring->bytes ? &arena : NULL);
    for (int i = 0; status == SHMB_OK && i < COUNT; i++) /* the drawn index must be valid */
        if ((uint64_t)index[i] >= ring->elements) abort();
}

static void read_all(struct shmb_ring *ring) {
    static int64_t index[CAPACITY * MOST_LANES], tickets[CAPACITY * MOST_LANES], begin[CAPACITY], size[CAPACITY];
    static uint64_t positions[CAPACITY];
    static unsigned char out[CAPACITY * MOST_LANES * ROW_BYTES], records[RECORD_BYTES];
    unsigned char *leaves[] = {out};
    struct shmb_arena arena = {records, sizeof records, 0, begin, size, positions};
    uint64_t missing;
    for (uint64_t i = 0; i < ring->elements; i++) index[i] = (int64_t)i;
    if (ring->bytes)
        shmb_read_records(ring, &call, index, CAPACITY, &arena, tickets);
    else
        shmb_read(ring, &call, index, ring->elements, leaves, tickets, &missing);
}

static void copy_all(struct shmb_ring *ring) {
    static int64_t tickets[CAPACITY];
    static uint64_t sources[CAPACITY];
    static struct shmb_extent extents[CAPACITY];
    static double raw[CAPACITY * MOST_LANES];
    static unsigned char out[CAPACITY * MOST_LANES * ROW_BYTES], rest[4 * RECORD_BYTES];
    unsigned char *leaves[] = {out};
    struct shmb_snapshot_counters moment;
    uint64_t span[3];
    if (!ring->bytes) {
        for (uint64_t slot = 0; slot < CAPACITY; slot++) tickets[slot] = -1;
        shmb_copy_slots(ring, 0, CAPACITY, leaves, tickets);
        shmb_finish_snapshot(ring, &call, leaves, tickets, sources, raw, &moment);
    } else if (shmb_read_span(ring, &call, span) == SHMB_OK) {
        shmb_finish_records_snapshot(ring, &call, span[0], rest, sizeof rest, tickets, extents, sources, raw, &moment);
    }
}

static void verify_all(struct shmb_ring *ring) {
    struct shmb_check found;
    for (uint64_t slot = 0; slot < CAPACITY; slot++)
        shmb_row_checksum(ring, slot, SHMB_TICKET(atomic_load(&ring->words[slot])));
    shmb_check(ring, &call, true, 0, &found);
}

static void update_some(struct shmb_ring *ring, uint64_t from) {
    int64_t index[] = {(int64_t)(from % ring->elements), (int64_t)((from + 5) % ring->elements)};
    uint64_t applied;
    shmb_update(ring, &call, index, NULL, priorities, 2, &applied);
}

/* Recovers like the library: a new mutex, all entries reaped, valid words, a consistent byte ring, and the tree. */
static void recover(struct shmb_ring *ring) {
    int64_t held[CAPACITY];
    uint64_t count = 0;
    bool freed;
    shmb_mutex_format(ring->runtime);
    for (uint32_t entry = 0; entry < SHMB_ENTRIES; entry++)
        if (&ring->entries[entry] != ring->me)
            shmb_reap(ring, &call, entry, atomic_load(&ring->entries[entry].incarnation), &freed);
    for (uint64_t slot = 0; slot < CAPACITY; slot++) {
        uint64_t word = atomic_load(&ring->words[slot]);
        bool item = SHMB_STATE(word) == SHMB_COMMITTED && SHMB_TICKET(word) % CAPACITY == slot;
        if (item && ring->bytes) item = shmb_is_valid_extent(ring, ring->extents[slot]);
        if (!item) atomic_store(&ring->words[slot], 0);
        uint64_t at = count;
        for (; item && ring->bytes && at > 0; at--) { /* slots are sorted by their positions */
            if (ring->extents[held[at - 1]].position <= ring->extents[slot].position) break;
            held[at] = held[at - 1];
        }
        if (item) held[at] = (int64_t)slot, count++;
    }
    if (ring->bytes) shmb_relink(ring, held, count);
    shmb_ring_leaves(ring);
    shmb_ring_parents(ring);
}

static void make_call(struct shmb_ring *ring, unsigned char what) {
    bool freed;
    uint64_t more = what / 16;
    switch (what % 16) {
    case 0: write_some(ring, 1 + more % BATCH, true); break;
    case 1: write_some(ring, 1 + more % BATCH, false); break;
    case 2: place_some(ring, more, false); break;
    case 3: place_some(ring, more, true); break;
    case 4: sample_some(ring, more, true); break;
    case 5: sample_some(ring, more, false); break;
    case 6: read_all(ring); break;
    case 7: copy_all(ring); break;
    case 8: verify_all(ring); break;
    case 9: update_some(ring, more); break;
    case 10: shmb_empty(ring, &call, more % 2); break;
    case 11: shmb_set_alpha(ring, &call, (double)more / 4, 0.1, false); break;
    case 12: shmb_reap(ring, &call, 1 + more % 3, atomic_load(&ring->entries[1 + more % 3].incarnation), &freed); break;
    case 13: shmb_restore(ring, &call, more, more, 1.0); break;
    case 14: shmb_repair(ring); break;
    case 15: recover(ring); break;
    }
}

static void live(struct specimen *one, bool prioritized) {
    struct shmb_ring *ring = &one->ring;
    struct shmb_entry *dead = &ring->entries[1];
    if (prioritized) shmb_set_alpha(ring, &call, 0.6, 0.1, true);
    for (int i = 0; i < 6; i++) write_some(ring, 1 + (unsigned)i, true);
    write_some(ring, 2, false);
    update_some(ring, 3);
    /* A writer that died between claim and commit. */
    uint64_t first = atomic_load(&ring->runtime->head);
    dead->incarnation = 7, dead->first = first, dead->count = 2, dead->phase = SHMB_PAYLOAD, dead->state = SHMB_LIVE;
    for (uint64_t ticket = first; ticket < first + 2; ticket++)
        atomic_store(&ring->words[ticket % CAPACITY], SHMB_WORD(ticket, SHMB_WRITING));
    ring->runtime->head = first + 2;
    shmb_ring_leaves(ring);
    shmb_ring_parents(ring);
}

static struct specimen *made(bool records, unsigned lanes, bool prioritized) {
    struct specimen *one = need(calloc(1, sizeof *one));
    struct shmb_ring *ring = &one->ring;
    shmb_init_process_token();
    shmb_compute_sections(CAPACITY, lanes, records, 0, &one->sections);
    one->control = need(aligned_alloc(64, SHMB_CONTROL_BYTES));
    one->slots = need(aligned_alloc(64, one->sections.bytes));
    one->payload_bytes = records ? RECORD_BYTES : CAPACITY * lanes * ROW_BYTES;
    one->payload = records ? two_maps() : need(malloc(one->payload_bytes));
    memset(one->control, 0, SHMB_CONTROL_BYTES);
    memset(one->slots, 0, one->sections.bytes);
    memset(one->payload, 0, one->payload_bytes);
    ring->runtime = (struct shmb_runtime *)(one->control + SHMB_RUNTIME_OFFSET);
    ring->entries = (struct shmb_entry *)(one->control + SHMB_REGISTRY_OFFSET);
    ring->me = &ring->entries[0];
    ring->mutex_kind = shmb_mutex_kind();
    ring->incarnation = 3;
    ring->capacity = CAPACITY;
    ring->lanes = lanes;
    ring->elements = CAPACITY * lanes;
    ring->words = (_Atomic uint64_t *)(one->slots + one->sections.words);
    ring->checksums = (uint32_t *)(one->slots + one->sections.checksums);
    ring->sources = (uint64_t *)(one->slots + one->sections.sources);
    ring->raw = (double *)(one->slots + one->sections.raw);
    ring->checksum = true;
    ring->process_token = shmb_process_token();
    shmb_tree_map(&ring->tree, &one->sections, one->slots);
    shmb_gate_init(&ring->gate);
    if (records) {
        ring->bytes = one->payload;
        ring->max_bytes = RECORD_BYTES;
        ring->extents = (struct shmb_extent *)(one->slots + one->sections.extents);
    } else {
        ring->leaves = need(malloc(sizeof *ring->leaves));
        ring->leaves[0] = (struct shmb_leaf){one->payload, ROW_BYTES, ROW_BYTES};
        ring->n_leaves = 1;
    }
    shmb_mutex_format(ring->runtime);
    ring->runtime->max_priority = -1;
    ring->runtime->alpha = 1;
    ring->runtime->state = SHMB_READY;
    ring->me->incarnation = ring->incarnation;
    ring->me->state = SHMB_LIVE;
    live(one, prioritized);
    one->whole = need(malloc(SHMB_CONTROL_BYTES + one->sections.bytes + one->payload_bytes));
    memcpy(one->whole, one->control, SHMB_CONTROL_BYTES);
    memcpy(one->whole + SHMB_CONTROL_BYTES, one->slots, one->sections.bytes);
    memcpy(one->whole + SHMB_CONTROL_BYTES + one->sections.bytes, one->payload, one->payload_bytes);
    return one;
}

static void put_back(struct specimen *one) {
    memcpy(one->control + SHMB_RUNTIME_OFFSET, one->whole + SHMB_RUNTIME_OFFSET, SHMB_CONTROL_BYTES - SHMB_RUNTIME_OFFSET);
    memcpy(one->slots, one->whole + SHMB_CONTROL_BYTES, one->sections.bytes);
    memcpy(one->payload, one->whole + SHMB_CONTROL_BYTES + one->sections.bytes, one->payload_bytes);
    one->ring.claimed = false;
    one->ring.inside = 0;
    one->ring.gate.thread = 0;
    one->ring.gate.in_call = false;
}

static void change(struct specimen *one, const unsigned char *how) {
    uint64_t value = 0, offset = (uint64_t)how[1] | (uint64_t)how[2] << 8;
    memcpy(&value, how + 4, 6);
    if (how[0] & 0x10) value = 0 - value;
    if (how[0] & 0x20) value <<= 16;
    unsigned char *area = one->slots;
    uint64_t bytes = one->sections.bytes;
    switch (how[3] % 4) {
    case 0: area = one->control + SHMB_RUNTIME_OFFSET, bytes = 208; break;
    case 1: area = one->control + SHMB_REGISTRY_OFFSET, bytes = 4 * SHMB_ENTRY_BYTES; break;
    case 2: break;
    case 3: area = one->payload, bytes = one->payload_bytes; break;
    }
    unsigned width = how[0] % 4 == 1 ? 4 : 8;
    unsigned char *at = area + offset % (bytes / width) * width;
    /* The C library trusts all fields of a mutex. The core checks only the kind, and a wrong holder only costs time. */
    unsigned char *kind = (unsigned char *)&one->ring.runtime->mutex.__data.__kind;
    if (area == one->control + SHMB_RUNTIME_OFFSET && at < area + sizeof one->ring.runtime->mutex_bytes && at != kind) return;
    uint64_t before = 0;
    memcpy(&before, at, width);
    if (how[0] % 4 == 2) value = before ^ (uint64_t)1 << value % 64;
    if (how[0] % 4 == 3) value = before + (uint64_t)(int64_t)(int8_t)value * 8;
    memcpy(at, &value, width);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
    static struct specimen *specimens[16];
    if (size < 2) return 0;
    bool records = data[0] & 1, prioritized = data[0] & 8;
    unsigned lanes = records ? 1 : 1 + (data[0] >> 1) % 4 % MOST_LANES;
    if (sizes[0] == 0)
        for (uint64_t i = 0, at = 0; i < BATCH; i++) {
            starts[i] = (int64_t)at, sizes[i] = (int64_t)(40 + 29 * i);
            at += ((uint64_t)sizes[i] + 7) / 8 * 8;
            for (unsigned lane = 0; lane < MOST_LANES; lane++) priorities[i * MOST_LANES + lane] = (double)(i + lane);
        }
    struct specimen **one = &specimens[(records ? 8 : lanes) + (prioritized ? 4 : 0)];
    if (*one == NULL) *one = made(records, lanes, prioritized);
    put_back(*one);
    size_t changes = data[1] % 8, at = 2;
    for (; changes > 0 && at + CHANGE <= size; changes--, at += CHANGE) change(*one, data + at);
    for (; at < size; at++) make_call(&(*one)->ring, data[at]);
    return 0;
}
