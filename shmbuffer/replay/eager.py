"""What `torch.compile` leaves alone.

A call of the C core is no graph: addresses and counters that change with every batch would make
Dynamo trace, guard and compile each of them anew. So the public calls that reach it are marked:
compiled code breaks its graph there, calls them as they are, and never recompiles on their account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, called as it is from compiled code.

    Cost: 0.7 µs a call, what ``torch.compiler.disable`` takes.
    """
    return cast(Callable[P, R], torch.compiler.disable(function))  # type: ignore[no-untyped-call]
