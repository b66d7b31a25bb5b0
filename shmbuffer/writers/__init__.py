"""Writers, which place new items: one a file."""

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
