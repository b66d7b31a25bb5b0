"""The shortest way in: a batch that lies as it has to is checked and written in one native call.

    buffer.extend(data) ──▶ Direct ──▶ one call of the C core ──▶ index
                               └─ None: data to be converted or refused, or a ring to be waited
                                  for: `Leaves.match` and `Ring.write` do it, and say what is wrong

There are no rules here beside theirs: what is taken is what they would have taken, and what they do
more than that (columns that are new, watchers, a priority that the sampler chooses) is looked for
before every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.memory.patience import LOCK_TIMEOUT_NS
from shmbuffer.replay.form.nodes import LEAF, BranchNode, Node, TensorDictNode
from shmbuffer.replay.form.pytrees import DictNode
from shmbuffer.replay.storages.native_rows import NativeRows

if TYPE_CHECKING:
    from shmbuffer.memory import Ring
    from shmbuffer.replay.form.leaves import Leaves
    from shmbuffer.replay.storages.rows import Rows
    from shmbuffer.replay.storages.storage import Storage

_MOST_DIMS = 32  # of a leaf; the core's limit
_REALS = np.dtype(np.float32), np.dtype(np.float64)


class Direct:
    """What a buffer calls first.

    Args:
        storage: whose ring it is: somebody may begin to watch it.
        ring: the ring.
        priority: leaf or entry whose numbers become priorities; None: the default ones.
        form: of the items, as the core wants to know it.
    """

    __slots__ = ("_form", "_priority", "_ring", "_storage")

    def __init__(
        self, storage: Storage, ring: Ring, priority: int | str | None, form: dict[str, Any]
    ) -> None:
        self._storage = storage
        self._ring = ring
        self._priority = priority
        self._form = form

    @classmethod
    def into(
        cls, storage: Storage, rows: Rows | None, priority: str | tuple[str, ...] | None
    ) -> Direct | None:
        """The way into these rows; None if there is none that is shorter than the usual one.

        Args:
            storage: see there.
            rows: where the payload lies.
            priority: entry of the data whose numbers become the items' priorities; None: they get
                the default one.
        """
        if type(rows) is not NativeRows or rows.ring.width != 1 or rows.leaves.lanes:
            return None
        leaves = rows.leaves
        tree = None if leaves.node is LEAF else _tree(leaves.node)
        if tree == () or any(len(leaf.shape) > _MOST_DIMS for leaf in leaves.leaves):
            return None
        where: int | str | None = None
        if priority is not None and leaves.is_tensordict:
            paths = [leaf.path for leaf in leaves.leaves]
            path = (priority,) if isinstance(priority, str) else priority
            if path in paths:
                where = paths.index(path)
            elif isinstance(priority, str) and priority in leaves.optional:
                where = priority
        form = {
            "tree": tree,
            "forms": _forms(leaves),
            "tensors": torch.Tensor,
            "box": TensorDict,
            "inside": "_tensordict",
            "reals": _REALS,
        }
        return cls(storage, rows.ring, where, form)

    def add(self, item: Any) -> int | None:
        """Write one item; its index, or None: it is to be written in the usual way."""
        core = self._core()
        if core is None:
            return None
        slot: int | None = core.add(item, LOCK_TIMEOUT_NS)
        if slot is not None and slot < 0:
            self._ring.refused(slot)
            return None
        return slot

    def extend(self, batch: Any) -> torch.Tensor | None:
        """Write a batch; its index int64 ``[n]``, or None: it is to be written in the usual way."""
        core = self._core()
        if core is None:
            return None
        index: Any = core.extend(batch, LOCK_TIMEOUT_NS)
        if type(index) is int:
            self._ring.refused(index)
            return None
        return index  # type: ignore[no-any-return]

    def _core(self) -> Any:
        ring = self._ring
        if ring.tree.initial is not None or self._storage._watchers:
            return None
        seat, priority = ring.seat, self._priority
        return seat.intakes.get(priority) or seat.intake(priority, **self._form)


def _tree(node: Node) -> tuple[Any, ...]:
    """``((key, None or the same for the dict that is there), ...)``; empty: not of dicts alone."""
    if type(node) not in (TensorDictNode, DictNode):
        return ()
    assert isinstance(node, BranchNode)
    found = []
    for key, child in node.pairs:
        below = None if child is LEAF else _tree(child)
        if below == () or type(key) is not str:
            return ()
        found.append((key, below))
    return tuple(found)


def _forms(leaves: Leaves) -> tuple[Any, ...]:
    """Of each leaf the shape of an item, and an example of its dtype for each class."""
    return tuple(
        (
            tuple(leaf.shape),
            None if array is None else np.zeros((2, 3), array),
            torch.empty((), dtype=dtype),
        )
        for leaf, array, dtype in zip(leaves.leaves, leaves.arrays, leaves.dtypes, strict=True)
    )
