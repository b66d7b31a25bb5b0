"""Which windows a stream of items has, and which are still there: counted item by item."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Step(NamedTuple):
    """One item."""

    number: int
    """Its only name."""
    source: tuple[int, int]
    ends: bool
    begins: bool = False
    episode: int = 0


class Stream:
    """What has been seen of one source."""

    def __init__(self) -> None:
        self.last: tuple[int, Step] | None = None
        self.window: list[int] = []  # tickets of the one that is open
        self.skips = 0  # items that are no part of a window, because its first ones are gone


class WindowOracle:
    """A ring of ``capacity`` slots, as somebody sees it who looks now and then."""

    def __init__(self, capacity: int, steps: int) -> None:
        self.capacity, self.steps = capacity, steps
        self.items: list[Step] = []  # by ticket
        self.seen = 0
        self.streams: dict[tuple[int, int], Stream] = {}
        self.waiting: deque[list[int]] = deque()
        self.lost = 0

    @property
    def oldest(self) -> int:
        return max(0, len(self.items) - self.capacity)

    def write(self, items: list[Step]) -> None:
        self.items += items

    def look(self) -> None:
        oldest = self.oldest
        for stream in self.streams.values():
            if stream.last is not None and stream.last[0] < oldest:
                stream.__init__()  # type: ignore[misc] # nobody knows what was between
            if stream.window and stream.window[0] < oldest:
                stream.skips = self.steps - len(stream.window)
                stream.window = []
        for ticket in range(max(self.seen, oldest), len(self.items)):
            self._see(ticket, self.items[ticket])
        self.seen = len(self.items)

    def _see(self, ticket: int, item: Step) -> None:
        stream = self.streams.setdefault(item.source, Stream())
        before = stream.last
        if before is None or before[1].ends or item.begins or before[1].episode != item.episode:
            stream.window, stream.skips = [], 0
        stream.last = ticket, item
        if stream.skips:
            stream.skips -= 1
            return
        stream.window.append(ticket)
        if len(stream.window) == self.steps:
            self.waiting.append(stream.window)
            stream.window = []

    def take(self, count: int) -> list[list[int]]:
        """The numbers of the items of the next windows, up to ``count``."""
        self.look()
        found: list[list[int]] = []
        while self.waiting and len(found) < count:
            window = self.waiting.popleft()
            if window[0] < self.oldest:
                self.lost += 1
            else:
                found.append([self.items[ticket].number for ticket in window])
        return found
