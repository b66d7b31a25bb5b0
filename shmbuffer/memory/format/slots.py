"""The life of a slot: who may touch it, and when.

     EMPTY ──claim──▶ WRITING ──commit──▶ COMMITTED ──claimed again──▶ WRITING
                         └──abort, or its writer died──▶ ABORTED ──claimed again──▶ WRITING

     COMMITTED, ABORTED ──the buffer is emptied──▶ EMPTY
     COMMITTED ──evicted: a record whose bytes are needed──▶ EMPTY
     any ──found to be wrong by recovery, while nobody is alive──▶ EMPTY

One 64-bit word a slot, little-endian:
     bits 0-1   state    EMPTY 0, WRITING 1, COMMITTED 2, ABORTED 3
     bits 2-63  ticket   the write that the slot belongs to; slot = ticket mod capacity

Beside the word, in arrays of their own: a checksum (CRC32C over ticket and payload), the source
(who wrote it, in which of its streams: `layout.source_of`), and the raw priority of each lane.

Always true
  1. A ticket is used once, so two equal looks at a word mean that nothing happened between them.
  2. A reader copies out first and compares after: a copy is kept if both looks saw the same
     COMMITTED word.
  3. The claim in the registry is written before the first word, so a WRITING slot always says whom
     to ask.
  4. Words change only while the mutex is held, or in a recovery, when nobody is alive; payload,
     checksum, source and raw priority of a WRITING slot belong to its writer alone, who needs no
     lock for them.
  5. A placed write gives slot i the ticket head + ((i - head) mod N) and claims the whole lap, so
     the position of the ring stays and no ticket is used twice.
If the writer dies: before its phase is COMMITTING the batch is aborted, from then on it is
committed; never a part of it. The raw priorities are written with the payload, so a batch that is
rolled forward keeps them.

Words are written in ``_native/``: ``claim.c`` (`open_claim`), ``commit.c`` (`shmb_commit`,
`shmb_abort_claim`), ``repair.c`` (for the dead: `roll_back`, `roll_forward`; for `empty`:
`empty_slot`), ``records.c`` (`evict`; in recovery `forget`), ``sharing.c`` (in recovery
`shmb_mend_links`); and in ``recovery.py``. The model of the protocol is in ``tests/model``. Here is
what Python needs to read the words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Bytes, Flags, Ints
from shmbuffer.memory.format.layout import SlotState

STATE_BITS = 2
_SHIFT, _STATE, _COMMITTED = np.uint64(STATE_BITS), np.uint64(3), np.uint64(SlotState.COMMITTED)


def states(words: NDArray[np.uint64]) -> Bytes:
    """State of each word, as numbers of `SlotState`."""
    return (words & _STATE).astype(np.uint8)


def tickets(words: NDArray[np.uint64]) -> Ints:
    """Ticket of each word; meaningless for EMPTY ones."""
    return (words >> _SHIFT).view(np.int64)


def committed(words: NDArray[np.uint64]) -> Flags:
    """Which slots hold an item."""
    found: Flags = (words & _STATE) == _COMMITTED
    return found


def aborted(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the words of the same tickets, ABORTED."""
    return words & ~_STATE | np.uint64(SlotState.ABORTED)


def committed_words(tickets: Ints) -> NDArray[np.uint64]:
    """Words of slots that hold the items of these tickets; 0 where the ticket is -1."""
    words: NDArray[np.uint64] = tickets.astype(np.uint64) << _SHIFT | _COMMITTED
    return np.where(tickets < 0, np.uint64(0), words)


def word(ticket: int, state: SlotState) -> int:
    """Returns the word of a ticket in a state."""
    return ticket << STATE_BITS | state
