"""Compares docs/torchrl.md with TorchRL, for every public name of TorchRL's family.

The tables "Names" and "Methods" are read from the page. Each difference that they list must exist,
and each difference that exists must be listed. A new argument on either side fails here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorClass

from tests.compat.family import MODULES, ours, theirs

DOCUMENT = Path(__file__).parents[2] / "docs" / "torchrl.md"
STATES = {"same", "better", "not there"}

# How an argument of TorchRL may differ, in the words of the tables: `name`: one of these.
NOT_ACCEPTED = "not accepted"
DEFAULT_ONLY = "default only"


class Plain(TensorClass["nocast"]):  # type: ignore[type-arg]
    """An empty tensorclass, with the attributes that tensordict adds to any class."""


@dataclass(frozen=True)
class Row:
    """A row of a table: the names in its first cell, its state, and the arguments that differ."""

    owner: str
    names: tuple[str, ...]
    state: str
    differences: dict[str, str]
    line: int

    def __str__(self) -> str:
        return f"docs/torchrl.md:{self.line}"


def rows(heading: str, columns: list[str]) -> list[Row]:
    """Returns the table below a heading, whose first row must be ``columns``."""
    lines = DOCUMENT.read_text().splitlines()
    at = lines.index(heading)
    found: list[Row] = []
    for number, line in enumerate(lines[at + 1 :], at + 2):
        if line.startswith("#"):
            break
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells == columns or set(cells[0]) <= set("-:"):
            continue
        assert len(cells) == len(columns), f"docs/torchrl.md:{number}: {len(cells)} cells"
        cell = dict(zip(columns, cells, strict=True))
        differences = dict(
            re.findall(
                r"`(\*{0,2}\w+)`: ([^;]+)", cell["arguments that differ"].replace("\\|", "|")
            )
        )
        # the class of a method that several classes have
        owner = re.findall(r"`(\w+)`", cell.get("class", ""))
        names = tuple(re.findall(r"`(\w+)`", cell.get("name", cell.get("method", ""))))
        assert names, f"docs/torchrl.md:{number}: no name in backticks"
        found += [Row(one, names, cell["here"], differences, number) for one in owner or [""]]
    assert found, f"no table below {heading!r}"
    return found


NAMES = rows("## Names", ["name", "here", "arguments that differ", "remarks"])
METHODS = rows("## Methods", ["class", "method", "here", "arguments that differ", "remarks"])
ROW_OF = {name: row for row in NAMES for name in row.names}
METHOD_ROW = {(row.owner, name): row for row in METHODS for name in row.names}
THERE = [name for name, row in ROW_OF.items() if row.state != "not there"]


def family_of_torchrl() -> set[str]:
    """Returns every public name: from ``__all__`` if a module has one, else all its definitions."""
    names: set[str] = set()
    for module in MODULES:
        if hasattr(module, "__all__"):
            names.update(module.__all__)
        else:
            names.update(
                name
                for name, value in vars(module).items()
                if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
            )
    return names


def mro(cls: type) -> list[type]:
    """Returns the base classes of ``cls`` in the family, without those of torch and Python."""
    return [one for one in cls.__mro__ if one.__module__.split(".")[0] in ("torchrl", "shmbuffer")]


@dataclass(frozen=True)
class Arguments:
    """The accepted arguments with defaults; ``rest`` is True if others can be passed by name."""

    named: dict[str, Any]
    rest: bool


def constructor(cls: type) -> Arguments:
    """Returns the arguments of a constructor, and of those that receive its ``**kwargs``."""
    named: dict[str, Any] = {}
    if issubclass(cls, tuple):
        return arguments(cls.__new__)
    for one in mro(cls):
        init = vars(one).get("__init__")
        if init is None:
            continue
        if not inspect.isfunction(init):  # a class in C++
            return Arguments({}, True)
        own = arguments(init)
        for name, default in own.named.items():
            named.setdefault(name, default)
        if not own.rest:
            return Arguments(named, False)
        if any(name.startswith("*") for name in own.named):
            return Arguments(named, True)  # it passes on everything, and not only to its base class
    return Arguments(named, True)


def arguments(function: Callable[..., Any]) -> Arguments:
    """Returns the arguments of one function, without ``self``."""
    named: dict[str, Any] = {}
    rest = False
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 and parameter.name in ("self", "cls", "_cls"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = True
        elif parameter.kind is parameter.VAR_POSITIONAL:
            named[f"*{parameter.name}"] = inspect.Parameter.empty
        else:
            named[parameter.name] = parameter.default
    return Arguments(named, rest)


def differences(mine: Arguments, theirs_: Arguments) -> dict[str, str]:
    """Returns how each argument of TorchRL differs here, in the words of the tables."""
    found: dict[str, str] = {}
    for name, default in theirs_.named.items():
        if name.startswith("*"):
            if not mine.named:
                found[name] = NOT_ACCEPTED
        elif name not in mine.named:
            found[name] = DEFAULT_ONLY if mine.rest else NOT_ACCEPTED
        elif not _same_default(mine.named[name], default):
            found[name] = _default_in_words(mine.named[name])
    for name, default in mine.named.items():
        ours_alone = name not in theirs_.named and not theirs_.rest and not name.startswith("*")
        if ours_alone and default is inspect.Parameter.empty:
            found[name] = "required"
    return found


def _same_default(mine: Any, theirs_: Any) -> bool:
    return bool(mine is theirs_ or mine == theirs_) or (
        isinstance(mine, type) and isinstance(theirs_, type) and mine.__name__ == theirs_.__name__
    )


def _default_in_words(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else f"default `{value!r}`"


def introduced(cls: type) -> Iterator[tuple[str, str, Any]]:
    """Yields the public attributes of a TorchRL class as (introducing class, name, value)."""
    family = mro(cls)
    generated = dir(Plain) if issubclass(cls, TensorClass) else []  # every tensorclass has these
    for name in dir(cls):
        if name.startswith("_") or name in generated:
            continue
        homes = [one for one in family if name in vars(one)]
        if homes and homes[-1].__name__ in ROW_OF:
            yield homes[-1].__name__, name, inspect.getattr_static(cls, name)


def attribute_of(cls: type, name: str) -> Any:
    """Returns an attribute as it is defined, after following an alias."""
    found = inspect.getattr_static(cls, name, None)
    return getattr(cls, name) if type(found).__module__.startswith("shmbuffer") else found


def function_in(value: Any) -> Callable[..., Any] | None:
    """Returns the function of a method of any kind, or None for a property or a constant."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return value if inspect.isfunction(value) else None


# -- names ----------------------------------------------------------------------------------------


def test_every_public_name_of_torchrl_has_a_row_and_every_row_a_name() -> None:
    assert set(ROW_OF) == family_of_torchrl()


def test_no_name_stands_twice() -> None:
    named = [name for row in NAMES for name in row.names]
    assert len(named) == len(set(named))
    methods = [(row.owner, name) for row in METHODS for name in row.names]
    assert len(methods) == len(set(methods))


def test_a_row_says_one_of_three_states() -> None:
    for row in NAMES + METHODS:
        assert row.state in STATES, f"{row}: {row.state!r}"


def test_a_name_that_is_there_comes_in_by_the_front_door() -> None:
    for name, row in ROW_OF.items():
        assert (name in ours.torchrl.__all__) == (row.state != "not there"), f"{row}: {name}"


@pytest.mark.parametrize("name", THERE)
def test_a_constructor_takes_torchrl_s_arguments_but_for_those_in_its_row(name: str) -> None:
    mine, theirs_ = getattr(ours, name), getattr(theirs, name)
    if not callable(theirs_):
        assert mine == theirs_
        return
    of = constructor if inspect.isclass(theirs_) else arguments
    found = differences(of(mine), of(theirs_))
    assert ROW_OF[name].differences == found, str(ROW_OF[name])


REQUIRED = {
    "HERReplayBuffer": {"reward_fn": len},
    "PrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.9},
    "TensorDictPrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.9},
}


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name in THERE
        for argument, how in ROW_OF[name].differences.items()
        if how == DEFAULT_ONLY and name.endswith("ReplayBuffer")
    ],
)
def test_default_only_takes_torchrl_s_default_and_refuses_the_rest_by_name(
    name: str, argument: str
) -> None:
    cls, required = getattr(ours, name), REQUIRED.get(name, {})
    default = constructor(getattr(theirs, name)).named[argument]
    cls(**required, **{argument: default})
    with pytest.raises(NotImplementedError, match=argument):
        cls(**required, **{argument: "something else"})


# -- methods --------------------------------------------------------------------------------------


def test_every_row_of_the_methods_is_of_a_class_that_has_it() -> None:
    for row in METHODS:
        for name in row.names:
            assert hasattr(getattr(theirs, row.owner), name), f"{row}: {row.owner}.{name}"


@pytest.mark.parametrize("name", THERE)
def test_every_method_of_torchrl_s_class_has_a_row_that_is_right(name: str) -> None:
    mine, theirs_ = getattr(ours, name), getattr(theirs, name)
    if not inspect.isclass(theirs_):
        return
    wrong: list[str] = []
    for home, attribute, value in introduced(theirs_):
        row = METHOD_ROW.get((name, attribute)) or METHOD_ROW.get((home, attribute))
        if row is None:
            wrong.append(f"{home}.{attribute} has no row")
            continue
        if hasattr(mine, attribute) != (row.state != "not there"):
            wrong.append(f"{row}: {name}.{attribute} is said to be {row.state}")
            continue
        called = function_in(value)
        own = function_in(attribute_of(mine, attribute))
        if called is None or row.state == "not there":
            continue
        if own is None:
            wrong.append(f"{row}: {name}.{attribute} is a method in TorchRL and none here")
            continue
        found = differences(arguments(own), arguments(called))
        if found != row.differences:
            wrong.append(f"{row}: {name}.{attribute} differs in {found}, said is {row.differences}")
    assert not wrong, "\n".join(wrong)
