/* Slots by source: two looks at each. The first numbers the sources as they appear and counts their slots; the second puts
 * each slot behind the one before of its source.
 *
 *     sources   a b a c b a        groups  a 3, b 2, c 1
 *     order     0 2 5 1 4 3        rows    0 3 1 5 4 2      order[rows[slot]] == slot
 *
 * Writers go on meanwhile. A source is read once, so whatever they store, the two results belong together. */
#include "order.h"

#include <stdlib.h>
#include <string.h>

#include "layout.h"

#define FIRST_GROUPS 64u /* a power of two */
#define LINE 16

/* Groups in the order in which they were met, and a table that finds them by source: 1 + number, at most half full. */
struct known {
    struct shmb_group *groups;
    uint64_t n, room;
    uint32_t shift;
    uint64_t *table;
};

static inline uint64_t place_of(const struct known *known, uint64_t source) {
    return source * 0x9E3779B97F4A7C15u >> known->shift;
}

static inline uint64_t next_place(const struct known *known, uint64_t at) { return (at + 1) & (2 * known->room - 1); }

static bool grow(struct known *known) {
    uint64_t room = known->room ? 2 * known->room : FIRST_GROUPS;
    struct shmb_group *groups = realloc(known->groups, room * sizeof *groups);
    if (groups) known->groups = groups;
    uint64_t *table = calloc(2 * room, sizeof *table);
    if (groups == NULL || table == NULL) return free(table), false;
    free(known->table);
    known->table = table;
    known->room = room;
    known->shift = 63u - (uint32_t)__builtin_ctzll(room);
    for (uint64_t i = 0; i < known->n; i++) {
        uint64_t at = place_of(known, groups[i].source);
        while (table[at]) at = next_place(known, at);
        table[at] = i + 1;
    }
    return true;
}

/* Its number, or -1 where there is no memory for it. */
static inline int64_t number_of(struct known *known, uint64_t source) {
    uint64_t at = place_of(known, source), number;
    for (; (number = known->table[at]) != 0; at = next_place(known, at))
        if (known->groups[number - 1].source == source) return (int64_t)number - 1;
    if (known->n == known->room) {
        if (!grow(known)) return -1;
        for (at = place_of(known, source); known->table[at]; at = next_place(known, at)) continue;
    }
    known->groups[known->n] = (struct shmb_group){source, 0};
    known->table[at] = ++known->n;
    return (int64_t)known->n - 1;
}

static bool count_groups(struct known *known, const uint64_t *sources, uint64_t from, uint64_t end, int32_t *numbers) {
    for (uint64_t slot = from; slot < end; slot++) {
        int64_t number = number_of(known, __atomic_load_n(&sources[slot], __ATOMIC_RELAXED));
        if (number < 0) return false;
        known->groups[number].count++;
        numbers[slot] = (int32_t)number;
    }
    return true;
}

/* The ends of groups of one size lie in one set of the processor's cache, which has room for some of them. So what a group
 * gets is put down a line at a time. */
struct line {
    int64_t first, next; /* rows */
    int32_t slots[LINE];
};

static void put_down(struct line *line, int32_t *order) {
    int64_t begin = (line->next - 1) / LINE * LINE, from = begin < line->first ? line->first : begin;
    memcpy(&order[from], &line->slots[from - begin], (size_t)(line->next - from) * sizeof *order);
}

static void put_in_order(uint64_t from, uint64_t end, struct line *lines, int32_t *order, int32_t *rows) {
    for (uint64_t slot = from; slot < end; slot++) {
        struct line *line = &lines[rows[slot]];
        rows[slot] = (int32_t)line->next;
        line->slots[line->next++ % LINE] = (int32_t)slot;
        if (line->next % LINE == 0) put_down(line, order);
    }
}

/* A group, and how many were met before it. */
struct met {
    struct shmb_group group;
    uint64_t number;
};

static uint64_t place_in_order(uint64_t source) {
    return source == SHMB_NO_SOURCE ? UINT64_MAX : shmb_stream_of(source);
}

static int by_stream_and_age(const void *one, const void *other) {
    const struct met *a = one, *b = other;
    uint64_t first = place_in_order(a->group.source), second = place_in_order(b->group.source);
    return first != second ? (first > second) - (first < second) : (a->number > b->number) - (a->number < b->number);
}

/* By age, and not by the numbers of writers: a load gives its items other ones, and trajectories follow each other as
 * before. */
static bool sort_groups(const struct known *known, struct shmb_group *sorted) {
    struct met *met = malloc((known->n + 1) * sizeof *met);
    if (met == NULL) return false;
    for (uint64_t i = 0; i < known->n; i++) met[i] = (struct met){known->groups[i], i};
    qsort(met, known->n, sizeof *met, by_stream_and_age);
    for (uint64_t i = 0; i < known->n; i++) sorted[i] = met[i].group;
    free(met);
    return true;
}

/* Of slots 0 to count, of which `start` is the oldest. Groups come by stream, then by age, and are the caller's to free. False: there
 * is no memory. */
bool shmb_order(const uint64_t *sources, uint64_t count, uint64_t start, int32_t *order, int32_t *rows,
                struct shmb_group **groups, uint64_t *n_groups) {
    struct known known = {0};
    bool done = grow(&known) && count_groups(&known, sources, start, count, rows) &&
                count_groups(&known, sources, 0, start, rows);
    struct shmb_group *sorted = done ? malloc((known.n + 1) * sizeof *sorted) : NULL;
    struct line *lines = done ? malloc((known.n + 1) * sizeof *lines) : NULL;
    done = sorted != NULL && lines != NULL && sort_groups(&known, sorted);
    if (done) {
        int64_t row = 0;
        for (uint64_t i = 0; i < known.n; i++) {
            struct line *line = &lines[number_of(&known, sorted[i].source)];
            line->first = line->next = row;
            row += (int64_t)sorted[i].count;
        }
        put_in_order(start, count, lines, order, rows);
        put_in_order(0, start, lines, order, rows);
        for (uint64_t i = 0; i < known.n; i++)
            if (lines[i].next % LINE) put_down(&lines[i], order);
        *groups = sorted;
        *n_groups = known.n;
    } else {
        free(sorted);
    }
    free(lines);
    free(known.groups);
    free(known.table);
    return done;
}
