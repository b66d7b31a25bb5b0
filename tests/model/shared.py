"""Parts that all steps share: the mutex, the tree, claims and queue positions.

A step is a method that gets a copy of the state and the offset `b` of the registers of the process
that takes it. The offset also identifies the process. The method changes the copy, sets the next
program counter and returns its label, or None if the step cannot be taken now. Methods that return
no label are parts of steps.
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
        # Ghosts, per slot: ticket + 1 of the last item that a client was told of, the same for
        # `empty()`, the last used ticket, and the right priority.
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
        """Returns the state in which the scenario begins."""
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
        """Returns the name of a process in a trace."""
        return f"{self.program[b][0].kind} {self.processes.index(b)}"

    def lock(self, s: bytearray, b: int, label: str, then: int) -> str | None:
        """Takes the mutex, and repairs first if its holder has died."""
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
        """Releases the mutex."""
        if s[MUTEX] != b:
            fail("the mutex is unlocked by its holder only")
        s[MUTEX] = 0

    def op(self, s: bytearray, b: int) -> Op:
        """Returns the call that the process is in."""
        return self.program[b][s[b + OP]]

    def next_op(self, s: bytearray, b: int) -> None:
        """Continues with the next call of the program."""
        s[b + OP] += 1
        program = self.program[b]
        if s[b + OP] == len(program):
            op = Op("")
            s[b] = At.FINISHED
        else:
            op = program[s[b + OP]]
            s[b] = STARTS[op.kind]
            if op.kind == "update" and not s[b + WORD]:  # the sample found no item
                self.next_op(s, b)
                return
        if op.kind != "update":
            s[b + SLOT : b + REGISTERS] = bytes(REGISTERS - SLOT)

    def loop(self, s: bytearray, b: int, length: int, again: int, then: int) -> None:
        """Continues with the next of `length` rounds, or with the step after the loop."""
        k = s[b + K] + 1
        if k < length:
            s[b + K] = k
            s[b] = again
        else:
            s[b + K] = 0
            s[b] = then

    def recompute(self, s: bytearray, node: int) -> None:
        """Sets one parent to the sum of its children. Parents are stored by height."""
        leaf, parents = self.leaf, self.parents
        if self.n == 2 or node == 0:
            s[parents + node] = s[leaf] + s[leaf + 1]
        elif node == 1:
            s[parents + 1] = s[leaf + 2]
        else:
            s[parents + 2] = s[parents] + s[parents + 1]

    def climb(self, s: bytearray, b: int, label: str, then: int) -> str:
        """Recomputes the parents, one per step."""
        k = s[b + K]
        self.recompute(s, k)
        if k + 1 < self.nodes:
            s[b + K] = k + 1
        else:
            s[b + K] = 0
            s[b] = then
        return label

    def set_head(self, s: bytearray, head: int) -> None:
        """Moves the head."""
        if head < s[HEAD]:
            fail("head never falls")
        s[HEAD] = head

    def set_count(self, s: bytearray, count: int, *, emptied: bool = False) -> None:
        """Sets `write_count`."""
        if count < s[COUNT] and not emptied:
            fail("write_count never falls, but by empty()")
        s[COUNT] = count

    def finish_count(self, s: bytearray, e: int) -> None:
        """Sets `write_count` to the goal of a claim."""
        goal = s[e + GOAL]
        if "count added" in self.broken:
            goal += s[COUNT]
        self.set_count(s, goal, emptied=s[e + PHASE] == EMPTYING)

    def priority_of(self, s: bytearray, i: int) -> int:
        """Returns the raw priority of a slot, or the default if the writer gave none."""
        raw = s[self.raw + i]
        return s[HIGHEST] if raw == DEFAULT else raw

    def settle_leaf(self, s: bytearray, i: int) -> None:
        """Sets the leaf of an item that is about to be committed, and notes its priority."""
        raw = self.priority_of(s, i)
        if "default marker kept" not in self.broken:
            s[self.raw + i] = raw
        s[self.leaf + i] = mass(raw)

    def unmass(self, s: bytearray, i: int) -> None:
        """Removes an item from the tree and from the length."""
        s[LENGTH] -= s[self.leaf + i] > 0
        if "leaf kept at claim" not in self.broken:
            s[self.leaf + i] = 0

    def count_committed(self, s: bytearray) -> int:
        """Returns the number of committed slots."""
        return sum(w & 3 == COMMITTED for w in s[self.word : self.word + self.n])

    def claim_over(self, s: bytearray | bytes, ticket: int) -> int:
        """Returns the entry whose open claim covers a ticket."""
        for e in self.entries:
            if s[e + LIVE] and s[e + PHASE] != IDLE and 0 <= ticket - s[e + FIRST] < s[e + SPAN]:
                return e
        raise ViolationError("a WRITING slot is covered by one claim")

    def turn_ahead(self, s: bytearray, mine: int) -> int:
        """Returns the entry with the earliest queue position before that of ``mine``."""
        first, ahead = s[mine + TURN] or 255, 0
        for e in self.entries:
            if s[e + LIVE] and 0 < s[e + TURN] < first:
                first, ahead = s[e + TURN], e
        return ahead

    def give_turn_back(self, s: bytearray, e: int) -> None:
        """Drops a queue position. Later positions are reduced, because only their order matters."""
        turn = s[e + TURN]
        s[e + TURN] = 0
        if turn:
            for other in self.entries:
                if s[other + TURN] > turn:
                    s[other + TURN] -= 1

    def next_to_empty(self, s: bytearray, b: int) -> bool:
        """Moves K to the next slot to be emptied; returns False, with K = 0, if there is none."""
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
        """Resets the word of slot K. Its ticket is removed too, but is not used again."""
        s[self.word + s[b + K]] = 0

    def free(self, s: bytearray, e: int) -> None:
        """Frees an entry."""
        self.give_turn_back(s, e)
        s[e + LIVE] = s[e + OWNER] = 0

    def nobody_lives(self, s: bytearray | bytes) -> bool:
        """True if the kernel shows that every client is dead."""
        return not any(s[e + LIVE] and s[e + OWNER] for e in self.entries)

    def take(self, s: bytearray, b: int, e: int) -> None:
        """Takes an entry."""
        s[e + INCARNATION] += 1
        s[e + PHASE] = IDLE
        s[e + TURN] = 0
        s[e + LIVE], s[e + OWNER] = 1, b
        s[b + ENTRY] = e
