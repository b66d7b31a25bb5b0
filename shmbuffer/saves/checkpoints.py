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

from shmbuffer.errors import BufferExistsError, CorruptBufferError, FormatError
from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.format.layout import CONTROL
from shmbuffer.memory.system.progress import OnProgress, hearing
from shmbuffer.saves.publication import publish, settle
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
        """Saves into the directory ``path``, which then has this save and nothing else.

        A crash leaves the save that was there before, or this one.

        Args:
            path: a directory; it is made if it is not there.
            on_progress: called with a `ProgressReport` some times a second. What it raises comes
                out of this call, and the save that was there before stays.

        Raises:
            TypeError: the state holds something that can only be pickled.
            BufferExistsError: the directory is the scratch directory of a buffer, or has files that
                no save made; nothing was written.
            OSError: no room, or no permission; what was there is as it was.
        """
        with hearing(on_progress):
            if self._has_files_in(Path(path)):
                self._flush_in_place(Path(path))
                return
            require_no_buffer(Path(path))
            with publish(path, self._kind) as directory:
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
        settle(path)
        with hearing(on_progress):
            self._apply(self._read(Path(path)), None)

    _kind = "part"
    """What it is, in the list of the files of its save."""

    def _dump(self, directory: Path, moment: Any) -> Any:
        """Write plain files into ``directory``; a storage on a ring returns the moment."""
        state = self.state_dict()  # type: ignore[attr-defined] # every part has it
        if state:
            make_folder(directory)
            write_state(directory, state, f"the state of this {type(self).__name__}")

    def _saved(self, moment: Any, folder: Path) -> Any:
        """What is saved beside the snapshot of a ring: plain values.

        Members of the user's own that have a ``dumps`` write below ``folder``.
        """
        return self.state_dict() or None  # type: ignore[attr-defined] # every part has it

    def _of_saved(self, saved: Any, folder: Path) -> Any:
        """What `_apply` takes, from the result of `_saved`; FileNotFoundError if it is of another.

        Nothing is changed yet.
        """
        return saved

    def _has_files_in(self, path: Path) -> bool:
        """Whether this is a storage, and ``path`` is its scratch directory."""
        return False

    def _flush_in_place(self, path: Path) -> None:
        """Makes the files of a storage durable that `_has_files_in` the place of the save."""
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


def save_part(part: Any, folder: Path, moment: Any) -> Any:
    """Saves a part beside the snapshot of a ring: returns plain values, or writes a folder."""
    if not has_its_own(part, "dumps"):
        return part._saved(moment, folder)
    make_folder(folder)
    part.dumps(folder)
    return None


def saved_part(part: Any, saved: Any, folder: Path) -> Any:
    """What `apply_part` takes, from the result of `save_part`."""
    return folder if has_its_own(part, "loads") else part._of_saved(saved, folder)


def export_storage(storage: Any, folder: Path) -> Any:
    """Writes a storage in TorchRL's layout, if its checkpointer can; returns the moment."""
    write = getattr(storage.checkpointer, "_export", None)
    if write is None or has_its_own(storage, "dumps"):
        return dump_part(storage, folder)
    make_folder(folder)
    return write(storage, folder)


def has_its_own(part: Any, name: str) -> bool:
    """Whether a class of the user's has the method."""
    module: str = getattr(type(part), name).__module__
    return not module.startswith(_OURS)


def require_no_buffer(path: Path) -> None:
    """BufferExistsError where a buffer has its files in ``path``: they cannot be saved over.

    An earlier save can.
    """
    if not (path / CONTROL).exists():
        return
    try:
        if is_save(path):
            return
        found = "is the scratch directory of a buffer, whose files cannot be saved over"
    except (CorruptBufferError, FormatError) as error:
        found = f"holds a damaged buffer or save ({error}), which is not replaced"
    raise BufferExistsError(f"{path}: {found}; save to another directory", path=str(path))
