"""Each item is consumed once and can be acknowledged by a batch that was moved or copied."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from shmbuffer import (
    ConsumerError,
    ConsumingSampler,
    EmptyBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RateLimitError,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ShmBufferError,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.buffers.flow.consumed import read_consumed
from shmbuffer.memory.flow.consumers import Consumers
from shmbuffer.memory.format.layout import PARTS
from tests.kit.items import numbered


def made(**options: Any) -> TensorDictReplayBuffer:
    options = {"sampler": ConsumingSampler(), "batch_size": 4, **options}
    return TensorDictReplayBuffer(**{"storage": LazyTensorStorage(16), **options})


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["number"].tolist()
    return found


def several(rb: Any, batches: int) -> list[int]:
    return [one for _ in range(batches) for one in numbers(rb.sample())]


def test_a_sample_is_acknowledged_before_it_is_returned() -> None:
    rb = made()
    rb.extend(numbered(0, 6))
    assert numbers(rb.sample()) == [0, 1, 2, 3]
    (consumer,) = rb.consumers()
    assert (consumer.name, consumer.acked, consumer.held) == ("default", 4, 0)
    batch = rb.sample()
    assert numbers(batch) == [4, 5], "nobody else is there to write more"
    assert "index_lease" not in batch
    with pytest.raises(EmptyBufferError, match="was given every item, and no client writes"):
        rb.sample()


def test_an_iteration_ends_with_the_last_item() -> None:
    rb = made()
    rb.extend(numbered(0, 10))
    assert [numbers(one) for one in rb] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(EmptyBufferError, match="was given every item"):
        list(rb)
    rb.extend(numbered(10, 2))
    one = rb.next()
    assert (numbers(one), rb.next()) == ([10, 11], None)


def test_it_is_known_whether_a_sample_would_be_given_items() -> None:
    rb = made(batch_size=None)
    assert not rb.can_sample(1)
    rb.extend(numbered(0, 6))
    assert rb.can_sample(100), "nobody else is there to write more"
    rb.sample(4)
    assert rb.can_sample(2)
    rb.sample(2, lease=math.inf)
    assert not rb.can_sample(1)
    rb.extend(numbered(6, 1))
    held = rb.sample(1, lease=1e-9)
    assert rb.can_sample(1), "its own lease is over"
    assert rb.ack(held) == (1, 0)
    assert not rb.can_sample(1)


def test_a_batch_may_go_anywhere_before_it_is_acknowledged() -> None:
    rb = made()
    rb.extend(numbered(0, 8))
    batch = rb.sample(lease=math.inf)
    stream = io.BytesIO()
    torch.save(dict(batch.items()), stream)
    assert rb.ack(batch[:2]) == (2, 0)
    stream.seek(0)
    assert rb.ack(torch.load(stream, weights_only=True)) == (4, 0)
    _, info = rb.sample(lease=math.inf, return_info=True, include_info=False)
    assert rb.ack(pickle.loads(pickle.dumps(info))) == (4, 0)
    assert [len(one) for one in rb.leased().values()] == [0, 0, 0]


def test_a_lazy_stack_is_acknowledged_without_a_look_at_its_items(tmp_path: Path) -> None:
    storage = LazyStackStorage(16, max_bytes=2**16, scratch_dir=tmp_path)
    rb = made(storage=storage)
    rb.extend(
        [TensorDict({"x": torch.zeros(1 + n % 3), "number": torch.tensor(n)}) for n in range(16)]
    )
    batch = rb.sample(lease=math.inf)
    assert rb.ack(batch) == (4, 0)
    assert "tensordicts" not in vars(batch), "nobody has looked"
    batch = rb.sample(lease=math.inf)
    assert [int(item["number"]) for item in batch.tensordicts] == [4, 5, 6, 7]
    assert rb.ack(batch[1:3]) == (2, 0)
    assert rb.leased()["index"].tolist() == [4, 7]
    assert rb.ack(LazyStackedTensorDict(batch[3], batch[0])) == (2, 0)
    one, other = rb.sample(lease=math.inf), rb.sample(lease=math.inf)
    assert rb.ack(LazyStackedTensorDict(one[0], other[1])) == (2, 0)
    assert rb.ack(LazyStackedTensorDict(*one[1:].tensordicts, *other.tensordicts)) == (7, 0)
    assert rb.consumers()[0].acked == 16


def test_items_that_were_exchanged_in_a_lazy_stack_are_those_that_are_acknowledged(
    tmp_path: Path,
) -> None:
    storage = LazyStackStorage(16, max_bytes=2**16, scratch_dir=tmp_path)
    rb = made(storage=storage)
    rb.extend([TensorDict({"number": torch.tensor(n)}) for n in range(16)])
    one, other = rb.sample(lease=math.inf), rb.sample(lease=math.inf)
    one.tensordicts[1], other.tensordicts[2] = other.tensordicts[2], one.tensordicts[1]
    assert rb.ack(one) == (4, 0)
    assert rb.leased()["index"].tolist() == [1, 4, 5, 7]
    del other.tensordicts[1]
    assert rb.ack(other) == (3, 0)
    assert rb.leased()["index"].tolist() == [5]


def test_what_a_handle_holds_can_be_acknowledged_as_a_whole() -> None:
    rb = made()
    rb.extend(numbered(0, 8))
    rb.sample(lease=60.0)
    rb.sample(lease=60.0)
    held = rb.leased()
    assert held["index"].tolist() == list(range(8))
    assert rb.ack(held) == (8, 0)
    assert rb.consumers()[0].leases == ()


def test_a_late_ack_is_refused_and_counted() -> None:
    rb = made()
    rb.extend(numbered(0, 4))
    late = rb.sample(lease=1e-9)
    again = rb.sample(lease=60.0)
    assert numbers(again) == numbers(late)
    assert rb.ack(late) == (0, 4)
    assert rb.ack(again) == (4, 0)
    (consumer,) = rb.consumers()
    assert (consumer.delivered, consumer.redelivered, consumer.refused) == (8, 4, 4)


def test_a_sample_that_fails_is_given_again() -> None:
    rb = made()
    fails = [True]

    def transform(batch: Any) -> Any:
        if fails:
            raise RuntimeError("on purpose")
        return batch

    rb.append_transform(transform)
    rb.extend(numbered(0, 4))
    with pytest.raises(RuntimeError, match="on purpose"):
        rb.sample(lease=math.inf)
    fails.clear()
    assert numbers(rb.sample()) == [0, 1, 2, 3]


def test_each_consumer_gets_each_item_as_often_as_it_wants(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    storage = LazyMemmapStorage(16, scratch_dir=path, shared_init=True)
    with TensorDictReplayBuffer(storage=storage, consume_after_n_samples=2, batch_size=4) as rb:
        rb.extend(numbered(0, 4))
        with attach(path) as other:
            other.set_sampler(ConsumingSampler(consumer="eval"))
            assert numbers(other.sample()) == [0, 1, 2, 3]
            assert sorted(one.name for one in other.consumers()) == ["default", "eval"]
            assert other.remove_consumer("eval")
            with pytest.raises(ConsumerError, match="was removed"):
                other.sample()
        assert numbers(rb.sample()) == numbers(rb.sample()) == [0, 1, 2, 3]
        with pytest.raises(EmptyBufferError):
            rb.sample()


def test_nothing_is_written_over_that_was_not_acknowledged() -> None:
    rb = made()
    rb.extend(numbered(0, 16))
    with pytest.raises(RateLimitError, match=r"consumer 'default' .* no other client is attached"):
        rb.extend(numbered(16, 1))
    batch = rb.sample(lease=math.inf)
    with pytest.raises(ShmBufferError, match="items cannot be overwritten by index"):
        rb[0] = numbered(9, 1)[0]
    rb.ack(batch)
    rb.extend(numbered(16, 4))
    assert [numbers(rb.sample()) for _ in range(4)] == [
        [*range(at, at + 4)] for at in (4, 8, 12, 16)
    ]


def test_a_buffer_that_is_emptied_begins_again() -> None:
    rb = made()
    rb.extend(numbered(0, 8))
    batch = rb.sample(lease=math.inf)
    rb.empty()
    assert rb.ack(batch) == (0, 4)
    (consumer,) = rb.consumers()
    assert (consumer.leases, consumer.behind) == ((), 0)
    rb.extend(numbered(20, 4))
    assert numbers(rb.sample()) == [20, 21, 22, 23]


def test_plain_tensors_are_consumed_too() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), consume_after_n_samples=1, batch_size=3)
    rb.extend(torch.arange(5))
    data, info = rb.sample(lease=60.0, return_info=True)
    assert data.tolist() == [0, 1, 2]
    assert rb.ack(info) == (3, 0)
    assert list(rb.sample()) == [3, 4]


def test_what_does_not_go_together_is_refused() -> None:
    storage = LazyTensorStorage
    with pytest.raises(ValueError, match="Prefetching is not supported"):
        ReplayBuffer(storage=storage(4), consume_after_n_samples=1, prefetch=1, batch_size=2)
    with pytest.raises(ValueError, match="prefetch is not supported with a ConsumingSampler"):
        ReplayBuffer(storage=storage(4), sampler=ConsumingSampler(), prefetch=1, batch_size=2)
    with pytest.raises(ValueError, match="conflicts with the sampler's max_sample_count=1"):
        ReplayBuffer(storage=storage(4), sampler=ConsumingSampler(), consume_after_n_samples=2)
    with pytest.raises(ValueError, match="only supports the default sampler"):
        ReplayBuffer(
            storage=storage(4), sampler=PrioritizedSampler(4, 1, 1), consume_after_n_samples=2
        )
    wrong: Any
    for wrong, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="consume_after_n_samples must be a positive integer"):
            ReplayBuffer(storage=storage(4), consume_after_n_samples=wrong)
        with pytest.raises(error, match="max_sample_count must be a positive integer"):
            ConsumingSampler(wrong)
    wrong = 3
    with pytest.raises(TypeError, match="consumer must be a string, got 3"):
        ConsumingSampler(consumer=wrong)
    wrong = None
    with pytest.raises(
        TypeError,
        match=r"consumer must be a name, got None; omit it to use the name 'default'",
    ):
        ConsumingSampler(consumer=wrong)
    lanes = ReplayBuffer(storage=storage(4, ndim=2), batch_size=1)
    lanes.extend(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"1-dimensional storages, got storage\.ndim=2"):
        lanes.set_sampler(ConsumingSampler())
    with pytest.raises(ValueError, match=r"1-dimensional storages, got storage\.ndim=2"):
        made(storage=storage(4, ndim=2))
    with pytest.raises(ValueError, match="objects in this process"):
        ReplayBuffer(storage=ListStorage(4), sampler=ConsumingSampler())
    with pytest.raises(ValueError, match="a sample_unit is not supported"):
        made(sample_unit=NStep(2, 0.9))
    rb = ReplayBuffer(storage=storage(4), batch_size=1)
    rb.extend(torch.zeros(2))
    for call in (lambda: rb.sample(lease=1.0), lambda: rb.leased()):
        with pytest.raises(
            TypeError, match="nothing can be acknowledged, because the sampler is a RandomSampler"
        ):
            call()
    ensemble = ReplayBufferEnsemble(made(), made())
    with pytest.raises(TypeError, match="lease is only supported by a single buffer whose"):
        ensemble.sample(4, lease=1.0)
    consuming = made()
    consuming.extend(numbered(0, 4))
    with pytest.raises(KeyError, match="the batch has no entry 'index_lease'"):
        consuming.ack(consuming.sample())


@pytest.mark.parametrize("lease", [0, -1.0, math.nan])
def test_a_lease_is_a_time(lease: float) -> None:
    rb = made()
    rb.extend(numbered(0, 4))
    with pytest.raises(ValueError, match="a lease must be a number of seconds above 0"):
        rb.sample(lease=lease)
    wrong: Any = "60"
    with pytest.raises(TypeError, match=r"a lease must be a number of seconds above 0, .* is '60'"):
        rb.sample(lease=wrong)
    assert numbers(rb.sample()) == [0, 1, 2, 3]


def test_a_batch_is_written_again_without_its_lease() -> None:
    rb, other = made(), made()
    rb.extend(numbered(0, 4))
    other.extend(rb.sample(lease=60.0))
    assert set(other.sample().keys()) == {"number", "index", "index_generation"}


def test_a_save_knows_what_is_done_and_what_its_saver_held(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    storage = LazyMemmapStorage(16, scratch_dir=path, shared_init=True)
    with TensorDictReplayBuffer(storage=storage, sampler=ConsumingSampler(), batch_size=4) as rb:
        rb.extend(numbered(0, 16))
        rb.sample()  # 0 to 3 are done
        mine = rb.sample(lease=math.inf)  # 4 to 7 are leased
        with attach(path) as other:
            other.set_sampler(ConsumingSampler())
            assert numbers(other.sample(4, lease=math.inf)) == [8, 9, 10, 11]
            rb.dumps(tmp_path / "save", extra={"leased": rb.leased()})
    again = made()
    extra = again.loads(tmp_path / "save")
    assert extra["leased"]["index"].tolist() == mine["index"].tolist()
    assert again.ack(extra["leased"]) == (0, 4), "these are other items"
    assert several(again, 2) == list(range(8, 16))
    with pytest.raises(EmptyBufferError):
        again.sample()
    again.extend(numbered(16, 12))
    assert several(again, 3) == list(range(16, 28))


def test_a_learner_that_starts_again_acknowledges_what_its_save_held(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    storage = LazyMemmapStorage(16, scratch_dir=path, shared_init=True)
    with TensorDictReplayBuffer(storage=storage, sampler=ConsumingSampler(), batch_size=4) as rb:
        rb.extend(numbered(0, 12))
        rb.sample(lease=math.inf)
        rb.dumps(tmp_path / "save", extra={"leased": rb.leased()})
        saved = rb.leased()
        rb.sample(lease=math.inf)  # sampled after the save, so not consumed according to it
    with attach(path) as rb:
        rb.set_sampler(ConsumingSampler())
        assert rb.ack(saved) == (4, 0)
        assert numbers(rb.sample(4)) == [4, 5, 6, 7]


def test_a_load_over_what_was_consumed_begins_with_what_is_loaded(tmp_path: Path) -> None:
    rb = made()
    rb.extend(numbered(0, 10))
    rb.sample()
    rb.dumps(tmp_path / "save")
    rb.sample()
    rb.extend(numbered(10, 14))
    rb.loads(tmp_path / "save")
    assert numbers(rb.sample()) == [4, 5, 6, 7]
    rb.extend(numbered(30, 10))
    assert numbers(rb.sample()) == [8, 9, 30, 31]


def test_a_save_knows_how_often_each_item_was_acknowledged(tmp_path: Path) -> None:
    rb, again = (made(sampler=ConsumingSampler(3), batch_size=None) for _ in range(2))
    rb.extend(numbered(0, 6))
    for _ in range(3):
        rb.sample(2)  # 0 and 1 are done
    rb.sample(4)
    rb.sample(2)  # 2 and 3 for the second time, 4 and 5 for the first
    rb.sample(1, lease=math.inf)  # 2 for the third time
    late = rb.sample(2, lease=math.inf)
    assert numbers(late) == [3, 4]  # for the third and the second time
    rb.dumps(tmp_path / "save")
    again.loads(tmp_path / "save")
    assert numbers(again.sample(6)) == [4, 5]
    assert numbers(again.sample(6)) == [5]
    with pytest.raises(EmptyBufferError):
        again.sample(6)
    again.extend(numbered(6, 12))
    assert [again.sample(12)["number"].sum() for _ in range(3)] == 3 * [sum(range(6, 18))]


@pytest.mark.parametrize("moment", ["status", "known"])
def test_a_consumer_that_is_removed_during_a_save_stays_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    rb = made()
    rb.extend(numbered(0, 6))
    rb.set_sampler(ConsumingSampler(consumer="other"))
    rb.set_sampler(ConsumingSampler())
    rb.sample()
    look = getattr(Consumers, moment)

    def removed_behind(self: Consumers, *name: str) -> Any:
        found = look(self, *name)
        if self.remove("other"):
            monkeypatch.undo()
        return found

    monkeypatch.setattr(Consumers, moment, removed_behind)
    rb.dumps(tmp_path / "save")
    assert [one.name for one in rb.consumers()] == ["default"]
    assert [one["name"] for one in read_consumed(tmp_path / "save" / "storage" / PARTS)] == [
        "default"
    ]


def test_an_item_that_was_written_again_is_not_taken_for_done(tmp_path: Path) -> None:
    rb = made(sampler=ConsumingSampler(2), batch_size=None)
    rb.extend(numbered(0, 16))
    rb.sample(16)
    rb.dumps(tmp_path / "first")
    rb.sample(16)
    rb.extend(numbered(16, 16))
    rb.loads(tmp_path / "first")
    assert numbers(rb.sample(16)) == list(range(16))
    with pytest.raises(EmptyBufferError):
        rb.sample(1)
