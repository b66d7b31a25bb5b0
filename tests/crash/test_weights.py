"""A publisher is killed at every step: the old weights stay, and the next publish works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from shmbuffer.memory.format import layout
from tests.crash.harness import (
    arm_and_open,
    dies,
    ended,
    fork,
    native_points,
    python_points,
    settings,
)
from tests.kit.rings import path_of
from tests.memory.carried import newest, number_in, publish
from tests.memory.test_weights import torn

pytestmark = pytest.mark.crash

READING = ("weights.looked", "weights.taken")
WRITING = [point for point in native_points("weights") if point not in READING]
#: Points of the first publish, in order. `file.*` are passed for every file that is created.
MAKING = [
    *("file.made", "file.mode", "file.sized", "weights.head", "file.renamed", "weights.named"),
    *WRITING,
]


@pytest.fixture
def survivor(tmp_path: Path) -> Iterator[Engine]:
    """A living client that has published no weights."""
    with Engine.open(tmp_path / "buffer", settings("rows")) as engine:
        yield engine


def _publish(engine: Engine) -> None:
    publish(engine, 9)


def test_the_points_of_a_publish_are_these() -> None:
    assert python_points("weights") == ["weights.head", "weights.named"]
    assert WRITING[-1] == "weights.published"


@pytest.mark.parametrize("last", [1, 2])  # the publish writes to this copy
@pytest.mark.parametrize(
    ("point", "after"), [*((point, 0) for point in WRITING), ("weights.copied", 3)]
)
def test_weights_are_those_before_or_those_after(
    survivor: Engine, point: str, after: int, last: int
) -> None:
    for number in range(1, last + 1):
        publish(survivor, number)
    assert dies(path_of(survivor), point, _publish, after)
    done = point == "weights.published"
    assert number_in(newest(survivor)) == (9 if done else last)
    assert (newest(survivor, last) is not None) == done
    with Engine.open(path_of(survivor), None) as other:
        assert number_in(newest(other)) == (9 if done else last)
        assert publish(other, 4) == last + 1 + done
    assert number_in(newest(survivor, last)) == 4


@pytest.mark.parametrize("point", MAKING)
def test_a_first_publish_that_dies_is_no_publish(survivor: Engine, point: str) -> None:
    assert dies(path_of(survivor), point, _publish)
    done = point == "weights.published"
    assert (newest(survivor) is not None) == done
    assert publish(survivor, 4) == 1 + done
    assert number_in(newest(survivor)) == 4
    path = path_of(survivor)
    assert survivor.cleanup()
    assert not path.exists()


@pytest.mark.product(few=5)
@pytest.mark.parametrize("point", MAKING)
def test_what_a_first_publish_has_left_goes_with_the_buffer(survivor: Engine, point: str) -> None:
    path = path_of(survivor)
    assert dies(path, point, _publish)
    assert survivor.cleanup()
    assert not path.exists()


@pytest.mark.parametrize("point", WRITING)
def test_weights_are_there_after_everybody_was_killed(survivor: Engine, point: str) -> None:
    path = path_of(survivor)
    publish(survivor, 1)
    survivor.close()
    assert dies(path, point, _publish)
    with Engine.open(path, None) as engine:
        assert engine.report is not None
        assert engine.report.reason == "no client alive"
        done = point == "weights.published"
        assert number_in(newest(engine)) == (9 if done else 1)
        assert publish(engine, 2) == 2 + done


@pytest.mark.parametrize("point", WRITING)
def test_a_publisher_that_dies_after_a_power_cut_leaves_the_version_that_was_whole(
    survivor: Engine, point: str
) -> None:
    path = path_of(survivor)
    publish(survivor, 1)
    publish(survivor, 2)
    survivor.close()
    torn(path, 2)
    assert dies(path, point, _publish)
    with Engine.open(path, None) as engine:
        done = point == "weights.published"
        assert number_in(newest(engine)) == (9 if done else 1)
        assert publish(engine, 3) == 4 + done


def test_the_lock_of_a_killed_publisher_is_free_though_its_child_lives(survivor: Engine) -> None:
    """The child has inherited the map of its parent, and a map keeps a lock on its file."""
    hear, say = os.pipe()

    def victim() -> None:
        engine = Engine.open(path_of(survivor), None)
        (told, tell), (never, _) = os.pipe(), os.pipe()
        _core.arm("weights.copied", "pause", notify_fd=tell, wait_fd=never)
        threading.Thread(target=_publish, args=(engine,), daemon=True).start()
        os.read(told, 1)
        forked, ready = os.pipe()
        if os.fork():
            os.read(forked, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(ready, b".")
        os.read(hear, 1)

    assert ended(fork(victim)) == -signal.SIGKILL
    try:
        assert publish(survivor, 4, timeout=0) == 1
    finally:
        os.write(say, b".")
        os.close(hear)
        os.close(say)


@pytest.mark.parametrize("point", READING)
def test_a_reader_that_dies_changes_nothing(survivor: Engine, point: str) -> None:
    publish(survivor, 1)
    before = (path_of(survivor) / layout.WEIGHTS).read_bytes()
    assert dies(path_of(survivor), point, lambda engine: newest(engine) and None)
    assert (path_of(survivor) / layout.WEIGHTS).read_bytes() == before
    assert publish(survivor, 2) == 2


@pytest.mark.parametrize("after", [0, 1])
def test_a_recovery_that_dies_taking_torn_weights_out_is_repeated(
    survivor: Engine, after: int
) -> None:
    path = path_of(survivor)
    for number in (1, 2, 3):
        publish(survivor, number)
    survivor.close()
    torn(path, 2, 3)
    assert ended(fork(lambda: arm_and_open(path, "recover.weights", after))) == -signal.SIGKILL
    _core.disarm()
    with Engine.open(path, None) as engine:
        assert newest(engine) is None
        assert publish(engine, 5) == 5
        assert number_in(newest(engine)) == 5
