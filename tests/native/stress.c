/* Writers, learners and other roles that use one ring in the threads of one program, with the core as it is shipped.
 *
 * The program is for tools that can check only one process: ThreadSanitizer, AddressSanitizer, valgrind. A thread that
 * dies at a crash point leaves the mutex like a killed process: the kernel marks it, and the next owner repairs. A
 * violation ends the program with FAILED and status 1. Otherwise one line of JSON has the counts of all operations. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/crc32c.h"
#include "roles.h"

static struct shmb_ring shared;

/* All threads go on until each of them has done enough. */
static bool goes_on(uint64_t done, uint64_t enough) {
    if (done == enough) atomic_fetch_sub(&world.unfinished, 1);
    return atomic_load(&world.unfinished) > 0;
}

#define TAKES_EACH 12 /* also acknowledgements; the batches are small, so that writers find space */

static void act(struct shmb_ring *ring, uint64_t role) {
    if (world.options.consumed && (role == 2 || role == 3)) {
        for (int i = 0; i < TAKES_EACH; i++) consume_once(ring);
        return;
    }
    switch (role) {
    case 0: look_after_once(ring); break;
    case 1: (world.options.limited ? draw_once : learn_once)(ring); break;
    case 2: read_once(ring); break;
    case 3: copy_once(ring); break;
    default: write_once(ring);
    }
}

/* Threads 0 to 3 have the roles above, and all others write. Other operations take longer than a write. */
#define WRITES_EACH 16

static void *live(void *argument) {
    uint64_t number = (uint64_t)(uintptr_t)argument;
    struct shmb_ring own, *ring = world.options.shared ? &shared : &own;
    random_begin(world.options.seed * 1000 + number);
    if (!world.options.shared) handle_open(&own);
    uint64_t enough = number < 4 ? world.options.rounds / WRITES_EACH : world.options.rounds;
    for (uint64_t done = 0; goes_on(done, enough); done++) {
        act(ring, number);
        if (number == 2) track_once(ring);
        if (number == 0 && world.options.consumed) come_and_go(ring); /* a death in it would keep init_lock */
    }
    if (world.options.shared) {
        if (world.options.consumed) let_go_of_all(ring);
        return NULL;
    }
    struct shmb_call call = a_call();
    expect(shmb_leave(&own, &call), "leave");
    handle_free(&own);
    return NULL;
}

/* Performs random operations until the thread dies or leaves. */
static void *live_for_a_while(void *argument) {
    struct shmb_ring *ring = argument;
    struct shmb_call call = a_call();
    random_begin(world.options.seed * 1000 + 17 * ring->incarnation);
    fuse_set(1 + random_below(400));
    for (uint64_t left = random_below(40); left > 0; left--) act(ring, random_below(8));
    expect(shmb_leave(ring, &call), "leave");
    fuse_set(0);
    return NULL;
}

/* Starts mortal threads one after the other. A joined thread is proven dead. */
static void *raise_mortals(void *argument) {
    for (uint64_t done = 0; goes_on(done, world.options.rounds / WRITES_EACH); done++) {
        pthread_t thread;
        struct shmb_ring mortal;
        handle_open(&mortal);
        uint64_t entry = (uint64_t)(mortal.me - mortal.entries);
        if (pthread_create(&thread, NULL, live_for_a_while, &mortal) || pthread_join(thread, NULL)) fail("pthread_create");
        atomic_store(&world.dead[entry], mortal.incarnation);
        handle_free(&mortal);
    }
    return NULL;
}

static void let_live(const struct options *options) {
    pthread_t threads[64], mothers[2];
    uint64_t n = options->mortal ? 2 : 0;
    atomic_store(&world.unfinished, options->threads + n);
    for (uint64_t i = 0; i < options->threads; i++)
        if (pthread_create(&threads[i], NULL, live, (void *)(uintptr_t)i)) fail("pthread_create");
    for (uint64_t i = 0; i < n; i++)
        if (pthread_create(&mothers[i], NULL, raise_mortals, NULL)) fail("pthread_create");
    for (uint64_t i = 0; i < options->threads; i++) pthread_join(threads[i], NULL);
    for (uint64_t i = 0; i < n; i++) pthread_join(mothers[i], NULL);
}

/* After all calls have ended, each acknowledged item is present, or a later one is. */
static void audit(struct shmb_ring *ring) {
    reap_the_dead(ring);
    check_whole(ring);
    check_flow_once(ring);
    if (atomic_load(&ring->runtime->pending)) fail("a claim is counted that nobody has");
    if (atomic_load(&ring->runtime->reserved)) fail("%llu slots are reserved for nobody", (unsigned long long)ring->runtime->reserved);
    for (uint64_t slot = 0; slot < ring->capacity; slot++) {
        uint64_t word = atomic_load(&ring->words[slot]);
        bool gone = ring->bytes || world.options.upkeep; /* evicted, or emptied */
        if (SHMB_STATE(word) == SHMB_WRITING) fail("slot %llu is still being written", (unsigned long long)slot);
        if (!gone && SHMB_TICKET(word) + 1 < atomic_load(&world.acknowledged[slot])) fail("slot %llu lost an item", (unsigned long long)slot);
    }
    for (int i = 0; i < 20; i++) read_once(ring);
    copy_once(ring);
    track_to_the_end(ring);
    if (world.options.consumed) consume_the_rest(ring);
    uint64_t counted = atomic_load(&ring->runtime->write_count);
    if (!world.options.upkeep && (counted < atomic_load(&world.acknowledged_elements) || counted > atomic_load(&world.offered_elements)))
        fail("%llu elements were counted", (unsigned long long)counted);
}

static void parse(int argc, char **argv, struct options *options) {
    static const struct option names[] = {
        {"seed", 1, NULL, 's'},   {"rounds", 1, NULL, 't'},  {"capacity", 1, NULL, 'c'}, {"lanes", 1, NULL, 'l'},
        {"threads", 1, NULL, 'n'}, {"records", 1, NULL, 'r'}, {"mortal", 0, NULL, 'm'},   {"shared", 0, NULL, 'h'},
        {"once", 0, NULL, 'o'},   {"upkeep", 0, NULL, 'u'},  {"limited", 0, NULL, 'i'}, {"weights", 0, NULL, 'w'},
        {"consumed", 0, NULL, 'e'}, {NULL, 0, NULL, 0}};
    *options = (struct options){.seed = 1, .capacity = 7, .lanes = 1, .threads = 6, .rounds = 400};
    for (int name; (name = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        uint64_t value = optarg ? strtoull(optarg, NULL, 10) : 0;
        switch (name) {
        case 's': options->seed = value; break;
        case 't': options->rounds = value; break;
        case 'c': options->capacity = value; break;
        case 'l': options->lanes = value; break;
        case 'n': options->threads = value; break;
        case 'r': options->record_bytes = value; break;
        case 'm': options->mortal = true; break;
        case 'h': options->shared = true; break;
        case 'o': options->once = true; break;
        case 'u': options->upkeep = true; break;
        case 'i': options->limited = true; break;
        case 'e': options->consumed = true; break;
        case 'w': options->weights = true; break;
        default: exit(2);
        }
    }
    if (optind < argc || options->rounds < WRITES_EACH || options->capacity < 1 || options->capacity > MAX_CAPACITY || options->lanes < 1 ||
        options->lanes > 4 || options->threads < 1 || options->threads > 64)
        exit(2);
}

int main(int argc, char **argv) {
    struct options options;
    struct shmb_ring ring;
    struct shmb_call call = a_call();
    parse(argc, argv, &options);
    shmb_crc32c_init();
    world_begin(&options);
    random_begin(options.seed);
    handle_open(&ring);
    expect(shmb_set_alpha(&ring, &call, 0.6, 0.01, true), "set_alpha");
    if (options.consumed) consumers_open(&ring);
    if (options.shared) handle_open(&shared);
    (options.weights ? publish_and_look : let_live)(&options);
    audit(&ring);
    if (options.shared) handle_free(&shared);
    handle_free(&ring);
    uint64_t redraws = 0;
    for (unsigned entry = 0; entry < SHMB_ENTRIES; entry++) redraws += atomic_load(&world.entries[entry].redraws);
    printf("{\"redraws\": %llu", (unsigned long long)redraws);
#define X(name) printf(", \"" #name "\": %llu", (unsigned long long)atomic_load(&world.counts.name));
    COUNTS(X)
#undef X
    printf(", \"repairs\": %llu, \"rolled_back\": %llu, \"rolled_forward\": %llu, \"evicted\": %llu}\n",
           (unsigned long long)world.runtime->repairs, (unsigned long long)world.runtime->rolled_back,
           (unsigned long long)world.runtime->rolled_forward, (unsigned long long)world.runtime->evicted);
    return 0;
}
