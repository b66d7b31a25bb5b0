"""Functions of TorchRL that need no buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    DEFAULT_DONE_KEYS,
    find_start_stop_traj,
    pin_memory_output,
    tree_iter,
    unravel_index,
)


def pieces(last: torch.Tensor, cursor: int | None, *, circle: bool) -> list[tuple[Any, ...]]:
    """Returns (column, first step, last step, length) column by column, step by step."""
    found = []
    flat = last.reshape(len(last), -1)
    for column in range(flat.shape[1]):
        ends = set(flat[:, column].nonzero().flatten().tolist())
        if not circle or not (ends | ({cursor} - {None})):
            ends.add(len(last) - 1)
        if circle and cursor is not None:
            ends.add(cursor)
        before = max(ends) - len(last)
        for end in sorted(ends):
            found.append((column, (before + 1) % len(last), end, end - before))
            before = end
    return found


@pytest.mark.parametrize("circle", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (7, 3), (5, 1)])
@pytest.mark.parametrize("cursor", [None, 0])
def test_trajectories_are_those_found_step_by_step(
    circle: bool, shape: tuple[int, ...], cursor: int | None
) -> None:
    random = np.random.default_rng(len(shape) + circle)
    for _ in range(30):
        last = torch.from_numpy(random.random(shape) < 0.3)
        kept = last.clone()
        start, stop, lengths = find_start_stop_traj(end=last, at_capacity=circle, cursor=cursor)
        assert torch.equal(last, kept)
        columns = stop[:, 1].tolist() if len(shape) > 1 else [0] * len(stop)
        found = zip(columns, start[:, 0].tolist(), stop[:, 0].tolist(), lengths.tolist())  # noqa: B905
        before = None if not circle else cursor
        assert list(found) == [
            (column, first if circle else end - length + 1, end, length)
            for column, first, end, length in pieces_of(last, before, circle)
        ]
        if len(shape) > 1:
            assert torch.equal(start[:, 1], stop[:, 1])


def pieces_of(last: torch.Tensor, cursor: int | None, circle: bool) -> list[tuple[Any, ...]]:
    """Returns the `pieces`; without wraparound, the first trajectory begins at row 0."""
    found = pieces(last, cursor, circle=circle)
    if circle:
        return found
    return [
        (column, 0, end, end + 1) if at == 0 or found[at - 1][0] != column else found[at]
        for at, (column, _, end, _) in enumerate(found)
    ]


def test_an_id_that_changes_ends_a_trajectory_also_around_the_circle() -> None:
    ids = torch.tensor([5, 5, 7, 7, 5])
    for circle, starts, lengths in ((True, [4, 2], [3, 2]), (False, [0, 2, 4], [2, 2, 1])):
        start, stop, length = find_start_stop_traj(trajectory=ids, at_capacity=circle)
        assert start.flatten().tolist() == starts
        assert length.tolist() == lengths
        assert ((start.flatten() + length - 1) % 5).tolist() == stop.flatten().tolist()
    start, _, _ = find_start_stop_traj(trajectory=ids, at_capacity=True, cursor=range(3, 5))
    assert start.flatten().tolist() == [0, 2, 4]  # the last row of the cursor is an end


def test_rows_that_say_nothing_are_refused() -> None:
    for given in ({}, {"end": torch.ones(2), "trajectory": torch.ones(2)}):
        with pytest.raises(TypeError, match="pass either trajectory or end"):
            find_start_stop_traj(at_capacity=True, **given)
    for rows in (torch.ones(0), torch.tensor(True)):
        with pytest.raises(RuntimeError, match="must have at least one row, but its shape is"):
            find_start_stop_traj(end=rows, at_capacity=True)
    for cursor in (range(0), torch.ones(0), "last"):
        with pytest.raises(RuntimeError, match="cursor must be a row, or several rows of which"):
            find_start_stop_traj(end=torch.zeros(3).bool(), at_capacity=True, cursor=cursor)


def test_the_output_is_pinned_where_the_object_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "shmbuffer.torchrl.functions.pin", lambda data: seen.append(data) or "pinned"
    )

    @pin_memory_output
    def read(self: Any, value: Any, *, twice: bool = False) -> Any:
        """What it does."""
        return (value, value) if twice else value

    assert read.__doc__ == "What it does."
    assert read(SimpleNamespace(_pin_memory=False), 3) == 3
    assert not seen
    assert read(SimpleNamespace(_pin_memory=True), 3, twice=True) == "pinned"
    assert seen == [(3, 3)]


def test_leaves_coordinates_and_flags_are_torch_s() -> None:
    assert list(tree_iter({"a": [1, (2, 3)], "b": 4})) == [1, 2, 3, 4]
    found = unravel_index(torch.tensor([0, 5, 11]), (3, 4))
    assert [one.tolist() for one in found] == [[0, 1, 2], [0, 1, 3]]
    assert DEFAULT_DONE_KEYS == ("done", "truncated", "terminated")
    assert TensorDict({key: torch.zeros(1) for key in DEFAULT_DONE_KEYS}, [1]).batch_size == (1,)
