"""What is replayed.

TorchRL's family of buffers on the engine. Knows no file format and no process.
"""

from shmbuffer.replay.buffers import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.replay.samplers import PrioritizedSampler, PriorityUpdate, RandomSampler, Sampler
from shmbuffer.replay.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from shmbuffer.replay.transforms import Compose
from shmbuffer.replay.writers import RoundRobinWriter, TensorDictRoundRobinWriter, Writer

__all__ = [
    "Compose",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PriorityUpdate",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "Storage",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
]
