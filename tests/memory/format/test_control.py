"""The control file has two superblocks, of which one is always intact; others are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import CorruptBufferError, FormatError, IncompatibleVersionError
from shmbuffer._native import _core
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.mapped.control import Control, Superblock, first_superblock
from tests.memory.rows import Parent, child

SETTINGS = {"capacity": 8, "extra": {"class": "ReplayBuffer"}}


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("control")
    os.ftruncate(number, layout.CONTROL_BYTES)
    yield number
    os.close(number)


@pytest.fixture
def control(fd: int) -> Control:
    fresh = Control(_core.Map(fd, layout.CONTROL_BYTES), "runs/buffer")
    fresh.format(first_superblock(SETTINGS, Flag.CHECKSUM, (1, 2)))
    return fresh


def page(fd: int, copy: int) -> bytes:
    return os.pread(fd, 4096, 4096 * copy)


def flip(fd: int, byte: int, bit: int = 0) -> None:
    found = os.pread(fd, 1, byte)[0]
    os.pwrite(fd, bytes([found ^ 1 << bit]), byte)


def forge(fd: int, field: str, value: int | bytes) -> None:
    """Writes a field and the matching checksum, as a program of another version would."""
    for copy in (0, 1):
        data = np.frombuffer(page(fd, copy), layout.SUPERBLOCK).copy()
        data[field] = np.void(value.ljust(3840, b" ")) if isinstance(value, bytes) else value
        data["crc32c"] = _core.crc32c(data.tobytes()[:-4])
        os.pwrite(fd, data.tobytes(), 4096 * copy)


# Two copies.


def test_a_fresh_control_file_has_two_whole_copies(control: Control, fd: int) -> None:
    copies = [Superblock.unpack(page(fd, copy)) for copy in (0, 1)]
    assert None not in copies
    assert [copy.sequence for copy in copies if copy] == [1, 2]
    assert control.superblock() == copies[1]
    assert control.superblock().settings == SETTINGS
    assert not control.repaired


def test_the_copies_are_written_in_turn(control: Control, fd: int) -> None:
    for epoch in range(1, 6):
        before = [page(fd, 0), page(fd, 1)]
        written = control.write(replace(control.superblock(), epoch=epoch))
        changed = [page(fd, copy) != before[copy] for copy in (0, 1)]
        assert changed == [epoch % 2 == 1, epoch % 2 == 0]
        assert written.sequence == epoch + 2
        assert control.superblock() == written


def test_the_sequences_change_with_every_write_and_with_nothing_else(control: Control) -> None:
    assert control.sequences == (1, 2)
    control.superblock()
    control.runtime["head"] += 1
    assert control.sequences == (1, 2)
    control.write(control.superblock())
    assert control.sequences == (3, 2)
    control.write(control.superblock())
    assert control.sequences == (3, 4)


def test_a_bit_that_flipped_anywhere_in_a_copy_shows(fd: int, control: Control) -> None:
    data = bytearray(page(fd, 0))
    for byte in range(4096):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert Superblock.unpack(bytes(data)) is None, f"bit {bit} of byte {byte}"
            data[byte] ^= 1 << bit


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_copy_is_repaired_from_the_other(control: Control, fd: int, copy: int) -> None:
    """A flipped bit in any byte is repaired, in the newer copy or in the older one."""
    newest = control.superblock()
    for byte in range(0, 4096, 7):
        flip(fd, 4096 * copy + byte, byte % 8)
        found = control.superblock()
        assert control.repaired
        assert replace(found, sequence=0) == replace(newest, sequence=0)
        written = control.write(found)
        assert control.superblock() == written
        assert not control.repaired, "the damaged copy is the one that is written next"


def test_a_write_that_died_half_way_leaves_what_was_there(control: Control, fd: int) -> None:
    before = control.superblock()

    def work(parent: Parent) -> None:
        _core.arm("superblock.half")
        control.write(replace(before, epoch=7))

    with child(work) as victim:
        assert victim.end() == -9
    assert control.superblock() == before
    assert control.repaired
    control.write(replace(before, epoch=8))
    assert control.superblock().epoch == 8
    assert not control.repaired


def test_a_reader_that_meets_two_writes_in_a_row_looks_again(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write was in progress at the first copy, the next write at the second copy."""
    newest = control.superblock()
    torn = iter([bytes(4096), bytes(4096)])
    look = control._page
    monkeypatch.setattr(control, "_page", lambda copy: next(torn, None) or look(copy))
    assert control.superblock() == newest
    assert not control.repaired


@pytest.mark.full
def test_a_reader_never_sees_damage_while_another_writes(control: Control) -> None:
    def work(parent: Parent) -> None:
        parent.pause()
        for epoch in range(1_000_000):
            control.write(replace(control.superblock(), epoch=epoch))

    with child(work) as writer:
        writer.reached()
        writer.go()
        last = seen = 0
        while seen < 300:
            superblock = control.superblock()
            assert superblock.sequence >= last
            assert superblock.settings == SETTINGS
            seen += superblock.sequence > last
            last = superblock.sequence
        writer.kill()


# What is refused.


def test_two_damaged_copies_are_refused(control: Control, fd: int) -> None:
    flip(fd, 100)
    flip(fd, 4096 + 200)
    with pytest.raises(
        CorruptBufferError,
        match=r"^runs/buffer: both copies of the superblock are damaged; try to read the items "
        r"with TensorDict\.load_memmap$",
    ) as caught:
        control.superblock()
    assert caught.value.path == "runs/buffer"  # type: ignore[attr-defined]


def test_two_damaged_copies_are_not_written_over(control: Control, fd: int) -> None:
    newest = control.superblock()
    flip(fd, 100)
    flip(fd, 4096 + 200)
    before = [page(fd, 0), page(fd, 1)]
    with pytest.raises(CorruptBufferError):
        control.write(newest)
    assert [page(fd, 0), page(fd, 1)] == before


@pytest.mark.parametrize("content", [b"", b"SHMBUF\x00\x02", b"\x7fELF", b"\xff" * 8192])
def test_a_file_that_is_not_ours_is_refused(fd: int, content: bytes) -> None:
    os.pwrite(fd, content, 0)
    with pytest.raises(
        FormatError,
        match=r"^runs/buffer: this is not a control file of shmbuffer; check the path",
    ) as caught:
        Control(_core.Map(fd, layout.CONTROL_BYTES), "runs/buffer").superblock()
    assert not isinstance(caught.value, IncompatibleVersionError)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format_major", 2, r"the format version is 0x2, but this build needs 0x1"),
        ("endian", 0x04030201, r"the byte order is 0x4030201, but this build needs 0x1020304"),
        (
            "architecture",
            0x1234,
            r"the processor architecture is 0x1234, but this build needs 0x\w+",
        ),
        ("mutex_bytes", 64, r"the size of a mutex is 0x40, but this build needs 0x\w+"),
        ("page", 65536, r"the page size is 0x10000, but this build needs 0x1000"),
        ("entries", 512, r"the number of registry entries is 0x200, but this build needs 0x100"),
    ],
)
def test_a_file_of_another_kind_says_in_what_it_differs(
    control: Control, fd: int, field: str, value: int, message: str
) -> None:
    forge(fd, field, value)
    with pytest.raises(
        IncompatibleVersionError,
        match=rf"^runs/buffer: {message}; open the buffer with the version that wrote it, on the "
        "same kind of machine$",
    ) as caught:
        control.superblock()
    error = caught.value
    assert (error.field, error.found) == (field, value)  # type: ignore[attr-defined]


def test_a_later_minor_version_is_read(control: Control, fd: int) -> None:
    forge(fd, "format_minor", 1)
    assert control.superblock().settings == SETTINGS


def test_a_later_version_is_named_before_anything_else_of_it_is_read(
    control: Control, fd: int
) -> None:
    """A later version may have unknown states, settings that are not JSON, or a moved checksum."""
    forge(fd, "format_major", 2)
    forge(fd, "state", 99)
    forge(fd, "settings", b"{]")
    with pytest.raises(IncompatibleVersionError, match="the format version is 0x2"):
        control.superblock()
    flip(fd, 300)
    flip(fd, 4096 + 300)
    with pytest.raises(IncompatibleVersionError, match="the format version is 0x2"):
        control.superblock()


@pytest.mark.parametrize(
    "spoil", [lambda fd: forge(fd, "state", 99), lambda fd: forge(fd, "settings", b"{]")]
)
def test_a_whole_copy_that_says_the_impossible_is_refused(
    control: Control, fd: int, spoil: Callable[[int], None]
) -> None:
    spoil(fd)
    with pytest.raises(CorruptBufferError, match="both copies of the superblock are damaged"):
        control.superblock()


# Contents.


def test_every_field_is_read_back() -> None:
    superblock = Superblock(
        sequence=2**63,
        uuid=b"u" * 16,
        boot_id=b"b" * 16,
        epoch=5,
        state=BufferState.CLOSING,
        flags=Flag.TEMPORARY | Flag.AUTO_CLEANUP | Flag.CREATED_DIRECTORY,
        capacity=2**40,
        lanes=3,
        leaves=4096,
        schema_sha256=b"s" * 32,
        slots_bytes=2**45,
        device=2**63,
        inode=2**64 - 1,
        durable_ticket=2**62 - 1,
        durable_epoch=4,
        owner_pid=2**22,
        owner_start_time=2**50,
        owner_pid_namespace=2**32 - 1,
        owner_boot_id=b"o" * 16,
        salt=2**32 - 1,
        created_ns=2**63,
        settings={"extra": {"ä": [1, None, 2.5]}},
    )
    assert Superblock.unpack(superblock.pack()) == superblock


def test_settings_have_3840_bytes(control: Control, fd: int) -> None:
    empty = len('{"extra": ""}')
    before = control.superblock()
    control.write(replace(before, settings={"extra": "x" * (3840 - empty)}))
    assert len(control.superblock().settings["extra"]) == 3840 - empty
    stored = [page(fd, 0), page(fd, 1)]
    with pytest.raises(
        ValueError,
        match="the settings of the buffer take 3841 bytes as JSON, but only 3840 are available",
    ):
        control.write(replace(before, settings={"extra": "x" * (3841 - empty)}))
    assert [page(fd, 0), page(fd, 1)] == stored


def test_a_fresh_runtime_page_has_a_mutex_and_no_priority(control: Control) -> None:
    assert _core.mutex_owner(control.map) == 0
    assert float(control.runtime["max_priority"][0]) == -1.0
    assert float(control.runtime["alpha"][0]) == 1.0
    assert control.runtime["head"][0] == 0
    assert not control.entries["state"].any()


def test_only_a_map_of_a_control_file_has_a_mutex(fd: int) -> None:
    for native in (_core.format_mutex, _core.mutex_owner):
        with pytest.raises(TypeError, match="The control file must be a Map of 143360 bytes"):
            native(_core.Map(fd, 4096))
        with pytest.raises(TypeError, match="must be a Map of"):
            native(b"x" * 143360)  # type: ignore[arg-type]


def test_a_map_is_a_buffer_that_outlives_its_object(fd: int, tmp_path: Path) -> None:
    mapping = _core.Map(fd, 8192, offset=4096)
    assert mapping.nbytes == 8192
    view = memoryview(mapping)
    del mapping
    view[0] = 7
    assert os.pread(fd, 1, 4096) == b"\7"


def test_a_map_may_be_read_only_or_empty(fd: int) -> None:
    view = memoryview(_core.Map(fd, 4096, writable=False))
    assert view.readonly
    nothing = _core.Map(-1, 0)
    assert (nothing.nbytes, nothing.address, len(memoryview(nothing))) == (0, 0, 0)
    nothing.sync()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((-1, 4096), OSError), ((0, -1), ValueError), (("x", 1), TypeError)],
)
def test_a_file_that_cannot_be_mapped_is_an_error(
    arguments: tuple[object, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        _core.Map(*arguments)  # type: ignore[arg-type]
