/* CRC32C (Castagnoli, RFC 3720 appendix B.4), by the processor's instruction if it has one. */
#ifndef SHMB_CRC32C_H
#define SHMB_CRC32C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void shmb_crc32c_init(void);
extern uint32_t (*shmb_crc32c)(uint32_t crc, const void *data, size_t bytes); /* chainable; start with 0 */
/* Continues one checksum per row, for rows that are stored one after another. The checksums are complemented, as the
 * instruction keeps them: ~crc[i] continues over row i. So they need not be complemented twice between two leaves. */
extern void (*shmb_crc32c_rows)(uint32_t *crc, const unsigned char *first, size_t rows, size_t bytes);
/* Moves four consecutive rows to memory that is not read soon, and continues ~crc[i] over row i. Each row consists
 * of whole cache lines, and the first one begins at a cache line. */
#define SHMB_MOVED_LINE 64
extern void (*shmb_crc32c_move)(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t *crc);
/* Copies bytes, and returns their checksum as shmb_crc32c does. `past` says that they are not read soon. */
extern uint32_t (*shmb_crc32c_copy)(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t crc, bool past);

#endif
