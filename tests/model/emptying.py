"""How all items go at once."""

from __future__ import annotations

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
    IN_RING,
    PAYLOAD,
    PHASE,
    SPAN,
    WRITING,
    At,
    K,
    fail,
)
from tests.model.writing import Writing


class Emptying(Writing):
    """`empty()`."""

    def empty_locked(self, s: bytearray, b: int) -> str | None:
        """The lock."""
        return self.lock(s, b, "empty.locked", At.EMPTY_NOTED)

    def empty_noted(self, s: bytearray, b: int) -> str:
        """Wait, or note the tickets up to the next lap, and what `write_count` will be."""
        e = s[b + ENTRY]
        other = self.around(s, e)
        if other and "empty() goes into a batch" not in self.broken:
            return self.wait_for(s, b, other)
        self.give_turn_back(s, e)
        s[e + FIRST], s[e + SPAN] = s[HEAD], -s[HEAD] % self.n
        goal = s[COUNT] if self.op(s, b).size else 0
        if "goal of empty() not noted" not in self.broken:
            s[e + GOAL] = goal
        s[b] = At.EMPTY_EMPTYING
        return "empty.noted"

    def around(self, s: bytearray, mine: int) -> int:
        """Return an entry whose batch goes around the end: the head would go into it."""
        for e in self.entries:
            around = s[e + FIRST] % self.n + s[e + SPAN] > self.n
            if e != mine and s[e + PHASE] == PAYLOAD and s[e + IN_RING] and around:
                return e
        return 0

    def empty_emptying(self, s: bytearray, b: int) -> str:
        """One store decides that all items are gone."""
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
        """The ring begins at slot 0 again."""
        e = s[b + ENTRY]
        self.set_head(s, s[e + FIRST] + s[e + SPAN])
        s[b] = At.EMPTY_LEAF
        return "empty.head"

    def empty_leaf(self, s: bytearray, b: int) -> str:
        """Every slot but those being written: its leaf."""
        if not self.next_to_empty(s, b):
            return self.empty_parents(s, b)
        self.unmass(s, s[b + K])
        s[b] = At.EMPTY_WORD
        return "empty.leaf"

    def empty_word(self, s: bytearray, b: int) -> str:
        """Its word."""
        self.empty_slot(s, b)
        s[b] = At.EMPTY_LEAF
        return "empty.word"

    def empty_parents(self, s: bytearray, b: int) -> str:
        """The parents."""
        s[b] = At.EMPTY_PARENTS
        return self.climb(s, b, "empty.parents", At.EMPTY_COUNT)

    def empty_count(self, s: bytearray, b: int) -> str:
        """`write_count`."""
        self.finish_count(s, s[b + ENTRY])
        s[b] = At.EMPTY_IDLE
        return "empty.count"

    def empty_idle(self, s: bytearray, b: int) -> str:
        """The claim is closed."""
        s[s[b + ENTRY] + PHASE] = IDLE
        s[b] = At.EMPTY_UNLOCKED
        return "empty.idle"

    def empty_unlocked(self, s: bytearray, b: int) -> str:
        """Unlock."""
        self.unlock(s, b)
        if s[HEAD] % self.n:
            fail("after empty() the ring begins at slot 0")
        if self.around(s, s[b + ENTRY]):
            fail("a batch is in the order of its tickets")
        self.next_op(s, b)
        return "empty.unlocked"
