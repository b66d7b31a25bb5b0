"""A kill at any instruction of a deed is repaired, by other clients or by the next process."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer.memory import Engine
from tests.crash.deeds import (
    aborts,
    empties,
    ends_at,
    is_done,
    prepare,
    require_done_or_not,
    sets_alpha,
    updates,
    writes,
)
from tests.crash.harness import read_all
from tests.crash.stepping import put_back, walk, walk_of_a_mender
from tests.kit.rings import ring_of

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="single steps of another machine"),
]

#: Maps a deed to its function, its number of mutex releases, and its least number of states.
WALKS: dict[str, tuple[Callable[[Engine], None], int, int]] = {
    "write": (writes, 2, 60),
    "update": (updates, 1, 12),
    "empty": (empties, 1, 30),
    "alpha": (sets_alpha, 1, 15),
    "abort": (aborts, 2, 30),
}
PATHS = pytest.mark.parametrize("alone", [False, True], ids=["beside a survivor", "alone"])


@pytest.mark.product(few=3)
@PATHS
@pytest.mark.parametrize("deed", WALKS)
def test_every_state_that_a_kill_can_leave_is_mended(
    tmp_path: Path, deed: str, alone: bool
) -> None:
    assert mended_states(tmp_path / "buffer", deed, alone=alone) >= WALKS[deed][2]


def mended_states(path: Path, deed: str, *, alone: bool, kind: str = "rows") -> int:
    """Follows a victim through the deed and repairs each state; returns the number of states."""
    work, releases, _ = WALKS[deed]
    survivor = prepare(path, kind)
    if alone:
        survivor.close()
    states, decided = walk(path, work, releases).states, False
    for number, state in enumerate(states):
        put_back(state)
        engine = Engine.open(path, None) if alone else survivor
        engine.seat.reap_dead()
        try:
            decided = require_mended(engine, deed, decided)
        except AssertionError as error:
            raise AssertionError(f"state {number} of {len(states)}: {error}") from error
        if alone:
            engine.close()
    assert decided or deed == "abort"
    survivor.close()
    return len(states)


def require_mended(engine: Engine, deed: str, decided: bool) -> bool:
    """Checks that the deed is done or not done; it stays done in later states.

    Returns:
        True if the deed is done.
    """
    ring = ring_of(engine)
    match deed:
        case "write":
            done = 100 in read_all(ring).values()
        case "empty":
            done = not read_all(ring)
        case "update":
            done = 50.0 in ring.tree.priorities()
        case "alpha":
            done = ring.tree.alpha == 2.0
        case _:
            done = False
    assert done or not decided
    if deed == "abort":
        there = read_all(ring)
        assert set(range(3, 11)) - {3, 4, 5} <= set(there.values()) <= set(range(3, 11))
        assert engine.check().ok
        return False
    require_done_or_not(engine, deed, None if deed == "update" else done)
    return done


@pytest.mark.product(few=2)
@pytest.mark.parametrize("point", ["write.mark", "write.commit", "empty.word", "update.leaf"])
def test_every_state_that_a_kill_of_a_mender_can_leave_is_mended(
    tmp_path: Path, point: str
) -> None:
    assert states_of_a_mender(tmp_path / "buffer", point, after=1) >= 5


def states_of_a_mender(path: Path, point: str, after: int, kind: str = "rows") -> int:
    """Follows a process that repairs after a victim, and repairs each state that it passes."""
    deed = point.split(".")[0]
    with prepare(path, kind) as survivor:
        if not ends_at(path, deed, point, after):
            return 0
        states = walk_of_a_mender(path).states
        for state in states:
            put_back(state)
            survivor.seat.reap_dead()
            require_done_or_not(survivor, deed, is_done(deed, point))
            assert len(survivor.clients()) == 1
    return len(states)
