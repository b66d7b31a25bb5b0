"""Rules that a history and its directory obey after any kill.

    H1  no item is torn                     H6  head and write_count never decrease
    H2  no item was invented                H7  masses, sums and checksums are exact
    H3  no acknowledged item is lost        H8  every ticket is accounted for
    H4  no item is there twice              H9  an update applies, and to its item only
    H5  a batch is complete or absent       H12 weights match the priorities
    H13 no living client is taken for dead  H14 an interrupt leaves no lock behind
    H15 a copy that was put back has all items that did not change while it was made, none later

The process that runs the others checks H10 (no process hangs), and tests/torture/test_draws.py
checks H11 (draws follow priorities). No process writes while `violations` runs.

A new era begins when a copy is put back (lineage.py). Torn items (H1), invented items (H2), items
that are present twice or under another ticket (H4), and inexact values (H7) are faults in every
era. Counters (H6, H8), overwritten items, complete batches (H5) and updates (H9) are compared
within the last era. H15 says which items from before that era must be present. A process with
another boot id that recovers cannot tell a kill from a power cut. Single items of a batch that was
not acknowledged may then be present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from tests.torture import items
from tests.torture.history import NEVER, NO_OUTCOME, WAS_REFUSED, History, Kind
from tests.torture.image import ABORTED, COMMITTED, EMPTY, READY, WRITING, Image
from tests.torture.lineage import lineage
from tests.torture.updates import broken_priorities

Numbers = NDArray[np.int64]


def violations(
    history: History,
    image: Image,
    *,
    mean_words: int = 0,
    contents: dict[int, int] | None = None,
    item_bytes: int = 0,
    boots: int = 1,
) -> list[str]:
    """Returns each violation as a sentence that begins with the name of the rule.

    Args:
        history: the calls of all processes.
        image: the contents of the directory.
        mean_words: mean size of records, as for `items.records_of`.
        contents: key of each slot, if another reader has read the items and found them complete.
        item_bytes: upper limit for the size of a record.
        boots: number of boot ids that the processes saw.
    """
    rules = Rules(history, image, mean_words, boots)
    if contents is not None:
        rules.bytes_of = lambda keys: len(keys) * item_bytes
        rules.slots = np.array(sorted(contents), np.int64)
        rules.keys = np.array([contents[slot] for slot in sorted(contents)], np.uint64)
        rules.torn = np.setxor1d(rules.slots, image.committed)
    return list(rules.broken())


class Rules:
    """The rules that `violations` checks, with one generator for each rule."""

    def __init__(self, history: History, image: Image, mean_words: int, boots: int = 1) -> None:
        self.history = history
        self.image = image
        self.mean_words = mean_words
        self.bytes_of: Callable[[items.Keys], int] = partial(items.record_bytes, mean=mean_words)
        self.boots = boots
        self.batches = history.batches.copy()
        self.acknowledged = history.batches["ticket"] >= 0
        self.lineage = lineage(history.batches, history.marks)
        self.slots = image.committed
        self.tickets = image.tickets[self.slots]

    def broken(self) -> Iterator[str]:
        torn = self.torn
        if len(torn):
            yield f"H1: the items in slots {torn.tolist()} are torn"
            return  # the other rules need whole items
        if not len(self.batches) and len(self.slots):
            yield "H2: there are items, and nobody wrote any"
            return
        yield from self.invented()
        yield from self.moved()
        yield from self.twice()
        yield from self.lost()
        yield from self.stale_samples()
        yield from self.falling()
        yield from self.inexact()
        yield from self.unaccounted()
        yield from self.taken_for_dead()
        yield from self.locked()
        batch, _ = self._batch_of(self.keys)
        yield from broken_priorities(
            self.history.updates,
            self.image,
            self.keys,
            since=self.lineage.since,
            uncertain=self.lineage.perhaps[batch],
        )

    @cached_property
    def keys(self) -> items.Keys:
        """The keys of the items that are present."""
        if not self.image.record_bytes:
            return items.key_in(self.image.leaves[0][self.slots])
        return np.array([self._record_key(slot) for slot in self.slots.tolist()], np.uint64)

    def _record_key(self, slot: int) -> int:
        key = items.record_key(self.image.record(slot)[24:], self.mean_words)
        return 2**63 if key is None else key

    @cached_property
    def torn(self) -> Numbers:
        if self.image.record_bytes:
            return self.slots[self.keys == 2**63]
        return self.slots[items.torn([leaf[self.slots] for leaf in self.image.leaves])]

    def _batch_of(self, keys: items.Keys) -> tuple[Numbers, Numbers]:
        """Returns the batch of each key and its number in it; batch -1 if no process wrote it."""
        known = self.batches["key"]
        if not len(known):
            return np.full(len(keys), -1), np.zeros(len(keys), np.int64)
        batch = np.searchsorted(known, keys, "right") - 1
        offset = (keys - known[np.maximum(batch, 0)]).astype(np.int64)
        batch[(batch >= 0) & (offset >= self.batches["count"][batch])] = -1
        return batch, offset

    def invented(self) -> Iterator[str]:
        samples = self.history.samples[self.history.samples["began"] >= self.lineage.since]
        for what, keys in (("there is", self.keys), ("sampled was", samples["key"])):
            batch, _ = self._batch_of(keys)
            undone = (batch >= 0) & self.lineage.undone[batch]
            for key in keys[undone][:5]:
                yield f"H15: {what} item {key:#x}, written after the copy that was put back"
            for key in keys[batch < 0][:5]:
                yield f"H2: {what} item {key:#x}, which nobody wrote"
            refused = (batch >= 0) & (self.batches["ticket"][batch] == WAS_REFUSED)
            for key in keys[refused][:5]:
                yield f"H2: {what} item {key:#x}, whose write was refused"
        batch, _ = self._batch_of(self.history.samples["key"])
        early = self.history.samples["ended"] < self.batches["began"][batch]
        for sample in self.history.samples[(batch >= 0) & early][:5]:
            yield f"H2: item {sample['key']:#x} was sampled before it was written"

    def moved(self) -> Iterator[str]:
        """H4: an item has one ticket. A batch without an outcome has that of its first evidence."""
        for what, keys, tickets in (
            ("is there", self.keys, self.tickets),
            ("was sampled", self.history.samples["key"], self.history.samples["ticket"]),
        ):
            batch, offset = self._batch_of(keys)
            open_ones = (batch >= 0) & (self.batches["ticket"][batch] == NO_OUTCOME)
            these, first = np.unique(batch[open_ones], return_index=True)
            self.batches["ticket"][these] = (tickets - offset)[open_ones][first]
            expected = self.batches["ticket"][batch] + offset
            wrong = (batch >= 0) & (expected >= 0) & (tickets != expected)
            for i in wrong.nonzero()[0][:5]:
                yield (
                    f"H4: item {keys[i]:#x} {what} with ticket {tickets[i]}; it has {expected[i]}"
                )

    def twice(self) -> Iterator[str]:
        unique, how_often = np.unique(self.keys, return_counts=True)
        for key in unique[how_often > 1][:5]:
            yield f"H4: item {key:#x} is there twice"
        first, count = self.known["ticket"], self.known["count"]
        again = (first[1:] < (first + count)[:-1]).nonzero()[0]
        for i in again[:5]:
            yield f"H4: ticket {first[i + 1]} was used twice"
        for i in np.flatnonzero(self.tickets % self.image.capacity != self.slots)[:5]:
            yield f"H4: ticket {self.tickets[i]} is in slot {self.slots[i]}"

    @cached_property
    def written(self) -> NDArray[np.bool_]:
        """Batches that must be present unless they were overwritten.

        Either their writers' accounts or other evidence says that they were committed.
        """
        proven = self.acknowledged if self.boots > 1 else self.batches["ticket"] >= 0
        written: NDArray[np.bool_] = proven & self.lineage.ours | self.lineage.kept
        return written

    @cached_property
    def known(self) -> NDArray[np.void]:
        """The batches of `written`, sorted by ticket."""
        known = self.batches[self.written]
        return known[np.lexsort((known["key"], known["ticket"]))]

    def lost(self) -> Iterator[str]:
        head, capacity = self.image.head, self.image.capacity
        known = self.known[self.known["ticket"] + self.known["count"] > head - capacity]
        if not len(known):
            return
        counts = known["count"]
        batch = np.repeat(np.arange(len(known)), counts)
        offset = np.arange(len(batch)) - np.repeat(np.cumsum(counts) - counts, counts)
        tickets = known["ticket"][batch] + offset
        keep = tickets >= head - capacity
        batch, offset, tickets = batch[keep], offset[keep], tickets[keep]
        words = self.image.words[tickets % capacity]
        missing = words != (tickets.astype(np.uint64) << np.uint64(2) | np.uint64(COMMITTED))
        if self.image.record_bytes:
            missing &= ~self._evicted(known, batch, offset, missing, words)
        for i in missing.nonzero()[0][:5]:
            one = known[batch[i]]
            number = self._batch_of(one["key"][None])[0][0]
            rule = (
                "H3: acknowledged" if self.acknowledged[number] else "H5: of a batch that is there,"
            )
            rule = "H15: untouched" if self.lineage.kept[number] else rule
            word = int(words[i])
            yield (
                f"{rule} item {one['key'] + np.uint64(offset[i]):#x} of ticket {tickets[i]} is "
                f"missing: its slot says {('EMPTY', 'WRITING', 'COMMITTED', 'ABORTED')[word & 3]}, "
                f"ticket {word >> 2}; head {head}"
            )
        if tickets[-1] >= head:
            yield f"H8: ticket {tickets[-1]} is not below the head, {head}"

    def _evicted(
        self,
        known: NDArray[np.void],
        batch: Numbers,
        offset: Numbers,
        missing: NDArray[np.bool_],
        words: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """The oldest items, if later items may have needed their bytes."""
        gone = np.logical_and.accumulate(missing) & (words & np.uint64(3) == EMPTY)
        if not gone.any():
            return gone
        newest = int(gone.nonzero()[0][-1])
        later = known[batch[newest] :]
        lapsed = ~self.written & self.lineage.ours & (self.batches["ended"] >= later["began"][0])
        lapsed = self.batches[lapsed | self.lineage.perhaps]
        needed = 0
        for key, count in np.concatenate([later, lapsed])[["key", "count"]]:
            keys = key + np.arange(count, dtype=np.uint64)
            needed += self.bytes_of(keys)
        if needed <= self.image.record_bytes:
            gone[:] = False
        return gone

    def stale_samples(self) -> Iterator[str]:
        """H2: an item that was overwritten before a sample began is not in the sample."""
        acknowledged = self.known[self.known["ended"] != NEVER]
        samples = self.history.samples[self.history.samples["began"] >= self.lineage.since]
        if not len(acknowledged) or not len(samples):
            return
        over = samples["ticket"] + self.image.capacity
        batch = np.searchsorted(acknowledged["ticket"], over, "right") - 1
        one = acknowledged[np.maximum(batch, 0)]
        covers = (batch >= 0) & (over < one["ticket"] + one["count"])
        for sample in samples[covers & (one["ended"] < samples["began"])][:5]:
            yield f"H2: item {sample['key']:#x} was sampled after it was overwritten"

    def falling(self) -> Iterator[str]:
        seen = self.history.seen[self.history.seen["began"] >= self.lineage.since]
        by_end = np.argsort(seen["ended"], kind="stable")
        before = np.searchsorted(seen["ended"][by_end], seen["began"], "left") - 1
        for name, field, now in (
            ("head", "a", self.image.head),
            ("write_count", "b", self.image.write_count),
        ):
            highest = np.maximum.accumulate(seen[field][by_end]) if len(seen) else seen[field]
            fell = (before >= 0) & (seen[field] < highest[np.maximum(before, 0)])
            for one in seen[fell][:5]:
                yield f"H6: {name} was {one[field]} after it had been higher"
            if len(highest) and now < highest[-1]:
                yield f"H6: {name} is {now}, and was {highest[-1]}"

    def inexact(self) -> Iterator[str]:
        image = self.image
        if len(wrong := image.wrong_leaves()):
            yield f"H7: the masses of elements {wrong[:5].tolist()} are not those of the priorities"
        if wrong_nodes := image.wrong_nodes():
            yield f"H7: {wrong_nodes} nodes are not the sums of their children"
        if len(wrong := image.wrong_checksums()):
            yield f"H7: the checksums of slots {wrong[:5].tolist()} are not those of their items"

    def unaccounted(self) -> Iterator[str]:
        image = self.image
        if image.state != READY:
            yield f"H8: the state is {image.state}"
        for slot in (image.states == WRITING).nonzero()[0][:5]:
            yield f"H8: slot {slot} is being written, and nobody writes"
        for slot in (self.image.tickets >= image.head).nonzero()[0][:5]:
            if image.words[slot]:
                yield f"H8: the ticket of slot {slot} is not below the head"
        if image.length != len(self.slots):
            yield f"H8: length is {image.length}, and {len(self.slots)} items are there"
        ours, counts = self.lineage.ours, self.batches["count"]
        written = int(counts[self.written & ours].sum()) + self.history.forgotten_written
        open_ones = int(counts[~self.written & ours].sum()) + self.history.forgotten_open
        for name, value, before in (
            ("head", image.head, self.lineage.head),
            ("write_count", image.write_count, self.lineage.write_count),
        ):
            if not written <= value - before <= written + open_ones:
                yield (
                    f"H8: {name} is {value}, from {before}; {written} items were written, and "
                    f"{open_ones} more may have been"
                )
        aborts = image.rolled_back + sum(entry.aborts for entry in image.entries)
        if not self.lineage.since and image.write_count + aborts > image.head:
            yield f"H8: {image.write_count} written + {aborts} aborted > {image.head} tickets"
        for slot in (image.states == ABORTED).nonzero()[0]:
            if image.mass[slot]:
                yield f"H8: slot {slot} is aborted and has a mass"

    def taken_for_dead(self) -> Iterator[str]:
        """H13: a recovery changes the epoch, so it stays the same while a handle is in use."""
        seen = self.history.seen[self.history.seen["first"] >= 0]
        if not len(seen):
            return
        handle, epoch = seen[["who", "count"]], seen["first"]
        _, whose = np.unique(handle, return_inverse=True)
        last = np.full(whose.max() + 1, -1)
        first = np.full(len(last), 2**62)
        np.maximum.at(last, whose, epoch)
        np.minimum.at(first, whose, epoch)
        for one in (last > first).nonzero()[0][:5]:
            who = handle["who"][whose == one][0]
            yield (
                f"H13: the directory was recovered while {who:#x} used it: it saw the epochs "
                f"{first[one]} and {last[one]}"
            )

    def locked(self) -> Iterator[str]:
        marks = self.history.marks
        for one in marks[(marks["kind"] == Kind.INTERRUPTED) & (marks["a"] > 0)][:5]:
            yield f"H14: an interrupt of {one['who']:#x} left {one['a']} locks behind"
