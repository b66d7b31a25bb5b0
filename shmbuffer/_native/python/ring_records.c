/* Ring's methods for records. */
#include "python/methods.h"

/* The caller's batch: data, its size in bytes, starts, sizes, count, pieces outside of the data, their number per record. */
static struct shmb_batch batch_at(const struct parsed *parsed, unsigned n) {
    return (struct shmb_batch){AT(const unsigned char, n), AT(const int64_t, n + 2), AT(const int64_t, n + 3), NUMBER(n + 4),
                               AT(const struct shmb_outside, n + 5), NUMBER(n + 6)};
}

/* Destination of records: data, room, starts, sizes, positions. */
static struct shmb_arena arena_at(const struct parsed *parsed, unsigned n) {
    return (struct shmb_arena){AT(unsigned char, n), NUMBER(n + 1), 0, AT(int64_t, n + 2), AT(int64_t, n + 3), AT(uint64_t, n + 4)};
}

static int fill_and_commit(struct ring_object *self, struct shmb_call *call, const double *priorities, uint64_t skip) {
    shmb_fill_records(&self->ring);
    if (priorities) shmb_fill_priorities(&self->ring, priorities, skip);
    return shmb_record_insert(self, shmb_commit(&self->ring, call, priorities != NULL));
}

/* -> first ticket */
PyObject *shmb_ring_write_records(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    struct shmb_batch batch = batch_at(parsed, 0);
    const double *priorities = AT(const double, 7);
    uint64_t bytes = NUMBER(1), first = 0;
    int status = shmb_check_batch(ring, &batch, bytes);
    if (status == SHMB_OK && priorities) status = shmb_check_priorities(ring, priorities, batch.count);
    shmb_release_lock_for(&parsed->python, status == SHMB_OK ? shmb_refusal.needed : bytes);
    if (status == SHMB_OK) status = shmb_claim_ring(ring, CALL, batch.count, &batch, AT(const uint32_t, 8), &first);
    if (status == SHMB_OK)
        status = fill_and_commit(self, CALL, priorities, batch.count > ring->capacity ? batch.count - ring->capacity : 0);
    return shmb_build_result(parsed, status, first);
}

/* -> number of written rows. Slots must ascend. */
PyObject *shmb_ring_place_records(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    struct shmb_batch batch = batch_at(parsed, 1);
    const int64_t *slots = AT(const int64_t, 0);
    const int64_t *tickets = AT(const int64_t, 10);
    const double *priorities = AT(const double, 8);
    uint64_t bytes = NUMBER(2), rows = 0;
    for (uint64_t i = 1; i < batch.count; i++)
        if (slots[i] <= slots[i - 1]) return PyErr_Format(PyExc_ValueError, "place_records(): the slots do not ascend. Sort them, and pass each slot once.");
    if (priorities && tickets) return PyErr_Format(PyExc_ValueError, "place_records(): pass either priorities or tickets.");
    if (batch.count == 0) return shmb_build_result(parsed, SHMB_OK, 0); /* an empty claim would stay open */
    int status = shmb_check_indices(ring, slots, batch.count, ring->capacity);
    if (status == SHMB_OK) status = shmb_check_batch(ring, &batch, bytes);
    if (status == SHMB_OK && priorities) status = shmb_check_priorities(ring, priorities, batch.count);
    shmb_release_lock_for(&parsed->python, status == SHMB_OK ? shmb_refusal.needed : bytes);
    if (status == SHMB_OK)
        status = shmb_claim_slots(ring, CALL, slots, batch.count, NUMBER(9) != 0, tickets, AT(unsigned char, 11), &batch, &rows);
    if (rows) status = fill_and_commit(self, CALL, priorities, 0);
    return shmb_build_result(parsed, status, rows);
}

/* -> used bytes of the arena */
PyObject *shmb_ring_sample_records(struct ring_object *self, struct parsed *parsed) {
    struct shmb_arena arena = arena_at(parsed, 2);
    uint64_t redrawn = 0;
    shmb_release_lock_for(&parsed->python, arena.space);
    int status = shmb_record_sample(self, shmb_sample(&self->ring, CALL, NUMBER(0), NUMBER(1), NULL, AT(int64_t, 7), AT(int64_t, 8),
                                           AT(float, 9), REAL(10), NUMBER(11) != 0, &redrawn, &arena));
    return shmb_build_result(parsed, status, arena.used);
}

/* -> used bytes of the arena */
PyObject *shmb_ring_read_records(struct ring_object *self, struct parsed *parsed) {
    struct shmb_arena arena = arena_at(parsed, 2);
    const int64_t *index = AT(const int64_t, 0);
    shmb_release_lock_for(&parsed->python, arena.space);
    int status = shmb_check_indices(&self->ring, index, NUMBER(1), self->ring.capacity);
    if (status == SHMB_OK) status = shmb_read_records(&self->ring, CALL, index, NUMBER(1), &arena, AT(int64_t, 7));
    return shmb_build_result(parsed, status, arena.used);
}

/* -> (tail, position below which no claim is writing, head), or a status */
PyObject *shmb_ring_read_span(struct ring_object *self, struct parsed *parsed) {
    uint64_t span[3];
    int status = shmb_read_span(&self->ring, CALL, span);
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    shmb_python_end(&parsed->python);
    return Py_BuildValue("(KKK)", BIG(span[0]), BIG(span[1]), BIG(span[2]));
}

/* -> (head, write_count, max_priority, tail, byte head), or a status */
PyObject *shmb_ring_finish_records_snapshot(struct ring_object *self, struct parsed *parsed) {
    struct shmb_snapshot_counters counters;
    shmb_python_may_block(CALL);
    int status = shmb_finish_records_snapshot(&self->ring, CALL, NUMBER(0), AT(unsigned char, 1), NUMBER(2), AT(int64_t, 3),
                                     AT(struct shmb_extent, 4), AT(uint64_t, 5), AT(double, 6), &counters);
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    shmb_python_end(&parsed->python);
    return Py_BuildValue("(KKdKK)", BIG(counters.head), BIG(counters.write_count), counters.max_priority, BIG(counters.byte_tail),
                         BIG(counters.byte_head));
}

/* -> number of removed items. For recovery, while no client is alive. */
PyObject *shmb_ring_relink(struct ring_object *self, struct parsed *parsed) {
    const int64_t *slots = AT(const int64_t, 0);
    uint64_t count = NUMBER(1);
    for (uint64_t i = 0; i < count; i++)
        if ((uint64_t)slots[i] >= self->ring.capacity)
            return PyErr_Format(PyExc_IndexError, "relink(): there is no slot %llu in the ring of %llu slots.", BIG(slots[i]), BIG(self->ring.capacity));
    return PyLong_FromUnsignedLongLong(shmb_relink(&self->ring, slots, count));
}
