"""The steps of environments, as transitions in a buffer."""

from shmbuffer.environments.recorder import Recorder

__all__ = ["Recorder"]
