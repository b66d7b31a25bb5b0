"""Functions, trees and small methods: the same programs on both families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.trace import Scenario, Step, assert_the_same

# Every step is called where it is made, so that the loop variables in it are those of its round.
# ruff: noqa: B023


def trees(family: Any, step: Step) -> None:
    for name in ("SumSegmentTreeFp32", "SumSegmentTreeFp64"):
        for size in (2, 5, 16, 40):
            tree = getattr(family, name)(size)
            step(f"{name} {size} sizes", lambda: (len(tree), tree.size, tree.capacity))
            step(f"{name} {size} nothing", lambda: (tree.identity_element, tree.query(0, size)))
            numbers = torch.arange(size, dtype=tree_dtype(name)) % 7
            tree[torch.arange(size)] = numbers
            step(f"{name} {size} at", lambda: tree.at(torch.arange(size)))
            step(f"{name} {size} one", lambda: tree[size - 1])
            step(f"{name} {size} array", lambda: tree[np.arange(size)])
            tree.update(np.array([0, size - 1]), 3.0)
            ends = torch.tensor([0, size // 2]), torch.tensor([size, size])
            step(f"{name} {size} query", lambda: tree.query(*ends))
            total = tree.query(0, size)
            for value in (0.0, 2.5, total / 2, total, total + 1):
                step(f"{name} {size} scan {value}", lambda: tree.scan_lower_bound(value))
            sums = torch.tensor([0.5, total], dtype=tree_dtype(name))
            step(f"{name} {size} scan tensor", lambda: tree.scan_lower_bound(sums))
    for name in ("MinSegmentTreeFp32", "MinSegmentTreeFp64"):
        for size in (2, 5, 40):
            tree = getattr(family, name)(size)
            step(f"{name} {size} nothing", lambda: (tree.identity_element, tree.query(0, size)))
            tree[torch.arange(size)] = 3 - torch.arange(size, dtype=tree_dtype(name)) % 5
            step(f"{name} {size} at", lambda: tree[torch.arange(size)])
            step(f"{name} {size} query", lambda: tree.query(0, size))
            step(f"{name} {size} part", lambda: tree.query(size // 3, size // 2 + 1))


def tree_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("32") else torch.float64


def boundaries(family: Any, step: Step) -> None:
    torch.manual_seed(1)
    for shape in ((1,), (9,), (9, 2), (6, 2, 3)):
        for density in (0.0, 0.3, 1.0):
            end = torch.rand(shape) < density
            ids = torch.randint(3, shape)
            for full in (False, True):
                for cursor in (None, 0, torch.tensor([2, 0]), range(1)):
                    name = f"{shape} {density} {full} {cursor}"
                    step(
                        f"end {name}",
                        lambda: family.find_start_stop_traj(
                            end=end, at_capacity=full, cursor=cursor
                        ),
                    )
                    step(
                        f"ids {name}",
                        lambda: family.find_start_stop_traj(
                            trajectory=ids, at_capacity=full, cursor=cursor
                        ),
                    )
    step("neither", lambda: family.find_start_stop_traj(at_capacity=True))
    step("no rows", lambda: family.find_start_stop_traj(end=torch.zeros(0), at_capacity=True))


def functions(family: Any, step: Step) -> None:
    step("leaves", lambda: list(family.tree_iter({"a": [1, (2, 3)], "b": 4})))
    step("coordinates", lambda: family.unravel_index(torch.arange(12).view(2, 6), (2, 3, 2)))

    class Reader:
        _pin_memory = False

        @family.pin_memory_output
        def read(self, value: Any) -> Any:
            return value, 1

    step("not pinned", lambda: Reader().read(torch.arange(3)))


SCENARIOS = [Scenario(trees), Scenario(boundaries), Scenario(functions)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_both_families_do_the_same(scenario: Scenario) -> None:
    assert_the_same(scenario)
