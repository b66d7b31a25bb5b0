"""What a damaged buffer may do: refuse with an error of ours, or mend and count.

Never: another exception, the end of the process, an item that was not written, a loss that no
report counts. Within one boot recovery believes the bytes of an item, as it must; then `check`
names every slot whose bytes are wrong. What a dying writer had written whole may be an item.
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
    """What a call returns; None if it refuses, with an error of ours that names the buffer."""
    try:
        return call()
    except ShmBufferError as error:
        said = str(error)
    assert str(specimen.path) in said, f"the error does not say where: {said}"
    return None


def require_looks_answer(specimen: Specimen) -> None:
    """`inspect` and `check` say what they find, and change nothing."""
    answer(lambda: inspect(specimen.path), specimen)
    report = answer(lambda: check(specimen.path), specimen)
    assert report is None or str(report)


def require_mended_or_refused(specimen: Specimen) -> None:
    """The next process to open it recovers what is right, and says what is not."""
    engine = answer(lambda: Engine.open(specimen.path, None, timeout=5.0), specimen)
    if engine is None:
        return
    with engine:
        assert engine.ring() is not None, "there was a schema"
        found = contents(engine.ring())
        report = engine.check()
        _require_right(specimen, found, report)
        if engine.report is None:  # a client's identity is damaged, and what is not proved is alive
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
    """A word that says ABORTED is what a writer's own abort leaves: nobody counts those."""
    states = slots.states(ring.live.words)
    lost = {slot for slot in specimen.truth if slot not in found}
    uncounted = {slot for slot in lost if states[slot] != SlotState.ABORTED}
    counted = report.words_refused + report.checksum_failed + report.rolled_back
    assert report.items == len(found)
    assert len(uncounted) <= counted, f"slots {sorted(uncounted)} went, and none counted"


def _require_usable(engine: Engine) -> None:
    """G4, whatever the priorities are: written, read, updated, and whole afterwards."""
    ring = engine.ring()
    assert ring is not None
    before = engine.check().problems
    slot = harness.write(ring, [77]) % ring.capacity
    assert contents(ring)[slot][0] == ring.head - 1
    index, tickets = np.array([slot]), np.array([ring.head - 1])
    assert ring.update(index, np.array([2.0]), tickets) == (1, 0)
    assert set(engine.check().problems) <= set(before)
