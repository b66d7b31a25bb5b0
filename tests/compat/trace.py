"""Runs programs on both families step by step, with the list of known differences."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tests.compat.family import ours, outcome, same, theirs

DOCUMENT = Path(__file__).parents[2] / "docs" / "torchrl.md"

# Known differences: the name of each, and the words that describe it in docs/torchrl.md.
DEVIATIONS = {
    "index out of range": "An index that is out of range raises an `IndexError`",
    "rb[key] = value": '`rb["key"] = value` changes a copy',
    "priorities that are none": "NaN, infinite and negative priorities are accepted",
    "last columns of an ensemble": "The next pass begins within the batch",
    "len of what is consumed": "`len(rb)` with a `ConsumingSampler` is the number of items that",
    "order of what is consumed": "A `ConsumingSampler` samples at random, and writes overwrite",
    "state of what is consumed": "The `state_dict` with a `ConsumingSampler` contains how often",
}

Step = Callable[..., None]
Program = Callable[[Any, Step], None]


@dataclass
class Scenario:
    """A program, and its differing steps: the label of the step and the name of the deviation."""

    program: Program
    deviations: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.program.__name__


def without_own_names(value: Any, names: frozenset[str]) -> Any:
    """Returns a description without the entries that only one family has."""
    if isinstance(value, tuple) and value and value[0] == "tensordict":
        kept = {
            key: without_own_names(one, names) for key, one in value[2].items() if key not in names
        }
        return ("tensordict", value[1], kept)
    if isinstance(value, dict):
        return {
            key: without_own_names(one, names) for key, one in value.items() if key not in names
        }
    if isinstance(value, (list, tuple)):
        return type(value)(without_own_names(one, names) for one in value)
    return value


def trace(program: Program, family: Any, hidden: frozenset[str]) -> list[tuple[str, Any]]:
    """Returns the outcomes of the steps of a program, each of which begins with the same seed."""
    steps: list[tuple[str, Any]] = []

    def step(label: str, call: Callable[[], Any], *, values: bool = True) -> None:
        torch.manual_seed(0)
        steps.append((label, without_own_names(outcome(call, values=values), hidden)))

    with collected_only_between():
        program(family, step)
    return steps


@contextmanager
def collected_only_between() -> Iterator[None]:
    """Collects garbage first, and disables collection until the end of the block.

    TorchRL's storages hold semaphores. Python's resource tracker raises if one is finalized while
    another one is created.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_the_same(
    scenario: Scenario, hidden: frozenset[str] = frozenset({"_weight", "priority_weight"})
) -> None:
    """Checks that both families agree, except for deviations, all of which must occur."""
    mine = trace(scenario.program, ours, hidden)
    other = trace(scenario.program, theirs, hidden)
    assert [label for label, _ in mine] == [label for label, _ in other]
    labels = [label for label, _ in mine]
    assert len(labels) == len(set(labels)), "two steps have one label"
    assert set(scenario.deviations) <= set(labels)
    wrong = []
    for (label, one), (_, two) in zip(mine, other, strict=True):
        known = scenario.deviations.get(label)
        if same(one, two) and known is not None:
            wrong.append(f"{label}: no difference any more ({known})")
        elif not same(one, two) and known is None:
            wrong.append(f"{label}:\n    ours:    {_said(one)}\n    TorchRL: {_said(two)}")
    assert not wrong, "\n".join(wrong)


def _said(value: Any) -> str:
    return f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)


def batch(start: int, stop: int, **more: torch.Tensor) -> TensorDict:
    """Makes items ``[stop - start]`` with an id and a row that follows from it."""
    number = torch.arange(start, stop)
    row = number.unsqueeze(-1) * torch.tensor([1.0, 10.0])
    return TensorDict({"id": number, "obs": row, **more}, [stop - start])


def episodes(*lengths: int, first: int = 0) -> TensorDict:
    """Makes consecutive trajectories of these lengths, with the flags of their last steps."""
    count = sum(lengths)
    number = torch.arange(first, first + count)
    last = torch.zeros(count, 1, dtype=torch.bool)
    last[torch.tensor(lengths).cumsum(0) - 1] = True
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TensorDict(
        {
            "id": number,
            "episode": of + first,
            "next": TensorDict(
                {"done": last, "terminated": last.clone(), "truncated": torch.zeros_like(last)},
                [count],
            ),
        },
        [count],
    )
