#define _GNU_SOURCE
#include "world.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct world world;

static const uint64_t leaf_bytes[LEAVES] = {8, 24, 5, 1, 2, 4, 16, 32, 0};

static _Thread_local struct {
    uint64_t random, fuse;
    bool looks_away;
} me;

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "FAILED: seed %llu: ", (unsigned long long)world.options.seed);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(1);
}

void expect(int status, const char *what) {
    if (status != SHMB_OK) fail("%s: status %d", what, status);
}

/* SplitMix64. */
static uint64_t mixed(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

void random_begin(uint64_t seed) { me.random = mixed(seed); }
uint64_t random_below(uint64_t bound) { return mixed(me.random++) % bound; }

#if defined(__SANITIZE_THREAD__)
void __tsan_release(void *address);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);

void stress_look_away(void) {
    me.looks_away = !world.options.once;
    if (me.looks_away) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
}

void stress_look_again(void) {
    if (me.looks_away) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    me.looks_away = false;
}
#else
static void __tsan_release(void *address) {}
static void stress_look_again(void) {}
#endif

int stress_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until) {
    struct timespec now, a_little = {0, 20000};
    for (;;) {
        int error = pthread_mutex_trylock(mutex);
        if (error != EBUSY) return error;
        clock_gettime(clock, &now);
        if (now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)) return ETIMEDOUT;
        nanosleep(&a_little, NULL);
    }
}

void fuse_set(uint64_t points) {
    me.fuse = points;
}

/* The kernel orders a death before the EOWNERDEAD that reports it. ThreadSanitizer does not know this order. */
static _Noreturn void die(void) {
    me.fuse = 0;
    stress_look_again();
    COUNT(deaths, 1);
    __tsan_release(&world.runtime->mutex);
    pthread_exit(NULL);
}

void stress_point(int point) {
    if (world.at_point) {
        world.at_point(point);
        return;
    }
    if (me.fuse && --me.fuse == 0) die();
    uint64_t chance = random_below(128);
    if (chance < 2) {
        sched_yield();
    } else if (chance == 2) {
        struct timespec a_little = {0, (long)random_below(50000)};
        nanosleep(&a_little, NULL);
    } else if (chance < 8) {
        for (volatile uint64_t left = random_below(500); left > 0;) left--;
    }
}

static unsigned char *shared_bytes(int fd, uint64_t bytes) {
    void *place = mmap(NULL, bytes, PROT_READ | PROT_WRITE, fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (place == MAP_FAILED) fail("mmap of %llu bytes", (unsigned long long)bytes);
    return place;
}

/* Maps the bytes twice in a row, like map.c. */
static unsigned char *byte_ring(uint64_t bytes) {
    int fd = memfd_create("byte ring", 0);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) fail("memfd_create");
    unsigned char *place = shared_bytes(-1, 2 * bytes);
    for (int i = 0; i < 2; i++)
        if (mmap(place + (uint64_t)i * bytes, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
            fail("mmap of the byte ring");
    close(fd);
    return place;
}

void world_begin(const struct options *options) {
    world.options = *options;
    shmb_init_process_token();
    unsigned char *control = shared_bytes(-1, SHMB_CONTROL_BYTES);
    world.runtime = (struct shmb_runtime *)(control + SHMB_RUNTIME_OFFSET);
    world.entries = (struct shmb_entry *)(control + SHMB_REGISTRY_OFFSET);
    shmb_compute_sections(options->capacity, options->lanes, options->record_bytes > 0, 0, &world.sections);
    world.slots = shared_bytes(-1, world.sections.bytes);
    shmb_compute_parts(options->capacity, &world.parts);
    uint64_t ledger = options->consumed ? world.parts.bytes : world.parts.consumers;
    world.ledger = shared_bytes(-1, ledger);
    atomic_store(&((struct shmb_ledger *)world.ledger)->bytes, ledger);
    if (options->record_bytes) world.bytes = byte_ring(options->record_bytes);
    for (unsigned leaf = 0; leaf < LEAVES && !options->record_bytes; leaf++) {
        uint64_t bytes = leaf_bytes[leaf];
        unsigned char *base = bytes ? shared_bytes(-1, bytes * options->capacity * options->lanes) : NULL;
        world.leaves[leaf] = (struct shmb_leaf){base, bytes, bytes};
    }
    pthread_mutex_init(&world.init_lock, NULL);
    if (shmb_mutex_format(world.runtime)) fail("pthread_mutex_init");
    world.runtime->max_priority = -1;
    atomic_store(&world.runtime->state, SHMB_READY);
    atomic_store(&world.runtime->allocated, world.options.capacity);
}

/* Joins like registry.py, and maps like Ring(). */
void handle_open(struct shmb_ring *ring) {
    memset(ring, 0, sizeof *ring);
    pthread_mutex_lock(&world.init_lock);
    uint32_t entry = 0;
    while (entry < SHMB_ENTRIES && atomic_load(&world.entries[entry].state) != SHMB_FREE) entry++;
    if (entry == SHMB_ENTRIES) fail("the registry is full");
    struct shmb_entry *mine = &world.entries[entry];
    ring->incarnation = atomic_fetch_add(&world.runtime->next_incarnation, 1) + 1;
    atomic_store(&mine->incarnation, ring->incarnation);
    atomic_store(&mine->phase, SHMB_IDLE);
    atomic_store(&mine->turn, 0);
    atomic_store(&mine->pending, 0);
    atomic_store(&mine->reading, 0);
    atomic_store(&mine->waits_for, 0);
    atomic_store(&mine->state, SHMB_LIVE);
    pthread_mutex_unlock(&world.init_lock);
    ring->runtime = world.runtime;
    ring->entries = world.entries;
    ring->me = mine;
    ring->mutex_kind = shmb_mutex_kind();
    ring->capacity = world.options.capacity;
    ring->lanes = world.options.lanes;
    ring->elements = ring->capacity * ring->lanes;
    ring->words = (_Atomic uint64_t *)(world.slots + world.sections.words);
    ring->checksums = (uint32_t *)(world.slots + world.sections.checksums);
    ring->sources = (uint64_t *)(world.slots + world.sections.sources);
    ring->raw = (double *)(world.slots + world.sections.raw);
    ring->leaves = world.leaves;
    ring->parts = world.parts;
    ring->ledger = (struct shmb_ledger *)world.ledger;
    ring->reservations = (struct shmb_reservation *)(world.ledger + world.parts.reservations);
    ring->n_leaves = world.bytes ? 0 : LEAVES;
    ring->bytes = world.bytes;
    ring->max_bytes = world.options.record_bytes;
    if (world.bytes) ring->extents = (struct shmb_extent *)(world.slots + world.sections.extents);
    ring->checksum = true;
    ring->salt = 7;
    ring->process_token = shmb_process_token();
    shmb_tree_map(&ring->tree, &world.sections, world.slots);
    shmb_gate_init(&ring->gate);
}

void handle_free(struct shmb_ring *ring) {
    free(ring->claim_slots);
    free(ring->claim_from);
    free(ring->masses);
    free(ring->touched);
}

/* Writes `bytes` bytes of an endless sequence. */
static void fill(unsigned char *to, uint64_t item, uint64_t stream, uint64_t from, uint64_t bytes) {
    uint64_t eight = 0;
    for (uint64_t at = from; at < from + bytes; at++) {
        if (at == from || at % 8 == 0) eight = mixed(item * 1024 + stream + at / 8 * 0x100000000u);
        *to++ = (unsigned char)(eight >> (8 * (at % 8)));
    }
}

void item_fill(unsigned char *to, unsigned leaf, uint64_t ticket, uint64_t lane, uint64_t bytes) {
    fill(to, ticket * world.options.lanes + lane, leaf, 0, bytes);
}

void item_check(const unsigned char *const *leaves, uint64_t ticket, uint64_t lane, const char *who) {
    unsigned char right[32];
    for (unsigned leaf = 0; leaf < LEAVES; leaf++) {
        item_fill(right, leaf, ticket, lane, leaf_bytes[leaf]);
        if (memcmp(right, leaves[leaf], leaf_bytes[leaf]))
            fail("%s: leaf %u of ticket %llu is not what was written", who, leaf, (unsigned long long)ticket);
    }
    COUNT(checked, 1);
}

void record_fill(unsigned char *body, uint64_t ticket, uint64_t from, uint64_t bytes) {
    fill(body, ticket, 0, from, bytes);
}

void record_check(const unsigned char *record, uint64_t bytes, uint64_t ticket, const char *who) {
    struct shmb_record header;
    unsigned char right[256]; /* records are shorter */
    memcpy(&header, record, sizeof header);
    if (header.ticket != ticket || header.bytes != bytes || bytes > sizeof right)
        fail("%s: the header of ticket %llu names %llu", who, (unsigned long long)ticket, (unsigned long long)header.ticket);
    fill(right, ticket, 0, sizeof header, bytes - sizeof header);
    if (memcmp(right, record + sizeof header, bytes - sizeof header))
        fail("%s: the body of ticket %llu is not what was written", who, (unsigned long long)ticket);
    COUNT(checked, 1);
}
