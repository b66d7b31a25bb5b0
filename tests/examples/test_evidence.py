"""The items themselves show whether one was lost or torn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, TensorDictReplayBuffer
from shmbuffer.examples.evidence import SIGNED, Ledger, examine, stamps, torn


def rows(n: int) -> TensorDict:
    after = {
        "observation": torch.randn(n, 4),
        "reward": torch.rand(n),
        "terminated": torch.rand(n) < 0.5,
    }
    return TensorDict(
        {
            "observation": torch.randn(n, 4),
            "action": torch.randint(2, (n,)),
            "gamma": torch.rand(n),
            "next": TensorDict(after, [n]),
        },
        [n],
    )


def buffer(path: Path, capacity: int = 64) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=path / "buffer"))


def write(rb: TensorDictReplayBuffer, ledger: Ledger, n: int) -> None:
    rb.extend(ledger.sign(rows(n)))
    ledger.acknowledge()


def test_acknowledged_items_are_there_and_whole(tmp_path: Path) -> None:
    with buffer(tmp_path) as rb, Ledger(tmp_path, 0) as one, Ledger(tmp_path, 1) as two:
        for ledger in (one, two, one):
            write(rb, ledger, 5)
        found = examine(rb, tmp_path)
    assert (found.items, found.acknowledged) == (15, 15)
    assert (found.lost, found.torn, found.repeated, found.unacknowledged) == (0, 0, 0, 0)


@pytest.mark.parametrize("key", SIGNED)
def test_a_row_does_not_fit_its_stamp_if_a_bit_of_it_is_another(
    tmp_path: Path, key: str | tuple[str, ...]
) -> None:
    with Ledger(tmp_path, 0) as ledger:
        batch = ledger.sign(rows(6))
    leaf = batch[key].reshape(6, -1).view(torch.uint8)
    leaf[4, -1] ^= 1
    assert torn(batch) == 1
    assert (stamps(batch) == batch["stamp"]).tolist() == [True] * 4 + [False, True]


def test_a_torn_item_is_counted(tmp_path: Path) -> None:
    with buffer(tmp_path) as rb, Ledger(tmp_path, 0) as ledger:
        batch = ledger.sign(rows(4))
        batch["gamma"][2] += 1.0
        rb.extend(batch)
        ledger.acknowledge()
        assert examine(rb, tmp_path).torn == 1


def test_an_acknowledged_item_that_is_not_there_is_lost(tmp_path: Path) -> None:
    with buffer(tmp_path) as rb, Ledger(tmp_path, 0) as ledger:
        write(rb, ledger, 3)
        ledger.sign(rows(2))
        write(rb, ledger, 3)
        assert examine(rb, tmp_path).lost == 2


def test_all_is_lost_if_nothing_was_ever_written(tmp_path: Path) -> None:
    with buffer(tmp_path) as rb, Ledger(tmp_path, 0) as ledger:
        ledger.sign(rows(2))
        ledger.acknowledge()
        assert examine(rb, tmp_path).lost == 2


def test_an_item_whose_writer_never_knew_is_no_loss(tmp_path: Path) -> None:
    with buffer(tmp_path) as rb, Ledger(tmp_path, 0) as ledger:
        write(rb, ledger, 3)
        rb.extend(ledger.sign(rows(2)))
        found = examine(rb, tmp_path)
    assert (found.lost, found.unacknowledged) == (0, 2)


def test_an_overwritten_item_is_not_lost(tmp_path: Path) -> None:
    with buffer(tmp_path, 8) as rb, Ledger(tmp_path, 0) as old, Ledger(tmp_path, 1) as new:
        write(rb, old, 4)
        for _ in range(3):
            write(rb, new, 5)
        found = examine(rb, tmp_path)
    assert (found.items, found.acknowledged, found.lost) == (8, 19, 0)


def test_an_item_of_a_full_ring_is_lost_if_an_older_one_survives(tmp_path: Path) -> None:
    with buffer(tmp_path, 8) as rb, Ledger(tmp_path, 0) as ledger:
        write(rb, ledger, 8)
        ledger.sign(rows(1))
        write(rb, ledger, 2)
        assert examine(rb, tmp_path).lost == 1


def test_an_item_that_is_there_twice_is_counted(tmp_path: Path) -> None:
    with buffer(tmp_path) as rb, Ledger(tmp_path, 0) as ledger:
        batch = ledger.sign(rows(3))
        rb.extend(batch)
        rb.extend(batch)
        ledger.acknowledge()
        found = examine(rb, tmp_path)
    assert (found.repeated, found.lost) == (3, 0)


def test_every_life_of_a_collector_has_a_ledger_of_its_own(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as first, Ledger(tmp_path, 0) as second, Ledger(tmp_path, 1) as other:
        assert len({first.source, second.source, other.source}) == 3


def test_an_acknowledgement_that_was_cut_off_counts_for_nothing(tmp_path: Path) -> None:
    with buffer(tmp_path) as rb, Ledger(tmp_path, 0) as ledger:
        write(rb, ledger, 3)
        [file] = tmp_path.glob("*.ledger")
        file.write_bytes(file.read_bytes() + b"\xff\xff\xff")
        found = examine(rb, tmp_path)
    assert (found.acknowledged, found.lost) == (3, 0)
