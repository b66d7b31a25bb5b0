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
#define AT_ONCE 64u /* elements */
#define MOST_LABEL (((uint64_t)1 << 61) - 1)
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
    return (uint64_t)*label + MOST_LABEL < 2 * MOST_LABEL + 1 && (column->kind == 'i' || bits >> 61 == 0);
}

/* Usually the labels are 64-bit integers. */
static void labels_in(const struct column *column, const uint32_t *elements, uint64_t count, int64_t *labels, bool *good) {
    bool usual = column->kind == 'i' && column->bytes == sizeof *labels;
    for (uint64_t i = 0; i < count && usual; i++) {
        memcpy(&labels[i], column->base + elements[i] * sizeof *labels, sizeof *labels);
        good[i] = (uint64_t)labels[i] + MOST_LABEL < 2 * MOST_LABEL + 1;
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
    double *kept;                 /* means of the values, by element */
    uint64_t head;
    int64_t now;
};

/* Reads the label of a record in place. The record may change meanwhile, so every number is read only once. False:
 * the record has another form, or no label. */
static bool label_of_record(const struct follow_call *of, uint64_t slot, int64_t *label) {
    const struct record_form *form = &of->form;
    const struct shmb_extent extent = of->ring->extents[slot];
    if (!shmb_extent_in_order(of->ring, extent)) return false;
    const int64_t start = 0, size = (int64_t)extent.bytes;
    const unsigned char *record = shmb_record_at(of->ring, extent.position);
    const struct shmb_records_read read = {record, extent.bytes, &start, &size, 1};
    struct shmb_record header;
    memcpy(&header, record, sizeof header);
    if (header.position != extent.position || header.bytes != extent.bytes) return false;
    if (!shmb_locate_pieces(&read, form->steps, form->code, form->code_bytes, form->numbers, form->offsets, form->sizes, NULL, NULL)) return false;
    struct column number = of->labels;
    number.base = record + form->offsets[form->piece];
    return (uint64_t)form->sizes[form->piece] == number.bytes && label_in(&number, 0, label);
}

static double mean_in(const struct column *values, uint64_t element) {
    double sum = 0;
    for (uint64_t v = 0; v < values->count; v++) sum += number_in(values, element * values->count + v);
    return sum / (double)values->count;
}

/* Reads the labels first and compares the words afterwards. False: an item has no label. */
static bool put_slots(const struct follow_call *of, const int64_t *slots, uint64_t count) {
    const struct shmb_ring *ring = of->ring;
    const struct column column = of->labels;
    const uint64_t lanes = ring->lanes, at_once = AT_ONCE / lanes, head = of->head;
    uint32_t elements[AT_ONCE];
    int64_t labels[AT_ONCE];
    double values[AT_ONCE];
    bool good[AT_ONCE];
    if (lanes > AT_ONCE) return false;
    for (uint64_t first = 0; first < count && !of->all->failed; first += at_once) {
        uint64_t some = count - first < at_once ? count - first : at_once, n = 0, kept = 0;
        for (uint64_t i = 0; i < some; i++)
            for (uint64_t lane = 0; lane < lanes; lane++) elements[n++] = (uint32_t)((uint64_t)slots[first + i] * lanes + lane);
        for (uint64_t i = 0; i < n && of->form.steps; i++) SHMB_OPTIMISTIC(good[i] = label_of_record(of, elements[i], &labels[i]));
        if (!of->form.steps) labels_in(&column, elements, n, labels, good);
        for (uint64_t i = 0; i < n && of->values.base; i++) values[i] = mean_in(&of->values, elements[i]);
        atomic_thread_fence(SYNC_SLOT_CLAIM_ACQUIRE);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t word = atomic_load_explicit(&ring->words[lanes == 1 ? elements[i] : elements[i] / lanes], memory_order_relaxed);
            if (SHMB_STATE(word) != SHMB_COMMITTED || SHMB_TICKET(word) >= head) continue;
            if (!good[i]) return false;
            if (of->values.base) of->kept[elements[i]] = values[i];
            elements[kept] = elements[i];
            labels[kept++] = labels[i];
        }
        shmb_labels_put(of->all, elements, labels, kept, of->now);
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
static void let_slots_go(const struct follow_call *of, const struct shmb_follower *f, int64_t *fresh, uint64_t count, uint64_t before) {
    struct shmb_labels *all = of->all;
    uint64_t again = 0, lanes = of->ring->lanes;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = atomic_load_explicit(&of->ring->words[fresh[i]], memory_order_relaxed);
        if (SHMB_TICKET(word) < before) fresh[again++] = fresh[i];
    }
    if (again > 1) qsort(fresh, again, sizeof *fresh, by_slot);
    for (uint64_t i = 0; i < f->gone.count; i++) {
        struct shmb_pair gone = f->gone.at[f->gone.begin + i];
        bool may_be_back = all->limit && i >= f->over;
        uint64_t at_once = again || may_be_back ? 1 : gone.second;
        for (uint64_t slot = gone.first; slot < gone.first + gone.second; slot += at_once) {
            uint64_t from = slot * lanes, end = from + at_once * lanes;
            for (uint64_t e = from; may_be_back && e < end; e++) shmb_label_away(all, (uint32_t)e);
            if (!may_be_back && !(again && is_among(fresh, again, (int64_t)slot))) shmb_labels_drop(all, from, end);
        }
    }
}

/* Checks absent items of groups: they have returned, are gone, or are still being written. */
static void settle_away(const struct follow_call *of) {
    struct shmb_labels *all = of->all;
    uint64_t kept = 0;
    for (uint64_t i = 0; i < all->n_away; i++) {
        uint32_t element = all->away[i];
        if (!shmb_label_is_absent(all, element)) continue;
        uint64_t word = atomic_load_explicit(&of->ring->words[element / of->ring->lanes], memory_order_relaxed);
        if (SHMB_STATE(word) == SHMB_WRITING || SHMB_TICKET(word) >= of->head)
            all->away[kept++] = element;
        else
            shmb_label_drop(all, element);
    }
    all->n_away = kept;
}

/* One poll. False: an item has no label, and the next poll must start over. */
static bool follow_once(struct follow_call *of, struct shmb_follower *f, bool *more) {
    struct shmb_labels *all = of->all;
    const uint64_t before = f->seen, capacity = of->ring->capacity;
    bool restarted = false, right = true;
    *more = false;
    if (!shmb_follower_poll(f, &restarted)) {
        of->head = f->seen;
        settle_away(of);
        shmb_labels_settle(all);
        return true;
    }
    if (f->failed) return all->failed = true, true;
    if (restarted) shmb_labels_clear(all);
    of->head = f->seen;
    all->first = of->head >= capacity ? of->head % capacity * of->ring->lanes : 0;
    uint64_t room = restarted ? PIECE : f->end - f->at + 1, count = 0;
    int64_t *slots = malloc(2 * room * sizeof *slots), *sorted = slots + room;
    if (slots == NULL) return all->failed = true, true;
    if (!restarted) {
        count = shmb_follower_next(f, slots, NULL, room);
        memcpy(sorted, slots, count * sizeof *slots);
        let_slots_go(of, f, sorted, count, before);
        right = put_slots(of, slots, count);
    }
    while (restarted && right && !all->failed && (count = shmb_follower_next(f, slots, NULL, room)) > 0)
        right = put_slots(of, slots, count);
    for (uint64_t i = 0; i < f->changed.count && right; i++) {
        int64_t slot = (int64_t)f->changed.at[f->changed.begin + i].first;
        right = put_slots(of, &slot, 1);
    }
    free(slots);
    settle_away(of);
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
        const struct follow_call of = {.all = all, .ring = f->ring, .head = f->seen};
        settle_away(&of);
    }
    shmb_labels_settle(all);
    if (all->failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *shmb_labels_follow(PyObject *labels, PyObject *args) {
    PyObject *follower;
    unsigned long long base, bytes, values, count, size, kept, piece;
    const char *steps, *code;
    Py_ssize_t steps_bytes, code_bytes;
    long long now;
    int kind, value_kind;
    if (!PyArg_ParseTuple(args, "O!KKCKKKCKy#y#KL:follow", shmb_follower_type, &follower, &base, &bytes, &kind, &values, &count, &size,
                          &value_kind, &kept, &steps, &steps_bytes, &code, &code_bytes, &piece, &now))
        return NULL;
    struct shmb_follower *f = shmb_follower_in(follower);
    struct follow_call of = {.all = shmb_labels_in(labels),
                         .ring = f->ring,
                         .labels = {(const unsigned char *)(uintptr_t)base, 1, bytes, kind},
                         .values = {(const unsigned char *)(uintptr_t)values, count, size, value_kind},
                         .kept = (double *)(uintptr_t)kept,
                         .now = now};
    if (steps_bytes) {
        of.form = (struct record_form){(const int64_t *)(const void *)steps, (const unsigned char *)code, (uint64_t)code_bytes, piece,
                                       NULL, NULL, NULL};
        uint64_t numbers = (uint64_t)of.form.steps[0], pieces = (uint64_t)of.form.steps[3];
        if (!f->ring->bytes || piece >= pieces) return PyErr_Format(PyExc_ValueError, "follow: piece %llu of %llu", piece, (unsigned long long)pieces);
        of.form.numbers = malloc((numbers + 2 * pieces) * sizeof(int64_t));
        if (of.form.numbers == NULL) return PyErr_NoMemory();
        of.form.offsets = of.form.numbers + numbers;
        of.form.sizes = of.form.offsets + pieces;
    }
    uint64_t head = atomic_load_explicit(&f->ring->runtime->head, memory_order_relaxed);
    bool right, more = true;
    PyThreadState *state = !f->started || head - f->seen > PIECE ? PyEval_SaveThread() : NULL;
    do right = follow_once(&of, f, &more);
    while (more && right && !of.all->failed);
    if (state) PyEval_RestoreThread(state);
    free(of.form.numbers);
    if (!right || of.all->failed) shmb_follower_forget(f);
    if (of.all->failed) return PyErr_NoMemory();
    if (!right) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(of.head);
}
