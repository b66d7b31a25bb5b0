"""A collector and a learner in processes of their own, who do one thing at a time when told to.

A player answers each order with what came of it, or stays in the call that it was told to make:
then the test looks at the registry until that says what it waits for.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from tensordict import TensorDict

from shmbuffer import RateLimitError, ReplayBuffer, attach
from shmbuffer._native import _core
from shmbuffer.buffers.data_path import drawing
from shmbuffer.memory.flow import sides, waiting
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.storages.ring_backed import RingBacked
from tests.kit.rings import engine_of

T = TypeVar("T")


class Answer(NamedTuple):
    """What came of an order."""

    numbers: list[int]
    error: BaseException | None
    said: list[str]
    """By the logger ``shmbuffer.flow``."""


class Waits(NamedTuple):
    """Somebody who waits, as `inspect` shows it."""

    pid: int
    text: str


class Player:
    """A process with a handle of its own; it ends with the block, one way or another.

    Attributes:
        did: numbers of the items that it wrote or drew, as it has reported them.
    """

    def __init__(self, path: Path) -> None:
        here, there = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            here.close()
            _play(path, there)
        there.close()
        self._pipe = here
        self._path = path
        self.did: list[int] = []
        self.ended = False
        assert self._pipe.recv() == "ready"

    def tell(self, what: str, *args: Any, **kwargs: Any) -> None:
        """Gives an order and does not wait for it: `answer` does."""
        self._pipe.send((what, args, kwargs))

    def heard(self) -> bool:
        """Whether there is an answer."""
        return self._pipe.poll()

    def answer(self) -> Answer:
        assert self._pipe.poll(50), f"{self.pid} does not come back: {waits(self._path)}"
        answer: Answer = self._pipe.recv()
        self.did += answer.numbers
        return answer

    def do(self, what: str, *args: Any, **kwargs: Any) -> Answer:
        self.tell(what, *args, **kwargs)
        return self.answer()

    def done(self, what: str, *args: Any, **kwargs: Any) -> list[int]:
        """Does it, and fails if that failed."""
        answer = self.do(what, *args, **kwargs)
        if answer.error is not None:
            raise answer.error
        return answer.numbers

    def refused(self, what: str, *args: Any, **kwargs: Any) -> RateLimitError:
        error = self.do(what, *args, **kwargs).error
        assert isinstance(error, RateLimitError), error
        return error

    def waits(self) -> str:
        """Waits until it waits, and says for which client."""
        return until(lambda: next((w.text for w in waits(self._path) if w.pid == self.pid), None))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True

    def died(self) -> None:
        """Waits until it has killed itself."""
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL
        self.ended = True

    def stopped(self) -> None:
        """Waits until it has stopped itself."""
        os.waitpid(self.pid, os.WUNTRACED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


def waits(path: Path) -> list[Waits]:
    """Clients that wait now."""
    return [Waits(one["pid"], one["text"]) for one in inspect(path)["waits"]]


def until(look: Callable[[], T | None]) -> T:
    """Looks until there is something to see."""
    give_up = time.monotonic() + 50
    while (seen := look()) is None:
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.002)
    return seen


def items(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict({"number": numbers, "obs": numbers[:, None].repeat(1, 5)}, [count])


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _play(path: Path, pipe: Connection) -> None:
    """The life of a player."""
    status = 1
    try:
        torch.set_num_threads(1)
        log, heard = logging.getLogger("shmbuffer.flow"), _Heard()
        log.propagate = False
        log.addHandler(heard)
        buffer = attach(path)
        pipe.send("ready")
        while True:
            what, args, kwargs = pipe.recv()
            numbers, error = [], None
            try:
                numbers = _DEEDS[what](buffer, *args, **kwargs)
            except BaseException as raised:
                error = raised
            pipe.send(Answer(numbers, error, list(heard.texts)))
            heard.texts.clear()
    except (EOFError, OSError):
        status = 0  # the test is over
    finally:
        os._exit(status)


def _extend(buffer: ReplayBuffer, first: int, count: int, **kwargs: Any) -> list[int]:
    buffer.extend(items(first, count), **kwargs)
    return list(range(first, first + count))


def _extend_and_stop(buffer: ReplayBuffer, first: int, count: int, point: str) -> list[int]:
    """Stops at a crash point of the write."""
    _core.arm(point, "stop")
    return _extend(buffer, first, count)


def _extend_and_die(buffer: ReplayBuffer, first: int, count: int, point: str) -> list[int]:
    """Is killed at a crash point of the write."""
    _core.arm(point, "kill")
    return _extend(buffer, first, count)


def _sample(buffer: ReplayBuffer, count: int, **kwargs: Any) -> list[int]:
    sample = buffer.sample(count, **kwargs)
    assert (sample["obs"] == sample["number"][:, None]).all()
    numbers: list[int] = sample["number"].tolist()
    return numbers


def _sample_and_stop_while_reading(buffer: ReplayBuffer, count: int) -> list[int]:
    """What was taken out of a queue is not copied before somebody lets us go on."""
    read = drawing._held

    def stopped(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return read(*args)

    drawing._held = stopped
    try:
        return _sample(buffer, count)
    finally:
        drawing._held = read


def _fork_beside_a_waiting_thread(buffer: ReplayBuffer, number: int) -> list[int]:
    """A thread writes and so does a forked child; both have to wait."""
    storage = buffer.storage
    assert isinstance(storage, RingBacked)
    writing = threading.Thread(target=buffer.extend, args=(items(number, 1),))
    writing.start()
    mine = engine_of(storage).seat.control.entries[
        engine_of(storage).seat.entry : engine_of(storage).seat.entry + 1
    ]
    until(lambda: mine["waits_for"][0] or None)
    pid = os.fork()
    if pid == 0:
        buffer.extend(items(number + 1, 1))
        os._exit(0 if _standing(buffer) == [0, 0, 0] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    writing.join()
    return [number]


def _standing(buffer: ReplayBuffer) -> list[int]:
    """What this handle leaves in the registry while it is in no call."""
    storage = buffer.storage
    assert isinstance(storage, RingBacked)
    control = engine_of(storage).seat.control
    mine = control.entries[engine_of(storage).seat.entry]
    return [int(mine["waits_for"]), int(mine["pending"]), int(mine["reading"])]


def _constants(_: ReplayBuffer, **changed: float) -> list[int]:
    """Of `shmbuffer.memory.flow.waiting` and `sides`: how long what takes."""
    for name, seconds in changed.items():
        module = sides if name == "ALONE_S" else waiting
        assert isinstance(getattr(module, name), float)
        setattr(module, name, seconds)
    return []


def _close(buffer: ReplayBuffer) -> list[int]:
    buffer.close()
    return []


_DEEDS: dict[str, Callable[..., list[int]]] = {
    "extend": _extend,
    "extend and stop": _extend_and_stop,
    "extend and die": _extend_and_die,
    "sample": _sample,
    "sample and stop while reading": _sample_and_stop_while_reading,
    "fork beside a waiting thread": _fork_beside_a_waiting_thread,
    "standing": _standing,
    "constants": _constants,
    "close": _close,
}
