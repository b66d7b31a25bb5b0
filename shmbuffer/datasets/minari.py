"""Reads data sets of Minari (https://minari.farama.org) in any of its file formats.

An episode of n steps has n + 1 observations and n + 1 infos. The first n are stored at the root of
the items, and the last n under ``"next"``. There are two exceptions:

- If there are only n observations, the one after the last step is missing. The last observation is
  repeated in its place.
- If there are only n infos, that of the reset is missing. The infos are stored only under
  ``"next"``. TorchRL makes the same assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from shmbuffer.datasets.converted import FoundDataset, identity_of
from shmbuffer.extras import missing
from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.saves.safe_files import read_file, require_own_content, require_plain

_METADATA, _HDF5 = "metadata.json", "main_data.hdf5"


def find(name: str) -> FoundDataset:
    """Finds a data set on this machine, in ``MINARI_DATASETS_PATH`` or ``~/.minari/datasets``."""
    try:
        import minari  # type: ignore[import-untyped]
        from minari.storage.datasets_root_dir import (  # type: ignore[import-untyped]
            get_dataset_path,
        )
    except ModuleNotFoundError as error:
        raise missing(
            "reading a Minari data set needs minari", "minari", name=error.name
        ) from error
    files = resolve_path(get_dataset_path(name) / "data")
    identity = _identity(files) if files.exists() else ""
    data = minari.load_dataset(name)  # its FileNotFoundError explains how to download the data set
    losses: dict[str, str] = {}
    return FoundDataset(
        kind="minari",
        name=name,
        identity=identity,
        identify=lambda: _identity(files),
        items=int(data.total_steps),
        batches=lambda: _episodes(data, losses),
        losses=losses,
    )


def _identity(folder: Path) -> str:
    """Returns the digest of a data set's files.

    Raises:
        UnsafePathError: a file is a link or a FIFO, which Minari itself would accept.
    """
    require_plain(folder)
    files = sorted(file for file in folder.rglob("*") if not file.is_dir())
    metadata = folder / _METADATA
    return identity_of(files, read_file(metadata) if metadata.exists() else b"")


def _episodes(data: Any, losses: dict[str, str]) -> Iterator[TensorDict]:
    """Yields the episodes in order, each as a TensorDict of steps ``[n]``."""
    file = Path(data.storage.data_path) / _HDF5
    if file.exists():
        require_own_content(file)
    for episode in data.iterate_episodes():
        yield _steps_of(episode, losses)


def _steps_of(episode: Any, losses: dict[str, str]) -> TensorDict:
    """Converts an episode to a TensorDict of steps ``[n]``, and adds its losses to ``losses``."""
    steps = len(episode.rewards)
    terminated, truncated, reward = (
        np.asarray(column).reshape(steps, 1)
        for column in (episode.terminations, episode.truncations, episode.rewards)
    )
    after = {
        "reward": reward,
        "done": terminated | truncated,
        "terminated": terminated,
        "truncated": truncated,
    }
    data = TensorDict({"episode": _tensor(np.full(steps, int(episode.id)))}, [steps])
    for name, values in after.items():
        data["next", name] = _tensor(values)
    trees = {
        "action": episode.actions,
        "observation": episode.observations,
        "info": episode.infos,
    }
    for key, found in _leaves(trees):
        array = _array(found)
        why = array if isinstance(array, str) else _add(data, key, array, losses)
        if why:
            column = ".".join(key)
            losses.setdefault(column, f"Column {column!r} is left out because {why}.")
    return data


def _add(
    data: TensorDict, key: tuple[str, ...], array: NDArray[Any], losses: dict[str, str]
) -> str:
    """Adds a column of an episode to its steps.

    Returns the reason if this is impossible, and otherwise an empty text.
    """
    steps, rows = len(data), len(array)
    known: NDArray[Any] | None = array[:steps]
    following: NDArray[Any] | None = array[1:]
    match key[0], rows - steps:
        case "action", 0:
            following = None
        case "info", 0:
            known, following = None, array
        case "observation", 0:
            following = np.concatenate([array[1:], array[-1:]])
            name = ".".join(("next", *key))
            losses[name] = (
                f"Column {name!r} is incomplete because an episode has as many observations as "
                "steps: the observation after its last step, where 'next.done' is set, is unknown. "
                "The last known observation is repeated there."
            )
        case (("observation" | "info"), 1):
            pass
        case _:
            return f"it has {rows} rows, but the episode has {steps} steps"
    if known is not None:
        data[key] = _tensor(known)
    if following is not None:
        data["next", *key] = _tensor(following)
    return ""


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Converts an array to a tensor. A read-only array, such as one of Arrow, is copied."""
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _leaves(tree: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the key and the value of each column in nested dicts and tuples."""
    if isinstance(tree, tuple):
        tree = {str(at): part for at, part in enumerate(tree)}
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from _leaves(part, (*key, name))
    elif tree is not None:
        yield key, tree


def _array(column: Any) -> NDArray[Any] | str:
    """Converts a column to an array of numbers, or returns the reason why this is impossible."""
    try:
        array = np.asarray(column)
    except ValueError:
        return "its rows have different shapes"
    if not array.ndim:
        return "it has one value per episode instead of one per step"
    if array.dtype.kind in "biufc":
        return array
    first = array.flat[0] if array.size else None
    if isinstance(first, str | bytes):
        return "it contains text, but tensors contain numbers"
    if isinstance(first, np.ndarray | list | tuple):
        return "its rows have different shapes"
    return f"its rows are of type {type(first).__name__}, but tensors contain numbers"
