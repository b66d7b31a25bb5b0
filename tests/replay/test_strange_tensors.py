"""Any tensor or array that torch or NumPy can make is accepted or refused without a crash.

Each kind is passed to every public call that takes data, indices or priorities, in a process of its
own. Items that are written properly afterwards must be stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

import shmbuffer
from shmbuffer import TensorDictPrioritizedReplayBuffer
from tests.damage.hostile import ends_in_time

pytestmark = pytest.mark.product("kind")

COUNT = 4


def without_storage() -> torch.Tensor:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (COUNT,), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
            raise NotImplementedError(str(func))

    return Wrapper()


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(COUNT)


def seen_by(transform: Callable[..., Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor that a function sees under a transform of `torch.func`."""
    found: list[torch.Tensor] = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor.sum()

    transform(function)(torch.zeros(shape))
    return found[0]


def freed() -> torch.Tensor:
    tensor = torch.zeros(COUNT)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


KINDS: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.zeros(COUNT, device="meta"),
    "sparse": lambda: torch.zeros(COUNT).to_sparse(),
    "sparse rows": lambda: torch.zeros(COUNT, COUNT).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(COUNT), 0.1, 0, torch.qint8),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "without storage": without_storage,
    "fake": fake,
    "functional": lambda: torch._to_functional_tensor(torch.zeros(COUNT)),
    "batched": lambda: seen_by(torch.vmap, (2, COUNT)),
    "differentiated": lambda: seen_by(torch.func.grad, (COUNT,)),
    "freed": freed,
    "freed, from the third on": lambda: freed().as_strided((0,), (1,), 2),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(COUNT)),
    "uninitialized": lambda: torch.nn.parameter.UninitializedParameter(),
    "of MKL-DNN": lambda: torch.zeros(COUNT, COUNT).to_mkldnn(),
    "negative": lambda: torch._neg_view(torch.zeros(COUNT)),
    "conjugate": lambda: torch.zeros(COUNT, dtype=torch.complex64).conj(),
    "expanded": lambda: torch.zeros(1).expand(COUNT),
    "memory-mapped": lambda: MemoryMappedTensor.from_tensor(torch.zeros(COUNT)),
    "every other": lambda: torch.zeros(2 * COUNT)[::2],
    "bits": lambda: torch.empty(COUNT, dtype=torch.bits8),
    "objects": lambda: np.array([None] * COUNT, dtype=object),
    "structs": lambda: np.zeros(COUNT, dtype=[("a", "f4")]),
    "masked": lambda: np.ma.zeros(COUNT),
    "read-only": lambda: np.broadcast_to(np.zeros(1, np.float32), (COUNT,)),
    "backward": lambda: np.zeros(COUNT, np.float32)[::-1],
    "big-endian": lambda: np.zeros(COUNT, ">f4"),
    "times": lambda: np.zeros(COUNT, "M8[s]"),
    "long doubles": lambda: np.zeros(COUNT, np.longdouble),
    "text": lambda: np.array(["a"] * COUNT),
    "voids": lambda: np.zeros(COUNT, "V3"),
    "records": lambda: np.recarray(COUNT, dtype=[("a", "f4")]),
    "unaligned": lambda: np.frombuffer(bytearray(4 * COUNT + 1), np.float32, COUNT, 1),
    "no numbers": lambda: np.zeros((0,), np.float32),
    "one number": lambda: np.float32(1),
}
STORAGES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda path: shmbuffer.LazyTensorStorage(64),
    "memmap": lambda path: shmbuffer.LazyMemmapStorage(64),
    "list": lambda path: shmbuffer.ListStorage(64),
    "records": lambda path: shmbuffer.LazyStackStorage(
        64, max_bytes=2**18, scratch_dir=path / "rb", shared_init=True
    ),
}


def proper() -> TensorDict:
    return TensorDict({"x": torch.arange(COUNT).float(), "p": torch.ones(COUNT)}, [COUNT])


def calls(rb: Any, value: Any) -> Iterator[Callable[[], object]]:
    """Yields every public call that takes data, indices or priorities, with ``value`` in it."""
    ones, index = torch.ones(COUNT), torch.arange(COUNT)

    def writes() -> Iterator[Callable[[], object]]:
        yield lambda: rb.extend(TensorDict({"x": value, "p": ones}, [COUNT]))
        yield lambda: rb.extend({"x": value, "p": ones})
        yield lambda: rb.extend({"x": ones, "p": value})
        yield lambda: rb.add({"x": value[0], "p": 1.0})

    def refilled() -> object:
        out = rb.sample(COUNT)
        out.set("x", value)
        return rb.sample(COUNT, out=out)

    yield from writes()  # the first write determines the schema
    yield lambda: rb.extend(proper())
    yield from writes()
    yield lambda: rb[value]
    yield lambda: rb.__setitem__(value, proper())
    yield lambda: rb.__setitem__(slice(0, COUNT), TensorDict({"x": value, "p": ones}, [COUNT]))
    yield lambda: rb.update_priority(index, value)
    yield lambda: rb.update_priority(value, ones)
    yield lambda: rb.update_tensordict_priority(
        TensorDict({"index": index, "p": value, "td_error": value}, [COUNT])
    )
    yield lambda: rb.update_tensordict_priority(
        TensorDict({"index": value, "p": ones, "td_error": ones}, [COUNT])
    )
    yield refilled
    yield lambda: rb.storage.get(value)
    yield lambda: rb.writer.extend(value)


def give_to_every_call(make: Callable[[Path], Any], value: Any, path: Path) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        storage=make(path), alpha=0.7, beta=0.5, priority_key="p"
    )
    for call in calls(rb, value):
        try:
            call()
        except Exception as error:
            if not str(error) and not isinstance(error, NotImplementedError):
                raise AssertionError(f"{error!r} says nothing") from error
    rb.empty()
    try:
        rb.extend(proper())
    except shmbuffer.SchemaMismatchError:
        return  # the value was accepted as the first item
    assert rb[:]["x"].tolist() == list(range(COUNT))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.replace(" ", "-"))
def test_a_strange_tensor_or_array_is_taken_or_refused(
    kind: str, storage: str, tmp_path: Path
) -> None:
    def body() -> None:
        warnings.simplefilter("ignore")
        give_to_every_call(STORAGES[storage], KINDS[kind](), tmp_path)

    assert ends_in_time(body) == 0
