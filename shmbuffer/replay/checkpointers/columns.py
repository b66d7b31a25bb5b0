"""Columns for a copy of a storage: maps of files at full capacity, sparse, that tensordict made."""

from __future__ import annotations

import math
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from shmbuffer.replay.checkpointers.memmap import pytree_names
from shmbuffer.replay.checkpointers.nontensors import tensors_only
from shmbuffer.replay.leaves import Leaves
from shmbuffer.replay.nodes import TensorDictNode


def make_files(leaves: Leaves, slots: int, path: Path) -> tuple[list[Any], dict[int, int]]:
    """Make the files of a whole storage, sparse, with tensordict's own ``meta.json``.

    Args:
        leaves: of the storage.
        slots: its capacity.
        path: a directory that is there.

    Returns:
        A map ``[slots, *lanes, *shape]`` of each leaf's file, or `Objects` of that shape; and
        descriptors of the files that have bytes, by the number of the leaf, for the caller to
        close.
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
                files[at].parent.mkdir(parents=True, exist_ok=True)
                with open(files[at], "xb") as file:
                    file.truncate(blank[at].numel() * blank[at].itemsize)
        files = {at: file for at, file in files.items() if blank[at].numel()}
    descriptors = {at: os.open(file, os.O_RDWR | os.O_CLOEXEC) for at, file in files.items()}
    return _columns(leaves, lead, descriptors), descriptors


def scratch_columns(leaves: Leaves, slots: int, path: Path) -> tuple[list[Any], dict[int, int]]:
    """What `make_files` gives, of files without a name: gone when nobody uses them any more."""
    lead = (slots, *leaves.lanes)
    descriptors: dict[int, int] = {}
    for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
        nbytes = math.prod((*lead, *leaf.shape)) * dtype.itemsize
        if nbytes and at not in leaves.objects:
            name = path / f".shmbuffer-column-{secrets.token_hex(6)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptors[at] = os.open(name, flags, 0o600)
            os.unlink(name)
            os.truncate(descriptors[at], nbytes)
    return _columns(leaves, lead, descriptors), descriptors


def _columns(leaves: Leaves, lead: tuple[int, ...], descriptors: dict[int, int]) -> list[Any]:
    """A map of each file; what has none is empty, or objects."""
    columns: list[Any] = []
    for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
        if at in descriptors:
            content = mmap.mmap(descriptors[at], 0)
            columns.append(torch.frombuffer(content, dtype=dtype).view(*lead, *leaf.shape))
        else:
            columns.append(leaves.column(at, lead, torch.device("cpu")))
    return columns
