/* CRC32C (Castagnoli, RFC 3720 appendix B.4), with the processor's instruction where it has one. */
#ifndef SHMB_CRC32C_H
#define SHMB_CRC32C_H

#include <stddef.h>
#include <stdint.h>

void shmb_crc32c_init(void);
extern uint32_t (*shmb_crc32c)(uint32_t crc, const void *data, size_t bytes); /* chainable; start with 0 */

#endif
