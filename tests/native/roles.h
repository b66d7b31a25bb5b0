/* What a thread does once with a handle. Each call is whole: nothing is claimed before and after it. */
#ifndef STRESS_ROLES_H
#define STRESS_ROLES_H

#include "world.h"

void write_once(struct shmb_ring *ring);      /* a ring, placed or in-place write; now and then aborted */
void learn_once(struct shmb_ring *ring);      /* sample, look at each item, update their priorities */
void draw_once(struct shmb_ring *ring);       /* learn_once within the limiter; out of a queue, if there is one */
void read_once(struct shmb_ring *ring);       /* the same by index */
void copy_once(struct shmb_ring *ring);       /* the whole ring at one moment */
void look_after_once(struct shmb_ring *ring); /* check, alpha, the largest priority, the dead, turns; with upkeep: empty, restore */
void reap_the_dead(struct shmb_ring *ring);
void check_whole(struct shmb_ring *ring);
void check_flow_once(struct shmb_ring *ring); /* what a limiter counts */
void track_once(struct shmb_ring *ring);      /* what has come and gone; of one thread at a time */
void track_to_the_end(struct shmb_ring *ring);
struct shmb_call a_call(void);

void publish_and_look(const struct options *options); /* threads that hand weights over, until enough were published */

#endif
