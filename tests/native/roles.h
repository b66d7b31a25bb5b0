/* Operations of a thread with a handle. Before and after each of these functions the handle has no open claim. */
#ifndef STRESS_ROLES_H
#define STRESS_ROLES_H

#include "world.h"

void write_once(struct shmb_ring *ring);      /* a ring, placed or in-place write, sometimes aborted */
void learn_once(struct shmb_ring *ring);      /* samples, checks each item, updates priorities */
void draw_once(struct shmb_ring *ring);       /* learn_once under a limiter, or from a queue */
void read_once(struct shmb_ring *ring);       /* reads items by index */
void copy_once(struct shmb_ring *ring);       /* a consistent copy of the ring */
void look_after_once(struct shmb_ring *ring); /* upkeep and checks; with options.upkeep also empty, restore */
void reap_the_dead(struct shmb_ring *ring);
void check_whole(struct shmb_ring *ring);
void check_flow_once(struct shmb_ring *ring); /* the counters of a limiter */
void track_once(struct shmb_ring *ring);      /* new and removed items, by one thread at a time */
void track_to_the_end(struct shmb_ring *ring);
struct shmb_call a_call(void);

void consumers_open(struct shmb_ring *ring);
void consume_once(struct shmb_ring *ring); /* takes items, or acknowledges or returns items that were taken */
void let_go_of_all(struct shmb_ring *ring);
void come_and_go(struct shmb_ring *ring);  /* a consumer for which no writer waits */
void consume_the_rest(struct shmb_ring *ring); /* at the end: no item was skipped */

void publish_and_look(const struct options *options); /* publishes weights in threads that may die, and reads them */

#endif
