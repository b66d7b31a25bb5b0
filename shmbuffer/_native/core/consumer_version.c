/* The version of the learners' policy, as one number, which decreases only if a caller sets it explicitly. It needs
 * no mutex: each change is one store, and a process that dies after it leaves the new version. Waiting clients are
 * woken, or check again after some milliseconds. */
#include "core/ring.h"

uint64_t shmb_consumer_version(struct shmb_runtime *runtime, enum shmb_version_change change, uint64_t value) {
    uint64_t now = atomic_load_explicit(&runtime->consumer_version, memory_order_relaxed), next;
    for (bool stored = false; !stored;) {
        if (change == SHMB_VERSION_AT_LEAST && now >= value) return now;
        next = change == SHMB_VERSION_ADD ? now + value : value;
        stored = atomic_compare_exchange_strong_explicit(&runtime->consumer_version, &now, next, memory_order_relaxed,
                                                         memory_order_relaxed);
        CP(version_stored);
    }
    shmb_wake_waiters(runtime);
    return next;
}
