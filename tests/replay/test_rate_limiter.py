"""Rate limiters in buffers: what is counted, what waits, and the error messages."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferClosedError,
    CompressedListStorage,
    EmptyBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RateLimiter,
    RateLimitError,
    RateLimitTimeout,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    ShmBufferError,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from shmbuffer.memory.flow import sides, waiting
from tests.kit.rings import engine_of, ring_of
from tests.replay.conftest import MakeStorage

pytestmark = [pytest.mark.product(few=4), pytest.mark.filterwarnings("ignore:sample.batch_size")]

LIMITER = RateLimiter(2, error_buffer=8, when_no_peer="wait")
QUEUE = RateLimiter(max_times_sampled=1)
RECORDS = (LazyStackStorage, CompressedListStorage)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the delays that give other clients time to come back."""
    monkeypatch.setattr(sides, "ALONE_S", 0.0)
    monkeypatch.setattr(waiting, "CHECK_INTERVAL_S", 0.0)


def items(count: int, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict({"number": numbers, "obs": numbers[:, None].repeat(1, 3)}, [count])


def ahead(rb: ReplayBuffer) -> float:
    ring = ring_of(rb)
    assert ring is not None
    ahead: float = ring.admission.rate_status().ahead
    return ahead


def buffer(storage: Any = None, limiter: RateLimiter | None = LIMITER, **kwargs: Any) -> Any:
    kwargs.setdefault("batch_size", 4)
    storage = LazyTensorStorage(16) if storage is None else storage
    return TensorDictReplayBuffer(storage=storage, rate_limiter=limiter, **kwargs)


def refuses(call: Any, text: str, kind: type[Exception] = RateLimitTimeout) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert re.fullmatch(text, str(raised.value)), str(raised.value)


def test_both_sides_are_kept_in_step(make: MakeStorage) -> None:
    rb = buffer(make(16))
    rb.extend(items(1))  # min_size items, which are not counted
    rb.extend(items(4))
    assert ahead(rb) == 8
    refuses(
        lambda: rb.extend(items(1), timeout=0),
        r".*: extend waits: 2 samples per insert are required, "
        r"but so far there were 0; there is no learner; timed out after "
        "0 s, and nothing was changed",
    )
    refuses(
        lambda: rb.add(items(1)[0], timeout=0),
        r".*: extend waits: 2 samples per insert are required, "
        r"but so far there were 0; there is no learner; timed out after "
        "0 s, and nothing was changed",
    )
    assert len(rb) == 5
    for _ in range(4):
        rb.sample()
    assert ahead(rb) == -8
    refuses(
        lambda: rb.sample(timeout=0),
        r".*: sample waits: 2 samples per insert are required, "
        r"but so far there were 4; there is no collector other than "
        r"pid \d+, which last inserted \d+ m?s ago; timed out after 0 s, and nothing was changed",
    )
    assert ahead(rb) == -8


def test_every_way_to_sample_counts_what_it_delivers(make: MakeStorage) -> None:
    rb = buffer(make(16), RateLimiter(8, error_buffer=100), batch_size=4)
    rb.extend(items(4))
    begin = ahead(rb)
    sample = rb.sample()
    sample, info = rb.sample(2, return_info=True)
    assert len(sample) == len(info["index"]) == 2
    assert "index" not in rb.sample(2, include_info=False)
    for batch in rb:
        assert len(batch) == 4
        break
    assert begin - ahead(rb) == 4 + 2 + 2 + 4
    filled = rb.sample()
    assert rb.sample(out=filled) is filled
    assert begin - ahead(rb) == 20


def test_a_sample_that_fails_counts_for_nothing(make: MakeStorage) -> None:
    def broken(_: Any) -> Any:
        raise ArithmeticError

    rb = buffer(make(16), transform=broken)
    rb.extend(items(4))
    begin = ahead(rb)
    with pytest.raises(ArithmeticError):
        rb.sample()
    assert ahead(rb) == begin


@pytest.mark.product(few=1)
def test_a_prefetched_batch_counts_when_it_is_delivered(make: MakeStorage) -> None:
    rb = buffer(make(16), RateLimiter(8, error_buffer=100), prefetch=2)
    rb.extend(items(4))
    begin = ahead(rb)
    rb.sample()
    assert begin - ahead(rb) == 4
    rb.empty()
    rb.extend(items(4))
    rb.sample()
    assert ahead(rb) == begin - 4


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SamplerWithoutReplacement(),
        lambda: PrioritizedSampler(16, 0.7, 0.5),
        lambda: SliceSampler(slice_len=2, traj_key="episode", strict_length=False),
    ],
)
def test_every_sampler_can_be_limited(make: MakeStorage, sampler: Any) -> None:
    rb = buffer(make(16), sampler=sampler())
    data = items(4)
    data["episode"] = torch.tensor([0, 0, 1, 1])
    rb.extend(data)
    assert ahead(rb) == 6
    for _ in range(3):
        assert len(rb.sample()) == 4
    assert ahead(rb) == -6
    refuses(lambda: rb.sample(timeout=0), ".*2 samples per insert are required, .*there were 4.*")


@pytest.mark.parametrize("kind", RECORDS)
def test_records_can_be_limited(kind: Any, tmp_path: Path) -> None:
    where = {"scratch_dir": tmp_path / "buffer", "shared_init": True}
    rb = buffer(kind(16, max_bytes=2**20, **where))
    rb.extend(items(5))
    refuses(lambda: rb.extend(items(1), timeout=0), ".*extend waits: 2 samples per insert.*")
    for _ in range(4):
        rb.sample()
    refuses(lambda: rb.sample(timeout=0), ".*2 samples per insert are required, .*there were 4.*")


def test_lanes_are_counted_as_items() -> None:
    rb = buffer(LazyTensorStorage(16, ndim=2), RateLimiter(2, error_buffer=8, min_size=4))
    data = TensorDict({"a": torch.arange(8).view(2, 4)}, [2, 4])
    rb.extend(data)
    assert ahead(rb) == 8
    rb.sample()
    assert ahead(rb) == 4


def test_objects_of_one_process_have_no_flow_control() -> None:
    why = (
        "a ListStorage holds objects of this process; use a LazyMemmapStorage with a scratch_dir "
        "and shared_init=True, or a LazyTensorStorage, for tensors that processes share"
    )
    text = f"this buffer has no flow control: {why}"
    with pytest.raises(RuntimeError) as raised:
        ReplayBuffer(storage=ListStorage(16), rate_limiter=LIMITER)
    assert str(raised.value) == text
    rb = ReplayBuffer(storage=ListStorage(16), batch_size=4)
    refuses(
        lambda: rb.sample(min_size=4, timeout=0),
        "anonymous memory: sample waits: the buffer has 0 items, but 4 are needed; there is no "
        "collector; timed out after 0 s, and nothing was changed",
    )
    rb.extend(["a", "b", "c", "d", "e"])
    assert len(rb.sample(min_size=4)) == 4
    refuses(
        lambda: rb.sample(min_size=6, timeout=0),
        ".*: sample waits: the buffer has 5 items, but 6 are needed; there is no collector other.*",
    )
    assert rb.rate_limiter is None


def test_a_loop_in_one_thread_goes_on_whatever_it_does(make: MakeStorage) -> None:
    rb = buffer(make(16), RateLimiter(2, error_buffer=4))
    for _ in range(30):
        rb.extend(items(3))
    for _ in range(30):
        rb.sample()
    for _ in range(10):
        rb.extend(items(1))
        rb.sample()
    assert abs(ahead(rb)) <= 4


def test_calls_with_short_timeouts_find_out_that_they_are_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sides, "ALONE_S", 0.05)
    rb = buffer(limiter=RateLimiter(2, error_buffer=4))
    rb.extend(items(3))
    refused = 0
    while True:
        try:
            rb.extend(items(1), timeout=0.02)
            break
        except RateLimitTimeout:
            refused += 1
    assert refused


def test_a_loop_over_a_drained_queue_ends_at_its_timeout(make: MakeStorage) -> None:
    rb = buffer(make(16), QUEUE)
    rb.extend(items(10))
    drawn: list[list[int]] = []
    with pytest.raises(RateLimitTimeout, match="the queue has 2 items left, but 4 are needed"):
        drawn.extend(batch["number"].tolist() for batch in rb.as_dataset(timeout=0))
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_write_without_a_learner_may_be_an_error(make: MakeStorage) -> None:
    rb = buffer(make(16), RateLimiter(2, error_buffer=4, when_no_peer="error"))
    rb.extend(items(3))
    refuses(
        lambda: rb.extend(items(1)),
        ".*: extend waits: 2 samples per insert are required, "
        "but so far there were 0; there is no learner, and "
        "when_no_peer is 'error'; nothing was changed",
        RateLimitError,
    )


def test_before_the_first_write_too(make: MakeStorage) -> None:
    rb = buffer(make(16), RateLimiter(2, min_size=3, when_no_peer="error"))
    refuses(
        rb.sample,
        ".*: sample waits: the buffer has 0 items, but 3 are needed; there is no collector, and "
        "when_no_peer is 'error'; nothing was changed",
        RateLimitError,
    )
    rb.rate_limiter = RateLimiter(2, min_size=3)
    refuses(
        lambda: rb.sample(timeout=0),
        ".*: sample waits: the buffer has 0 items, but 3 are needed; there is no collector; "
        "timed out after 0 s, and nothing was changed",
    )


@pytest.mark.parametrize("alone", ["pass", "wait", "error"])
def test_two_threads_share_a_handle(
    make: MakeStorage, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "ALONE_S", 30.0)
    rb = buffer(make(16), RateLimiter(2, error_buffer=8, when_no_peer=alone))
    failed: list[BaseException] = []

    def collect() -> None:
        try:
            for number in range(41):
                rb.extend(items(1, number))
        except BaseException as error:
            failed.append(error)

    collector = threading.Thread(target=collect)
    collector.start()
    for _ in range(20):
        rb.sample(4)
        assert abs(ahead(rb)) <= 8 + 2  # one insert may be open
    collector.join()
    assert not failed
    assert ahead(rb) == 0


def test_min_size_of_a_call(make: MakeStorage) -> None:
    rb = buffer(make(16), None)
    rb.extend(items(4))
    assert len(rb.sample(min_size=4)) == 4
    refuses(
        lambda: rb.sample(min_size=5, timeout=0),
        r".*: sample waits: the buffer has 4 items, but 5 are needed; there is no "
        r"collector other than pid \d+, "
        r"which last inserted \d+ m?s ago; timed out after 0 s, and nothing was changed",
    )
    refuses(
        lambda: rb.sample(min_size=17),
        ".*: min_size is 17, but the buffer has room for only 16 items.*",
        ValueError,
    )
    refuses(lambda: rb.sample(min_size=-1), "min_size must be at least 0, got -1", ValueError)
    refuses(
        lambda: rb.sample(timeout=-1),
        "timeout must be a number of seconds of at least 0, or None, but is -1",
        ValueError,
    )
    refuses(
        lambda: rb.sample(timeout="1"),
        "timeout must be a number of seconds of at least 0, or None, but is '1'",
        TypeError,
    )
    for limiter in (32, "x"):
        message = f"rate_limiter must be a RateLimiter or None, got {limiter!r}"
        refuses(lambda: setattr(rb, "rate_limiter", limiter), message, TypeError)  # noqa: B023
        refuses(lambda: buffer(LazyTensorStorage(4), limiter), message, TypeError)  # noqa: B023


def test_what_cannot_be_is_said_at_once(make: MakeStorage) -> None:
    rb = buffer(make(16), RateLimiter(2, error_buffer=4))
    rb.extend(items(1))
    refuses(
        lambda: rb.extend(items(5)),
        ".*: to write 5 items at once, the error buffer must be at least 5, but is 4",
        RateLimitError,
    )
    refuses(
        lambda: rb.sample(9),
        ".*: to sample 9 items at once, the error buffer must be at least 4.5, but is 4",
        RateLimitError,
    )


def test_the_same_limiter_again_leaves_the_balance_alone(tmp_path: Path) -> None:
    """A program that is restarted sets the same limiter again."""

    def again() -> Any:
        storage = LazyMemmapStorage(64, scratch_dir=tmp_path / "buffer", shared_init=True)
        return buffer(storage, RateLimiter(4, min_size=10))

    first = again()
    first.extend(items(11))
    first.sample(3)
    assert ahead(first) == 1
    second = again()
    assert ahead(second) == 1
    assert second.rate_limiter == RateLimiter(
        4.0, min_size=10, error_buffer=4.0, when_no_peer="pass"
    )
    first.storage.close()
    second.storage.close()
    third = again()
    assert ahead(third) == 1
    third.storage.close()


@pytest.mark.parametrize("waits", ["extend", "the first sample"])
def test_closing_a_handle_wakes_its_waiting_thread(tmp_path: Path, waits: str) -> None:
    storage = LazyMemmapStorage(16, scratch_dir=tmp_path / "buffer", shared_init=True)
    rb = buffer(storage)
    if waits == "extend":
        rb.extend(items(5))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            rb.extend(items(1)) if waits == "extend" else rb.sample()
        except BaseException as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    control = engine_of(storage).seat.control
    while not control.entries["waits_for"].any():
        pass
    storage.close()
    waiting.join(30)
    assert [type(error) for error in raised] == [BufferClosedError]


def test_a_queue_loads_no_checkpoint_until_its_limiter_is_removed(
    make: MakeStorage, tmp_path: Path
) -> None:
    """A queue that refuses a load keeps its items."""
    rb = buffer(make(16), QUEUE)
    rb.extend(items(5))
    rb.dumps(tmp_path / "save")
    assert rb.sample()["number"].tolist() == [0, 1, 2, 3]
    for name, load in (
        ("loads", lambda: rb.loads(tmp_path / "save")),
        ("load_state_dict", lambda: rb.load_state_dict(rb.state_dict())),
    ):
        refuses(
            load,
            rf"{name}: the buffer is a queue \(max_times_sampled\), which can only be written "
            r"at its end\. Nothing was changed\. Load into a buffer that is not a queue",
            ShmBufferError,
        )
    assert len(rb) == 5
    assert rb.sample(1)["number"].tolist() == [4]
    rb.rate_limiter = None
    rb.loads(tmp_path / "save")
    assert len(rb) == 5


WRITTEN = (5, 16, 40)
"""Number of items written into 16 slots: some, all, and past the end."""


def filled(rb: Any, count: int) -> None:
    """Writes items one at a time, so that each has the ticket of its own write."""
    for number in range(count):
        rb.extend(items(1, number))


def come_out(rb: Any) -> list[int]:
    """Returns what a queue delivers until it is empty."""
    numbers: list[int] = []
    try:
        while True:
            numbers += rb.sample(1, timeout=0)["number"].tolist()
    except RateLimitTimeout:
        return numbers


@pytest.mark.parametrize("way", ["loads", "load_state_dict"])
def test_a_load_is_not_limited_and_the_ratio_counts_from_there(
    make: MakeStorage, tmp_path: Path, way: str
) -> None:
    source = buffer(make(16), None)
    source.extend(items(13))
    source.dumps(tmp_path / "save")
    tight = RateLimiter(4, min_size=2, error_buffer=4, when_no_peer="wait")
    rb = buffer(make(16), tight)
    rb.extend(items(2))
    rb.sample(3)
    if way == "loads":
        rb.loads(tmp_path / "save")
    else:
        rb.load_state_dict(source.state_dict())
    assert (len(rb), ahead(rb)) == (13, 0)
    rb.extend(items(1, 13))
    with pytest.raises(RateLimitTimeout):
        rb.extend(items(1, 14), timeout=0)


@pytest.mark.product("way written")
@pytest.mark.parametrize("way", ["extend", "loads", "loads over others", "load_state_dict"])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("kind", ["rows", *RECORDS])
def test_a_queue_that_is_set_on_a_filled_buffer_hands_out_all_of_it_oldest_first(
    make: MakeStorage, tmp_path: Path, written: int, way: str, kind: Any
) -> None:
    """A load uses up a lap of tickets, and the queue began behind the loaded items."""
    if kind == "rows":
        source, rb = buffer(make(16), None), buffer(make(16), None)
    else:
        source, rb = (
            buffer(kind(16, max_bytes=2**16, scratch_dir=tmp_path / name, shared_init=True), None)
            for name in ("source", "loaded")
        )
    filled(source, written)
    source.dumps(tmp_path / "save")
    if way == "loads over others":
        rb.extend(items(7, 100))
    if way == "extend":
        filled(rb, written)
    elif way == "load_state_dict":
        rb.load_state_dict(source.state_dict())
    else:
        rb.loads(tmp_path / "save")
    rb.rate_limiter = QUEUE
    rb.extend(items(max(0, 16 - written), written), timeout=0)  # free slots are space
    assert come_out(rb) == list(range(max(16, written)))[-16:]
    rb.extend(items(16, 200), timeout=0)  # all slots are space again
    assert come_out(rb) == list(range(200, 216))


def test_an_item_that_is_replaced_before_a_queue_is_set_keeps_its_turn(make: MakeStorage) -> None:
    """Each replacement moves the ticket of an item a lap ahead of the others."""
    rb = buffer(make(16), None)
    filled(rb, 20)
    for number in (101, 102, 103):
        rb[7] = items(1, number)[0]
    rb.rate_limiter = RateLimiter(max_times_sampled=2)
    assert come_out(rb) == [n for m in range(4, 20) for n in [103 if m == 7 else m] * 2]


@pytest.mark.parametrize("written", WRITTEN)
def test_a_queue_that_is_set_on_a_recovered_buffer_hands_out_all_of_it(
    tmp_path: Path, written: int
) -> None:
    where = {"scratch_dir": tmp_path / "buffer", "shared_init": True}
    rb = buffer(LazyMemmapStorage(16, **where), None)
    filled(rb, written)
    shutil.copytree(tmp_path / "buffer", tmp_path / "copy")
    rb.storage.close()
    for name in ("buffer", "copy"):  # after all clients have left, and with every byte verified
        again = buffer(LazyMemmapStorage(16, **where | {"scratch_dir": tmp_path / name}), None)
        again.rate_limiter = QUEUE
        assert come_out(again) == list(range(written))[-16:]
        again.storage.close()


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"prefetch": 2}, "prefetch"), ({"sampler": SamplerWithoutReplacement()}, "a Sampler.*")],
)
def test_a_queue_refuses_parts_that_choose_items(options: Any, asked: str) -> None:
    rb = buffer(None, QUEUE, **options)
    rb.extend(items(5))
    refuses(
        rb.sample,
        r"the buffer is a queue \(max_times_sampled\), which returns items in first-in, "
        rf"first-out order at the time of the call, so it cannot be combined with {asked}",
        ValueError,
    )


def test_a_writer_that_chooses_places_waits_like_any_other() -> None:
    rb = buffer(LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="number"))
    rb.extend(items(4))
    refuses(
        lambda: rb.extend(items(4, 10), timeout=0),
        ".*: extend waits: 2 samples per insert are required, "
        "but so far there were 0; there is no learner.*",
    )


# Ensembles: each row is limited by the limiter of its own buffer.


def ensemble(*limiters: RateLimiter | None, **kwargs: Any) -> ReplayBufferEnsemble:
    kwargs.setdefault("sample_from_all", True)
    buffers = [buffer(LazyTensorStorage(16), limiter) for limiter in limiters]
    return ReplayBufferEnsemble(*buffers, batch_size=4 * len(buffers), **kwargs)


def numbers(sample: Any) -> list[list[int]]:
    found: list[list[int]] = sample["number"].tolist()
    return found


@pytest.mark.parametrize("prefetch", [None, 2])
def test_samples_of_an_ensemble_count_and_wait_for_each_buffer(prefetch: int | None) -> None:
    """Samples of an ensemble neither counted nor waited."""
    rb = ensemble(LIMITER, None, prefetch=prefetch)
    rb[0].extend(items(5))
    rb[1].extend(items(5))
    for left in (4, 0, -4, -8):
        assert len(rb.sample()) == 2
        assert ahead(rb[0]) == left
    refuses(
        lambda: rb.sample(timeout=0), ".*2 samples per insert are required, .* there were 4; .*"
    )
    assert ahead(rb[0]) == -8
    rb[0].extend(items(4))
    assert len(rb.sample(timeout=0)) == 2


def test_a_sample_of_an_ensemble_that_fails_counts_for_nothing_in_any_buffer() -> None:
    rb = ensemble(LIMITER, LIMITER, LIMITER)
    for member in (rb[0], rb[1], rb[2]):
        member.extend(items(5))
    for _ in range(4):
        rb[2].sample()
    refuses(lambda: rb.sample(timeout=0), ".*2 samples per insert are required, .*there were 4.*")
    assert [ahead(rb[at]) for at in range(3)] == [8, 8, -8]

    def broken(_: Any) -> Any:
        raise ArithmeticError

    rb[2].extend(items(4))
    rb.append_transform(broken)
    with pytest.raises(ArithmeticError):
        rb.sample()
    assert [ahead(rb[at]) for at in range(3)] == [8, 8, 0]


def test_an_ensemble_waits_for_the_first_items_of_a_limited_buffer() -> None:
    rb = ensemble(RateLimiter(min_size=3, when_no_peer="wait"), None)
    rb[1].extend(items(4))
    refuses(
        lambda: rb.sample(timeout=0), ".*sample waits: the buffer has 0 items, but 3 are needed.*"
    )
    rb[0].extend(items(3))
    assert len(rb.sample(timeout=0)) == 2


def test_a_row_of_a_queue_is_its_oldest_items_once() -> None:
    """Items of a queue were drawn at random and repeatedly."""
    rb = ensemble(QUEUE, QUEUE)
    rb[0].extend(items(8))
    rb[1].extend(items(4, 100))
    assert numbers(rb.sample()) == [[0, 1, 2, 3], [100, 101, 102, 103]]
    refuses(lambda: rb.sample(timeout=0), ".*the queue has 0 items left, but 4 are needed.*")
    rb[1].extend(items(4, 104))  # items taken from the other buffer were kept
    assert numbers(rb.sample()) == [[4, 5, 6, 7], [104, 105, 106, 107]]
    rb[0].rate_limiter = None
    rb[1].extend(items(4, 108))
    assert numbers(rb.sample(timeout=0))[1] == [108, 109, 110, 111]


def test_items_taken_by_a_failed_sample_come_with_the_next_one_in_order() -> None:
    """Such items were lost if a transform raised, and stranded by another batch size."""
    rb = ensemble(QUEUE, QUEUE)

    def broken(_: Any) -> Any:
        raise ArithmeticError

    rb[0].extend(items(12))
    rb[1].extend(items(12, 100))
    rb[1].append_transform(broken)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            rb.sample()
    rb[1]._parts.transform = rb[1].transform[:0]
    with pytest.raises(
        RuntimeError, match=r"took 4 items from the queue of buffer 0.* but this one needs 2"
    ):
        rb.sample(4)
    for first in (0, 4, 8):
        assert numbers(rb.sample()) == [
            [*range(first, first + 4)],
            [*range(100 + first, 104 + first)],
        ]


def test_a_queue_gives_nothing_while_another_buffer_has_nothing_to_draw() -> None:
    rb = ensemble(QUEUE, None)
    rb[0].extend(items(8))
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb[1].extend(items(4, 100))
    assert numbers(rb.sample(4))[0] == [0, 1]
    assert numbers(rb.sample())[0] == [2, 3, 4, 5]


def test_a_learner_of_an_ensemble_and_a_collector_for_each_buffer_keep_in_step() -> None:
    rb = ensemble(LIMITER, RateLimiter(1, error_buffer=6, when_no_peer="wait"))
    failed: list[BaseException] = []

    def collect(at: int, count: int) -> None:
        try:
            for number in range(count):
                rb[at].extend(items(1, number))
        except BaseException as error:
            failed.append(error)

    collectors = [
        threading.Thread(target=collect, args=(0, 41)),
        threading.Thread(target=collect, args=(1, 81)),
    ]
    for collector in collectors:
        collector.start()
    for _ in range(20):
        rb.sample()
        assert abs(ahead(rb[0])) <= 8 + 2  # one insert may be open
        assert abs(ahead(rb[1])) <= 6 + 1
    for collector in collectors:
        collector.join()
    assert not failed
    assert [ahead(rb[0]), ahead(rb[1])] == [0, 0]
