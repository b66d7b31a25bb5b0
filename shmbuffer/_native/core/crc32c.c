/* The instruction accepts 8 bytes per cycle, and its result takes three cycles, so one stream uses a third of its
 * speed. Therefore several streams run in parallel. For short rows the processor's own lookahead overlaps them. Long
 * rows are processed four at a time. A single long row is cut into three pieces, whose checksums are combined:
 *
 *     crc(abc) = skip_zeros(c, skip_zeros(b, crc(a)) ^ crc(b)) ^ crc(c)
 *
 * where skip_zeros(x, crc) is the checksum after as many zeros as x has bytes.
 *
 * A CRC is linear, so the effect of a number of zeros is a table. There is one table for each of the two lengths of
 * a piece. */
#include "core/crc32c.h"

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

static void rows_by_table(uint32_t *crc, const unsigned char *first, size_t rows, size_t bytes) {
    for (size_t i = 0; i < rows; i++) crc[i] = ~by_table(~crc[i], first + i * bytes, bytes);
}

static uint32_t copy_by_table(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t crc, bool past) {
    (void)past;
    if (bytes) memcpy(to, from, bytes);
    return by_table(crc, to, bytes);
}

static void move_by_table(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t *crc) {
    memcpy(to, from, 4 * bytes);
    rows_by_table(crc, to, 4, bytes);
}

#if defined(__x86_64__)
#include <cpuid.h>
/* clang treats the instruction as a separate feature; gcc knows that name only from version 12 on */
#if defined(__clang__)
#define WITH_INSTRUCTION __attribute__((target("sse4.2,crc32")))
#else
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#endif
WITH_INSTRUCTION static inline uint64_t eight(uint64_t crc, uint64_t bytes) { return __builtin_ia32_crc32di(crc, bytes); }
WITH_INSTRUCTION static inline uint32_t four(uint32_t crc, uint32_t bytes) { return __builtin_ia32_crc32si(crc, bytes); }
WITH_INSTRUCTION static inline uint32_t one(uint32_t crc, unsigned char byte) { return __builtin_ia32_crc32qi(crc, byte); }
/* __builtin_cpu_supports needs the compiler's runtime library; in zig cc, which builds the wheels, it always answers
 * no. */
static int has_instruction(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2);
}
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#define WITH_INSTRUCTION __attribute__((target("+crc")))
WITH_INSTRUCTION static inline uint64_t eight(uint64_t crc, uint64_t bytes) { return __crc32cd((uint32_t)crc, bytes); }
WITH_INSTRUCTION static inline uint32_t four(uint32_t crc, uint32_t bytes) { return __crc32cw(crc, bytes); }
WITH_INSTRUCTION static inline uint32_t one(uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
static int has_instruction(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#ifdef WITH_INSTRUCTION
/* Between two instructions the crc stays a uint64_t, the type of the 8-byte instruction. Narrowing it would cost one
 * cycle each time. */
#define LONG_PIECE 2048 /* each is a multiple of 8 */
#define SHORT_PIECE 128
#define SHORT_ROW 64 /* up to this size the processor overlaps consecutive rows by itself */

static uint32_t skips_long[4][256], skips_short[4][256];

static inline uint32_t skip_zeros(uint32_t zeros[4][256], uint32_t crc) {
    return zeros[0][crc & 255] ^ zeros[1][(crc >> 8) & 255] ^ zeros[2][(crc >> 16) & 255] ^ zeros[3][crc >> 24];
}

static void make_skips(uint32_t zeros[4][256], size_t bytes) {
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = (uint32_t)1 << bit;
        for (size_t i = 0; i < bytes; i++) crc = (crc >> 8) ^ table[0][crc & 255];
        of_bit[bit] = crc;
    }
    for (int byte = 0; byte < 4; byte++)
        for (int value = 0; value < 256; value++) {
            zeros[byte][value] = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1) zeros[byte][value] ^= of_bit[8 * byte + bit];
        }
}

WITH_INSTRUCTION static inline uint64_t eight_at(uint64_t crc, const unsigned char *at) {
    uint64_t bytes;
    memcpy(&bytes, at, 8);
    return eight(crc, bytes);
}

WITH_INSTRUCTION static inline uint32_t in_sequence(uint64_t wide, const unsigned char *at, size_t bytes) {
    for (; bytes >= 8; at += 8, bytes -= 8) wide = eight_at(wide, at);
    uint32_t crc = (uint32_t)wide;
    if (bytes >= 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        crc = four(crc, word);
        at += 4, bytes -= 4;
    }
    while (bytes--) crc = one(crc, *at++);
    return crc;
}

WITH_INSTRUCTION static inline uint32_t in_three_pieces(uint32_t crc, const unsigned char *at, size_t piece, uint32_t zeros[4][256]) {
    uint64_t first = crc, second = 0, third = 0;
    for (size_t i = 0; i < piece; i += 8) {
        first = eight_at(first, at + i);
        second = eight_at(second, at + piece + i);
        third = eight_at(third, at + 2 * piece + i);
    }
    return skip_zeros(zeros, skip_zeros(zeros, (uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
}

WITH_INSTRUCTION static uint32_t by_instruction(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *at = data;
    crc = ~crc;
    for (; bytes >= 3 * LONG_PIECE; at += 3 * LONG_PIECE, bytes -= 3 * LONG_PIECE)
        crc = in_three_pieces(crc, at, LONG_PIECE, skips_long);
    for (; bytes >= 3 * SHORT_PIECE; at += 3 * SHORT_PIECE, bytes -= 3 * SHORT_PIECE)
        crc = in_three_pieces(crc, at, SHORT_PIECE, skips_short);
    return ~in_sequence(crc, at, bytes);
}

/* Most leaves are a few numbers. If the compiler knows the size, a row takes only the instructions for its bytes. */
WITH_INSTRUCTION static void short_rows(uint32_t *crc, const unsigned char *first, size_t rows, size_t bytes) {
    switch (bytes) {
#define ROWS_OF(n)                                                                                        \
    case n:                                                                                               \
        _Pragma("GCC unroll 4") for (size_t row = 0; row < rows; row++)                                   \
            crc[row] = in_sequence(crc[row], first + row * (n), n);                                          \
        break;
        ROWS_OF(1)
        ROWS_OF(2)
        ROWS_OF(4)
        ROWS_OF(8)
        ROWS_OF(12)
        ROWS_OF(16)
        ROWS_OF(32)
#undef ROWS_OF
    default:
        for (size_t row = 0; row < rows; row++) crc[row] = in_sequence(crc[row], first + row * bytes, bytes);
    }
}

WITH_INSTRUCTION static void rows_by_instruction(uint32_t *crc, const unsigned char *first, size_t rows, size_t bytes) {
    size_t row = 0, whole = bytes & ~(size_t)7;
    if (bytes <= SHORT_ROW) {
        short_rows(crc, first, rows, bytes);
        return;
    }
    for (; row + 4 <= rows; row += 4) {
        const unsigned char *a = first + row * bytes, *b = a + bytes, *c = b + bytes, *d = c + bytes;
        uint64_t w = crc[row], x = crc[row + 1], y = crc[row + 2], z = crc[row + 3];
        for (size_t i = 0; i < whole; i += 8) {
            w = eight_at(w, a + i);
            x = eight_at(x, b + i);
            y = eight_at(y, c + i);
            z = eight_at(z, d + i);
        }
        crc[row] = in_sequence(w, a + whole, bytes - whole);
        crc[row + 1] = in_sequence(x, b + whole, bytes - whole);
        crc[row + 2] = in_sequence(y, c + whole, bytes - whole);
        crc[row + 3] = in_sequence(z, d + whole, bytes - whole);
    }
    for (; row < rows; row++) crc[row] = ~by_instruction(~crc[row], first + row * bytes, bytes);
}

/* Moves and checks four rows at a time. Loaded bytes go into the crc and, if the processor supports it, to memory
 * without reading the target into the cache first. This works on whole cache lines only; mixing both ways in one
 * line costs more than it saves. */
#define LINE SHMB_MOVED_LINE

static inline void past_the_cache(unsigned char *to, uint64_t bytes) {
#if defined(__x86_64__)
    __builtin_ia32_movnti64((long long *)(void *)to, (long long)bytes);
#else
    memcpy(to, &bytes, 8);
#endif
}

/* Later stores of this processor become visible after stores past the cache. */
static inline void all_past_the_cache(void) {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

WITH_INSTRUCTION static inline uint64_t move_line(uint64_t crc, unsigned char *to, const unsigned char *from) {
    for (int i = 0; i < LINE; i += 8) {
        uint64_t bytes;
        memcpy(&bytes, from + i, 8);
        crc = eight(crc, bytes);
        past_the_cache(to + i, bytes);
    }
    return crc;
}

WITH_INSTRUCTION static void move_by_instruction(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t *crc) {
    size_t b = bytes, c = 2 * bytes, d = 3 * bytes;
    uint64_t w = crc[0], x = crc[1], y = crc[2], z = crc[3];
    for (size_t at = 0; at < bytes; at += LINE) {
        w = move_line(w, to + at, from + at);
        x = move_line(x, to + b + at, from + b + at);
        y = move_line(y, to + c + at, from + c + at);
        z = move_line(z, to + d + at, from + d + at);
    }
    crc[0] = (uint32_t)w;
    crc[1] = (uint32_t)x;
    crc[2] = (uint32_t)y;
    crc[3] = (uint32_t)z;
    all_past_the_cache();
}

WITH_INSTRUCTION static inline uint32_t move_three(uint32_t crc, unsigned char *to, const unsigned char *from) {
    uint64_t first = crc, second = 0, third = 0;
    for (size_t at = 0; at < LONG_PIECE; at += LINE) {
        first = move_line(first, to + at, from + at);
        second = move_line(second, to + LONG_PIECE + at, from + LONG_PIECE + at);
        third = move_line(third, to + 2 * LONG_PIECE + at, from + 2 * LONG_PIECE + at);
    }
    return skip_zeros(skips_long, skip_zeros(skips_long, (uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
}

/* Copies long pieces past the cache, from their first whole line on. The checksum of other pieces is computed while they
 * are in the cache. */
WITH_INSTRUCTION static uint32_t copy_by_instruction(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t crc, bool past) {
    const size_t piece = 3 * LONG_PIECE;
    if (past && bytes >= 2 * piece) {
        const size_t before = -(uintptr_t)to & (LINE - 1);
        memcpy(to, from, before);
        crc = ~by_instruction(crc, to, before);
        for (to += before, from += before, bytes -= before; bytes >= piece; to += piece, from += piece, bytes -= piece)
            crc = move_three(crc, to, from);
        crc = ~crc;
        all_past_the_cache();
    }
    for (size_t part; bytes; to += part, from += part, bytes -= part) {
        part = bytes < piece ? bytes : piece;
        memcpy(to, from, part);
        crc = by_instruction(crc, to, part);
    }
    return crc;
}
#endif

uint32_t (*shmb_crc32c)(uint32_t, const void *, size_t) = by_table;
void (*shmb_crc32c_rows)(uint32_t *, const unsigned char *, size_t, size_t) = rows_by_table;
void (*shmb_crc32c_move)(unsigned char *, const unsigned char *, size_t, uint32_t *) = move_by_table;

uint32_t (*shmb_crc32c_copy)(unsigned char *, const unsigned char *, size_t, uint32_t, bool) = copy_by_table;

void shmb_crc32c_init(void) {
    for (unsigned i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1)));
        table[0][i] = crc;
    }
    for (unsigned i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
#ifdef WITH_INSTRUCTION
    if (!has_instruction()) return;
    make_skips(skips_long, LONG_PIECE);
    make_skips(skips_short, SHORT_PIECE);
    shmb_crc32c = by_instruction;
    shmb_crc32c_rows = rows_by_instruction;
    shmb_crc32c_move = move_by_instruction;
    shmb_crc32c_copy = copy_by_instruction;
#endif
}
