"""Admission is compared with Reverb's own decisions, and with a model for whole batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shmbuffer import RateLimiter
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings
from tests.kit.rings import ring_of
from tests.selection import seeds

CAPACITY = 1024
LONG_NS = 5 * 10**9
#: (samples_per_insert, min_size, error_buffer) -> decisions about single items. i, s: an insert or
#: a sample was admitted; I, S: it was refused. Recorded with dm-reverb 0.14.0:
#: `reverb.Table.can_insert` and `can_sample` of a table with
#: ``SampleToInsertRatio(samples_per_insert, min_size, error_buffer)`` were called before each step
#: of a random walk, and admitted items were inserted or sampled.
RECORDED = {
    (1.0, 1, 1.0): (
        "SSSiiIIssSSSSSSSiissSiiIIIIIssSiiIIIssSiissSiiIIIIssSisSiiIsiIsiIssiiIssiiIIIIssSSiiIIsi"
        "siIIIsiIssSSiiIIIIIIssSSiissSSSSSiiIssiissSiiIssSisSSSiiIIssSS"
    ),
    (4.0, 3, 8.0): (
        "iiiiiIIsssssssssissiIIssssssiiIssIsiIIIIsssIIIIIsissssiIIssssssssssssssssissssiisiiIIsss"
        "sssssssssisssssssSSissssSSissiisiIIsssssssssiiiIsssIIssssssssss"
    ),
    (0.5, 2, 1.0): (
        "SiiiiIIIssSiiisSiiiIIssSSiiiiIssSiiiiIIssiiiiIssSiiiiIssSiiiiIsisSisSiisSiiiiIIIssiiiiIs"
        "sSSiiiiIsisSiiissSiiiiIssSSiiisSiiiIIIssSSiiiiIIIIssSiiisiiiII"
    ),
    (0.3, 5, 2.0): (
        "SiSiiiissSSiiiiiiiiissSiiiiiiiiiiiIsiiiIIsssSiisSSSiiiiiiiiiiiIIIIsssSSSSiiisSSiiiiiiiii"
        "sssSiiiiiiiiiiiiIIssssSSiiiiisiisSiSSSSiiiiiiiiissiiiiiiiiiIsss"
    ),
    (2.5, 4, 3.0): (
        "iSiiiiIsIssssSiiIIIsssiIIIsssssSiiIsssssSiissssiiIIIsIssiIIIIIIIIIIIIIIIIIIIIssiIIIsIsss"
        "ssiisssssSSiisssssSSSSiissssiiIssssssSissSSiisssssiiIsssiIIIsss"
    ),
    (8.0, 1, 16.0): (
        "iiiIssssssssssisssIIssIssiIsssssssssisIIssssssssssssssissssiIIIIsIsssssssisIIIsssiIsssss"
        "ssssssiIssIsssssssssssiiIIIIsIIIssIsssIIIIIssssssssssiiIIsssss"
    ),
    (1.0, 10, 1.0): (
        "iiiiiiiiiiiIssSSSiisiIIIsiIIssSiissSisSiiIIssSSisSiiIIssSSSSiiIsissSiiIIssSSSiiIsiIssSii"
        "ssSiisiIIIssSSisSSSSiiIssSiiIIIssSSiiIsiIIIsiIIIIIssSSiiIIIssS"
    ),
}
ROUNDING = 1e-6


@dataclass
class Model:
    """Reverb's rule, applied to batches with open claims.

    Source: reverb/cc/rate_limiter.cc, ``CanInsert`` and ``CanSample``, which decide about single
    items.

    Attributes:
        counted: elements written since the ratio applies; below 0 while inserts are free.
        drawn: elements sampled since then.
        size: elements that are stored.
        open: elements of each handle's open claim.
    """

    limiter: RateLimiter
    counted: int
    drawn: int
    size: int
    open: list[int]

    @property
    def ratio(self) -> float:
        return float(self.limiter.samples_per_insert or 0)

    @property
    def ahead(self) -> float:
        """Returns the lead of the inserts, including open claims."""
        return (self.counted + sum(self.open)) * self.ratio - self.drawn

    def may_insert(self, count: int) -> bool:
        buffer = self.limiter.tolerance
        if self.size + sum(self.open) < self.limiter.min_size and count * self.ratio <= 2 * buffer:
            return True
        return self.ahead + count * self.ratio <= buffer + ROUNDING

    def may_sample(self, count: int) -> bool:
        if self.size < self.limiter.min_size:
            return False
        committed = self.counted * self.ratio - self.drawn
        return committed - count >= -self.limiter.tolerance - ROUNDING


@pytest.fixture
def handles(tmp_path: Path) -> Iterator[list[Engine]]:
    """Makes several handles on one buffer."""
    path = tmp_path / "buffer"
    with Engine.open(path, Settings(capacity=CAPACITY)) as first:
        first.define(Schema((Leaf(("number",), "int64", ()),), CAPACITY))
        others = [Engine.open(path, None) for _ in range(2)]
        yield [first, *others]
        for other in others:
            other.close()


def claims(ring: Ring, count: int) -> bool:
    """Tries to claim; True if the claim is admitted, which is then open."""
    status = ring.seat.native.claim(count, 0, LONG_NS)
    if status >= 0:
        return True
    assert status == -_core.LIMITED
    ring.seat.native.stop_waiting(LONG_NS)
    return False


def draws(ring: Ring, count: int) -> bool:
    status = ring.seat.native.admit_sample(count, 0, False, LONG_NS)
    if status >= 0:
        return True
    assert status == -_core.LIMITED
    ring.seat.native.stop_waiting(LONG_NS)
    return False


def finish(ring: Ring, *, commit: bool) -> None:
    native = ring.seat.native
    assert (native.commit(0, 0, LONG_NS) if commit else native.abort(LONG_NS)) == 0


@pytest.mark.parametrize("case", RECORDED)
def test_single_items_go_on_and_wait_as_with_reverb(
    handles: list[Engine], case: tuple[float, int, float]
) -> None:
    ring, limiter = ring_of(handles[0]), RateLimiter(case[0], case[1], case[2])
    handles[0].set_limiter(limiter)
    model = fresh(limiter, 0, [])
    for step, decision in enumerate(RECORDED[case]):
        expected = decision.islower()
        if decision in "iI":
            assert model.may_insert(1) == expected, step
            went = claims(ring, 1)
            if went:
                finish(ring, commit=True)
                model.counted += 1
                model.size += 1
        else:
            assert model.may_sample(1) == expected, step
            went = draws(ring, 1)
            model.drawn += went
        assert went == expected, (step, decision)
        assert abs(model.ahead) <= case[2] + ROUNDING or model.size < case[1]
    standing = ring.admission.rate_status()
    assert (standing.size, standing.pending) == (model.size, 0)


def limiter_of(draw: random.Random) -> RateLimiter:
    ratio = draw.choice((0.1, 0.25, 1 / 3, 1.0, 1.7, 4.0))
    least = max(1.0, ratio)
    return RateLimiter(
        samples_per_insert=ratio,
        min_size=draw.choice((1, 2, 7, 20)),
        error_buffer=least + draw.choice((0.0, 1.0, 3.3, 12.0, 40.0)),
    )


def fresh(limiter: RateLimiter, size: int, still_open: list[int]) -> Model:
    """Makes the model of a ratio that applies from now on."""
    return Model(limiter, min(0, size - limiter.min_size), 0, size, still_open)


@pytest.mark.product(few=4)
@pytest.mark.parametrize("seed", seeds(15, 60))
def test_batches_of_several_handles_go_on_as_the_model_says(
    handles: list[Engine], seed: int
) -> None:
    draw = random.Random(seed)
    rings = [ring_of(engine) for engine in handles]
    limiter = limiter_of(draw)
    handles[0].set_limiter(limiter)
    model = fresh(limiter, 0, [0] * len(rings))
    overshoot = 0.0  # excess of a batch that was admitted while there were too few items to sample
    went = {"insert": 0, "sample": 0, "refused": 0}
    for step in range(220):
        who = draw.randrange(len(rings))
        ring, count = rings[who], draw.choice((1, 1, 2, 3, 5, 8))
        what = draw.choice(("insert", "insert", "sample", "sample", "finish", "finish"))
        if draw.random() < 0.01:
            what = draw.choice(("empty", "set"))
        if what == "insert" and not model.open[who] and ring.head + count < CAPACITY:
            expected = model.may_insert(count)
            assert claims(ring, count) == expected, f"seed {seed}, step {step}: {model}"
            if expected:
                model.open[who] = count
                overshoot = max(overshoot, model.ahead - model.limiter.tolerance)
        elif what == "sample":
            expected = model.may_sample(count)
            assert draws(ring, count) == expected, f"seed {seed}, step {step}: {model}"
            model.drawn += count if expected else 0
        elif what == "finish" and model.open[who]:
            commit = draw.random() < 0.8
            finish(ring, commit=commit)
            if commit:
                model.counted += model.open[who]
                model.size += model.open[who]
            model.open[who] = 0
            continue
        elif what == "empty":
            ring.empty()
            model.open[who] = 0  # its own claim is abandoned
            model = fresh(model.limiter, 0, model.open)
            overshoot = 0.0
            continue
        elif what == "set":
            limiter = limiter_of(draw)
            handles[who].set_limiter(limiter)
            model = fresh(limiter, model.size, model.open)
            overshoot = model.ahead - limiter.tolerance  # of the claims that are already open
            continue
        else:
            continue
        went[what if expected else "refused"] += 1
        assert model.ahead <= model.limiter.tolerance + max(0.0, overshoot) + ROUNDING
        committed = model.counted * model.ratio - model.drawn
        assert model.size < model.limiter.min_size or (
            committed >= -model.limiter.tolerance - ROUNDING
        )
        standing = ring.admission.rate_status()
        assert standing.ahead == pytest.approx(committed)
        assert (standing.pending, standing.size) == (sum(model.open), model.size)
    assert went["insert"] > 0
