"""Items whose entries follow from their numbers, items of every kind, and when two are alike."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
    tensorclass,
)

Point = namedtuple("Point", ["x", "y"])


@tensorclass
class Step:
    """A tensor and a text, which is no tensor."""

    obs: torch.Tensor
    text: str


@tensorclass
class Transition:
    """Two tensors."""

    obs: torch.Tensor
    reward: torch.Tensor


class Trap:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def numbered(first: int, count: int) -> TensorDict:
    """Returns the items ``first``, ``first + 1``, ...: their only entry is ``number``."""
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


def items(start: int, stop: int) -> TensorDict:
    """Returns the items ``start`` to ``stop - 1``: every leaf says the number in its own way."""
    number = torch.arange(start, stop)
    nested = {"c": number[:, None].repeat(1, 3).float(), "d": number % 2 == 0}
    return TensorDict({"a": number, "b": nested}, [len(number)])


def numbers(data: Any) -> list[int]:
    """Returns the numbers of these `items`, once all leaves agree on them."""
    number = data["a"]
    assert torch.equal(data["b", "c"], number[..., None].expand(*number.shape, 3).float())
    assert torch.equal(data["b", "d"], number % 2 == 0)
    found: list[int] = number.tolist()
    return found


def alike(found: Any, given: Any) -> bool:
    """Returns whether two things are the same: the class, dtype, shape, and every bit."""
    if type(found) is not type(given):
        return False
    if isinstance(given, torch.Tensor):
        if found.is_nested or given.is_nested:
            return (
                found.is_nested == given.is_nested
                and found.layout == given.layout
                and alike(list(found.unbind()), list(given.unbind()))
            )
        return (found.dtype, found.shape, raw(found)) == (given.dtype, given.shape, raw(given))
    if isinstance(given, (np.ndarray, np.generic)):
        return (found.dtype, found.shape, found.tobytes()) == (
            given.dtype,
            given.shape,
            given.tobytes(),
        )
    if isinstance(given, LazyStackedTensorDict):
        return found.stack_dim == given.stack_dim and alike(found.tensordicts, given.tensordicts)
    if isinstance(given, TensorDictBase):
        return (
            (found.batch_size, found.names, found.device)
            == (given.batch_size, given.names, given.device)
            and list(found.keys()) == list(given.keys())
            and all(alike(found.get(key), given.get(key)) for key in given.keys())  # noqa: SIM118
        )
    if isinstance(given, NonTensorData):
        return found.batch_size == given.batch_size and alike(found.data, given.data)
    if is_tensorclass(given):
        return alike(found._tensordict, given._tensordict)
    if isinstance(given, dict):
        return list(map(repr, found)) == list(map(repr, given)) and all(
            alike(one, other) for one, other in zip(found.values(), given.values(), strict=True)
        )
    if isinstance(given, (list, tuple)):
        return len(found) == len(given) and all(map(alike, found, given))
    return repr(found) == repr(given)


def raw(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor, in C order."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
