"""Recovery is killed at every step, in buffers whose bytes are trusted and in others."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shmbuffer.memory import Engine
from tests.crash.harness import (
    arm_and_open,
    ended,
    fork,
    native_points,
    python_points,
    read_all,
    require_sound,
    require_usable,
    schema,
    settings,
    succeeds,
    victim,
    write,
)
from tests.crash.situations import PASSINGS
from tests.kit.rings import path_of, ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

#: Points that are passed without a schema, or with records, weights, or a save to continue.
OTHER_FILES = ("recover.entries", "recover.misplaced", "recover.weights", "recover.reserved")
#: Points that are passed only if bytes of another boot are not trusted.
UNTRUSTED = ("recover.dropped", "recover.head", "recover.count")
#: Points that are passed if the bytes were verified and belong to this boot.
ADOPTED = ("recover.seen", "recover.superblock", "recover.noted", "recover.ready")
REAPING = ("reap.leaf", "reap.word", "reap.freed")
RECOVERY = [
    *(point for point in python_points("recover") if point not in (*OTHER_FILES, *UNTRUSTED)),
    *("superblock.half", "superblock.stored"),
    *REAPING,
]


@pytest.mark.parametrize("write_point", ["write.mark", "write.copy", "write.commit"])
@pytest.mark.parametrize("point", RECOVERY)
def test_a_recovery_that_dies_starts_again(survivor: Engine, point: str, write_point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(6))
    survivor.close()
    victim(path, write_point)
    passing = 0
    while ended(fork(lambda after=passing: arm_and_open(path, point, after))) == -signal.SIGKILL:
        passing += 1
    assert passing > 0

    def recovers() -> None:
        with Engine.open(path, None) as found:
            there = set(read_all(ring_of(found)).values())
            if write_point == "write.commit":
                assert there == {100, 101, 102, 103, 2, 3, 4, 5}
            else:
                assert there >= {2, 3, 4, 5}
                assert not there & {100, 101, 102, 103}
            require_sound(found)
            require_usable(ring_of(found), 999)

    succeeds(recovers)


def damaged_after_a_reboot(survivor: Engine, *, header: bool = False) -> Path:
    """Writes six items, damages the fourth, and gives the fifth an impossible priority."""
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(6))
    survivor.flush()
    survivor.seat.control.write(replace(survivor.superblock, boot_id=bytes(16)))
    file, at = path / "number.memmap", 3 * 8
    if ring.records is not None:
        position = int(ring.records.extents["position"][3])
        file, at = path / ".shmbuffer/records", position + (8 if header else 100)
    raw = ring.schema.sections["raw"] + 4 * 8
    survivor.close()
    for name, where, content in (
        (file, at, b"\xff"),
        (path / ".shmbuffer/slots", raw, np.float64(-1.0).tobytes()),
    ):
        with open(name, "r+b") as damaged:
            damaged.seek(where)
            damaged.write(content)
    return path


def recovers_from_the_reboot(path: Path) -> None:
    with Engine.open(path, None) as found:
        assert found.report is not None
        assert found.report.reason == "reboot"
        ring = ring_of(found)
        assert sorted(read_all(ring).values()) == [0, 1, 2, 4, 5]
        assert ring.tree.priorities()[[0, 1, 2, 5]].tolist() == [1.0, 2.0, 3.0, 6.0]
        require_sound(found)
        require_usable(ring, 999)


def test_an_interrupted_recovery_from_a_reboot_still_distrusts_the_bytes(survivor: Engine) -> None:
    path = damaged_after_a_reboot(survivor)
    for point in [*RECOVERY, *UNTRUSTED]:
        if point not in (*ADOPTED, "recover.live", *REAPING):
            assert ended(fork(lambda point=point: arm_and_open(path, point, 0))) == -signal.SIGKILL
    succeeds(lambda: recovers_from_the_reboot(path))


def recovery_dies_at(path: Path, point: str) -> int:
    """Kills recoveries at several passings of the point. Each finds what the last one left."""
    kills = 0
    for after in PASSINGS:
        if ended(fork(partial(arm_and_open, path, point, after))) == 0:
            break
        kills += 1
    return kills


@pytest.mark.parametrize(
    "point",
    [
        *UNTRUSTED,
        *native_points("leaves"),
        *native_points("tree"),
        *("mutex.cleared", "mutex.initialised"),
        *("recover.misplaced", "relink.header", "relink.tail", "relink.head"),
    ],
)
def test_a_recovery_from_a_reboot_starts_again_from_any_step(survivor: Engine, point: str) -> None:
    rows = survivor.settings.record_bytes == 0
    path = damaged_after_a_reboot(survivor)
    kills = recovery_dies_at(path, point)
    assert bool(kills) != (rows and point.startswith(("relink.", "recover.misplaced")))
    recovers(path, [0, 1, 2, 4, 5])


def recovers(path: Path, left: list[int]) -> None:
    with Engine.open(path, None) as found:
        assert sorted(read_all(ring_of(found)).values()) == left
        require_sound(found)
        require_usable(ring_of(found), 999)


def test_a_recovery_that_refuses_a_record_starts_again(tmp_path: Path) -> None:
    """Without checksums, the header shows the damage."""
    unchecked = replace(settings("records"), checksum=False)
    with Engine.open(tmp_path / "buffer", unchecked) as engine:
        engine.define(schema("records"))
        path = damaged_after_a_reboot(engine, header=True)
    assert recovery_dies_at(path, "recover.misplaced") == 1
    recovers(path, [0, 1, 2, 4, 5])
