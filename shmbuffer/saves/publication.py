"""A directory that is seen whole or not at all: what a save wrote, published in one step.

    publish(path):  a work directory ──written──▶ synced ──published──▶ path

Two ways, by what is at ``path`` already:

- nothing, an empty directory, or only files of an earlier save (its list, `MANIFEST`, says which):
  the work directory beside it takes its place by one rename, or by an exchange of the two
  (renameat2(2), RENAME_EXCHANGE).
- files of somebody else, or a live buffer: these stay. The work directory lies within, and once it
  is complete and says so its files are moved to their places one by one.

If the process dies here: before the rename, or before "complete" is written, the earlier save is
as it was. After it the new one counts: `finish`, which every load and every save begins with, moves
what has not been moved yet. What is left of dead saves is removed by the next one, and nothing that
is not in a work directory of ours.

All this happens below directories that are held open, and follows no link: a save may come from
anywhere, and others may write there. The directory of a save has to belong to the process that
changes it; reading one needs no more than the right to.
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
from shmbuffer.errors import (
    BufferExistsError,
    BufferNotFoundError,
    BufferUnlinkedError,
    CorruptBufferError,
    ReadOnlyError,
    ShmBufferError,
    UnsafePathError,
)
from shmbuffer.memory.directory.locks import POLL_S, Lock, holders
from shmbuffer.memory.system.beneath import FOLDER
from shmbuffer.memory.system.path_checks import explained, followed
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves.file_tree import (
    LIST_BYTES,
    MANIFEST,
    exchange,
    files_below,
    is_below,
    is_replaceable,
    list_of,
    sync_tree,
    walk,
)
from shmbuffer.saves.safe_files import make_folders, write_file
from shmbuffer.saves.work_directory import (
    COMPLETE,
    MARK,
    NEW,
    Work,
    in_use,
    is_being_published,
    make_folder_of,
    sweep,
    sweep_one,
)

_WAIT_S = 60.0  # for another process that is moving the files of its save right now


def _step(name: str) -> None:
    _core.reached(f"save.{name}")


@contextmanager
def publish(
    path: str | os.PathLike[str],
    *,
    within: bool = False,
    merge: bool = False,
    stale: tuple[str, ...] = (),
) -> Iterator[Path]:
    """Write a directory that appears at ``path`` when the block ends without error, synced."""
    path = followed(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory; a checkpoint is one")
    make_folder_of(path)
    finish(path)
    with Directory.open(path.parent, anybodys=True) as above, ExitStack() as held:
        sweep(above, path.name)
        with Lock() as turn:
            target = _in_turn(above, path.name, turn, held)
            if target is not None:
                sweep_one(target, MARK)
            within = within or (target is not None and not _gives_way(target, merge=merge))
        made = within and target is None
        if made:
            make_folders(path)
            target = above.folder(path.name)
            held.enter_context(target)
        work = Work(target, MARK) if within and target is not None else _beside(above, path.name)
        if not work.mine:
            work.close()
            raise in_use(path, work.pid)
        try:
            work.make_new()
            _step("made")
            with work.named():
                yield work.way
            _step("written")
            _publish(work, above, path.name, target, held, merge=merge, stale=stale)
        finally:
            work.leave()
            if made:
                with suppress(OSError, ShmBufferError):
                    above.rmdir(path.name)  # unless there is a save in it now


@contextmanager
def publish_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file that appears at ``path`` when the block ends without an error."""
    above, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(above):
        raise FileNotFoundError(
            f"{path}: the directory {above} is not there; make it, or choose another path"
        )
    with Directory.open(os.path.realpath(above), anybodys=True) as folder:
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


def _publish(
    work: Work,
    above: Directory,
    name: str,
    target: Directory | None,
    held: ExitStack,
    *,
    merge: bool,
    stale: tuple[str, ...],
) -> None:
    """Sync what was written, and put it into its place; what it opens stays open with ``held``."""
    with work.directory.folder(NEW) as new:
        files = set(files_below(new))
        if not files:
            return
        kept = set() if target is None else list_of(target)
        outdated = (set(stale) if merge else kept | set(stale)) - files
        _write_manifest(work, files | (kept - outdated))
        sync_tree(new)
        work.directory.sync()
        _step("synced")
        if work.above is not above or not _replace(work, name):
            if work.above is above:  # no exchange here, or something was put there since
                target = held.enter_context(above.folder(name))
                work.move_to(target)
            assert target is not None
            _require_places(new, target)  # before it counts
            work.directory.write_atomic(COMPLETE, json.dumps({"remove": sorted(outdated)}).encode())
            _core.reached("save.counts")
            target.sync()  # without it what was moved could outlive what has to be moved yet
            _step("complete")
            _roll_forward(work, target)
        _step("published")


def finish(path: str | os.PathLike[str]) -> None:
    """Complete a save whose process died before it was published."""
    path = followed(path)
    deadline = time.monotonic() + _WAIT_S
    while is_being_published(path):
        pid, owner = "", path.stat().st_uid
        if owner == os.geteuid():
            try:
                with Directory.open(path, allow_unsafe_fs=True) as target:
                    work = Work(target, MARK, make=False)
                    mine, pid = work.mine, work.pid
                    try:
                        if mine and work.directory.exists(COMPLETE):
                            _roll_forward(work, target)
                    finally:
                        work.leave()
                if mine:
                    return
            except (BufferNotFoundError, BufferUnlinkedError):
                continue  # another process has finished it
            except ReadOnlyError as error:
                raise _unfinished(path, str(error)) from error
        if time.monotonic() > deadline:
            if owner != os.geteuid():
                raise _unfinished(path, f"it belongs to uid {owner}")
            raise in_use(path, pid)
        time.sleep(0.01)


def _unfinished(path: Path, why: str) -> ReadOnlyError:
    return ReadOnlyError(
        f"{path}: an interrupted save still has to move its files here, and this process may not "
        f"do that ({why}); load it once as its owner, with write access",
        path=str(path),
    )


def _opened(above: Directory, name: str, held: ExitStack) -> Directory | None:
    """The directory of that name, for as long as `held` is; None if there is none."""
    try:
        return held.enter_context(above.folder(name))
    except BufferNotFoundError:
        return None


def _beside(above: Directory, name: str) -> Work:
    while True:
        work = Work(above, f".{name}.{secrets.token_hex(6)}{MARK}")
        if work.mine:
            return work
        work.close()  # another process is sweeping it, which saw it before it was locked


def _gives_way(target: Directory, *, merge: bool) -> bool:
    """Whether another directory may take the place of this one by an exchange of names."""
    if merge and target.listdir():
        return False
    above = target.path.parent
    if os.path.ismount(target.path) or not os.access(above, os.W_OK | os.X_OK):
        return False
    return is_replaceable(target)


def _replace(work: Work, name: str) -> bool:
    """Put what is new in the place of ``name`` beside it. False if one step cannot do that."""
    above = work.above
    with Lock() as turn, ExitStack() as held:
        target = _in_turn(above, name, turn, held)
        if target is not None:
            with explained(work.path / NEW):
                mode = stat.S_IMODE(os.fstat(target.file.fd).st_mode)
                os.chmod(NEW, mode & ~stat.S_IWOTH, dir_fd=work.directory.file.fd)
                _core.reached("save.mode")
        try:
            work.directory.rename(NEW, name, into=above)  # an empty directory gives way too
        except OSError as error:
            if not isinstance(error, BufferExistsError) and error.errno != errno.ENOTEMPTY:
                raise
            if target is None:  # another process has saved there since
                return _replace(work, name)
            if not _exchanged(work, target, name):
                return False
    _step("replaced")
    with suppress(PermissionError):  # as in `make_folders`
        above.sync()
    return True


def _in_turn(above: Directory, name: str, turn: Lock, held: ExitStack) -> Directory | None:
    """The directory of that name, which no other save replaces until ``turn`` is closed."""
    deadline = time.monotonic() + _WAIT_S
    while (target := _opened(above, name, held)) is not None:
        turn.take(os.open, ".", FOLDER, dir_fd=target.file.fd)
        try:
            fcntl.flock(turn.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:  # NFS locks no directory: nobody waits there
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


def _exchanged(work: Work, target: Directory, name: str) -> bool:
    """Exchange what is new with the earlier save. False if that is not to be had."""
    names = work.directory.file.fd, NEW, work.above.file.fd, name
    if not is_replaceable(target) or not exchange(*names):
        return False
    _core.reached("save.exchanged")
    # What is here now is going to be removed: is it what was looked at, and has nothing come in?
    work.mine = is_same = False
    try:
        with work.directory.folder(NEW) as old:
            work.mine = is_same = old.identity == target.identity and is_replaceable(old)
    finally:
        if not is_same:
            work.mine = exchange(*names)
            _core.reached("save.returned")
    return is_same


def _write_manifest(work: Work, files: set[str]) -> None:
    text = json.dumps({"format": 1, "files": sorted(files - {MANIFEST})}, indent=1)
    with work.named():
        write_file(work.way / MANIFEST, text)
        _core.reached("save.listed")


def _require_places(new: Directory, target: Directory) -> None:
    """FileExistsError where something of ``new`` cannot have its place in ``target``."""
    for folder in walk(new):
        for name in (*folder.folders, *folder.files):
            place = folder.below(name)
            try:
                found = target.stat(place)
            except BufferNotFoundError:
                continue
            there = stat.S_ISDIR(found.st_mode)
            if there and found.st_dev != target.identity[0]:
                raise FileExistsError(
                    f"{target.path / place} is on another file system than {target.path}, and "
                    "files cannot be renamed from one to the other; unmount it, or save to "
                    "another directory. Nothing was changed"
                )
            if there == (name in folder.folders):
                continue
            what, wanted = "a file or a link", "a directory"
            if there:
                what, wanted = "a directory", "a file"
            raise FileExistsError(
                f"{target.path / place} is {what}, and {wanted} of that name is to be saved there; "
                "save to another directory. Nothing was changed"
            )


def _plan(work: Work) -> list[str]:
    """What is to be removed once the files of a complete save are in their places."""
    try:
        names = json.loads(work.directory.read(COMPLETE, limit=LIST_BYTES))["remove"]
        if not isinstance(names, list):
            raise TypeError(f"a list was expected, and {names!r:.40} found")
        if not work.directory.exists(NEW):
            raise ValueError(f"{NEW} is missing")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        where = work.path / COMPLETE
        raise CorruptBufferError(
            f"{where}: does not say how to finish an interrupted save ({error!r}); remove "
            f"{work.path}, then load or save again: files that are still in it are lost",
            path=str(where),
        ) from error
    return [name for name in names if is_below(name)]


def _roll_forward(work: Work, target: Directory) -> None:
    """Move the files of a complete save to their places. Can be repeated from any point."""
    remove = _plan(work)
    with work.directory.folder(NEW) as new:
        _require_places(new, target)
        work.show(new)
        changed = {"."}
        for folder in walk(new):
            changed.add(folder.at)
            for name in folder.folders:
                target.make(folder.below(name), mode=stat.S_IMODE(folder.stat(name).st_mode))
                _core.reached("save.place")
        for name in files_below(new):
            new.rename(name, name, into=target)
            _step("moved")
    for name in remove:
        with suppress(UnsafePathError):  # what lies behind a link is not of this save
            target.unlink(name)
        above = [*map(str, Path(name).parents)][:-1]  # without "."
        changed |= {*above}
        with suppress(OSError, ShmBufferError):  # other things are in there
            for place in above:
                target.rmdir(place)
        _step("removed")
    for each in changed:
        with suppress(FileNotFoundError, UnsafePathError):
            target.sync(each)
    work.directory.unlink(COMPLETE)
    work.directory.sync()  # else it could come back after a power cut, without what it needs
    _step("moved all")
