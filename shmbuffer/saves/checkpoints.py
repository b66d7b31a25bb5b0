"""The base class of storages, samplers and writers that can be saved: `Checkpoints`.

A buffer saves one snapshot of its parts into ``storage/``, ``sampler/`` and ``writer/``, in
TorchRL's layout. Each part can also be saved alone. Data that do not fit into TorchRL's files are
in additional files (``shmbuffer.*``). The key ``"shmbuffer"`` in TorchRL's JSON files refers to
them. If TorchRL saves to the same path later, it rewrites the JSON without that key, and the
additional files are ignored.

A part implements its state once: `state_dict`, or `_saved` if the save has an earlier snapshot.
Saves of this package contain that state as plain values. `PartFiles` converts it to TorchRL's files
and back.
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
    """The result of loading a storage, for the sampler and the writer of the same buffer."""

    slots: int = 0
    """Capacity of the saved storage in slots."""
    width: int = 1
    """Number of elements per slot."""
    shift: int = 0
    """An item that was saved in slot i is now in slot ``(i - shift) % slots``."""
    in_place: bool = False
    """True if the storage opened its own files, which have cursor, counts and priorities."""
    same_tickets: bool = False
    """True if the items and the ring have the same tickets as at the time of the save."""
    moment: ItemSnapshot | None = None
    """The slots as they were saved. Priorities in it take precedence over those in files."""

    def places(self, elements: Any) -> Any:
        """Returns the new indices of elements, given their indices in the saved storage."""
        if not self.shift:
            return elements
        return (elements - self.shift * self.width) % (self.slots * self.width)


class PartFiles(NamedTuple):
    """The files in which TorchRL stores the state of a part."""

    write: Callable[[Path, Any, Any, Any], None]
    """Called with a directory, the part, the state of `_saved`, and the snapshot."""
    read: Callable[[Path, Any], Any]
    """Reads such a state from a directory, for a part."""


_STATE = "shmbuffer.state"


def _write_state(directory: Path, part: Any, state: Any, moment: Any) -> None:
    if state:
        make_folder(directory)
        write_value(directory, _STATE, state, f"the state of this {type(part).__name__}")


def _read_state(directory: Path, part: Any) -> Any:
    return read_value(directory, _STATE) if exists(directory / f"{_STATE}.jsonl") else None


OWN_FILES = PartFiles(_write_state, _read_state)
"""Files with the state as plain values, for a part for which TorchRL has no files."""


class Saves:
    """TorchRL's other names for ``dumps`` and ``loads``, which a subclass may have overridden."""

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

    A custom part is saved by its ``state_dict`` if that contains only tensors, text, numbers and
    containers of these. If it has its own ``dumps`` and ``loads``, they are called with a
    directory. The path passed to ``dumps`` is valid only in this process and during the call.
    """

    def dumps(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Saves the part into the directory ``path``, replacing an earlier save.

        After a crash, the directory contains either the earlier save or the new one.

        Args:
            path: the directory, which is created if necessary.
            on_progress: function that is called with a `ProgressReport` several times a second. If
                it raises an error, so does this call, and the earlier save is kept.

        Raises:
            TypeError: the state contains an object that could only be pickled.
            BufferExistsError: the directory is the scratch directory of a buffer, or has files that
                are not part of a save. Nothing was written.
            OSError: there is no space, or permission is denied. The earlier save is kept.
        """
        with report_to(on_progress):
            if self._has_files_in(Path(path)):
                self._flush_in_place(Path(path))
                return
            require_no_buffer(Path(path))
            with publish(path, self._kind) as directory:
                self._dump(directory, None)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Replaces the contents with a save by `dumps`, from this library or from TorchRL.

        Args:
            path: the directory.
            on_progress: see `dumps`. If it raises an error, either nothing was changed, or a note
                on the exception says that the buffer is now empty.

        Raises:
            FileNotFoundError: the directory contains no save.
            CorruptBufferError: the files are damaged.
        """
        settle(path)
        with report_to(on_progress):
            self._apply(self._read(Path(path)), None)

    _kind = "part"
    """The name of the kind of part in the list of files of a save."""
    _state_keys: tuple[str, ...] = ()
    """The keys that `load_state_dict` requires."""
    _torchrl_files = OWN_FILES

    def _dump(self, directory: Path, moment: Any) -> Any:
        """Writes TorchRL's files into ``directory``; a storage on a ring returns the snapshot."""
        self._torchrl_files.write(directory, self, self._saved(moment, directory), moment)

    def _saved(self, moment: Any, folder: Path) -> Any:
        """Returns the state in a snapshot as plain values; the current state if ``moment`` is None.

        Custom members that have a method ``dumps`` write below ``folder``.
        """
        return self.state_dict() or None  # type: ignore[attr-defined] # every part has it

    def _of_saved(self, saved: Any, folder: Path) -> Any:
        """Converts the result of `_saved` to the state for `_apply`. The part does not change yet.

        Raises:
            FileNotFoundError: the save is of another kind of part.
        """
        if set(self._state_keys).difference(saved if isinstance(saved, dict) else ()):
            raise FileNotFoundError(f"{folder}: {missing_part(self._kind)}")
        return saved

    def _has_files_in(self, path: Path) -> bool:
        """True for a storage whose scratch directory is ``path``."""
        return False

    def _flush_in_place(self, path: Path) -> None:
        """Syncs the files of a storage that is saved into its own scratch directory."""
        raise NotImplementedError(type(self).__name__)

    def _read(self, directory: Path) -> Any:
        """Reads a state of `_dump` or TorchRL for `_apply`. The part does not change yet."""
        return self._torchrl_files.read(directory, self)

    def _apply(self, saved: Any, loaded: Any) -> Any:
        """Applies a state of `_read`. A storage returns `Loaded` or None for the other parts."""
        if saved is not None:
            self.load_state_dict(saved)  # type: ignore[attr-defined] # every part has it


def dump_part(part: Any, directory: Path, moment: Any = None) -> Any:
    """Saves a part of a buffer with its own ``dumps`` if it has one, otherwise with `_dump`."""
    if has_its_own(part, "dumps"):
        make_folder(directory)
        return part.dumps(directory)
    return part._dump(directory, moment)


def read_part(part: Any, directory: Path) -> Any:
    """Reads the state of a part for `apply_part`. The part does not change yet."""
    return directory if has_its_own(part, "loads") else part._read(directory)


def apply_part(part: Any, saved: Any, loaded: Any = None) -> Any:
    """Loads a part of a buffer with its own ``loads`` if it has one, otherwise with `_apply`."""
    return part.loads(saved) if has_its_own(part, "loads") else part._apply(saved, loaded)


def save_part(part: Any, folder: Path, moment: Any) -> Any:
    """Saves a part next to the snapshot of a ring: returns plain values, or writes a folder."""
    if not has_its_own(part, "dumps"):
        return part._saved(moment, folder)
    make_folder(folder)
    part.dumps(folder)
    return None


def saved_part(part: Any, saved: Any, folder: Path) -> Any:
    """Returns the argument of `apply_part` for a result of `save_part`."""
    return folder if has_its_own(part, "loads") else part._of_saved(saved, folder)


def export_storage(storage: Any, folder: Path) -> Any:
    """Writes a storage in TorchRL's layout if its checkpointer can; returns the snapshot."""
    write = getattr(storage.checkpointer, "_export", None)
    if write is None or has_its_own(storage, "dumps"):
        return dump_part(storage, folder)
    make_folder(folder)
    return write(storage, folder)


def has_its_own(part: Any, name: str) -> bool:
    """True if the method belongs to a class that the user defined."""
    module: str = getattr(type(part), name).__module__
    return not module.startswith(_OURS)


def require_no_buffer(path: Path) -> None:
    """Raises BufferExistsError if ``path`` is the directory of a live buffer."""
    if not (path / CONTROL).exists():
        return
    try:
        if is_save(path):
            return
        found = "is the scratch directory of a buffer, whose files cannot be saved over"
    except (CorruptBufferError, FormatError) as error:
        found = f"contains a damaged buffer or save ({error}), which is not replaced"
    raise BufferExistsError(f"{path}: {found}; save to another directory", path=str(path))
