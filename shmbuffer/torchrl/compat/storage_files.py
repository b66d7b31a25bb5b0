"""Files of a tensor storage in TorchRL's layout.

    storage_metadata.json    {"len": <elements>, "is_pytree": <bool>, "metadata": <tensors>}
    meta.json, ...           tensordict's files (`folders`)
    <key>/<key>.memmap       tensors of a PyTree, which has no meta.json

TorchRL stores only a length, and expects the items in the first slots. All other data are stored
under this package's key and in additional files (`checkpointers.saved_storage`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.form.nodes import LEAF, Node
from shmbuffer.memory.format.key_names import require_file_name
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.system.beneath import leads_down
from shmbuffer.saves.safe_files import make_folders_below
from shmbuffer.saves.values import read_json, reading
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode
from shmbuffer.torchrl.compat.folders import described, mapped, write_folder

METADATA = "storage_metadata.json"

_SINGLE = "_-single-tensor-_"
"""TorchRL's name for the tensor of a storage that contains only one tensor."""


def read_metadata(folder: Path) -> dict[str, Any]:
    """Reads ``storage_metadata.json``."""
    missing = "no tensor storage was saved in this directory"
    found: dict[str, Any] = read_json(folder / METADATA, missing=missing)
    return found


def metadata_of(metadata: dict[str, Any] | None, length: int) -> dict[str, Any]:
    """Returns the contents of ``storage_metadata.json``.

    ``metadata`` describes the tensors of a PyTree. It is None for TensorDicts. ``length`` is the
    number of elements that contain an item.
    """
    return {"metadata": metadata or {}, "is_pytree": metadata is not None, "len": length}


def files_of(leaves: Leaves, lead: tuple[int, ...], path: Path) -> list[Path]:
    """Returns the path of the file for each leaf, and creates the directories below ``path``."""
    if isinstance(leaves.node, TensorDictNode):
        shapes = (leaf.shape for leaf in leaves.leaves)
        forms = zip(leaves.dtypes, shapes, strict=True)
        return write_folder(path, leaves.node, forms, lead)
    files = [path / f"{name}.memmap" for name in _pytree_names(leaves)]
    for file in files:
        make_folders_below(path, file)
    return files


def _pytree_names(leaves: Leaves) -> list[str]:
    """Returns the names of a PyTree's tensors in TorchRL's layout, in the order of the leaves."""
    for path in leaves.node.paths():
        require_file_name(path, f"{leaves.where}: leaf", slashes=False)
    return [_pytree_name(path) for path in leaves.node.paths()]


def _pytree_name(path: tuple[str, ...]) -> str:
    """Returns the name of one tensor of a PyTree."""
    return "/".join(path) or _SINGLE


def pytree_metadata(leaves: Leaves, slots: int) -> dict[str, Any]:
    """Returns the descriptions of a PyTree's tensors for ``storage_metadata.json``."""
    return {
        name.replace("/", "."): {
            "dtype": str(dtype),
            "shape": [slots, *leaves.lanes, *leaf.shape],
        }
        for name, leaf, dtype in zip(
            _pytree_names(leaves), leaves.leaves, leaves.dtypes, strict=True
        )
    }


def pytree_columns(
    path: Path, found: dict[str, Any], node: Node | None
) -> tuple[Node | None, dict[KeyPath, torch.Tensor]]:
    """Reads the structure and the columns of a PyTree, without unpickling.

    Args:
        path: directory of the storage.
        found: contents of ``storage_metadata.json``.
        node: structure of the items if the storage already knows it, otherwise None.

    Returns:
        The structure, or None if it remains unknown, and the tensor at each nested key.
    """
    with reading(path / METADATA):
        metadata: dict[str, Any] = found["metadata"]
        if node is None and list(metadata) == [_SINGLE]:
            node = LEAF
        if node is not None:
            names = {key: _pytree_name(key) for key in node.paths()}
        else:  # nested keys are joined with dots, so a key that contains a dot is split
            names = {tuple(name.split(".")): name.replace(".", "/") for name in metadata}
        if not names:
            raise ValueError("it does not contain a tensor")
        for name in names.values():
            if not leads_down(name):
                raise ValueError(f"{name!r} is not the name of a file below this directory")
        return node, {
            key: mapped(path / f"{name}.memmap", *described(metadata[name.replace("/", ".")]))
            for key, name in names.items()
        }
