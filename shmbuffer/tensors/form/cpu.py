"""Creates tensors for the package's own use, independent of the caller's settings of torch.

``torch.set_default_device``, ``with torch.device(...)``, ``torch.set_default_dtype`` and
``torch.inference_mode`` change what ``torch.empty(3)`` returns. Indices, masks, weights and memory
that the C core writes to must always be on the CPU. Other modules therefore use these functions.
``tests/test_own_tensors.py`` fails if a module calls torch's functions directly.

The functions have the same names and arguments as those of torch, except ``device``. Functions
that fill a tensor with floating-point numbers need a ``dtype``, because the caller may have changed
torch's default.
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
    """Converts a value to a tensor on the CPU. A tensor stays on its own device."""
    device = value.device if isinstance(value, torch.Tensor) else DEVICE
    return torch.as_tensor(value, dtype=dtype, device=device)


def as_default() -> AbstractContextManager[Any]:
    """Returns a context in which tensordict and torch create their tensors on the CPU."""
    return DEVICE


def without_inference_mode() -> AbstractContextManager[None]:
    """Returns a context without inference mode, so that its tensors can be modified later."""
    return torch.inference_mode(mode=False)
