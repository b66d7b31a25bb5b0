"""File locks let one process at a time do rare work, and show its death."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from shmbuffer import (
    AttachTimeout,
    BufferUnlinkedError,
    ReadOnlyError,
    UnsafeFilesystemError,
    UnsafePathError,
)
from shmbuffer.memory.clients import locks
from shmbuffer.memory.clients.locks import INIT_LOCK, InitLock, LivenessFile, holders
from shmbuffer.memory.system.region import Directory
from tests.kit.programs import Program, as_nobody, in_fork, needs_root

HOLDER = """
import sys
from shmbuffer.memory.clients.locks import InitLock, LivenessFile
from shmbuffer.memory.system.region import Directory
directory = Directory.open(sys.argv[1])
"""
HOLDS_INIT = (
    HOLDER
    + """
with InitLock(directory, 60):
    print("holds", flush=True)
    input()
print("released", flush=True)
"""
)
IS_ALIVE = (
    HOLDER
    + """
held = LivenessFile.hold(directory, 7)
print("holds", flush=True)
input()
"""
)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory.open(tmp_path / "buffer", create=True) as opened:
        yield opened


def open_locks() -> int:
    return sum(
        os.readlink(f"/proc/self/fd/{fd}").endswith(".lock")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    )


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


# The init lock.


def test_the_lock_is_taken_and_given_back(directory: Directory) -> None:
    for _ in range(3):
        with InitLock(directory, 0) as lock:
            assert lock.directory is directory
            assert open_locks() == 1
        assert open_locks() == 0
    assert directory.listdir(".shmbuffer") == ["init.lock"]


def test_one_lock_object_serves_many_times(directory: Directory) -> None:
    lock = InitLock(directory, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lock:
            1 / 0  # noqa: B018 - leaves the block
    assert open_locks() == 0


def test_another_process_waits_and_the_error_names_the_holder(directory: Directory) -> None:
    with Program.python(HOLDS_INIT, directory.path) as process:
        assert process.line() == "holds"
        with (
            pytest.raises(
                AttachTimeout,
                match=(
                    rf"init\.lock: waited 0\.02 s for pid {process.pid} \(running\), which creates,"
                    rf" attaches, recovers or removes this buffer; .*`ps -fp {process.pid}`"
                ),
            ) as info,
            InitLock(directory, 0.02),
        ):
            pass
        assert info.value.parts == {
            "path": directory.path / INIT_LOCK,
            "timeout_s": 0.02,
            "pids": [process.pid],
        }
        process.tell()
        assert process.line() == "released"
        with InitLock(directory, 0):
            pass


@pytest.mark.full
def test_a_holder_that_is_stopped_is_named_as_such(directory: Directory) -> None:
    with Program.python(HOLDS_INIT, directory.path) as process:
        process.line()
        stopped(process.pid)
        with pytest.raises(AttachTimeout, match=rf"\(stopped\), .*`kill -CONT {process.pid}` lets"):
            InitLock(directory, 0).__enter__()


def test_a_holder_that_cannot_be_seen_is_looked_for_elsewhere(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_LOCKS", tmp_path / "nothing")
    with (
        InitLock(directory, 0),
        pytest.raises(AttachTimeout, match=r"a process that /proc/locks does not show.*`fuser -v"),
    ):
        InitLock(directory, 0).__enter__()


def test_the_lock_of_a_killed_process_is_free(directory: Directory) -> None:
    with Program.python(HOLDS_INIT, directory.path) as process:
        process.line()
        process.kill()
        with InitLock(directory, 0):
            pass


def test_a_waiter_gets_the_lock_when_its_holder_is_killed(directory: Directory) -> None:
    with (
        Program.python(HOLDS_INIT, directory.path) as holder,
        Program.python(HOLDS_INIT, directory.path) as waiter,
    ):
        first, second = (holder, waiter)
        # Either of the two may have come first.
        pids = _held_by(directory)
        if pids == [waiter.pid]:
            first, second = waiter, holder
        assert first.line() == "holds"
        first.kill()
        assert second.line() == "holds"
        assert _held_by(directory) == [second.pid]


def _held_by(directory: Directory) -> list[int]:
    while True:
        with directory.open_lock(INIT_LOCK) as file:
            pids = holders(file.fd)
        if pids:
            return pids


@pytest.mark.full
def test_processes_exclude_each_other(directory: Directory) -> None:
    """Processes increment a counter by a separate read and write."""
    directory.write_atomic("counter", b"0")
    source = (
        HOLDER
        + """
for _ in range(25):
    with InitLock(directory, 60):
        count = int(open(f"{sys.argv[1]}/counter").read())
        with open(f"{sys.argv[1]}/counter", "w") as file:
            file.write(str(count + 1))
"""
    )
    with (
        Program.python(source, directory.path) as a,
        Program.python(source, directory.path) as b,
        Program.python(source, directory.path) as c,
    ):
        for process in (a, b, c):
            assert process.end()[0] == 0
    assert directory.read("counter", limit=9) == b"75"


def test_threads_exclude_each_other(directory: Directory) -> None:
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with InitLock(directory, 60):
                inside += 1
                most = max(most, inside)
                os.sched_yield()
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)
    assert open_locks() == 0


def test_a_thread_that_enters_twice_is_told_that_it_waits_for_itself(directory: Directory) -> None:
    with InitLock(directory, 0), pytest.raises(AttachTimeout, match=f"for pid {os.getpid()} "):
        InitLock(directory, 0).__enter__()


def test_a_lock_file_of_any_content_and_age_is_no_lock(directory: Directory) -> None:
    directory.write_atomic(INIT_LOCK, b"pid 1 holds this, really")
    os.utime(directory.path / INIT_LOCK, (2**33, 2**33))
    with InitLock(directory, 0):
        pass
    assert directory.read(INIT_LOCK, limit=99) == b"pid 1 holds this, really"


def test_a_filelock_on_the_same_path_is_the_same_lock(directory: Directory) -> None:
    with InitLock(directory, 0):
        other = filelock.FileLock(directory.path / INIT_LOCK)
        with pytest.raises(filelock.Timeout):
            other.acquire(timeout=0)
    with other, pytest.raises(AttachTimeout):
        InitLock(directory, 0).__enter__()


@pytest.mark.parametrize("how", ["unlinked", "replaced", "removed with its directory"])
def test_a_file_that_was_exchanged_before_it_was_locked_is_not_the_lock(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    real = locks._lock
    tries: list[int] = []

    def exchanged(fd: int, where: Path) -> bool:
        if not tries:
            directory.unlink(INIT_LOCK)
            if how == "replaced":
                directory.create(INIT_LOCK, 0).close()
            elif how != "unlinked":
                directory.rmdir(".shmbuffer")
        tries.append(os.fstat(fd).st_ino)
        return real(fd, where)

    monkeypatch.setattr(locks, "_lock", exchanged)
    with InitLock(directory, 0):
        assert len(tries) == 2
        assert directory.stat(INIT_LOCK).st_ino == tries[1]
        assert _held_by(directory) == [os.getpid()]
    assert open_locks() == 0


def test_waiters_end_with_a_named_error_when_the_directory_is_removed(directory: Directory) -> None:
    directory.path.rmdir()
    with pytest.raises(BufferUnlinkedError, match="was removed while it was in use"):
        InitLock(directory, 60).__enter__()


def test_a_link_in_place_of_the_lock_is_refused(directory: Directory, tmp_path: Path) -> None:
    (directory.path / ".shmbuffer").mkdir(0o700)
    (directory.path / INIT_LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match=r"init\.lock: this is a symbolic link"):
        InitLock(directory, 0).__enter__()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused_and_gets_no_soft_lock(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def missing(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(
        UnsafeFilesystemError, match=r"init\.lock: the file system does not support file locks"
    ):
        InitLock(directory, 0).__enter__()
    assert directory.listdir(".shmbuffer") == ["init.lock"]
    assert open_locks() == 0


@needs_root
def test_a_directory_that_cannot_be_written_cannot_be_locked(tmp_path: Path) -> None:
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp())
    os.chown(path, 65534, 65534)
    path.chmod(0o500)

    def attempt() -> None:
        as_nobody()
        with Directory.open(path) as directory, pytest.raises(ReadOnlyError, match="denied"):
            InitLock(directory, 0).__enter__()

    assert in_fork(attempt) == 0
    shutil.rmtree(path)


# Forks.


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(directory: Directory) -> None:
    source = (
        HOLDER
        + """
import os, signal
held = InitLock(directory, 0).__enter__(), LivenessFile.hold(directory, 7)
if os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""
    )
    with Program.python(source, directory.path) as process:
        child = int(process.line())
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        try:
            os.kill(child, 0)
            assert LivenessFile.is_free(directory, 7)
            with InitLock(directory, 0):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_is_forked_inside_does_not_release_the_lock(directory: Directory) -> None:
    with InitLock(directory, 0) as lock:
        number = lock.fd

        def leave() -> None:
            assert open_locks() == 0
            own = [LivenessFile.hold(directory, entry) for entry in range(4)]
            assert number in [each.fd for each in own]
            lock.__exit__(None, None, None)
            assert not any(LivenessFile.is_free(directory, entry) for entry in range(4))
            for each in own:
                each.close()
            with pytest.raises(AttachTimeout):
                InitLock(directory, 0).__enter__()

        assert in_fork(leave) == 0
        with pytest.raises(AttachTimeout):
            InitLock(directory, 0).__enter__()


def test_a_forked_child_takes_locks_of_its_own(directory: Directory) -> None:
    held = LivenessFile.hold(directory, 7)

    def child() -> None:
        assert not LivenessFile.is_free(directory, 7)
        own = LivenessFile.hold(directory, 8)
        with InitLock(directory, 0):
            pass
        own.close()

    assert in_fork(child) == 0
    held.close()


@pytest.mark.full
def test_no_fork_gets_in_between_the_opening_of_a_lock_and_its_listing(
    directory: Directory,
) -> None:
    done = threading.Event()

    def lock() -> None:
        while not done.is_set():
            with InitLock(directory, 60):
                LivenessFile.is_free(directory, 7)

    directory.open_lock(LivenessFile.name(7)).close()
    thread = threading.Thread(target=lock)
    thread.start()
    try:
        for _ in range(100):
            pid = os.fork()
            if pid == 0:
                os._exit(open_locks())
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        done.set()
        thread.join()


# Liveness.


def test_a_client_holds_its_file_while_it_lives(directory: Directory) -> None:
    with Program.python(IS_ALIVE, directory.path) as process:
        process.line()
        assert not LivenessFile.is_free(directory, 7)
        stopped(process.pid)
        assert not LivenessFile.is_free(directory, 7)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds no lock
        assert LivenessFile.is_free(directory, 7)
    assert directory.listdir(".shmbuffer/procs") == ["007.lock"]


def test_a_client_gives_its_file_back(directory: Directory) -> None:
    held = LivenessFile.hold(directory, 255)
    assert not os.get_inheritable(held.fd)
    assert not LivenessFile.is_free(directory, 255)
    held.close()
    held.close()
    assert LivenessFile.is_free(directory, 255)
    assert directory.listdir(".shmbuffer/procs") == ["255.lock"]
    assert open_locks() == 0


def test_a_release_reaches_copies_of_the_descriptor(directory: Directory) -> None:
    """A fork in C, which runs no hook of Python, leaves such copies."""
    held = LivenessFile.hold(directory, 7)
    copy = os.dup(held.fd)
    held.close()
    assert LivenessFile.is_free(directory, 7)
    os.close(copy)


def test_a_file_that_is_not_there_proves_nobody_dead(directory: Directory) -> None:
    assert not LivenessFile.is_free(directory, 7)


def test_many_can_ask_at_once(directory: Directory) -> None:
    LivenessFile.hold(directory, 7).close()
    asking = directory.open_file(LivenessFile.name(7))
    fcntl.flock(asking, fcntl.LOCK_SH)
    assert LivenessFile.is_free(directory, 7)
    asking.close()


def test_a_client_waits_while_another_process_probes_its_lock(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = directory.open_lock(LivenessFile.name(7))
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: fcntl.flock(asking, fcntl.LOCK_UN))
    LivenessFile.hold(directory, 7).close()
    asking.close()


def test_an_entry_has_one_client(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "TESTER_PATIENCE_S", 0.0)
    with Program.python(IS_ALIVE, directory.path) as process:
        process.line()
        with pytest.raises(
            AttachTimeout,
            match=rf"007\.lock: waited 0 s for pid {process.pid} \(running\), which is the living"
            " client of registry entry 7;",
        ):
            LivenessFile.hold(directory, 7)
    assert open_locks() == 0


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("other")])
def test_a_liveness_file_is_a_regular_file(
    directory: Directory, make: Callable[[Path], None]
) -> None:
    path = directory.path / LivenessFile.name(7)
    path.parent.mkdir(0o700, parents=True)
    make(path)
    for use in (LivenessFile.hold, LivenessFile.is_free):
        with pytest.raises(UnsafePathError, match=r"007\.lock: .* a regular file was expected"):
            use(directory, 7)


def test_only_holders_of_this_file_are_named(directory: Directory) -> None:
    with InitLock(directory, 0), directory.open_lock("other.lock") as other:
        assert holders(other.fd) == []
        fcntl.lockf(other, fcntl.LOCK_EX)  # another kind of lock
        assert holders(other.fd) == []
        fcntl.flock(other, fcntl.LOCK_EX)
        assert holders(other.fd) == [os.getpid()]


def test_waiters_in_the_kernel_are_not_holders(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = directory.open_lock("a.lock")
    found = os.fstat(file.fd)
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    (tmp_path / "locks").write_text(
        f"1: FLOCK  ADVISORY  WRITE 11 {name} 0 EOF\n"
        f"1: -> FLOCK  ADVISORY  WRITE 12 {name} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 13 {name} 0 EOF\n"
        f"3: FLOCK  ADVISORY  READ 14 {name}1 0 EOF\n"
    )
    monkeypatch.setattr(locks, "_LOCKS", tmp_path / "locks")
    assert holders(file.fd) == [11]
    file.close()
