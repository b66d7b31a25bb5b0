/* Ring's methods for consumers. A consumer is identified by its index and its number. */
#include "core/ledger.h"
#include "python/methods.h"

static struct shmb_consumer_id read_consumer(const struct parsed *parsed) {
    return (struct shmb_consumer_id){(uint32_t)NUMBER(0), NUMBER(1)};
}

/* -> its number */
PyObject *shmb_ring_open_consumer(struct ring_object *self, struct parsed *parsed) {
    uint64_t number = 0, which = NUMBER(0), times = NUMBER(2), end = self->ring.parts.consumers + (which + 1) * self->ring.parts.each;
    const struct shmb_consumer_options wanted = {AT(const unsigned char, 1), (uint32_t)times, NUMBER(3) != 0, NUMBER(4) != 0, NUMBER(5)};
    if (self->ring.ledger == NULL || which >= SHMB_CONSUMERS || times == 0 || times > SHMB_MAX_ACKS ||
        atomic_load(&self->ring.ledger->bytes) < end)
        return PyErr_Format(PyExc_ValueError, "open_consumer(): index %llu or %llu acknowledgements are out of range, or the ledger file is too short.", BIG(which), BIG(times));
    shmb_python_may_block(CALL);
    int status = shmb_open_consumer(&self->ring, CALL, (uint32_t)which, &wanted, &number);
    return shmb_build_result(parsed, shmb_record_seen(self, status), number);
}

PyObject *shmb_ring_remove_consumer(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_record_seen(self, shmb_remove_consumer(&self->ring, CALL, read_consumer(parsed))), 0);
}

/* -> number of items */
PyObject *shmb_ring_deliver(struct ring_object *self, struct parsed *parsed) {
    uint64_t delivered = 0;
    int status = shmb_deliver(&self->ring, CALL, read_consumer(parsed), NUMBER(2), NUMBER(3), NUMBER(4), AT(int64_t, 5), AT(int64_t, 6),
                              AT(uint64_t, 7), &delivered);
    return shmb_build_result(parsed, shmb_record_seen(self, status), delivered);
}

/* -> number of groups */
PyObject *shmb_ring_claim_groups(struct ring_object *self, struct parsed *parsed) {
    uint64_t delivered = 0, items = 0;
    const int64_t *sizes = AT(const int64_t, 4);
    for (uint64_t group = 0; group < NUMBER(5); group++) items += (uint64_t)sizes[group];
    int status = shmb_check_indices(&self->ring, AT(const int64_t, 2), items, self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_claim_groups(&self->ring, CALL, read_consumer(parsed), AT(const int64_t, 2), AT(const int64_t, 3), sizes, NUMBER(5),
                                   NUMBER(6), AT(unsigned char, 7), AT(uint64_t, 8), &delivered);
    return shmb_build_result(parsed, shmb_record_seen(self, status), delivered);
}

/* -> number of items */
PyObject *shmb_ring_drop_items(struct ring_object *self, struct parsed *parsed) {
    uint64_t dropped = 0;
    int status = shmb_check_indices(&self->ring, AT(const int64_t, 2), NUMBER(4), self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_drop_items(&self->ring, CALL, read_consumer(parsed), AT(const int64_t, 2), AT(const int64_t, 3), NUMBER(4), &dropped);
    return shmb_build_result(parsed, shmb_record_seen(self, status), dropped);
}

/* -> number of items */
PyObject *shmb_ring_acknowledge(struct ring_object *self, struct parsed *parsed) {
    uint64_t acked = 0;
    int status = shmb_check_indices(&self->ring, AT(const int64_t, 3), NUMBER(5), self->ring.capacity);
    if (status == SHMB_OK)
        status = shmb_acknowledge_items(&self->ring, CALL, read_consumer(parsed), AT(const uint64_t, 2), AT(const int64_t, 3),
                                        AT(const int64_t, 4), NUMBER(5), &acked);
    return shmb_build_result(parsed, shmb_record_seen(self, status), acked);
}

PyObject *shmb_ring_return_lease(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_return_lease(&self->ring, CALL, read_consumer(parsed), NUMBER(2)), 0);
}

/* -> 1 or 0 */
PyObject *shmb_ring_is_stuck(struct ring_object *self, struct parsed *parsed) {
    bool stuck = false;
    int status = shmb_check_stuck(&self->ring, CALL, read_consumer(parsed), NUMBER(2), &stuck);
    return shmb_build_result(parsed, status, stuck);
}

PyObject *shmb_ring_await_items(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_record_seen(self, shmb_await_items(&self->ring, CALL, read_consumer(parsed), NUMBER(2), AT(uint64_t, 3))), 0);
}

/* -> number of items */
PyObject *shmb_ring_count_deliverable(struct ring_object *self, struct parsed *parsed) {
    uint64_t available = 0;
    int status = shmb_count_deliverable(&self->ring, CALL, read_consumer(parsed), NUMBER(2), &available);
    return shmb_build_result(parsed, status, available);
}

/* -> number of items */
PyObject *shmb_ring_list_returned(struct ring_object *self, struct parsed *parsed) {
    uint64_t count = 0, max_count = NUMBER(5);
    if (max_count) shmb_python_may_block(CALL);
    int status = shmb_list_returned(&self->ring, CALL, read_consumer(parsed), AT(uint64_t, 2), AT(int64_t, 3), AT(int64_t, 4), max_count, &count);
    return shmb_build_result(parsed, status, count);
}

/* -> 1 or 0 */
PyObject *shmb_ring_find_oldest(struct ring_object *self, struct parsed *parsed) {
    bool available = false;
    int status = shmb_find_oldest_item(&self->ring, CALL, read_consumer(parsed), AT(struct shmb_oldest_item, 2), &available);
    return shmb_build_result(parsed, status, available);
}

PyObject *shmb_ring_read_item_states(struct ring_object *self, struct parsed *parsed) {
    shmb_python_may_block(CALL);
    int status = shmb_read_item_states(&self->ring, CALL, read_consumer(parsed), AT(unsigned char, 2), AT(int64_t, 3), AT(uint64_t, 4));
    return shmb_build_result(parsed, status, 0);
}
