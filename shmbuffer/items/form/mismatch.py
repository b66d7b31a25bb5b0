"""Raises errors for data that do not match the schema.

Each message contains the expected and the actual structure, and advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.form.nodes import NESTED, BranchNode, Node
from shmbuffer.memory import Leaf
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.format.schema import NEW_BUFFER


class Numbers(list[Any]):
    """A list of plain numbers, one per item, which are converted to the dtype of the leaf."""


def refuse_form(
    where: str,
    kind: str,
    leaves: Sequence[Leaf],
    optional: Iterable[str],
    data: Any,
    paths: Iterable[KeyPath],
) -> NoReturn:
    """Raises SchemaMismatchError for data whose structure differs from that of the buffer.

    ``paths`` has the paths of the leaves in the data.
    """
    known = {leaf.path for leaf in leaves}
    shown = type(data).__name__
    if kind in NESTED and isinstance(data, (tuple, list)):
        _refuse(where, "", no_names(data), kind, shown)
    found = {path for path in paths if path[0] not in optional or path in known}
    expected_names, found_names = _names(known), _names(found)
    if missing := sorted(known - found):
        name = ".".join(missing[0])
        words = f"is missing in this write, which has {found_names}; write all leaves of the buffer"
        _refuse(where, name, f"leaf {name!r} {words}, or {NEW_BUFFER}", expected_names, found_names)
    if extra := sorted(found - known):
        name = ".".join(extra[0])
        words = (
            f"of this write is not a leaf of the buffer, which has {expected_names}; leave it out"
        )
        _refuse(where, name, f"leaf {name!r} {words}, or {NEW_BUFFER}", expected_names, found_names)
    words = (
        f"the buffer contains a {kind}, but this write is a {shown}; write the same kind of data"
    )
    _refuse(where, "", f"{words}, or {NEW_BUFFER}", kind, shown)


ONE_ITEM = "if this is one item, write it with add()"
A_BATCH = "if this is a batch, write it with extend()"
"""Advice in the error message for a call of the wrong one of `add` and `extend`."""


def refuse_leaf(
    where: str, leaf: Leaf, shape: Sequence[int], found: str, remedy: str = "convert it"
) -> NoReturn:
    """Raises SchemaMismatchError for a leaf whose dtype or shape differs from the schema."""
    expected = f"{leaf.dtype}{list(shape)}"
    words = f"is {expected}, but this write has {found}; {remedy}, or {NEW_BUFFER}"
    _refuse(where, leaf.name, f"leaf {leaf.name!r} {words}", expected, found)


def refuse_number(where: str, leaf: Leaf, count: int, found: int) -> NoReturn:
    """Raises SchemaMismatchError for a leaf whose number of items differs from the other leaves."""
    words = (
        f"has {found} items in this write, but other leaves have {count}; write the same number "
        "of items in every leaf"
    )
    _refuse(where, leaf.name, f"leaf {leaf.name!r} {words}", count, found)


def _refuse(where: str, leaf: str, words: str, expected: Any, found: Any) -> NoReturn:
    raise SchemaMismatchError(f"{where}: {words}", leaf=leaf, expected=expected, found=found)


def refuse_list(node: Node, path: KeyPath) -> None:
    """Raises ValueError if the path of a leaf leads through a list or tuple.

    The caller found that this leaf has other leading dimensions than the first leaf.
    """
    for depth, name in enumerate(path):
        if not isinstance(node, BranchNode):
            return
        if depth and node.kind in ("list", "tuple"):
            entry = ".".join(path[:depth])
            raise ValueError(
                f"entry {entry!r} is a {node.kind}, so each of its {node.size} parts is a leaf; to "
                "store it as one leaf, write np.asarray(...) with one row for each item"
            )
        node = node.items[dict(zip(node.names, node.items, strict=True))[name]]


def no_names(data: Any) -> str:
    """Returns the error message for a tuple or list that is written to a buffer of TensorDicts."""
    kind = "tuple" if isinstance(data, tuple) else "list"
    return (
        f"this write is a {kind}, but entries of a TensorDict have names; write a dict, {{'obs': "
        "..., 'reward': ...}, or use a ReplayBuffer or PrioritizedReplayBuffer"
    )


def not_a_tensor(data: Any, why: Exception | None = None) -> str:
    """Returns the error message for a value that a tensor storage cannot contain.

    ``why`` is the error that the conversion to an array raised.
    """
    reason = "" if why is None else f" ({why})"
    shape = getattr(data, "shape", None)  # a tensor without memory cannot be printed
    description = repr(data)[:60] if shape is None else f"a {type(data).__name__} of {list(shape)}"
    return (
        f"{description} in the data is not a tensor{reason}. Tensor storages contain tensors, "
        "arrays and numbers; a LazyTensorStorage can also contain strings and objects that are "
        "entries of a TensorDict. Leave it out, encode it as a tensor, or use a ListStorage"
    )


def _names(paths: Iterable[KeyPath]) -> list[str]:
    return [".".join(path) for path in sorted(paths)]
