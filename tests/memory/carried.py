"""Weights that repeat one number in all their values, so that a mixture of two is detected."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuffer import CorruptBufferError, Weights
from shmbuffer.memory import Engine, weights

SIZE = 300


def of(number: int, size: int = SIZE) -> dict[str, Any]:
    """Makes weights that contain this number only."""
    return {
        "layer.weight": np.full((size, 3), number, np.float32),
        "layer.bias": np.full(7, number, np.float64),
        "nothing": np.empty((0, 4), np.float32),
        "norm": {"mean": np.full(size, number % 251, np.uint8), "seen": np.int64(number)},
    }


def number_in(found: Weights | None) -> int:
    """Returns the number in the weights; fails on a mixture, or on another step or other names."""
    assert found is not None, "there are no weights"
    state: dict[str, Any] = found.state_dict
    number = int(state["norm"]["seen"])
    wanted = of(number, len(state["norm"]["mean"]))
    assert list(state) == list(wanted)
    for name in ("layer.weight", "layer.bias", "nothing"):
        assert state[name].dtype == wanted[name].dtype
        assert np.array_equal(state[name], wanted[name]), f"weights {number} are torn in {name}"
    assert np.array_equal(state["norm"]["mean"], wanted["norm"]["mean"]), "the weights are torn"
    assert found.step == 10 * number
    return number


def publish(engine: Engine, number: int, *, size: int = SIZE, **options: Any) -> int:
    """Publishes weights that contain this number, with ten times the number as step."""
    return weights.publish_arrays(engine.seat, of(number, size), 10 * number, **options)


def newest(engine: Engine, than: int | None = None) -> Weights | None:
    """Returns the newest weights, whose checksum must match if they are found."""
    try:
        return weights.newest_arrays(engine.seat, than)
    except CorruptBufferError as error:
        raise AssertionError(f"the newest weights are torn: {error}") from error
