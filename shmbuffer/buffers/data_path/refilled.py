"""Reuses the tensors of an earlier sample for ``sample(out=...)``.

    first call     keeps tensors with the right shape and dtype, replaces or removes all others,
                   and records the entries
    later calls    compare the entries with the record, and write into them in one native call

For large items, allocating memory takes longer than the copy, because every page causes a fault.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch.autograd.graph import increment_version

from shmbuffer.buffers.data_path.sample_info import SampleInfo
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.form.nodes import LEAF
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode
from shmbuffer.tensors.form.tensors import require_memory

_KEPT = 16  # maximum number of samples that are remembered

_Form = tuple[torch.dtype, torch.Size]


class Refilled:
    """A sample into whose tensors new samples are written.

    Args:
        out: the sample. Its entries are changed to those of a new sample.
        count: number of items in the sample.
        leaves: leaves of an item.
        info: which other entries a sample has.
        gone: function that is called when ``out`` is deleted.

    Attributes:
        leaves: the tensor of each leaf.
        index: the entry with the index, int64 ``[count]``.
        tickets: tensor for the tickets, int64 ``[count]``, even if samples have no such entry.
        shown: the entry with the weights, or None if samples have no weights.
        weights: tensor for the weights that the core writes, float32 ``[count]``. It is ``shown``
            if that is float32. None if samples have no weights.
        addresses: address of each leaf's tensor.
    """

    def __init__(
        self,
        out: TensorDict,
        count: int,
        leaves: Leaves,
        info: SampleInfo,
        gone: Callable[[Any], object],
    ) -> None:
        self._out = weakref.ref(out, gone)
        self._form = leaves, info
        lead = torch.Size((count,))
        ticket_keys = (GENERATION,) if info.generation else ()
        weight_keys = () if info.weight_dtype is None else info.weight_keys
        names = frozenset((INDEX, *ticket_keys, *weight_keys))
        forms = iter(
            (dtype, torch.Size((count, *leaf.shape)))
            for dtype, leaf in zip(leaves.dtypes, leaves.leaves, strict=True)
        )
        self.leaves: list[torch.Tensor] = []
        self._noted: list[tuple[dict[Any, Any], int, list[tuple[Any, Any]]]] = []
        assert isinstance(leaves.node, TensorDictNode)
        self._take(out, leaves.node, forms, names)
        self.index = _entry(out, (INDEX,), (torch.int64, lead))
        self.tickets = _entry(out, ticket_keys, (torch.int64, lead))
        self.shown: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        if info.weight_dtype is not None:
            form = (info.weight_dtype, lead)
            self.shown = self.weights = _entry(out, weight_keys, form)
            if info.weight_dtype is not torch.float32:
                self.weights = cpu.empty(lead, dtype=torch.float32)
        for tensor in (*self.leaves, self.index, self.tickets, self.weights):
            if tensor is not None:
                require_memory(tensor)
        self.addresses = tuple(leaf.data_ptr() for leaf in self.leaves)
        self._note(out)
        self._tensors = [*self.leaves, self.index, self.tickets]
        if self.shown is not None:
            self._tensors.append(self.shown)

    def fits(self, out: TensorDict, leaves: Leaves, info: SampleInfo) -> bool:
        """True if ``out`` is this sample, has not been changed, and has the expected entries.

        Args:
            out: the user's argument.
            leaves: leaves of an item now.
            info: which other entries a sample has now.
        """
        if self._out() is not out or self._form != (leaves, info):
            return False
        for entries, size, noted in self._noted:
            if len(entries) != size:
                return False
            for key, value in noted:
                if entries.get(key) is not value:
                    return False
        return True

    def changed(self) -> None:
        """Tells autograd that the tensors were modified in place."""
        increment_version(self._tensors)

    def _take(
        self,
        data: TensorDict,
        node: TensorDictNode,
        forms: Iterator[_Form],
        others: frozenset[str] = frozenset(),
    ) -> None:
        """Adds and removes entries, so that ``data`` has the entries of ``node`` and ``others``.

        Args:
            data: the sample, or a nested TensorDict in it.
            node: structure of an item at this level.
            forms: dtype and shape of each leaf, in order.
            others: further keys to keep.
        """
        for key in data._tensordict.keys() - node.items.keys() - others:
            del data[key]
        for key, child in node.pairs:
            value = data._tensordict.get(key)
            if child is LEAF:
                self.leaves.append(_entry(data, (key,), next(forms)))
            elif type(child) is TensorDictNode:
                size = torch.Size((*data.batch_size[:1], *child.batch))
                if type(value) is not TensorDict or value.batch_size != size:
                    value = TensorDict(batch_size=size, device=data.device)
                    data.set(key, value)
                    value = data._tensordict[key]
                self._take(value, child, forms)
                self._note(value)
            else:
                raise ValueError(
                    "sample(out=...) requires items that are TensorDicts of tensors, but the entry "
                    f"{key!r} is a {child.kind}; call sample() without out="
                )

    def _note(self, data: TensorDict) -> None:
        entries = data._tensordict
        self._noted.append((entries, len(entries), list(entries.items())))


class OutputReuse:
    """The samples into whose tensors one buffer has written."""

    def __init__(self) -> None:
        self._known: dict[int, Refilled] = {}

    def of(self, out: Any, count: int, leaves: Leaves, info: SampleInfo) -> Refilled:
        """Returns the `Refilled` object for ``out``, which is created if necessary.

        Raises TypeError if ``out`` is not a TensorDict, and ValueError if it has another batch size
        than ``[count]``.
        """
        found = self._known.get(id(out))
        if found is not None and found.fits(out, leaves, info):
            return found
        if type(out) is not TensorDict:
            raise TypeError(f"sample(out=...) takes a TensorDict, got a {type(out).__name__}")
        if out.batch_size != (count,):
            raise ValueError(
                f"the batch size of out= must be [{count}] for sample({count}), got "
                f"{list(out.batch_size)}"
            )
        if len(self._known) >= _KEPT:
            self._known.clear()
        known, name = self._known, id(out)
        found = Refilled(out, count, leaves, info, lambda _: known.pop(name, None))
        known[name] = found
        return found


def _entry(data: TensorDict, names: tuple[str, ...], form: _Form) -> torch.Tensor:
    """Returns a tensor that is stored in ``data`` under all of ``names``.

    The present tensor is used if it has the right dtype, shape and memory layout. Otherwise a new
    tensor is stored. Without names, returns a new tensor that is not stored.

    Args:
        data: the TensorDict.
        names: keys of the tensor.
        form: dtype and shape.
    """
    dtype, shape = form
    value: Any = data._tensordict.get(names[0]) if names else None
    if not (
        type(value) is torch.Tensor
        and value.dtype is dtype
        and value.shape == shape
        and value.is_cpu
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    ):
        value = cpu.empty(shape, dtype=dtype)
    found: torch.Tensor = value
    for name in names:
        if data._tensordict.get(name) is not found:
            data.set(name, found)
    return found
