"""Creates tensors for the package's own use, whatever the caller has set for the thread.

``torch.set_default_device``, ``with torch.device(...)``, ``torch.set_default_dtype`` and
``torch.inference_mode`` change what ``torch.empty(3)`` makes. Indices, masks, weights and memory
that the C core writes to have to lie on the CPU all the same, so that they are made here and
nowhere else; ``tests/test_own_tensors.py`` refuses a bare call.

The functions have the names and arguments of torch's, without ``device``. Those that fill in
floating-point numbers need a ``dtype``, because torch's default is the caller's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

DEVICE = torch.device("cpu")

empty = partial(torch.empty, device=DEVICE)
zeros = partial(torch.zeros, device=DEVICE)
ones = partial(torch.ones, device=DEVICE)
full = partial(torch.full, device=DEVICE)
arange = partial(torch.arange, device=DEVICE)
tensor = partial(torch.tensor, device=DEVICE)
rand = partial(torch.rand, device=DEVICE)
randint = partial(torch.randint, device=DEVICE)
randperm = partial(torch.randperm, device=DEVICE)


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``torch.as_tensor``: a tensor stays on its device, and anything else comes to the CPU."""
    device = value.device if isinstance(value, torch.Tensor) else DEVICE
    return torch.as_tensor(value, dtype=dtype, device=device)


def within() -> AbstractContextManager[Any]:
    """A block in which tensordict, and torch itself, create tensors on the CPU for us."""
    return DEVICE


def lasting() -> AbstractContextManager[None]:
    """A block whose tensors may be kept: they can be used and written outside inference mode."""
    return torch.inference_mode(mode=False)
