"""Data sets of Minari (https://minari.farama.org), in whichever files it keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.extras import missing
from shmbuffer.replay.datasets.converted import FoundDataset


def find(name: str) -> FoundDataset:
    """A data set on this machine, in ``MINARI_DATASETS_PATH`` or ``~/.minari/datasets``."""
    try:
        import minari  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise missing(
            "to read a data set of Minari needs minari", "minari", name=error.name
        ) from error
    data = minari.load_dataset(name)  # its FileNotFoundError says how to download it
    files = Path(data.storage.data_path)
    version = max(file.stat().st_mtime_ns for file in (files, *files.rglob("*")))
    return FoundDataset("minari", name, version, int(data.total_steps), lambda: _episodes(data))


def _episodes(data: Any) -> Iterator[TensorDict]:
    """Each episode as steps ``[n]``, in the order of their numbers."""
    for episode in data.iterate_episodes():
        steps = len(episode.rewards)
        ends = {
            "terminated": torch.as_tensor(episode.terminations).reshape(steps, 1),
            "truncated": torch.as_tensor(episode.truncations).reshape(steps, 1),
        }
        root: dict[str, Any] = {
            "episode": torch.full((steps,), int(episode.id)),
            "action": _some(episode.actions, slice(None), steps),
        }
        then: dict[str, Any] = {
            "reward": torch.as_tensor(np.asarray(episode.rewards)).reshape(steps, 1),
            "done": ends["terminated"] | ends["truncated"],
            **ends,
        }
        for key, tree in (("observation", episode.observations), ("info", episode.infos)):
            root[key] = _some(tree, slice(None, -1), steps)
            then[key] = _some(tree, slice(1, None), steps)
        nested = {key: value for key, value in then.items() if value is not None}
        known = {key: value for key, value in root.items() if value is not None}
        yield TensorDict({**known, "next": TensorDict(nested, [steps])}, [steps])


def _some(tree: Any, cut: slice, steps: int) -> Any:
    """Part of each column of numbers, one for each step; None without such a column."""
    if isinstance(tree, tuple):
        tree = {str(at): part for at, part in enumerate(tree)}
    if isinstance(tree, dict):
        parts = {key: _some(part, cut, steps) for key, part in tree.items()}
        kept = {key: part for key, part in parts.items() if part is not None}
        return TensorDict(kept, [steps]) if kept else None
    column = np.asarray(tree)
    if column.dtype.kind not in "biufc" or not column.ndim:  # text, or nothing
        return None
    found = column[cut]
    return torch.from_numpy(np.ascontiguousarray(found)) if len(found) == steps else None
