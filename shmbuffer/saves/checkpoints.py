"""What storages, samplers and writers have in common when they are saved: `Checkpoints`.

A buffer saves its parts into ``storage/``, ``sampler/`` and ``writer/``, all of one moment, in
TorchRL's layout; each can be saved alone, too. What TorchRL has no place for is in files of our own
(``shmbuffer.*``), and under the key ``"shmbuffer"`` of its JSON files: a save by TorchRL over ours
rewrites those, so that files of ours that are left do not count.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from shmbuffer.errors import BufferExistsError
from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.format.layout import CONTROL
from shmbuffer.memory.system.progress import OnProgress, hearing
from shmbuffer.saves.publication import finish, publish
from shmbuffer.saves.safe_files import make_folder
from shmbuffer.saves.values import read_state, write_state

_OURS = f"{__name__.partition('.')[0]}."


class Loaded(NamedTuple):
    """What became of a storage that was loaded, for the sampler and the writer beside it."""

    slots: int = 0
    """Capacity of what was saved, in slots."""
    width: int = 1
    """Elements of a slot."""
    shift: int = 0
    """The item that was saved in slot i is in slot ``(i - shift) % slots`` now."""
    in_place: bool = False
    """The storage's own files were opened: cursor, counts and priorities are there already."""
    same_tickets: bool = False
    """Items and ring have the tickets that they had when they were saved."""
    moment: ItemSnapshot | None = None
    """It was copied from a live buffer, whose priorities win over those in older files."""

    def places(self, elements: Any) -> Any:
        """Where the elements of the saved storage are now."""
        if not self.shift:
            return elements
        return (elements - self.shift * self.width) % (self.slots * self.width)


class Saves:
    """TorchRL's other names for ``dumps`` and ``loads``, which a user may have overridden."""

    def dump(
        self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None, **more: Any
    ) -> None:
        """The same as `dumps`."""
        with hearing(on_progress):
            self.dumps(path, **more)  # type: ignore[attr-defined] # of the part that is saved

    def save(
        self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None, **more: Any
    ) -> None:
        """The same as `dumps`."""
        self.dump(path, on_progress=on_progress, **more)

    def load(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> Any:
        """The same as `loads`."""
        with hearing(on_progress):
            return self.loads(path)  # type: ignore[attr-defined] # of the part that is loaded


class Checkpoints(Saves):
    """A part of a buffer that can be saved and loaded alone.

    A part of your own is saved by its ``state_dict``, as far as that holds tensors, text, numbers
    and containers of them; or by its own ``dumps`` and ``loads``, which are given a directory (to
    save, by a path for this process, until the call ends).
    """

    def dumps(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Save into the directory ``path``; other files that are in it stay.

        A crash leaves the save that was there before, or this one.

        Args:
            path: a directory; it is made if it is not there.
            on_progress: called with a `ProgressReport` some times a second. What it raises comes
                out of this call, and the save that was there before stays.

        Raises:
            TypeError: the state holds something that can only be pickled.
            BufferExistsError: the directory is the scratch directory of a buffer.
            BufferInUseError: another process is saving there right now.
            OSError: no room, or no permission; what was there is as it was.
        """
        in_place = self._has_files_in(Path(path))
        if not in_place:
            require_no_buffer(Path(path))
        with (
            hearing(on_progress),
            publish(path, merge=True, within=in_place, stale=self._stale) as directory,
        ):
            if in_place:
                self._dump_in_place(directory)
            else:
                self._dump(directory, None)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Replace everything with what `dumps` saved, here or in TorchRL.

        Args:
            path: the directory.
            on_progress: see `dumps`. What it raises comes out of this call: before the first byte
                has changed, or with a note that the buffer is empty now.

        Raises:
            FileNotFoundError: nothing was saved there.
            CorruptBufferError: the files are damaged.
        """
        finish(path)
        with hearing(on_progress):
            self._apply(self._read(Path(path)), None)

    _stale: tuple[str, ...] = ()
    """Files of an earlier save of such a part that would be taken for files of a newer one."""

    def _dump(self, directory: Path, moment: Any) -> Any:
        """Write plain files into ``directory``; a storage on a ring returns the moment."""
        state = self.state_dict()  # type: ignore[attr-defined] # every part has it
        if state:
            make_folder(directory)
            write_state(directory, state, f"the state of this {type(self).__name__}")

    def _has_files_in(self, path: Path) -> bool:
        """Whether this is a storage, and ``path`` is its scratch directory."""
        return False

    def _dump_in_place(self, directory: Path) -> None:
        """`_dump` of a storage that `_has_files_in` the place where ``directory`` will be."""
        raise NotImplementedError(type(self).__name__)

    def _read(self, directory: Path) -> Any:
        """What `_dump` or TorchRL wrote, for `_apply`; nothing is changed yet."""
        return read_state(directory)

    def _apply(self, saved: Any, loaded: Any) -> Any:
        """Become what `_read` gave; a storage returns the `Loaded` for the other parts, or None."""
        if saved is not None:
            self.load_state_dict(saved)  # type: ignore[attr-defined] # every part has it


def dump_part(part: Any, directory: Path, moment: Any = None) -> Any:
    """Save a part of a buffer, with its own ``dumps`` where it has one; returns as `_dump`."""
    if has_its_own(part, "dumps"):
        make_folder(directory)
        return part.dumps(directory)
    return part._dump(directory, moment)


def read_part(part: Any, directory: Path) -> Any:
    """What was saved of a part, for `apply_part`; nothing is changed yet."""
    return directory if has_its_own(part, "loads") else part._read(directory)


def apply_part(part: Any, saved: Any, loaded: Any = None) -> Any:
    """Load a part of a buffer, with its own ``loads`` where it has one; returns as `_apply`."""
    return part.loads(saved) if has_its_own(part, "loads") else part._apply(saved, loaded)


def has_its_own(part: Any, name: str) -> bool:
    """Whether a class of the user's has the method."""
    module: str = getattr(type(part), name).__module__
    return not module.startswith(_OURS)


def require_no_buffer(path: Path) -> None:
    """BufferExistsError where a buffer has its files in ``path``: they cannot be saved over."""
    if (path / CONTROL).exists():
        raise BufferExistsError(
            f"{path}: is the scratch directory of a buffer, whose files cannot be saved over; "
            "save to another directory",
            path=str(path),
        )
