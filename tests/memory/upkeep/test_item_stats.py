"""Item statistics by age, writer and priority, without locks or changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmbuffer import BufferNotFoundError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format.layout import SlotState
from shmbuffer.memory.upkeep import item_stats
from tests.crash import harness
from tests.kit.rings import ring_of
from tests.memory.rows import Rows, schema, write


def test_items_have_age_source_priority_and_mass(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8, alpha=0.5, eps=0.0), role="collector") as first:
        write(first.define(schema()), range(3))
        with Engine.open(path, None, role="learner") as second:
            write(ring_of(second), range(3, 5))
            ring_of(first).update(np.array([0, 4]), np.array([4.0, 9.0]))
            found = item_stats.take(path)
            assert found is not None
            assert found.share == 1.0
            assert found.ages.tolist() == [4, 3, 2, 1, 0]
            assert found.sources.tolist() == [1, 1, 1, 2, 2]
            assert found.priorities[[0, 4]].tolist() == [4.0, 9.0]
            assert found.masses[[0, 4]].tolist() == [2.0, 3.0]
            assert found.masses.sum() == pytest.approx(ring_of(first).tree.p_sum)
            roles = {number: one.role for number, one in found.writers.items()}
            assert roles == {1: "collector", 2: "learner"}
            assert all(one.living for one in found.writers.values())
    found = item_stats.take(path)
    assert found is not None
    assert not any(one.living for one in found.writers.values())


def test_the_streams_of_a_writer_are_one_writer(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8, alpha=0.5), role="collector") as engine:
        ring = engine.define(schema())
        rows = Rows.of(ring.schema.leaves, np.arange(3))
        ring.write(rows.addresses, 3, streams=np.array([0, 7, 2**24 - 1], np.uint32))
        found = item_stats.take(path)
        assert found is not None
        assert found.sources.tolist() == [1, 1, 1]
        assert {writer.role for writer in found.writers.values()} == {"collector"}


def test_only_committed_items_count(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8, alpha=0.5)) as engine:
        ring = engine.define(schema())
        write(ring, range(6))
        ring.live.words[2] |= np.uint64(SlotState.ABORTED)
        ring.live.words[4] = 0
        found = item_stats.take(path)
        assert found is not None
        assert found.ages.tolist() == [5, 4, 2, 0]


def test_items_with_lanes_count_elements(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=4, ndim=2, alpha=0.5)) as engine:
        ring = engine.define(schema(4, lanes=(3,)))
        write(ring, range(6))
        found = item_stats.take(path)
        assert found is not None
        assert found.ages.tolist() == [3, 3, 3, 0, 0, 0]
        assert len(found.masses) == len(found.priorities) == len(found.sources) == 6


def test_of_a_large_buffer_some_items_are_looked_at(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_stats, "MAX_SLOTS", 3)
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8, alpha=0.5)) as engine:
        write(engine.define(schema()), range(8))
        found = item_stats.take(path)
        assert found is not None
        assert found.share == 3 / 8
        assert found.ages.tolist() == [7, 4, 1]


def test_records_and_buffers_without_priorities_have_items_too(fast_path: Path) -> None:
    path = fast_path / "records"
    with Engine.open(path, harness.settings("records")) as engine:
        harness.write(engine.define(harness.schema("records")), range(5))
        found = item_stats.take(path)
        assert found is not None
        assert (len(found.ages), len(found.masses)) == (5, 5)
    path = fast_path / "uniform"
    with Engine.open(path, Settings(capacity=8)) as engine:
        write(engine.define(schema()), range(5))
        found = item_stats.take(path)
        assert found is not None
        assert (len(found.ages), len(found.masses)) == (5, 0)


def test_a_writer_whose_place_another_one_has_is_not_known(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8, alpha=0.5)) as engine:
        write(engine.define(schema()), range(2))
    with Engine.open(path, None):
        found = item_stats.take(path)
        assert found is not None
        assert found.writers == {1: item_stats.ItemWriter(1, None, "", False)}


def test_before_the_first_write_there_is_nothing(fast_path: Path) -> None:
    with Engine.open(fast_path / "empty", Settings(capacity=8)):
        assert item_stats.take(fast_path / "empty") is None
    with pytest.raises(BufferNotFoundError):
        item_stats.take(fast_path / "none")
