/* The byte ring as a recovery may find it: some items are gone, and the bytes between the others are arbitrary. After
 * shmb_relink the remaining items are read, and overwritten one by one. Each item is evicted before its bytes are used
 * again, because a reader would otherwise find bytes of another item. Arguments: first seed, number of cases. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/crc32c.h"
#include "roles.h"

#define CAPACITY 16
#define BYTES 4096

static struct shmb_ring ring;

static bool is_item(uint64_t slot) { return SHMB_STATE(atomic_load(&ring.words[slot])) == SHMB_COMMITTED; }

static void start_anew(void) {
    struct shmb_runtime *runtime = ring.runtime;
    memset(world.slots, 0, world.sections.bytes);
    memset(world.bytes, 0, BYTES);
    memset(world.acknowledged, 0, sizeof world.acknowledged);
    _Atomic uint64_t *counters[] = {&runtime->head, &runtime->write_count, &runtime->length, &runtime->byte_head, &runtime->byte_tail};
    for (unsigned i = 0; i < sizeof counters / sizeof counters[0]; i++) atomic_store(counters[i], 0);
}

/* Writes random bytes, or bytes that look like a header, between the items. */
static void damage(void) {
    static bool used[BYTES];
    memset(used, 0, sizeof used);
    for (uint64_t slot = 0; slot < CAPACITY; slot++)
        for (uint64_t i = 0; is_item(slot) && i < ring.extents[slot].bytes; i++) used[(ring.extents[slot].position + i) % BYTES] = true;
    for (uint64_t left = random_below(40); left > 0; left--) {
        uint64_t position = atomic_load(&ring.runtime->byte_tail) + 8 * random_below(BYTES / 8), bytes_of_it = 8 * random_below(40);
        struct shmb_record header = {random_below(64), position, bytes_of_it};
        unsigned char bytes[sizeof header];
        memcpy(bytes, &header, sizeof bytes);
        for (unsigned i = 0; i < sizeof bytes; i++)
            if (!used[(position + i) % BYTES]) ring.bytes[(position + i) % BYTES] = left % 2 ? bytes[i] : (unsigned char)random_below(256);
    }
}

static int by_position(const void *a, const void *b) {
    uint64_t x = ring.extents[*(const int64_t *)a].position, y = ring.extents[*(const int64_t *)b].position;
    return (x > y) - (x < y);
}

static void check_items(const char *who) {
    for (uint64_t slot = 0; slot < CAPACITY; slot++)
        if (is_item(slot))
            record_check(shmb_record_at(&ring, ring.extents[slot].position), ring.extents[slot].bytes,
                         SHMB_TICKET(atomic_load(&ring.words[slot])), who);
}

static uint64_t relink(bool damaged) {
    int64_t slots[CAPACITY];
    uint64_t count = 0, left = 0;
    for (uint64_t slot = 0; slot < CAPACITY; slot++)
        if (is_item(slot)) slots[count++] = (int64_t)slot;
    qsort(slots, count, sizeof slots[0], by_position);
    if (damaged) { /* after a power cut the counters are older than the slots */
        atomic_store(&ring.runtime->byte_tail, random_below(1 << 20) * 8);
        atomic_store(&ring.runtime->byte_head, random_below(1 << 20) * 8);
    }
    uint64_t forgotten = shmb_relink(&ring, slots, count);
    for (uint64_t slot = 0; slot < CAPACITY; slot++) left += is_item(slot);
    if (left + forgotten != count) fail("relink: %llu items became %llu", (unsigned long long)count, (unsigned long long)left);
    if (!damaged && forgotten) fail("relink: an item of a whole ring was forgotten");
    shmb_ring_leaves(&ring);
    shmb_ring_parents(&ring);
    return forgotten;
}

/* There is only one thread, so no order has to be varied, which would take three times as long. */
static void pass_by(int point) { (void)point; }

static uint64_t one_case(uint64_t seed) {
    random_begin(seed);
    start_anew();
    for (uint64_t left = 1 + random_below(60); left > 0; left--) write_once(&ring);
    bool damaged = random_below(4) > 0;
    for (uint64_t slot = 0; damaged && slot < CAPACITY; slot++)
        if (random_below(3) == 0) atomic_store(&ring.words[slot], SHMB_WORD(0, SHMB_EMPTY));
    if (damaged) damage();
    uint64_t forgotten = relink(damaged);
    check_items("relinked");
    check_whole(&ring);
    for (unsigned left = 40; left > 0; left--) {
        write_once(&ring);
        check_items("written over");
        check_whole(&ring);
        if (left % 8 == 0) read_once(&ring), copy_once(&ring), learn_once(&ring);
    }
    return forgotten;
}

int main(int argc, char **argv) {
    struct options options = {.seed = 1, .capacity = CAPACITY, .lanes = 1, .record_bytes = BYTES};
    struct shmb_call call = a_call();
    if (argc != 3) return 2;
    uint64_t first = strtoull(argv[1], NULL, 10), count = strtoull(argv[2], NULL, 10), forgotten = 0;
    shmb_crc32c_init();
    world_begin(&options);
    world.at_point = pass_by;
    handle_open(&ring);
    expect(shmb_set_alpha(&ring, &call, 0.6, 0.01, true), "set_alpha");
    for (uint64_t seed = first; seed < first + count; seed++) {
        world.options.seed = seed;
        forgotten += one_case(seed);
    }
    handle_free(&ring);
    printf("{\"cases\": %llu, \"forgotten\": %llu, \"checked\": %llu}\n", (unsigned long long)count, (unsigned long long)forgotten,
           (unsigned long long)atomic_load(&world.counts.checked));
    return 0;
}
