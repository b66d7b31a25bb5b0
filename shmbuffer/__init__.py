"""Replay buffers in shared memory.

TorchRL's API, many processes, and nothing lost when any of them is killed.

    from shmbuffer import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer, attach

Every public name can be imported from here, and is loaded when it is first used (PEP 562). So this
package, the memory floor and the command line do not import torch. ``dir()`` and ``__all__`` have
the names that the guides use; `shmbuffer.torchrl` lists all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shmbuffer.names import LISTED, load

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

__all__ = sorted(
    [name for names in LISTED.values() for name in names]
    + ["RateLimitTimeout", "SchemaMismatchError", "ShmBufferError", "SpaceError"]
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name == "numpy":  # the module of the clients without torch
        return importlib.import_module("shmbuffer.numpy")
    found = globals()[name] = load(name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
