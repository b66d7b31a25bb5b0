"""Players: collectors and learners in their own processes, which execute single orders of a test.

A player answers each order with its result, or stays in the call that it was told to make. In the
second case the test reads the registry until it shows what the player waits for.
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
    """The result of an order."""

    numbers: list[int]
    error: BaseException | None
    said: list[str]
    """Messages of the logger ``shmbuffer.flow``."""


class Waits(NamedTuple):
    """A waiting client, as `inspect` shows it."""

    pid: int
    text: str


class Player:
    """A process with its own handle, which ends with the block in any case.

    Attributes:
        did: numbers of the items that it has written or drawn, as it has reported them.
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
        """Gives an order without waiting for the result, which `answer` returns."""
        self._pipe.send((what, args, kwargs))

    def heard(self) -> bool:
        """True if there is an answer."""
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
        """Gives an order, waits for the result, and fails if the order failed."""
        answer = self.do(what, *args, **kwargs)
        if answer.error is not None:
            raise answer.error
        return answer.numbers

    def refused(self, what: str, *args: Any, **kwargs: Any) -> RateLimitError:
        error = self.do(what, *args, **kwargs).error
        assert isinstance(error, RateLimitError), error
        return error

    def waits(self) -> str:
        """Waits until the player waits, and returns the client for which it waits."""
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
        """Waits until the player has killed itself."""
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL
        self.ended = True

    def stopped(self) -> None:
        """Waits until the player has stopped itself."""
        os.waitpid(self.pid, os.WUNTRACED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


def waits(path: Path) -> list[Waits]:
    """Returns the clients that are waiting now."""
    return [Waits(one["pid"], one["text"]) for one in inspect(path)["waits"]]


def until(look: Callable[[], T | None]) -> T:
    """Calls a function until its result is not None."""
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
    """Runs in the process of a player until it ends."""
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
    """Kills the process at a crash point of the write."""
    _core.arm(point, "kill")
    return _extend(buffer, first, count)


def _sample(buffer: ReplayBuffer, count: int, **kwargs: Any) -> list[int]:
    sample = buffer.sample(count, **kwargs)
    assert (sample["obs"] == sample["number"][:, None]).all()
    numbers: list[int] = sample["number"].tolist()
    return numbers


def _sample_and_stop_while_reading(buffer: ReplayBuffer, count: int) -> list[int]:
    """Takes items from a queue, and stops before they are copied."""
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
    """Writes in a thread and in a forked child, both of which have to wait."""
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
    """Returns the values of this handle in the registry while it is in no call."""
    storage = buffer.storage
    assert isinstance(storage, RingBacked)
    control = engine_of(storage).seat.control
    mine = control.entries[engine_of(storage).seat.entry]
    return [int(mine["waits_for"]), int(mine["pending"]), int(mine["reading"])]


def _constants(_: ReplayBuffer, **changed: float) -> list[int]:
    """Changes waiting times in `shmbuffer.memory.flow.waiting` and `sides`."""
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
