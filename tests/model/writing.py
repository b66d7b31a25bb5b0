"""Steps that write items to slots: claim, copy, commit, abort, and waiting for a slot."""

from __future__ import annotations

from tests.model.shared import Shared
from tests.model.state import (
    ABORTED,
    COMMITTED,
    COMMITTING,
    COUNT,
    COUNTED,
    DEFAULT,
    ENTRY,
    FIRST,
    GOAL,
    HEAD,
    HIGHEST,
    IDLE,
    IN_RING,
    INCARNATION,
    KEPT,
    LENGTH,
    LIVE,
    MARKING,
    MUTEX,
    OWNER,
    PAYLOAD,
    PHASE,
    REAPED,
    SEEN,
    SPAN,
    TARGET,
    TURN,
    WRITING,
    At,
    K,
    fail,
)


class Writing(Shared):
    """Steps of ring writes, placed writes and in-place writes."""

    def wanted(self, s: bytearray, b: int) -> tuple[int, ...]:
        """Returns the slots that a write needs at the current head."""
        op = self.op(s, b)
        if op.kind != "ring":
            return op.slots
        end = s[HEAD] + op.size
        return tuple(t % self.n for t in range(end - min(op.size, self.n), end))

    def tickets(self, s: bytearray, b: int) -> list[int]:
        """Returns the tickets of the items of an open claim."""
        first = s[s[b + ENTRY] + FIRST]
        op = self.op(s, b)
        if op.kind == "ring":
            return list(range(first, first + min(op.size, self.n)))
        return [first + (i - first) % self.n for i in op.slots]

    def obstacle(self, s: bytearray, b: int) -> int:
        """Returns the entry for which a writer must wait: an earlier position or a WRITING slot."""
        mine = s[b + ENTRY]
        if "no turns" not in self.broken:
            ahead = self.turn_ahead(s, mine)
            if ahead:
                return ahead
        if "waiting writer holds marks" in self.broken:
            return 0
        for i in self.wanted(s, b):
            word = s[self.word + i]
            if word & 3 == WRITING:
                other = self.claim_over(s, word >> 2)
                if other != mine and not (
                    s[other + OWNER] and "living writer's slot taken" in self.broken
                ):
                    return other
        return 0

    def write_locked(self, s: bytearray, b: int) -> str | None:
        """W1: takes the mutex. Values that were read before it do not count."""
        return self.lock(s, b, "write.locked", At.WRITE_NOTED)

    def write_noted(self, s: bytearray, b: int) -> str:
        """W1, W2: checks the slots, and notes the claim, or a queue position if it has to wait."""
        mine, op = s[b + ENTRY], self.op(s, b)
        other = self.obstacle(s, b)
        if other:
            s[b + TARGET], s[b + SEEN] = other, s[other + INCARNATION]
            s[b] = At.WAIT_SLEEP
            if s[mine + TURN]:
                return self.wait_sleep(s, b)
            s[mine + TURN] = 1 + max(s[e + TURN] for e in self.entries)
            return "wait.turn"
        ahead = self.turn_ahead(s, mine)
        if ahead and s[ahead + OWNER]:
            fail("nobody overtakes an earlier turn")
        head = s[HEAD]
        if op.kind == "ring":
            span = min(op.size, self.n)
            first = head + op.size - span
        elif "placed claim of one ticket" in self.broken:
            span, first = 1, head + (op.slots[0] - head) % self.n
        else:
            span, first = self.n, head
        s[mine + FIRST], s[mine + SPAN], s[mine + IN_RING] = first, span, op.kind == "ring"
        if "goal at claim" in self.broken:
            s[mine + GOAL] = s[COUNT] + op.size
        late = self.broken & {"claim after head", "claim after marks"}
        s[b] = At.WRITE_HEAD if late else At.WRITE_MARKING
        return "write.noted"

    def write_marking(self, s: bytearray, b: int) -> str:
        """W2: decides with one store that the claim exists."""
        s[s[b + ENTRY] + PHASE] = MARKING
        s[b] = At.WRITE_HEAD
        if "claim after marks" in self.broken:
            s[b] = At.WRITE_CLAIM_PARENTS
        elif self.broken & {"claim after head", "head after marks"}:
            s[b] = At.WRITE_MARK
        return "write.marking"

    def write_head(self, s: bytearray, b: int) -> str:
        """W3: takes the tickets and gives the queue position back."""
        e = s[b + ENTRY]
        if "placed claim of one ticket" in self.broken and self.op(s, b).kind != "ring":
            self.set_head(s, s[HEAD] + 1)
        else:
            self.set_head(s, s[e + FIRST] + s[e + SPAN])
        self.give_turn_back(s, e)
        s[b] = At.WRITE_MARK
        if "head after marks" in self.broken:
            s[b] = At.WRITE_CLAIM_PARENTS
        elif "claim after head" in self.broken:
            s[b] = At.WRITE_MARKING
        return "write.head"

    def write_mark(self, s: bytearray, b: int) -> str:
        """W4: marks the slot as being written, which removes its old item."""
        ticket = self.tickets(s, b)[s[b + K]]
        i = ticket % self.n
        old = s[self.word + i]
        if old & 3 == WRITING and "waiting writer holds marks" in self.broken:
            return self.hold(s, b)
        if ticket < s[self.used + i] and "waiting writer holds marks" not in self.broken:
            fail("a ticket is used once")
        s[self.used + i] = ticket + 1
        in_place = self.op(s, b).kind == "in place"
        if in_place and (old & 3 == COMMITTED or "stale priority kept in place" in self.broken):
            s[b + KEPT] |= 1 << i
        if not in_place or old & 3 != COMMITTED:
            s[self.due + i] = 0
        s[self.told + i] = 0
        if "no WRITING mark" not in self.broken:
            s[self.word + i] = ticket << 2 | WRITING
        s[b] = At.WRITE_UNMASSED
        return "write.mark"

    def write_unmassed(self, s: bytearray, b: int) -> str:
        """W5: removes the slot from the tree, so that it is not drawn."""
        tickets = self.tickets(s, b)
        self.unmass(s, tickets[s[b + K]] % self.n)
        then = At.WRITE_CLAIM_PARENTS
        if "claim after marks" in self.broken:
            then = At.WRITE_MARKING
        elif "head after marks" in self.broken:
            then = At.WRITE_HEAD
        self.loop(s, b, len(tickets), At.WRITE_MARK, then)
        return "write.mass"

    def write_claim_parents(self, s: bytearray, b: int) -> str:
        """W6: recomputes the parents."""
        return self.climb(s, b, "write.claim_parents", At.WRITE_PAYLOAD)

    def write_payload(self, s: bytearray, b: int) -> str:
        """W7: sets the phase from which on the claim may be visible without the mutex."""
        s[s[b + ENTRY] + PHASE] = PAYLOAD
        s[b] = At.WRITE_CLAIMED
        return "write.payload"

    def write_claimed(self, s: bytearray, b: int) -> str:
        """W8: releases the mutex."""
        self.unlock(s, b)
        s[b] = At.WRITE_RELOCKED if "commit before payload" in self.broken else At.WRITE_COPY
        return "write.claimed"

    def write_copy(self, s: bytearray, b: int) -> str:
        """W9: copies one leaf array of all items; the raw priorities are set with the first one."""
        op = self.op(s, b)
        for ticket in self.tickets(s, b):
            i = ticket % self.n
            if s[b + K]:
                s[self.two + i] = ticket + 1
            else:
                s[self.one + i] = ticket + 1
                if not s[b + KEPT] >> i & 1:
                    s[self.raw + i] = op.priority
                if not s[self.due + i]:
                    s[self.due + i] = op.priority
        self.loop(s, b, 2, At.WRITE_COPY, At.WRITE_CHECKSUM)
        return "write.copy"

    def write_fails(self, s: bytearray, b: int) -> str | None:
        """W9: raises an error between two leaf arrays."""
        if not self.scenario.errors or s[b + K] == 0:
            return None
        s[b + K] = 0
        s[b] = At.ABORT_LOCKED
        return "write.copy"

    def write_checksum(self, s: bytearray, b: int) -> str:
        """W9: sets the checksums, which include the tickets."""
        for ticket in self.tickets(s, b):
            s[self.crc + ticket % self.n] = ticket + 1
            if "told before the commit" in self.broken:
                s[self.told + ticket % self.n] = ticket + 1
        s[b] = At.WRITE_RELOCKED
        if "commit before payload" in self.broken:
            self.next_op(s, b)
        return "write.checksum"

    def write_relocked(self, s: bytearray, b: int) -> str | None:
        """W10: takes the mutex."""
        return self.lock(s, b, "write.relocked", At.WRITE_GOAL)

    def write_goal(self, s: bytearray, b: int) -> str:
        """W10: notes the final `write_count`. Two claims may be open, so it cannot be earlier."""
        size = self.op(s, b).size
        if "count added" in self.broken:
            s[s[b + ENTRY] + GOAL] = size
        elif "goal at claim" not in self.broken:
            s[s[b + ENTRY] + GOAL] = s[COUNT] + size
        s[b] = At.WRITE_COMMITTING
        return "write.goal"

    def write_committing(self, s: bytearray, b: int) -> str:
        """W10: decides with one store that the batch is present."""
        s[s[b + ENTRY] + PHASE] = COMMITTING
        s[COUNTED] += self.op(s, b).size
        for ticket in self.tickets(s, b):
            due = self.due + ticket % self.n
            if s[due] == DEFAULT:
                s[due] = s[HIGHEST]
        s[b] = At.WRITE_LEAF
        return "write.committing"

    def write_leaf(self, s: bytearray, b: int) -> str:
        """W11: sets the leaf of the slot."""
        self.settle_leaf(s, self.tickets(s, b)[s[b + K]] % self.n)
        s[b] = At.WRITE_COMMIT
        return "write.leaf"

    def write_commit(self, s: bytearray, b: int) -> str:
        """W11: sets the word of the slot."""
        tickets = self.tickets(s, b)
        ticket = tickets[s[b + K]]
        i = ticket % self.n
        if s[self.word + i] != (ticket << 2 | WRITING) and "no WRITING mark" not in self.broken:
            fail("a living writer keeps its slots")
        s[self.word + i] = ticket << 2 | COMMITTED
        self.loop(s, b, len(tickets), At.WRITE_LEAF, At.WRITE_COMMIT_PARENTS)
        return "write.commit"

    def write_commit_parents(self, s: bytearray, b: int) -> str:
        """W12: recomputes the parents and the length. After a death, the repair does it."""
        if s[b + K] == 0:
            s[LENGTH] += len(self.tickets(s, b))
        return self.climb(s, b, "write.commit_parents", At.WRITE_COUNT)

    def write_count(self, s: bytearray, b: int) -> str:
        """W12: sets `write_count` to its goal and adds nothing, so the step can be repeated."""
        self.finish_count(s, s[b + ENTRY])
        s[b] = At.WRITE_IDLE
        return "write.count"

    def write_idle(self, s: bytearray, b: int) -> str:
        """W13: closes the claim."""
        s[s[b + ENTRY] + PHASE] = IDLE
        s[b] = At.WRITE_DONE
        return "write.idle"

    def write_done(self, s: bytearray, b: int) -> str:
        """W14: releases the mutex. Only then does the call return."""
        self.unlock(s, b)
        for ticket in self.tickets(s, b):
            i = ticket % self.n
            if s[self.word + i] == (ticket << 2 | COMMITTED):
                s[self.told + i] = ticket + 1
            elif s[self.used + i] <= ticket + 1 and s[self.gone + i] <= ticket:
                fail("an acknowledged item is there")
        if "commit before payload" in self.broken:
            s[b] = At.WRITE_COPY
        else:
            self.next_op(s, b)
        return "write.done"

    def abort_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "abort.locked", At.ABORT_WORD)

    def abort_word(self, s: bytearray, b: int) -> str:
        """Gives the slots back empty. Their leaves have been zero since the claim."""
        tickets = self.tickets(s, b)
        ticket = tickets[s[b + K]]
        s[self.word + ticket % self.n] = ticket << 2 | ABORTED
        self.loop(s, b, len(tickets), At.ABORT_WORD, At.ABORT_IDLE)
        return "abort.word"

    def abort_idle(self, s: bytearray, b: int) -> str:
        """Closes the claim."""
        s[s[b + ENTRY] + PHASE] = IDLE
        s[b] = At.ABORT_UNLOCKED
        return "abort.idle"

    def abort_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex. The call raises the error."""
        self.unlock(s, b)
        self.next_op(s, b)
        return "abort.unlocked"

    # Waiting, during which a process holds only a queue position

    def wait_sleep(self, s: bytearray, b: int) -> str:
        """Releases the mutex and sleeps."""
        self.unlock(s, b)
        s[b] = At.WAITING
        return "wait.sleep"

    def wait_wakes(self, s: bytearray, b: int) -> str:
        """Checks again. A sleeper does so at intervals even if it is not woken."""
        s[b + TARGET] = s[b + SEEN] = 0
        s[b] = At.WRITE_LOCKED
        return "wait.woken"

    def wait_asks(self, s: bytearray, b: int) -> str | None:
        """Reaps the other client if the kernel says that it is dead, and checks again."""
        e = s[b + TARGET]
        if s[e + OWNER] or not s[e + LIVE] or s[e + INCARNATION] != s[b + SEEN]:
            return None
        if "dead turn not reaped" in self.broken and s[e + PHASE] == IDLE:
            return None
        s[b + REAPED] = At.WRITE_LOCKED
        s[b] = At.REAP_LOCKED
        return "reap.asked"

    def wait_forfeits(self, s: bytearray, b: int) -> str | None:
        """Moves the client ahead to the end of the queue, because it was too slow."""
        ahead = self.turn_ahead(s, s[b + ENTRY])
        allowed = self.scenario.forfeits and "turn not forfeited" not in self.broken
        if not allowed or not ahead or s[MUTEX] != 0:
            return None
        s[MUTEX] = b
        self.give_turn_back(s, ahead)
        s[ahead + TURN] = 1 + max(s[e + TURN] for e in self.entries)
        s[b] = At.WAIT_SLEEP
        return "wait.forfeit"

    def wait_times_out(self, s: bytearray, b: int) -> str | None:
        """Gives the queue position back after the deadline. No slot was taken."""
        allowed = self.scenario.timeouts and "no deadline" not in self.broken
        if not allowed or s[MUTEX] != 0:
            return None
        s[MUTEX] = b
        self.give_turn_back(s, s[b + ENTRY])
        s[b] = At.WAIT_LEFT
        return "wait.timeout"

    def wait_left(self, s: bytearray, b: int) -> str:
        """Releases the mutex. The call raises RingOverrunError."""
        self.unlock(s, b)
        s[b + TARGET] = s[b + SEEN] = 0
        self.next_op(s, b)
        return "wait.left"

    def hold(self, s: bytearray, b: int) -> str:
        """Waits with marks. This step exists only if the rule is switched off."""
        for node in range(self.nodes):
            self.recompute(s, node)
        s[s[b + ENTRY] + PHASE] = PAYLOAD
        self.unlock(s, b)
        s[b] = At.WAIT_HOLDING
        return "wait.sleep"

    def hold_ends(self, s: bytearray, b: int) -> str | None:
        """Continues to mark. This step exists only if the rule is switched off."""
        i = self.tickets(s, b)[s[b + K]] % self.n
        if s[self.word + i] & 3 == WRITING or s[MUTEX] != 0:
            return None
        s[MUTEX] = b
        s[s[b + ENTRY] + PHASE] = MARKING
        s[b] = At.WRITE_MARK
        return "wait.woken"
