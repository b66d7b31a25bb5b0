"""Sampler of trajectory slices without replacement: one slice per trajectory in each pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuffer.memory import Ring
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.samplers.passes import Pass
from shmbuffer.samplers.sampler import drawn_by
from shmbuffer.samplers.slicing.cuts import Cuts
from shmbuffer.samplers.slicing.options import refuse
from shmbuffer.samplers.slicing.slices import SliceSampler
from shmbuffer.samplers.slicing.trajectories import LongTrajectories, Trajectories
from shmbuffer.samplers.without_replacement import SamplerWithoutReplacement
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu


class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws one slice from every trajectory that is long enough, then starts the next pass.

    Each pass chooses its slices again. The last batch of a pass can be short. After this batch,
    `ran_out` is True, which ends an iteration over the buffer.

    A write through this buffer starts a new pass, as in TorchRL. Items that other processes write
    are included in the next pass, so that the current pass ends although these processes continue
    to write. A trajectory whose first item was overwritten is skipped.

    Args:
        drop_last: if True, the last batch of a pass is dropped if it would be short.
        shuffle: if True, each pass has a new random order. If False, trajectories are drawn in the
            order of their age, oldest first.
        world_size: number of learners that share a pass. If nothing is written during the pass,
            exactly one of the learners draws each trajectory; see `SamplerWithoutReplacement`.
        rank: number of this learner; see `SamplerWithoutReplacement`.
        seed: seed of the shared order; see `SamplerWithoutReplacement`.
        **slices: arguments of `SliceSampler` except ``cache_values``, which is always True, and
            ``fragmented``, ``pad_output``, ``span`` and ``step_key``.

    Raises:
        ValueError: in the same cases as `SliceSampler` and `SamplerWithoutReplacement`. With
            ``drop_last``, `sample` also raises ValueError if a batch needs more slices than there
            are trajectories.

    Cost: O(trajectories) for a new pass, otherwise O(slices). See also `SliceSampler`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, SliceSamplerWithoutReplacement
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(9),
        ...     sampler=SliceSamplerWithoutReplacement(num_slices=2, shuffle=False),
        ...     batch_size=4,
        ... )
        >>> episode = torch.arange(3).repeat_interleave(3)
        >>> index = rb.extend(TensorDict({"episode": episode}, [9]))
        >>> [batch["episode"].tolist() for batch in rb]
        [[0, 0, 1, 1], [2, 2]]

    Source: ``torchrl.data.SliceSamplerWithoutReplacement``.
    """

    _in_core = False

    def __init__(
        self,
        *,
        drop_last: bool = False,
        shuffle: bool = True,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        **slices: Any,
    ) -> None:
        refuse(type(self), slices, "cache_values", "fragmented", "pad_output", "span", "step_key")
        SliceSampler.__init__(self, cache_values=True, **slices)
        SamplerWithoutReplacement.__init__(
            self, drop_last, shuffle, world_size=world_size, rank=rank, seed=seed
        )

    # -- drawing -------------------------------------------------------------------------------

    def _choose(self, storage: Any, table: Trajectories, count: int, steps: int) -> Cuts:
        """Chooses the next ``count`` slices of the pass, or starts a new pass."""
        allowed = self._allowed(table, steps)
        least = count if self.drop_last else min(count, 1)
        ring: Ring | None = ring_of(storage)
        left, whole = self._left(ring, table, steps), self._pass.whole
        if left is None or len(left) < least:
            ours = allowed[self._ours(np.arange(len(allowed)))]
            if len(ours) < least:
                raise ValueError(
                    f"a batch needs {count} slices, but only {len(ours)} trajectories are long "
                    "enough, and drop_last=True drops incomplete batches; sample fewer slices, "
                    "write more items, or use drop_last=False"
                )
            left, whole = self._in_order(ours), len(ours)
        chosen, left = left[:count], left[count:]
        if len(left) < max(least, 1):
            self._pass = Pass(whole=whole, ran_out=True)
        else:
            heads = table.elements_of(table.starts(left))
            self._pass = Pass(heads, 0, whole, table.rows, tickets=_tickets(ring, heads))
        self._written = False
        return Cuts(chosen, self._begins(table, chosen, steps))

    def _suffice(
        self, table: Trajectories, allowed: LongTrajectories, count: int, steps: int
    ) -> bool:
        """True if a batch can be drawn from the trajectories in ``allowed``.

        With ``drop_last``, there must be enough trajectories for a full batch.
        """
        return len(self._ours(np.arange(len(allowed)))) >= self._least(count)

    def _left(self, ring: Ring | None, table: Trajectories, steps: int) -> Ints | None:
        """Returns the trajectories that remain in the pass, int64 ``[n]``.

        Returns None if the pass is over, or if a write through this buffer ended it.
        """
        now = self._pass
        if not isinstance(now.order, np.ndarray) or self._written:
            return None
        if now.tickets is None and now.items != table.rows:
            return None
        rows = table.rows_of(now.order)
        trajectories = table.of_rows(rows)
        same = (rows >= 0) & (rows == table.starts(trajectories))
        same &= table.lengths(trajectories) >= self._shortest(steps)
        if now.tickets is not None and ring is not None:
            same &= _tickets(ring, now.order) == now.tickets
        left: Ints = trajectories[same]
        return left

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[Any, Any]]:
        """Draws as many slices as in ``index`` again, from different trajectories.

        The position in the pass does not change.
        """
        steps = self._sizes(self._asked)[1]
        count = -(-len(index[0] if isinstance(index, tuple) else index) // steps)

        def choose(table: Trajectories) -> Cuts:
            allowed = self._allowed(table, steps)
            chosen = drawn_by(self, cpu.randperm, len(allowed))[:count].numpy()
            return Cuts(allowed[chosen], self._begins(table, allowed[chosen], steps))

        return self._draw(storage, steps, choose)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the pass; see `SamplerWithoutReplacement.state_dict`.

        ``_heads`` contains the first element of each remaining trajectory, or is None between
        passes. ``_trajectories`` is the number of trajectories in the pass. ``_sample_list`` is
        None, so that TorchRL starts a new pass, because TorchRL numbers trajectories differently.
        """
        state = super().state_dict()
        return {
            **state,
            "_sample_list": None,
            "_heads": state["_sample_list"],
            "_trajectories": self._pass.whole,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`.

        From a state of TorchRL, only ``drop_last`` and ``_ran_out`` are loaded. If the storage does
        not contain as many items as when the state was made, the next draw starts a new pass.
        """
        # Tickets are not loaded, because the loaded items have different tickets.
        super().load_state_dict({**state_dict, "_sample_list": state_dict.get("_heads")})
        self._pass = self._pass._replace(whole=int(state_dict.get("_trajectories", 0)))

    def __repr__(self) -> str:
        whole = self._pass.whole
        drawn = whole - self._pass.count_left()
        return f"{SliceSampler.__repr__(self)[:-1]}, {drawn} of {whole} drawn)"


def _tickets(ring: Ring | None, elements: Ints) -> Ints | None:
    return None if ring is None else slots.tickets(ring.live.words[elements // ring.width])


SliceSampler._without_replacement = SliceSamplerWithoutReplacement
