"""Random calls on both libraries: indices, lengths, cursors, contents, forms of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.compat.trace import Scenario, Step, assert_the_same
from tests.kit.items import Transition

CAPACITY = 5


def made_batch(form: str, count: int, seed: int) -> Any:
    """A batch of ``count`` random items in one of the forms."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randint(0, 100, (count, 3), generator=generator)
    reward = torch.rand(count, generator=generator)
    rank = {"rank": reward.clone()}
    match form:
        case "tensor":
            return obs
        case "tensordict":
            inside = TensorDict({"obs": obs + 1}, [count])
            return TensorDict({"obs": obs, "reward": reward, "next": inside, **rank}, [count])
        case "tensorclass":
            return Transition(obs=obs, reward=reward, batch_size=[count])
        case "tuple":
            return (obs, reward)
        case "dict":
            return {"x": obs, "y": (reward, [{"z": obs * 2}])}
        case _:
            return [TensorDict({"obs": obs[at], "reward": reward[at]}, []) for at in range(count)]


def made_item(form: str, seed: int) -> Any:
    """Makes a random item."""
    data = made_batch(form, 1, seed)
    if form == "tuple":
        return tuple(leaf[0] for leaf in data)
    if form == "dict":
        reward, (more,) = data["y"]
        return {"x": data["x"][0], "y": (reward[0], [{"z": more["z"][0]}])}
    return data[0]


Call = Callable[[Any], Any]


def call(name: str, form: str, one: int, two: int, seed: int, count: int) -> Call | None:
    """Makes an operation of the buffer, or None if its slots hold no item.

    Args:
        name: the operation.
        form: form of the data.
        one: a number of items, or a slot.
        two: another number or slot.
        seed: seed of the data.
        count: number of stored items.
    """
    match name:
        case "extend":
            return lambda rb: rb.extend(made_batch(form, one + 1, seed))
        case "add":
            return lambda rb: rb.add(made_item(form, seed))
        case "len":
            return lambda rb: (len(rb), len(rb.storage), rb.write_count, rb.writer._cursor)
        case "sample":
            return lambda rb: rb.sample(one + 1)
        case "sample with info":
            return lambda rb: rb.sample(one + 1, return_info=True)
        case "empty":
            return lambda rb: rb.empty()
        case "empty, and count on":
            return lambda rb: rb.empty(empty_write_count=False)
        case "contains":
            return lambda rb: [bool(rb.storage.contains(at)) for at in range(CAPACITY)]
    if not count:
        return None
    one, two = one % count, two % count
    match name:
        case "read all":
            return lambda rb: rb[:]
        case "read one":
            return lambda rb: rb[one]
        case "read from the end":
            return lambda rb: rb[-one - 1]
        case "read a list":
            return lambda rb: rb[[one, two]]
        case "read a tensor":
            return lambda rb: rb[torch.tensor([one, two])]
        case "read a slice":
            return lambda rb: rb[min(one, two) : max(one, two) + 1]
        case "read in order":
            return lambda rb: rb.read_all_in_order(end=one + 1)
        case "write one":
            return lambda rb: rb.__setitem__(one, made_item(form, seed))
        case "write a slice":
            return lambda rb: rb.__setitem__(slice(0, one + 1), made_batch(form, one + 1, seed))
        case "write a list" if one != two:
            return lambda rb: rb.__setitem__([one, two], made_batch(form, 2, seed))
        case "write all":
            return lambda rb: rb.write_all(made_batch(form, count, seed))
        case "update a priority":
            return lambda rb: rb.update_priority(torch.tensor([one]), torch.tensor([two + 1.0]))
        case "update priorities":
            index = torch.arange(count)
            return lambda rb: rb.update_priority(index, torch.arange(count) + 0.5)
    return None


def writable(form: str, writer: str, name: str) -> bool:
    """True if TorchRL can change items of this form in place and records the change."""
    if writer == "max value":
        return False  # it keeps the ranks of the replaced items
    return form not in ("tuple", "dict") or name == "write one"  # it confuses entries and items


OPERATIONS = [
    "extend", "extend", "add", "len", "sample", "sample with info", "empty", "empty, and count on",
    "contains", "read all", "read one", "read from the end", "read a list", "read a tensor",
    "read a slice", "read in order", "write one", "write a slice", "write a list", "write all",
    "update a priority", "update priorities",
]  # fmt: skip

operations = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS),
        st.integers(0, 6),
        st.integers(0, 6),
        st.integers(0, 2**31),
    ),
    min_size=1,
    max_size=12,
)

STORAGES = (
    "ListStorage",
    "LazyStackStorage",
    "CompressedListStorage",
    "LazyTensorStorage",
    "LazyMemmapStorage",
)
SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "random": lambda family: family.RandomSampler(),
    "without replacement": lambda family: family.SamplerWithoutReplacement(),
    "in order": lambda family: family.SamplerWithoutReplacement(shuffle=False),
    "prioritized": lambda family: family.PrioritizedSampler(CAPACITY, 0.7, 0.9),
}
WRITERS: dict[str, Callable[[Any], Any]] = {
    "round robin": lambda family: family.RoundRobinWriter(),
    "tensordict round robin": lambda family: family.TensorDictRoundRobinWriter(),
    "max value": lambda family: family.TensorDictMaxValueWriter(rank_key="rank"),
}


def forms_of(storage: str, cls: str, writer: str) -> list[str]:
    """Returns the forms of data that both families support for these parts."""
    if cls == "TensorDictReplayBuffer" or writer != "round robin":
        return ["tensordict"]
    if storage in ("LazyStackStorage", "CompressedListStorage"):
        return ["tensordict", "list"]
    if storage == "ListStorage":
        return ["tensor", "tensordict", "tensorclass", "list"]
    return ["tensor", "tensordict", "tensorclass", "tuple", "dict", "list"]


# A test makes a hundred buffers, each with semaphores and files.
pytestmark = pytest.mark.timeout(600)

CASES = [
    (storage, cls, writer)
    for storage in STORAGES
    for cls in ("ReplayBuffer", "TensorDictReplayBuffer")
    for writer in WRITERS
]


@pytest.mark.parametrize(("storage", "cls", "writer"), CASES)
@settings(max_examples=12)
@given(data=st.data(), steps=operations, sampler=st.sampled_from(sorted(SAMPLERS)))
def test_random_calls_have_the_same_outcomes(
    storage: str,
    cls: str,
    writer: str,
    data: st.DataObject,
    steps: list[tuple[str, int, int, int]],
    sampler: str,
) -> None:
    form = data.draw(st.sampled_from(forms_of(storage, cls, writer)))

    def program(family: Any, step: Step) -> None:
        rb = getattr(family, cls)(
            storage=getattr(family, storage)(CAPACITY),
            sampler=SAMPLERS[sampler](family),
            writer=WRITERS[writer](family),
        )
        emptied_list = False
        for number, (name, one, two, seed) in enumerate(steps):
            if emptied_list and name in ("extend", "add"):
                return  # TorchRL's lists keep their cursor and refuse the next write
            if name.startswith("write") and not writable(form, writer, name):
                continue
            made = call(name, form, one, two, seed, len(rb))
            drawn = name.startswith("sample") and sampler != "in order"
            if made is not None:
                step(f"{number}: {name}", lambda made=made: made(rb), values=not drawn)
            emptied_list |= name.startswith("empty") and storage not in (
                "LazyTensorStorage",
                "LazyMemmapStorage",
            )

    # TorchRL's TensorDictRoundRobinWriter stores "index", which only samples have here.
    hidden = {"_weight", "priority_weight", "index"}
    assert_the_same(Scenario(program), frozenset(hidden))
