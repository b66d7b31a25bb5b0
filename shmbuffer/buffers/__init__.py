"""The buffers of the family, made of rooms of which each knows those above it.

data_path   the parts of a buffer, and the way of data through them
flow        items for consumers, room for rollouts, weights for collectors
calls       the objects that a buffer passes its calls on to: writes, reads, items, saves
"""

from shmbuffer.buffers.calls.stored_items import ConditionalUpdateResult
from shmbuffer.buffers.flow.reservation import Reservation
from shmbuffer.buffers.hindsight import HERReplayBuffer, HindsightStrategy
from shmbuffer.buffers.prioritized import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer

__all__ = [
    "ConditionalUpdateResult",
    "HERReplayBuffer",
    "HindsightStrategy",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "Reservation",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
