"""A power cut during a save of a checkpoint leaves the previous save or the new one, complete.

Once `dumps` has returned, it is the new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer.saves import publication
from tests.power.choices import Random, designed
from tests.power.disk import Disk
from tests.power.machine import Machine
from tests.power.recorder import Recording, Reporter, apply, record
from tests.power.simulation import apart, folder
from tests.replay.test_checkpoint_crash import buffer, new, old, state

pytestmark = [pytest.mark.crash, pytest.mark.slow]


@pytest.mark.product(few=2)
@pytest.mark.parametrize("layout", ["shmbuffer", "torchrl"])
@pytest.mark.parametrize("there", ["nothing", "a save", "a save, without exchange"])
def test_a_save_is_whole_after_a_power_cut(there: str, layout: str) -> None:
    figures = apart(lambda: cut_a_save(there, layout, seed=1))
    assert figures["images"] > 70
    assert figures["images of the new save"] > 3


def cut_a_save(there: str, layout: str, seed: int) -> dict[str, int]:
    """Saves over an existing save, and loads the saves that power cuts leave."""
    saver, states = new(), {"old": state(old()), "new": state(new())}
    with folder() as (tree, attic):
        where = tree / "runs" / "run"
        if there != "nothing":
            old().dumps(where, layout=layout)

        def save(reporter: Reporter) -> None:
            exchange = (lambda *_: False) if "without" in there else publication.exchange
            publication.exchange = reporter.told(exchange, "exchange")  # type: ignore[assignment]
            saver.dumps(where, layout=layout)
            reporter.mark("saved")

        recording = record(tree, attic, save)
        machine = Machine(tree, attic, "rows")
        return _cut(recording, machine, where, states, there == "nothing", seed)


def _cut(
    recording: Recording,
    machine: Machine,
    where: Path,
    states: dict[str, Any],
    fresh: bool,
    seed: int,
) -> dict[str, int]:
    random = np.random.default_rng(seed)
    figures = {"images": 0, "images of the new save": 0}
    disk, saved, changed = recording.before, False, True
    for event in recording.events:
        apply(disk, event)
        saved = saved or event.kind == "mark"
        changed = changed or event.kind in ("names", "synced", "page", "size", "mark")
        if event.kind != "step" or not changed:
            continue
        changed = False
        for choice in _choices(disk, random):
            machine.place(disk.cut(choice))
            found = _loaded(where, states)
            allowed = {"new"} if saved else {"nothing" if fresh else "old", "new"}
            assert found in allowed, f"{event.value}: {choice.name}, seed {seed}: {found}"
            figures["images"] += 1
            figures["images of the new save"] += found == "new"
    return figures


def _choices(disk: Disk, random: np.random.Generator) -> list[Any]:
    worst = list(designed(disk))
    return [
        worst[int(random.integers(len(worst)))],
        Random(int(random.integers(2**63))),
    ]


def _loaded(where: Path, states: dict[str, Any]) -> str:
    with buffer() as loaded:
        try:
            loaded.loads(where)
        except FileNotFoundError:
            return "nothing"
        found = state(loaded)
    return next((name for name, known in states.items() if known == found), "neither")
