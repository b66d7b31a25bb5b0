"""Rates are the growth of counters between two snapshots; a replaced buffer starts over."""

from __future__ import annotations

from typing import Any

from shmbuffer.watch.events import Change
from shmbuffer.watch.pace import RATED, Watch


def look(
    uuid: str = "one", clients: tuple[int, ...] = (1,), epoch: int = 0, **counted: int
) -> dict[str, Any]:
    counters = dict.fromkeys((*RATED, "age_sum", "reaped", "rolled_back"), 0) | counted
    each = [
        {
            "entry": 0,
            "incarnation": incarnation,
            "role": "client",
            "pid": 100 + incarnation,
            "alive": True,
            "state": "running",
            "claimed": None,
            "mutex": False,
            "counters": counters,
        }
        for incarnation in clients
    ]
    return {
        "uuid": uuid,
        "epoch": epoch,
        "state": "READY",
        "recovery": None,
        "counters": counters,
        "clients": each,
    }


def test_the_first_look_has_no_rates() -> None:
    watch = Watch()
    pace = watch.add(look(inserts=7), at=1.0)
    assert (pace.rates, pace.age, pace.clients, list(watch.history)) == ({}, None, {}, [])


def test_rates_are_per_second() -> None:
    watch = Watch()
    watch.add(look(inserts=10, items_sampled=100, age_sum=50), at=1.0)
    pace = watch.add(look(inserts=30, items_sampled=140, age_sum=130, updates_stale=1), at=3.0)
    assert pace.seconds == 2.0
    assert pace.rates["inserts"] == 10.0
    assert pace.rates["items_sampled"] == 20.0
    assert pace.rates["updates_stale"] == 0.5
    assert pace.age == 2.0
    assert pace.clients == {1: (10.0, 20.0)}
    assert list(watch.history) == [pace]


def test_an_entry_that_was_given_to_another_client_goes_on_counting() -> None:
    watch = Watch()
    watch.add(look(clients=(1,), inserts=10), at=0.0)
    assert watch.add(look(clients=(2,), inserts=14), at=1.0).clients == {2: (4.0, 0.0)}


def test_another_buffer_in_the_same_place_starts_from_the_beginning() -> None:
    watch = Watch()
    watch.add(look(inserts=1000), at=0.0)
    watch.add(look(inserts=2000), at=1.0)
    assert watch.add(look("two", inserts=3), at=2.0).rates == {}
    assert not watch.history
    assert watch.add(look("two", inserts=5), at=3.0).rates["inserts"] == 2.0


def test_history_is_bounded() -> None:
    watch = Watch()
    for at in range(1000):
        watch.add(look(inserts=at, clients=(at,)), at=float(at))
    assert len(watch.history) == 240
    assert len(watch.events) == 200


def test_the_ratio_is_of_items_drawn_to_items_written() -> None:
    watch = Watch()
    assert watch.add(look(), at=0.0).ratio is None
    assert watch.add(look(inserts=2, items_sampled=16), at=1.0).ratio == 8.0
    pace = watch.add(look(inserts=2, items_sampled=20), at=2.0)
    assert (pace.ratio, pace.to_json()["ratio"]) == (None, None)


def test_events_are_kept_with_the_time_of_the_poll() -> None:
    watch = Watch()
    assert watch.add(look(), at=0.0, wall_s=1000.0).events == ()
    pace = watch.add(look(clients=(1, 2)), at=1.0, wall_s=1001.0)
    assert pace.events == (Change(1001.0, "joined", "client 102"),)
    assert watch.add(look(clients=(1, 2)), at=2.0, wall_s=1002.0).events == ()
    assert list(watch.events) == list(pace.events)
    told = pace.to_json()["events"]
    assert list(told) == [{"at_s": 1001.0, "kind": "joined", "text": "client 102"}]


def test_a_reaped_client_is_shown_for_ten_seconds() -> None:
    watch = Watch()
    watch.add(look(clients=(1, 2)), at=0.0)
    watch.add(look(clients=(1,), reaped=1), at=1.0)
    assert [client["pid"] for client in watch.departed()] == [102]
    watch.add(look(clients=(), reaped=1), at=2.0)  # left in good order
    assert [client["pid"] for client in watch.departed()] == [102]
    watch.add(look(clients=(), reaped=1), at=11.0)
    assert watch.departed() == []


def test_a_buffer_that_is_removed_and_made_again_is_told_once() -> None:
    watch = Watch()
    watch.add(look(), at=0.0)
    assert [event.kind for event in watch.record_loss("gone").events] == ["removed"]
    assert watch.record_loss("gone").events == ()
    assert [event.kind for event in watch.add(look("two"), at=2.0).events] == ["new buffer"]
    assert [event.kind for event in watch.record_loss("broken", "unreadable").events] == [
        "unreadable"
    ]
    assert [event.text for event in watch.events] == [
        "gone",
        "the buffer was replaced by another one",
        "broken",
    ]


def test_a_claim_is_timed_as_long_as_it_is_the_same() -> None:
    watch, found = Watch(), look()
    client = found["clients"][0]
    watch.add(found, at=0.0)
    assert watch.held_s(client) == 0.0
    client["claimed"] = {"first": 7, "count": 2}
    for at in (1.0, 3.0):
        watch.add(found, at=at)
    assert watch.held_s(client) == 2.0
    client["claimed"] = {"first": 9, "count": 2}
    watch.add(found, at=4.0)
    assert watch.held_s(client) == 0.0


def test_the_lock_of_a_busy_client_is_another_one_at_each_look() -> None:
    watch = Watch()
    for at in (0.0, 1.0, 2.0):
        found = look(inserts=int(at))
        found["clients"][0]["mutex"] = True
        watch.add(found, at=at)
    assert watch.held_s(found["clients"][0]) == 0.0
    watch.add(found, at=5.0)
    assert watch.held_s(found["clients"][0]) == 3.0
