"""The ring's protocol: claim, fill and commit to write; draw, copy and check again to read."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from shmbuffer import (
    BufferClosedError,
    BufferNeedsRestart,
    EmptyBufferError,
    LockTimeout,
    RingOverrunError,
    ShmBufferError,
)
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Settings
from shmbuffer.memory.clients import registry
from shmbuffer.memory.clients.locks import LivenessFile
from shmbuffer.memory.flow import waiting
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.layout import SlotState
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import (
    LEAVES,
    Child,
    Maker,
    Parent,
    Rows,
    child,
    contents,
    draw,
    fill,
    lock_timeout,
    mutex_held,
    place,
    read,
    require_sound,
    sample,
    schema,
    slot_held,
    succeeds,
    write,
)
from tests.selection import seeds

BIG = (Leaf(("number",), "int64", ()), Leaf(("image",), "uint8", (20_000,)))


def runtime(engine: Engine, name: str) -> int:
    return int(engine.seat.control.runtime[name][0])


# Writing and reading back.


def test_items_are_read_back_where_they_were_written(ring: Ring) -> None:
    assert write(ring, [10, 11, 12]) == 0
    assert write(ring, [13]) == 3
    assert contents(ring) == {0: 10, 1: 11, 2: 12, 3: 13}
    assert (ring.length, ring.head, ring.cursor, ring.write_count) == (4, 4, 4, 4)


def test_the_ring_comes_round(ring: Ring) -> None:
    for number in range(0, 30, 3):
        assert write(ring, range(number, number + 3)) == number
    assert contents(ring) == {n % 8: n for n in range(22, 30)}
    assert (ring.length, ring.head, ring.cursor, ring.write_count) == (8, 30, 6, 30)


@pytest.mark.parametrize("count", [9, 16, 17, 1000])
def test_the_last_items_of_a_batch_larger_than_the_ring_stay(
    engine: Engine, ring: Ring, count: int
) -> None:
    write(ring, [1, 2, 3])
    assert write(ring, range(100, 100 + count), np.arange(1.0, count + 1)) == 3
    last = range(100 + count - 8, 100 + count)
    assert contents(ring) == {(3 + n - 100) % 8: n for n in last}
    assert (ring.head, ring.write_count) == (3 + count, 3 + count)
    assert sorted(ring.tree.priorities()) == [float(count - 7 + i) for i in range(8)]
    assert ring.tree.max_priority == count
    require_sound(engine)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7])
def test_small_rings_work_too(make: Maker, capacity: int) -> None:
    engine = make(capacity, alpha=1.0)
    ring = ring_of(engine)
    for number in range(3 * capacity + 1):
        write(ring, [number])
    numbers = range(2 * capacity + 1, 3 * capacity + 1)
    assert contents(ring) == {n % capacity: n for n in numbers}
    assert set(sample(ring, 64, prioritized=True).numbers) <= set(numbers)
    require_sound(engine)


def test_slots_may_be_wide(make: Maker) -> None:
    engine = make(4, (2, 3), alpha=1.0)
    ring = ring_of(engine)
    assert (ring.capacity, ring.width, ring.width, ring.elements) == (4, 6, 6, 24)
    assert write(ring, range(18)) == 0
    assert write(ring, range(18, 30)) == 3
    assert contents(ring) == {n % 24: n for n in range(6, 30)}
    assert (ring.length, ring.head, ring.cursor, ring.write_count) == (24, 5, 6, 30)
    place(ring, [2], range(100, 106))
    assert read(ring, range(12, 18))[0].tolist() == list(range(100, 106))
    drawn = sample(ring, 500)
    assert drawn.index.tolist() == [
        n % 24 if n < 100 else n - 100 + 12 for n in drawn.numbers.tolist()
    ]
    assert set(drawn.index) == set(range(24)), "every lane is drawn"
    require_sound(engine)


def test_an_empty_batch_changes_nothing(engine: Engine, ring: Ring) -> None:
    write(ring, [1])
    before = ring.live.words.tolist()
    assert write(ring, []) == 1
    place(ring, [], [])
    assert ring.update(np.empty(0, np.int64), np.empty(0)) == (0, 0)
    assert len(sample(ring, 0).numbers) == 0
    assert len(read(ring, [])[0]) == 0
    assert ring.live.words.tolist() == before


def test_a_claim_of_nothing_is_a_claim(engine: Engine, ring: Ring) -> None:
    write(ring, range(8))
    for finish in (ring.claims.commit, ring.claims.abort):
        assert ring.claims.claim(0) == ring.head
        finish()
        ring.claims.claim_slots(np.empty(0, np.int64), in_place=False)
        finish()
    assert contents(ring) == {n: n for n in range(8)}
    require_sound(engine)


def test_a_buffer_may_have_no_leaves(make: Maker) -> None:
    """TorchRL's family stores objects in a list beside such a ring."""
    engine = make(4, leaves=(), alpha=1.0)
    ring = ring_of(engine)
    assert ring.write((), 3, np.array([1.0, 0.0, 2.0])) == 0
    assert ring.live.committed().tolist() == [0, 1, 2]
    assert set(draw(ring, 100, prioritized=True)[0]) == {0, 2}
    require_sound(engine)


def test_a_slot_without_an_item_is_said_to_be_missing(ring: Ring) -> None:
    write(ring, [1, 2])
    ring.claims.claim(1)
    numbers, tickets = read(ring, [0, 2, 1, 7])
    assert tickets.tolist() == [0, -1, 1, -1]
    assert numbers[[0, 2]].tolist() == [1, 2]
    ring.claims.abort()
    assert read(ring, [2])[1].tolist() == [-1]


@pytest.mark.parametrize("index", [[8], [0, -1], [2**40], [-(2**63)]])
def test_an_index_outside_the_buffer_is_refused(ring: Ring, index: list[int]) -> None:
    write(ring, range(3))
    with pytest.raises(
        IndexError, match=r"out of range for a buffer of 8 elements; nothing was changed"
    ):
        read(ring, index)
    with pytest.raises(IndexError, match=rf"index {index[-1]} at position {len(index) - 1} is "):
        place(ring, index, range(len(index)))
    with pytest.raises(IndexError, match=rf"index {index[-1]} at position {len(index) - 1} is "):
        ring.update(np.array(index), np.ones(len(index)))
    with pytest.raises(IndexError, match=rf"index {index[-1]} at position"):
        ring.claims.claim_slots(np.array(index), in_place=True)
    assert contents(ring) == {0: 0, 1: 1, 2: 2}
    assert ring.head == 3


def test_an_item_may_be_read_several_times_in_one_call(ring: Ring) -> None:
    write(ring, range(5))
    assert read(ring, [4, 0, 4, 4])[0].tolist() == [4, 0, 4, 4]


def test_nothing_can_be_drawn_from_an_empty_buffer(ring: Ring) -> None:
    for prioritized in (True, False):
        with pytest.raises(
            EmptyBufferError, match="Cannot sample from an empty storage; write to it first"
        ):
            sample(ring, 1, prioritized=prioritized)
    write(ring, [1])
    ring.empty()
    with pytest.raises(EmptyBufferError):
        draw(ring, 1)


# Placed and in-place writes.


def test_a_placed_write_goes_where_it_is_told(engine: Engine, ring: Ring) -> None:
    write(ring, range(5))
    place(ring, [6, 0, 3], [26, 20, 23])
    assert contents(ring) == {0: 20, 1: 1, 2: 2, 3: 23, 4: 4, 6: 26}
    assert (ring.length, ring.cursor, ring.write_count) == (6, 5, 8)
    assert write(ring, [30]) % 8 == 5
    require_sound(engine)


def test_a_placed_item_has_the_default_priority_or_its_own(ring: Ring) -> None:
    write(ring, range(4), np.array([1.0, 4.0, 2.0, 3.0]))
    place(ring, [2], [22])
    assert ring.tree.priorities()[2] == 4.0
    place(ring, [3, 0], [23, 20], np.array([7.0, 0.5]))
    assert ring.tree.priorities()[:4].tolist() == [0.5, 4.0, 4.0, 7.0]
    assert ring.tree.max_priority == 7.0


def test_an_item_that_is_changed_in_place_keeps_its_priority(engine: Engine, ring: Ring) -> None:
    write(ring, range(4), np.array([1.0, 4.0, 2.0, 3.0]))
    place(ring, [2, 6], [22, 26], in_place=True)
    assert contents(ring) == {0: 0, 1: 1, 2: 22, 3: 3, 6: 26}
    assert ring.tree.priorities()[[2, 6]].tolist() == [2.0, 4.0], (
        "a slot that was empty: the default"
    )
    assert (ring.write_count, ring.cursor) == (4, 4)
    require_sound(engine)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_the_last_row_for_a_repeated_slot_wins(
    engine: Engine, ring: Ring, in_place: bool, given: bool
) -> None:
    write(ring, range(4), np.array([1.0, 4.0, 2.0, 3.0]))
    priorities = np.array([5.0, 6.0, 7.0, 8.0, 9.0]) if given else None
    place(ring, [2, 6, 2, 6, 2], [20, 60, 21, 61, 22], priorities, in_place=in_place)
    assert contents(ring) == {0: 0, 1: 1, 2: 22, 3: 3, 6: 61}
    kept = [2.0, 4.0] if in_place else [4.0, 4.0]
    assert ring.tree.priorities()[[2, 6]].tolist() == ([9.0, 8.0] if given else kept)
    assert ring.write_count == (4 if in_place else 6)
    require_sound(engine)
    ring.claims.claim_slots(np.array([2, 3, 2]), in_place=in_place)
    ring.claims.abort()
    assert contents(ring) == {0: 0, 1: 1, 6: 61}
    require_sound(engine)


def test_a_reader_of_the_old_content_sees_another_word(ring: Ring) -> None:
    write(ring, range(8))
    before = ring.live.words.copy()
    place(ring, range(8), range(8), in_place=True)
    assert not (ring.live.words == before).any()


# Emptying.


def test_emptying_forgets_every_item(engine: Engine, ring: Ring) -> None:
    write(ring, range(11))
    ring.empty()
    assert contents(ring) == {}
    assert (ring.length, ring.write_count, ring.cursor) == (0, 0, 0)
    assert ring.tree.p_sum == 0.0
    assert write(ring, [5]) % 8 == 0
    assert contents(ring) == {0: 5}
    require_sound(engine)


def test_emptying_may_keep_the_write_count(ring: Ring) -> None:
    write(ring, range(11))
    ring.empty(keep_write_count=True)
    assert (ring.length, ring.write_count) == (0, 11)


def test_emptying_an_empty_buffer_changes_nothing(engine: Engine, ring: Ring) -> None:
    ring.empty()
    ring.empty()
    assert (ring.length, ring.head) == (0, 0)
    require_sound(engine)


def test_a_write_in_progress_while_the_buffer_is_emptied_comes_after_it(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(5))
    with slot_held(engine) as writer:
        ring.empty()
        assert contents(ring) == {}
        assert (ring.length, ring.write_count) == (0, 0)
        assert slots.states(ring.live.words).tolist() == [0, 0, 0, 0, 0, SlotState.WRITING, 0, 0]
        writer.go()
        assert writer.end() == 0
    assert contents(ring) == {5: 99}
    assert (ring.length, ring.write_count) == (1, 1)
    require_sound(engine)


# The split form.


@pytest.mark.parametrize("lanes", [(), (3,)])
def test_a_payload_may_be_moved_by_the_caller(make: Maker, lanes: tuple[int, ...]) -> None:
    engine = make(8, lanes, alpha=1.0)
    ring = ring_of(engine)
    width = ring.width
    write(ring, range(6 * width))
    ticket = ring.claims.claim(4)
    slots = (ticket + np.arange(4)) % 8
    assert slots.tolist() == [6, 7, 0, 1]
    fill(ring, slots, range(6 * width, 10 * width))
    ring.claims.commit(np.arange(1.0, 4 * width + 1))
    assert contents(ring) == {n % (8 * width): n for n in range(2 * width, 10 * width)}
    assert ring.tree.priorities()[6 * width] == 1.0
    assert ring.tree.priorities()[2 * width - 1] == 4.0 * width
    require_sound(engine)


def test_slots_may_be_claimed_by_name(engine: Engine, ring: Ring) -> None:
    write(ring, range(8))
    ring.claims.claim_slots(np.array([5, 2]), in_place=False)
    fill(ring, [5, 2], [55, 52])
    ring.claims.commit(np.array([3.0, 2.0]))
    assert contents(ring) == {**{n: n for n in range(8)}, 5: 55, 2: 52}
    assert ring.tree.priorities()[[5, 2]].tolist() == [3.0, 2.0]
    require_sound(engine)


def test_the_last_slots_of_a_claim_larger_than_the_ring_are_there(
    engine: Engine, ring: Ring
) -> None:
    assert ring.claims.claim(11) == 0
    fill(ring, np.arange(3, 11) % 8, range(3, 11))
    ring.claims.commit(np.arange(8.0))
    assert contents(ring) == {n % 8: n for n in range(3, 11)}
    assert (ring.head, ring.write_count) == (11, 11)
    require_sound(engine)


@pytest.mark.parametrize("finish", ["commit", "abort"])
def test_only_what_was_claimed_can_be_finished(ring: Ring, finish: str) -> None:
    name = f"{finish}: no slot is claimed; call claim first"
    with pytest.raises(ShmBufferError, match=name):
        getattr(ring.claims, finish)()
    ring.claims.claim(1)
    getattr(ring.claims, finish)()
    with pytest.raises(ShmBufferError, match=name):
        getattr(ring.claims, finish)()


def test_a_thread_that_forgot_its_claim_can_claim_again(engine: Engine, ring: Ring) -> None:
    """An exception between claim and commit must not block the handle."""
    ring.claims.claim(2)
    assert ring.claims.claim(2) == 2
    fill(ring, [2, 3], [2, 3])
    ring.claims.commit()
    assert contents(ring) == {2: 2, 3: 3}
    ring.claims.claim(1)
    write(ring, [5])
    ring.claims.claim(1)
    ring.empty()
    assert contents(ring) == {}
    with pytest.raises(ShmBufferError, match="no slot is claimed"):
        ring.claims.commit()
    require_sound(engine)


def test_other_threads_wait_for_a_claim_to_be_finished(engine: Engine, ring: Ring) -> None:
    order: list[str] = []
    ring.claims.claim(1)

    def wait_and_write() -> None:
        write(ring, [7])
        order.append("written")

    thread = threading.Thread(target=wait_and_write)
    thread.start()
    fill(ring, [0], [6])
    order.append("committed")
    ring.claims.commit()
    thread.join()
    assert order == ["committed", "written"]
    assert contents(ring) == {0: 6, 1: 7}
    require_sound(engine)


def test_a_thread_cannot_finish_the_claim_of_another(engine: Engine, ring: Ring) -> None:
    raised: list[BaseException] = []

    def meddle() -> None:
        for finish in (ring.claims.commit, ring.claims.abort):
            try:
                finish()
            except ShmBufferError as error:
                raised.append(error)

    ring.claims.claim(1)
    thread = threading.Thread(target=meddle)
    thread.start()
    thread.join()
    assert [str(error).rpartition(": ")[2] for error in raised] == [
        "no slot is claimed; call claim first"
    ] * 2
    fill(ring, [0], [6])
    ring.claims.commit()
    assert contents(ring) == {0: 6}


def test_the_claim_of_a_thread_that_has_ended_is_given_back(engine: Engine, ring: Ring) -> None:
    thread = threading.Thread(target=lambda: ring.claims.claim(3))
    thread.start()
    thread.join()
    write(ring, [5])
    assert contents(ring) == {3: 5}
    assert ring.seat.native.head == 4
    require_sound(engine)


def test_a_commit_that_is_refused_gives_the_claim_back(engine: Engine, ring: Ring) -> None:
    write(ring, range(8))
    bad: Any
    for bad in (np.array([1.0, np.nan]), np.ones(3), np.ones(2, np.float32)):
        ring.claims.claim(2)
        with pytest.raises(ValueError, match="priorit"):
            ring.claims.commit(bad)
        with pytest.raises(ShmBufferError, match="no slot is claimed"):
            ring.claims.abort()
    assert contents(ring) == {6: 6, 7: 7}
    require_sound(engine)


# Two writers of the same slot.


def test_a_writer_waits_for_the_one_who_fills_its_slot(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    with slot_held(engine) as other:
        write(ring, range(1, 8))
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(write(ring, [8], timeout=None)))
        thread.start()
        while runtime(engine, "waiters") == 0:
            pass
        assert not done
        other.go()
        thread.join()
        assert done == [8]
        assert other.end() == 0
    assert contents(ring) == {**{n: n for n in range(1, 8)}, 0: 8}
    assert runtime(engine, "waiters") == 0
    assert ring.write_count == 9
    require_sound(engine)


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_it_gives_up_in_time_and_names_the_client_it_waited_for(make: Maker, state: str) -> None:
    engine = make()
    ring = ring_of(engine)
    with slot_held(engine) as other:
        write(ring, range(1, 8))
        if state == "stopped":
            other.stop()
        before = (ring.live.words.tolist(), ring.head, ring.write_count)
        for attempt in (
            lambda: write(ring, [8], timeout=0.05),
            lambda: write(ring, range(20), timeout=0.05),
            lambda: place(ring, [3, 0], [1, 2], timeout=0.05),
            lambda: place(ring, [0], [1], in_place=True, timeout=0.05),
            lambda: ring.claims.claim(1, timeout=0.05),
            lambda: ring.claims.claim_slots(np.array([0]), in_place=False, timeout=0.05),
        ):
            with pytest.raises(
                RingOverrunError,
                match=rf"waited 0\.05 s, because process {other.pid} \({state}\) is still "
                r"writing the next slot; continue or end that process, or make the buffer larger",
            ) as caught:
                attempt()
            error: Any = caught.value
            assert (error.pid, error.state, error.timeout) == (other.pid, state, 0.05)
            assert (ring.live.words.tolist(), ring.head, ring.write_count) == before
            assert runtime(engine, "waiters") == 0, "its turn is given back"
        place(ring, [3], [33])  # another writer continues
        assert contents(ring)[3] == 33


def test_it_does_not_wait_for_the_dead(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    with slot_held(engine) as other:
        write(ring, range(1, 8))
        other.kill()
        assert write(ring, [8]) == 8
    assert contents(ring) == {**{n: n for n in range(1, 8)}, 0: 8}
    assert runtime(engine, "reaped") == 1
    assert len(engine.seat.registry.live()) == 1
    require_sound(engine)


def wait_for(engine: Engine, count: int) -> None:
    """Waits until ``count`` writers are in the queue."""
    while runtime(engine, "waiters") != count:
        pass


def test_the_writer_that_waits_longest_goes_first(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_PATIENCE_S", 60.0)  # no writer moves to the end of the queue
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    handles = [ring_of(make.second(engine)) for _ in range(4)]
    tickets: dict[int, int] = {}
    with slot_held(engine) as other:
        write(ring, range(1, 8))
        threads = []
        for place_in_queue, handle in enumerate(handles):

            def work(number: int = place_in_queue, mine: Ring = handle) -> None:
                tickets[number] = write(mine, [number], timeout=None)

            threads.append(threading.Thread(target=work))
            threads[-1].start()
            wait_for(engine, place_in_queue + 1)
        time.sleep(0.002)  # a queue position counts after 1 ms
        other.go()
        for thread in threads:
            thread.join()
        assert other.end() == 0
    assert tickets[0] == 8  # each of the other positions counts 1 ms after the one before it
    assert sorted(tickets.values()) == [8, 9, 10, 11]
    assert runtime(engine, "waiters") == 0


@pytest.mark.parametrize("fate", ["stopped", "killed"])
def test_a_turn_that_is_not_used_holds_nobody_up(make: Maker, fate: str) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)

    def wait_in_line(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause()
        write(ring, [77], timeout=None)

    with slot_held(engine) as other, child(wait_in_line) as waiter:
        write(ring, range(1, 8))
        waiter.reached()
        waiter.go()
        wait_for(engine, 1)
        if fate == "stopped":
            waiter.stop()
        else:
            waiter.kill()
        other.go()
        assert other.end() == 0
        assert write(ring, [8]) == 8, "past the waiter in front"
        assert contents(ring)[0] == 8
        if fate == "stopped":
            assert runtime(engine, "waiters") == 1, "it keeps a place, at the end"
            os.kill(waiter.pid, signal.SIGCONT)
            assert waiter.end() == 0
            assert contents(ring)[1] == 77
    assert runtime(engine, "waiters") == 0
    require_sound(engine)


def test_a_waiter_that_gives_up_for_any_reason_leaves_the_queue(make: Maker) -> None:
    engine = make()
    ring = ring_of(engine)
    native = ring.seat.native

    class Interrupted:
        """A ring whose first write is blocked and whose later writes run out of memory."""

        def __init__(self) -> None:
            self.calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def write(self, *arguments: Any) -> int:
            self.calls += 1
            return native.write(*arguments) if self.calls == 1 else -_core.NO_MEMORY

    with slot_held(engine):
        write(ring, range(1, 8))
        ring.seat.native = Interrupted()
        with pytest.raises(MemoryError, match="write could not allocate memory"):
            write(ring, [8])
        ring.seat.native = native
        assert runtime(engine, "waiters") == 0


def test_everything_that_may_free_a_slot_wakes_a_waiter(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    second = make.second(engine)
    engine.seat.control.runtime["waiters"] = 1  # looks like another waiter

    def wakes(act: Callable[[], object]) -> None:
        before = runtime(engine, "progress")
        act()
        assert runtime(engine, "progress") > before

    wakes(lambda: write(ring, [1]))
    wakes(lambda: place(ring, [3], [1]))
    ring.claims.claim(1)
    wakes(ring.claims.abort)
    wakes(ring.empty)
    wakes(second.close)
    with slot_held(engine) as other:
        other.kill()
        wakes(lambda: engine.seat.reap_dead())
    engine.seat.control.runtime["waiters"] = 0


# Several threads on one handle.


@pytest.mark.product(few=2)
@pytest.mark.parametrize("leaves", [LEAVES, BIG], ids=["small", "big"])
def test_threads_may_share_a_handle(make: Maker, leaves: tuple[Leaf, ...]) -> None:
    """Small rows are copied with the interpreter lock held, large rows without it."""
    engine = make(16, leaves=leaves, alpha=1.0)
    ring = ring_of(engine)
    tickets: list[int] = []
    drawn: list[int] = []
    raised: list[BaseException] = []

    def writer(name: int) -> None:
        for k in range(60):
            number = name * 10_000 + k * 3
            tickets.append(write(ring, range(number, number + 3)))

    def reader(name: int) -> None:
        for key in range(60):
            found = sample(ring, 4, key=key, prioritized=True)
            ring.update(found.index, np.ones(4) + key, found.tickets)
            drawn.append(found.redrawn)

    def guarded(work: Callable[[int], None], name: int) -> None:
        try:
            work(name)
        except BaseException as error:
            raised.append(error)

    write(ring, range(16))
    threads = [
        threading.Thread(target=guarded, args=(work, name))
        for name, work in enumerate([writer, reader, writer, reader, writer])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert sorted(tickets) == list(range(16, 16 + 3 * 180, 3)), "each ticket once"
    assert (ring.length, ring.write_count) == (16, 16 + 3 * 180)
    assert len(drawn) == 120
    contents(ring)
    require_sound(engine)


def test_a_large_batch_lets_other_threads_of_the_interpreter_run(make: Maker) -> None:
    engine = make(alpha=1.0, leaves=BIG)
    ring = ring_of(engine)
    numbers = np.arange(8, dtype=np.int64)
    rows = Rows.of(BIG, numbers)
    with slot_held(engine) as other:
        other.go()
        assert other.end() == 0
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    seen = ticks
    while ticks < seen + 10:
        ring.write(rows.addresses, 8)
    stop.set()
    thread.join()


# A reader that is overtaken by a lap.


@pytest.mark.product(few=1)
@pytest.mark.parametrize("prioritized", [True, False])
def test_a_writer_that_laps_a_slow_reader_never_makes_it_return_a_mixed_row(
    make: Maker, prioritized: bool
) -> None:
    leaves = (
        Leaf(("first",), "uint8", (3000,)),
        Leaf(("number",), "int64", ()),
        Leaf(("last",), "uint8", (3000,)),
    )
    engine = make(8, leaves=leaves, alpha=1.0, checksum=False)
    ring = ring_of(engine)
    write(ring, range(8))

    def tight_loop(parent: Parent) -> None:
        batches = [Rows.of(leaves, np.arange(n, n + 4)) for n in range(200)]
        parent.pause()
        while True:
            for batch in batches:
                ring.write(batch.addresses, 4)

    with child(tight_loop) as writer:
        writer.reached()
        writer.go()
        redrawn = rounds = 0
        while redrawn < 200 or rounds < 50:
            drawn = sample(ring, 64, key=rounds, prioritized=prioritized)  # fails on a mixed row
            assert (drawn.tickets % 8 == drawn.index).all()
            read(ring, range(8))
            redrawn += drawn.redrawn
            rounds += 1
        writer.kill()
    engine.seat.reap_dead()
    require_sound(engine)


def test_a_reader_is_never_starved(make: Maker) -> None:
    """After some rounds, the remaining items are drawn and copied with the mutex held."""
    engine = make(1, leaves=BIG, alpha=1.0, checksum=False)
    ring = ring_of(engine)
    write(ring, [0])

    def tight_loop(parent: Parent) -> None:
        batch = Rows.of(BIG, np.array([1]))
        parent.pause()
        while True:
            ring.write(batch.addresses, 1)

    with child(tight_loop) as writer:
        writer.reached()
        writer.go()
        got = 0
        while got < 30:
            try:
                got += len(sample(ring, 4).numbers)
            except EmptyBufferError:  # its only slot is being written
                continue
        writer.kill()


def test_a_row_that_changed_between_draw_and_copy_is_drawn_again(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))

    def work(parent: Parent) -> None:
        sample(ring, 1)  # attaches
        parent.pause_at("sample.unlocked")
        drawn = sample(ring, 8, prioritized=True)
        assert drawn.redrawn == 8
        assert set(drawn.numbers) <= set(range(100, 108))
        assert (drawn.tickets >= 8).all()

    with child(work) as reader:
        reader.reached()
        write(ring, range(100, 108))
        reader.go()
        assert reader.end() == 0


def test_a_row_that_changed_between_copy_and_second_look_is_drawn_again(make: Maker) -> None:
    """The copied bytes do not matter: they are of one write, the word is of another."""
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))

    def work(parent: Parent) -> None:
        sample(ring, 1)
        parent.pause_at("sample.copy")  # after the first leaf
        drawn = sample(ring, 8)
        assert drawn.redrawn == 8
        assert (drawn.tickets >= 8).all()

    with child(work) as reader:
        reader.reached()
        write(ring, range(100, 108))
        reader.go()
        assert reader.end() == 0


def test_an_uncommitted_item_is_never_drawn(make: Maker) -> None:
    """A priority that is set before the tree is enabled does not make the item drawable."""
    engine = make()
    ring = ring_of(engine)
    write(ring, range(8))
    assert ring.update(np.arange(8), np.arange(1.0, 9.0)) == (8, 0)
    ring.claims.claim(4)
    drawn = sample(ring, 200, prioritized=True)
    assert set(drawn.index) == {4, 5, 6, 7}
    ring.claims.abort()
    ring.tree.bind(1.0, 0.0)
    assert ring.tree.mass().tolist()[:8] == [0, 0, 0, 0, 5, 6, 7, 8], "and it is not forgotten"
    require_sound(engine)


# Uniform draws.


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_uniform_draw_meets_every_item_equally_often(make: Maker, count: int) -> None:
    engine = make(200)
    ring = ring_of(engine)
    write(ring, range(count))
    place(ring, [150], [150])
    frequencies = np.bincount(draw(ring, 20_000, key=5)[0], minlength=200)
    items = [*range(count), 150]
    assert frequencies.sum() == frequencies[items].sum() == 20_000
    expected = 20_000 / len(items)
    assert ((frequencies[items] - expected) ** 2 / expected).sum() < 30


def test_the_same_key_draws_the_same_items(ring: Ring) -> None:
    write(ring, range(8), np.arange(1.0, 9.0))
    for prioritized in (True, False):
        one, same, other = (
            sample(ring, 600, key=key, prioritized=prioritized).index.tolist() for key in (7, 7, 8)
        )
        assert one == same != other
    for key in (0, 2**64 - 1, -1):
        sample(ring, 4, key=key)


def test_a_draw_is_a_sample_without_the_payload(ring: Ring) -> None:
    write(ring, range(8), np.arange(1.0, 9.0))
    for prioritized in (True, False):
        drawn = sample(ring, 600, key=3, beta=0.5, prioritized=prioritized)
        index, tickets, weights = draw(ring, 600, key=3, beta=0.5, prioritized=prioritized)
        assert index.tolist() == drawn.index.tolist()
        assert tickets.tolist() == drawn.tickets.tolist()
        assert weights.tobytes() == drawn.weights.tobytes()


# Tickets.


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**53 - 2, 2**61 + 3])
def test_tickets_are_64_bit_numbers(make: Maker, start: int) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    engine.seat.control.runtime["head"] = start
    for number in range(0, 9, 3):
        assert write(ring, range(number, number + 3)) == start + number
    assert ring.head == start + 9
    assert contents(ring) == {(start + n) % 8: n for n in range(1, 9)}
    drawn = sample(ring, 100, prioritized=True)
    assert (drawn.tickets - start).tolist() == drawn.numbers.tolist()
    assert (drawn.tickets % 8).tolist() == drawn.index.tolist()
    assert ring.update(drawn.index[:1], np.array([2.0]), drawn.tickets[:1]) == (1, 0)
    assert ring.update(drawn.index[:1], np.array([3.0]), drawn.tickets[:1] - 2**31) == (0, 1)
    assert ring.update(drawn.index[:1], np.array([3.0]), drawn.tickets[:1] - 2**32) == (0, 1)
    place(ring, [5], [55])
    assert contents(ring)[5] == 55
    assert ring.cursor == (start + 9) % 8
    require_sound(engine)
    ages = engine.stats()["age_sum"]
    assert 0 <= ages < 8 * 100


def test_the_last_ticket_is_followed_by_an_error_and_not_by_the_first(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    engine.seat.control.runtime["head"] = 2**62 - 1 - 10
    write(ring, range(4))
    before = (ring.live.words.tolist(), ring.head)
    for attempt in (
        lambda: write(ring, range(7)),
        lambda: place(ring, [1], [1]),
        lambda: ring.claims.claim(7),
        lambda: ring.empty(),
    ):
        with pytest.raises(
            BufferNeedsRestart, match=r"this buffer has used up its 2\*\*62 tickets"
        ):
            attempt()
        assert (ring.live.words.tolist(), ring.head) == before
    write(ring, range(6))
    assert ring.head == 2**62 - 1
    require_sound(engine)


# Errors and the state after them.


def test_a_mutex_that_a_living_process_does_not_let_go_is_an_error_in_time(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    ring.claims.claim(1)
    with mutex_held(engine) as holder:
        lock_timeout(monkeypatch, 60_000_000)
        with pytest.raises(
            LockTimeout,
            match=rf"commit waited 0\.06 s for the buffer's mutex, which thread {holder.pid} "
            rf"of process {holder.pid} \(running\) holds; continue or end that process",
        ) as caught:
            ring.claims.commit()
        error: Any = caught.value
        assert (error.tid, error.pid, error.state) == (holder.pid, holder.pid, "running")
        for attempt in (
            lambda: write(ring, [1]),
            lambda: sample(ring, 1),
            lambda: ring.update(np.zeros(1, np.int64), np.ones(1)),
            ring.empty,
            ring.snapshot,
            ring.totals,
            lambda: ring.raise_max_priority(9.0),
            lambda: ring.tree.set_alpha(0.5),
        ):
            with pytest.raises(LockTimeout):
                attempt()
        assert read(ring, [3])[0].tolist() == [3], "a read needs no lock"
        with pytest.raises(ShmBufferError, match="no slot is claimed"):
            ring.claims.abort()
        holder.go()
        assert holder.end() == 0
    assert 0 not in contents(ring), "a commit that failed has committed nothing"
    write(ring, [9])
    assert contents(ring) == {**{n: n for n in range(2, 8)}, 1: 9}
    require_sound(engine)


class AlarmError(Exception):
    """The error that the signal handler below raises."""


@contextmanager
def interrupted_in(holder: Child, *, raising: bool) -> Iterator[list[int]]:
    """Sends a signal while the ring waits in C.

    The handler lets the holder of the mutex continue.
    """
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        places = ("memory/ring/ring.py", "memory/ring/claims.py")
        if frame is None or not frame.f_code.co_filename.endswith(places):
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # before the ring waits
            return
        came.append(number)
        holder.go()
        if raising:
            raise AlarmError

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_that_raises_in_a_commit_leaves_no_slot_behind(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    ring.claims.claim(3)
    with mutex_held(engine) as holder:
        with interrupted_in(holder, raising=True), pytest.raises(AlarmError):
            ring.claims.commit()
        assert holder.end() == 0
    assert contents(ring) == {n: n for n in range(3, 8)}
    second = ring_of(make.second(engine))
    assert write(second, range(8), timeout=0.0) == 11, "nobody has to wait for it"
    require_sound(engine)


def test_a_signal_that_raises_in_a_write_leaves_nothing_behind(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    with mutex_held(engine) as holder:
        with interrupted_in(holder, raising=True), pytest.raises(AlarmError):
            write(ring, [9])
        assert holder.end() == 0
    assert contents(ring) == {n: n for n in range(8)}
    assert write(ring, [9]) == 8
    require_sound(engine)


def test_a_signal_that_does_not_raise_disturbs_nothing(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    with mutex_held(engine) as holder:
        with interrupted_in(holder, raising=False) as came:
            write(ring, [9])
        assert came == [signal.SIGALRM]
        assert holder.end() == 0
    assert contents(ring)[0] == 9


def test_a_signal_handler_cannot_write_while_its_thread_is_writing(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    messages: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if frame is None or not frame.f_code.co_filename.endswith("memory/ring/ring.py"):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        for use in (lambda: write(ring, [1]), engine.close):
            try:
                use()
            except ShmBufferError as error:
                messages.append(str(error))
        holder.go()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with mutex_held(engine) as holder:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            write(ring, [9])
            assert holder.end() == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if (liveness := engine.seat.membership.liveness) is not None:
        liveness.close()  # it could not leave: its entry remains with its process
    assert len(messages) == 1
    assert "a signal handler used the handle through which this thread was writing" in messages[0]


def test_a_signal_handler_may_close_a_handle_that_its_thread_waits_in(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    monkeypatch.setattr(registry, "LOCK_TIMEOUT_NS", 50_000_000)

    with mutex_held(engine) as holder:

        def handler(number: int, frame: FrameType | None) -> None:
            if frame is None or not frame.f_code.co_filename.endswith("memory/ring/ring.py"):
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                return
            holder.go()
            assert holder.end() == 0
            engine.close()

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            assert len(sample(ring, 3).numbers) == 3
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert engine.closed
    with pytest.raises(BufferClosedError):
        sample(ring, 3)


MANY_LEAVES = """
import sys
import numpy as np
from shmbuffer.memory import Engine, Leaf, Schema, Settings
from tests.memory.rows import place, read, sample, write
from tests.kit.rings import ring_of

leaves = (Leaf(("number",), "int64", ()),) + tuple(
    Leaf((f"leaf{i}",), "uint8", (400,)) for i in range(99)
)
engine = Engine.anonymous(Settings(capacity=8))
ring = engine.define(Schema(leaves, 8))
for k in range(20):
    write(ring, range(8))
    place(ring, [3, 4], [5, 6])
    sample(ring, 8)
    read(ring, range(8))
"""


def test_the_interpreters_memory_is_left_alone_without_its_lock(tmp_path: Path) -> None:
    """The leaves exceed the space on the stack, and Python's debug hooks check memory."""
    with Program.python(MANY_LEAVES, PYTHONMALLOC="debug") as process:
        assert process.end()[::2] == (0, "")


SNAPSHOT = """
import sys
from shmbuffer.errors import LockTimeout
from shmbuffer.memory import Engine

for module in list(sys.modules.values()):  # of the snapshot, and of leaving
    if hasattr(module, "LOCK_TIMEOUT_NS"):
        module.LOCK_TIMEOUT_NS = 60_000_000
engine = Engine.open(sys.argv[1], None)
try:
    engine.stats()
except LockTimeout:
    print("in time")
"""


@pytest.mark.full
def test_a_snapshot_that_cannot_be_had_leaves_the_interpreter_whole(make_files: Maker) -> None:
    engine = make_files(alpha=1.0)
    write(ring_of(engine), range(8))
    with mutex_held(engine), Program.python(SNAPSHOT, engine.path, PYTHONMALLOC="debug") as process:
        # It joins and leaves without the mutex; the next reaper frees its entry.
        status, output, errors = process.end()
        assert (status, output, errors) == (0, "in time\n", "")


def test_priorities_have_the_size_and_the_type_that_is_read(ring: Ring) -> None:
    bad: Any
    for bad, message in (
        (np.ones(2), "2 priorities were given for 3 elements"),
        (np.ones(4), "4 priorities were given for 3 elements"),
        (
            np.ones(3, np.float32),
            r"priorities must be a contiguous array of float64, but are float32\[3\]",
        ),
        (
            np.ones(6)[::2],
            r"priorities must be a contiguous array of float64, but are float64\[3\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write(ring, range(3), bad)
        with pytest.raises(ValueError, match=message):
            place(ring, range(3), range(3), bad)
    assert ring.head == 0


# Closing.


def test_a_closed_handle_says_so(engine: Engine, ring: Ring) -> None:
    write(ring, range(3))
    view = ring.leaf(0)
    engine.close()
    for use in (
        lambda: write(ring, [1]),
        lambda: place(ring, [1], [1]),
        lambda: sample(ring, 1),
        lambda: read(ring, [1]),
        lambda: ring.update(np.zeros(1, np.int64), np.ones(1)),
        lambda: ring.length,
        ring.empty,
        lambda: ring.claims.claim(1),
        ring.claims.commit,
        ring.claims.abort,
        ring.snapshot,
        ring.totals,
        ring.drawn_from,
        lambda: ring.raise_max_priority(9.0),
    ):
        with pytest.raises(BufferClosedError, match="this handle was closed; attach again"):
            use()
    assert np.frombuffer(view, np.int64)[:3].tolist() == [0, 1, 2], "views keep their memory"


def test_closing_gives_an_open_claim_back(make: Maker) -> None:
    engine = make(alpha=1.0)
    second = make.second(engine)
    write(ring_of(engine), range(8))
    ring_of(second).claims.claim(3)
    second.close()
    assert contents(ring_of(engine)) == {n: n for n in range(3, 8)}
    assert len(engine.seat.registry.live()) == 1
    require_sound(engine)


def test_closing_waits_for_the_claim_of_another_thread(make: Maker) -> None:
    engine = make(alpha=1.0)
    second = make.second(engine)
    ring = ring_of(second)
    claimed, finish = threading.Event(), threading.Event()

    def write_slowly() -> None:
        ring.claims.claim(1)
        claimed.set()
        finish.wait()
        fill(ring, [0], [5])
        ring.claims.commit()

    writer = threading.Thread(target=write_slowly)
    writer.start()
    claimed.wait()
    closer = threading.Thread(target=second.close)
    closer.start()
    while not second.closed:
        pass
    with pytest.raises(BufferClosedError):
        write(ring, [6])
    finish.set()
    writer.join()
    closer.join()
    assert contents(ring_of(engine)) == {0: 5}
    assert len(engine.seat.registry.live()) == 1


def test_a_handle_that_could_not_leave_goes_on_saying_that_it_lives(
    make_files: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a process in another container would take the slot that is being filled."""
    engine = make_files(alpha=1.0)
    second = make_files.second(engine)
    ring, liveness = ring_of(second), second.seat.membership.liveness
    directory = engine.seat.backing.directory
    assert directory is not None
    assert liveness is not None
    monkeypatch.setattr(registry, "LOCK_TIMEOUT_NS", 20_000_000)
    claimed, finish = threading.Event(), threading.Event()

    def write_slowly() -> None:
        ring.claims.claim(1)
        claimed.set()
        finish.wait()
        fill(ring, [0], [5])
        ring.claims.commit()

    thread = threading.Thread(target=write_slowly)
    thread.start()
    claimed.wait()
    second.close()
    assert engine.seat.registry.live() == [(0, 1), (1, 2)]
    assert not LivenessFile.is_free(directory, 1)
    finish.set()
    thread.join()
    assert contents(ring_of(engine)) == {0: 5}
    second.close()
    assert engine.seat.registry.live() == [(0, 1)]
    assert LivenessFile.is_free(directory, 1)


# Forks.


def test_a_child_may_write_while_a_thread_of_its_parent_is_writing(make: Maker) -> None:
    """The child does not have the thread, but it has the lock that the thread held."""
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    claimed, finish = threading.Event(), threading.Event()

    def write_slowly() -> None:
        ring.claims.claim(1)
        claimed.set()
        finish.wait()
        fill(ring, [0], [5])
        ring.claims.commit()

    def work() -> None:
        signal.alarm(20)
        write(ring, [6])
        engine.close()

    thread = threading.Thread(target=write_slowly)
    thread.start()
    claimed.wait()
    succeeds(work)
    finish.set()
    thread.join()
    assert contents(ring) == {0: 5, 1: 6}
    require_sound(engine)


def test_a_child_cannot_commit_what_its_parent_claimed(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    ring.claims.claim(1)
    before = memoryview(ring.seat.mapped.slots).tobytes()

    def work() -> None:
        for finish in (ring.claims.commit, ring.claims.abort):
            with pytest.raises(ShmBufferError, match="no slot is claimed"):
                finish()
        assert memoryview(ring.seat.mapped.slots).tobytes() == before, "nor touch it"

    succeeds(work)
    fill(ring, [0], [5])
    ring.claims.commit()
    assert contents(ring) == {0: 5}
    require_sound(engine)


def test_a_child_has_an_entry_of_its_own_and_so_has_its_child(fast_path: Path) -> None:
    """The handle may also have been opened by a child that inherited none."""
    path = fast_path / "buffer"

    def grandchild(engine: Engine, parent: int) -> None:
        write(ring_of(engine), [2])
        assert ring_of(engine).seat.incarnation not in (1, parent)
        assert ring_of(engine).live.sources[:2].tolist() == [
            parent,
            ring_of(engine).seat.incarnation,
        ]

    def work() -> None:
        with Engine.open(path, None) as engine:
            mine = ring_of(engine).seat.incarnation
            write(ring_of(engine), [1])
            succeeds(lambda: grandchild(engine, mine))

    with Engine.open(path, Settings(capacity=8)) as engine:
        engine.define(schema())
        succeeds(work)
        assert contents(ring_of(engine)) == {0: 1, 1: 2}


# The native ring.


@pytest.mark.product(few=5)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 0}, "Ring: capacity 0, lanes 1 or entry 0 is out of range"),
        ({"lanes": 0}, "Ring: capacity 8, lanes 0 or entry 0 is out of range"),
        ({"lanes": 2**60}, "Ring: capacity 8, lanes 1152921504606846976 or entry 0"),
        ({"entry": 256}, "Ring: capacity 8, lanes 1 or entry 256 is out of range"),
        ({"capacity": 9}, r"Ring: the slots file has \d+ bytes, but this capacity needs \d+"),
        ({"lanes": 2}, r"Ring: the slots file has \d+ bytes, but this capacity needs \d+"),
        ({"leaves": 1}, r"Ring: leaf 0 has 64 bytes, but its rows need 72"),
    ],
)
def test_a_native_ring_is_made_of_maps_of_the_right_size(
    make: Maker, changes: dict[str, int], message: str
) -> None:
    engine = make()
    assert engine.seat.mapped is not None
    slots_map, leaf_maps, _ = engine.seat.mapped[1:]
    arguments: dict[str, Any] = {
        "control": engine.seat.control.map,
        "slots": slots_map,
        "leaves": tuple(zip(leaf_maps, (8, 37, 1, 0), strict=True)),
        "capacity": 8,
        "lanes": 1,
        "entry": 0,
        "checksum": True,
        "salt": 0,
    }
    kept = [slots_map, engine.seat.control.map, *leaf_maps]
    gc.collect()  # otherwise a collection may happen below
    before = [sys.getrefcount(one) for one in kept]
    for _ in range(10):
        native = _core.Ring(**arguments)
        assert (native.head, native.incarnation) == (0, 1)
        del native
        wrong = {**arguments, **changes}
        if "leaves" in changes:
            wrong["leaves"] = ((leaf_maps[0], 9),)
        with pytest.raises(ValueError, match=message):
            _core.Ring(**wrong)
        with pytest.raises(TypeError):
            _core.Ring(**{**arguments, "leaves": ((slots_map,),)})
        with pytest.raises(TypeError):
            _core.Ring(**{**arguments, "control": b""})
    wrong.clear()
    assert [sys.getrefcount(one) for one in kept] == before


def test_a_native_call_takes_exactly_its_arguments(ring: Ring) -> None:
    native: Any = ring.seat.native
    calls: tuple[Callable[[], object], ...] = (
        lambda: native.write(()),
        lambda: native.write((0,), 1, 0, 0, 0),
        lambda: native.write([0, 0, 0, 0], 1, 0, 0, 0),
        lambda: native.write((0, 0, "x", 0), 1, 0, 0, 0),
        lambda: native.claim(1.5, 0, 0),
        lambda: native.read(0, 1, (0,), 0, 0),
        lambda: native.sample(1, 0, None, 0, 0, 0, "x", True, 0),
        lambda: native.abort("x"),
    )
    for call in calls:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(OverflowError):
        native.claim(-1, 0, 0)
    assert ring.head == 0


def mapped(name: str) -> int:
    """Counts the memory maps of this process whose file has this name."""
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_is_freed_with_its_last_view(fast_path: Path) -> None:
    gc.collect()
    anonymous = mapped("memfd:shmbuffer")
    for kind in ("anonymous", "files"):
        maker = Maker(kind, fast_path, [])
        engine = maker(alpha=1.0)
        ring = ring_of(engine)
        write(ring, range(8))
        view = np.frombuffer(ring.leaf(0), np.int64)
        engine.close()
        maker.made.clear()
        del ring, engine
        gc.collect()
        assert view.tolist() == list(range(8))
        assert mapped("memfd:shmbuffer") == anonymous + (kind == "anonymous")
        assert mapped("number.memmap") == (kind == "files")
        assert mapped("obs.memmap") == mapped(".shmbuffer/slots") == 0
        del view
        gc.collect()
        assert mapped("memfd:shmbuffer") == anonymous
        assert mapped("number.memmap") == 0


# Against a plain model.


class Model:
    """A ring as a list of its items."""

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity = capacity
        self.width = width
        self.slots: list[tuple[int, list[int], list[float]] | None] = [None] * capacity
        self.head = self.write_count = 0
        self.greatest = -1.0

    def default(self) -> float:
        return max(1.0, self.greatest)

    def put(
        self, slot: int, ticket: int, numbers: list[int], raw: list[float] | None, keep: bool
    ) -> None:
        old = self.slots[slot]
        kept = list(old[2]) if keep and old is not None else [self.default()] * self.width
        self.slots[slot] = (ticket, numbers, kept if raw is None else raw)

    def rows(self, numbers: range, raw: list[float] | None) -> Iterator[Any]:
        for start in range(0, len(numbers), self.width):
            stop = start + self.width
            yield list(numbers[start:stop]), None if raw is None else raw[start:stop]

    def write(self, numbers: range, raw: list[float] | None) -> None:
        if raw is not None:
            self.greatest = max(self.greatest, *raw[-self.capacity * self.width :])
        for row, given in self.rows(numbers, raw):
            self.put(self.head % self.capacity, self.head, row, given, False)
            self.head += 1
        self.write_count += len(numbers)

    def place(
        self, where: list[int], numbers: range, raw: list[float] | None, in_place: bool
    ) -> None:
        if raw is not None:
            self.greatest = max(self.greatest, *raw)
        for slot, (row, given) in zip(where, self.rows(numbers, raw), strict=True):
            ticket = self.head + (slot - self.head) % self.capacity
            self.put(slot, ticket, row, given, in_place)
        self.head += self.capacity
        self.write_count += 0 if in_place else len(numbers)

    def abort(self, count: int) -> None:
        for _ in range(count):
            self.slots[self.head % self.capacity] = None
            self.head += 1

    def empty(self, keep: bool) -> None:
        self.slots = [None] * self.capacity
        self.head = -(-self.head // self.capacity) * self.capacity
        self.write_count = self.write_count if keep else 0
        self.greatest = -1.0

    def update(self, index: list[int], raw: list[float], tickets: list[int]) -> int:
        applied = 0
        for element, priority, ticket in zip(index, raw, tickets, strict=True):
            slot = self.slots[element // self.width]
            if slot is not None and slot[0] == ticket:
                slot[2][element % self.width] = priority
                self.greatest = max(self.greatest, priority)
                applied += 1
        return applied

    def check(self, ring: Ring) -> None:
        assert (ring.head, ring.write_count) == (self.head, self.write_count)
        found = contents(ring)
        numbers, tickets = read(ring, range(ring.elements))
        raw, mass = ring.tree.priorities(), ring.tree.mass()
        for slot, held in enumerate(self.slots):
            elements = range(slot * self.width, (slot + 1) * self.width)
            if held is None:
                assert not set(elements) & set(found)
                assert not mass[list(elements)].any()
                continue
            assert tickets[list(elements)].tolist() == [held[0]] * self.width
            assert numbers[list(elements)].tolist() == held[1]
            assert raw[list(elements)].tolist() == held[2]
        assert (ring.tree.max_priority is None) == (self.greatest < 0)
        assert ring.tree.max_priority in (None, self.greatest)


@pytest.mark.product(few=2)
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_any_sequence_of_calls_does_what_a_plain_list_does(make: Maker, seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity, lanes = [(8, ()), (5, (3,)), (1, ()), (17, (2, 2)), (64, ()), (3, (16,))][seed]
    engine = make(capacity, lanes, alpha=1.0, eps=0.0)
    ring = ring_of(engine)
    width, number = ring.width, 0
    model = Model(capacity, width)
    for _ in range(150):
        count = int(rng.integers(1, 2 * capacity + 2))
        given = rng.random(count * width) * 9 if rng.random() < 0.5 else None
        raw = None if given is None else given.tolist()
        numbers = range(number, number + count * width)
        number += count * width
        match rng.integers(8):
            case 0 | 1 | 2:
                assert write(ring, numbers, given) == model.head
                model.write(numbers, raw)
            case 3 | 4:
                where = rng.permutation(capacity)[:count].tolist()
                numbers, in_place = numbers[: len(where) * width], bool(rng.random() < 0.5)
                given = None if given is None else given[: len(numbers)].copy()
                place(ring, where, numbers, given, in_place=in_place)
                model.place(where, numbers, None if raw is None else raw[: len(numbers)], in_place)
            case 5:
                count = min(count, capacity)
                ring.claims.claim(count)
                ring.claims.abort()
                model.abort(count)
            case 6 if rng.random() < 0.2:
                keep = bool(rng.random() < 0.5)
                ring.empty(keep_write_count=keep)
                model.empty(keep)
            case _:
                index = rng.integers(ring.elements, size=count)
                tickets = read(ring, index)[1] + rng.integers(2, size=count) * capacity
                updated = rng.random(count) * 9
                applied = model.update(index.tolist(), updated.tolist(), tickets.tolist())
                assert ring.update(index, updated, tickets) == (applied, count - applied)
        model.check(ring)
    require_sound(engine)


@pytest.mark.product(few=1)
def test_a_claim_that_takes_nothing_leaves_the_claims_of_other_threads_alone(make: Maker) -> None:
    """The result was once read after another thread had opened a claim of its own."""
    ring = ring_of(make(64, leaves=(Leaf(("wide",), "uint8", (65536,)),)))
    data, done = np.zeros((4, 65536), np.uint8), threading.Event()

    def writes() -> None:
        while not done.is_set():
            ring.write([data.ctypes.data], 4, timeout=None)

    writers = [threading.Thread(target=writes) for _ in range(2)]
    for writer in writers:
        writer.start()
    where, stale, kept = np.array([1]), np.array([2**40]), np.ones(1, np.bool_)
    given = (where.ctypes.data, 1, True, stale.ctypes.data, kept.ctypes.data, 1_000_000_000)
    answers = {ring.seat.native.claim_slots(*given) for _ in range(200_000)}
    done.set()
    for writer in writers:
        writer.join()
    assert answers == {0}
