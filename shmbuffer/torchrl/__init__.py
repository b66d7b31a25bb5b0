"""All names of TorchRL's replay buffer API, for scripts that change only the import.

    from shmbuffer.torchrl import LazyTensorStorage, TED2Flat, find_start_stop_traj

The names are those of `shmbuffer`, including rarely used ones such as checkpointers, hooks for
episodes, segment trees and helper functions. The modules of this folder contain features that only
TorchRL needs: its files, TED, transforms and functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmbuffer.names import HOME_OF

if TYPE_CHECKING:
    from shmbuffer.errors import *  # noqa: F403
    from shmbuffer.guide_names import *  # noqa: F403
    from shmbuffer.other_names import *  # noqa: F403
else:
    from shmbuffer.names import load as __getattr__  # noqa: F401

__all__ = sorted(HOME_OF)


def __dir__() -> list[str]:
    return __all__
