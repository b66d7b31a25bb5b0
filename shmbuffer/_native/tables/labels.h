/* Items by label, such as the version that made them or the group that they belong to: see labels.c. */
#ifndef SHMB_LABELS_H
#define SHMB_LABELS_H

#include <stddef.h>

#include "tables/marks.h"

#define SHMB_NO_ITEM UINT32_MAX
#define SHMB_MAX_ITEMS ((uint64_t)UINT32_MAX - 1)

enum shmb_group_state { SHMB_GROUP_OPEN = 0, SHMB_GROUP_COMPLETE = 1, SHMB_GROUP_LOST = 2, SHMB_GROUP_CLAIMED = 3 };

/* The items of one label. If their number is limited, a full group is followed by another one with the same label. */
struct shmb_group {
    int64_t label;
    /* ring buffer of elements, oldest first: index i is items[i & mask]. NULL: the group is unused */
    uint32_t *items;
    uint32_t mask;         /* capacity - 1; the capacity is a power of two */
    /* indices, modulo 2^32; in an unused group, `front` links to the next unused one */
    uint32_t front, back;
    /* items; less than back - front if items in the middle were removed */
    uint32_t count;
    uint32_t added;         /* items that were ever added */
    uint32_t absent;       /* items that are being rewritten */
    uint32_t serial;       /* changes whenever the group is reused */
    uint32_t place;        /* position in the order of labels, while that is up to date */
    uint32_t marked;       /* element of this group in `marks`; SHMB_NO_ITEM: none */
    /* 1 + number: neighbours in the list of open groups, in the order of their beginnings */
    uint32_t before, after;
    int64_t since;         /* time of its beginning */
    unsigned char state;   /* enum shmb_group_state */
    bool loose;            /* its items are out of order, or not contiguous */
};

struct shmb_labels {
    uint64_t elements;
    uint32_t limit;      /* items per group; 0: unlimited */
    uint32_t first_capacity; /* initial capacity of a group */
    bool by_age;         /* groups are in `marks` by their first item */
    bool failed;         /* out of memory: the contents are invalid until they are cleared */
    bool unsorted;       /* `order` is not sorted */
    bool in_order;       /* `order` is up to date */
    /* 1 + the group of the last added item, which is usually also that of the next one */
    uint32_t last;
    uint64_t first;      /* element of the oldest slot */
    struct shmb_group_place {
        uint32_t group, index; /* 1 + the group's number; 0: none */
    } *where;                /* for each element */
    unsigned char *absent;   /* one bit per element, if there is a limit */
    struct shmb_group *groups;
    /* 1 + the first unused group */
    uint32_t n_groups, groups_capacity, free_groups;
    /* hash table of 1 + group, at most half full: the last group of each label */
    uint32_t *table, shift;
    struct shmb_ordered {
        int64_t label;
        uint32_t group, serial, count;
    } *order; /* by label; brought up to date on demand */
    uint64_t n_order, order_capacity;
    uint32_t *loose; /* groups that must be put in order */
    uint64_t n_loose, loose_capacity;
    uint32_t *lost; /* elements of lost groups that were not reported yet */
    uint64_t n_lost, lost_capacity;
    bool records_lost; /* lost elements are recorded */
    /* elements that were absent at the last poll, without duplicates; some may have returned */
    uint32_t *absent_elements;
    uint64_t n_absent_elements, absent_capacity;
    /* ends of the list of open groups, 1 + number */
    uint32_t serials, oldest, newest;
    struct shmb_marks marks;          /* first items of the groups that can be drawn */
    uint64_t items, open, withdrawn, given_up;
};

bool shmb_labels_make(struct shmb_labels *all, uint64_t elements, uint32_t limit, bool by_age);
void shmb_labels_free(struct shmb_labels *all);
bool shmb_labels_clear(struct shmb_labels *all); /* counters keep their values */

void shmb_label_put(struct shmb_labels *all, uint32_t element, int64_t label, int64_t now);
void shmb_label_drop(struct shmb_labels *all, uint32_t element);
void shmb_labels_put(struct shmb_labels *all, const uint32_t *elements, const int64_t *labels, uint64_t count, int64_t now);
void shmb_labels_drop(struct shmb_labels *all, uint64_t first, uint64_t end); /* consecutive elements */
/* the item is being rewritten, or was removed: not known yet */
void shmb_label_mark_absent(struct shmb_labels *all, uint32_t element);
bool shmb_label_is_absent(const struct shmb_labels *all, uint32_t element);
void shmb_labels_settle(struct shmb_labels *all); /* after additions and removals, before any query */
void shmb_labels_give_up(struct shmb_labels *all, int64_t before); /* gives up open groups that began until then */
void shmb_label_give_up(struct shmb_labels *all, uint32_t element); /* gives up its group, if that is open */
/* marks its group as claimed by a learner, which does not draw it again */
void shmb_label_mark_claimed(struct shmb_labels *all, uint32_t element, bool claimed);

/* Groups by label, the smallest label first. */
uint64_t shmb_labels_order(struct shmb_labels *all);
static inline const struct shmb_group *shmb_group_at(const struct shmb_labels *all, uint64_t at) {
    return &all->groups[all->order[at].group];
}
static inline const struct shmb_group *shmb_find_group(const struct shmb_labels *all, uint64_t element) {
    return element < all->elements && all->where[element].group ? &all->groups[all->where[element].group - 1] : NULL;
}
static inline const uint32_t *shmb_group_item_at(const struct shmb_group *group, uint32_t number) {
    return &group->items[(group->front + number) & group->mask];
}
static inline uint32_t shmb_group_item(const struct shmb_group *group, uint32_t number) { return *shmb_group_item_at(group, number); }

#endif
