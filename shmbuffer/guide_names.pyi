"""Names that the guides use. `shmbuffer.names` reads this list."""

from shmbuffer.buffers.hindsight import HERReplayBuffer as HERReplayBuffer
from shmbuffer.buffers.prioritized_buffers import PrioritizedReplayBuffer as PrioritizedReplayBuffer
from shmbuffer.buffers.prioritized_buffers import (
    TensorDictPrioritizedReplayBuffer as TensorDictPrioritizedReplayBuffer,
)
from shmbuffer.buffers.replay_buffer import ReplayBuffer as ReplayBuffer
from shmbuffer.buffers.schedulers import LinearScheduler as LinearScheduler
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer as TensorDictReplayBuffer
from shmbuffer.datasets.loading import load_dataset as load_dataset
from shmbuffer.datasets.prefill import prefill_replay_buffer as prefill_replay_buffer
from shmbuffer.distributed.ray import RayReplayBuffer as RayReplayBuffer
from shmbuffer.distributed.rpc import RemoteTensorDictReplayBuffer as RemoteTensorDictReplayBuffer
from shmbuffer.distributed.shards.sharded_buffer import ShardedReplayBuffer as ShardedReplayBuffer
from shmbuffer.ensembles.ensemble import ReplayBufferEnsemble as ReplayBufferEnsemble
from shmbuffer.ensembles.offline_to_online import (
    OfflineToOnlineReplayBuffer as OfflineToOnlineReplayBuffer,
)
from shmbuffer.environments.recorder import Recorder as Recorder
from shmbuffer.errors import RateLimitTimeout as RateLimitTimeout
from shmbuffer.errors import SchemaMismatchError as SchemaMismatchError
from shmbuffer.errors import ShmBufferError as ShmBufferError
from shmbuffer.errors import SpaceError as SpaceError
from shmbuffer.items.raw_priorities import PriorityUpdate as PriorityUpdate
from shmbuffer.memory.format.limiter import RateLimiter as RateLimiter
from shmbuffer.memory.upkeep.recovery_report import RecoveryReport as RecoveryReport
from shmbuffer.memory.weights import Weights as Weights
from shmbuffer.samplers.consuming_sampler import ConsumingSampler as ConsumingSampler
from shmbuffer.samplers.labelled.groups import PromptGroupSampler as PromptGroupSampler
from shmbuffer.samplers.labelled.staleness import StalenessAwareSampler as StalenessAwareSampler
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler as PrioritizedSampler
from shmbuffer.samplers.random import RandomSampler as RandomSampler
from shmbuffer.samplers.slicing.prioritized_slices import (
    PrioritizedSliceSampler as PrioritizedSliceSampler,
)
from shmbuffer.samplers.slicing.slices import SliceSampler as SliceSampler
from shmbuffer.samplers.slicing.slices_without_replacement import (
    SliceSamplerWithoutReplacement as SliceSamplerWithoutReplacement,
)
from shmbuffer.samplers.slicing.streaming_slices import (
    StreamingSliceSampler as StreamingSliceSampler,
)
from shmbuffer.samplers.without_replacement import (
    SamplerWithoutReplacement as SamplerWithoutReplacement,
)
from shmbuffer.service.client import attach as attach
from shmbuffer.service.coordinator import Coordinator as Coordinator
from shmbuffer.service.recover import recover as recover
from shmbuffer.storages.compressed import CompressedListStorage as CompressedListStorage
from shmbuffer.storages.lazy_memmap import LazyMemmapStorage as LazyMemmapStorage
from shmbuffer.storages.lazy_stack import LazyStackStorage as LazyStackStorage
from shmbuffer.storages.lazy_tensor import LazyTensorStorage as LazyTensorStorage
from shmbuffer.storages.list import ListStorage as ListStorage
from shmbuffer.storages.read_only import ReadOnlyStorage as ReadOnlyStorage
from shmbuffer.units.frame_stack import FrameStack as FrameStack
from shmbuffer.units.n_step import NStep as NStep
from shmbuffer.units.sequence import Sequence as Sequence
from shmbuffer.writers.immutable import ImmutableDatasetWriter as ImmutableDatasetWriter
from shmbuffer.writers.max_value import TensorDictMaxValueWriter as TensorDictMaxValueWriter
