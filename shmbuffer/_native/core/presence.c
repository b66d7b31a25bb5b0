/* Checks whether the directory of a buffer still exists. Mappings outlive the names of their files: after `rm -rf` a
 * write goes into pages that no other process can ever open. So a process that writes, draws, weighs or waits looks
 * for the control file once a second, without a lock. The lookup starts from the descriptor of the directory, so a
 * renamed directory is found. A removal by the library sets CLOSING before it removes the first file, and CLOSING
 * has its own errors. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "core/ring.h"

#define CHECK_NS 1000000000 /* between two checks */

static bool is_file_present(const struct shmb_presence *presence) {
    struct stat status;
    if (fstatat(presence->folder, presence->name, &status, AT_SYMLINK_NOFOLLOW)) return errno != ENOENT;
    return (uint64_t)status.st_dev == presence->device && (uint64_t)status.st_ino == presence->inode;
}

/* A closed handle closes its descriptor after it has left the registry. A check after that is meaningless. */
bool shmb_is_removed(struct shmb_ring *ring, int64_t now_ns) {
    struct shmb_presence *presence = &ring->presence;
    if (presence->name == NULL) return false;
    if (now_ns - atomic_load_explicit(&presence->looked_ns, memory_order_relaxed) < CHECK_NS) return false;
    if (!is_file_present(presence) && atomic_load(&ring->left) == 0 &&
        atomic_load(&ring->runtime->state) != (uint32_t)SHMB_CLOSING)
        return true;
    atomic_store_explicit(&presence->looked_ns, now_ns, memory_order_relaxed);
    return false;
}
