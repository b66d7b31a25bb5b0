"""Checks an image after it was opened: G8, G9 and the invariants of every buffer."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

import numpy as np

from shmbuffer.memory.format import layout
from tests.power.contents import (
    CAPACITY,
    COMMITTED,
    DICTIONARY,
    WRITING,
    Contents,
    Place,
    Runtime,
    Superblock,
    done,
)
from tests.power.disk import Image
from tests.power.history import BUFFER, History
from tests.power.machine import Started

READY, NO_SCHEMA = 1, 0


def audit(history: History, image: Image, started: Started | None) -> int:
    """Compares the buffer with the guarantees; returns the number of items that were checked."""
    if started is None:
        assert not history.opened or history.removing, "the buffer is gone, which was flushed"
        return 0
    control = image.files[f"{BUFFER}/{layout.CONTROL}"][1]
    before, after = Superblock.of(control), Superblock.of(started.files[layout.CONTROL])
    assert before is not None, "both copies of the superblock were damaged"
    assert after is not None
    owed = history.owed(before.durable_ticket)
    dictionary = image.files.get(f"{BUFFER}/{layout.DICTIONARY}", (0, None))[1]
    assert dictionary == DICTIONARY or (dictionary is None and not history.published)
    if not after.defined:
        assert after.state == NO_SCHEMA
        assert not owed, f"no schema any more, but items {owed} were covered"
        return 0
    assert after.state == READY
    assert after.boot != before.boot
    assert after.epoch > before.epoch
    found = Contents(history.kind, started.files)
    items = found.items()
    _require_no_invention(history, items)
    missing = {place: number for place, number in owed.items() if items.get(place) != number}
    assert not missing, f"covered items are missing: {missing}; there are {items}"
    _require_sound(history, found, Runtime.of(started.files[layout.CONTROL]), before)
    for place in owed.keys() & history.covered.keys():
        raw, given = float(found.raw[place[0]]), history.priorities[place]
        assert raw in given or any(map(math.isnan, given)), f"priority {raw}, never given: {given}"
    if layout.LEDGER in started.files:
        _require_acknowledged(history, started.files[layout.LEDGER], found.places(), owed.keys())
    _require_counted(history, image, started, len(items))
    return len(items)


def _require_acknowledged(
    history: History, ledger: bytes, places: list[Place], owed: AbstractSet[Place]
) -> None:
    acknowledged = done(ledger, places)
    assert acknowledged <= history.acking, f"{acknowledged - history.acking} never were"
    again = {ticket for _, ticket in owed} & history.done - acknowledged
    assert not again, f"acknowledged before the flush, and given again: {again}"


def _require_no_invention(history: History, items: dict[Place, int]) -> None:
    for place, number in items.items():
        assert number in history.invoked, f"item {number} was never written"
        assert history.acked.get(place, number) == number or number in history.writing, (
            f"slot and ticket {place} have item {number}, and had {history.acked[place]}"
        )
    back = {place for place in items.keys() & history.gone if items[place] not in history.writing}
    assert not back, f"items {back} had been overwritten, evicted or emptied before the last flush"
    assert len(set(items.values())) == len(items), f"an item is in two slots: {items}"


def _require_sound(history: History, found: Contents, runtime: Runtime, before: Superblock) -> None:
    tickets = (found.words >> np.uint64(2)).astype(np.int64)[found.words != 0]
    assert not (found.states == WRITING).any(), "a slot is being written, and by nobody"
    assert runtime.length == np.count_nonzero(found.states == COMMITTED)
    assert runtime.head > max(tickets.tolist(), default=-1)
    assert runtime.head >= max(history.floor.head, before.durable_ticket), "head fell"
    assert runtime.write_count >= history.floor.write_count or history.emptied, "write_count fell"
    used = max((found.words != 0).nonzero()[0].tolist(), default=-1) + 1
    assert used <= runtime.allocated <= CAPACITY, "slots in use do not count as allocated"
    held = found.states == COMMITTED
    assert (found.mass[held] > 0).all(), "an item cannot be drawn"
    assert not found.mass[~held].any(), "a slot without an item can be drawn"
    assert found.tree_is_exact(), "the sum is not the sum of the leaves"


def _require_counted(history: History, image: Image, started: Started, items: int) -> None:
    """G9: items that are in the image but not in the opened buffer have been counted as dropped."""
    files = {
        path.removeprefix(f"{BUFFER}/"): data
        for path, (_, data) in image.files.items()
        if path.startswith(f"{BUFFER}/")
    }
    shown = int(np.count_nonzero(Contents(history.kind, files).states == COMMITTED))
    report = started.report
    assert report.items == items
    lost = shown + report.rolled_forward - items
    refused = report.words_refused + report.checksum_failed
    assert lost == refused, f"{lost} items were dropped, {refused} are reported: {report}"
