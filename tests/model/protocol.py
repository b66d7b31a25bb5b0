"""An exhaustive small model of the slot protocol: every interleaving, every death, every state.

    Scenario ──Model──▶ first state ──explore──▶ all states that can be reached, or the shortest
                                                 trace to one in which something is wrong

The model contains

* a ring of two or three slots with words, leaves, parents, raw priorities and checksums;
* a payload of two leaf arrays, so that a torn row shows;
* `head`, `write_count`, `length` and the highest priority;
* the registry with its claims and queue positions;
* one robust mutex. If its holder dies, the next process that locks it repairs first;
* writers (ring, placed, in place, failing ones, `empty`), learners (sample, priority update) and a
  reaper;
* clients that join and leave, and onlookers that take the mutex and never join;
* a new process that recovers when no client is alive;
* a death after every single step, and a second death inside reap, repair and recovery;
* the death of all processes at once, a client that is stopped for ever, and a kernel that is slow
  to show a death.

The model leaves out

* memory order: a step is atomic, and all processes see it at once. The C core names its sync
  points;
* time: a sleeper wakes, forfeits a position or gives up at any time at which it is allowed to;
* young positions: the C core lets others pass a queue position for a millisecond;
* power loss: checksums are written and compared, but no page is torn;
* a client that is stopped while it holds the mutex: all others wait for it;
* exact numbers: mass(raw) = raw + 1, a sample has one row, and the sums have no minimum.

The steps are in writing.py, reading.py, emptying.py, mending.py and clients.py. They use the parts
in shared.py. A state is a `bytes` object with the layout in state.py. A program counter names the
next step, and a label names the step that was just taken. `STEPS` are the crash points of the C
core by their own names. `MODEL_STEPS` exist only here. A string in `broken` switches a rule off, to
test that the search notices it.

`Model.check` checks these invariants whenever the mutex is free. H1 to H10 are the rules of the
history checker for real processes.

* H1, H2: a committed row is complete and matches its ticket, and so does every sampled row;
* H3: an item that a client was told of is present, until a later ticket or `empty()` removes it;
* an item that the head has passed is gone. Otherwise it would be the newest, after its successors;
* H4: a ticket is used once, and only in its own slot;
* H5: when a claim ends, all of its items are committed or none is;
* H6: `head` and `write_count` decrease only by `empty()`, and `write_count` is exact;
* H7: parents are sums, a leaf is positive only if its word is COMMITTED, `length` is exact;
* H9: an item's mass is that of its last priority, set by its writer or by its ticket;
* H10: from every state, each survivor can reach its end without being killed;
* one claim covers each WRITING slot, and a living client keeps its slots, entry and position.

The search has shown that these rules are needed, beyond the first description of the protocol

1. A default priority becomes a number when the item is committed. A marker would change its meaning
   at the next repair, with the highest priority so far.
2. An in-place write keeps the raw priority of a slot only if the slot is COMMITTED when it is
   claimed. Otherwise the new item would get the priority of an item that is long gone.
3. The owner frees an entry after its last unlock, and a process that takes the mutex without an
   entry holds init.lock. Otherwise a recovery might find no client alive while a process holds the
   mutex, and would create a new mutex.
4. A reaper compares the state of the entry as well as its incarnation, or entries are taken under
   the mutex. A free entry must not be freed again while a newcomer takes it.
5. `empty()` notes its goal, because the process that finishes it does not know whether the count
   is kept.
6. While the state is RECOVERING no client joins, even if an entry looks alive. The kernel may not
   show yet that the recovering process is dead.
7. A repair evicts the items that a ring write still had to mark when it died. Otherwise old items
   would lie in front of the head as if they were the newest.
8. A sleeper checks again which client it waits for, in the queue as well as before a slot, because
   that client may be dead. If it checks only for slots, the queue position must be forfeited.

The reduction: while a living process holds the mutex, only this process takes steps (or dies). A
step outside the mutex touches payload that no other process may write, or reads one word. It can
therefore be moved before or after a section of another process. A scenario with `every_order` is
searched without the reduction, and a test compares the results.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from tests.model.clients import Clients
from tests.model.emptying import Emptying
from tests.model.reading import Reading
from tests.model.state import (
    AGAIN,
    COMMITTED,
    COUNT,
    COUNTED,
    CRASHES,
    ENTRY,
    FATES,
    FIRST,
    HEAD,
    IDLE,
    KILLS,
    LENGTH,
    LIVE,
    MUTEX,
    OPTIONAL,
    OWNER,
    OWNER_DEAD,
    PAYLOAD,
    PHASE,
    READY,
    REGISTERS,
    RESTING,
    SPAN,
    STOPPABLE,
    STOPS,
    WRITING,
    At,
    Scenario,
    ViolationError,
    fail,
    mass,
)
from tests.model.writing import Writing

Step = Callable[[bytearray, int], "str | None"]


class Model(Writing, Reading, Emptying, Clients):
    """The steps of one scenario, and the invariants between them."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.actions = self._actions()
        self.mover = 0  # the process whose step broke a rule
        kinds = {op.kind for program in scenario.programs for op in program}
        # These calls move the head by a lap.
        self.in_order = not kinds & {"placed", "in place", "empty"}

    def successors(self, s: bytes) -> Iterator[tuple[int, str, bytearray]]:
        """Yields the process, the label and the next state for each step that can be taken."""
        holder = s[MUTEX]
        reduced = holder not in (0, OWNER_DEAD) and not self.scenario.every_order
        movers = (holder,) if reduced else self.processes
        for b in movers:
            for action in self.actions[s[b]]:
                self.mover = b
                t = bytearray(s)
                label = action(t, b)
                if label is not None:
                    yield b, label, t
            if self.may_die(s, b):
                t = bytearray(s)
                t[CRASHES if t[CRASHES] else AGAIN] -= 1
                self.kill(t, b, slowly=self.scenario.slow_death)
                yield b, "killed", t
            if s[STOPS] and s[b] in STOPPABLE[self.scenario.stop]:
                t = bytearray(s)
                t[STOPS] = 0
                t[b : b + REGISTERS] = bytes(REGISTERS)
                t[b] = At.STOPPED
                yield b, "stopped", t
        if s[KILLS]:
            t = bytearray(s)
            t[KILLS] = t[CRASHES] = 0
            for b in self.processes:
                self.kill(t, b, slowly=False)
            yield 0, "all killed", t

    def rests(self, s: bytes) -> bool:
        """True if every process has reached its end, in one way or another."""
        if s[MUTEX] not in (0, OWNER_DEAD):
            return False
        for b in self.processes:
            pc = s[b]
            if pc in RESTING:
                continue
            if pc not in OPTIONAL or any(action(bytearray(s), b) for action in self.actions[pc]):
                return False
        return True

    def check(self, s: bytes) -> None:
        """Checks the invariants of a state in which the mutex is free and the buffer is READY."""
        if s[MUTEX] or not s[READY]:
            return
        committed = 0
        for i in range(self.n):
            word = s[self.word + i]
            state = word & 3
            ticket = word >> 2
            if word and ticket >= s[HEAD]:
                fail("tickets are below head")
            if word and ticket % self.n != i:
                fail("no item is in two slots")
            if state == COMMITTED:
                committed += 1
                one = s[self.one + i]
                if not one == s[self.two + i] == s[self.crc + i] == ticket + 1:
                    fail("a committed row is whole")
                if s[self.leaf + i] != mass(s[self.due + i]):
                    fail("an item has the priority it was given")
            elif s[self.leaf + i]:
                fail("a leaf is positive only if its word is COMMITTED")
            if state == WRITING:
                self.claim_over(s, ticket)
            told = s[self.told + i]
            if told and word != (told - 1 << 2 | COMMITTED):
                fail("an acknowledged item is there")
            gone = s[self.gone + i]
            if gone and word == (gone - 1 << 2 | COMMITTED):
                fail("an emptied buffer is empty")
        if committed != s[LENGTH]:
            fail("length is the number of committed slots")
        t = bytearray(s)
        for node in range(self.nodes):
            self.recompute(t, node)
        if t != s:
            fail("parents are the sums of their leaves")
        if s[COUNT] != s[COUNTED]:
            fail("write_count counts what was written")
        claims = []
        for e in self.entries:
            phase = s[e + PHASE]
            if phase not in (IDLE, PAYLOAD):
                fail("only IDLE and PAYLOAD are seen without the mutex")
            if phase == PAYLOAD:
                claims.append((s[e + FIRST], s[e + FIRST] + s[e + SPAN]))
        claims.sort()
        if any(a[1] > c[0] for a, c in pairwise(claims)):
            fail("a WRITING slot is covered by one claim")
        for b in self.processes:
            e = s[b + ENTRY]
            if e and not (s[e + LIVE] and s[e + OWNER] == b):
                fail("a living client keeps its entry")
        words = s[self.word : self.word + self.n] if self.in_order else ()
        if any(w & 3 == COMMITTED and (w >> 2) + self.n < s[HEAD] for w in words):
            fail("an item goes when the head has passed it")

    def _actions(self) -> list[tuple[Step, ...]]:
        """Returns the steps that a process may take, by its program counter."""
        table: list[tuple[Step, ...]] = [()] * len(At)
        for pc in At:
            step: Step | None = getattr(self, pc.name.lower(), None)
            if step is not None:
                table[pc] = (step,)
        table[At.DYING] = (self.shown_dead,)
        table[At.WRITE_COPY] = (self.write_copy, self.write_fails)
        table[At.ATTACHING] = (self.recover_locked, self.join_started)
        table[At.WAITING] = (
            self.wait_wakes,
            self.wait_asks,
            self.wait_forfeits,
            self.wait_times_out,
        )
        table[At.WAIT_HOLDING] = (self.hold_ends,)
        draws = tuple(partial(self.sample_drawn, i=i) for i in range(self.n))
        table[At.SAMPLE_DRAWN] = (*draws, self.sample_nothing)
        table[At.REAPER] = tuple(partial(self.reaper_asks, e=e) for e in self.entries)
        return table


class Outcome(NamedTuple):
    """The result of a search.

    `unlocked` is a fingerprint of the set of states in which the mutex is free. `died_after`
    contains the steps after which a death was tried. If the search was `complete`, every state was
    visited and can reach an end. Otherwise no rule was broken in the states that were visited.
    """

    states: int
    transitions: int
    unlocked: int
    taken: frozenset[str]
    died_after: frozenset[str]
    broken_rule: str
    trace: tuple[str, ...]
    complete: bool = True

    def __str__(self) -> str:
        return "\n  ".join((self.broken_rule or "no rule is broken", *self.trace))


def explore(scenario: Scenario, *, limit: int | None = None) -> Outcome:
    """Visits every state that can be reached, nearest first; stops at the first violation.

    Then it checks that every living process can reach its end from each state. With a ``limit``,
    the search ends without this check as soon as it has found more states.
    """
    model = Model(scenario)
    first = model.first_state()
    index = {first: 0}
    queue = [first]
    parents = array("l", [-1])
    how: list[tuple[int, str]] = [(0, "")]
    sources, targets = array("l"), array("l")
    taken: set[str] = set()
    died_after: set[str] = set()

    def outcome(rule: str, at: int, last: tuple[str, ...] = ()) -> Outcome:
        lines = list(last)
        while rule and at > 0:
            lines.insert(0, describe(model, *how[at]))
            at = parents[at]
        unlocked = sum(map(hash, (s for s in queue if s[MUTEX] == 0)))
        sizes = len(queue), transitions, unlocked
        return Outcome(*sizes, frozenset(taken), frozenset(died_after), rule, tuple(lines))

    at = transitions = 0
    try:
        model.check(first)
        while at < len(queue):
            if limit is not None and len(queue) > limit:
                return outcome("", 0)._replace(complete=False)
            state = queue[at]
            for b, label, successor in model.successors(state):
                new = bytes(successor)
                to = index.get(new)
                taken.add(label)
                if to is None:
                    to = index[new] = len(queue)
                    queue.append(new)
                    parents.append(at)
                    how.append((b, label))
                    model.mover = 0
                    model.check(new)
                if label not in died_after and b and model.may_die(new, b):
                    died_after.add(label)
                transitions += 1
                if label not in FATES:  # a killed process has not reached its end
                    sources.append(at)
                    targets.append(to)
            at += 1
    except ViolationError as violation:
        b = model.mover
        if b == 0:
            return outcome(str(violation), len(queue) - 1)
        return outcome(str(violation), at, (describe(model, b, f"({At(state[b]).name})"),))

    ends = bytearray(model.rests(s) for s in queue)
    grows = True
    while grows:
        grows = False
        for i in range(len(targets) - 1, -1, -1):
            if ends[targets[i]] and not ends[sources[i]]:
                ends[sources[i]] = grows = True
    stuck = ends.find(0)
    if stuck >= 0:
        return outcome("every survivor comes to an end", stuck)
    return outcome("", 0)


def describe(model: Model, b: int, label: str) -> str:
    """Returns one line of a trace."""
    return f"{model.name(b)}: {label}" if b else label
