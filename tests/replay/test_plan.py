"""A buffer's plan: its code paths with reasons, when the plan is made again, and its length."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import shmbuffer
from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.kit.items import numbered
from tests.kit.rings import ring_of

PACKAGE = Path(shmbuffer.__file__).parent
FOLDER = Path(__file__).parents[2] / "docs" / "design"
DESIGN = "".join((FOLDER / name).read_text() for name in ("life-of-an-item.md", "modules.md"))
MOST = {
    "A batch that needs no conversion": 2,
    "A batch that has to be converted": 5,
    "A sample": 5,
    "Its priorities": 3,
}


def learner(capacity: int = 10, **kwargs: Any) -> TensorDictPrioritizedReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(capacity), batch_size=4, **kwargs
    )


def is_form(file: str) -> bool:
    return "/tensors/form/" in file or "/shmbuffer/items/" in file


def walk(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Returns the functions of the package that a call enters, each once, without those of forms.

    A comprehension or a nested function counts as part of its enclosing function.
    """
    entered: list[tuple[str, str]] = []

    def look(frame: Any, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back.f_code.co_filename
        file = code.co_filename
        if event != "call" or not file.startswith(str(PACKAGE)) or "<locals>" in code.co_qualname:
            return
        if is_form(file) and is_form(caller):
            return
        name = str(Path(file).relative_to(PACKAGE))
        if (code.co_qualname, name) not in entered:
            entered.append((code.co_qualname, name))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def told(heading: str) -> list[tuple[str, str]]:
    """Returns the table below a heading of the design pages."""
    section = DESIGN.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\| `([\w.]+)` \| `([\w/.]+)` \|", section, re.MULTILINE)


def walks() -> dict[str, Callable[[], object]]:
    rb = learner(1000)
    error = torch.rand(32)
    whole = TensorDict({"obs": torch.rand(32, 4), "reward": torch.rand(32)}, [32])
    rb.extend(whole)
    direct = whole.clone().set("td_error", error)
    converted = direct.clone(recurse=False).set("obs", torch.rand(4, 32).T)
    sample = rb.sample().set("td_error", error[:4])
    return {
        "A batch that needs no conversion": lambda: rb.extend(direct),
        "A batch that has to be converted": lambda: rb.extend(converted),
        "A sample": rb.sample,
        "Its priorities": lambda: rb.update_tensordict_priority(sample),
    }


WALKS = [
    "A batch that needs no conversion",
    "A batch that has to be converted",
    "A sample",
    "Its priorities",
]


@pytest.mark.parametrize("heading", WALKS)
def test_a_hot_call_enters_the_functions_that_the_design_tells(heading: str) -> None:
    call = walks()[heading]
    for _ in range(2):  # the first call fills caches
        call()
    found = walk(call)
    assert found == told(heading)
    assert len(found) <= MOST[heading]


class OwnSampler(RandomSampler):
    """A subclass that draws like its base class."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws like `RandomSampler`."""
        return super().sample(storage, batch_size)


WAYS: dict[str, tuple[Callable[[], ReplayBuffer], str, str]] = {
    "prioritized": (learner, "fast", "fast"),
    "plain": (
        lambda: ReplayBuffer(storage=LazyTensorStorage(9)),
        "fast",
        "whole: samples do not have index and weights as entries",
    ),
    "list": (
        lambda: TensorDictReplayBuffer(storage=ListStorage(9)),
        "whole: a ListStorage has no columns",
        "by parts: a ListStorage has no native draw",
    ),
    "own sampler": (
        lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=OwnSampler()),
        "fast",
        "by parts: a OwnSampler draws",
    ),
    "top k": (
        lambda: TensorDictReplayBuffer(
            storage=LazyTensorStorage(9), writer=TensorDictMaxValueWriter("number")
        ),
        "by parts: a TensorDictMaxValueWriter chooses the slots of items",
        "fast",
    ),
    "ahead": (
        lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(9), prefetch=1, batch_size=2),
        "fast",
        "whole: samples are prefetched",
    ),
    "transforms": (
        lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(9), transform=lambda data: data),
        "fast, after conversion: transforms are called",
        "whole: transforms are called",
    ),
    "collated": (
        lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(9), collate_fn=lambda data: data),
        "fast",
        "whole: there is a collate_fn",
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_plan_says_which_ways_are_taken_and_why_no_shorter_ones(name: str) -> None:
    make, write, sample = WAYS[name]
    rb = make()
    data = numbered(0, 3)
    rb.extend(data if rb.family != "ReplayBuffer" else data["number"])
    said = repr(rb.plan).splitlines()
    assert f"    write: {write}" in said
    assert f"    sample: {sample}" in said


def test_before_the_first_write_there_is_no_fast_way() -> None:
    assert "    write: whole: nothing was written yet" in repr(learner().plan).splitlines()


def test_a_plan_says_what_a_sample_has_and_waits_for() -> None:
    rb = learner(rate_limiter=RateLimiter(min_size=1)).share()
    said = repr(rb.plan).splitlines()
    assert "    info: index, _weight, priority_weight, index_generation" in said
    assert "    samples wait for the rate limiter" in said


def test_a_plan_is_kept_until_a_part_is_exchanged() -> None:
    rb = learner()
    rb.extend(numbered(0, 3))
    plan = rb.plan
    rb.extend(numbered(0, 3))
    rb.sample()
    assert rb.plan is plan
    rb.set_sampler(SamplerWithoutReplacement())
    assert rb.plan is not plan
    assert rb.plan.fast_read is None
    assert len(rb.sample(4)) == 4


def test_the_next_call_finds_the_first_write_of_another_handle(tmp_path: Path) -> None:
    def handle() -> TensorDictPrioritizedReplayBuffer:
        storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer", shared_init=True)
        return TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=storage, batch_size=4
        )

    late, first = handle(), handle()
    first.extend(numbered(0, 4).set("td_error", torch.tensor([0.0, 0.0, 5.0, 0.0])))
    assert late.sampler.default_priority == 5.0  # requested before anything else
    assert set(late.sample()["number"].tolist()) == {2}
    assert late.plan.fast_read is not None


def test_a_column_that_is_added_ends_the_fast_ways_of_every_buffer_on_the_storage() -> None:
    storage = LazyTensorStorage(8)
    one, other = (TensorDictReplayBuffer(storage=storage, batch_size=2) for _ in range(2))
    one.extend(numbered(0, 4))
    other.sample()
    assert other.plan.fast_write is not None
    one["b"] = torch.ones(4)
    other.extend(numbered(0, 2).set("b", torch.zeros(2)))
    assert other.plan.fast_write is None
    assert other[:]["b"].tolist() == [1, 1, 1, 1, 0, 0]
    assert {"number", "b"} <= other.sample().keys()


def test_priorities_go_with_the_write_that_says_again_what_an_item_is() -> None:
    rb = learner()
    rb.extend(numbered(0, 3).set("td_error", torch.ones(3)))
    rb.sample()
    rb.empty()
    rb.extend(TensorDict({"b": torch.arange(3.0), "td_error": torch.tensor([0.0, 3.0, 0.0])}, [3]))
    assert set(rb.sample()["b"].tolist()) == {1.0}


@pytest.mark.parametrize("count", [3, 0])
def test_the_first_items_of_a_list_may_come_one_by_one(count: int) -> None:
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage(8), batch_size=2)
    rb.extend(torch.full((2,), float(at)) for at in range(count))
    assert len(rb) == count


def test_a_sampler_finds_the_ring_that_its_storage_got_meanwhile() -> None:
    storage = LazyTensorStorage(4)
    sampler = PrioritizedSampler(4, alpha=1.0, beta=1.0, eps=0.0)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
    storage.set(range(3), torch.arange(3))
    sampler.update_priority(torch.arange(3), torch.tensor([0.0, 2.0, 0.0]))
    assert ring_of(storage).tree.prioritized
    assert set(rb.sample().tolist()) == {1}
