"""The fast path for samples: one native call draws, gathers, validates and weights the items.

    sample() ──▶ FastRead ──▶ one call into the C core ──▶ a TensorDict of the filled tensors
       │            └─ with out=: into the tensors of an earlier sample
       └─ a sampler that draws in Python ──▶ FastRead.read ──▶ one call: gathers and validates
            └─ with a sample unit that reads complete samples and out=: `FastRead.refill_chosen`

The path is available for TensorDicts of tensors that need no further step.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer.buffers.data_path.refilled import OutputReuse
from shmbuffer.buffers.data_path.sample_info import SampleInfo
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.items.mover import draw_into
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.sampler import Sampler, draw_key
from shmbuffer.storages.indexing import is_plain
from shmbuffer.storages.movers.native_rows import NativeRows
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode

NO_OUT = (
    "sample(out=...) is only supported if one native call can make the sample. The items must be "
    "TensorDicts of tensors with fixed shapes in the ring of a storage with ndim=1. The buffer "
    "must have no sample_unit (except FrameStack), collate_fn, transform, pin_memory or prefetch, "
    "and include_info must not be passed. Call sample() without out="
)


class FastRead:
    """The fast path for samples of TensorDicts.

    Args:
        storage: the storage. If its rows are replaced, the methods return None.
        rows: rows of the storage.
        sampler: the sampler.
        by_priority: the sampler if it draws by priority, or None.
        info: which entries a sample has in addition to the items.
        reader: object that reads complete samples for a sample unit, or None if a sample contains
            the items unchanged.
    """

    __slots__ = (
        "_by_priority",
        "_info",
        "_node",
        "_rows",
        "_sampler",
        "_storage",
        "_tracks",
        "_weight_keys",
        "reader",
        "refills",
    )

    def __init__(
        self,
        storage: TensorStorage,
        rows: Rows,
        sampler: Sampler,
        by_priority: PrioritizedSampler | None,
        info: SampleInfo,
        reader: Any,
    ) -> None:
        assert type(rows.leaves.node) is TensorDictNode
        self._storage, self._rows, self._node = storage, rows, rows.leaves.node
        self._sampler, self._by_priority, self._info = sampler, by_priority, info
        self._weight_keys, self._tracks = info.weight_keys, info.generation
        self.reader = reader
        self.refills = OutputReuse()

    def sample(self, count: int) -> tuple[Any, dict[str, Any]] | None:
        """Draws a sample, and returns it as a TensorDict ``[count]`` with its ``info``.

        Returns None if the rows of the storage were replaced, or if one native call cannot read the
        sample units.
        """
        rows, by_priority = self._rows, self._by_priority
        if self._storage._mover is not rows:
            return None
        key = draw_key(self._sampler, self._storage)
        beta = None if by_priority is None else by_priority._beta
        if self.reader is not None:
            drawn: Any = self.reader.draw(self._storage, (count, key, beta))
            if drawn is None:
                return None
        elif isinstance(rows, NativeRows) and (core := rows.ring.seat.outtake) is not None:
            drawn = core.sample(count, key, beta, LOCK_TIMEOUT_NS)
            if type(drawn) is not tuple:
                drawn = rows.sample_patiently(count, key, beta)
        else:
            drawn = rows.sample(count, key, beta)
        tensors, index, tickets, weights = drawn
        if by_priority is not None and by_priority.dtype is not torch.float32:
            weights = by_priority._weights(index, weights)
        info = {INDEX: index}  # the result of `SampleInfo.entries`, without the cost of a call
        if weights is not None:
            for name in self._weight_keys:
                info[name] = weights
        if self._tracks and tickets is not None:
            info[GENERATION] = tickets
        return self._node.batch_of(tensors, info, index.shape, rows.leaves.device), info

    def read(self, index: Any, known: dict[Any, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Reads the items that a sampler chose.

        Args:
            index: index of the items.
            known: the sampler's further entries, with the tickets of the items.

        Returns:
            The sample and its ``info``. The sample has all entries of ``info``, or none if these
            must be expanded first. None if the sampler returned no tickets, if an item was
            overwritten in the meantime, or if the rows of the storage were replaced.
        """
        rows = self._rows
        tickets: Any = known.get(GENERATION)
        if not isinstance(rows, NativeRows) or self._storage._mover is not rows:
            return None
        if not (is_plain(index) and is_plain(tickets) and len(index) == len(tickets)):
            return None
        info = self._info.of_choice(index, known)
        if self.reader is None:
            rows.ring.require_linked()
            tensors = rows.read_if_held(index, tickets)
        else:
            tensors = self.reader.read(index, tickets)
            info = self.reader.of_anchors(info)
        if tensors is None:
            return None
        size = info[INDEX].shape
        whole = all(type(key) is str and _has_rows(value, size) for key, value in info.items())
        others = info if whole else {}
        return self._node.batch_of(tensors, others, size, rows.leaves.device), info

    def refill(self, out: TensorDict, count: int) -> tuple[Any, dict[str, Any]] | None:
        """Draws a sample like `sample`, but writes it into the tensors of ``out``."""
        rows, by_priority = self._rows, self._by_priority
        if self._storage._mover is not rows:
            return None
        if not isinstance(rows, NativeRows):
            raise ValueError(NO_OUT)
        leaves = rows.leaves if self.reader is None else self.reader.leaves
        into = self.refills.of(out, count, leaves, self._info)
        index, weights, shown = into.index, into.weights, into.shown
        beta = None if by_priority is None else by_priority._beta
        key = draw_key(self._sampler, self._storage)
        if self.reader is None:
            draw_into(rows.ring, into.addresses, (index, into.tickets, weights), key, beta)
        else:
            others = (
                0 if one is None else one.data_ptr() for one in (index, into.tickets, weights)
            )
            addresses = *into.addresses, *others
            if self.reader.draw(self._storage, (count, key, beta), addresses) is None:
                return None
        if by_priority is not None and shown is not None and shown is not weights:
            shown.copy_(by_priority._weights(index, weights))
        into.changed()
        return out, self._info.entries(index, shown, into.tickets)

    def refill_chosen(
        self, out: TensorDict, count: int, index: Any, known: dict[Any, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Reads chosen items like `read`, but writes the sample into the tensors of ``out``.

        Requires a sample unit that reads complete samples.
        """
        reader = self.reader
        if self._storage._mover is not self._rows:
            return None
        into = self.refills.of(out, count, reader.leaves, self._info)
        if not reader.fill(index, known[GENERATION], into.addresses):
            return None
        info = reader.of_anchors(self._info.of_choice(index, known))
        for key, value in info.items():
            kept = out.get(key, None)
            if type(kept) is torch.Tensor and kept.shape == value.shape:
                info[key] = kept.copy_(value)
            else:
                out.set(key, value)
        into.changed()
        return out, info


def _has_rows(value: Any, size: torch.Size) -> bool:
    return type(value) is torch.Tensor and value.is_cpu and value.shape[:1] == size
