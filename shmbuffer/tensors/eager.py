"""Calls that `torch.compile` leaves alone.

A call of the C core is no graph: Dynamo would trace its addresses and counters, and compile again
with every batch. So compiled code breaks its graph at the public calls that reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def _leave_alone() -> Any:
    """The value that has the hook for compiled code skip a frame and its calls, or None."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    except (ImportError, AttributeError, TypeError):
        return None
    return lambda code: set_code_exec_strategy(code, strategy)


_LEAVE_ALONE = _leave_alone()

#: Frames that stand between a marked function and its caller.
FRAMES = 0 if _LEAVE_ALONE is not None else 1


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, called as it is from compiled code; `torch.compiler.disable` costs 0.3 µs."""
    if _LEAVE_ALONE is None:
        return cast(Callable[P, R], torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    _LEAVE_ALONE(function.__code__)
    # What torch.compiler.disable leaves on the function that it makes: Dynamo looks for it before
    # it follows a call.
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = None
    marked._torchdynamo_disable_recursive = True
    return function
