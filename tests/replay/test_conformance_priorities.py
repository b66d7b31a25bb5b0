"""Priorities: their sources, the draws that follow from them, and the importance weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LambdaScheduler,
    LazyMemmapStorage,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SchedulerList,
    StepScheduler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.replay.conformance import Maker, cases, numbers, steps

pytestmark = pytest.mark.product(few=3)

EPS = 1e-8


every_storage = pytest.mark.parametrize(
    "maker", cases(samplers=("prioritized",), writers=("round robin",)), indirect=True, ids=str
)
# Every kind of list stores its priorities in the same way.
every_table = pytest.mark.parametrize(
    "maker",
    cases(("list", "memory", "directory"), ("prioritized",), ("round robin",)),
    indirect=True,
    ids=str,
)


def learner(maker: Maker, max_size: int = 10, **options: Any) -> Any:
    """Makes a `TensorDictPrioritizedReplayBuffer` on the storage of the case."""
    options = {"alpha": 0.7, "beta": 0.9, "batch_size": 400, **options}
    return TensorDictPrioritizedReplayBuffer(storage=maker.storage(max_size), **options)


def weights_of(rb: Any, key: str = "id") -> dict[int, float]:
    """Returns the importance weight of every item that is drawn."""
    sample = rb.sample()
    return dict(zip(sample[key].tolist(), sample["priority_weight"].tolist(), strict=True))


def expected_weights(
    priorities: dict[int, float], alpha: float = 0.7, beta: float = 0.9
) -> dict[int, float]:
    """Returns the weights of Schaul et al., section 3.4, normalized as in TorchRL."""
    mass = {item: (priority + EPS) ** alpha for item, priority in priorities.items()}
    least = min(mass.values())
    return {item: (one / least) ** -beta for item, one in mass.items()}


def assert_priorities(rb: Any, priorities: dict[int, float], **exponents: float) -> None:
    """Checks that draws and weights follow these priorities."""
    assert weights_of(rb) == pytest.approx(expected_weights(priorities, **exponents), rel=1e-4)


def with_priorities(start: int, priorities: list[float]) -> TensorDict:
    return steps(start, start + len(priorities)).set("td_error", torch.tensor(priorities))


# -- where they come from -------------------------------------------------------------------------


@every_table
def test_without_any_priority_all_are_one(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 5))
    assert rb.sampler.default_priority == 1.0
    assert_priorities(rb, dict.fromkeys(range(5), 1.0))


@every_storage
def test_data_bring_their_priority(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(with_priorities(0, [1.0, 2.0, 3.0]))
    rb.add(with_priorities(3, [4.0])[0])
    assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})


@every_table
def test_a_priority_may_have_a_trailing_dimension(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 3).set("td_error", torch.tensor([[1.0], [2.0], [3.0]])))
    assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0})


@every_table
def test_a_priority_key_may_be_nested(maker: Maker) -> None:
    rb = learner(maker, priority_key=("next", "error"))
    rb.extend(steps(0, 3).set(("next", "error"), torch.tensor([1.0, 2.0, 3.0])))
    assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0})
    sample = rb.sample()
    sample["next", "error"] = sample["id"] + 5.0
    rb.update_tensordict_priority(sample)
    assert_priorities(rb, {0: 5.0, 1: 6.0, 2: 7.0})


@every_table
def test_new_items_get_the_largest_raw_priority_so_far(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 3))
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([0.25, 9.0]))
    assert rb.sampler.default_priority == 9.0
    rb.extend(steps(3, 5))
    assert_priorities(rb, {0: 0.25, 1: 9.0, 2: 1.0, 3: 9.0, 4: 9.0})
    rb.update_priority(1, 0.5)  # the largest priority ever, not the current largest
    rb.add(steps(5, 6)[0])
    assert_priorities(rb, {0: 0.25, 1: 0.5, 2: 1.0, 3: 9.0, 4: 9.0, 5: 9.0})


@every_table
def test_an_extend_may_leave_the_priorities_in_the_data_alone(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(with_priorities(0, [5.0, 7.0]), update_priority=False)
    assert_priorities(rb, {0: 1.0, 1: 1.0})


@every_storage
def test_an_item_that_is_written_over_takes_its_priority_along(maker: Maker) -> None:
    rb = learner(maker, 4)
    rb.extend(steps(0, 4))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rb.extend(steps(4, 6))
    assert_priorities(rb, {4: 4.0, 5: 4.0, 2: 3.0, 3: 4.0})


@every_storage
def test_an_item_that_is_changed_keeps_its_priority(maker: Maker) -> None:
    rb = learner(maker, 6)
    rb.extend(steps(0, 4))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rb[1] = steps(20, 21)[0]
    rb[2:4] = steps(30, 32)
    assert_priorities(rb, {0: 1.0, 20: 2.0, 30: 3.0, 31: 4.0})
    assert rb.write_count == 4


@every_table
def test_emptying_forgets_priorities(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 4))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rb.empty()
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(steps(10, 12))
    assert len(set(weights_of(rb).values())) == 1
    assert set(weights_of(rb)) == {10, 11}


# -- updates --------------------------------------------------------------------------------------


@pytest.mark.product("index priority expected")
@every_table
@pytest.mark.parametrize(
    ("index", "priority", "expected"),
    [
        (1, 5.0, {0: 1.0, 1: 5.0, 2: 1.0}),
        (torch.tensor(2), torch.tensor(5.0), {0: 1.0, 1: 1.0, 2: 5.0}),
        (torch.tensor([0, 2]), torch.tensor([3.0, 4.0]), {0: 3.0, 1: 1.0, 2: 4.0}),
        (torch.tensor([0, 2]), torch.tensor([[3.0], [4.0]]), {0: 3.0, 1: 1.0, 2: 4.0}),
        (torch.tensor([0, 2]), 6.0, {0: 6.0, 1: 1.0, 2: 6.0}),
        (torch.tensor([0, 2]), torch.tensor([6.0]), {0: 6.0, 1: 1.0, 2: 6.0}),
        ([0, 1], [3.0, 4.0], {0: 3.0, 1: 4.0, 2: 1.0}),
        (np.array([0, 1]), np.array([3.0, 4.0]), {0: 3.0, 1: 4.0, 2: 1.0}),
        (torch.tensor([1, -1]), torch.tensor([3.0, 100.0]), {0: 1.0, 1: 3.0, 2: 1.0}),
        (torch.tensor([2, 2]), torch.tensor([3.0, 4.0]), {0: 1.0, 1: 1.0, 2: 4.0}),
        (torch.tensor([], dtype=torch.int64), torch.tensor([]), {0: 1.0, 1: 1.0, 2: 1.0}),
    ],
    ids=[
        "one", "scalars", "several", "column", "broadcast", "broadcast tensor", "lists", "arrays",
        "left out", "twice", "none",
    ],
)  # fmt: skip
def test_update_priority_takes_every_shape_of_index_and_priority(
    maker: Maker, index: Any, priority: Any, expected: dict[int, float]
) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 3))
    rb.update_priority(index, priority)
    assert_priorities(rb, expected)


@every_table
def test_priorities_that_do_not_match_their_indices_are_refused(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 3))
    with pytest.raises(RuntimeError, match="3"):
        rb.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 2.0, 3.0]))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="priorit"):
            rb.update_priority(torch.tensor([0, 1]), torch.tensor([7.0, wrong]))
    assert_priorities(rb, dict.fromkeys(range(3), 1.0))


@every_storage
def test_a_sample_takes_its_new_priorities_back(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 6))
    sample = rb.sample()
    sample["td_error"] = sample["id"].float() + 1
    rb.update_tensordict_priority(sample)
    assert_priorities(rb, {number: number + 1.0 for number in range(6)})
    sample["td_error"] = 7 - sample["id"].float()
    update = rb.update_priority(sample)  # as TorchRL's training scripts call it
    assert (update.applied, update.stale) == (len(sample), 0)
    assert_priorities(rb, {number: 7.0 - number for number in range(6)})


def test_a_sample_without_priorities_and_an_index_alone_say_what_is_missing() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(6), batch_size=4
    )
    rb.extend(steps(0, 6))
    sample = rb.sample()
    with pytest.warns(UserWarning, match=r"no entry 'td_error'") as said:
        rb.update_priority(sample)
    assert [one.filename for one in said] == [__file__]
    with pytest.raises(TypeError, match=r"without priorities.*update_priority\(index, priority\)"):
        rb.update_priority(sample["index"])
    with pytest.raises(KeyError, match="needs the entry 'index'"):
        rb.update_priority(sample.exclude("index"))
    unnamed = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(6), batch_size=4
    )
    unnamed.extend(steps(0, 6))
    batch, info = unnamed.sample(return_info=True)
    with pytest.raises(TypeError, match=r"return_info=True.*TensorDictReplayBuffer"):
        unnamed.update_priority(batch)
    assert unnamed.update_priority(info["index"], 2.0).applied == 4


def test_a_generation_that_is_given_beside_a_sample_counts(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(6, scratch_dir=tmp_path / "buffer", shared_init=True)
    with TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=storage, batch_size=4
    ) as rb:
        rb.extend(steps(0, 6))
        sample = rb.sample().set("td_error", torch.ones(4))
        late = sample["index_generation"] - 6
        assert tuple(rb.update_priority(sample, generation=late)) == (0, 4)
        assert tuple(rb.update_priority(sample)) == (4, 0)


@every_table
def test_a_huge_priority_dominates_the_next_sample(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(steps(0, 10))
    rb.update_priority(4, 1e9)
    counts = Counter(numbers(rb.sample()))
    assert counts[4] > 390


@every_table
def test_an_item_of_priority_zero_is_all_but_never_drawn(maker: Maker) -> None:
    rb = learner(maker, alpha=1.0)
    rb.extend(with_priorities(0, [0.0, 1.0, 0.0, 1.0]))
    assert set(numbers(rb.sample())) == {1, 3}


@every_table
def test_items_are_drawn_in_proportion_to_their_mass(maker: Maker) -> None:
    rb = learner(maker, alpha=1.0, beta=1.0, batch_size=5000)
    rb.extend(with_priorities(0, [1.0, 2.0, 3.0, 4.0]))
    counts = Counter(numbers(rb.sample()))
    # The standard deviations are 21 to 35.
    for number in range(4):
        assert abs(counts[number] - 500 * (number + 1)) < 200


@every_table
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.5), (1.0, 1.0), (0.5, 0.0), (2.0, 0.4)])
def test_alpha_and_beta_are_the_exponents_of_the_paper(
    maker: Maker, alpha: float, beta: float
) -> None:
    rb = learner(maker, alpha=alpha, beta=beta)
    rb.extend(with_priorities(0, [1.0, 2.0, 3.0]))
    assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0}, alpha=alpha, beta=beta)


@every_table
def test_alpha_and_beta_may_be_changed_at_any_time(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(with_priorities(0, [1.0, 2.0, 3.0]))
    rb.sampler.beta = 0.4
    assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0}, beta=0.4)
    for alpha in (0.3, 0.0, 1.0):  # priorities are stored before the exponent is applied
        rb.sampler.alpha = alpha
        assert rb.sampler.alpha == alpha
        assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0}, alpha=alpha, beta=0.4)


def test_the_dtype_of_the_weights_can_be_chosen() -> None:
    rb = PrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, dtype=torch.float64, storage=LazyTensorStorage(5), batch_size=3
    )
    rb.extend(torch.arange(5))
    assert rb.sample(return_info=True)[1]["priority_weight"].dtype is torch.float64


@pytest.mark.parametrize(("name", "value"), [("alpha", -0.1), ("beta", -1.0)])
def test_a_negative_exponent_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        PrioritizedSampler(10, **{"alpha": 0.7, "beta": 0.9, name: value})


# -- whole trajectories as items ------------------------------------------------------------------


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    ("reduction", "expected"), [("max", 9.0), ("min", 1.0), ("mean", 4.0), ("median", 3.0)]
)
def test_several_priorities_of_an_item_are_reduced_to_one(
    storage: Any, reduction: str, expected: float
) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=storage(5), reduction=reduction, batch_size=300
    )
    data = TensorDict({"id": torch.arange(15).reshape(3, 5)}, [3, 5])
    rb.extend(data)
    sample = rb.sample()
    assert list(sample.batch_size) == [300, 5]
    assert list(sample["index"].shape) == [300, 5]
    assert list(sample["priority_weight"].shape) == [300, 5]
    assert torch.equal(sample["index"], sample["id"] // 5)
    several = torch.tensor([3.0, 1.0, 9.0, 5.0, 2.0])
    sample["td_error"] = torch.where(sample["index"] == 1, several, torch.ones(5))
    rb.update_tensordict_priority(sample)
    sample = rb.sample()
    weights = dict(
        zip(sample["index"][:, 0].tolist(), sample["priority_weight"][:, 0].tolist(), strict=True)
    )
    assert weights == pytest.approx({0: 1.0, 1: 1.0 / expected, 2: 1.0}, rel=1e-4)


# -- other buffers, other samplers ----------------------------------------------------------------


def test_a_prioritized_buffer_of_anything_takes_priorities_by_index() -> None:
    rb = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=ListStorage(5), collate_fn=list, batch_size=200
    )
    rb.extend(["a", "b", "c"])
    rb.update_priority(torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.0, 3.0]))
    data, info = rb.sample(return_info=True)
    assert set(data) == {"a", "c"}
    assert data == [["a", "b", "c"][at] for at in info["index"].tolist()]
    weight = dict(zip(data, info["priority_weight"].tolist(), strict=True))
    assert weight["a"] / weight["c"] == pytest.approx(3.0)


def test_where_nothing_is_prioritized_updates_do_nothing() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=4)
    rb.extend(steps(0, 5))
    sample = rb.sample()
    sample["td_error"] = torch.ones(4)
    rb.update_tensordict_priority(sample)
    rb.update_priority(0, 3.0)
    assert set(numbers(rb.sample())) <= set(range(5))


@every_table
def test_set_sampler_keeps_the_items_and_returns_the_former_sampler(maker: Maker) -> None:
    rb = learner(maker)
    rb.extend(with_priorities(0, [1.0, 2.0, 3.0]))
    before = rb.sampler
    assert rb.set_sampler(RandomSampler()) is before
    assert set(numbers(rb.sample())) == {0, 1, 2}
    assert "priority_weight" not in rb.sample().keys()  # noqa: SIM118
    rb.set_sampler(PrioritizedSampler(10, 0.7, 0.9))
    assert set(numbers(rb.sample())) == {0, 1, 2}


def test_two_buffers_on_one_storage_hear_of_each_others_writes() -> None:
    storage = LazyTensorStorage(10)
    one = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(10, 1.0, 1.0), batch_size=200)
    other = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(10, 1.0, 1.0), batch_size=200)
    storage.attach(one)
    storage.attach(other)
    one.extend(torch.arange(4))
    assert len(other) == 4
    assert set(other.sample().tolist()) == {0, 1, 2, 3}
    one.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert set(one.sample().tolist()) == {0}
    assert set(other.sample().tolist()) == {0, 1, 2, 3}
    other.extend(torch.arange(4, 6))
    assert set(one.sample().tolist()) == {0, 4, 5}


# -- schedules ------------------------------------------------------------------------------------


def scheduled() -> Any:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.8, beta=0.4, storage=LazyTensorStorage(10), batch_size=200
    )
    rb.extend(with_priorities(0, [1.0, 2.0, 3.0]))
    return rb


def test_a_linear_schedule_reaches_its_end_and_stays_there() -> None:
    rb = scheduled()
    schedule = LinearScheduler(rb, "beta", final_value=1.0, num_steps=3)
    seen = []
    for _ in range(5):
        schedule.step()
        seen.append(float(rb.sampler.beta))
    assert seen == pytest.approx([0.6, 0.8, 1.0, 1.0, 1.0])
    assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0}, alpha=0.8, beta=1.0)


def test_a_step_schedule_multiplies_or_adds_every_n_steps_within_its_bounds() -> None:
    rb = scheduled()
    schedule = StepScheduler(rb, "alpha", gamma=0.5, n_steps=2, min_value=0.15)
    seen = []
    for _ in range(7):
        schedule.step()
        seen.append(float(rb.sampler.alpha))
    assert seen == pytest.approx([0.8, 0.4, 0.4, 0.2, 0.2, 0.15, 0.15])
    assert_priorities(rb, {0: 1.0, 1: 2.0, 2: 3.0}, alpha=0.15, beta=0.4)
    schedule = StepScheduler(rb, "beta", gamma=0.25, mode="additive", max_value=1.0)
    for _ in range(4):
        schedule.step()
    assert float(rb.sampler.beta) == 1.0


def test_schedules_are_functions_of_the_step_lists_and_states() -> None:
    rb = scheduled()
    beta = LambdaScheduler(rb, "beta", lambda_fn=lambda step: 1.0 + step)
    alpha = LinearScheduler(rb.sampler, "alpha", final_value=0.0, num_steps=4)
    both = SchedulerList([beta, alpha])
    both.step()
    both.step()
    assert float(rb.sampler.beta) == pytest.approx(0.4 * 3.0)
    assert float(rb.sampler.alpha) == pytest.approx(0.4)
    state = alpha.state_dict()
    other = scheduled()
    resumed = LinearScheduler(other, "alpha", final_value=0.0, num_steps=4)
    resumed.load_state_dict(state)
    resumed.step()
    assert float(other.sampler.alpha) == pytest.approx(0.2)


def test_a_schedule_of_something_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma"):
        LinearScheduler(scheduled(), "gamma", final_value=1.0, num_steps=3)
