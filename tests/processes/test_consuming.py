"""Collectors and learners are killed all the time; each consumer acknowledges each item once."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections import Counter
from pathlib import Path

import pytest

from shmbuffer import EmptyBufferError, RateLimitError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.system.deadline import limit_waits
from tests.crash.harness import ended, fork
from tests.kit.rings import ring_of
from tests.memory.rows import require_sound, schema, write

pytestmark = pytest.mark.crash

CAPACITY, CONSUMERS = 64, ("one", "two")
ABOUT, DONE = range(2)


def _collects(path: Path) -> None:
    with Engine.open(path, None) as engine:
        for _ in range(10**6):
            write(ring_of(engine), range(7))


def _learns(path: Path, name: str, told: int, seed: int) -> None:
    """Reports each ticket before and after its acknowledgement, with one write to a pipe each."""
    draws = random.Random(seed)
    with Engine.open(path, None) as engine:
        consumer = ring_of(engine).consumers.open(name)
        while True:
            taken = consumer.take(5, draws.choice([1e-9, 60.0, 60.0, float("inf")]))
            if draws.random() < 0.1:
                consumer.give_back(taken.lease)
                continue
            which = CONSUMERS.index(name)
            for slot, ticket in zip(taken.slots, taken.tickets, strict=True):
                os.write(told, struct.pack("<BBQ", which, ABOUT, int(ticket)))
                applied, _ = consumer.ack(taken.lease, slot[None], ticket[None])
                if applied:
                    os.write(told, struct.pack("<BBQ", which, DONE, int(ticket)))


@pytest.mark.full
def test_each_item_is_acknowledged_once_by_each_consumer(tmp_path: Path) -> None:
    path, draws = tmp_path / "buffer", random.Random(4)
    engine = Engine.open(path, Settings(capacity=CAPACITY))
    engine.define(schema(CAPACITY))
    consumers = [ring_of(engine).consumers.open(name) for name in CONSUMERS]
    told, tell = os.pipe()
    os.set_blocking(told, False)
    heard = b""

    def start(kind: int) -> int:
        if kind < 2:
            return fork(lambda: _collects(path))
        seed = draws.getrandbits(32)
        return fork(lambda: _learns(path, CONSUMERS[kind % 2], tell, seed))

    living = {kind: start(kind) for kind in range(6)}
    for _ in range(60):
        time.sleep(draws.random() * 0.03)
        kind = draws.randrange(6)
        os.kill(living[kind], signal.SIGKILL)
        assert ended(living[kind]) == -signal.SIGKILL
        living[kind] = start(kind)
        heard += _all_of(told)
    for pid in living.values():
        os.kill(pid, signal.SIGKILL)
        ended(pid)
    heard += _all_of(told)
    os.close(tell)
    os.close(told)
    engine.seat.reap_dead()
    require_sound(engine)
    about, done = _counted(heard)
    for which, consumer in enumerate(consumers):
        rest = _rest(engine, consumer)
        assert max(done[which].values()) == 1, "nothing is acknowledged twice"
        assert not rest & done[which].keys(), "nothing that was is given again"
        assert len(done[which]) > 200
        status = next(
            one for one in ring_of(engine).consumers.status() if one.name == consumer.name
        )
        assert status.behind == status.held == 0
        # A learner that was killed between the acknowledgement and its report has reported only the
        # start.
        acknowledged = status.acked
        assert len(done[which]) + len(rest) <= acknowledged
        assert acknowledged <= len(set(about[which]) | rest)
    require_sound(engine)
    engine.close()


def _all_of(fd: int) -> bytes:
    data = b""
    while True:
        try:
            more = os.read(fd, 1 << 16)
        except BlockingIOError:
            return data
        if not more:
            return data
        data += more


def _counted(heard: bytes) -> tuple[list[Counter[int]], list[Counter[int]]]:
    about, done = [Counter[int](), Counter[int]()], [Counter[int](), Counter[int]()]
    for which, kind, ticket in struct.iter_unpack("<BBQ", heard):
        (done if kind == DONE else about)[which][ticket] += 1
    return about, done


def _rest(engine: Engine, consumer: object) -> set[int]:
    found: set[int] = set()
    while True:
        try:
            with limit_waits(5.0):
                taken = consumer.take(7)  # type: ignore[attr-defined]
        except (EmptyBufferError, RateLimitError):
            return found
        tickets = set(taken.tickets.tolist())
        assert not found & tickets
        found |= tickets
        applied = consumer.ack(taken.lease, taken.slots, taken.tickets)  # type: ignore[attr-defined]
        assert applied == (len(taken.slots), 0)
