"""Buffers for processes with NumPy arrays, without torch and tensordict.

    buffer = shmbuffer.numpy.attach("run/replay")
    buffer.extend({"obs": observations, "reward": rewards})

    attach ──▶ ReplayBuffer ─┬─ structure, leaves, batches       form of an item; checks of a batch
                             ├─ rows                             into the ring and out of it
                             └─ limits, maximum, raw_priorities  when, and by which priority

Clients with TensorDicts share the rules for keys, trees, mismatches, limits and priorities. Nothing
here imports torch.
"""

from __future__ import annotations

from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.numpy.client import attach
from shmbuffer.numpy.replay_buffer import ReplayBuffer

__all__ = ["PriorityUpdate", "ReplayBuffer", "attach"]
