/* Labels::follow for Python: updates the labels of a ring in one call. The labels are in a column of numbers, or are
 * a number in each record. */
#define PY_SSIZE_T_CLEAN
#include "python/labelling.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/ring.h"
#include "python/following.h"
#include "python/module.h"
#include "tables/locating.h"

#define PIECE 8192u
#define BATCH 64u /* elements */
#define MAX_LABEL (((uint64_t)1 << 61) - 1)
#define WHOLE 9007199254740992.0 /* 2^53: smaller float64 are exact integers */

/* Numbers of one kind, one or more per element. */
struct column {
    const unsigned char *base;
    uint64_t count, bytes; /* numbers per element; bytes per number */
    int kind;              /* 'i', 'u', 'f', as in NumPy */
};

/* Little-endian, like all shared data. */
static inline uint64_t bits_in(const struct column *column, uint64_t at) {
    const unsigned char *from = column->base + at * column->bytes;
    uint64_t wide = 0;
    uint32_t narrow = 0;
    if (column->bytes == sizeof wide) return memcpy(&wide, from, sizeof wide), wide;
    if (column->bytes == sizeof narrow) return memcpy(&narrow, from, sizeof narrow), (uint64_t)narrow;
    memcpy(&narrow, from, column->bytes);
    return narrow;
}

static inline int64_t signed_in(const struct column *column, uint64_t bits) {
    unsigned spare = 64 - 8 * (unsigned)column->bytes;
    return (int64_t)(bits << spare) >> spare;
}

static double number_in(const struct column *column, uint64_t at) {
    uint64_t bits = bits_in(column, at);
    double wide;
    float narrow;
    if (column->kind == 'i') return (double)signed_in(column, bits);
    if (column->kind == 'u') return (double)bits;
    if (column->bytes == sizeof wide) return memcpy(&wide, &bits, sizeof wide), wide;
    return memcpy(&narrow, &bits, sizeof narrow), (double)narrow;
}

/* False: the number is not a label. */
static inline bool label_in(const struct column *column, uint64_t element, int64_t *label) {
    if (column->kind == 'f') {
        double value = number_in(column, element);
        *label = fabs(value) < WHOLE ? (int64_t)value : 0;
        return (double)*label == value;
    }
    uint64_t bits = bits_in(column, element);
    *label = column->kind == 'i' ? signed_in(column, bits) : (int64_t)bits;
    return (uint64_t)*label + MAX_LABEL < 2 * MAX_LABEL + 1 && (column->kind == 'i' || bits >> 61 == 0);
}

/* Usually the labels are 64-bit integers. */
static void labels_in(const struct column *column, const uint32_t *elements, uint64_t count, int64_t *labels, bool *good) {
    bool usual = column->kind == 'i' && column->bytes == sizeof *labels;
    for (uint64_t i = 0; i < count && usual; i++) {
        memcpy(&labels[i], column->base + elements[i] * sizeof *labels, sizeof *labels);
        good[i] = (uint64_t)labels[i] + MAX_LABEL < 2 * MAX_LABEL + 1;
    }
    for (uint64_t i = 0; i < count && !usual; i++) good[i] = label_in(column, elements[i], &labels[i]);
}

/* Location of a number in records of one form. */
struct record_form {
    const int64_t *steps; /* see locating.h. NULL: the items are not records */
    const unsigned char *code;
    uint64_t code_bytes, piece;
    int64_t *numbers, *offsets, *sizes; /* scratch space for one record */
};

struct follow_call {
    struct shmb_labels *all;
    const struct shmb_ring *ring;
    struct column labels, values; /* values.base NULL: none */
    struct record_form form;
    double *means;                 /* means of the values, by element */
    uint64_t head;
    int64_t now;
};

/* Reads the label of a record in place. The record may change meanwhile, so every number is read only once. False:
 * the record has another form, or no label. */
static bool label_of_record(const struct follow_call *call, uint64_t slot, int64_t *label) {
    const struct record_form *form = &call->form;
    const struct shmb_extent extent = call->ring->extents[slot];
    if (!shmb_is_valid_extent(call->ring, extent)) return false;
    const int64_t start = 0, size = (int64_t)extent.bytes;
    const unsigned char *record = shmb_record_at(call->ring, extent.position);
    const struct shmb_records_read read = {record, extent.bytes, &start, &size, 1};
    struct shmb_record header;
    memcpy(&header, record, sizeof header);
    if (header.position != extent.position || header.bytes != extent.bytes) return false;
    if (!shmb_locate_pieces(&read, form->steps, form->code, form->code_bytes, form->numbers, form->offsets, form->sizes, NULL, NULL)) return false;
    struct column number = call->labels;
    number.base = record + form->offsets[form->piece];
    return (uint64_t)form->sizes[form->piece] == number.bytes && label_in(&number, 0, label);
}

static double mean_in(const struct column *values, uint64_t element) {
    double sum = 0;
    for (uint64_t v = 0; v < values->count; v++) sum += number_in(values, element * values->count + v);
    return sum / (double)values->count;
}

/* Reads the labels first and compares the words afterwards. False: an item has no label. */
static bool put_slots(const struct follow_call *call, const int64_t *slots, uint64_t count) {
    const struct shmb_ring *ring = call->ring;
    const struct column column = call->labels;
    const uint64_t lanes = ring->lanes, per_batch = BATCH / lanes, head = call->head;
    uint32_t elements[BATCH];
    int64_t labels[BATCH];
    double values[BATCH];
    bool good[BATCH];
    if (lanes > BATCH) return false;
    for (uint64_t first = 0; first < count && !call->all->failed; first += per_batch) {
        uint64_t n_slots = count - first < per_batch ? count - first : per_batch, n = 0, remaining = 0;
        for (uint64_t i = 0; i < n_slots; i++)
            for (uint64_t lane = 0; lane < lanes; lane++) elements[n++] = (uint32_t)((uint64_t)slots[first + i] * lanes + lane);
        for (uint64_t i = 0; i < n && call->form.steps; i++) SHMB_OPTIMISTIC(good[i] = label_of_record(call, elements[i], &labels[i]));
        if (!call->form.steps) labels_in(&column, elements, n, labels, good);
        for (uint64_t i = 0; i < n && call->values.base; i++) values[i] = mean_in(&call->values, elements[i]);
        atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t word = atomic_load_explicit(&ring->words[lanes == 1 ? elements[i] : elements[i] / lanes], memory_order_relaxed);
            if (SHMB_STATE(word) != SHMB_COMMITTED || SHMB_TICKET(word) >= head) continue;
            if (!good[i]) return false;
            if (call->values.base) call->means[elements[i]] = values[i];
            elements[remaining] = elements[i];
            labels[remaining++] = labels[i];
        }
        shmb_labels_put(call->all, elements, labels, remaining, call->now);
    }
    return true;
}

static bool is_among(const int64_t *sorted, uint64_t count, int64_t slot) {
    uint64_t low = 0, high = count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (sorted[middle] < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && sorted[low] == slot;
}

static int by_slot(const void *one, const void *other) {
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return a < b ? -1 : a > b;
}

/* Removes the items that are gone. Items that were reported again are still present, so they stay. Sorts `fresh`. */
static void remove_slots(const struct follow_call *call, const struct shmb_follower *f, int64_t *fresh, uint64_t count, uint64_t before) {
    struct shmb_labels *all = call->all;
    uint64_t n_reported_again = 0, lanes = call->ring->lanes;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = atomic_load_explicit(&call->ring->words[fresh[i]], memory_order_relaxed);
        if (SHMB_TICKET(word) < before) fresh[n_reported_again++] = fresh[i];
    }
    if (n_reported_again > 1) qsort(fresh, n_reported_again, sizeof *fresh, by_slot);
    for (uint64_t i = 0; i < f->removed.count; i++) {
        struct shmb_pair removed = f->removed.at[f->removed.begin + i];
        bool may_return = all->limit && i >= f->n_overwritten;
        uint64_t per_batch = n_reported_again || may_return ? 1 : removed.second;
        for (uint64_t slot = removed.first; slot < removed.first + removed.second; slot += per_batch) {
            uint64_t from = slot * lanes, end = from + per_batch * lanes;
            for (uint64_t e = from; may_return && e < end; e++) shmb_label_mark_absent(all, (uint32_t)e);
            if (!may_return && !(n_reported_again && is_among(fresh, n_reported_again, (int64_t)slot))) shmb_labels_drop(all, from, end);
        }
    }
}

/* Checks absent items of groups: they have returned, are gone, or are still being written. */
static void settle_absent(const struct follow_call *call) {
    struct shmb_labels *all = call->all;
    uint64_t remaining = 0;
    for (uint64_t i = 0; i < all->n_absent_elements; i++) {
        uint32_t element = all->absent_elements[i];
        if (!shmb_label_is_absent(all, element)) continue;
        uint64_t word = atomic_load_explicit(&call->ring->words[element / call->ring->lanes], memory_order_relaxed);
        if (SHMB_STATE(word) == SHMB_WRITING || SHMB_TICKET(word) >= call->head)
            all->absent_elements[remaining++] = element;
        else
            shmb_label_drop(all, element);
    }
    all->n_absent_elements = remaining;
}

/* One poll. False: an item has no label, and the next poll must start over. */
static bool follow_once(struct follow_call *call, struct shmb_follower *f, bool *more) {
    struct shmb_labels *all = call->all;
    const uint64_t before = f->seen, capacity = call->ring->capacity;
    bool restarted = false, right = true;
    *more = false;
    if (!shmb_follower_poll(f, &restarted)) {
        call->head = f->seen;
        settle_absent(call);
        shmb_labels_settle(all);
        return true;
    }
    if (f->failed) return all->failed = true, true;
    if (restarted) shmb_labels_clear(all);
    call->head = f->seen;
    all->first = call->head >= capacity ? call->head % capacity * call->ring->lanes : 0;
    uint64_t max_count = restarted ? PIECE : f->end - f->at + 1, count = 0;
    int64_t *slots = malloc(2 * max_count * sizeof *slots), *sorted = slots + max_count;
    if (slots == NULL) return all->failed = true, true;
    if (!restarted) {
        count = shmb_follower_next(f, slots, NULL, max_count);
        memcpy(sorted, slots, count * sizeof *slots);
        remove_slots(call, f, sorted, count, before);
        right = put_slots(call, slots, count);
    }
    while (restarted && right && !all->failed && (count = shmb_follower_next(f, slots, NULL, max_count)) > 0)
        right = put_slots(call, slots, count);
    for (uint64_t i = 0; i < f->changed.count && right; i++) {
        int64_t slot = (int64_t)f->changed.at[f->changed.begin + i].first;
        right = put_slots(call, &slot, 1);
    }
    free(slots);
    settle_absent(call);
    shmb_labels_settle(all);
    if (f->failed) all->failed = true;
    *more = restarted; /* it took a while, and other processes have written meanwhile */
    return right;
}

PyObject *shmb_labels_settle_all(PyObject *labels, PyObject *follower) {
    struct shmb_labels *all = shmb_labels_in(labels);
    if (all->failed) return PyErr_NoMemory();
    if (PyObject_TypeCheck(follower, shmb_follower_type)) {
        const struct shmb_follower *f = shmb_follower_in(follower);
        const struct follow_call call = {.all = all, .ring = f->ring, .head = f->seen};
        settle_absent(&call);
    }
    shmb_labels_settle(all);
    if (all->failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *shmb_labels_follow(PyObject *labels, PyObject *args) {
    PyObject *follower;
    unsigned long long base, bytes, values, count, size, means, piece;
    const char *steps, *code;
    Py_ssize_t steps_bytes, code_bytes;
    long long now;
    int kind, value_kind;
    if (!PyArg_ParseTuple(args, "O!KKCKKKCKy#y#KL:follow", shmb_follower_type, &follower, &base, &bytes, &kind, &values, &count, &size,
                          &value_kind, &means, &steps, &steps_bytes, &code, &code_bytes, &piece, &now))
        return NULL;
    struct shmb_follower *f = shmb_follower_in(follower);
    struct follow_call call = {.all = shmb_labels_in(labels),
                         .ring = f->ring,
                         .labels = {(const unsigned char *)(uintptr_t)base, 1, bytes, kind},
                         .values = {(const unsigned char *)(uintptr_t)values, count, size, value_kind},
                         .means = (double *)(uintptr_t)means,
                         .now = now};
    if (steps_bytes) {
        call.form = (struct record_form){(const int64_t *)(const void *)steps, (const unsigned char *)code, (uint64_t)code_bytes, piece,
                                       NULL, NULL, NULL};
        uint64_t numbers = (uint64_t)call.form.steps[0], pieces = (uint64_t)call.form.steps[3];
        if (!f->ring->bytes || piece >= pieces) return PyErr_Format(PyExc_ValueError, "Labels.follow(): there is no piece %llu, because the form has %llu pieces or the ring has no records.", piece, (unsigned long long)pieces);
        call.form.numbers = malloc((numbers + 2 * pieces) * sizeof(int64_t));
        if (call.form.numbers == NULL) return PyErr_NoMemory();
        call.form.offsets = call.form.numbers + numbers;
        call.form.sizes = call.form.offsets + pieces;
    }
    uint64_t head = atomic_load_explicit(&f->ring->runtime->head, memory_order_relaxed);
    bool right, more = true;
    PyThreadState *state = !f->started || head - f->seen > PIECE ? PyEval_SaveThread() : NULL;
    do right = follow_once(&call, f, &more);
    while (more && right && !call.all->failed);
    if (state) PyEval_RestoreThread(state);
    free(call.form.numbers);
    if (!right || call.all->failed) shmb_follower_forget(f);
    if (call.all->failed) return PyErr_NoMemory();
    if (!right) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(call.head);
}
