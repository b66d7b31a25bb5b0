/* Location of the pieces of records: see locating.c. */
#ifndef SHMB_LOCATING_H
#define SHMB_LOCATING_H

#include <stdbool.h>
#include <stdint.h>

/* Records in memory, as they were read: their `starts` and `sizes` within `nbytes` bytes. */
struct shmb_records_read {
    const unsigned char *data;
    uint64_t nbytes;
    const int64_t *starts, *sizes;
    uint64_t count;
};

/* Stores for each record its numbers, the offsets and stored sizes of its pieces, and, unless `expanded` is NULL,
 * the expanded sizes of its pieces. `same_dims` tells whether the leaves of all records have the same dims. `steps` is
 * compiled from the form with that code by memory/record_format/numbers.py. False: a record has another form, or is
 * damaged. */
bool shmb_locate_pieces(const struct shmb_records_read *read, const int64_t *steps, const unsigned char *code, uint64_t code_bytes,
                        int64_t *numbers, int64_t *offsets, int64_t *sizes, int64_t *expanded, bool *same_dims);

/* Numbers and pieces per record of a form. */
static inline uint64_t shmb_numbers_of_form(const int64_t *steps) { return (uint64_t)steps[0]; }
static inline uint64_t shmb_pieces_of_form(const int64_t *steps) { return (uint64_t)steps[3]; }

/* Records of one form that are to be written: the sizes of their pieces, and the numbers that agree with them. */
struct shmb_records_written {
    const int64_t *steps;
    const unsigned char *code;
    uint64_t code_bytes;
    const int64_t *numbers, *sizes;
    uint64_t count;
};

/* Computes the numbers of one record, which are its dims and the sizes of compressed pieces, and the offsets of its
 * pieces. A negative size is replaced by the one that follows from the dims. `stored` is scratch space, one number
 * per piece. Returns the size of the record; 0: it cannot be written. */
uint64_t shmb_measure_record(const int64_t *steps, uint64_t code_bytes, const int64_t *dims, uint64_t count, int64_t *numbers,
                             int64_t *sizes, int64_t *offsets, int64_t *stored);

/* Computes start and end of each record, and the offsets of its pieces from its start. `stored` is scratch space,
 * one number per piece. Returns the number of bytes; -1: a record cannot be written. */
int64_t shmb_measure_records(const struct shmb_records_written *written, int64_t *offsets, int64_t *starts, int64_t *ends,
                             int64_t *stored);

/* Writes the records. The pieces are copied from `addresses`. A piece is left out if its byte of `outside` is not 0. */
void shmb_lay_out_records(const struct shmb_records_written *written, const int64_t *addresses, const int64_t *offsets,
                          const int64_t *starts, const int64_t *ends, const unsigned char *outside, unsigned char *data);

#endif
