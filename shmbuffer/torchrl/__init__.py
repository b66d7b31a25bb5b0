"""All names of TorchRL's replay buffer API, for scripts in which only the import is changed.

    from shmbuffer.torchrl import LazyTensorStorage, TED2Flat, find_start_stop_traj

The names are those of `shmbuffer`, including rarely used ones such as checkpointers, hooks for
episode data, segment trees and helper functions. The modules in this folder contain only what
compatibility with TorchRL needs: its files, its episode data format (TED), transforms and helper
functions.
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
