"""Items whose entries follow from their numbers, items of every kind, and their comparison."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
    lazy_stack,
    tensorclass,
)

Point = namedtuple("Point", ["x", "y"])


@tensorclass
class Step:
    """A tensor and a text as a tensorclass."""

    obs: torch.Tensor
    text: str


@tensorclass
class Transition:
    """Two tensors as a tensorclass."""

    obs: torch.Tensor
    reward: torch.Tensor


class Trap:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def numbered(first: int, count: int) -> TensorDict:
    """Returns the items ``first``, ``first + 1``, ..., whose only entry is ``number``."""
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


def items(start: int, stop: int) -> TensorDict:
    """Returns the items ``start`` to ``stop - 1``, whose leaves all follow from the number."""
    number = torch.arange(start, stop)
    nested = {"c": number[:, None].repeat(1, 3).float(), "d": number % 2 == 0}
    return TensorDict({"a": number, "b": nested}, [len(number)])


def numbers(data: Any) -> list[int]:
    """Returns the numbers of these `items`, after checking that all leaves agree."""
    number = data["a"]
    assert torch.equal(data["b", "c"], number[..., None].expand(*number.shape, 3).float())
    assert torch.equal(data["b", "d"], number % 2 == 0)
    found: list[int] = number.tolist()
    return found


def alike(found: Any, given: Any) -> bool:
    """True if two values have the same class, dtype and shape, and equal bits."""
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


def large(seed: int, *shape: int) -> torch.Tensor:
    """Returns numbers that zstd can compress."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) // (7 + seed)


#: An item of each kind that a record can hold, made from a number.
ITEMS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: large(n, 3, 40).float(),
    "number": lambda n: torch.tensor(n),
    "empty": lambda n: torch.zeros(0, 3),
    "bfloat16": lambda n: large(n, 50).bfloat16(),
    "bool": lambda n: large(n, 100) % 2 == 0,
    "conjugate": lambda n: large(n, 3, 40).to(torch.complex64).conj(),
    "complex128": lambda n: TensorDict(
        {"a": torch.tensor(n, dtype=torch.int8), "z": large(n, 9).to(torch.complex128)}
    ),
    "transposed": lambda n: large(n, 20, 30).t(),
    "of any strides": lambda n: [
        torch.arange(6)[::2],
        torch.arange(n, n + 3).expand(2, 3),
        torch.full((2, 3, 4, 5), n).contiguous(memory_format=torch.channels_last),
        torch.tensor([n + 2j]).imag,
        torch.tensor([n + 2j]).conj().imag,
        torch.tensor(n - 1j).conj().imag,
        np.arange(n, n + 6).reshape(2, 3).T,
        np.arange(6)[::-2],
        np.broadcast_to(float(n), (2, 2)),
    ],
    "array": lambda n: {
        "a": np.arange(30, dtype="i2") + n,
        "b": np.float32(n),
        "c": np.ones((2, 0)),
    },
    "odd array": lambda n: [
        np.array(["a", "bcd" * n]),
        np.array("2001-02-03", "M8[s]"),
        np.array(["2001-02-03", "NaT"], "M8[D]"),
        np.arange(100, dtype=">i4") + n,
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.str_("x" * n),
    ],
    "values": lambda n: {
        "text": "\u00e9\ud800" * 50 * n,
        1: -((10**n) ** 5),
        "float": n / 7,
        (True, "x"): n > 1,
        "none": None,
        "bytes": b"\0" * 50 * n,
    },
    "nested": lambda n: [
        (large(n, 5), {"a": Point(n, [torch.tensor(n), b""])}),
        OrderedDict(z=True, a=()),
    ],
    "flat": lambda n: TensorDict({"obs": large(n, 20, 20), "reward": torch.tensor(float(n))}),
    "ragged": lambda n: TensorDict({"tokens": torch.arange(n * 40), "logp": torch.zeros(n * 40)}),
    "of batches": lambda n: TensorDict(
        {"obs": large(n, 3, 30), "next": TensorDict({"obs": large(n, 3, 2)}, [3])},
        [3],
        names=["time"],
        device="cpu",
    ),
    "with text": lambda n: TensorDict(
        {"text": "so long" * 30 * n, "data": NonTensorData([n, "x", None, {"a": 1}])}
    ),
    "text a step": lambda n: TensorDict(
        {"text": NonTensorStack("a", "b" * n), "all": NonTensorData("all", batch_size=[2])}, [2]
    ),
    "array as data": lambda n: TensorDict(
        {"array": NonTensorData(np.arange(n)), "tensor": NonTensorData(torch.arange(n))}
    ),
    "lazy": lambda n: TensorDict(
        {"stack": lazy_stack([TensorDict(a=torch.ones(k + n)) for k in range(2)])}
    ),
    "lazy stack": lambda n: lazy_stack(
        [TensorDict({"a": torch.arange(n + k), "b": torch.zeros(2)}, []) for k in range(3)]
    ),
    "tensorclass": lambda n: Step(obs=large(n, 3, 4), text="x" * n, batch_size=[3]),
    "tensorclass inside": lambda n: TensorDict(
        {"step": Step(obs=large(n, 30), text="x", batch_size=[])}
    ),
    "nothing": lambda n: TensorDict(),
    "no entries": lambda n: {"a": {}, "b": [], "c": ()},
}
