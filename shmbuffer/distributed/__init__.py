"""Beyond one machine. Optional dependencies, imported on use."""

from shmbuffer.distributed.ray import RayReplayBuffer
from shmbuffer.distributed.rpc import RemoteTensorDictReplayBuffer
from shmbuffer.distributed.shards.replay_buffer import ShardedReplayBuffer

__all__ = ["RayReplayBuffer", "RemoteTensorDictReplayBuffer", "ShardedReplayBuffer"]
