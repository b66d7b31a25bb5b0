#define _GNU_SOURCE
/* A library that is preloaded into a process and makes the n-th libc call on watched files fail.
 *
 *     faults_watch(prefix)          watches files with this prefix, such as "/proc/" or "/memfd:"
 *     faults_arm(at, error, kinds)  counts calls from now on; call number `at` fails with `error`, and so does every
 *                                   later one whose kind is in `kinds` (a bit mask, 0 for none)
 *     faults_disarm()               returns the number of calls
 *
 * System calls that are not made through a libc function (futexes, the dynamic loader, libc's own calls) cannot be
 * intercepted. A failing call is not executed, except `close`, because a descriptor is free whatever `close` returns.
 * SHORT makes a read or a write transfer half of its bytes.
 *
 * Allocations are counted if the C core itself calls malloc, calloc or realloc. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KINDS(X)                                                                                                        \
    X(open) X(open_rw) X(create) X(close) X(stat) X(fstat) X(access) X(statfs) X(statvfs) X(mkdir) X(rmdir) X(unlink)  \
    X(rename) X(exchange) X(link) X(chmod) X(flock) X(unlock) X(dup) X(fallocate) X(truncate) X(mmap) X(msync) X(fsync)          \
    X(opendir) X(readdir) X(read) X(write) X(readlink) X(memfd) X(malloc)

enum kind {
#define X(name) KIND_##name,
    KINDS(X)
#undef X
    KIND_END
};

static const char *const kind_names[] = {
#define X(name) #name,
    KINDS(X)
#undef X
};

#define SHORT (-1)
#define MAX_CALLS 4096

struct call {
    int kind;
    char path[124];
};

static struct call calls[MAX_CALLS];
static char watched[8][256];
static int n_watched;
static bool armed;
static long seen, fail_at, failed;
static int fail_with;
static unsigned long long fail_kinds;
static char *core_begin, *core_end;
static __thread bool inside; /* calls of this library are not counted */

const char *faults_kind_name(int kind) { return kind >= 0 && kind < KIND_END ? kind_names[kind] : NULL; }
const struct call *faults_calls(void) { return calls; }
long faults_failed(void) { return failed; }

void faults_watch(const char *prefix) {
    if (prefix == NULL) n_watched = 0;
    else if (n_watched < 8) snprintf(watched[n_watched++], sizeof watched[0], "%s", prefix);
}

static int find_core(struct dl_phdr_info *object, size_t size, void *unused) {
    (void)size, (void)unused;
    if (strstr(object->dlpi_name, "/_core.abi3.so") == NULL) return 0;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_LOAD && object->dlpi_phdr[i].p_flags & PF_X) {
            core_begin = (char *)object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
            core_end = core_begin + object->dlpi_phdr[i].p_memsz;
        }
    return 1;
}

void faults_arm(long at, int error, unsigned long long kinds) {
    dl_iterate_phdr(find_core, NULL);
    seen = failed = 0;
    fail_at = at, fail_with = error, fail_kinds = kinds;
    armed = true;
}

long faults_disarm(void) {
    armed = false;
    return seen;
}

static bool of_core(const void *caller) { return (char *)caller >= core_begin && (char *)caller < core_end; }

/* Counts a call on a watched file. If the call has to fail, sets errno and returns true. */
static bool fails(enum kind kind, const char *path) {
    if (seen < MAX_CALLS) {
        calls[seen].kind = (int)kind;
        size_t length = strlen(path), room = sizeof calls[0].path - 1;
        snprintf(calls[seen].path, sizeof calls[0].path, "%s", length > room ? path + length - room : path);
    }
    long number = seen++;
    if (fail_at < 0 || number < fail_at || (number > fail_at && !(fail_kinds >> kind & 1))) return false;
    failed++;
    errno = fail_with;
    return true;
}

static bool is_watched(const char *path) {
    for (int i = 0; i < n_watched; i++)
        if (strncmp(path, watched[i], strlen(watched[i])) == 0) return true;
    return false;
}

static bool path_of(int fd, char *out, size_t size) {
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, name, out, size - 1);
    if (length < 0) return false;
    out[length] = 0;
    return true;
}

static bool fd_fails(enum kind kind, int fd) {
    char path[4096];
    if (!armed || inside || fd < 0) return false;
    inside = true;
    int before = errno;
    bool found = path_of(fd, path, sizeof path) && is_watched(path);
    errno = before;
    bool failing = found && fails(kind, path);
    inside = false;
    return failing;
}

static bool at_fails(enum kind kind, int folder, const char *name) {
    char path[8192];
    if (!armed || inside || name == NULL) return false;
    if (name[0] != '/' && folder < 0) return false;
    inside = true;
    int before = errno;
    bool found = true;
    int number, end = 0;
    if (sscanf(name, "/proc/self/fd/%d%n", &number, &end) == 1 && name[end] == '/') {
        found = path_of(number, path, 4096);
        if (found) snprintf(path + strlen(path), sizeof path - strlen(path), "%s", name + end);
    } else if (name[0] == '/') {
        snprintf(path, sizeof path, "%s", name);
    } else {
        found = path_of(folder, path, 4096);
        if (found) snprintf(path + strlen(path), sizeof path - strlen(path), "/%s", name);
    }
    found = found && is_watched(path);
    errno = before;
    bool failing = found && fails(kind, path);
    inside = false;
    return failing;
}

static bool core_fails(enum kind kind, const void *caller) {
    if (!armed || inside || !of_core(caller)) return false;
    inside = true;
    bool failing = fails(kind, "(the core)");
    inside = false;
    return failing;
}

#define REAL(name)                                                                                                      \
    static __typeof__(&name) real;                                                                                      \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static enum kind kind_of_open(int flags) {
    if (flags & O_CREAT) return KIND_create;
    return (flags & O_ACCMODE) == O_RDONLY ? KIND_open : KIND_open_rw;
}

static mode_t mode_of(int flags, va_list arguments) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; }

#define OPEN(name)                                                                                                      \
    int name(const char *path, int flags, ...) {                                                                        \
        REAL(name);                                                                                                     \
        va_list arguments;                                                                                              \
        va_start(arguments, flags);                                                                                     \
        mode_t mode = mode_of(flags, arguments);                                                                        \
        va_end(arguments);                                                                                              \
        return at_fails(kind_of_open(flags), -1, path) ? -1 : real(path, flags, mode);                                  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                    \
    int name(int folder, const char *path, int flags, ...) {                                                            \
        REAL(name);                                                                                                     \
        va_list arguments;                                                                                              \
        va_start(arguments, flags);                                                                                     \
        mode_t mode = mode_of(flags, arguments);                                                                        \
        va_end(arguments);                                                                                              \
        return at_fails(kind_of_open(flags), folder, path) ? -1 : real(folder, path, flags, mode);                      \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
    REAL(close);
    if (!fd_fails(KIND_close, fd)) return real(fd);
    real(fd);
    errno = fail_with;
    return -1;
}

/* CALL(kind, function, parameters, arguments, whether it fails) */
#define CALL(type, failure, name, parameters, arguments, condition)                                                     \
    type name parameters {                                                                                              \
        REAL(name);                                                                                                     \
        return (condition) ? failure : real arguments;                                                                  \
    }
#define ON_PATH(kind, name, parameters, arguments) CALL(int, -1, name, parameters, arguments, at_fails(kind, -1, path))
#define ON_FD(kind, name, parameters, arguments) CALL(int, -1, name, parameters, arguments, fd_fails(kind, fd))
#define AT(kind, name, parameters, arguments) CALL(int, -1, name, parameters, arguments, at_fails(kind, folder, path))

ON_PATH(KIND_stat, stat, (const char *path, struct stat *out), (path, out))
ON_PATH(KIND_stat, stat64, (const char *path, struct stat64 *out), (path, out))
ON_PATH(KIND_stat, lstat, (const char *path, struct stat *out), (path, out))
ON_PATH(KIND_stat, lstat64, (const char *path, struct stat64 *out), (path, out))

/* The core checks at intervals that the control file exists (presence.c). These calls are not counted, so that the
 * others have the same numbers in every run. tests/processes/test_removed_directory.py tests a failing check. */
#define LOOK(name, type)                                                                                                \
    int name(int folder, const char *path, struct type *out, int flags) {                                               \
        REAL(name);                                                                                                     \
        bool of_the_clock = of_core(__builtin_return_address(0));                                                       \
        return !of_the_clock && at_fails(KIND_stat, folder, path) ? -1 : real(folder, path, out, flags);                \
    }
LOOK(fstatat, stat)
LOOK(fstatat64, stat64)

ON_FD(KIND_fstat, fstat, (int fd, struct stat *out), (fd, out))
ON_FD(KIND_fstat, fstat64, (int fd, struct stat64 *out), (fd, out))
ON_PATH(KIND_access, access, (const char *path, int mode), (path, mode))
ON_FD(KIND_statfs, fstatfs, (int fd, struct statfs *out), (fd, out))
ON_FD(KIND_statvfs, fstatvfs, (int fd, struct statvfs *out), (fd, out))
ON_FD(KIND_statvfs, fstatvfs64, (int fd, struct statvfs64 *out), (fd, out))
ON_PATH(KIND_statvfs, statvfs64, (const char *path, struct statvfs64 *out), (path, out))
ON_PATH(KIND_mkdir, mkdir, (const char *path, mode_t mode), (path, mode))
AT(KIND_mkdir, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
ON_PATH(KIND_rmdir, rmdir, (const char *path), (path))
ON_PATH(KIND_unlink, unlink, (const char *path), (path))
AT(flags & AT_REMOVEDIR ? KIND_rmdir : KIND_unlink, unlinkat, (int folder, const char *path, int flags),
   (folder, path, flags))
ON_PATH(KIND_rename, rename, (const char *path, const char *to), (path, to))
AT(KIND_rename, renameat, (int folder, const char *path, int to_folder, const char *to), (folder, path, to_folder, to))
AT(KIND_exchange, renameat2, (int folder, const char *path, int to_folder, const char *to, unsigned flags),
   (folder, path, to_folder, to, flags))
ON_PATH(KIND_link, link, (const char *path, const char *to), (path, to))
ON_PATH(KIND_chmod, chmod, (const char *path, mode_t mode), (path, mode))
ON_FD(KIND_chmod, fchmod, (int fd, mode_t mode), (fd, mode))
ON_FD(operation & LOCK_UN ? KIND_unlock : KIND_flock, flock, (int fd, int operation), (fd, operation))
ON_FD(KIND_truncate, ftruncate, (int fd, off_t size), (fd, size))
ON_FD(KIND_truncate, ftruncate64, (int fd, off64_t size), (fd, size))
ON_PATH(KIND_truncate, truncate64, (const char *path, off64_t size), (path, size))
ON_FD(KIND_fsync, fsync, (int fd), (fd))
ON_FD(KIND_fsync, fdatasync, (int fd), (fd))

CALL(int, fail_with, posix_fallocate, (int fd, off_t from, off_t size), (fd, from, size), fd_fails(KIND_fallocate, fd))
CALL(int, fail_with, posix_fallocate64, (int fd, off64_t from, off64_t size), (fd, from, size),
     fd_fails(KIND_fallocate, fd))
CALL(DIR *, NULL, opendir, (const char *path), (path), at_fails(KIND_opendir, -1, path))
CALL(DIR *, NULL, fdopendir, (int fd), (fd), fd_fails(KIND_opendir, fd))
CALL(struct dirent *, NULL, readdir, (DIR * stream), (stream), fd_fails(KIND_readdir, dirfd(stream)))
CALL(struct dirent64 *, NULL, readdir64, (DIR * stream), (stream), fd_fails(KIND_readdir, dirfd(stream)))
CALL(ssize_t, -1, readlink, (const char *restrict path, char *restrict out, size_t size), (path, out, size),
     at_fails(KIND_readlink, -1, path))
CALL(int, -1, msync, (void *address, size_t size, int flags), (address, size, flags),
     core_fails(KIND_msync, __builtin_return_address(0)))

/* Anonymous maps are counted only if the core creates them. */
#define MMAP(name, offset_type)                                                                                         \
    CALL(void *, MAP_FAILED, name, (void *address, size_t size, int protection, int flags, int fd, offset_type offset), \
         (address, size, protection, flags, fd, offset),                                                                \
         fd < 0 ? core_fails(KIND_mmap, __builtin_return_address(0)) : fd_fails(KIND_mmap, fd))
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

static bool memfd_fails(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "/memfd:%s", name);
    return at_fails(KIND_memfd, -1, path);
}
CALL(int, -1, memfd_create, (const char *name, unsigned flags), (name, flags), memfd_fails(name))

#define MOVE(kind, name, parameters, arguments, half)                                                                   \
    ssize_t name parameters {                                                                                           \
        REAL(name);                                                                                                     \
        if (!fd_fails(kind, fd)) return real arguments;                                                                 \
        return errno == SHORT && size > 1 ? real half : errno == SHORT ? real arguments : -1;                           \
    }
MOVE(KIND_read, read, (int fd, void *out, size_t size), (fd, out, size), (fd, out, size / 2))
MOVE(KIND_read, pread, (int fd, void *out, size_t size, off_t at), (fd, out, size, at), (fd, out, size / 2, at))
MOVE(KIND_read, pread64, (int fd, void *out, size_t size, off64_t at), (fd, out, size, at), (fd, out, size / 2, at))
MOVE(KIND_write, write, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2))
MOVE(KIND_write, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at),
     (fd, data, size / 2, at))
MOVE(KIND_write, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at),
     (fd, data, size / 2, at))

#define FCNTL(name)                                                                                                     \
    int name(int fd, int command, ...) {                                                                                \
        REAL(name);                                                                                                     \
        va_list arguments;                                                                                              \
        va_start(arguments, command);                                                                                   \
        void *argument = va_arg(arguments, void *);                                                                     \
        va_end(arguments);                                                                                              \
        bool copies = command == F_DUPFD || command == F_DUPFD_CLOEXEC;                                                 \
        return copies && fd_fails(KIND_dup, fd) ? -1 : real(fd, command, argument);                                     \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);

void *malloc(size_t size) {
    return core_fails(KIND_malloc, __builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    return core_fails(KIND_malloc, __builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *old, size_t size) {
    return core_fails(KIND_malloc, __builtin_return_address(0)) ? NULL : __libc_realloc(old, size);
}
