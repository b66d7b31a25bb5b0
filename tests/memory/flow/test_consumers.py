"""Each consumer gets each item once, or again if the holder died or its lease ended."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest

from shmbuffer import ConsumerError, EmptyBufferError, RateLimitTimeout
from shmbuffer.memory import Engine
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.flow.consumers import Consumers
from shmbuffer.memory.format.layout import Side
from shmbuffer.memory.format.ledger import COMPLETE, DELIVERABLE, LEASED_ELSEWHERE, LEASED_HERE
from shmbuffer.memory.system.deadline import limit_waits
from tests.kit.programs import Program, needs_root
from tests.kit.rings import ring_of
from tests.memory.rows import Maker, write


def test_items_come_once_and_oldest_first(make: Maker) -> None:
    ring = ring_of(make())
    consumer = ring.consumers.open("a")
    write(ring, range(5))
    first = consumer.take(3)
    assert (first.slots.tolist(), first.tickets.tolist()) == ([0, 1, 2], [0, 1, 2])
    second = consumer.take(3)
    assert second.tickets.tolist() == [3, 4], "nobody else can write more, so that is all"
    with pytest.raises(EmptyBufferError, match="consumer 'a' was given every item"):
        consumer.take(1)
    assert consumer.ack(first.lease, first.slots, first.tickets) == (3, 0)
    assert consumer.ack(first.lease, first.slots, first.tickets) == (3, 0), "twice is as once"
    (found,) = ring.consumers.status()
    assert (found.position, found.floor, found.behind) == (5, 3, 2)
    assert (found.delivered, found.acked, found.refused, found.held) == (5, 3, 0, 2)


def test_what_could_be_given_is_counted(make: Maker) -> None:
    ring = ring_of(make())
    consumer = ring.consumers.open("a")
    assert consumer.available(1) == 0
    write(ring, range(5))
    assert consumer.available(8) == 5
    consumer.take(1, 1e-9)
    assert consumer.available(8) == 5, "a lease that is over, and what is new"
    consumer.take(3)  # the first of them for the second time
    assert consumer.available(8) == 2
    consumer.take(2, 1e-9)
    assert consumer.available(8) == 2, "nothing is new"
    taken = consumer.take(2)
    assert consumer.available(1) == 0
    consumer.give_back(taken.lease)
    assert consumer.item_states().states[list(taken.slots)].tolist() == [DELIVERABLE, DELIVERABLE]
    assert consumer.available(1) == 2
    write(ring, range(5, 6))
    assert consumer.available(1) == 3


def test_each_consumer_is_given_each_item(make: Maker) -> None:
    ring = ring_of(make())
    one, two = ring.consumers.open("one"), ring.consumers.open("two")
    write(ring, range(4))
    for consumer in (one, two):
        assert consumer.take(4).tickets.tolist() == [0, 1, 2, 3]
    assert ring.consumers.open("one").number == one.number
    late = ring.consumers.open("late", start="newest")
    write(ring, [4])
    assert late.take(4).tickets.tolist() == [4]


@pytest.mark.parametrize("way", ["take", "claim"])
def test_what_an_interrupted_call_has_taken_is_given_to_others(make: Maker, way: str) -> None:
    ring = ring_of(make())
    consumer = ring.consumers.open("a")
    write(ring, range(3))

    def interrupt(frame: object, event: str, what: object) -> None:
        """Raises an exception, like a signal that arrives during a call into the core."""
        if event == "c_return" and getattr(what, "__name__", "") in ("deliver", "claim_groups"):
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            consumer.take(3) if way == "take" else consumer.claim(np.arange(3), np.arange(3))
    finally:
        sys.setprofile(before)
    (lease,) = ring.consumers.status()[0].leases
    assert (lease.items, lease.ends_in_s) == (3, 0)
    assert consumer.take(3).tickets.tolist() == [0, 1, 2]


def test_a_consumer_that_is_removed_while_it_is_looked_up_is_not_taken_for_the_next(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_of(make())
    write(ring, range(3))
    ring.consumers.open("a")
    find = Consumers._find

    def removed_behind(self: Consumers, encoded: bytes) -> object:
        found = find(self, encoded)
        monkeypatch.undo()
        assert ring.consumers.remove("a")
        ring.consumers.open("b", times=2, holds=False)
        return found

    monkeypatch.setattr(Consumers, "_find", removed_behind)
    gone = ring.consumers.open("a")
    assert not gone.is_there
    with pytest.raises(ConsumerError, match="consumer"):
        gone.take(1)


def test_what_a_lease_lost_is_given_to_others_first_and_its_ack_is_refused(make: Maker) -> None:
    ring = ring_of(make())
    consumer = ring.consumers.open("a")
    write(ring, range(6))
    lost = consumer.take(2, 1e-9)
    kept = consumer.take(2)
    assert kept.tickets.tolist() == [0, 1], "its lease was over"
    assert consumer.ack(lost.lease, lost.slots, lost.tickets) == (0, 2)
    assert consumer.ack(kept.lease, kept.slots, kept.tickets) == (2, 0)
    again = consumer.take(3, 1e-9)
    assert consumer.ack(again.lease, again.slots[:1], again.tickets[:1]) == (1, 0), "not taken yet"
    rest = consumer.take(4)
    assert rest.tickets.tolist() == [3, 4, 5]
    (found,) = ring.consumers.status()
    assert (found.redelivered, found.refused) == (4, 2)


def test_what_a_closed_handle_held_is_given_to_others(make_files: Maker) -> None:
    engine = make_files()
    other = make_files.second(engine)
    mine = ring_of(engine).consumers.open("a")
    theirs = ring_of(other).consumers.open("a")
    write(ring_of(engine), range(4))
    taken = theirs.take(2)
    assert mine.item_states().states[:4].tolist() == [
        LEASED_ELSEWHERE,
        LEASED_ELSEWHERE,
        DELIVERABLE,
        DELIVERABLE,
    ]
    assert theirs.item_states().states[:4].tolist() == [
        LEASED_HERE,
        LEASED_HERE,
        DELIVERABLE,
        DELIVERABLE,
    ]
    assert theirs.ack(taken.lease, taken.slots[:1], taken.tickets[:1]) == (1, 0)
    other.close()
    assert mine.take(2).tickets.tolist() == [1, 2]
    assert mine.item_states().states[:4].tolist() == [
        COMPLETE,
        LEASED_HERE,
        LEASED_HERE,
        DELIVERABLE,
    ]


def test_a_group_is_taken_whole_or_not_at_all(make: Maker) -> None:
    ring = ring_of(make())
    consumer = ring.consumers.open("a")
    write(ring, range(6))
    at = np.arange(6)
    assert consumer.drop(at[4:5], at[4:5]) == 1
    kept, lease = consumer.claim(at, at, [2, 2, 2])
    assert kept.tolist() == [True, True, False]
    assert consumer.claim(at[:2], at[:2], [2])[0].tolist() == [False]
    twice, _ = consumer.claim(np.array([5, 5]), np.array([5, 5]), [1, 1])
    assert twice.tolist() == [True, False]
    assert consumer.ack(lease, at[:4], at[:4]) == (4, 0)
    (found,) = ring.consumers.status()
    assert (found.floor, found.dropped, found.delivered) == (5, 1, 5)


def test_a_consumer_that_is_removed_says_so(make: Maker) -> None:
    ring = ring_of(make())
    consumer = ring.consumers.open("a")
    write(ring, range(3))
    assert ring.consumers.remove("a")
    assert not ring.consumers.remove("a")
    assert not ring.consumers
    with pytest.raises(ConsumerError, match="was removed while this handle used it"):
        consumer.take(1)
    with pytest.raises(ConsumerError, match="was removed while this handle used it"):
        consumer.available(1)
    again = ring.consumers.open("a")
    with pytest.raises(ConsumerError, match="was removed"):
        consumer.take(1)
    assert again.take(3).tickets.tolist() == [0, 1, 2]


def test_eight_consumers_are_enough(make: Maker) -> None:
    ring = ring_of(make())
    for number in range(8):
        ring.consumers.open(f"c{number}")
    with pytest.raises(ConsumerError, match=r"already 8 consumers \('c0', .* --remove NAME"):
        ring.consumers.open("one more")
    ring.consumers.remove("c3")
    ring.consumers.open("one more")


def test_what_cannot_be_is_refused(make: Maker) -> None:
    ring = ring_of(make())
    ring.consumers.open("a")
    with pytest.raises(
        ConsumerError, match="'a' already exists with max_sample_count=1, got max_sample_count=2"
    ):
        ring.consumers.open("a", times=2)
    with pytest.raises(ConsumerError, match="got max_sample_count=1 and without blocking writers"):
        ring.consumers.open("a", holds=False)
    for name in ("", "x" * 49, "a\0"):
        with pytest.raises(ValueError, match="name of a consumer must have from 1 to 48 bytes"):
            ring.consumers.open(name)
    with pytest.raises(ValueError, match="start must be 'oldest' or 'newest'"):
        ring.consumers.open("b", start="middle")  # type: ignore[arg-type]


def test_an_engine_of_several_lanes_has_no_consumers(make: Maker) -> None:
    engine: Engine = make(lanes=(2,))
    with pytest.raises(ValueError, match="a consumer needs a storage with one dimension"):
        ring_of(engine).consumers.open("a")


def test_a_learner_that_waits_is_told_of_what_it_holds_while_writers_wait_for_it(
    make_files: Maker,
) -> None:
    engine = make_files()
    ring, other = ring_of(engine), ring_of(make_files.second(engine))
    consumer = other.consumers.open("train")
    write(ring, range(8))
    held = consumer.take(6)
    writer = threading.Thread(target=write, args=(ring, range(8, 12)))
    writer.start()
    try:
        entries = engine.seat.control.entries
        while not (entries["waits_for"] & Side.SAMPLES).any():
            time.sleep(0.001)
        with pytest.raises(RateLimitTimeout) as caught, limit_waits(0.3):
            consumer.take(4)
    finally:
        consumer.ack(held.lease, held.slots, held.tickets)
        writer.join()
    assert (
        "4 undelivered items are needed, but this consumer has fewer; this handle holds 6 "
        "unacknowledged items of consumer 'train', and writers wait for them; ack them "
        "first"
    ) in str(caught.value)
    assert len(consumer.take(4).slots) == 4


def test_a_writer_waits_for_the_slowest_consumer_and_names_it(make_files: Maker) -> None:
    engine = make_files()
    ring, other = ring_of(engine), ring_of(make_files.second(engine))
    quick, slow = other.consumers.open("quick"), other.consumers.open("slow")
    write(ring, range(8))
    taken = quick.take(8)
    quick.ack(taken.lease, taken.slots, taken.tickets)
    with pytest.raises(RateLimitTimeout) as caught, limit_waits(0.3):
        write(ring, [8])
    assert str(caught.value).startswith(
        f"{engine.path}: extend waits: the oldest of 8 items that consumer 'slow' has not "
        "acknowledged would be overwritten; no learner holds any of these items; sample with the "
        "consumer, or remove the consumer (`shmbuffer consumers DIRECTORY --remove slow`); timed"
    )
    first = slow.take(2)
    held = rf"process {os.getpid()} holds 2 of these items until ack"
    with pytest.raises(RateLimitTimeout, match=held), limit_waits(0.3):
        write(ring, [8])
    slow.ack(first.lease, first.slots, first.tickets)
    assert write(ring, [8, 9]) == 8
    assert other.consumers.remove("slow")
    with pytest.raises(
        ValueError, match="a consumer cannot receive a batch of 9 items through a buffer of 8"
    ):
        write(ring, range(9))


def done_but_for(consumer: Consumer, count: int, left: int) -> None:
    """Takes ``count`` items, acknowledges all but the ``left`` oldest, and gives those back."""
    taken = consumer.take(count)
    consumer.ack(taken.lease, taken.slots[left:], taken.tickets[left:])
    consumer.give_back(taken.lease)


def test_what_writers_and_learners_would_both_wait_for_is_a_batch(make_files: Maker) -> None:
    engine = make_files()
    ring, other = ring_of(engine), ring_of(make_files.second(engine))
    consumer = other.consumers.open("train")
    write(ring, range(8))
    done_but_for(consumer, 8, left=2)
    assert not consumer.is_stuck(8), "of a batch that the buffer has no room for"
    assert consumer.available(5) == 2
    taken = consumer.take(5)
    assert taken.tickets.tolist() == [0, 1]
    assert not consumer.is_stuck(3), "somebody holds them, and may acknowledge them"
    with pytest.raises(RateLimitTimeout, match="5 undelivered items are needed"), limit_waits(0.1):
        consumer.take(5)
    consumer.ack(taken.lease, taken.slots, taken.tickets)
    assert write(ring, range(8, 16)) == 8


def test_nobody_waits_for_what_a_writer_that_waits_cannot_write(make_files: Maker) -> None:
    engine = make_files()
    ring, other = ring_of(engine), ring_of(make_files.second(engine))
    consumer = other.consumers.open("train")
    write(ring, range(8))
    done_but_for(consumer, 4, left=0)
    write(ring, range(8, 10))
    done_but_for(consumer, 6, left=4)
    assert not consumer.is_stuck(2), "there is room for two"
    writer = threading.Thread(target=write, args=(ring, range(10, 14)))
    writer.start()
    try:
        end = time.monotonic() + 50
        while not consumer.is_stuck(1):
            assert time.monotonic() < end
            time.sleep(0.001)
        assert consumer.available(6) == 4
    finally:
        taken = consumer.take(4)
        consumer.ack(taken.lease, taken.slots, taken.tickets)
        writer.join()
    assert taken.tickets.tolist() == [4, 5, 6, 7]
    assert consumer.take(4).tickets.tolist() == [10, 11, 12, 13]


def test_a_writer_is_told_of_nobody_who_has_given_back_what_it_held(make_files: Maker) -> None:
    engine = make_files()
    ring, other = ring_of(engine), ring_of(make_files.second(engine))
    consumer = other.consumers.open("train")
    write(ring, range(8))
    done_but_for(consumer, 8, left=2)
    with (
        pytest.raises(RateLimitTimeout, match="no learner holds any of these items; sample"),
        limit_waits(0.1),
    ):
        write(ring, [8])


IN_ANOTHER_TIME = """
import sys
from shmbuffer.memory import Engine
with Engine.open(sys.argv[1], None) as engine:
    consumer = engine.ring().consumers.open("a")
    there = consumer.available(1)
    consumer.take(1, 600.0)
    print(there, flush=True)
    input()
"""


@needs_root
def test_a_lease_ends_at_the_same_time_in_all_time_namespaces(make_files: Maker) -> None:
    engine = make_files()
    ring = ring_of(engine)
    write(ring, range(4))
    consumer = ring.consumers.open("a")
    consumer.take(3, 600.0)
    shifted = "unshare", "--time", "--boottime=86400", "--fork"
    with Program.python(IN_ANOTHER_TIME, engine.seat.where, before=shifted) as process:
        try:
            line = process.line()
        except AssertionError as error:
            if "unshare failed" in str(error):
                pytest.skip(str(error))
            raise
        assert line.split() == ["1"], "it was given nothing that this process holds"
        (status,) = ring.consumers.status()
        assert [lease.items for lease in status.leases] == [3, 1]
        assert all(0 < lease.ends_in_s <= 600 for lease in status.leases)
        assert all(0 <= lease.held_s < 3600 for lease in status.leases)
        process.tell("")
        process.end()
