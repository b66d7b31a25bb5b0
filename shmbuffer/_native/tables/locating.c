/* Locates the pieces of records in the usual batch: records of one form. All input is validated. An invalid record
 * is not reported here: memory/record_format examines it again, and describes the fault. It also documents the
 * format. Records are written by the same rules. */
#include "tables/locating.h"

#include <string.h>

#include "core/layout.h"

#define HEADER sizeof(struct shmb_record) /* of the ring; the body follows it */
#define NUMBERS_AT (HEADER + 8)
#define VERSION 1u
#define MAX_VOLUME ((uint64_t)1 << 40)
#define MAX_BYTES ((uint64_t)1 << 32)

enum codec { RAW, ZSTD, OWN, JOINED };

struct piece { /* layout in `steps`; it is followed by `factors` columns */
    int64_t alignment, codec, size_column, head, factors;
};

struct form {
    const int64_t *constants, *equal, *pieces;
    uint64_t n_numbers, n_equal, n_pieces, nbytes;
    const unsigned char *code;
};

static inline uint64_t value_in(const struct form *form, const int64_t *numbers, int64_t column) {
    return (uint64_t)((uint64_t)column < form->n_numbers ? numbers[column] : form->constants[(uint64_t)column - form->n_numbers]);
}

/* Number of bytes of a leaf with these dims. False: impossibly large. */
static inline bool volume(const struct form *form, const int64_t *numbers, const int64_t *columns, int64_t count, uint64_t *bytes) {
    uint64_t product = 1;
    bool none = false;
    for (int64_t i = 0; i < count; i++) {
        uint64_t factor = value_in(form, numbers, columns[i]);
        none = none || factor == 0;
        if (__builtin_mul_overflow(product, factor ? factor : 1, &product) || product > MAX_VOLUME) return false;
    }
    *bytes = none ? 0 : product;
    return true;
}

static struct form read_form(const int64_t *steps, const unsigned char *code, uint64_t code_bytes) {
    struct form form = {.n_numbers = shmb_numbers_of_form(steps), .n_equal = (uint64_t)steps[2], .n_pieces = shmb_pieces_of_form(steps),
                        .nbytes = code_bytes, .code = code};
    form.constants = steps + 4;
    form.equal = form.constants + steps[1];
    form.pieces = form.equal + 2 * form.n_equal;
    return form;
}

static bool shapes_agree(const struct form *form, const int64_t *numbers) {
    for (uint64_t i = 0; i < form->n_equal; i++)
        if (value_in(form, numbers, form->equal[2 * i]) != value_in(form, numbers, form->equal[2 * i + 1])) return false;
    return true;
}

static bool numbers_of(const struct form *form, const unsigned char *record, uint64_t size, int64_t *numbers) {
    uint32_t words[2];
    if (size < NUMBERS_AT + 4 * form->n_numbers + form->nbytes) return false;
    memcpy(words, record + HEADER, sizeof words);
    if (words[0] != (VERSION | (uint32_t)form->n_numbers << 16) || words[1] != form->nbytes) return false;
    for (uint64_t i = 0; i < form->n_numbers; i++) {
        uint32_t number;
        memcpy(&number, record + NUMBERS_AT + 4 * i, sizeof number);
        numbers[i] = number;
    }
    return memcmp(record + NUMBERS_AT + 4 * form->n_numbers, form->code, form->nbytes) == 0 && shapes_agree(form, numbers);
}

/* Bitmap of those of the first 64 numbers that are dims, not sizes of pieces. */
static uint64_t dims_in(const struct form *form) {
    uint64_t dims = ~(uint64_t)0;
    const int64_t *step = form->pieces;
    for (uint64_t p = 0; p < form->n_pieces; p++) {
        const struct piece *piece = (const struct piece *)step;
        step += sizeof *piece / sizeof *step + (uint64_t)piece->factors;
        if ((uint64_t)piece->size_column < 64) dims &= ~((uint64_t)1 << piece->size_column);
    }
    return dims;
}

static bool dims_agree(const struct form *form, uint64_t dims, const int64_t *one, const int64_t *other) {
    int64_t differ = form->n_numbers > 64;
    for (uint64_t i = 0; i < form->n_numbers && !differ; i++) differ = dims >> i & 1 ? one[i] ^ other[i] : 0;
    return !differ;
}

/* Returns the size of the record; 0: the record is impossible. `offsets` temporarily has the expanded size of each
 * frame. `known` has the expanded sizes of a record with the same dims, or is NULL. */
static uint64_t pieces_of(const struct form *form, uint64_t start, const int64_t *numbers, int64_t *offsets, int64_t *sizes,
                          int64_t *expanded, const int64_t *known) {
    uint64_t total = 0, at = NUMBERS_AT + 4 * form->n_numbers + form->nbytes;
    const int64_t *step = form->pieces;
    for (uint64_t p = 0; p < form->n_pieces; p++) {
        const struct piece *piece = (const struct piece *)step;
        uint64_t bytes = known ? (uint64_t)known[p] : 0;
        step += sizeof *piece / sizeof *step;
        if (!known && !volume(form, numbers, step, piece->factors, &bytes)) return 0;
        if ((total += bytes) > MAX_BYTES) return 0;
        step += piece->factors;
        offsets[p] = sizes[p] = (int64_t)bytes;
        if (expanded) expanded[p] = (int64_t)bytes;
        if (piece->codec == JOINED) offsets[piece->head] += (int64_t)bytes;
    }
    step = form->pieces;
    for (uint64_t p = 0; p < form->n_pieces; p++) {
        const struct piece *piece = (const struct piece *)step;
        uint64_t whole = (uint64_t)offsets[p], alignment = (uint64_t)piece->alignment;
        step += sizeof *piece / sizeof *step + (uint64_t)piece->factors;
        if (piece->codec == JOINED) sizes[p] = 0;
        if (piece->codec == ZSTD || piece->codec == OWN) sizes[p] = numbers[piece->size_column];
        uint64_t stored = (uint64_t)sizes[p];
        if (piece->codec == ZSTD && (whole > MAX_BYTES || whole > ((uint64_t)1 << 17) + (stored << 15))) return 0;
        at = (at + alignment - 1) & ~(alignment - 1);
        offsets[p] = (int64_t)(start + at);
        at += stored;
    }
    return at <= UINT32_MAX ? at : 0;
}

bool shmb_locate_pieces(const struct shmb_records_read *read, const int64_t *steps, const unsigned char *code, uint64_t code_bytes,
                        int64_t *numbers, int64_t *offsets, int64_t *sizes, int64_t *expanded, bool *same_dims) {
    const struct form form = read_form(steps, code, code_bytes);
    const uint64_t dims = expanded ? dims_in(&form) : 0;
    bool all = true;
    for (uint64_t row = 0; row < read->count; row++) {
        uint64_t start = (uint64_t)read->starts[row], size = (uint64_t)read->sizes[row];
        if (start > read->nbytes || start % 8 || size > read->nbytes - start) return false;
        if (!numbers_of(&form, read->data + start, size, numbers + row * form.n_numbers)) return false;
        const uint64_t at = row * form.n_pieces;
        const int64_t *mine = numbers + row * form.n_numbers;
        int64_t *whole = expanded ? expanded + at : NULL;
        const bool as_before = whole && row && dims_agree(&form, dims, mine, mine - form.n_numbers);
        if (pieces_of(&form, start, mine, offsets + at, sizes + at, whole, as_before ? whole - form.n_pieces : NULL) != size) return false;
        all = all && (as_before || row == 0);
    }
    if (same_dims) *same_dims = all;
    return true;
}

static bool can_be_written(const struct form *form, const int64_t *numbers) {
    for (uint64_t i = 0; i < form->n_numbers; i++)
        if (numbers[i] < 0 || numbers[i] > UINT32_MAX) return false;
    return shapes_agree(form, numbers);
}

uint64_t shmb_measure_record(const int64_t *steps, uint64_t code_bytes, const int64_t *dims, uint64_t count, int64_t *numbers,
                             int64_t *sizes, int64_t *offsets, int64_t *stored) {
    const struct form form = read_form(steps, NULL, code_bytes);
    const int64_t *step = form.pieces;
    uint64_t next = 0;
    for (uint64_t i = 0; i < form.n_numbers; i++) numbers[i] = -1;
    for (uint64_t p = 0; p < form.n_pieces; p++) {
        const struct piece *piece = (const struct piece *)step;
        if (piece->size_column >= 0 && (numbers[piece->size_column] = sizes[p]) < 0) return 0;
        step += sizeof *piece / sizeof *step + (uint64_t)piece->factors;
    }
    for (uint64_t i = 0; i < form.n_numbers; i++)
        if (numbers[i] < 0 && next++ < count) numbers[i] = dims[next - 1];
    if (next != count || !can_be_written(&form, numbers)) return 0;
    const uint64_t end = pieces_of(&form, 0, numbers, offsets, stored, NULL, NULL);
    for (uint64_t p = 0; end && p < form.n_pieces; p++) {
        if (sizes[p] < 0) sizes[p] = stored[p];
        if (sizes[p] != stored[p]) return 0;
    }
    return end;
}

int64_t shmb_measure_records(const struct shmb_records_written *written, int64_t *offsets, int64_t *starts, int64_t *ends,
                             int64_t *stored) {
    const struct form form = read_form(written->steps, written->code, written->code_bytes);
    uint64_t at = 0;
    for (uint64_t row = 0; row < written->count; row++) {
        const int64_t *numbers = written->numbers + row * form.n_numbers, *expected_sizes = written->sizes + row * form.n_pieces;
        if (!can_be_written(&form, numbers)) return -1;
        uint64_t end = pieces_of(&form, 0, numbers, offsets + row * form.n_pieces, stored, NULL, NULL);
        if (end == 0 || memcmp(stored, expected_sizes, form.n_pieces * sizeof *stored) != 0) return -1;
        starts[row] = (int64_t)at;
        ends[row] = (int64_t)end;
        at += (end + 7) & ~(uint64_t)7;
    }
    return (int64_t)at;
}

/* Writes bytes at `to`, and zeros between the end of the previous bytes and `to`. Returns the new end. */
static unsigned char *append_bytes(unsigned char *end, unsigned char *to, const void *from, uint64_t nbytes) {
    memset(end, 0, (size_t)(to - end));
    if (nbytes) memcpy(to, from, nbytes);
    return to + nbytes;
}

void shmb_lay_out_records(const struct shmb_records_written *written, const int64_t *addresses, const int64_t *offsets,
                          const int64_t *starts, const int64_t *ends, const unsigned char *outside, unsigned char *data) {
    const struct form form = read_form(written->steps, written->code, written->code_bytes);
    const uint32_t words[2] = {VERSION | (uint32_t)form.n_numbers << 16, (uint32_t)form.nbytes};
    for (uint64_t row = 0; row < written->count; row++) {
        unsigned char *record = data + starts[row], *end = append_bytes(record, record + HEADER, words, sizeof words);
        for (uint64_t i = 0; i < form.n_numbers; i++, end += sizeof(uint32_t)) {
            const uint32_t number = (uint32_t)written->numbers[row * form.n_numbers + i];
            memcpy(end, &number, sizeof number);
        }
        end = append_bytes(end, end, form.code, form.nbytes);
        int64_t left_out = 0;
        for (uint64_t p = 0; p < form.n_pieces; p++) {
            const uint64_t at = row * form.n_pieces + p;
            const int64_t bytes = written->sizes[at];
            end = append_bytes(end, record + offsets[at] - left_out, (const void *)(uintptr_t)addresses[at], outside[p] ? 0 : (uint64_t)bytes);
            left_out += outside[p] ? bytes : 0;
        }
        append_bytes(end, record + ((ends[row] - left_out + 7) & ~(int64_t)7), NULL, 0);
    }
}
