"""The entries of a TensorDict by path, and the names that the compact forms keep for themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor

from shmbuffer.replay.form.nodes import fields, is_collection

Path = tuple[str, ...]

STORAGE_SHAPE: Path = ("_storage_shape",)
"""Sizes of the ring, slots first."""

CUTS: Path = ("_cuts",)
"""Where items do not continue each other although no episode ended: rows in the flat form, flags of
trajectories in a nested one. Written only if there is such a place."""

CUT_SHAPE: Path = ("_cut_storage_shape",)
"""The place of `STORAGE_SHAPE` where there are cuts: TorchRL does not know of them, would put the
observations together wrongly, and stops with an error where the other entry is missing."""

ROOT: Path = ("_root",)
"""Root entries under a done or reward key. Written only where they are not what TorchRL makes up:
a flag that is False for every flag under ``"next"``, and no reward."""

LENGTH: Path = ("_len",)
"""Elements that hold an item, in an HDF5 file."""

NEXT = "next"


def path_of(key: str | Sequence[Any]) -> Path:
    """A key, or nested key, as the tuple of its names."""
    if isinstance(key, str):
        return (key,)
    return tuple(name for part in key for name in path_of(part))


def dotted(path: Path) -> str:
    """A path for a message."""
    return ".".join(path)


def entries(data: Any) -> dict[Path, Any]:
    """Tensors and non-tensor entries of any TensorDict, tensorclass or dict of them, by path.

    Nothing is copied.
    """
    found: dict[Path, Any] = {}
    for name, value in (data if isinstance(data, dict) else fields(data)).items():
        if isinstance(value, torch.Tensor) or is_non_tensor(value):
            found[(name,)] = value
        elif is_collection(value):
            found.update({(name, *path): leaf for path, leaf in entries(value).items()})
        else:  # a version of tensordict that unwraps what it hands out
            found[(name,)] = NonTensorData(value)
    return found


def assemble(found: Mapping[Path, Any], batch: Sequence[int]) -> TensorDict:
    """The TensorDict with these entries."""
    data = TensorDict(batch_size=torch.Size(batch))
    for path, value in found.items():
        data[path] = value
    return data


def constant(found: Mapping[Path, Any], path: Path, hook: str) -> Any:
    """A number or tuple that was stored beside the data.

    Raises:
        ValueError: it is not there: this is not what the hook reads.
    """
    value = found.get(path)
    if value is None:
        raise ValueError(
            f"{hook}: the data have no entry {dotted(path)!r}, so they were not written by its "
            f"counterpart, or under another name; they have {names(found)}"
        )
    while isinstance(value, NonTensorStack):  # equal ones, one for each trajectory
        value = value[0]
    return value.data if isinstance(value, NonTensorData) else value


def shape_of(found: Mapping[Path, Any], hook: str) -> list[int]:
    """Sizes of the ring.

    Raises:
        ValueError: see `constant`.
    """
    path = CUT_SHAPE if CUT_SHAPE in found else STORAGE_SHAPE
    return [int(size) for size in constant(found, path, hook)]


def names(found: Iterable[Path]) -> str:
    """Paths for a message."""
    return ", ".join(sorted(dotted(path) for path in found))
