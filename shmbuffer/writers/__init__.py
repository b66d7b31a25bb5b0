"""Writers, which choose the places of new items, one per module."""

from shmbuffer.writers.immutable import ImmutableDatasetWriter
from shmbuffer.writers.max_value import TensorDictMaxValueWriter
from shmbuffer.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter
from shmbuffer.writers.writer import Writer

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]
