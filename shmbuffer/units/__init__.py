"""Sample units, which turn a drawn item into a window, a transition or a stack of frames."""

from shmbuffer.units.frame_stack import FrameStack
from shmbuffer.units.n_step import NStep
from shmbuffer.units.sequence import Sequence
from shmbuffer.units.unit import SampleUnit, Transition

__all__ = ["FrameStack", "NStep", "SampleUnit", "Sequence", "Transition"]
