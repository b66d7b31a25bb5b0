"""What storages, samplers and writers have in common when they are saved: `Checkpoints`.

A buffer saves its parts into one directory, ``storage/``, ``sampler/`` and ``writer/``, all of one
moment; each of them can be saved alone too. The layout is TorchRL's. What TorchRL has no place for
is in files of our own beside it (``shmbuffer.*``), and under the key ``"shmbuffer"`` of its JSON
files: a save by TorchRL over one of ours rewrites those, so that what is left of us is not taken
for part of it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.errors import BufferExistsError, CorruptBufferError
from shmbuffer.memory import Moment
from shmbuffer.memory.layout import CONTROL
from shmbuffer.memory.progress import OnProgress, hearing
from shmbuffer.replay.publication import finish, publish
from shmbuffer.replay.values import read_values, reading, write_values

OURS = "shmbuffer"
"""Our key in TorchRL's JSON files."""

_STATE = "shmbuffer.state"


class Loaded(NamedTuple):
    """What became of a storage that was loaded, for the sampler and the writer beside it."""

    cursor: int = 0
    """Slot of the next item."""
    slots: int = 0
    """Capacity of what was saved, in slots."""
    width: int = 1
    """Elements of a slot."""
    shift: int = 0
    """The item that was saved in slot i is in slot ``(i - shift) % slots`` now."""
    in_place: bool = False
    """The storage's own files were opened: cursor, counts and priorities are there already."""
    moment: Moment | None = None
    """It was copied from a live buffer, whose priorities win over those in older files."""

    def places(self, elements: Any) -> Any:
        """Where the elements of the saved storage are now."""
        if not self.shift:
            return elements
        return (elements - self.shift * self.width) % (self.slots * self.width)


class Checkpoints:
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
            publish(path, merge=True, within=in_place) as directory,
        ):
            if in_place:
                self._dump_in_place(directory)
            else:
                self._dump(directory, None)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Put what `dumps` saved, here or in TorchRL, in place of what is there.

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

    # A part of the user's own may have overridden `dumps` and `loads`, with TorchRL's arguments.

    def dump(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """The same as `dumps`."""
        with hearing(on_progress):
            self.dumps(path)

    def save(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """The same as `dumps`."""
        with hearing(on_progress):
            self.dumps(path)

    def load(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """The same as `loads`."""
        with hearing(on_progress):
            self.loads(path)

    def _dump(self, directory: Path, moment: Any) -> Any:
        """Write plain files into ``directory``, which may be made by this.

        Args:
            directory: of this part.
            moment: the `Moment` of the storage that is being saved with it, or `LIVING` where that
                goes on in the files that are saved; None if it is saved alone.

        Returns:
            A storage on a ring: the moment that was saved.
        """
        state = self.state_dict()  # type: ignore[attr-defined] # every part has it
        if state:
            directory.mkdir(exist_ok=True)
            write_state(directory, state, f"the state of this {type(self).__name__}")

    def _has_files_in(self, path: Path) -> bool:
        """Whether this is a storage, and ``path`` is its scratch directory."""
        return False

    def _dump_in_place(self, directory: Path) -> None:
        """`_dump` of a storage that `_has_files_in` the place where ``directory`` will be."""
        raise NotImplementedError(type(self).__name__)

    def _read(self, directory: Path) -> Any:
        """What `_dump` or TorchRL wrote, for `_apply`; nothing is changed yet.

        Raises:
            FileNotFoundError: nothing was saved there, and something has to be.
        """
        return read_state(directory)

    def _apply(self, saved: Any, loaded: Any) -> Any:
        """Become what `_read` gave.

        Args:
            saved: see there.
            loaded: what became of the storage beside it, a `Loaded`; None if it was not loaded. A
                storage: what the writer beside it says, see
                `StorageCheckpointerBase.loads_beside`.

        Returns:
            A storage: the `Loaded` for the other parts, or None.
        """
        if saved is not None:
            self.load_state_dict(saved)  # type: ignore[attr-defined] # every part has it


def dump_part(part: Any, directory: Path, moment: Any = None) -> Any:
    """Save a part of a buffer, with its own ``dumps`` where it has one.

    Returns:
        A storage on a ring: the `Moment` that was saved.
    """
    if has_its_own(part, "dumps"):
        directory.mkdir(exist_ok=True)
        return part.dumps(directory)
    return part._dump(directory, moment)


def read_part(part: Any, directory: Path) -> Any:
    """What was saved of a part, for `apply_part`; nothing is changed yet."""
    return directory if has_its_own(part, "loads") else part._read(directory)


def apply_part(part: Any, saved: Any, loaded: Any = None) -> Any:
    """Load a part of a buffer, with its own ``loads`` where it has one.

    Args:
        part: which.
        saved: from `read_part`.
        loaded: see `Checkpoints._apply`.

    Returns:
        A storage: the `Loaded` for the other parts, or None.
    """
    return part.loads(saved) if has_its_own(part, "loads") else part._apply(saved, loaded)


def has_its_own(part: Any, name: str) -> bool:
    """Whether a class of the user's has the method."""
    module: str = getattr(type(part), name).__module__
    return module.split(".")[0] != __name__.split(".")[0]


def write_state(directory: Path, state: dict[str, Any], what: str) -> None:
    """Write the state of a part, for which TorchRL has no files; ``what`` it is, for messages."""
    write_values(directory, _STATE, [state], allow_pickle=False, what=what)


def read_state(directory: Path) -> dict[str, Any] | None:
    """What `write_state` wrote; None if it did not."""
    if not (directory / f"{_STATE}.jsonl").exists():
        return None
    with reading(directory / f"{_STATE}.jsonl"):
        (state,) = read_values(directory, _STATE, allow_pickle=False)
        return dict(state)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that is an object.

    Raises:
        FileNotFoundError: it is not there.
        CorruptBufferError: it is something else.
    """
    found: dict[str, Any] = _read_json(file, dict)
    return found


def read_json_list(file: Path) -> list[Any]:
    """A JSON file that is a list. Raises as `read_json`."""
    found: list[Any] = _read_json(file, list)
    return found


def _read_json(file: Path, kind: type) -> Any:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptBufferError(
            f"{file}: is not JSON ({error}); take another copy of the checkpoint", path=str(file)
        ) from error
    if not isinstance(found, kind):
        raise CorruptBufferError(
            f"{file}: holds {found!r:.40}, not a {kind.__name__}; take another copy of the "
            "checkpoint",
            path=str(file),
        )
    return found


def load_plainly(file: Path) -> Any:
    """What torch.save wrote.

    Raises:
        ValueError: it could only be unpickled, or is damaged: torch does not tell the two apart.
    """
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file}: cannot be loaded without running code from it ({type(error).__name__}); the "
            "state of transforms may hold tensors, text, numbers and containers of them"
        ) from error


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; numpy's numbers are numbers."""
    file.write_text(json.dumps(content, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")


def require_no_buffer(path: Path) -> None:
    """BufferExistsError where a buffer has its files in ``path``: they cannot be saved over."""
    if (path / CONTROL).exists():
        raise BufferExistsError(
            f"{path}: is the scratch directory of a buffer, whose files cannot be saved over; "
            "save to another directory",
            path=str(path),
        )
