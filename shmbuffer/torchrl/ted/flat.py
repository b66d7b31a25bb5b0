"""The flat form of episode data: all items in time order, with each observation stored once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor

from shmbuffer.errors import BufferExistsError
from shmbuffer.memory.format.key_names import require_file_names
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves.file_tree import close_tree
from shmbuffer.saves.safe_files import make_folder
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.ted.entries import (
    CUT_SHAPE,
    CUTS,
    DONE_KEYS,
    NEXT,
    REWARD_KEYS,
    ROOT,
    STORAGE_SHAPE,
    NestedKey,
    Roles,
    assemble,
    entries,
    names,
    require_loadable,
)
from shmbuffer.torchrl.ted.episodes import Episodes, as_bytes, flags_of, rows_of, transfer


@dataclass(frozen=True)
class CompactEntry:
    """An entry of the compact form.

    ``after`` is the leaf under ``"next"`` if the entry also contains its values.
    """

    path: KeyPath
    leaf: torch.Tensor
    after: torch.Tensor | None = None


class TED2Flat(Roles):
    """Save hook that converts episode data to a flat form with each observation stored once.

    The items are arranged in time order, lane by lane. An entry that is both at the root and under
    ``"next"`` gets ``n`` + (number of trajectories) rows. Flags and rewards are moved from
    ``"next"`` to the root, and all other entries keep their ``n`` rows. `Flat2TED` restores every
    item bit for bit.

    When a storage is saved, the checkpointer sets ``shift`` and ``is_full``. If they are not set,
    the data are assumed to be in time order.

    Args:
        done_key: key under ``"next"`` of the flag that marks the end of an episode, with one value
            per item.
        shift_key: key under which ``shift`` is stored.
        is_full_key: key under which ``is_full`` is stored.
        done_keys: keys of flags, without ``"next"``.
        reward_keys: keys of rewards, without ``"next"``.

    Raises:
        ValueError: ``done_key`` is not under ``"next"``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import TED2Flat
        >>> data = TensorDict({
        ...     "observation": torch.tensor([0.0, 1.0, 10.0, 11.0]),
        ...     "next": {
        ...         "observation": torch.tensor([1.0, 2.0, 11.0, 12.0]),
        ...         "reward": torch.ones(4, 1),
        ...         "done": torch.tensor([[False], [True], [False], [False]]),
        ...     },
        ... }, batch_size=[4])
        >>> TED2Flat()(data)["observation"].tolist()
        [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]

    Source: ``torchrl.data.TED2Flat``.
    """

    shift: int | None = None
    """Slot after the one that was written last."""
    is_full: bool | None = None
    """True if the ring has wrapped."""

    def __init__(
        self,
        done_key: NestedKey = (NEXT, "done"),
        shift_key: NestedKey = "shift",
        is_full_key: NestedKey = "is_full",
        done_keys: Iterable[NestedKey] = DONE_KEYS,
        reward_keys: Iterable[NestedKey] = REWARD_KEYS,
    ) -> None:
        super().__init__(done_key, shift_key, is_full_key, done_keys, reward_keys)
        if self._done[0] != NEXT or len(self._done) < 2:
            raise ValueError(
                f"{type(self).__name__}(done_key={done_key!r}): the end of an episode must be an "
                "entry under 'next', such as ('next', 'done')"
            )

    def __call__(self, data: Any, path: str | os.PathLike[str] | None = None) -> TensorDict:
        """Returns the compact form as a locked, memory-mapped TensorDict.

        The TensorDict has no batch dimensions. Rows without an item are 0.

        Args:
            data: the items.
            path: a new or empty directory for the memory-mapped files. With None, no files are
                created.

        Raises:
            BufferExistsError: the directory is not empty.
            ValueError: the data have no suitable entry ``done_key``, or have an entry whose key
                the compact form uses.
        """
        found = entries(data)
        reserved = {one for one in found if one in self._reserved_paths or one[0] == ROOT[0]}
        if reserved:
            raise ValueError(
                f"{type(self).__name__}: the data have the entries {names(reserved)}, but the "
                "compact form uses these keys; rename them, or pass another shift_key or "
                "is_full_key"
            )
        full = True if self.is_full is None else self.is_full
        episodes = Episodes(tuple(data.batch_size), self.shift or 0, full)
        episodes.end(self._episode_ends(found, episodes))
        has_defaults = self._has_default_flags(found, episodes)
        stored = self._compact_entries(found, has_defaults)
        cuts = cpu.zeros(episodes.rows, dtype=torch.bool)
        for entry in stored:
            if entry.after is not None:
                root, after = (as_bytes(leaf, episodes.rows) for leaf in (entry.leaf, entry.after))
                cuts |= episodes.cuts(root, after)
        episodes.end(cuts)
        constants: dict[KeyPath, Any] = {
            self._is_full_path: NonTensorData(episodes.is_full),
            self._shift_path: NonTensorData(episodes.shift),
            CUT_SHAPE if cuts.any() else STORAGE_SHAPE: NonTensorData([*episodes.shape]),
            **self._non_tensors(found, episodes),
        }
        if cuts.any():
            constants[CUTS] = self._cuts(cuts, episodes)
        if not has_defaults:
            constants[ROOT] = TensorDict(batch_size=self._batch(episodes))
        return self._write(stored, constants, episodes, path)

    def _episode_ends(self, found: Mapping[KeyPath, Any], episodes: Episodes) -> torch.Tensor:
        """Returns True for each row that ends an episode, bool ``[rows]``."""
        done = found.get(self._done)
        if not isinstance(done, torch.Tensor):
            raise ValueError(
                f"{type(self).__name__}(done_key={self.done_key!r}): the data have no entry with "
                f"this key. They have {names(found)}; pass the key of the entry that marks where "
                "episodes end as done_key"
            )
        if done.numel() != episodes.rows:
            raise ValueError(
                f"{type(self).__name__}(done_key={self.done_key!r}): this entry has shape "
                f"{list(done.shape)}, but one value for each of {list(episodes.shape)} items is "
                "needed; pass the entry that marks the end of the whole episode"
            )
        return flags_of(done, episodes.rows)[episodes.elements] & episodes.holds

    def _compact_entries(
        self, found: Mapping[KeyPath, Any], has_defaults: bool
    ) -> list[CompactEntry]:
        """Returns the tensors that the compact form contains.

        ``has_defaults`` is True if the flags at the root can be restored without storing them.
        """
        stored = []
        for path, leaf in found.items():
            if is_non_tensor(leaf):
                continue
            inner = path[1:]
            if path[0] == NEXT and inner in self._flags | self._rewards:
                stored.append(CompactEntry(inner, leaf))
            elif path[0] == NEXT and not isinstance(found.get(inner), torch.Tensor):
                stored.append(CompactEntry(path, leaf))  # an entry that is only under "next"
            elif path in self._flags | self._rewards:
                if not has_defaults:
                    stored.append(CompactEntry(ROOT + path, leaf))
            elif path[0] != NEXT:
                after = found.get((NEXT, *path))
                stored.append(
                    CompactEntry(path, leaf, after if isinstance(after, torch.Tensor) else None)
                )
        return stored

    def _has_default_flags(self, found: Mapping[KeyPath, Any], episodes: Episodes) -> bool:
        """True if the root has no reward, and has the same flags as "next", which are all False.

        In this case the flags at the root are not stored.
        """
        flags = {path for path in found if path in self._flags}
        if flags != {path[1:] for path in found if path[0] == NEXT and path[1:] in self._flags}:
            return False
        if any(path in self._rewards for path in found):
            return False
        items = episodes.elements[episodes.holds]
        return not any(flags_of(found[path], episodes.rows)[items].any() for path in flags)

    def _write(
        self,
        stored: list[CompactEntry],
        constants: Mapping[KeyPath, Any],
        episodes: Episodes,
        path: str | os.PathLike[str] | None,
    ) -> TensorDict:
        """Creates the compact form and copies the rows of all entries to it."""
        if path is not None:
            names = [name for name in constants if name != ROOT]
            names += [entry.path for entry in stored]
            require_file_names(names, f"{path}: entry")
            require_loadable({entry.path: entry.leaf for entry in stored}, type(self).__name__)
        shapes = [
            self._shape(entry, episodes, tuple(entry.leaf.shape[len(episodes.shape) :]))
            for entry in stored
        ]
        output = assemble(constants, self._batch(episodes))
        if path is not None:
            _make_empty_folder(Path(path))
        output.memmap_(None if path is None else str(path))
        rows = cpu.arange(episodes.rows)
        items = episodes.holds.nonzero()[:, 0]
        elements = episodes.elements[items]
        ends = episodes.ends.nonzero()[:, 0]
        plain: dict[KeyPath, torch.Tensor] = {}
        for entry, shape in zip(stored, shapes, strict=True):
            both = entry.after is not None
            tensor = _make_tensor(output, entry, shape, mapped=path is not None)
            if tensor is None:
                tensor = plain[entry.path] = cpu.zeros(shape, dtype=entry.leaf.dtype)
            target = as_bytes(rows_of(tensor), episodes.kept if both else episodes.rows)
            source = as_bytes(entry.leaf, episodes.rows)
            transfer(target, (episodes.steps if both else rows)[items], source, elements)
            if entry.after is not None:
                after = as_bytes(entry.after, episodes.rows)
                transfer(target, episodes.steps[ends] + 1, after, episodes.elements[ends])
        if plain:
            output.unlock_()
            for name, tensor in plain.items():
                output[name] = tensor
            output.lock_()
        if path is not None:
            with Directory.open(path, allow_unsafe_fs=True) as folder:
                close_tree(folder)
        return output

    def _non_tensors(self, found: Mapping[KeyPath, Any], episodes: Episodes) -> dict[KeyPath, Any]:
        """Returns the entries that are not tensors, with one object per row in time order."""
        stored: dict[KeyPath, Any] = {}
        for path, value in found.items():
            if isinstance(value, NonTensorStack):
                objects = _flattened(value.tolist(), len(episodes.shape))
                stored[path] = self._objects([objects[at] for at in episodes.elements], episodes)
            elif is_non_tensor(value):
                stored[path] = NonTensorData(value.data)
        return stored

    # -- methods that the nested form overrides ------------------------------------------------

    def _batch(self, episodes: Episodes) -> tuple[int, ...]:
        """Returns the batch size of the compact form."""
        return ()

    def _shape(self, entry: CompactEntry, episodes: Episodes, item: tuple[int, ...]) -> Any:
        """Returns the shape of an entry in the compact form; ``item`` is the shape of one item."""
        return torch.Size((episodes.rows if entry.after is None else episodes.kept, *item))

    def _objects(self, objects: list[Any], episodes: Episodes) -> Any:
        """Returns an entry with one object per row."""
        return NonTensorStack(*(NonTensorData(one) for one in objects))

    def _cuts(self, cuts: torch.Tensor, episodes: Episodes) -> torch.Tensor:
        """Returns the entry `CUTS` for the rows at which a trajectory, but no episode, ends."""
        return cuts.nonzero()[:, 0]


def _make_tensor(
    output: TensorDict, entry: CompactEntry, shape: Any, mapped: bool
) -> torch.Tensor | None:
    """Creates a memory-mapped tensor for an entry of ``output``, and returns it.

    Returns None for complex and empty tensors, which tensordict can only map if they have a file.
    """
    dense = not isinstance(shape, torch.Tensor)
    if dense and not mapped and (entry.leaf.dtype.is_complex or not entry.leaf.numel()):
        return None
    with cpu.as_default():
        return output.make_memmap(entry.path, shape, dtype=entry.leaf.dtype)


def _make_empty_folder(path: Path) -> None:
    """Creates the directory for tensordict's files, or checks that it is empty.

    tensordict itself would follow symbolic links and overwrite files.

    Raises:
        BufferExistsError: the directory is not empty.
    """
    make_folder(path)
    with Directory.open(path, allow_unsafe_fs=True) as folder:
        if folder.listdir():
            raise BufferExistsError(
                f"{path}: is not empty, and existing files are not overwritten; pass a new "
                "directory",
                path=str(path),
            )


def _flattened(objects: Any, dims: int) -> list[Any]:
    """Flattens a list of objects that is nested ``dims`` levels deep."""
    for _ in range(dims - 1):
        objects = [one for inner in objects for one in inner]
    return list(objects)
