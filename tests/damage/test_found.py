"""Damage that once ended the process, hung, raised a plain Python error, or was not noticed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shmbuffer import BufferNeedsRestart, CorruptBufferError
from shmbuffer._native import _core
from shmbuffer.memory import Engine
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import EntryState, Phase
from shmbuffer.memory.format.slots import states
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.system.identity import process_state
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash import harness
from tests.damage.cells import Cell, entry_cells, runtime_cells, slots_cells
from tests.damage.conftest import Specimens
from tests.damage.judgement import require_mended_or_refused
from tests.damage.living import drawn
from tests.damage.specimen import Specimen, contents
from tests.damage.trials import failures
from tests.kit.rings import ring_of


@pytest.fixture
def opened(specimen: Specimen) -> Iterator[Engine]:
    """Opens a living handle whose shared memory is about to be overwritten."""
    with Engine.open(specimen.path, None) as engine:
        yield engine


@pytest.fixture
def records(specimens: Specimens) -> Iterator[Specimen]:
    specimen = specimens("records", False)
    specimen.restore()
    yield specimen
    specimen.renew()


def cell(cells: list[Cell], name: str) -> Cell:
    return next(one for one in cells if one.name == name)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("runtime.state", 77, "invalid buffer state 77"),
        ("entry[0].state", 9, "registry entry 0: its state is 9, but 1 is the limit"),
        ("entry[0].role", 77, "registry entry 0: its role is 77, but 3 is the limit"),
        ("entry[0].phase", 66, "registry entry 0: its phase is 66, but 4 is the limit"),
        (
            "entry[0].count",
            2**40,
            "registry entry 0: its count is 1099511627776, but 8 is the limit",
        ),
    ],
)
def test_a_field_of_the_control_page_that_cannot_be_is_shown_and_named(
    specimen: Specimen, field: str, value: int, says: str
) -> None:
    specimen.damage(cell(runtime_cells() + entry_cells(0), field).becomes(value))
    assert inspect(specimen.path)["uuid"]
    assert says in check(specimen.path).problems
    with Engine.open(specimen.path, None) as engine:
        assert contents(ring_of(engine)) == specimen.truth
        assert engine.check().ok


@pytest.mark.parametrize("pid", [0, 2**31, 2**63, 2**64 - 1])
def test_a_pid_that_no_process_can_have_is_gone_and_proves_nothing(
    specimen: Specimen, pid: int
) -> None:
    specimen.damage(cell(entry_cells(0), "entry[0].pid").becomes(pid))
    (client,) = inspect(specimen.path)["clients"]
    assert (client["state"], client["alive"]) == ("dead", False)  # its lock file decides
    assert process_state(pid) == "dead"
    with Engine.open(specimen.path, None) as engine:
        assert contents(ring_of(engine)) == specimen.truth


def test_an_invalid_state_stops_a_client_that_has_no_ring_yet(specimen: Specimen) -> None:
    with Engine.open(specimen.path, None) as engine:
        engine.seat.control.runtime["state"] = 77
        with pytest.raises(BufferNeedsRestart, match=r"the buffer state 0x4d is invalid"):
            Engine.open(specimen.path, None)


def test_an_impossible_number_of_clients_stops_a_joining_process(opened: Engine) -> None:
    opened.seat.control.runtime["next_incarnation"] = 2**64 - 1
    assert opened.path is not None
    with pytest.raises(BufferNeedsRestart, match="clients"):
        Engine.open(opened.path, None)


@pytest.mark.parametrize("kind", ["rows", "records"])
@pytest.mark.parametrize("rebooted", [False, True])
def test_what_a_writer_had_begun_is_no_item_after_a_reboot(
    specimens: Specimens, kind: str, *, rebooted: bool
) -> None:
    """The entry of the writer says that it was committing, but only the first row has its checksum.

    Within one boot the rows are trusted, and `check` names the second one.
    """
    specimen = specimens(kind, rebooted)
    first, second = sorted(specimen.begun)
    specimen.damage(cell(entry_cells(0), "entry[0].phase").becomes(Phase.COMMITTING))
    require_mended_or_refused(specimen)
    with Engine.open(specimen.path, None) as engine:
        found = contents(ring_of(engine))
        assert (first in found, second in found) == (not rebooted, not rebooted)


@pytest.mark.parametrize("kind", ["rows", "records"])
def test_a_ticket_that_nobody_can_have_reached_does_not_end_the_buffer(
    specimens: Specimens, kind: str
) -> None:
    """After a restart the head may be older than the words, but not by all tickets."""
    specimen = specimens(kind, True)
    last = cell(slots_cells(specimen), f"words[{specimen.schema.capacity - 1}]")
    specimen.damage(last.becomes(2**64 - 1))
    require_mended_or_refused(specimen)


def test_an_empty_word_with_a_ticket_is_counted(specimen: Specimen) -> None:
    slot, (ticket, _) = next(iter(specimen.truth.items()))
    word = cell(slots_cells(specimen), f"words[{slot}]")
    specimen.damage(word.becomes(ticket << 2))
    with Engine.open(specimen.path, None) as engine:
        assert engine.report is not None
        assert engine.report.words_refused == 1


def test_a_nan_priority_is_a_problem_and_raises_no_warning(specimen: Specimen) -> None:
    slot = next(iter(specimen.truth))
    cells = slots_cells(specimen)
    specimen.damage(
        cell(cells, f"raw[{slot}]").becomes(0xBFF << 52),
        cell(cells, "sum1[0]").becomes(0x7FF << 52),
        cell(cells, "mass[1]").becomes(0xFFF << 52),
    )
    report = check(specimen.path)
    assert any("priority tree" in line for line in report.problems + report.notes)


@pytest.mark.parametrize("head", [2**62 - 1, 2**63, 2**64 - 1])
def test_a_head_beyond_all_tickets_does_not_end_the_buffer(specimen: Specimen, head: int) -> None:
    specimen.damage(cell(runtime_cells(), "runtime.head").becomes(head))
    with Engine.open(specimen.path, None) as engine:
        assert contents(ring_of(engine)) == specimen.truth
        harness.write(ring_of(engine), [77])
        assert engine.check().ok


def test_an_extent_that_points_at_another_record_is_refused(records: Specimen) -> None:
    """Within one boot no checksum is compared, but the record's header names its slot."""
    one, other = list(records.truth)[:2]
    cells = slots_cells(records)
    places = [
        cell(cells, f"extents[{2 * slot + half}]") for slot in (one, other) for half in (0, 1)
    ]
    theirs = [records.bytes_of(place.becomes(0)) for place in places[2:]]
    records.damage(
        *(
            place.becomes(int.from_bytes(data, "little"))
            for place, data in zip(places[:2], theirs, strict=True)
        )
    )
    with Engine.open(records.path, None) as engine:
        assert engine.report is not None
        assert engine.report.words_refused == 1
        left = dict(records.truth)
        del left[one]
        assert contents(ring_of(engine)) == left
        assert engine.check().ok


@pytest.mark.parametrize("half", ["position", "bytes"])
def test_a_record_that_is_not_where_its_slot_says_is_never_returned(
    records: Specimen, half: str
) -> None:
    slot = next(iter(records.truth))
    with Engine.open(records.path, None) as engine:
        ring = ring_of(engine)
        assert ring.records is not None
        assert engine.seat.mapped is not None
        extents = SlotsFile(engine.seat.mapped.slots, records.schema).extents
        extents[half][slot] += 8
        with pytest.raises(
            CorruptBufferError, match=f"slot {slot} does not contain the expected item"
        ):
            ring.records.read(np.array([slot]))
        with pytest.raises(
            CorruptBufferError, match=f"slot {slot} does not contain the expected item"
        ):
            ring.records.sample(256, 1, beta=None)


def test_a_size_that_is_damage_is_not_allocated(records: Specimen) -> None:
    slot = next(iter(records.truth))
    with Engine.open(records.path, None) as engine:
        ring = ring_of(engine)
        assert ring.records is not None
        assert engine.seat.mapped is not None
        extents = SlotsFile(engine.seat.mapped.slots, records.schema).extents
        extents["bytes"][slot] = records.schema.record_bytes  # this is more than a first arena has
        with pytest.raises(CorruptBufferError, match=f"slot {slot}"):
            ring.records.sample(64, 1, beta=None)
        with pytest.raises(CorruptBufferError, match=f"slot {slot}"):
            ring.records.read(np.array([slot]))


def test_mass_without_an_item_is_never_drawn(opened: Engine) -> None:
    ring = ring_of(opened)
    empty = int(np.flatnonzero(states(ring.live.words) != 2)[0])
    _mass_of(opened)[:] = 0
    _mass_of(opened)[empty] = 1.0
    with pytest.raises(
        CorruptBufferError, match=f"slot {empty} does not contain the expected item"
    ):
        harness.sample(ring)


def test_mass_behind_the_last_element_leads_nowhere(opened: Engine) -> None:
    ring = ring_of(opened)
    _mass_of(opened)[:] = 0
    _mass_of(opened)[ring.elements + 1 :] = 1.0
    truth = contents(ring)

    def trial(engine: Engine) -> None:
        found = drawn(ring_of(engine), prioritized=True)
        assert found.items() <= truth.items()

    wrong = failures([opened], trial)
    assert not wrong, wrong


def test_a_number_of_items_without_items_is_no_sample(opened: Engine) -> None:
    ring = ring_of(opened)
    ring.empty()
    opened.seat.control.runtime["length"] = 2**63
    assert ring.length == ring.elements
    with pytest.raises(CorruptBufferError):
        harness.sample(ring, prioritized=False)


@pytest.mark.parametrize("ahead", [2**20, 2**40, 2**63])
def test_a_head_of_the_byte_ring_that_cannot_be_copies_and_takes_nothing(
    records: Specimen, ahead: int
) -> None:
    """The copy once read beyond the map, or asked for more and more memory."""

    def trial(engine: Engine) -> None:
        ring = ring_of(engine)
        engine.seat.control.runtime["byte_head"] += np.uint64(ahead)
        with tempfile.TemporaryFile() as file:
            assert ring.records is not None
            copy = ring.records.copy_out
            _refused(lambda: copy(file.fileno(), "a copy"))
        _refused(lambda: harness.write(ring, [1]))
        tickets, extents = np.empty(8, np.int64), np.empty(8, layout.EXTENT)
        room = np.empty(2**21, np.uint8)
        places = (tickets, extents, np.empty(8, np.int64), np.empty(8))
        given = [place.ctypes.data for place in places]
        native = ring.seat.native
        assert (
            native.finish_records_snapshot(0, room.ctypes.data, 2**21, *given, 10**9)
            == -_core.DAMAGED
        )

    wrong = failures([records.path], lambda path: _with_handle(path, trial))
    assert not wrong, wrong


@pytest.mark.parametrize("field", ["first", "count"])
def test_a_claim_of_more_tickets_than_there_are_belongs_to_no_client(
    opened: Engine, field: str
) -> None:
    """The reaper once went through all of them while it held the mutex."""

    def trial(engine: Engine) -> None:
        assert engine.path is not None
        engine.seat.rejoin()
        entries = engine.seat.control.entries
        entries["incarnation"][9], entries["state"][9] = 5, EntryState.LIVE
        entries["phase"][9], entries[field][9] = Phase.PAYLOAD, 2**61
        entries["boot_id"][9] = np.void(b"an earlier boot.")
        head = ring_of(engine).head
        assert engine.seat.reap_dead() == 1
        assert ring_of(engine).head == head
        harness.write(ring_of(engine), [5])
        engine.close()

    wrong = failures([opened], trial)
    assert not wrong, wrong


@pytest.mark.parametrize("bit", range(8))
def test_a_mutex_of_another_kind_is_not_taken(opened: Engine, bit: int) -> None:
    """With a wrong kind of mutex, the C library ends the process, or waits for ever."""
    kind = opened.seat.control.runtime["mutex"].view(np.uint32)[4:5]
    kind ^= np.uint32(1 << bit)
    try:
        with pytest.raises(BufferNeedsRestart, match="cannot be repaired"):
            harness.write(ring_of(opened), [1])
    finally:
        kind ^= np.uint32(1 << bit)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", 1.7e308), ("alpha", -1.0), ("eps", -1.0), ("max_priority", 1e300)],
)
def test_a_number_that_no_buffer_can_have_is_the_recorded_one_after_recovery(
    specimen: Specimen, name: str, value: float
) -> None:
    specimen.damage(cell(runtime_cells(), f"runtime.{name}").becomes(_bits(value)))
    with Engine.open(specimen.path, None) as engine:
        harness.write(ring_of(engine), [2])
        runtime = engine.seat.control.runtime
        assert (runtime["alpha"], runtime["eps"]) == (engine.settings.alpha, engine.settings.eps)
        assert runtime["max_priority"] <= 1e6


def test_a_priority_whose_mass_is_infinite_is_the_default_after_recovery(
    specimen: Specimen,
) -> None:
    slot = next(iter(specimen.truth))
    specimen.damage(
        cell(runtime_cells(), "runtime.alpha").becomes(_bits(2.0)),
        cell(slots_cells(specimen), f"raw[{slot}]").becomes(_bits(1e200)),
    )
    with Engine.open(specimen.path, None) as engine:
        assert engine.report is not None
        assert engine.report.priorities_repaired == 1
        assert np.isfinite(_mass_of(engine)).all()


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.uint64))


def test_a_priority_is_not_blamed_for_an_invalid_alpha(opened: Engine) -> None:
    opened.seat.control.runtime["alpha"] = np.nan
    with pytest.raises(CorruptBufferError, match="alpha=nan"):
        harness.write(ring_of(opened), [1])


def _mass_of(engine: Engine) -> NDArray[np.float64]:
    ring = ring_of(engine)
    assert engine.seat.mapped is not None
    data, at = np.frombuffer(engine.seat.mapped.slots, np.uint8), ring.schema.sections["mass"]
    return data[at : at + 8 * 16].view(np.float64)


def _refused(call: Callable[[], object]) -> None:
    with pytest.raises(CorruptBufferError):
        call()


def _with_handle(path: Path, trial: Callable[[Engine], None]) -> None:
    with Engine.open(path, None) as engine:
        trial(engine)
