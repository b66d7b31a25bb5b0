"""Replay buffers in shared memory.

TorchRL's API, many processes, and nothing lost when any of them is killed.

    from shmbuffer import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer, attach

Every public name is here, and loaded when it is first used (PEP 562). So this package, the memory
floor and the command line do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shmbuffer import errors

if TYPE_CHECKING:
    # Every name of these modules' __all__, for type checkers; the test of the front door compares.
    from shmbuffer.buffers import *  # noqa: F403
    from shmbuffer.buffers.schedulers import *  # noqa: F403
    from shmbuffer.datasets import *  # noqa: F403
    from shmbuffer.distributed import *  # noqa: F403
    from shmbuffer.ensembles import *  # noqa: F403
    from shmbuffer.environments import *  # noqa: F403
    from shmbuffer.errors import *  # noqa: F403
    from shmbuffer.memory.directory.partials import Partial as Partial
    from shmbuffer.memory.flow.consumer_status import ConsumerStatus as ConsumerStatus
    from shmbuffer.memory.flow.consumer_status import HeldItems as HeldItems
    from shmbuffer.memory.format.ledger import Acknowledged as Acknowledged
    from shmbuffer.memory.format.limiter import RateLimiter as RateLimiter
    from shmbuffer.memory.system.progress import ProgressReport as ProgressReport
    from shmbuffer.memory.system.threads import set_threads as set_threads
    from shmbuffer.memory.weights import Weights as Weights
    from shmbuffer.samplers import *  # noqa: F403
    from shmbuffer.saves.checkpointers import *  # noqa: F403
    from shmbuffer.service.client import attach as attach
    from shmbuffer.service.coordinator import Coordinator as Coordinator
    from shmbuffer.service.recovery import RecoveryReport as RecoveryReport
    from shmbuffer.service.recovery import recover as recover
    from shmbuffer.storages import *  # noqa: F403
    from shmbuffer.tensors.records.ragged import densify as densify
    from shmbuffer.tensors.records.ragged import pad as pad
    from shmbuffer.torchrl.functions import *  # noqa: F403
    from shmbuffer.torchrl.ted import *  # noqa: F403
    from shmbuffer.torchrl.transforms import Compose as Compose
    from shmbuffer.units import *  # noqa: F403
    from shmbuffer.watch.loggers import log_stats as log_stats
    from shmbuffer.writers import *  # noqa: F403

_HOMES = {
    "shmbuffer.environments": ("Recorder",),
    "shmbuffer.memory.system.progress": ("ProgressReport",),
    "shmbuffer.distributed": (
        "RayReplayBuffer",
        "RemoteTensorDictReplayBuffer",
        "ShardedReplayBuffer",
    ),
    "shmbuffer.buffers": (
        "ConditionalUpdateResult",
        "HERReplayBuffer",
        "HindsightStrategy",
        "PrioritizedReplayBuffer",
        "ReplayBuffer",
        "Reservation",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
    ),
    "shmbuffer.saves.checkpointers": (
        "CompressedListStorageCheckpointer",
        "FlatStorageCheckpointer",
        "H5StorageCheckpointer",
        "ListStorageCheckpointer",
        "NestedStorageCheckpointer",
        "StorageCheckpointerBase",
        "TensorStorageCheckpointer",
    ),
    "shmbuffer.ensembles": (
        "OfflineToOnlineReplayBuffer",
        "ReplayBufferEnsemble",
        "SamplerEnsemble",
        "StorageEnsemble",
        "StorageEnsembleCheckpointer",
        "WriterEnsemble",
    ),
    "shmbuffer.datasets": (
        "load_dataset",
        "prefill_replay_buffer",
    ),
    "shmbuffer.tensors.records.ragged": (
        "densify",
        "pad",
    ),
    "shmbuffer.memory.flow.consumer_status": (
        "ConsumerStatus",
        "HeldItems",
    ),
    "shmbuffer.memory.format.ledger": ("Acknowledged",),
    "shmbuffer.samplers": (
        "ConsumingSampler",
        "GroupCounts",
        "MinSegmentTreeFp32",
        "MinSegmentTreeFp64",
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "PriorityUpdate",
        "PromptGroupSampler",
        "RandomSampler",
        "Sampler",
        "SamplerWithoutReplacement",
        "SliceSampler",
        "SliceSamplerWithoutReplacement",
        "StalenessAwareSampler",
        "StreamingSliceSampler",
        "SumSegmentTreeFp32",
        "SumSegmentTreeFp64",
    ),
    "shmbuffer.buffers.schedulers": (
        "LambdaScheduler",
        "LinearScheduler",
        "ParameterScheduler",
        "SchedulerList",
        "StepScheduler",
    ),
    "shmbuffer.storages": (
        "CompressedListStorage",
        "LazyMemmapStorage",
        "LazyStackStorage",
        "LazyTensorStorage",
        "ListStorage",
        "ReadOnlyStorage",
        "Storage",
        "TensorStorage",
    ),
    "shmbuffer.torchrl.ted": (
        "Flat2TED",
        "H5Combine",
        "H5Split",
        "Nested2TED",
        "TED2Flat",
        "TED2Nested",
    ),
    "shmbuffer.torchrl.functions": (
        "DEFAULT_DONE_KEYS",
        "find_start_stop_traj",
        "pin_memory_output",
        "tree_iter",
        "unravel_index",
    ),
    "shmbuffer.torchrl.transforms": ("Compose",),
    "shmbuffer.units": (
        "FrameStack",
        "NStep",
        "SampleUnit",
        "Sequence",
        "Transition",
    ),
    "shmbuffer.writers": (
        "ImmutableDatasetWriter",
        "RoundRobinWriter",
        "TensorDictMaxValueWriter",
        "TensorDictRoundRobinWriter",
        "Writer",
    ),
    "shmbuffer.memory.format.limiter": ("RateLimiter",),
    "shmbuffer.memory.directory.partials": ("Partial",),
    "shmbuffer.memory.system.threads": ("set_threads",),
    "shmbuffer.memory.weights": ("Weights",),
    "shmbuffer.service.client": ("attach",),
    "shmbuffer.service.coordinator": ("Coordinator",),
    "shmbuffer.watch.loggers": ("log_stats",),
    "shmbuffer.service.recovery": (
        "RecoveryReport",
        "recover",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
for _name, _one in vars(errors).items():
    if isinstance(_one, type) and issubclass(_one, errors.ShmBufferError):
        _HOME_OF[_name] = errors.__name__

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name == "numpy":  # the module of the clients without torch
        return importlib.import_module("shmbuffer.numpy")
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(module)
    except AttributeError as error:  # for `from shmbuffer import ...` the name would be missing
        raise ImportError(
            f"{module} cannot be imported: {error}; if sources have changed, compile the core again"
            " (pip install -e .)",
            name=module,
        ) from error
    found = globals()[name] = getattr(home, name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
