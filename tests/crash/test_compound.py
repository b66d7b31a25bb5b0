"""A process that repairs after a death is killed as well, at each step and after each death.

The bytes that the first victim left are restored before each second victim, so that each pair needs
only one new process. The default run takes every fourth first death, and `--full` takes all of
them. Each first death is followed by every ninth second death, which are other ones each time. The
campaign takes every third second death.
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
#: Points that are passed only without a schema, or if the bytes are not trusted.
NEVER = (
    *("recover.entries", "recover.dropped", "recover.head", "recover.count", "recover.reserved"),
)
#: Points of the first process that opens a directory that is not in use.
ALONE = (
    *(point for point in python_points("recover") if point not in NEVER),
    *("superblock.half", "superblock.stored", "mutex.cleared", "mutex.initialised"),
    *(*native_points("reap"), *JOIN),
)
STRIDE = 9
#: The stride and STRIDE have no common factor, so that all second deaths follow some first death.
FIRST_STRIDE = 4
FIRST_DEATHS = [
    pytest.param(*pair, marks=() if at % FIRST_STRIDE == 0 else pytest.mark.full)
    for at, pair in enumerate(PAIRS)
]


class Image:
    """The bytes of all files of a buffer, which can be written back to the same files."""

    def __init__(self, path: Path) -> None:
        self.files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def put_back(self) -> None:
        for file, content in self.files.items():
            with open(file, "r+b") as target:
                target.write(content)


def some(points: tuple[str, ...], first: int, stride: int) -> Iterator[str]:
    """Yields every ``stride``-th point, with another offset for each first death."""
    return (point for at, point in enumerate(points) if (at + first) % stride == 0)


def two_deaths_beside_a_survivor(
    path: Path, deed: str, point: str, stride: int, kind: str = "rows"
) -> int:
    """Repairs beside a survivor; returns the number of second victims that were killed."""
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
    """Repairs with no client left; returns the number of second victims that were killed."""
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
