"""Damages shared memory under an open handle while calls are made.

A call raises a library error or does its work. An item that it returns is correct, or `check` says
that it is not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from shmbuffer.memory import Engine, Ring
from tests.crash import harness
from tests.damage.judgement import NAMED, answer
from tests.damage.specimen import Change, Contents, Specimen, contents, row_bytes

#: Time for which a call waits for the mutex, because damage may make it look as if it were held.
_LOCK_TIMEOUT_NS = 20_000_000
_WAIT_S = 0.05


def damage_under_a_handle(specimen: Specimen, *changes: Change) -> None:
    """Opens an intact buffer, overwrites its shared bytes, and makes every call on it.

    The handle stays damaged, so this needs a process of its own.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("shmbuffer.memory.") and hasattr(module, "LOCK_TIMEOUT_NS"):
            module.LOCK_TIMEOUT_NS = _LOCK_TIMEOUT_NS
    specimen.restore()
    opened = Engine.open(specimen.path, None)
    held = opened.ring()
    assert held is not None
    truth = contents(held)
    for change in changes:  # the maps share the page cache with the file
        with (specimen.path / change.file).open("r+b") as file:
            file.seek(change.offset)
            file.write(change.data)
    for call in _calls(opened, held, truth):
        answer(call, specimen)
    again = answer(lambda: Engine.open(specimen.path, None, timeout=1.0), specimen)
    if again is not None:
        answer(again.check, specimen)


def _calls(opened: Engine, held: Ring, truth: Contents) -> list[Callable[[], object]]:
    index = np.arange(4, dtype=np.int64)
    return [
        lambda: opened.stats(),
        lambda: opened.clients(),
        lambda: opened.seat.reap_dead(),
        lambda: _require_right(opened, truth, contents(held)),
        lambda: _require_right(opened, truth, drawn(held, prioritized=True)),
        lambda: _require_right(opened, truth, drawn(held, prioritized=False)),
        lambda: _update(held, index),
        lambda: _copy(held),
        lambda: _write(held, range(77, 79)),
        lambda: _place(held),
        lambda: drawn(held, prioritized=True),
        lambda: held.tree.set_alpha(0.7, 0.1),
        lambda: opened.flush(timeout=1.0),
        lambda: held.empty(),
        lambda: _write(held, range(5)),
        lambda: drawn(held, prioritized=True),
        lambda: opened.check(),
        lambda: opened.close(),
    ]


def _require_right(opened: Engine, truth: Contents, found: Contents) -> None:
    wrong = {slot for slot, item in found.items() if truth.get(slot) != item}
    if wrong:
        problems = opened.check().problems
        named = {int(match[1]) for line in problems if (match := NAMED.match(line))}
        assert wrong <= named, f"slots {sorted(wrong - named)} are wrong; check says {problems}"


def drawn(held: Ring, *, prioritized: bool) -> Contents:
    """Returns the result of a sample, by slot."""
    count = 64
    if held.records is not None:
        drawn = held.records.sample(count, 7, beta=0.4 if prioritized else None)
        tickets = drawn.tickets.tolist()
        return {
            slot: (tickets[row], bytes(drawn.batch.body(row)))
            for row, slot in enumerate(drawn.index.tolist())
        }
    batch, index = harness.Batch(range(count)), np.empty(count, np.int64)
    found = np.empty(count, np.int64)
    places = (index.ctypes.data, found.ctypes.data)
    held.sample(count, 7, batch.addresses, *places, prioritized=prioritized)
    return {
        slot: (int(found[row]), row_bytes(batch, row)) for row, slot in enumerate(index.tolist())
    }


def _update(held: Ring, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    with _any_alpha():
        held.update(index, np.ones(len(index)))


def _write(held: Ring, numbers: range) -> None:
    with _any_alpha():
        harness.write(held, numbers, timeout=_WAIT_S)


@contextmanager
def _any_alpha() -> Iterator[None]:
    """Ignores the error for infinite masses, because a damaged alpha may be a valid choice."""
    try:
        yield
    except ValueError as error:
        if "also after ** alpha" not in str(error):
            raise


def _place(held: Ring) -> None:
    """Places an item unless a slot is being written, because the call would wait for it."""
    if not (held.live.words & np.uint64(3) == 1).any():
        harness.place(held, [1], [88], in_place=False)


def _copy(held: Ring) -> None:
    if held.records is not None:
        with tempfile.TemporaryFile() as file:
            held.records.copy_out(file.fileno(), "a copy")
