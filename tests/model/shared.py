"""What all steps have in common: the mutex, the tree, claims and turns.

A step is a method that gets a copy of the state and the offset `b` of the registers of the process
that takes it (which is also the identity of that process). It changes the copy, sets the next
program counter and returns its label, or None where it cannot be taken now. Methods that return no
label are parts of steps.
"""

from __future__ import annotations

from tests.model.state import (
    ABORTED,
    AGAIN,
    COMMITTED,
    CONTROL_SIZE,
    COUNT,
    COUNTED,
    CRASHES,
    CURSOR,
    DEFAULT,
    EMPTYING,
    ENTRY,
    ENTRY_SIZE,
    FIRST,
    GOAL,
    HEAD,
    HIGHEST,
    IDLE,
    INCARNATION,
    KILLS,
    LENGTH,
    LIVE,
    MUTEX,
    NEWCOMERS,
    OP,
    OWNER,
    OWNER_DEAD,
    PHASE,
    READY,
    REGISTERS,
    REPAIRED,
    SLOT,
    SPAN,
    STARTS,
    STOPS,
    TURN,
    WORD,
    WRITING,
    At,
    K,
    Op,
    Scenario,
    ViolationError,
    fail,
    mass,
)


class Shared:
    """The layout of one scenario, its first state, and the parts of steps."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.broken = scenario.broken
        self.n = n = scenario.capacity
        self.nodes = 1 if n == 2 else 3
        at = CONTROL_SIZE
        self.word, self.leaf, self.raw, self.one, self.two, self.crc = range(at, at + 6 * n, n)
        at += 6 * n
        # Ghosts, per slot: ticket + 1 of the item that somebody was told of; of the item that an
        # empty() took; the last ticket used; the raw priority that the item there must have.
        self.told, self.gone, self.used, self.due = range(at, at + 4 * n, n)
        at += 4 * n
        self.parents = at
        at += self.nodes
        holders = [p for p in scenario.programs if p[0].kind not in NEWCOMERS]
        self.entries = tuple(range(at, at + ENTRY_SIZE * len(holders), ENTRY_SIZE))
        at += ENTRY_SIZE * len(holders)
        count = len(scenario.programs)
        self.processes = tuple(range(at, at + REGISTERS * count, REGISTERS))
        self.size = at + REGISTERS * count
        self.program = dict(zip(self.processes, scenario.programs, strict=True))
        self.newcomers = {b for b in self.processes if self.program[b][0].kind in NEWCOMERS}

    def first_state(self) -> bytes:
        """Return the state in which the scenario begins."""
        s = bytearray(self.size)
        scenario = self.scenario
        s[READY] = 1
        s[HEAD] = s[COUNT] = s[COUNTED] = scenario.written
        s[HIGHEST] = 2
        s[CRASHES], s[AGAIN], s[KILLS] = scenario.crashes, scenario.again, scenario.kills
        s[STOPS] = 1 if scenario.stop else 0
        for ticket in range(max(0, scenario.written - self.n), scenario.written):
            i = ticket % self.n
            s[self.word + i] = ticket << 2 | COMMITTED
            s[self.raw + i] = s[self.due + i] = 1
            s[self.leaf + i] = mass(1)
            s[self.one + i] = s[self.two + i] = s[self.crc + i] = ticket + 1
            s[self.told + i] = s[self.used + i] = ticket + 1
            s[LENGTH] += 1
        for node in range(self.nodes):
            self.recompute(s, node)
        free = iter(self.entries)
        for b in self.processes:
            kind = self.program[b][0].kind
            s[b] = STARTS[kind]
            if b not in self.newcomers:
                e = s[b + ENTRY] = next(free)
                s[e + LIVE] = s[e + INCARNATION] = 1
                s[e + OWNER] = b
        return bytes(s)

    def name(self, b: int) -> str:
        """Return how a trace calls this process."""
        return f"{self.program[b][0].kind} {self.processes.index(b)}"

    def lock(self, s: bytearray, b: int, label: str, then: int) -> str | None:
        """Take the mutex; after a holder that died, repair first."""
        if s[MUTEX] == 0:
            s[b] = then
        elif s[MUTEX] == OWNER_DEAD:
            s[b + REPAIRED] = then
            s[b + CURSOR] = 0
            s[b] = At.REPAIR_CLAIMS
        else:
            return None
        s[MUTEX] = b
        return label

    def unlock(self, s: bytearray, b: int) -> None:
        """Give the mutex back."""
        if s[MUTEX] != b:
            fail("the mutex is unlocked by its holder only")
        s[MUTEX] = 0

    def op(self, s: bytearray, b: int) -> Op:
        """Return the call that the process is in."""
        return self.program[b][s[b + OP]]

    def next_op(self, s: bytearray, b: int) -> None:
        """Go on with the next call of the program."""
        s[b + OP] += 1
        program = self.program[b]
        if s[b + OP] == len(program):
            op = Op("")
            s[b] = At.FINISHED
        else:
            op = program[s[b + OP]]
            s[b] = STARTS[op.kind]
            if op.kind == "update" and not s[b + WORD]:  # the sample found nothing
                self.next_op(s, b)
                return
        if op.kind != "update":
            s[b + SLOT : b + REGISTERS] = bytes(REGISTERS - SLOT)

    def loop(self, s: bytearray, b: int, length: int, again: int, then: int) -> None:
        """Go on with the next of `length` rounds, or with what comes after them."""
        k = s[b + K] + 1
        if k < length:
            s[b + K] = k
            s[b] = again
        else:
            s[b + K] = 0
            s[b] = then

    def recompute(self, s: bytearray, node: int) -> None:
        """Set one parent to the sum of its children; parents stand in the order of their height."""
        leaf, parents = self.leaf, self.parents
        if self.n == 2 or node == 0:
            s[parents + node] = s[leaf] + s[leaf + 1]
        elif node == 1:
            s[parents + 1] = s[leaf + 2]
        else:
            s[parents + 2] = s[parents] + s[parents + 1]

    def climb(self, s: bytearray, b: int, label: str, then: int) -> str:
        """Recompute the parents, one a step."""
        k = s[b + K]
        self.recompute(s, k)
        if k + 1 < self.nodes:
            s[b + K] = k + 1
        else:
            s[b + K] = 0
            s[b] = then
        return label

    def set_head(self, s: bytearray, head: int) -> None:
        """Move the head."""
        if head < s[HEAD]:
            fail("head never falls")
        s[HEAD] = head

    def set_count(self, s: bytearray, count: int, *, emptied: bool = False) -> None:
        """Set `write_count`."""
        if count < s[COUNT] and not emptied:
            fail("write_count never falls, but by empty()")
        s[COUNT] = count

    def finish_count(self, s: bytearray, e: int) -> None:
        """Bring `write_count` to the goal of a claim."""
        goal = s[e + GOAL]
        if "count added" in self.broken:
            goal += s[COUNT]
        self.set_count(s, goal, emptied=s[e + PHASE] == EMPTYING)

    def priority_of(self, s: bytearray, i: int) -> int:
        """Return the raw priority of a slot, the default one where the writer gave none."""
        raw = s[self.raw + i]
        return s[HIGHEST] if raw == DEFAULT else raw

    def settle_leaf(self, s: bytearray, i: int) -> None:
        """Give an item that is about to be committed its leaf, and write down what it was."""
        raw = self.priority_of(s, i)
        if "default marker kept" not in self.broken:
            s[self.raw + i] = raw
        s[self.leaf + i] = mass(raw)

    def unmass(self, s: bytearray, i: int) -> None:
        """Take an item out of the tree and out of the length."""
        s[LENGTH] -= s[self.leaf + i] > 0
        if "leaf kept at claim" not in self.broken:
            s[self.leaf + i] = 0

    def count_committed(self, s: bytearray) -> int:
        """Return the number of committed slots."""
        return sum(w & 3 == COMMITTED for w in s[self.word : self.word + self.n])

    def claim_over(self, s: bytearray | bytes, ticket: int) -> int:
        """Return the entry whose open claim covers a ticket."""
        for e in self.entries:
            if s[e + LIVE] and s[e + PHASE] != IDLE and 0 <= ticket - s[e + FIRST] < s[e + SPAN]:
                return e
        raise ViolationError("a WRITING slot is covered by one claim")

    def turn_ahead(self, s: bytearray, mine: int) -> int:
        """Return the entry with the earliest turn before this one."""
        first, ahead = s[mine + TURN] or 255, 0
        for e in self.entries:
            if s[e + LIVE] and 0 < s[e + TURN] < first:
                first, ahead = s[e + TURN], e
        return ahead

    def give_turn_back(self, s: bytearray, e: int) -> None:
        """Drop a turn; numbers behind it move up, for only their order means anything."""
        turn = s[e + TURN]
        s[e + TURN] = 0
        if turn:
            for other in self.entries:
                if s[other + TURN] > turn:
                    s[other + TURN] -= 1

    def next_to_empty(self, s: bytearray, b: int) -> bool:
        """Move K to the next slot that is to be emptied; False, and K = 0, if there is none."""
        for i in range(s[b + K], self.n):
            state = s[self.word + i] & 3
            if state in (COMMITTED, ABORTED) or (
                state == WRITING and "empty() takes slots being written" in self.broken
            ):
                s[b + K] = i
                return True
        s[b + K] = 0
        return False

    def empty_slot(self, s: bytearray, b: int) -> None:
        """Reset the word of slot K; the ticket goes as well, but it is not used again."""
        s[self.word + s[b + K]] = 0

    def free(self, s: bytearray, e: int) -> None:
        """Give an entry back."""
        self.give_turn_back(s, e)
        s[e + LIVE] = s[e + OWNER] = 0

    def nobody_lives(self, s: bytearray | bytes) -> bool:
        """Say whether the kernel shows every client dead."""
        return not any(s[e + LIVE] and s[e + OWNER] for e in self.entries)

    def take(self, s: bytearray, b: int, e: int) -> None:
        """Take an entry."""
        s[e + INCARNATION] += 1
        s[e + PHASE] = IDLE
        s[e + TURN] = 0
        s[e + LIVE], s[e + OWNER] = 1, b
        s[b + ENTRY] = e
