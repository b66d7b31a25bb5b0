"""Recording of environment steps as transitions in a buffer."""

from shmbuffer.environments.recorder import Recorder

__all__ = ["Recorder"]
