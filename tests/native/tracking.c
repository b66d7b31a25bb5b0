#include <stdlib.h>
#include <string.h>

#include "roles.h"
#include "tables/follower.h"

#define PIECE 5 /* items per report, so that most reports have several parts */

static struct shmb_follower follower;
static unsigned char told[MAX_CAPACITY];

/* Each report is consistent with those before, although other threads write in the meantime. */
void track_once(struct shmb_ring *ring) {
    bool restarted;
    if (follower.reported == NULL && !shmb_follower_make(&follower, ring)) fail("no memory for a follower");
    follower.ring = ring;
    if (random_below(50) == 0) shmb_follower_forget(&follower);
    if (!shmb_follower_poll(&follower, &restarted)) return;
    if (restarted) memset(told, 0, sizeof told);
    for (uint64_t i = 0; i < follower.removed.count; i++) {
        struct shmb_pair run = follower.removed.at[follower.removed.begin + i];
        for (uint64_t slot = run.first; slot < run.first + run.second; slot++) {
            if (!told[slot]) fail("slot %llu is gone, and was not there", (unsigned long long)slot);
            told[slot] = 0;
        }
    }
    for (uint64_t i = 0; i < follower.changed.count; i++) {
        uint64_t slot = follower.changed.at[follower.changed.begin + i].first;
        if (!told[slot]) fail("slot %llu has changed, and was not there", (unsigned long long)slot);
    }
    int64_t slots[PIECE], reach[PIECE];
    for (uint64_t count; (count = shmb_follower_next(&follower, slots, reach, PIECE)) != 0;)
        for (uint64_t i = 0; i < count; i++) {
            if (told[slots[i]]) fail("slot %llu is new, and was there", (unsigned long long)slots[i]);
            if (reach[i] < 0 || (uint64_t)reach[i] > ring->capacity) fail("slot %llu reaches too far", (unsigned long long)slots[i]);
            told[slots[i]] = 1;
        }
    if (follower.failed) fail("no memory for what is followed");
    COUNT(tracked, 1);
}

/* After all writes, the reported items are those that are present. */
void track_to_the_end(struct shmb_ring *ring) {
    if (follower.reported == NULL) return;
    follower.ring = ring;
    for (int i = 0; i < 2; i++) track_once(ring);
    for (uint64_t slot = 0; slot < ring->capacity; slot++) {
        bool reported = SHMB_STATE(atomic_load(&ring->words[slot])) == SHMB_COMMITTED;
        if (reported != told[slot]) fail("slot %llu: reported %d, told %d", (unsigned long long)slot, reported, told[slot]);
    }
    shmb_follower_free(&follower);
}
