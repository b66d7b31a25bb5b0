"""The life cycle of a slot, and the meaning of its word.

     EMPTY ──claim──▶ WRITING ──commit──▶ COMMITTED ──claimed again──▶ WRITING
                         └──abort, or its writer died──▶ ABORTED ──claimed again──▶ WRITING

     COMMITTED, ABORTED ──the buffer is emptied──▶ EMPTY
     COMMITTED ──evicted: a record whose bytes are needed──▶ EMPTY
     any ──refused by recovery, while no client is alive──▶ EMPTY

One 64-bit word a slot, little-endian:
     bits 0-1   state    EMPTY 0, WRITING 1, COMMITTED 2, ABORTED 3
     bits 2-63  ticket   the write that the slot belongs to; slot = ticket mod capacity

Beside the word, separate arrays contain a checksum (CRC32C over ticket and payload), the source,
and the raw priority of each lane. The source is the writer and its stream (`layout.source_of`).

Always true
  1. A ticket is used once. If two reads of a word are equal, nothing happened between them.
  2. A reader copies the item first, and compares afterwards. It keeps the copy if the word was the
     same COMMITTED word before and after.
  3. The claim is in the registry before the first word is written, so the writer of a WRITING slot
     can always be found.
  4. Words change only while the mutex is held, or in a recovery, when no client is alive. The
     payload, checksum, source and raw priority of a WRITING slot belong to its writer alone, which
     needs no lock for them.
  5. A placed write gives slot i the ticket head + ((i - head) mod N) and claims a whole lap. The
     position of the ring is unchanged, and no ticket is used twice.
If the writer dies: the batch is aborted if its phase was before COMMITTING, and committed
otherwise. It is never committed in part. Raw priorities are written with the payload, so a batch
that is rolled forward keeps them.

These functions in ``_native/`` write words: `open_claim` in ``claim.c``, `shmb_commit` and
`shmb_abort_claim` in ``commit.c``, `roll_back`, `roll_forward` and `empty_slot` in ``repair.c``,
`evict` and `remove_item` in ``records.c``, and `shmb_repair_links` in ``sharing.c``. Recovery also
writes them in ``recovery.py``. The model of the protocol is in ``tests/model``. This module
contains only the functions that Python needs to read the words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Bytes, Flags, Ints
from shmbuffer.memory.format.layout import SlotState

STATE_BITS = 2
_SHIFT, _STATE, _COMMITTED = np.uint64(STATE_BITS), np.uint64(3), np.uint64(SlotState.COMMITTED)


def states(words: NDArray[np.uint64]) -> Bytes:
    """Returns the state of each word, as numbers of `SlotState`."""
    return (words & _STATE).astype(np.uint8)


def tickets(words: NDArray[np.uint64]) -> Ints:
    """Returns the ticket of each word; meaningless for EMPTY ones."""
    return (words >> _SHIFT).view(np.int64)


def committed(words: NDArray[np.uint64]) -> Flags:
    """Returns which slots contain an item."""
    found: Flags = (words & _STATE) == _COMMITTED
    return found


def aborted(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns words with the same tickets and the state ABORTED."""
    return words & ~_STATE | np.uint64(SlotState.ABORTED)


def committed_words(tickets: Ints) -> NDArray[np.uint64]:
    """Returns the words of slots that contain the items of these tickets; 0 for the ticket -1."""
    words: NDArray[np.uint64] = tickets.astype(np.uint64) << _SHIFT | _COMMITTED
    return np.where(tickets < 0, np.uint64(0), words)


def word(ticket: int, state: SlotState) -> int:
    """Returns the word of a ticket in a state."""
    return ticket << STATE_BITS | state
