"""Windows of steps around sampled items, for recurrent learners.

    burn_in          length                  bootstrap
    ├─ ... ─┤ anchor ├─ ... ────────────────┤├─ ... ─┤        one window, dilation steps apart
    False            True                     False           "learning_mask"

The priorities of the steps in a window are combined to the priority of its anchor
(`Sequence._by_anchor`).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.items.indices import ravel, unravel
from shmbuffer.items.keys import ANCHOR_GENERATION, GENERATION, INDEX
from shmbuffer.items.raw_priorities import reduced
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key
from shmbuffer.samplers.sampler import lanes_of
from shmbuffer.tensors.form import cpu
from shmbuffer.units.anchors import Anchors, AnchorTrajectories, AroundAnchors, at_least
from shmbuffer.units.unit import Expanded

_BOUNDARIES = ("pad", "stop", "include_reset")
_ANCHOR, _VALID, _LEARNING = "anchor_index", "validity_mask", "learning_mask"
_NUMBER, _STEP = "sequence_id", "step_in_sequence"
_SHOWN = ("length", "episode_boundary", "done_key", "burn_in", "bootstrap", "dilation", "eta")


class Sequence(AroundAnchors):
    """Sample unit that returns a window of steps around each sampled item.

    The sampled item is the anchor. Its window has ``burn_in`` steps before the anchor, then
    ``length`` steps that start with the anchor, then ``bootstrap`` further steps. ``dilation`` is
    the distance between steps. A batch for n anchors consists of n consecutive windows, which are
    ``n * (burn_in + length + bootstrap)`` items.

    - A window comes from one stream of one collector, without a restart in between. It never
      crosses the ring's head or an empty slot. If a step is overwritten during the read, another
      window is drawn.
    - If the window extends beyond the trajectory, its first or last step is repeated. The
      validity mask is False for repeated steps.

    In addition to the items and the weights of their anchors, a sample has:

    | key | shape, dtype | content |
    |---|---|---|
    | ``"validity_mask"`` | ``[n]`` bool | False for a repeated step |
    | ``"learning_mask"`` | ``[n]`` bool | True for the ``length`` steps to learn from |
    | ``"anchor_index"`` | ``[n]`` int64, or ``[n, ndim]`` | index of the anchor |
    | ``"anchor_generation"`` | ``[n]`` int64 | ticket of the anchor, in a shared buffer |
    | ``"sequence_id"``, ``"step_in_sequence"`` | ``[n]`` int64 | number of the window in the
      batch, and of the step in the window |

    ``update_tensordict_priority`` computes the priority of the anchor from the priorities of the
    steps to learn from: ``eta * max + (1 - eta) * mean``. The sample can be reshaped to
    ``[windows, steps]`` or reduced to some of its rows before this call.

    Args:
        length: number of steps to learn from, starting with the anchor.
        episode_boundary: ``"pad"`` limits the window to the episode. ``"stop"`` moves the window to
            an earlier start, as far as possible, if the episode ends within the window.
            ``"include_reset"`` continues windows into the next episode of the stream.
        done_key: key of the flag that is True for the last step of an episode. With None, only the
            end of a stream ends an episode.
        burn_in: number of steps before the anchor, to warm up the state of a recurrent network.
        bootstrap: number of steps after the steps to learn from, for multi-step targets.
        dilation: distance between steps. With 2, every other step is used.
        eta: weight of the largest priority. The mean has the weight ``1 - eta``. R2D2 uses 0.9
            (Kapturowski et al., ICLR 2019).

    Raises:
        ValueError: a number is out of range, or ``episode_boundary`` is unknown.

    Cost: the search for episode boundaries costs the same as in `SliceSampler`. The steps are read
        once.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, Sequence
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(10),
        ...     sample_unit=Sequence(length=2, burn_in=1, bootstrap=1),
        ...     batch_size=2,
        ... )
        >>> done = torch.arange(10) % 5 == 4
        >>> index = rb.extend(TensorDict({"next": {"done": done}}, [10]))
        >>> rb.sample().reshape(2, 4)["learning_mask"][0].tolist()
        [False, True, True, False]
        >>> unit = Sequence(length=2, burn_in=1, bootstrap=1)
        >>> index, info = unit.expand(torch.tensor([5]), {}, rb.storage)
        >>> index.tolist(), info["validity_mask"].tolist()
        ([5, 5, 6, 7], [False, True, True, True])

    Source: ``torchrl.data.Sequence``.
    """

    def __init__(
        self,
        length: int,
        episode_boundary: Literal["pad", "stop", "include_reset"] = "pad",
        done_key: Key | None = ("next", "done"),
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
        *,
        eta: float = 1.0,
    ) -> None:
        if episode_boundary not in _BOUNDARIES:
            raise ValueError(
                f"episode_boundary must be one of {', '.join(_BOUNDARIES)}, got "
                f"{episode_boundary!r}"
            )
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be from 0 (the mean) to 1 (the largest), got {eta!r}")
        self.length = at_least("length", length, 1)
        self.episode_boundary = episode_boundary
        self.done_key = done_key if done_key is None or isinstance(done_key, str) else (*done_key,)
        self.burn_in = at_least("burn_in", burn_in, 0)
        self.bootstrap = at_least("bootstrap", bootstrap, 0)
        self.dilation = at_least("dilation", dilation, 1)
        self.eta = float(eta)
        crosses = episode_boundary == "include_reset"
        self._trajectories = AnchorTrajectories(None if crosses else self.done_key)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SHOWN)
        return f"{type(self).__name__}({shown})"

    def _around(self, anchors: Anchors, info: dict[Any, Any]) -> Expanded | None:
        """Returns the steps of all windows, or None if a step was overwritten."""
        steps = np.arange(self.burn_in + self.length + self.bootstrap)
        begins = anchors.rows
        if self.episode_boundary == "stop":
            missing = begins + self.dilation * (self.length + self.bootstrap - 1) - anchors.last
            begins = begins - np.clip(missing, 0, begins - anchors.first)
        wanted = begins[:, None] + (steps - self.burn_in) * self.dilation
        rows = np.clip(wanted, anchors.first[:, None], anchors.last[:, None])
        items = anchors.items(rows.ravel())
        if items is None:
            return None
        count, total = wanted.shape
        drawn = torch.from_numpy(anchors.elements)
        lanes = lanes_of(anchors.storage)
        entries: dict[Any, torch.Tensor] = {
            _ANCHOR: torch.stack(unravel(drawn, lanes), -1) if lanes else drawn,
            _NUMBER: cpu.arange(count),
        }
        for key, value in info.items():
            # Tuple keys are a slice sampler's flags for the last step, which windows do not need.
            if isinstance(key, str) and key not in (GENERATION, INDEX):
                entries[key] = cpu.as_tensor(value)
        entries = {
            key: value.repeat_interleave(total, 0) if value.dim() else value
            for key, value in entries.items()
        }
        learned = (steps >= self.burn_in) & (steps < self.burn_in + self.length)
        for key, mask in ((_STEP, steps), (_LEARNING, learned)):
            entries[key] = torch.from_numpy(np.tile(mask, count))
        entries[_VALID] = torch.from_numpy((rows == wanted).ravel())
        if anchors.tickets is not None:
            entries[ANCHOR_GENERATION] = torch.from_numpy(anchors.tickets).repeat_interleave(total)
        return anchors.named(items, entries)

    def _by_anchor(self, data: Any, key: Key, reduction: str, lanes: tuple[int, ...]) -> Any:
        """Reduces a sample with priorities to one row per anchor, for a priority update.

        Args:
            data: the sample.
            key: key of the priorities.
            reduction: reduction of several priorities of one step.
            lanes: sizes of the storage dimensions after the first.
        """
        anchors = data.get(_ANCHOR, None)
        if anchors is None:
            return data
        elements = ravel(anchors.cpu(), lanes)
        counted = np.ones(len(elements), np.bool_)
        for name in (_VALID, _LEARNING):
            mask = data.get(name, None)
            if mask is not None:
                counted &= mask.cpu().numpy().reshape(-1)
        generations = data.get(ANCHOR_GENERATION, None)
        tickets = np.zeros_like(elements)
        if generations is not None:
            tickets = generations.cpu().numpy().reshape(-1)
        order = np.flatnonzero(counted)
        order = order[np.lexsort((elements[order], tickets[order]))]
        elements, tickets = elements[order], tickets[order]
        other = (elements[1:] != elements[:-1]) | (tickets[1:] != tickets[:-1])
        begins = np.flatnonzero(np.append(len(order) > 0, other)[: len(order)])
        index = torch.from_numpy(elements[begins])
        found: dict[Key, torch.Tensor] = {}
        found[INDEX] = torch.stack(unravel(index, lanes), -1) if lanes else index
        if generations is not None:
            found[GENERATION] = torch.from_numpy(tickets[begins])
        priority = data.get(key, None)
        if priority is not None:
            raw = reduced(priority, len(counted), reduction)
            found[key] = torch.from_numpy(self._mixed(raw[order], begins))
        return TensorDict(found, [len(begins)])

    def _mixed(self, priorities: Any, begins: Ints) -> Any:
        """Combines the priorities of the steps of each anchor.

        ``begins`` contains the position of the first step of each anchor in ``priorities``.
        """
        if not len(begins):
            return np.zeros(0)
        largest = np.maximum.reduceat(priorities, begins)
        mean = np.add.reduceat(priorities, begins) / np.diff(begins, append=len(priorities))
        return largest if self.eta == 1 else self.eta * largest + (1 - self.eta) * mean
