/* Where the pieces of records lie: see locating.c. */
#ifndef SHMB_LOCATING_H
#define SHMB_LOCATING_H

#include <stdbool.h>
#include <stdint.h>

/* Records in memory, as they were read: `starts` and `sizes` of each among `nbytes` bytes. */
struct shmb_records_read {
    const unsigned char *data;
    uint64_t nbytes;
    const int64_t *starts, *sizes;
    uint64_t count;
};

/* Writes for each record its numbers, where its pieces begin in the bytes, the sizes that they are stored in, and, where `expanded`
 * is not NULL, how many bytes of a leaf each of them holds; in `alike`, whether the leaves of all of them have the same dims. `steps` is
 * what memory/record_format/numbers.py makes of the form with that code. False: one of them is of another form, or damaged. */
bool shmb_locate_pieces(const struct shmb_records_read *read, const int64_t *steps, const unsigned char *code, uint64_t code_bytes,
                        int64_t *numbers, int64_t *offsets, int64_t *sizes, int64_t *expanded, bool *alike);

/* How many numbers and pieces the records of a form have. */
static inline uint64_t shmb_numbers_of_form(const int64_t *steps) { return (uint64_t)steps[0]; }
static inline uint64_t shmb_pieces_of_form(const int64_t *steps) { return (uint64_t)steps[3]; }

/* Records of one form, as they are to be written: `sizes` of their pieces, and `numbers` that agree with them. */
struct shmb_records_written {
    const int64_t *steps;
    const unsigned char *code;
    uint64_t code_bytes;
    const int64_t *numbers, *sizes;
    uint64_t count;
};

/* Writes the numbers of one record, which are its dims and the sizes of what is compressed, and where its pieces begin. Another size
 * may be negative, and becomes what the dims say. `stored` is room for a number a piece. Returns where the record ends; 0: it cannot
 * be written. */
uint64_t shmb_measure_record(const int64_t *steps, uint64_t code_bytes, const int64_t *dims, uint64_t count, int64_t *numbers,
                             int64_t *sizes, int64_t *offsets, int64_t *stored);

/* Writes where each record starts and ends in their bytes, and where its pieces begin from its start. `stored` is room for a number a
 * piece. Returns how many bytes there are; -1: one of them cannot be written. */
int64_t shmb_measure_records(const struct shmb_records_written *written, int64_t *offsets, int64_t *starts, int64_t *ends,
                             int64_t *stored);

/* Writes those bytes; the pieces come from `addresses`. */
void shmb_lay_out_records(const struct shmb_records_written *written, const int64_t *addresses, const int64_t *offsets,
                          const int64_t *starts, const int64_t *ends, unsigned char *data);

#endif
