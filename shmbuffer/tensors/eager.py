"""Marks functions that `torch.compile` does not trace.

Dynamo cannot trace a call into the C core. It would treat addresses and counters as constants and
recompile for every batch. The public methods that call the core therefore cause a graph break in
compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def _leave_alone() -> Any:
    """Returns a function that makes Dynamo skip a code object and everything that it calls.

    Returns None if this version of torch does not support this.
    """
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

#: Number of stack frames between a marked function and its caller.
FRAMES = 0 if _LEAVE_ALONE is not None else 1


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Prevents `torch.compile` from tracing ``function``.

    A call is 0.3 µs faster than with `torch.compiler.disable`, because there is no wrapper.
    """
    if _LEAVE_ALONE is None:
        return cast(Callable[P, R], torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    _LEAVE_ALONE(function.__code__)
    # torch.compiler.disable sets these attributes, and Dynamo checks them before it traces a call.
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = None
    marked._torchdynamo_disable_recursive = True
    return function
