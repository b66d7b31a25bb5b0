"""Prioritized sampling: draws, weights, priorities of new items, and saved states."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PriorityUpdate,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    attach,
)
from tests.kit.rings import ring_of
from tests.replay.test_samplers import TwoMethods
from tests.selection import seeds

pytestmark = pytest.mark.product(few=4)

EVERYWHERE = ["memory", "memmap", "directory", "list", "tensors", "users"]


@pytest.fixture(params=EVERYWHERE)
def anywhere(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """Makes a storage of each kind that stores priorities differently: ``anywhere(max_size)``."""
    made: list[Any] = []

    def storage(max_size: int) -> Any:
        path = tmp_path / f"buffer{len(made)}"
        makers = {
            "memory": lambda: LazyTensorStorage(max_size),
            "memmap": lambda: LazyMemmapStorage(max_size),
            "directory": lambda: LazyMemmapStorage(max_size, scratch_dir=path, shared_init=True),
            "list": lambda: ListStorage(max_size),
            "tensors": lambda: TensorStorage(torch.zeros(max_size, dtype=torch.int64)),
            "users": lambda: TwoMethods(max_size),
        }
        made.append(makers[request.param]())
        return made[-1]

    yield storage
    for one in made:
        one.close()


def buffer(storage: Any, *, capacity: int | None = None, **options: Any) -> ReplayBuffer:
    options = {"alpha": 0.7, "beta": 0.9, **options}
    sampler = PrioritizedSampler(capacity or storage.max_size, **options)
    return ReplayBuffer(storage=storage, sampler=sampler)


def filled(storage: Any, priorities: Any, **options: Any) -> ReplayBuffer:
    """Makes a buffer of items 0, 1, 2, ... with these priorities."""
    rb = buffer(storage, **options)
    index = rb.extend(torch.arange(len(priorities)))
    rb.update_priority(index, torch.tensor(priorities, dtype=torch.float64))
    return rb


def raw(rb: ReplayBuffer, count: int | None = None) -> list[float]:
    found = rb.sampler.state_dict()["_priorities"].tolist()
    return found if count is None else found[:count]


def require_shares(index: Any, probability: Any, *, limit: float) -> None:
    """Checks draws with a chi-square test; items of probability 0 must not be drawn."""
    probability = np.asarray(probability, dtype=np.float64)
    counts = np.bincount(np.asarray(index.tolist()), minlength=len(probability))
    assert counts[probability == 0].sum() == 0
    possible = probability > 0
    expected = probability[possible] * counts.sum()
    assert ((counts[possible] - expected) ** 2 / expected).sum() < limit


# -- probabilities ---------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0, 2.5])
def test_an_item_is_drawn_in_proportion_to_its_mass(anywhere: Any, alpha: float) -> None:
    priority = [0.5, 1.0, 2.0, 4.0, 0.25]
    rb = filled(anywhere(5), priority, alpha=alpha)
    drawn = torch.cat([rb.sampler.sample(rb.storage, 1000)[0] for _ in range(20)])
    mass = np.array(priority) ** alpha
    require_shares(drawn, mass / mass.sum(), limit=18.5)  # 4 degrees of freedom: 1 in 1000


def test_a_thousand_items_are_drawn_in_proportion_to_their_masses() -> None:
    priority = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rb = filled(LazyTensorStorage(1000), priority.tolist(), alpha=0.6)
    drawn = torch.cat([rb.sampler.sample(rb.storage, 10_000)[0] for _ in range(30)])
    mass = (priority.numpy() + 1e-8) ** 0.6
    require_shares(drawn, mass / mass.sum(), limit=1143)  # 999 degrees of freedom: 1 in 1000


def test_eps_keeps_items_without_priority_in_the_game(anywhere: Any) -> None:
    rb = filled(anywhere(4), [0.0, 3.0, 0.0, 1.0], alpha=1.0, eps=1.0)
    require_shares(rb.sample(10_000), np.array([1, 4, 1, 2]) / 8, limit=16.3)


def test_a_huge_priority_dominates_the_next_sample(anywhere: Any) -> None:
    rb = filled(anywhere(10), [1.0] * 10)
    rb.update_priority(torch.tensor([7]), 1e9)
    assert (rb.sample(1000) == 7).double().mean() > 0.99
    rb.update_priority(7, 0.0)
    assert 7 not in set(rb.sample(1000).tolist())


def test_priorities_that_are_all_zero_draw_uniformly_with_weight_one(anywhere: Any) -> None:
    rb = filled(anywhere(4), [0.0] * 4, eps=0.0)
    for dtype in (torch.float32, torch.float64):
        rb.sampler.dtype = dtype
        data, info = rb.sample(4000, return_info=True)
        require_shares(data, [0.25] * 4, limit=16.3)
        assert torch.equal(info["_weight"], torch.ones(4000, dtype=dtype))


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_the_weight_is_computed_in_the_dtype_that_was_asked_for(
    anywhere: Any, dtype: torch.dtype, rtol: float
) -> None:
    priority = [0.3, 1.0, 2.0, 5.0]
    rb = filled(anywhere(4), priority, dtype=dtype)
    mass = (np.array(priority) + 1e-8) ** 0.7
    expected = torch.from_numpy((mass / mass.min()) ** -0.9)
    index, info = rb.sampler.sample(rb.storage, 100)
    assert info["_weight"] is info["priority_weight"]
    for found, at in ((info["_weight"], index), _weights_of(rb)):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected[at], rtol=rtol, atol=0)


def _weights_of(rb: ReplayBuffer) -> tuple[torch.Tensor, torch.Tensor]:
    data, info = rb.sample(100, return_info=True)
    return info["_weight"], data


def test_the_smallest_mass_is_that_of_the_items_that_are_there(make: Any) -> None:
    rb = filled(make(3), [1e-6, 1.0, 4.0], alpha=1.0, beta=1.0, eps=0.0)
    rb.add(torch.tensor(3))  # overwrites the smallest; the default is 4
    data, info = rb.sample(1000, return_info=True)
    torch.testing.assert_close(info["_weight"], torch.where(data == 1, 1.0, 0.25))


def test_a_weight_whose_priority_has_changed_since_the_draw_is_that_of_the_draw(make: Any) -> None:
    rb = filled(make(4), [1.0, 2.0, 4.0, 8.0], alpha=1.0, beta=1.0, eps=0.0, dtype=torch.float64)
    elements = torch.arange(4)
    drawn = torch.tensor([1.0, 0.5, 0.25, 0.125])
    assert rb.sampler._weights(elements, drawn).tolist() == drawn.tolist()
    rb.update_priority(2, 1000.0)
    ring_of(rb).claims.claim(1)  # element 0 is being overwritten and has no mass
    found = rb.sampler._weights(elements, drawn)
    ring_of(rb).claims.abort()
    assert found.tolist() == drawn.tolist()


def test_beta_and_alpha_and_eps_act_when_they_are_set(anywhere: Any) -> None:
    rb = filled(anywhere(3), [1.0, 2.0, 4.0], alpha=0.0, beta=1.0, eps=0.0)
    sampler = rb.sampler
    assert set(_weights_of(rb)[0].tolist()) == {1.0}
    sampler.alpha = 2.0  # different from 0
    weights, item = _weights_of(rb)
    assert torch.equal(weights, 0.25 ** item.float())
    sampler.beta = 0.5
    weights, item = _weights_of(rb)
    assert torch.equal(weights, 0.5 ** item.float())
    sampler.alpha, sampler.beta, sampler.eps = 1.0, 1.0, 2.0
    weights, item = _weights_of(rb)
    torch.testing.assert_close(weights, torch.tensor([1.0, 3 / 4, 3 / 6])[item])
    assert (sampler.alpha, sampler.beta, sampler.eps) == (1.0, 1.0, 2.0)
    assert raw(rb) == [1.0, 2.0, 4.0]


# -- seeds -----------------------------------------------------------------------------------------


def test_seeds_decide_every_draw(anywhere: Any) -> None:
    rb = filled(anywhere(10), [float(i) for i in range(10)])
    rb.generator = torch.Generator().manual_seed(1)
    first = [rb.sample(50), rb.sample(50)]
    rb.generator = torch.Generator().manual_seed(1)
    torch.manual_seed(99)
    assert torch.equal(rb.sample(50), first[0])
    assert torch.equal(rb.sample(50), first[1])
    assert not torch.equal(*first)
    rb.generator = None
    torch.manual_seed(7)
    second = rb.sample(50)
    assert not torch.equal(rb.sample(50), second)
    torch.manual_seed(7)
    assert torch.equal(rb.sample(50), second)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.product("name value")
@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-1, -1e-300, float("nan"), float("inf")])
def test_an_exponent_below_zero_is_refused_when_it_is_given_and_when_it_is_set(
    make: Any, name: str, value: float
) -> None:
    message = rf"{name} must be a finite number of at least 0, got {name}={value}"
    with pytest.raises(ValueError, match=message):
        PrioritizedSampler(10, **{"alpha": 0.7, "beta": 0.9, name: value})
    rb = filled(make(2), [1.0, 2.0])
    for sampler in (rb.sampler, PrioritizedSampler(10, 0.7, 0.9)):
        before = getattr(sampler, name)
        with pytest.raises(ValueError, match=message):
            setattr(sampler, name, value)
        assert getattr(sampler, name) == before


def test_an_alpha_that_is_too_large_for_the_priorities_changes_nothing(make: Any) -> None:
    rb = filled(make(2), [1e200, 2.0])
    with pytest.raises(ValueError, match="nothing was changed"):
        rb.sampler.alpha = 2.0
    assert rb.sampler.alpha == 0.7
    assert repr(rb.sampler) == "PrioritizedSampler(alpha=0.7, beta=0.9, eps=1e-08, reduction=max)"


def test_other_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reduction must be one of .* got 'first'"):
        PrioritizedSampler(10, 0.7, 0.9, reduction="first")
    with pytest.raises(ValueError, match="max_capacity must be at least 1, got 0"):
        PrioritizedSampler(0, 0.7, 0.9)
    with pytest.raises(NotImplementedError, match=r"torch\.float64, got torch\.float16"):
        PrioritizedSampler(10, 0.7, 0.9, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=r"must be the CPU, .* got 'cuda:1'"):
        PrioritizedSampler(10, 0.7, 0.9, device="cuda:1")
    assert PrioritizedSampler(10, 0.7, 0.9, device="cpu").device == torch.device("cpu")
    assert PrioritizedSampler(10, 0.7, 0.9).max_size == 10


def test_where_there_is_nothing_there_is_nothing_to_draw(anywhere: Any) -> None:
    storage = anywhere(4)
    sampler = PrioritizedSampler(4, 0.7, 0.9)
    if not len(storage):  # a TensorStorage is full from the start
        for count in (0, 1):
            with pytest.raises(EmptyBufferError) as caught:
                sampler.sample(storage, count)
            assert isinstance(caught.value, RuntimeError)
    rb = ReplayBuffer(storage=storage, sampler=sampler)
    rb.extend(torch.arange(3))
    index, info = sampler.sample(storage, 0)
    assert (index.shape, info["_weight"].shape) == ((0,), (0,))
    rb.empty()
    for count in (0, 1):
        with pytest.raises(EmptyBufferError):
            sampler.sample(storage, count)
    rb.extend(torch.arange(2))
    assert set(rb.sample(1000).tolist()) == {0, 1}


# -- updates ---------------------------------------------------------------------------------------


@pytest.mark.product("index priority expected")
@pytest.mark.parametrize(
    ("index", "priority", "expected"),
    [
        (1, 5.0, [1.0, 5.0, 1.0, 1.0]),
        (torch.tensor(1), torch.tensor(5.0), [1.0, 5.0, 1.0, 1.0]),
        ([0, 2], [5, 6], [5.0, 1.0, 6.0, 1.0]),
        (range(4), 2, [2.0] * 4),
        (torch.tensor([3, 0]), torch.tensor([[5.0], [6.0]]), [6.0, 1.0, 1.0, 5.0]),
        (torch.tensor([[3], [0]]), torch.tensor([[5.0], [6.0]]), [6.0, 1.0, 1.0, 5.0]),
        (np.array([3, 0]), np.array([5.0, 6.0], np.float32), [6.0, 1.0, 1.0, 5.0]),
        (torch.tensor([3, 0]), torch.tensor([5, 6]), [6.0, 1.0, 1.0, 5.0]),
        (torch.tensor([3]), torch.tensor([5.0], dtype=torch.bfloat16), [1.0, 1.0, 1.0, 5.0]),
        (torch.tensor([3]), torch.tensor([5.0], requires_grad=True), [1.0, 1.0, 1.0, 5.0]),
        (torch.tensor([2, 2, 2]), torch.tensor([5.0, 6.0, 7.0]), [1.0, 1.0, 7.0, 1.0]),
        (torch.tensor([-1, 3, -1]), torch.tensor([5.0, 6.0, 7.0]), [1.0, 1.0, 1.0, 6.0]),
        (-1, 5.0, [1.0] * 4),
        (torch.tensor([-1]), torch.tensor(5.0), [1.0] * 4),
        (torch.tensor([], dtype=torch.int64), torch.tensor([]), [1.0] * 4),
        ([], 3.0, [1.0] * 4),
    ],
)
def test_indices_and_priorities_come_in_many_forms(
    anywhere: Any, index: Any, priority: Any, expected: list[float]
) -> None:
    rb = buffer(anywhere(4))
    rb.extend(torch.arange(4))
    rb.update_priority(index, priority)
    assert raw(rb) == expected


@pytest.mark.product("dtype column step")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_tensors_say_the_same_in_place_as_their_numbers_in_lists(
    anywhere: Any, dtype: torch.dtype, column: bool, step: int
) -> None:
    by_tensor, by_list = buffer(anywhere(50)), buffer(anywhere(50))
    for rb in (by_tensor, by_list):
        rb.extend(torch.arange(50))
    torch.manual_seed(3)
    index = torch.randint(50, (40,))[::step]
    priority = torch.rand(40, dtype=dtype)[::step]
    found = by_tensor.update_priority(index, priority[:, None] if column else priority)
    assert found == by_list.update_priority(index.tolist(), priority.double().tolist())
    assert found == PriorityUpdate(len(index), 0)
    assert raw(by_tensor) == raw(by_list)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_is_refused_in_the_words_for_its_numbers(
    anywhere: Any, dtype: torch.dtype
) -> None:
    rb = filled(anywhere(4), [1.0, 2.0, 3.0, 4.0])
    for index, priority in ([[0, 1, 2], [9.0, -0.5, 9.0]], [[0, 1, 4], [9.0, 9.0, 9.0]]):
        said = []
        for given in (priority, torch.tensor(priority, dtype=dtype)):
            with pytest.raises((ValueError, IndexError)) as caught:
                rb.update_priority(torch.tensor(index), given)
            said.append((caught.type, str(caught.value)))
        assert said[0] == said[1]
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0]


def test_the_bytes_of_a_negative_view_are_not_taken_for_the_priority() -> None:
    rb = buffer(LazyTensorStorage(4))
    rb.extend(torch.arange(4))
    negative = torch.conj(torch.tensor([1 - 5j])).imag  # 5, in memory that holds -5
    with pytest.raises(RuntimeError, match="negative bit"):
        rb.update_priority(torch.tensor([3]), negative)
    assert raw(rb) == [1.0] * 4


@pytest.mark.parametrize("index", [[0, 4], [-2], [0, 2**40]])
def test_an_index_beyond_the_capacity_changes_nothing(anywhere: Any, index: list[int]) -> None:
    rb = filled(anywhere(4), [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(IndexError, match=r"out of range for a buffer of 4|must be from 0 to 3"):
        rb.update_priority(torch.tensor(index), 9.0)
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("index", [[False, False, True, True], [0.5], None], ids=str)
def test_what_is_no_index_changes_no_priority(anywhere: Any, index: Any) -> None:
    rb = filled(anywhere(4), [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(IndexError, match="item indices must be integers"):
        rb.update_priority(index, 9.0)
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("value", ["1", None])
def test_an_exponent_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=f"alpha must be a finite number.* got alpha={value}"):
        PrioritizedSampler(4, value, 1.0)


@pytest.mark.parametrize("priority", [[1.0, 2.0], [], [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]])
def test_another_number_of_priorities_than_indices_changes_nothing(
    anywhere: Any, priority: Any
) -> None:
    rb = filled(anywhere(4), [1.0, 2.0, 3.0, 4.0])
    message = "priority should be a number or an iterable of the same length as index"
    with pytest.raises(RuntimeError, match=f"{message}, but there are . priorities for 3 items"):
        rb.update_priority(torch.tensor([0, 1, 2]), torch.tensor(priority))
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_one_bad_priority_refuses_the_batch(anywhere: Any, bad: float) -> None:
    rb = filled(anywhere(4), [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match="priorit") as caught:
        rb.update_priority([0, 1], [9.0, bad])
    assert str(bad) in str(caught.value)
    assert "nothing was changed" in str(caught.value)
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0]


def test_coordinates_name_an_element_where_there_are_several_dimensions(make: Any) -> None:
    rb = buffer(make(6, ndim=2), alpha=1.0)
    index = rb.extend(torch.arange(6).reshape(3, 2))
    assert index.shape == (6, 2)  # 2 slots of 3 lanes
    sampler = rb.sampler
    sampler.update_priority(torch.tensor([[1, 2], [0, 0]]), torch.tensor([5.0, 4.0]))
    sampler.update_priority((torch.tensor([0]), torch.tensor([2])), 3.0)
    assert raw(rb) == [4.0, 1.0, 3.0, 1.0, 1.0, 5.0]
    assert sampler.update_priority(torch.tensor([[-1, -1], [1, 0]]), [8.0, 2.0]).applied == 1
    assert raw(rb) == [4.0, 1.0, 3.0, 2.0, 1.0, 5.0]
    with pytest.raises(IndexError, match=r"out of range for a buffer of 6"):
        sampler.update_priority(torch.tensor([[-1, 0]]), 8.0)
    with pytest.raises(IndexError, match="2 coordinates"):
        sampler.update_priority(torch.tensor([[1, 1, 1]]), 8.0)
    (slot, lane), info = sampler.sample(rb.storage, 2000)
    require_shares(slot * 3 + lane, np.array([4, 1, 3, 2, 1, 5]) / 16, limit=20.5)
    assert info["_weight"].shape == (2000,)


def test_a_sample_with_several_dimensions_takes_its_priorities_back(make: Any) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(6, ndim=2), sampler=PrioritizedSampler(6, 1.0, 1.0), batch_size=6
    )
    rb.extend(TensorDict({"a": torch.tensor([[0, 3], [1, 4], [2, 5]])}, [3, 2]))
    for _ in range(20):
        sample = rb.sample()
        sample["td_error"] = sample["a"].double() + 1
        rb.update_tensordict_priority(sample)
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_mark_update_gives_the_default_priority(anywhere: Any) -> None:
    rb = filled(anywhere(4), [1.0, 2.0, 9.0, 4.0])
    rb.mark_update(torch.tensor([0, -1, 3]))
    assert raw(rb) == [9.0, 2.0, 9.0, 9.0]
    rb.sampler.mark_update(1)
    assert raw(rb) == [9.0] * 4


@pytest.mark.parametrize("anywhere", ["memory", "memmap", "directory", "list"], indirect=True)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_priorities_in_the_data_are_those_of_the_items(anywhere: Any, shape: Any) -> None:
    rb = TensorDictReplayBuffer(storage=anywhere(6), sampler=PrioritizedSampler(6, 0.7, 0.9))
    priority = torch.tensor([7.0, 6.0]).reshape(shape)
    rb.extend(TensorDict({"a": torch.arange(2), "td_error": priority}, [2]))
    rb.add(TensorDict({"a": torch.tensor(2), "td_error": priority[1] / 2}))
    assert raw(rb, 3) == [7.0, 6.0, 3.0]
    assert rb.sampler.default_priority == 7.0


# -- what a new item gets --------------------------------------------------------------------------


def test_a_new_item_gets_the_largest_priority_ever_given(anywhere: Any) -> None:
    rb = filled(anywhere(4), [2.0, 9.0, 3.0, 1.0])
    assert rb.sampler.default_priority == 9.0
    rb.update_priority(1, 0.5)
    rb.add(torch.tensor(4))
    assert raw(rb) == [9.0, 0.5, 3.0, 1.0]


def test_after_empty_nothing_was_ever_given(anywhere: Any) -> None:
    rb = filled(anywhere(4), [2.0, 9.0, 3.0, 1.0])
    rb.empty()
    assert rb.sampler.default_priority == 1.0
    rb.extend(torch.arange(2))
    assert raw(rb, 2) == [1.0, 1.0]
    assert np.isnan(raw(rb)[2:]).all()


def test_within_the_buffer_the_largest_is_looked_for_when_it_has_gone(anywhere: Any) -> None:
    rb = filled(anywhere(4), [9.0, 1.0, 2.0, 3.0], max_priority_within_buffer=True)
    assert rb.sampler.max_priority_within_buffer
    assert rb.sampler.default_priority == 9.0
    rb.add(torch.tensor(4))  # overwrites the 9
    assert raw(rb) == [3.0, 1.0, 2.0, 3.0]
    rb.update_priority(0, 0.5)
    rb.update_priority(3, 0.25)  # lowers the largest
    assert rb.sampler.default_priority == 2.0
    rb.add(torch.tensor(5))
    assert raw(rb) == [0.5, 2.0, 2.0, 0.25]
    rb.update_priority([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4])  # all below 1
    rb.add(torch.tensor(6))
    assert raw(rb) == [0.1, 0.2, 0.4, 0.4]
    rb.extend(torch.arange(4))  # overwrites all items
    assert raw(rb) == [1.0] * 4
    rb.update_priority([0, 1, 2, 3], 5.0)
    rb.empty()
    assert rb.sampler.default_priority == 1.0
    rb.extend(torch.arange(2))
    assert raw(rb, 2) == [1.0, 1.0]


@pytest.mark.parametrize("within", [False, True])
def test_the_largest_and_its_place_are_known_at_every_step(make: Any, within: bool) -> None:
    rb = buffer(make(11), alpha=1.0, beta=1.0, max_priority_within_buffer=within)
    for item in range(20):
        index = rb.add(torch.tensor(item))
        rb.update_priority(index, 21 - item)
        masses = rb.sampler._sum_tree
        assert masses.dtype is torch.float32
        there = [21.0 - n for n in range(max(0, item - 10), item + 1)]
        torch.testing.assert_close(masses.sort().values[-len(there) :], torch.tensor(there[::-1]))
        if within:
            assert rb.sampler._max_priority == (max(there), int(masses.argmax()))
        else:
            assert rb.sampler._max_priority == (21.0, 0)
    rb.update_priority(rb.extend(torch.arange(10)), 12)
    assert rb.sampler._max_priority == ((12.0, 0) if within else (21.0, 0))


class Plain:
    """A reference model: the priorities of a ring as a list."""

    def __init__(self, capacity: int) -> None:
        self.raw: list[float | None] = [None] * capacity
        self.head = 0

    def default(self) -> float:
        return max((value for value in self.raw if value is not None), default=1.0)

    def write(self, count: int, given: list[float] | None) -> None:
        places = [(self.head + k) % len(self.raw) for k in range(count)]
        for place in places:
            self.raw[place] = None
        values = [self.default()] * count if given is None else given
        for place, value in zip(places, values, strict=True):
            self.raw[place] = value
        self.head = (self.head + count) % len(self.raw)


@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("handles", [1, 2])
def test_within_the_buffer_any_sequence_of_calls_does_what_a_list_does(
    directory: Any, seed: int, handles: int
) -> None:
    rng = np.random.default_rng(seed)
    storages = [directory(7), directory(7)] if handles == 2 else [LazyTensorStorage(7)]
    rbs = [
        TensorDictReplayBuffer(
            storage=storage,
            sampler=PrioritizedSampler(7, 0.6, 0.9, max_priority_within_buffer=True),
            batch_size=3,
        )
        for storage in storages
    ]
    plain = Plain(7)
    rbs[0].add(TensorDict({"a": torch.tensor(1)}))
    plain.write(1, None)
    for _ in range(300):
        rb = rbs[rng.integers(len(rbs))]
        choice = rng.integers(6)
        if choice < 2:
            count = int(rng.integers(1, 4))
            rb.extend(TensorDict({"a": torch.arange(count)}, [count]))
            plain.write(count, None)
        elif choice == 2:
            given = rng.integers(0, 9, 2).astype(float)
            entries = {"a": torch.arange(2), "td_error": torch.from_numpy(given)}
            rb.extend(TensorDict(entries, [2]))
            plain.write(2, given.tolist())
        elif choice == 3 and plain.raw[2] is not None:
            rb[2] = TensorDict({"a": torch.tensor(5)})  # an in-place change keeps the priority
        elif choice == 4:
            rb.add(TensorDict({"a": torch.tensor(1)}))
            plain.write(1, None)
        else:
            there = [place for place, value in enumerate(plain.raw) if value is not None]
            for place in rng.permutation(there)[:2]:
                value = float(rng.integers(0, 9))
                rb.update_priority(int(place), value)
                plain.raw[place] = value
        found = [None if np.isnan(value) else value for value in raw(rb)]
        assert found == plain.raw
        assert rb.sampler.default_priority == plain.default()


def test_within_the_buffer_counts_for_every_writer_of_the_storage(make_private: Any) -> None:
    storage = make_private(4)
    rb = filled(storage, [9.0, 1.0, 2.0, 3.0], max_priority_within_buffer=True)
    other = ReplayBuffer(storage=storage, sampler=RandomSampler())
    other.add(torch.tensor(4))
    assert raw(rb) == [3.0, 1.0, 2.0, 3.0]
    rb.update_priority(3, 0.5)
    storage.set(0, torch.tensor(5))
    assert raw(rb) == [2.0, 1.0, 2.0, 0.5]
    rb.set_sampler(RandomSampler())  # the ring is left unchanged for the next sampler
    rb.add(torch.tensor(6))
    rb.set_sampler(PrioritizedSampler(4, 0.7, 0.9))
    assert raw(rb) == [2.0, 9.0, 2.0, 0.5]


def test_within_the_buffer_is_remembered_by_the_directory(directory: Any, tmp_path: Any) -> None:
    rb = filled(directory(4), [9.0, 1.0, 2.0, 3.0], max_priority_within_buffer=True)
    other = attach(tmp_path / "buffer")
    assert other.sampler.max_priority_within_buffer
    other.add(torch.tensor(4))
    assert raw(rb) == [3.0, 1.0, 2.0, 3.0]
    rb.update_priority([0, 3], 0.5)
    sent = pickle.loads(pickle.dumps(rb))
    sent.add(torch.tensor(5))
    assert raw(rb) == [0.5, 2.0, 2.0, 0.5]
    sent.close()
    other.close()


# -- several samplers ------------------------------------------------------------------------------


def test_two_samplers_on_one_storage_hear_of_every_write_and_keep_their_own(
    make_private: Any,
) -> None:
    storage = make_private(6)
    one, two = buffer(storage, alpha=1.0), buffer(storage, alpha=1.0, eps=0.5)
    three = buffer(storage, alpha=1.0, max_priority_within_buffer=True)
    one.extend(torch.arange(3))
    two.extend(torch.arange(3, 5))
    one.update_priority(range(5), [1.0, 2.0, 3.0, 4.0, 5.0])
    two.update_priority(range(5), [5.0, 0.0, 0.0, 0.0, 0.0])
    three.update_priority(range(5), [0.5, 0.25, 0.0, 0.0, 0.0])
    three.add(torch.tensor(5))
    assert raw(one) == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    assert raw(two) == [5.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    assert raw(three) == [0.5, 0.25, 0.0, 0.0, 0.0, 0.5]
    require_shares(two.sample(1000), np.array([5.5, 0.5, 0.5, 0.5, 0.5, 5.5]) / 13, limit=20.5)
    one.empty()
    for rb in (two, three):
        with pytest.raises(EmptyBufferError):
            rb.sample(1)
    two.extend(torch.arange(2))
    assert set(three.sample(1000).tolist()) == {0, 1}


def test_a_table_of_its_own_knows_generations_too(make_private: Any) -> None:
    storage = make_private(4)
    first, rb = buffer(storage), buffer(storage).share()
    first.extend(torch.arange(4))
    assert rb.sampler.ring() is not storage.ring()
    index = torch.arange(4)
    rb.extend(torch.arange(4, 6))
    result = rb.update_priority(index, 7.0, generation=torch.arange(4))
    assert result == PriorityUpdate(applied=2, stale=2)
    assert raw(rb) == [1.0, 1.0, 7.0, 7.0]


def test_priorities_that_were_given_before_the_storage_was_known_go_with_it(anywhere: Any) -> None:
    sampler = PrioritizedSampler(2, 1.0, 1.0)
    storage = anywhere(4)
    sampler.extend(torch.tensor([0, 1]))
    sampler.update_priority(torch.tensor([0, 1]), torch.tensor([0.0, 5.0]))
    storage.set(
        range(4) if not isinstance(storage, TwoMethods) else torch.arange(4), torch.arange(4)
    )
    index, _ = sampler.sample(storage, 1000)
    assert sampler.state_dict()["_priorities"][:2].tolist() == [0.0, 5.0]
    assert 0 not in set(index.tolist())
    assert {1, 2, 3} == set(index.tolist())


def test_priorities_of_items_that_are_not_there_leave_the_directorys_own(directory: Any) -> None:
    rb = buffer(directory(4))
    with pytest.raises(ValueError, match="finite and non-negative"):
        rb.update_priority(torch.tensor([0]), float("nan"))
    assert rb.update_priority(torch.tensor([0]), 5.0) == PriorityUpdate(0, 0)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 0.0, 9.0]))
    with attach(rb.storage.scratch_dir) as other:
        assert set(other.sample(100, return_info=True)[1]["index"].tolist()) == {3}
    rb.close()


def test_a_users_storage_is_followed_by_its_length() -> None:
    storage = TwoMethods(6)
    sampler = PrioritizedSampler(6, 1.0, 1.0)
    storage.set(torch.arange(3), torch.arange(3))
    assert set(sampler.sample(storage, 200)[0].tolist()) == {0, 1, 2}
    sampler.update_priority([0, 1, 2], [0.0, 4.0, 4.0], storage=storage)
    storage.set(3, torch.tensor(3))  # the sampler is not told
    assert set(sampler.sample(storage, 200)[0].tolist()) == {1, 2, 3}
    del storage.items[3], storage.items[2]
    assert set(sampler.sample(storage, 200)[0].tolist()) == {1}
    assert sampler.state_dict()["_priorities"][:2].tolist() == [0.0, 4.0]


def test_a_users_storage_may_be_larger_than_max_capacity() -> None:
    rb = buffer(TwoMethods(6), capacity=2)
    index = rb.extend(torch.arange(6))
    rb.update_priority(index, torch.arange(6.0))
    assert raw(rb) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_client_that_joins_later_finds_the_current_alpha(directory: Any) -> None:
    rb = filled(directory(4), [1.0, 2.0, 3.0, 4.0])
    sent = pickle.dumps(rb)
    rb.sampler.alpha = 0.2
    late = buffer(directory(4))  # with the alpha of the directory
    arrived = pickle.loads(sent)
    assert arrived.sampler.alpha == late.sampler.alpha == rb.sampler.alpha == 0.2
    late.sampler.alpha = 0.1
    assert arrived.sampler.alpha == rb.sampler.alpha == 0.1
    buffer(directory(4), alpha=0.1)
    with pytest.raises(ValueError, match=r"alpha=0\.1"):
        buffer(directory(4), alpha=0.5)
    arrived.close()


def test_a_sampler_that_leaves_takes_its_alpha_along(make_private: Any) -> None:
    storage = make_private(4)
    rb = filled(storage, [1.0, 2.0, 3.0, 4.0])
    sampler = rb.sampler
    sampler.alpha, sampler.eps = 0.3, 0.1
    rb.set_sampler(PrioritizedSampler(4, 0.9, 0.9))
    assert (sampler.alpha, sampler.eps) == (0.3, 0.1)
    assert (ring_of(storage).tree.alpha, ring_of(storage).tree.eps) == (0.9, 1e-8)
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0]
    rb.set_sampler(sampler)
    assert (ring_of(storage).tree.alpha, ring_of(storage).tree.eps) == (0.3, 0.1)


# -- state -----------------------------------------------------------------------------------------


def test_everything_comes_back_with_the_state(anywhere: Any) -> None:
    rb = filled(anywhere(4), [0.0, 7.0, 1.0, 3.0], alpha=0.3, beta=0.2, eps=0.01)
    rb.update_priority(1, 2.0)  # no item has the largest priority any more
    state = rb.sampler.state_dict()
    assert set(state) == {"_alpha", "_beta", "_eps", "_max_priority", "_priorities"}
    assert state["_priorities"].dtype is torch.float64
    other = filled(anywhere(4), [9.0, 9.0, 9.0, 9.0])
    other.sampler.load_state_dict(state)
    rb.update_priority(range(4), 5.0)  # does not change the copied state
    sampler = other.sampler
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.3, 0.2, 0.01)
    assert raw(other) == [0.0, 2.0, 1.0, 3.0]
    assert sampler.default_priority == 7.0
    torch.testing.assert_close(
        sampler._sum_tree, ((torch.tensor([0.0, 2.0, 1.0, 3.0]) + 0.01) ** 0.3)
    )
    torch.manual_seed(4)
    drawn, info = sampler.sample(other.storage, 50)
    rb.sampler.load_state_dict(state)
    torch.manual_seed(4)
    again, same = rb.sampler.sample(rb.storage, 50)
    assert torch.equal(drawn, again)
    assert torch.equal(info["_weight"], same["_weight"])


def test_a_state_in_which_nothing_was_given_yet_says_so(anywhere: Any) -> None:
    rb = buffer(anywhere(4))
    rb.extend(torch.arange(4))
    state = rb.sampler.state_dict()
    assert state["_max_priority"] is None
    other = filled(anywhere(4), [9.0, 9.0, 9.0, 9.0])
    other.sampler.load_state_dict(state)
    assert other.sampler.default_priority == 1.0
    for one in (rb, other):
        one.update_priority(range(4), 0.25)
        one.add(torch.tensor(4))
    assert raw(other) == raw(rb)
    assert other.sampler.default_priority == rb.sampler.default_priority


def test_a_state_is_loaded_before_the_sampler_knows_a_storage(anywhere: Any) -> None:
    rb = filled(anywhere(4), [0.0, 7.0, 0.0, 3.0], alpha=1.0, eps=0.0)
    sampler = PrioritizedSampler(4, 0.5, 0.5)
    sampler.load_state_dict(rb.sampler.state_dict())
    assert (sampler.alpha, sampler.beta) == (1.0, 0.9)
    storage = anywhere(4)
    ReplayBuffer(storage=storage, sampler=RandomSampler()).extend(torch.arange(4))
    drawn, _ = sampler.sample(storage, 2000)
    require_shares(drawn, [0, 0.7, 0, 0.3], limit=10.8)
    assert sampler.default_priority == 7.0


def test_a_state_of_another_capacity_is_refused_whole(make: Any) -> None:
    rb = filled(make(4), [1.0, 2.0, 3.0, 4.0])
    state = filled(make(5), [5.0] * 5, alpha=0.1, beta=0.1).sampler.state_dict()
    with pytest.raises(ValueError, match="priorities for 5 elements, but the storage has 4"):
        rb.sampler.load_state_dict(state)
    assert (rb.sampler.alpha, rb.sampler.beta) == (0.7, 0.9)
    assert raw(rb) == [1.0, 2.0, 3.0, 4.0]


def test_the_state_of_a_buffer_holds_its_priorities(make: Any) -> None:
    options = {"alpha": 0.7, "beta": 0.9, "batch_size": 4}
    rb = TensorDictPrioritizedReplayBuffer(storage=make(8), **options)
    entries = {"a": torch.arange(5), "td_error": torch.arange(5.0)}
    rb.extend(TensorDict(entries, [5]))
    other = TensorDictPrioritizedReplayBuffer(storage=make(8), **options)
    other.load_state_dict(rb.state_dict())
    assert raw(other, 5) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert np.isnan(raw(other)[5:]).all()
    assert other.sampler.default_priority == 4.0


# -- what it says of itself ------------------------------------------------------------------------


def test_the_repr_has_the_exponents_as_they_are(make: Any) -> None:
    sampler = PrioritizedSampler(10, 0.7, 0.9, eps=0.5, reduction="sum")
    assert repr(sampler) == "PrioritizedSampler(alpha=0.7, beta=0.9, eps=0.5, reduction=sum)"
    rb = filled(make(2), [1.0, 2.0])
    rb.sampler.alpha = 0.25
    assert repr(rb.sampler) == "PrioritizedSampler(alpha=0.25, beta=0.9, eps=1e-08, reduction=max)"


def test_a_buffer_that_makes_its_own_sampler_passes_everything_on() -> None:
    rb = PrioritizedReplayBuffer(
        alpha=0.1,
        beta=0.2,
        eps=0.3,
        dtype=torch.float64,
        reduction="sum",
        storage=LazyTensorStorage(5),
    )
    sampler = rb.sampler
    assert isinstance(sampler, PrioritizedSampler)
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.1, 0.2, 0.3)
    assert (sampler.dtype, sampler.reduction, sampler.max_capacity) == (torch.float64, "sum", 5)


@pytest.mark.parametrize("number", [3, 5, 0])
@pytest.mark.parametrize("place", ["memory", "directory"])
def test_priorities_that_are_not_as_many_as_the_items_are_refused(
    place: str, number: int, tmp_path: Any
) -> None:
    path = tmp_path / "buffer" if place == "directory" else None
    storage = LazyMemmapStorage(10, scratch_dir=path, shared_init=path is not None)
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=0.4, storage=storage)
    rb.extend({"obs": torch.zeros(2, 3)})
    message = rf"got {number} priorities for 4 items; nothing was changed"
    with pytest.raises(ValueError, match=message):
        rb.extend({"obs": torch.zeros(4, 3), "td_error": torch.ones(number)})
    assert (len(rb), rb.write_count) == (2, 2)
    storage.close()


def test_a_beta_far_above_1_is_warned_of_where_it_is_set() -> None:
    for beta in (0.0, 1.0, 1.1, 2.0):
        sampler = PrioritizedSampler(10, alpha=0.7, beta=beta)
    with pytest.warns(UserWarning, match=r"beta=7 .*1 corrects.*from 0 to 1") as said:
        PrioritizedSampler(10, alpha=0.7, beta=7)
    assert [one.filename for one in said] == [__file__]
    with pytest.warns(UserWarning, match="beta=3.5") as said:
        sampler.beta = 3.5
    assert [one.filename for one in said] == [__file__]
    assert sampler.beta == 3.5
