"""Writers, which place new items: one a file."""

from shmbuffer.replay.writers.immutable import ImmutableDatasetWriter
from shmbuffer.replay.writers.max_value import TensorDictMaxValueWriter
from shmbuffer.replay.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter
from shmbuffer.replay.writers.writer import Writer

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]
