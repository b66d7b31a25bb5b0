/* One process's handle of one ring: where it maps the shared bytes, and the calls that move items.
 *
 * memory/format/slots.py and docs/design/ describe the protocol: which process may access a slot, and when. One
 * robust mutex guards claim, commit and the tree. Payloads are copied without a lock, and readers compare each row
 * with its slot word after the copy. No function in this folder calls Python. The callbacks in `struct shmb_call`
 * release the interpreter lock before a wait. */
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

/* Encloses a copy of bytes that a writer may be changing. The copy is used only if `shmb_still_holds` or a ticket
 * shows that no writer changed them. In terms of C this is a data race, so a build for ThreadSanitizer redefines the
 * macro. */
#ifndef SHMB_OPTIMISTIC
#define SHMB_OPTIMISTIC(copy) copy
#endif

enum shmb_status {
    SHMB_OK = 0,
    /* a slot is being written, or another client is ahead: see shmb_refusal.blocker */
    SHMB_BLOCKED,
    SHMB_FORKED,         /* this handle belongs to the parent process */
    SHMB_CLOSED, /* writes are impossible: the buffer is being removed, or is a save */
    SHMB_LOCK_TIMEOUT,   /* a living process holds the mutex for too long */
    SHMB_INTERRUPTED,    /* a Python signal handler raised */
    SHMB_UNRECOVERABLE,  /* the mutex cannot be repaired */
    SHMB_FENCED,         /* our registry entry was given to another client */
    SHMB_NOTHING,        /* no item is committed */
    SHMB_NO_MEMORY,
    SHMB_NO_CLAIM,
    SHMB_OTHER_SETTINGS, /* prioritized sampling is on with another alpha or eps */
    /* not a number, infinite, negative or too large: see shmb_refusal.bad_at */
    SHMB_BAD_PRIORITY,
    SHMB_LEFT,           /* this handle was closed */
    SHMB_BAD_INDEX,      /* not an element or not a slot: see shmb_refusal.bad_at */
    SHMB_BAD_ALPHA,      /* the sum of the present priorities would not be finite with it */
    /* a signal handler called a handle that this thread was already using */
    SHMB_REENTERED,
    SHMB_NO_TICKETS,     /* all 2 ** 62 tickets are used */
    /* the records need more bytes than the ring has: see shmb_refusal.needed */
    SHMB_TOO_LARGE,
    SHMB_BAD_BATCH,      /* a record is not within its batch: see shmb_refusal.bad_at */
    /* the items do not fit into the caller's arena: see shmb_refusal.needed */
    SHMB_NO_ROOM,
    SHMB_LIMITED,        /* the other side must act first: see shmb_refusal.why */
    SHMB_IN_QUEUE,       /* a queue can be written only at its end */
    SHMB_CONSUMED,       /* a ring with consumers can be written only at its end */
    SHMB_CONSUMER_GONE,  /* the consumer was removed */
    SHMB_NO_LEASE,       /* all leases of the consumer are in use */
    /* shared memory is inconsistent at slot shmb_refusal.bad_at, or SHMB_NO_SLOT */
    SHMB_DAMAGED,
    SHMB_UNLINKED,       /* the directory was removed: see presence.c */
    SHMB_LAPPED,         /* the items were overwritten during every attempt to read them */
    /* too few own rows for next observations: see shmb_refusal.needed */
    SHMB_NO_OWN_ROWS,
    /* the reservation has ended: committed, cancelled, expired, or its holder was considered dead */
    SHMB_NO_RESERVATION,
    /* more rows or bytes than reserved: see shmb_refusal.needed, shmb_refusal.bad_at */
    SHMB_OVER_RESERVED,
    SHMB_ALL_RESERVED,   /* the table of reservations is full */
    /* the consumer's version will be too far ahead of items of this claim */
    SHMB_TOO_OLD,
    /* slots have no space in the files yet: see shmb_refusal.needed */
    SHMB_UNALLOCATED,
    /* internal: the mutex is ours, but its last owner died while holding it; section.c repairs the ring */
    SHMB_OWNER_DIED,
};

#define SHMB_NO_SLOT UINT64_MAX

/* Callbacks of a call: they release the interpreter lock before a wait, and check for signals. */
struct shmb_call {
    void (*may_block)(struct shmb_call *call);  /* idempotent */
    bool (*interrupted)(struct shmb_call *call); /* a signal handler raised */
    int64_t timeout_ns;                          /* limit of the wait for the mutex */
};

/* See gate.c. */
struct shmb_gate {
    _Atomic pid_t thread; /* the thread inside; 0: none */
    _Atomic pid_t last;   /* the last thread that was inside */
    bool in_call;         /* true while the thread inside executes a call */
    _Atomic uint32_t waiting;
    pthread_mutex_t mutex; /* guards the condition variable */
    pthread_cond_t freed;
};

#define SHMB_FOR_EVER INT64_MAX

struct shmb_leaf {
    unsigned char *base;    /* NULL: its rows are stored once, see struct shmb_shared_leaf */
    uint64_t element_bytes; /* in its column; 0 without a column */
    uint64_t item_bytes;    /* of an element in a batch that is read */
};

/* A leaf of next observations, in a buffer that stores observations once. */
struct shmb_shared_leaf {
    unsigned leaf, root; /* leaf numbers of the next observations and of the observations */
    unsigned char *own_rows;
    uint64_t bytes; /* of one row */
};

/* A piece of a record that is not in the batch, but in memory of the caller, such as a tensor. `offset` counts from the start
 * of the record. */
struct shmb_outside {
    int64_t offset, address, bytes;
};

/* Records to write. Record k starts at data + starts[k], with space for its header before it. Every record has `each` pieces
 * outside of the data, in ascending order. In the data, the bytes after such a piece follow those before it without a gap. */
struct shmb_batch {
    const unsigned char *data;
    const int64_t *starts, *sizes;
    uint64_t count;
    const struct shmb_outside *outside; /* count * each */
    uint64_t each;
};

/* Destination of records that are read. They are stored one after another. */
struct shmb_arena {
    unsigned char *data;
    uint64_t space, used;
    int64_t *starts, *sizes;
    uint64_t *positions; /* scratch: the position of each record in the byte ring */
};

/* See sharing.c. */
struct shmb_plan;

/* The rows of a write, in a buffer that stores observations once. */
struct shmb_rows {
    const unsigned char *const *from; /* for each leaf, the address of the first row; NULL: not known yet */
    const uint64_t *sources;          /* of each row; NULL: determined by its stream */
};

/* See presence.c. */
struct shmb_presence {
    int folder;       /* descriptor of the directory */
    const char *name; /* of the control file in the directory; NULL: there are no files */
    uint64_t device, inode; /* of that file */
    _Atomic int64_t looked_ns; /* monotonic clock at the last successful check */
};

struct shmb_ring {
    struct shmb_runtime *runtime;
    int mutex_kind; /* as returned by shmb_mutex_kind */
    struct shmb_entry *entries, *me;
    uint64_t incarnation; /* ours; me->incarnation differs if another process considered us dead */
    uint64_t capacity, lanes, elements;
    _Atomic uint64_t *words;
    uint32_t *checksums;
    uint64_t *sources;
    double *raw;
    struct shmb_tree tree;
    unsigned n_leaves;
    struct shmb_leaf *leaves;
    uint64_t row_bytes;  /* of a slot, all leaves together */
    unsigned char *bytes; /* the byte ring, mapped twice in a row; NULL: items are rows of leaves */
    uint64_t max_bytes;
    struct shmb_extent *extents;
    struct shmb_plan *plan; /* NULL: every leaf has its own column */
    _Atomic uint64_t *nexts;
    _Atomic uint32_t *holders;
    uint64_t own_rows;
    struct shmb_ledger *ledger; /* NULL: no consumers and no reservations */
    struct shmb_reservation *reservations;
    struct shmb_ledger_parts parts;    /* offsets of its other parts */
    struct shmb_shared_leaf *shared;
    unsigned n_shared;
    bool checksum;
    uint32_t salt; /* of the schema; part of every checksum */
    uint64_t process_token; /* identifies the process that made this handle: see shmb_process_token */
    _Atomic uint32_t inside; /* threads that hold the mutex or wait for it */
    /* the entry was returned: no thread may take the mutex through this handle any more */
    _Atomic uint32_t left;

    struct shmb_presence presence;

    /* One claim at a time. The fields below belong to the thread inside the gate. */
    struct shmb_gate gate;
    bool claimed;
    bool claim_passes; /* the ratio does not count the claim */
    uint64_t claim_first, claim_count; /* tickets of the rows, consecutive for a ring write */
    uint64_t claim_slot;               /* of the first row */
    uint64_t claim_rows;               /* rows to write: slots, or claim_count */
    uint64_t claim_slot_count;        /* fewer than the rows if the caller named a slot twice */
    uint64_t claim_written;            /* elements that the claim adds to write_count */
    bool claim_checked;                /* its checksums are stored already */
    enum shmb_claim_kind claim_kind;
    int64_t *claim_slots; /* for placed and in-place writes */
    struct shmb_batch claim_batch; /* for a ring of records, valid during the call */
    uint64_t claim_bytes;          /* of all its records */
    uint64_t claim_skipped;        /* first row of the batch that is written */
    int64_t *claim_from;           /* for placed and in-place writes: the rows of the batch */
    double *masses;       /* scratch, claim_rows * lanes */
    uint64_t *touched;
    uint64_t scratch_rows;
    uint64_t readers; /* threads that copy from a queue; guarded by the mutex */

    struct shmb_reservation *claim_reservation;   /* reservation of the open claim, or NULL */
    uint64_t claim_place;                  /* number of its first element among all elements ever written */
    uint32_t next_place;                   /* where to start the search for a free reservation */
};

enum shmb_reason { SHMB_SLOT_IS_TAKEN = 0, SHMB_AHEAD = 1, SHMB_BEHIND, SHMB_FEW, SHMB_FULL, SHMB_SHORT, SHMB_OVER_QUOTA, SHMB_VERSION,
                   SHMB_HELD, SHMB_SCARCE };

/* Why the last refused call of this thread was refused. It is not part of the handle, because other threads use
 * that, too. */
struct shmb_refusal {
    enum shmb_reason why; /* for SHMB_LIMITED */
    uint64_t bad_at; /* position of the refused argument */
    /* bytes that would have sufficed; for SHMB_LIMITED: elements that must be removed or written first; for
     * SHMB_UNALLOCATED: slots that need space, counted from slot 0 */
    uint64_t needed;
    struct {
        uint32_t entry;
        uint64_t incarnation, turn;
        uint32_t progress; /* futex value at the time of the refusal */
        bool by_turn;      /* we wait behind a turn, not for a slot */
    } blocker;
};
extern _Thread_local struct shmb_refusal shmb_refusal;

/* Totals of all items, read in one locked section. */
struct shmb_totals {
    /* sum of all masses; 0: draws are uniform, because the caller asked for it or because there are no positive
     * masses */
    double mass;
    double least;        /* the smallest positive mass; 0 if mass is 0 */
    double max_priority; /* largest raw priority ever given; negative: none yet */
    uint64_t length;     /* elements that hold an item */
};
/* Totals at the time of this thread's last draw, taken with its first rows. length 0: the thread has not drawn yet. */
extern _Thread_local struct shmb_totals shmb_last_draw_totals;

/* Most rings have one lane, and the division would take half of the time spent on an element. */
static inline uint64_t shmb_slot_of(const struct shmb_ring *ring, uint64_t element) {
    return ring->lanes == 1 ? element : element / ring->lanes;
}

/* Number of slots that can be in use. All slots from here on are zeros, because a claim moves the head before it
 * marks a slot. Loops over the ring end here, so that they do not allocate pages that were never written. */
static inline uint64_t shmb_written_slots(const struct shmb_ring *ring) {
    uint64_t head = atomic_load_explicit(&ring->runtime->head, memory_order_relaxed);
    return head < ring->capacity ? head : ring->capacity;
}

static inline uint64_t shmb_ticket_in_lap(uint64_t head, uint64_t slot, uint64_t capacity) {
    return head + (slot + capacity - head % capacity) % capacity;
}

/* True if the registry entry is still ours. */
static inline bool shmb_is_ours(const struct shmb_ring *ring) {
    return atomic_load_explicit(&ring->me->incarnation, memory_order_relaxed) == ring->incarnation &&
           atomic_load_explicit(&ring->me->state, memory_order_relaxed) == SHMB_LIVE;
}

static inline bool shmb_is_limited(const struct shmb_ring *ring) {
    return __builtin_expect(atomic_load_explicit(&ring->runtime->limiter_version, memory_order_relaxed) != 0, 0);
}

/* The second look: if the word is the same, a copy made after the first look is valid. */
static inline bool shmb_still_holds(const struct shmb_ring *ring, uint64_t slot, uint64_t word) {
    return atomic_load_explicit(&ring->words[slot], memory_order_relaxed) == word;
}

/* Slots of the open reservations, at most the capacity. */
static inline uint64_t shmb_read_reserved(const struct shmb_ring *ring) {
    uint64_t reserved = atomic_load_explicit(&ring->runtime->reserved, memory_order_relaxed);
    return reserved < ring->capacity ? reserved : ring->capacity;
}

/* True if slots below `end` have no space in the files yet. An `end` beyond the capacity wraps around, so it needs
 * all slots. */
static inline bool shmb_is_unallocated(const struct shmb_ring *ring, uint64_t end) {
    uint64_t allocated = atomic_load_explicit(&ring->runtime->allocated, SYNC_ALLOCATE_ACQUIRE);
    if (__builtin_expect(end <= allocated || ring->capacity <= allocated, 1)) return false;
    shmb_refusal.needed = end < ring->capacity ? end : ring->capacity;
    return true;
}

/* The functions by file. Each file calls only those above it (tests/native/test_house.py). */

/* process.c */
uint64_t shmb_process_token(void); /* identifies this process; changes after a fork */
void shmb_init_process_token(void);
int64_t shmb_now_ns(void);
int64_t shmb_clock_ns(clockid_t clock);
uint64_t shmb_boot_ns(void);
void shmb_set_boot_offset(int64_t offset_ns);
void shmb_store_touch_time(struct shmb_runtime *runtime);

/* weights.c: see weights.h */

/* pool.c: threads that share the work of a large batch: see pool.h */

/* presence.c */
bool shmb_is_removed(struct shmb_ring *ring, int64_t now_ns);

/* gate.c: lets one thread of this process at a time claim, fill and commit through a handle */
void shmb_gate_init(struct shmb_gate *gate);
int shmb_gate_enter(struct shmb_ring *ring, struct shmb_call *call, int64_t timeout_ns);
void shmb_gate_pause(struct shmb_ring *ring); /* the call ends, but the claim stays open */
int shmb_gate_resume(struct shmb_ring *ring); /* only for the thread that paused */
void shmb_gate_leave(struct shmb_ring *ring);

/* mutex.c */
int shmb_mutex_format(struct shmb_runtime *runtime);
int shmb_mutex_kind(void); /* of a freshly formatted mutex */
uint32_t shmb_mutex_owner(const struct shmb_runtime *runtime);
int shmb_mutex_acquire(struct shmb_runtime *runtime, int kind, struct shmb_call *call);
int shmb_mutex_mark_consistent(struct shmb_runtime *runtime);

/* slots.c */
bool shmb_claim_covers(const struct shmb_ring *ring, uint64_t word, uint32_t *entry);
uint64_t shmb_queue_place(const struct shmb_ring *ring, uint64_t ticket);
/* Place of an item that may be older than the head `since`: see slots.c. */
static inline uint64_t shmb_place_since(uint64_t ticket, uint64_t since, uint64_t capacity) {
    return ticket < since ? since - 1 - (since - 1 - ticket) % capacity : ticket;
}

/* masses.c: under the mutex, except to read a priority */
double shmb_mass(const struct shmb_runtime *runtime, double raw);
void shmb_masses(const struct shmb_runtime *runtime, const double *raw, double *masses, uint64_t count);
double shmb_largest_mass(const struct shmb_ring *ring);
double shmb_default_priority(const struct shmb_runtime *runtime);
bool shmb_draws_by_mass(const struct shmb_ring *ring, bool prioritized);
struct shmb_totals shmb_compute_totals(const struct shmb_ring *ring, bool prioritized);
uint64_t shmb_greatest_bits(const double *numbers, uint64_t count);
int shmb_check_priorities(struct shmb_ring *ring, const double *priorities, uint64_t count);
void shmb_ring_leaves(struct shmb_ring *ring); /* computes every leaf from words and raw priorities, and `length` */
void shmb_ring_parents(struct shmb_ring *ring); /* computes every sum and minimum from the leaves */

/* limiter.c: under the mutex, except for shmb_copy_setting and shmb_read_limits */
struct shmb_limiter *shmb_get_limiter(struct shmb_runtime *runtime);
struct shmb_setting shmb_copy_setting(const struct shmb_runtime *runtime);
const struct shmb_ages *shmb_get_ages(const struct shmb_runtime *runtime);
bool shmb_is_too_old(const struct shmb_ring *ring, uint64_t version, uint64_t place);
bool shmb_is_counting_versions(const struct shmb_ring *ring);
void shmb_begin_version_count(struct shmb_runtime *runtime);
void shmb_move_version_base(struct shmb_ring *ring, uint64_t place, bool only_later);
uint32_t shmb_read_limits(struct shmb_runtime *runtime); /* limits in force, of enum shmb_limit_kind */
void shmb_begin_pending(struct shmb_ring *ring, uint64_t elements);
void shmb_end_pending(struct shmb_ring *ring, struct shmb_entry *entry);
void shmb_clear_waiting(struct shmb_ring *ring, struct shmb_entry *entry, uint32_t sides);
void shmb_recount_pending(struct shmb_ring *ring);
void shmb_prepare_base(struct shmb_ring *ring);
void shmb_set_base(struct shmb_ring *ring);
void shmb_restart_limiter(struct shmb_ring *ring, uint64_t write_count, uint64_t elements);
void shmb_uncount_insert(struct shmb_runtime *runtime);

/* The next element that a queue hands out, and how often it was handed out. */
struct shmb_place {
    uint64_t element, times;
};

/* queue.c */
struct shmb_place shmb_queue_next(const struct shmb_ring *ring, const struct shmb_limiter *limiter);
struct shmb_place shmb_queue_front(const struct shmb_ring *ring, struct shmb_limiter *limiter);
uint64_t shmb_queue_oldest(const struct shmb_ring *ring, const struct shmb_limiter *limiter, struct shmb_place *next,
                           uint64_t count, uint64_t *first, int64_t *index, int64_t *tickets);
uint64_t shmb_count_ready_in_queue(const struct shmb_ring *ring, const struct shmb_limiter *limiter);
uint64_t shmb_count_queued(const struct shmb_ring *ring);
void shmb_skip_emptied(struct shmb_ring *ring);

/* ledger.c: deliveries of items, under the mutex: see ledger.h */

/* sharing.c: observations that are stored once; under the mutex, except for readers and the functions that fill */
bool shmb_sharing_begin(struct shmb_ring *ring);
void shmb_sharing_end(struct shmb_ring *ring);
bool shmb_plan_rows(struct shmb_ring *ring, const struct shmb_rows *rows, uint64_t count, const uint32_t *streams); /* no lock */
bool shmb_plan_slots(struct shmb_ring *ring, uint64_t count, bool keeps); /* no lock */
int shmb_claim_own_rows(struct shmb_ring *ring, uint64_t first);
int shmb_unlink_slots(struct shmb_ring *ring);
void shmb_store_nexts(struct shmb_ring *ring);
void shmb_store_back_links(struct shmb_ring *ring);
void shmb_store_links(struct shmb_ring *ring);
uint64_t shmb_repair_links(struct shmb_ring *ring, uint64_t head, bool drops);
bool shmb_is_valid_link(const struct shmb_ring *ring, uint64_t slot, uint64_t head);
/* The result is always within this process's mappings, even if the link is damaged. Other code detects the damage. */
static inline const unsigned char *shmb_next_address(const struct shmb_ring *ring, unsigned which, uint64_t slot, uint64_t next) {
    const struct shmb_shared_leaf *shared = &ring->shared[which];
    uint64_t ahead = SHMB_AHEAD_OF(next), target = slot + ahead;
    if (next & SHMB_OWN_ROW) return shared->own_rows + (ahead < ring->own_rows ? ahead : 0) * shared->bytes;
    if (target >= ring->capacity) target -= ring->capacity;
    return ring->leaves[shared->root].base + (target < ring->capacity ? target : slot) * shared->bytes;
}
void shmb_copy_next(const struct shmb_ring *ring, uint64_t slot, uint64_t next, unsigned char *const *out, uint64_t row);
void shmb_fill_nexts(struct shmb_ring *ring, const unsigned char *const *from, uint64_t skip_rows, uint64_t first, uint64_t rows);
static inline uint64_t shmb_read_next(const struct shmb_ring *ring, uint64_t slot) {
    return ring->plan ? atomic_load_explicit(&ring->nexts[slot], SYNC_SLOT_NEXT_ACQUIRE) : 0;
}
/* The second look at the link, after the second look at the word. */
static inline bool shmb_link_still_holds(const struct shmb_ring *ring, uint64_t slot, uint64_t next) {
    return !ring->plan || atomic_load_explicit(&ring->nexts[slot], memory_order_relaxed) == next;
}

/* reservations.c: reserved slots and bytes, under the mutex: see reservations.h */

/* repair.c: claims of dead clients, under the mutex */
void shmb_finish_claim(struct shmb_ring *ring, struct shmb_entry *entry);
void shmb_repair(struct shmb_ring *ring);

/* section.c */
int shmb_lock(struct shmb_ring *ring, struct shmb_call *call);
void shmb_unlock(struct shmb_ring *ring);
bool shmb_disable_lock(struct shmb_ring *ring, struct shmb_call *call);

/* turns.c: under the mutex, except for functions that take a `call` or sleep */
/* returns the entry to wake, whose turn is next; SHMB_ENTRIES: none */
uint32_t shmb_return_turn(struct shmb_ring *ring);
bool shmb_waits_behind_a_turn(struct shmb_ring *ring);
bool shmb_is_being_written(struct shmb_ring *ring, uint64_t slot);
bool shmb_others_are_writing(struct shmb_ring *ring);
int shmb_cancel_turn(struct shmb_ring *ring, struct shmb_call *call);
int shmb_forfeit_turn(struct shmb_ring *ring, struct shmb_call *call, uint32_t entry, uint64_t turn);
void shmb_wake_waiters(struct shmb_runtime *runtime);
void shmb_wake_after_claim(struct shmb_ring *ring);
void shmb_wake_turn(struct shmb_ring *ring, uint32_t entry);
int shmb_wait_progress(struct shmb_ring *ring, uint32_t seen, int64_t timeout_ns);

/* consumer_version.c */
enum shmb_version_change { SHMB_VERSION_SET = 0, SHMB_VERSION_ADD = 1, SHMB_VERSION_AT_LEAST = 2 };
uint64_t shmb_consumer_version(struct shmb_runtime *runtime, enum shmb_version_change change, uint64_t value);

/* records.c: the byte ring */
int shmb_check_batch(struct shmb_ring *ring, const struct shmb_batch *batch, uint64_t bytes);
bool shmb_bytes_are_being_written(struct shmb_ring *ring);
bool shmb_evicts_from(const struct shmb_ring *ring, uint64_t place, uint64_t since, uint64_t bytes);
void shmb_claim_bytes(struct shmb_ring *ring);
bool shmb_is_valid_extent(const struct shmb_ring *ring, struct shmb_extent extent);
bool shmb_is_extent_in_use(const struct shmb_ring *ring, struct shmb_extent extent);
static inline unsigned char *shmb_record_at(const struct shmb_ring *ring, uint64_t position) {
    return ring->bytes + position % ring->max_bytes;
}
/* Returns which record of the batch is row k of the open claim. */
static inline uint64_t shmb_batch_row(const struct shmb_ring *ring, uint64_t row) {
    return ring->claim_kind == SHMB_RING_WRITE ? ring->claim_skipped + row : (uint64_t)ring->claim_from[row];
}
bool shmb_is_valid_span(const struct shmb_ring *ring);
uint64_t shmb_oldest_ticket(const struct shmb_ring *ring);
uint64_t shmb_relink(struct shmb_ring *ring, const int64_t *slots, uint64_t count);

/* flow.c: flow control: see flow.h */

/* consume.c: the calls of a consumer's clients: see ledger.h */

/* fill.c */
void shmb_fill(struct shmb_ring *ring, const unsigned char *const *sources, uint64_t skip_rows);
void shmb_fill_priorities(struct shmb_ring *ring, const double *priorities, uint64_t skip_rows);
void shmb_fill_records(struct shmb_ring *ring);
void shmb_fill_checksums(struct shmb_ring *ring);
void shmb_seal(struct shmb_ring *ring, uint64_t first, uint64_t count);
uint32_t shmb_row_checksum(const struct shmb_ring *ring, uint64_t slot, uint64_t ticket);

/* commit.c */
void shmb_claim_parents(struct shmb_ring *ring); /* under the mutex, as is the next function */
void shmb_abort_claim(struct shmb_ring *ring);
int shmb_commit(struct shmb_ring *ring, struct shmb_call *call, bool has_priorities);
int shmb_abort(struct shmb_ring *ring, struct shmb_call *call);

/* claim.c */
enum { SHMB_KEEPS_OBSERVATIONS = 2 }; /* in-place write that changes no observation and no next observation */
int shmb_claim_ring(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_batch *batch,
                    const uint32_t *streams, uint64_t *first);
int shmb_claim_rows(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, const struct shmb_rows *rows,
                    const uint32_t *streams, uint64_t *first);
int shmb_claim_slots(struct shmb_ring *ring, struct shmb_call *call, const int64_t *slots, uint64_t count,
                     int in_place, const int64_t *tickets, unsigned char *accepted, const struct shmb_batch *batch,
                     uint64_t *claimed_rows);
int shmb_empty(struct shmb_ring *ring, struct shmb_call *call, bool keep_write_count);
int shmb_restore(struct shmb_ring *ring, struct shmb_call *call, uint64_t wanted, uint64_t write_count,
                 double max_priority);

/* reserve.c: calls that make and end reservations: see reserve.h */

/* reap.c */
int shmb_leave(struct shmb_ring *ring, struct shmb_call *call);
int shmb_reap(struct shmb_ring *ring, struct shmb_call *call, uint32_t entry, uint64_t incarnation, bool *freed);

/* priorities.c */
int shmb_check_indices(struct shmb_ring *ring, const int64_t *index, uint64_t count, uint64_t bound);
int shmb_update(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, const int64_t *tickets,
                const double *priorities, uint64_t count, uint64_t *applied);
int shmb_set_alpha(struct shmb_ring *ring, struct shmb_call *call, double alpha, double eps, bool bind);
int shmb_read_totals(struct shmb_ring *ring, struct shmb_call *call, struct shmb_totals *out);
int shmb_raise_max_priority(struct shmb_ring *ring, struct shmb_call *call, double value);

/* check.c: see check.h */

/* sample.c: draws, copies and validates */
int shmb_sample(struct shmb_ring *ring, struct shmb_call *call, uint64_t count, uint64_t key,
                unsigned char *const *out, int64_t *index, int64_t *tickets, float *weights, double beta,
                bool prioritized, uint64_t *redrawn, struct shmb_arena *arena);
int shmb_read(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
              unsigned char *const *out, int64_t *tickets, uint64_t *missing);
int shmb_read_records(struct shmb_ring *ring, struct shmb_call *call, const int64_t *index, uint64_t count,
                      struct shmb_arena *arena, int64_t *tickets);

/* Counters that are consistent with one another. */
struct shmb_snapshot_counters {
    uint64_t byte_tail, byte_head;
    uint64_t head, write_count;
    double max_priority;
};

/* stacks.c: samples of consecutive steps, without the mutex: see stacks.h */

/* snapshot.c */
uint64_t shmb_copy_slots(struct shmb_ring *ring, uint64_t first, uint64_t count, unsigned char *const *out,
                         int64_t *tickets);
int shmb_finish_snapshot(struct shmb_ring *ring, struct shmb_call *call, unsigned char *const *out, int64_t *tickets,
                     uint64_t *sources, double *raw, struct shmb_snapshot_counters *counters);
int shmb_read_span(struct shmb_ring *ring, struct shmb_call *call, uint64_t span[3]);
int shmb_finish_records_snapshot(struct shmb_ring *ring, struct shmb_call *call, uint64_t from, unsigned char *out, uint64_t space,
                        int64_t *tickets, struct shmb_extent *extents, uint64_t *sources, double *raw,
                        struct shmb_snapshot_counters *counters);

#endif
