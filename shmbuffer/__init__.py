"""Replay buffers in shared memory.

TorchRL's API, many processes, and nothing lost when any of them is killed.

    from shmbuffer import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer, attach

Every public name is here. They are loaded when they are first used (PEP 562), so importing this
package does not import torch, and neither do the memory floor and the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Every name of these modules' __all__, for type checkers; the test of the front door compares.
    from shmbuffer.distributed import *  # noqa: F403
    from shmbuffer.errors import *  # noqa: F403
    from shmbuffer.memory.limiter import RateLimiter as RateLimiter
    from shmbuffer.memory.progress import ProgressReport as ProgressReport
    from shmbuffer.replay import *  # noqa: F403
    from shmbuffer.service.client import attach as attach
    from shmbuffer.service.coordinator import Coordinator as Coordinator
    from shmbuffer.service.recovery import RecoveryReport as RecoveryReport
    from shmbuffer.service.recovery import recover as recover
    from shmbuffer.watch.loggers import log_stats as log_stats

_HOMES = {
    "shmbuffer.errors": (
        "AttachTimeout",
        "BufferClosedError",
        "BufferExistsError",
        "BufferInUseError",
        "BufferNeedsRestart",
        "BufferNotFoundError",
        "BufferUnlinkedError",
        "CorruptBufferError",
        "DurabilityError",
        "EmptyBufferError",
        "ForkedHandleError",
        "FormatError",
        "IncompatibleVersionError",
        "LockTimeout",
        "RateLimitError",
        "RateLimitTimeout",
        "ReadOnlyError",
        "RecordTooLargeError",
        "RegistryFullError",
        "RingOverrunError",
        "SchemaMismatchError",
        "ShmBufferError",
        "SpaceError",
        "UnsafeFilesystemError",
        "UnsafePathError",
        "UnsupportedPlatformError",
    ),
    "shmbuffer.memory.progress": ("ProgressReport",),
    "shmbuffer.distributed": ("RayReplayBuffer", "RemoteTensorDictReplayBuffer"),
    "shmbuffer.replay": (
        "Compose",
        "CompressedListStorage",
        "CompressedListStorageCheckpointer",
        "Flat2TED",
        "FlatStorageCheckpointer",
        "H5Combine",
        "H5Split",
        "H5StorageCheckpointer",
        "ImmutableDatasetWriter",
        "LambdaScheduler",
        "LazyMemmapStorage",
        "LazyStackStorage",
        "LazyTensorStorage",
        "LinearScheduler",
        "ListStorage",
        "ListStorageCheckpointer",
        "Nested2TED",
        "NestedStorageCheckpointer",
        "ParameterScheduler",
        "PrioritizedReplayBuffer",
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "PriorityUpdate",
        "RandomSampler",
        "ReplayBuffer",
        "ReplayBufferEnsemble",
        "RoundRobinWriter",
        "Sampler",
        "SamplerEnsemble",
        "SamplerWithoutReplacement",
        "SchedulerList",
        "SliceSampler",
        "SliceSamplerWithoutReplacement",
        "StepScheduler",
        "Storage",
        "StorageCheckpointerBase",
        "StorageEnsemble",
        "StorageEnsembleCheckpointer",
        "TED2Flat",
        "TED2Nested",
        "TensorDictMaxValueWriter",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
        "TensorDictRoundRobinWriter",
        "TensorStorage",
        "TensorStorageCheckpointer",
        "Writer",
        "WriterEnsemble",
        "densify",
        "pad",
    ),
    "shmbuffer.memory.limiter": ("RateLimiter",),
    "shmbuffer.service.client": ("attach",),
    "shmbuffer.service.coordinator": ("Coordinator",),
    "shmbuffer.watch.loggers": ("log_stats",),
    "shmbuffer.service.recovery": (
        "RecoveryReport",
        "recover",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
