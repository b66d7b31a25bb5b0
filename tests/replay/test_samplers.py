"""Which items samplers draw, how often, and with which weight."""

from __future__ import annotations

import os
import pickle
import signal
import threading
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
    Sampler,
    Storage,
    TensorDictPrioritizedReplayBuffer,
)

pytestmark = pytest.mark.product(few=4)


def prioritized(storage: Storage, **options: Any) -> PrioritizedReplayBuffer:
    options = {"alpha": 0.7, "beta": 0.9, "batch_size": 1000, **options}
    return PrioritizedReplayBuffer(storage=storage, **options)


def shares(index: Any, size: int) -> np.ndarray[Any, Any]:
    return np.bincount(np.asarray(index.tolist()), minlength=size) / len(index)


# -- uniform ---------------------------------------------------------------------------------------


def test_every_item_is_drawn_equally_often(make: Any) -> None:
    rb = ReplayBuffer(storage=make(10), batch_size=20_000)
    rb.extend(torch.arange(5))
    np.testing.assert_allclose(shares(rb.sample(), 10), [0.2] * 5 + [0] * 5, atol=0.02)


def test_places_without_an_item_are_never_drawn(make: Any) -> None:
    storage = make(100)
    storage.set([3, 50, 98], torch.tensor([3, 50, 98]))
    rb = ReplayBuffer(storage=storage, batch_size=1000)
    assert set(rb.sample().tolist()) == {3, 50, 98}


def test_an_empty_buffer_has_nothing_to_draw(make: Any) -> None:
    for rb in (ReplayBuffer(storage=make(10)), prioritized(make(10), batch_size=None)):
        with pytest.raises(EmptyBufferError):
            rb.sample(1)
        rb.extend(torch.arange(3))
        assert len(rb.sample(2)) == 2
        rb.empty()
        with pytest.raises(EmptyBufferError) as caught:
            rb.sample(1)
        assert isinstance(caught.value, RuntimeError)


def test_torch_manual_seed_decides_the_draws(make: Any) -> None:
    for rb in (ReplayBuffer(storage=make(10), batch_size=50), prioritized(make(10), batch_size=50)):
        rb.extend(torch.arange(10))
        torch.manual_seed(5)
        first = [rb.sample(), rb.sample()]
        torch.manual_seed(5)
        assert torch.equal(rb.sample(), first[0])
        assert torch.equal(rb.sample(), first[1])
        assert not torch.equal(*first)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
def test_a_child_that_is_forked_while_a_thread_draws_can_draw(own: bool) -> None:
    """A child would hang in the mutex of torch's generator if a parent's thread held it."""
    sampler, end, drawing = RandomSampler(), threading.Event(), threading.Event()
    if own:
        sampler._rng = torch.Generator()

    def draw() -> None:
        while not end.is_set():
            drawing.set()
            # takes about ten milliseconds, mostly without the GIL
            sampler.sample(range(100), 5_000_000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(5):
            drawing.clear()
            assert drawing.wait(60)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)  # ends the process if it hangs
                sampler.sample(range(100), 5)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, "the child hung"
    finally:
        end.set()
        thread.join()


def test_a_generator_decides_the_draws_and_leaves_torchs_own_alone(make: Any) -> None:
    rb = ReplayBuffer(storage=make(10), batch_size=50, generator=torch.Generator().manual_seed(1))
    rb.extend(torch.arange(10))
    torch.manual_seed(3)
    first = rb.sample()
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), expected)
    rb.generator = torch.Generator().manual_seed(1)
    assert torch.equal(rb.sample(), first)
    assert rb.sampler._rng is rb.generator


# -- by priority -----------------------------------------------------------------------------------


def test_items_are_drawn_in_proportion_to_their_mass(make: Any) -> None:
    rb = prioritized(make(10), batch_size=50_000)
    index = rb.extend(torch.arange(5))
    priority = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.5])
    assert rb.update_priority(index, priority) == PriorityUpdate(applied=5, stale=0)
    mass = (priority.double().numpy() + 1e-8) ** 0.7
    np.testing.assert_allclose(shares(rb.sample(), 5), mass / mass.sum(), atol=0.01)


def test_the_weight_is_the_mass_over_the_smallest_to_the_minus_beta(make: Any) -> None:
    rb = prioritized(make(10))
    priority = torch.tensor([0.3, 1.0, 2.0, 5.0])
    rb.update_priority(rb.extend(torch.arange(4)), priority)
    data, info = rb.sample(return_info=True)
    mass = (priority.double() + 1e-8) ** 0.7
    expected = (mass / mass.min()) ** -0.9
    assert info["_weight"] is info["priority_weight"]
    assert info["_weight"].dtype is torch.float32
    torch.testing.assert_close(info["_weight"], expected[data].float(), rtol=1e-5, atol=0)
    assert torch.equal(info["index"], data)


def test_the_dtype_of_the_weights_is_the_callers(make: Any) -> None:
    rb = prioritized(make(10), dtype=torch.float64)
    rb.extend(torch.arange(4))
    assert rb.sample(return_info=True)[1]["_weight"].dtype is torch.float64


def test_beta_may_be_changed_at_any_time(make: Any) -> None:
    rb = prioritized(make(10))
    rb.update_priority(rb.extend(torch.arange(2)), torch.tensor([1.0, 2.0]))
    rb.sampler.beta = 0.0  # type: ignore[attr-defined]
    assert (rb.sample(return_info=True)[1]["_weight"] == 1).all()


def test_alpha_may_be_changed_at_any_time_and_exactly(make: Any) -> None:
    rb = prioritized(make(10), batch_size=50_000)
    rb.update_priority(rb.extend(torch.arange(3)), torch.tensor([1.0, 4.0, 0.0]))
    sampler = rb.sampler
    assert isinstance(sampler, PrioritizedSampler)
    for alpha in (0.0, 1.0):
        sampler.alpha = alpha
        assert sampler.alpha == alpha
    np.testing.assert_allclose(shares(rb.sample(), 3), [0.2, 0.8, 0], atol=0.01)
    with pytest.raises(ValueError, match="alpha"):
        sampler.alpha = -1


def test_a_new_item_gets_the_largest_priority_ever_given(make: Any) -> None:
    rb = prioritized(make(4), batch_size=50_000)
    assert rb.sampler.default_priority == 1.0
    index = rb.extend(torch.arange(2))
    rb.update_priority(index, torch.tensor([9.0, 1.0]))
    assert rb.sampler.default_priority == 9.0
    rb.add(torch.tensor(2))
    mass = np.array([9.0, 1.0, 9.0]) ** 0.7
    np.testing.assert_allclose(shares(rb.sample(), 3), mass / mass.sum(), atol=0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_an_invalid_priority_refuses_the_whole_batch(make: Any, bad: float) -> None:
    for rb in (
        prioritized(make(4)),
        PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=TwoMethods(4), batch_size=10),
    ):
        index = rb.extend(torch.arange(3))
        rb.update_priority(index, torch.tensor([1.0, 2.0, 3.0]))
        before = rb.sampler.state_dict()["_priorities"][:3].clone()
        with pytest.raises(ValueError, match="priorit"):
            rb.update_priority(index, torch.tensor([5.0, 5.0, bad]))
        assert torch.equal(rb.sampler.state_dict()["_priorities"][:3], before)


def test_an_index_that_stands_twice_keeps_the_last_priority(make: Any) -> None:
    rb = prioritized(make(4))
    rb.extend(torch.arange(2))
    rb.update_priority([0, 0, 1], [5.0, 0.0, 1.0])
    assert set(rb.sample().tolist()) == {1}


def test_an_index_out_of_range_is_refused_and_minus_one_is_left_out(make: Any) -> None:
    rb = prioritized(make(4))
    rb.extend(torch.arange(2))
    with pytest.raises(IndexError):
        rb.update_priority([0, 9], [5.0, 0.0])
    assert rb.update_priority(torch.tensor([-1, 1]), torch.tensor([3.0, 0.0])).applied == 1
    assert set(rb.sample().tolist()) == {0}


def test_one_priority_stands_for_all_and_other_sizes_are_refused(make: Any) -> None:
    rb = prioritized(make(4))
    index = rb.extend(torch.arange(3))
    assert rb.update_priority(index, 2.0).applied == 3
    assert rb.update_priority(1, 3.0).applied == 1
    with pytest.raises(RuntimeError, match="2 priorities for 3 items"):
        rb.update_priority(index, torch.ones(2))


def test_priorities_that_are_all_zero_draw_uniformly(make: Any) -> None:
    rb = prioritized(make(4), eps=0.0, batch_size=20_000)
    rb.update_priority(rb.extend(torch.arange(4)), 0.0)
    np.testing.assert_allclose(shares(rb.sample(), 4), [0.25] * 4, atol=0.02)


def test_a_stale_generation_does_not_change_the_new_items_priority(make: Any) -> None:
    rb = prioritized(make(4)).share()
    rb.extend(torch.arange(4))
    _, info = rb.sample(return_info=True)
    index, generation = info["index"], info["index_generation"]
    rb.extend(torch.arange(4, 8))
    result = rb.update_priority(index, torch.zeros(len(index)), generation=generation)
    assert result == PriorityUpdate(applied=0, stale=len(index))
    assert set(rb.sample().tolist()) == {4, 5, 6, 7}


def test_lanes_have_priorities_of_their_own(make: Any) -> None:
    rb = prioritized(make(12, ndim=2))
    index = rb.extend(torch.arange(12).reshape(3, 4))
    assert index.shape == (12, 2)
    priority = torch.zeros(12)
    priority[5] = 1.0
    rb.update_priority(index, priority)
    data, info = rb.sample(return_info=True)
    assert len(set(data.tolist())) == 1
    slot, lane = info["index"]
    assert rb[:][lane[0], slot[0]] == data[0]
    with pytest.raises(IndexError, match="coordinates"):
        rb.update_priority(torch.arange(3), 1.0)


def test_set_sampler_works_late(make: Any) -> None:
    rb = ReplayBuffer(storage=make(4), batch_size=1000)
    rb.extend(torch.arange(4))
    before = rb.sampler
    sampler = PrioritizedSampler(4, 0.7, 0.9)
    assert rb.set_sampler(sampler) is before
    assert set(rb.sample().tolist()) == {0, 1, 2, 3}
    rb.update_priority([0, 1, 2], 0.0)
    assert set(rb.sample().tolist()) == {3}
    assert rb.set_sampler(RandomSampler()) is sampler
    assert set(rb.sample().tolist()) == {0, 1, 2, 3}
    rb.set_sampler(PrioritizedSampler(4, 0.7, 0.9))
    assert set(rb.sample().tolist()) == {3}


def test_two_samplers_on_one_storage_that_is_not_shared_have_their_own_tables(
    make_private: Any,
) -> None:
    storage = make_private(4)
    one, other = prioritized(storage), prioritized(storage, alpha=0.9, eps=0.0)
    one.extend(torch.arange(2))
    other.extend(torch.arange(2, 4))
    one.update_priority([0, 1, 2, 3], [0.0, 0.0, 0.0, 1.0])
    other.update_priority([0, 1, 2, 3], [1.0, 0.0, 0.0, 0.0])
    assert set(one.sample().tolist()) == {3}
    assert set(other.sample().tolist()) == {0}
    one.extend(torch.tensor([10]))  # new to both samplers
    assert set(one.sample().tolist()) == {3, 10}
    assert set(other.sample().tolist()) == {10}
    assert one.sampler.alpha == 0.7  # type: ignore[attr-defined]
    assert other.sampler.alpha == 0.9  # type: ignore[attr-defined]


def test_two_samplers_on_one_directory_have_one_table(directory: Any) -> None:
    one, other = prioritized(directory()), prioritized(directory())
    one.extend(torch.arange(3))
    other.update_priority([0, 1], 0.0)
    assert set(one.sample().tolist()) == {2}
    with pytest.raises(ValueError, match=r"alpha=0\.7"):
        prioritized(directory(), alpha=0.5)
    ReplayBuffer(storage=directory(), batch_size=10).sample()


def test_a_list_storage_is_drawn_from_by_priority_too() -> None:
    rb = prioritized(ListStorage(4), batch_size=100)
    rb.extend(torch.arange(6))
    rb.update_priority([0, 1, 2, 3], [0.0, 0.0, 0.0, 1.0])
    assert set(rb.sample().tolist()) == {3}
    rb.add(torch.tensor(9))
    assert set(rb.sample().tolist()) == {3, 9}


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("max", 4.0), ("min", 1.0), ("mean", 2.0), ("median", 1.0), ("sum", 6.0)],
)
def test_several_priorities_of_an_item_are_reduced(
    make: Any, reduction: str, expected: float
) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=make(4), batch_size=3, reduction=reduction
    )
    data = TensorDict(
        {"a": torch.zeros(2, 3), "td_error": torch.tensor([[1.0, 4.0, 1.0]]).repeat(2, 1)}, [2, 3]
    )
    rb.extend(data)
    raw = rb.sampler.state_dict()["_priorities"]
    assert raw[:2].tolist() == [expected] * 2
    sample = rb.sample()
    assert sample["index"].shape == sample["_weight"].shape == (3, 3)
    sample["td_error"] = sample["td_error"] * 2
    rb.update_tensordict_priority(sample)
    raw = rb.sampler.state_dict()["_priorities"]
    assert set(raw[:2].tolist()) <= {expected, 2 * expected}
    assert 2 * expected in raw.tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        {"alpha": -0.1, "beta": 0.4},
        {"alpha": 0.6, "beta": -0.4},
        {"alpha": float("nan"), "beta": 0.4},
        {"alpha": 0.6, "beta": 0.4, "reduction": "first"},
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"alpha|beta|reduction"):
        PrioritizedSampler(10, **arguments)


def test_a_tree_on_a_gpu_is_refused_in_a_sentence() -> None:
    with pytest.raises(NotImplementedError, match=r"must be the CPU, .* got 'cuda'"):
        PrioritizedSampler(10, 0.6, 0.4, device="cuda")


def test_the_priorities_come_back_with_the_state(make: Any) -> None:
    rb = prioritized(make(4))
    rb.update_priority(rb.extend(torch.arange(3)), torch.tensor([0.0, 7.0, 1.0]))
    rb.update_priority(1, 2.0)
    other = prioritized(make(4), alpha=0.3, beta=0.1)
    other.load_state_dict(rb.state_dict())
    sampler = other.sampler
    assert isinstance(sampler, PrioritizedSampler)
    assert (sampler.alpha, sampler.beta) == (0.7, 0.9)
    assert sampler.default_priority == 7.0
    assert sampler.state_dict()["_priorities"][:3].tolist() == [0.0, 2.0, 1.0]
    with pytest.raises(ValueError, match="elements"):
        sampler.load_state_dict({**sampler.state_dict(), "_priorities": torch.zeros(9)})


# -- parts written by users ------------------------------------------------------------------------


class TwoMethods(Storage):
    """A user's storage with set, get and len."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.items: dict[int, Any] = {}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        if isinstance(cursor, int):
            self.items[cursor] = data
        else:
            self.items.update(zip(cursor.tolist(), data, strict=True))

    def get(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.items[index]
        return torch.stack([self.items[int(at)] for at in index])

    def __len__(self) -> int:
        return len(self.items)

    def _empty(self) -> None:
        self.items.clear()


class Newest(Sampler):
    """Always draws the newest item."""

    def __init__(self) -> None:
        self.last = 0

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        return torch.full((batch_size,), self.last), {"mark": torch.ones(batch_size)}

    def extend(self, index: Any) -> None:
        self.last = int(index[-1])

    def add(self, index: Any) -> None:
        self.last = int(index)


def test_a_users_storage_works_with_every_sampler() -> None:
    rb = ReplayBuffer(storage=TwoMethods(4), batch_size=1000)
    assert rb.extend(torch.arange(3)).tolist() == [0, 1, 2]
    assert rb.add(torch.tensor(3)) == 3
    assert rb.add(torch.tensor(4)) == 0
    assert (len(rb), rb.write_count) == (4, 5)
    assert set(rb.sample().tolist()) == {4, 1, 2, 3}
    rb.set_sampler(PrioritizedSampler(4, 0.7, 0.9))
    assert set(rb.sample().tolist()) == {4, 1, 2, 3}
    assert rb.update_priority([0, 1, 2, 3], [0.0, 0.0, 0.0, 1.0]).applied == 4
    assert set(rb.sample().tolist()) == {3}
    rb.add(torch.tensor(5))
    data, info = rb.sample(return_info=True)
    assert set(data.tolist()) == {5, 3}
    assert info["_weight"].shape == (1000,)
    with pytest.raises(RuntimeError, match="priorities in this process cannot be pickled"):
        pickle.dumps(rb.sampler)
    rb.empty()
    with pytest.raises(EmptyBufferError):
        rb.sample()


def test_a_users_sampler_works_on_every_storage(make: Any) -> None:
    rb = ReplayBuffer(storage=make(4), sampler=Newest(), batch_size=2)
    rb.extend(torch.arange(3))
    data, info = rb.sample(return_info=True)
    assert data.tolist() == [2, 2]
    assert info["mark"].tolist() == [1, 1]
    rb.add(torch.tensor(7))
    assert rb.sample().tolist() == [7, 7]


def test_a_users_sampler_may_refine_ours(make: Any) -> None:
    class Halved(PrioritizedSampler):
        def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
            index, info = super().sample(storage, batch_size)
            return index, {**info, "_weight": info["_weight"] / 2}

    rb = ReplayBuffer(storage=make(4), sampler=Halved(4, 0.7, 0.9), batch_size=3)
    rb.extend(torch.arange(3))
    data, info = rb.sample(return_info=True)
    assert info["_weight"].tolist() == [0.5, 0.5, 0.5]
    assert torch.equal(info["index"], data)


def test_a_sampler_can_be_used_without_a_buffer(make: Any) -> None:
    storage = make(4)
    storage.set(range(3), torch.arange(3))
    index, info = RandomSampler().sample(storage, 10)
    assert index.shape == (10,)
    sampler = PrioritizedSampler(4, 0.7, 0.9)
    index, info = sampler.sample(storage, 10)
    assert info["_weight"].tolist() == [1.0] * 10
    sampler.update_priority([0, 1], 0.0)
    assert set(sampler.sample(storage, 100)[0].tolist()) == {2}


def test_a_sampler_that_is_passed_on_is_bound_where_it_arrives(directory: Any) -> None:
    rb = prioritized(directory())
    rb.extend(torch.arange(3))
    rb.update_priority([0, 1], 0.0)
    other = pickle.loads(pickle.dumps(rb))
    assert set(other.sample().tolist()) == {2}
    other.update_priority([2], 0.0)
    other.update_priority([0], 1.0)
    assert set(rb.sample().tolist()) == {0}
    other.close()


def test_storages_in_one_process_need_no_directory_for_priorities() -> None:
    for storage in (LazyTensorStorage(4), LazyMemmapStorage(4)):
        rb = prioritized(storage)
        rb.extend(torch.arange(2))
        assert "index_generation" not in rb.sample(return_info=True)[1]
