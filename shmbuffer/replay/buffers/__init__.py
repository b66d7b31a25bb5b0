"""The buffers of the family."""

from shmbuffer.replay.buffers.calls.access import ConditionalUpdateResult
from shmbuffer.replay.buffers.flow.reservation import Reservation
from shmbuffer.replay.buffers.hindsight import HERReplayBuffer, HindsightStrategy
from shmbuffer.replay.buffers.prioritized import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from shmbuffer.replay.buffers.replay_buffer import ReplayBuffer
from shmbuffer.replay.buffers.tensordict import TensorDictReplayBuffer

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
