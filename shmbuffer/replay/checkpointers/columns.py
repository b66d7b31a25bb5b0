"""Columns for a copy of a storage: maps of files at full capacity, sparse, that tensordict made."""

from __future__ import annotations

import math
import mmap
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shmbuffer._native import _core
from shmbuffer.replay.checkpointers.memmap import pytree_names
from shmbuffer.replay.checkpointers.nontensors import tensors_only
from shmbuffer.replay.form.leaves import Leaves
from shmbuffer.replay.form.nodes import TensorDictNode

#: What owns a column's file, by the number of its leaf.
Opened = dict[int, _core.Descriptor]


def make_files(leaves: Leaves, slots: int, path: Path) -> tuple[list[Any], Opened]:
    """Make the files of a whole storage, sparse, with tensordict's own ``meta.json``.

    Args:
        leaves: of the storage.
        slots: its capacity.
        path: a directory that is there.

    Returns:
        A map ``[slots, *lanes, *shape]`` of each leaf's file, or `Objects` of that shape; and what
        owns the files that have bytes, by the number of the leaf.
    """
    lead = (slots, *leaves.lanes)
    tensors = [at for at in range(len(leaves.leaves)) if at not in leaves.objects]
    blank = {
        at: torch.empty((), dtype=leaves.dtypes[at]).expand((*lead, *leaves.leaves[at].shape))
        for at in tensors
    }
    files: dict[int, Path] = {}
    if isinstance(leaves.node, TensorDictNode):
        made: list[Any] = []
        node = tensors_only(leaves.node)
        data = node.build(iter(blank.values()), lead, torch.device("cpu"))
        for at in tensors:  # torch finds them as large as they have to be
            _make_sparse(path / leaves.leaves[at].file, blank[at])
        with _named_errors(path):
            node.collect(data.memmap_like(path), made)
        files = {
            at: Path(column.filename)
            for at, column in zip(tensors, made, strict=True)
            if column.numel()
        }
    else:
        for at, name in enumerate(pytree_names(leaves)):
            if at in blank:
                files[at] = path / f"{name}.memmap"
                _make_sparse(files[at], blank[at])
        files = {at: file for at, file in files.items() if blank[at].numel()}
    descriptors = {at: _core.Descriptor() for at in files}
    for at, file in files.items():
        descriptors[at].take(os.open, file, os.O_RDWR | os.O_CLOEXEC)
    return _columns(leaves, lead, descriptors), descriptors


def _make_sparse(file: Path, column: torch.Tensor) -> None:
    """Make the file of a column."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "xb") as made:
        made.truncate(column.numel() * column.itemsize)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Have what the system refused torch be an error of the system.

    Torch says it in a RuntimeError that ends with the number: "... Too many open files (24)".
    """
    try:
        yield
    except RuntimeError as error:
        number = re.search(r"\((\d+)\)\s*$", str(error).split("\n", 1)[0])
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def scratch_columns(leaves: Leaves, slots: int, path: Path) -> tuple[list[Any], Opened]:
    """What `make_files` gives, of files without a name: gone when nobody uses them any more."""
    lead = (slots, *leaves.lanes)
    descriptors: Opened = {}
    for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
        nbytes = math.prod((*lead, *leaf.shape)) * dtype.itemsize
        if nbytes and at not in leaves.objects:
            name = path / f".shmbuffer-column-{secrets.token_hex(6)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptors[at] = _core.Descriptor()
            fd = descriptors[at].take(os.open, name, flags, 0o600)
            os.unlink(name)
            os.truncate(fd, nbytes)
    return _columns(leaves, lead, descriptors), descriptors


def _columns(leaves: Leaves, lead: tuple[int, ...], descriptors: Opened) -> list[Any]:
    """A map of each file; what has none is empty, or objects."""
    columns: list[Any] = []
    for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
        if at in descriptors:
            content = mmap.mmap(descriptors[at].fd, 0)
            columns.append(torch.frombuffer(content, dtype=dtype).view(*lead, *leaf.shape))
        else:
            columns.append(leaves.column(at, lead, torch.device("cpu")))
    return columns
