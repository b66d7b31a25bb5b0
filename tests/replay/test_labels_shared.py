"""Versions and groups while collectors write and are killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import EmptyBufferError, PromptGroupSampler, StalenessAwareSampler
from tests.kit.rings import engine_of, ring_of
from tests.replay.label_oracle import by_age, expected, looked
from tests.replay.label_programs import SIZE, dies_at, items, opened, without_end
from tests.replay.test_following_shared import POINTS
from tests.replay.workers import began, collectors, kill, start

CAPACITY = 24


def columns(rb: Any, *names: str) -> list[Any]:
    """Returns entries of all slots as they are stored."""
    mover = rb.storage.mover()
    capacity = ring_of(rb).capacity
    if "records" not in str(rb.storage.scratch_dir.name):
        at = {leaf.path[0]: number for number, leaf in enumerate(mover.leaves.leaves)}
        return [mover.take(at[name], np.arange(capacity)).numpy() for name in names]
    held = np.flatnonzero(ring_of(rb).live.holds())
    found, _ = mover.entries(held, [(name,) for name in names])
    whole = np.full((len(names), capacity), -1)
    whole[:, held] = np.array([[int(one) for one in column] for column in found])
    return list(whole)


def whole_groups(rb: Any) -> set[tuple[int, ...]]:
    """Returns the items of all complete groups, computed from the ring itself."""
    keys, members = columns(rb, "query", "member")
    found: dict[int, list[int]] = {}
    for slot in by_age(ring_of(rb)).tolist():
        found.setdefault(int(keys[slot]), []).append(slot)
    groups = [one for one in found.values() if len(one) == SIZE]
    assert all({*members[one].tolist()} == {*range(SIZE)} for one in groups)
    return {tuple(sorted(one)) for one in groups}


def require_same(rb: Any, groups: PromptGroupSampler, stale: StalenessAwareSampler) -> None:
    """Checks that the indices of both samplers match the content of the ring."""
    (versions,) = columns(rb, "policy_version")
    assert looked(stale._index, rb.storage) == expected(ring_of(rb), versions)
    whole = whole_groups(rb)
    count = groups.groups.whole if groups.can_sample(rb.storage, SIZE) else 0
    assert count == len(whole)
    if count:
        index, _ = groups.sample(rb.storage, count * SIZE)
        assert {tuple(sorted(one)) for one in index.view(-1, SIZE).tolist()} == whole


@pytest.mark.slow
@pytest.mark.product("edits records", few=6)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("records", [False, True])
def test_what_is_drawn_is_right_when_a_writer_dies_at_any_step(
    tmp_path: Path, point: str, edits: bool, records: bool
) -> None:
    path = tmp_path / ("records" if records else "rows")
    groups = PromptGroupSampler(samples_per_group=SIZE, group_size=SIZE)
    stale = StalenessAwareSampler()
    with opened(path, CAPACITY) as rb:
        rb.extend(items(9, 0, 16))
        with collectors(dies_at, path, CAPACITY, 1) as (victim,):
            victim[1].send((point, 0, [3, 4, 9] if edits else []))
            assert victim[1].poll(50)
            assert victim[1].recv() == "wrote"
            require_same(rb, groups, stale)
            victim[1].send("go")
            victim[0].join(50)
            died = victim[0].exitcode == -signal.SIGKILL
            assert died or victim[1].recv() == "alive"
            ring_of(rb).totals()  # repairs the ring if the mutex was held
            engine_of(rb).seat.reap_dead()
            require_same(rb, groups, stale)
            for turn in range(4):
                rb.extend(items(9, 16 + 5 * turn, 5, turn))
                require_same(rb, groups, stale)
    assert groups.groups.withdrawn > 0


@pytest.mark.product(few=1)
@pytest.mark.slow
@pytest.mark.parametrize("records", [False, True])
def test_groups_and_versions_are_exact_beside_writers_that_are_killed(
    tmp_path: Path, records: bool
) -> None:
    path, capacity = tmp_path / ("records" if records else "rows"), 1200
    groups = PromptGroupSampler(samples_per_group=SIZE, group_size=SIZE, give_up_after=0.2)
    stale = StalenessAwareSampler(max_staleness=8)
    torch.manual_seed(0)
    with collectors(without_end, path, capacity, 3) as running:
        began(*running)
        with opened(path, capacity, groups) as rb, opened(path, capacity, stale) as other:
            drawn = weighed = 0
            for turn in range(6):
                for _ in range(60):
                    try:
                        batch = rb.sample(4 * SIZE)
                    except EmptyBufferError:
                        continue
                    keys, members = batch["query"].view(4, SIZE), batch["member"].view(4, SIZE)
                    assert (keys == keys[:, :1]).all()
                    assert len({*keys[:, 0].tolist()}) == 4
                    assert (members.sort(1).values == torch.arange(SIZE)).all()
                    payload = (batch["query"] * 10 + batch["member"])[:, None]
                    assert (batch["payload"] == payload).all()
                    drawn += 1
                    newest = int(batch["policy_version"].max())
                    other.sampler.consumer_version = newest  # type: ignore[attr-defined]
                    try:
                        fresh = other.sample(32)
                    except RuntimeError:  # older items have overwritten the fresh ones
                        continue
                    weighed += 1
                    assert (fresh["staleness"] == newest - fresh["policy_version"]).all()
                    assert (fresh["staleness"] <= 8).all()
                    assert (fresh["seal"] == fresh["policy_version"][:, None]).all()
                kill(running[turn % 3])
                running[turn % 3] = start(without_end, path, capacity, 3 + turn)
                assert running[turn % 3][1].poll(50)
            for each in running:
                kill(each)
            engine_of(rb).seat.reap_dead()
            assert drawn > 100
            assert weighed > 50
            found = {
                tuple(sorted(one))
                for _ in range(300)
                for one in rb.sample(SIZE)["index"].view(-1, SIZE).tolist()
            }
            assert found <= whole_groups(rb)
            assert groups.groups.withdrawn > 0
