"""Publishes the directory of a save atomically, so that readers see the whole save or none of it.

    publish(path):  a work directory ──written──▶ synced ──published──▶ path

The work directory is next to ``path``. If ``path`` does not exist or is an empty directory, the new
directory is renamed to ``path``. If ``path`` contains only the files of an earlier save, which its
`MANIFEST` lists, the two directories are exchanged atomically (renameat2(2), RENAME_EXCHANGE), and
the earlier save is removed. If ``path`` contains other files, an error is raised before a byte is
written.

If the process dies here, either the earlier save or the new save is at ``path``. If the file system
cannot exchange two directories (NFS), the earlier save is first moved into the work directory, and
`settle` moves it back. The next save removes the remaining files of dead processes.

All operations use open directories and follow no links, because a save may come from an untrusted
source, and other users may be able to write there. A process must own the directory of a save to
replace it. To read a save, it needs only read permission.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shmbuffer._native import _core
from shmbuffer.errors import BufferExistsError, BufferNotFoundError
from shmbuffer.memory.clients.locks import POLL_S, Lock, holders
from shmbuffer.memory.system.beneath import FOLDER
from shmbuffer.memory.system.path_checks import explain_errors, resolve_path
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves.file_tree import MANIFEST, exchange, files_below, find_foreign_file, sync_tree
from shmbuffer.saves.safe_files import make_folders_below, write_file
from shmbuffer.saves.work_directory import (
    MARK,
    NEW,
    OLD,
    Work,
    in_use,
    make_folder_of,
    sweep,
)

_WAIT_S = 60.0  # seconds to wait for another process that is publishing a save to the same path


def _step(name: str) -> None:
    """Marks a crash point of the publication, for tests."""
    _core.reached(f"save.{name}")


@contextmanager
def publish(path: str | os.PathLike[str], what: str = "directory") -> Iterator[Path]:
    """Yields a directory that is published at ``path`` if the ``with`` block raises no error.

    Args:
        path: The path of the save.
        what: The kind of the save. Only an earlier save of the same kind is replaced.

    Raises:
        BufferExistsError: The directory at ``path`` has files that are not part of a save.
        NotADirectoryError: The path exists and is not a directory.
        BufferInUseError: Another process has been publishing a save there for 60 seconds.
    """
    path = resolve_path(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"{path}: a save is a directory, but this path is not a directory; choose another path"
        )
    make_folder_of(path)
    with Directory.open(path.parent, any_owner=True) as above, ExitStack() as stack:
        sweep(above, path.name)
        with Lock() as lock:
            target = _open_locked(above, path.name, lock, stack)
            if target is not None:
                _require_replaceable(target, what)
        work = _create_work(above, path.name)
        try:
            work.make_new()
            _step("made")
            with work.real_paths_in_errors():
                yield work.new_path
            _step("written")
            _publish(work, path.name, what)
        finally:
            work.leave()


@contextmanager
def publish_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path for a new file, which is published at ``path`` if the block raises no error.

    An existing file is replaced.

    Raises:
        FileNotFoundError: The directory that would contain the file does not exist.
    """
    above, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(above):
        raise FileNotFoundError(
            f"{path}: the directory {above} does not exist; create it, or choose another path"
        )
    with Directory.open(os.path.realpath(above), any_owner=True) as folder:
        sweep(folder, name)
        work = _create_work(folder, name)
        try:
            work.make_new()
            with work.real_paths_in_errors():
                yield work.new_path / name
            with work.directory.folder(NEW) as new:
                sync_tree(new)
            work.directory.rename(f"{NEW}/{name}", name, into=folder)
            with suppress(PermissionError):  # as in `make_folders`
                folder.sync()
        finally:
            work.leave()


def settle(path: str | os.PathLike[str]) -> None:
    """Moves an earlier save back to its path if the process that was replacing it has died."""
    path = resolve_path(path)
    if not path.exists() and path.parent.is_dir():
        with Directory.open(path.parent, any_owner=True) as above:
            sweep(above, path.name)


def _publish(work: Work, name: str, what: str) -> None:
    """Writes the manifest of a new save, then syncs and publishes the save.

    An empty directory is not published.
    """
    with work.directory.folder(NEW) as new:
        files = files_below(new)
        if not files:
            return
        with work.real_paths_in_errors():
            manifest = work.new_path / MANIFEST
            make_folders_below(work.new_path, manifest)
            content = {"format": 1, "what": what, "files": files}
            write_file(manifest, json.dumps(content, indent=1))
            _step("listed")
        sync_tree(new)
    work.directory.sync()
    _step("synced")
    _replace(work, name, what)
    _step("published")


def _create_work(above: Directory, name: str) -> Work:
    """Creates a work directory for a save to ``above/name``, and locks it."""
    while True:
        work = Work(above, f".{name}.{secrets.token_hex(6)}{MARK}")
        if work.mine:
            return work
        work.close()  # another process is removing the directory, because it was not locked yet


def _require_replaceable(target: Directory, what: str) -> None:
    """Raises BufferExistsError unless a directory is empty or contains only an earlier save."""
    if os.path.ismount(target.path):
        raise BufferExistsError(
            f"{target.path}: is a mount point, which a save cannot replace; save to another "
            "directory. Nothing was written",
            path=target.path,
        )
    if foreign := find_foreign_file(target, what):
        raise BufferExistsError(
            f"{target.path}: a save replaces the whole directory, but {foreign} in this directory "
            f"does not belong to a save of a {what}; move it away, or save to another directory. "
            "Nothing was written",
            path=target.path,
        )


def _replace(work: Work, name: str, what: str) -> None:
    """Moves the new directory to its final name, and replaces an earlier save there."""
    above = work.above
    with Lock() as lock, ExitStack() as stack:
        target = _open_locked(above, name, lock, stack)
        if target is not None:
            with explain_errors(work.path / NEW):
                mode = stat.S_IMODE(os.fstat(target.file.fd).st_mode)
                os.chmod(NEW, mode & ~stat.S_IWOTH, dir_fd=work.directory.file.fd)
                _step("mode")
        try:
            work.directory.rename(NEW, name, into=above)  # also replaces an empty directory
        except OSError as error:
            if not isinstance(error, BufferExistsError) and error.errno != errno.ENOTEMPTY:
                raise
            if target is None:  # another process has saved there in the meantime
                lock.close()
                _replace(work, name, what)
                return
            _exchange(work, target, name, what)
    _step("replaced")
    with suppress(PermissionError):  # as in `make_folders`
        above.sync()


def _open_locked(above: Directory, name: str, lock: Lock, stack: ExitStack) -> Directory | None:
    """Opens the directory of an earlier save, and locks it so that no other save replaces it.

    Args:
        above: The directory that contains the save.
        name: The name of the save.
        lock: The lock to take. It lasts until the caller closes it.
        stack: Closes the opened directory at its exit.

    Returns:
        The directory, or None if it does not exist.

    Raises:
        BufferInUseError: Another process has held the lock for 60 seconds.
    """
    deadline = time.monotonic() + _WAIT_S
    while (target := _open_if_exists(above, name, stack)) is not None:
        lock.take(os.open, ".", FOLDER, dir_fd=target.file.fd)
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:  # NFS does not support locks on directories, so no process waits there
            return target
        else:
            with suppress(BufferNotFoundError):
                found = above.stat(name)
                if (found.st_dev, found.st_ino) == target.identity:
                    return target
        pids = [str(pid) for pid in holders(lock.fd)]
        lock.close()
        if time.monotonic() > deadline:
            raise in_use(target.path, *pids[:1])
        time.sleep(POLL_S)
    return None


def _open_if_exists(above: Directory, name: str, stack: ExitStack) -> Directory | None:
    """Opens a directory until the exit of ``stack``. Returns None if it does not exist."""
    try:
        return stack.enter_context(above.folder(name))
    except BufferNotFoundError:
        return None


def _exchange(work: Work, target: Directory, name: str, what: str) -> None:
    """Exchanges the new directory with the earlier save, which moves to the work directory.

    Raises:
        BufferExistsError: Another program has written files into the earlier save. The earlier save
            is kept.
    """
    names = work.directory.file.fd, NEW, work.above.file.fd, name
    _require_replaceable(target, what)
    exchanged = exchange(*names)
    if exchanged:
        _step("exchanged")
    else:
        # after a power cut, `settle` must find the work directory that contains the save
        with suppress(PermissionError):
            work.above.sync()
        work.above.rename(name, OLD, into=work.directory)
        _step("moved away")
    # The directory that was moved here will be removed. Before that, it must be the directory that
    # was checked, without new files.
    work.mine = is_same = False
    try:
        with work.directory.folder(NEW if exchanged else OLD) as old:
            is_same = old.identity == target.identity and not find_foreign_file(old, what)
            work.mine = is_same
    finally:
        if not is_same:
            if not exchanged:
                work.directory.rename(OLD, name, into=work.above)
            work.mine = not exchanged or exchange(*names)
            _step("returned")
    if not is_same:
        raise BufferExistsError(
            f"{target.path}: another program wrote files into the earlier save while it was being "
            "replaced, so the earlier save was kept; move these files away, or save to another "
            "directory",
            path=target.path,
        )
    if not exchanged:
        work.directory.rename(NEW, name, into=work.above)
