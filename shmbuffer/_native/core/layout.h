/* Every byte that processes share: the control file and the sections of the slots file.
 *
 * memory/format/layout.py gets these offsets from module.c, and docs/format/directory.md has the same tables.
 * tests/memory/format/test_layout.py compares them. No other file of the C core contains an offset. */
#ifndef SHMB_LAYOUT_H
#define SHMB_LAYOUT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define SHMB_PAGE 4096u
#define SHMB_RUNTIME_OFFSET (2u * SHMB_PAGE) /* after the two superblocks, which only Python writes */
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

/* The source of a slot: the client that wrote it and the stream it wrote to. Items of one trajectory have equal
 * sources.
 *
 *     bits 0-38   incarnation of the client; values from SHMB_INCARNATIONS on mean that the item was loaded
 *     bits 39-62  stream
 *
 * memory/format/layout.py composes and decomposes these words, too. */
#define SHMB_STREAMS ((uint64_t)1 << 24)
#define SHMB_INCARNATIONS ((uint64_t)1 << 38)
static inline uint64_t shmb_source(uint64_t incarnation, uint32_t stream) {
    return (uint64_t)stream << 39 | incarnation;
}
static inline uint64_t shmb_stream_of(uint64_t source) { return source >> 39; }

/* Phases of a claim. All except IDLE and PAYLOAD exist only while the mutex is held. */
enum shmb_phase { SHMB_IDLE = 0, SHMB_MARKING = 1, SHMB_PAYLOAD = 2, SHMB_COMMITTING = 3, SHMB_EMPTYING = 4 };

enum shmb_entry_state { SHMB_FREE = 0, SHMB_LIVE = 1 };

/* State of the whole buffer, which clients can see without reading a superblock. */
enum shmb_buffer_state { SHMB_NO_SCHEMA = 0, SHMB_READY = 1, SHMB_RECOVERING = 2, SHMB_CLOSING = 3, SHMB_READ_ONLY = 4 };

/* Limits of both sides; see limiter.c. There are two of them. The last bit of the version selects the one in force. */
struct shmb_limiter {
    double samples_per_insert;
    /* samples; for a quota: elements from inserts_base on that may be written */
    double error_buffer;
    uint64_t min_size;          /* elements that the buffer must hold before any is drawn */
    uint64_t inserts_base;      /* write_count from which inserts are counted */
    uint64_t samples_base;      /* `drawn` from which samples are counted */
    uint64_t max_times_sampled; /* how often a queue hands out one element */
    /* hand-outs of a queue so far, counted from ticket 0: each element counts max_times_sampled times */
    uint64_t queue_next;
    uint32_t when_no_peer;      /* enum shmb_alone */
    uint32_t limits;            /* SHMB_RATIO and SHMB_QUEUE, or SHMB_QUOTA alone */
};
enum shmb_limit_kind { SHMB_RATIO = 1, SHMB_QUEUE = 2, SHMB_MIN_SIZE = 4, SHMB_QUOTA = 8, SHMB_AGES = 16 };

/* Stored beside a limiter with SHMB_AGES: how far an item's version may be behind the consumer's version. */
struct shmb_ages {
    uint64_t max_staleness;     /* versions */
    uint64_t items_per_version; /* elements that one version is made from; 0: no client waits for a version */
    /* write_count from which inserts are counted here; unlike for the ratio, all inserts count */
    uint64_t inserts_base;
    uint64_t version_base;      /* the consumer's version when counting began */
};
enum shmb_alone { SHMB_ALONE_PASS = 0, SHMB_ALONE_WAIT = 1, SHMB_ALONE_ERROR = 2, SHMB_ALONE_QUEUE = 3 };

struct shmb_setting { /* a copy of a limiter and its ages */
    struct shmb_limiter limiter;
    struct shmb_ages ages;
};

/* The side that a client waits for. */
enum shmb_side { SHMB_FOR_SAMPLES = 1, SHMB_FOR_INSERTS = 2 };

/* One page. The mutex guards all fields that follow it, every change of a slot word, and the tree. */
struct shmb_runtime {
    union {
        pthread_mutex_t mutex; /* robust, process-shared, NORMAL; never destroyed */
        unsigned char mutex_bytes[64];
        /* defined by the kernel and glibc: thread id, FUTEX_OWNER_DIED, FUTEX_WAITERS (futex(2)) */
        _Atomic uint32_t mutex_word;
    };
    _Atomic uint64_t head;        /* next ticket */
    _Atomic uint64_t write_count; /* elements written so far */
    _Atomic uint64_t length;      /* number of COMMITTED slots */
    _Atomic uint32_t state;       /* enum shmb_buffer_state */
    _Atomic uint32_t prioritized; /* 1 after a prioritized sampler was bound: the tree is maintained */
    _Atomic double max_priority;  /* largest raw priority ever given; negative: none yet, the default is 1 */
    _Atomic double alpha;         /* also read without the mutex: see alpha_version */
    _Atomic double eps;
    _Atomic uint64_t alpha_version; /* changes whenever alpha or eps changes */
    _Atomic uint64_t next_turn;     /* the last turn number that was assigned */
    _Atomic uint32_t waiters;       /* entries that have a turn number */
    _Atomic uint32_t progress;      /* futex: changes whenever waiters should check again */
    _Atomic uint64_t next_incarnation; /* the last incarnation that was assigned; guarded by init.lock */
    _Atomic uint64_t repairs;          /* times that a process took the mutex from a dead owner */
    _Atomic uint64_t rolled_back;      /* slots aborted on behalf of dead clients */
    _Atomic uint64_t rolled_forward;   /* slots committed on behalf of dead clients */
    _Atomic uint64_t reaped;           /* entries of dead clients that were freed */
    _Atomic uint64_t byte_head;        /* position in the byte ring at which the next record starts */
    _Atomic uint64_t byte_tail;        /* position of the oldest record whose bytes are in use */
    _Atomic uint64_t evicted;          /* items that were evicted to free their bytes */
    _Atomic uint64_t drawn;            /* elements drawn while a ratio was set, and counted for it */
    _Atomic uint64_t pending;          /* elements that the open claims will add to write_count */
    _Atomic uint32_t limiter_version;  /* changes with the limiter; 0: no limiter was ever set */
    _Atomic uint32_t limited;          /* entries that wait for the other side */
    uint64_t inserts_goal;             /* inserts_base after the claim that is COMMITTING is finished */
    _Atomic uint64_t queue_since;      /* head when the buffer became a queue */
    _Atomic uint64_t lock_waits; /* times that a process had to sleep for the mutex */
    struct shmb_limiter limiters[2];
    struct shmb_ages ages[2];    /* one for each limiter */
    /* CLOCK_REALTIME of the last store that no entry has the time of: see restored.py */
    _Atomic uint64_t touched_ns;
    _Atomic uint32_t consumers; /* open consumers of the ledger; 0: a claim skips the ledger */
    uint32_t pad;
    /* elements written by loads; they are not part of any entry's inserts */
    _Atomic uint64_t loaded;
    _Atomic uint64_t reserved;       /* slots of the open reservations */
    _Atomic uint64_t reserved_bytes; /* bytes of the byte ring of the open reservations */
    /* boot clock in ns; no reservation expires before it; 0: none expires */
    _Atomic uint64_t next_expiry;
    _Atomic uint64_t next_reservation; /* id of the last reservation */
    _Atomic uint64_t refused;          /* elements refused because they were too old for the consumer's version */
    _Atomic uint64_t consumer_version; /* version of the policy that the learners report: consumer_version.c */
    /* initial share of a data set in each sample; 0: not set. Only Python uses it */
    double offline_base;
    /* current share of a data set in each sample. Only Python uses it */
    double offline_fraction;
    /* slots below it have space in the files; no claim goes beyond it. Only Python stores it */
    _Atomic uint64_t allocated;
    unsigned char spare[3296]; /* zeros, reserved for later fields */
};

/* One client. The identity is written under init.lock before state = LIVE. The claim is written by its owner, or
 * under the mutex by a process that finishes it after the owner's death. Only the owner writes the counters, and
 * they only grow. They outlive the client, because the totals of the buffer are the sums over all entries. */
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
    _Atomic uint64_t goal;  /* write_count after the claim is finished */
    _Atomic uint64_t turn;  /* 0, or the client's number in the order of those that wait for a slot */
    _Atomic uint64_t turn_ns; /* CLOCK_MONOTONIC when the turn was assigned or became the first one */
    /* for a claim of records: the position of their bytes; for a writer that waits at a queue: the number of bytes */
    _Atomic uint64_t byte_first;
    _Atomic uint64_t inserts;         /* elements committed */
    _Atomic uint64_t aborts;          /* elements that the owner itself rolled back */
    _Atomic uint64_t batches_sampled; /* calls of sample */
    _Atomic uint64_t items_sampled;   /* elements */
    _Atomic uint64_t redraws;         /* rows drawn again because they changed during the copy */
    /* elements written between each sampled item and its sampling, summed */
    _Atomic uint64_t age_sum;
    _Atomic uint64_t updates_applied; /* number of priorities */
    _Atomic uint64_t updates_stale;
    _Atomic uint64_t waits;        /* times that a write had to wait for a slot */
    /* CLOCK_REALTIME of the last write, sample or update: see restored.py */
    _Atomic uint64_t last_seen_ns;
    _Atomic uint64_t pending; /* elements that the open claim will add to write_count */
    /* 1 + the first place that is being copied from a queue; 0: none */
    _Atomic uint64_t reading;
    _Atomic uint32_t waits_for; /* SHMB_FOR_SAMPLES, SHMB_FOR_INSERTS: the sides that must act first */
    uint32_t waits_why;      /* enum shmb_reason: why it waits */
    uint32_t inserts_wanted; /* elements that it waits to write */
    /* elements that it waits to draw; for SHMB_FEW: elements that the buffer must hold */
    uint32_t samples_wanted;
    uint64_t waits_since_ns; /* CLOCK_MONOTONIC */
    _Atomic uint64_t last_insert_ns; /* CLOCK_MONOTONIC; 0: none since the client joined */
    _Atomic uint64_t last_sample_ns;
    uint64_t first_draw;        /* source of the handle's first draw; 0: none. Only Python uses it */
    unsigned char spare[248]; /* zeros, reserved for later fields */
};

/* Slots and bytes that a client reserves for later items; see reservations.c. */
struct shmb_reservation {
    uint64_t id;          /* unique among the reservations that are not UNRESERVED */
    uint64_t incarnation; /* of the holder, whose registry entry is `entry` */
    uint32_t entry;
    _Atomic uint32_t state; /* enum shmb_reservation_state */
    uint64_t rows;          /* slots */
    uint64_t bytes;         /* of the byte ring; 0: unknown */
    /* boot clock (shmb_boot_ns); UINT64_MAX: it ends only with its holder */
    uint64_t expires_ns;
    uint64_t since_ns;      /* the boot clock, for display */
    uint32_t flags;         /* enum shmb_reservation_flag */
    uint32_t pad;
};
enum shmb_reservation_state { SHMB_UNRESERVED = 0, SHMB_OPEN = 1, SHMB_CLAIMED = 2, SHMB_DONE = 3 };
/* PARTIAL: it has pieces in a file. PASSED: the ratio did not count it. */
enum shmb_reservation_flag { SHMB_PARTIAL = 1, SHMB_PASSED = 2 };
#define SHMB_RESERVATIONS 4096u
_Static_assert(sizeof(struct shmb_reservation) == 64, "a reservation is one cache line");

/* A record in the byte ring. Positions only grow. The byte at a position is number position mod max_bytes of the
 * file. The file is mapped twice in a row, so that every record is contiguous. The next header follows the record at
 * a multiple of 8, so the headers lead from the tail to the head. The slot decides whether a header belongs to its
 * current item. */
struct shmb_record {
    uint64_t ticket;
    uint64_t position;
    uint64_t bytes; /* including the header */
};

/* Position of the record of a slot. */
struct shmb_extent {
    uint64_t position, bytes;
};

/* Describes one copy of the weights and proves that it is complete. */
struct shmb_stamp {
    /* 0 while the copy is being written, or after recovery found it damaged */
    _Atomic uint64_t version;
    int64_t step;             /* as given by the publisher */
    uint64_t time_ns;         /* CLOCK_REALTIME */
    uint64_t pid;             /* of the publisher in its pid namespace, for display */
    uint32_t crc32c;          /* of the four fields above and the copy */
    uint32_t pad[7];
};

/* The first page of the weights file. It is followed by the JSON that describes the form of the weights, which never
 * changes, and by two copies of the weights. Version n is in copy n mod 2. See weights.c. */
struct shmb_weights {
    unsigned char magic[8];
    uint16_t format, pad;
    uint32_t endian;
    uint64_t copy_bytes; /* of each copy */
    uint64_t copies;     /* offset of the first copy; the second one follows it */
    uint32_t form_bytes; /* of the JSON */
    uint32_t crc32c;     /* of all fields before it and the JSON */
    uint64_t spare[3];
    _Atomic uint64_t newest; /* the current version; 0: nothing was published */
    uint64_t beside[7];
    struct shmb_stamp stamps[2];
};
_Static_assert(sizeof(struct shmb_stamp) == 64, "a stamp is one cache line");
_Static_assert(sizeof(struct shmb_weights) == 256, "the page of the weights has its fixed size");

enum shmb_claim_kind { SHMB_RING_WRITE = 0, SHMB_PLACED = 1, SHMB_IN_PLACE = 2 };

_Static_assert(sizeof(struct shmb_record) == 24, "the header of a record has its fixed size");
_Static_assert(sizeof(struct shmb_limiter) == 64, "a limiter is one cache line");
_Static_assert(sizeof(struct shmb_ages) == 32, "ages have their fixed size");
/* The last bytes of the runtime page are the record of the last recovery, which only Python reads and writes. */
#define SHMB_RECOVERY_BYTES 256u
_Static_assert(sizeof(struct shmb_runtime) == SHMB_PAGE - SHMB_RECOVERY_BYTES, "the runtime page is one page");
_Static_assert(sizeof(struct shmb_entry) == SHMB_ENTRY_BYTES, "a registry entry has its fixed size");
_Static_assert(sizeof(pthread_mutex_t) <= 64, "the mutex has its place");

/* Location of the next observation of a slot's item, in a buffer that stores each observation once; see sharing.c.
 *
 *     bits 0-30   of a link: distance in slots to the next observation; otherwise the number of the own row
 *     bits 31-61  distance back to the item whose next observation is stored in this slot; 0: none
 *     bit 62      the item had a link, and has an own row now
 *     bit 63      the next observation is in an own row, which is not part of the ring
 */
#define SHMB_OWN_ROW ((uint64_t)1 << 63)
#define SHMB_UNLINKED_OWN_ROW ((uint64_t)1 << 62)
#define SHMB_NEXT_BITS 31
#define SHMB_NEXT_LIMIT ((uint64_t)1 << SHMB_NEXT_BITS) /* limit for the slots and for the own rows of such a buffer */
#define SHMB_AHEAD_OF(word) ((word) & (SHMB_NEXT_LIMIT - 1))
#define SHMB_BACK_OF(word) ((word) >> SHMB_NEXT_BITS & (SHMB_NEXT_LIMIT - 1))
#define SHMB_BACK_BITS ((SHMB_NEXT_LIMIT - 1) << SHMB_NEXT_BITS)

/* The sections of the slots file, each aligned to a cache line:
 *   words u64[N] | checksums u32[N] | sources u64[N] | raw f64[L] | mass f64[pad16(L)] |
 *   for each level k = 1.. until one node is left: sum f64[pad16(n_k)] , min f64[pad16(n_k)] |
 *   if items are records: extents (position u64, bytes u64)[N] |
 *   if observations are stored once: nexts u64[N] | holders u32[K], the slot that each own row was last assigned to
 * with L = N * lanes, n_1 = ceil(L / 16), n_k+1 = ceil(n_k / 16). A file of zeros is an empty ring. */
struct shmb_sections {
    uint64_t words, checksums, sources, raw, mass, extents, nexts, holders;
    uint64_t sum[SHMB_MAX_DEPTH], min[SHMB_MAX_DEPTH]; /* offsets; index 0 unused */
    uint64_t nodes[SHMB_MAX_DEPTH];                    /* nodes[k] = n_k; nodes[0] = L */
    unsigned depth;                                    /* level of the root, which is one node */
    uint64_t bytes;
};

/* The ledger file records which items were delivered to which clients. After the first page, each part starts on a
 * page:
 *
 *     reservations[4096] | for each consumer: leases[1024], deliveries[N]
 *
 * A page of zeros means that nothing was delivered. The file ends after the last part in use, but the mapping covers
 * all parts. Bytes beyond `bytes` are never accessed. See consume.c. */
#define SHMB_CONSUMERS 8u
#define SHMB_LEASES 1024u
#define SHMB_CONSUMER_NAME 48u

enum shmb_consumer_state { SHMB_CONSUMER_CLOSED = 0, SHMB_CONSUMER_OPEN = 1 };

/* All fields are guarded by the mutex. */
struct shmb_consumer {
    unsigned char name[SHMB_CONSUMER_NAME]; /* UTF-8, padded with zeros */
    _Atomic uint32_t state;       /* enum shmb_consumer_state */
    uint32_t times;               /* acknowledgements that complete an item */
    uint32_t holds;               /* 1: no item is overwritten before it is complete */
    uint32_t pad;
    _Atomic uint64_t next;        /* place from which on nothing was delivered yet */
    _Atomic uint64_t floor;       /* place below which all items are complete or gone */
    uint64_t since;               /* head when the consumer was opened: see shmb_place_since */
    _Atomic uint64_t open_leases; /* leases in use */
    _Atomic uint64_t delivered;   /* items, as are the next four counters */
    _Atomic uint64_t acked;
    _Atomic uint64_t redelivered;
    _Atomic uint64_t refused;     /* acknowledgements that came too late */
    _Atomic uint64_t dropped;     /* given up without a delivery */
    uint64_t created_ns;          /* CLOCK_REALTIME, for display */
    /* unique in the directory; distinguishes it from a later consumer of the same name */
    uint64_t number;
    uint64_t unused[13];
};

/* Items that were delivered together to one client. */
struct shmb_lease {
    /* unique in the directory; its index is id mod SHMB_LEASES; 0: not in use */
    _Atomic uint64_t id;
    uint32_t entry, pad;   /* of the holder */
    uint64_t incarnation;  /* of the holder */
    uint64_t deadline_ns;  /* boot clock; UINT64_MAX: until the holder dies */
    uint64_t first, end;   /* range of places that contains the items */
    uint64_t left;         /* items that are still under the lease */
    uint64_t taken_ns;     /* boot clock at the delivery */
};

/* Delivery state of one slot. It is valid only for the item with its ticket. */
struct shmb_delivery {
    _Atomic uint64_t ticket; /* 1 + ticket of the item; 0: no delivery */
    _Atomic uint64_t bits;   /* the bits below */
};
/* bits 0-52 the lease | bits 53-62 number of acknowledgements | bit 63 the item is under the lease */
#define SHMB_LEASE_BITS 53
#define SHMB_LEASE_OF(bits) ((bits) & (((uint64_t)1 << SHMB_LEASE_BITS) - 1))
#define SHMB_ACKS_OF(bits) ((bits) << 1 >> (SHMB_LEASE_BITS + 1))
#define SHMB_MAX_ACKS 1023u
#define SHMB_LEASED_BIT ((uint64_t)1 << 63)

struct shmb_ledger {
    struct shmb_consumer consumers[SHMB_CONSUMERS];
    _Atomic uint64_t next_lease; /* the next id; all lower ones were assigned */
    _Atomic uint64_t bytes;      /* minimum size of the file. Only Python writes it */
    uint64_t unused[254];
};
_Static_assert(sizeof(struct shmb_consumer) == 256, "a consumer has its fixed size");
_Static_assert(sizeof(struct shmb_lease) == 64, "a lease is one cache line");
_Static_assert(sizeof(struct shmb_delivery) == 16, "a delivery has its fixed size");
_Static_assert(sizeof(struct shmb_ledger) == SHMB_PAGE, "the ledger begins with one page");

struct shmb_ledger_parts {           /* offsets in the ledger */
    uint64_t reservations;
    uint64_t consumers, each; /* offset of the first consumer's leases; bytes per consumer */
    uint64_t deliveries;      /* relative to the consumer's leases */
    uint64_t bytes;           /* size of the file with all parts */
};

void shmb_compute_parts(uint64_t capacity, struct shmb_ledger_parts *out);
void shmb_compute_sections(uint64_t capacity, uint64_t lanes, bool records, uint64_t own_rows, struct shmb_sections *out);

#endif
