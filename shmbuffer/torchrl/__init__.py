"""Every name of TorchRL's family, for a script that changes one import line.

    from shmbuffer.torchrl import LazyTensorStorage, TED2Flat, find_start_stop_traj

These are the names of `shmbuffer`, the rarely used ones included, such as checkpointers, the hooks
for episodes, segment trees and helper functions. The modules of this folder are what only TorchRL
needs: its files, TED, transforms and functions.
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
