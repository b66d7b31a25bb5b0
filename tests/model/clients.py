"""Steps in which clients join, leave and die."""

from __future__ import annotations

from tests.model.mending import Mending
from tests.model.state import (
    AGAIN,
    CRASHES,
    ENTRY,
    FIRST_OF_REPAIR,
    INCARNATION,
    INIT,
    LIVE,
    MUTEX,
    NOT_TO_KILL,
    OWNER,
    OWNER_DEAD,
    READY,
    REAPED,
    REGISTERS,
    SEEN,
    STARTS,
    TARGET,
    At,
)


class Clients(Mending):
    """Steps of joining, leaving and looking, and the deaths of processes."""

    def join_started(self, s: bytearray, b: int) -> str | None:
        """Takes the initialisation lock and finds a free entry, or a dead one to reap first."""
        early = not s[READY] and "joined before READY" not in self.broken
        if s[INIT] not in (0, b) or early or self.op(s, b).kind == "recover":
            return None
        if self.nobody_lives(s):
            return None
        free = [e for e in self.entries if not s[e + LIVE]]
        dead = [e for e in self.entries if s[e + LIVE] and not s[e + OWNER]]
        if not free and not dead:
            return None
        s[INIT] = b
        if free or "dead entry overwritten" in self.broken:
            s[b + TARGET] = (free or dead)[0]
            s[b] = (
                At.JOIN_TAKEN if "entry taken without the mutex" in self.broken else At.JOIN_LOCKED
            )
        else:
            s[b + TARGET], s[b + SEEN] = dead[0], s[dead[0] + INCARNATION]
            s[b + REAPED] = At.ATTACHING
            s[b] = At.REAP_LOCKED
        return "join.started"

    def join_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "join.locked", At.JOIN_TAKEN)

    def join_taken(self, s: bytearray, b: int) -> str:
        """Takes the entry, with a new incarnation."""
        self.take(s, b, s[b + TARGET])
        s[b + TARGET] = 0
        s[b] = At.JOIN_UNLOCKED
        return "join.taken"

    def join_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex and the initialisation lock."""
        if "entry taken without the mutex" not in self.broken:
            self.unlock(s, b)
        s[INIT] = 0
        self.next_op(s, b)
        return "join.unlocked"

    def leave_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "leave.locked", At.LEAVE_CLAIM)

    def leave_claim(self, s: bytearray, b: int) -> str:
        """Gives back what the client has open, which in this model is a queue position at most."""
        self.give_turn_back(s, s[b + ENTRY])
        s[b] = At.LEAVE_UNLOCKED
        if "entry freed under the mutex" in self.broken:
            s[b] = At.LEAVE_FREED
        return "leave.claim"

    def leave_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex while the entry still says that the client is alive."""
        self.unlock(s, b)
        s[b] = At.LEAVE_FREED
        if "entry freed under the mutex" in self.broken:
            self.next_op(s, b)
        return "leave.unlocked"

    def leave_freed(self, s: bytearray, b: int) -> str:
        """Frees the entry with a single, last store. From here on another process may recover."""
        self.free(s, s[b + ENTRY])
        s[b + ENTRY] = 0
        if "entry freed under the mutex" in self.broken:
            s[b] = At.LEAVE_UNLOCKED
        else:
            self.next_op(s, b)
        return "leave.freed"

    # Look: a process that takes the mutex holds an entry or the initialisation lock.

    def look_started(self, s: bytearray, b: int) -> str | None:
        """Takes the initialisation lock, so that no process recovers even if all others die."""
        if s[INIT] or not s[READY] or self.nobody_lives(s):
            return None
        if "onlooker holds nothing" not in self.broken:
            s[INIT] = b
        s[b] = At.LOOK_LOCKED
        return "look.started"

    def look_locked(self, s: bytearray, b: int) -> str | None:
        """Takes the mutex."""
        return self.lock(s, b, "look.locked", At.LOOK_UNLOCKED)

    def look_unlocked(self, s: bytearray, b: int) -> str:
        """Releases the mutex and the initialisation lock."""
        self.unlock(s, b)
        if s[INIT] == b:
            s[INIT] = 0
        self.next_op(s, b)
        return "look.unlocked"

    # Death

    def shown_dead(self, s: bytearray, b: int) -> str:
        """Lets the kernel show that a process is dead."""
        self.bury(s, b)
        return "shown dead"

    def bury(self, s: bytearray, b: int) -> None:
        """Removes a dead process; another newcomer takes the place of a newcomer."""
        for e in self.entries:
            if s[e + OWNER] == b:
                s[e + OWNER] = 0
        s[b : b + REGISTERS] = bytes(REGISTERS)
        s[b] = STARTS[self.program[b][0].kind] if b in self.newcomers else At.DEAD

    def kill(self, s: bytearray, b: int, *, slowly: bool) -> None:
        """Ends a process at its current step. Its locks are released before its death is shown."""
        if s[MUTEX] == b:
            s[MUTEX] = OWNER_DEAD
        if s[INIT] == b:
            s[INIT] = 0
        if slowly:
            s[b : b + REGISTERS] = bytes(REGISTERS)
            s[b] = At.DYING
        else:
            self.bury(s, b)

    def may_die(self, s: bytes, b: int) -> bool:
        """True if the death of this process is still to be tried in this state."""
        pc = s[b]
        if pc in NOT_TO_KILL:
            return False
        return s[CRASHES] > 0 or (s[AGAIN] > 0 and pc >= FIRST_OF_REPAIR)
