"""What a drawn item becomes in a batch: itself, a window of steps around it, n steps in one."""

from shmbuffer.replay.units.n_step import NStep
from shmbuffer.replay.units.sequence import Sequence
from shmbuffer.replay.units.unit import SampleUnit, Transition

__all__ = ["NStep", "SampleUnit", "Sequence", "Transition"]
