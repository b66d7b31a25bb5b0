"""Schedules: the value after each step, and its effect on the sampler."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import (
    LambdaScheduler,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    ParameterScheduler,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SchedulerList,
    StepScheduler,
    TensorDictPrioritizedReplayBuffer,
)


def sampler_of(alpha: float = 0.7, beta: float = 0.6) -> PrioritizedSampler:
    return PrioritizedSampler(10, alpha, beta)


def values(scheduler: Any, count: int) -> list[float]:
    """Returns the parameter after each of ``count`` steps."""
    found = []
    for _ in range(count):
        scheduler.step()
        found.append(getattr(scheduler.sampler, scheduler.param_name))
    return found


class Parts(Sampler):
    """A user's sampler with parameters of every kind."""

    def __init__(self) -> None:
        self.count = 4
        self.temperature = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        return torch.zeros(batch_size, dtype=torch.int64), {}


# -- linear ----------------------------------------------------------------------------------------


def test_a_linear_schedule_goes_to_its_final_value_in_equal_steps() -> None:
    sampler = sampler_of()
    scheduler = LinearScheduler(sampler, "alpha", final_value=0.0, num_steps=100)
    assert sampler.alpha == 0.7  # unchanged before the first step
    found = values(scheduler, 200)
    np.testing.assert_allclose(found[:100], np.linspace(0.7, 0.0, 101)[1:], rtol=0, atol=1e-15)
    assert found[99:] == [0.0] * 101


def test_a_linear_schedule_goes_up_too_and_ends_exactly() -> None:
    scheduler = LinearScheduler(sampler_of(beta=0.6), "beta", 1.0, 4)
    delta = (1.0 - 0.6) / 4
    assert values(scheduler, 6) == [0.6 + delta, 0.6 + delta * 2, 0.6 + delta * 3, 1.0, 1.0, 1.0]


def test_a_linear_schedule_of_one_step_jumps() -> None:
    assert values(LinearScheduler(sampler_of(), "beta", 1.0, 1), 2) == [1.0, 1.0]


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_schedule_changes_the_value_every_n_steps() -> None:
    scheduler = StepScheduler(
        sampler_of(beta=0.6), "beta", gamma=0.1, n_steps=3, mode="additive", max_value=1.0
    )
    expected = [min(0.6 + 0.1 * ((step + 1) // 3), 1.0) for step in range(20)]
    np.testing.assert_allclose(values(scheduler, 20), expected, rtol=0, atol=1e-15)
    assert scheduler.sampler.beta == 1.0  # type: ignore[attr-defined]


def test_a_step_schedule_multiplies_by_default() -> None:
    scheduler = StepScheduler(sampler_of(beta=0.8), "beta")
    assert values(scheduler, 3) == [0.8 * 0.9, 0.8 * 0.9 * 0.9, 0.8 * 0.9 * 0.9 * 0.9]
    scheduler = StepScheduler(sampler_of(beta=0.5), "beta", 2.0, 2, max_value=0.75)
    assert values(scheduler, 5) == [0.5, 0.75, 0.75, 0.75, 0.75]


def test_zero_is_a_bound_as_any_other() -> None:
    scheduler = StepScheduler(
        sampler_of(beta=0.5), "beta", gamma=-0.2, mode="additive", min_value=0
    )
    np.testing.assert_allclose(values(scheduler, 4), [0.3, 0.1, 0.0, 0.0], atol=1e-15)
    found = values(LambdaScheduler(sampler_of(), "beta", lambda step: -step, min_value=0), 2)
    assert found == [0, 0]
    found = values(LambdaScheduler(sampler_of(), "beta", lambda step: step, max_value=0), 2)
    assert found == [0, 0]


def test_a_step_schedule_goes_on_from_a_value_set_elsewhere() -> None:
    sampler = sampler_of(beta=0.5)
    scheduler = StepScheduler(sampler, "beta", 0.5)
    scheduler.step()
    sampler.beta = 0.8
    scheduler.step()
    assert sampler.beta == 0.4


# -- functions -------------------------------------------------------------------------------------


def test_a_lambda_schedule_multiplies_the_initial_value() -> None:
    scheduler = LambdaScheduler(sampler_of(beta=0.5), "beta", lambda step: 0.9**step)
    assert values(scheduler, 3) == [0.5 * 0.9, 0.5 * 0.9**2, 0.5 * 0.9**3]
    scheduler = LambdaScheduler(
        sampler_of(beta=0.5), "beta", lambda step: step, min_value=0.75, max_value=1.25
    )
    assert values(scheduler, 4) == [0.75, 1.0, 1.25, 1.25]


# -- what is scheduled -----------------------------------------------------------------------------


def test_the_sampler_of_a_buffer_is_scheduled() -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.6, storage=ListStorage(10))
    scheduler = LinearScheduler(rb, "beta", 1.0, 2)
    assert scheduler.sampler is rb.sampler
    scheduler.step()
    scheduler.step()
    assert rb.sampler.beta == 1.0  # type: ignore[attr-defined]


def test_alpha_on_a_live_buffer_is_that_of_a_fresh_sampler_with_this_alpha() -> None:
    priority = torch.tensor([0.1, 1.0, 3.0, 0.0, 7.0], dtype=torch.float64)

    def filled(alpha: float) -> ReplayBuffer:
        sampler = PrioritizedSampler(5, alpha, 0.5, dtype=torch.float64)
        rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler)
        rb.update_priority(rb.extend(torch.arange(5)), priority)
        return rb

    live = filled(0.9)
    scheduler = SchedulerList(
        [
            LinearScheduler(live, "alpha", 0.0, 3),
            StepScheduler(live, "beta", 0.1, mode="additive"),
        ]
    )
    alphas = []
    for _ in range(4):
        scheduler.step()
        alphas.append(live.sampler.alpha)  # type: ignore[attr-defined]
        fresh = filled(alphas[-1])
        fresh.sampler.beta = live.sampler.beta  # type: ignore[attr-defined]
        require_same(live, fresh)
    assert alphas[2:] == [0.0, 0.0]
    back = LinearScheduler(live, "alpha", 0.9, 2)  # different from 0, too
    back.step()
    require_same_masses(live, filled(0.45))
    back.step()
    require_same_masses(live, filled(0.9))


def require_same(one: ReplayBuffer, other: ReplayBuffer) -> None:
    require_same_masses(one, other)
    found = []
    for rb in (one, other):
        torch.manual_seed(3)
        found.append(rb.sampler.sample(rb.storage, 100))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1]["_weight"], found[1][1]["_weight"])


def require_same_masses(one: ReplayBuffer, other: ReplayBuffer) -> None:
    assert torch.equal(one.sampler._sum_tree, other.sampler._sum_tree)  # type: ignore[attr-defined]


def test_parameters_of_any_kind_are_scheduled() -> None:
    sampler = Parts()
    assert values(StepScheduler(sampler, "count", 2, 2, max_value=10), 4) == [4, 8, 8, 10]
    assert type(sampler.count) is int
    before = sampler.temperature
    scheduler = LinearScheduler(sampler, "temperature", 4, 4)
    found = values(scheduler, 4)
    assert [value.tolist() for value in found] == [[1.75, 2.5], [2.5, 3.0], [3.25, 3.5], 4.0]  # type: ignore[attr-defined]
    assert before.tolist() == [1.0, 2.0]
    sampler.temperature = torch.tensor([1.0, 2.0])
    found = values(LambdaScheduler(sampler, "temperature", lambda step: step, max_value=3), 2)
    assert [value.tolist() for value in found] == [[1.0, 2.0], [2.0, 3.0]]  # type: ignore[attr-defined]


def test_a_custom_schedule_gives_the_value_of_each_step() -> None:
    class Halves(ParameterScheduler):
        def _step(self) -> Any:
            return self.initial_val / 2**self._step_cnt

    assert values(Halves(sampler_of(beta=0.8), "beta", min_value=0.15), 3) == [0.4, 0.2, 0.15]


# -- what is refused -------------------------------------------------------------------------------


def test_a_senseless_argument_is_refused() -> None:
    sampler = sampler_of()
    with pytest.raises(TypeError, match=r"needs a ReplayBuffer or a Sampler, got int"):
        LinearScheduler(3, "beta", 1.0, 2)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"RandomSampler has no attribute 'beta' that could be scheduled"
    ):
        LinearScheduler(RandomSampler(), "beta", 1.0, 2)
    rb = ReplayBuffer(storage=ListStorage(3))
    with pytest.raises(ValueError, match="has no attribute"):
        StepScheduler(rb, "alpha")
    with pytest.raises(ValueError, match=r"mode must be .* got 'exponential'"):
        StepScheduler(sampler, "beta", mode="exponential")
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"num_steps must be at least 1, got {count}"):
            LinearScheduler(sampler, "beta", 1.0, count)
        with pytest.raises(ValueError, match=f"n_steps must be at least 1, got {count}"):
            StepScheduler(sampler, "beta", n_steps=count)
    with pytest.raises(ValueError, match="min_value=1 is larger than max_value=0"):
        StepScheduler(sampler, "beta", min_value=1, max_value=0)
    with pytest.raises(TypeError, match="abstract"):
        ParameterScheduler(sampler, "beta")  # type: ignore[abstract]
    assert sampler.beta == 0.6


def test_a_step_that_the_sampler_refuses_was_not_taken() -> None:
    sampler = sampler_of(beta=0.5)
    scheduler = StepScheduler(sampler, "beta", -0.3, 2, mode="additive")
    assert values(scheduler, 3) == [0.5, 0.2, 0.2]
    for _ in range(2):
        with pytest.raises(ValueError, match="beta must be"):
            scheduler.step()
        assert sampler.beta == 0.2
    scheduler.gamma = 0.1
    assert values(scheduler, 2) == pytest.approx([0.3, 0.3])


# -- several, and their state ----------------------------------------------------------------------


def test_several_schedules_step_together() -> None:
    sampler = sampler_of(alpha=0.7, beta=0.6)
    alpha = LinearScheduler(sampler, "alpha", 0.0, 10)
    beta = StepScheduler(sampler, "beta", 0.1, 5, mode="additive", max_value=1.0)
    for given in ((alpha,), [alpha], alpha):
        several = SchedulerList(given)
        assert several.schedulers == [alpha]
        several.append(beta)
    for _ in range(10):
        several.step()
    assert sampler.alpha == 0.0
    assert sampler.beta == pytest.approx(0.8)


@pytest.mark.parametrize(
    "make",
    [
        lambda sampler: LinearScheduler(sampler, "beta", 1.0, 9),
        lambda sampler: StepScheduler(sampler, "beta", 0.07, 2, "additive", max_value=0.9),
        lambda sampler: LambdaScheduler(sampler, "beta", lambda step: 1 / step, min_value=0.1),
        lambda sampler: SchedulerList(
            [LinearScheduler(sampler, "beta", 1.0, 9), StepScheduler(sampler, "alpha", 0.8, 3)]
        ),
    ],
)
def test_a_schedule_resumes_where_it_was(make: Any) -> None:
    sampler = sampler_of()
    scheduler = make(sampler)
    for _ in range(4):
        scheduler.step()
    state = json.loads(json.dumps(scheduler.state_dict()))
    sampler_state = sampler.state_dict()
    expected = [_step(scheduler, sampler) for _ in range(8)]
    resumed = sampler_of(alpha=0.1, beta=0.2)
    again = make(resumed)
    resumed.load_state_dict(sampler_state)
    again.load_state_dict(state)
    assert [_step(again, resumed) for _ in range(8)] == expected


def _step(scheduler: Any, sampler: PrioritizedSampler) -> tuple[float, float]:
    scheduler.step()
    return sampler.alpha, sampler.beta


def test_a_state_has_torchrls_entries_and_leaves_the_sampler_alone() -> None:
    sampler = sampler_of()
    state = LinearScheduler(sampler, "beta", 1.0, 4).state_dict()
    assert set(state) == {
        "param_name",
        "_min_val",
        "_max_val",
        "initial_val",
        "_step_cnt",
        "final_val",
        "num_steps",
        "_delta",
    }
    other = LinearScheduler(sampler, "alpha", 0.0, 7)
    other.load_state_dict({**state, "_step_cnt": 3})
    assert (sampler.alpha, sampler.beta) == (0.7, 0.6)
    other.step()
    assert (sampler.alpha, sampler.beta) == (0.7, 1.0)


def test_a_state_of_another_schedule_is_refused() -> None:
    linear, steps = (
        LinearScheduler(sampler_of(), "beta", 1.0, 4),
        StepScheduler(sampler_of(), "beta"),
    )
    with pytest.raises(ValueError, match=r"StepScheduler has the entries .*'gamma'.*'final_val'"):
        steps.load_state_dict(linear.state_dict())
    with pytest.raises(ValueError, match="has 1 schedulers, but this SchedulerList has 2"):
        SchedulerList([linear, steps]).load_state_dict(SchedulerList(linear).state_dict())
