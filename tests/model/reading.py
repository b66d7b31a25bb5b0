"""Steps in which items are drawn, copied and given priorities."""

from __future__ import annotations

from tests.model.shared import Shared
from tests.model.state import (
    COMMITTED,
    HIGHEST,
    ONE,
    ROUND,
    SLOT,
    TWO,
    WORD,
    At,
    K,
    fail,
    mass,
)


class Reading(Shared):
    """Samples of one row, and priority updates by ticket."""

    def sample_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "sample.locked", At.SAMPLE_DRAWN)

    def sample_drawn(self, s: bytearray, b: int, i: int) -> str | None:
        """Draws a slot with a mass and a committed item, and keeps the slot and its word."""
        word = s[self.word + i]
        if s[self.leaf + i] == 0 or word & 3 != COMMITTED:
            return None
        s[b + SLOT], s[b + WORD] = i, word
        # After one failed round, the row is copied while the mutex is held.
        s[b] = At.SAMPLE_COPY if s[b + ROUND] else At.SAMPLE_UNLOCKED
        return "sample.drawn"

    def sample_nothing(self, s: bytearray, b: int) -> str | None:
        """Returns to the caller without an item, because there is none to draw."""
        if self.count_committed(s):
            return None
        self.unlock(s, b)
        s[b + SLOT] = s[b + WORD] = 0
        self.next_op(s, b)
        return "sample.unlocked"

    def sample_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex, before the copy or after it."""
        self.unlock(s, b)
        if self.op(s, b).kind == "draw":
            self.next_op(s, b)
        elif s[b + ROUND]:
            self.accept(s, b)
        else:
            s[b] = At.SAMPLE_COPY
        return "sample.unlocked"

    def sample_copy(self, s: bytearray, b: int) -> str:
        """Copies one leaf array of the row."""
        i = s[b + SLOT]
        if s[b + K]:
            s[b + TWO] = s[self.two + i]
        else:
            s[b + ONE] = s[self.one + i]
        self.loop(
            s, b, 2, At.SAMPLE_COPY, At.SAMPLE_UNLOCKED if s[b + ROUND] else At.SAMPLE_VALIDATE
        )
        return "sample.copy"

    def sample_validate(self, s: bytearray, b: int) -> str:
        """Compares the word again. A row whose word has changed is drawn again."""
        if s[self.word + s[b + SLOT]] == s[b + WORD] or "no second look" in self.broken:
            self.accept(s, b)
        else:
            s[b + SLOT : b + ROUND] = bytes(ROUND - SLOT)
            s[b + ROUND] = 1
            s[b] = At.SAMPLE_LOCKED
        return "sample.validate"

    def accept(self, s: bytearray, b: int) -> None:
        """Returns the row to the caller."""
        if not s[b + ONE] == s[b + TWO] == (s[b + WORD] >> 2) + 1:
            fail("no torn, invented or uncommitted row is returned")
        s[b + ONE] = s[b + TWO] = s[b + ROUND] = 0
        self.next_op(s, b)

    # Priority update

    def update_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "update.locked", At.UPDATE_RAW)

    def update_raw(self, s: bytearray, b: int) -> str:
        """Sets the raw priority if the slot still holds the item that was named."""
        i, priority = s[b + SLOT], self.op(s, b).priority
        named = s[self.word + i] == s[b + WORD]
        if not named and "stale update" not in self.broken:
            return self.update_unlocked(s, b)
        s[HIGHEST] = max(s[HIGHEST], priority)
        s[self.raw + i] = priority
        if named:
            s[self.due + i] = priority
        s[b] = At.UPDATE_LEAF
        return "update.raw"

    def update_leaf(self, s: bytearray, b: int) -> str:
        """Sets the leaf of the slot."""
        s[self.leaf + s[b + SLOT]] = mass(self.op(s, b).priority)
        s[b] = At.UPDATE_PARENTS
        return "update.leaf"

    def update_parents(self, s: bytearray, b: int) -> str:
        """Recomputes the parents."""
        return self.climb(s, b, "update.parents", At.UPDATE_UNLOCKED)

    def update_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex."""
        self.unlock(s, b)
        self.next_op(s, b)
        return "update.unlocked"
