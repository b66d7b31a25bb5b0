"""What a drawn item becomes in a batch: itself, a window of steps around it, n steps in one."""

from shmbuffer.units.frame_stack import FrameStack
from shmbuffer.units.n_step import NStep
from shmbuffer.units.sequence import Sequence
from shmbuffer.units.unit import SampleUnit, Transition

__all__ = ["FrameStack", "NStep", "SampleUnit", "Sequence", "Transition"]
