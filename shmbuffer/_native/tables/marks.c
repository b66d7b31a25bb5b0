/* A bitmap with a tree of counts above it. Changes and queries access one node per level.
 *
 *     counts[1]   sixteen nodes below
 *     counts[0]   512 bits, which are one cache line
 *     bits        1 1 0 1 0 ...
 */
#include "tables/marks.h"

#include <stdlib.h>
#include <string.h>

#define LEAF_SHIFT 9u /* 512 numbers */
#define FAN_SHIFT 4u  /* 16 nodes */
#define WORDS 8u      /* words per leaf */

static inline unsigned shift_of(unsigned level) { return LEAF_SHIFT + FAN_SHIFT * level; }

static uint64_t words_of(const struct shmb_marks *marks) { return marks->nodes[0] * WORDS; }

bool shmb_marks_make(struct shmb_marks *marks, uint64_t limit) {
    *marks = (struct shmb_marks){.limit = limit};
    uint64_t nodes = (limit >> LEAF_SHIFT) + 1;
    for (;; nodes = (nodes >> FAN_SHIFT) + 1) {
        marks->nodes[marks->depth] = nodes;
        marks->counts[marks->depth] = calloc(nodes, sizeof **marks->counts);
        if (marks->counts[marks->depth++] == NULL) break;
        if (nodes == 1) break;
    }
    marks->bits = calloc(words_of(marks), sizeof *marks->bits);
    if (marks->bits != NULL && marks->counts[marks->depth - 1] != NULL) return true;
    shmb_marks_free(marks);
    return false;
}

void shmb_marks_free(struct shmb_marks *marks) {
    free(marks->bits);
    for (unsigned level = 0; level < marks->depth; level++) free(marks->counts[level]);
    *marks = (struct shmb_marks){0};
}

void shmb_marks_clear(struct shmb_marks *marks) {
    if (marks->total == 0) return;
    memset(marks->bits, 0, words_of(marks) * sizeof *marks->bits);
    for (unsigned level = 0; level < marks->depth; level++)
        memset(marks->counts[level], 0, marks->nodes[level] * sizeof **marks->counts);
    marks->total = 0;
}

void shmb_marks_set(struct shmb_marks *marks, uint64_t number, bool included) {
    uint64_t bit = (uint64_t)1 << number % 64, *word = &marks->bits[number / 64];
    if (((*word & bit) != 0) == included) return;
    *word ^= bit;
    marks->total += included ? 1u : UINT64_MAX;
    for (unsigned level = 0; level < marks->depth; level++)
        marks->counts[level][number >> shift_of(level)] += included ? 1u : UINT32_MAX;
}

void shmb_marks_move(struct shmb_marks *marks, uint64_t from, uint64_t to) {
    if (from >> LEAF_SHIFT != to >> LEAF_SHIFT) {
        shmb_marks_set(marks, from, false);
        shmb_marks_set(marks, to, true);
        return;
    }
    marks->bits[from / 64] ^= (uint64_t)1 << from % 64; /* no count changes */
    marks->bits[to / 64] ^= (uint64_t)1 << to % 64;
}

uint64_t shmb_marks_below(const struct shmb_marks *marks, uint64_t number) {
    uint64_t count = 0;
    for (unsigned level = marks->depth - 1; level-- > 0;) {
        uint64_t node = number >> shift_of(level);
        for (uint64_t i = node >> FAN_SHIFT << FAN_SHIFT; i < node; i++) count += marks->counts[level][i];
    }
    for (uint64_t word = number >> LEAF_SHIFT << (LEAF_SHIFT - 6); word < number / 64; word++)
        count += (uint64_t)__builtin_popcountll(marks->bits[word]);
    return count + (uint64_t)__builtin_popcountll(marks->bits[number / 64] & (((uint64_t)1 << number % 64) - 1));
}

uint64_t shmb_marks_at(const struct shmb_marks *marks, uint64_t k) {
    uint64_t node = 0;
    for (unsigned level = marks->depth - 1; level-- > 0;)
        for (node <<= FAN_SHIFT; k >= marks->counts[level][node]; node++) k -= marks->counts[level][node];
    uint64_t word = node * WORDS, bits;
    for (;; word++) {
        uint64_t count = (uint64_t)__builtin_popcountll(marks->bits[word]);
        if (k < count) break;
        k -= count;
    }
    for (bits = marks->bits[word]; k > 0; k--) bits &= bits - 1;
    return word * 64 + (uint64_t)__builtin_ctzll(bits);
}
