/* One process's handle on one ring: where the shared bytes are mapped here, and the calls that move items.
 *
 * The protocol (who may touch a slot, when) is told in memory/format/slots.py and docs/design/. One robust mutex
 * guards claim, commit and the tree; the payload is copied with no lock held, and every row that is read is
 * compared with its slot word afterwards. No function here calls Python: what has to give up the interpreter
 * lock while it waits goes through `struct shmb_call`.
 */
#ifndef SHMB_RING_H
#define SHMB_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#include "core/crashpoint.h"
#include "core/layout.h"
#include "core/sync.h"
#include "core/tree.h"
#include "core/weights.h"

/* Around a copy of bytes that a writer may be changing meanwhile: kept where `still_holds`, or a ticket, says that
 * nobody was. In terms of C it is a data race; a build for ThreadSanitizer is told here what not to look at. */
#ifndef SHMB_OPTIMISTIC
#define SHMB_OPTIMISTIC(copy) copy
#endif

enum shmb_status {
    SHMB_OK = 0,
    SHMB_BLOCKED,        /* a slot is being written, or somebody waits in front: see shmb_refusal.blocker */
    SHMB_FORKED,         /* this handle belongs to the parent process */
    SHMB_CLOSED, /* nothing can be written: the buffer is being removed, or is a save */
    SHMB_LOCK_TIMEOUT,   /* a living process holds the mutex and does not let go */
    SHMB_INTERRUPTED,    /* a Python signal handler raised */
    SHMB_UNRECOVERABLE,  /* the mutex is beyond repair */
    SHMB_FENCED,         /* our registry entry was given to somebody else */
    SHMB_NOTHING,        /* nothing is committed */
    SHMB_NO_MEMORY,
    SHMB_NO_CLAIM,
    SHMB_OTHER_SETTINGS, /* priorities are on with another alpha or eps */
    SHMB_BAD_PRIORITY,   /* not a number, infinite, negative or too large: see shmb_refusal.bad_at */
    SHMB_LEFT,           /* this handle was closed */
    SHMB_BAD_INDEX,      /* not an element, or not a slot: see shmb_refusal.bad_at */
    SHMB_BAD_ALPHA,      /* with it the sum of the priorities that are there would not be finite */
    SHMB_REENTERED,      /* a signal handler came while this thread was in a call of the same handle */
    SHMB_NO_TICKETS,     /* all 2 ** 62 are used */
    SHMB_TOO_LARGE,      /* the records need more bytes than the ring has: see shmb_refusal.needed */
    SHMB_BAD_BATCH,      /* a record that is not within its batch: see shmb_refusal.bad_at */
    SHMB_NO_ROOM,        /* what was read does not fit into the caller's arena: see shmb_refusal.needed */
    SHMB_LIMITED,        /* the other side has to go on first: see shmb_refusal.why */
    SHMB_IN_QUEUE,       /* a queue is written at its end only */
    SHMB_CONSUMED,       /* so is a ring that is consumed */
    SHMB_CONSUMER_GONE,  /* it was removed */
    SHMB_NO_LEASE,       /* all of a consumer's are in use */
    SHMB_DAMAGED,        /* shared memory says what cannot be; slot shmb_refusal.bad_at, or SHMB_NO_SLOT */
    SHMB_UNLINKED,       /* the directory was removed: see presence.c */
    SHMB_LAPPED,         /* what was read was written over each time */
    SHMB_NO_WHOLES,      /* too few rows for whole next observations: see shmb_refusal.needed */
    SHMB_NO_RESERVATION, /* this one has ended: committed, given back, expired, or its holder was taken for dead */
    SHMB_OVER_RESERVED,  /* more rows or bytes than were reserved: see shmb_refusal.needed, shmb_refusal.bad_at */
    SHMB_ALL_RESERVED,   /* there is no place for another reservation */
    SHMB_TOO_OLD,        /* the consumer's version will be further on than items of this claim may be behind */
    SHMB_UNALLOCATED,    /* slots have no space in the files yet; slots that need it: see shmb_refusal.needed */
    SHMB_OWNER_DIED,     /* the mutex is ours, its last owner died holding it: section.c repairs, and tells nobody */
};

#define SHMB_NO_SLOT UINT64_MAX

/* What a call needs from the world above: giving up the interpreter lock before it sleeps. */
struct shmb_call {
    void (*may_block)(struct shmb_call *call);  /* idempotent */
    bool (*interrupted)(struct shmb_call *call); /* a signal handler raised */
    int64_t timeout_ns;                          /* for the mutex */
};

/* See gate.c. */
struct shmb_gate {
    _Atomic pid_t thread; /* who is inside; 0: nobody */
    _Atomic pid_t last;   /* who was inside last */
    bool in_call;         /* of the thread inside */
    _Atomic uint32_t waiting;
    pthread_mutex_t mutex; /* of those who wait */
    pthread_cond_t freed;
};

#define SHMB_FOR_EVER INT64_MAX

struct shmb_leaf {
    unsigned char *base;    /* NULL: it is stored once, see struct shmb_once */
    uint64_t element_bytes; /* in its column; 0 where it has none */
    uint64_t item_bytes;    /* of an element that is read */
};

/* A leaf of next observations that are stored once. */
struct shmb_once {
    unsigned leaf, root; /* their numbers: of next observations, and of observations */
    unsigned char *wholes;
    uint64_t bytes; /* of a row */
};

/* Records to be written: record k starts at data + starts[k] with room for its header. */
struct shmb_batch {
    const unsigned char *data;
    const int64_t *starts, *sizes;
    uint64_t count;
};

/* Where records that are read go: one behind the other. */
struct shmb_arena {
    unsigned char *data;
    uint64_t room, used;
    int64_t *starts, *sizes;
    uint64_t *positions; /* scratch: where each is in the byte ring */
};

/* See sharing.c. */
struct shmb_plan;

/* What a write brings, where observations are stored once. */
struct shmb_rows {
    const unsigned char *const *from; /* one address a leaf, of the first row; NULL: not known yet */
    const uint64_t *sources;          /* of each row; NULL: by its stream */
};

/* See presence.c. */
struct shmb_presence {
    int folder;       /* descriptor of the directory */
    const char *name; /* of the control file in it; NULL: there are no files */
    uint64_t device, inode; /* of that file */
    _Atomic int64_t looked_ns; /* monotonic; when it was seen last */
};

struct shmb_ring {
    struct shmb_runtime *runtime;
    int mutex_kind; /* as shmb_mutex_kind says */
    struct shmb_entry *entries, *me;
    uint64_t incarnation; /* ours; me->incarnation differs if somebody took us for dead */
    uint64_t capacity, lanes, elements;
    _Atomic uint64_t *words;
    uint32_t *checksums;
    uint64_t *sources;
    double *raw;
    struct shmb_tree tree;
    unsigned n_leaves;
    struct shmb_leaf *leaves;
    uint64_t row_bytes;  /* of a slot, all leaves */
    unsigned char *bytes; /* the byte ring, mapped twice in a row; NULL: items are rows of leaves */
    uint64_t max_bytes;
    struct shmb_extent *extents;
    struct shmb_plan *plan; /* NULL: every leaf has its column */
    _Atomic uint64_t *nexts;
    _Atomic uint32_t *holders;
    uint64_t wholes;
    struct shmb_ledger *ledger; /* NULL: nobody consumes, nobody reserves */
    struct shmb_reservation *reservations;
    struct shmb_parts parts;    /* where the rest of it is */
    struct shmb_once *once;
    unsigned n_once;
    bool checksum;
    uint32_t salt; /* of the schema; part of every checksum */
    uint64_t life; /* of the process that made this handle: see shmb_life */
    _Atomic uint32_t inside; /* threads that hold the mutex or wait for it */
    _Atomic uint32_t left;   /* the entry is given back: nobody may take the mutex through this handle any more */

    struct shmb_presence presence;

    /* One claim at a time; everything below belongs to the thread that is inside the gate. */
    struct shmb_gate gate;
    bool claimed;
    bool claim_passes; /* it does not count, whatever the ratio */
    uint64_t claim_first, claim_count; /* tickets of the rows, in order, for a ring write */
    uint64_t claim_slot;               /* of the first of them */
    uint64_t claim_rows;               /* rows to write: slots, or claim_count */
    uint64_t claim_slots_taken;        /* fewer than rows, where a slot was named twice */
    uint64_t claim_written;            /* elements that write_count grows by */
    bool claim_checked;                /* its checksums are there already */
    enum shmb_claim_kind claim_kind;
    int64_t *claim_slots; /* placed and in-place writes */
    struct shmb_batch claim_batch; /* of a ring with records, as long as the call is under way */
    uint64_t claim_bytes;          /* of all its records */
    uint64_t claim_skipped;        /* first row of the batch that is written */
    int64_t *claim_from;           /* placed and in-place writes: row of the batch */
    double *masses;       /* scratch, claim_rows * lanes */
    uint64_t *touched;
    uint64_t scratch_rows;
    uint64_t readers; /* threads that copy out of a queue; under the mutex */

    struct shmb_reservation *claim_held;   /* what the open claim is made from; NULL: it was reserved by nobody */
    uint64_t claim_place;                  /* where it is: of its first element among all, as write_count counts them */
    uint32_t next_place;                   /* where to look for a free reservation */
};

enum shmb_reason { SHMB_SLOT_IS_TAKEN = 0, SHMB_AHEAD = 1, SHMB_BEHIND, SHMB_FEW, SHMB_FULL, SHMB_SHORT, SHMB_OVER_QUOTA, SHMB_VERSION,
                   SHMB_HELD, SHMB_SCARCE };

/* Why the last call of this thread that was refused was so. Not of the handle, which other threads use meanwhile. */
struct shmb_refusal {
    enum shmb_reason why; /* of SHMB_LIMITED: too many inserts, or samples; too few items; a queue full, or short of them */
    uint64_t bad_at; /* position of the argument */
    uint64_t needed; /* bytes, where there were too few; of SHMB_LIMITED the elements that are to go, or to be there; of
                      * SHMB_UNALLOCATED the slots that need space, from the first on */
    struct {
        uint32_t entry;
        uint64_t incarnation, turn;
        uint32_t progress; /* futex value seen when blocked */
        bool by_turn;      /* we wait behind a turn, not for a slot */
    } blocker;
};
extern _Thread_local struct shmb_refusal shmb_refusal;

/* What all items are together, in one locked section. */
struct shmb_totals {
    double mass;         /* sum of all masses; 0: a draw is uniform, as it is asked for, or no masses are kept, or all are 0 */
    double least;        /* the smallest positive mass; 0 where the sum is */
    double max_priority; /* the largest raw priority ever given; negative: none yet */
    uint64_t length;     /* elements that hold an item */
};
/* Of the section in which the first rows of this thread's last draw were drawn; length 0: it has not drawn yet. */
extern _Thread_local struct shmb_totals shmb_drawn_from;

/* Most rings have one lane, and a division is half of what else there is to do for an element. */
static inline uint64_t shmb_slot_of(const struct shmb_ring *ring, uint64_t element) {
    return ring->lanes == 1 ? element : element / ring->lanes;
}

/* Slots from here on are as the file of zeros left them: a claim moves the head first, and marks then. So what goes over the
 * whole ring costs what was written, and makes no pages where nothing was. */
static inline uint64_t shmb_reached(const struct shmb_ring *ring) {
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    return head < ring->capacity ? head : ring->capacity;
}

static inline uint64_t shmb_ticket_in_lap(uint64_t head, uint64_t slot, uint64_t capacity) {
    return head + (slot + capacity - head % capacity) % capacity;
}

/* Whether the registry entry is ours still. */
static inline bool shmb_is_ours(const struct shmb_ring *ring) {
    return atomic_load_explicit(&ring->me->incarnation, memory_order_relaxed) == ring->incarnation &&
           atomic_load_explicit(&ring->me->state, memory_order_relaxed) == SHMB_LIVE;
}

static inline bool shmb_is_limited(const struct shmb_ring *ring) {
    return __builtin_expect(atomic_load_explicit(&ring->runtime->limiter_version, memory_order_relaxed) != 0, 0);
}

/* The second look: with the same word, a copy that was made before it is kept. */
static inline bool shmb_still_holds(const struct shmb_ring *ring, uint64_t slot, uint64_t word) {
    return atomic_load_explicit(&ring->words[slot], memory_order_relaxed) == word;
}

/* Slots of the open reservations, as far as a ring can have so many. */
static inline uint64_t shmb_reserved(const struct shmb_ring *ring) {
    uint64_t reserved = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed);
    return reserved < ring->capacity ? reserved : ring->capacity;
}

/* Whether slots below `end` have no space in the files yet. An `end` past the last slot
 * goes around, so that all of them need it. */
static inline bool shmb_is_unallocated(const struct shmb_ring *ring, uint64_t end) {
    uint64_t allocated = atomic_load_explicit(&ring->runtime->allocated, SYNC_ALLOCATE_ACQUIRE);
    if (__builtin_expect(end <= allocated || ring->capacity <= allocated, 1)) return false;
    shmb_refusal.needed = end < ring->capacity ? end : ring->capacity;
    return true;
}

/* From here on file by file: each calls only those above it (tests/native/test_house.py). */

/* process.c */
uint64_t shmb_life(void); /* of this process; another value after fork */
void shmb_life_begin(void);
int64_t shmb_now_ns(void);
int64_t shmb_clock_ns(clockid_t clock);
uint64_t shmb_boot_ns(void);
void shmb_set_boot_offset(int64_t offset_ns);
void shmb_touch(struct shmb_runtime *runtime);

/* weights.c: see weights.h */

/* pool.c: threads that take their share of a large batch: see pool.h */

/* presence.c */
bool shmb_is_removed(struct shmb_ring *ring, int64_t now_ns);

/* gate.c: who of this process's threads may claim, fill and commit through a handle */
void shmb_gate_init(struct shmb_gate *gate);
int shmb_gate_enter(struct shmb_ring *ring, struct shmb_call *call, int64_t timeout_ns);
void shmb_gate_pause(struct shmb_ring *ring); /* the call ends, the claim stays open */
int shmb_gate_resume(struct shmb_ring *ring); /* of the thread that paused */
void shmb_gate_leave(struct shmb_ring *ring);

/* mutex.c */
int shmb_mutex_format(struct shmb_runtime *runtime);
int shmb_mutex_kind(void); /* of one that was just formatted */
uint32_t shmb_mutex_owner(const struct shmb_runtime *runtime);
int shmb_mutex_acquire(struct shmb_runtime *runtime, int kind, struct shmb_call *call);
int shmb_mutex_mended(struct shmb_runtime *runtime);

/* slots.c */
bool shmb_claim_covers(const struct shmb_ring *ring, uint64_t word, uint32_t *entry);
uint64_t shmb_place_of(const struct shmb_ring *ring, uint64_t ticket);
/* Where an item is that was there before `since`: see slots.c. */
static inline uint64_t shmb_place_since(uint64_t ticket, uint64_t since, uint64_t capacity) {
    return ticket < since ? since - 1 - (since - 1 - ticket) % capacity : ticket;
}

/* masses.c: under the mutex, unless a priority is only looked at */
double shmb_mass(const struct shmb_runtime *runtime, double raw);
void shmb_masses(const struct shmb_runtime *runtime, const double *raw, double *masses, uint64_t count);
double shmb_largest_mass(const struct shmb_ring *ring);
double shmb_default_priority(const struct shmb_runtime *runtime);
bool shmb_draws_by_mass(const struct shmb_ring *ring, bool prioritized);
struct shmb_totals shmb_totals_now(const struct shmb_ring *ring, bool prioritized);
uint64_t shmb_greatest_bits(const double *numbers, uint64_t count);
int shmb_priorities_in_order(struct shmb_ring *ring, const double *priorities, uint64_t count);
void shmb_ring_leaves(struct shmb_ring *ring); /* every leaf from words and raw priorities, and `length` */
void shmb_ring_parents(struct shmb_ring *ring); /* every sum and minimum from the leaves */

/* limiter.c: under the mutex, but for the copy and what is asked of it */
struct shmb_limiter *shmb_limiter_of(struct shmb_runtime *runtime);
struct shmb_setting shmb_copy_of_setting(const struct shmb_runtime *runtime);
const struct shmb_ages *shmb_ages_of(const struct shmb_runtime *runtime);
bool shmb_is_too_old(const struct shmb_ring *ring, uint64_t version, uint64_t place);
bool shmb_counts_versions(const struct shmb_ring *ring);
void shmb_begin_versions(struct shmb_runtime *runtime);
void shmb_note_turn(struct shmb_ring *ring, uint64_t place, bool only_later);
uint32_t shmb_limits(struct shmb_runtime *runtime); /* in force: of enum shmb_limit_kind */
void shmb_promise(struct shmb_ring *ring, uint64_t elements);
void shmb_settle(struct shmb_ring *ring, struct shmb_entry *entry);
void shmb_wait_no_more(struct shmb_ring *ring, struct shmb_entry *entry, uint32_t sides);
void shmb_count_limited(struct shmb_ring *ring);
void shmb_note_base(struct shmb_ring *ring);
void shmb_set_base(struct shmb_ring *ring);
void shmb_restart_limiter(struct shmb_ring *ring, uint64_t write_count, uint64_t elements);
void shmb_forget_insert(struct shmb_runtime *runtime);

/* The element that a queue hands out next, and how often it has done so. */
struct shmb_place {
    uint64_t element, times;
};

/* queue.c */
struct shmb_place shmb_queue_next(const struct shmb_ring *ring, const struct shmb_limiter *limiter);
struct shmb_place shmb_queue_front(const struct shmb_ring *ring, struct shmb_limiter *limiter);
uint64_t shmb_queue_oldest(const struct shmb_ring *ring, const struct shmb_limiter *limiter, struct shmb_place *next,
                           uint64_t count, uint64_t *first, int64_t *index, int64_t *tickets);
uint64_t shmb_left_in_queue(const struct shmb_ring *ring, const struct shmb_limiter *limiter);
uint64_t shmb_queued(const struct shmb_ring *ring);
void shmb_pass_the_forgotten(struct shmb_ring *ring);

/* ledger.c: who was given which items, under the mutex: see ledger.h */

/* sharing.c: observations that are stored once. Under the mutex, but for what only looks, and for what fills */
bool shmb_sharing_begin(struct shmb_ring *ring);
void shmb_sharing_end(struct shmb_ring *ring);
bool shmb_plan_rows(struct shmb_ring *ring, const struct shmb_rows *rows, uint64_t count, const uint32_t *streams); /* no lock */
bool shmb_plan_slots(struct shmb_ring *ring, uint64_t count, bool keeps); /* no lock */
int shmb_claim_wholes(struct shmb_ring *ring, uint64_t first);
int shmb_unlink_slots(struct shmb_ring *ring);
void shmb_note_nexts(struct shmb_ring *ring);
void shmb_join_back(struct shmb_ring *ring);
void shmb_join(struct shmb_ring *ring);
uint64_t shmb_mend_links(struct shmb_ring *ring, uint64_t head, bool drops);
bool shmb_link_in_order(const struct shmb_ring *ring, uint64_t slot, uint64_t head);
/* Whatever is there, it lies in our memory: what is damaged is found by others. */
static inline const unsigned char *shmb_next_at(const struct shmb_ring *ring, unsigned which, uint64_t slot, uint64_t next) {
    const struct shmb_once *once = &ring->once[which];
    uint64_t ahead = SHMB_AHEAD_OF(next), there = slot + ahead;
    if (next & SHMB_WHOLE) return once->wholes + (ahead < ring->wholes ? ahead : 0) * once->bytes;
    if (there >= ring->capacity) there -= ring->capacity;
    return ring->leaves[once->root].base + (there < ring->capacity ? there : slot) * once->bytes;
}
void shmb_copy_next(const struct shmb_ring *ring, uint64_t slot, uint64_t next, unsigned char *const *out, uint64_t row);
void shmb_fill_nexts(struct shmb_ring *ring, const unsigned char *const *from, uint64_t skip_rows, uint64_t first, uint64_t rows);
static inline uint64_t shmb_next_of(const struct shmb_ring *ring, uint64_t slot) {
    return ring->plan ? atomic_load_explicit(&ring->nexts[slot], SYNC_SLOT_NEXT_ACQUIRE) : 0;
}
/* The second look, after that at the word's copy: nothing of it has moved meanwhile. */
static inline bool shmb_next_holds(const struct shmb_ring *ring, uint64_t slot, uint64_t next) {
    return !ring->plan || atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed) == next;
}

/* reservations.c: room that is reserved; under the mutex: see reservations.h */

/* repair.c: claims of the dead. Under the mutex */
void shmb_finish_claim(struct shmb_ring *ring, struct shmb_entry *entry);
void shmb_repair(struct shmb_ring *ring);

/* section.c */
int shmb_lock(struct shmb_ring *ring, struct shmb_call *call);
void shmb_unlock(struct shmb_ring *ring);
bool shmb_lock_no_more(struct shmb_ring *ring, struct shmb_call *call);

/* turns.c: under the mutex, unless they take a call or sleep */
uint32_t shmb_give_back_turn(struct shmb_ring *ring); /* whose turn is next: to be woken; SHMB_ENTRIES: nobody's */
bool shmb_waits_behind_a_turn(struct shmb_ring *ring);
bool shmb_is_being_written(struct shmb_ring *ring, uint64_t slot);
bool shmb_others_are_writing(struct shmb_ring *ring);
int shmb_give_up_turn(struct shmb_ring *ring, struct shmb_call *call);
int shmb_forfeit_turn(struct shmb_ring *ring, struct shmb_call *call, uint32_t entry, uint64_t turn);
void shmb_wake_waiters(struct shmb_runtime *runtime);
void shmb_wake_behind(struct shmb_ring *ring);
void shmb_wake_in_turn(struct shmb_ring *ring, uint32_t entry);
int shmb_wait_progress(struct shmb_ring *ring, uint32_t seen, int64_t timeout_ns);

/* consumer_version.c */
enum shmb_version_change { SHMB_VERSION_SET = 0, SHMB_VERSION_ADD = 1, SHMB_VERSION_AT_LEAST = 2 };
uint64_t shmb_consumer_version(struct shmb_runtime *runtime, enum shmb_version_change change, uint64_t value);

/* records.c: the byte ring */
int shmb_batch_in_order(struct shmb_ring *ring, const struct shmb_batch *batch, uint64_t bytes);
bool shmb_bytes_are_being_written(struct shmb_ring *ring);
bool shmb_evicts_from(const struct shmb_ring *ring, uint64_t place, uint64_t since, uint64_t bytes);
void shmb_claim_bytes(struct shmb_ring *ring);
void shmb_fill_records(struct shmb_ring *ring);
bool shmb_extent_in_order(const struct shmb_ring *ring, struct shmb_extent extent);
bool shmb_lies_in_use(const struct shmb_ring *ring, struct shmb_extent extent);
static inline unsigned char *shmb_record_at(const struct shmb_ring *ring, uint64_t position) {
    return ring->bytes + position % ring->max_bytes;
}
bool shmb_span_in_order(const struct shmb_ring *ring);
uint64_t shmb_oldest_ticket(const struct shmb_ring *ring);
uint64_t shmb_relink(struct shmb_ring *ring, const int64_t *slots, uint64_t count);

/* flow.c: flow control: see flow.h */

/* consume.c: what a consumer's clients ask for: see ledger.h */

/* fill.c */
void shmb_fill(struct shmb_ring *ring, const unsigned char *const *sources, uint64_t skip_rows);
void shmb_fill_priorities(struct shmb_ring *ring, const double *priorities, uint64_t skip_rows);
void shmb_fill_checksums(struct shmb_ring *ring);
void shmb_seal(struct shmb_ring *ring, uint64_t first, uint64_t count);
uint32_t shmb_row_checksum(const struct shmb_ring *ring, uint64_t slot, uint64_t ticket);

/* commit.c */
void shmb_claim_parents(struct shmb_ring *ring); /* under the mutex, as is the next */
void shmb_abort_claim(struct shmb_ring *ring);
int shmb_commit(struct shmb_ring *ring, struct shmb_call *call, bool given);
int shmb_abort(struct shmb_ring *ring, struct shmb_call *call);

/* claim.c */
enum { SHMB_KEEPS = 2 }; /* in place, and no observation changes, neither this one nor the next */
int shmb_claim_ring(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_batch *batch,
                    const uint32_t *streams, uint64_t *first);
int shmb_claim_rows(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_rows *rows,
                    const uint32_t *streams, uint64_t *first);
int shmb_claim_slots(struct shmb_ring *ring, struct shmb_call *call, const int64_t *slots, uint64_t count,
                     int in_place, const int64_t *tickets, unsigned char *kept, const struct shmb_batch *batch,
                     uint64_t *taken);
int shmb_empty(struct shmb_ring *ring, struct shmb_call *call, bool keep_write_count);
int shmb_restore(struct shmb_ring *ring, struct shmb_call *call, uint64_t wanted, uint64_t write_count,
                 double max_priority);

/* reserve.c: the calls of who reserves: see reserve.h */

/* reap.c */
int shmb_leave(struct shmb_ring *ring, struct shmb_call *call);
int shmb_reap(struct shmb_ring *ring, struct shmb_call *call, uint32_t entry, uint64_t incarnation, bool *freed);

/* priorities.c */
int shmb_indices_in_order(struct shmb_ring *ring, const int64_t *index, uint64_t count, uint64_t bound);
int shmb_update(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, const int64_t *tickets,
                const double *priorities, uint64_t count, uint64_t *applied);
int shmb_set_alpha(struct shmb_ring *ring, struct shmb_call *call, double alpha, double eps, bool bind);
int shmb_read_totals(struct shmb_ring *ring, struct shmb_call *call, struct shmb_totals *out);
int shmb_raise_max_priority(struct shmb_ring *ring, struct shmb_call *call, double value);

/* check.c: see check.h */

/* sample.c: draw, copy, validate */
int shmb_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t key,
                unsigned char *const *out, int64_t *index, int64_t *tickets, float *weights, double beta,
                bool prioritized, uint64_t *redrawn, struct shmb_arena *arena);
int shmb_read(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
              unsigned char *const *out, int64_t *tickets, uint64_t *missing);
int shmb_read_records(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
                      struct shmb_arena *arena, int64_t *tickets);

/* The counters of one moment. */
struct shmb_moment {
    uint64_t byte_tail, byte_head;
    uint64_t head, write_count;
    double max_priority;
};

/* stacks.c: samples of consecutive steps, without the mutex: see stacks.h */

/* snapshot.c */
uint64_t shmb_copy_slots(struct shmb_ring *ring, uint64_t first, uint64_t count, unsigned char *const *out,
                         int64_t *tickets);
int shmb_copy_moment(struct shmb_ring *ring, struct shmb_call *call, unsigned char *const *out, int64_t *tickets,
                     uint64_t *sources, double *raw, struct shmb_moment *moment);
int shmb_span(struct shmb_ring *ring, struct shmb_call *call, uint64_t span[3]);
int shmb_records_moment(struct shmb_ring *ring, struct shmb_call *call, uint64_t from, unsigned char *out, uint64_t room,
                        int64_t *tickets, struct shmb_extent *extents, uint64_t *sources, double *raw,
                        struct shmb_moment *moment);

#endif
