"""Checks of a damaged buffer, which may be refused with a library error or repaired and counted.

A call never raises another exception, ends the process, returns an item that was not written, or
loses items that no report counts. Within one boot, recovery has to trust the bytes of an item, but
`check` then names every slot whose bytes are wrong. Data that a dying writer had completely written
may be an item.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from shmbuffer import RecoveryReport, ShmBufferError
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.layout import SlotState
from shmbuffer.memory.upkeep.check import CheckReport, check
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash import harness
from tests.damage.specimen import Specimen, contents

Result = TypeVar("Result")
NAMED = re.compile(r"slot (\d+): the bytes do not match their checksum")


def answer(call: Callable[[], Result], specimen: Specimen) -> Result | None:
    """Returns the result of a call; None if it raises a library error that names the buffer."""
    try:
        return call()
    except ShmBufferError as error:
        said = str(error)
    assert str(specimen.path) in said, f"the error does not say where: {said}"
    return None


def require_looks_answer(specimen: Specimen) -> None:
    """Checks that `inspect` and `check` report what they find, and change nothing."""
    answer(lambda: inspect(specimen.path), specimen)
    report = answer(lambda: check(specimen.path), specimen)
    assert report is None or str(report)


def require_mended_or_refused(specimen: Specimen) -> None:
    """Checks that the next process to open the buffer recovers valid items and reports the rest."""
    engine = answer(lambda: Engine.open(specimen.path, None, timeout=5.0), specimen)
    if engine is None:
        return
    with engine:
        assert engine.ring() is not None, "there was a schema"
        found = contents(engine.ring())
        report = engine.check()
        _require_right(specimen, found, report)
        # A client's identity is damaged. It counts as alive, so no recovery has run.
        if engine.report is None:
            return
        others = [line for line in report.problems if not NAMED.match(line)]
        assert not others, f"recovery left damage: {others}"
        _require_counted(specimen, engine.ring(), set(found), engine.report)
        if found:
            harness.sample(engine.ring(), prioritized=True) if report.ok else None
            _require_usable(engine)


def _require_right(
    specimen: Specimen, found: dict[int, tuple[int, bytes]], report: CheckReport
) -> None:
    named = {int(match[1]) for line in report.problems if (match := NAMED.match(line))}
    wrong = {slot for slot, item in found.items() if specimen.truth.get(slot) != item}
    wrong -= specimen.begun - named
    assert not specimen.rebooted or not wrong, f"slots {sorted(wrong)} hold what nobody wrote"
    assert wrong <= named, f"slots {sorted(wrong - named)} are wrong, and check does not say so"


def _require_counted(
    specimen: Specimen, ring: Ring, found: set[int], report: RecoveryReport
) -> None:
    """Checks that all lost items were counted.

    A slot that says ABORTED may come from a writer's own abort, which no report counts.
    """
    states = slots.states(ring.live.words)
    lost = {slot for slot in specimen.truth if slot not in found}
    uncounted = {slot for slot in lost if states[slot] != SlotState.ABORTED}
    counted = report.words_refused + report.checksum_failed + report.rolled_back
    assert report.items == len(found)
    assert len(uncounted) <= counted, f"slots {sorted(uncounted)} went, and none counted"


def _require_usable(engine: Engine) -> None:
    """Checks G4: items can be written, read and updated, and are intact afterwards."""
    ring = engine.ring()
    assert ring is not None
    before = engine.check().problems
    slot = harness.write(ring, [77]) % ring.capacity
    assert contents(ring)[slot][0] == ring.head - 1
    index, tickets = np.array([slot]), np.array([ring.head - 1])
    assert ring.update(index, np.array([2.0]), tickets) == (1, 0)
    assert set(engine.check().problems) <= set(before)
