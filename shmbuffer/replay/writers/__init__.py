"""Who decides where the next item goes: one writer a file."""

from shmbuffer.replay.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter
from shmbuffer.replay.writers.writer import Writer

__all__ = ["RoundRobinWriter", "TensorDictRoundRobinWriter", "Writer"]
