"""The operations of a recorded process, and the items that must be present after a power cut.

    invoked     numbers that a process began to write: nothing else may ever be returned
    writing     those of them whose write has not returned yet
    acked       items whose write returned, by slot and ticket
    covered     those of them that were committed when the last `flush` began that has returned
    gone        those of them that were gone by then, so that they must not come back
    over        those of them that were gone when an earlier power cut came

An item is no longer guaranteed when its slot is claimed again, emptied or evicted. The newest words
show this, which are the words that processes saw at the time of the power cut.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shmbuffer.memory.format import layout
from tests.power.contents import Contents, Place, Runtime, Superblock, names_of
from tests.power.disk import Disk
from tests.power.recorder import Event

BUFFER = "buffer"
_NOTHING = Runtime(0, 0, 0, 0)


@dataclass
class History:
    """The history of a recording up to a step.

    Attributes:
        kind: rows, records, or records in a short ring.
        opened: whether a flush has returned, so that the buffer must exist.
        removing: whether a process began to remove the buffer.
        published: whether `publish_dictionary` has returned.
        emptied: whether a process began to empty the buffer since the last flush.
        acking: tickets that a consumer began to acknowledge.
        done: those of them that the last flush found acknowledged.
        floor: head and write_count as the last flush found them.
        now: the contents that processes see at this step, or None without a schema.
    """

    kind: str
    invoked: set[int] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)
    acked: dict[Place, int] = field(default_factory=dict)
    covered: dict[Place, int] = field(default_factory=dict)
    gone: set[Place] = field(default_factory=set)
    over: set[Place] = field(default_factory=set)
    priorities: dict[Place, set[float]] = field(default_factory=dict)
    acking: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    opened: bool = False
    removing: bool = False
    published: bool = False
    emptied: bool = False
    floor: Runtime = _NOTHING
    now: Contents | None = None
    _doing: set[int] = field(default_factory=set)
    _flushing: dict[Place, int] = field(default_factory=dict)
    _going: set[Place] = field(default_factory=set)
    _since: dict[Place, set[float]] = field(default_factory=dict)
    _found: Runtime = _NOTHING

    def follow(self, disk: Disk, event: Event) -> None:
        """Adds the next event; ``disk`` is the disk after this event."""
        if event.kind == "mark":
            self._hear(disk, *event.value)
        elif event.kind == "step":
            self.now = self._newest(disk)
            if self.now:
                self._note_priorities(self.now)

    def _newest(self, disk: Disk) -> Contents | None:
        files = newest_files(disk, self.kind)
        if files is None or not (found := Superblock.of(files[layout.CONTROL])):
            return None
        return Contents(self.kind, files) if found.defined else None

    def owed(self, durable_ticket: int) -> dict[Place, int]:
        """Returns items that must be present, by a flush that returned or by a superblock."""
        if self.now is None or self.removing:
            return {}
        there = set(self.now.places()) - self.over
        owed = {place: number for place, number in self.covered.items() if place in there}
        owed |= {
            place: number
            for place, number in self.acked.items()
            if place in there and place[1] < durable_ticket
        }
        return owed

    def cut(self) -> History:
        """Returns the history that the next process finds after a power cut at this step."""
        there = set(self.now.places()) if self.now else set()
        after = replace(self, now=None, over=self.over | (self.acked.keys() - there))
        # The next process may find the old buffer or a new one. No item is guaranteed.
        if self.removing:
            nothing: dict[str, Any] = {"covered": {}, "priorities": {}, "gone": set()}
            over = after.over | self.acked.keys()
            after = replace(after, **nothing, over=over, floor=_NOTHING, opened=False)
            after.removing = False
        return copy.deepcopy(after)

    def _hear(self, disk: Disk, kind: str, values: dict[str, Any]) -> None:
        now = self._newest(disk)
        if kind == "invoke":
            self.writing = set(values["numbers"])
            self.invoked |= self.writing
        elif kind == "ok" and now:
            items = now.items()
            written = {place for place, number in items.items() if number in self.writing}
            self.acked |= items
            self.over -= written  # tickets that a power cut took back are used again
            self.gone -= written
            self.writing = set()
        elif kind == "flush" and now:
            self._flushing, self._doing = now.items(), set(self.acking)
            self._going = self.acked.keys() - self._flushing.keys()
            self._since = {}
            self._note_priorities(now)
            self._found = self._runtime(disk)
        elif kind == "flushed":
            self.done = self._doing
            self.covered, self.priorities, self.floor = self._flushing, self._since, self._found
            self._since = {place: set(given) for place, given in self._since.items()}
            self.opened, self.emptied, self.gone = True, False, self._going
        elif kind == "acks":
            self.acking |= set(values["tickets"])
        elif kind == "empty":
            self.emptied = True
        elif kind == "published":
            self.published = True
        elif kind == "remove":
            self.removing = True

    def _note_priorities(self, now: Contents) -> None:
        for place in now.places():
            raw = float(now.raw[place[0]])
            for given in (self.priorities, self._since):
                given.setdefault(place, set()).add(raw)

    def _runtime(self, disk: Disk) -> Runtime:
        files = newest_files(disk, self.kind)
        assert files is not None
        return Runtime.of(files[layout.CONTROL])


def newest_files(disk: Disk, kind: str) -> Mapping[str, bytes] | None:
    """Returns the content of the mapped files as processes see it; None if one is missing."""
    paths = disk.newest()
    if not all(f"{BUFFER}/{name}" in paths for name in names_of(kind)):
        return None
    found = {name: disk.files[paths[f"{BUFFER}/{name}"]] for name in names_of(kind)}
    return {
        name: bytes(file.data[: file.sizes[-1]]).ljust(file.sizes[-1], b"\0")
        for name, file in found.items()
    }
