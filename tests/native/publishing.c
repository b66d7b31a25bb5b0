/* Publishers run one after the other, each in a thread that may die during a publish. Readers never wait. All words of
 * the weights contain the same number, so that a mixture of two versions shows. */
#include <stdlib.h>

#include "roles.h"

#define PIECES 3
#define WORDS 80

static const uint64_t sizes[PIECES] = {40 * 8, 8, 33 * 8}, places[PIECES] = {0, 40 * 8, 47 * 8};
static struct shmb_weights_map map;
static uint64_t number;                /* number of the last weights whose publication began */
static _Atomic uint64_t acknowledged;  /* number of the last weights whose publication returned */
static _Atomic bool published_all;

static void publish_once(void) {
    uint64_t words[WORDS], from[PIECES];
    number++;
    for (unsigned i = 0; i < WORDS; i++) words[i] = number;
    for (unsigned i = 0; i < PIECES; i++) from[i] = (uint64_t)(uintptr_t)words;
    const struct shmb_pieces pieces = {from, sizes, places, PIECES};
    uint64_t before = atomic_load(&map.page->newest);
    if (shmb_publish(&map, &pieces, (int64_t)number, 1) != before + 1) fail("publish: not version %llu", (unsigned long long)before + 1);
    atomic_store(&acknowledged, number);
    COUNT(writes, 1);
}

/* Returns the newest version, or `than` if there is no newer one. */
static uint64_t follow_once(uint64_t than) {
    /* If ThreadSanitizer checks the copies, only the version may order them. */
    uint64_t words[WORDS], known = world.options.once ? 0 : atomic_load(&acknowledged);
    struct shmb_weights_info found;
    int status = shmb_read_newest(&map, than, (unsigned char *)words, &found);
    if (status == SHMB_NOTHING) return than;
    if (status == SHMB_LAPPED) return COUNT(lapped, 1), than;
    expect(status, "newest");
    if (found.version <= than) fail("newest: version %llu again", (unsigned long long)found.version);
    if ((uint64_t)found.step < known) fail("newest: older than what was published");
    for (unsigned piece = 0; piece < PIECES; piece++)
        for (uint64_t i = places[piece] / 8; i < (places[piece] + sizes[piece]) / 8; i++)
            if (words[i] != (uint64_t)found.step) fail("newest: word %llu of %lld is not what was published", (unsigned long long)i, (long long)found.step);
    COUNT(checked, WORDS);
    return found.version;
}

static void *publish_for_a_while(void *argument) {
    random_begin(*(uint64_t *)argument);
    if (world.options.mortal) fuse_set(1 + random_below(40));
    for (uint64_t left = 1 + random_below(4); left > 0; left--) publish_once();
    fuse_set(0);
    return NULL;
}

/* A publisher holds the lock of the file until its end. Joining its thread has the same effect. */
static void *raise_publishers(void *argument) {
    for (uint64_t life = 0; life < world.options.rounds && !world.options.once; life++) {
        uint64_t seed = world.options.seed * 1000000 + life;
        pthread_t thread;
        if (pthread_create(&thread, NULL, publish_for_a_while, &seed) || pthread_join(thread, NULL)) fail("pthread_create");
    }
    for (int left = 2; world.options.once && left > 0; left--) publish_once(); /* once to each of the two copies */
    atomic_store(&published_all, true);
    return NULL;
}

static void *look_on(void *argument) {
    uint64_t version = 0;
    random_begin(world.options.seed * 1000 + (uint64_t)(uintptr_t)argument);
    while (!atomic_load(&published_all)) version = follow_once(random_below(4) ? version : 0);
    follow_once(0);
    return NULL;
}

void publish_and_look(const struct options *options) {
    pthread_t publisher, readers[8];
    unsigned n = options->threads < 8 ? (unsigned)options->threads : 8;
    map = (struct shmb_weights_map){calloc(1, sizeof *map.page), calloc(2, WORDS * 8), WORDS * 8};
    if (!map.page || !map.copies) fail("calloc");
    for (unsigned i = 0; i < n; i++)
        if (pthread_create(&readers[i], NULL, look_on, (void *)(uintptr_t)i)) fail("pthread_create");
    if (pthread_create(&publisher, NULL, raise_publishers, NULL)) fail("pthread_create");
    pthread_join(publisher, NULL);
    for (unsigned i = 0; i < n; i++) pthread_join(readers[i], NULL);
    if (follow_once(0) == 0) fail("newest: nothing is there");
    free(map.page), free(map.copies);
}
