"""Which cases of a product the default run takes; `pytest --full` takes all of them.

A product is a test that is marked ``product``. Of its cases the default run takes a few that meet
each value of each parameter once at least; a dataclass counts as its fields. Where values matter
together, the marker names them: with ``product("kind point")`` each kind is also met at each point.
Where these are still too many, the marker says how many it takes: ``product(few=2)``. They are
those that meet most. Which cases these are follows from the cases alone, so that every run takes
the same ones.

A seed is no value of a product that has to be met: of `seeds` the default run takes the first few.
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
    """Names of the cases that the default run takes, in order.

    Args:
        cases: names, and the values of the parameters by their names.
        together: names of parameters, separated by blanks, whose combinations have to be met.
        few: at most so many, and what they do not meet only `--full` does.
    """
    groups = [names.split() for names in together]
    needs = {name: _needs(_values(case), groups) for name, case in cases.items()}
    meets: dict[Need, list[str]] = {}
    for name, some in needs.items():
        for need in some:
            meets.setdefault(need, []).append(name)
    missing, taken = set(meets), set()
    # What few cases meet comes first. Of these cases the one that meets most of what is missing is
    # taken; where several do, a hash decides, so that what is named first is not taken each time.
    for need in sorted(meets, key=lambda need: len(meets[need])):
        if need in missing and len(taken) != few:
            best = max(
                meets[need], key=lambda name: (len(needs[name].keys() & missing), _hash(name))
            )
            taken.add(best)
            missing -= needs[best].keys()
    return [name for name in cases if name in taken]


def seeds(few: int, every: int) -> list[object]:
    """Values for a parameter: of ``every`` seed the default run takes ``few``."""
    return [
        pytest.param(seed, marks=pytest.mark.full if seed >= few else ()) for seed in range(every)
    ]


def _needs(values: dict[str, Hashable], groups: list[list[str]]) -> dict[Need, None]:
    """What the case meets: its values, and the combinations of them that are asked for.

    In order, where a set has another one in each process, and so would the cases be.
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
    """The value with its type, as 1 is not True here; one that has no hash is like no other."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _hash(name: str) -> int:
    return zlib.crc32(name.encode())
