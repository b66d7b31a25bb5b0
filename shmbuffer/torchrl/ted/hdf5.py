"""Splits episode data into one TensorDict per trajectory, because HDF5 has no nested tensors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import MemoryMappedTensor, NonTensorData, PersistentTensorDict, TensorDict

from shmbuffer.memory.format.dtypes import require_dtypes
from shmbuffer.memory.format.key_names import is_number, require_file_name
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import fields
from shmbuffer.tensors.form.tensors import dtype_name
from shmbuffer.torchrl.ted.entries import ROOT, assemble, dotted, entries, flat_path
from shmbuffer.torchrl.ted.episodes import rows_of
from shmbuffer.torchrl.ted.flat import TED2Flat

PREFIX = "traj_"
"""Start of a trajectory's name. The rest is a number that is padded with zeros."""


class H5Split(TED2Flat):
    """Save hook that splits the result of `TED2Nested` into one TensorDict per trajectory.

    The constructor accepts the arguments of `TED2Flat` but does not use them.

    Source: ``torchrl.data.H5Split``.
    """

    # The signature is that of TorchRL's class.
    def __call__(self, data: TensorDict) -> TensorDict:  # type: ignore[override]
        """Returns views of the trajectories under ``traj_0``, ``traj_1``, ..., and the constants.

        Raises:
            TypeError: HDF5 cannot store an entry.
        """
        width = len(str(len(data) - 1))
        split = TensorDict()
        if ROOT[0] in fields(data):
            split[ROOT[0]] = TensorDict()
        for path, leaf in entries(data).items():
            require_file_name(path, "H5Split: entry", slashes=False)
            if isinstance(leaf, torch.Tensor):
                require_dtypes(
                    [(dotted(path), dtype_name(leaf.dtype))],
                    lambda dtype: dtype.in_hdf5,
                    "H5Split",
                    "HDF5",
                    "convert it, or use a TensorStorageCheckpointer",
                )
                for number, part in enumerate(leaf.unbind(0)):
                    split[(f"{PREFIX}{number:0{width}}", *path)] = part
            elif isinstance(leaf, NonTensorData) and _is_number(leaf.data):
                split[path] = NonTensorData(leaf.data)
            else:
                raise TypeError(
                    f"H5Split: entry {dotted(path)!r} contains objects that are not numbers, which "
                    "cannot be restored from an HDF5 file; leave it out, or use a "
                    "NestedStorageCheckpointer"
                )
        return split


class H5Combine:
    """Load hook that joins the trajectories that `H5Split` created. `Nested2TED` is applied next.

    Source: ``torchrl.data.H5Combine``.
    """

    def __call__(self, data: Any, out: Any = None) -> TensorDict:
        """Returns a TensorDict ``[trajectories]`` of nested tensors in memory, like `TED2Nested`.

        Cost: each trajectory is read once. In addition to the result, memory for one trajectory is
            needed.

        Raises:
            ValueError: the data contain no trajectories.
        """
        present = list(data.keys())
        numbered = sorted(
            (int(name.removeprefix(PREFIX)), name)
            for name in present
            if name.startswith(PREFIX) and is_number(name.removeprefix(PREFIX))
        )
        if not numbered:
            raise ValueError(
                f"H5Combine: the data have no entry {PREFIX + '0'!r}, so they were not written by "
                f"H5Split; they have {', '.join(sorted(present))}"
            )
        parts = [data[name] for _, name in numbered]
        combined: dict[KeyPath, Any] = {}
        for name in present:
            if (name,) == ROOT:
                combined[ROOT] = TensorDict(batch_size=[len(parts)])
            elif not name.startswith(PREFIX):
                combined.update(entries({name: data.get(name)}))
        for key in parts[0].keys(include_nested=True, leaves_only=True):
            combined[flat_path(key)] = _joined(parts, flat_path(key))
        return assemble(combined, [len(parts)])


def _joined(parts: list[Any], path: KeyPath) -> torch.Tensor:
    """Joins the tensors at ``path`` in all trajectories to a nested tensor."""
    shapes = [_shape(part, path) for part in parts]
    dtype = parts[0].get(path).dtype
    with cpu.as_default():
        nested: torch.Tensor = MemoryMappedTensor.empty(cpu.tensor(shapes), dtype=dtype)
    rows = rows_of(nested)
    start = 0
    for part, shape in zip(parts, shapes, strict=True):
        rows[start : start + shape[0]] = part.get(path)
        start += shape[0]
    return nested


def _shape(part: Any, path: KeyPath) -> tuple[int, ...]:
    if isinstance(part, PersistentTensorDict):  # avoids reading the entry from the file
        return tuple(part.file["/".join(path)].shape)
    return tuple(part.get(path).shape)


def _is_number(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, (bool, int, float)) for one in values)
