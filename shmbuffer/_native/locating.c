/* Where the pieces of records lie, for the usual batch: records of one form, without pieces that have a place of their own.
 * Nothing is believed. What is not so is no error here: memory/record_format looks at it again, and says what is wrong. It
 * also tells the format. */
#include "locating.h"

#include <string.h>

#define HEADER 32 /* of the ring; the body begins behind it */
#define FRONT (HEADER + 16)
#define VERSION 1u
#define MOST_VOLUME ((uint64_t)1 << 40)
#define MOST_BYTES ((uint64_t)1 << 32)

enum codec { RAW, ZSTD, OWN, JOINED };

struct piece { /* as they follow each other in the steps; then so many columns */
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

/* Bytes of a leaf whose dims are these. False: larger than anything can be. */
static inline bool volume(const struct form *form, const int64_t *numbers, const int64_t *columns, int64_t count, uint64_t *bytes) {
    uint64_t product = 1;
    bool none = false;
    for (int64_t i = 0; i < count; i++) {
        uint64_t factor = value_in(form, numbers, columns[i]);
        none = none || factor == 0;
        if (__builtin_mul_overflow(product, factor ? factor : 1, &product) || product > MOST_VOLUME) return false;
    }
    *bytes = none ? 0 : product;
    return true;
}

static bool numbers_of(const struct form *form, const unsigned char *record, uint64_t size, int64_t *numbers) {
    uint32_t words[4];
    if (size < FRONT + 4 * form->n_numbers + form->nbytes) return false;
    memcpy(words, record + HEADER, sizeof words);
    if (words[0] != (VERSION | (uint32_t)form->n_numbers << 16) || words[1] != form->nbytes || words[2] || words[3]) return false;
    for (uint64_t i = 0; i < form->n_numbers; i++) {
        uint32_t number;
        memcpy(&number, record + FRONT + 4 * i, sizeof number);
        numbers[i] = number;
    }
    if (memcmp(record + FRONT + 4 * form->n_numbers, form->code, form->nbytes) != 0) return false;
    for (uint64_t i = 0; i < form->n_equal; i++)
        if (value_in(form, numbers, form->equal[2 * i]) != value_in(form, numbers, form->equal[2 * i + 1])) return false;
    return true;
}

/* `offsets` first has what each piece expands to. */
static bool pieces_of(const struct form *form, uint64_t start, uint64_t size, const int64_t *numbers, int64_t *offsets, int64_t *sizes) {
    uint64_t total = 0, at = FRONT + 4 * form->n_numbers + form->nbytes;
    const int64_t *step = form->pieces;
    for (uint64_t p = 0; p < form->n_pieces; p++) {
        const struct piece *piece = (const struct piece *)step;
        uint64_t bytes;
        step += sizeof *piece / sizeof *step;
        if (!volume(form, numbers, step, piece->factors, &bytes) || (total += bytes) > MOST_BYTES) return false;
        step += piece->factors;
        offsets[p] = sizes[p] = (int64_t)bytes;
        if (piece->codec == JOINED) offsets[piece->head] += (int64_t)bytes;
    }
    step = form->pieces;
    for (uint64_t p = 0; p < form->n_pieces; p++) {
        const struct piece *piece = (const struct piece *)step;
        uint64_t expanded = (uint64_t)offsets[p], alignment = (uint64_t)piece->alignment;
        step += sizeof *piece / sizeof *step + (uint64_t)piece->factors;
        if (piece->codec == JOINED) sizes[p] = 0;
        if (piece->codec == ZSTD || piece->codec == OWN) sizes[p] = numbers[piece->size_column];
        uint64_t stored = (uint64_t)sizes[p];
        if (piece->codec == ZSTD && (expanded > MOST_BYTES || expanded > ((uint64_t)1 << 17) + (stored << 15))) return false;
        at = (at + alignment - 1) & ~(alignment - 1);
        offsets[p] = (int64_t)(start + at);
        at += stored;
    }
    return at == size && at <= UINT32_MAX;
}

bool shmb_locate_pieces(const struct shmb_records_read *read, const int64_t *steps, const unsigned char *code, uint64_t code_bytes,
                        int64_t *numbers, int64_t *offsets, int64_t *sizes) {
    struct form form = {.n_numbers = (uint64_t)steps[0], .n_equal = (uint64_t)steps[2], .n_pieces = (uint64_t)steps[3],
                        .nbytes = code_bytes, .code = code};
    form.constants = steps + 4;
    form.equal = form.constants + steps[1];
    form.pieces = form.equal + 2 * form.n_equal;
    for (uint64_t row = 0; row < read->count; row++) {
        uint64_t start = (uint64_t)read->starts[row], size = (uint64_t)read->sizes[row];
        if (start > read->nbytes || start % 8 || size > read->nbytes - start) return false;
        if (!numbers_of(&form, read->data + start, size, numbers + row * form.n_numbers)) return false;
        if (!pieces_of(&form, start, size, numbers + row * form.n_numbers, offsets + row * form.n_pieces, sizes + row * form.n_pieces))
            return false;
    }
    return true;
}
