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
    if (!fits) return PyErr_Format(PyExc_ValueError, "powers(): raw and out must be float64 buffers of the same size.");
    Py_RETURN_NONE;
}

static struct shmb_runtime *runtime_of(PyObject *control) {
    if (!PyObject_TypeCheck(control, shmb_map_type) || shmb_map_bytes(control) != (Py_ssize_t)SHMB_CONTROL_BYTES) {
        PyErr_Format(PyExc_TypeError, "The control file must be a Map of %u bytes.", SHMB_CONTROL_BYTES);
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
                return PyErr_Format(PyExc_ValueError, "arm(): %s is not a possible name of a crash point with this action.", name);
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "arm(): the action must be kill, stop, term, pause, int or exec, but it is %s.", action);
}

static PyObject *core_disarm(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    shmb_crash_disarm();
    Py_RETURN_NONE;
}

static PyObject *core_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return PyLong_FromUnsignedLong(shmb_threads()); }

static PyObject *core_set_threads(PyObject *Py_UNUSED(module), PyObject *number) {
    unsigned long threads = PyLong_AsUnsignedLong(number);
    if (threads == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    shmb_set_threads(threads < SHMB_MAX_THREADS ? (unsigned)threads : SHMB_MAX_THREADS);
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

static int put_number(PyObject *dict, const char *name, uint64_t value) {
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    int failed = number == NULL || PyDict_SetItemString(dict, name, number) < 0;
    Py_XDECREF(number);
    return failed;
}

/* Offsets as computed by this compiler, for memory/format/layout.py. */
static PyObject *core_layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    PyObject *dict = PyDict_New();
    int failed = dict == NULL;
#define RUNTIME(field) failed = failed || put_number(dict, "runtime." #field, offsetof(struct shmb_runtime, field));
    RUNTIME(mutex) RUNTIME(head) RUNTIME(write_count) RUNTIME(length) RUNTIME(state) RUNTIME(prioritized)
    RUNTIME(max_priority) RUNTIME(alpha) RUNTIME(eps) RUNTIME(alpha_version) RUNTIME(next_turn) RUNTIME(waiters)
    RUNTIME(progress) RUNTIME(next_incarnation) RUNTIME(repairs) RUNTIME(rolled_back) RUNTIME(rolled_forward)
    RUNTIME(reaped) RUNTIME(byte_head) RUNTIME(byte_tail) RUNTIME(evicted)
    RUNTIME(drawn) RUNTIME(pending) RUNTIME(limiter_version) RUNTIME(limited) RUNTIME(inserts_goal)
    RUNTIME(queue_since) RUNTIME(lock_waits) RUNTIME(limiters) RUNTIME(touched_ns) RUNTIME(consumers) RUNTIME(loaded) RUNTIME(consumer_version)
    RUNTIME(reserved) RUNTIME(reserved_bytes) RUNTIME(next_expiry) RUNTIME(next_reservation) RUNTIME(refused) RUNTIME(ages)
    RUNTIME(offline_base) RUNTIME(offline_fraction) RUNTIME(allocated) RUNTIME(spare)
#define LIMITER(field) failed = failed || put_number(dict, "limiter." #field, offsetof(struct shmb_limiter, field));
    LIMITER(samples_per_insert) LIMITER(error_buffer) LIMITER(min_size) LIMITER(inserts_base) LIMITER(samples_base)
    LIMITER(max_times_sampled) LIMITER(queue_next) LIMITER(when_no_peer) LIMITER(limits)
#define RESERVATION(field) failed = failed || put_number(dict, "reservation." #field, offsetof(struct shmb_reservation, field));
    RESERVATION(id) RESERVATION(incarnation) RESERVATION(entry) RESERVATION(state) RESERVATION(rows) RESERVATION(bytes)
    RESERVATION(expires_ns) RESERVATION(since_ns) RESERVATION(flags)
#define AGES(field) failed = failed || put_number(dict, "ages." #field, offsetof(struct shmb_ages, field));
    AGES(max_staleness) AGES(items_per_version) AGES(inserts_base) AGES(version_base)
#define ENTRY(field) failed = failed || put_number(dict, "entry." #field, offsetof(struct shmb_entry, field));
    ENTRY(state) ENTRY(role) ENTRY(incarnation) ENTRY(pid) ENTRY(start_time) ENTRY(pid_namespace) ENTRY(boot_id)
    ENTRY(joined_ns) ENTRY(phase) ENTRY(kind) ENTRY(first) ENTRY(count) ENTRY(goal) ENTRY(turn) ENTRY(turn_ns) ENTRY(byte_first) ENTRY(inserts)
    ENTRY(aborts) ENTRY(batches_sampled) ENTRY(items_sampled) ENTRY(redraws) ENTRY(age_sum) ENTRY(updates_applied)
    ENTRY(updates_stale) ENTRY(waits) ENTRY(last_seen_ns) ENTRY(pending) ENTRY(reading) ENTRY(waits_for) ENTRY(waits_why)
    ENTRY(inserts_wanted) ENTRY(samples_wanted) ENTRY(waits_since_ns) ENTRY(last_insert_ns) ENTRY(last_sample_ns) ENTRY(first_draw) ENTRY(spare)
#define WEIGHTS(field) failed = failed || put_number(dict, "weights." #field, offsetof(struct shmb_weights, field));
    WEIGHTS(magic) WEIGHTS(format) WEIGHTS(pad) WEIGHTS(endian) WEIGHTS(copy_bytes) WEIGHTS(copies) WEIGHTS(form_bytes)
    WEIGHTS(crc32c) WEIGHTS(newest) WEIGHTS(stamps)
#define STAMP(field) failed = failed || put_number(dict, "stamp." #field, offsetof(struct shmb_stamp, field));
    STAMP(version) STAMP(step) STAMP(time_ns) STAMP(pid) STAMP(crc32c)
#define CONSUMER(field) failed = failed || put_number(dict, "consumer." #field, offsetof(struct shmb_consumer, field));
    CONSUMER(name) CONSUMER(state) CONSUMER(times) CONSUMER(holds) CONSUMER(next) CONSUMER(floor) CONSUMER(since)
    CONSUMER(open_leases) CONSUMER(delivered) CONSUMER(acked) CONSUMER(redelivered) CONSUMER(refused) CONSUMER(dropped)
    CONSUMER(created_ns) CONSUMER(number)
#define LEASE(field) failed = failed || put_number(dict, "lease." #field, offsetof(struct shmb_lease, field));
    LEASE(id) LEASE(entry) LEASE(incarnation) LEASE(deadline_ns) LEASE(first) LEASE(end) LEASE(left) LEASE(taken_ns)
#define DELIVERY(field) failed = failed || put_number(dict, "delivery." #field, offsetof(struct shmb_delivery, field));
    DELIVERY(ticket) DELIVERY(bits)
#define LEDGER(field) failed = failed || put_number(dict, "ledger." #field, offsetof(struct shmb_ledger, field));
    LEDGER(consumers) LEDGER(next_lease) LEDGER(bytes)
    failed = failed || put_number(dict, "page", SHMB_PAGE) || put_number(dict, "runtime", SHMB_RUNTIME_OFFSET) ||
             put_number(dict, "registry", SHMB_REGISTRY_OFFSET) || put_number(dict, "entries", SHMB_ENTRIES) ||
             put_number(dict, "entry_bytes", SHMB_ENTRY_BYTES) || put_number(dict, "control_bytes", SHMB_CONTROL_BYTES) ||
             put_number(dict, "recovery_bytes", SHMB_RECOVERY_BYTES) || put_number(dict, "streams", SHMB_STREAMS) ||
             put_number(dict, "incarnations", SHMB_INCARNATIONS) ||
             put_number(dict, "fanout", SHMB_FANOUT) || put_number(dict, "mutex_bytes", sizeof(pthread_mutex_t)) ||
             put_number(dict, "mutex_align", _Alignof(pthread_mutex_t));
    if (failed) Py_CLEAR(dict);
    return dict;
}

/* Returns the limiter in force in a runtime page, which is mapped or copied, as bytes; None: there is none. */
static PyObject *core_limiter(PyObject *Py_UNUSED(module), PyObject *page) {
    Py_buffer view;
    if (PyObject_GetBuffer(page, &view, PyBUF_SIMPLE) < 0) return NULL;
    struct shmb_setting copy = {{0}, {0}};
    bool is_page = view.len == SHMB_PAGE;
    if (is_page) copy = shmb_copy_setting(view.buf);
    PyBuffer_Release(&view);
    if (!is_page) return PyErr_Format(PyExc_ValueError, "limiter(): the argument must be a runtime page of %d bytes.", SHMB_PAGE);
    if (copy.limiter.limits == 0 && copy.limiter.min_size == 0) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)&copy, sizeof copy);
}

static PyObject *core_sections(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long capacity, lanes, own_rows = 0;
    int records = 0;
    struct shmb_sections sections;
    if (!PyArg_ParseTuple(args, "KK|pK:sections", &capacity, &lanes, &records, &own_rows)) return NULL;
    if (capacity == 0 || lanes == 0 || capacity > ((uint64_t)1 << 40) || lanes > ((uint64_t)1 << 40) / capacity ||
        (own_rows && (capacity >= SHMB_NEXT_LIMIT || own_rows >= SHMB_NEXT_LIMIT)))
        return PyErr_Format(PyExc_ValueError, "sections(): %llu slots of %llu lanes are out of range.", capacity, lanes);
    shmb_compute_sections(capacity, lanes, records != 0, own_rows, &sections);
    PyObject *dict = PyDict_New();
    int failed = dict == NULL || put_number(dict, "words", sections.words) || put_number(dict, "checksums", sections.checksums) ||
                 put_number(dict, "sources", sections.sources) || put_number(dict, "raw", sections.raw) ||
                 put_number(dict, "mass", sections.mass) || put_number(dict, "depth", sections.depth) ||
                 (records && put_number(dict, "extents", sections.extents)) ||
                 (own_rows && (put_number(dict, "nexts", sections.nexts) || put_number(dict, "holders", sections.holders))) ||
                 put_number(dict, "bytes", sections.bytes);
    for (unsigned level = 1; !failed && level <= sections.depth; level++) {
        char name[32];
        PyOS_snprintf(name, sizeof name, "sum%u", level);
        failed = put_number(dict, name, sections.sum[level]);
        PyOS_snprintf(name, sizeof name, "min%u", level);
        failed = failed || put_number(dict, name, sections.min[level]);
        PyOS_snprintf(name, sizeof name, "nodes%u", level);
        failed = failed || put_number(dict, name, sections.nodes[level]);
    }
    if (failed) Py_CLEAR(dict);
    return dict;
}

/* Offsets in the ledger. */
static PyObject *core_parts(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long capacity;
    struct shmb_ledger_parts parts;
    if (!PyArg_ParseTuple(args, "K:parts", &capacity)) return NULL;
    if (capacity == 0 || capacity > ((uint64_t)1 << 40))
        return PyErr_Format(PyExc_ValueError, "parts(): a ledger of %llu slots is out of range.", capacity);
    shmb_compute_parts(capacity, &parts);
    PyObject *dict = PyDict_New();
    int failed = dict == NULL || put_number(dict, "reservations", parts.reservations) || put_number(dict, "consumers", parts.consumers) ||
                 put_number(dict, "each", parts.each) || put_number(dict, "deliveries", parts.deliveries) || put_number(dict, "bytes", parts.bytes);
    if (failed) Py_CLEAR(dict);
    return dict;
}

static PyObject *core_begin_process(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    shmb_init_process_token();
    return PyLong_FromUnsignedLongLong(shmb_process_token());
}

static PyObject *core_set_boot_offset(PyObject *Py_UNUSED(module), PyObject *object) {
    int64_t offset_ns = PyLong_AsLongLong(object);
    if (offset_ns == -1 && PyErr_Occurred()) return NULL;
    shmb_set_boot_offset(offset_ns);
    Py_RETURN_NONE;
}

static PyObject *core_boot_ns(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(shmb_boot_ns());
}

static PyObject *core_close_in_child(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    shmb_close_parent_descriptors();
    Py_RETURN_NONE;
}

struct moves {
    const uint64_t *from, *bytes, *to;
    uint64_t count, base;
};

static void move_part(void *bits, uint64_t first, uint64_t end) {
    const struct moves *moves = bits;
    for (uint64_t i = first; i < end; i++) {
        if (i + 8 < moves->count) __builtin_prefetch((const void *)(uintptr_t)(moves->base + moves->from[i + 8]));
        if (moves->bytes[i]) memcpy((void *)(uintptr_t)moves->to[i], (const void *)(uintptr_t)(moves->base + moves->from[i]), moves->bytes[i]);
    }
}

/* move_pieces(from, sizes, to, count, base): addresses of int64[count] each; those in `from` are relative to base */
static PyObject *core_move_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long from, sizes, to, count, base = 0;
    if (!PyArg_ParseTuple(args, "KKKK|K:move_pieces", &from, &sizes, &to, &count, &base)) return NULL;
    struct moves moves = {(const uint64_t *)(uintptr_t)from, (const uint64_t *)(uintptr_t)sizes, (const uint64_t *)(uintptr_t)to, count, base};
    Py_BEGIN_ALLOW_THREADS
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < count; i++) bytes += moves.bytes[i];
    shmb_divide(move_part, &moves, count, count ? bytes / count : 0);
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
static void convert_planes(const unsigned char *from, unsigned char *to, size_t bytes, size_t planes, bool splits) {
    size_t each = planes ? bytes / planes : 0;
    if (planes <= 1) memcpy(to, from, bytes);
    else if (planes == 2) splits ? bytes_apart(from, to, each, 2) : bytes_together(from, to, each, 2);
    else if (planes == 3) splits ? bytes_apart(from, to, each, 3) : bytes_together(from, to, each, 3);
    else if (planes == 4) splits ? bytes_apart(from, to, each, 4) : bytes_together(from, to, each, 4);
    else splits ? bytes_apart(from, to, each, planes) : bytes_together(from, to, each, planes);
}

static PyObject *convert_pieces(PyObject *args, bool splits) {
    unsigned long long from, sizes, planes, to, count, base = 0;
    if (!PyArg_ParseTuple(args, "KKKKK|K:planes", &from, &sizes, &planes, &to, &count, &base)) return NULL;
    const uint64_t *source = (const uint64_t *)(uintptr_t)from, *bytes = (const uint64_t *)(uintptr_t)sizes;
    const uint64_t *plane_counts = (const uint64_t *)(uintptr_t)planes, *target = (const uint64_t *)(uintptr_t)to;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < count; i++)
        if (bytes[i])
            convert_planes((const unsigned char *)(uintptr_t)(base + source[i]), (unsigned char *)(uintptr_t)target[i], bytes[i], plane_counts[i], splits);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* split_planes, join_planes(from, sizes, planes, to, count, base): addresses as in move_pieces */
static PyObject *core_split_planes(PyObject *Py_UNUSED(module), PyObject *args) { return convert_pieces(args, true); }
static PyObject *core_join_planes(PyObject *Py_UNUSED(module), PyObject *args) { return convert_pieces(args, false); }

/* same_pieces(one, other, nbytes, count, out): stores whether the pieces are equal, uint8[count] */
static PyObject *core_compare_pieces(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long one, other, nbytes, count, out;
    if (!PyArg_ParseTuple(args, "KKKKK:same_pieces", &one, &other, &nbytes, &count, &out)) return NULL;
    const uint64_t *a = (const uint64_t *)(uintptr_t)one, *b = (const uint64_t *)(uintptr_t)other;
    unsigned char *equal = (unsigned char *)(uintptr_t)out;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < count; i++)
        equal[i] = a[i] == b[i] || memcmp((const void *)(uintptr_t)a[i], (const void *)(uintptr_t)b[i], nbytes) == 0;
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* A separate tree: numbers at an address, followed by the nodes, with the layout of a slots file. */
static struct shmb_tree tree_at(uint64_t address, uint64_t size, bool dense) {
    struct shmb_sections sections;
    struct shmb_tree tree = {.dense = dense};
    shmb_compute_sections(size, 1, false, 0, &sections);
    shmb_tree_map(&tree, &sections, (unsigned char *)(uintptr_t)(address - sections.mass));
    return tree;
}

/* tree_update(tree, size, whole, elements, count): uint64[count], which is overwritten */
static PyObject *core_tree_update(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address, size, elements, count;
    int dense;
    if (!PyArg_ParseTuple(args, "KKpKK:tree_update", &address, &size, &dense, &elements, &count)) return NULL;
    struct shmb_tree tree = tree_at(address, size, dense != 0);
    shmb_tree_update(&tree, (uint64_t *)(uintptr_t)elements, count);
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
    {"register_arrays", shmb_core_register_arrays, METH_VARARGS,
     "register_arrays(single, wide, integer): registers NumPy's class; examples [2, 3] of float32, float64 and int64."},
    {"register_tensors", shmb_core_register_tensors, METH_O, "register_tensors(class): registers a tensor class; subclasses are not included."},
    {"split_planes", core_split_planes, METH_VARARGS, "split_planes(from, sizes, planes, to, count, base=0): converts interleaved bytes to consecutive planes."},
    {"join_planes", core_join_planes, METH_VARARGS, "join_planes(from, sizes, planes, to, count, base=0): interleaves the bytes of planes."},
    {"move_pieces", core_move_pieces, METH_VARARGS, "move_pieces(from, sizes, to, count, base=0): copies pieces from address to address."},
    {"compare_pieces", core_compare_pieces, METH_VARARGS, "compare_pieces(one, other, nbytes, count, out): stores which pieces are equal."},
    {"locate_pieces", shmb_core_locate_pieces, METH_VARARGS,
     "locate_pieces(data, nbytes, starts, sizes, count, steps, code, code_bytes, numbers, offsets, stored, expanded):\n"
     "locates the pieces of records of one form. None: a record does not fit."},
    {"measure_records", shmb_core_measure_records, METH_VARARGS,
     "measure_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends): returns the bytes\n"
     "of records of one form, or -1."},
    {"lay_out_records", shmb_core_lay_out_records, METH_VARARGS,
     "lay_out_records(steps, code, code_bytes, numbers, sizes, count, offsets, starts, ends, addresses, data): writes\n"
     "these records."},
    {"build_record", shmb_core_build_record, METH_VARARGS, "build_record(steps, code, dims, pieces): returns the bytes of one record and its size, or None."},
    {"distribute_pieces", shmb_core_distribute_pieces, METH_VARARGS,
     "distribute_pieces(base, storage, pieces, numbers, width, offsets, stored, expanded, count, to, of_each, out, room, frames, parts):\n"
     "copies raw pieces of located records, and lists the frames of compressed ones."},
    {"group_frames", shmb_core_group_frames, METH_VARARGS,
     "group_frames(expanded, frames, frame, before, nbytes, to, planes, parts, most, interleaved, at, out): groups frames that are\n"
     "expanded in one step."},
    {"deinterleave", shmb_core_deinterleave, METH_VARARGS, "deinterleave(into, other, half, frames): moves the other halves of frames to their places."},
    {"check_frames", shmb_core_check_frames, METH_VARARGS,
     "check_frames(at, stored, count, expanded, dictionary): True if the headers of the frames have these expanded sizes."},
    {"join_pieces", shmb_core_join_pieces, METH_VARARGS, "join_pieces(at, sizes, first, end, step): returns the concatenation of some pieces."},
    {"make_views", shmb_core_make_views, METH_VARARGS, "make_views(addresses, sizes, count): returns read-only memoryviews."},
    {"locate_buffers", shmb_core_locate_buffers, METH_VARARGS, "locate_buffers(buffers, addresses, sizes): stores address and size of each buffer."},
    {"address", shmb_core_address, METH_O, "address(one): returns the address of a buffer or a tensor; a number unchanged; 0 for None."},
    {"tree_update", core_tree_update, METH_VARARGS, "tree_update(tree, size, dense, elements, count): recomputes the nodes above these elements."},
    {"tree_query", core_tree_query, METH_VARARGS, "tree_query(tree, size, least, first, end, out, count): stores sums, or minima."},
    {"tree_lower_bound", core_tree_lower_bound, METH_VARARGS, "tree_lower_bound(tree, size, sums, out, count): stores the first element whose prefix sum reaches each sum."},
    {"powers", core_powers, METH_VARARGS, "powers(raw, eps, alpha, out): stores out[i] = (raw[i] + eps) ** alpha in float64; the buffers must not overlap."},
    {"crc32c", core_crc32c, METH_VARARGS, "crc32c(data, crc=0): returns the CRC32C; chainable."},
    {"format_mutex", core_format_mutex, METH_O, "format_mutex(control): initialises the robust mutex; only while no client is alive."},
    {"mutex_owner", core_mutex_owner, METH_O, "mutex_owner(control): returns the thread id of the owner, 0 if there is none."},
    {"consumer_version", core_consumer_version, METH_VARARGS,
     "consumer_version(control, change, value): changes the learners' version, and returns it. Change 0 sets it, 1 adds to it, 2\n"
     "raises it."},
    {"arm", (PyCFunction)(void (*)(void))core_arm, METH_VARARGS | METH_KEYWORDS,
     "arm(name, action='kill', after=0, notify_fd=-1, wait_fd=-1): for tests; acts when a crash point is passed for the (after + 1)th\n"
     "time. With the name '*' the process pauses at each point, and writes its name and a newline to notify_fd."},
    {"disarm", core_disarm, METH_NOARGS, "disarm(): disarms the crash point."},
    {"threads", core_threads, METH_NOARGS, "threads(): returns the number of threads that share a large batch, including the caller."},
    {"set_threads", core_set_threads, METH_O, "set_threads(threads): sets that number; 0: one per processor of this process, at most 4."},
    {"reached", core_reached, METH_O, "reached(name): passes a crash point in Python code."},
    {"fence", core_fence, METH_NOARGS, "fence(): orders loads before it before loads and stores after it."},
    {"crash_points", core_crash_points, METH_NOARGS, "crash_points(): returns the names of the crash points in the C core."},
    {"layout", core_layout, METH_NOARGS, "layout(): returns the offsets in the control file as the C core sees them."},
    {"sections", core_sections, METH_VARARGS, "sections(capacity, lanes, records=False, own_rows=0): returns the offsets in the slots file."},
    {"parts", core_parts, METH_VARARGS, "parts(capacity): returns the offsets in the ledger, and its size."},
    {"limiter", core_limiter, METH_O, "limiter(runtime): returns the limiter in force, as layout.LIMITER; None: there is none."},
    {"publish", shmb_core_publish, METH_VARARGS,
     "publish(weights, copies, nbytes, pieces, count, step): publishes weights under the lock of the file, and returns the version.\n"
     "pieces: the address of uint64[3, count] with addresses, sizes and offsets in a copy."},
    {"read_newest", shmb_core_read_newest, METH_VARARGS,
     "read_newest(weights, copies, nbytes, than, out): copies weights newer than `than`. Returns (version, step, time_ns, pid), or a\n"
     "status."},
    {"close_in_child", core_close_in_child, METH_NOARGS, "close_in_child(): closes every Descriptor that is not inherited."},
    {"set_boot_offset", core_set_boot_offset, METH_O, "set_boot_offset(ns): sets the offset of CLOCK_BOOTTIME in this time namespace."},
    {"boot_ns", core_boot_ns, METH_NOARGS, "boot_ns(): returns CLOCK_BOOTTIME of the initial time namespace, in ns."},
    {"begin_process", core_begin_process, METH_NOARGS, "begin_process(): returns a number that identifies this process; it changes after a fork."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_core", .m_doc = "The C core of shmbuffer.", .m_size = -1, .m_methods = methods};

PyTypeObject *shmb_follower_type, *shmb_trajectories_type;

PyMODINIT_FUNC PyInit__core(void) {
    shmb_crc32c_init();
    shmb_powers_init();
    shmb_init_process_token();
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
    STATUS(UNLINKED) STATUS(LAPPED) STATUS(NO_OWN_ROWS) STATUS(NO_RESERVATION) STATUS(OVER_RESERVED)
    STATUS(ALL_RESERVED) STATUS(TOO_OLD) STATUS(CONSUMED) STATUS(CONSUMER_GONE) STATUS(NO_LEASE)
    STATUS(UNALLOCATED)
    return module;
}
