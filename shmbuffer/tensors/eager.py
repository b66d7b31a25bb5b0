"""Marks functions that `torch.compile` does not trace.

Dynamo cannot trace a call of the C core: it would treat addresses and counters as constants and
recompile for every batch. Compiled code therefore breaks its graph at the public methods that call
the core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def _leave_alone() -> Any:
    """Returns the function that makes Dynamo skip a function and all its calls, or None."""
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

#: Frames between a marked function and its caller.
FRAMES = 0 if _LEAVE_ALONE is not None else 1


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Marks ``function`` as not traced, 0.3 µs faster than `torch.compiler.disable`."""
    if _LEAVE_ALONE is None:
        return cast(Callable[P, R], torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    _LEAVE_ALONE(function.__code__)
    # The attributes that torch.compiler.disable sets: Dynamo looks for them before it traces a
    # call.
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = None
    marked._torchdynamo_disable_recursive = True
    return function
