"""Rates use the clock since boot, times the wall clock; gaps are kept."""

from __future__ import annotations

import numpy as np
import pytest

from shmbuffer.memory.upkeep.history import EventKind
from shmbuffer.watch.plot.timeline import MOST_POINTS, Timeline
from tests.watch.histories import BEGIN_S, event, history_of, steady


def since(times: object) -> list[float]:
    return [round(float(t) - BEGIN_S, 2) for t in np.asarray(times)]


def test_rates_are_per_second_and_the_first_is_not_known() -> None:
    line = Timeline(history_of(steady(4, inserts=100.0, items_sampled=256.0)))
    times, (written, drawn) = line.rates("inserts", "items_sampled")
    assert since(times) == [0, 1, 2, 3, 4]
    assert np.isnan(written[0])
    assert written[1:].tolist() == [100.0] * 4
    assert drawn[1:].tolist() == [256.0] * 4
    assert line.total("inserts") == 400


def test_a_wall_clock_that_is_set_does_not_change_rates() -> None:
    rows = steady(9, inserts=100.0)
    for row in rows:
        row["boot"] = row["t"]
        # the clock is set forward by a day in the middle
        row["t"] -= 86400.0 if row["t"] < 5 else 0.0
    line = Timeline(history_of(rows))
    times, (written,) = line.rates("inserts")
    assert since(times) == list(range(10))
    assert written[1:].tolist() == [100.0] * 9


def test_a_recorder_lies_before_the_next_whatever_the_wall_clock_says() -> None:
    rows = [*steady(4, by=1, begin=1000, inserts=1.0), *steady(4, by=2, begin=2000, inserts=1.0)]
    for row in rows[:5]:
        row["t"] += 5000
    line = Timeline(history_of(rows))
    assert (np.diff(line.times_s) > 0).all()
    assert since(line.times_s[5:]) == [2000, 2001, 2002, 2003, 2004]


def test_between_two_recorders_is_a_gap_that_counts_for_the_total_alone() -> None:
    rows = [*steady(3, by=1, inserts=10.0), *steady(3, by=4, begin=60, inserts=10.0)]
    line = Timeline(history_of(rows))
    assert [(b - BEGIN_S, e - BEGIN_S) for b, e in line.gaps] == [(3, 60)]
    assert line.total("inserts") == 630
    times, (written,) = line.rates("inserts")
    assert since(times) == [0, 1, 2, 3, 60, 61, 62, 63]
    assert np.isnan(written[[0, 4]]).all()
    _, levels = line.levels("inserts")
    assert np.flatnonzero(np.isnan(levels)).tolist() == [4]


def test_a_counter_that_fell_in_a_power_cut_does_not_count_backwards() -> None:
    rows = steady(5, inserts=10.0)
    rows[3]["inserts"] = 5
    line = Timeline(history_of(rows))
    _, (written,) = line.rates("inserts")
    assert np.isnan(written[3])
    assert line.total("inserts") == 20 + 35 + 10


def test_before_the_fine_records_come_the_coarse_ones() -> None:
    fine = steady(5, by=3, begin=600, inserts=10.0)
    coarse = [
        *({"t": t, "by": 2, "inserts": 10 * t} for t in (0, 60, 120)),
        *({"t": t, "by": 3, "inserts": 10 * t} for t in (540, 600)),
    ]
    line = Timeline(history_of(fine, coarse))
    assert since(line.times_s) == [0, 60, 120, 540, 600, 601, 602, 603, 604, 605]
    assert line.total("inserts") == 6050
    assert [(b - BEGIN_S, e - BEGIN_S) for b, e in line.gaps] == [(120, 540)]


def test_the_last_minutes_are_counted_back_from_the_end_with_a_record_before() -> None:
    happened = [event(EventKind.LEFT, t, incarnation=t + 5) for t in (10, 50, 95)]
    line = Timeline(history_of(steady(100, inserts=10.0), happened=happened), last_s=10.0)
    assert since(line.times_s)[0] == 89
    assert line.total("inserts") == 110
    assert [round(one.time_s - BEGIN_S) for one in line.events] == [95]


def test_a_line_has_few_points_and_loses_nothing_of_a_total() -> None:
    rows = [*steady(3000, by=1, inserts=7.0), *steady(500, by=2, begin=3100, inserts=7.0)]
    line = Timeline(history_of(rows))
    times, (grown,) = line.lines("inserts")
    assert len(times) <= MOST_POINTS + 4
    assert np.nansum(grown) == 7 * 3500
    _, (written,) = line.rates("inserts")
    assert np.allclose(written[~np.isnan(written)], 7.0)


def test_events_are_told_by_name() -> None:
    happened = [
        event(EventKind.JOINED, 1, incarnation=2, pid=7, name="collect-0"),
        event(EventKind.DIED, 3, incarnation=2, pid=7, name="c-0", exitcode=-9, restarted=True),
        event(EventKind.RECOVERED, 4, epoch=1, role="coordinator"),
        event(EventKind.LEFT, 4.5, boot=4.5, incarnation=3, pid=8, role="learner"),
    ]
    line = Timeline(history_of(steady(5), happened=happened))
    joined, died, recovered, left = line.events
    assert (joined.kind, joined.who, joined.exitcode) == (EventKind.JOINED, "collect-0", None)
    assert (died.who, died.exitcode, died.restarted) == ("c-0", -9, True)
    assert (recovered.kind, recovered.epoch) == (EventKind.RECOVERED, 1)
    assert (left.who, left.role) == ("learner 8", "learner")
    assert line.known == {2: joined}
    assert line.ended == {2: died, 3: left}


def test_how_long_nothing_has_happened() -> None:
    rows = steady(20, inserts=10.0)
    for row in rows[13:]:
        row["inserts"] = 120
    assert Timeline(history_of(rows)).quiet_s("inserts") == pytest.approx(8)
    assert Timeline(history_of(steady(20))).quiet_s("inserts") == pytest.approx(20)


def test_without_a_record_there_is_no_timeline() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        Timeline(history_of([]))
    assert Timeline(history_of([], steady(0))).total("inserts") == 0
