"""Sample units: they turn a drawn item into a window of steps, n steps in one, or a stack."""

from shmbuffer.units.frame_stack import FrameStack
from shmbuffer.units.n_step import NStep
from shmbuffer.units.sequence import Sequence
from shmbuffer.units.unit import SampleUnit, Transition

__all__ = ["FrameStack", "NStep", "SampleUnit", "Sequence", "Transition"]
