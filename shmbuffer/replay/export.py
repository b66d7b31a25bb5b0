"""The items of a buffer for other programs: the oldest first, some at a time, priorities left out.

parquet      a leaf a column; see `parquet_file`
hdf5         a leaf a dataset ``[items, *shape]``, nested keys as groups
tensordict   a directory for ``TensorDict.load_memmap``
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer.errors import EmptyBufferError
from shmbuffer.extras import missing
from shmbuffer.numpy.nodes import LEAF
from shmbuffer.replay import parquet_file
from shmbuffer.replay.form.tensors import torch_dtype


def export(storage: Any, path: str | os.PathLike[str], kind: str) -> int:
    """Write the items of a storage of tensors to ``path``, where nothing is yet; how many.

    The file or directory appears as a whole. ``kind`` is ``"parquet"``, ``"hdf5"`` or
    ``"tensordict"``. What others overwrite meanwhile is left out.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise FileExistsError(f"{target}: is there already; name another one, or remove it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such directory; make it first")
    if not len(storage):
        raise EmptyBufferError(f"{target}: there is nothing to export yet; nothing was written")
    if kind == "parquet":
        return parquet_file.write(storage, target, "none")
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        count = {"hdf5": _hdf5, "tensordict": _tensordict}[kind](storage, beside)
        beside.rename(target)
        return count
    finally:
        if beside.is_dir():
            shutil.rmtree(beside)
        beside.unlink(missing_ok=True)


def _hdf5(storage: Any, path: Path) -> int:
    try:
        import h5py  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise missing("HDF5 files need h5py", "h5", name=error.name) from error
    rows, count = parquet_file.rows_of(storage, path), 0
    for leaf in rows.leaves.leaves:
        if torch_dtype(leaf.dtype) is torch.bfloat16 or leaf.dtype.startswith("float8"):
            raise TypeError(
                f"{path}: HDF5 has no type for the {leaf.dtype} of {leaf.name!r}; export it to "
                "Parquet or a TensorDict"
            )
    with h5py.File(path, "w") as file:
        for tensors in parquet_file.in_order_of_age(rows):
            end = count + len(tensors[0])
            for leaf, tensor in zip(rows.leaves.leaves, tensors, strict=True):
                name, array = "/".join(leaf.path) or "data", tensor.numpy()
                if not count:
                    open_ended = (None, *array.shape[1:])
                    file.create_dataset(name, data=array, maxshape=open_ended, chunks=True)
                else:
                    file[name].resize(end, 0)
                    file[name][count:end] = array
            count = end
    return count


def _tensordict(storage: Any, path: Path) -> int:
    rows, count = parquet_file.rows_of(storage, path), 0
    if rows.leaves.node is LEAF:
        raise TypeError(
            f"{path}: an item is one tensor, which no TensorDict names; export it to HDF5"
        )
    room, whole = rows.ring.length // rows.ring.width, TensorDict()
    for tensors in parquet_file.in_order_of_age(rows):
        batch = TensorDict({}, [len(tensors[0])])
        for leaf, tensor in zip(rows.leaves.leaves, tensors, strict=True):
            batch.set(leaf.path, tensor)
        if not count:
            whole = batch[:1].expand(room).memmap_like(path)
        whole[count : count + len(batch)] = batch
        count += len(batch)
    if count < room:  # some was written over meanwhile
        kept = path.with_name(f"{path.name}.kept")
        whole[:count].memmap(kept)
        shutil.rmtree(path)
        kept.rename(path)
    return count
