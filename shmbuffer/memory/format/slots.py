"""The life cycle of a slot, and the 64-bit word that contains its state and ticket.

     EMPTY ──claim──▶ WRITING ──commit──▶ COMMITTED ──claimed again──▶ WRITING
                         └──abort, or its writer died──▶ ABORTED ──claimed again──▶ WRITING

     COMMITTED, ABORTED ──the buffer is emptied──▶ EMPTY
     COMMITTED ──evicted: the bytes of its record are needed──▶ EMPTY
     any state ──rejected by recovery, while no client is alive──▶ EMPTY

One 64-bit word per slot, little-endian:
     bits 0-1   state    EMPTY 0, WRITING 1, COMMITTED 2, ABORTED 3
     bits 2-63  ticket   number of the write that the slot belongs to; slot = ticket mod capacity

Separate arrays contain the checksum of each slot (CRC32C of its ticket and payload), its source,
and the raw priority of each lane. The source is the writer and its stream (`layout.source_of`).

Always true
  1. Each ticket is used only once. If a process reads the same word twice, the slot did not change
     between the two reads.
  2. A reader copies the item, and then compares the word. It keeps the copy if the word was the
     same COMMITTED word before and after the copy.
  3. A claim is entered in the registry before its first word is written. The writer of a WRITING
     slot can therefore always be found.
  4. Words change only while the mutex is held, or in a recovery, when no client is alive. The
     payload, checksum, source and raw priorities of a WRITING slot belong to its writer alone, so
     the writer needs no lock to store them.
  5. A write to an explicit index i gives slot i the ticket head + ((i - head) mod N), where N is
     the capacity, and advances the head by N. The next write at the head therefore uses the same
     slot as before, and no ticket is used twice.
If the writer dies: its batch is aborted if the claim was in a phase before COMMITTING. Otherwise
the batch is committed. A batch is never committed in part. Raw priorities are written with the
payload, so a batch that is rolled forward keeps them.

These functions in ``_native/`` write words: `open_claim` in ``claim.c``, `shmb_commit` and
`shmb_abort_claim` in ``commit.c``, `roll_back`, `roll_forward` and `empty_slot` in ``repair.c``,
`evict` and `remove_item` in ``records.c``, and `shmb_repair_links` in ``sharing.c``. The only
Python module that writes words is ``recovery.py``. ``tests/model`` contains a model of the
protocol. This module has the Python functions that encode and decode words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Bytes, Flags, Ints
from shmbuffer.memory.format.layout import SlotState

STATE_BITS = 2
_SHIFT, _STATE, _COMMITTED = np.uint64(STATE_BITS), np.uint64(3), np.uint64(SlotState.COMMITTED)


def states(words: NDArray[np.uint64]) -> Bytes:
    """Returns the state in each word, as the values of `SlotState`."""
    return (words & _STATE).astype(np.uint8)


def tickets(words: NDArray[np.uint64]) -> Ints:
    """Returns the ticket in each word. The ticket of an EMPTY slot has no meaning."""
    return (words >> _SHIFT).view(np.int64)


def committed(words: NDArray[np.uint64]) -> Flags:
    """Returns a mask of the slots that contain a committed item."""
    found: Flags = (words & _STATE) == _COMMITTED
    return found


def aborted(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the words of slots with the same tickets in the state ABORTED."""
    return words & ~_STATE | np.uint64(SlotState.ABORTED)


def committed_words(tickets: Ints) -> NDArray[np.uint64]:
    """Returns the words of slots that contain the items with these tickets.

    The word for a negative ticket is 0.
    """
    words: NDArray[np.uint64] = tickets.astype(np.uint64) << _SHIFT | _COMMITTED
    return np.where(tickets < 0, np.uint64(0), words)


def word(ticket: int, state: SlotState) -> int:
    """Returns the word for a ticket and a state."""
    return ticket << STATE_BITS | state
