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

#define FIRST_CAPACITY 4u
#define MAX_FIRST_CAPACITY 64u /* largest initial capacity */

static inline uint32_t *entry(const struct shmb_group *group, uint32_t index) { return &group->items[index & group->mask]; }

static inline uint32_t number_of(const struct shmb_labels *all, const struct shmb_group *group) {
    return (uint32_t)(group - all->groups);
}

static inline uint64_t age_of(const struct shmb_labels *all, uint32_t element) {
    return element >= all->first ? element - all->first : element + all->elements - all->first;
}

/* Makes room for one more entry. NULL: out of memory. */
static void *reserve_one_more(struct shmb_labels *all, void *at, uint64_t count, uint64_t *capacity, size_t bytes) {
    if (count < *capacity) return at;
    uint64_t wanted = *capacity ? 2 * *capacity : 64;
    void *change = realloc(at, wanted * bytes);
    if (change == NULL) return all->failed = true, NULL;
    *capacity = wanted;
    return change;
}

/* Adds `change` to the counts of items; it may be negative. */
static inline void change_count(struct shmb_labels *all, struct shmb_group *group, int32_t change) {
    group->count += (uint32_t)change;
    all->items += (uint64_t)(int64_t)change;
    if (all->in_order && !all->limit) all->order[group->place].count = group->count;
}

/* The hash table of labels. */

static inline uint32_t hash_place(const struct shmb_labels *all, int64_t label) {
    uint64_t mixed = (uint64_t)label;
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15u;
    return (uint32_t)((mixed ^ mixed >> 29) * 0xC2B2AE3D27D4EB4Fu >> all->shift);
}

static inline uint32_t next_hash_place(const struct shmb_labels *all, uint32_t at) {
    return (at + 1) & (uint32_t)(((uint64_t)1 << (64 - all->shift)) - 1);
}

static uint32_t place_of_label(const struct shmb_labels *all, int64_t label) {
    uint32_t at = hash_place(all, label);
    while (all->table[at] && all->groups[all->table[at] - 1].label != label) at = next_hash_place(all, at);
    return at;
}

/* Later entries of the same probe sequence move into the gap. */
static void forget_label(struct shmb_labels *all, uint32_t gap) {
    for (uint32_t at = next_hash_place(all, gap); all->table[at]; at = next_hash_place(all, at)) {
        uint32_t home = hash_place(all, all->groups[all->table[at] - 1].label);
        bool between = gap < at ? gap < home && home <= at : gap < home || home <= at;
        if (between) continue;
        all->table[gap] = all->table[at];
        gap = at;
    }
    all->table[gap] = 0;
}

static bool grow_groups(struct shmb_labels *all) {
    uint32_t capacity = all->groups_capacity ? 2 * all->groups_capacity : 64;
    struct shmb_group *groups = realloc(all->groups, capacity * sizeof *groups);
    if (groups) all->groups = groups;
    uint32_t *table = calloc((size_t)2 * capacity, sizeof *table), *before = all->table, had = 2 * all->groups_capacity;
    if (groups == NULL || table == NULL) return free(table), false;
    all->table = table;
    all->groups_capacity = capacity;
    all->shift = 63u - (uint32_t)__builtin_ctz(capacity);
    for (uint32_t i = 0; i < had; i++)
        if (before[i]) table[place_of_label(all, groups[before[i] - 1].label)] = before[i];
    free(before);
    return true;
}

/* Groups. */

static void open_group(struct shmb_labels *all, struct shmb_group *group) {
    uint32_t one = number_of(all, group) + 1;
    group->before = all->newest;
    group->after = 0;
    if (all->newest) all->groups[all->newest - 1].after = one;
    if (!all->oldest) all->oldest = one;
    all->newest = one;
    all->open++;
}

static void close_group(struct shmb_labels *all, struct shmb_group *group, enum shmb_group_state state) {
    if (group->state == SHMB_GROUP_OPEN && all->limit) {
        *(group->before ? &all->groups[group->before - 1].after : &all->oldest) = group->after;
        *(group->after ? &all->groups[group->after - 1].before : &all->newest) = group->before;
        all->open--;
    }
    group->state = (unsigned char)state;
}

static void update_mark(struct shmb_labels *all, struct shmb_group *group) {
    bool drawable = all->by_age && group->count && group->absent == 0 &&
                 (all->limit ? group->state == SHMB_GROUP_COMPLETE : group->state == SHMB_GROUP_OPEN);
    uint32_t first = drawable ? *entry(group, group->front) : SHMB_NO_ITEM;
    if (group->marked == first) return;
    if (group->marked != SHMB_NO_ITEM && first != SHMB_NO_ITEM) {
        shmb_marks_move(&all->marks, group->marked, first);
    } else if (first != SHMB_NO_ITEM) {
        shmb_marks_set(&all->marks, first, true);
    } else {
        shmb_marks_set(&all->marks, group->marked, false);
    }
    group->marked = first;
}

static void note_lost(struct shmb_labels *all, uint32_t element) {
    if (!all->records_lost) return;
    uint32_t *lost = reserve_one_more(all, all->lost, all->n_lost, &all->lost_capacity, sizeof *lost);
    if (lost == NULL) return;
    all->lost = lost;
    lost[all->n_lost++] = element;
}

static void lose_group(struct shmb_labels *all, struct shmb_group *group) {
    close_group(all, group, SHMB_GROUP_LOST);
    update_mark(all, group);
    for (uint32_t i = group->front; i != group->back && all->records_lost; i++)
        if (*entry(group, i) != SHMB_NO_ITEM) note_lost(all, *entry(group, i));
}

static struct shmb_group *add_group(struct shmb_labels *all, int64_t label, int64_t now) {
    const uint32_t capacity = all->first_capacity;
    uint32_t *items = malloc(capacity * sizeof *items), number = all->free_groups;
    if (items == NULL) return all->failed = true, NULL;
    if (number) {
        all->free_groups = all->groups[--number].front;
    } else {
        if (all->n_groups == all->groups_capacity && !grow_groups(all)) return free(items), all->failed = true, NULL;
        number = all->n_groups++;
    }
    struct shmb_group *group = &all->groups[number];
    *group = (struct shmb_group){.label = label, .items = items, .mask = capacity - 1, .serial = ++all->serials,
                             .marked = SHMB_NO_ITEM, .since = now};
    all->table[place_of_label(all, label)] = number + 1;
    all->in_order = false;
    if (all->limit) {
        open_group(all, group);
    } else {
        struct shmb_ordered *order = reserve_one_more(all, all->order, all->n_order, &all->order_capacity, sizeof *order);
        if (order == NULL) return NULL;
        all->order = order;
        all->unsorted = all->unsorted || (all->n_order && order[all->n_order - 1].label > label);
        order[all->n_order++] = (struct shmb_ordered){label, number, group->serial, 0};
    }
    return group;
}

static void remove_group(struct shmb_labels *all, struct shmb_group *group) {
    uint32_t number = number_of(all, group), at = place_of_label(all, group->label);
    all->in_order = false;
    close_group(all, group, SHMB_GROUP_LOST);
    update_mark(all, group);
    if (all->table[at] == number + 1) forget_label(all, at);
    free(group->items);
    *group = (struct shmb_group){.front = all->free_groups};
    all->free_groups = number + 1;
}

static bool make_place(struct shmb_labels *all, struct shmb_group *group) {
    if (group->back - group->front <= group->mask) return true;
    uint32_t mask = 2 * group->mask + 1, *items = malloc(((size_t)mask + 1) * sizeof *items);
    if (items == NULL) return all->failed = true, false;
    for (uint32_t i = group->front; i != group->back; i++) items[i & mask] = *entry(group, i);
    free(group->items);
    group->items = items;
    group->mask = mask;
    return true;
}

static void mark_loose(struct shmb_labels *all, struct shmb_group *group) {
    if (group->loose) return;
    uint32_t *loose = reserve_one_more(all, all->loose, all->n_loose, &all->loose_capacity, sizeof *loose);
    if (loose == NULL) return;
    all->loose = loose;
    loose[all->n_loose++] = number_of(all, group);
    group->loose = true;
}

static void append(struct shmb_labels *all, struct shmb_group *group, uint32_t element) {
    if (!make_place(all, group)) return;
    if (group->count && age_of(all, *entry(group, group->back - 1)) > age_of(all, element)) mark_loose(all, group);
    all->where[element] = (struct shmb_group_place){number_of(all, group) + 1, group->back};
    *entry(group, group->back++) = element;
    change_count(all, group, 1);
}

/* Absence. */

static inline bool is_absent(const struct shmb_labels *all, uint32_t element) {
    return all->absent && (all->absent[element / 8] >> element % 8 & 1);
}

static void set_absent(struct shmb_labels *all, struct shmb_group *group, uint32_t element, bool absent) {
    if (is_absent(all, element) == absent) return;
    all->absent[element / 8] ^= (unsigned char)(1u << element % 8);
    group->absent += absent ? 1u : UINT32_MAX;
    update_mark(all, group);
}

bool shmb_label_is_absent(const struct shmb_labels *all, uint32_t element) { return is_absent(all, element); }

void shmb_label_mark_absent(struct shmb_labels *all, uint32_t element) {
    if (all->absent == NULL || all->where[element].group == 0 || is_absent(all, element)) return;
    uint32_t *absent_elements = reserve_one_more(all, all->absent_elements, all->n_absent_elements, &all->absent_capacity, sizeof *absent_elements);
    if (absent_elements == NULL) return;
    all->absent_elements = absent_elements;
    absent_elements[all->n_absent_elements++] = element;
    set_absent(all, &all->groups[all->where[element].group - 1], element, true);
}

/* Items. */

/* Handles the usual case that the oldest items of a group are removed and others stay. Returns the number of removed
 * elements. */
static inline uint32_t drop_oldest(struct shmb_labels *all, struct shmb_group_place *where, uint64_t max_count) {
    const uint32_t number = where->group;
    struct shmb_group *group = &all->groups[number - 1];
    bool counts = all->limit && (group->state == SHMB_GROUP_OPEN || group->state == SHMB_GROUP_COMPLETE);
    if (group->absent || group->marked != SHMB_NO_ITEM || counts) return 0;
    uint32_t n = 0, capacity = group->count - 1 < max_count ? group->count - 1 : (uint32_t)max_count;
    for (; n < capacity && where[n].group == number && where[n].index == group->front + n; n++) where[n].group = 0;
    group->front += n;
    change_count(all, group, -(int32_t)n);
    while (*entry(group, group->front) == SHMB_NO_ITEM) group->front++;
    return n;
}

void shmb_label_drop(struct shmb_labels *all, uint32_t element) {
    if (all->where[element].group == 0) return;
    struct shmb_group *group = &all->groups[all->where[element].group - 1];
    if (is_absent(all, element)) set_absent(all, group, element, false);
    *entry(group, all->where[element].index) = SHMB_NO_ITEM;
    all->where[element].group = 0;
    change_count(all, group, -1);
    if (all->limit && (group->state == SHMB_GROUP_OPEN || group->state == SHMB_GROUP_COMPLETE)) {
        all->withdrawn++;
        lose_group(all, group);
    }
    if (group->count == 0) {
        remove_group(all, group);
        return;
    }
    while (*entry(group, group->front) == SHMB_NO_ITEM) group->front++;
    while (*entry(group, group->back - 1) == SHMB_NO_ITEM) group->back--;
    if (group->back - group->front != group->count) mark_loose(all, group);
    update_mark(all, group);
}

void shmb_labels_drop(struct shmb_labels *all, uint64_t first, uint64_t end) {
    for (uint64_t element = first, count; element < end; element += count) {
        count = all->where[element].group ? drop_oldest(all, &all->where[element], end - element) : 0;
        if (count == 0) shmb_label_drop(all, (uint32_t)element), count = 1;
    }
}

/* After an item was reported again: its position may have changed, because a claim that its dead writer had
 * half-marked has moved the head. */
static void compare_neighbours(struct shmb_labels *all, struct shmb_group *group, uint32_t element) {
    uint32_t index = all->where[element].index;
    uint32_t before = index == group->front ? SHMB_NO_ITEM : *entry(group, index - 1);
    uint32_t after = index + 1 == group->back ? SHMB_NO_ITEM : *entry(group, index + 1);
    uint64_t age = age_of(all, element);
    if (before != SHMB_NO_ITEM && age_of(all, before) > age) mark_loose(all, group);
    if (after != SHMB_NO_ITEM && age_of(all, after) < age) mark_loose(all, group);
}

/* Handles the usual case that items belong to the group of the last added item, are younger, and the group is open.
 * Returns the number of added items. */
static uint64_t append_to_last(struct shmb_labels *all, const uint32_t *elements, const int64_t *labels, uint64_t count) {
    struct shmb_group *group = all->last ? &all->groups[all->last - 1] : NULL;
    if (group == NULL || group->count == 0 || group->state != SHMB_GROUP_OPEN) return 0;
    uint64_t capacity = group->mask + 1 - (group->back - group->front), age = age_of(all, *entry(group, group->back - 1)), n = 0;
    /* the last item completes the group, which the caller handles */
    if (all->limit && capacity >= all->limit - group->added) capacity = all->limit - group->added - 1;
    for (; n < count && n < capacity && labels[n] == group->label; n++) {
        uint32_t element = elements[n], index = group->back + (uint32_t)n;
        uint64_t before = age;
        age = age_of(all, element);
        if (all->where[element].group || age < before) break;
        all->where[element] = (struct shmb_group_place){all->last, index};
        *entry(group, index) = element;
    }
    group->back += (uint32_t)n;
    change_count(all, group, (int32_t)n);
    group->added += all->limit ? (uint32_t)n : 0;
    return n;
}

void shmb_label_put(struct shmb_labels *all, uint32_t element, int64_t label, int64_t now) {
    if (all->where[element].group) {
        struct shmb_group *group = &all->groups[all->where[element].group - 1];
        if (group->label == label) {
            if (is_absent(all, element)) set_absent(all, group, element, false);
            compare_neighbours(all, group, element);
            return;
        }
        shmb_label_drop(all, element);
    }
    struct shmb_group *group = all->last ? &all->groups[all->last - 1] : NULL;
    if (group == NULL || group->items == NULL || group->label != label) {
        uint32_t at = all->table[place_of_label(all, label)];
        group = at ? &all->groups[at - 1] : NULL;
    }
    if (group == NULL || (all->limit && group->added == all->limit)) group = add_group(all, label, now);
    if (group == NULL) return;
    all->last = number_of(all, group) + 1;
    append(all, group, element);
    if (all->failed) return;
    if (all->limit) {
        group->added++;
        if (group->state == SHMB_GROUP_LOST)
            note_lost(all, element);
        else if (group->added == all->limit)
            close_group(all, group, SHMB_GROUP_COMPLETE);
    }
    update_mark(all, group);
}

void shmb_labels_put(struct shmb_labels *all, const uint32_t *elements, const int64_t *labels, uint64_t count, int64_t now) {
    for (uint64_t i = 0; i < count && !all->failed;) {
        i += append_to_last(all, elements + i, labels + i, count - i);
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

static void put_in_order(struct shmb_labels *all, struct shmb_group *group) {
    uint32_t number = number_of(all, group) + 1, count = 0;
    bool sorted = true;
    struct aged *aged = malloc(group->count * sizeof *aged);
    if (aged == NULL) {
        all->failed = true;
        return;
    }
    for (uint32_t i = group->front; i != group->back; i++) {
        uint32_t element = *entry(group, i);
        if (element == SHMB_NO_ITEM) continue;
        aged[count] = (struct aged){age_of(all, element), element};
        sorted = sorted && (count == 0 || aged[count - 1].age < aged[count].age);
        count++;
    }
    if (!sorted) qsort(aged, count, sizeof *aged, by_age);
    group->back = group->front + count;
    for (uint32_t i = 0; i < count; i++) {
        *entry(group, group->front + i) = aged[i].element;
        all->where[aged[i].element] = (struct shmb_group_place){number, group->front + i};
    }
    free(aged);
    update_mark(all, group);
}

void shmb_labels_settle(struct shmb_labels *all) {
    for (uint64_t i = 0; i < all->n_loose && !all->failed; i++) {
        struct shmb_group *group = &all->groups[all->loose[i]];
        if (group->items == NULL || !group->loose) continue; /* the group was removed meanwhile */
        group->loose = false;
        put_in_order(all, group);
    }
    all->n_loose = 0;
}

void shmb_labels_give_up(struct shmb_labels *all, int64_t before) {
    while (all->oldest && all->groups[all->oldest - 1].since <= before) {
        all->given_up++;
        lose_group(all, &all->groups[all->oldest - 1]);
    }
}

void shmb_label_give_up(struct shmb_labels *all, uint32_t element) {
    struct shmb_group *group = all->where[element].group ? &all->groups[all->where[element].group - 1] : NULL;
    if (group == NULL || group->state != SHMB_GROUP_OPEN || !all->limit) return;
    all->given_up++;
    lose_group(all, group);
}

void shmb_label_mark_claimed(struct shmb_labels *all, uint32_t element, bool claimed) {
    if (all->where[element].group == 0) return;
    struct shmb_group *group = &all->groups[all->where[element].group - 1];
    if (group->state == (claimed ? SHMB_GROUP_COMPLETE : SHMB_GROUP_CLAIMED))
        group->state = claimed ? SHMB_GROUP_CLAIMED : SHMB_GROUP_COMPLETE;
    update_mark(all, group);
}

/* The whole table. */

static int by_label(const void *one, const void *other) {
    const struct shmb_ordered *a = one, *b = other;
    return a->label < b->label ? -1 : a->label > b->label;
}

uint64_t shmb_labels_order(struct shmb_labels *all) {
    uint64_t remaining = 0;
    if (all->in_order) return all->n_order;
    for (uint64_t i = 0; i < all->n_order; i++) {
        const struct shmb_group *group = &all->groups[all->order[i].group];
        if (group->items == NULL || group->serial != all->order[i].serial) continue;
        all->order[remaining] = all->order[i];
        all->order[remaining++].count = group->count;
    }
    all->n_order = remaining;
    if (all->unsorted) qsort(all->order, remaining, sizeof *all->order, by_label);
    for (uint64_t i = 0; i < remaining; i++) all->groups[all->order[i].group].place = (uint32_t)i;
    all->unsorted = false;
    all->in_order = true;
    return remaining;
}

bool shmb_labels_make(struct shmb_labels *all, uint64_t elements, uint32_t limit, bool by_age_too) {
    *all = (struct shmb_labels){.elements = elements, .limit = limit, .by_age = by_age_too, .first_capacity = FIRST_CAPACITY};
    /* most groups reach their limit */
    while (all->first_capacity < limit && all->first_capacity < MAX_FIRST_CAPACITY) all->first_capacity *= 2;
    all->where = calloc(elements, sizeof *all->where); /* pages that are never touched are not allocated */
    if (limit) all->absent = calloc(elements / 8 + 1, 1);
    bool allocated = all->where && (!limit || all->absent) && grow_groups(all) && (!by_age_too || shmb_marks_make(&all->marks, elements));
    if (allocated) return true;
    shmb_labels_free(all);
    *all = (struct shmb_labels){.elements = elements, .limit = limit, .by_age = by_age_too, .failed = true};
    return false;
}

void shmb_labels_free(struct shmb_labels *all) {
    for (uint32_t i = 0; i < all->n_groups; i++) free(all->groups[i].items);
    free(all->groups);
    free(all->table);
    free(all->where);
    free(all->absent);
    free(all->order);
    free(all->loose);
    free(all->lost);
    free(all->absent_elements);
    if (all->by_age) shmb_marks_free(&all->marks);
    *all = (struct shmb_labels){0};
}

bool shmb_labels_clear(struct shmb_labels *all) {
    struct shmb_labels before = *all;
    shmb_labels_free(all);
    bool allocated = shmb_labels_make(all, before.elements, before.limit, before.by_age);
    all->records_lost = before.records_lost;
    all->withdrawn = before.withdrawn;
    all->given_up = before.given_up;
    return allocated;
}
