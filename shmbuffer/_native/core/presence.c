/* Whether the directory of a buffer is still there. Maps outlive the names of their files: after `rm -rf` a write goes
 * into pages that no process will ever find again. So a process that writes, draws, weighs or waits looks for the control file,
 * once a second, with no lock held. It starts from the descriptor of the directory, so a moved one is found.
 * A removal by the library sets CLOSING before its first file goes, which has errors of its own. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "core/ring.h"

#define LOOK_NS 1000000000 /* between two looks */

static bool is_there(const struct shmb_presence *presence) {
    struct stat found;
    if (fstatat(presence->folder, presence->name, &found, AT_SYMLINK_NOFOLLOW)) return errno != ENOENT;
    return (uint64_t)found.st_dev == presence->device && (uint64_t)found.st_ino == presence->inode;
}

/* A closed handle closes its descriptor after it has left: a look after that says nothing. */
bool shmb_is_removed(struct shmb_ring *ring, int64_t now_ns) {
    struct shmb_presence *presence = &ring->presence;
    if (presence->name == NULL) return false;
    if (now_ns - atomic_load_explicit(&presence->looked_ns, memory_order_relaxed) < LOOK_NS) return false;
    if (!is_there(presence) && atomic_load(&ring->left) == 0 &&
        atomic_load(&ring->runtime->state) != (uint32_t)SHMB_CLOSING)
        return true;
    atomic_store_explicit(&presence->looked_ns, now_ns, memory_order_relaxed);
    return false;
}
