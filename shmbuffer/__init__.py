"""Replay buffers in shared memory, with TorchRL's API.

Many processes can share a buffer. If any of them is killed, no committed item is lost.

    from shmbuffer import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer, attach

Every public name can be imported from this package. A name is loaded when it is first used
(PEP 562), so importing the package, its memory layer or its command line does not import torch.
``dir()`` and ``__all__`` list the names that the guides use. `shmbuffer.torchrl` lists all names.
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
    if name == "numpy":  # the subpackage for clients without torch
        return importlib.import_module("shmbuffer.numpy")
    found = globals()[name] = load(name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
