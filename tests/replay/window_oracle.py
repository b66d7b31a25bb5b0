"""Computes the windows of a stream of items, and those still stored, item by item."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Step(NamedTuple):
    """An item of a stream."""

    number: int
    """Unique number of the item."""
    source: tuple[int, int]
    ends: bool
    begins: bool = False
    episode: int = 0


class Stream:
    """The items of one source that were seen so far."""

    def __init__(self) -> None:
        self.last: tuple[int, Step] | None = None
        self.window: list[int] = []  # tickets of the open window
        self.skips = 0  # items outside any window, because its first items are gone


class WindowOracle:
    """A ring of ``capacity`` slots, as a reader sees it that updates now and then."""

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
        """Returns the numbers of the items of the next windows, at most ``count`` windows."""
        self.look()
        found: list[list[int]] = []
        while self.waiting and len(found) < count:
            window = self.waiting.popleft()
            if window[0] < self.oldest:
                self.lost += 1
            else:
                found.append([self.items[ticket].number for ticket in window])
        return found
