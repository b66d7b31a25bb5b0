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

void consumers_open(struct shmb_ring *ring);
void consume_once(struct shmb_ring *ring); /* take, or do with what was taken: acknowledge it, or give it back */
void let_go_of_all(struct shmb_ring *ring);
void come_and_go(struct shmb_ring *ring);  /* as a consumer for whom nobody waits */
void consume_the_rest(struct shmb_ring *ring); /* at the end: nothing was skipped */

void publish_and_look(const struct options *options); /* threads that hand weights over, until enough were published */

#endif
