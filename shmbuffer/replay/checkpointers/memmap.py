"""Tensordict's memory-mapped files: made by tensordict, read here.

    <directory>/meta.json       a TensorDict: shape, device, and for each key what it is
    <directory>/<key>.memmap    a tensor, C order, no header; the key is percent-encoded
    <directory>/<key>/          a nested TensorDict, tensorclass, or something that is no tensor

A PyTree has no ``meta.json``: its tensors are at ``<key>/<position>/....memmap``, and TorchRL's
``storage_metadata.json`` says what they are. Reading does not go through tensordict, because that
unpickles what is in there and copies nothing into place: here a tensor is a map of its file.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from shmbuffer._native import _core
from shmbuffer.errors import CorruptBufferError, SchemaMismatchError
from shmbuffer.replay.checkpoints import read_json
from shmbuffer.replay.form.leaves import Leaves, torch_dtype
from shmbuffer.replay.form.nodes import LEAF, Node, ObjectNode, TensorClassNode, TensorDictNode
from shmbuffer.replay.keys import OWN_KEYS
from shmbuffer.replay.values import reading

SINGLE = "_-single-tensor-_"
"""TorchRL's name for the tensor of a storage that holds nothing else."""

# Where tensordict puts what it pickles.
_PICKLES = ("other.pickle", "pickle.pkl")
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux: nothing is ever written to these private maps


@dataclass
class Folder:
    """What a directory of tensordict holds.

    Attributes:
        path: of the directory.
        shape: batch size.
        cls: name of a tensorclass, ``module:qualname``; None is a TensorDict.
        tensors: dtype and shape of each tensor, and its file.
        folders: what is nested.
        values: what is no tensor: a value, or lists with one for each item.
        refused: keys of what could only be unpickled.
    """

    path: Path
    shape: tuple[int, ...]
    cls: str | None = None
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], Path]] = field(default_factory=dict)
    folders: dict[str, Folder] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def node(self, dims: int, *, root: bool = True) -> Node:
        """The tree of what is in there; without what a sample adds to the data.

        Args:
            dims: leading dimensions that belong to the storage.
            root: this is not nested.
        """
        items: dict[str, Node] = dict.fromkeys(self.tensors, LEAF)
        items |= {key: ObjectNode() for key in self.values}
        items |= {key: one.node(dims, root=False) for key, one in self.folders.items()}
        kept = {key: items[key] for key in sorted(items) if not (root and key in OWN_KEYS)}
        batch = tuple(self.shape[dims:])
        return (
            TensorDictNode(kept, batch)
            if self.cls is None
            else TensorClassNode(kept, batch, self.cls)
        )

    def tensor(self, path: tuple[str, ...]) -> torch.Tensor:
        """The tensor at a nested key, as a map of its file.

        Raises:
            CorruptBufferError: there is none, or its file is too short.
        """
        with reading(self.path / "meta.json"):
            if len(path) > 1:
                return self.folders[path[0]].tensor(path[1:])
            dtype, shape, file = self.tensors[path[0]]
            return mapped(file, dtype, shape)

    def value(self, path: tuple[str, ...]) -> Any:
        """What is at a nested key and no tensor.

        Raises:
            CorruptBufferError: there is nothing.
        """
        with reading(self.path / "meta.json"):
            if len(path) > 1:
                return self.folders[path[0]].value(path[1:])
            return self.values[path[0]]

    def names(self) -> list[tuple[str, ...]]:
        """Nested keys of all tensors."""
        nested = [(key, *rest) for key, one in self.folders.items() for rest in one.names()]
        return [*((key,) for key in self.tensors), *nested]

    def pickled(self) -> list[str]:
        """Dotted names of what could only be unpickled."""
        nested = [f"{key}.{one}" for key, rest in self.folders.items() for one in rest.pickled()]
        return [*self.refused, *nested]


def read_folder(path: Path) -> Folder:
    """Look at a directory that tensordict has written.

    Raises:
        FileNotFoundError: there is no ``meta.json``.
        CorruptBufferError: it is none, or something in it cannot be read.
    """
    meta = read_json(path / "meta.json")
    kind = str(meta.get("_type", ""))
    if (path / "_tensordict" / "meta.json").exists():
        folder = read_folder(path / "_tensordict")
        folder.path, folder.cls = path, _class_name(kind)
        return folder
    with reading(path / "meta.json"):
        folder = Folder(path, tuple(int(size) for size in meta.get("shape", ())))
        for key, entry in meta.items():
            if isinstance(entry, dict) and "type" in entry:
                _add_nested(folder, key)
            elif isinstance(entry, dict) and "dtype" in entry:
                if entry.get("is_nested"):
                    raise ValueError(f"{key!r} is a nested tensor, which no storage holds")
                dtype = torch_dtype(str(entry["dtype"]).removeprefix("torch."))
                shape = tuple(int(size) for size in entry["shape"])
                folder.tensors[key] = dtype, shape, _file_of(path, key)
    return folder


def _add_nested(folder: Folder, key: str) -> None:
    path = folder.path / quote(key, safe="")
    if not path.exists() and _is_plain(key):
        path = folder.path / key  # as older versions of tensordict wrote it
    meta = read_json(path / "meta.json")
    kind = str(meta.get("_type", ""))
    if "NonTensor" in kind or meta.get("_is_non_tensor"):
        if any((path / name).exists() for name in _PICKLES) or "data" not in meta:
            folder.refused.append(key)
        else:
            folder.values[key] = meta["data"]
    elif "LazyStacked" in kind:
        raise ValueError(f"{key!r} is a lazy stack, which no tensor storage holds")
    else:
        folder.folders[key] = read_folder(path)


def _file_of(path: Path, key: str) -> Path:
    file = path / f"{quote(key, safe='')}.memmap"
    return path / f"{key}.memmap" if _is_plain(key) and not file.exists() else file


def _is_plain(key: str) -> bool:
    return "/" not in key and "\0" not in key and key not in (".", "..")


def _class_name(kind: str) -> str:
    """``module:qualname`` of ``<class 'module.qualname'>``; a class has no dots in its name."""
    module, _, name = kind.removeprefix("<class '").removesuffix("'>").rpartition(".")
    return f"{module}:{name}"


def mapped(file: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor in a file, read when it is looked at.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptBufferError: it is too short.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if any(size < 0 for size in shape):
        raise CorruptBufferError(f"{file}: cannot hold a tensor of shape {list(shape)}")
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    with _core.Descriptor() as opened:
        fd = opened.take(os.open, file, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(fd).st_size
        if found < nbytes:
            raise CorruptBufferError(
                f"{file}: has {found} bytes, {nbytes} belong there; it was cut short: take "
                "another copy of the checkpoint",
                path=str(file),
                expected=nbytes,
                found=found,
            )
        flags, protection = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        content = mmap.mmap(fd, nbytes, flags=flags, prot=protection)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def pytree_names(leaves: Leaves) -> list[str]:
    """The names of a PyTree's tensors in TorchRL's layout, in the order of the leaves.

    Raises:
        SchemaMismatchError: a key cannot be the name of a file.
    """
    for path in leaves.node.paths():
        for key in path:
            if not _is_plain(key) or not key:
                raise SchemaMismatchError(
                    f"{leaves.where}: the key {key!r} cannot be the name of a file in a "
                    "checkpoint; rename it"
                )
    return [pytree_name(path) for path in leaves.node.paths()]


def pytree_name(path: tuple[str, ...]) -> str:
    """The name of one of them."""
    return "/".join(path) or SINGLE


def pytree_metadata(leaves: Leaves, slots: int) -> dict[str, Any]:
    """What TorchRL's ``storage_metadata.json`` says of a PyTree's tensors."""
    return {
        name.replace("/", "."): {
            "dtype": str(dtype),
            "shape": [slots, *leaves.lanes, *leaf.shape],
        }
        for name, leaf, dtype in zip(
            pytree_names(leaves), leaves.leaves, leaves.dtypes, strict=True
        )
    }


def pytree_column(path: Path, name: str, metadata: dict[str, Any]) -> torch.Tensor:
    """The tensor of that name in TorchRL's layout.

    Raises:
        KeyError, TypeError, ValueError: there is none, or what is said of it makes no sense.
        CorruptBufferError: its file is too short.
    """
    entry = metadata[name.replace("/", ".")]
    dtype = torch_dtype(str(entry["dtype"]).removeprefix("torch."))
    shape = tuple(int(size) for size in entry["shape"])
    return mapped(path / f"{name}.memmap", dtype, shape)


def require_no_pickle(path: Path) -> None:
    """ValueError where something in a directory of tensordict's could only be unpickled."""
    for file in sorted(path.rglob("*")):
        if file.name in _PICKLES:
            key = ".".join(file.relative_to(path).parts[:-1])
            raise ValueError(
                f"{file}: entry {key!r} is no tensor and was pickled, and loading it would run "
                "code from the file; nothing was unpickled. Store tensors, text, numbers, or lists "
                "of them"
            )
