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

/* Writes for each record its numbers, and where its pieces begin in the bytes, and the sizes that they are stored in. `steps` is
 * what memory/record_format/numbers.py makes of the form with that code. False: one of them is of another form, or damaged. */
bool shmb_locate_pieces(const struct shmb_records_read *read, const int64_t *steps, const unsigned char *code, uint64_t code_bytes,
                        int64_t *numbers, int64_t *offsets, int64_t *sizes);

#endif
