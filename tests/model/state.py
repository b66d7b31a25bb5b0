"""The layout of a state of the model, which is an array of bytes, and the names of its bytes.

     control │ word leaf raw one two crc │ told gone used due │ parents │ entries │ registers
     ────────┼───── one byte a slot ─────┼───── ghosts ───────┼─────────┼─ 8 each ┼─ 15 a process

A word is `ticket << 2 | state`, as in the buffer itself. All numbers are below 256. A ghost is a
value that an observer of all steps would remember. No step depends on a ghost.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import NamedTuple, NoReturn

STEPS = (
    *("write.locked", "write.noted", "write.marking", "write.head", "write.mark", "write.mass"),
    *("write.claim_parents", "write.payload", "write.claimed", "write.copy", "write.checksum"),
    *("write.relocked", "write.goal", "write.committing", "write.leaf", "write.commit"),
    *("write.commit_parents", "write.count", "write.idle", "write.done"),
    *("abort.locked", "abort.word", "abort.idle"),
    *("update.locked", "update.raw", "update.leaf", "update.parents", "update.unlocked"),
    *("sample.locked", "sample.drawn", "sample.unlocked", "sample.copy", "sample.validate"),
    *("empty.locked", "empty.noted", "empty.emptying", "empty.head", "empty.leaf", "empty.word"),
    *("empty.parents", "empty.count", "empty.idle", "empty.unlocked"),
    *("reap.locked", "reap.leaf", "reap.word", "reap.head", "reap.count", "reap.parents"),
    *("reap.idle", "reap.freed", "reap.unlocked"),
    *("repair.claims", "repair.leaves", "repair.parents", "repair.consistent"),
    *("recover.locked", "recover.state", "recover.mutex", "recover.reaped", "recover.words"),
    *("recover.priorities", "recover.tree", "recover.ready"),
    *("wait.turn", "wait.sleep", "wait.forfeit", "wait.timeout"),
)
MODEL_STEPS = (
    *("abort.unlocked", "wait.woken", "wait.left", "reap.asked"),
    *("join.started", "join.locked", "join.taken", "join.unlocked"),
    *("leave.locked", "leave.claim", "leave.unlocked", "leave.freed"),
    *("look.started", "look.locked", "look.unlocked"),
)
#: Stores of the core within one step of the model, which has no such byte or recomputes it at once.
WITHIN = {
    "write.noted": ("write.kind", "write.first"),
    "write.head": ("turn.returned",),
    "write.mark": ("write.length",),
    "write.copy": ("write.source", "write.raw"),
    "write.checksum": ("write.priority",),
    "write.relocked": ("write.max_priority",),
    "write.leaf": ("write.default",),
    "write.commit_parents": ("write.lengthened",),
    "update.raw": ("update.max_priority",),
    "empty.noted": ("empty.first", "empty.span"),
    "empty.head": ("empty.max_priority",),
    "empty.word": ("empty.length",),
    "reap.leaf": ("reap.default", "reap.mass"),
    "reap.word": ("reap.length",),
    "repair.leaves": (
        *("repair.waiters", "repair.version"),
        *("leaves.padding", "leaves.raw", "leaves.mass", "leaves.length"),
    ),
    "repair.parents": ("tree.sum", "tree.least"),
    "repair.consistent": ("repair.idle", "count.added"),
    "recover.mutex": ("mutex.cleared", "mutex.initialised"),
    "write.locked": ("mutex.locked", "mutex.waiting"),
    "write.done": ("mutex.unlocked", "wake.progress"),
    "wait.turn": ("turn.numbered", "turn.dated", "turn.noted"),
}
#: Crash points of protocols that are not modelled here: byte rings, changes of alpha, loading and
#: copying. Models of flow control and of consumers are in flow.py and consuming.py.
NOT_MODELLED = (
    *("write.evict_leaf", "write.evict", "write.evicted", "write.tail", "write.byte_first"),
    *("write.header", "write.extent", "write.bytes"),
    *("alpha.alpha", "alpha.eps", "alpha.version", "alpha.stored", "alpha.leaves"),
    *("alpha.parents", "restore.head", "restore.count", "restore.max_priority", "copy.snapshot"),
    "raise.max_priority",
    *("relink.header", "relink.forgotten", "relink.tail", "relink.head"),
    *("flow.pending", "flow.promised", "flow.settled", "flow.waits", "flow.limited", "flow.base"),
    *(
        "flow.goal",
        "flow.drawn",
        "flow.reading",
        "flow.taken",
        "flow.passed",
        "flow.stored",
        "flow.published",
    ),
    *("weights.begun", "weights.copied", "weights.step", "weights.dated", "weights.signed"),
    *("weights.checksum", "weights.whole", "weights.published"),
    *("weights.looked", "weights.taken"),
    *(
        "share.copied",
        "share.assigned",
        "share.own_row",
        "share.holder",
        "share.next",
        "share.source",
    ),
    *("share.filled", "share.back", "share.link", "share.restored", "share.dropped"),
    *("consume.cleared", "consume.opened", "consume.begun", "consume.counted", "consume.removed"),
    *("consume.numbered", "consume.noted", "consume.lent", "consume.given", "consume.ticket"),
    *("consume.left", "consume.next", "consume.floor", "consume.acked", "consume.freed"),
    *("consume.ended", "consume.repaired", "version.stored"),
    *("reserve.numbered", "reserve.noted", "reserve.open", "reserve.counted", "reserve.expiry"),
    *("reserve.partial", "reserve.claimed", "reserve.spent", "reserve.returned", "reserve.ended"),
    *("reserve.forgotten", "reserve.repaired"),
)
FATES = frozenset({"killed", "all killed", "stopped"})

EMPTY, WRITING, COMMITTED, ABORTED = range(4)
IDLE, MARKING, PAYLOAD, COMMITTING, EMPTYING = range(5)
DEFAULT = 255  # raw priority of an item to which its writer gave none
OWNER_DEAD = 255  # value of the mutex after its holder has died

# The control file. COUNTED is a ghost, the correct `write_count`. The last four are what may still
# happen: deaths anywhere, deaths in a repair, the death of all processes, and stops.
(MUTEX, INIT, READY, HEAD, COUNT, LENGTH, HIGHEST, COUNTED, CRASHES, AGAIN, KILLS, STOPS) = range(
    12
)
CONTROL_SIZE = 12
# A registry entry. OWNER is the process behind it, or 0 once the kernel shows that it is dead.
(LIVE, INCARNATION, OWNER, PHASE, FIRST, SPAN, GOAL, TURN, IN_RING) = range(9)
ENTRY_SIZE = 9
# The registers of a process. The first ones are the next step after a repair, a finished claim or a
# reap. TARGET is the entry that the process waits for or reaps, and SEEN its incarnation. CURSOR is
# the entry whose claim is being finished. A writer keeps the slots whose priority stays in KEPT.
# The others belong to learners.
(PC, OP, K, ENTRY, REPAIRED, SETTLED, REAPED, TARGET, SEEN, CURSOR) = range(10)
(SLOT, WORD, ONE, TWO, ROUND) = range(10, 15)
KEPT = SLOT
REGISTERS = 15


class At(IntEnum):
    """The step that a process takes next, by the name of its method."""

    FINISHED = 0
    DEAD = auto()
    DYING = auto()
    STOPPED = auto()
    WRITE_LOCKED = auto()
    WRITE_NOTED = auto()
    WRITE_MARKING = auto()
    WRITE_HEAD = auto()
    WRITE_MARK = auto()
    WRITE_UNMASSED = auto()
    WRITE_CLAIM_PARENTS = auto()
    WRITE_PAYLOAD = auto()
    WRITE_CLAIMED = auto()
    WRITE_COPY = auto()
    WRITE_CHECKSUM = auto()
    WRITE_RELOCKED = auto()
    WRITE_GOAL = auto()
    WRITE_COMMITTING = auto()
    WRITE_LEAF = auto()
    WRITE_COMMIT = auto()
    WRITE_COMMIT_PARENTS = auto()
    WRITE_COUNT = auto()
    WRITE_IDLE = auto()
    WRITE_DONE = auto()
    ABORT_LOCKED = auto()
    ABORT_WORD = auto()
    ABORT_IDLE = auto()
    ABORT_UNLOCKED = auto()
    WAIT_SLEEP = auto()
    WAITING = auto()
    WAIT_LEFT = auto()
    WAIT_HOLDING = auto()
    UPDATE_LOCKED = auto()
    UPDATE_RAW = auto()
    UPDATE_LEAF = auto()
    UPDATE_PARENTS = auto()
    UPDATE_UNLOCKED = auto()
    SAMPLE_LOCKED = auto()
    SAMPLE_DRAWN = auto()
    SAMPLE_UNLOCKED = auto()
    SAMPLE_COPY = auto()
    SAMPLE_VALIDATE = auto()
    EMPTY_LOCKED = auto()
    EMPTY_NOTED = auto()
    EMPTY_EMPTYING = auto()
    EMPTY_HEAD = auto()
    EMPTY_LEAF = auto()
    EMPTY_WORD = auto()
    EMPTY_PARENTS = auto()
    EMPTY_COUNT = auto()
    EMPTY_IDLE = auto()
    EMPTY_UNLOCKED = auto()
    ATTACHING = auto()
    JOIN_LOCKED = auto()
    JOIN_TAKEN = auto()
    JOIN_UNLOCKED = auto()
    LEAVE_LOCKED = auto()
    LEAVE_CLAIM = auto()
    LEAVE_UNLOCKED = auto()
    LEAVE_FREED = auto()
    LOOK_STARTED = auto()
    LOOK_LOCKED = auto()
    LOOK_UNLOCKED = auto()
    REAPER = auto()
    REAP_LOCKED = auto()
    REAP_CHECKED = auto()
    REAP_LEAF = auto()
    REAP_WORD = auto()
    REAP_HEAD = auto()
    REAP_COUNT = auto()
    REAP_PARENTS = auto()
    REAP_IDLE = auto()
    REAP_FREED = auto()
    REAP_UNLOCKED = auto()
    REPAIR_CLAIMS = auto()
    REPAIR_LEAVES = auto()
    REPAIR_PARENTS = auto()
    REPAIR_CONSISTENT = auto()
    RECOVER_STATE = auto()
    RECOVER_MUTEX = auto()
    RECOVER_REAPED = auto()
    RECOVER_FREED = auto()
    RECOVER_WORDS = auto()
    RECOVER_PRIORITIES = auto()
    RECOVER_TREE = auto()
    RECOVER_READY = auto()


FIRST_OF_REPAIR = At.REAP_LOCKED  # from here on, a second death may happen
RESTING = frozenset({At.FINISHED, At.DEAD, At.STOPPED, At.REAPER})
# steps that are taken only where they are possible
OPTIONAL = frozenset({At.ATTACHING, At.LOOK_STARTED})
NOT_TO_KILL = RESTING | OPTIONAL | {At.DYING}
STOPPABLE = {
    "copying": frozenset({At.WRITE_COPY, At.WRITE_CHECKSUM, At.WRITE_RELOCKED}),
    "waiting": frozenset({At.WAITING}),
}


class Op(NamedTuple):
    """A call of a client, with its number of items or its slots, and its priority."""

    kind: str
    size: int = 0
    slots: tuple[int, ...] = ()
    priority: int = DEFAULT


def ring(size: int, priority: int = DEFAULT) -> Op:
    """Writes `size` items at the head of the ring."""
    return Op("ring", size, (), priority)


def placed(*slots: int) -> Op:
    """Writes new items into these slots, as `set` does."""
    return Op("placed", len(slots), slots)


def in_place(*slots: int) -> Op:
    """Overwrites the items in these slots, which keep their priorities and are not counted."""
    return Op("in place", 0, slots)


def empty(*, keep_count: bool = False) -> Op:
    """Empties the buffer; `write_count` becomes 0 unless it is kept."""
    return Op("empty", int(keep_count))


def update(priority: int) -> Op:
    """Sets the priority of the item in the last sample or draw, by its ticket."""
    return Op("update", 1, (), priority)


SAMPLE = Op("sample")
DRAW = Op("draw")  # a sample without a copy
REAP = Op("reap")
LEAVE = Op("leave")
JOIN = Op("join")  # joins while a client is alive
RECOVER = Op("recover")  # recovers while no client is alive
ATTACH = Op("attach")  # joins or recovers
LOOK = Op("look")  # takes the mutex without joining, as a check does
STARTS = {
    "ring": At.WRITE_LOCKED,
    "placed": At.WRITE_LOCKED,
    "in place": At.WRITE_LOCKED,
    "empty": At.EMPTY_LOCKED,
    "update": At.UPDATE_LOCKED,
    "sample": At.SAMPLE_LOCKED,
    "draw": At.SAMPLE_LOCKED,
    "reap": At.REAPER,
    "leave": At.LEAVE_LOCKED,
    "look": At.LOOK_STARTED,
    "join": At.ATTACHING,
    "recover": At.ATTACHING,
    "attach": At.ATTACHING,
}
NEWCOMERS = frozenset({"join", "recover", "attach", "look"})  # these begin without an entry


class Scenario(NamedTuple):
    """Processes, their calls and their ring, and the faults that may happen.

    `written` items are present at the start. `crashes` may happen anywhere, `again` only inside a
    repair, and `kills` to all processes at once, except the one that recovers. `stop` says where
    one client may be stopped for ever: "copying" or "waiting". `broken` names rules that are
    switched off.
    """

    capacity: int
    programs: tuple[tuple[Op, ...], ...]
    written: int = 0
    crashes: int = 1
    again: int = 1
    kills: int = 0
    stop: str = ""
    timeouts: bool = False
    forfeits: bool = True
    errors: bool = False
    slow_death: bool = False
    every_order: bool = False
    broken: frozenset[str] = frozenset()


class ViolationError(Exception):
    """A state or a step that the protocol forbids."""


def fail(rule: str) -> NoReturn:
    """Raises ViolationError with the rule that is violated."""
    raise ViolationError(rule)


def mass(raw: int) -> int:
    """Returns the mass that the tree contains for a raw priority."""
    return raw + 1
