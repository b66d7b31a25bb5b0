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
    from shmbuffer.errors import (
        AttachTimeout,
        BufferClosedError,
        BufferExistsError,
        BufferInUseError,
        BufferNeedsRestart,
        BufferNotFoundError,
        BufferUnlinkedError,
        CorruptBufferError,
        DurabilityError,
        EmptyBufferError,
        ForkedHandleError,
        FormatError,
        IncompatibleVersionError,
        LockTimeout,
        ReadOnlyError,
        RegistryFullError,
        RingOverrunError,
        SchemaMismatchError,
        ShmBufferError,
        SpaceError,
        UnsafeFilesystemError,
        UnsafePathError,
        UnsupportedPlatformError,
    )
    from shmbuffer.replay import (
        Compose,
        LazyMemmapStorage,
        LazyTensorStorage,
        ListStorage,
        PrioritizedReplayBuffer,
        PrioritizedSampler,
        PriorityUpdate,
        RandomSampler,
        ReplayBuffer,
        RoundRobinWriter,
        Sampler,
        Storage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
        TensorDictRoundRobinWriter,
        TensorStorage,
        Writer,
    )
    from shmbuffer.service.client import attach
    from shmbuffer.service.coordinator import Coordinator
    from shmbuffer.service.recovery import (
        RecoveryReport,
        recover,
    )

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
        "ReadOnlyError",
        "RegistryFullError",
        "RingOverrunError",
        "SchemaMismatchError",
        "ShmBufferError",
        "SpaceError",
        "UnsafeFilesystemError",
        "UnsafePathError",
        "UnsupportedPlatformError",
    ),
    "shmbuffer.replay": (
        "Compose",
        "LazyMemmapStorage",
        "LazyTensorStorage",
        "ListStorage",
        "PrioritizedReplayBuffer",
        "PrioritizedSampler",
        "PriorityUpdate",
        "RandomSampler",
        "ReplayBuffer",
        "RoundRobinWriter",
        "Sampler",
        "Storage",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
        "TensorDictRoundRobinWriter",
        "TensorStorage",
        "Writer",
    ),
    "shmbuffer.service.client": ("attach",),
    "shmbuffer.service.coordinator": ("Coordinator",),
    "shmbuffer.service.recovery": (
        "RecoveryReport",
        "recover",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AttachTimeout",
    "BufferClosedError",
    "BufferExistsError",
    "BufferInUseError",
    "BufferNeedsRestart",
    "BufferNotFoundError",
    "BufferUnlinkedError",
    "Compose",
    "Coordinator",
    "CorruptBufferError",
    "DurabilityError",
    "EmptyBufferError",
    "ForkedHandleError",
    "FormatError",
    "IncompatibleVersionError",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "LockTimeout",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PriorityUpdate",
    "RandomSampler",
    "ReadOnlyError",
    "RecoveryReport",
    "RegistryFullError",
    "ReplayBuffer",
    "RingOverrunError",
    "RoundRobinWriter",
    "Sampler",
    "SchemaMismatchError",
    "ShmBufferError",
    "SpaceError",
    "Storage",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "UnsafeFilesystemError",
    "UnsafePathError",
    "UnsupportedPlatformError",
    "Writer",
    "attach",
    "recover",
]


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
    return sorted({*globals(), *__all__})
