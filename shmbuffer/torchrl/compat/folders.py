"""Reads and writes tensordict's memory-mapped files.

    <directory>/meta.json       a TensorDict: shape, device, and the type of each entry
    <directory>/<key>.memmap    a tensor in C order without a header; the key is percent-encoded
    <directory>/<key>/          a nested TensorDict, a tensorclass, or a non-tensor object

This module does not read with tensordict, because tensordict unpickles objects in the files. The
tensors that it returns are maps of their files.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from tensordict import is_non_tensor

from shmbuffer.items.form.nodes import LEAF, BranchNode, Node
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.memory.format.array_types import Flags
from shmbuffer.memory.format.key_names import is_number, require_file_name
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.saves.safe_files import exists, make_folder, open_file, remove_file, write_file
from shmbuffer.saves.values import damaged, read_json, reading, write_json
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.objects import Objects
from shmbuffer.tensors.form.tensor_nodes import (
    LazyStackNode,
    ObjectNode,
    TensorClassNode,
    TensorDictNode,
    fields,
    is_collection,
)
from shmbuffer.tensors.form.tensors import torch_dtype

_TENSORDICT, _LAZY_STACK = (
    {
        "_type": f"<class 'tensordict.{module}.{name}'>",
        "_format_version": 1,
        "_class": f"tensordict:{name}",
    }
    for module, name in (("_td", "TensorDict"), ("_lazy", "LazyStackedTensorDict"))
)
_STACK = "<class 'tensordict.tensorclass.NonTensorStack'>"
# Files into which tensordict pickles objects.
_PICKLES = ("other.pickle", "pickle.pkl")
# Linux's MAP_NORESERVE. The private maps are not written to, so they need no swap space.
_NORESERVE = 0x4000


@dataclass
class TensorDictFolder:
    """The contents of a directory written by tensordict, including nested directories."""

    path: Path  # path of the directory
    shape: tuple[int, ...] = ()  # batch size
    node: Node = LEAF  # structure of the contents, without the entries that a sample adds
    # Dtype, shape and file of each tensor, by nested key.
    tensors: dict[KeyPath, tuple[torch.dtype, tuple[int, ...], Path]] = field(default_factory=dict)
    # Entries that are not tensors, by nested key: a value, or nested lists with one value per item.
    values: dict[KeyPath, Any] = field(default_factory=dict)
    # Dotted keys of entries that can only be unpickled, so they are not read.
    refused: list[str] = field(default_factory=list)

    def tensor(self, key: KeyPath) -> torch.Tensor:
        """Returns the tensor at a nested key as a map of its file."""
        with reading(self.path / "meta.json"):
            dtype, shape, file = self.tensors[key]
            return mapped(file, dtype, shape)


def read_folder(path: Path, dims: int = 1) -> TensorDictFolder:
    """Reads the metadata of a directory written by tensordict.

    The first ``dims`` dimensions are those of the storage and not part of an element.
    """
    folder = TensorDictFolder(path)
    folder.node = _node_of(folder, path, (), dims)
    return folder


def _node_of(folder: TensorDictFolder, path: Path, at: KeyPath, dims: int) -> Node:
    """Returns the structure of the directory at a nested key. Adds its entries to ``folder``."""
    meta = read_json(path / "meta.json")
    if exists(path / "_tensordict" / "meta.json"):
        node = _node_of(folder, path / "_tensordict", at, dims)
        assert isinstance(node, TensorDictNode)
        name = _class_name(str(meta.get("_type", "")))
        return TensorClassNode(node.items, node.batch, **{"class": name})
    items: dict[str, Node] = {}
    with reading(path / "meta.json"):
        shape = tuple(int(size) for size in meta.get("shape", ()))
        for key, entry in sorted(meta.items()):
            if not isinstance(entry, dict):
                continue
            require_file_name((*at, key), f"{path / 'meta.json'}: leaf")
            if "type" in entry:
                _add_nested(folder, items, path, (*at, key), dims)
            elif "dtype" in entry:
                if entry.get("is_nested"):
                    raise ValueError(f"{key!r} is a nested tensor, but no storage supports these")
                items[key] = LEAF
                folder.tensors[*at, key] = (*described(entry), _file_of(path, key))
    if not at:
        folder.shape = shape
    stored = {key: node for key, node in items.items() if at or key not in OWN_KEYS}
    return TensorDictNode(stored, shape[dims:])


def _add_nested(
    folder: TensorDictFolder, items: dict[str, Node], path: Path, at: KeyPath, dims: int
) -> None:
    """Adds the nested TensorDict, lazy stack or object at the nested key ``at``."""
    key = at[-1]
    inner = path / quote(key, safe="")
    if not inner.exists() and "/" not in key:
        inner = path / key  # older versions of tensordict do not encode keys
    meta = read_json(inner / "meta.json")
    kind = str(meta.get("_type", ""))
    if "NonTensor" in kind or meta.get("_is_non_tensor"):
        if any(exists(inner / name) for name in _PICKLES) or "data" not in meta:
            folder.refused.append(".".join(at))
        else:
            folder.values[at] = meta["data"]
            items[key] = ObjectNode()
    elif "LazyStacked" in kind:
        count = sum(is_number(each.name) for each in inner.iterdir())
        parts = {n: _node_of(folder, inner / str(n), (*at, str(n)), dims) for n in range(count)}
        dim, batch = int(meta["stack_dim"]) - dims, parts[0]
        assert isinstance(batch, TensorDictNode)
        items[key] = LazyStackNode(parts, dim, len(batch.batch) + 1)
    else:
        items[key] = _node_of(folder, inner, at, dims)


def described(entry: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Parses the dtype and the shape of a tensor from its JSON description."""
    dtype = torch_dtype(str(entry["dtype"]).removeprefix("torch."))
    return dtype, tuple(int(size) for size in entry["shape"])


def _file_of(path: Path, key: str) -> Path:
    file = path / f"{quote(key, safe='')}.memmap"
    return path / f"{key}.memmap" if "/" not in key and not exists(file) else file


def _class_name(kind: str) -> str:
    """Converts the repr of a class, ``<class 'module.qualname'>``, to ``module:qualname``."""
    module, _, name = kind.removeprefix("<class '").removesuffix("'>").rpartition(".")
    return f"{module}:{name}"


def mapped(file: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor that maps a file. Writing to the tensor does not change the file.

    Raises:
        CorruptBufferError: the file is too short.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if any(size < 0 for size in shape):
        raise damaged(file, f"cannot hold a tensor of shape {list(shape)}")
    if not nbytes:
        return cpu.empty(shape, dtype=dtype)
    with open_file(file) as fd:
        found = os.fstat(fd).st_size
        if found < nbytes:
            why = f"has {found} bytes instead of {nbytes}, so it was truncated"
            raise damaged(file, why, expected=nbytes, found=found)
        flags, protection = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        content = mmap.mmap(fd, nbytes, flags=flags, prot=protection)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def require_nameable(data: Any, what: str, above: KeyPath = ()) -> None:
    """Raises SchemaMismatchError unless all keys of a TensorDict are valid file names.

    Must be called before tensordict writes files, because versions up to 0.12 use keys as paths
    without encoding them. ``what`` is the start of the error message.
    """
    for key, value in fields(data).items():
        nested = is_collection(value) and not is_non_tensor(value)
        folder = nested or is_non_tensor(value)
        require_file_name((*above, key), f"{what}: leaf", folder=folder)
        if nested:
            require_nameable(value, what, (*above, key))


def require_no_pickle(path: Path) -> None:
    """Raises ValueError if a directory contains an entry that can only be unpickled."""
    for file in sorted(path.rglob("*")):
        if file.name in _PICKLES:
            key = ".".join(file.relative_to(path).parts[:-1])
            raise ValueError(
                f"{file}: entry {key!r} is not a tensor and was pickled, so loading it would run "
                "code from the file; nothing was unpickled. Store tensors, text, numbers, or lists "
                "of them"
            )


def write_folder(
    path: Path,
    node: Node,
    forms: Iterator[tuple[torch.dtype, tuple[int, ...]]],
    lead: tuple[int, ...],
) -> list[Path]:
    """Creates the directories and ``meta.json`` files of a tree, but not the files of its tensors.

    Args:
        path: directory of the root.
        node: the tree.
        forms: dtype and shape of one element of each leaf, in order.
        lead: leading dimensions of the tensors.

    Returns:
        The path of the file for each tensor. For a leaf of objects, the path of its parent
        directory.
    """
    make_folder(path)
    files: list[Path] = []
    if isinstance(node, TensorClassNode) and not shapes_of_objects(node):
        name = node.about["class"].replace(":", ".")
        write_json(path / "meta.json", {"_type": f"<class '{name}'>"})
        inner = TensorDictNode(node.items, node.batch)
        return write_folder(path / "_tensordict", inner, forms, lead)
    meta: dict[str, Any] = {}
    for key, child in node.pairs if isinstance(node, BranchNode) else ():
        is_folder = isinstance(child, BranchNode)
        require_file_name((str(key),), f"{path}: leaf", folder=is_folder)
        if isinstance(child, BranchNode):
            meta[key] = {"type": type(child).__name__.removesuffix("Node")}
            files += write_folder(path / quote(str(key), safe=""), child, forms, lead)
            continue
        dtype, shape = next(forms)
        files.append(path)
        if child is LEAF:
            files[-1] = path / f"{quote(key, safe='')}.memmap"
            size = [*lead, *shape]
            meta[key] = {"device": "cpu", "shape": size, "dtype": str(dtype), "is_nested": False}
    if isinstance(node, TensorDictNode):
        meta |= {"shape": [*lead, *node.batch], "device": "cpu", **_TENSORDICT}
    elif isinstance(node, LazyStackNode):
        meta = {**_LAZY_STACK, "stack_dim": len(lead) + node.dim, "stack_dim_name": None}
    write_json(path / "meta.json", meta)
    return files


def shapes_of_objects(node: Node) -> dict[KeyPath, tuple[int, ...]]:
    """Returns a dict from the nested key of each leaf of objects to its shape in one element."""
    if isinstance(node, ObjectNode):
        return {(): node.shape}
    if not isinstance(node, BranchNode):
        return {}
    return {
        (name, *rest): shape
        for name, child in zip(node.names, node.items.values(), strict=True)
        for rest, shape in shapes_of_objects(child).items()
    }


def add_objects(folder: Path, at: KeyPath, column: Objects, present: Flags) -> None:
    """Adds a column of objects to tensordict's files if JSON can represent the objects.

    Args:
        folder: directory of the root.
        at: nested key of the column.
        column: the objects.
        present: True for each element that contains an item. The others get the object of the
            first item.
    """
    held = np.nonzero(present)[0]
    if not len(held):
        return
    whole = column.clone()
    whole.array[~present] = column.array[held[0]]
    try:
        data = json.dumps(whole.array.tolist())
    except (TypeError, ValueError):
        return
    *above, key = (quote(part, safe="") for part in at)
    folder = folder.joinpath(*above)
    make_folder(folder / key, exist_ok=False)
    text = f'{{"_type": "{_STACK}", "stack_dim": 0, "device": null, "data": {data}}}'
    write_file(folder / key / "meta.json", text)
    meta = read_json(folder / "meta.json")
    remove_file(folder / "meta.json")
    write_json(folder / "meta.json", {at[-1]: {"type": "NonTensorStack"}, **meta})


def objects_of(data: Any, shape: tuple[int, ...]) -> Objects:
    """Converts tensordict's nested lists to `Objects` of this shape.

    Raises:
        ValueError: the lists do not have this shape.
    """
    level = [data]
    for size in shape:
        if any(not isinstance(part, list) or len(part) != size for part in level):
            raise ValueError(f"the nested lists of objects do not have the shape {list(shape)}")
        level = [one for part in level for one in part]
    return Objects.of(level, shape)
