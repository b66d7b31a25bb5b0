/* The extension module _core: its types, and functions for checksums, crash points, and the layout as seen by the C
 * core. */
#include "python/module.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/crc32c.h"
#include "core/pool.h"
#include "core/power.h"
#include "core/ring.h"
#include "python/following.h"
#include "python/leaf.h"

PyTypeObject *shmb_map_type, *shmb_ring_type;

static PyObject *core_crc32c(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I:crc32c", &data, &crc)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = shmb_crc32c(crc, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *core_powers(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer raw, out;
    double eps, alpha;
    if (!PyArg_ParseTuple(args, "y*ddw*:powers", &raw, &eps, &alpha, &out)) return NULL;
    bool fits = raw.len == out.len && raw.len % (Py_ssize_t)sizeof(double) == 0;
    if (fits) shmb_powers(raw.buf, eps, alpha, out.buf, (uint64_t)raw.len / sizeof(double));
    PyBuffer_Release(&raw);
    PyBuffer_Release(&out);
    if (!fits) return PyErr_Format(PyExc_ValueError, "powers: two buffers of as many float64 are needed");
    Py_RETURN_NONE;
}

static struct shmb_runtime *runtime_of(PyObject *control) {
    if (!PyObject_TypeCheck(control, shmb_map_type) || shmb_map_bytes(control) != (Py_ssize_t)SHMB_CONTROL_BYTES) {
        PyErr_Format(PyExc_TypeError, "a Map of the control file (%u bytes) is needed", SHMB_CONTROL_BYTES);
        return NULL;
    }
    return (struct shmb_runtime *)((char *)shmb_map_address(control) + SHMB_RUNTIME_OFFSET);
}

static PyObject *core_format_mutex(PyObject *Py_UNUSED(module), PyObject *control) {
    struct shmb_runtime *runtime = runtime_of(control);
    if (runtime == NULL) return NULL;
    int error = shmb_mutex_format(runtime);
    if (error == 0) Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *core_mutex_owner(PyObject *Py_UNUSED(module), PyObject *control) {
    struct shmb_runtime *runtime = runtime_of(control);
    return runtime ? PyLong_FromUnsignedLong(shmb_mutex_owner(runtime)) : NULL;
}

static PyObject *core_consumer_version(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *control;
    unsigned long long value;
    unsigned int change;
    if (!PyArg_ParseTuple(args, "OIK:consumer_version", &control, &change, &value)) return NULL;
    struct shmb_runtime *runtime = runtime_of(control);
    if (runtime == NULL) return NULL;
    return PyLong_FromUnsignedLongLong(shmb_consumer_version(runtime, (enum shmb_version_change)change, value));
}

static PyObject *core_arm(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name", "action", "after", "notify_fd", "wait_fd", NULL};
    static const char *const actions[] = {"kill", "stop", "term", "pause", "int", "exec"};
    const char *name, *action = "kill";
    long after = 0;
    int notify_fd = -1, wait_fd = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|slii:arm", names, &name, &action, &after, &notify_fd, &wait_fd))
        return NULL;
    for (int i = 0; i < 6; i++)
        if (strcmp(action, actions[i]) == 0) {
            if (shmb_crash_arm(name, (enum shmb_crash_action)i, after, notify_fd, wait_fd) < 0)
                return PyErr_Format(PyExc_ValueError, "arm: no crash point can have the name %s", name);
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "arm: the action is kill, stop, term, pause, int or exec, not %s", action);
}

static PyObject *core_disarm(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    shmb_crash_disarm();
    Py_RETURN_NONE;
}

static PyObject *core_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return PyLong_FromUnsignedLong(shmb_threads()); }

static PyObject *core_set_threads(PyObject *Py_UNUSED(module), PyObject *number) {
    unsigned long threads = PyLong_AsUnsignedLong(number);
    if (threads == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    shmb_set_threads(threads < SHMB_MOST_THREADS ? (unsigned)threads : SHMB_MOST_THREADS);
    Py_RETURN_NONE;
}

/* Also a fence: stores of Python code before the point are visible before its later stores. */
static PyObject *core_reached(PyObject *Py_UNUSED(module), PyObject *name) {
    atomic_thread_fence(memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&shmb_armed, memory_order_relaxed) != SHMB_CP_NONE, 0)) {
        const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
        if (text == NULL) return NULL;
        shmb_crash_point_named(text);
    }
    Py_RETURN_NONE;
}

/* For looks at slot words by Python: separates copies before it from looks after it, and the other way around. */
static PyObject *core_fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
    Py_RETURN_NONE;
}

static PyObject *core_crash_points(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    for (int i = 1; list && i < SHMB_CP_NATIVE_END; i++) {
        PyObject *name = PyUnicode_FromString(shmb_crash_point_name(i));
        if (name == NULL || PyList_Append(list, name) < 0) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static int put(PyObject *dict, const char *name, uint64_t value) {
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    int failed = number == NULL || PyDict_SetItemString(dict, name, number) < 0;
    Py_XDECREF(number);
    return failed;
}

/* Offsets as computed by this compiler, for memory/format/layout.py. */
static PyObject *core_layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    PyObject *dict = PyDict_New();
    int failed = dict == NULL;
#define RUNTIME(field) failed = failed || put(dict, "runtime." #field, offsetof(struct shmb_runtime, field));
    RUNTIME(mutex) RUNTIME(head) RUNTIME(write_count) RUNTIME(length) RUNTIME(state) RUNTIME(prioritized)
    RUNTIME(max_priority) RUNTIME(alpha) RUNTIME(eps) RUNTIME(alpha_version) RUNTIME(next_turn) RUNTIME(waiters)
    RUNTIME(progress) RUNTIME(next_incarnation) RUNTIME(repairs) RUNTIME(rolled_back) RUNTIME(rolled_forward)
    RUNTIME(reaped) RUNTIME(byte_head) RUNTIME(byte_tail) RUNTIME(evicted)
    RUNTIME(drawn) RUNTIME(pending) RUNTIME(limiter_version) RUNTIME(limited) RUNTIME(inserts_goal)
    RUNTIME(queue_since) RUNTIME(lock_waits) RUNTIME(limiters) RUNTIME(touched_ns) RUNTIME(consumers) RUNTIME(loaded) RUNTIME(consumer_version)
    RUNTIME(reserved) RUNTIME(reserved_bytes) RUNTIME(next_expiry) RUNTIME(next_reservation) RUNTIME(refused) RUNTIME(ages)
    RUNTIME(offline_base) RUNTIME(offline_fraction) RUNTIME(allocated) RUNTIME(spare)
#define LIMITER(field) failed = failed || put(dict, "limiter." #field, offsetof(struct shmb_limiter, field));
    LIMITER(samples_per_insert) LIMITER(error_buffer) LIMITER(min_size) LIMITER(inserts_base) LIMITER(samples_base)
    LIMITER(max_times_sampled) LIMITER(queue_next) LIMITER(when_no_peer) LIMITER(limits)
#define RESERVATION(field) failed = failed || put(dict, "reservation." #field, offsetof(struct shmb_reservation, field));
    RESERVATION(id) RESERVATION(incarnation) RESERVATION(entry) RESERVATION(state) RESERVATION(rows) RESERVATION(bytes)
    RESERVATION(expires_ns) RESERVATION(since_ns) RESERVATION(flags)
#define AGES(field) failed = failed || put(dict, "ages." #field, offsetof(struct shmb_ages, field));
    AGES(max_staleness) AGES(items_per_version) AGES(inserts_base) AGES(version_base)
#define ENTRY(field) failed = failed || put(dict, "entry." #field, offsetof(struct shmb_entry, field));
    ENTRY(state) ENTRY(role) ENTRY(incarnation) ENTRY(pid) ENTRY(start_time) ENTRY(pid_namespace) ENTRY(boot_id)
    ENTRY(joined_ns) ENTRY(phase) ENTRY(kind) ENTRY(first) ENTRY(count) ENTRY(goal) ENTRY(turn) ENTRY(turn_ns) ENTRY(byte_first) ENTRY(inserts)
    ENTRY(aborts) ENTRY(batches_sampled) ENTRY(items_sampled) ENTRY(redraws) ENTRY(age_sum) ENTRY(updates_applied)
    ENTRY(updates_stale) ENTRY(waits) ENTRY(last_seen_ns) ENTRY(pending) ENTRY(reading) ENTRY(waits_for) ENTRY(waits_why)
    ENTRY(inserts_wanted) ENTRY(samples_wanted) ENTRY(waits_since_ns) ENTRY(last_insert_ns) ENTRY(last_sample_ns) ENTRY(first_draw) ENTRY(spare)
#define WEIGHTS(field) failed = failed || put(dict, "weights." #field, offsetof(struct shmb_weights, field));
    WEIGHTS(magic) WEIGHTS(format) WEIGHTS(pad) WEIGHTS(endian) WEIGHTS(copy_bytes) WEIGHTS(copies) WEIGHTS(form_bytes)
    WEIGHTS(crc32c) WEIGHTS(newest) WEIGHTS(stamps)
#define STAMP(field) failed = failed || put(dict, "stamp." #field, offsetof(struct shmb_stamp, field));
    STAMP(version) STAMP(step) STAMP(time_ns) STAMP(pid) STAMP(crc32c)
#define CONSUMER(field) failed = failed || put(dict, "consumer." #field, offsetof(struct shmb_consumer, field));
    CONSUMER(name) CONSUMER(state) CONSUMER(times) CONSUMER(holds) CONSUMER(next) CONSUMER(floor) CONSUMER(since)
    CONSUMER(open_leases) CONSUMER(delivered) CONSUMER(acked) CONSUMER(redelivered) CONSUMER(refused) CONSUMER(dropped)
    CONSUMER(created_ns) CONSUMER(number)
#define LENT(field) failed = failed || put(dict, "lease." #field, offsetof(struct shmb_lease, field));
    LENT(id) LENT(entry) LENT(incarnation) LENT(deadline_ns) LENT(first) LENT(end) LENT(left) LENT(taken_ns)
#define DELIVERY(field) failed = failed || put(dict, "delivery." #field, offsetof(struct shmb_delivery, field));
    DELIVERY(ticket) DELIVERY(what)
#define LEDGER(field) failed = failed || put(dict, "ledger." #field, offsetof(struct shmb_ledger, field));
    LEDGER(consumers) LEDGER(next_lease) LEDGER(bytes)
    failed = failed || put(dict, "page", SHMB_PAGE) || put(dict, "runtime", SHMB_RUNTIME_OFFSET) ||
             put(dict, "registry", SHMB_REGISTRY_OFFSET) || put(dict, "entries", SHMB_ENTRIES) ||
             put(dict, "entry_bytes", SHMB_ENTRY_BYTES) || put(dict, "control_bytes", SHMB_CONTROL_BYTES) ||
             put(dict, "recovery_bytes", SHMB_RECOVERY_BYTES) || put(dict, "streams", SHMB_STREAMS) ||
             put(dict, "incarnations", SHMB_INCARNATIONS) ||
             put(dict, "fanout", SHMB_FANOUT) || put(dict, "mutex_bytes", sizeof(pthread_mutex_t)) ||
             put(dict, "mutex_align", _Alignof(pthread_mutex_t));
    if (failed) Py_CLEAR(dict);
    return dict;
}

/* Returns the limiter in force in a runtime page, which is mapped or copied, as bytes; None: there is none. */
static PyObject *core_limiter(PyObject *Py_UNUSED(module), PyObject *page) {
    Py_buffer view;
    if (PyObject_GetBuffer(page, &view, PyBUF_SIMPLE) < 0) return NULL;
    struct shmb_setting copy = {{0}, {0}};
    bool is_page = view.len == SHMB_PAGE;
    if (is_page) copy = shmb_copy_of_setting(view.buf);
    PyBuffer_Release(&view);
    if (!is_page) return PyErr_Format(PyExc_ValueError, "limiter: a runtime page has %d bytes", SHMB_PAGE);
    if (copy.limiter.limits == 0 && copy.limiter.min_size == 0) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)&copy, sizeof copy);
}

static PyObject *core_sections(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long capacity, lanes, wholes = 0;
    int records = 0;
    struct shmb_sections sections;
    if (!PyArg_ParseTuple(args, "KK|pK:sections", &capacity, &lanes, &records, &wholes)) return NULL;
    if (capacity == 0 || lanes == 0 || capacity > ((uint64_t)1 << 40) || lanes > ((uint64_t)1 << 40) / capacity ||
        (wholes && (capacity >= SHMB_NEXT_LIMIT || wholes >= SHMB_NEXT_LIMIT)))
        return PyErr_Format(PyExc_ValueError, "sections: %llu slots of %llu lanes cannot be laid out", capacity, lanes);
    shmb_sections_of(capacity, lanes, records != 0, wholes, &sections);
    PyObject *dict = PyDict_New();
    int failed = dict == NULL || put(dict, "words", sections.words) || put(dict, "checksums", sections.checksums) ||
                 put(dict, "sources", sections.sources) || put(dict, "raw", sections.raw) ||
                 put(dict, "mass", sections.mass) || put(dict, "depth", sections.depth) ||
                 (records && put(dict, "extents", sections.extents)) ||
                 (wholes && (put(dict, "nexts", sections.nexts) || put(dict, "holders", sections.holders))) ||
                 put(dict, "bytes", sections.bytes);
    for (unsigned level = 1; !failed && level <= sections.depth; level++) {
        char name[32];
        PyOS_snprintf(name, sizeof name, "sum%u", level);
        failed = put(dict, name, sections.sum[level]);
        PyOS_snprintf(name, sizeof name, "min%u", level);
        failed = failed || put(dict, name, sections.min[level]);
        PyOS_snprintf(name, sizeof name, "nodes%u", level);
        failed = failed || put(dict, name, sections.nodes[level]);
    }
    if (failed) Py_CLEAR(dict);
    return dict;
}

/* Offsets in the ledger. */
static PyObject *core_parts(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long capacity;
    struct shmb_parts parts;
    if (!PyArg_ParseTuple(args, "K:parts", &capacity)) return NULL;
    if (capacity == 0 || capacity > ((uint64_t)1 << 40))
        return PyErr_Format(PyExc_ValueError, "parts: a ledger of %llu slots cannot be laid out", capacity);
    shmb_parts_of(capacity, &parts);
    PyObject *dict = PyDict_New();
    int failed = dict == NULL || put(dict, "reservations", parts.reservations) || put(dict, "consumers", parts.consumers) ||
                 put(dict, "each", parts.each) || put(dict, "deliveries", parts.deliveries) || put(dict, "bytes", parts.bytes);
    if (failed) Py_CLEAR(dict);
    return dict;
}

static PyObject *core_begin_life(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    shmb_life_begin();
    return PyLong_FromUnsignedLongLong(shmb_life());
}

static PyObject *core_set_boot_offset(PyObject *Py_UNUSED(module), PyObject *given) {
    int64_t offset_ns = PyLong_AsLongLong(given);
    if (offset_ns == -1 && PyErr_Occurred()) return NULL;
    shmb_set_boot_offset(offset_ns);
    Py_RETURN_NONE;
}

static PyObject *core_boot_ns(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(shmb_boot_ns());
}

static PyObject *core_close_in_child(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    shmb_descriptors_of_parent();
    Py_RETURN_NONE;
}

struct moved {
    const uint64_t *from, *bytes, *to;
    uint64_t count, base;
};

static void move_part(void *what, uint64_t first, uint64_t end) {
    const struct moved *moved = what;
    for (uint64_t i = first; i < end; i++) {
        if (i + 8 < moved->count) __builtin_prefetch((const void *)(uintptr_t)(moved->base + moved->from[i + 8]));
        if (moved->bytes[i]) memcpy((void *)(uintptr_t)moved->to[i], (const void *)(uintptr_t)(moved->base + moved->from[i]), moved->bytes[i]);
    }
}

/* move_pieces(from, sizes, to, count, base): addresses of int64[count] each; those in `from` are relative to base */
static PyObject *core_move_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long from, sizes, to, count, base = 0;
    if (!PyArg_ParseTuple(args, "KKKK|K:move_pieces", &from, &sizes, &to, &count, &base)) return NULL;
    struct moved moved = {(const uint64_t *)(uintptr_t)from, (const uint64_t *)(uintptr_t)sizes, (const uint64_t *)(uintptr_t)to, count, base};
    Py_BEGIN_ALLOW_THREADS
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < count; i++) bytes += moved.bytes[i];
    shmb_divide(move_part, &moved, count, count ? bytes / count : 0);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Converts between interleaved bytes and `planes` consecutive planes of `each` bytes. */
static inline void bytes_apart(const unsigned char *restrict from, unsigned char *restrict to, size_t each, size_t planes) {
    for (size_t i = 0; i < each; i++)
        for (size_t k = 0; k < planes; k++) to[k * each + i] = from[i * planes + k];
}

static inline void bytes_together(const unsigned char *restrict from, unsigned char *restrict to, size_t each, size_t planes) {
    for (size_t i = 0; i < each; i++)
        for (size_t k = 0; k < planes; k++) to[i * planes + k] = from[k * each + i];
}

/* With a constant number of planes, the compiler generates code for 16 bytes at a time. */
static void turn(const unsigned char *from, unsigned char *to, size_t bytes, size_t planes, bool splits) {
    size_t each = planes ? bytes / planes : 0;
    if (planes <= 1) memcpy(to, from, bytes);
    else if (planes == 2) splits ? bytes_apart(from, to, each, 2) : bytes_together(from, to, each, 2);
    else if (planes == 3) splits ? bytes_apart(from, to, each, 3) : bytes_together(from, to, each, 3);
    else if (planes == 4) splits ? bytes_apart(from, to, each, 4) : bytes_together(from, to, each, 4);
    else splits ? bytes_apart(from, to, each, planes) : bytes_together(from, to, each, planes);
}

static PyObject *turn_pieces(PyObject *args, bool splits) {
    unsigned long long from, sizes, planes, to, count, base = 0;
    if (!PyArg_ParseTuple(args, "KKKKK|K:planes", &from, &sizes, &planes, &to, &count, &base)) return NULL;
    const uint64_t *source = (const uint64_t *)(uintptr_t)from, *bytes = (const uint64_t *)(uintptr_t)sizes;
    const uint64_t *of = (const uint64_t *)(uintptr_t)planes, *target = (const uint64_t *)(uintptr_t)to;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < count; i++)
        if (bytes[i])
            turn((const unsigned char *)(uintptr_t)(base + source[i]), (unsigned char *)(uintptr_t)target[i], bytes[i], of[i], splits);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* split_planes, join_planes(from, sizes, planes, to, count, base): addresses as in move_pieces */
static PyObject *core_split_planes(PyObject *Py_UNUSED(module), PyObject *args) { return turn_pieces(args, true); }
static PyObject *core_join_planes(PyObject *Py_UNUSED(module), PyObject *args) { return turn_pieces(args, false); }

/* same_pieces(one, other, nbytes, count, out): stores whether the pieces are equal, uint8[count] */
static PyObject *core_same_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long one, other, nbytes, count, out;
    if (!PyArg_ParseTuple(args, "KKKKK:same_pieces", &one, &other, &nbytes, &count, &out)) return NULL;
    const uint64_t *a = (const uint64_t *)(uintptr_t)one, *b = (const uint64_t *)(uintptr_t)other;
    unsigned char *found = (unsigned char *)(uintptr_t)out;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < count; i++)
        found[i] = a[i] == b[i] || memcmp((const void *)(uintptr_t)a[i], (const void *)(uintptr_t)b[i], nbytes) == 0;
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* A separate tree: numbers at an address, followed by the nodes, with the layout of a slots file. */
static struct shmb_tree tree_at(uint64_t address, uint64_t size, bool whole) {
    struct shmb_sections sections;
    struct shmb_tree tree = {.whole = whole};
    shmb_sections_of(size, 1, false, 0, &sections);
    shmb_tree_map(&tree, &sections, (unsigned char *)(uintptr_t)(address - sections.mass));
    return tree;
}

/* tree_update(tree, size, whole, elements, count): uint64[count], which is overwritten */
static PyObject *core_tree_update(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address, size, elements, count;
    int whole;
    if (!PyArg_ParseTuple(args, "KKpKK:tree_update", &address, &size, &whole, &elements, &count)) return NULL;
    struct shmb_tree tree = tree_at(address, size, whole != 0);
    shmb_tree_touched(&tree, (uint64_t *)(uintptr_t)elements, count);
    Py_RETURN_NONE;
}

/* tree_query(tree, size, least, first, end, out, count): uint64[count] each -> double[count] */
static PyObject *core_tree_query(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address, size, first, end, out, count;
    int least;
    if (!PyArg_ParseTuple(args, "KKpKKKK:tree_query", &address, &size, &least, &first, &end, &out, &count)) return NULL;
    struct shmb_tree tree = tree_at(address, size, least != 0);
    const uint64_t *from = (const uint64_t *)(uintptr_t)first, *to = (const uint64_t *)(uintptr_t)end;
    for (uint64_t i = 0; i < count; i++)
        ((double *)(uintptr_t)out)[i] = shmb_tree_query(&tree, least != 0, from[i], to[i]);
    Py_RETURN_NONE;
}

/* tree_lower_bound(tree, size, sums, out, count): double[count] -> uint64[count] */
static PyObject *core_tree_lower_bound(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address, size, sums, out, count;
    if (!PyArg_ParseTuple(args, "KKKKK:tree_lower_bound", &address, &size, &sums, &out, &count)) return NULL;
    struct shmb_tree tree = tree_at(address, size, false);
    for (uint64_t i = 0; i < count; i++)
        ((uint64_t *)(uintptr_t)out)[i] = shmb_tree_lower_bound(&tree, ((const double *)(uintptr_t)sums)[i]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"know_arrays", shmb_core_know_arrays, METH_VARARGS, "know_arrays(single, wide, integer): [2, 3] of float32, float64, int64: their class is read here."},
    {"know_tensors", shmb_core_know_tensors, METH_O, "know_tensors(class): so are tensors of exactly this class."},
    {"split_planes", core_split_planes, METH_VARARGS, "split_planes(from, sizes, planes, to, count, base=0): what lies byte beside byte, plane by plane."},
    {"join_planes", core_join_planes, METH_VARARGS, "join_planes(from, sizes, planes, to, count, base=0): planes byte beside byte."},
    {"move_pieces", core_move_pieces, METH_VARARGS, "move_pieces(from, sizes, to, count, base=0): copy pieces from address to address."},
    {"same_pieces", core_same_pieces, METH_VARARGS, "same_pieces(one, other, nbytes, count, out): which pieces are equal."},
    {"locate_pieces", shmb_core_locate_pieces, METH_VARARGS,
     "locate_pieces(data, nbytes, starts, sizes, count, steps, code, code_bytes, numbers, offsets, stored, expanded): of one form; None: not so."},
    {"measure_records", shmb_core_measure_records, METH_VARARGS,
     "measure_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends): bytes of records of one form, or -1."},
    {"lay_out_records", shmb_core_lay_out_records, METH_VARARGS,
     "lay_out_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, addresses, data): write those."},
    {"record", shmb_core_record, METH_VARARGS, "record(steps, code, dims, pieces): the bytes of one record and where it ends, or None."},
    {"take_apart", shmb_core_take_apart, METH_VARARGS,
     "take_apart(base, held, pieces, numbers, width, offsets, stored, expanded, count, to, of_each, out, room, frames, parts): leaves of located records."},
    {"runs", shmb_core_runs, METH_VARARGS,
     "runs(whole, frames, frame, before, nbytes, to, planes, parts, most, woven, at, out): frames that are expanded in one step."},
    {"unweave", shmb_core_unweave, METH_VARARGS, "unweave(into, other, half, frames): their other halves to their places."},
    {"frames_say", shmb_core_frames_say, METH_VARARGS, "frames_say(at, stored, count, whole, dictionary): that they expand to so much."},
    {"bytes_of", shmb_core_bytes_of, METH_VARARGS, "bytes_of(at, sizes, first, end, step): some pieces as bytes, one behind the other."},
    {"views", shmb_core_views, METH_VARARGS, "views(addresses, sizes, count): memoryviews, to be read."},
    {"bytes_at", shmb_core_bytes_at, METH_VARARGS, "bytes_at(found, addresses, sizes): where buffers lie."},
    {"address", shmb_core_address, METH_O, "address(one): where a buffer or a tensor begins; of a number itself, of None 0."},
    {"tree_update", core_tree_update, METH_VARARGS, "tree_update(tree, size, whole, elements, count): the nodes above them."},
    {"tree_query", core_tree_query, METH_VARARGS, "tree_query(tree, size, least, first, end, out, count): sums, or minima."},
    {"tree_lower_bound", core_tree_lower_bound, METH_VARARGS, "tree_lower_bound(tree, size, sums, out, count): where they lie."},
    {"powers", core_powers, METH_VARARGS, "powers(raw, eps, alpha, out): out[i] = (raw[i] + eps) ** alpha, of float64, in other memory."},
    {"crc32c", core_crc32c, METH_VARARGS, "crc32c(data, crc=0): CRC32C, chainable."},
    {"format_mutex", core_format_mutex, METH_O, "format_mutex(control): a fresh robust mutex; only while nobody is alive."},
    {"mutex_owner", core_mutex_owner, METH_O, "mutex_owner(control): thread id of the holder, 0 if nobody holds it."},
    {"consumer_version", core_consumer_version, METH_VARARGS,
     "consumer_version(control, change, value): the version that learners have; 0 sets it, 1 adds to it, 2 raises it."},
    {"arm", (PyCFunction)(void (*)(void))core_arm, METH_VARARGS | METH_KEYWORDS,
     "arm(name, action='kill', after=0, notify_fd=-1, wait_fd=-1): for tests; at the (after + 1)th passing of a crash point.\n"
     "With the name '*' it pauses at each of them, and writes its name and a newline to notify_fd."},
    {"disarm", core_disarm, METH_NOARGS, "disarm(): forget the armed crash point."},
    {"threads", core_threads, METH_NOARGS, "threads(): that work on a large batch, the caller among them."},
    {"set_threads", core_set_threads, METH_O, "set_threads(threads): as many; 0: by what this process may use."},
    {"reached", core_reached, METH_O, "reached(name): a crash point in Python code."},
    {"fence", core_fence, METH_NOARGS, "fence(): loads before it come before loads and stores after it."},
    {"crash_points", core_crash_points, METH_NOARGS, "crash_points(): names of the points compiled into the C core."},
    {"layout", core_layout, METH_NOARGS, "layout(): offsets in the control file as the C core sees them."},
    {"sections", core_sections, METH_VARARGS, "sections(capacity, lanes, records=False): offsets in the slots file."},
    {"parts", core_parts, METH_VARARGS, "parts(capacity): offsets in the ledger, and its size."},
    {"limiter", core_limiter, METH_O, "limiter(runtime): what limits both sides, as layout.LIMITER; None: nothing does."},
    {"publish", shmb_core_publish, METH_VARARGS,
     "publish(weights, copies, nbytes, pieces, count, step): under the lock of the file; returns the version. Pieces: an\n"
     "address of uint64[3, count], which are addresses, sizes and places in a copy."},
    {"newest", shmb_core_newest, METH_VARARGS,
     "newest(weights, copies, nbytes, than, out): copy out what is newer; (version, step, time_ns, pid), or a status."},
    {"close_in_child", core_close_in_child, METH_NOARGS, "close_in_child(): close every Descriptor that is not inherited."},
    {"set_boot_offset", core_set_boot_offset, METH_O, "set_boot_offset(ns): by which our time namespace shifts CLOCK_BOOTTIME."},
    {"boot_ns", core_boot_ns, METH_NOARGS, "boot_ns(): CLOCK_BOOTTIME of the initial time namespace, in ns."},
    {"begin_life", core_begin_life, METH_NOARGS, "begin_life(): number of this process, another one after fork."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_core", .m_doc = "The C core of shmbuffer.", .m_size = -1, .m_methods = methods};

PyTypeObject *shmb_follower_type, *shmb_trajectories_type;

PyMODINIT_FUNC PyInit__core(void) {
    shmb_crc32c_init();
    shmb_powers_init();
    shmb_life_begin();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    shmb_map_type = (PyTypeObject *)PyType_FromSpec(&shmb_map_spec);
    shmb_ring_type = (PyTypeObject *)PyType_FromSpec(&shmb_ring_spec);
    static const struct {
        const char *name;
        PyType_Spec *spec;
    } types[] = {{"Descriptor", &shmb_descriptor_spec},
                 {"Intake", &shmb_intake_spec},
                 {"Outtake", &shmb_outtake_spec},
                 {"Follower", &shmb_follower_spec},
                 {"Trajectories", &shmb_trajectories_spec},
                 {"Labels", &shmb_labels_spec},
                 {"Windows", &shmb_windows_spec}};
    if (shmb_map_type == NULL || shmb_ring_type == NULL || PyModule_AddObjectRef(module, "Map", (PyObject *)shmb_map_type) < 0 ||
        PyModule_AddObjectRef(module, "Ring", (PyObject *)shmb_ring_type) < 0)
        Py_CLEAR(module);
    for (size_t i = 0; module && i < sizeof types / sizeof *types; i++) {
        PyObject *type = PyType_FromSpec(types[i].spec);
        if (type == NULL || PyModule_AddObjectRef(module, types[i].name, type) < 0) Py_CLEAR(module);
        /* the module holds a reference */
        if (types[i].spec == &shmb_follower_spec) shmb_follower_type = (PyTypeObject *)type;
        if (types[i].spec == &shmb_trajectories_spec) shmb_trajectories_type = (PyTypeObject *)type;
        Py_XDECREF(type);
    }
#define STATUS(name) if (module && PyModule_AddIntConstant(module, #name, SHMB_##name) < 0) Py_CLEAR(module);
    STATUS(BLOCKED) STATUS(FORKED) STATUS(CLOSED) STATUS(LOCK_TIMEOUT) STATUS(INTERRUPTED) STATUS(UNRECOVERABLE)
    STATUS(FENCED) STATUS(NOTHING) STATUS(NO_MEMORY) STATUS(NO_CLAIM) STATUS(OTHER_SETTINGS)
    STATUS(LEFT) STATUS(BAD_PRIORITY) STATUS(BAD_INDEX) STATUS(BAD_ALPHA) STATUS(REENTERED) STATUS(NO_TICKETS)
    STATUS(TOO_LARGE) STATUS(BAD_BATCH) STATUS(NO_ROOM) STATUS(LIMITED) STATUS(IN_QUEUE) STATUS(DAMAGED)
    STATUS(UNLINKED) STATUS(LAPPED) STATUS(NO_WHOLES) STATUS(NO_RESERVATION) STATUS(OVER_RESERVED)
    STATUS(ALL_RESERVED) STATUS(TOO_OLD) STATUS(CONSUMED) STATUS(CONSUMER_GONE) STATUS(NO_LEASE)
    STATUS(UNALLOCATED)
    return module;
}
