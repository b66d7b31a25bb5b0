/* Ring's methods except for records: rows of leaves, priorities, the whole buffer, clients, flow control. */
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/flow.h"
#include "core/reserve.h"
#include "core/stacks.h"
#include "python/leaf.h"
#include "python/methods.h"

#define STACK_PRIORITIES 256 /* more priorities do not fit on the stack */

/* Rows of leaves. */

static int write_rows(struct ring_object *self, const struct shmb_rows *rows, uint64_t count, const double *priorities,
                      const uint32_t *streams, int64_t timeout_ns, uint64_t *first) {
    struct shmb_ring *ring = &self->ring;
    const unsigned char *const *from = rows->from;
    struct python_call python = shmb_python_begin(timeout_ns);
    int status = priorities ? shmb_check_priorities(ring, priorities, count * ring->lanes) : SHMB_OK;
    shmb_release_lock_for(&python, count * self->ring.row_bytes);
    if (status == SHMB_OK) status = shmb_claim_rows(ring, &python.call, count, rows, streams, first);
    if (status == SHMB_OK) {
        uint64_t skip = count > ring->capacity ? count - ring->capacity : 0;
        shmb_fill(ring, from, skip);
        if (priorities) shmb_fill_priorities(ring, priorities, skip);
        status = shmb_record_insert(self, shmb_commit(ring, &python.call, priorities != NULL));
    }
    shmb_python_end(&python);
    return status;
}

int shmb_binding_write(PyObject *object, const unsigned char *const *from, uint64_t count, const double *priorities,
                       const uint32_t *streams, int64_t timeout_ns, uint64_t *first) {
    const struct shmb_rows rows = {from, NULL};
    return write_rows((struct ring_object *)object, &rows, count, priorities, streams, timeout_ns, first);
}

/* -> first ticket */
PyObject *shmb_ring_write(struct ring_object *self, struct parsed *parsed) {
    uint64_t first = 0;
    const struct shmb_rows rows = {parsed->addresses, NULL};
    int status = write_rows(self, &rows, NUMBER(1), AT(const double, 2), AT(const uint32_t, 3), CALL->timeout_ns, &first);
    return shmb_build_result(parsed, status, first);
}

/* -> first ticket */
PyObject *shmb_ring_write_loaded(struct ring_object *self, struct parsed *parsed) {
    uint64_t first = 0;
    const struct shmb_rows rows = {parsed->addresses, AT(const uint64_t, 3)};
    int status = write_rows(self, &rows, NUMBER(1), AT(const double, 2), NULL, CALL->timeout_ns, &first);
    return shmb_build_result(parsed, status, first);
}

PyObject *shmb_ring_place(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    const int64_t *slots = AT(const int64_t, 0);
    const double *priorities = AT(const double, 3);
    uint64_t count = NUMBER(1), rows;
    int status = shmb_check_indices(ring, slots, count, ring->capacity);
    if (status == SHMB_OK && priorities) status = shmb_check_priorities(ring, priorities, count * ring->lanes);
    shmb_release_lock_for(&parsed->python, count * self->ring.row_bytes);
    if (status == SHMB_OK) status = shmb_claim_slots(ring, CALL, slots, count, NUMBER(4) != 0, NULL, NULL, NULL, &rows);
    if (status == SHMB_OK) {
        shmb_fill(ring, parsed->addresses, 0);
        if (priorities) shmb_fill_priorities(ring, priorities, 0);
        status = shmb_record_insert(self, shmb_commit(ring, CALL, priorities != NULL));
    }
    return shmb_build_result(parsed, status, 0);
}

/* -> first ticket. The caller copies the payload, and then calls commit or abort. */
PyObject *shmb_ring_claim(struct ring_object *self, struct parsed *parsed) {
    uint64_t first = 0;
    int status = shmb_claim_ring(&self->ring, CALL, NUMBER(0), NULL, AT(const uint32_t, 1), &first);
    if (status == SHMB_OK) shmb_gate_pause(&self->ring);
    return shmb_build_result(parsed, status, first);
}

/* -> number of claimed rows */
PyObject *shmb_ring_claim_slots(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    const int64_t *slots = AT(const int64_t, 0);
    const int64_t *tickets = AT(const int64_t, 3);
    uint64_t count = NUMBER(1), rows = 0;
    int status = shmb_check_indices(ring, slots, count, ring->capacity);
    if (status == SHMB_OK)
        status = shmb_claim_slots(ring, CALL, slots, count, (int)NUMBER(2), tickets, AT(unsigned char, 4), NULL, &rows);
    if (status == SHMB_OK && (rows || tickets == NULL)) shmb_gate_pause(ring);
    return shmb_build_result(parsed, status, rows);
}

/* Copies the payload of the open claim, row by row. */
PyObject *shmb_ring_fill(struct ring_object *self, struct parsed *parsed) {
    int status = shmb_gate_resume(&self->ring);
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    shmb_release_lock_for(&parsed->python, self->ring.claim_rows * self->ring.row_bytes);
    shmb_fill(&self->ring, parsed->addresses, 0);
    shmb_gate_pause(&self->ring);
    return shmb_build_result(parsed, SHMB_OK, 0);
}

/* The claim is closed, whatever the result is. */
PyObject *shmb_ring_commit(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    const double *priorities = AT(const double, 0);
    uint64_t skip = NUMBER(1);
    int status = shmb_gate_resume(ring);
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    if (priorities) {
        status = shmb_check_priorities(ring, priorities, (skip + ring->claim_rows) * ring->lanes);
        if (status == SHMB_OK) shmb_fill_priorities(ring, priorities, skip);
    }
    if (status == SHMB_OK)
        status = shmb_record_insert(self, shmb_commit(ring, CALL, priorities != NULL));
    else if (shmb_abort(ring, CALL) == SHMB_INTERRUPTED)
        status = SHMB_INTERRUPTED;
    return shmb_build_result(parsed, status, 0);
}

PyObject *shmb_ring_abort(struct ring_object *self, struct parsed *parsed) {
    int status = shmb_gate_resume(&self->ring);
    if (status == SHMB_OK) status = shmb_abort(&self->ring, CALL);
    return shmb_build_result(parsed, status, 0);
}

static int sample(struct ring_object *self, struct python_call *python, uint64_t count, uint64_t key, unsigned char *const *out,
                  int64_t *index, int64_t *tickets, float *weights, double beta, bool prioritized, uint64_t *redrawn) {
    if (out) shmb_release_lock_for(python, count * self->ring.row_bytes / self->ring.lanes);
    return shmb_record_sample(self, shmb_sample(&self->ring, &python->call, count, key, out, index, tickets, weights, beta, prioritized,
                                     redrawn, NULL));
}

int shmb_binding_sample(PyObject *object, uint64_t count, uint64_t key, unsigned char *const *out, int64_t *index,
                        int64_t *tickets, float *weights, double beta, _Bool prioritized, int64_t timeout_ns,
                        uint64_t *redrawn) {
    struct python_call python = shmb_python_begin(timeout_ns);
    int status = sample((struct ring_object *)object, &python, count, key, out, index, tickets, weights, beta, prioritized, redrawn);
    shmb_python_end(&python);
    return status;
}

/* -> number of rows that were drawn again */
PyObject *shmb_ring_sample(struct ring_object *self, struct parsed *parsed) {
    uint64_t redrawn = 0;
    int status = sample(self, &parsed->python, NUMBER(0), NUMBER(1), (unsigned char *const *)parsed->addresses, AT(int64_t, 3),
                        AT(int64_t, 4), AT(float, 5), REAL(6), NUMBER(7) != 0, &redrawn);
    return shmb_build_result(parsed, status, redrawn);
}

static int read_rows(struct ring_object *self, struct python_call *python, const int64_t *index, uint64_t count,
                     unsigned char *const *out, int64_t *tickets, uint64_t *missing) {
    struct shmb_ring *ring = &self->ring;
    shmb_release_lock_for(python, count * ring->row_bytes / ring->lanes);
    int status = shmb_check_indices(ring, index, count, ring->elements);
    return status == SHMB_OK ? shmb_read(ring, &python->call, index, count, out, tickets, missing) : status;
}

int shmb_binding_read(PyObject *object, const int64_t *index, uint64_t count, unsigned char *const *out, int64_t *tickets,
                      uint64_t *missing, int64_t timeout_ns) {
    struct python_call python = shmb_python_begin(timeout_ns);
    int status = read_rows((struct ring_object *)object, &python, index, count, out, tickets, missing);
    shmb_python_end(&python);
    return status;
}

int shmb_binding_stacks(PyObject *object, const struct shmb_stacks *stacks, unsigned char *const *out, uint64_t bytes,
                        int64_t timeout_ns) {
    struct shmb_ring *ring = &((struct ring_object *)object)->ring;
    struct python_call python = shmb_python_begin(timeout_ns);
    shmb_release_lock_for(&python, stacks->count * bytes);
    int status = shmb_check_indices(ring, stacks->index, stacks->count * stacks->steps, ring->elements);
    if (status == SHMB_OK && !shmb_read_stacks(ring, stacks, out, bytes)) status = SHMB_LAPPED;
    shmb_python_end(&python);
    return status;
}

/* -> number of rows without an item */
PyObject *shmb_ring_read(struct ring_object *self, struct parsed *parsed) {
    uint64_t missing = 0;
    int status = read_rows(self, &parsed->python, AT(const int64_t, 0), NUMBER(1), (unsigned char *const *)parsed->addresses,
                           AT(int64_t, 3), &missing);
    return shmb_build_result(parsed, status, missing);
}

/* Priorities. */

static int update(struct ring_object *self, struct parsed *parsed, const int64_t *index, const int64_t *tickets,
                  const double *priorities, uint64_t count, uint64_t *applied) {
    struct shmb_entry *me = self->ring.me;
    shmb_release_lock_for(&parsed->python, count * sizeof *priorities);
    int status = shmb_record_seen(self, shmb_update(&self->ring, CALL, index, tickets, priorities, count, applied));
    if (status != SHMB_OK) return status;
    atomic_fetch_add_explicit(&me->updates_applied, *applied, memory_order_relaxed);
    CP(count_added);
    atomic_fetch_add_explicit(&me->updates_stale, count - *applied, memory_order_relaxed);
    CP(count_added);
    return SHMB_OK;
}

/* -> number of applied priorities */
PyObject *shmb_ring_update(struct ring_object *self, struct parsed *parsed) {
    uint64_t applied = 0;
    int status = update(self, parsed, AT(const int64_t, 0), AT(const int64_t, 1), AT(const double, 2), NUMBER(3), &applied);
    return shmb_build_result(parsed, status, applied);
}

static bool are_integers(PyObject *object, uint64_t count, struct shmb_numbers *out) {
    return shmb_locate_numbers(object, out) && out->kind == SHMB_INTEGER && out->count == count;
}

/* -> (applied, stale), or None */
PyObject *shmb_ring_update_arrays(struct ring_object *self, struct parsed *parsed) {
    struct shmb_numbers index, priorities, tickets = {0};
    double buffer[STACK_PRIORITIES];
    uint64_t applied = 0;
    bool fits = self->ring.lanes == 1 && shmb_locate_numbers(OBJECT(1), &priorities) && priorities.kind != SHMB_INTEGER &&
                are_integers(OBJECT(0), priorities.count, &index) && index.rank == 1 &&
                (OBJECT(2) == Py_None || are_integers(OBJECT(2), priorities.count, &tickets));
    if (!fits) Py_RETURN_NONE;
    double *widened = shmb_convert_to_double(&priorities, buffer, STACK_PRIORITIES);
    if (widened == NULL) return PyErr_NoMemory();
    int status = update(self, parsed, (const int64_t *)index.data, (const int64_t *)tickets.data, widened, index.count, &applied);
    shmb_python_end(&parsed->python);
    if (widened != buffer) free(widened);
    if (status == SHMB_BAD_INDEX) Py_RETURN_NONE;
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    return Py_BuildValue("(KK)", BIG(applied), BIG(index.count - applied));
}

PyObject *shmb_ring_set_alpha(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_set_alpha(&self->ring, CALL, REAL(0), REAL(1), NUMBER(2) != 0), 0);
}

/* -> (mass, least, max_priority, length), or a status */
PyObject *shmb_ring_read_totals(struct ring_object *self, struct parsed *parsed) {
    struct shmb_totals totals;
    int status = shmb_read_totals(&self->ring, CALL, &totals);
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    shmb_python_end(&parsed->python);
    return shmb_build_totals(&totals);
}

PyObject *shmb_ring_raise_max_priority(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_record_seen(self, shmb_raise_max_priority(&self->ring, CALL, REAL(0))), 0);
}

/* The whole buffer. */

PyObject *shmb_ring_empty(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_record_seen(self, shmb_empty(&self->ring, CALL, NUMBER(0) != 0)), 0);
}

PyObject *shmb_ring_restore(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_restore(&self->ring, CALL, NUMBER(0), NUMBER(1), REAL(2)), 0);
}

/* -> (wrong nodes, leaves, length, words, orphans, wrong extents, nexts, reserved), or a status */
PyObject *shmb_ring_check(struct ring_object *self, struct parsed *parsed) {
    struct shmb_check faults;
    shmb_python_may_block(CALL);
    int status = shmb_check(&self->ring, CALL, NUMBER(0) != 0, NUMBER(1), &faults);
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    shmb_python_end(&parsed->python);
    return Py_BuildValue("(KKKKKKKKK)", BIG(faults.wrong_nodes), BIG(faults.wrong_leaves), BIG(faults.wrong_length),
                         BIG(faults.wrong_words), BIG(faults.orphans), BIG(faults.wrong_extents), BIG(faults.wrong_nexts),
                         BIG(faults.wrong_reserved), BIG(faults.wrong_ledger));
}

/* -> bytes of the runtime page and the registry, which are consistent; or a status */
PyObject *shmb_ring_snapshot(struct ring_object *self, struct parsed *parsed) {
    const size_t bytes = SHMB_CONTROL_BYTES - SHMB_RUNTIME_OFFSET;
    PyObject *copy = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (copy == NULL) return NULL;
    char *to = PyBytes_AsString(copy);
    int status = shmb_lock(&self->ring, CALL);
    if (status == SHMB_OK) {
        memcpy(to, (const void *)self->ring.runtime, bytes);
        shmb_unlock(&self->ring);
    }
    shmb_python_end(&parsed->python);
    if (status == SHMB_OK) return copy;
    Py_DECREF(copy);
    return shmb_build_result(parsed, status, 0);
}

/* -> number of slots that had changed */
PyObject *shmb_ring_copy_slots(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    uint64_t first = NUMBER(0), count = NUMBER(1);
    if (first > ring->capacity || count > ring->capacity - first)
        return PyErr_Format(PyExc_IndexError, "copy_slots(): %llu slots from %llu on are not within the ring of %llu slots.", BIG(count), BIG(first), BIG(ring->capacity));
    shmb_python_may_block(CALL);
    return shmb_build_result(parsed, SHMB_OK, shmb_copy_slots(ring, first, count, (unsigned char *const *)parsed->addresses, AT(int64_t, 3)));
}

/* -> (head, write_count, max_priority), or a status */
PyObject *shmb_ring_finish_snapshot(struct ring_object *self, struct parsed *parsed) {
    struct shmb_snapshot_counters counters;
    shmb_python_may_block(CALL);
    int status = shmb_finish_snapshot(&self->ring, CALL, (unsigned char *const *)parsed->addresses, AT(int64_t, 1), AT(uint64_t, 2),
                                  AT(double, 3), &counters);
    if (status != SHMB_OK) return shmb_build_result(parsed, status, 0);
    shmb_python_end(&parsed->python);
    return Py_BuildValue("(KKd)", BIG(counters.head), BIG(counters.write_count), counters.max_priority);
}

PyObject *shmb_ring_compute_checksum(struct ring_object *self, struct parsed *parsed) {
    return PyLong_FromUnsignedLong(shmb_row_checksum(&self->ring, NUMBER(0), NUMBER(1)));
}

/* -> list of the COMMITTED slots in [first, first + count) whose checksum is wrong */
PyObject *shmb_ring_verify(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    uint64_t first = NUMBER(0), count = NUMBER(1);
    if (first > ring->capacity || count > ring->capacity - first)
        return PyErr_Format(PyExc_IndexError, "verify(): %llu slots from %llu on are not within the ring of %llu slots.", BIG(count), BIG(first), BIG(ring->capacity));
    PyObject *list = PyList_New(0);
    for (uint64_t slot = first; list && slot < first + count;) {
        bool wrong = false;
        Py_BEGIN_ALLOW_THREADS
        for (uint64_t left = 4096; left && slot < first + count && !wrong; left--, slot++) {
            uint64_t word = atomic_load_explicit(&ring->words[slot], SYNC_SLOT_COMMIT_ACQUIRE);
            if (SHMB_STATE(word) != SHMB_COMMITTED) continue;
            wrong = shmb_row_checksum(ring, slot, SHMB_TICKET(word)) != ring->checksums[slot];
            atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
            wrong = wrong && shmb_still_holds(ring, slot, word);
        }
        Py_END_ALLOW_THREADS
        if (wrong) {
            PyObject *at = PyLong_FromUnsignedLongLong(slot - 1);
            if (at == NULL || PyList_Append(list, at) < 0) Py_CLEAR(list);
            Py_XDECREF(at);
        }
    }
    return list;
}

PyObject *shmb_ring_seal(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    if (NUMBER(0) > ring->capacity || NUMBER(1) > ring->capacity - NUMBER(0))
        return PyErr_Format(PyExc_IndexError, "seal(): %llu slots from %llu on are not within the ring of %llu slots.", BIG(NUMBER(1)), BIG(NUMBER(0)), BIG(ring->capacity));
    Py_BEGIN_ALLOW_THREADS
    shmb_seal(ring, NUMBER(0), NUMBER(1));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* -> number of removed items. Recovery repairs next observations with this, while no client is alive. */
PyObject *shmb_ring_repair_links(struct ring_object *self, struct parsed *parsed) {
    struct shmb_ring *ring = &self->ring;
    uint64_t dropped = 0;
    shmb_python_may_block(CALL);
    if (ring->plan) dropped = shmb_repair_links(ring, atomic_load_explicit(&ring->runtime->head, memory_order_relaxed), true);
    return shmb_build_result(parsed, SHMB_OK, dropped);
}

/* Recomputes leaves, length and parents from words and raw priorities. For recovery, while no client is alive. */
PyObject *shmb_ring_rebuild(struct ring_object *self, struct parsed *parsed) {
    shmb_python_may_block(CALL);
    shmb_ring_leaves(&self->ring);
    shmb_ring_parents(&self->ring);
    shmb_clear_stale_deliveries(&self->ring);
    shmb_python_end(&parsed->python);
    Py_RETURN_NONE;
}

/* Clients. */

/* -> 1 if the entry was freed */
PyObject *shmb_ring_reap(struct ring_object *self, struct parsed *parsed) {
    bool freed = false;
    int status = shmb_reap(&self->ring, CALL, (uint32_t)NUMBER(0), NUMBER(1), &freed);
    return shmb_build_result(parsed, status, freed);
}

PyObject *shmb_ring_forfeit(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_forfeit_turn(&self->ring, CALL, (uint32_t)NUMBER(0), NUMBER(1)), 0);
}

PyObject *shmb_ring_leave(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_leave(&self->ring, CALL), 0);
}

/* Sleeps until another client makes progress, after a call of this handle was refused. */
PyObject *shmb_ring_wait(struct ring_object *self, struct parsed *parsed) {
    if (shmb_refusal.why == SHMB_SLOT_IS_TAKEN) atomic_fetch_add_explicit(&self->ring.me->waits, 1, memory_order_relaxed);
    CP(count_added);
    shmb_python_may_block(CALL);
    shmb_wait_progress(&self->ring, shmb_refusal.blocker.progress, CALL->timeout_ns);
    shmb_python_end(&parsed->python);
    if (PyErr_CheckSignals() < 0) return NULL;
    Py_RETURN_NONE;
}

/* -> 0 if the directory existed at the last check, at most a second ago */
PyObject *shmb_ring_check_directory(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_is_removed(&self->ring, shmb_now_ns()) ? SHMB_UNLINKED : SHMB_OK, 0);
}

/* Flow control. */

PyObject *shmb_ring_bypass(struct ring_object *self, struct parsed *parsed) {
    shmb_bypass = (enum shmb_bypass)NUMBER(0);
    Py_RETURN_NONE;
}

/* -> number of elements that count as drawn */
PyObject *shmb_ring_admit_sample(struct ring_object *self, struct parsed *parsed) {
    uint64_t counted = 0;
    int status = shmb_admit_sample(&self->ring, CALL, NUMBER(0), NUMBER(1), NUMBER(2) != 0, &counted);
    return shmb_build_result(parsed, status, counted);
}

PyObject *shmb_ring_cancel_draw(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_cancel_draw(&self->ring, CALL, NUMBER(0), (uint32_t)NUMBER(1)), 0);
}

/* The caller then reads them and calls release. */
PyObject *shmb_ring_dequeue(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_dequeue(&self->ring, CALL, NUMBER(0), AT(int64_t, 1), AT(int64_t, 2)), 0);
}

PyObject *shmb_ring_release(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_release(&self->ring, CALL), 0);
}

PyObject *shmb_ring_set_limits(struct ring_object *self, struct parsed *parsed) {
    const struct shmb_limiter wanted = {REAL(1), REAL(2), NUMBER(3), 0, 0, NUMBER(4), 0, (uint32_t)NUMBER(5), (uint32_t)NUMBER(0)};
    const struct shmb_ages ages = {NUMBER(6), NUMBER(7), 0, 0};
    return shmb_build_result(parsed, shmb_limit(&self->ring, CALL, &wanted, &ages), 0);
}

/* Reservations. A name of a reservation combines its id with its index in the ledger. */

#define PLACE(n) ((uint32_t)(NUMBER(n) % SHMB_RESERVATIONS))
#define ID(n) (NUMBER(n) / SHMB_RESERVATIONS)

/* The name is stored before Python checks for signals again, so that an interrupted caller can still cancel the
 * reservation. */
PyObject *shmb_ring_reserve(struct ring_object *self, struct parsed *parsed) {
    const struct shmb_request request = {.rows = NUMBER(0), .elements = NUMBER(0) * self->ring.lanes, .bytes = NUMBER(1),
                                   .expires_ns = NUMBER(2), .id = NUMBER(3), .flags = NUMBER(3) ? SHMB_PARTIAL : 0};
    uint64_t id = 0;
    uint32_t place = 0;
    int status = shmb_record_seen(self, shmb_reserve(&self->ring, CALL, request, &place, &id));
    if (id) *AT(uint64_t, 4) = id * SHMB_RESERVATIONS + place;
    return shmb_build_result(parsed, status, 0);
}

PyObject *shmb_ring_select_reservation(struct ring_object *self, struct parsed *parsed) {
    shmb_selected_reservation = (struct shmb_selected_reservation){NUMBER(0) ? &self->ring : NULL, PLACE(0), ID(0), AT(const uint64_t, 1), AT(unsigned char, 2), NUMBER(3)};
    Py_RETURN_NONE;
}

PyObject *shmb_ring_cancel_reservation(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_cancel_reservation(&self->ring, CALL, PLACE(0), ID(0)), 0);
}

PyObject *shmb_ring_note_partial(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_note_partial(&self->ring, CALL, PLACE(0), ID(0)), 0);
}

/* -> 1 if it is committed, otherwise 0 */
PyObject *shmb_ring_partial_is_done(struct ring_object *self, struct parsed *parsed) {
    bool done = false;
    int status = shmb_partial_is_done(&self->ring, CALL, NUMBER(0), NUMBER(1) != 0, &done);
    return shmb_build_result(parsed, status, done);
}

PyObject *shmb_ring_count_refused(struct ring_object *self, struct parsed *parsed) {
    atomic_fetch_add_explicit(&self->ring.runtime->refused, NUMBER(0), memory_order_relaxed);
    CP(count_added);
    Py_RETURN_NONE;
}

/* Withdraws waiting calls of this handle, for a slot or for a side. Python calls it when an exception passes
 * through. It is a single call, so that no signal handler runs in between. Another thread that still waits registers
 * again at its next attempt. */
int shmb_binding_stop_waiting(PyObject *object, int64_t timeout_ns) {
    struct shmb_ring *ring = &((struct ring_object *)object)->ring;
    struct python_call python = shmb_python_begin(timeout_ns);
    int status = SHMB_OK;
    if (shmb_bypass == SHMB_PASSES_ONCE) shmb_bypass = SHMB_COUNTS;
    if (atomic_load_explicit(&ring->me->turn, memory_order_relaxed)) status = shmb_cancel_turn(ring, &python.call);
    if (status == SHMB_OK && atomic_load_explicit(&ring->me->waits_for, memory_order_relaxed))
        status = shmb_stop_waiting(ring, &python.call, SHMB_FOR_SAMPLES | SHMB_FOR_INSERTS);
    shmb_python_end(&python);
    return status;
}

PyObject *shmb_ring_stop_waiting(struct ring_object *self, struct parsed *parsed) {
    return shmb_build_result(parsed, shmb_binding_stop_waiting((PyObject *)self, CALL->timeout_ns), 0);
}

/* -> reason for which the queue makes that client wait; 0: none */
PyObject *shmb_ring_find_queue_reason(struct ring_object *self, struct parsed *parsed) {
    enum shmb_reason why;
    int status = shmb_find_queue_reason(&self->ring, CALL, &self->ring.entries[NUMBER(0)], (uint32_t)NUMBER(1), &why);
    return shmb_build_result(parsed, status, (uint64_t)why);
}
