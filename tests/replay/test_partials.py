"""Rollouts that are written in pieces survive kills of their processes without loss.

A rollout is in the ring or in its file, and after a kill other processes find it there.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    RateLimiter,
    ReservationLostError,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer._native import _core
from tests.crash.harness import ended, fork, python_points
from tests.kit.rings import engine_of, ring_of

pytestmark = pytest.mark.crash

CAPACITY = 64
PIECES = 3
SECONDS = 4.0
PYTHON = ("partial.made", "partial.written", "partial.removed", "ledger.extended")
NATIVE = (
    *("reserve.open", "reserve.partial", "reserve.claimed", "reserve.spent", "reserve.forgotten"),
    *("write.marking", "write.payload", "write.copy", "write.committing", "write.commit"),
    *("write.count", "write.idle", "write.done"),
)


def steps(rollout: int, first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"rollout": torch.full((count,), rollout), "step": number}, [count])


@contextmanager
def buffer(path: Path, capacity: int = CAPACITY) -> Iterator[Any]:
    storage = LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True)
    with TensorDictReplayBuffer(storage=storage, batch_size=1) as rb:
        rb.extend(steps(0, 0, 1))
        yield rb


def there(rb: Any) -> dict[int, list[int]]:
    """Returns the steps in the ring by rollout, in the order of their tickets."""
    live = ring_of(rb).live
    held = live.holds().nonzero()[0]
    order = held[(live.words[held] >> 2).argsort()]
    found: dict[int, list[int]] = {}
    for slot in order.tolist():
        item = rb[slot]
        found.setdefault(int(item["rollout"]), []).append(int(item["step"]))
    found.pop(0, None)
    return found


def victim(path: Path, point: str, after: int, work: Callable[[Any], None]) -> bool:
    """Runs ``work`` in a process; True if it was killed at the sync point."""
    kept = []

    def body() -> None:
        rb = attach(path)
        kept.append(rb)
        _core.arm(point, after=after)
        work(rb)
        _core.disarm()

    status = ended(fork(body))
    assert status in (0, -signal.SIGKILL), f"the victim ended with {status}"
    return status == -signal.SIGKILL


def rolls_out(told: int) -> Callable[[Any], None]:
    """Writes a rollout of `PIECES` pieces of two steps, and reports each appended piece."""

    def work(rb: Any) -> None:
        room = rb.reserve(2 * PIECES)
        for piece in range(PIECES):
            room.append(steps(7, 2 * piece, 2))
            os.write(told, b"x")
        room.commit()

    return work


@pytest.mark.product
@pytest.mark.parametrize("point", [*PYTHON, *NATIVE])
def test_a_rollout_is_in_the_ring_or_in_its_file_wherever_its_process_dies(
    tmp_path: Path, point: str
) -> None:
    for passing in range(2 * PIECES + 2):
        hear, say = os.pipe()
        with buffer(tmp_path / str(passing)) as rb:
            killed = victim(tmp_path / str(passing), point, passing, rolls_out(say))
            os.close(say)
            appended = len(os.read(hear, 100))
            os.close(hear)
            assert killed or passing, f"{point} was never reached"
            require_once(rb, appended)
        if not killed:
            break


def require_once(rb: Any, appended: int) -> None:
    """Checks that a resuming process finds the appended pieces once and commits them once."""
    partials = rb.partials()  # reaps the dead client first
    found = there(rb)
    whole = list(range(2 * PIECES))
    if found:
        assert found == {7: whole}
        assert partials == []
    elif appended or partials:
        (partial,) = partials
        assert partial.pieces >= appended
        number = partial.id
        room = rb.resume(partial)
        begun = sum(len(piece) for piece in room.pieces)
        assert [int(n) for piece in room.pieces for n in piece["step"]] == whole[:begun]
        if begun < len(whole):
            room.append(steps(7, begun, len(whole) - begun))
        room.commit()
        assert there(rb) == {7: whole}
        with pytest.raises(ReservationLostError):
            rb.resume(number)
    assert rb.partials() == []
    folder = Path(rb.storage.scratch_dir) / ".shmbuffer/partials"
    assert not folder.exists() or os.listdir(folder) == []
    engine = engine_of(rb)
    assert engine.stats()["reserved"] == 0
    assert engine.check().ok
    assert ring_of(engine).reservations.list_committed() == []


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    "point", ["partial.cut", "partial.written", "partial.removed", "reserve.open", "reserve.spent"]
)
def test_who_goes_on_and_dies_is_followed_by_another(tmp_path: Path, point: str) -> None:
    def dies_with_pieces(rb: Any) -> None:
        room = rb.reserve(2 * PIECES)
        room.append(steps(7, 0, 2))
        os.kill(os.getpid(), signal.SIGKILL)

    def goes_on(rb: Any) -> None:
        room = rb.resume(rb.partials()[0])
        room.append(steps(7, 2, 4))
        room.commit()

    for passing in range(3):
        path = tmp_path / str(passing)
        with buffer(path) as rb:
            assert victim(path, "none", 0, dies_with_pieces)
            killed = victim(path, point, passing, goes_on)
            assert killed or passing, f"{point} was never reached"
            require_once(rb, 1)
        if not killed:
            break


def test_every_point_of_pieces_is_died_at() -> None:
    assert set(python_points("partial")) == {*PYTHON[:3], "partial.cut"}


# With kills, for some seconds.


def collects(path: Path, seed: int) -> None:
    """Writes rollouts in pieces, one after the other; resumes those of dead processes first."""
    choose = random.Random(seed)
    rb = attach(path)
    rooms = []
    while True:
        for partial in rb.partials():
            try:
                room = rb.resume(partial, timeout=10)
            except ReservationLostError:
                continue  # another process was faster
            goes_through_with(room, choose)
            break
        room = rb.reserve(2 * PIECES, timeout=10)
        rooms[:] = [room]
        room.append(steps(room.id, 0, 2))
        goes_through_with(room, choose)


def goes_through_with(room: Any, choose: random.Random) -> None:
    begun = sum(len(piece) for piece in room.pieces)
    for first in range(begun, 2 * PIECES, 2):
        room.append(steps(room.id, first, 2))
        time.sleep(choose.random() * 0.002)
    room.commit()


def learns(path: Path, say: int) -> None:
    """Consumes the queue and reports the rollout of each step."""
    rb = attach(path)
    while True:
        sample = rb.sample(timeout=30)
        line = f"{int(sample['rollout'][0])} {int(sample['step'][0])}\n"
        os.write(say, line.encode())


@pytest.mark.full
def test_no_rollout_is_lost_or_committed_twice_while_collectors_are_killed(tmp_path: Path) -> None:
    """The test kills two collectors at any point, while a learner consumes the queue."""
    path, choose = tmp_path / "buffer", random.Random(5)
    hear, say = os.pipe()
    with buffer(path, 64) as rb:
        rb.rate_limiter = RateLimiter(max_times_sampled=1)
        learner = fork(lambda: learns(path, say))
        os.close(say)
        collectors = [fork(lambda seed=seed: collects(path, seed)) for seed in range(2)]
        until, kills, heard = time.monotonic() + SECONDS, 0, b""
        os.set_blocking(hear, False)
        # Continues if a loaded machine has had too few kills or steps by then.
        while time.monotonic() < until or kills <= 10 or heard.count(b"\n") <= 30 * 2 * PIECES:
            time.sleep(choose.random() * 0.08)
            which = choose.randrange(2)
            os.kill(collectors[which], signal.SIGKILL)
            assert ended(collectors[which]) == -signal.SIGKILL
            kills += 1
            collectors[which] = fork(lambda seed=100 + kills: collects(path, seed))
            heard += drained(hear)
        for collector in collectors:
            os.kill(collector, signal.SIGKILL)
            ended(collector)
        left = rb.partials()
        for partial in left:  # partial rollouts that were not resumed yet
            room = rb.resume(partial, timeout=10)
            begun = sum(len(piece) for piece in room.pieces)
            if begun < 2 * PIECES:
                room.append(steps(room.id, begun, 2 * PIECES - begun))
            room.commit()
        numbers = int(engine_of(rb).seat.control.runtime["next_reservation"][0])
        wait_until_empty(rb)
        time.sleep(0.2)
        os.kill(learner, signal.SIGKILL)
        ended(learner)
        heard += drained(hear)
        assert rb.partials() == []
        engine = engine_of(rb)
        engine.seat.reap_dead()
        assert engine.stats()["reserved"] == 0
        assert engine.check().ok
    os.close(hear)
    seen = Counter(tuple(map(int, line.split())) for line in heard.decode().splitlines())
    rollouts = {rollout for rollout, _ in seen if rollout}
    assert kills > 10
    assert len(rollouts) > 20
    assert set(seen.values()) == {1}, "a step was committed twice"
    for rollout in rollouts:
        assert [step for number, step in sorted(seen) if number == rollout] == list(
            range(2 * PIECES)
        ), f"rollout {rollout} is there in part"
    assert rollouts <= set(range(1, numbers + 1))


def drained(fd: int) -> bytes:
    found = b""
    try:
        while data := os.read(fd, 2**16):
            found += data
    except BlockingIOError:
        pass
    return found


def wait_until_empty(rb: Any) -> None:
    while engine_of(rb).stats()["queued"]:
        time.sleep(0.01)
