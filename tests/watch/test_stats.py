"""Rates are computed between two readings; a reading is one snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shmbuffer.watch.stats import Meter

if TYPE_CHECKING:
    from shmbuffer import memory


def counters(**changed: float) -> dict[str, float]:
    zero = dict.fromkeys(
        (
            "length",
            "write_count",
            "batches_sampled",
            "items_sampled",
            "inserts",
            "age_sum",
            "time_ns",
        ),
        0,
    )
    return {**zero, "elements": 100, "redraws": 5, **changed}


class Engine:
    """An engine that returns one snapshot after the other."""

    def __init__(self, *snapshots: dict[str, float]) -> None:
        self._snapshots = iter(snapshots)

    def ring(self) -> None:
        """Returns None, as for a buffer without a ring."""

    def stats(self) -> dict[str, float]:
        return next(self._snapshots)


def meter_of(*snapshots: dict[str, float]) -> Meter:
    return Meter(cast("memory.Engine", Engine(*snapshots)))


def test_the_keys_are_torchrls_where_it_has_them() -> None:
    meter = meter_of(counters(), counters(length=25, write_count=125, time_ns=10**9))
    stats = meter.read()
    assert stats["size"] == 25
    assert stats["write_count"] == 125
    assert stats["capacity"] == 100
    assert stats["utilization"] == stats["fill"] == 0.25
    assert stats["initialized"] is False
    assert stats["redraws"] == 5
    assert not stats.keys() & {"length", "age_sum", "time_ns", "elements"}


def test_rates_are_between_two_readings() -> None:
    meter = meter_of(
        counters(),
        counters(inserts=100, batches_sampled=10, items_sampled=320, time_ns=2 * 10**9),
        counters(inserts=400, batches_sampled=10, items_sampled=320, time_ns=3 * 10**9),
    )
    first, second = meter.read(), meter.read()
    names = ("inserts_per_s", "batches_sampled_per_s", "items_sampled_per_s")
    assert [first[name] for name in names] == [50.0, 5.0, 160.0]
    assert [second[name] for name in names] == [300.0, 0.0, 0.0]


def test_two_readings_at_one_instant_give_the_same_rates() -> None:
    later = counters(inserts=100, time_ns=10**9)
    meter = meter_of(counters(), later, later)
    assert meter.read()["inserts_per_s"] == meter.read()["inserts_per_s"] == 100.0


def test_the_age_is_that_of_what_was_drawn_since() -> None:
    meter = meter_of(
        counters(),
        counters(),
        counters(items_sampled=10, age_sum=100),
        counters(items_sampled=30, age_sum=700),
        counters(items_sampled=30, age_sum=700),
    )
    assert [meter.read()["sampled_age"] for _ in range(4)] == [0.0, 10.0, 30.0, 700 / 30]
