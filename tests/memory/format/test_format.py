"""Golden bytes: what another version, another language or a hex dump reads in the files.

A failure here means that the format has changed. Then increase `FORMAT_MAJOR` or `FORMAT_MINOR`,
describe the change in docs/format and CHANGELOG.md, and replace the bytes here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Schema, Settings
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import BufferState, Flag
from shmbuffer.memory.mapped.control import Superblock
from shmbuffer.memory.system import identity
from shmbuffer.memory.upkeep.check import check
from tests.memory.rows import schema, write


@pytest.fixture
def engine(fast_path: Path) -> Iterator[Engine]:
    """Makes a buffer of four slots with six writes, which holds the tickets 2 to 5."""
    settings = Settings(capacity=4, alpha=1.0, eps=0.0, extra={"class": "ReplayBuffer"})
    with Engine.open(fast_path / "buffer", settings) as opened:
        write(opened.define(schema(4)), range(6))
        yield opened


def control(engine: Engine) -> bytes:
    assert engine.path is not None
    return (engine.path / layout.CONTROL).read_bytes()


def test_this_is_format_1_0() -> None:
    assert (layout.FORMAT_MAJOR, layout.FORMAT_MINOR) == (1, 0)


def test_the_first_sixteen_bytes_say_what_it_is(engine: Engine) -> None:
    header = bytes.fromhex(
        "53484d4255460001"  # SHMBUF, 0, 1
        "0100"  # format 1
        "0000"  # .0
        "04030201"  # 0x01020304, little-endian
    )
    data = control(engine)
    assert data[:16] == header
    assert data[4096 : 4096 + 16] == header


def test_a_control_file_has_one_size(engine: Engine) -> None:
    assert len(control(engine)) == 143360


def test_a_superblock_is_these_bytes() -> None:
    superblock = Superblock(
        sequence=0x0102030405060708,
        uuid=bytes(range(16)),
        boot_id=bytes(range(16, 32)),
        epoch=3,
        state=BufferState.READY,
        flags=Flag.CHECKSUM | Flag.RESERVE,
        capacity=1_000_000,
        lanes=4,
        leaves=6,
        schema_sha256=bytes(range(32, 64)),
        slots_bytes=123_456_789,
        device=64769,
        inode=42,
        durable_ticket=2**40,
        durable_epoch=2,
        owner_pid=4711,
        owner_start_time=99,
        owner_pid_namespace=0xEFFFFFFC,
        owner_boot_id=bytes(range(64, 80)),
        salt=0xDEADBEEF,
        created_ns=1_700_000_000_000_000_000,
        settings={"capacity": 4_000_000, "alpha": 0.6},
    )
    settings = b'{"alpha": 0.6, "capacity": 4000000}'
    machine = struct.pack(
        "<IHHI",
        layout.ARCHITECTURE,
        _core.layout()["mutex_bytes"],
        _core.layout()["mutex_align"],
        4096,
    )
    expected = (
        bytes.fromhex("53484d425546000101000000040302010807060504030201")
        + bytes(range(32))
        + struct.pack("<QIIQQII", 3, 1, 3, 1_000_000, 4, 6, 256)
        + bytes(range(32, 64))
        + struct.pack("<QQQQQQQQ", 123_456_789, 64769, 42, 2**40, 2, 4711, 99, 0xEFFFFFFC)
        + bytes(range(64, 80))
        + machine
        + struct.pack("<IQII", 0xDEADBEEF, 1_700_000_000_000_000_000, len(settings), 0)
        + settings
    )
    packed = superblock.pack()
    assert len(packed) == 4096
    assert packed[: len(expected)] == expected
    assert packed[len(expected) : -4] == bytes(4092 - len(expected))
    assert packed[-4:] == _core.crc32c(packed[:-4]).to_bytes(4, "little")
    assert Superblock.unpack(packed) == superblock


def test_the_runtime_page_lies_at_8192(engine: Engine) -> None:
    page = control(engine)[8192:12288]
    head, write_count, length = struct.unpack_from("<QQQ", page, 64)
    state, prioritized = struct.unpack_from("<II", page, 88)
    max_priority, alpha, eps = struct.unpack_from("<ddd", page, 96)
    assert (head, write_count, length) == (6, 6, 4)
    assert (state, prioritized) == (1, 1)
    assert (max_priority, alpha, eps) == (-1.0, 1.0, 0.0)


def test_the_recovery_record_lies_at_12032(engine: Engine) -> None:
    assert engine.path is not None
    assert control(engine)[12032:12288] == bytes(256)
    path = engine.path
    engine.close()
    with Engine.open(path, None) as recovered:
        record = control(recovered)[12032:12288]
    assert record[32:48] == b"no client alive".ljust(16, b"\0")
    assert struct.unpack_from("<Q", record, 0) == (1,)
    assert struct.unpack_from("<Q", record, 24) == (identity.current().pid,)
    assert struct.unpack_from("<QQQ", record, 48) == (4, 0, 0)
    assert record[112:252] == bytes(140)
    assert record[252:] == _core.crc32c(record[:252]).to_bytes(4, "little")


def test_the_registry_lies_at_12288(engine: Engine) -> None:
    assert engine.seat.registry.note_first_draw(engine.seat.entry, 2**63 + 5) == []
    entry = control(engine)[12288 : 12288 + 512]
    me = identity.current()
    assert struct.unpack_from("<II", entry, 0) == (1, 0)
    assert struct.unpack_from("<QQQQ", entry, 8) == (1, me.pid, me.start_time, me.pid_namespace)
    assert entry[40:56] == me.boot_id
    assert struct.unpack_from("<II", entry, 64) == (0, 0)
    assert struct.unpack_from("<QQQQ", entry, 72) == (2, 4, 6, 0)  # the claim of its last write
    assert struct.unpack_from("<Q", entry, 120) == (4,)
    assert struct.unpack_from("<Q", entry, 256) == (2**63 + 5,)


def test_what_no_field_has_is_zero(engine: Engine) -> None:
    data = control(engine)
    assert data[8192 + 544 : 12032] == bytes(3296)
    for entry in range(256):
        assert data[12288 + 512 * entry + 264 : 12288 + 512 * (entry + 1)] == bytes(248)


def add_to_what_no_field_has(path: Path) -> None:
    with open(path / layout.CONTROL, "r+b") as file:
        for at in (8192 + 3000, 12288 + 512 * 7 + 300):
            file.seek(at)
            file.write(b"later")


def test_what_no_field_has_is_checked_and_cleared(engine: Engine) -> None:
    path = engine.path
    assert path is not None
    add_to_what_no_field_has(path)
    wrong = "10 bytes of the control file that belong to no field are not zero"
    assert engine.check().problems == [wrong]
    engine.close()
    assert check(path).problems == [wrong]
    with Engine.open(path, None) as recovered:
        assert recovered.check().ok
        assert control(recovered)[8192 + 544 : 12032] == bytes(3296)


def test_what_a_later_minor_version_has_added_is_left_alone(engine: Engine) -> None:
    path = engine.path
    assert path is not None
    engine.seat.control.write(replace(engine.superblock, format_minor=1))
    add_to_what_no_field_has(path)
    engine.close()
    assert check(path).ok
    with Engine.open(path, None) as recovered:
        assert recovered.report is not None
        assert recovered.check().ok
        data = control(recovered)
    assert data[8192 + 3000 : 8192 + 3005] == data[15872 + 300 : 15872 + 305] == b"later"
    assert data[8:12] == data[4096 + 8 : 4096 + 12] == bytes.fromhex("01000100")


def test_a_slot_word_is_ticket_and_state(engine: Engine) -> None:
    assert engine.path is not None
    data = (engine.path / layout.SLOTS).read_bytes()
    assert data[:32] == bytes.fromhex(
        "1200000000000000"  # ticket 4, COMMITTED: 4 << 2 | 2
        "1600000000000000"  # ticket 5
        "0a00000000000000"  # ticket 2
        "0e00000000000000"  # ticket 3
    )
    assert struct.unpack_from("<4Q", data, _core.sections(4, 1)["sources"]) == (1, 1, 1, 1)
    assert struct.unpack_from("<4d", data, _core.sections(4, 1)["raw"]) == (1, 1, 1, 1)


def test_a_leaf_is_its_numbers_and_nothing_else(engine: Engine) -> None:
    assert engine.path is not None
    assert (engine.path / "number.memmap").read_bytes() == struct.pack("<4q", 4, 5, 2, 3)
    obs = np.frombuffer((engine.path / "next" / "obs.memmap").read_bytes(), np.uint8)
    assert obs.reshape(4, 37)[:, 0].tolist() == [4, 5, 2, 3]
    assert not (engine.path / "nothing.memmap").exists()


def test_the_schema_is_canonical_json(engine: Engine) -> None:
    assert engine.path is not None
    assert (engine.path / layout.SCHEMA).read_bytes() == (
        b'{"capacity":4,"lanes":[],"leaves":['
        b'{"dtype":"int64","path":["number"],"shape":[]},'
        b'{"dtype":"uint8","path":["next","obs"],"shape":[37]},'
        b'{"dtype":"bool","path":["done"],"shape":[]},'
        b'{"dtype":"float32","path":["nothing"],"shape":[0]}],'
        b'"structure":{"kind":"tensordict"}}'
    )


def test_the_files_of_a_buffer_have_these_names(engine: Engine) -> None:
    assert engine.path is not None
    names = {str(path.relative_to(engine.path)) for path in engine.path.rglob("*")}
    assert names == {
        "meta.json",
        "number.memmap",
        "done.memmap",
        "next",
        "next/meta.json",
        "next/obs.memmap",
        ".shmbuffer",
        ".shmbuffer/control",
        ".shmbuffer/slots",
        ".shmbuffer/ledger",
        ".shmbuffer/schema.json",
        ".shmbuffer/made.json",
        ".shmbuffer/init.lock",
        ".shmbuffer/procs",
        ".shmbuffer/procs/000.lock",
    }


def test_what_we_made_is_listed(engine: Engine) -> None:
    assert engine.path is not None
    made = json.loads((engine.path / ".shmbuffer" / "made.json").read_text())
    assert sorted(made) == [
        "done.memmap",
        "meta.json",
        "next/meta.json",
        "next/obs.memmap",
        "number.memmap",
    ]


def test_nothing_is_open_to_others(engine: Engine) -> None:
    assert engine.path is not None
    for path in [engine.path, *engine.path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_meta_json_is_what_tensordict_writes() -> None:
    one = Schema((Leaf(("a", "b"), "bfloat16", (2,)), Leaf(("c",), "bool", ())), 3, (4,))
    meta = {name: json.loads(data) for name, data in one.meta_files().items()}
    tail = {
        "shape": [3, 4],
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
        "_format_version": 1,
        "_class": "tensordict:TensorDict",
    }
    leaf = {"device": "cpu", "is_nested": False}
    assert meta == {
        "meta.json": {
            "a": {"type": "TensorDict"},
            "c": {**leaf, "shape": [3, 4], "dtype": "torch.bool"},
            **tail,
        },
        "a/meta.json": {"b": {**leaf, "shape": [3, 4, 2], "dtype": "torch.bfloat16"}, **tail},
    }
