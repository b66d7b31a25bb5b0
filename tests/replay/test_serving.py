"""`can_sample`, changes in the background, and the names of TorchRL's services."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferClosedError,
    ConditionalUpdateResult,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from shmbuffer.extras import command

pytestmark = pytest.mark.filterwarnings("ignore:sample.batch_size=")  # other sizes, on purpose


def rows(count: int, episode: int = 1000) -> TensorDict:
    number = torch.arange(count)
    return TensorDict({"x": number.float(), "episode": number // episode}, [count])


def made(sampler: Any, size: int = 20, **options: Any) -> TensorDictReplayBuffer:
    options.setdefault("batch_size", 4)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, **options)


def could(rb: ReplayBuffer, count: int | None = None) -> bool:
    """Returns `can_sample`, after checking that a sample without a timeout agrees."""
    said = rb.can_sample(count)
    options = {} if isinstance(rb, ReplayBufferEnsemble) else {"timeout": 0.0}
    try:
        rb.sample(count, **options)
    except (RuntimeError, ValueError, TimeoutError):
        assert not said
    else:
        assert said
    return said


# -- can_sample ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "pass", "priority"])
def test_where_there_is_an_item_a_batch_can_be_had(kind: str) -> None:
    samplers = {
        "random": RandomSampler,
        "pass": SamplerWithoutReplacement,
        "priority": partial(PrioritizedSampler, 20, alpha=1, beta=1),
    }
    rb = made(samplers[kind]())
    assert not could(rb)
    rb.extend(rows(1))
    assert could(rb)
    assert could(rb, 40)
    rb.empty()
    assert not could(rb)


def test_whole_batches_need_as_many_items() -> None:
    rb = made(SamplerWithoutReplacement(drop_last=True))
    rb.extend(rows(3))
    assert not could(rb)
    assert could(rb, 3)
    rb.extend(rows(1))
    assert could(rb)
    assert could(rb)  # the pass had ended: the next one begins


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_a_pass_that_several_share_ones_own_part_counts(rank: int) -> None:
    parts = []
    for drop_last in (False, True):
        rb = made(
            SamplerWithoutReplacement(drop_last, shuffle=False, world_size=3, rank=rank),
            batch_size=2,
        )
        for _ in range(9):
            rb.add(rows(1)[0])
            parts.append(could(rb))
    # Of two items the third learner gets none; all three need six items for whole batches of two.
    assert parts == [n > rank for n in range(1, 10)] + [n >= 6 for n in range(1, 10)]


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, "prioritized"])
def test_slices_need_a_trajectory_that_is_long_enough(kind: Any) -> None:
    def sampler(**options: Any) -> Any:
        if kind == "prioritized":
            return PrioritizedSliceSampler(20, alpha=1, beta=1, **options)
        return kind(**options)

    strict = made(sampler(slice_len=4, traj_key="episode"))
    loose = made(sampler(slice_len=4, traj_key="episode", strict_length=False))
    for rb in (strict, loose):
        assert not could(rb)
        rb.extend(rows(6, episode=2))
        assert could(rb, 8) == (rb is loose)
        rb.extend(rows(4))
        assert could(rb)
    with pytest.raises(RuntimeError, match="a batch of 6 is not divisible by slice_len=4"):
        strict.can_sample(6)
    rb = made(sampler(num_slices=2))
    rb.extend(TensorDict({"x": torch.zeros(4)}, [4]))
    with pytest.raises(RuntimeError, match="the sampler cannot find the ends of trajectories"):
        rb.can_sample()


def test_a_batch_of_slices_without_replacement_may_have_to_be_whole() -> None:
    for drop_last in (False, True):
        sampler = SliceSamplerWithoutReplacement(
            slice_len=2, traj_key="episode", drop_last=drop_last
        )
        rb = made(sampler)
        rb.extend(rows(3, episode=2))
        assert could(rb) != drop_last
        rb.extend(rows(2).set("episode", torch.full((2,), 7)))
        assert could(rb)


def test_slices_that_no_priority_allows_to_begin_are_not_there() -> None:
    rb = made(PrioritizedSliceSampler(20, alpha=1, beta=1, eps=0, slice_len=2, traj_key="episode"))
    index = rb.extend(rows(4, episode=2))
    assert could(rb)
    rb.update_priority(index, torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert not could(rb)  # a slice cannot begin with the last step of an episode
    rb.update_priority(index, torch.zeros(4))
    assert could(rb)  # all priorities are zero: uniform draws
    rb.update_priority(index, torch.tensor([0.0, 1.0, 0.5, 0.0]))
    assert could(rb)


def test_a_limiter_is_asked_and_nothing_counts() -> None:
    rb = made(RandomSampler(), rate_limiter=RateLimiter(samples_per_insert=2, min_size=3))
    assert not rb.can_sample()
    rb.extend(rows(2))
    assert not could(rb)
    rb.extend(rows(2))
    for _ in range(50):
        assert rb.can_sample()
    drawn = 0
    while could(rb):
        drawn += 4
    assert drawn >= 4
    assert not rb.can_sample(1000)
    rb.rate_limiter = None
    assert could(rb, 1000)


def test_of_a_queue_the_items_that_are_left_count() -> None:
    rb = made(RandomSampler(), rate_limiter=RateLimiter(max_times_sampled=1))
    assert not rb.can_sample()
    rb.extend(rows(7))
    assert not could(rb, 8)
    assert could(rb)
    assert not could(rb)
    assert could(rb, 3)
    assert not could(rb, 1)


@pytest.mark.parametrize("p", [None, [0.0, 1.0], "sampleable", "all"])
def test_every_buffer_that_may_be_chosen_has_to_have_a_share(p: Any) -> None:
    members = made(SliceSampler(slice_len=2, traj_key="episode")), made(RandomSampler())
    how = {"sample_from_all": True} if p == "all" else {"p": p}
    rb = ReplayBufferEnsemble(*members, batch_size=8, **how)
    assert not could(rb)
    members[1].extend(rows(4))
    assert could(rb) == (p in ([0.0, 1.0], "sampleable"))
    members[0].extend(rows(1))  # too short for a slice
    assert rb.can_sample() == (p in ([0.0, 1.0], "sampleable"))
    members[0].extend(rows(2))
    assert could(rb)
    assert not could(rb, 7)  # not divisible
    assert rb.sampler.can_sample(rb.storage, 8)
    assert not rb.sampler.can_sample(rb.storage, 7)
    members[0].rate_limiter = RateLimiter(min_size=10)
    assert rb.can_sample() == (p == [0.0, 1.0])


def test_the_size_of_the_batch_has_to_be_known() -> None:
    rb = ReplayBuffer(storage=ListStorage(3))
    with pytest.raises(RuntimeError, match="Pass it to can_sample"):
        rb.can_sample()
    with pytest.raises(TypeError, match="batch_size must be a number of items"):
        rb.can_sample(1.5)  # type: ignore[arg-type]
    assert not rb.can_sample(1)
    rb.add(3)
    assert rb.can_sample(1)


# -- changes in the background ---------------------------------------------------------------------


class Gate:
    """A transform that reports its calls and lets one batch pass for each `open`."""

    def __init__(self) -> None:
        self.arrived: queue.Queue[None] = queue.Queue()
        self._open = threading.Semaphore(0)

    def open(self, batches: int) -> None:
        self._open.release(batches)

    def __call__(self, data: Any) -> Any:
        self.arrived.put(None)
        assert self._open.acquire(timeout=50)
        return data


@pytest.fixture
def gated() -> Iterator[tuple[TensorDictReplayBuffer, Gate]]:
    gate = Gate()
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=4,
        prefetch=2,
        transform=gate,
    )
    yield rb, gate
    gate.open(100)
    rb.close()


def begun(rb: TensorDictReplayBuffer, gate: Gate) -> list[Any]:
    """Takes two samples; the second of the two prefetched batches waits at the gate."""
    gate.open(3)
    samples = [rb.sample()]
    rb.synchronize()
    samples.append(rb.sample())
    for _ in range(4):
        gate.arrived.get(timeout=50)
    return samples


def test_a_change_comes_between_the_batches_before_it_and_those_after_it(
    gated: tuple[TensorDictReplayBuffer, Gate],
) -> None:
    rb, gate = gated
    index = rb.extend(TensorDict({"x": torch.zeros(8)}, [8]))
    samples = begun(rb, gate)
    futures = []
    for x in (1, 2):  # one after the other
        generation = rb.writer.generations_of(index) + (x - 1) * 8  # of the change before
        patch = {"x": torch.full((8,), float(x))}
        futures.append(rb.submit_update_if_present(index=index, generation=generation, patch=patch))
    with pytest.raises(TimeoutError):
        futures[0].result(timeout=0.2)  # waits for both changes
    assert rb.stats()["prefetch_queue_size"] == 2
    gate.open(100)
    samples += [rb.sample() for _ in range(4)]
    assert [set(sample["x"].tolist()) for sample in samples] == [{0}, {0}, {0}, {0}, {2}, {2}]
    assert all(future.result().updated.all() for future in futures)
    assert torch.equal(samples[-1]["index_generation"], samples[-1]["index"] + 16)


def test_a_change_that_fails_says_so_where_it_is_waited_for(
    gated: tuple[TensorDictReplayBuffer, Gate],
) -> None:
    rb, gate = gated
    gate.open(100)
    index = rb.extend(rows(8))
    generation = rb.writer.generations_of(index)
    rb.sample()
    for wait in (rb.sample, rb.synchronize):
        future = rb.submit_update_if_present(index=index, generation=generation, patch={"y": index})
        assert isinstance(future.exception(timeout=50), KeyError)
        with pytest.raises(KeyError, match="'y' is not a leaf"):
            wait()
        assert rb.sample()["x"].shape == (4,)
    rb.synchronize()


def test_a_save_has_what_was_submitted_before_it(
    gated: tuple[TensorDictReplayBuffer, Gate], tmp_path: Path
) -> None:
    rb, gate = gated
    index = rb.extend(rows(8))
    begun(rb, gate)
    generation = rb.writer.generations_of(index)
    rb.submit_update_if_present(index=index, generation=generation, patch={"x": -index.float()})
    threading.Timer(0.1, gate.open, [100]).start()
    rb.dumps(tmp_path / "save")
    again = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    again.loads(tmp_path / "save")
    assert again[:]["x"].tolist() == [-float(x) for x in range(8)]


def test_without_prefetch_a_change_is_made_at_once() -> None:
    rb = made(RandomSampler(), writer=TensorDictRoundRobinWriter(track_generations=True))
    index = rb.extend(rows(8))
    generation = rb.writer.generations_of(index)
    future = rb.submit_update_if_present(
        index=index[:3], generation=generation[:3], patch={"x": torch.full((3,), 9.0)}
    )
    assert future.done()
    assert isinstance(future.result(), ConditionalUpdateResult)
    assert rb[:]["x"].tolist() == [9, 9, 9, 3, 4, 5, 6, 7]
    future = rb.submit_update_if_present(index=index, generation=generation, patch={"y": index})
    assert isinstance(future.exception(), KeyError)


def test_synchronize_makes_what_is_ahead_and_leaves_it_there() -> None:
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    found = []
    for generator in generators:
        rb = made(RandomSampler(), prefetch=3, generator=generator)
        rb.extend(rows(20))
        samples = []
        for _ in range(5):
            samples.append(rb.sample()["x"].tolist())
            if generator is generators[0]:
                rb.synchronize()
                assert rb.stats()["prefetch_queue_size"] == 3
        found.append(samples)
        rb.shutdown()
    assert found[0] == found[1]


# -- the words of services -------------------------------------------------------------------------


def test_a_buffer_is_its_own_service(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer", shared_init=True)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=2, prefetch=2)
    rb.extend(rows(8))
    rb.sample()
    assert rb.start() is rb.client() is rb
    assert rb.is_alive
    assert rb.service_backend == "direct"
    for _ in range(2):
        rb.shutdown(timeout=3)
        assert not rb.is_alive
    for call, what in ((rb.start, "started"), (lambda: submitted(rb), "changed")):
        with pytest.raises(BufferClosedError, match=f"was closed, so it cannot be {what} any more"):
            call()
    assert (tmp_path / "buffer").exists()


def submitted(rb: ReplayBuffer) -> Any:
    nothing = torch.zeros(0, dtype=torch.int64)
    return rb.submit_update_if_present(index=nothing, generation=nothing, patch={})


def test_a_shutdown_closes_the_buffers_of_an_ensemble_and_raises_what_failed() -> None:
    members = [made(RandomSampler()) for _ in range(2)]
    rb = ReplayBufferEnsemble(*members, batch_size=4)
    rb.shutdown()
    assert not any(one.is_alive for one in (rb, *members))
    failing = made(RandomSampler(), prefetch=1, transform=lambda data: data["missing"])
    failing.extend(rows(4))
    with pytest.raises(KeyError):
        failing.sample()
    with pytest.raises(KeyError):
        failing.shutdown()
    assert not failing.is_alive


def test_a_delayed_buffer_can_be_started_and_shut_down_before_its_parts_are_made() -> None:
    calls: list[None] = []
    rb = ReplayBuffer(storage=lambda: calls.append(None) or ListStorage(3), delayed_init=True)  # type: ignore[func-returns-value]
    assert rb.start().client().is_alive
    rb.synchronize()
    assert not calls


def test_without_ray_as_remote_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError) as error:
        TensorDictReplayBuffer.as_remote()
    assert str(error.value) == (
        f"TensorDictReplayBuffer.as_remote needs Ray, which is not installed: {command('ray')}"
    )


@pytest.mark.parametrize("cls", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_the_sampler_of_a_prioritized_buffer_has_a_name_and_is_on_the_cpu(cls: Any) -> None:
    rb = cls(alpha=0.7, beta=0.9, sampler_device="cpu")
    assert rb.prioritized_sampler is rb.sampler
    with pytest.raises(NotImplementedError, match="the priority tree is in shared memory"):
        cls(alpha=0.7, beta=0.9, sampler_device="cuda")
