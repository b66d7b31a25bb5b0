"""Unhealthy values are reported with the reason; values just below a threshold are not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from shmbuffer.memory.upkeep.history import Event, EventKind
from shmbuffer.watch import findings
from shmbuffer.watch.findings import find_problems
from shmbuffer.watch.plot.timeline import Timeline
from tests.watch.histories import BEGIN_S, client, event, history_of, item_stats, look, steady

HEALTHY = {
    "inserts": 100.0,
    "batches_sampled": 4.0,
    "items_sampled": 800.0,
    "updates_applied": 790.0,
    "updates_stale": 10.0,
}


def timeline(seconds: int = 120, happened: tuple[object, ...] = (), **rates: float) -> Timeline:
    grown = steady(seconds, **{**HEALTHY, **rates})
    return Timeline(history_of(grown, happened=happened))  # type: ignore[arg-type]


def stops_at(second: int, *names: str, until: int = 120) -> Timeline:
    """Makes counters that stop growing."""
    rows = steady(until, **HEALTHY)
    for row in rows[second + 1 :]:
        row.update({name: rows[second][name] for name in names})
    return Timeline(history_of(rows))


def test_a_healthy_buffer_has_none() -> None:
    learner = client(incarnation=3, role="learner")
    items = item_stats(np.random.default_rng(0).exponential(size=1000))
    healthy = look(timeline(), clients=[client(), learner], items=items)
    assert find_problems(healthy) == []
    assert findings.verdict(healthy, []) == "looks healthy"


def test_an_empty_one_is_neither_healthy_nor_not() -> None:
    assert findings.verdict(look(write_count=0), []) == "nothing has been written yet"


def test_the_most_urgent_comes_first() -> None:
    found = find_problems(look(timeline(updates_stale=800.0, items_sampled=90000.0)))
    assert [one.name for one in found] == ["late_updates", "sampled_too_often"]
    assert findings.verdict(look(), found) == "2 possible problems"
    assert findings.verdict(look(), found[:1]) == "1 possible problem"


def test_all_clients_dead() -> None:
    dead = [client(alive=False, pid=pid, incarnation=pid) for pid in range(1, 6)]
    happened = (event(EventKind.JOINED, 1, incarnation=1, pid=1, name="collect-0"),)
    one = look(timeline(happened=happened), clients=dead, needs_recovery="no client alive")
    says = findings.all_clients_dead(one)
    assert says is not None
    assert re.fullmatch(
        r"all clients are dead: collect-0, collector 2, collector 3 and 2 more; "
        r"the last record is from 2023-11-\d\d \d\d:\d\d:20",
        says,
    )
    assert findings.all_clients_dead(look(clients=dead, needs_recovery="reboot")) is not None
    assert findings.all_clients_dead(look(clients=[], needs_recovery="no client alive")) is None
    assert findings.all_clients_dead(look(clients=[client(), *dead])) is None


def test_a_coordinator_that_died() -> None:
    mine = {"role": "coordinator", "pid": 9, "incarnation": 1}
    joined = event(EventKind.JOINED, 0, **mine)
    says = findings.coordinator_dead(look(timeline(happened=(joined,))))
    assert says is not None
    assert "the coordinator (pid 9) is dead" in says
    left = event(EventKind.LEFT, 119, **mine)
    assert findings.coordinator_dead(look(timeline(happened=(joined, left)))) is None
    alive = [client(), client(role="coordinator", incarnation=1)]
    assert findings.coordinator_dead(look(timeline(happened=(joined,)), clients=alive)) is None
    assert findings.coordinator_dead(look(timeline(happened=(joined,)), clients=[])) is None


WRITER = client(counters={"inserts": 9, "batches_sampled": 0})
LEARNER = client(role="learner", counters={"inserts": 0, "batches_sampled": 9})


def test_no_insert() -> None:
    def says(until: int, one: dict[str, object]) -> str | None:
        return findings.no_insert(look(stops_at(until, "inserts"), clients=[one]))

    assert says(80, WRITER) == "nothing was written for 40 s"
    assert says(91, WRITER) is None
    assert says(10, LEARNER) is None
    assert findings.no_insert(look(clients=[WRITER])) is None
    held = look(stops_at(80, "inserts"), clients=[WRITER], limited=2)
    assert (
        findings.no_insert(held)
        == "nothing was written for 40 s: 2 clients wait for the rate limiter"
    )
    assert findings.no_insert(look(stops_at(80, "inserts"), clients=[])) is None


def test_no_sample() -> None:
    def says(until: int, one: dict[str, object]) -> str | None:
        return findings.no_sample(look(stops_at(until, "batches_sampled"), clients=[one]))

    assert says(75, LEARNER) == "nothing was sampled for 45 s"
    assert says(91, LEARNER) is None
    assert says(10, WRITER) is None
    assert findings.no_sample(look(clients=[LEARNER])) is None


def test_a_silent_collector() -> None:
    busy = client(idle_s=0.5, incarnation=5)
    silent = client(idle_s=75.0, pid=4711, state="stopped")
    assert findings.silent_collector(look(clients=[busy, silent])) == (
        "collector 4711 (stopped) has written nothing for 75 s, while others write"
    )
    never = client(idle_s=None, pid=4712, incarnation=6)
    named = timeline(happened=(event(EventKind.JOINED, 1, incarnation=6, name="collect-3"),))
    both = look(named, clients=[busy, silent, never], now_s=BEGIN_S + 130.0)
    assert findings.silent_collector(both) == (
        "collect-3 has written nothing for 2 min, and 1 more are silent, while others write"
    )
    assert findings.silent_collector(look(clients=[busy, client(idle_s=59.0)])) is None
    assert findings.silent_collector(look(clients=[silent])) is None


def test_repeated_deaths_are_a_finding() -> None:
    def died(name: str, t: int) -> Event:
        return event(EventKind.DIED, t, name=name, incarnation=t)

    twice = (died("collect-0", 1), died("collect-0", 5), died("collect-1", 7))
    assert findings.dies_again(look(timeline(happened=twice))) is None
    thrice = (*twice, died("collect-0", 9))
    assert findings.dies_again(look(timeline(happened=thrice))) == (
        "collect-0 died 3 times in 2 min"
    )
    more = (*thrice, *(died("", t) for t in (20, 21, 22, 23)))
    assert findings.dies_again(look(timeline(happened=more))) == (
        "collectors without a name died 4 times in 2 min, and 1 other process died repeatedly"
    )
    assert findings.dies_again(look()) is None


def test_sampled_too_often() -> None:
    assert findings.sampled_too_often(look(timeline(items_sampled=60000.0))) == (
        "600 samples per insert: the learner may overfit old items"
    )
    assert findings.sampled_too_often(look(timeline(items_sampled=51200.0))) is None
    assert findings.sampled_too_often(look(inserts=10, items_sampled=10000)) == (
        # without a history: since the buffer was created
        "1,000 samples per insert: the learner may overfit old items"
    )
    assert findings.sampled_too_often(look(inserts=1, items_sampled=999)) is None
    wished = look(timeline(items_sampled=60000.0), samples_per_insert=600.0)
    assert findings.sampled_too_often(wished) is None


def test_overwritten_before_it_is_drawn() -> None:
    def says(line: Timeline | None = None, **counters: int) -> str | None:
        return findings.overwritten_unsampled(look(line, **{"items_sampled": 256, **counters}))

    assert says(timeline(items_sampled=20.0)) == (
        "0.2 samples per insert: most items are overwritten before they are sampled"
    )
    nothing = says(timeline(items_sampled=0.0))
    assert nothing is not None
    assert nothing.startswith("nothing is sampled")
    assert says(inserts=2000) is not None
    assert says(inserts=2000, items_sampled=0) is None  # the buffer serves another purpose
    assert says(timeline(items_sampled=50.0)) is None
    assert says(timeline(items_sampled=20.0), length=999) is None


def test_late_updates() -> None:
    late = timeline(updates_applied=88.0, updates_stale=12.0)
    assert findings.late_updates(look(late)) == (
        "12 % of priority updates come too late: their items have been overwritten"
    )
    some = timeline(updates_applied=90.0, updates_stale=10.0)
    assert findings.late_updates(look(some)) is None
    assert findings.late_updates(look(updates_applied=9, updates_stale=90)) is None


def test_never_updated() -> None:
    none = timeline(updates_applied=0.0, updates_stale=0.0)
    says = findings.never_updated(look(none))
    assert says is not None
    assert says.startswith("priorities are never updated")
    assert findings.never_updated(look(none, prioritized=0)) is None
    assert findings.never_updated(look(timeline(updates_stale=0.0))) is None
    assert findings.never_updated(look(items_sampled=999)) is None


def test_few_items_have_the_mass() -> None:
    masses = np.ones(1000)
    masses[:10] = 4 * 990 / 10
    assert findings.few_have_the_mass(look(items=item_stats(masses))) == (
        "1 % of the items have 80 % of the priority mass"
    )
    masses[:10] = 990 / 10
    assert findings.few_have_the_mass(look(items=item_stats(masses))) is None
    assert findings.few_have_the_mass(look(items=item_stats([1.0, 0.0]))) is None
    assert findings.few_have_the_mass(look(items=item_stats(np.zeros(1000)))) is None
    assert findings.few_have_the_mass(look()) is None


def test_rows_that_are_drawn_again() -> None:
    assert findings.sampled_again(look(timeline(redraws=64.0))) == (
        "8 % of rows are overwritten while they are sampled: the buffer is too small"
    )
    assert findings.sampled_again(look(timeline(redraws=40.0))) is None


def test_writers_that_wait() -> None:
    assert findings.writers_wait(look(timeline(waits=12.0))) == (
        "12 writes per second wait for a slot that another process is filling"
    )
    assert findings.writers_wait(look(timeline(waits=10.0))) is None
    assert findings.writers_wait(look(waits=10**6)) is None


def test_a_ring_of_too_few_bytes_is_a_finding() -> None:
    records = {"max_bytes": 4096}
    assert findings.evicted_early(look(records=records, length=310, evicted=5)) == (
        "the byte ring is full at 31 % of the capacity: max_bytes is too small for it"
    )
    assert findings.evicted_early(look(records=records, length=500, evicted=5)) is None
    assert findings.evicted_early(look(records=records, length=310)) is None
    assert findings.evicted_early(look(length=310, evicted=5)) is None


def test_a_history_that_stands_still() -> None:
    alive = [client(role="coordinator", pid=9, state="stopped")]
    late = look(timeline(), clients=alive, now_s=BEGIN_S + 160.0)
    assert findings.history_stands_still(late) == (
        "the coordinator (pid 9, stopped) has recorded nothing for 40 s"
    )
    soon = look(timeline(), clients=alive, now_s=BEGIN_S + 129.0)
    assert findings.history_stands_still(soon) is None
    assert findings.history_stands_still(look(timeline(), now_s=BEGIN_S + 160.0)) is None


@pytest.mark.parametrize("finding", findings.ALL)
def test_each_has_a_test_and_a_sentence_of_its_own(finding: object) -> None:
    name = finding.__name__  # type: ignore[attr-defined]
    assert f"findings.{name}(" in Path(__file__).read_text("utf-8")
    assert finding.__doc__
    assert finding(look(write_count=0, length=0)) is None  # type: ignore[operator]


def test_the_document_has_each_with_its_threshold() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plot.md").read_text("utf-8")
    said = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert list(said) == [finding.__name__ for finding in findings.ALL]
    thresholds = {
        "no_insert": [findings.QUIET_S],
        "no_sample": [findings.QUIET_S],
        "silent_collector": [findings.SILENT_S],
        "dies_again": [findings.SOME_DEATHS],
        "late_updates": [100 * findings.LATE_UPDATES],
        "sampled_too_often": [findings.MANY_SAMPLES],
        "overwritten_unsampled": [findings.FEW_SAMPLES],
        "never_updated": [findings.ENOUGH_ITEMS],
        "few_have_the_mass": [100 * findings.TOP, 100 * findings.TOP_MASS],
        "sampled_again": [100 * findings.RESAMPLED],
        "writers_wait": [findings.WAITS_PER_S],
        "evicted_early": [100 * findings.EARLY_EVICTION],
        "history_stands_still": [findings.STANDSTILL_S],
    }
    for name, sentence in said.items():
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", sentence)]
        assert numbers == thresholds.get(name, []), name
