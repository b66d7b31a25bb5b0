"""Client for processes without torch, which reads and writes a buffer as NumPy arrays.

    buffer = shmbuffer.numpy.attach("run/replay")
    buffer.extend({"obs": observations, "reward": rewards})

    attach ──▶ ReplayBuffer ─┬─ structure, leaves, batches       form of an item; checks of a batch
                             ├─ rows                             writing and reading of the ring
                             └─ limits, maximum, raw_priorities  rate limits, and priorities

Clients that use TensorDicts share the code for keys, structures, checks, limits and priorities. No
module of this package imports torch.
"""

from __future__ import annotations

from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.numpy.client import attach
from shmbuffer.numpy.replay_buffer import ReplayBuffer

__all__ = ["PriorityUpdate", "ReplayBuffer", "attach"]
