"""Gathers rows of several buffers in one batch, without a second copy.

    buffer 0 ──▶ rows [0, a)    ┐
    buffer 1 ──▶ rows [a, n)    ┘ of the same tensors, index, weights and tickets

This is possible if the items of all buffers have the same layout, and if each buffer draws and
copies its rows in one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.samplers.sampler import draw_key
from shmbuffer.tensors.form import cpu

Shares = Sequence[tuple[int, int]]
"""Pairs of a buffer number and the number of its rows, in the order of the batch."""


class OneBatch:
    """Samples combined batches from several buffers.

    Args:
        plans: plan of each buffer.
        weight_keys: keys of a sample's entries for the importance weight.
    """

    def __init__(self, plans: Sequence[Plan], weight_keys: tuple[str, ...]) -> None:
        self._plans = plans
        self._weight_keys = weight_keys
        self._leaves = plans[0].payload.leaves
        paths = [leaf.path for leaf in self._leaves.leaves]
        #: For each buffer, the position of each of its leaves among the leaves of the first buffer.
        self._orders = [
            [paths.index(leaf.path) for leaf in plan.payload.leaves.leaves] for plan in plans
        ]
        self._weighs = any(plan.by_priority is not None for plan in plans)
        self._tracks = any(plan.info.generation for plan in plans)

    @classmethod
    def of(cls, buffers: Sequence[ReplayBuffer], weight_keys: tuple[str, ...]) -> OneBatch | None:
        """Returns a `OneBatch`; None if rows of these buffers cannot be copied directly to it."""
        plans = [rb.plan for rb in buffers]
        if not all(map(_is_plain, buffers, plans)):
            return None
        forms = [plan.payload.leaves for plan in plans]
        kinds = [
            (form.node.to_json()["kind"], {(leaf.path, str(leaf)) for leaf in form.leaves})
            for form in forms
        ]
        fits = forms[0].node.kind == "tensordict" and all(kind == kinds[0] for kind in kinds)
        return cls(plans, weight_keys) if fits else None

    def sample(self, shares: Shares, starts: Sequence[int]) -> Batch:
        """Samples a batch.

        Args:
            shares: the rows of the batch.
            starts: for each buffer, the number to add to its indices.
        """
        count = sum(share for _, share in shares)
        tensors, _ = self._leaves.outputs((count,))
        index = cpu.empty(count, dtype=torch.int64)
        tickets = torch.empty_like(index)
        weights = cpu.ones(count, dtype=torch.float32) if self._weighs else None
        first = 0
        for at, share in shares:
            plan, end = self._plans[at], first + share
            of = plan.by_priority
            places, its = index[first:end], tickets[first:end]
            its_weights = None if of is None or weights is None else weights[first:end]
            plan.payload.fill(
                [tensors[leaf] for leaf in self._orders[at]],
                first,
                (places, its, its_weights),
                draw_key(plan.sampler, plan.storage),
                None if of is None else of.beta,
            )
            if starts[at]:
                places.add_(starts[at])
            if self._tracks and not plan.info.generation:
                its.fill_(-1)
            first = end
        info: dict[str, Any] = {INDEX: index}
        if weights is not None:
            info.update(dict.fromkeys(self._weight_keys, weights))
        if self._tracks:
            info[GENERATION] = tickets
        return self._leaves.build(tensors, (count,)), info


def _is_plain(rb: ReplayBuffer, plan: Plan) -> bool:
    """True if one native call can draw a buffer's rows and copy them into given tensors."""
    leaves = getattr(plan.payload, "leaves", None)
    return (
        plan.draws
        and hasattr(plan.payload, "fill")
        and leaves is not None
        and not leaves.lanes
        and not leaves.objects
        and getattr(plan.storage, "device", None) in (None, leaves.device)
        and not plan.transforms
        and rb._parts.collate_fn is None
        and not rb._parts.pin_memory
        and (plan.by_priority is None or plan.by_priority.dtype is torch.float32)
    )
