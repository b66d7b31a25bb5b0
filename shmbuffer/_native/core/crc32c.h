/* CRC32C (Castagnoli, RFC 3720 appendix B.4), with the processor's instruction where it has one. */
#ifndef SHMB_CRC32C_H
#define SHMB_CRC32C_H

#include <stddef.h>
#include <stdint.h>

void shmb_crc32c_init(void);
extern uint32_t (*shmb_crc32c)(uint32_t crc, const void *data, size_t bytes); /* chainable; start with 0 */
/* Between two pieces a crc is complemented twice. Of several rows, one behind the other, each has a crc of its own, which stays
 * complemented, as the instruction has it: ~crc[i] goes on over row i. */
extern void (*shmb_crc32c_rows)(uint32_t *crc, const unsigned char *first, size_t rows, size_t bytes);
/* Moves four rows, one behind the other, to memory that is not read soon, and lets ~crc[i] go on over row i. Each is
 * whole lines long, and the first begins a line. */
#define SHMB_MOVED_LINE 64
extern void (*shmb_crc32c_move)(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t *crc);

#endif
