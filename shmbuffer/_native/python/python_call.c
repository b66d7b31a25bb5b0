/* Calls of the core from Python: the interpreter lock is released for large copies and before a wait. The end of a
 * call updates the time at which the client was last seen. */
#include "core/flow.h"
#include "python/binding.h"

/* for smaller copies, releasing and taking the interpreter lock costs more than the copy */
#define RELEASE_FROM_BYTES 16384

void shmb_python_may_block(struct shmb_call *call) {
    struct python_call *python = (struct python_call *)call;
    if (python->saved == NULL) python->saved = PyEval_SaveThread();
}

static bool interrupted(struct shmb_call *call) {
    struct python_call *python = (struct python_call *)call;
    PyEval_RestoreThread(python->saved);
    int raised = PyErr_CheckSignals();
    python->saved = PyEval_SaveThread();
    return raised != 0;
}

struct python_call shmb_python_begin(int64_t timeout_ns) {
    return (struct python_call){{shmb_python_may_block, interrupted, timeout_ns}, NULL};
}

void shmb_python_end(struct python_call *python) {
    if (python->saved) PyEval_RestoreThread(python->saved);
    python->saved = NULL;
}

void shmb_release_lock_for(struct python_call *python, uint64_t bytes) {
    if (bytes >= RELEASE_FROM_BYTES) shmb_python_may_block(&python->call);
}

PyObject *shmb_build_result(struct parsed *parsed, int status, uint64_t number) {
    shmb_python_end(&parsed->python);
    if (status == SHMB_INTERRUPTED) return NULL; /* the exception of the signal handler is set */
    return PyLong_FromLongLong(status == SHMB_OK ? (long long)number : -(long long)status);
}

/* Every write, draw and update ends here. Because it reads the clock anyway, it also checks whether the directory
 * was removed. The call itself was executed, on memory that no other process can open, and all later calls return
 * the same status. Returns the time with a resolution of a few milliseconds. */
static int64_t update_last_seen(struct ring_object *self, int *status) {
    if (*status != SHMB_OK) return 0;
    atomic_store_explicit(&self->ring.me->last_seen_ns, (uint64_t)shmb_clock_ns(CLOCK_REALTIME), memory_order_relaxed);
    CP(count_added);
    int64_t now_ns = shmb_clock_ns(CLOCK_MONOTONIC_COARSE);
    if (shmb_is_removed(&self->ring, now_ns)) *status = SHMB_UNLINKED;
    return now_ns;
}

int shmb_record_seen(struct ring_object *self, int status) {
    update_last_seen(self, &status);
    return status;
}

/* These make a client count as one that inserts, or as one that samples. A load is neither. */
int shmb_record_insert(struct ring_object *self, int status) {
    struct shmb_entry *me = self->ring.me;
    int64_t now_ns = update_last_seen(self, &status);
    if (status == SHMB_OK && shmb_bypass != SHMB_PASSES) {
        atomic_store_explicit(&me->last_insert_ns, (uint64_t)now_ns, memory_order_relaxed);
        CP(count_added);
    }
    return status;
}

int shmb_record_sample(struct ring_object *self, int status) {
    struct shmb_entry *me = self->ring.me;
    int64_t now_ns = update_last_seen(self, &status);
    if (status == SHMB_OK) {
        atomic_store_explicit(&me->last_sample_ns, (uint64_t)now_ns, memory_order_relaxed);
        CP(count_added);
    }
    return status;
}

PyObject *shmb_build_totals(const struct shmb_totals *totals) {
    return Py_BuildValue("(dddK)", totals->mass, totals->least, totals->max_priority, BIG(totals->length));
}
