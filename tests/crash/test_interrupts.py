"""Ctrl-C wherever CPython checks for signals leaves no lock, wait or file behind.

The interrupted operations can be repeated. The places are listed in `interrupts.py`. Here each deed
is interrupted at some of its places. ``interrupts.walk(deed)`` takes all of them, in minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter, RateLimitTimeout, RingOverrunError, recover
from shmbuffer.items.limits import take_oldest
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.flow.consumer import Leases, given_back_unless_delivered
from shmbuffer.memory.system import deadline
from shmbuffer.service.run_directory import hold_lock
from tests.crash.interrupts import Deed, walk
from tests.kit.rings import ring_of
from tests.memory.rows import contents, schema, write

Begun = tuple[Callable[[], object], Callable[[], object]]
SETTINGS = Settings(8, alpha=0.5)
ONE_FOR_ONE = RateLimiter(1, error_buffer=1)


class Deeds:
    """The deeds. Each one prepares a buffer and yields the call to interrupt and a later check."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()

    @contextmanager
    def made(self, settings: Settings = SETTINGS) -> Iterator[Engine]:
        """A buffer with items, which is removed at the end."""
        with Engine.open(self.folder / str(next(self.numbers)), settings) as engine:
            write(engine.define(schema(8)), range(5))
            yield engine
            engine.cleanup()

    @contextmanager
    def attach(self) -> Iterator[Begun]:
        with self.made() as engine:
            assert engine.path is not None
            path = engine.path

            def works() -> None:
                with Engine.open(path, None, timeout=0) as other:
                    assert len(contents(ring_of(other))) == 5

            yield lambda: Engine.open(path, None, timeout=0), works

    @contextmanager
    def create(self) -> Iterator[Begun]:
        path = self.folder / str(next(self.numbers))

        def works() -> None:
            with Engine.open(path, SETTINGS, timeout=0) as engine:
                write(engine.define(schema(8)), range(5))
                engine.cleanup()

        yield lambda: Engine.open(path, SETTINGS, timeout=0), works

    @contextmanager
    def define(self) -> Iterator[Begun]:
        with Engine.open(self.folder / str(next(self.numbers)), SETTINGS) as engine:

            def works() -> None:
                engine.define(schema(8), timeout=0)
                engine.cleanup()
                engine.close()

            yield lambda: engine.define(schema(8), timeout=0), works

    @contextmanager
    def flush(self) -> Iterator[Begun]:
        with self.made() as engine:
            yield lambda: engine.flush(timeout=0), lambda: engine.flush(timeout=0)

    @contextmanager
    def recover(self) -> Iterator[Begun]:
        with Engine.open(self.folder / str(next(self.numbers)), SETTINGS) as engine:
            write(engine.define(schema(8)), range(5))
            path = engine.path
        assert path is not None

        def works() -> None:
            with Engine.open(path, None, timeout=0) as other:
                assert len(contents(ring_of(other))) == 5
                other.cleanup()

        yield lambda: recover(path, timeout=0), works

    @contextmanager
    def close(self) -> Iterator[Begun]:
        with self.made() as engine:
            assert engine.path is not None
            other = Engine.open(engine.path, None)

            def works() -> None:
                other.close()
                engine.seat.reap_dead()
                assert len(engine.clients()) == 1

            yield other.close, works

    @contextmanager
    def wait_to_sample(self) -> Iterator[Begun]:
        with self.made() as engine:
            engine.set_limiter(ONE_FOR_ONE)
            admission = ring_of(engine).admission
            yield (
                lambda: refused(RateLimitTimeout, lambda: admission.admit(2)),
                lambda: waits_for_nobody(engine),
            )

    @contextmanager
    def wait_to_write(self) -> Iterator[Begun]:
        with self.made() as engine:
            engine.set_limiter(ONE_FOR_ONE)
            ring = ring_of(engine)
            yield (
                lambda: refused(RateLimitTimeout, lambda: write(ring, range(2))),
                lambda: waits_for_nobody(engine),
            )

    @contextmanager
    def wait_for_a_slot(self) -> Iterator[Begun]:
        with self.made() as engine, Engine.open(str(engine.path), None) as other:
            ring = ring_of(engine)
            ring_of(other).claims.claim(8)
            yield (
                lambda: refused(RingOverrunError, lambda: write(ring, range(2))),
                lambda: waits_for_nobody(engine),
            )
            ring_of(other).claims.abort()

    @contextmanager
    def reserve(self) -> Iterator[Begun]:
        """Reserves space. After an interrupt, all reserved space has an owner that knows of it."""
        with self.made() as engine:
            ring = ring_of(engine)
            yield lambda: ring.reservations.reserve(3), lambda: holds_nothing(engine)

    @contextmanager
    def wait_to_reserve(self) -> Iterator[Begun]:
        """Reserves space, and is admitted at the second attempt."""
        with self.made() as engine:
            engine.set_limiter(ONE_FOR_ONE)
            ring = ring_of(engine)

            def act() -> None:
                refused(RateLimitTimeout, lambda: ring.reservations.reserve(2))
                ring.admission.admit(1)
                ring.reservations.reserve(1)

            yield act, lambda: holds_nothing(engine)

    @contextmanager
    def take_of_a_queue(self) -> Iterator[Begun]:
        with self.made(Settings(8)) as engine:
            engine.set_limiter(RateLimiter(max_times_sampled=1))
            ring = ring_of(engine)
            yield (
                lambda: take_oldest(ring, 3, lambda index, tickets: index),
                lambda: holds_nothing(engine),
            )

    @contextmanager
    def consume(self) -> Iterator[Begun]:
        with self.made() as engine:
            consumer = ring_of(engine).consumers.open("learner")

            def works() -> None:
                assert len(consumer.take(5).slots) == 5

            yield delivering(lambda leases: consumer.take(3, leases=leases)), works

    @contextmanager
    def claim_groups(self) -> Iterator[Begun]:
        with self.made() as engine:
            consumer = ring_of(engine).consumers.open("learner")
            there = np.arange(3)

            def works() -> None:
                assert len(consumer.take(5).slots) == 5

            yield delivering(lambda leases: consumer.claim(there, there, leases=leases)), works

    @contextmanager
    def remove(self) -> Iterator[Begun]:
        path = self.folder / str(next(self.numbers))
        with Engine.open(path, SETTINGS) as engine:
            write(engine.define(schema(8)), range(5))

            def works() -> None:
                engine.cleanup()
                with Engine.open(path, SETTINGS, existing="error", timeout=0) as other:
                    other.cleanup()

            yield engine.cleanup, works

    @contextmanager
    def anonymous(self) -> Iterator[Begun]:
        def act() -> None:
            with Engine.anonymous(SETTINGS) as engine:
                write(engine.define(schema(8)), range(5))

        yield act, act

    @contextmanager
    def coordinator(self) -> Iterator[Begun]:
        with self.made() as engine:
            path = engine.path
            assert path is not None

            def act() -> None:
                hold_lock(path).close()

            yield act, act


def delivering(take: Callable[[Leases], object]) -> Callable[[], None]:
    """Takes items like a sampler, which returns them to the consumer if it is interrupted."""

    def act() -> None:
        with given_back_unless_delivered() as leases:
            take(leases)

    return act


def refused(error: type[Exception], call: Callable[[], object]) -> None:
    """Makes a call that is refused without waiting."""
    with deadline.limit_waits(0.0), suppress(error):
        call()


def holds_nothing(engine: Engine) -> None:
    """Checks that nothing is reserved or being read, and that all space can be used."""
    waits_for_nobody(engine)
    control = engine.seat.control
    assert not control.entries["reading"].any()
    assert int(control.runtime["reserved"][0]) == 0


def waits_for_nobody(engine: Engine) -> None:
    """Checks that no entry in shared memory says that a client waits."""
    control = engine.seat.control
    assert not control.entries["waits_for"].any()
    assert not control.entries["turn"].any()
    assert [int(control.runtime[name][0]) for name in ("limited", "waiters")] == [0, 0]


#: Distance between two places that are interrupted, or 16 for deeds that are not listed. It is
#: three times as large without `--full`.
STRIDES = {"close": 1, "wait_for_a_slot": 1, "wait_to_sample": 3, "wait_to_write": 3}
STRIDES |= {"reserve": 2, "wait_to_reserve": 3}
STRIDES |= dict.fromkeys(("take_of_a_queue", "consume", "claim_groups"), 1)
NAMES = [name for name in vars(Deeds) if not name.startswith("_") and name != "made"]


def deed(name: str, folder: Path) -> Deed:
    """Returns a deed by its name."""
    begin: Callable[[], AbstractContextManager[Begun]] = getattr(Deeds(folder), name)
    return Deed(name, begin)


@pytest.mark.product(few=2)
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_anywhere_leaves_no_lock_and_no_file(
    name: str, fast_path: Path, full: bool
) -> None:
    stride = STRIDES.get(name, 16) * (1 if full else 3)
    assert walk(deed(name, fast_path), stride=stride, all_of="locks.py") > 5
