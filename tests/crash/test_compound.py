"""A process that repairs after a death is killed too: at each step, after each death.

The bytes that the first victim left are put back before each second one, so that a pair costs one
process. The default run takes every fourth first death, `--full` all of them. Each is followed by
every ninth second death, other ones each time, and in the campaign by every third.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer.memory import Engine
from tests.crash.deeds import (
    LEAVES,
    MUTEX,
    PAIRS,
    TREE,
    ends_at,
    is_done,
    prepare,
    require_done_or_not,
)
from tests.crash.harness import mends, native_points, python_points, require_usable
from tests.kit.rings import ring_of

pytestmark = pytest.mark.crash

JOIN = (*python_points("join"), "count.added", *MUTEX, *TREE, *LEAVES)
#: Points of a process that opens a directory in use, and repairs it.
BESIDE = (*native_points("repair"), *native_points("reap"), *JOIN)
#: Where there is no schema, or bytes are not believed.
NEVER = (
    *("recover.entries", "recover.dropped", "recover.head", "recover.count", "recover.reserved"),
)
#: Points of the first process to open a directory that nobody uses.
ALONE = (
    *(point for point in python_points("recover") if point not in NEVER),
    *("superblock.half", "superblock.stored", "mutex.cleared", "mutex.initialised"),
    *(*native_points("reap"), *JOIN),
)
STRIDE = 9
#: No multiple of three, so that every second death follows one of the first ones.
FIRST_STRIDE = 4
FIRST_DEATHS = [
    pytest.param(*pair, marks=() if at % FIRST_STRIDE == 0 else pytest.mark.full)
    for at, pair in enumerate(PAIRS)
]


class Image:
    """The bytes of all files of a buffer, to be put back in the same files."""

    def __init__(self, path: Path) -> None:
        self.files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def put_back(self) -> None:
        for file, content in self.files.items():
            with open(file, "r+b") as target:
                target.write(content)


def some(points: tuple[str, ...], first: int, stride: int) -> Iterator[str]:
    """Every ``stride``-th of the points, another part of them for each of the first ones."""
    return (point for at, point in enumerate(points) if (at + first) % stride == 0)


def two_deaths_beside_a_survivor(
    path: Path, deed: str, point: str, stride: int, kind: str = "rows"
) -> int:
    """How many second victims were killed."""
    kills = 0
    with prepare(path, kind) as survivor:
        assert ends_at(path, deed, point)
        image = Image(path)
        for second in some(BESIDE, PAIRS.index((deed, point)), stride):
            image.put_back()
            kills += mends(path, second)
            survivor.seat.reap_dead()
            require_done_or_not(survivor, deed, is_done(deed, point))
            assert len(survivor.clients()) == 1
        require_usable(ring_of(survivor), 999)
    return kills


def two_deaths_and_nobody_left(
    path: Path, deed: str, point: str, stride: int, kind: str = "rows"
) -> int:
    """How many second victims were killed."""
    kills = 0
    prepare(path, kind).close()
    assert ends_at(path, deed, point)
    image = Image(path)
    for second in some(ALONE, PAIRS.index((deed, point)), stride):
        image.put_back()
        kills += mends(path, second)
        with Engine.open(path, None) as found:
            require_done_or_not(found, deed, is_done(deed, point))
            assert len(found.clients()) == 1
    return kills


@pytest.mark.product
@pytest.mark.parametrize(("deed", "point"), FIRST_DEATHS)
def test_a_process_that_dies_repairing_is_followed_by_another(
    tmp_path: Path, deed: str, point: str
) -> None:
    assert two_deaths_beside_a_survivor(tmp_path / "buffer", deed, point, STRIDE) >= 0


@pytest.mark.product(few=4)
@pytest.mark.parametrize(("deed", "point"), FIRST_DEATHS)
def test_a_process_that_dies_recovering_is_followed_by_another(
    tmp_path: Path, deed: str, point: str
) -> None:
    assert two_deaths_and_nobody_left(tmp_path / "buffer", deed, point, STRIDE) > 0


def test_every_second_death_follows_one_of_the_first() -> None:
    firsts = range(0, len(PAIRS), FIRST_STRIDE)
    for points in (BESIDE, ALONE):
        assert {point for first in firsts for point in some(points, first, STRIDE)} == set(points)
    assert {PAIRS[first][0] for first in firsts} == {deed for deed, _ in PAIRS}
