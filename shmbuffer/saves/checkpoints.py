"""The base class of storages, samplers and writers that can be saved: `Checkpoints`.

A buffer saves one snapshot of its parts into ``storage/``, ``sampler/`` and ``writer/``, in
TorchRL's layout. Each part can also be saved alone. Data that TorchRL's files cannot contain are in
additional files (``shmbuffer.*``), to which the key ``"shmbuffer"`` in TorchRL's JSON files refers.
If TorchRL saves to the same path later, it rewrites the JSON without this key, and the additional
files are ignored.

A part defines its state in `state_dict`, or in `_saved` if the state depends on the snapshot of the
storage. Saves of this package contain the state as plain values. `PartFiles` converts the state to
TorchRL's files and back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shmbuffer.errors import BufferExistsError, CorruptBufferError, FormatError
from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.format.layout import CONTROL
from shmbuffer.memory.system.progress import OnProgress, report_to
from shmbuffer.saves.publication import publish, settle
from shmbuffer.saves.safe_files import exists, make_folder
from shmbuffer.saves.saved_parts import missing_part
from shmbuffer.saves.values import read_value, write_value

_OURS = f"{__name__.partition('.')[0]}."


class Loaded(NamedTuple):
    """Describes a storage that was loaded, for the sampler and the writer of the same buffer."""

    slots: int = 0
    """Capacity of the saved storage in slots."""
    width: int = 1
    """Number of elements per slot."""
    shift: int = 0
    """An item that was saved in slot i is now in slot ``(i - shift) % slots``."""
    in_place: bool = False
    """True if the storage opened its own files, which contain cursor, counts and priorities."""
    same_tickets: bool = False
    """True if the items have the same tickets as before the save, and the ring the same head."""
    moment: ItemSnapshot | None = None
    """The snapshot in the save. Its priorities take precedence over those in other files."""

    def places(self, elements: Any) -> Any:
        """Converts indices of elements in the saved storage to indices in the loaded storage."""
        if not self.shift:
            return elements
        return (elements - self.shift * self.width) % (self.slots * self.width)


class PartFiles(NamedTuple):
    """Functions that write and read the state of a part in TorchRL's files."""

    write: Callable[[Path, Any, Any, Any], None]
    """Writes a state. Called with the directory, the part, the state, and the snapshot."""
    read: Callable[[Path, Any], Any]
    """Reads and returns a state. Called with the directory and the part."""


_STATE = "shmbuffer.state"


def _write_state(directory: Path, part: Any, state: Any, moment: Any) -> None:
    if state:
        make_folder(directory)
        write_value(directory, _STATE, state, f"the state of this {type(part).__name__}")


def _read_state(directory: Path, part: Any) -> Any:
    return read_value(directory, _STATE) if exists(directory / f"{_STATE}.jsonl") else None


OWN_FILES = PartFiles(_write_state, _read_state)
"""Stores the state as plain values, for parts for which TorchRL defines no files."""


class Saves:
    """TorchRL's aliases for ``dumps`` and ``loads``, which also call overridden methods."""

    def dump(
        self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None, **more: Any
    ) -> None:
        """Calls `dumps`."""
        with report_to(on_progress):
            self.dumps(path, **more)  # type: ignore[attr-defined] # the part that is saved

    def save(
        self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None, **more: Any
    ) -> None:
        """Calls `dumps`."""
        self.dump(path, on_progress=on_progress, **more)

    def load(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> Any:
        """Calls `loads`."""
        with report_to(on_progress):
            return self.loads(path)  # type: ignore[attr-defined] # the part that is loaded


class Checkpoints(Saves):
    """A part of a buffer that can be saved and loaded alone.

    A custom part is saved with its ``state_dict`` if the state contains only tensors, text, numbers
    and containers of these. If the part defines ``dumps`` and ``loads``, these methods are called
    with a directory instead. The path that ``dumps`` receives is valid only in this process and
    during the call.
    """

    def dumps(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Saves the part into the directory ``path``, replacing an earlier save.

        After a crash, the directory contains either the earlier save or the new one.

        Args:
            path: The directory, which is created if necessary.
            on_progress: Function that is called with a `ProgressReport` several times a second. If
                it raises an error, this call raises the error too, and keeps the earlier save.

        Raises:
            TypeError: The state contains an object that could only be pickled.
            BufferExistsError: The directory is the scratch directory of a buffer, or has files that
                are not part of a save. Nothing was written.
            OSError: There is not enough space, or permission is denied. The earlier save is kept.
        """
        with report_to(on_progress):
            if self._has_files_in(Path(path)):
                self._flush_in_place(Path(path))
                return
            require_no_buffer(Path(path))
            with publish(path, self._kind) as directory:
                self._dump(directory, None)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Replaces the contents of this part with a save by `dumps` of this library or of TorchRL.

        Args:
            path: The directory.
            on_progress: As for `dumps`. If the function raises an error, either nothing was
                changed, or a note on the exception says that the buffer is now empty.

        Raises:
            FileNotFoundError: The directory contains no save.
            CorruptBufferError: The files are damaged.
        """
        settle(path)
        with report_to(on_progress):
            self._apply(self._read(Path(path)), None)

    _kind = "part"
    """The kind of the part, as recorded in the manifest of a save."""
    _state_keys: tuple[str, ...] = ()
    """The keys of the state that `load_state_dict` requires."""
    _torchrl_files = OWN_FILES

    def _dump(self, directory: Path, moment: Any) -> Any:
        """Writes the part into a directory, in TorchRL's layout.

        ``moment`` is the snapshot of the storage in the same save, or None. A storage on a ring
        returns its snapshot.
        """
        self._torchrl_files.write(directory, self, self._saved(moment, directory), moment)

    def _saved(self, moment: Any, folder: Path) -> Any:
        """Returns the state as plain values.

        Args:
            moment: The snapshot of the storage to which the state must belong. None: the current
                state.
            folder: The directory below which custom members with a method ``dumps`` write.
        """
        return self.state_dict() or None  # type: ignore[attr-defined] # every part has it

    def _of_saved(self, saved: Any, folder: Path) -> Any:
        """Converts a result of `_saved` to the argument of `_apply`, without changing the part.

        Raises:
            FileNotFoundError: The save has the state of another class of part.
        """
        if set(self._state_keys).difference(saved if isinstance(saved, dict) else ()):
            raise FileNotFoundError(f"{folder}: {missing_part(self._kind)}")
        return saved

    def _has_files_in(self, path: Path) -> bool:
        """True if this part is a storage whose scratch directory is ``path``."""
        return False

    def _flush_in_place(self, path: Path) -> None:
        """Syncs the files of a storage that is saved into its own scratch directory."""
        raise NotImplementedError(type(self).__name__)

    def _read(self, directory: Path) -> Any:
        """Reads the files of `_dump` or of TorchRL, without changing the part.

        Returns the argument of `_apply`.
        """
        return self._torchrl_files.read(directory, self)

    def _apply(self, saved: Any, loaded: Any) -> Any:
        """Changes the part to a state that `_read` returned.

        ``loaded`` is the `Loaded` that the storage of the same buffer has returned, or None.
        """
        if saved is not None:
            self.load_state_dict(saved)  # type: ignore[attr-defined] # every part has it


def dump_part(part: Any, directory: Path, moment: Any = None) -> Any:
    """Saves a part of a buffer: with ``dumps`` of a user's class, or with `_dump`."""
    if has_its_own(part, "dumps"):
        make_folder(directory)
        return part.dumps(directory)
    return part._dump(directory, moment)


def read_part(part: Any, directory: Path) -> Any:
    """Reads the state of a part for `apply_part`, without changing the part."""
    return directory if has_its_own(part, "loads") else part._read(directory)


def apply_part(part: Any, saved: Any, loaded: Any = None) -> Any:
    """Loads a part of a buffer: with ``loads`` of a user's class, or with `_apply`."""
    return part.loads(saved) if has_its_own(part, "loads") else part._apply(saved, loaded)


def save_part(part: Any, folder: Path, moment: Any) -> Any:
    """Saves a part in a save that contains the snapshot of a ring.

    Returns the state as plain values. A user's class with ``dumps`` writes into ``folder`` instead,
    and the result is None.
    """
    if not has_its_own(part, "dumps"):
        return part._saved(moment, folder)
    make_folder(folder)
    part.dumps(folder)
    return None


def saved_part(part: Any, saved: Any, folder: Path) -> Any:
    """Converts a result of `save_part` to the argument of `apply_part`."""
    return folder if has_its_own(part, "loads") else part._of_saved(saved, folder)


def export_storage(storage: Any, folder: Path) -> Any:
    """Writes a storage into a directory, in TorchRL's layout if its checkpointer supports it.

    Returns the snapshot that was written.
    """
    write = getattr(storage.checkpointer, "_export", None)
    if write is None or has_its_own(storage, "dumps"):
        return dump_part(storage, folder)
    make_folder(folder)
    return write(storage, folder)


def has_its_own(part: Any, name: str) -> bool:
    """True if a class that the user defined implements the method ``name`` of a part."""
    module: str = getattr(type(part), name).__module__
    return not module.startswith(_OURS)


def require_no_buffer(path: Path) -> None:
    """Raises BufferExistsError if a directory is that of a live buffer, or of a damaged buffer."""
    if not (path / CONTROL).exists():
        return
    try:
        if is_save(path):
            return
        found = "is the scratch directory of a buffer, which a save cannot replace"
    except (CorruptBufferError, FormatError) as error:
        found = f"contains a damaged buffer or save ({error}), which a save does not replace"
    raise BufferExistsError(f"{path}: {found}; save to another directory", path=str(path))
