"""Text and other objects of a tensor storage, in files.

shmbuffer.objects.*   of each item its objects, as `values` has them: exact, and without pickle
<key>/meta.json       the same as tensordict has it, for TorchRL: a list of all slots; where all
of them are text, numbers, or lists and dicts of these
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from shmbuffer.errors import CorruptBufferError
from shmbuffer.replay.form.nodes import BranchNode, Node, ObjectNode, TensorDictNode
from shmbuffer.replay.form.nodes import Path as Key
from shmbuffer.replay.form.objects import Objects
from shmbuffer.replay.values import RefusedError, read_values, write_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.replay.form.leaves import Leaves

_NAME = "shmbuffer.objects"
_KIND = "<class 'tensordict.tensorclass.NonTensorStack'>"


def tensors_only(node: Node) -> Node:
    """The tree without objects; a tensorclass that has some is a TensorDict there."""
    if not shapes_of_objects(node) or not isinstance(node, TensorDictNode):
        return node
    kept = {
        key: tensors_only(child)
        for key, child in node.items.items()
        if not isinstance(child, ObjectNode)
    }
    return TensorDictNode(kept, node.batch)


def shapes_of_objects(node: Node) -> dict[Key, tuple[int, ...]]:
    """Where there are objects, and the shape of one element's, in the order of the leaves."""
    if isinstance(node, ObjectNode):
        return {(): node.shape}
    if not isinstance(node, BranchNode):
        return {}
    return {
        (name, *rest): shape
        for name, child in zip(node.names, node.items.values(), strict=True)
        for rest, shape in shapes_of_objects(child).items()
    }


def write_objects(
    folder: Path,
    leaves: Leaves,
    columns: list[Any],
    present: NDArray[np.bool_],
    *,
    allow_pickle: bool,
    remedy: str,
) -> None:
    """Write what is no tensor of every item.

    Args:
        folder: of the storage, with tensordict's files of the tensors in it.
        leaves: of the storage.
        columns: of all leaves; objects are `Objects` ``[slots, *lanes, *shape]``.
        present: bool ``[slots]``: where an item is.
        allow_pickle: pickle what cannot be saved otherwise.
        remedy: what to write for that, in the message.

    Raises:
        TypeError: an object could only be pickled.
    """
    if not leaves.objects:
        return
    mine = {at: columns[at] for at in sorted(leaves.objects)}
    slots = np.nonzero(present)[0]

    def items() -> Iterator[list[list[Any]]]:
        for slot in slots:
            yield [column[int(slot)].tolist() for column in mine.values()]

    write_values(folder, _NAME, items(), allow_pickle=allow_pickle, what="item", remedy=remedy)
    if isinstance(leaves.node, TensorDictNode):
        for at, column in mine.items():
            _write_as_tensordict(folder, leaves.leaves[at].path, column, present)


def read_objects(
    folder: Path,
    shapes: dict[Key, tuple[int, ...]],
    present: NDArray[np.bool_],
    lanes: tuple[int, ...],
    *,
    allow_pickle: bool,
) -> dict[Key, Objects]:
    """What `write_objects` wrote; None where there is no item.

    Args:
        folder: of the storage.
        shapes: of the objects of one element, by key, in the order of the leaves.
        present: bool ``[slots]``: where an item is.
        lanes: sizes of the storage's dimensions after the first.
        allow_pickle: unpickle what was pickled, which runs code from the file.

    Raises:
        RefusedError: something was pickled, and ``allow_pickle`` is False. A ValueError.
        CorruptBufferError: the file is damaged.
    """
    if not shapes:
        return {}
    lead = (len(present), *lanes)
    columns = {key: Objects.of((), (*lead, *shape)) for key, shape in shapes.items()}
    slots = np.nonzero(present)[0].tolist()
    items = read_values(folder, _NAME, allow_pickle=allow_pickle)
    try:
        for slot, found in zip(slots, items, strict=True):
            for column, values in zip(columns.values(), found, strict=True):
                place = column[slot]
                place.copy_(Objects.of(values, place.shape))
    except RefusedError:
        raise
    except (TypeError, ValueError) as error:
        raise CorruptBufferError(
            f"{folder / _NAME}.jsonl: does not have the objects of {len(slots)} items ({error}); "
            "take another copy of the checkpoint",
            path=str(folder),
        ) from error
    return columns


def objects_of_list(data: list[Any], shape: tuple[int, ...]) -> Objects:
    """Tensordict's nested lists as objects ``shape``.

    Raises:
        ValueError: they are not as many.
    """
    level: list[Any] = [data]
    for size in shape:
        if any(not isinstance(part, list) or len(part) != size for part in level):
            raise ValueError(f"a list of objects is not {list(shape)}")
        level = [one for part in level for one in part]
    return Objects.of(level, shape)


def _write_as_tensordict(
    folder: Path, path: tuple[str, ...], column: Objects, present: NDArray[np.bool_]
) -> None:
    """Add an entry to tensordict's files, if JSON can hold it. Empty places get some item's."""
    held = np.nonzero(present)[0]
    if not len(held):
        return
    whole = column.clone()
    whole.array[~present] = column.array[held[0]]
    try:
        data = json.dumps(_nested(whole.array))
    except (TypeError, ValueError):
        return
    *above, key = path
    for part in above:
        folder = folder / quote(part, safe="")
    (folder / quote(key, safe="")).mkdir()
    (folder / quote(key, safe="") / "meta.json").write_text(
        f'{{"_type": "{_KIND}", "stack_dim": 0, "device": null, "data": {data}}}'
    )
    meta = json.loads((folder / "meta.json").read_bytes())
    (folder / "meta.json").write_text(json.dumps({key: {"type": "NonTensorStack"}, **meta}))


def _nested(array: np.ndarray[Any, Any]) -> Any:
    return [_nested(part) for part in array] if array.ndim > 1 else list(array)
