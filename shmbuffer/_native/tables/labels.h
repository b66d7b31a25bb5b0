/* Items by label, such as the version that made them or the group that they are of: see labels.c. */
#ifndef SHMB_LABELS_H
#define SHMB_LABELS_H

#include <stddef.h>

#include "tables/marks.h"

#define SHMB_NO_ITEM UINT32_MAX
#define SHMB_MOST_ITEMS ((uint64_t)UINT32_MAX - 1)

enum shmb_kin_state { SHMB_KIN_OPEN = 0, SHMB_KIN_WHOLE = 1, SHMB_KIN_LOST = 2, SHMB_KIN_TAKEN = 3 };

/* Items of one label. Where their number is limited, those that came next to each other: a label that comes again behind
 * them begins another one. */
struct shmb_kin {
    int64_t label;
    uint32_t *items;       /* elements, oldest first; of index i: items[i & mask]. NULL: it is free */
    uint32_t mask;         /* of a circle of a power of two */
    uint32_t front, back;  /* indices, modulo 2^32; of a free one `front` is the next free one */
    uint32_t count;        /* items; fewer than between the two where one in the middle went */
    uint32_t came;         /* items that ever were of it */
    uint32_t absent;       /* of the items, those that are being written */
    uint32_t serial;       /* another one each time that it is used */
    uint32_t place;        /* in the order of labels, while that is up to date */
    uint32_t marked;       /* element by which it is in the marks; SHMB_NO_ITEM: it is not */
    uint32_t before, after; /* of the open ones, 1 + number: in the order in which they began */
    int64_t since;         /* when it began */
    unsigned char state;   /* enum shmb_kin_state */
    bool loose;            /* its items are not in order, or not next to each other */
};

struct shmb_labels {
    uint64_t elements;
    uint32_t limit;      /* items of a kin; 0: none */
    uint32_t first_room; /* of a kin that begins */
    bool by_age;         /* kins are marked by their first item */
    bool failed;         /* there was no memory: what is here is worth nothing until it is cleared */
    bool unsorted;       /* `order` is */
    bool in_order;       /* it has the labels that are there */
    uint32_t last;       /* 1 + the kin of the last item that was put: as a rule also that of the next one */
    uint64_t first;      /* the element of the oldest slot */
    struct shmb_place_in {
        uint32_t kin, index; /* kin: 1 + its number, 0: none */
    } *where;                /* of each element */
    unsigned char *absent;   /* a bit an element; where there is a limit */
    struct shmb_kin *kins;
    uint32_t n_kins, room_kins, free_kins; /* free_kins: 1 + the first of them */
    uint32_t *table, shift;                /* 1 + kin, at most half full: the last one of each label */
    struct shmb_ordered {
        int64_t label;
        uint32_t kin, serial, count;
    } *order; /* by label; which there are, is brought up to date when it is asked for */
    uint64_t n_order, room_order;
    uint32_t *loose; /* kins that are to be put in order */
    uint64_t n_loose, room_loose;
    uint32_t *lost; /* elements of kins that are lost, which nobody has taken yet */
    uint64_t n_lost, room_lost;
    bool tells; /* of them */
    uint32_t *away; /* elements that were absent at the last poll, each once; some may be back */
    uint64_t n_away, room_away;
    uint32_t serials, oldest, newest; /* of the open ones, 1 + number */
    struct shmb_marks marks;          /* first items of those that may be drawn */
    uint64_t items, open, withdrawn, given_up;
};

bool shmb_labels_make(struct shmb_labels *all, uint64_t elements, uint32_t limit, bool by_age);
void shmb_labels_free(struct shmb_labels *all);
bool shmb_labels_clear(struct shmb_labels *all); /* counts stay */

void shmb_label_put(struct shmb_labels *all, uint32_t element, int64_t label, int64_t now);
void shmb_label_drop(struct shmb_labels *all, uint32_t element);
void shmb_labels_put(struct shmb_labels *all, const uint32_t *elements, const int64_t *labels, uint64_t count, int64_t now);
void shmb_labels_drop(struct shmb_labels *all, uint64_t first, uint64_t end); /* elements that follow each other */
void shmb_label_away(struct shmb_labels *all, uint32_t element); /* it is being written, or gone: nobody knows yet */
bool shmb_label_is_absent(const struct shmb_labels *all, uint32_t element);
void shmb_labels_settle(struct shmb_labels *all); /* behind puts and drops, before anything is asked */
void shmb_labels_give_up(struct shmb_labels *all, int64_t before); /* open ones that began before that */
void shmb_label_give_up(struct shmb_labels *all, uint32_t element); /* its kin, where that is open */
void shmb_label_mark_claimed(struct shmb_labels *all, uint32_t element, bool taken); /* its kin; who took it draws it no more */

/* Kins by label, the smallest first. */
uint64_t shmb_labels_order(struct shmb_labels *all);
static inline const struct shmb_kin *shmb_kin_at(const struct shmb_labels *all, uint64_t at) {
    return &all->kins[all->order[at].kin];
}
static inline const struct shmb_kin *shmb_kin_of(const struct shmb_labels *all, uint64_t element) {
    return element < all->elements && all->where[element].kin ? &all->kins[all->where[element].kin - 1] : NULL;
}
static inline const uint32_t *shmb_kin_item_at(const struct shmb_kin *kin, uint32_t number) {
    return &kin->items[(kin->front + number) & kin->mask];
}
static inline uint32_t shmb_kin_item(const struct shmb_kin *kin, uint32_t number) { return *shmb_kin_item_at(kin, number); }

#endif
