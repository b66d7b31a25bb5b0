/* Every byte that processes share: the control file and the sections of the slots file.
 *
 * memory/format/layout.py has these offsets from module.c, and docs/format/directory.md the same tables;
 * tests/memory/format/test_layout.py compares both. Nothing else in the C core knows an offset.
 */
#ifndef SHMB_LAYOUT_H
#define SHMB_LAYOUT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define SHMB_PAGE 4096u
#define SHMB_RUNTIME_OFFSET (2u * SHMB_PAGE) /* after two superblocks, which only Python writes */
#define SHMB_REGISTRY_OFFSET (3u * SHMB_PAGE)
#define SHMB_ENTRIES 256u
#define SHMB_ENTRY_BYTES 512u
#define SHMB_CONTROL_BYTES (SHMB_REGISTRY_OFFSET + SHMB_ENTRIES * SHMB_ENTRY_BYTES)
#define SHMB_FANOUT 16u /* children of a tree node: two cache lines of float64 */
#define SHMB_MAX_DEPTH 16u

/* A slot word is ticket << 2 | state. */
enum shmb_state { SHMB_EMPTY = 0, SHMB_WRITING = 1, SHMB_COMMITTED = 2, SHMB_ABORTED = 3 };
#define SHMB_WORD(ticket, state) (((uint64_t)(ticket) << 2) | (uint64_t)(state))
#define SHMB_STATE(word) ((unsigned)((word) & 3u))
#define SHMB_TICKET(word) ((uint64_t)(word) >> 2)
#define SHMB_LAST_TICKET (UINT64_MAX >> 2)

/* The source of a slot: who wrote it, and in which of its streams. What is followed as a trajectory has equal words.
 *
 *     bits 0-38   incarnation of the client; from SHMB_INCARNATIONS on of no client: the item was loaded
 *     bits 39-62  stream
 *
 * memory/format/layout.py makes words and takes them apart, too. */
#define SHMB_STREAMS ((uint64_t)1 << 24)
#define SHMB_INCARNATIONS ((uint64_t)1 << 38)
static inline uint64_t shmb_source(uint64_t incarnation, uint32_t stream) {
    return (uint64_t)stream << 39 | incarnation;
}
static inline uint64_t shmb_stream_of(uint64_t source) { return source >> 39; }

/* Phases of a claim. All but IDLE and PAYLOAD exist only while the mutex is held. */
enum shmb_phase { SHMB_IDLE = 0, SHMB_MARKING = 1, SHMB_PAYLOAD = 2, SHMB_COMMITTING = 3, SHMB_EMPTYING = 4 };

enum shmb_entry_state { SHMB_FREE = 0, SHMB_LIVE = 1 };

/* Life of the whole buffer, as clients see it without reading a superblock. */
enum shmb_buffer_state { SHMB_NO_SCHEMA = 0, SHMB_READY = 1, SHMB_RECOVERING = 2, SHMB_CLOSING = 3, SHMB_READ_ONLY = 4 };

/* What limits both sides; see limiter.c. Two of them, of which the one counts that the version's last bit names. */
struct shmb_limiter {
    double samples_per_insert;
    double error_buffer;        /* samples; of a quota, elements from inserts_base on that may be written */
    uint64_t min_size;          /* elements that have to be there before any is drawn */
    uint64_t inserts_base;      /* write_count from which on inserts count */
    uint64_t samples_base;      /* `drawn` from which on samples count */
    uint64_t max_times_sampled; /* of an element in a queue */
    uint64_t queue_next;        /* elements that were handed out, from ticket 0 on, each max_times_sampled times */
    uint32_t when_no_peer;      /* enum shmb_alone */
    uint32_t limits;            /* SHMB_RATIO, SHMB_QUEUE; or SHMB_QUOTA alone */
};
enum shmb_limit_kind { SHMB_RATIO = 1, SHMB_QUEUE = 2, SHMB_MIN_SIZE = 4, SHMB_QUOTA = 8, SHMB_AGES = 16 };

/* Beside a limiter with SHMB_AGES: how far what is written may be behind the consumer's version. */
struct shmb_ages {
    uint64_t max_staleness;     /* versions */
    uint64_t items_per_version; /* elements that a version is made from; 0: nobody waits for a version */
    uint64_t inserts_base;      /* write_count from which on inserts count here, those too that a ratio does not count */
    uint64_t version_base;      /* the consumer's version when inserts began to count */
};
enum shmb_alone { SHMB_ALONE_PASS = 0, SHMB_ALONE_WAIT = 1, SHMB_ALONE_ERROR = 2, SHMB_ALONE_QUEUE = 3 };

struct shmb_setting { /* a copy of both */
    struct shmb_limiter limiter;
    struct shmb_ages ages;
};

/* Whom a client waits for. */
enum shmb_side { SHMB_FOR_SAMPLES = 1, SHMB_FOR_INSERTS = 2 };

/* One page. The mutex guards everything behind it, every slot word that changes, and the tree. */
struct shmb_runtime {
    union {
        pthread_mutex_t mutex; /* robust, process-shared, NORMAL; never destroyed, never unmapped */
        unsigned char mutex_bytes[64];
        _Atomic uint32_t mutex_word; /* of the kernel and glibc: thread id, FUTEX_OWNER_DIED, FUTEX_WAITERS (futex(2)) */
    };
    _Atomic uint64_t head;        /* next ticket */
    _Atomic uint64_t write_count; /* elements written so far */
    _Atomic uint64_t length;      /* slots that are COMMITTED */
    _Atomic uint32_t state;       /* enum shmb_buffer_state */
    _Atomic uint32_t prioritized; /* 1 once a prioritized sampler is bound: the tree is kept */
    _Atomic double max_priority;  /* largest raw priority ever given; negative: none yet, the default is 1 */
    _Atomic double alpha;         /* looked at without the mutex too: see alpha_version */
    _Atomic double eps;
    _Atomic uint64_t alpha_version; /* changes with alpha or eps */
    _Atomic uint64_t next_turn;     /* last turn number given out */
    _Atomic uint32_t waiters;       /* entries that hold a turn */
    _Atomic uint32_t progress;      /* futex: changes whenever a waiter should look again */
    _Atomic uint64_t next_incarnation; /* last incarnation given out; guarded by init.lock */
    _Atomic uint64_t repairs;          /* times that a locker found its predecessor dead */
    _Atomic uint64_t rolled_back;      /* slots aborted for the dead */
    _Atomic uint64_t rolled_forward;   /* slots committed for the dead */
    _Atomic uint64_t reaped;           /* clients whose entry was freed for them */
    _Atomic uint64_t byte_head;        /* position in the byte ring where the next record starts */
    _Atomic uint64_t byte_tail;        /* position of the oldest record whose bytes are in use */
    _Atomic uint64_t evicted;          /* items that went because their bytes were needed */
    _Atomic uint64_t drawn;            /* elements drawn while there was a ratio, and within it */
    _Atomic uint64_t pending;          /* elements that write_count grows by with the open claims */
    _Atomic uint32_t limiter_version;  /* changes with the limiter; 0: there was never one */
    _Atomic uint32_t limited;          /* entries that wait for the other side */
    uint64_t inserts_goal;             /* inserts_base once the claim that is COMMITTING is finished */
    _Atomic uint64_t queue_since;      /* head when the buffer became a queue */
    _Atomic uint64_t lock_waits; /* times that the mutex was not to be had at once, nor soon: it was slept for */
    struct shmb_limiter limiters[2];
    struct shmb_ages ages[2];    /* beside limiters */
    _Atomic uint64_t touched_ns; /* CLOCK_REALTIME of the last store that no entry dates: restored.py */
    _Atomic uint32_t consumers; /* of the ledger: how many are open; 0: a claim asks no further */
    uint32_t pad;
    _Atomic uint64_t loaded; /* elements that loads have written; those are in no entry's inserts */
    _Atomic uint64_t reserved;       /* slots of the reservations that are open */
    _Atomic uint64_t reserved_bytes; /* of the byte ring, of the same */
    _Atomic uint64_t next_expiry;    /* the boot clock, in ns, before which no reservation ends by time; 0: none does */
    _Atomic uint64_t next_reservation; /* number of the last one */
    _Atomic uint64_t refused;          /* elements that were too old for the consumer's version */
    _Atomic uint64_t consumer_version; /* of the policy that learners have, as they say: consumer_version.c */
    double offline_base;     /* share of a data set in each sample, as it began; 0: nobody has said. Only Python has it */
    double offline_fraction; /* the same, as it is now. Only Python has it */
    _Atomic uint64_t allocated; /* slots below it have their space in the files; a claim does not go beyond it. Only Python stores it */
    unsigned char spare[3296]; /* zero: room for fields of later versions */
};

/* One client. Identity is written under init.lock before state = LIVE; the claim by its owner, or by
 * the process that finishes it for the dead, under the mutex; counters by the owner alone, and they only grow
 * (they outlive the client: the totals of the buffer are the sums over all entries). */
struct shmb_entry {
    _Atomic uint32_t state; /* enum shmb_entry_state */
    uint32_t role;
    _Atomic uint64_t incarnation; /* unique in the directory; part of the source of its items */
    uint64_t pid;
    uint64_t start_time;    /* clock ticks since boot, /proc/<pid>/stat field 22 */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    unsigned char boot_id[16];
    uint64_t joined_ns; /* CLOCK_REALTIME, for display only */
    _Atomic uint32_t phase;
    uint32_t kind;          /* enum shmb_claim_kind */
    _Atomic uint64_t first; /* first ticket */
    _Atomic uint64_t count; /* tickets; at most the capacity */
    _Atomic uint64_t goal;  /* write_count once the claim is finished */
    _Atomic uint64_t turn;  /* 0, or the place in the queue of those who wait for a slot */
    _Atomic uint64_t turn_ns; /* CLOCK_MONOTONIC when it was taken, or became the first */
    _Atomic uint64_t byte_first; /* of a claim of records: where its bytes start; of one that a queue has wait: how many */
    _Atomic uint64_t inserts;         /* elements committed */
    _Atomic uint64_t aborts;          /* elements rolled back by the owner itself */
    _Atomic uint64_t batches_sampled; /* calls */
    _Atomic uint64_t items_sampled;   /* elements */
    _Atomic uint64_t redraws;         /* rows drawn again because they changed while being copied */
    _Atomic uint64_t age_sum;         /* elements written between a sampled item and its sampling, summed */
    _Atomic uint64_t updates_applied; /* priorities */
    _Atomic uint64_t updates_stale;
    _Atomic uint64_t waits;        /* times that a write had to wait for a slot */
    _Atomic uint64_t last_seen_ns; /* CLOCK_REALTIME of the last write, sample or update: restored.py */
    _Atomic uint64_t pending; /* elements that write_count grows by once the open claim is committed */
    _Atomic uint64_t reading; /* 1 + the first place that is being copied out of a queue; 0: none */
    _Atomic uint32_t waits_for; /* SHMB_FOR_SAMPLES, SHMB_FOR_INSERTS: for what the other side has to do first */
    uint32_t waits_why;      /* enum shmb_reason, of what it waits for */
    uint32_t inserts_wanted; /* elements that it waits to write */
    uint32_t samples_wanted; /* that it waits to draw; of SHMB_FEW, that have to be there */
    uint64_t waits_since_ns; /* CLOCK_MONOTONIC */
    _Atomic uint64_t last_insert_ns; /* CLOCK_MONOTONIC; 0: none since it joined */
    _Atomic uint64_t last_sample_ns;
    uint64_t first_draw;        /* what the first draw of the handle came from; 0: none. Only Python has it */
    unsigned char spare[248]; /* zero: room for fields of later versions */
};

/* Room that somebody holds for items to come; see reservations.c. */
struct shmb_reservation {
    uint64_t id;          /* of one that is not FREE, and of nobody else */
    uint64_t incarnation; /* with entry: who holds it */
    uint32_t entry;
    _Atomic uint32_t state; /* enum shmb_reservation_state */
    uint64_t rows;          /* slots */
    uint64_t bytes;         /* of the byte ring; 0: unknown */
    uint64_t expires_ns;    /* the boot clock (shmb_boot_ns); UINT64_MAX: it ends with its holder only */
    uint64_t since_ns;      /* the boot clock, for display */
    uint32_t flags;         /* enum shmb_reservation_flag */
    uint32_t pad;
};
enum shmb_reservation_state { SHMB_UNRESERVED = 0, SHMB_OPEN = 1, SHMB_CLAIMED = 2, SHMB_DONE = 3 };
enum shmb_reservation_flag { SHMB_PARTIAL = 1, SHMB_PASSED = 2 }; /* it has pieces in a file; the ratio let it pass */
#define SHMB_RESERVATIONS 4096u
_Static_assert(sizeof(struct shmb_reservation) == 64, "a reservation is one cache line");

/* A record in the byte ring. Positions only grow; the byte at a position is number position mod max_bytes of the
 * file, which is mapped twice in a row so that no record is cut at its end. The next header follows the record, at a
 * multiple of 8: so headers lead from the tail to the head. The slot says whether a header's record is its item. */
struct shmb_record {
    uint64_t ticket;
    uint64_t position;
    uint64_t bytes; /* header included */
};

/* Where the record of a slot is. */
struct shmb_extent {
    uint64_t position, bytes;
};

/* Of one copy of the weights: whose bytes it has, and that they are whole. */
struct shmb_stamp {
    _Atomic uint64_t version; /* 0 while the copy is written, and of one that a recovery found damaged */
    int64_t step;             /* as the publisher gave it */
    uint64_t time_ns;         /* CLOCK_REALTIME */
    uint64_t pid;             /* of the publisher, in its pid namespace; for display */
    uint32_t crc32c;          /* over the four above and the copy */
    uint32_t pad[7];
};

/* The first page of the file of the weights. Behind it come the JSON that says what they are made of, which does not change
 * any more, and two copies of them: version n lies in copy n mod 2. See weights.c. */
struct shmb_weights {
    unsigned char magic[8];
    uint16_t format, pad;
    uint32_t endian;
    uint64_t copy_bytes; /* of each copy */
    uint64_t copies;     /* where the first one starts; the other follows it */
    uint32_t form_bytes; /* of the JSON */
    uint32_t crc32c;     /* over all before it, and the JSON */
    uint64_t spare[3];
    _Atomic uint64_t newest; /* the version that counts; 0: nothing was published */
    uint64_t beside[7];
    struct shmb_stamp stamps[2];
};
_Static_assert(sizeof(struct shmb_stamp) == 64, "a stamp is one cache line");
_Static_assert(sizeof(struct shmb_weights) == 256, "the page of the weights has its fixed size");

enum shmb_claim_kind { SHMB_RING_WRITE = 0, SHMB_PLACED = 1, SHMB_IN_PLACE = 2 };

_Static_assert(sizeof(struct shmb_record) == 24, "the header of a record has its fixed size");
_Static_assert(sizeof(struct shmb_limiter) == 64, "a limiter is one cache line");
_Static_assert(sizeof(struct shmb_ages) == 32, "ages have their fixed size");
/* The end of the runtime page is the record of the last recovery, which only Python reads and writes. */
#define SHMB_RECOVERY_BYTES 256u
_Static_assert(sizeof(struct shmb_runtime) == SHMB_PAGE - SHMB_RECOVERY_BYTES, "the runtime page is one page");
_Static_assert(sizeof(struct shmb_entry) == SHMB_ENTRY_BYTES, "a registry entry has its fixed size");
_Static_assert(sizeof(pthread_mutex_t) <= 64, "the mutex has its place");

/* Where the next observation of a slot's item is, in a buffer that stores observations once; see sharing.c.
 *
 *     bits 0-30   of a link, how many slots further on it is; else the number of the whole
 *     bits 31-61  how many slots back the item is whose next observation this slot's is; 0: none
 *     bit 62      it was a link before, and is a whole now
 *     bit 63      it is a whole: a row of its own, beside the ring
 */
#define SHMB_WHOLE ((uint64_t)1 << 63)
#define SHMB_UNLINKED_WHOLE ((uint64_t)1 << 62)
#define SHMB_NEXT_BITS 31
#define SHMB_NEXT_LIMIT ((uint64_t)1 << SHMB_NEXT_BITS) /* of slots and of wholes in such a buffer */
#define SHMB_AHEAD_OF(word) ((word) & (SHMB_NEXT_LIMIT - 1))
#define SHMB_BACK_OF(word) ((word) >> SHMB_NEXT_BITS & (SHMB_NEXT_LIMIT - 1))
#define SHMB_BACK_BITS ((SHMB_NEXT_LIMIT - 1) << SHMB_NEXT_BITS)

/* The slots file, section after section, each on a cache line:
 *   words u64[N] | checksums u32[N] | sources u64[N] | raw f64[L] | mass f64[pad16(L)] |
 *   for each level k = 1.. until one node is left: sum f64[pad16(n_k)] , min f64[pad16(n_k)] |
 *   where items are records: extents (position u64, bytes u64)[N] |
 *   where observations are stored once: nexts u64[N] | holders u32[K], the slot that each whole was given to last
 * with L = N * lanes, n_1 = ceil(L / 16), n_k+1 = ceil(n_k / 16). A file of zeros is an empty ring. */
struct shmb_sections {
    uint64_t words, checksums, sources, raw, mass, extents, nexts, holders;
    uint64_t sum[SHMB_MAX_DEPTH], min[SHMB_MAX_DEPTH]; /* offsets; index 0 unused */
    uint64_t nodes[SHMB_MAX_DEPTH];                    /* n_k; nodes[0] = L */
    unsigned depth;                                    /* the root is level `depth` and has one node */
    uint64_t bytes;
};

/* The ledger file: who was given what. Behind the first page, each part on a page:
 *
 *     reservations[4096] | for each consumer: leases[1024], deliveries[N]
 *
 * A page of zeros says that nobody was given anything. The file ends where what is in use ends, and all of it is mapped: what lies
 * behind `bytes` is never looked at. See consume.c. */
#define SHMB_CONSUMERS 8u
#define SHMB_LEASES 1024u
#define SHMB_CONSUMER_NAME 48u

enum shmb_consumer_state { SHMB_CONSUMES_NOT = 0, SHMB_CONSUMES = 1 };

/* Everything in it is under the mutex. */
struct shmb_consumer {
    unsigned char name[SHMB_CONSUMER_NAME]; /* UTF-8, zeros behind it */
    _Atomic uint32_t state;       /* enum shmb_consumer_state */
    uint32_t times;               /* that each item is acknowledged */
    uint32_t holds;               /* 1: no item is written over before that */
    uint32_t pad;
    _Atomic uint64_t next;        /* place: what nobody has been given is from here on */
    _Atomic uint64_t floor;       /* place: everything below was acknowledged, or is gone */
    uint64_t since;               /* head when it was opened: see shmb_place_since */
    _Atomic uint64_t open_leases; /* records of leases in use */
    _Atomic uint64_t delivered;   /* items, and so are the next four */
    _Atomic uint64_t acked;
    _Atomic uint64_t redelivered;
    _Atomic uint64_t refused;     /* that were acknowledged too late */
    _Atomic uint64_t dropped;     /* that were given up without delivery */
    uint64_t created_ns;          /* CLOCK_REALTIME, for display */
    uint64_t number;              /* unique in the directory: another one with its name is not it */
    uint64_t unused[13];
};

/* Some items, and who was given them. */
struct shmb_lease {
    _Atomic uint64_t id;   /* unique in the directory; id mod SHMB_LEASES is its place; 0: not in use */
    uint32_t entry, pad;   /* of the holder */
    uint64_t incarnation;  /* of the holder */
    uint64_t deadline_ns;  /* the boot clock; UINT64_MAX: until the holder dies */
    uint64_t first, end;   /* places that its items lie between */
    uint64_t left;         /* items that are under it */
    uint64_t taken_ns;     /* the boot clock */
};

/* Of one slot: what was noted for another ticket counts as nothing. */
struct shmb_delivery {
    _Atomic uint64_t ticket; /* 1 + ticket of the item; 0: nothing was noted */
    _Atomic uint64_t what;   /* see below */
};
/* bits 0-52 the lease | bits 53-62 how often it was acknowledged | bit 63 it is under that lease */
#define SHMB_LEASE_BITS 53
#define SHMB_LEASE_OF(what) ((what) & (((uint64_t)1 << SHMB_LEASE_BITS) - 1))
#define SHMB_ACKS_OF(what) ((what) << 1 >> (SHMB_LEASE_BITS + 1))
#define SHMB_MOST_ACKS 1023u
#define SHMB_LEASED_WHAT ((uint64_t)1 << 63)

struct shmb_ledger {
    struct shmb_consumer consumers[SHMB_CONSUMERS];
    _Atomic uint64_t next_lease; /* ids below it were given out */
    _Atomic uint64_t bytes;      /* the file has at least so many. Only Python writes it */
    uint64_t unused[254];
};
_Static_assert(sizeof(struct shmb_consumer) == 256, "a consumer has its fixed size");
_Static_assert(sizeof(struct shmb_lease) == 64, "a lease is one cache line");
_Static_assert(sizeof(struct shmb_delivery) == 16, "a delivery has its fixed size");
_Static_assert(sizeof(struct shmb_ledger) == SHMB_PAGE, "the ledger begins with one page");

struct shmb_parts {           /* offsets in the ledger */
    uint64_t reservations;
    uint64_t consumers, each; /* where the first one has its leases; bytes of each */
    uint64_t deliveries;      /* from its leases on */
    uint64_t bytes;           /* of the whole, if everything were in use */
};

void shmb_parts_of(uint64_t capacity, struct shmb_parts *out);
void shmb_sections_of(uint64_t capacity, uint64_t lanes, bool records, uint64_t wholes, struct shmb_sections *out);

#endif
