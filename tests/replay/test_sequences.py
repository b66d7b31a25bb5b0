"""Windows around drawn items: their steps, their flags, and whose priority they use."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SampleUnit,
    Sequence,
    SliceSampler,
    Storage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Transition,
)
from tests.kit.rings import ring_of
from tests.replay.slice_model import History, Item

pytestmark = pytest.mark.product(few=4)

EPISODES = torch.arange(10) % 5 == 4  # two episodes in ten steps


class Given(Sampler):
    """Draws the indices that it is given."""

    def __init__(self, *anchors: int) -> None:
        self.anchors = torch.tensor(anchors)

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        return self.anchors, {}


def steps(count: int, first: int = 0, done: Any = None) -> TensorDict:
    number = torch.arange(first, first + count)
    ends = EPISODES[number % 10] if done is None else done
    return TensorDict({"number": number, "next": TensorDict({"done": ends}, [count])}, [count])


def buffer(storage: Any, unit: Any, sampler: Any = None, **kwargs: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, sample_unit=unit, **kwargs)


def window(written: int, anchor: int, **unit: Any) -> list[int | None]:
    """Returns the numbers in the window of one item of a ring of ten; None for a missing step."""
    rb = buffer(LazyTensorStorage(10), Sequence(**unit), Given(anchor % 10))
    rb.extend(steps(written))
    sample = rb.sample(1)
    assert sample["anchor_index"].tolist() == [anchor % 10] * len(sample)
    assert torch.equal(sample["index"], sample["number"] % 10)
    pairs = zip(sample["number"].tolist(), sample["validity_mask"].tolist(), strict=True)
    return [number if valid else None for number, valid in pairs]


# -- which steps a window has ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchor", "unit", "expected"),
    [
        (1, {"length": 3}, [1, 2, 3]),
        (3, {"length": 3}, [3, 4, None]),
        (4, {"length": 2}, [4, None]),
        (6, {"length": 2, "burn_in": 2}, [None, 5, 6, 7]),
        (7, {"length": 1, "burn_in": 1, "bootstrap": 2}, [6, 7, 8, 9]),
        (8, {"length": 1, "bootstrap": 3}, [8, 9, None, None]),
        (1, {"length": 2, "dilation": 2}, [1, 3]),
        (2, {"length": 3, "dilation": 2, "burn_in": 1}, [0, 2, 4, None]),
        # the window begins earlier, as far as the episode goes back
        (3, {"length": 3, "episode_boundary": "stop"}, [2, 3, 4]),
        (4, {"length": 2, "bootstrap": 2, "episode_boundary": "stop"}, [1, 2, 3, 4]),
        (6, {"length": 7, "episode_boundary": "stop"}, [5, 6, 7, 8, 9, None, None]),
        (1, {"length": 3, "episode_boundary": "stop"}, [1, 2, 3]),
        (4, {"length": 2, "burn_in": 2, "episode_boundary": "stop"}, [1, 2, 3, 4]),
        (5, {"length": 2, "burn_in": 1, "episode_boundary": "stop"}, [None, 5, 6]),
        (4, {"length": 2, "dilation": 3, "episode_boundary": "stop"}, [1, 4]),
        # or goes on
        (3, {"length": 3, "episode_boundary": "include_reset"}, [3, 4, 5]),
        (5, {"length": 2, "burn_in": 3, "episode_boundary": "include_reset"}, [2, 3, 4, 5, 6]),
        (8, {"length": 4, "episode_boundary": "include_reset"}, [8, 9, None, None]),
        (1, {"length": 1, "burn_in": 3, "episode_boundary": "include_reset"}, [None, None, 0, 1]),
        (3, {"length": 3, "done_key": None}, [3, 4, 5]),
        (8, {"length": 4, "done_key": None, "episode_boundary": "stop"}, [6, 7, 8, 9]),
    ],
)
def test_the_steps_of_a_window_are_those_around_its_anchor(
    anchor: int, unit: dict[str, Any], expected: list[int | None]
) -> None:
    assert window(10, anchor, **unit) == expected


@pytest.mark.parametrize(
    ("anchor", "unit", "expected"),
    [
        (12, {"length": 3}, [12, None, None]),  # the newest step of an open episode
        (3, {"length": 2, "burn_in": 2}, [None, None, 3, 4]),  # the oldest step
        (11, {"length": 3, "episode_boundary": "stop"}, [10, 11, 12]),
        (9, {"length": 5, "episode_boundary": "include_reset"}, [9, 10, 11, 12, None]),
        (4, {"length": 1, "burn_in": 3, "episode_boundary": "include_reset"}, [None, None, 3, 4]),
        (8, {"length": 4, "done_key": None}, [8, 9, 10, 11]),  # slot 9 is followed by slot 0
    ],
)
def test_no_window_lies_across_the_place_where_the_ring_writes_next(
    anchor: int, unit: dict[str, Any], expected: list[int | None]
) -> None:
    assert window(13, anchor, **unit) == expected


def test_what_is_missing_repeats_the_step_at_the_boundary() -> None:
    rb = buffer(LazyTensorStorage(10), Sequence(2, burn_in=2, bootstrap=2), Given(8, 5))
    rb.extend(steps(10))
    assert rb.sample(2)["number"].view(2, 6).tolist() == [[6, 7, 8, 9, 9, 9], [5, 5, 5, 6, 7, 8]]


def expected_window(one: list[Item], at: int, unit: Sequence) -> tuple[list[int], list[bool]]:
    """Returns the numbers and validity of the window of a step, by definition."""
    if unit.episode_boundary == "stop":
        reach = unit.dilation * (unit.length + unit.bootstrap - 1)
        at = max(0, min(at, len(one) - 1 - reach))
    places = [
        at + unit.dilation * (step - unit.burn_in)
        for step in range(unit.burn_in + unit.length + unit.bootstrap)
    ]
    inside = [min(max(place, 0), len(one) - 1) for place in places]
    return [one[place].number for place in inside], [0 <= place < len(one) for place in places]


@pytest.mark.product("make boundary")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
def test_every_window_is_that_of_the_definition(
    make: Any, boundary: Any, lanes: int, seed: int
) -> None:
    unit = Sequence(3 - seed % 2, boundary, burn_in=seed, bootstrap=1, dilation=1 + seed // 2)
    total = unit.burn_in + unit.length + unit.bootstrap
    history, capacity = History(seed, lanes=lanes), 12 + seed
    rb = buffer(make(capacity * lanes, ndim=min(lanes, 2)), unit, batch_size=40)
    for written in (capacity // 2, capacity, 2 * capacity + seed):
        while len(history.rows) < written:
            rb.extend(history.steps(min(history.chunk(5), written - len(history.rows))))
        crosses = boundary == "include_reset"
        places = {
            item.number: (one, at)
            for one in history.trajectories(capacity, episodes=not crosses)
            for at, item in enumerate(one)
        }
        seen = set()
        for _ in range(3):
            sample = rb.sample()
            anchors = sample["anchor_index"][::total]
            drawn = rb.storage.get(tuple(anchors.T) if lanes > 1 else anchors)["number"].tolist()
            rows = sample["number"].view(-1, total).tolist()
            valid = sample["validity_mask"].view(-1, total).tolist()
            for number, row, mask in zip(drawn, rows, valid, strict=True):
                assert (row, mask) == expected_window(*places[number], unit)
            seen.update(drawn)
        assert seen <= places.keys()
        assert len(seen) > len(places) // 2


def test_streams_and_collectors_are_never_mixed(directory: Any) -> None:
    options = {"done_key": None, "burn_in": 2}
    rb = buffer(directory(24), Sequence(3, **options), batch_size=100)
    collectors = [TensorDictReplayBuffer(storage=directory(24)) for _ in range(2)]
    for step in range(10):  # the ring wraps around
        for who, collector in enumerate(collectors):
            number = torch.tensor([step, 100 + step]) + 1000 * who
            done = torch.zeros(2, dtype=torch.bool)
            data = TensorDict({"number": number, "next": TensorDict({"done": done}, [2])}, [2])
            collector.extend(data, streams=[0, 1])
    for _ in range(5):
        sample = rb.sample()
        rows = sample["number"].view(-1, 5)
        valid = sample["validity_mask"].view(-1, 5)
        assert (rows // 100 == rows[:, 2:3] // 100).all()
        assert torch.equal(rows[:, 2:3] + torch.arange(-2, 3), rows) == bool(valid.all())
        assert ((rows[:, 2:3] + torch.arange(-2, 3) == rows) == valid).all()
        assert (rows % 100 >= 4).all()  # the other items were overwritten


def test_a_slot_without_an_item_ends_windows_on_both_sides(directory: Any) -> None:
    rb = buffer(directory(10), Sequence(3, done_key=None), batch_size=50)
    rb.extend(steps(3))
    ring = ring_of(rb)
    ring.claims.claim(1)
    ring.claims.abort()
    rb.extend(steps(3, first=3))
    sample = rb.sample()
    found = {
        tuple(row[mask].tolist())
        for row, mask in zip(
            sample["number"].view(-1, 3), sample["validity_mask"].view(-1, 3), strict=True
        )
    }
    assert found == {(0, 1, 2), (1, 2), (2,), (3, 4, 5), (4, 5), (5,)}


# -- what a sample says ----------------------------------------------------------------------------


def test_a_sample_says_of_each_step_what_it_is() -> None:
    unit = Sequence(2, burn_in=1, bootstrap=1)
    rb = buffer(LazyTensorStorage(10), unit, Given(1, 7))
    rb.extend(steps(10))
    sample, info = rb.sample(2, return_info=True)
    assert sample.shape == (8,)
    assert set(info) == {
        *("index", "anchor_index", "validity_mask", "learning_mask"),
        *("sequence_id", "step_in_sequence"),
    }
    assert set(sample.keys()) == {"number", "next", *info}
    assert sample["learning_mask"].view(2, 4).tolist() == [[False, True, True, False]] * 2
    assert sample["validity_mask"].all()
    assert sample["sequence_id"].tolist() == [0] * 4 + [1] * 4
    assert sample["step_in_sequence"].tolist() == [0, 1, 2, 3] * 2
    assert set(rb.sample(2, include_info=False).keys()) == {"number", "next"}


def test_a_shared_buffer_says_tickets_of_steps_and_of_the_anchor(directory: Any) -> None:
    rb = buffer(directory(10), Sequence(2, burn_in=1), Given(2))
    rb.extend(steps(13))
    sample = rb.sample(1)
    assert sample["number"].tolist() == [11, 12, 12]
    assert sample["index_generation"].tolist() == [11, 12, 12]
    assert sample["anchor_generation"].tolist() == [12, 12, 12]


def test_lanes_have_coordinates() -> None:
    rb = buffer(LazyTensorStorage(20, ndim=2), Sequence(2), batch_size=6)
    rb.extend(torch.stack([steps(10), steps(10, first=100)]))
    sample = rb.sample()
    assert sample["index"].shape == sample["anchor_index"].shape == (12, 2)
    assert torch.equal(sample["index"][:, 1], sample["anchor_index"][:, 1])
    assert torch.equal(sample["number"], sample["index"] @ torch.tensor([1, 100]))


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_windows_are_made_of_items_of_every_storage(storage: Any) -> None:
    rb = buffer(storage(10), Sequence(3), Given(2))
    rb.extend(steps(10))
    sample = rb.sample(1)
    assert (sample["number"].tolist(), sample["validity_mask"].tolist()) == ([2, 3, 4], [True] * 3)


def test_somebody_else_s_storage_and_plain_batches_have_windows_too() -> None:
    class Own(Storage):
        def __init__(self) -> None:
            super().__init__(10)
            self.items: list[Any] = []

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            self.items += data

        def get(self, index: Any) -> Any:
            return [self.items[at] for at in index.tolist()]

        def __len__(self) -> int:
            return len(self.items)

    rb = ReplayBuffer(storage=Own(), sample_unit=Sequence(3), sampler=Given(8))
    rb.extend(list(steps(10).unbind(0)))
    data, info = rb.sample(1, return_info=True)
    assert [int(item["number"]) for item in data] == [8, 9, 9]
    assert info["validity_mask"].tolist() == [True, True, False]
    plain = ReplayBuffer(
        storage=LazyTensorStorage(10), sample_unit=Sequence(2, done_key=None), sampler=Given(8, 9)
    )
    plain.extend(torch.arange(10))
    assert plain.sample(2).tolist() == [8, 9, 9, 9]


@pytest.mark.product(few=4)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: None,
        lambda: PrioritizedSampler(20, 0.7, 0.9),
        SamplerWithoutReplacement,
        lambda: SliceSampler(slice_len=1),
    ],
)
def test_any_sampler_gives_the_anchors_and_a_seed_decides_them(make: Any, sampler: Any) -> None:
    batches: list[list[list[int]]] = []
    for prefetch in (None, 3):
        generator = torch.Generator().manual_seed(5)
        rb = buffer(
            make(20), Sequence(3), sampler(), batch_size=4, prefetch=prefetch, generator=generator
        )
        rb.extend(steps(20))
        batches.append([rb.sample()["number"].tolist() for _ in range(8)])
    assert batches[0] == batches[1]
    flags = rb.sample()
    assert torch.equal(flags["next", "done"], EPISODES[flags["number"] % 10])  # as stored


def test_each_item_is_the_anchor_once_a_pass() -> None:
    rb = buffer(LazyTensorStorage(10), Sequence(2), SamplerWithoutReplacement(), batch_size=3)
    rb.extend(steps(10))
    for _ in range(2):
        anchors = [number for batch in rb for number in batch["anchor_index"][::2].tolist()]
        assert sorted(anchors) == list(range(10))


def test_weights_are_those_of_the_anchor() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(10), sample_unit=Sequence(3)
    )
    index = rb.extend(steps(10))
    rb.update_priority(index, 1.0 + index)
    sample = rb.sample(20)
    assert torch.allclose(sample["_weight"], 1 / (1.0 + sample["anchor_index"]))
    assert sample["_weight"] is sample["priority_weight"]


def test_how_often_an_item_is_the_anchor_is_in_proportion_to_its_priority() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.0, eps=0.0, storage=LazyTensorStorage(10), sample_unit=Sequence(2)
    )
    index = rb.extend(steps(10))
    rb.update_priority(index, index.double())
    found = np.bincount(rb.sample(20_000)["anchor_index"][::2], minlength=10) / 20_000
    assert np.abs(found - np.arange(10) / 45).max() < 0.012  # four standard deviations


def test_a_transition_takes_the_way_of_no_unit() -> None:
    plans = []
    for unit in (None, Transition()):
        rb = buffer(LazyTensorStorage(10), unit)
        rb.extend(steps(10))
        assert set(rb.sample(8).keys()) == {"number", "next", "index"}
        plans.append(repr(rb.plan))
    assert plans[0] == plans[1]
    assert Transition().expand(plans, {"a": 1}, None) == (plans, {"a": 1})


def test_the_plan_says_why_there_is_no_shorter_way() -> None:
    rb = buffer(LazyTensorStorage(10), Sequence(3))
    rb.extend(steps(10))
    assert "sample: by parts: a Sequence expands the drawn" in repr(rb.plan)


def test_transforms_and_collate_functions_see_the_windows() -> None:
    seen: list[int] = []
    rb = buffer(
        LazyTensorStorage(10),
        Sequence(3),
        transform=lambda data: data.set("twice", 2 * data["number"]),
        collate_fn=lambda data: seen.append(len(data)) or data,
    )
    rb.extend(steps(10))
    sample = rb.sample(4)
    assert seen == [12]
    assert torch.equal(sample["twice"], 2 * sample["number"])


def test_a_buffer_with_a_unit_goes_to_another_process(directory: Any) -> None:
    rb = buffer(directory(10), Sequence(2, burn_in=1), Given(3))
    rb.extend(steps(10))
    rb.sample(1)
    with pickle.loads(pickle.dumps(rb)) as again:
        assert again.sample(1)["number"].tolist() == [2, 3, 4]


# -- a unit of your own ----------------------------------------------------------------------------


class Twice(SampleUnit):
    """Each item and its successor, as a TorchRL user would write the unit."""

    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Any:
        both = torch.stack((index, (index + 1) % len(storage)), 1).flatten()
        return both, {key: value.repeat_interleave(2, 0) for key, value in info.items()}


def test_a_unit_of_your_own_is_read_on_private_and_shared_buffers(make: Any) -> None:
    rb = buffer(make(10), Twice(), PrioritizedSampler(10, 1.0, 1.0))
    rb.extend(steps(10))
    sample = rb.sample(6)
    pairs = sample["number"].view(6, 2)
    assert torch.equal(pairs[:, 1], (pairs[:, 0] + 1) % 10)
    assert sample["_weight"].shape == (12,)
    if rb.shared:
        assert torch.equal(sample["index_generation"], sample["number"])


# -- priorities ------------------------------------------------------------------------------------


def prioritized(unit: Sequence, storage: Any = None, **kwargs: Any) -> Any:
    return TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        storage=LazyTensorStorage(10) if storage is None else storage,
        sample_unit=unit,
        **kwargs,
    )


def priorities(rb: Any) -> list[float]:
    tree = ring_of(rb).tree
    found: list[float] = tree.priorities(np.arange(ring_of(rb).elements)).tolist()
    return found


def drawn_for(rb: Any, anchors: Iterable[int]) -> TensorDict:
    """Draws a sample with these anchors."""
    index, known = rb._parts.unit.expand(torch.tensor([*anchors]), {}, rb.storage)
    data = rb.storage.get(index)
    return data.update({"index": index, **known})


@pytest.mark.parametrize(("eta", "expected"), [(1.0, 9.0), (0.0, 6.0), (0.9, 8.7)])
def test_an_anchor_gets_the_mix_of_largest_and_mean_and_nobody_else_anything(
    eta: float, expected: float
) -> None:
    rb = prioritized(Sequence(3, eta=eta))
    rb.extend(steps(10))
    sample = drawn_for(rb, [1])
    sample["td_error"] = torch.tensor([3.0, 9.0, 6.0])
    assert rb.update_tensordict_priority(sample) == (1, 0)
    assert priorities(rb) == pytest.approx([1.0, expected, *[1.0] * 8])


def test_steps_that_are_not_learned_from_or_not_there_do_not_count() -> None:
    rb = prioritized(Sequence(2, burn_in=1, bootstrap=1, eta=0.5))
    rb.extend(steps(10))
    sample = drawn_for(rb, [4, 6])
    assert sample["validity_mask"].tolist() == [True, True, False, False, True, True, True, True]
    sample["td_error"] = torch.tensor([90.0, 4.0, float("nan"), 90.0, 90.0, 2.0, 4.0, 90.0])
    assert rb.update_tensordict_priority(sample) == (2, 0)
    assert priorities(rb)[4] == 4.0
    assert priorities(rb)[6] == 3.5


def test_a_sample_may_be_reshaped_or_cut_before_its_priorities_come_back() -> None:
    def updated(change: Any) -> list[float]:
        rb = prioritized(Sequence(2, burn_in=1, eta=0.5))
        rb.extend(steps(10))
        sample = drawn_for(rb, [2, 6])
        sample["td_error"] = torch.tensor([0.0, 1.0, 3.0, 0.0, 5.0, 9.0])
        rb.update_tensordict_priority(change(sample))
        return priorities(rb)

    flat = updated(lambda sample: sample)
    assert (flat[2], flat[6]) == (2.5, 8.0)
    assert updated(lambda sample: sample.reshape(2, 3)) == flat
    assert updated(lambda sample: sample.reshape(2, 3)[:, 1:]) == flat
    assert updated(lambda sample: sample[sample["learning_mask"]]) == flat
    assert updated(lambda sample: sample[torch.randperm(6)]) == flat
    column = updated(lambda sample: sample.set("td_error", sample["td_error"][:, None]))
    assert column == flat


def test_an_anchor_that_was_drawn_twice_gets_one_priority() -> None:
    rb = prioritized(Sequence(2, eta=0.5))
    rb.extend(steps(10))
    sample = drawn_for(rb, [2, 2])
    sample["td_error"] = torch.tensor([1.0, 3.0, 1.0, 3.0])
    assert rb.update_tensordict_priority(sample) == (1, 0)
    assert priorities(rb)[2] == 2.5


def test_a_priority_for_a_written_over_anchor_is_stale_also_where_the_window_is_there(
    directory: Any,
) -> None:
    rb = prioritized(Sequence(3), directory(10))
    rb.extend(steps(10))
    sample = drawn_for(rb, [0, 5])
    rb.extend(steps(2, first=10))
    sample["td_error"] = torch.full((6,), 7.0)
    assert rb.update_tensordict_priority(sample) == (1, 1)
    assert [at for at, one in enumerate(priorities(rb)) if one == 7.0] == [5]


def test_lanes_get_priorities_by_coordinates() -> None:
    rb = prioritized(Sequence(2), LazyTensorStorage(20, ndim=2))
    rb.extend(torch.stack([steps(10), steps(10, first=100)]))
    sample = rb.sample(5)
    sample["td_error"] = sample["number"].float() + 5
    rb.update_tensordict_priority(sample)
    for slot, lane in sample["anchor_index"].tolist():
        last = slot if slot % 5 == 4 else slot + 1
        assert priorities(rb)[2 * slot + lane] == last + 100 * lane + 5


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_items_of_lists_get_the_priorities_of_their_windows(storage: Any) -> None:
    rb = prioritized(Sequence(2), storage(10))
    rb.extend(steps(10))
    sample = rb.sample(4)
    sample["td_error"] = sample["number"].float() + 5
    rb.update_tensordict_priority(sample)
    for anchor in sample["anchor_index"].tolist():
        assert priorities(rb)[anchor] == anchor + 5 + (anchor % 5 != 4)


def test_a_window_with_a_bad_priority_changes_nothing() -> None:
    rb = prioritized(Sequence(2))
    rb.extend(steps(10))
    sample = drawn_for(rb, [1, 6])
    sample["td_error"] = torch.tensor([1.0, 2.0, float("nan"), 2.0])
    with pytest.raises(ValueError, match="priority nan at position 1 is not a number"):
        rb.update_tensordict_priority(sample)
    assert priorities(rb) == [1.0] * 10


def test_a_sample_without_priorities_gives_its_anchors_the_default_one() -> None:
    rb = prioritized(Sequence(2))
    index = rb.extend(steps(10))
    rb.update_priority(index, 3.0)
    with pytest.warns(UserWarning, match="this sample has no entry 'td_error'"):
        assert rb.update_tensordict_priority(drawn_for(rb, [1])) == (1, 0)
    assert rb.update_tensordict_priority(drawn_for(rb, [1])[:0]) == (0, 0)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"length": 2, "burn_in": -1}, "burn_in must be at least 0, got -1"),
        ({"length": 2, "bootstrap": -1}, "bootstrap must be at least 0, got -1"),
        ({"length": 2, "dilation": 0}, "dilation must be at least 1, got 0"),
        ({"length": 2, "episode_boundary": "cut"}, "one of pad, stop, include_reset, got 'cut'"),
        (
            {"length": 2, "eta": 1.5},
            r"eta must be from 0 .* to 1 .*, got 1\.5",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sequence(**arguments)


def test_a_unit_says_what_it_is() -> None:
    assert repr(Sequence(3, burn_in=2)) == (
        "Sequence(length=3, episode_boundary='pad', done_key=('next', 'done'), burn_in=2, "
        "bootstrap=0, dilation=1, eta=1.0)"
    )
    assert Sequence(3, done_key=["next", "done"]).done_key == ("next", "done")  # type: ignore[arg-type]


def test_items_that_do_not_say_where_an_episode_ends_are_refused() -> None:
    rb = buffer(LazyTensorStorage(10), Sequence(3, done_key="over"))
    rb.extend(steps(10))
    with pytest.raises(KeyError, match="no entry 'over', which marks the end of an episode; pass"):
        rb.sample(4)


def test_an_anchor_without_an_item_is_refused_and_an_empty_buffer_too() -> None:
    rb = buffer(LazyTensorStorage(10), Sequence(3), Given(7))
    with pytest.raises(EmptyBufferError):
        Sequence(3).expand(torch.tensor([0]), {}, rb.storage)
    rb.extend(steps(5))
    with pytest.raises(IndexError, match="Sequence: an anchor is not an item of this storage"):
        Sequence(3).expand(torch.tensor([7]), {}, rb.storage)
    with pytest.raises(
        IndexError, match="the items that the Given chose were overwritten during each of 16"
    ):
        rb.sample(1)


def test_what_cannot_have_windows_says_so() -> None:
    with pytest.raises(
        TypeError, match="sample_unit must be a SampleUnit, such as Sequence, got 3"
    ):
        ReplayBuffer(sample_unit=3)  # type: ignore[arg-type]
    plain = buffer(LazyTensorStorage(10), Transition())
    with pytest.raises(NotImplementedError, match="an ensemble samples items, not Sequence"):
        ReplayBufferEnsemble(plain, buffer(LazyTensorStorage(10), Sequence(3)))
    with pytest.raises(NotImplementedError, match="an ensemble samples items, not Sequence"):
        ReplayBufferEnsemble(plain, sample_unit=Sequence(3))
    ReplayBufferEnsemble(plain, sample_unit=Transition())
    with pytest.raises(NotImplementedError, match="HERReplayBuffer relabels single steps"):
        HERReplayBuffer(lambda rows: rows["reward"], sample_unit=Sequence(3))
    queue = buffer(
        LazyMemmapStorage(10), Sequence(3), rate_limiter=RateLimiter(max_times_sampled=1)
    )
    queue.extend(steps(10))
    with pytest.raises(ValueError, match="cannot be combined with a Sequence"):
        queue.sample(1)
