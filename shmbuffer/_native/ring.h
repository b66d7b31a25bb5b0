/* One process's handle on one ring: where the shared bytes are mapped here, and the calls that move items.
 *
 * The protocol (who may touch a slot, when) is told in memory/slots.py and docs/design.md. One robust mutex
 * guards claim, commit and the tree; the payload is copied with no lock held, and every row that is read is
 * compared with its slot word afterwards. No function here calls Python: what has to give up the interpreter
 * lock while it waits goes through `struct shmb_call`.
 */
#ifndef SHMB_RING_H
#define SHMB_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#include "crashpoint.h"
#include "layout.h"

/* Around a copy of bytes that a writer may be changing meanwhile: kept where `still_holds`, or a ticket, says that
 * nobody was. In terms of C it is a data race; a build for ThreadSanitizer is told here what not to look at. */
#ifndef SHMB_OPTIMISTIC
#define SHMB_OPTIMISTIC(copy) copy
#endif

enum shmb_status {
    SHMB_OK = 0,
    SHMB_BLOCKED,        /* a slot is being written, or somebody waits in front: see shmb_refusal.blocker */
    SHMB_FORKED,         /* this handle belongs to the parent process */
    SHMB_CLOSING_STATUS, /* the buffer is being removed */
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
    SHMB_DAMAGED,        /* shared memory says what cannot be; slot shmb_refusal.bad_at, or SHMB_NO_SLOT */
    SHMB_UNLINKED,       /* the directory was removed: see presence.c */
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
    pthread_mutex_t mutex; /* held for some instructions, never while waiting */
    pthread_cond_t freed;
    pid_t thread; /* who is inside; 0: nobody */
    pid_t last;   /* who was inside last */
    bool in_call;
};

#define SHMB_FOR_EVER INT64_MAX

struct shmb_tree {
    unsigned depth;
    uint64_t nodes[SHMB_MAX_DEPTH];
    double *mass; /* level 0 */
    double *sum[SHMB_MAX_DEPTH], *min[SHMB_MAX_DEPTH];
};

struct shmb_leaf {
    unsigned char *base;
    uint64_t element_bytes;
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
    unsigned char *bytes; /* the byte ring, mapped twice in a row; NULL: items are rows of leaves */
    uint64_t max_bytes;
    struct shmb_extent *extents;
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
};

enum shmb_reason { SHMB_SLOT_IS_TAKEN = 0, SHMB_AHEAD = 1, SHMB_BEHIND, SHMB_FEW, SHMB_FULL, SHMB_SHORT };

/* Why the last call of this thread that was refused was so. Not of the handle, which other threads use meanwhile. */
struct shmb_refusal {
    enum shmb_reason why; /* of SHMB_LIMITED: too many inserts, or samples; too few items; a queue full, or short of them */
    uint64_t bad_at; /* position of the argument */
    uint64_t needed; /* bytes, where there were too few */
    struct {
        uint32_t entry;
        uint64_t incarnation, turn;
        uint32_t progress; /* futex value seen when blocked */
        bool by_turn;      /* we wait behind a turn, not for a slot */
    } blocker;
};
extern _Thread_local struct shmb_refusal shmb_refusal;

/* Most rings have one lane, and a division is half of what else there is to do for an element. */
static inline uint64_t shmb_slot_of(const struct shmb_ring *ring, uint64_t element) {
    return ring->lanes == 1 ? element : element / ring->lanes;
}

uint64_t shmb_life(void); /* of this process; another value after fork */
void shmb_life_begin(void);
int64_t shmb_now_ns(void);
int64_t shmb_clock_ns(clockid_t clock);
void shmb_touch(struct shmb_runtime *runtime);

/* gate.c: who of this process's threads may claim, fill and commit through a handle */
void shmb_gate_init(struct shmb_gate *gate);
int shmb_gate_enter(struct shmb_ring *ring, struct shmb_call *call, int64_t timeout_ns);
void shmb_gate_pause(struct shmb_ring *ring); /* the call ends, the claim stays open */
int shmb_gate_resume(struct shmb_ring *ring); /* of the thread that paused */
void shmb_gate_leave(struct shmb_ring *ring);

/* presence.c */
bool shmb_is_removed(struct shmb_ring *ring, int64_t now_ns);

/* mutex.c */
int shmb_lock(struct shmb_ring *ring, struct shmb_call *call);
void shmb_unlock(struct shmb_ring *ring);
bool shmb_lock_no_more(struct shmb_ring *ring, struct shmb_call *call);
int shmb_mutex_format(struct shmb_runtime *runtime);
int shmb_mutex_kind(void); /* of one that was just formatted */
uint32_t shmb_mutex_owner(const struct shmb_runtime *runtime);
void shmb_wake_waiters(struct shmb_runtime *runtime);
int shmb_wait_progress(struct shmb_runtime *runtime, uint32_t seen, int64_t timeout_ns);

/* What a check finds; all zero if the ring is whole. */
struct shmb_check {
    uint64_t wrong_nodes;  /* not what their children say */
    uint64_t wrong_leaves; /* mass without an item, or not the mass of the raw priority */
    uint64_t wrong_length; /* |length - number of COMMITTED slots| */
    uint64_t wrong_words;  /* ticket not of this slot, or from the future */
    uint64_t wrong_extents; /* a record that is not between tail and head of the byte ring */
    uint64_t orphans;      /* WRITING, and no claim covers it */
};

/* The counters of one moment. */
struct shmb_moment {
    uint64_t byte_tail, byte_head;
    uint64_t head, write_count;
    double max_priority;
};

/* priorities.c: the tree. All under the mutex. */
void shmb_tree_map(struct shmb_tree *tree, const struct shmb_sections *sections, unsigned char *slots);
double shmb_mass(const struct shmb_runtime *runtime, double raw);
double shmb_largest_mass(const struct shmb_ring *ring);
double shmb_default_priority(const struct shmb_runtime *runtime);
void shmb_tree_range(struct shmb_tree *tree, uint64_t first, uint64_t count); /* parents of leaves [first, first+count) */
void shmb_tree_touched(struct shmb_tree *tree, uint64_t *elements, uint64_t count); /* consumes its argument */
void shmb_tree_parents(struct shmb_tree *tree);                                     /* all of them */
void shmb_ring_leaves(struct shmb_ring *ring); /* every leaf from words and raw priorities, and `length` */
static inline double shmb_tree_total(const struct shmb_tree *tree) { return tree->sum[tree->depth][0]; }
static inline double shmb_tree_min(const struct shmb_tree *tree) { return tree->min[tree->depth][0]; }
int shmb_update(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, const int64_t *tickets,
                const double *priorities, uint64_t count, uint64_t *applied);
int shmb_priorities_in_order(struct shmb_ring *ring, const double *priorities, uint64_t count);
int shmb_indices_in_order(struct shmb_ring *ring, const int64_t *index, uint64_t count, uint64_t bound);
int shmb_check(struct shmb_ring *ring, struct shmb_call *call, struct shmb_check *found);
int shmb_set_alpha(struct shmb_ring *ring, struct shmb_call *call, double alpha, double eps, bool bind);

/* write.c: claim, fill, commit, abort */
int shmb_claim_ring(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_batch *batch,
                    uint64_t *first);
int shmb_claim_slots(struct shmb_ring *ring, struct shmb_call *call, const int64_t *slots, uint64_t count,
                     bool in_place, const int64_t *tickets, unsigned char *kept, const struct shmb_batch *batch,
                     uint64_t *taken);
void shmb_fill(struct shmb_ring *ring, const unsigned char *const *sources, uint64_t skip_rows);
void shmb_fill_priorities(struct shmb_ring *ring, const double *priorities, uint64_t skip_rows);
int shmb_commit(struct shmb_ring *ring, struct shmb_call *call, bool given);
int shmb_abort(struct shmb_ring *ring, struct shmb_call *call);
int shmb_leave(struct shmb_ring *ring, struct shmb_call *call);
int shmb_give_up_turn(struct shmb_ring *ring, struct shmb_call *call);
int shmb_forfeit_turn(struct shmb_ring *ring, struct shmb_call *call, uint32_t entry, uint64_t turn);
int shmb_empty(struct shmb_ring *ring, struct shmb_call *call, bool keep_write_count);
int shmb_restore(struct shmb_ring *ring, struct shmb_call *call, uint64_t slot, uint64_t write_count,
                 double max_priority);
bool shmb_is_being_written(struct shmb_ring *ring, uint64_t slot);
bool shmb_claim_covers(const struct shmb_ring *ring, uint64_t word, uint32_t *entry);
uint64_t shmb_slot_of_row(const struct shmb_ring *ring, uint64_t row);
uint64_t shmb_ticket_of_row(const struct shmb_ring *ring, uint64_t row);
uint32_t shmb_row_checksum(const struct shmb_ring *ring, uint64_t slot, uint64_t ticket);

/* limiter.c: flow control. Under the mutex, unless they take a call */
extern _Thread_local bool shmb_let_pass;
uint32_t shmb_limits(struct shmb_runtime *runtime); /* what there is: SHMB_RATIO, SHMB_QUEUE, SHMB_MIN_SIZE */
int shmb_admit_insert(struct shmb_ring *ring, uint64_t rows, uint64_t elements);
void shmb_promise(struct shmb_ring *ring, uint64_t elements);
void shmb_settle(struct shmb_ring *ring, struct shmb_entry *entry);
void shmb_wait_no_more(struct shmb_ring *ring, struct shmb_entry *entry, uint32_t sides);
void shmb_count_limited(struct shmb_ring *ring);
void shmb_note_base(struct shmb_ring *ring);
void shmb_set_base(struct shmb_ring *ring);
void shmb_start_anew(struct shmb_ring *ring, uint64_t write_count, uint64_t elements);
void shmb_pass_the_forgotten(struct shmb_ring *ring);
uint64_t shmb_place_of(const struct shmb_ring *ring, uint64_t ticket);
int shmb_admit_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t min_size, bool chosen,
                      uint64_t *counted);
int shmb_take_back(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint32_t version);
int shmb_take(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, int64_t *index, int64_t *tickets);
int shmb_release(struct shmb_ring *ring, struct shmb_call *call);
int shmb_waits_in_queue(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_entry *entry, uint32_t side,
                        enum shmb_reason *why);
uint64_t shmb_queued(const struct shmb_ring *ring);
int shmb_limit(struct shmb_ring *ring, struct shmb_call *call, const struct shmb_limiter *wanted);
int shmb_give_up_waiting(struct shmb_ring *ring, struct shmb_call *call, uint32_t sides);

/* records.c: the byte ring */
int shmb_batch_in_order(struct shmb_ring *ring, const struct shmb_batch *batch, uint64_t bytes, bool apart);
bool shmb_bytes_are_being_written(struct shmb_ring *ring);
bool shmb_evicts_from(const struct shmb_ring *ring, uint64_t place, uint64_t bytes);
void shmb_take_bytes(struct shmb_ring *ring);
void shmb_fill_records(struct shmb_ring *ring);
bool shmb_extent_in_order(const struct shmb_ring *ring, struct shmb_extent extent);
bool shmb_lies_in_use(const struct shmb_ring *ring, struct shmb_extent extent);
static inline unsigned char *shmb_record_at(const struct shmb_ring *ring, uint64_t position) {
    return ring->bytes + position % ring->max_bytes;
}
bool shmb_span_in_order(const struct shmb_ring *ring);
uint64_t shmb_oldest_ticket(const struct shmb_ring *ring);
int shmb_span(struct shmb_ring *ring, struct shmb_call *call, uint64_t span[3]);
int shmb_records_moment(struct shmb_ring *ring, struct shmb_call *call, uint64_t from, unsigned char *out, uint64_t room,
                        int64_t *tickets, struct shmb_extent *extents, uint64_t *sources, double *raw,
                        struct shmb_moment *moment);
uint64_t shmb_relink(struct shmb_ring *ring, const int64_t *slots, uint64_t count);

/* reap.c: claims of the dead */
void shmb_finish_claim(struct shmb_ring *ring, struct shmb_entry *entry);
void shmb_repair(struct shmb_ring *ring);
int shmb_reap(struct shmb_ring *ring, struct shmb_call *call, uint32_t entry, uint64_t incarnation, bool *freed);

/* sample.c: draw, copy, validate */
int shmb_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t key,
                unsigned char *const *out, int64_t *index, int64_t *tickets, float *weights, double beta,
                bool prioritized, uint64_t *redrawn, struct shmb_arena *arena);
int shmb_read(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
              unsigned char *const *out, int64_t *tickets, uint64_t *missing);
int shmb_read_records(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
                      struct shmb_arena *arena, int64_t *tickets);
uint64_t shmb_copy_slots(struct shmb_ring *ring, uint64_t first, uint64_t count, unsigned char *const *out,
                         int64_t *tickets);
void shmb_note_moment(const struct shmb_ring *ring, uint64_t *sources, double *raw, struct shmb_moment *moment);
int shmb_copy_moment(struct shmb_ring *ring, struct shmb_call *call, unsigned char *const *out, int64_t *tickets,
                     uint64_t *sources, double *raw, struct shmb_moment *moment);

#endif
