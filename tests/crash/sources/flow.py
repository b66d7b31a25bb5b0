"""Finds stores to shared memory that follow one another without a crash point in between.

The readers of C and of Python turn a function into steps, and `Reading` follows every path through
the steps. A step is one of

    Store(what, where)          changes shared memory
    Point()                     a crash point
    Call(name)                  of a function that was read too: its steps, from here
    Ways(*steps)                one of them is taken
    Loop(body, once)            again and again; ``once``: at least once
    Try(body, handlers)         one of the handlers may follow, with nothing left open
    Leave(how)                  "return", "raise", "break", "continue"
    Goto(label), Label(label)   forward only

or a list of steps. A state is the set of stores that no point has followed yet. None is the state
of a place that is not reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, Union


class Store(NamedTuple):
    what: str
    where: str


class Point(NamedTuple):
    name: str


class Call(NamedTuple):
    name: str


class Ways(NamedTuple):
    ways: tuple[Step, ...]


class Loop(NamedTuple):
    body: Step
    once: bool = False


class Try(NamedTuple):
    body: Step
    handlers: tuple[Step, ...]


class Leave(NamedTuple):
    how: str


class Goto(NamedTuple):
    label: str


class Label(NamedTuple):
    label: str


Step = Union[Store, Point, Call, Ways, Loop, Try, Leave, Goto, Label, "list[Step]"]
State = frozenset[Store] | None

NOTHING: frozenset[Store] = frozenset()


class Gap(NamedTuple):
    """Two stores with no crash point between them."""

    first: Store
    then: Store

    def __str__(self) -> str:
        first, then = " ".join(self.first[::-1]), " ".join(self.then[::-1])
        return f"{then.strip()}: no crash point since {first}"


def joined(*states: State) -> State:
    reached = [state for state in states if state is not None]
    return frozenset[Store]().union(*reached) if reached else None


class Reading:
    """Follows the paths through functions that call each other."""

    def __init__(self, functions: Mapping[str, Step], entries: Iterable[str] = ()) -> None:
        self.functions = functions
        self.entries = entries or entries_of(functions)
        self.gaps: set[Gap] = set()
        self.stores: set[Store] = set()
        self.points: set[str] = set()
        self._ends: dict[tuple[str, frozenset[Store]], State] = {}
        self._under_way: set[str] = set()

    def call(self, name: str, state: State = NOTHING) -> State:
        """Returns the state after a call of a function that begins in ``state``."""
        if state is None or name in self._under_way:
            return state
        if (name, state) not in self._ends:
            self._under_way.add(name)
            frame = _Frame(self)
            end = frame.walk(self.functions[name], state)
            self._ends[name, state] = joined(end, frame.left["return"])
            self._under_way.remove(name)
        return self._ends[name, state]

    def everything(self) -> Reading:
        """Follows all functions that no other function calls. They must end with a crash point."""
        for name in self.entries:
            end = self.call(name) or ()
            self.gaps |= {Gap(store, Store(f"{name} returns", "")) for store in end}
        return self

    def changed(self, name: str, step: Step) -> Reading:
        """Returns a reading in which one function has other steps. It reads only callers again."""
        again = self._callers_of(name)
        other = Reading({**self.functions, name: step}, self.entries)
        other.entries = [entry for entry in self.entries if entry in again]
        other._ends = {call: end for call, end in self._ends.items() if call[0] not in again}
        return other.everything()

    def _callers_of(self, name: str) -> set[str]:
        """Returns the function and its direct and indirect callers."""
        found, ahead = {name}, {name}
        while ahead:
            ahead = {it for it, called in self._calls.items() if called & ahead} - found
            found |= ahead
        return found

    @cached_property
    def _calls(self) -> dict[str, set[str]]:
        return {name: calls_of(steps) for name, steps in self.functions.items()}


def entries_of(functions: Mapping[str, Step]) -> list[str]:
    """Returns the functions that no other function calls."""
    called = set[str]().union(*map(calls_of, functions.values()))
    return [name for name in functions if name not in called]


class _Frame:
    """The path through one call of a function."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.left: dict[str, State] = dict.fromkeys(("return", "raise", "break", "continue"))
        self.jumps: dict[str, State] = {}

    def walk(self, step: Step, state: State) -> State:
        match step:
            case list():
                for each in step:
                    state = self.walk(each, state)
                return state
            case Label():
                return joined(state, self.jumps.get(step.label))
        if state is None:
            return None
        match step:
            case Store():
                self.reading.stores.add(step)
                self.reading.gaps |= {Gap(before, step) for before in state}
                return frozenset({step})
            case Point():
                self.reading.points.add(step.name)
                return NOTHING
            case Call():
                return self.reading.call(step.name, state)
            case Ways():
                return joined(*(self.walk(way, state) for way in step.ways))
            case Loop():
                return self._loop(step, state)
            case Try():
                handled = (self.walk(handler, NOTHING) for handler in step.handlers)
                return joined(self.walk(step.body, state), *handled)
            case Goto():
                self.jumps[step.label] = joined(self.jumps.get(step.label), state)
            case Leave():
                self.left[step.how] = joined(self.left[step.how], state)
        return None

    def _loop(self, step: Loop, state: State) -> State:
        outer = self.left["break"], self.left["continue"]
        self.left["break"] = self.left["continue"] = None
        begin, end = state, None if step.once else state
        while True:
            after = joined(self.walk(step.body, begin), self.left["continue"])
            end = joined(end, after)
            again = joined(begin, after)
            if again == begin:
                break
            begin = again
        end = joined(end, self.left["break"])
        self.left["break"], self.left["continue"] = outer
        return end


def points_of(step: Step) -> list[str]:
    """Returns the names of the points in a step, in order."""
    match step:
        case Point():
            return [step.name]
        case Call() | Store() | Leave() | Goto() | Label():
            return []
    return [name for part in _parts(step) for name in points_of(part)]


def calls_of(step: Step) -> set[str]:
    """Returns the functions that a step calls."""
    match step:
        case Call():
            return {step.name}
        case Point() | Store() | Leave() | Goto() | Label():
            return set()
    return set[str]().union(*map(calls_of, _parts(step)))


def without(step: Step, number: int) -> Step:
    """Returns the step without its point of that number."""
    return _without(step, [number])


def _without(step: Step, left: list[int]) -> Step:
    match step:
        case Point():
            left[0] -= 1
            return step if left[0] != -1 else []
        case list():
            return [_without(part, left) for part in step]
        case Ways():
            return Ways(tuple(_without(part, left) for part in step.ways))
        case Loop():
            return Loop(_without(step.body, left), step.once)
        case Try():
            body = _without(step.body, left)
            return Try(body, tuple(_without(part, left) for part in step.handlers))
    return step


def _parts(step: Step) -> tuple[Step, ...]:
    match step:
        case list():
            return tuple(step)
        case Ways():
            return step.ways
        case Loop():
            return (step.body,)
        case Try():
            return step.body, *step.handlers
    return ()
