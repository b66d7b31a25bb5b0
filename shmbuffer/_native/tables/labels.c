/* Items by label, so that draws can select labels instead of items.
 *
 *     where   for each element    its group, and index in it
 *     group   label, elements     oldest first, a ring buffer: constant time at both ends
 *     order   of the labels       the smallest first
 *     marks   first elements      of groups that can be drawn: counts them, and selects the k-th
 *
 * With a limit, a group has that many items. It is open until all of them were added, and complete then. It is lost
 * once one of its items is removed, or once it is given up while it is open. Items that are added to a lost group
 * are lost, too, up to the limit. An item that a writer changes in place is absent meanwhile, and its group is
 * complete again when it returns.
 *
 * Removing an item at an end moves no other items. Removing one in the middle, or adding one out of order, makes its
 * group loose. Loose groups are put in order at the end of a poll. */
#include "tables/labels.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 4u
#define MOST_ROOM 64u /* largest initial capacity */

static inline uint32_t *entry(const struct shmb_kin *kin, uint32_t index) { return &kin->items[index & kin->mask]; }

static inline uint32_t number_of(const struct shmb_labels *all, const struct shmb_kin *kin) {
    return (uint32_t)(kin - all->kins);
}

static inline uint64_t age_of(const struct shmb_labels *all, uint32_t element) {
    return element >= all->first ? element - all->first : element + all->elements - all->first;
}

/* Makes room for one more entry. NULL: out of memory. */
static void *reserve_one_more(struct shmb_labels *all, void *at, uint64_t count, uint64_t *room, size_t bytes) {
    if (count < *room) return at;
    uint64_t wanted = *room ? 2 * *room : 64;
    void *more = realloc(at, wanted * bytes);
    if (more == NULL) return all->failed = true, NULL;
    *room = wanted;
    return more;
}

/* Adds `more` to the counts of items; it may be negative. */
static inline void count_more(struct shmb_labels *all, struct shmb_kin *kin, int32_t more) {
    kin->count += (uint32_t)more;
    all->items += (uint64_t)(int64_t)more;
    if (all->in_order && !all->limit) all->order[kin->place].count = kin->count;
}

/* The hash table of labels. */

static inline uint32_t home_of(const struct shmb_labels *all, int64_t label) {
    uint64_t mixed = (uint64_t)label;
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15u;
    return (uint32_t)((mixed ^ mixed >> 29) * 0xC2B2AE3D27D4EB4Fu >> all->shift);
}

static inline uint32_t next_home(const struct shmb_labels *all, uint32_t at) {
    return (at + 1) & (uint32_t)(((uint64_t)1 << (64 - all->shift)) - 1);
}

static uint32_t place_of_label(const struct shmb_labels *all, int64_t label) {
    uint32_t at = home_of(all, label);
    while (all->table[at] && all->kins[all->table[at] - 1].label != label) at = next_home(all, at);
    return at;
}

/* Later entries of the same probe sequence move into the gap. */
static void forget_label(struct shmb_labels *all, uint32_t gap) {
    for (uint32_t at = next_home(all, gap); all->table[at]; at = next_home(all, at)) {
        uint32_t home = home_of(all, all->kins[all->table[at] - 1].label);
        bool between = gap < at ? gap < home && home <= at : gap < home || home <= at;
        if (between) continue;
        all->table[gap] = all->table[at];
        gap = at;
    }
    all->table[gap] = 0;
}

static bool more_kins(struct shmb_labels *all) {
    uint32_t room = all->room_kins ? 2 * all->room_kins : 64;
    struct shmb_kin *kins = realloc(all->kins, room * sizeof *kins);
    if (kins) all->kins = kins;
    uint32_t *table = calloc((size_t)2 * room, sizeof *table), *before = all->table, had = 2 * all->room_kins;
    if (kins == NULL || table == NULL) return free(table), false;
    all->table = table;
    all->room_kins = room;
    all->shift = 63u - (uint32_t)__builtin_ctz(room);
    for (uint32_t i = 0; i < had; i++)
        if (before[i]) table[place_of_label(all, kins[before[i] - 1].label)] = before[i];
    free(before);
    return true;
}

/* Groups. */

static void open_kin(struct shmb_labels *all, struct shmb_kin *kin) {
    uint32_t one = number_of(all, kin) + 1;
    kin->before = all->newest;
    kin->after = 0;
    if (all->newest) all->kins[all->newest - 1].after = one;
    if (!all->oldest) all->oldest = one;
    all->newest = one;
    all->open++;
}

static void close_kin(struct shmb_labels *all, struct shmb_kin *kin, enum shmb_kin_state state) {
    if (kin->state == SHMB_KIN_OPEN && all->limit) {
        *(kin->before ? &all->kins[kin->before - 1].after : &all->oldest) = kin->after;
        *(kin->after ? &all->kins[kin->after - 1].before : &all->newest) = kin->before;
        all->open--;
    }
    kin->state = (unsigned char)state;
}

static void remark(struct shmb_labels *all, struct shmb_kin *kin) {
    bool there = all->by_age && kin->count && kin->absent == 0 &&
                 (all->limit ? kin->state == SHMB_KIN_WHOLE : kin->state == SHMB_KIN_OPEN);
    uint32_t first = there ? *entry(kin, kin->front) : SHMB_NO_ITEM;
    if (kin->marked == first) return;
    if (kin->marked != SHMB_NO_ITEM && first != SHMB_NO_ITEM) {
        shmb_marks_move(&all->marks, kin->marked, first);
    } else if (first != SHMB_NO_ITEM) {
        shmb_marks_set(&all->marks, first, true);
    } else {
        shmb_marks_set(&all->marks, kin->marked, false);
    }
    kin->marked = first;
}

static void note_lost(struct shmb_labels *all, uint32_t element) {
    if (!all->tells) return;
    uint32_t *lost = reserve_one_more(all, all->lost, all->n_lost, &all->room_lost, sizeof *lost);
    if (lost == NULL) return;
    all->lost = lost;
    lost[all->n_lost++] = element;
}

static void lose(struct shmb_labels *all, struct shmb_kin *kin) {
    close_kin(all, kin, SHMB_KIN_LOST);
    remark(all, kin);
    for (uint32_t i = kin->front; i != kin->back && all->tells; i++)
        if (*entry(kin, i) != SHMB_NO_ITEM) note_lost(all, *entry(kin, i));
}

static struct shmb_kin *add_kin(struct shmb_labels *all, int64_t label, int64_t now) {
    const uint32_t room = all->first_room;
    uint32_t *items = malloc(room * sizeof *items), number = all->free_kins;
    if (items == NULL) return all->failed = true, NULL;
    if (number) {
        all->free_kins = all->kins[--number].front;
    } else {
        if (all->n_kins == all->room_kins && !more_kins(all)) return free(items), all->failed = true, NULL;
        number = all->n_kins++;
    }
    struct shmb_kin *kin = &all->kins[number];
    *kin = (struct shmb_kin){.label = label, .items = items, .mask = room - 1, .serial = ++all->serials,
                             .marked = SHMB_NO_ITEM, .since = now};
    all->table[place_of_label(all, label)] = number + 1;
    all->in_order = false;
    if (all->limit) {
        open_kin(all, kin);
    } else {
        struct shmb_ordered *order = reserve_one_more(all, all->order, all->n_order, &all->room_order, sizeof *order);
        if (order == NULL) return NULL;
        all->order = order;
        all->unsorted = all->unsorted || (all->n_order && order[all->n_order - 1].label > label);
        order[all->n_order++] = (struct shmb_ordered){label, number, kin->serial, 0};
    }
    return kin;
}

static void remove_kin(struct shmb_labels *all, struct shmb_kin *kin) {
    uint32_t number = number_of(all, kin), at = place_of_label(all, kin->label);
    all->in_order = false;
    close_kin(all, kin, SHMB_KIN_LOST);
    remark(all, kin);
    if (all->table[at] == number + 1) forget_label(all, at);
    free(kin->items);
    *kin = (struct shmb_kin){.front = all->free_kins};
    all->free_kins = number + 1;
}

static bool have_place(struct shmb_labels *all, struct shmb_kin *kin) {
    if (kin->back - kin->front <= kin->mask) return true;
    uint32_t mask = 2 * kin->mask + 1, *items = malloc(((size_t)mask + 1) * sizeof *items);
    if (items == NULL) return all->failed = true, false;
    for (uint32_t i = kin->front; i != kin->back; i++) items[i & mask] = *entry(kin, i);
    free(kin->items);
    kin->items = items;
    kin->mask = mask;
    return true;
}

static void loosen(struct shmb_labels *all, struct shmb_kin *kin) {
    if (kin->loose) return;
    uint32_t *loose = reserve_one_more(all, all->loose, all->n_loose, &all->room_loose, sizeof *loose);
    if (loose == NULL) return;
    all->loose = loose;
    loose[all->n_loose++] = number_of(all, kin);
    kin->loose = true;
}

static void append(struct shmb_labels *all, struct shmb_kin *kin, uint32_t element) {
    if (!have_place(all, kin)) return;
    if (kin->count && age_of(all, *entry(kin, kin->back - 1)) > age_of(all, element)) loosen(all, kin);
    all->where[element] = (struct shmb_place_in){number_of(all, kin) + 1, kin->back};
    *entry(kin, kin->back++) = element;
    count_more(all, kin, 1);
}

/* Absence. */

static inline bool is_absent(const struct shmb_labels *all, uint32_t element) {
    return all->absent && (all->absent[element / 8] >> element % 8 & 1);
}

static void set_absent(struct shmb_labels *all, struct shmb_kin *kin, uint32_t element, bool absent) {
    if (is_absent(all, element) == absent) return;
    all->absent[element / 8] ^= (unsigned char)(1u << element % 8);
    kin->absent += absent ? 1u : UINT32_MAX;
    remark(all, kin);
}

bool shmb_label_is_absent(const struct shmb_labels *all, uint32_t element) { return is_absent(all, element); }

void shmb_label_away(struct shmb_labels *all, uint32_t element) {
    if (all->absent == NULL || all->where[element].kin == 0 || is_absent(all, element)) return;
    uint32_t *away = reserve_one_more(all, all->away, all->n_away, &all->room_away, sizeof *away);
    if (away == NULL) return;
    all->away = away;
    away[all->n_away++] = element;
    set_absent(all, &all->kins[all->where[element].kin - 1], element, true);
}

/* Items. */

/* Handles the usual case that the oldest items of a group are removed and others stay. Returns the number of removed
 * elements. */
static inline uint32_t dropped_first(struct shmb_labels *all, struct shmb_place_in *where, uint64_t most) {
    const uint32_t number = where->kin;
    struct shmb_kin *kin = &all->kins[number - 1];
    bool counts = all->limit && (kin->state == SHMB_KIN_OPEN || kin->state == SHMB_KIN_WHOLE);
    if (kin->absent || kin->marked != SHMB_NO_ITEM || counts) return 0;
    uint32_t n = 0, room = kin->count - 1 < most ? kin->count - 1 : (uint32_t)most;
    for (; n < room && where[n].kin == number && where[n].index == kin->front + n; n++) where[n].kin = 0;
    kin->front += n;
    count_more(all, kin, -(int32_t)n);
    while (*entry(kin, kin->front) == SHMB_NO_ITEM) kin->front++;
    return n;
}

void shmb_label_drop(struct shmb_labels *all, uint32_t element) {
    if (all->where[element].kin == 0) return;
    struct shmb_kin *kin = &all->kins[all->where[element].kin - 1];
    if (is_absent(all, element)) set_absent(all, kin, element, false);
    *entry(kin, all->where[element].index) = SHMB_NO_ITEM;
    all->where[element].kin = 0;
    count_more(all, kin, -1);
    if (all->limit && (kin->state == SHMB_KIN_OPEN || kin->state == SHMB_KIN_WHOLE)) {
        all->withdrawn++;
        lose(all, kin);
    }
    if (kin->count == 0) {
        remove_kin(all, kin);
        return;
    }
    while (*entry(kin, kin->front) == SHMB_NO_ITEM) kin->front++;
    while (*entry(kin, kin->back - 1) == SHMB_NO_ITEM) kin->back--;
    if (kin->back - kin->front != kin->count) loosen(all, kin);
    remark(all, kin);
}

void shmb_labels_drop(struct shmb_labels *all, uint64_t first, uint64_t end) {
    for (uint64_t element = first, count; element < end; element += count) {
        count = all->where[element].kin ? dropped_first(all, &all->where[element], end - element) : 0;
        if (count == 0) shmb_label_drop(all, (uint32_t)element), count = 1;
    }
}

/* After an item was reported again: its position may have changed, because a claim that its dead writer had
 * half-marked has moved the head. */
static void compare_neighbours(struct shmb_labels *all, struct shmb_kin *kin, uint32_t element) {
    uint32_t index = all->where[element].index;
    uint32_t before = index == kin->front ? SHMB_NO_ITEM : *entry(kin, index - 1);
    uint32_t after = index + 1 == kin->back ? SHMB_NO_ITEM : *entry(kin, index + 1);
    uint64_t age = age_of(all, element);
    if (before != SHMB_NO_ITEM && age_of(all, before) > age) loosen(all, kin);
    if (after != SHMB_NO_ITEM && age_of(all, after) < age) loosen(all, kin);
}

/* Handles the usual case that items belong to the group of the last added item, are younger, and the group is open.
 * Returns the number of added items. */
static uint64_t put_behind_last(struct shmb_labels *all, const uint32_t *elements, const int64_t *labels, uint64_t count) {
    struct shmb_kin *kin = all->last ? &all->kins[all->last - 1] : NULL;
    if (kin == NULL || kin->count == 0 || kin->state != SHMB_KIN_OPEN) return 0;
    uint64_t room = kin->mask + 1 - (kin->back - kin->front), age = age_of(all, *entry(kin, kin->back - 1)), n = 0;
    /* the last item completes the group, which the caller handles */
    if (all->limit && room >= all->limit - kin->came) room = all->limit - kin->came - 1;
    for (; n < count && n < room && labels[n] == kin->label; n++) {
        uint32_t element = elements[n], index = kin->back + (uint32_t)n;
        uint64_t before = age;
        age = age_of(all, element);
        if (all->where[element].kin || age < before) break;
        all->where[element] = (struct shmb_place_in){all->last, index};
        *entry(kin, index) = element;
    }
    kin->back += (uint32_t)n;
    count_more(all, kin, (int32_t)n);
    kin->came += all->limit ? (uint32_t)n : 0;
    return n;
}

void shmb_label_put(struct shmb_labels *all, uint32_t element, int64_t label, int64_t now) {
    if (all->where[element].kin) {
        struct shmb_kin *kin = &all->kins[all->where[element].kin - 1];
        if (kin->label == label) {
            if (is_absent(all, element)) set_absent(all, kin, element, false);
            compare_neighbours(all, kin, element);
            return;
        }
        shmb_label_drop(all, element);
    }
    struct shmb_kin *kin = all->last ? &all->kins[all->last - 1] : NULL;
    if (kin == NULL || kin->items == NULL || kin->label != label) {
        uint32_t at = all->table[place_of_label(all, label)];
        kin = at ? &all->kins[at - 1] : NULL;
    }
    if (kin == NULL || (all->limit && kin->came == all->limit)) kin = add_kin(all, label, now);
    if (kin == NULL) return;
    all->last = number_of(all, kin) + 1;
    append(all, kin, element);
    if (all->failed) return;
    if (all->limit) {
        kin->came++;
        if (kin->state == SHMB_KIN_LOST)
            note_lost(all, element);
        else if (kin->came == all->limit)
            close_kin(all, kin, SHMB_KIN_WHOLE);
    }
    remark(all, kin);
}

void shmb_labels_put(struct shmb_labels *all, const uint32_t *elements, const int64_t *labels, uint64_t count, int64_t now) {
    for (uint64_t i = 0; i < count && !all->failed;) {
        i += put_behind_last(all, elements + i, labels + i, count - i);
        if (i == count) break;
        shmb_label_put(all, elements[i], labels[i], now);
        i++;
    }
}

struct aged {
    uint64_t age;
    uint32_t element;
};

static int by_age(const void *one, const void *other) {
    uint64_t a = ((const struct aged *)one)->age, b = ((const struct aged *)other)->age;
    return a < b ? -1 : a > b;
}

static void put_in_order(struct shmb_labels *all, struct shmb_kin *kin) {
    uint32_t number = number_of(all, kin) + 1, count = 0;
    bool sorted = true;
    struct aged *aged = malloc(kin->count * sizeof *aged);
    if (aged == NULL) {
        all->failed = true;
        return;
    }
    for (uint32_t i = kin->front; i != kin->back; i++) {
        uint32_t element = *entry(kin, i);
        if (element == SHMB_NO_ITEM) continue;
        aged[count] = (struct aged){age_of(all, element), element};
        sorted = sorted && (count == 0 || aged[count - 1].age < aged[count].age);
        count++;
    }
    if (!sorted) qsort(aged, count, sizeof *aged, by_age);
    kin->back = kin->front + count;
    for (uint32_t i = 0; i < count; i++) {
        *entry(kin, kin->front + i) = aged[i].element;
        all->where[aged[i].element] = (struct shmb_place_in){number, kin->front + i};
    }
    free(aged);
    remark(all, kin);
}

void shmb_labels_settle(struct shmb_labels *all) {
    for (uint64_t i = 0; i < all->n_loose && !all->failed; i++) {
        struct shmb_kin *kin = &all->kins[all->loose[i]];
        if (kin->items == NULL || !kin->loose) continue; /* the group was removed meanwhile */
        kin->loose = false;
        put_in_order(all, kin);
    }
    all->n_loose = 0;
}

void shmb_labels_give_up(struct shmb_labels *all, int64_t before) {
    while (all->oldest && all->kins[all->oldest - 1].since <= before) {
        all->given_up++;
        lose(all, &all->kins[all->oldest - 1]);
    }
}

void shmb_label_give_up(struct shmb_labels *all, uint32_t element) {
    struct shmb_kin *kin = all->where[element].kin ? &all->kins[all->where[element].kin - 1] : NULL;
    if (kin == NULL || kin->state != SHMB_KIN_OPEN || !all->limit) return;
    all->given_up++;
    lose(all, kin);
}

void shmb_label_mark_claimed(struct shmb_labels *all, uint32_t element, bool taken) {
    if (all->where[element].kin == 0) return;
    struct shmb_kin *kin = &all->kins[all->where[element].kin - 1];
    if (kin->state == (taken ? SHMB_KIN_WHOLE : SHMB_KIN_TAKEN))
        kin->state = taken ? SHMB_KIN_TAKEN : SHMB_KIN_WHOLE;
    remark(all, kin);
}

/* The whole table. */

static int by_label(const void *one, const void *other) {
    const struct shmb_ordered *a = one, *b = other;
    return a->label < b->label ? -1 : a->label > b->label;
}

uint64_t shmb_labels_order(struct shmb_labels *all) {
    uint64_t kept = 0;
    if (all->in_order) return all->n_order;
    for (uint64_t i = 0; i < all->n_order; i++) {
        const struct shmb_kin *kin = &all->kins[all->order[i].kin];
        if (kin->items == NULL || kin->serial != all->order[i].serial) continue;
        all->order[kept] = all->order[i];
        all->order[kept++].count = kin->count;
    }
    all->n_order = kept;
    if (all->unsorted) qsort(all->order, kept, sizeof *all->order, by_label);
    for (uint64_t i = 0; i < kept; i++) all->kins[all->order[i].kin].place = (uint32_t)i;
    all->unsorted = false;
    all->in_order = true;
    return kept;
}

bool shmb_labels_make(struct shmb_labels *all, uint64_t elements, uint32_t limit, bool by_age_too) {
    *all = (struct shmb_labels){.elements = elements, .limit = limit, .by_age = by_age_too, .first_room = FIRST_ROOM};
    /* most groups reach their limit */
    while (all->first_room < limit && all->first_room < MOST_ROOM) all->first_room *= 2;
    all->where = calloc(elements, sizeof *all->where); /* pages that are never touched are not allocated */
    if (limit) all->absent = calloc(elements / 8 + 1, 1);
    bool made = all->where && (!limit || all->absent) && more_kins(all) && (!by_age_too || shmb_marks_make(&all->marks, elements));
    if (made) return true;
    shmb_labels_free(all);
    *all = (struct shmb_labels){.elements = elements, .limit = limit, .by_age = by_age_too, .failed = true};
    return false;
}

void shmb_labels_free(struct shmb_labels *all) {
    for (uint32_t i = 0; i < all->n_kins; i++) free(all->kins[i].items);
    free(all->kins);
    free(all->table);
    free(all->where);
    free(all->absent);
    free(all->order);
    free(all->loose);
    free(all->lost);
    free(all->away);
    if (all->by_age) shmb_marks_free(&all->marks);
    *all = (struct shmb_labels){0};
}

bool shmb_labels_clear(struct shmb_labels *all) {
    struct shmb_labels before = *all;
    shmb_labels_free(all);
    bool made = shmb_labels_make(all, before.elements, before.limit, before.by_age);
    all->tells = before.tells;
    all->withdrawn = before.withdrawn;
    all->given_up = before.given_up;
    return made;
}
