"""Rates are what counters grew by between two looks; another buffer in the place begins anew."""

from __future__ import annotations

from typing import Any

from shmbuffer.cli.pace import RATED, Watch


def look(uuid: str = "one", clients: tuple[int, ...] = (1,), **counted: int) -> dict[str, Any]:
    counters = dict.fromkeys((*RATED, "age_sum"), 0) | counted
    each = [
        {"entry": 0, "incarnation": incarnation, "counters": counters} for incarnation in clients
    ]
    return {"uuid": uuid, "counters": counters, "clients": each}


def test_the_first_look_has_no_rates() -> None:
    watch = Watch()
    pace = watch.see(look(inserts=7), at=1.0)
    assert (pace.rates, pace.age, pace.clients, list(watch.history)) == ({}, None, {}, [])


def test_rates_are_per_second() -> None:
    watch = Watch()
    watch.see(look(inserts=10, sampled=100, age_sum=50), at=1.0)
    pace = watch.see(look(inserts=30, sampled=140, age_sum=130, updates_stale=1), at=3.0)
    assert pace.seconds == 2.0
    assert pace.rates["inserts"] == 10.0
    assert pace.rates["sampled"] == 20.0
    assert pace.rates["updates_stale"] == 0.5
    assert pace.age == 2.0
    assert pace.clients == {1: (10.0, 20.0)}
    assert list(watch.history) == [pace]


def test_an_entry_that_was_given_to_another_client_goes_on_counting() -> None:
    watch = Watch()
    watch.see(look(clients=(1,), inserts=10), at=0.0)
    assert watch.see(look(clients=(2,), inserts=14), at=1.0).clients == {2: (4.0, 0.0)}


def test_another_buffer_in_the_same_place_begins_anew() -> None:
    watch = Watch()
    watch.see(look(inserts=1000), at=0.0)
    watch.see(look(inserts=2000), at=1.0)
    assert watch.see(look("two", inserts=3), at=2.0).rates == {}
    assert not watch.history
    assert watch.see(look("two", inserts=5), at=3.0).rates["inserts"] == 2.0


def test_history_is_bounded() -> None:
    watch = Watch()
    for at in range(1000):
        watch.see(look(inserts=at), at=float(at))
    assert len(watch.history) == 240
