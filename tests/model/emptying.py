"""The steps of `empty()`, which removes all items at once."""

from __future__ import annotations

from tests.model.shared import Shared
from tests.model.state import (
    COMMITTED,
    COUNT,
    COUNTED,
    EMPTYING,
    ENTRY,
    FIRST,
    GOAL,
    HEAD,
    IDLE,
    PHASE,
    SPAN,
    WRITING,
    At,
    K,
    fail,
)


class Emptying(Shared):
    """The steps of `empty()`."""

    def empty_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "empty.locked", At.EMPTY_NOTED)

    def empty_noted(self, s: bytearray, b: int) -> str:
        """Notes the tickets up to the next lap, and the final value of `write_count`."""
        e = s[b + ENTRY]
        s[e + FIRST], s[e + SPAN] = s[HEAD], -s[HEAD] % self.n
        goal = s[COUNT] if self.op(s, b).size else 0
        if "goal of empty() not noted" not in self.broken:
            s[e + GOAL] = goal
        s[b] = At.EMPTY_EMPTYING
        return "empty.noted"

    def empty_emptying(self, s: bytearray, b: int) -> str:
        """Decides with one store that all items are gone."""
        s[s[b + ENTRY] + PHASE] = EMPTYING
        for i in range(self.n):
            word = s[self.word + i]
            if word & 3 == COMMITTED:
                s[self.gone + i] = (word >> 2) + 1
                s[self.told + i] = 0
            if word & 3 != WRITING:
                s[self.due + i] = 0
        if not self.op(s, b).size:
            s[COUNTED] = 0
        s[b] = At.EMPTY_HEAD
        return "empty.emptying"

    def empty_head(self, s: bytearray, b: int) -> str:
        """Moves the head so that the ring begins at slot 0 again."""
        e = s[b + ENTRY]
        self.set_head(s, s[e + FIRST] + s[e + SPAN])
        s[b] = At.EMPTY_LEAF
        return "empty.head"

    def empty_leaf(self, s: bytearray, b: int) -> str:
        """Clears the leaf of the next slot, unless the slot is being written."""
        if not self.next_to_empty(s, b):
            return self.empty_parents(s, b)
        self.unmass(s, s[b + K])
        s[b] = At.EMPTY_WORD
        return "empty.leaf"

    def empty_word(self, s: bytearray, b: int) -> str:
        """Clears the word of that slot."""
        self.empty_slot(s, b)
        s[b] = At.EMPTY_LEAF
        return "empty.word"

    def empty_parents(self, s: bytearray, b: int) -> str:
        """Recomputes the parents."""
        s[b] = At.EMPTY_PARENTS
        return self.climb(s, b, "empty.parents", At.EMPTY_COUNT)

    def empty_count(self, s: bytearray, b: int) -> str:
        """Sets `write_count`."""
        self.finish_count(s, s[b + ENTRY])
        s[b] = At.EMPTY_IDLE
        return "empty.count"

    def empty_idle(self, s: bytearray, b: int) -> str:
        """Closes the claim."""
        s[s[b + ENTRY] + PHASE] = IDLE
        s[b] = At.EMPTY_UNLOCKED
        return "empty.idle"

    def empty_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex."""
        self.unlock(s, b)
        if s[HEAD] % self.n:
            fail("after empty() the ring begins at slot 0")
        self.next_op(s, b)
        return "empty.unlocked"
