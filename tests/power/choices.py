"""Chooses among the states that a power cut may leave: the worst by design, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tests.power.disk import PAGE, SECTOR, Disk, Name, torn

Pages = Callable[[str, int], bool]


@dataclass(frozen=True)
class Designed:
    """Chooses by rule whether each page, size and name is new or old."""

    name: str
    new_page: Pages
    new_names: bool

    def page(self, role: str, number: int, versions: list[bytes]) -> bytes:
        return versions[-1 if self.new_page(role, number) else 0]

    def size(self, role: str, sizes: list[int]) -> int:
        return sizes[-1 if self.new_page(role, -1) else 0]

    def happened(self, operation: Mapping[Name, int | None]) -> bool:
        return self.new_names


@dataclass(frozen=True)
class Between:
    """Chooses an intermediate version of one page, and the newest version of everything else."""

    one: tuple[str, int]
    version: int

    @property
    def name(self) -> str:
        return f"only {self.one} is version {self.version}"

    def page(self, role: str, number: int, versions: list[bytes]) -> bytes:
        return versions[self.version if (role, number) == self.one else -1]

    def size(self, role: str, sizes: list[int]) -> int:
        return sizes[-1]

    def happened(self, operation: Mapping[Name, int | None]) -> bool:
        return True


class Random:
    """Chooses at random. One page in ten is torn between two versions."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._bias = self._random.choice([0.1, 0.5, 0.9])

    def page(self, role: str, number: int, versions: list[bytes]) -> bytes:
        one = versions[self._any(len(versions))]
        if self._random.random() < 0.1:
            other = versions[self._any(len(versions))]
            return torn(one, other, int(self._random.integers(1, PAGE // SECTOR)))
        return one

    def size(self, role: str, sizes: list[int]) -> int:
        return sizes[self._any(len(sizes))]

    def happened(self, operation: Mapping[Name, int | None]) -> bool:
        return bool(self._random.random() < self._bias)

    def _any(self, count: int) -> int:
        """Draws a number, more often the newest or the oldest than one in between."""
        if self._random.random() < 0.5:
            return count - 1 if self._random.random() < self._bias else 0
        return int(self._random.integers(count))


def _control(role: str, number: int) -> bool:
    return role in ("control", "slots")


def _superblock(role: str, number: int) -> bool:
    return role == "control" and number < 2


def designed(disk: Disk) -> Iterator[Designed | Between]:
    """Yields the most effective choices, such as all old, all new, and one against the rest."""
    yield Designed("all old", lambda *_: False, False)
    yield Designed("all new", lambda *_: True, True)
    yield Designed("names without content", lambda *_: False, True)
    yield Designed("content without names", lambda *_: True, False)
    yield Designed("control new, payload old", _control, True)
    yield Designed("control old, payload new", lambda *at: not _control(*at), True)
    yield Designed("superblock new, the rest old", _superblock, True)
    yield Designed("superblock old, the rest new", lambda *at: not _superblock(*at), True)
    for path, file in disk.newest().items():
        role = path.rpartition("/")[2]
        for number in disk.files[file].older if file in disk.files else ():
            one = (role, number)
            yield Designed(f"only {one} new", lambda *at, one=one: at == one, True)  # type: ignore[misc]
            yield Designed(f"only {one} old", lambda *at, one=one: at != one, True)  # type: ignore[misc]
            for version in range(1, len(disk.files[file].older[number]))[-4:]:
                yield Between(one, version)
