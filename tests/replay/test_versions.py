"""Patches apply only if they are newer: in any storage, with duplicates, and under kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SchemaMismatchError,
    TensorDictReplayBuffer,
    TensorStorage,
)
from shmbuffer.memory.upkeep.check import check
from tests.replay import version_programs
from tests.replay.version_programs import items, opened
from tests.replay.workers import collectors, kill

STORAGES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda path: LazyTensorStorage(6),
    "held": lambda path: TensorStorage(data().zero_()),
    "directory": lambda path: LazyMemmapStorage(6, scratch_dir=path / "rows"),
    "records": lambda path: LazyStackStorage(
        6, scratch_dir=path / "records", shared_init=True, max_bytes=2**20
    ),
}


def data(*shape: int) -> TensorDict:
    version = torch.tensor([0, 1, 2, 3, 4, 5]).reshape(6, *shape)
    return TensorDict({"x": torch.zeros(6, 2), ("deep", "v"): version}, [6])


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return STORAGES[request.param](tmp_path)


def seen(rb: TensorDictReplayBuffer) -> tuple[list[float], list[int]]:
    found = [rb[at] for at in range(6)]
    return [float(one["x"][0]) for one in found], [int(one["deep", "v"]) for one in found]


@pytest.mark.product(few=4)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("newer", [False, True])
def test_an_item_with_a_newer_version_is_left_alone(
    storage: Any, shape: tuple[int, ...], newer: bool
) -> None:
    if isinstance(storage, TensorStorage) and storage.initialized:
        storage = TensorStorage(data(*shape).zero_())
    with TensorDictReplayBuffer(storage=storage) as rb:
        index = rb.extend(data(*shape))
        generation = rb.storage.tickets(index)
        generation[5] -= 6  # of the earlier item
        result = rb.update_if_present(
            index=index,
            generation=generation,
            patch={"x": torch.arange(1.0, 7.0)[:, None].expand(6, 2)},
            version_key=("deep", "v"),
            version=torch.tensor([2, 2, 2, 2, 2, 9]),
            require_newer=newer,
        )
        assert result.updated.tolist() == [True, True, not newer, False, False, False]
        assert result.version_rejected is not None
        assert result.version_rejected.tolist() == [False, False, newer, True, True, False]
        assert result.updated_count == 3 - newer
        assert result.version_rejected_count == 2 + newer
        assert result.stale_count == 1
        assert seen(rb) == ([1, 2, 0 if newer else 3, 0, 0, 0], [2, 2, 2, 3, 4, 5])
        # A rejected item is unchanged and can still be changed.
        again = rb.update_if_present(
            index=index[3:5],
            generation=generation[3:5],
            patch={"x": torch.ones(2, 2)},
            version_key=("deep", "v"),
            version=7,
        )
        assert again.updated.all()
        assert seen(rb)[1] == [2, 2, 2, 7, 7, 5]


def test_of_an_item_that_is_named_twice_the_highest_version_counts(storage: Any) -> None:
    with TensorDictReplayBuffer(storage=storage) as rb:
        index = rb.extend(data())
        at = torch.tensor([0, 3, 0, 3, 0, 3])
        generation = rb.storage.tickets(index)[at]
        generation[4] -= 6  # a stale generation of the same slot
        result = rb.update_if_present(
            index=index[at],
            generation=generation,
            patch={"x": torch.arange(1.0, 7.0)[:, None].expand(6, 2)},
            version_key=("deep", "v"),
            version=torch.tensor([8, 4, 5, 4, 9, 2]),
        )
        assert result.updated.tolist() == [True, False, False, True, False, False]
        assert result.version_rejected is not None
        assert result.version_rejected.tolist() == [False, True, True, False, False, True]
        assert seen(rb) == ([1, 0, 0, 4, 0, 0], [8, 1, 2, 4, 4, 5])


def test_elements_of_lanes_are_compared_each_for_itself() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6, ndim=2), batch_size=4)
    values = {"x": torch.zeros(2, 3), "v": torch.arange(6).view(2, 3)}
    where = tuple(rb.extend(TensorDict(values, [2, 3])).unbind(-1))
    stored, version = rb[:]["v"].T[where].clone(), torch.tensor([2, 0, 3, 3, 0, 9])
    result = rb.update_if_present(
        index=torch.stack(where, -1),
        generation=rb.storage.tickets(where),
        patch={"x": torch.ones(6)},
        version_key="v",
        version=version,
    )
    wins = version >= stored
    assert 0 < wins.sum() < 6
    assert torch.equal(result.updated, wins)
    assert torch.equal(rb[:]["v"].T[where], torch.maximum(version, stored))
    assert torch.equal(rb[:]["x"].T[where], wins.float())


def test_items_that_are_gone_are_stale_and_not_compared(storage: Any) -> None:
    with TensorDictReplayBuffer(storage=storage) as rb:
        index = rb.extend(data())
        generation = rb.storage.tickets(index)
        rb.empty()
        result = rb.update_if_present(
            index=index,
            generation=generation,
            patch={"x": torch.ones(6, 2)},
            version_key=("deep", "v"),
            version=9,
        )
        assert (result.updated_count, result.stale_count) == (0, 6)


def test_an_ensemble_compares_each_item_in_its_buffer() -> None:
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=SamplerWithoutReplacement())
        for _ in range(2)
    ]
    for rb in members:
        rb.share()
        rb.extend(data())
    rb = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    sample = rb.sample()
    version = torch.full((2, 4), 3)
    version[1] = 4
    for wanted in (version, 3):
        result = rb.update_if_present(
            index=sample["index"],
            generation=sample["index_generation"],
            patch={"x": torch.ones(2, 4, 2)},
            version_key=("deep", "v"),
            version=wanted,
            require_newer=True,
        )
        assert result.version_rejected is not None
        if wanted is version:
            lower = sample["deep", "v"] < version
            assert torch.equal(result.version_rejected, ~lower.flatten())
            for at, one in enumerate(members):
                changed = set(sample["index", "index"][at][lower[at]].tolist())
                expected = [3 + at if v in changed else v for v in range(6)]
                assert one[:]["deep", "v"].tolist() == expected
        else:
            assert not result.updated.any()  # the changed items are stale, the others are not newer


def test_what_cannot_be_compared_is_refused_before_anything_changes(storage: Any) -> None:
    with TensorDictReplayBuffer(storage=storage) as rb:
        index = rb.extend(data())
        at = {"index": index, "generation": rb.storage.tickets(index)}
        patch = {"x": torch.ones(6, 2)}
        for given in ({"version": 1}, {"version_key": "v"}):
            with pytest.raises(ValueError, match="version_key and version must be passed together"):
                rb.update_if_present(**at, patch=patch, **given)
        key: dict[str, Any] = {"version_key": ("deep", "v"), "version": 9}
        with pytest.raises(ValueError, match="the patch contains the version_key"):
            rb.update_if_present(**at, patch={("deep", "v"): index}, **key)
        with pytest.raises(
            ValueError, match=r"'x' has shape \[2\] in an item, but only scalars can be compared"
        ):
            rb.update_if_present(**at, patch={}, version_key="x", version=9)
        with pytest.raises(KeyError, match="'y' is not a"):
            rb.update_if_present(**at, patch=patch, version_key="y", version=9)
        with pytest.raises(
            ValueError, match="version must be one number, or one for each of 6 items"
        ):
            rb.update_if_present(**at, patch=patch, version_key=("deep", "v"), version=index[:2])
        with pytest.raises(RuntimeError, match="got 2 generations for 6 items"):
            rb.update_if_present(index=index, generation=index[:2], patch=patch, **key)
        assert seen(rb) == ([0] * 6, [0, 1, 2, 3, 4, 5])
    with pytest.raises(RuntimeError, match="a ListStorage does not track generations"):
        TensorDictReplayBuffer(storage=ListStorage(3)).update_if_present(
            index=torch.tensor([0]), generation=torch.tensor([0]), patch={}, **key
        )


def test_a_version_of_another_dtype_is_refused_and_a_plain_number_fits() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6))
    index = rb.extend(
        TensorDict({"x": torch.zeros(6), "v": torch.zeros(6, dtype=torch.int32)}, [6])
    )
    at = {"index": index, "generation": rb.storage.tickets(index), "version_key": "v"}
    with pytest.raises(SchemaMismatchError, match="leaf 'v' is int32"):
        rb.update_if_present(**at, patch={"x": torch.ones(6)}, version=torch.arange(1, 7))
    assert rb[:]["x"].tolist() == [0] * 6
    assert rb.update_if_present(**at, patch={"x": torch.ones(6)}, version=3).updated.all()
    assert rb[:]["v"].tolist() == [3] * 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sample.batch_size=")
def test_versions_only_grow_while_changers_and_writers_are_killed(tmp_path: Path) -> None:
    path, capacity = tmp_path / "buffer", 6
    newest = torch.full((capacity,), -(2**40))

    def look(rb: TensorDictReplayBuffer, *, stay: bool) -> None:
        """Checks that items are consistent; with ``stay``, each has at least its newest version."""
        for _ in range(20):
            sample = rb.sample(32)
            latent, version, index = sample["latent"], sample["version"], sample["index"]
            assert (latent == latent[:, :1]).all()  # the patch and its version are written together
            life = latent[:, 0] - version * 1000
            assert ((life >= 0) & (life < 1000)).all()
            if stay:
                assert (version >= newest[index]).all()
                newest[index] = torch.maximum(newest[index], version)

    with opened(path, capacity) as rb:
        rb.extend(items(torch.zeros(capacity, dtype=torch.int64), 0))
        with (
            collectors(version_programs.changing, path, capacity, 2) as changing,
            collectors(version_programs.writing, path, capacity, 1) as writing,
        ):
            for one in (*changing, *writing):
                assert one[1].poll(50)
            look(rb, stay=False)
            kill(writing[0])
            # Patches reach every item; one that was being overwritten is gone.
            while (newest > 0).sum() < len(rb):
                look(rb, stay=True)
            kill(changing[0])
            look(rb, stay=True)
            kill(changing[1])
            look(rb, stay=True)
    assert check(path).problems == []
