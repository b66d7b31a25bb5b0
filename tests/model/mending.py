"""Steps in which another process takes over after a death: reap, repair and recovery."""

from __future__ import annotations

from tests.model.shared import Shared
from tests.model.state import (
    ABORTED,
    COMMITTED,
    COMMITTING,
    CURSOR,
    EMPTYING,
    FIRST,
    HEAD,
    IDLE,
    IN_RING,
    INCARNATION,
    INIT,
    LENGTH,
    LIVE,
    MARKING,
    MUTEX,
    OWNER,
    PAYLOAD,
    PHASE,
    READY,
    REAPED,
    REPAIRED,
    SEEN,
    SETTLED,
    SPAN,
    TARGET,
    WRITING,
    At,
    K,
    fail,
    mass,
)


class Mending(Shared):
    """Steps that roll the claims of dead clients back or forward, never half-way."""

    # Reap: the claim and the entry of a client that is proven dead

    def reaper_asks(self, s: bytearray, b: int, e: int) -> str | None:
        """Asks the kernel, without the mutex, whether the owner of an entry is dead."""
        if not s[e + LIVE] or s[e + OWNER]:
            return None
        s[b + TARGET], s[b + SEEN] = e, s[e + INCARNATION]
        s[b + REAPED] = At.REAPER
        s[b] = At.REAP_LOCKED
        return "reap.asked"

    def reap_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "reap.locked", At.REAP_CHECKED)

    def reap_checked(self, s: bytearray, b: int) -> str:
        """Compares again, because the entry may have been reaped, freed and taken meanwhile."""
        e = s[b + TARGET]
        stale = s[e + INCARNATION] != s[b + SEEN]
        if stale and "incarnation not compared again" in self.broken:
            stale = False
        if stale or (not s[e + LIVE] and "free entry reaped" not in self.broken):
            return self.reap_unlocked(s, b)
        s[b + CURSOR], s[b + SETTLED] = e, At.REAP_FREED
        if s[e + PHASE] == IDLE:
            s[b] = At.REAP_FREED
            return "reap.idle"
        if "entry freed first" in self.broken:
            s[e + LIVE] = 0
        return self.reap_leaf(s, b)

    def reap_leaf(self, s: bytearray, b: int) -> str:
        """Sets the leaf of the next slot that the claim has marked or still had to mark.

        In an `empty()`, it is the leaf of the next slot that is not being written.
        """
        e = s[b + CURSOR]
        phase = s[e + PHASE]
        s[b] = At.REAP_WORD
        if phase == EMPTYING:
            if "emptying undone" not in self.broken and self.next_to_empty(s, b):
                s[self.leaf + s[b + K]] = 0
                return "reap.leaf"
        else:
            for k in range(s[b + K], s[e + SPAN]):
                ticket = s[e + FIRST] + k
                i = ticket % self.n
                ours = s[self.word + i] == (ticket << 2 | WRITING)
                if ours and self.forward(phase):
                    self.settle_leaf(s, i)
                elif ours or self.is_passed(s, e, ticket):
                    s[self.leaf + i] = 0
                else:
                    continue
                s[b + K] = k
                return "reap.leaf"
        s[b + K] = 0
        return self.reap_head(s, b)

    def is_passed(self, s: bytearray, e: int, ticket: int) -> bool:
        """True if a ring write that died still had to mark the item in this slot."""
        word = s[self.word + ticket % self.n]
        passed = s[e + PHASE] == MARKING and s[e + IN_RING] and word >> 2 < ticket
        return bool(passed) and word & 3 == COMMITTED and "unmarked items stay" not in self.broken

    def forward(self, phase: int) -> bool:
        """True if a claim of a dead owner is rolled forward in this phase."""
        if phase == COMMITTING:
            return "committing rolled back" not in self.broken
        return "dead writer's slots committed" in self.broken

    def reap_word(self, s: bytearray, b: int) -> str:
        """Sets the word of that slot."""
        e = s[b + CURSOR]
        if s[e + PHASE] == EMPTYING:
            self.empty_slot(s, b)
        else:
            ticket = s[e + FIRST] + s[b + K]
            i = ticket % self.n
            forward = s[self.word + i] & 3 == WRITING and self.forward(s[e + PHASE])
            s[self.word + i] = ticket << 2 | (COMMITTED if forward else ABORTED)
            if s[e + PHASE] == MARKING:
                s[self.told + i] = 0  # an older item, which had to be removed in any case
        s[b + K] += 1
        s[b] = At.REAP_LEAF
        return "reap.word"

    def reap_head(self, s: bytearray, b: int) -> str:
        """Moves the head, if the dead client had not moved it."""
        e = s[b + CURSOR]
        undone = s[e + PHASE] == EMPTYING and "emptying undone" in self.broken
        if not undone and "head not repaired" not in self.broken:
            self.set_head(s, max(s[HEAD], s[e + FIRST] + s[e + SPAN]))
        counts = s[e + PHASE] in (COMMITTING, EMPTYING) and "count not repaired" not in self.broken
        s[b] = At.REAP_COUNT if counts and not undone else At.REAP_PARENTS
        return "reap.head"

    def reap_count(self, s: bytearray, b: int) -> str:
        """Sets `write_count`."""
        self.finish_count(s, s[b + CURSOR])
        s[b] = At.REAP_PARENTS
        return "reap.count"

    def reap_parents(self, s: bytearray, b: int) -> str:
        """Recomputes the parents."""
        return self.climb(s, b, "reap.parents", At.REAP_IDLE)

    def reap_idle(self, s: bytearray, b: int) -> str:
        """Closes the claim, whose batch is now complete or absent."""
        e = s[b + CURSOR]
        states = set()
        for ticket in range(s[e + FIRST], s[e + FIRST] + s[e + SPAN]):
            word = s[self.word + ticket % self.n]
            if word & 3 and word >> 2 == ticket:
                states.add(word & 3)
        if len(states) > 1 and s[e + PHASE] != EMPTYING:
            fail("a dead writer's batch is whole or absent")
        if s[HEAD] < s[e + FIRST] + s[e + SPAN] and s[e + PHASE] == EMPTYING:
            fail("after empty() the ring begins at slot 0")
        s[e + PHASE] = IDLE
        s[b] = s[b + SETTLED]
        return "reap.idle"

    def reap_freed(self, s: bytearray, b: int) -> str:
        """Frees the entry. Only from here on may another client take it."""
        self.free(s, s[b + TARGET])
        s[b] = At.REAP_UNLOCKED
        return "reap.freed"

    def reap_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex."""
        self.unlock(s, b)
        s[b] = s[b + REAPED]
        for register in (SETTLED, REAPED, TARGET, SEEN, CURSOR):
            s[b + register] = 0
        return "reap.unlocked"

    def repair_claims(self, s: bytearray, b: int) -> str:
        """Finishes the claim that was open under the mutex. Claims in PAYLOAD are reaped later."""
        for e in self.entries:
            ends = {MARKING, COMMITTING, EMPTYING}
            if "repair ends payload claims" in self.broken:
                ends.add(PAYLOAD)
            if s[e + PHASE] in ends and "repair leaves claims" not in self.broken:
                s[b + CURSOR], s[b + SETTLED] = e, At.REPAIR_CLAIMS
                return self.reap_leaf(s, b)
        s[b + CURSOR] = s[b + SETTLED] = 0
        s[b] = At.REPAIR_CONSISTENT if "tree not rebuilt" in self.broken else At.REPAIR_LEAVES
        return "repair.claims"

    def rebuild_leaf(self, s: bytearray, i: int) -> None:
        """Computes a leaf from the word and the raw priority."""
        committed = s[self.word + i] & 3 == COMMITTED
        s[self.leaf + i] = mass(self.priority_of(s, i)) if committed else 0

    def repair_leaves(self, s: bytearray, b: int) -> str:
        """Recomputes every leaf, one per step."""
        if "leaves not rebuilt" not in self.broken:
            self.rebuild_leaf(s, s[b + K])
        self.loop(s, b, self.n, At.REPAIR_LEAVES, At.REPAIR_PARENTS)
        return "repair.leaves"

    def repair_parents(self, s: bytearray, b: int) -> str:
        """Recomputes every parent, and then the length."""
        self.climb(s, b, "repair.parents", At.REPAIR_CONSISTENT)
        if s[b] == At.REPAIR_CONSISTENT and "length not counted again" not in self.broken:
            s[LENGTH] = self.count_committed(s)
        return "repair.parents"

    def repair_consistent(self, s: bytearray, b: int) -> str:
        """Makes the mutex consistent and continues with the step for which it was taken."""
        s[b] = s[b + REPAIRED]
        s[b + REPAIRED] = 0
        return "repair.consistent"

    # Recovery: no client is alive

    def recover_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the initialisation lock, which protects a recovery in place of the mutex.

        If the state is RECOVERING under this lock, the recovering process and all others are dead.
        """
        if s[INIT] or (s[READY] and not self.nobody_lives(s)) or self.op(s, b).kind == "join":
            return None
        s[INIT] = b
        s[b] = At.RECOVER_STATE
        return "recover.locked"

    def recover_state(self, s: bytearray, b: int) -> str:
        """Sets the state to RECOVERING, so that the next process recovers again after a death."""
        s[READY] = 0
        s[b] = At.RECOVER_MUTEX
        return "recover.state"

    def recover_mutex(self, s: bytearray, b: int) -> str:
        """Creates a new mutex."""
        s[MUTEX] = 0
        s[b] = At.RECOVER_REAPED
        return "recover.mutex"

    def recover_reaped(self, s: bytearray, b: int) -> str:
        """Goes on when every entry is reaped, to take an entry later."""
        for e in self.entries:
            if s[e + LIVE]:
                s[b + CURSOR], s[b + SETTLED] = e, At.RECOVER_FREED
                if s[e + PHASE] == IDLE or "recovery does not reap" in self.broken:
                    return self.recover_freed(s, b)
                return self.reap_leaf(s, b)
        s[b + CURSOR] = s[b + SETTLED] = 0
        self.take(s, b, self.entries[0])
        s[b] = At.RECOVER_READY if "READY first" in self.broken else At.RECOVER_WORDS
        return "recover.reaped"

    def recover_freed(self, s: bytearray, b: int) -> str:
        """Frees one entry after the other."""
        self.free(s, s[b + CURSOR])
        s[b] = At.RECOVER_REAPED
        return "reap.freed"

    def recover_words(self, s: bytearray, b: int) -> str:
        """Clears impossible words. A death alone leaves none once all entries are reaped."""
        if s[self.word + s[b + K]] & 3 == WRITING:
            fail("a WRITING slot is covered by one claim")
        self.loop(s, b, self.n, At.RECOVER_WORDS, At.RECOVER_PRIORITIES)
        return "recover.words"

    def recover_priorities(self, s: bytearray, b: int) -> str:
        """Corrects impossible priorities."""
        i = s[b + K]
        if s[self.word + i] & 3 == COMMITTED:
            s[self.raw + i] = self.priority_of(s, i)
        self.loop(s, b, self.n, At.RECOVER_PRIORITIES, At.RECOVER_TREE)
        return "recover.priorities"

    def recover_tree(self, s: bytearray, b: int) -> str:
        """Recomputes leaves, parents and length."""
        k = s[b + K]
        if k < self.n:
            self.rebuild_leaf(s, k)
        else:
            self.recompute(s, k - self.n)
        self.loop(s, b, self.n + self.nodes, At.RECOVER_TREE, At.RECOVER_READY)
        if s[b] == At.RECOVER_READY:
            s[LENGTH] = self.count_committed(s)
            if "READY first" in self.broken:
                s[INIT] = 0
                self.next_op(s, b)
        return "recover.tree"

    def recover_ready(self, s: bytearray, b: int) -> str:
        """Sets the state to READY as the last step."""
        s[READY] = 1
        if "READY first" in self.broken:
            s[b] = At.RECOVER_WORDS
        else:
            s[INIT] = 0
            self.next_op(s, b)
        return "recover.ready"
