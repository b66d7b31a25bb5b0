"""Exports the items of a buffer for other programs, oldest first and without priorities.

    parquet      one column per leaf; see `parquet_file`
    hdf5         one dataset ``[items, *lanes, *shape]`` per leaf, with nested keys as groups
    tensordict   a directory for ``TensorDict.load_memmap``

Items are written in batches of bounded size. Items that other processes overwrite during the export
are skipped.

If the process dies during an export, the target does not exist. The incomplete data are in a work
directory (see `publication`), which the next export to the same target removes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.extras import missing
from shmbuffer.items.form.nodes import LEAF
from shmbuffer.memory import Schema
from shmbuffer.memory.format.dtypes import DType, require_dtypes
from shmbuffer.memory.format.key_names import require_file_names
from shmbuffer.saves import parquet_file
from shmbuffer.saves.publication import publish, publish_file
from shmbuffer.saves.safe_files import create_file, make_folders_below, write_file
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.tensors.form.tensors import contiguous


def export(storage: Any, path: str | os.PathLike[str], kind: str) -> int:
    """Writes the items of a storage of tensors to a new file or directory.

    The target appears atomically when it is complete and synced to disk.

    Args:
        storage: The storage of tensors.
        path: The file or directory to create. It must not exist yet.
        kind: ``"parquet"``, ``"hdf5"`` or ``"tensordict"``.

    Returns:
        The number of exported items.

    Raises:
        FileExistsError: The target already exists.
        FileNotFoundError: The parent directory does not exist.
        EmptyBufferError: There are no items.
        TypeError: The items are not tensors with the same structure, or the format does not support
            a dtype.
        MissingExtra: The package that writes the format is not installed.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise FileExistsError(f"{target}: already exists; choose another name, or remove it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such directory; create it first")
    if not len(storage):
        raise EmptyBufferError(
            f"{target}: the buffer is empty, so there is nothing to export; nothing was written"
        )
    rows = parquet_file.rows_of(storage, target)
    write: Callable[[Rows, Path], int] = _WRITERS[kind]
    return write(rows, target)


def _parquet(rows: Rows, target: Path) -> int:
    return parquet_file.write_rows(rows, target, "none")


def _hdf5(rows: Rows, target: Path) -> int:
    try:
        import h5py  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise missing("HDF5 files need h5py", "h5", name=error.name) from error
    _require_dtypes(rows, target, lambda dtype: dtype.in_hdf5, "HDF5")
    paths = [leaf.path for leaf in rows.leaves.leaves]
    require_file_names(paths, f"{target}: leaf", slashes=False)
    names = list(map("/".join, paths))
    count = 0
    with (
        parquet_file.errors_located(target),
        publish_file(target) as beside,
        h5py.File(beside, "w") as file,
    ):
        for tensors in parquet_file.in_order_of_age(rows):
            end = count + len(tensors[0])
            for name, tensor in zip(names, tensors, strict=True):
                array = contiguous(tensor).numpy()
                if not count:
                    open_ended = (None, *array.shape[1:])
                    file.create_dataset(name, data=array, maxshape=open_ended, chunks=True)
                else:
                    file[name].resize(end, 0)
                    file[name][count:end] = array
            count = end
        _require_items(count, target)
    return count


def _tensordict(rows: Rows, target: Path) -> int:
    if rows.leaves.node is LEAF:
        raise TypeError(
            f"{target}: each item is a single tensor without a key, so it cannot be stored in a "
            "TensorDict; export the buffer to HDF5"
        )
    _require_dtypes(rows, target, lambda dtype: dtype.tensordict, "TensorDict.load_memmap")
    leaves, count = rows.leaves.leaves, 0
    require_file_names([leaf.path for leaf in leaves], f"{target}: leaf")
    with parquet_file.errors_located(target), publish(target) as folder:
        with ExitStack() as opened:
            files = []
            for leaf in leaves:
                make_folders_below(folder, folder / leaf.file)
                files.append(opened.enter_context(create_file(folder / leaf.file)))
            for tensors in parquet_file.in_order_of_age(rows):
                for file, tensor in zip(files, tensors, strict=True):
                    file.write(contiguous(tensor).view(-1).view(torch.uint8).numpy().data)
                count += len(tensors[0])
        _require_items(count, target)
        for name, content in Schema(leaves, count, rows.lanes).meta_files().items():
            write_file(folder / name, content)
    return count


def _require_dtypes(
    rows: Rows, target: Path, accepts: Callable[[DType], bool], reader: str
) -> None:
    """Raises TypeError if the format does not support the dtype of a leaf.

    ``accepts`` returns True for a supported dtype. ``reader`` is the name of the format in the
    message.
    """
    leaves = [(leaf.name, leaf.dtype) for leaf in rows.leaves.leaves]
    remedy = "export it to Parquet. Nothing was written"
    require_dtypes(leaves, accepts, str(target), reader, remedy)


def _require_items(count: int, target: Path) -> None:
    """Raises EmptyBufferError if every item was overwritten before it was read."""
    if not count:
        raise EmptyBufferError(
            f"{target}: all items were overwritten by other processes before they could be read, "
            "so nothing was written; export again, or use a larger buffer"
        )


_WRITERS = {"parquet": _parquet, "hdf5": _hdf5, "tensordict": _tensordict}
