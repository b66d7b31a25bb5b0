/* Crash points: every step of every protocol has a name. The points are compiled into the released build and do
 * nothing unless a test arms one. An armed point counts down, and then ends, stops or pauses the process, so that a
 * test can kill it at exactly one step. Each point is also a compiler barrier: the stores before it reach memory
 * before those after it. The death of a process can observe nothing else. */
#ifndef SHMB_CRASHPOINT_H
#define SHMB_CRASHPOINT_H

#include <stdatomic.h>

#define SHMB_CRASH_POINTS(X)                                                                                 \
    X(write_locked, "write.locked")                                                                          \
    X(write_kind, "write.kind")                                                                              \
    X(write_first, "write.first")                                                                            \
    X(write_noted, "write.noted")                                                                            \
    X(write_marking, "write.marking")                                                                        \
    X(write_head, "write.head")                                                                              \
    X(write_mark, "write.mark")                                                                              \
    X(write_length, "write.length")                                                                          \
    X(write_mass, "write.mass")                                                                      \
    X(write_evict_leaf, "write.evict_leaf")                                                                  \
    X(write_evict, "write.evict")                                                                            \
    X(write_evicted, "write.evicted")                                                                        \
    X(write_tail, "write.tail")                                                                              \
    X(write_byte_first, "write.byte_first")                                                                  \
    X(write_header, "write.header")                                                                          \
    X(write_extent, "write.extent")                                                                          \
    X(write_bytes, "write.bytes")                                                                            \
    X(write_claim_parents, "write.claim_parents")                                                            \
    X(write_payload, "write.payload")                                                                        \
    X(write_claimed, "write.claimed")                                                                        \
    X(write_source, "write.source")                                                                          \
    X(write_raw, "write.raw")                                                                                \
    X(write_copy, "write.copy")                                                                              \
    X(write_priority, "write.priority")                                                                      \
    X(write_checksum, "write.checksum")                                                                      \
    X(share_copied, "share.copied")                                                                          \
    X(share_assigned, "share.assigned")                                                                              \
    X(share_own_row, "share.own_row")                                                                              \
    X(share_holder, "share.holder")                                                                          \
    X(share_next, "share.next")                                                                              \
    X(share_source, "share.source")                                                                          \
    X(share_filled, "share.filled")                                                                          \
    X(share_back, "share.back")                                                                              \
    X(share_link, "share.link")                                                                              \
    X(share_restored, "share.restored")                                                                            \
    X(share_dropped, "share.dropped")                                                                        \
    X(write_relocked, "write.relocked")                                                                      \
    X(write_max_priority, "write.max_priority")                                                              \
    X(write_goal, "write.goal")                                                                              \
    X(write_committing, "write.committing")                                                                  \
    X(write_default, "write.default")                                                                        \
    X(write_leaf, "write.leaf")                                                                              \
    X(write_commit, "write.commit")                                                                          \
    X(write_lengthened, "write.lengthened")                                                                  \
    X(write_commit_parents, "write.commit_parents")                                                          \
    X(write_count, "write.count")                                                                            \
    X(write_idle, "write.idle")                                                                              \
    X(write_done, "write.done")                                                                              \
    X(abort_locked, "abort.locked")                                                                          \
    X(abort_word, "abort.word")                                                                              \
    X(abort_idle, "abort.idle")                                                                              \
    X(update_locked, "update.locked")                                                                        \
    X(update_raw, "update.raw")                                                                              \
    X(update_leaf, "update.leaf")                                                                            \
    X(update_max_priority, "update.max_priority")                                                            \
    X(update_parents, "update.parents")                                                                      \
    X(update_unlocked, "update.unlocked")                                                                    \
    X(alpha_alpha, "alpha.alpha")                                                                            \
    X(alpha_eps, "alpha.eps")                                                                                \
    X(alpha_version, "alpha.version")                                                                        \
    X(alpha_stored, "alpha.stored")                                                                          \
    X(alpha_leaves, "alpha.leaves")                                                                          \
    X(alpha_parents, "alpha.parents")                                                                        \
    X(raise_max_priority, "raise.max_priority")                                                              \
    X(sample_locked, "sample.locked")                                                                        \
    X(sample_drawn, "sample.drawn")                                                                          \
    X(sample_unlocked, "sample.unlocked")                                                                    \
    X(sample_copy, "sample.copy")                                                                            \
    X(sample_validate, "sample.validate")                                                                    \
    X(empty_locked, "empty.locked")                                                                          \
    X(empty_first, "empty.first")                                                                            \
    X(empty_span, "empty.span")                                                                              \
    X(empty_noted, "empty.noted")                                                                            \
    X(empty_emptying, "empty.emptying")                                                                      \
    X(empty_head, "empty.head")                                                                              \
    X(empty_max_priority, "empty.max_priority")                                                              \
    X(empty_leaf, "empty.leaf")                                                                              \
    X(empty_word, "empty.word")                                                                              \
    X(empty_length, "empty.length")                                                                          \
    X(empty_parents, "empty.parents")                                                                        \
    X(empty_count, "empty.count")                                                                            \
    X(empty_idle, "empty.idle")                                                                              \
    X(empty_unlocked, "empty.unlocked")                                                                      \
    X(reserve_numbered, "reserve.numbered")                                                                  \
    X(reserve_noted, "reserve.noted")                                                                        \
    X(reserve_open, "reserve.open")                                                                          \
    X(reserve_counted, "reserve.counted")                                                                    \
    X(reserve_expiry, "reserve.expiry")                                                                      \
    X(reserve_claimed, "reserve.claimed")                                                                    \
    X(reserve_returned, "reserve.returned")                                                                  \
    X(reserve_spent, "reserve.spent")                                                                        \
    X(reserve_ended, "reserve.ended")                                                                        \
    X(reserve_repaired, "reserve.repaired")                                                                      \
    X(reserve_partial, "reserve.partial")                                                                    \
    X(reserve_forgotten, "reserve.forgotten")                                                                \
    X(reap_locked, "reap.locked")                                                                            \
    X(reap_default, "reap.default")                                                                          \
    X(reap_mass, "reap.mass")                                                                                \
    X(reap_leaf, "reap.leaf")                                                                                \
    X(reap_word, "reap.word")                                                                                \
    X(reap_length, "reap.length")                                                                            \
    X(reap_head, "reap.head")                                                                                \
    X(reap_count, "reap.count")                                                                              \
    X(reap_parents, "reap.parents")                                                                          \
    X(reap_idle, "reap.idle")                                                                                \
    X(reap_freed, "reap.freed")                                                                              \
    X(reap_unlocked, "reap.unlocked")                                                                        \
    X(repair_claims, "repair.claims")                                                                        \
    X(repair_waiters, "repair.waiters")                                                                      \
    X(repair_version, "repair.version")                                                                      \
    X(repair_leaves, "repair.leaves")                                                                        \
    X(repair_parents, "repair.parents")                                                                      \
    X(repair_idle, "repair.idle")                                                                            \
    X(repair_consistent, "repair.consistent")                                                                \
    X(leave_claim, "leave.claim")                                                                            \
    X(leave_freed, "leave.freed")                                                                            \
    X(restore_head, "restore.head")                                                                          \
    X(restore_count, "restore.count")                                                                        \
    X(restore_max_priority, "restore.max_priority")                                                          \
    X(copy_snapshot, "copy.snapshot")                                                                            \
    X(wait_turn, "wait.turn")                                                                                \
    X(wait_forfeit, "wait.forfeit")                                                                          \
    X(turn_numbered, "turn.numbered")                                                                        \
    X(turn_dated, "turn.dated")                                                                              \
    X(turn_noted, "turn.noted")                                                                              \
    X(turn_returned, "turn.returned")                                                                        \
    X(version_stored, "version.stored")                                                                      \
    X(wake_progress, "wake.progress")                                                                        \
    X(flow_pending, "flow.pending")                                                                          \
    X(flow_promised, "flow.promised")                                                                        \
    X(flow_settled, "flow.settled")                                                                          \
    X(flow_waits, "flow.waits")                                                                              \
    X(flow_limited, "flow.limited")                                                                          \
    X(flow_base, "flow.base")                                                                                \
    X(flow_goal, "flow.goal")                                                                                \
    X(flow_drawn, "flow.drawn")                                                                              \
    X(flow_reading, "flow.reading")                                                                          \
    X(flow_taken, "flow.taken")                                                                              \
    X(flow_passed, "flow.passed")                                                                            \
    X(flow_stored, "flow.stored")                                                                            \
    X(flow_published, "flow.published")                                                                      \
    X(consume_numbered, "consume.numbered")                                                                  \
    X(consume_noted, "consume.noted")                                                                        \
    X(consume_lent, "consume.lent")                                                                          \
    X(consume_given, "consume.given")                                                                        \
    X(consume_ticket, "consume.ticket")                                                                          \
    X(consume_acked, "consume.acked")                                                                        \
    X(consume_left, "consume.left")                                                                          \
    X(consume_freed, "consume.freed")                                                                        \
    X(consume_ended, "consume.ended")                                                                        \
    X(consume_next, "consume.next")                                                                          \
    X(consume_floor, "consume.floor")                                                                        \
    X(consume_cleared, "consume.cleared")                                                                    \
    X(consume_opened, "consume.opened")                                                                      \
    X(consume_begun, "consume.begun")                                                                        \
    X(consume_counted, "consume.counted")                                                                    \
    X(consume_removed, "consume.removed")                                                                    \
    X(consume_repaired, "consume.repaired")                                                                      \
    X(mutex_cleared, "mutex.cleared")                                                                        \
    X(mutex_initialised, "mutex.initialised")                                                                              \
    X(mutex_locked, "mutex.locked")                                                                          \
    X(mutex_waiting, "mutex.waiting")                                                                        \
    X(mutex_unlocked, "mutex.unlocked")                                                                      \
    X(tree_sum, "tree.sum")                                                                                  \
    X(tree_least, "tree.least")                                                                              \
    X(leaves_padding, "leaves.padding")                                                                      \
    X(leaves_raw, "leaves.raw")                                                                              \
    X(leaves_mass, "leaves.mass")                                                                            \
    X(leaves_length, "leaves.length")                                                                        \
    X(relink_header, "relink.header")                                                                        \
    X(relink_forgotten, "relink.forgotten")                                                                  \
    X(relink_tail, "relink.tail")                                                                            \
    X(relink_head, "relink.head")                                                                            \
    X(weights_begun, "weights.begun")                                                                        \
    X(weights_copied, "weights.copied")                                                                      \
    X(weights_step, "weights.step")                                                                          \
    X(weights_dated, "weights.dated")                                                                        \
    X(weights_signed, "weights.signed")                                                                      \
    X(weights_checksum, "weights.checksum")                                                                  \
    X(weights_whole, "weights.whole")                                                                        \
    X(weights_published, "weights.published")                                                                \
    X(weights_looked, "weights.looked")                                                                      \
    X(weights_taken, "weights.taken")                                                                        \
    X(count_added, "count.added")

enum shmb_crash_point {
    SHMB_CP_NONE = 0,
#define X(symbol, name) SHMB_CP_##symbol,
    SHMB_CRASH_POINTS(X)
#undef X
        SHMB_CP_NATIVE_END
};

/* Points in Python code (creation, join, recovery, barrier, cleanup) have numbers from here on. */
#define SHMB_CP_PYTHON 1000

/* Arms all points, by the name "*". Each pauses and reports its name, for tests that record every step. */
#define SHMB_CP_EVERY 1001

enum shmb_crash_action {
    SHMB_KILL = 0,
    SHMB_STOP = 1,
    SHMB_TERM = 2,
    SHMB_PAUSE = 3,
    SHMB_INT = 4,
    SHMB_EXEC = 5, /* replaces the process by a program that exits at once with status 0 */
};

extern _Atomic int shmb_armed;

void shmb_crash_point_reached(int point);
int shmb_crash_arm(const char *name, enum shmb_crash_action action, long after, int notify_fd, int wait_fd);
void shmb_crash_disarm(void);
void shmb_crash_point_named(const char *name);
const char *shmb_crash_point_name(int point);

#define CP(symbol)                                                                                           \
    do {                                                                                                     \
        atomic_signal_fence(memory_order_seq_cst);                                                           \
        if (__builtin_expect(atomic_load_explicit(&shmb_armed, memory_order_relaxed) != SHMB_CP_NONE, 0))    \
            shmb_crash_point_reached(SHMB_CP_##symbol);                                                      \
    } while (0)

/* For loops over rows, in which points would take half of the time. The loop tests once whether a point is armed. */
#define SHMB_ARMED (atomic_load_explicit(&shmb_armed, memory_order_relaxed) != SHMB_CP_NONE)
#define CP_ROW(armed, symbol)                                                                                \
    do {                                                                                                     \
        atomic_signal_fence(memory_order_seq_cst);                                                           \
        if (armed) CP(symbol);                                                                               \
    } while (0)

#endif
