"""Buffers for processes that have NumPy arrays: without torch and tensordict.

    buffer = shmbuffer.numpy.attach("run/replay")
    buffer.extend({"obs": observations, "reward": rewards})

    attach ──▶ ReplayBuffer ─┬─ structure, leaves, batches       what an item is; a batch against it
                             ├─ rows                             into the ring and out of it
                             └─ limits, maximum, raw_priorities  when, and by which priority

What is said here of keys, trees, leaves that do not fit, limits and priorities holds for the
clients with TensorDicts, too: they import it from here. Nothing here imports torch.
"""

from __future__ import annotations

from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.numpy.client import attach
from shmbuffer.numpy.replay_buffer import ReplayBuffer

__all__ = ["PriorityUpdate", "ReplayBuffer", "attach"]
