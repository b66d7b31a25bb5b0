"""The whole payload: a consistent copy, a restore, and its adoption in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorStorage
from shmbuffer.storages.movers.tensor_rows import Rows
from tests.kit.rings import engine_of, ring_of


def learner(storage: Any) -> TensorDictPrioritizedReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=8)


def steps(n: int, first: int = 0) -> TensorDict:
    a = torch.arange(first, first + n)
    return TensorDict({"a": a, "c": a[:, None] * torch.ones(3), "td_error": a.double()}, [n])


def columns_of(rows: Rows) -> list[torch.Tensor]:
    return [
        torch.zeros((rows.ring.capacity, *rows.leaves.lanes, *leaf.shape), dtype=dtype)
        for leaf, dtype in zip(rows.leaves.leaves, rows.leaves.dtypes, strict=True)
    ]


def test_rows_that_were_copied_out_can_be_copied_in(make: Any) -> None:
    rb = learner(make(8))
    rb.extend(steps(11))
    ring_of(rb).claims.claim(2)
    ring_of(rb).claims.abort()
    columns = columns_of(rb.storage.mover())
    moment = rb.storage.mover().copy_out(columns)
    assert columns[0].tolist()[:3] == [8, 9, 10]
    assert moment.tickets.tolist() == [8, 9, 10, -1, -1, 5, 6, 7]

    other = learner(make(8))
    other.extend(steps(2, 50))
    other.storage.mover().copy_in(
        columns,
        np.flatnonzero(moment.tickets >= 0),
        np.flatnonzero(moment.tickets >= 0),
        cursor=moment.head % 8,
        write_count=moment.write_count,
    )
    assert torch.equal(other[:]["a"], rb[:]["a"])
    assert torch.equal(other[:]["c"], rb[:]["c"])
    assert ring_of(other).live.committed().tolist() == [0, 1, 2, 5, 6, 7]
    assert other.write_count == 11
    assert (
        other.extend({**steps(1, 90).exclude("td_error"), "td_error": torch.ones(1).double()})[0]
        == ring_of(rb).head % 8
    )
    assert engine_of(other).check().ok


def test_wide_slots_come_back_in(make: Any) -> None:
    one, other = (
        learner(make(12, ndim=2)),
        learner(make(12, ndim=2)),
    )
    data = TensorDict({"a": torch.arange(15).view(3, 5)}, [3, 5])
    one.extend(data)
    columns = columns_of(one.storage.mover())
    moment = one.storage.mover().copy_out(columns)
    other.extend(data[:, :1] * 0)
    held = np.flatnonzero(moment.tickets >= 0)
    other.storage.mover().copy_in(columns, held, held, cursor=1, write_count=15)
    assert other[:]["a"].tolist() == one[:]["a"].tolist()


def test_bytes_that_are_in_place_become_items(make: Any) -> None:
    rb = learner(make(6))
    rb.extend(steps(6))
    rb.empty()
    present = np.array([0, 1, 3])
    rb.storage.mover().copy_in(None, present, present, cursor=4, write_count=40)
    assert rb[:]["a"].tolist() == [0, 1, 3]
    assert (len(rb), rb.write_count, ring_of(rb).cursor) == (3, 40, 4)
    assert engine_of(rb).check().ok


def test_the_last_row_for_a_repeated_element_stays(make: Any) -> None:
    rb = learner(make(6))
    rb.extend(steps(4))
    changed = rb.storage.mover().patch(np.array([1, 3, 1]), {0: torch.tensor([10, 30, 11])})
    assert changed.tolist() == [True] * 3
    assert rb[:]["a"].tolist() == [0, 11, 2, 30]
    assert (rb[:]["c"][:, 0] == torch.arange(4)).all()


def test_rows_of_other_tickets_are_left_alone(make: Any) -> None:
    rb = learner(make(4))
    rb.extend(steps(6))
    changed = rb.storage.mover().patch(
        np.array([0, 1, 2, 3]), {0: torch.arange(4) - 10}, np.array([0, 5, 2, 7])
    )
    assert changed.tolist() == [False, True, True, False]
    assert rb[:]["a"].tolist() == [4, -9, -8, 3]


def test_the_callers_own_tensors_are_copied_out_too() -> None:
    data = steps(5)
    storage = TensorStorage(data)
    assert storage.mover() is not None
    columns = columns_of(storage.mover())
    moment = storage.mover().copy_out(columns)
    assert columns[0].tolist() == [0, 1, 2, 3, 4]
    assert (moment.tickets >= 0).all()
    storage.mover().copy_in(
        [c.flip(0) for c in columns], np.arange(5), np.arange(5), cursor=0, write_count=0
    )
    assert data["a"].tolist() == [4, 3, 2, 1, 0]


def test_a_copy_may_go_straight_into_a_file(tmp_path: Path) -> None:
    rb = learner(LazyTensorStorage(1000))
    rb.extend(steps(1500))
    rows = rb.storage.mover()
    columns = [
        torch.from_file(
            str(tmp_path / str(at)), shared=True, size=column.numel(), dtype=column.dtype
        ).view(column.shape)
        for at, column in enumerate(columns_of(rows))
    ]
    rows.copy_out(columns)
    again = torch.from_file(str(tmp_path / "0"), size=1000, dtype=torch.int64)
    assert sorted(again.tolist()) == list(range(500, 1500))
