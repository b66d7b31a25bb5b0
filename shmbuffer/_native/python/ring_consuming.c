/* Ring's methods for consumers. A consumer is identified by its index and its number. */
#include "core/ledger.h"
#include "python/methods.h"

static struct shmb_of_consumer read_consumer(const struct asked *asked) {
    return (struct shmb_of_consumer){(uint32_t)NUMBER(0), NUMBER(1)};
}

/* -> its number */
PyObject *shmb_ring_open_consumer(struct ring_object *self, struct asked *asked) {
    uint64_t number = 0, which = NUMBER(0), times = NUMBER(2), end = self->ring.parts.consumers + (which + 1) * self->ring.parts.each;
    const struct shmb_wanted_consumer wanted = {AT(const unsigned char, 1), (uint32_t)times, NUMBER(3) != 0, NUMBER(4) != 0, NUMBER(5)};
    if (self->ring.ledger == NULL || which >= SHMB_CONSUMERS || times == 0 || times > SHMB_MOST_ACKS ||
        atomic_load(&self->ring.ledger->bytes) < end)
        return PyErr_Format(PyExc_ValueError, "open_consumer: number %llu, %llu times", BIG(which), BIG(times));
    shmb_python_may_block(CALL);
    int status = shmb_open_consumer(&self->ring, CALL, (uint32_t)which, &wanted, &number);
    return shmb_answer(asked, shmb_seen(self, status), number);
}

PyObject *shmb_ring_remove_consumer(struct ring_object *self, struct asked *asked) {
    return shmb_answer(asked, shmb_seen(self, shmb_remove_consumer(&self->ring, CALL, read_consumer(asked))), 0);
}

/* -> number of items */
PyObject *shmb_ring_deliver(struct ring_object *self, struct asked *asked) {
    uint64_t given = 0;
    int status = shmb_deliver(&self->ring, CALL, read_consumer(asked), NUMBER(2), NUMBER(3), NUMBER(4), AT(int64_t, 5), AT(int64_t, 6),
                              AT(uint64_t, 7), &given);
    return shmb_answer(asked, shmb_seen(self, status), given);
}

/* -> number of groups */
PyObject *shmb_ring_claim_groups(struct ring_object *self, struct asked *asked) {
    uint64_t given = 0, items = 0;
    const int64_t *sizes = AT(const int64_t, 4);
    for (uint64_t group = 0; group < NUMBER(5); group++) items += (uint64_t)sizes[group];
    int status = shmb_indices_in_order(&self->ring, AT(const int64_t, 2), items, self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_claim_groups(&self->ring, CALL, read_consumer(asked), AT(const int64_t, 2), AT(const int64_t, 3), sizes, NUMBER(5),
                                   NUMBER(6), AT(unsigned char, 7), AT(uint64_t, 8), &given);
    return shmb_answer(asked, shmb_seen(self, status), given);
}

/* -> number of items */
PyObject *shmb_ring_drop_items(struct ring_object *self, struct asked *asked) {
    uint64_t dropped = 0;
    int status = shmb_indices_in_order(&self->ring, AT(const int64_t, 2), NUMBER(4), self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_drop_items(&self->ring, CALL, read_consumer(asked), AT(const int64_t, 2), AT(const int64_t, 3), NUMBER(4), &dropped);
    return shmb_answer(asked, shmb_seen(self, status), dropped);
}

/* -> number of items */
PyObject *shmb_ring_acknowledge(struct ring_object *self, struct asked *asked) {
    uint64_t acked = 0;
    int status = shmb_indices_in_order(&self->ring, AT(const int64_t, 3), NUMBER(5), self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_acknowledge_items(&self->ring, CALL, read_consumer(asked), AT(const uint64_t, 2), AT(const int64_t, 3),
                                        AT(const int64_t, 4), NUMBER(5), &acked);
    return shmb_answer(asked, shmb_seen(self, status), acked);
}

PyObject *shmb_ring_return_lease(struct ring_object *self, struct asked *asked) {
    return shmb_answer(asked, shmb_return_lease(&self->ring, CALL, read_consumer(asked), NUMBER(2)), 0);
}

/* -> 1 or 0 */
PyObject *shmb_ring_is_stuck(struct ring_object *self, struct asked *asked) {
    bool stuck = false;
    int status = shmb_check_stuck(&self->ring, CALL, read_consumer(asked), NUMBER(2), &stuck);
    return shmb_answer(asked, status, stuck);
}

PyObject *shmb_ring_await_items(struct ring_object *self, struct asked *asked) {
    return shmb_answer(asked, shmb_seen(self, shmb_await_items(&self->ring, CALL, read_consumer(asked), NUMBER(2), AT(uint64_t, 3))), 0);
}

/* -> number of items */
PyObject *shmb_ring_to_give(struct ring_object *self, struct asked *asked) {
    uint64_t there = 0;
    int status = shmb_count_to_give(&self->ring, CALL, read_consumer(asked), NUMBER(2), &there);
    return shmb_answer(asked, status, there);
}

/* -> number of items */
PyObject *shmb_ring_returned(struct ring_object *self, struct asked *asked) {
    uint64_t found = 0, room = NUMBER(5);
    if (room) shmb_python_may_block(CALL);
    int status = shmb_list_returned(&self->ring, CALL, read_consumer(asked), AT(uint64_t, 2), AT(int64_t, 3), AT(int64_t, 4), room, &found);
    return shmb_answer(asked, status, found);
}

/* -> 1 or 0 */
PyObject *shmb_ring_oldest_to_give(struct ring_object *self, struct asked *asked) {
    bool there = false;
    int status = shmb_oldest_to_give(&self->ring, CALL, read_consumer(asked), AT(struct shmb_oldest, 2), &there);
    return shmb_answer(asked, status, there);
}

PyObject *shmb_ring_item_states(struct ring_object *self, struct asked *asked) {
    shmb_python_may_block(CALL);
    int status = shmb_read_item_states(&self->ring, CALL, read_consumer(asked), AT(unsigned char, 2), AT(int64_t, 3), AT(uint64_t, 4));
    return shmb_answer(asked, status, 0);
}
