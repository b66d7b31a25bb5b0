"""Batches in pinned memory, which can be copied to a GPU asynchronously.

    ring ──gather──▶ pinned tensors, the caller's ──to("cuda", non_blocking=True)──▶ GPU
                          ▲                                   │
                          └── torch's pool of pinned blocks ◀─┘ when no references exist

Rows are gathered directly into pinned memory. The results of a transform, a ``collate_fn`` or a
storage without columns are copied to pinned memory. A batch belongs to the caller as long as any
tensor or view of it exists. Then torch reuses its memory, after the transfers from it have ended.
A memory pool in this package could not guarantee this, because it would not know about views and
streams.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch.utils._pytree import tree_map

from shmbuffer.tensors.form.tensors import use_allocator


def can_pin(pin_memory: bool) -> bool:
    """True if batches are to be pinned. If torch finds no GPU, warns and returns False."""
    if pin_memory and not torch.cuda.is_available():
        warnings.warn(
            "pin_memory=True has no effect, because torch finds no GPU",
            stacklevel=2,
        )
        return False
    return bool(pin_memory)


def empty_like(form: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized pinned tensor with the shape and dtype of ``form``."""
    return torch.empty_like(form, pin_memory=True)


def is_pinned(tensor: torch.Tensor) -> bool:
    """True if a tensor is already in pinned memory or on a GPU."""
    return tensor.device.type != "cpu" or tensor.is_pinned()


def read_into_pinned(pins: bool) -> AbstractContextManager[None]:
    """Returns a context in which storages read into pinned memory, or one without effect.

    The context has no effect if ``pins`` is False.
    """
    return use_allocator(empty_like) if pins else nullcontext()


def pin(data: Any) -> Any:
    """Returns ``data`` with all tensors in pinned memory. Copies those that are not pinned yet."""
    return tree_map(_pin_node, data, is_leaf=is_tensor_collection)


def _pin_node(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return _pin_tensor(data)
    if is_tensor_collection(data):
        return (
            data
            if all(map(_needs_no_pinning, data.values(True, True)))
            else data.apply(_pin_tensor)
        )
    return data.pin_memory() if hasattr(data, "pin_memory") else data


def _pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if is_pinned(tensor):
        return tensor
    if tensor.layout is not torch.strided:  # for example sparse; torch pins the inner tensors
        return tensor.pin_memory()
    return empty_like(tensor).copy_(tensor)


def _needs_no_pinning(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or is_pinned(value)
