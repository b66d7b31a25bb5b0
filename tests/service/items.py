"""Items without torch that contain a number twice, so that torn items are detected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format.leaf import Leaf
from shmbuffer.memory.format.schema import Schema

LEAVES = (Leaf(("number",), "int64", ()), Leaf(("next", "number"), "int64", ()))


def create(path: Path, capacity: int = 64) -> Engine:
    return Engine.open(path, Settings(capacity=capacity, alpha=0.6), existing="error")


def write(engine: Engine, numbers: Iterable[int]) -> None:
    values = np.array(list(numbers), np.int64)
    ring = engine.ring() or engine.define(
        Schema(LEAVES, engine.settings.capacity, (), {"kind": "tensordict"})
    )
    ring.write([values.ctypes.data, values.ctypes.data], len(values))


def read(engine: Engine) -> list[int]:
    """Returns the numbers of all committed items in storage order; fails on a torn item."""
    ring = engine.ring()
    if ring is None:
        return []
    index = ring.live.committed()
    first, second = np.empty(len(index), np.int64), np.empty(len(index), np.int64)
    tickets = np.empty(len(index), np.int64)
    missing = ring.read(
        index.ctypes.data,
        len(index),
        [first.ctypes.data, second.ctypes.data],
        tickets.ctypes.data,
    )
    assert missing == 0
    assert (first == second).all()
    return [int(number) for number in first]
