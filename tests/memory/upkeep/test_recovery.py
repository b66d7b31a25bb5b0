"""Recovery: the first process to open a directory without living clients finds all committed items.

A different boot id in the superblock simulates a reboot. After a reboot, and in a copy, any page
may be older than another, so every item is verified by its checksum.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer import AttachTimeout, BufferNotFoundError, RecoveryReport, recover
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.clients.locks import InitLock
from shmbuffer.memory.format import layout, slots
from shmbuffer.memory.format.layout import BufferState, EntryState, Phase, SlotState
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.identity import UNKNOWN_BOOT
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.check import check
from tests.kit.rings import ring_of
from tests.memory.rows import (
    Parent,
    Rows,
    child,
    contents,
    draw,
    files_of,
    mutex_held,
    place,
    read,
    require_sound,
    sample,
    schema,
    succeeds,
    write,
)
from tests.memory.upkeep.edits import edited

SETTINGS = Settings(capacity=8, alpha=1.0, eps=0.0)
ALL = {n % 8: n for n in range(4, 12)}


def made(path: Path, settings: Settings = SETTINGS) -> None:
    """Makes items 4 to 11 with their number as priority; all clients have left."""
    with Engine.open(path, settings) as engine:
        ring = engine.define(schema(settings.capacity))
        write(ring, range(12), np.arange(12.0))


def reboot(path: Path) -> None:
    """Simulates a reboot: only the state on the disk remains."""
    with Directory.open(path) as directory, directory.open_file(layout.CONTROL) as file:
        control = Control(_core.Map(file.fd, layout.CONTROL_BYTES), str(path))
        control.write(replace(control.superblock(), boot_id=b"an earlier boot."))
        control.entries["boot_id"] = np.void(b"an earlier boot.")


def dies(path: Path, work: Callable[[Engine], object], point: str | None = None) -> None:
    """Runs a client that is killed at a sync point, or after its work, without leaving."""

    def victim() -> None:
        engine = Engine.open(path, None)
        if point is not None:
            _core.arm(point)
        work(engine)
        os.kill(os.getpid(), signal.SIGKILL)

    with child(lambda parent: victim()) as process:
        assert process.end() == -signal.SIGKILL


def flip(path: Path, name: str, at: int) -> None:
    with edited(path, name) as data:
        data[at] ^= 4


@contextmanager
def words(path: Path, capacity: int = 8) -> Iterator[Any]:
    with edited(path, layout.SLOTS) as data:
        yield data[: 8 * capacity].view(np.uint64)


@contextmanager
def raw(path: Path, capacity: int = 8) -> Iterator[Any]:
    at = _core.sections(capacity, 1)["raw"]
    with edited(path, layout.SLOTS) as data:
        yield data[at : at + 8 * capacity].view(np.float64)


@contextmanager
def runtime(path: Path) -> Iterator[Any]:
    """Yields the runtime page as a structured value."""
    with edited(path, layout.CONTROL) as data:
        yield data[layout.RUNTIME_OFFSET : layout.REGISTRY_OFFSET].view(layout.RUNTIME)


@contextmanager
def entries(path: Path) -> Iterator[Any]:
    with edited(path, layout.CONTROL) as data:
        yield data[layout.REGISTRY_OFFSET :].view(layout.ENTRY)


def numbers(report: RecoveryReport) -> dict[str, int]:
    """Returns the non-zero counts of a report."""
    found = {name: value for name, value in report.to_json().items() if isinstance(value, int)}
    return {name: value for name, value in found.items() if value and name != "epoch"}


# No living client.


def test_committed_items_survive(path: Path) -> None:
    made(path)
    dies(path, lambda engine: write(ring_of(engine), [12], np.array([12.0])))
    report = recover(path)
    assert report.reason == "no client alive"
    assert numbers(report) == {"items": 8, "clients_retired": 1}
    with Engine.open(path, None) as engine:
        ring = ring_of(engine)
        assert contents(ring) == {**ALL, 4: 12}
        assert (ring.head, ring.write_count, ring.tree.max_priority) == (13, 13, 12.0)
        assert ring.tree.mass().tolist()[:8] == [8.0, 9.0, 10.0, 11.0, 12.0, 5.0, 6.0, 7.0]
        require_sound(engine)
        write(ring, [13])
        assert contents(ring)[5] == 13


def test_a_batch_being_written_is_gone_as_a_whole(path: Path) -> None:
    made(path)
    dies(path, lambda engine: ring_of(engine).claims.claim(3))
    report = recover(path)
    assert numbers(report) == {"items": 5, "rolled_back": 3, "clients_retired": 1}
    with Engine.open(path, None) as engine:
        assert contents(ring_of(engine)) == {n % 8: n for n in range(7, 12)}
        assert ring_of(engine).head == 15
        require_sound(engine)


@pytest.mark.parametrize("point", ["write.committing", "write.commit", "write.count", "write.idle"])
def test_a_batch_being_committed_is_there_as_a_whole(path: Path, point: str) -> None:
    made(path)
    dies(path, lambda engine: write(ring_of(engine), [12, 13], np.array([1.0, 2.0])), point)
    report = recover(path)
    assert report.items == 8
    assert report.rolled_forward == {"write.committing": 2, "write.commit": 1}.get(point, 0)
    with Engine.open(path, None) as engine:
        ring = ring_of(engine)
        assert contents(ring) == {**ALL, 4: 12, 5: 13}
        assert ring.write_count == 14
        assert ring.tree.priorities()[4:6].tolist() == [1.0, 2.0]
        require_sound(engine)


def test_items_rolled_forward_without_a_priority_have_the_default(
    path: Path,
) -> None:
    """The priority of the item that was in the slot before is not used."""
    made(path)
    dies(path, lambda engine: write(ring_of(engine), [12, 13]), "write.committing")
    assert recover(path).rolled_forward == 2
    with Engine.open(path, None) as engine:
        assert ring_of(engine).tree.priorities()[4:6].tolist() == [11.0, 11.0]
        require_sound(engine)


def test_lanes_are_counted_as_elements(path: Path) -> None:
    with Engine.open(path, Settings(capacity=12)) as engine:
        write(engine.define(schema(4, (3,))), range(9))
    dies(path, lambda engine: ring_of(engine).claims.claim(2))
    assert numbers(recover(path)) == {"items": 6, "rolled_back": 6, "clients_retired": 1}


def test_every_dead_client_is_retired(path: Path) -> None:
    made(path)
    with Engine.open(path, None) as engine:

        def work(parent: Parent) -> None:
            engine.seat.rejoin()
            ring_of(engine).claims.claim(1)
            parent.pause()

        with child(work) as one, child(work) as other:
            one.reached()
            other.reached()
            engine.close()
            one.kill()
            other.kill()
    report = recover(path)
    assert numbers(report) == {"items": 6, "rolled_back": 2, "clients_retired": 2}
    with Engine.open(path, None) as engine:
        assert len(engine.seat.registry.live()) == 1
        assert engine.stats()["waiters"] == 0
        assert not (engine.seat.control.entries["phase"] != Phase.IDLE).any()


def test_a_mutex_that_died_with_its_holder_is_recreated(path: Path) -> None:
    made(path)
    dies(
        path,
        lambda engine: ring_of(engine).update(np.arange(8), np.full(8, 3.0)),
        "update.leaf",
    )
    with Engine.open(path, None) as engine:
        assert ring_of(engine).tree.priorities()[0] == 3.0
        require_sound(engine)
        assert engine.stats()["repairs"] == 0


def test_a_directory_without_items_is_recovered_too(path: Path) -> None:
    Engine.open(path, SETTINGS).close()
    report = recover(path)
    assert numbers(report) == {}
    assert (report.reason, report.epoch) == ("no client alive", 1)
    with Engine.open(path, None) as engine:
        assert engine.ring() is None
        write(engine.define(schema()), [1])


def test_a_definition_that_was_not_finished_is_cleared_away(path: Path) -> None:
    Engine.open(path, SETTINGS).close()
    before = set(files_of(path))
    dies(path, lambda engine: engine.define(schema()), "define.renamed")
    assert set(files_of(path)) > before
    report = recover(path)
    assert numbers(report) == {"clients_retired": 1}
    assert set(files_of(path)) == before


def test_a_directory_that_somebody_uses_is_left_alone(path: Path) -> None:
    made(path)
    with Engine.open(path, None) as engine:
        write(ring_of(engine), [12])
        epoch = engine.superblock.epoch
        report = recover(path)
        assert (report.reason, report.items, report.epoch) == ("in use", 8, epoch)
        assert contents(ring_of(engine)) == {**ALL, 4: 12}
        ring_of(engine).claims.claim(1)
        recover(path)
        ring_of(engine).claims.commit()


def test_there_has_to_be_something_to_recover(path: Path) -> None:
    with pytest.raises(BufferNotFoundError):
        recover(path)


def test_recovery_waits_for_init_lock_with_a_deadline(path: Path) -> None:
    made(path)
    with (
        Directory.open(path) as directory,
        InitLock(directory, 0),
        pytest.raises(AttachTimeout, match=r"waited 0\.05 s"),
    ):
        recover(path, timeout=0.05)


def test_a_handle_says_what_its_recovery_did(path: Path) -> None:
    made(path)
    dies(path, lambda engine: ring_of(engine).claims.claim(2))
    with Engine.open(path, None) as engine, Engine.open(path, None) as second:
        assert engine.report is not None
        assert engine.report.rolled_back == 2
        assert second.report is None


# Repairs.


@pytest.mark.parametrize("bad", [-1.0, np.inf, -np.inf, 1e301, np.nan])
def test_an_invalid_priority_becomes_the_default(path: Path, bad: float) -> None:
    made(path)
    with raw(path) as found:
        found[[2, 5]] = bad
    report = recover(path)
    assert numbers(report) == {"items": 8, "priorities_repaired": 2}
    with Engine.open(path, None) as engine:
        ring = ring_of(engine)
        assert ring.tree.priorities()[[2, 5]].tolist() == [11.0, 11.0]
        assert contents(ring) == ALL
        require_sound(engine)


def test_the_priority_of_an_empty_slot_is_ignored(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), range(3))
    with raw(path) as found:
        found[5] = -np.inf
    assert numbers(recover(path)) == {"items": 3}


def test_priorities_that_were_never_switched_on_are_not_repaired(path: Path) -> None:
    made(path, Settings(capacity=8))
    with Engine.open(path, None) as engine:
        write(ring_of(engine), range(8))
    with raw(path) as found:
        assert np.isnan(found).all()
    assert numbers(recover(path)) == {"items": 8}


@pytest.mark.parametrize("section", ["mass", "sum1", "min1"])
def test_the_tree_is_rebuilt(path: Path, section: str) -> None:
    made(path)
    at = _core.sections(8, 1)[section]
    with edited(path, layout.SLOTS) as data:
        data[at : at + 128] = 0x40  # also behind the last leaf
    assert numbers(recover(path)) == {"items": 8}
    with Engine.open(path, None) as engine:
        assert ring_of(engine).tree.p_sum == sum(range(4, 12))
        assert set(draw(ring_of(engine), 500, prioritized=True)[0]) == set(range(8))
        require_sound(engine)


def test_the_items_are_recounted(path: Path) -> None:
    made(path)
    with runtime(path) as page:
        page["length"] = 200
    assert recover(path).items == 8
    with Engine.open(path, None) as engine:
        assert ring_of(engine).length == 8


@pytest.mark.parametrize(
    ("slot", "word"),
    [
        (3, slots.word(4, SlotState.COMMITTED)),  # of another slot
        (3, slots.word(19, SlotState.COMMITTED)),  # from the future
        (3, slots.word(19, SlotState.WRITING)),
        (3, 2**64 - 1),
        (0, slots.word(1, SlotState.ABORTED)),
    ],
)
def test_a_word_that_cannot_be_true_is_refused(path: Path, slot: int, word: int) -> None:
    made(path)
    with words(path) as found:
        found[slot] = word
    report = recover(path)
    assert numbers(report) == {"items": 7, "words_refused": 1}
    with Engine.open(path, None) as engine:
        assert slot not in contents(ring_of(engine))
        assert int(ring_of(engine).live.words[slot]) == 0
        require_sound(engine)


def test_a_slot_that_nobody_claims_is_given_back(path: Path) -> None:
    made(path)
    with words(path) as found:
        found[3] = slots.word(11, SlotState.WRITING)
    assert numbers(recover(path)) == {"items": 7, "rolled_back": 1}
    with Engine.open(path, None) as engine:
        assert int(ring_of(engine).live.words[3]) == slots.word(11, SlotState.ABORTED)
        require_sound(engine)


@pytest.mark.parametrize(
    ("field", "value"),
    [("phase", 77), ("count", 2**40), ("first", 2**40), ("turn", 5), ("phase", 2)],
)
def test_a_claim_that_makes_no_sense_does_no_harm(path: Path, field: str, value: int) -> None:
    made(path)
    with entries(path) as found:
        found["state"][0] = EntryState.LIVE
        found["boot_id"][0] = np.void(b"an earlier boot.")
        found[field][0] = value
    report = recover(path)
    assert numbers(report) == {"items": 8, "clients_retired": 1}
    with Engine.open(path, None) as engine:
        assert contents(ring_of(engine)) == ALL
        assert engine.stats()["waiters"] == 0
        require_sound(engine)
        write(ring_of(engine), [12])


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [("alpha", np.nan, 1.0), ("alpha", -1.0, 1.0), ("eps", np.inf, 0.0), ("eps", -0.5, 0.0)],
)
def test_an_invalid_alpha_becomes_the_recorded_one(
    path: Path, field: str, bad: float, good: float
) -> None:
    made(path)
    with runtime(path) as page:
        page[field] = bad
    recover(path)
    with Engine.open(path, None) as engine:
        assert getattr(ring_of(engine).tree, field) == good
        require_sound(engine)


def test_an_invalid_largest_priority_is_forgotten(path: Path) -> None:
    made(path)
    with runtime(path) as page:
        page["max_priority"] = np.inf
    with raw(path) as found:
        found[0] = np.nan
    recover(path)
    with Engine.open(path, None) as engine:
        assert np.isfinite(ring_of(engine).tree.priorities()).all()
        require_sound(engine)
        write(ring_of(engine), [5])
        require_sound(engine)


# A reboot.


def test_after_a_reboot_every_item_has_to_fit_its_checksum(path: Path) -> None:
    made(path)
    flip(path, "next/obs.memmap", 37 * 5 + 2)
    flip(path, "number.memmap", 8 * 2)
    reboot(path)
    report = recover(path)
    assert report.reason == "reboot"
    assert numbers(report) == {"items": 6, "checksum_failed": 2}
    with Engine.open(path, None) as engine:
        assert set(contents(ring_of(engine))) == set(range(8)) - {5, 2}
        assert set(sample(ring_of(engine), 300, prioritized=True).index) == set(range(8)) - {5, 2}
        assert engine.superblock.boot_id != b"an earlier boot."
        require_sound(engine)


@pytest.mark.parametrize("unknown", ["now", "when it was made"])
def test_a_boot_id_that_cannot_be_read_is_no_reboot(
    path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    """Otherwise a client that uses the buffer would find a new mutex."""
    known = identity.boot_id()
    ids = {"now": [known, UNKNOWN_BOOT], "when it was made": [UNKNOWN_BOOT, known]}[unknown]
    monkeypatch.setattr(identity, "boot_id", lambda: ids[0])
    monkeypatch.setattr(identity, "_current", None)
    with Engine.open(path, SETTINGS) as engine:
        ring = engine.define(schema(SETTINGS.capacity))
        write(ring, range(12), np.arange(12.0))
        monkeypatch.setattr(identity, "boot_id", lambda: ids[1])
        assert recover(path).reason == "in use"
        with Engine.open(path, None) as other:
            assert contents(ring_of(other)) == ALL
        write(ring, [12], np.array([1.0]))
        assert engine.superblock.epoch == 0


def test_where_the_boot_is_not_known_what_can_be_verified_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path)
    flip(path, "next/obs.memmap", 37 * 5 + 2)
    monkeypatch.setattr(identity, "boot_id", lambda: UNKNOWN_BOOT)
    report = recover(path)
    assert report.reason == "reboot"
    assert numbers(report) == {"items": 7, "checksum_failed": 1}


def test_where_the_boot_is_not_known_and_nothing_can_be_verified_all_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path, replace(SETTINGS, checksum=False))
    monkeypatch.setattr(identity, "boot_id", lambda: UNKNOWN_BOOT)
    report = recover(path)
    assert report.reason == "no client alive"
    assert numbers(report) == {"items": 8}


def test_on_the_same_boot_the_bytes_are_the_kernels(path: Path) -> None:
    """On the same boot, recovery does not search for damage from outside; a check finds it."""
    made(path)
    flip(path, "next/obs.memmap", 37 * 5 + 2)
    assert numbers(recover(path)) == {"items": 8}
    report = check(path)
    assert report.problems == ["slot 5: the bytes do not match their checksum"]


def test_a_mutex_that_was_held_at_a_power_cut_is_recreated(path: Path) -> None:
    """Its owner is of the earlier boot, so no kernel will report its death."""
    made(path)
    with Engine.open(path, None) as engine, mutex_held(engine):
        held = (path / layout.CONTROL).read_bytes()
    with edited(path, layout.CONTROL) as data:
        data[:] = np.frombuffer(held, np.uint8)
    reboot(path)
    with Engine.open(path, None) as engine:
        assert engine.report is not None
        assert engine.report.clients_retired == 2
        write(ring_of(engine), [12])
        assert contents(ring_of(engine)) == {**ALL, 4: 12}
        assert engine.stats()["repairs"] == 0
        require_sound(engine)


def test_an_old_checksum_is_damage_too(path: Path) -> None:
    """The payload is of a later write than the word, because pages reach the disk in any order."""
    made(path)
    with words(path) as found:
        before = found.copy()
    with Engine.open(path, None) as engine:
        place(ring_of(engine), [6], [66], in_place=True)
    with words(path) as found:
        found[6] = before[6]
    reboot(path)
    assert numbers(recover(path)) == {"items": 7, "checksum_failed": 1}


def test_a_head_that_is_older_than_its_items_is_moved_behind_them(path: Path) -> None:
    made(path)
    with runtime(path) as page:
        page["head"] = 3
    reboot(path)
    report = recover(path)
    assert numbers(report) == {"items": 8}
    with Engine.open(path, None) as engine:
        assert ring_of(engine).head == 12
        write(ring_of(engine), [12])
        assert contents(ring_of(engine)) == {**ALL, 4: 12}
        assert ring_of(engine).write_count >= 9


def test_a_ticket_that_a_barrier_covered_is_not_used_again_after_a_reboot(path: Path) -> None:
    """No word of an emptied ring shows its last ticket, and the page with the head may be older."""
    made(path)
    with Engine.open(path, None) as engine:
        ring_of(engine).empty()
        engine.flush()
        assert engine.superblock.durable_ticket == 16
    with runtime(path) as page:
        page["head"] = 3
    reboot(path)
    with Engine.open(path, None) as engine:
        assert ring_of(engine).head == 16
        write(ring_of(engine), [16])
        assert contents(ring_of(engine)) == {0: 16}
        require_sound(engine)


def test_an_incarnation_is_not_used_again_after_a_reboot(path: Path) -> None:
    """The control page is older than the slots, and lacks the clients that wrote them."""
    made(path)
    for _ in range(3):
        with Engine.open(path, None) as engine:
            write(ring_of(engine), [9])
            last = ring_of(engine).seat.incarnation
    with runtime(path) as page:
        page["next_incarnation"] = 1
    with entries(path) as found:
        found["incarnation"] = 1
    reboot(path)
    with Engine.open(path, None) as engine:
        assert ring_of(engine).seat.incarnation > last
        assert ring_of(engine).seat.incarnation not in ring_of(engine).live.sources


def test_after_a_reboot_no_number_is_used_again_whatever_the_streams_of_its_items(
    path: Path,
) -> None:
    with Engine.open(path, SETTINGS) as engine:
        engine.define(schema())
        for _ in range(3):
            with Engine.open(path, None) as other:
                ring = ring_of(other)
                rows = Rows.of(ring.schema.leaves, np.arange(2))
                ring.write(rows.addresses, 2, streams=np.array([5, 2**24 - 1], np.uint32))
                last = ring.seat.incarnation
    with runtime(path) as page:
        page["next_incarnation"] = 1
    with entries(path) as found:
        found["incarnation"] = 1
    reboot(path)
    with Engine.open(path, None) as engine:
        assert ring_of(engine).seat.incarnation == last + 1


@pytest.mark.parametrize("flushed", [True, False])
def test_without_checksums_only_what_a_barrier_covered_is_kept(path: Path, flushed: bool) -> None:
    with Engine.open(path, replace(SETTINGS, checksum=False)) as engine:
        write(engine.define(schema()), range(8))
        engine.flush()
        if not flushed:
            write(ring_of(engine), [8])
    reboot(path)
    report = recover(path)
    assert numbers(report) == ({"items": 8, "unverified": 8} if flushed else {"checksum_failed": 8})


def test_a_barrier_does_not_cover_what_was_being_written_then(path: Path) -> None:
    with Engine.open(path, replace(SETTINGS, checksum=False)) as engine:
        ring = engine.define(schema())
        write(ring, range(7))
        ring.claims.claim(1)
        engine.flush()
        assert engine.superblock.durable_ticket == 7
        ring.claims.commit()
    reboot(path)
    assert numbers(recover(path)) == {"checksum_failed": 8}, "nothing tells the one from the others"


def test_without_checksums_a_head_that_is_older_than_the_slots_is_not_believed(path: Path) -> None:
    with Engine.open(path, replace(SETTINGS, checksum=False)) as engine:
        write(engine.define(schema()), range(4))
        engine.flush()
        write(ring_of(engine), range(4, 6))
    with runtime(path) as page:
        page["head"] = 4  # the page as the barrier wrote it
    reboot(path)
    assert numbers(recover(path)) == {"checksum_failed": 6}


@pytest.mark.parametrize("reason", ["reboot", "copy"])
@pytest.mark.parametrize(
    "point",
    ["recover.state", "recover.mutex", "recover.reaped", "recover.tree", "recover.superblock"],
)
def test_a_recovery_that_died_is_repeated_for_the_same_reason(
    path: Path, point: str, reason: str
) -> None:
    """Otherwise its successor would trust unverified bytes."""
    made(path)
    flip(path, "next/obs.memmap", 37 * 5 + 2)
    if reason == "reboot":
        reboot(path)
    else:
        shutil.copytree(path, path.with_name("copy"))
        path = path.with_name("copy")

    def victim() -> None:
        _core.arm(point)
        recover(path)

    with child(lambda parent: victim()) as process:
        assert process.end() == -signal.SIGKILL
    again = recover(path)
    with Engine.open(path, None) as engine:
        assert set(contents(ring_of(engine))) == set(range(8)) - {5}
        require_sound(engine)
    if point != "recover.superblock":  # there the recovery was complete except for the last write
        assert again.reason == reason
        assert numbers(again)["items"] == 7


# A copy.


def test_a_copy_made_while_in_use_recovers_on_its_own(path: Path) -> None:
    copy = path.with_name("copy")
    with Engine.open(path, SETTINGS) as engine:
        ring = engine.define(schema())
        write(ring, range(12), np.arange(12.0))
        ring.claims.claim(2)
        shutil.copytree(path, copy)
        before = files_of(path)
        report = recover(copy)
        assert report.reason == "copy"
        assert numbers(report) == {"items": 6, "rolled_back": 2, "clients_retired": 1}
        assert files_of(path) == before, "the original does not notice"
        with Engine.open(copy, None) as other:
            assert other.superblock.uuid != engine.superblock.uuid
            assert other.superblock.owner_pid == os.getpid()
            assert contents(ring_of(other)) == {n % 8: n for n in range(6, 12)}
            write(ring_of(other), range(100, 108))
            require_sound(other)
            assert len(engine.clients()) == len(other.clients()) == 1
        ring.claims.commit()
        write(ring, [14])
        assert set(contents(ring).values()) >= {14, *range(7, 12)}
        require_sound(engine)


def test_a_copy_made_while_another_writes_has_whole_items_only(path: Path) -> None:
    """The files of the copy are of different times, and each file is of several."""
    copy = path.with_name("copy")
    with Engine.open(path, Settings(capacity=64, alpha=1.0)) as engine:
        ring = engine.define(schema(64))
        write(ring, range(64))

        def tight_loop(parent: Parent) -> None:
            write(ring, [0])
            parent.pause()
            for number in range(10_000_000):
                write(ring, range(number, number + 5))

        with child(tight_loop) as writer:
            writer.reached()
            writer.go()
            for _ in range(8):
                shutil.copytree(path, copy)
                report = recover(copy)
                with Engine.open(copy, None) as other:
                    found = contents(ring_of(other))  # fails on a torn item
                    assert len(found) == report.items
                    assert ring_of(other).head >= max(read(ring_of(other), range(64))[1])
                    require_sound(other)
                    write(ring_of(other), [1])
                shutil.rmtree(copy)
            writer.kill()
        engine.seat.reap_dead()
        require_sound(engine)


def test_a_directory_that_was_moved_is_no_copy(path: Path) -> None:
    made(path)
    moved = path.with_name("moved")
    path.rename(moved)
    assert recover(moved).reason == "no client alive"


# The report.


def test_a_report_tells_what_it_counts(path: Path) -> None:
    made(path)
    dies(path, lambda engine: ring_of(engine).claims.claim(3))
    report = recover(path)
    assert report.path == str(path)
    assert report.duration_ms > 0
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    assert set(report.to_json()) == {one.name for one in fields(RecoveryReport)}


def test_a_report_prints_as_a_table() -> None:
    report = RecoveryReport(
        "runs/buffer",
        "reboot",
        items=1_234_567,
        rolled_back=2,
        rolled_forward=3,
        clients_retired=4,
        priorities_repaired=5,
        words_refused=6,
        checksum_failed=7,
        unverified=8,
        epoch=9,
        duration_ms=12.34,
    )
    assert str(report).splitlines() == [
        "recovered runs/buffer (reboot, epoch 9)",
        "  items present          1,234,567",
        "  rolled back            2",
        "  rolled forward         3",
        "  dead clients reaped    4",
        "  priorities repaired    5",
        "  slot words refused     6",
        "  checksums that failed  7",
        "  kept unverified        8",
        "  time                   12.3 ms",
    ]


def test_only_the_first_of_two_recovers(path: Path) -> None:
    made(path)

    def work(parent: Parent) -> None:
        parent.pause_at("recover.tree")
        with Engine.open(path, None) as engine:
            assert engine.report is not None
            assert engine.superblock.state == BufferState.READY
            parent.pause()

    with child(work) as other:
        other.reached()
        with pytest.raises(AttachTimeout):
            Engine.open(path, None, timeout=0.05)
        other.go()
        other.reached()
        with Engine.open(path, None) as engine:
            assert engine.report is None
            assert contents(ring_of(engine)) == ALL
        other.go()
        assert other.end() == 0


def test_recovering_twice_changes_nothing_but_the_epoch(path: Path) -> None:
    made(path)
    first, second = recover(path), recover(path)
    assert (first.epoch, second.epoch) == (1, 2)
    assert numbers(first) == numbers(second) == {"items": 8}
    succeeds(lambda: recover(path))
