"""Selects the cases of products for the default run; `pytest --full` takes all of them.

A product is a test that is marked ``product``. The default run takes a few of its cases, so that
each value of each parameter occurs at least once. A dataclass counts as its fields. If combinations
of values matter, the marker names their parameters: with ``product("kind point")`` each kind also
occurs at each point. If these are still too many cases, the marker limits their number:
``product(few=2)``. The cases with the most values are then taken. The selection depends only on the
cases, so that it is the same in every run.

Seeds are not values that must occur: of `seeds` the default run takes the first few.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Hashable, Iterable, Mapping

import pytest

Case = Mapping[str, object]
Need = tuple[Hashable, ...]


def sample(
    cases: Mapping[str, Case], together: Iterable[str] = (), few: int | None = None
) -> list[str]:
    """Returns the names of the cases that the default run takes, in order.

    Args:
        cases: the names of the cases, with the values of their parameters by name.
        together: names of parameters, separated by blanks, whose combinations must occur.
        few: the largest number of cases; only `--full` covers what they omit.
    """
    groups = [names.split() for names in together]
    needs = {name: _needs(_values(case), groups) for name, case in cases.items()}
    meets: dict[Need, list[str]] = {}
    for name, some in needs.items():
        for need in some:
            meets.setdefault(need, []).append(name)
    missing, taken = set(meets), set()
    # Rare values come first. The case with the most missing values is taken. A hash decides between
    # equal cases, so that the first one is not taken each time.
    for need in sorted(meets, key=lambda need: len(meets[need])):
        if need in missing and len(taken) != few:
            best = max(
                meets[need], key=lambda name: (len(needs[name].keys() & missing), _hash(name))
            )
            taken.add(best)
            missing -= needs[best].keys()
    return [name for name in cases if name in taken]


def seeds(few: int, every: int) -> list[object]:
    """Returns values of a seed parameter:

    ``every`` seeds, of which the default run takes ``few``.
    """
    return [
        pytest.param(seed, marks=pytest.mark.full if seed >= few else ()) for seed in range(every)
    ]


def _needs(values: dict[str, Hashable], groups: list[list[str]]) -> dict[Need, None]:
    """Returns the values of the case and the requested combinations of them.

    They are ordered, because the order of a set would differ between processes.
    """
    combined = [tuple((name, values[name]) for name in names if name in values) for names in groups]
    return dict.fromkeys([*values.items(), *combined])


def _values(case: Case) -> dict[str, Hashable]:
    found: dict[str, Hashable] = {}
    for name, value in case.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            found |= {part: _comparable(one) for part, one in parts.items()}
        else:
            found[name] = _comparable(value)
    return found


def _comparable(value: object) -> Hashable:
    """Returns the value with its type, because 1 is not True here; unhashable values are unique."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _hash(name: str) -> int:
    return zlib.crc32(name.encode())
