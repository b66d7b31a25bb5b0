"""Beyond one machine. Optional dependencies, imported on use."""

from shmbuffer.distributed.ray import RayReplayBuffer
from shmbuffer.distributed.rpc import RemoteTensorDictReplayBuffer

__all__ = ["RayReplayBuffer", "RemoteTensorDictReplayBuffer"]
