"""Publishes the directory of a save atomically, so that readers see all of it or nothing.

    publish(path):  a work directory ──written──▶ synced ──published──▶ path

The work directory is next to ``path``. If ``path`` does not exist or is an empty directory, one
rename puts the new directory there. If it contains only the files of an earlier save (which its
list, `MANIFEST`, names), the two directories are exchanged atomically (renameat2(2),
RENAME_EXCHANGE), and the earlier save is removed. All other contents raise an error before a byte
is written.

If the process dies here, either the earlier save or the new one is in place. If the file system
cannot exchange two directories (NFS), the earlier save is first moved into the work directory, and
`settle` moves it back. The next save removes the remaining files of dead processes.

All operations use open directories and follow no links, because a save may come from an untrusted
source and other users may write there. The process that changes the directory of a save must own
it. Reading it requires only read permission.
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
from shmbuffer.saves.file_tree import MANIFEST, exchange, files_below, foreign_in, sync_tree
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

_WAIT_S = 60.0  # for another process that is publishing its save to this path


def _step(name: str) -> None:
    _core.reached(f"save.{name}")


@contextmanager
def publish(path: str | os.PathLike[str], what: str = "directory") -> Iterator[Path]:
    """Yields a directory that is published at ``path`` when the block ends without an error.

    Args:
        path: path of the directory.
        what: kind of the save. Only an earlier save of the same kind is replaced.

    Raises:
        BufferExistsError: the directory has files that are not part of a save.
        NotADirectoryError: the path exists and is not a directory.
    """
    path = resolve_path(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"{path} is not a directory, but a checkpoint is one; choose another path"
        )
    make_folder_of(path)
    with Directory.open(path.parent, any_owner=True) as above, ExitStack() as held:
        sweep(above, path.name)
        with Lock() as turn:
            target = _in_turn(above, path.name, turn, held)
            if target is not None:
                _require_ours(target, what)
        work = _beside(above, path.name)
        try:
            work.make_new()
            _step("made")
            with work.named():
                yield work.way
            _step("written")
            _publish(work, path.name, what)
        finally:
            work.leave()


@contextmanager
def publish_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a file that is published at ``path`` when the block ends without an error."""
    above, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(above):
        raise FileNotFoundError(
            f"{path}: the directory {above} does not exist; create it, or choose another path"
        )
    with Directory.open(os.path.realpath(above), any_owner=True) as folder:
        sweep(folder, name)
        work = _beside(folder, name)
        try:
            work.make_new()
            with work.named():
                yield work.way / name
            with work.directory.folder(NEW) as new:
                sync_tree(new)
            work.directory.rename(f"{NEW}/{name}", name, into=folder)
            with suppress(PermissionError):  # as in `make_folders`
                folder.sync()
        finally:
            work.leave()


def settle(path: str | os.PathLike[str]) -> None:
    """Moves an earlier save back if the process that was replacing it died in between."""
    path = resolve_path(path)
    if not path.exists() and path.parent.is_dir():
        with Directory.open(path.parent, any_owner=True) as above:
            sweep(above, path.name)


def _publish(work: Work, name: str, what: str) -> None:
    """Syncs the new directory and publishes it."""
    with work.directory.folder(NEW) as new:
        files = files_below(new)
        if not files:
            return
        with work.named():
            make_folders_below(work.way, work.way / MANIFEST)
            content = {"format": 1, "what": what, "files": files}
            write_file(work.way / MANIFEST, json.dumps(content, indent=1))
            _step("listed")
        sync_tree(new)
    work.directory.sync()
    _step("synced")
    _replace(work, name, what)
    _step("published")


def _beside(above: Directory, name: str) -> Work:
    while True:
        work = Work(above, f".{name}.{secrets.token_hex(6)}{MARK}")
        if work.mine:
            return work
        work.close()  # another process is removing it, because it was not locked yet


def _require_ours(target: Directory, what: str) -> None:
    """Raises BufferExistsError unless a directory is empty or contains only an earlier save."""
    if os.path.ismount(target.path):
        raise BufferExistsError(
            f"{target.path}: is a mount point, which a save cannot replace; save to "
            "another directory. Nothing was written",
            path=target.path,
        )
    if foreign := foreign_in(target, what):
        raise BufferExistsError(
            f"{target.path}: a save replaces the whole directory, but {foreign} in it does not "
            f"belong to a save of a {what}; move it away, or save to another directory. Nothing "
            "was written",
            path=target.path,
        )


def _replace(work: Work, name: str, what: str) -> None:
    """Publishes the new directory under ``name``."""
    above = work.above
    with Lock() as turn, ExitStack() as held:
        target = _in_turn(above, name, turn, held)
        if target is not None:
            with explain_errors(work.path / NEW):
                mode = stat.S_IMODE(os.fstat(target.file.fd).st_mode)
                os.chmod(NEW, mode & ~stat.S_IWOTH, dir_fd=work.directory.file.fd)
                _step("mode")
        try:
            work.directory.rename(NEW, name, into=above)  # this replaces an empty directory, too
        except OSError as error:
            if not isinstance(error, BufferExistsError) and error.errno != errno.ENOTEMPTY:
                raise
            if target is None:  # another process has saved there in the meantime
                turn.close()
                _replace(work, name, what)
                return
            _exchange(work, target, name, what)
    _step("replaced")
    with suppress(PermissionError):  # as in `make_folders`
        above.sync()


def _in_turn(above: Directory, name: str, turn: Lock, held: ExitStack) -> Directory | None:
    """Opens a directory and prevents other saves from replacing it until ``turn`` is closed."""
    deadline = time.monotonic() + _WAIT_S
    while (target := _opened(above, name, held)) is not None:
        turn.take(os.open, ".", FOLDER, dir_fd=target.file.fd)
        try:
            fcntl.flock(turn.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:  # NFS does not lock directories, so no process waits there
            return target
        else:
            with suppress(BufferNotFoundError):
                found = above.stat(name)
                if (found.st_dev, found.st_ino) == target.identity:
                    return target
        pids = [str(pid) for pid in holders(turn.fd)]
        turn.close()
        if time.monotonic() > deadline:
            raise in_use(target.path, *pids[:1])
        time.sleep(POLL_S)
    return None


def _opened(above: Directory, name: str, held: ExitStack) -> Directory | None:
    """Opens a directory until ``held`` is closed; returns None if there is none."""
    try:
        return held.enter_context(above.folder(name))
    except BufferNotFoundError:
        return None


def _exchange(work: Work, target: Directory, name: str, what: str) -> None:
    """Exchanges the new directory with the earlier save, which moves to the work directory."""
    names = work.directory.file.fd, NEW, work.above.file.fd, name
    _require_ours(target, what)
    exchanged = exchange(*names)
    if exchanged:
        _step("exchanged")
    else:
        # Records the name of the work directory that contains the save.
        with suppress(PermissionError):
            work.above.sync()
        work.above.rename(name, OLD, into=work.directory)
        _step("moved away")
    # The directory here will be removed, so check that it is the expected one without new files.
    work.mine = is_same = False
    try:
        with work.directory.folder(NEW if exchanged else OLD) as old:
            work.mine = is_same = old.identity == target.identity and not foreign_in(old, what)
    finally:
        if not is_same:
            if not exchanged:
                work.directory.rename(OLD, name, into=work.above)
            work.mine = not exchanged or exchange(*names)
            _step("returned")
    if not is_same:
        raise BufferExistsError(
            f"{target.path}: another program wrote files into the earlier save while it was being "
            "replaced, so the earlier save was kept. Move them away, or save to another directory",
            path=target.path,
        )
    if not exchanged:
        work.directory.rename(NEW, name, into=work.above)
