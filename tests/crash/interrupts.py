"""Ctrl-C at every place where CPython looks for signals, and what is left after it.

CPython 3.11 handles a signal in the main thread only where the loop of the interpreter looks at its
eval breaker (ceval.c, CHECK_EVAL_BREAKER):

    RESUME              at the start of a function, and where a generator goes on after a yield
    CALL                when a callable that is not a Python function has returned: before its
    CALL_FUNCTION_EX    result is stored
    JUMP_BACKWARD       at the end of each round of a loop; also POP_JUMP_BACKWARD_IF_*

So not between a call of ``__enter__`` and the block of its ``with`` (BEFORE_WITH does not look),
nor between RETURN_VALUE and a store; but between what a contextlib generator yields and the block
(``next(self.gen)`` in contextlib is a CALL), and at the start of an ``__exit__`` that is written in
Python.

`walk` traces each bytecode (``frame.f_trace_opcodes``), in frames of this package and of
contextlib, and raises KeyboardInterrupt before the bytecode behind one that looks: there it meets
the same handlers, because what follows a call belongs to the same statement. It also raises where a
call of a Python function has returned, which CPython does not; what holds there holds elsewhere.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import shmbuffer
from shmbuffer.memory.clients import locks
from tests import holdings

_TRACED = (f"{Path(shmbuffer.__file__).parent}/", contextlib.__file__)
_LOOKS = {
    code
    for name, code in dis.opmap.items()
    if name in ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD") or name.startswith("POP_JUMP_BACKWARD")
}


@dataclass(frozen=True)
class Place:
    """A bytecode before which signals are looked at."""

    code: CodeType
    offset: int

    def __str__(self) -> str:
        line = next(
            (line for start, end, line in self.code.co_lines() if start <= self.offset < end), 0
        )
        return f"{Path(self.code.co_filename).name}:{line} {self.code.co_qualname} +{self.offset}"


class Interrupter:
    """In its block, the places are counted, and at one of them KeyboardInterrupt is raised.

    Attributes:
        at: the number of that place; None: none.
        places: those that were passed.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.places: list[Place] = []

    def __enter__(self) -> Interrupter:
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_TRACED):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._look(code, max(frame.f_lasti, 0))
        looked = False

        def follow(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal looked
            if event == "opcode":
                if looked:
                    self._look(code, frame.f_lasti)
                looked = code.co_code[frame.f_lasti] in _LOOKS
            elif event == "exception":  # what raises does not look
                looked = False
            return follow

        return follow

    def _look(self, code: CodeType, offset: int) -> None:
        self.places.append(Place(code, offset))
        if len(self.places) - 1 == self.at:
            raise KeyboardInterrupt(str(self.places[-1]))


@dataclass(frozen=True)
class Deed:
    """What is interrupted.

    Attributes:
        begin: makes what it needs, and returns what is done, and what has to work afterwards.
    """

    name: str
    begin: Callable[[], contextlib.AbstractContextManager[tuple[Callable[[], object], ...]]]


def walk(deed: Deed, *, stride: int = 1, all_of: str = "", once: bool = True) -> int:
    """Interrupt a deed at one place after the other; returns at how many.

    Args:
        deed: what is done.
        stride: each how many-th place.
        all_of: the name of a module, in which none is left out.
        once: a place that is passed again is not taken again.
    """
    with deed.begin() as (act, _), Interrupter() as counted:
        act()
    places = list(enumerate(counted.places))
    if once:
        first = {place: number for number, place in reversed(places)}
        places = sorted((number, place) for place, number in first.items())
    chosen = [
        number
        for at, (number, place) in enumerate(places)
        if at % stride == 0 or place.code.co_filename.endswith(f"/{all_of}")
    ]
    for number in chosen:
        interrupt(deed, number)
    return len(chosen)


def interrupt(deed: Deed, number: int) -> None:
    """Interrupt a deed at one place; fails if init.lock or anything else is held afterwards."""
    before, mapped = holdings.held(), holdings.mapped()
    place = f"{deed.name}, {number}"
    with deed.begin() as (act, works):
        try:
            with _unraisable(), Interrupter(number):
                act()
        except KeyboardInterrupt as error:
            place += f": {error}"
            assert not _locked("/.shmbuffer/init.lock"), place  # its frames are still there
        works()
    del act, works
    gained = holdings.gained(before) + holdings.gained(mapped, holdings.mapped)
    assert not gained, (place, gained)
    assert _is_open(locks._gate), f"{place}: no other thread can take a lock any more"


def _is_open(gate: Any) -> bool:
    """Whether another thread can enter; for this one it is reentrant."""
    entered: list[bool] = []

    def enter() -> None:
        if gate.acquire(timeout=10):
            gate.release()
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return bool(entered)


@contextlib.contextmanager
def _unraisable() -> Iterator[None]:
    """What is raised in a finalizer CPython only tells of."""
    before, sys.unraisablehook = sys.unraisablehook, lambda told: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def _locked(names: str) -> set[str]:
    """The files of that name that this process has locked."""
    return {name for name, _ in holdings.locked_files() if names in name}
