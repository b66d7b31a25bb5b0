#include "crc32c.h"

#include <string.h>

static uint32_t table[8][256];

static uint32_t by_table(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *at = data;
    crc = ~crc;
    while (bytes >= 8) {
        uint64_t eight;
        memcpy(&eight, at, 8);
        eight ^= crc;
        crc = table[7][eight & 255] ^ table[6][(eight >> 8) & 255] ^ table[5][(eight >> 16) & 255] ^
              table[4][(eight >> 24) & 255] ^ table[3][(eight >> 32) & 255] ^ table[2][(eight >> 40) & 255] ^
              table[1][(eight >> 48) & 255] ^ table[0][eight >> 56];
        at += 8, bytes -= 8;
    }
    while (bytes--) crc = (crc >> 8) ^ table[0][(crc ^ *at++) & 255];
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *at = data;
    uint64_t wide = (uint32_t)~crc;
    while (bytes >= 8) {
        uint64_t eight;
        memcpy(&eight, at, 8);
        wide = __builtin_ia32_crc32di(wide, eight);
        at += 8, bytes -= 8;
    }
    crc = (uint32_t)wide;
    while (bytes--) crc = __builtin_ia32_crc32qi(crc, *at++);
    return ~crc;
}
static int has_instruction(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
__attribute__((target("+crc"))) static uint32_t by_instruction(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *at = data;
    crc = ~crc;
    while (bytes >= 8) {
        uint64_t eight;
        memcpy(&eight, at, 8);
        crc = __crc32cd(crc, eight);
        at += 8, bytes -= 8;
    }
    while (bytes--) crc = __crc32cb(crc, *at++);
    return ~crc;
}
static int has_instruction(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

uint32_t (*shmb_crc32c)(uint32_t, const void *, size_t) = by_table;

void shmb_crc32c_init(void) {
    for (unsigned i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1)));
        table[0][i] = crc;
    }
    for (unsigned i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
#if defined(__x86_64__) || defined(__aarch64__)
    if (has_instruction()) shmb_crc32c = by_instruction;
#endif
}
