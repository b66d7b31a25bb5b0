"""Ensembles sample several buffers as one; each row of a sample is from one of them."""

from __future__ import annotations

import multiprocessing
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, tensorclass

from shmbuffer import (
    EmptyBufferError,
    ImmutableDatasetWriter,
    LambdaScheduler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterEnsemble,
)
from shmbuffer.buffers.view import BufferView
from tests.kit.rings import ring_of

pytestmark = pytest.mark.product(few=4)

SIZE = 10


@tensorclass
class Step:
    x: torch.Tensor


def items(base: int, size: int = SIZE) -> TensorDict:
    """Makes items that identify their slot: ``x = base + index``."""
    return TensorDict({"x": torch.arange(size) + base}, [size])


def numbers(*bases: int, size: int = SIZE, **options: Any) -> list[ReplayBuffer]:
    made = []
    for base in bases:
        made.append(ReplayBuffer(storage=LazyTensorStorage(size), **options))
        made[-1].extend(torch.arange(size) + base)
    return made


def dicts(*bases: int, **options: Any) -> list[TensorDictReplayBuffer]:
    made = []
    for base in bases:
        made.append(TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), **options))
        made[-1].extend(items(base))
    return made


def prioritized(*bases: int, **options: Any) -> list[TensorDictPrioritizedReplayBuffer]:
    made = []
    for base in bases:
        storage = LazyTensorStorage(SIZE)
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=storage, **options
        )
        rb.extend(items(base))
        made.append(rb)
    return made


def mass(rb: Any) -> list[float]:
    found: list[float] = ring_of(rb).tree.mass().tolist()
    return found


# -- what a sample is --------------------------------------------------------------------------


def test_a_sample_has_a_row_from_each_chosen_buffer() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100, 200), sample_from_all=True, batch_size=12)
    data, info = rb.sample(return_info=True)
    assert data.shape == torch.Size([3, 4])
    assert info["index", "buffer_ids"].tolist() == [0, 1, 2]
    assert info["index"].batch_size == torch.Size([3])
    assert torch.equal(data, info["index", "index"] + torch.tensor([[0], [100], [200]]))
    assert info["index", "index"].dtype == torch.int64


def test_a_sample_of_tensordicts_says_the_buffer_of_each_item() -> None:
    rb = ReplayBufferEnsemble(*dicts(0, 100, 200), num_buffer_sampled=5, batch_size=20)
    sample, info = rb.sample(return_info=True)
    assert sample.batch_size == torch.Size([5, 4])
    index = sample["index"]
    assert isinstance(index, TensorDictBase)
    assert index.batch_size == torch.Size([5, 4])
    assert torch.equal(sample["x"], index["buffer_ids"] * 100 + index["index"])
    assert (index["buffer_ids"] == index["buffer_ids"][:, :1]).all()
    for key in (("index", "buffer_ids"), ("index", "index")):
        assert torch.equal(info[key], sample[key])


def test_include_info_false_leaves_the_index_out() -> None:
    rb = ReplayBufferEnsemble(*dicts(0, 100), batch_size=4)
    sample, info = rb.sample(return_info=True, include_info=False)
    assert sorted(sample.keys()) == ["x"]
    assert sorted(info["index"].keys()) == ["buffer_ids", "index"]


def test_a_batch_size_of_the_call_wins_with_a_warning() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), batch_size=4)
    with pytest.warns(UserWarning, match="differs from the buffer's batch_size=4"):
        assert rb.sample(6).shape == torch.Size([2, 3])


def test_without_a_batch_size_nothing_is_drawn() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100))
    with pytest.raises(RuntimeError, match="no batch size"):
        rb.sample()
    with pytest.raises(RuntimeError, match="iteration needs a batch size"):
        next(iter(rb))


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_batch_that_cannot_be_divided_is_refused(error: type[Exception]) -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100, 200))
    with pytest.raises(error, match=r"must be a multiple of num_buffer_sampled=3, .* got 7"):
        rb.sample(7)


def test_dicts_and_tuples_are_stacked() -> None:
    rbs = []
    for base in (0, 100):
        rb = ReplayBuffer(storage=LazyTensorStorage(SIZE))
        rb.extend({"a": torch.arange(SIZE) + base, "b": (torch.arange(SIZE) - base,)})
        rbs.append(rb)
    ensemble = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=6)
    data, info = ensemble.sample(return_info=True)
    index = info["index", "index"]
    assert torch.equal(data["a"], index + torch.tensor([[0], [100]]))
    assert torch.equal(data["b"][0], index - torch.tensor([[0], [100]]))


def test_lists_are_collated_by_their_buffers() -> None:
    rbs = []
    for base in (0, 100):
        rb = ReplayBuffer(storage=ListStorage(SIZE))
        rb.extend([torch.tensor([base + at]) for at in range(SIZE)])
        rbs.append(rb)
    data, info = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=4).sample(
        return_info=True
    )
    assert torch.equal(data[..., 0], info["index", "index"] + torch.tensor([[0], [100]]))


@pytest.mark.parametrize("widths", [(2, 2), (2, 3)])
def test_tensorclasses_stay_what_they_are(widths: tuple[int, int]) -> None:
    rbs = []
    for width in widths:
        rb = ReplayBuffer(storage=LazyTensorStorage(SIZE))
        rb.extend(Step(torch.full((SIZE, width), float(width)), batch_size=[SIZE]))
        rbs.append(rb)
    sample, info = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=6).sample(
        return_info=True
    )
    assert isinstance(sample, Step)
    assert sample.batch_size == torch.Size([2, 3])
    assert [sample[at].x.tolist() for at in range(2)] == [[[float(w)] * w] * 3 for w in widths]
    assert info["index", "index"].shape == torch.Size([2, 3])


def test_the_index_of_several_dimensions_has_a_column_for_each() -> None:
    rbs = []
    for base in (0, 100):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        x = torch.arange(12).view(4, 3) + base
        rb.extend(TensorDict({"x": x}, [4, 3]))
        rbs.append(rb)
    sample = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=8).sample()
    index = sample["index", "index"]
    assert index.shape == torch.Size([2, 4, 2])
    slot, lane = index.unbind(-1)
    assert torch.equal(sample["x"], lane * 3 + slot + 100 * sample["index", "buffer_ids"])


# -- buffers that differ -----------------------------------------------------------------------


def test_different_keys_are_stacked_lazily() -> None:
    one, other = dicts(0), dicts(100)
    other[0] = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE))
    other[0].extend(items(100).set("y", torch.ones(SIZE, 3)))
    rb = ReplayBufferEnsemble(*one, *other, sample_from_all=True, batch_size=6)
    sample, info = rb.sample(return_info=True)
    assert isinstance(sample, LazyStackedTensorDict)
    assert "y" not in sample.keys()  # noqa: SIM118
    assert sample[1]["y"].shape == torch.Size([3, 3])
    assert torch.equal(sample["x"], sample["index", "index"] + torch.tensor([[0], [100]]))
    assert info["index", "buffer_ids"].tolist() == [[0] * 3, [1] * 3]


def test_different_shapes_are_stacked_lazily() -> None:
    rbs = []
    for width in (3, 4):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE))
        rb.extend(TensorDict({"x": torch.full((SIZE, width), float(width))}, [SIZE]))
        rbs.append(rb)
    sample = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=4).sample()
    assert sample.batch_size == torch.Size([2, 2])
    assert [row["x"].tolist() for row in sample.unbind(0)] == [[[3.0] * 3] * 2, [[4.0] * 4] * 2]


def test_buffers_with_and_without_lanes_go_together() -> None:
    [flat] = dicts(100)
    lanes = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    lanes.extend(TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
    sample = ReplayBufferEnsemble(lanes, flat, sample_from_all=True, batch_size=8).sample()
    assert torch.equal(sample[1]["x"], sample[1]["index", "index"] + 100)
    slot, lane = sample[0]["index", "index"].unbind(-1)
    assert torch.equal(sample[0]["x"], lane * 3 + slot)


def test_tensors_of_different_shapes_need_a_collate_fn() -> None:
    rbs = [ReplayBuffer(storage=LazyTensorStorage(SIZE)) for _ in range(2)]
    for rb, width in zip(rbs, (3, 4), strict=True):
        rb.extend(torch.zeros(SIZE, width))
    with pytest.raises(RuntimeError, match=r"cannot be stacked .*pass a collate_fn"):
        ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=4).sample()
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=4, collate_fn=tuple)
    assert [part.shape for part in rb.sample()] == [(2, 3), (2, 4)]


# -- how buffers are chosen --------------------------------------------------------------------


@pytest.mark.product(few=3)
@pytest.mark.parametrize("p", [[0.0, 0.9, 0.1], torch.tensor([0, 9, 1]), (0, 9, 1)])
@pytest.mark.parametrize("count", [3, 16, None])
def test_a_buffer_of_no_probability_never_appears(p: Any, count: int | None) -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100, 200), p=p, num_buffer_sampled=count, batch_size=48)
    ids = torch.cat([rb.sample(return_info=True)[1]["index", "buffer_ids"] for _ in range(60)])
    assert len(ids) == 60 * (count or 3)
    assert set(ids.tolist()) == {1, 2}
    assert 0.8 < (ids == 1).double().mean() < 0.98


def test_without_p_all_buffers_are_alike() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100, 200), num_buffer_sampled=300, batch_size=300)
    ids = rb.sample(return_info=True)[1]["index", "buffer_ids"]
    assert torch.bincount(ids, minlength=3).min() > 70


def test_p_is_normalized_and_can_be_set() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), p=[1.0, 3.0], batch_size=8)
    sampler: Any = rb.sampler
    assert sampler.p.tolist() == [0.25, 0.75]
    sampler.p = torch.tensor([0.0, 5.0])
    assert sampler.p.tolist() == [0.0, 1.0]
    assert (rb.sample() >= 100).all()
    sampler.p = None
    assert sampler.p is None
    assert rb.sample().shape == (2, 4)


def test_num_buffer_sampled_can_be_set() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), batch_size=8)
    sampler: Any = rb.sampler
    assert sampler.num_buffer_sampled == 2
    sampler.num_buffer_sampled = 4
    assert rb.sample().shape == (4, 2)
    sampler.num_buffer_sampled = None
    assert rb.sample().shape == (2, 4)


def test_with_sample_from_all_the_number_is_that_of_the_buffers() -> None:
    rb = ReplayBufferEnsemble(
        *numbers(0, 100, 200), sample_from_all=True, num_buffer_sampled=16, batch_size=48
    )
    assert rb.sample().shape == (3, 16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"p": [0.5, 0.5], "sample_from_all": True}, RuntimeError, "pass .*one"),
        ({"p": [0.5, 0.2, 0.3]}, ValueError, r"one number for each of the 2 buffers, .*\[3\]"),
        ({"p": [[0.5, 0.5]]}, ValueError, r"one number for each of the 2 buffers, .*\[1, 2\]"),
        ({"p": [1.0, -0.5]}, ValueError, "p must be finite and non-negative, got"),
        ({"p": [1.0, float("nan")]}, ValueError, "p must be finite and non-negative, got"),
        ({"p": "often"}, ValueError, "p must be numbers, 'sampleable' or None, got 'often'"),
        ({"num_buffer_sampled": 0}, ValueError, "num_buffer_sampled must be at least 1, got 0"),
    ],
)
def test_choices_that_make_no_sense_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ReplayBufferEnsemble(*numbers(0, 100), **options)


def test_a_p_of_zeros_has_nothing_to_choose() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), p=[0.0, 0.0], batch_size=4)
    with pytest.raises(EmptyBufferError, match="p is 0 for all buffers"):
        rb.sample()


def test_sampleable_chooses_by_what_is_there() -> None:
    full, half = numbers(0, 100)
    half.empty()
    rb = ReplayBufferEnsemble(full, half, p="sampleable", num_buffer_sampled=200, batch_size=200)
    assert (rb.sample() < 100).all()
    half.extend(torch.arange(5) + 100)
    share = (rb.sample() >= 100).double().mean()
    assert 0.2 < share < 0.47  # expected: a third
    for buffer in (full, half):
        buffer.empty()
    with pytest.raises(EmptyBufferError, match="all buffers are empty"):
        rb.sample()


def test_a_chosen_buffer_without_items_is_named() -> None:
    full, empty = numbers(0, 100)
    empty.empty()
    rb = ReplayBufferEnsemble(full, empty, sample_from_all=True, batch_size=4)
    with pytest.raises(EmptyBufferError, match=r"buffer 1 of the ensemble is empty.*ensemble\[1\]"):
        rb.sample()
    never = ReplayBufferEnsemble(full, ReplayBuffer(), p=[1.0, 0.0], batch_size=4)
    assert never.sample().shape == (2, 2)


# -- seeds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [None, [0.3, 0.7], "sampleable"])
@pytest.mark.parametrize("make", [numbers, prioritized])
def test_the_generator_decides_every_draw(p: Any, make: Any) -> None:
    def draws(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        rb = ReplayBufferEnsemble(*make(0, 100), p=p, batch_size=8, generator=generator)
        found = []
        for at in range(6):
            torch.manual_seed(at * seed)  # has no effect
            sample = rb.sample()
            found.append((sample if isinstance(sample, torch.Tensor) else sample["x"]).tolist())
        return found

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


@pytest.mark.parametrize("p", [None, [0.3, 0.7]])
def test_without_a_generator_torchs_default_one_decides(p: Any) -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), p=p, batch_size=8)
    found = []
    for _ in range(2):
        torch.manual_seed(11)
        found.append([rb.sample().tolist() for _ in range(3)])
    assert found[0] == found[1]


def test_without_a_generator_the_buffers_keep_theirs() -> None:
    generator = torch.Generator()
    one, other = numbers(0, 100)
    one.generator = generator
    rb = ReplayBufferEnsemble(one, other, batch_size=4)
    assert one.generator is generator
    assert one.sampler._rng is generator
    rb.generator = generator
    assert other.sampler._rng is generator
    assert rb.sampler._rng is generator


# -- transforms and collate_fns ----------------------------------------------------------------


class Counted:
    """A transform that records its input and has an inverse."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.shapes: list[torch.Size] = []

    def __call__(self, data: Any) -> Any:
        self.shapes.append(data.shape)
        return data.set("x", data["x"] * self.factor)

    def inv(self, data: Any) -> Any:
        return data.set("x", data["x"] + 1)


@pytest.mark.parametrize("explicit", [False, True])
def test_each_buffer_has_its_transform_and_the_ensemble_one_more(explicit: bool) -> None:
    own, last = [Counted(10), Counted(1000)], Counted(-1)
    rbs = [TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), transform=one) for one in own]
    if explicit:
        rb = ReplayBufferEnsemble(
            storages=StorageEnsemble(
                *(one.storage for one in rbs), transforms=[one.transform for one in rbs]
            ),
            samplers=SamplerEnsemble(*(one.sampler for one in rbs), sample_from_all=True),
            writers=WriterEnsemble(*(one.writer for one in rbs)),
            transform=last,
            batch_size=8,
        )
    else:
        rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=8, transform=last)
    for at in range(2):
        rb[at].extend(items(0))  # 1 .. 10 are stored
    sample = rb.sample()
    expected = (sample["index", "index"] + 1) * torch.tensor([[10], [1000]]) * -1
    assert torch.equal(sample["x"], expected)
    assert (own[0].shapes, own[1].shapes) == ([torch.Size([4])],) * 2
    assert last.shapes == [torch.Size([2, 4])]


def test_collate_fns_stand_in_for_those_of_the_buffers() -> None:
    rbs = [ReplayBuffer(storage=ListStorage(SIZE)) for _ in range(2)]
    for rb in rbs:
        rb.extend(["a", "b", "c"])
    ensemble = ReplayBufferEnsemble(
        *rbs,
        sample_from_all=True,
        batch_size=6,
        collate_fns=["".join, lambda letters: "".join(letters).upper()],
        collate_fn="-".join,
    )
    low, high = ensemble.sample().split("-")
    assert set(low) <= set("abc")
    assert set(high) <= set("ABC")
    assert (len(low), len(high)) == (3, 3)
    assert ensemble[:, [0, 2]] == "ac-AC"


def test_as_many_collate_fns_as_buffers() -> None:
    with pytest.raises(ValueError, match="collate_fns must have one function for each buffer"):
        ReplayBufferEnsemble(*numbers(0, 100), collate_fns=[None])


def test_a_transform_that_changes_the_batch_size_is_named() -> None:
    rb = ReplayBufferEnsemble(*dicts(0, 100), batch_size=4, transform=lambda td: td.reshape(-1))
    with pytest.raises(
        RuntimeError, match=r"2 rows of 2 items .* a transform .* batch size of the sample to \[4\]"
    ):
        rb.sample()
    data, info = rb.sample(return_info=True, include_info=False)
    expected = info["index", "index"] + info["index", "buffer_ids"][:, None] * 100
    assert torch.equal(data["x"], expected.reshape(-1))


def test_transforms_can_be_appended() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), batch_size=4)
    rb.append_transform(lambda data: data + 0.5)
    assert (rb.sample() % 1 == 0.5).all()


# -- samplers of the buffers -------------------------------------------------------------------


def test_prioritized_buffers_give_their_weights() -> None:
    rbs = prioritized(0, 100)
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=40)
    for one in rbs:
        one.update_priority(torch.arange(SIZE), torch.arange(SIZE) + 1.0)
    sample, info = rb.sample(return_info=True)
    expected = 1.0 / (sample["index", "index"] + 1.0)  # (p / p_min) ** -beta
    for key in ("_weight", "priority_weight"):
        assert torch.allclose(sample[key], expected)
        assert torch.equal(info[key], sample[key])


def test_among_prioritized_buffers_the_others_weigh_one() -> None:
    [weighted], [uniform] = prioritized(0), dicts(100)
    rb = ReplayBufferEnsemble(weighted, uniform, sample_from_all=True, batch_size=20)
    weighted.update_priority(torch.arange(SIZE), torch.arange(SIZE) + 1.0)
    sample = rb.sample()
    assert not isinstance(sample, LazyStackedTensorDict)
    assert torch.allclose(sample["_weight"][0], 1.0 / (sample["index", "index"][0] + 1.0))
    assert sample["_weight"][1].tolist() == [1.0] * 10
    only = ReplayBufferEnsemble(weighted, uniform, p=[0.0, 1.0], batch_size=4)
    assert only.sample()["priority_weight"].tolist() == [[1.0] * 2] * 2  # the same keys each time


def test_another_name_of_the_weights() -> None:
    rb = ReplayBufferEnsemble(*prioritized(0, 100), batch_size=4, weight_key="w")
    assert sorted(map(str, rb.sample().keys())) == ["index", "w", "x"]
    rb = ReplayBufferEnsemble(*prioritized(0, 100, weight_key="v"), batch_size=4)
    assert sorted(map(str, rb.sample().keys())) == ["index", "v", "x"]


def test_the_priorities_of_a_sample_reach_the_buffers() -> None:
    rbs = prioritized(0, 100)
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=80)
    sample = rb.sample()
    index = sample["index"]
    sample["td_error"] = (index["buffer_ids"] * 100 + index["index"] + 7).double()
    assert rb.update_tensordict_priority(sample) == (80, 0)
    assert rb.update_priority(sample) == (80, 0)
    for at, one in enumerate(rbs):
        expected = [1.0] * SIZE
        for place in index["index"][at].tolist():
            expected[place] = at * 100 + place + 7.0
        assert mass(one) == expected


@pytest.mark.parametrize("form", ["sample", "column", "info", "flat", "rows", "number"])
def test_update_priority_takes_the_index_in_any_form(form: str) -> None:
    rbs = prioritized(0, 100)
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=40)
    sample, info = rb.sample(return_info=True, include_info=False)
    index = info["index"]  # [2], with index [2, 20]
    expected = index["buffer_ids"][:, None] * 100.0 + index["index"] + 7
    priority: Any = expected
    if form == "sample":
        sample, info = rb.sample(return_info=True)
        index = sample["index"]
        expected = priority = index["buffer_ids"] * 100.0 + index["index"] + 7
    elif form == "column":
        priority = priority.unsqueeze(-1)
    elif form == "flat":
        sample, info = rb.sample(return_info=True)
        index = sample["index"].reshape(-1)
        expected = priority = index["buffer_ids"] * 100.0 + index["index"] + 7
    elif form == "number":
        priority = 3.0
    if form == "rows":
        applied = [rb.update_priority(index[at], priority[at]).applied for at in range(2)]
        assert applied == [20, 20]
    else:
        assert rb.update_priority(index, priority) == (40, 0)
    for at, one in enumerate(rbs):
        places = index["index"][index["buffer_ids"] == at].reshape(-1).tolist()
        assert len(places) == 20
        want = [1.0] * SIZE
        for place in places:
            want[place] = 3.0 if form == "number" else at * 100 + place + 7.0
        assert mass(one) == want


def test_a_lazily_stacked_sample_goes_back_too() -> None:
    rbs = prioritized(0)
    other = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(12, ndim=2)
    )
    other.extend(TensorDict({"x": torch.arange(12).view(4, 3), "y": torch.zeros(4, 3)}, [4, 3]))
    rb = ReplayBufferEnsemble(*rbs, other, sample_from_all=True, batch_size=40)
    sample = rb.sample()
    sample["td_error"] = sample["x"] + 7.0
    assert rb.update_tensordict_priority(sample) == (40, 0)
    places = [list(range(SIZE)), [lane * 3 + slot for slot in range(3) for lane in range(4)]]
    for at, one in enumerate((*rbs, other)):
        drawn = set(sample["x"][at].tolist())
        assert mass(one) == [x + 7.0 if x in drawn else 1.0 for x in places[at]]


def test_each_buffer_has_its_own_priority_key() -> None:
    rbs = [*prioritized(0, priority_key="a"), *prioritized(100, priority_key="b")]
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=40)
    sample = rb.sample()
    sample["a"], sample["b"] = torch.full((2, 20), 3.0), torch.full((2, 20), 5.0)
    rb.update_tensordict_priority(sample)
    assert (max(mass(rbs[0])), max(mass(rbs[1]))) == (3.0, 5.0)


def test_without_a_priority_items_get_the_default_one() -> None:
    rbs = prioritized(0, 100)
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=200)
    rbs[0].update_priority(torch.arange(SIZE), torch.arange(SIZE) + 1.0)
    with pytest.warns(UserWarning, match=r"no entry 'td_error', .* entries \['x'\]") as said:
        assert rb.update_tensordict_priority(rb.sample()) == (200, 0)
    assert [one.filename for one in said] == [__file__]
    # any further warning is an error here
    assert rb.update_tensordict_priority(rb.sample()) == (200, 0)
    assert mass(rbs[0])[-1] == mass(rbs[0])[-2] == SIZE
    rb.mark_update(rb.sample()["index"])
    assert mass(rbs[1]) == [1.0] * SIZE


def test_several_priorities_of_an_item_are_reduced_by_its_buffer() -> None:
    rbs = []
    for how in ("max", "min"):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(SIZE), reduction=how
        )
        rb.extend(TensorDict({"x": torch.arange(SIZE * 3).view(SIZE, 3)}, [SIZE, 3]))
        rbs.append(rb)
    ensemble = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=100)
    sample = ensemble.sample()
    assert sample.batch_size == torch.Size([2, 50, 3])
    assert sample["index", "buffer_ids"].shape == torch.Size([2, 50, 3])
    assert torch.equal(sample["x"][..., 1], sample["index", "index"][..., 1] * 3 + 1)
    sample["td_error"] = sample["x"].unsqueeze(-1) + 2.0
    assert ensemble.update_tensordict_priority(sample) == (100, 0)
    for at, (rb, shift) in enumerate(zip(rbs, (4.0, 2.0), strict=True)):
        drawn = set(sample["index", "index"][at, :, 0].tolist())
        assert mass(rb) == [3 * x + shift if x in drawn else 1.0 for x in range(SIZE)]


def test_buffers_without_priorities_count_no_updates() -> None:
    [weighted], [uniform] = prioritized(0), dicts(100)
    rb = ReplayBufferEnsemble(weighted, uniform, sample_from_all=True, batch_size=20)
    sample = rb.sample()
    sample["td_error"] = torch.ones(2, 10)
    assert rb.update_tensordict_priority(sample) == (10, 0)
    assert rb.update_priority(sample["index"], 1.0) == (10, 0)


@pytest.mark.parametrize(
    ("index", "priority", "error", "message"),
    [
        (torch.arange(3), 1.0, TypeError, "TensorDict with 'buffer_ids' and 'index'"),
        (None, torch.ones(7), RuntimeError, r"priority must have .* got 7 numbers for 4 items"),
        (None, torch.full((2, 2), float("nan")), ValueError, "nan"),
    ],
)
def test_updates_that_make_no_sense_are_refused(
    index: Any, priority: Any, error: type[Exception], message: str
) -> None:
    rb = ReplayBufferEnsemble(*prioritized(0, 100), sample_from_all=True, batch_size=4)
    with pytest.raises(error, match=message):
        rb.update_priority(rb.sample()["index"] if index is None else index, priority)
    with pytest.raises(KeyError, match=r"needs the entry 'index' .* has \['x'\]"):
        rb.update_tensordict_priority(items(0))


def test_passes_without_replacement_fill_their_rows() -> None:
    rbs = [*numbers(0, size=5, sampler=SamplerWithoutReplacement())]
    rbs += numbers(10, size=7, sampler=SamplerWithoutReplacement())
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=4)
    rows = torch.stack([rb.sample() for _ in range(35)])  # 70 batches from each buffer
    for at, size in enumerate((5, 7)):
        found = rows[:, at].flatten()
        for start in range(0, 70, size):  # in each pass
            assert sorted((found[start : start + size] - 10 * at).tolist()) == list(range(size))


def test_slices_stay_within_their_rows() -> None:
    data = TensorDict({"x": torch.arange(20), "episode": torch.arange(20) // 5}, [20])
    data["next", "done"] = torch.zeros(20, 1, dtype=torch.bool)
    rbs = []
    for _ in range(2):
        sampler = SliceSampler(slice_len=3, traj_key="episode")
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
        rb.extend(data)
        rbs.append(rb)
    sample = ReplayBufferEnsemble(*rbs, batch_size=12).sample()
    slices = sample.reshape(4, 3)
    assert (slices["x"].diff(dim=1) == 1).all()
    assert (slices["episode"] == slices["episode"][:, :1]).all()
    last = torch.tensor([False, False, True]).expand(4, 3)
    assert torch.equal(slices["next", "truncated"].reshape(4, 3), last)


def test_prioritized_slices_carry_weights_and_take_priorities() -> None:
    rbs = []
    for _ in range(2):
        sampler = PrioritizedSliceSampler(20, 1.0, 1.0, eps=0.0, slice_len=5, traj_key="episode")
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
        rb.extend(TensorDict({"x": torch.arange(20), "episode": torch.arange(20) // 5}, [20]))
        rbs.append(rb)
    ensemble = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=20)
    sample = ensemble.sample()
    assert sample["_weight"].tolist() == [[1.0] * 10] * 2
    sample["td_error"] = sample["x"] + 3.0
    assert ensemble.update_tensordict_priority(sample) == (20, 0)
    for at, rb in enumerate(rbs):
        drawn = set(sample["x"][at].tolist())
        assert mass(rb) == [x + 3.0 if x in drawn else 1.0 for x in range(20)]


def test_slices_and_single_items_go_together() -> None:
    data = TensorDict({"x": torch.arange(20), "episode": torch.arange(20) // 5}, [20])
    data["next", "done"] = data["next", "truncated"] = torch.zeros(20, 1, dtype=torch.bool)
    rbs = []
    for sampler in (SliceSampler(slice_len=2, traj_key="episode"), RandomSampler()):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
        rb.extend(data)
        rbs.append(rb)
    sample = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=8).sample()
    assert sample["next", "truncated"][0].flatten().tolist() == [False, True] * 2
    assert not sample["next", "truncated"][1].any()
    assert torch.equal(sample["x"], sample["index", "index"])


# -- the buffers -------------------------------------------------------------------------------


def test_an_int_gives_the_buffer_itself() -> None:
    rbs = numbers(0, 100, 200)
    rb = ReplayBufferEnsemble(*rbs)
    for index in (1, -2, np.int64(1), torch.tensor(1)):
        assert rb[index] is rbs[1]
    assert len(rb) == 3
    assert [one is other for one, other in zip(rb[:]._members, rbs, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ((slice(None), slice(None, 3)), [[0, 1, 2], [100, 101, 102], [200, 201, 202]]),
        ((slice(None), 0), [0, 100, 200]),
        ((..., 0), [0, 100, 200]),
        ((..., slice(-1, None)), [[9], [109], [209]]),
        ((slice(None), torch.tensor([0, 2])), [[0, 2], [100, 102], [200, 202]]),
        ((slice(None), [2, 0]), [[2, 0], [102, 100], [202, 200]]),
        ((slice(None, 2), slice(None, 2)), [[0, 1], [100, 101]]),
        (([0, 2], 1), [1, 201]),
        ((torch.tensor([2, 0]), 1), [201, 1]),
        ((np.array([2]), range(2)), [[200, 201]]),
        ((torch.tensor([True, False, True]), 1), [1, 201]),
        ((1, slice(None, 2)), [100, 101]),
        ((0, 0), 0),
    ],
)
def test_items_of_several_buffers_are_read_at_once(index: Any, expected: Any) -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100, 200), p=[0.0, 0.5, 0.5])
    assert rb[index].tolist() == expected
    storages: Any = rb.storage
    found = storages[index]
    found = [part.tolist() for part in found] if isinstance(found, list) else found.tolist()
    assert found == expected


def test_reading_tensordicts_of_all_buffers() -> None:
    rb = ReplayBufferEnsemble(*dicts(0, 100))
    assert rb[:, :2]["x"].tolist() == [[0, 1], [100, 101]]
    assert rb["x"].tolist() == [list(range(10)), list(range(100, 110))]
    assert rb.read_all_in_order(3)["x"].tolist() == [[0, 1, 2], [100, 101, 102]]
    chunks = [chunk["x"].tolist() for chunk in rb.iter_in_order(6)]
    assert [len(chunk) for chunk in chunks] == [6, 4, 6, 4]
    assert [x for chunk in chunks for x in chunk] == [*range(10), *range(100, 110)]


@pytest.mark.parametrize("index", [slice(1, None), [1, 2], torch.tensor([1, 2]), np.array([1, 2])])
def test_several_buffers_are_an_ensemble_of_them(index: Any) -> None:
    rbs = numbers(0, 100, 200)
    transform = torch.neg
    rb = ReplayBufferEnsemble(*rbs, p=[0.5, 0.25, 0.25], batch_size=8, transform=transform)
    part = rb[index]
    assert isinstance(part, ReplayBufferEnsemble)
    assert [one is other for one, other in zip(part._members, rbs[1:], strict=True)] == [True] * 2
    assert part.sampler.p.tolist() == [0.5, 0.5]  # type: ignore[attr-defined]
    assert part.sample().shape == (2, 4)
    assert (part.sample() <= -100).all()
    for name, cls in (("storage", StorageEnsemble), ("sampler", SamplerEnsemble)):
        some: Any = getattr(rb, name)[index]
        assert isinstance(some, cls)
        assert len(some) == 2
        assert some[0] is getattr(rbs[1], name)


def test_everything_is_the_ensemble_itself() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100))
    for part in (rb, rb.storage, rb.sampler, rb.writer):
        ensemble: Any = part
        assert ensemble[:] is ensemble
        assert ensemble[...] is ensemble
        assert len(ensemble) == 2


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "there is no buffer 3; this ensemble has 3"),
        (-4, IndexError, "there is no buffer -4; this ensemble has 3"),
        ([0, 5], IndexError, "there is no buffer 5; this ensemble has 3"),
        (
            torch.zeros(2, 2, dtype=torch.int64),
            RuntimeError,
            "must have one dimension, got an index with 2 dimensions",
        ),
        (torch.zeros(2), TypeError, "must be integers, got float32"),
        ({}, IndexError, "{} does not select a buffer"),
        ((0, 99), IndexError, "99"),
    ],
)
def test_an_index_that_names_no_buffer_says_so(
    index: Any, error: type[Exception], message: str
) -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100, 200))
    with pytest.raises(error, match=message):
        rb[index]
    if not isinstance(index, tuple):
        for part in (rb.storage, rb.sampler, rb.writer):
            ensemble: Any = part
            with pytest.raises(error):
                ensemble[index]


@pytest.mark.parametrize("name", ["sampler", "writer"])
def test_samplers_and_writers_have_no_items(name: str) -> None:
    part: Any = getattr(ReplayBufferEnsemble(*numbers(0, 100)), name)
    assert part[(0,)] is part[0]
    with pytest.raises(
        IndexError, match=rf"an index of {name}s must not have several .* got \(0, 1\)"
    ):
        part[0, 1]


def test_a_storage_ensemble_reads_what_a_sampler_ensemble_chose() -> None:
    rbs = numbers(0, 100)
    storages = StorageEnsemble(*(rb.storage for rb in rbs), transforms=[None, torch.neg])
    samplers = SamplerEnsemble(*(rb.sampler for rb in rbs), sample_from_all=True)
    index, info = samplers.sample(storages, 6)
    assert index["buffer_ids"].tolist() == [0, 1]
    assert list(info.keys()) == []
    (zero, first), (one, second) = storages.get(index)
    assert (zero, one) == (0, 1)
    assert torch.equal(first, index["index"][0])
    assert torch.equal(second, -100 - index["index"][1])
    with pytest.raises(TypeError, match="must be a TensorDict with the entries 'buffer_ids'"):
        storages.get(torch.arange(3))
    with pytest.raises(TypeError, match="needs a StorageEnsemble, got LazyTensorStorage"):
        samplers.sample(rbs[0].storage, 6)
    assert (storages.max_size, storages.initialized, storages.shared) == (20, True, False)


def test_a_part_exchanged_in_a_buffer_is_exchanged_in_the_ensemble() -> None:
    rbs = numbers(0, 100)
    rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=40)
    sampler = PrioritizedSampler(SIZE, alpha=1.0, beta=1.0, eps=0.0)
    rb[0].set_sampler(sampler)
    rb[0].update_priority(torch.arange(SIZE), torch.tensor([0.0] * 9 + [1.0]))
    assert set(rb.sample()[0].tolist()) == {9}
    samplers: Any = rb.sampler
    assert samplers[0] is sampler
    rb[1].set_storage(TensorStorage(torch.full((3,), 7)))
    assert set(rb.sample()[1].tolist()) == {7}


def test_the_ensembles_parts_can_be_exchanged() -> None:
    rbs = numbers(0, 100)
    rb = ReplayBufferEnsemble(*rbs, batch_size=40)
    samplers = [SamplerWithoutReplacement(), RandomSampler()]
    old: Any = rb.set_sampler(SamplerEnsemble(*samplers, p=[1.0, 0.0]))
    assert isinstance(old[0], RandomSampler)
    assert rbs[0].sampler is samplers[0]
    assert (rb.sample() < 100).all()
    full = [TensorStorage(torch.full((3,), value)) for value in (5, 6)]
    before: Any = rb.set_storage(StorageEnsemble(*full))
    assert isinstance(before[0], LazyTensorStorage)
    assert rbs[1].storage is full[1]
    assert set(rb.sample().flatten().tolist()) == {5}
    writers = [ImmutableDatasetWriter(), RoundRobinWriter()]
    gone: Any = rb.set_writer(WriterEnsemble(*writers))
    assert isinstance(gone[1], RoundRobinWriter)
    with pytest.raises(RuntimeError, match="data set"):
        rb[0].extend(torch.arange(2))
    with pytest.raises(TypeError, match="the sampler of an ensemble must be a SamplerEnsemble"):
        rb.set_sampler(RandomSampler())
    with pytest.raises(ValueError, match="must have one writer for each of the 2 buffers, got 1"):
        rb.set_writer(WriterEnsemble(RoundRobinWriter()))


def test_an_ensembles_sampler_is_copied_without_the_buffers_that_it_looks_at() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), p=[0.25, 0.75])
    again = pickle.loads(pickle.dumps(rb.sampler))
    assert [type(again[at]) for at in range(len(again))] == [RandomSampler] * 2
    assert torch.equal(again.p, torch.tensor([0.25, 0.75]))
    rb[0].set_sampler(SamplerWithoutReplacement())
    assert isinstance(rb.sampler[0], SamplerWithoutReplacement)  # type: ignore[index] # ensemble
    assert isinstance(again[0], RandomSampler)


# -- made of parts -----------------------------------------------------------------------------


def test_an_ensemble_is_made_of_parts() -> None:
    storages = StorageEnsemble(*(LazyTensorStorage(SIZE) for _ in range(3)))
    rb = ReplayBufferEnsemble(
        storages=storages,
        samplers=SamplerEnsemble(
            *(SamplerWithoutReplacement(drop_last=True) for _ in range(3)), sample_from_all=True
        ),
        writers=WriterEnsemble(*(RoundRobinWriter() for _ in range(3))),
        collate_fns=[None, None, torch.neg],
        batch_size=9,
    )
    for at in range(3):
        assert isinstance(rb[at], ReplayBuffer)
        assert rb[at].storage is storages[at]
        rb[at].extend(torch.arange(SIZE) + 100 * at)
    data, info = rb.sample(return_info=True)
    expected = info["index", "index"] + torch.tensor([[0], [100], [200]])
    assert torch.equal(data, expected * torch.tensor([[1], [1], [-1]]))


def test_how_buffers_are_chosen_can_be_said_to_the_ensemble_of_parts() -> None:
    def parts() -> dict[str, Any]:
        return {
            "storages": StorageEnsemble(*(rb.storage for rb in numbers(0, 100))),
            "samplers": SamplerEnsemble(RandomSampler(), RandomSampler()),
            "writers": WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
            "batch_size": 12,
        }

    rb = ReplayBufferEnsemble(**parts(), p=[0.0, 1.0], num_buffer_sampled=3)
    assert rb.sample().shape == (3, 4)
    assert (rb.sample() >= 100).all()
    rb = ReplayBufferEnsemble(**parts(), sample_from_all=True, collate_fns=[torch.neg, None])
    assert (rb.sample() >= 100).tolist() == [[False] * 6, [True] * 6]
    assert (rb[0].sample(5) <= 0).all()
    with pytest.raises(RuntimeError, match=r"pass .*one"):
        ReplayBufferEnsemble(**parts(), p=[1.0, 1.0], sample_from_all=True)


def test_a_shared_ensemble_has_shared_buffers() -> None:
    rb = ReplayBufferEnsemble(*dicts(0, 100), shared=True, batch_size=4)
    assert rb[0].shared
    assert rb[1].shared


def test_its_parts_may_be_made_when_it_is_first_used() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), batch_size=4, delayed_init=True)
    assert not rb.initialized
    assert rb.sample().shape == (2, 2)
    assert rb.initialized


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((ReplayBuffer(),), {"storages": 1}, RuntimeError, "pass either buffers"),
        ((), {}, TypeError, "needs buffers, or all three of storages="),
        ((), {"writers": WriterEnsemble()}, TypeError, "all three"),
        ((torch.ones(3),), {}, TypeError, "an ensemble must consist of buffers, got tensor"),
    ],
)
def test_invalid_members_of_an_ensemble_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ReplayBufferEnsemble(*arguments, **options)


def test_ensembles_do_not_nest() -> None:
    inner = ReplayBufferEnsemble(*numbers(0, 100))
    with pytest.raises(TypeError, match="an ensemble cannot contain another"):
        ReplayBufferEnsemble(inner)


def test_parts_of_different_numbers_are_refused() -> None:
    storages = StorageEnsemble(LazyTensorStorage(3), LazyTensorStorage(3))
    writers = WriterEnsemble(RoundRobinWriter())
    with pytest.raises(ValueError, match="the same number of storages, samplers and writers, got"):
        ReplayBufferEnsemble(
            storages=storages,
            samplers=SamplerEnsemble(RandomSampler(), RandomSampler()),
            writers=writers,
        )
    with pytest.raises(ValueError, match="got 1 writers for 2 storages"):
        writers.register_storage(storages)
    with pytest.raises(TypeError, match="needs a StorageEnsemble, got LazyTensorStorage"):
        writers.register_storage(storages[0])
    with pytest.raises(TypeError, match="for each storage, got 1 for 2 storages"):
        StorageEnsemble(*storages._members, transforms=[None])
    with pytest.raises(ValueError, match="at least one storage"):
        StorageEnsemble()


# -- writing -----------------------------------------------------------------------------------


def test_writing_into_the_ensemble_says_where_to_write() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100))
    with pytest.raises(RuntimeError, match=r"write to one of .*ensemble\[i\].extend\(data\)"):
        rb.extend(torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"ensemble\[i\].extend\(data\)"):
        rb.add(torch.zeros(()))
    with pytest.raises(RuntimeError, match=r"ensemble\[i\]\[index\] = data"):
        rb[0] = torch.zeros(())
    with pytest.raises(TypeError, match=r"was changed. Call ensemble\[i\].write_all\(...\)"):
        rb.write_all(torch.zeros(3))
    with pytest.raises(TypeError, match=r"ReplayBufferEnsemble\.set_at_: only a single buffer has"):
        rb.set_at_("x", torch.zeros(3), 0)
    for part in (rb.writer, rb.storage):
        ensemble: Any = part
        for how in ("add", "extend"):
            with pytest.raises(RuntimeError, match=r"write to one of .*ensemble\[i\]"):
                getattr(ensemble, how)(torch.zeros(3))
    assert rb[:, :].sum() == sum(range(10)) * 2 + 1000


def test_items_go_to_the_buffer_that_their_entry_names() -> None:
    rbs = [TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE)) for _ in range(3)]
    rb = ReplayBufferEnsemble(*rbs, routing_key=("to", "buffer"))
    to = torch.tensor([[2, 0], [2, 0]])
    data = TensorDict({"x": torch.arange(4).view(2, 2), ("to", "buffer"): to}, [2, 2])
    written = rb.extend(data)
    assert written["buffer_ids"].tolist() == [2, 0, 2, 0]
    assert written["index"].tolist() == [0, 0, 1, 1]
    assert (rbs[0]["x"].tolist(), rbs[2]["x"].tolist()) == ([1, 3], [0, 2])
    assert len(rbs[1]) == 0
    item = TensorDict({"x": torch.tensor(9), ("to", "buffer"): torch.tensor(1)}, [])
    assert rb.add(item)["buffer_ids"].item() == 1
    assert rbs[1]["x"].tolist() == [9]
    assert rb.extend(data[:0])["index"].shape == torch.Size([0])
    assert rb.write_count == 5


def test_a_dimension_of_the_data_names_the_buffers() -> None:
    rbs = [TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE)) for _ in range(2)]
    rb = ReplayBufferEnsemble(*rbs, routing_dim=-1)
    rb.extend(TensorDict({"x": torch.arange(6).view(3, 2)}, [3, 2]))
    assert (rbs[0]["x"].tolist(), rbs[1]["x"].tolist()) == ([0, 2, 4], [1, 3, 5])
    with pytest.raises(
        ValueError, match=r"routing_dim=-1 must be a dimension with one entry for each of the 2"
    ):
        rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
    with pytest.raises(RuntimeError, match="an item was given to the ensemble"):
        rb.add(TensorDict({"x": torch.tensor(3)}, []))


@pytest.mark.parametrize(
    ("to", "error", "message"),
    [
        (torch.tensor([0, 2]), ValueError, "in 'to' must be between 0 and 1, got 2"),
        (torch.tensor([0, -1]), ValueError, "in 'to' must be between 0 and 1, got -1"),
        (torch.tensor([0.0, 1.0]), TypeError, "must be integers, got torch.float32"),
        (
            torch.zeros(2, 2, dtype=torch.int64),
            ValueError,
            "one buffer number per item, got 4 numbers for 2",
        ),
        (None, KeyError, "no entry 'to'"),
    ],
)
def test_a_batch_that_names_no_buffers_is_refused_whole(
    to: Any, error: type[Exception], message: str
) -> None:
    rb = ReplayBufferEnsemble(*dicts(0, 100), routing_key="to")
    data = TensorDict({"x": torch.zeros(2)}, [2])
    with pytest.raises(error, match=message):
        rb.extend(data if to is None else data.set("to", to))
    assert rb.write_count == 20
    with pytest.raises(TypeError, match="must be a TensorDict, got Tensor"):
        rb.extend(torch.zeros(3))
    with pytest.raises(ValueError, match="routing_key and routing_dim cannot be combined"):
        ReplayBufferEnsemble(*dicts(0), routing_key="to", routing_dim=0)


def test_entries_of_a_sample_are_changed_where_they_are(tmp_path: Path) -> None:
    rbs = []
    for base in (0, 100):
        path = tmp_path / str(base)
        storage = LazyMemmapStorage(SIZE, scratch_dir=path, shared_init=True)
        rbs.append(TensorDictReplayBuffer(storage=storage))
        rbs[-1].extend(items(base))
    with ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=6) as rb:
        sample = rb.sample()
        rbs[1].extend(items(500))  # replaces every item of the second buffer
        result = rb.update_if_present(
            index=sample["index"],
            generation=sample["index_generation"],
            patch={"x": -sample["x"]},
        )
        assert result.updated.tolist() == [True] * 3 + [False] * 3
        drawn = set(sample["x"][0].tolist())
        assert rbs[0]["x"].tolist() == [-x if x in drawn else x for x in range(10)]
        assert rbs[1]["x"].tolist() == list(range(500, 510))


# -- as a whole --------------------------------------------------------------------------------


def test_iteration_goes_on_and_on() -> None:
    rb = ReplayBufferEnsemble(*numbers(0, 100), batch_size=4)
    assert [batch.shape for batch, _ in zip(rb, range(7), strict=False)] == [(2, 2)] * 7


@pytest.mark.parametrize("make", [numbers, prioritized])
@pytest.mark.parametrize("p", [None, [0.2, 0.8]])
def test_prefetched_batches_are_those_that_a_seed_gives(make: Any, p: Any) -> None:
    found = []
    for prefetch in (None, 3):
        generator = torch.Generator().manual_seed(5)
        rb = ReplayBufferEnsemble(
            *make(0, 100), p=p, batch_size=8, generator=generator, prefetch=prefetch
        )
        samples = [rb.sample() for _ in range(9)]
        found.append([(s if isinstance(s, torch.Tensor) else s["x"]).tolist() for s in samples])
        rb.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [numbers, dicts])
def test_batches_that_were_made_ahead_come_next_after_a_load(tmp_path: Path, make: Any) -> None:
    def filled() -> ReplayBufferEnsemble:
        generator = torch.Generator().manual_seed(4)
        return ReplayBufferEnsemble(*make(0, 100), batch_size=8, generator=generator, prefetch=3)

    rb, other = filled(), filled()
    rb.sample()
    rb.dumps(tmp_path / "save")
    other.loads(tmp_path / "save")
    for _ in range(5):
        mine, theirs = (one.sample() for one in (rb, other))
        assert (mine == theirs).all()


def test_prefetched_draws_are_taken_back() -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    rbs = numbers(0, sampler=sampler)
    rb = ReplayBufferEnsemble(*rbs, batch_size=2, prefetch=2)
    assert rb.sample().tolist() == [[0, 1]]
    rb.set_sampler(rb.sampler)
    assert rb.sample().tolist() == [[2, 3]]
    rb.close()


def test_counts_are_those_of_all_buffers() -> None:
    one, other = numbers(0, 100)
    rb = ReplayBufferEnsemble(one, other, batch_size=4)
    other.extend(torch.arange(5))
    assert rb.write_count == 25
    assert rb.stats() == {
        "size": 20,
        "capacity": 20,
        "utilization": 1.0,
        "write_count": 25,
        "prefetch_queue_size": 0,
        "initialized": True,
        "num_buffers": 2,
    }


def test_empty_empties_every_buffer() -> None:
    rbs = prioritized(0, 100)
    rb = ReplayBufferEnsemble(*rbs, batch_size=4)
    rb.empty()
    assert [len(one) for one in rbs] == [0, 0]
    assert rb.write_count == 0
    with pytest.raises(EmptyBufferError, match="of the ensemble is empty"):
        rb.sample()
    rbs[0].extend(items(0))
    rbs[1].extend(items(100))
    assert rb.sample().shape == (2, 2)
    rb.empty(empty_write_count=False)
    assert rb.write_count == 20


def test_an_immutable_buffer_keeps_all_of_them_from_being_emptied() -> None:
    one, other = numbers(0, 100)
    other.set_writer(ImmutableDatasetWriter())
    rb = ReplayBufferEnsemble(one, other)
    with pytest.raises(RuntimeError, match="cannot be emptied"):
        rb.empty()
    assert (len(one), len(other)) == (10, 10)


def test_a_state_brings_everything_back() -> None:
    def made(seed: int) -> ReplayBufferEnsemble:
        torch.manual_seed(seed)
        one = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(SIZE)
        )
        writer = TensorDictMaxValueWriter("x")
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer)
        generator = torch.Generator().manual_seed(seed)
        return ReplayBufferEnsemble(one, other, p=[1, 2], batch_size=8, generator=generator)

    rb = made(3)
    index = rb[0].extend(items(0, 7))
    rb[0].update_priority(index, index + 1.0)
    rb[1].extend(items(50))
    rb.sample()
    again = made(4)
    again.sampler.p = [5, 1]  # type: ignore[attr-defined]
    again.load_state_dict(rb.state_dict())
    assert mass(again[0]) == mass(rb[0])
    assert again.sampler.p.tolist() == rb.sampler.p.tolist()  # type: ignore[attr-defined]
    assert again.write_count == rb.write_count == 7 + 10
    for _ in range(4):
        one, other = again.sample(), rb.sample()
        assert one["x"].tolist() == other["x"].tolist()
        assert torch.equal(one["_weight"], other["_weight"])
    for each in (rb, again):
        assert each[1].extend(items(40, 20)).max().item() == 1  # 58 and 59 beat 57 and 58
        assert each[0].extend(items(0, 1)).tolist() == [7]
    with pytest.raises(ValueError, match=r"state has the storages \['0', '1'\], but this"):
        ReplayBufferEnsemble(*numbers(0)).load_state_dict(rb.state_dict())


def test_a_state_holds_what_the_buffers_have_of_their_own() -> None:
    class Scale(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(factor), requires_grad=False)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return data * self.factor

    def made(factor: float, seed: int) -> ReplayBufferEnsemble:
        rbs = [ReplayBuffer(storage=LazyTensorStorage(SIZE), transform=Scale(factor))]
        rbs[0].generator = torch.Generator().manual_seed(seed)
        return ReplayBufferEnsemble(*rbs, batch_size=5)

    rb, again = made(2.0, 1), made(3.0, 2)
    rb[0].extend(torch.arange(SIZE))
    again.load_state_dict(rb.state_dict())
    assert again.sample().tolist() == rb.sample().tolist()
    assert again[0, 3].item() == 6.0


@pytest.mark.parametrize("kind", ["ensemble", "offline to online"])
def test_several_buffers_count_as_a_buffer_and_are_freed_when_they_are_unused(kind: str) -> None:
    one, other = prioritized(0, 100)
    rb: Any
    if kind == "ensemble":
        rb = ReplayBufferEnsemble(one, other, batch_size=4)
    else:
        rb = OfflineToOnlineReplayBuffer(one, online_capacity=SIZE, batch_size=4)
    view: BufferView = rb
    assert isinstance(view, ReplayBuffer)
    scheduler = LambdaScheduler(view, "num_buffer_sampled", lambda step: step + 1)
    scheduler.step()
    assert view.sampler.num_buffer_sampled == 4  # type: ignore[attr-defined]
    assert not isinstance(one, type(rb))
    used = weakref.ref(rb)
    del rb, view, scheduler
    assert used() is None


@pytest.mark.parametrize("name", ["reserve", "publish", "ack", "to_parquet", "set_"])
def test_a_method_of_a_single_buffer_names_the_buffer_to_call(name: str) -> None:
    one, other = dicts(0, 100)
    rbs: list[Any] = [
        ReplayBufferEnsemble(one, batch_size=4),
        OfflineToOnlineReplayBuffer(other, online_capacity=SIZE, batch_size=4),
    ]
    for rb, single in zip(rbs, (r"ensemble\[i\]", "online_buffer"), strict=True):
        message = rf"{type(rb).__name__}.{name}: only a single .* Call {single}.{name}\(...\)"
        with pytest.raises(TypeError, match=message):
            getattr(rb, name)("x")


def test_repr_names_the_parts() -> None:
    text = repr(ReplayBufferEnsemble(*numbers(0, 100)))
    for name in ("StorageEnsemble(", "SamplerEnsemble(RandomSampler", "WriterEnsemble("):
        assert name in text


def test_a_closed_ensemble_has_closed_its_buffers(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "buffer")
    with ReplayBufferEnsemble(ReplayBuffer(storage=storage), batch_size=2) as rb:
        rb[0].extend(torch.arange(SIZE))
        rb.flush()
        assert rb.sample().shape == (1, 2)
    with pytest.raises(RuntimeError):
        rb.sample()


# -- shared buffers ----------------------------------------------------------------------------


def shared(tmp_path: Path, *bases: int) -> list[TensorDictPrioritizedReplayBuffer]:
    made = []
    for base in bases:
        storage = LazyMemmapStorage(SIZE, scratch_dir=tmp_path / str(base), shared_init=True)
        rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=storage)
        rb.extend(items(base))
        made.append(rb)
    return made


def test_late_priorities_are_counted_as_stale(tmp_path: Path) -> None:
    rbs = shared(tmp_path, 0, 100)
    with ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=10) as rb:
        assert rb.shared
        sample, info = rb.sample(return_info=True)
        assert torch.equal(info["index_generation"], sample["index_generation"])
        rbs[1].extend(items(500))
        sample["td_error"] = torch.full((2, 5), 9.0)
        assert rb.update_tensordict_priority(sample) == (5, 5)
        assert mass(rbs[1]) == [1.0] * SIZE
        generation = sample["index_generation"]
        assert rb.update_priority(sample["index"], 4.0, generation=generation) == (5, 5)
        assert rb.update_priority(sample["index"], 4.0) == (10, 0)


def test_a_private_buffer_next_to_a_shared_one_has_no_tickets(tmp_path: Path) -> None:
    rbs = [*shared(tmp_path, 0), *prioritized(100)]
    with ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=10) as rb:
        sample = rb.sample()
        assert (sample["index_generation"][0] >= 0).all()
        assert sample["index_generation"][1].tolist() == [-1] * 5
        rbs[0].extend(items(0))
        sample["td_error"] = torch.full((2, 5), 9.0)
        assert rb.update_tensordict_priority(sample) == (5, 5)


def learner(rb: ReplayBufferEnsemble, answers: Any) -> None:
    sample = rb.sample()
    sample["td_error"] = sample["x"] + 5.0
    update = rb.update_tensordict_priority(sample)
    rb[1].extend(items(700, 2))
    answers.put((sample["index", "index"].tolist(), sample["x"].tolist(), tuple(update)))
    rb.close()


def test_an_ensemble_of_shared_buffers_goes_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tensordict before 0.15 leaves "None" there once it has stacked, which a child cannot read.
    monkeypatch.delenv("LAZY_LEGACY_OP", raising=False)
    rbs = shared(tmp_path, 0, 100)
    with ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=10) as rb:
        context = multiprocessing.get_context("forkserver")
        answers = context.Queue()
        process = context.Process(target=learner, args=(rb, answers))
        process.start()
        index, x, update = answers.get()
        process.join()
        answers.close()
        answers.join_thread()
        assert x == [index[0], [place + 100 for place in index[1]]]
        assert update == (10, 0)
        assert mass(rbs[0]) == [place + 5.0 if place in index[0] else 1.0 for place in range(SIZE)]
        assert rbs[1]["x"].tolist()[:2] == [700, 701]
        again = pickle.loads(pickle.dumps(rb))
        assert torch.equal(again[:, :]["x"], rb[:, :]["x"])
        again.close()


def test_an_ensemble_with_a_plain_list_cannot_be_passed_on(tmp_path: Path) -> None:
    plain = ReplayBuffer(storage=ListStorage(3))
    plain.add(torch.zeros(1))
    rb = ReplayBufferEnsemble(*shared(tmp_path, 0), plain)
    with rb, pytest.raises(RuntimeError, match="ListStorage"):
        pickle.dumps(rb)
