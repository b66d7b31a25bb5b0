"""The rules accept a correct history and report each kind of violation."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shmbuffer.memory import Engine
from tests.torture import items
from tests.torture.history import EVENT, NEVER, WAS_REFUSED, History, Kind, Log
from tests.torture.image import ABORTED, COMMITTED, EMPTY, Image
from tests.torture.kills import scratch
from tests.torture.plan import Plan
from tests.torture.roles import sample, write
from tests.torture.rules import Rules, violations

BATCH = 3
WRITER, LEARNER, LATER = items.who_of(1, 1), items.who_of(2, 1), items.who_of(1, 2)
ROWS = Plan(16, 40, BATCH, 0, 1, 1, 0.5)
RECORDS = Plan(16, 256, BATCH, 4096, 1, 1, 0.5)


def played(folder: Path, plan: Plan) -> Path:
    """Writes twice around a ring, samples and updates; the outcome of the last is not noted."""
    logs, rng = folder / "logs", np.random.default_rng(1)
    logs.mkdir()
    with (
        Engine.open(folder / "buffer", plan.settings) as engine,
        Log(logs, 1, WRITER) as writer,
        Log(logs, 2, LEARNER) as learner,
        Log(logs, 3, LATER) as unheard,
    ):
        ring = engine.define(plan.schema)
        for first in range(0, 36, BATCH):
            writer.invoked(first, BATCH)
            ticket = write(ring, items.keys_of(WRITER, first, BATCH), plan)
            writer.written(first, BATCH, ticket)
            began = time.monotonic_ns()
            writer.seen(
                began, ring.head, ring.write_count, engine.superblock.epoch, engine.seat.incarnation
            )
            began = time.monotonic_ns()
            keys, index, tickets, _ = sample(ring, plan, rng, 4)
            learner.sampled(began, keys, tickets)
            _, where = np.unique(tickets, return_index=True)
            given = items.keys_of(LEARNER, 4 * first, len(where))
            raw = items.priority(given)
            row = learner.updating(given, tickets[where], raw)
            applied, _ = ring.update(index[where], raw, tickets[where])
            learner.updated(row, len(where), applied)
        unheard.invoked(0, BATCH)
        write(ring, items.keys_of(LATER, 0, BATCH), plan)
    return folder


@pytest.fixture(scope="module")
def rows() -> Iterator[Path]:
    folder = scratch()
    yield played(folder, ROWS)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def records() -> Iterator[Path]:
    folder = scratch()
    yield played(folder, RECORDS)
    shutil.rmtree(folder)


def look(folder: Path) -> tuple[History, Image]:
    image = Image(folder / "buffer")
    for name in ("words", "raw", "mass", "checksums"):
        setattr(image, name, getattr(image, name).copy())
    image.nodes = [(sums.copy(), least.copy()) for sums, least in image.nodes]
    return History.read(folder / "logs"), image


def of_ticket(image: Image, ticket: int) -> int:
    """Returns the slot of the item with this ticket."""
    slot = ticket % image.capacity
    assert image.tickets[slot] == ticket
    return slot


def set_state(image: Image, ticket: int, state: int) -> None:
    """Makes the item with this ticket look absent, with no other fault in the image."""
    slot = of_ticket(image, ticket)
    image.words[slot] = 0 if state == EMPTY else ticket << 2 | state
    image.length -= 1
    image.mass[slot] = 0


def broken(history: History, image: Image, plan: Plan = ROWS) -> str:
    return "\n".join(violations(history, image, mean_words=plan.mean_words))


def test_a_sound_history_breaks_no_rule(rows: Path, records: Path) -> None:
    assert broken(*look(rows)) == ""
    assert broken(*look(records), RECORDS) == ""


def torn(history: History, image: Image) -> None:
    image.leaves[1][of_ticket(image, 30), 17] ^= 1


def torn_by_another_item(history: History, image: Image) -> None:
    image.leaves[2][of_ticket(image, 30)] = image.leaves[2][of_ticket(image, 31)]


def never_written(history: History, image: Image) -> None:
    history.batches = history.batches[history.batches["ticket"] != 30]


def refused(history: History, image: Image) -> None:
    history.batches["ticket"][history.batches["ticket"] == 30] = WAS_REFUSED


def sampled_but_never_written(history: History, image: Image) -> None:
    history.samples["key"][3] += np.uint64(1 << 31)


def sampled_before(history: History, image: Image) -> None:
    history.samples["ended"][3] = 1


def sampled_too_late(history: History, image: Image) -> None:
    history.samples["began"][0] = history.samples["ended"][-1]


def sampled_with_another_ticket(history: History, image: Image) -> None:
    history.samples["ticket"][3] += 1


def lost(history: History, image: Image) -> None:
    set_state(image, 30, EMPTY)


def lost_as_aborted(history: History, image: Image) -> None:
    set_state(image, 30, ABORTED)


def lost_to_an_older_item(history: History, image: Image) -> None:
    image.words[of_ticket(image, 30)] = (30 - image.capacity) << 2 | COMMITTED


def in_two_slots(history: History, image: Image) -> None:
    for leaf in image.leaves:
        leaf[of_ticket(image, 30)] = leaf[of_ticket(image, 31)]


def ticket_used_twice(history: History, image: Image) -> None:
    history.batches["ticket"][3] = history.batches["ticket"][4]


def half_a_batch(history: History, image: Image) -> None:
    set_state(image, 37, ABORTED)


def head_fell(history: History, image: Image) -> None:
    history.seen["a"][5] = 1


def count_fell_in_the_end(history: History, image: Image) -> None:
    image.write_count = int(history.seen["b"][-1]) - 1


def wrong_mass(history: History, image: Image) -> None:
    slot = of_ticket(image, 30)
    image.mass[slot] = np.nextafter(image.mass[slot], 100)


def wrong_sum(history: History, image: Image) -> None:
    image.nodes[0][0][0] = np.nextafter(image.nodes[0][0][0], 100)


def wrong_minimum(history: History, image: Image) -> None:
    image.nodes[0][1][0] = 0


def wrong_checksum(history: History, image: Image) -> None:
    image.checksums[of_ticket(image, 30)] ^= np.uint32(1)


def still_being_written(history: History, image: Image) -> None:
    image.words[of_ticket(image, 30)] -= np.uint64(1)


def wrong_length(history: History, image: Image) -> None:
    image.length += 1


def leaked_tickets(history: History, image: Image) -> None:
    image.head += 1


def miscounted(history: History, image: Image) -> None:
    image.write_count += 1


def ticket_above_the_head(history: History, image: Image) -> None:
    image.words[of_ticket(image, 30)] += np.uint64(4 * image.capacity)


def aborted_twice(history: History, image: Image) -> None:
    image.rolled_back += 1


def updates_of(history: History, image: Image) -> np.ndarray:
    """Returns the last update of each item that is present."""
    return np.flatnonzero(np.isin(history.updates["ticket"], image.tickets[image.committed]))


def priority_of_nobody(history: History, image: Image) -> None:
    slot = of_ticket(image, 30)
    image.raw[slot] = image.mass[slot] = 1.5


def priority_of_another_item(history: History, image: Image) -> None:
    update = history.updates[updates_of(history, image)[-1]]
    slot = (int(update["ticket"]) + 1) % image.capacity
    image.raw[slot] = update["raw"]


def update_undone(history: History, image: Image) -> None:
    update = history.updates[updates_of(history, image)[-1]]
    slot = of_ticket(image, int(update["ticket"]))
    image.raw[slot] = items.priority(items.key_in(image.leaves[0][slot : slot + 1]))[0]


def older_update(history: History, image: Image) -> None:
    update = updates_of(history, image)[-1]
    again = history.updates[update : update + 1].copy()
    again["key"] += np.uint64(1000)
    again["began"], again["ended"] = again["ended"] + 1, again["ended"] + 2
    history.updates = np.concatenate([history.updates, again])


def update_not_applied(history: History, image: Image) -> None:
    history.updates["applied"][:] = 0


def recovered_under_a_living_process(history: History, image: Image) -> None:
    history.seen["first"][-1] += 1


def lock_left_by_an_interrupt(history: History, image: Image) -> None:
    mark(history, Kind.INTERRUPTED, a=1)


def written_after_the_copy(history: History, image: Image) -> None:
    """Puts back a copy from before ticket 30 was written, although the item is present."""
    moment = int(history.batches["began"][history.batches["ticket"] == 30][0])
    mark(history, Kind.COPIED, began=moment - 2, ended=moment - 1)
    mark(history, Kind.RESTORED, began=NEVER - 1, ended=NEVER - 1)


def lost_in_a_copy(history: History, image: Image) -> None:
    """Puts back a copy from after all writes, although ticket 30 is missing."""
    set_state(image, 30, EMPTY)
    put_back(history, image)


def put_back(history: History, image: Image) -> None:
    """Simulates that a copy of all present items was put back and no item was written since."""
    mark(history, Kind.COPIED, began=NEVER - 3, ended=NEVER - 2, a=image.head - image.capacity)
    at, head, count = NEVER - 1, image.head, image.write_count
    mark(history, Kind.RESTORED, began=at, ended=at, a=head, b=count)


def mark(history: History, kind: Kind, **fields: int) -> None:
    """Adds one mark to the history."""
    row = np.zeros(1, EVENT)
    row["kind"] = kind
    for name, value in fields.items():
        row[name] = value
    history.marks = np.concatenate([history.marks, row])


MUTATIONS: dict[Callable[[History, Image], None], str] = {
    torn: "H1: the items in slots",
    torn_by_another_item: "H1: the items in slots",
    never_written: "H2: there is item",
    refused: "whose write was refused",
    sampled_but_never_written: "H2: sampled was item",
    sampled_before: "was sampled before it was written",
    sampled_too_late: "was sampled after it was overwritten",
    sampled_with_another_ticket: "H4: item 0x[0-9a-f]+ was sampled with ticket",
    lost: "H3: acknowledged item .* is missing: its slot says EMPTY",
    lost_as_aborted: "H3: acknowledged item .* says ABORTED",
    lost_to_an_older_item: "H3: acknowledged item .* says COMMITTED, ticket 14",
    in_two_slots: "H4: item 0x[0-9a-f]+ is there twice",
    ticket_used_twice: r"H4: ticket \d+ was used twice",
    half_a_batch: "H5: of a batch that is there, item .* is missing",
    head_fell: "H6: head was 1 after it had been higher",
    count_fell_in_the_end: "H6: write_count is 35, and was 36",
    wrong_mass: "H7: the masses of elements",
    wrong_sum: "H7: 1 nodes",
    wrong_minimum: "H7: 1 nodes",
    wrong_checksum: "H7: the checksums of slots",
    still_being_written: "H8: slot 14 is being written",
    wrong_length: "H8: length is 17",
    leaked_tickets: "H8: head is 40",
    miscounted: "H8: write_count is 40",
    ticket_above_the_head: "H8: the ticket of slot 14 is not below the head",
    aborted_twice: r"H8: 39 written \+ 1 aborted > 39 tickets",
    priority_of_nobody: "H9: nobody gave slot 14",
    priority_of_another_item: r"H9: the priority in slot \d+ was given to another item",
    update_undone: "has its first priority, and was updated",
    older_update: "has an older priority than the last one",
    update_not_applied: "H9: an update named",
    recovered_under_a_living_process: "H13: the directory was recovered while .* epochs 0 and 1",
    lock_left_by_an_interrupt: "H14: an interrupt of 0x0 left 1 locks behind",
    written_after_the_copy: "H15: there is item .* written after the copy",
    lost_in_a_copy: "H15: untouched item .* of ticket 30 is missing: its slot says EMPTY",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.__name__)
def test_a_broken_history_is_noticed(
    rows: Path, mutation: Callable[[History, Image], None]
) -> None:
    history, image = look(rows)
    mutation(history, image)
    said = broken(history, image)
    assert re.search(MUTATIONS[mutation], said), said


def test_an_open_batch_that_left_nothing_is_absent(rows: Path) -> None:
    history, image = look(rows)
    for ticket in (36, 37, 38):
        set_state(image, ticket, ABORTED)
    image.write_count -= BATCH
    image.rolled_back += BATCH
    assert not [rule for rule in violations(history, image) if rule[:2] in ("H3", "H5", "H8")]


def test_what_was_put_back_may_lack_what_changed_while_it_was_copied(rows: Path) -> None:
    history, image = look(rows)
    put_back(history, image)
    assert broken(history, image) == ""
    copied = history.marks["kind"] == Kind.COPIED
    moment = int(history.batches["began"][history.batches["ticket"] == 30][0])
    history.marks["began"][copied] = moment  # before the batch was acknowledged
    set_state(image, 30, EMPTY)
    assert not [rule for rule in violations(history, image) if rule.startswith(("H3", "H15"))]


def test_a_torn_record_is_noticed(records: Path) -> None:
    history, image = look(records)
    position = int(image.extents[image.head % 16 - 1][0]) % image.record_bytes
    data = bytearray(image.ring_bytes)
    data[position + 41] ^= 1
    image.ring_bytes = bytes(data)
    assert "H1: the items in slots" in broken(history, image, RECORDS)


def test_the_oldest_records_may_go_where_their_bytes_were_needed(records: Path) -> None:
    history, image = look(records)
    assert image.evicted
    set_state(image, image.head - 2, EMPTY)
    assert "H5: of a batch that is there" in broken(history, image, RECORDS)
    history, image = look(records)
    oldest = int(image.tickets[image.committed].min())
    rules = Rules(history, image, RECORDS.mean_words)
    assert not list(rules.moved())
    image.record_bytes = 2**20  # the byte ring has space for all items
    assert f"of ticket {oldest - 1} is missing" in "\n".join(rules.lost())


def test_priorities_carry_their_keys() -> None:
    keys = items.keys_of(WRITER, 0, 1000)
    raw = items.priority(keys)
    assert items.key_of_priority(raw).tolist() == keys.tolist()
    assert len(np.unique(raw)) == 1000
    assert items.key_of_priority(np.array([1.5, 0.0, np.nan])).tolist() == [-1, -1, -1]
