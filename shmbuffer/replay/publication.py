"""A directory that is seen whole or not at all: what a save wrote, published in one step.

    publish(path):  a work directory ──written──▶ synced ──published──▶ path

Two ways, by what is at ``path`` already:

- nothing, an empty directory, or only files of an earlier save (its list, `MANIFEST`, says
  which): everything is written into a work directory beside it, which then takes its place by one
  rename, or by an exchange of the two (renameat2(2), RENAME_EXCHANGE).
- files of somebody else, or a live buffer: these stay where they are. The work directory lies
  within, and once it is complete and says so its files are moved to their places one by one.

If the process dies here: before the rename, or before "complete" is written, the earlier save is
as it was. After it the new one counts: `finish`, which every load and every save begins with, moves
what has not been moved yet. What is left of dead saves is removed by the next one, and nothing that
is not in a work directory of ours.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import ReadOnlyError
from shmbuffer.memory.filesystem import shut
from shmbuffer.memory.layout import PAGE
from shmbuffer.memory.progress import Progress
from shmbuffer.replay.work_directory import COMPLETE, MARK, Work, in_use, is_there, located, sweep

MANIFEST = "shmbuffer.files.json"
"""The list of the files of a save, in its directory."""

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100
_WAIT_S = 60.0  # for another process that is moving the files of its save right now


def _step(name: str) -> None:
    """A crash point."""
    _core.reached(f"save.{name}")


@contextmanager
def publish(
    path: str | os.PathLike[str],
    *,
    within: bool = False,
    merge: bool = False,
    stale: tuple[str, ...] = (),
) -> Iterator[Path]:
    """Write a directory that appears at ``path`` when the block ends without an error.

    Args:
        path: where it will be; a directory that is missing above it is made. Files of somebody
            else that are there stay.
        within: something at ``path`` is in use and has to stay where it is.
        merge: files of an earlier save that have no successor stay too.
        stale: files (relative) that go like those of the list, if the new save has none of that
            name: of saves that have no list.

    Yields:
        An empty directory on the same file system, to write files into. If it stays empty nothing
        happens.

    Raises:
        NotADirectoryError, FileExistsError: something else is at ``path``, or at the place of a
            file; nothing was changed.
        BufferInUseError: another process is saving there right now.
        OSError: no room, or no permission; what was there is as it was.

    Cost: a sync of every file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory; a checkpoint is one")
    _make_durably(path.parent)
    _core.reached("save.parents")
    finish(path)
    sweep(path)
    made = False
    if within or (merge and path.exists() and any(path.iterdir())) or not _is_replaceable(path):
        made = not path.exists()
        _make_durably(path)
        _core.reached("save.folder")
        work = Work(path / MARK)
    else:
        work = Work(path.parent / f".{path.name}.{secrets.token_hex(6)}{MARK}")
    try:
        work.new.mkdir()
        _step("made")
        yield work.new
        _step("written")
        files = set(_files(work.new))
        if not files:
            return
        kept = list_of(path)
        outdated = set() if merge else {name for name in kept | set(stale) if name not in files}
        _write_manifest(work.new, files | (kept - outdated))
        _sync_tree(work.new)
        _step("synced")
        if work.path.parent == path or not _replace(work.new, path):
            if work.path.parent != path:  # no exchange here, or something was put there since
                os.rename(work.path, path / MARK)
                _core.reached("save.within")
                work.path = path / MARK
            _require_places(files, path)  # before it counts
            _complete(work, sorted(outdated))
            _step("complete")
            _roll_forward(work, path)
        _step("published")
    finally:
        work.leave()
        if made:
            with suppress(OSError):  # there is a save in it now
                path.rmdir()
                _core.reached("save.undone")


def finish(path: str | os.PathLike[str]) -> None:
    """Complete what a process left that died after its save was complete, and before it was seen.

    Raises:
        ReadOnlyError: that cannot be done here.
        BufferInUseError: another process has been at it for a minute.
    """
    path = Path(os.path.realpath(path))
    directory = path / MARK
    deadline = time.monotonic() + _WAIT_S
    while is_there(directory / COMPLETE):
        try:
            work = Work(directory, make=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ReadOnlyError(
                f"{path}: a save was interrupted when it was complete but for moving its files "
                f"here, and this process may not do that ({error.strerror}); load it once where "
                "the directory can be written",
                path=str(path),
            ) from error
        if work.mine:
            try:
                _roll_forward(work, path)
            finally:
                work.leave()
            return
        work.leave()
        if time.monotonic() > deadline:
            raise in_use(path, work.pid)
        time.sleep(0.01)


def is_being_published(path: Path) -> bool:
    """Whether some files at ``path`` may be of another save than the others, right now."""
    return (path / MARK / COMPLETE).exists()


def list_of(path: Path) -> set[str]:
    """The files of the save at ``path`` that its list names; none where there is no list."""
    try:
        found = json.loads((path / MANIFEST).read_bytes())
        return {name for name in found["files"] if _is_below(name)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _is_below(name: Any) -> bool:
    """Whether this is a relative name that leads nowhere else: it was read from a file."""
    return (
        isinstance(name, str)
        and name not in ("", ".")
        and name == os.path.normpath(name)
        and not name.startswith(("/", "../"))
        and name != ".."
    )


def _walk(root: Path, *, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk`, which passes over a directory that it cannot list: its files would be missed."""

    def refuse(error: OSError) -> None:
        raise error

    return os.walk(root, topdown=topdown, onerror=refuse)


def _files(root: Path) -> list[str]:
    """Every file below ``root``, relative. A link, and whatever else there is, counts as a file."""
    found = []
    for folder, folders, names in _walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*names, *links]:
            found.append(os.path.relpath(os.path.join(folder, name), root))
    return sorted(found)


def _is_replaceable(path: Path) -> bool:
    """Whether another directory may take the place of this one with all that is in it."""
    if not path.exists():
        return True
    if os.path.ismount(path) or not os.access(path.parent, os.W_OK | os.X_OK):
        return False
    mine = list_of(path) | {MANIFEST}
    folders = {str(parent) for name in mine for parent in Path(name).parents}
    for folder, names, files in _walk(path):
        at = os.path.relpath(folder, path)
        if at not in folders or not mine.issuperset(
            os.path.normpath(os.path.join(at, name)) for name in files
        ):
            return False
        if any(os.path.islink(os.path.join(folder, name)) for name in [*names, *files]):
            return False
    return True


def _replace(new: Path, path: Path) -> bool:
    """Put ``new`` in the place of ``path``. False if that cannot be done in one step."""
    if path.exists():
        os.chmod(new, stat.S_IMODE(path.stat().st_mode))
        _core.reached("save.mode")
    try:
        os.rename(new, path)  # an empty directory gives way too
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _is_replaceable(path) or not _exchange(new, path):
            return False
    _step("replaced")
    sync(path.parent)
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change names in one step. False where that is not to be had."""
    rename: Callable[..., int] | None = getattr(
        ctypes.CDLL(None, use_errno=True), "renameat2", None
    )
    if rename is None:
        return False
    if not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _make_durably(path: Path) -> None:
    """Make a directory with all above it, so that a power cut does not take it with what is in it.

    A directory above that cannot be synced, because it may not be read, is somebody else's.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):
            sync(folder.parent)


def _write_manifest(new: Path, files: set[str]) -> None:
    text = json.dumps({"format": 1, "files": sorted(files - {MANIFEST})}, indent=1)
    (new / MANIFEST).write_text(text)
    _core.reached("save.listed")


def _require_places(files: set[str], path: Path) -> None:
    """FileExistsError where one of the files cannot have its place in ``path``."""
    for name in sorted(files):
        if (path / name).is_dir():
            raise FileExistsError(
                f"{path / name} is a directory, and a file of that name is to be saved there; "
                "save to another directory. Nothing was changed"
            )
        for folder in Path(name).parents:
            if (path / folder).is_symlink() or (
                (path / folder).exists() and not (path / folder).is_dir()
            ):
                raise FileExistsError(
                    f"{path / folder} is a file or a link, and a directory of that name is to be "
                    "saved there; save to another directory. Nothing was changed"
                )


def _complete(work: Work, remove: list[str]) -> None:
    """Say that everything is there, and what is to go: from now on the new save counts."""
    draft = work.path / f"{COMPLETE}.new"
    draft.write_text(json.dumps({"remove": remove}))
    _core.reached("save.drafted")
    sync(draft)
    os.rename(draft, work.path / COMPLETE)
    _core.reached("save.counts")
    sync(work.path)
    sync(work.path.parent)  # without it what was moved could outlive what has to be moved yet


def _roll_forward(work: Work, path: Path) -> None:
    """Move the files of a complete save to their places. Can be repeated from any point."""
    plan: dict[str, Any] = json.loads((work.path / COMPLETE).read_bytes())
    folders = {path}
    files = _files(work.new)
    _require_places(set(files), path)
    for name in files:
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _core.reached("save.place")
        os.replace(work.new / name, target)
        folders |= {target.parent, target.parent.parent} if target.parent != path else {path}
        _step("moved")
    for name in filter(_is_below, plan["remove"]):
        target = path / name
        target.unlink(missing_ok=True)
        _core.reached("save.unlinked")
        with suppress(OSError):  # other things are in there
            if target.parent != path:
                target.parent.rmdir()
        _step("removed")
    for folder in folders:
        with suppress(FileNotFoundError):
            sync(folder)
    (work.path / COMPLETE).unlink()
    sync(work.path)  # else it could come back after a power cut, without what it needs
    _step("moved all")


def _sync_tree(root: Path) -> None:
    total = sum((root / name).lstat().st_size for name in _files(root))
    with Progress("sync", total) as progress:
        for folder, _, names in _walk(root, topdown=False):
            for name in names:
                _sync_file(Path(folder, name), progress)
            sync(Path(folder))
        sync(root.parent)


def _sync_file(file: Path, progress: Progress) -> None:
    """`sync`; of a large file piece by piece where somebody wants to know how far it is."""
    size = file.lstat().st_size
    pieces = list(progress.cut(-(-size // PAGE), PAGE))
    if len(pieces) > 1:
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ) as content,
        ):
            for first, count in pieces:
                nbytes = min(count * PAGE, size - first * PAGE)
                content.flush(first * PAGE, nbytes)  # msync(2): an fsync of these bytes
                progress.advance(nbytes)
    else:
        progress.advance(size)
    sync(file)  # the rest of it, its size for one


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with located(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync directories
            raise
    finally:
        shut(fd)
