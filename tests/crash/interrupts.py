"""Interrupts a deed with Ctrl-C at every place where CPython checks for signals.

CPython 3.11 handles a signal in the main thread only when the interpreter loop reads its eval
breaker (ceval.c, CHECK_EVAL_BREAKER):

    RESUME              at the start of a function, and where a generator goes on after a yield
    CALL                when a callable that is not a Python function has returned: before its
    CALL_FUNCTION_EX    result is stored
    JUMP_BACKWARD       at the end of each round of a loop; also POP_JUMP_BACKWARD_IF_*

No signal is therefore handled between a call of ``__enter__`` and the block of its ``with``,
because BEFORE_WITH does not check, or between RETURN_VALUE and a store. A signal can be handled
between the yield of a contextlib generator and the block, because ``next(self.gen)`` in contextlib
is a CALL. It can also be handled at the start of an ``__exit__`` that is written in Python.

`walk` traces each bytecode (``frame.f_trace_opcodes``) in frames of this package and of contextlib.
It raises KeyboardInterrupt before the bytecode that follows a check. The same handlers apply there,
because the code after a call belongs to the same statement. It also raises after a Python function
has returned, where CPython does not check. These additional places do no harm.
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
    """A bytecode before which CPython checks for signals."""

    code: CodeType
    offset: int

    def __str__(self) -> str:
        line = next(
            (line for start, end, line in self.code.co_lines() if start <= self.offset < end), 0
        )
        return f"{Path(self.code.co_filename).name}:{line} {self.code.co_qualname} +{self.offset}"


class Interrupter:
    """Counts the places that a block passes, and raises KeyboardInterrupt at one of them.

    Attributes:
        at: the number of the place at which to raise, or None.
        places: the places that were passed.
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
            elif event == "exception":  # CPython does not check after a call that raises
                looked = False
            return follow

        return follow

    def _look(self, code: CodeType, offset: int) -> None:
        self.places.append(Place(code, offset))
        if len(self.places) - 1 == self.at:
            raise KeyboardInterrupt(str(self.places[-1]))


@dataclass(frozen=True)
class Deed:
    """An operation that is interrupted.

    Attributes:
        begin: prepares the operation. It yields a function that performs it, and a function that
            has to work afterwards.
    """

    name: str
    begin: Callable[[], contextlib.AbstractContextManager[tuple[Callable[[], object], ...]]]


def walk(deed: Deed, *, stride: int = 1, all_of: str = "", once: bool = True) -> int:
    """Interrupts a deed at one place after the other; returns the number of interrupts.

    Args:
        deed: the operation to interrupt.
        stride: distance between two places that are tried.
        all_of: the name of a module in which all places are tried.
        once: skip places that were already tried.
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
    """Interrupts a deed at one place; fails if a lock, file or map is held afterwards."""
    before, mapped = holdings.held(), holdings.mapped()
    place = f"{deed.name}, {number}"
    with deed.begin() as (act, works):
        try:
            with _unraisable(), Interrupter(number):
                act()
        except KeyboardInterrupt as error:
            place += f": {error}"
            # The traceback keeps its frames alive, so their locks must be free already.
            assert not _locked("/.shmbuffer/init.lock"), place
        works()
    del act, works
    gained = holdings.gained(before) + holdings.gained(mapped, holdings.mapped)
    assert not gained, (place, gained)
    assert _is_open(locks._gate), f"{place}: no other thread can take a lock any more"


def _is_open(gate: Any) -> bool:
    """True if another thread can enter the gate, which is reentrant for this thread."""
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
    """Ignores exceptions in finalisers, which CPython reports but does not raise."""
    before, sys.unraisablehook = sys.unraisablehook, lambda told: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def _locked(names: str) -> set[str]:
    """Returns the files with this ending that the process has locked."""
    return {name for name, _ in holdings.locked_files() if names in name}
