"""torch.compile skips the native calls and stops recompiling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from tensordict import TensorDict
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    Writer,
)
from shmbuffer.tensors.eager import eager

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def frames() -> int:
    """Returns the number of compilations so far."""
    return int(counters["frames"]["total"])


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    "storage",
    [
        lambda path: LazyTensorStorage(50, compilable=True),
        lambda path: LazyMemmapStorage(50, compilable=True),
        lambda path: LazyMemmapStorage(50, scratch_dir=path, shared_init=True, compilable=True),
        lambda path: ListStorage(50, compilable=True),
    ],
)
@pytest.mark.parametrize(
    "sampler",
    [RandomSampler, lambda: PrioritizedSampler(50, 0.7, 0.9), SamplerWithoutReplacement],
)
def test_extending_and_sampling_stop_recompiling(
    tmp_path: Path, storage: Any, sampler: Any
) -> None:
    rb = TensorDictReplayBuffer(
        storage=storage(tmp_path / "buffer"),
        sampler=sampler(),
        writer=TensorDictRoundRobinWriter(compilable=True),
        batch_size=7,
        compilable=True,
    )

    @torch.compile(backend="eager")
    def step(data: TensorDict) -> TensorDict:
        rb.extend(data)
        sample = rb.sample()
        return sample.set("twice", sample["a"] * 2)

    compiled = []
    for i in range(12):
        size = 3 + i % 4
        sample = step(TensorDict({"a": torch.arange(size) + i}, [size]))
        assert torch.equal(sample["twice"], sample["a"] * 2)
        compiled.append(frames())
    assert compiled[-1] == compiled[5], "compiled again with the buffer in a later state"
    assert len(rb) == 50
    rb.close()


def test_a_plain_buffer_and_its_priorities_work_in_compiled_code() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PrioritizedSampler(10, 1.0, 1.0),
        writer=RoundRobinWriter(compilable=True),
        batch_size=5,
    )

    @torch.compile(backend="eager")
    def step(data: torch.Tensor, priority: torch.Tensor) -> torch.Tensor:
        index = rb.extend(data)
        rb.update_priority(index, priority)
        return rb.sample() + len(rb)

    for i in range(6):
        out = step(torch.arange(2) + 10 * i, torch.tensor([0.0, 1.0]) * 100**i)
        assert len(out) == 5
    assert rb.sample().tolist() == [51] * 5


def test_parts_may_be_called_by_themselves() -> None:
    storage = LazyTensorStorage(10, compilable=True)
    writer: Writer = RoundRobinWriter(compilable=True)
    writer.register_storage(storage)

    @torch.compile(backend="eager")
    def step(data: torch.Tensor) -> torch.Tensor:
        writer.extend(data)
        storage.set(range(2), data[:2] + 100)
        return storage.get(slice(0, 2)) - 100

    seen = []
    for i in range(8):
        assert torch.equal(step(torch.arange(4) + i), torch.arange(2) + i)
        seen.append(frames())
    assert seen[-1] == seen[3]
    assert len(storage) == 10


def test_a_marked_call_and_what_it_calls_are_left_alone_and_what_follows_is_not() -> None:
    compiled: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        compiled.extend(node.target.__name__ for node in graph.graph.nodes if callable(node.target))
        return graph.forward

    def below(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @eager
    def marked(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("below 0")
        return below(below(x))

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return marked(x * 2) / 3

    assert torch.equal(step(torch.ones(3)), torch.full((3,), 4 / 3))
    assert compiled == ["mul", "truediv"]
    with pytest.raises(ValueError, match="below 0"):
        step(-torch.ones(3))
    assert torch.equal(torch.compile(below, backend=backend)(torch.ones(3)), torch.full((3,), 2.0))
    assert compiled == ["mul", "truediv", "add"]
    assert torch.equal(marked(torch.ones(3)), torch.full((3,), 3.0))
