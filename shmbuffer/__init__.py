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
    from shmbuffer.errors import *  # noqa: F403
    from shmbuffer.guide_names import *  # noqa: F403
    from shmbuffer.other_names import *  # noqa: F403

__all__ = sorted(LISTED)


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
