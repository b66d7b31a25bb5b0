"""Weights are published and copied as a whole, and no writer waits for a reader."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmbuffer import (
    AttachTimeout,
    BufferClosedError,
    BufferUnlinkedError,
    CorruptBufferError,
    FormatError,
    IncompatibleVersionError,
    SchemaMismatchError,
    ShmBufferError,
    SpaceError,
)
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Settings, consumer_version, weights
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash.harness import ended, fork, stopped_at, succeeds
from tests.kit.rings import path_of
from tests.memory.carried import newest, number_in, of, publish
from tests.memory.rows import schema
from tests.memory.upkeep.test_recovery import reboot

SETTINGS = Settings(capacity=8)
COPY_0, COPY_1 = 128, 192  # the offsets of their stamps


@pytest.fixture
def engine(fast_path: Path) -> Iterator[Engine]:
    """Makes a handle on an empty buffer."""
    with Engine.open(fast_path / "buffer", SETTINGS) as engine:
        yield engine


def file_of(engine: Engine) -> Path:
    return path_of(engine) / layout.WEIGHTS


def change(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def payload_at(file: Path, version: int) -> int:
    """Returns the offset of the copy of a version."""
    copy_bytes, copies = struct.unpack_from("<QQ", file.read_bytes(), 16)
    return int(copies + (version & 1) * copy_bytes)


def test_what_was_published_is_found_by_another_handle(engine: Engine) -> None:
    assert newest(engine) is None
    assert publish(engine, 7) == 1
    with Engine.open(path_of(engine), None) as other:
        found = newest(other)
        assert number_in(found) == 7
        assert found is not None
        assert (found.version, found.step) == (1, 70)


def test_nothing_newer_is_none(engine: Engine) -> None:
    for version in (1, 2, 3):
        assert publish(engine, version) == version
        assert number_in(newest(engine, version - 1)) == version
        assert newest(engine, version) is None
        assert newest(engine, version + 5) is None


@pytest.mark.parametrize("than", [-1, -(2**70), np.int64(0), np.int64(-1)])
def test_any_integer_says_what_is_known(engine: Engine, than: Any) -> None:
    assert newest(engine, than) is None
    publish(engine, 7)
    assert number_in(newest(engine, than)) == 7


def test_a_version_only_grows_though_the_step_goes_back(engine: Engine) -> None:
    for number in (5, 9):
        publish(engine, number)
    path = path_of(engine)
    engine.close()
    with Engine.open(path, None) as again:  # all clients had left
        assert number_in(newest(again)) == 9
        assert publish(again, 2) == 3
        assert number_in(newest(again, 2)) == 2


@pytest.mark.product(few=5)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_with_its_name_and_its_bytes(engine: Engine, dtype: str) -> None:
    leaf = Leaf(("w",), dtype, (5, 3))
    given = np.arange(leaf.nbytes, dtype=np.uint8)
    weights.publish(engine.seat, [leaf], [given.ctypes.data], 0)
    found = weights.newest(engine.seat)
    assert found is not None
    assert found.form.leaves == (leaf,)
    assert np.array_equal(found.parts()[0], given)
    arrays = newest(engine)
    assert arrays is not None
    assert arrays.state_dict["w"].shape == (5, 3)
    assert arrays.state_dict["w"].tobytes() == given.tobytes()


def test_what_lies_elsewhere_in_memory_is_published_as_it_is_meant(engine: Engine) -> None:
    whole = np.arange(24, dtype=">i4").reshape(4, 6)
    weights.publish_arrays(engine.seat, {"w": whole.T[::2], "n": 3}, 1)
    found = newest(engine)
    assert found is not None
    assert np.array_equal(found.state_dict["w"], whole.T[::2])
    assert found.state_dict["w"].dtype == np.dtype("<i4")
    assert found.state_dict["n"] == 3


def test_what_is_returned_is_the_callers_own(engine: Engine) -> None:
    publish(engine, 1)
    found = newest(engine)
    assert found is not None
    found.state_dict["layer.bias"][:] = 99
    publish(engine, 2)
    publish(engine, 3)
    assert (found.state_dict["layer.bias"] == 99).all()
    assert (found.state_dict["layer.weight"] == 1).all()
    assert number_in(newest(engine)) == 3


# The first publication determines the tensors of the weights.


OTHERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a missing tensor": (
        lambda state: state.pop("layer.bias"),
        r"leaf 'layer\.bias' \(float64\[7\]\) is missing in this publish",
    ),
    "a new one": (
        lambda state: state.update(more=np.zeros(2)),
        r"leaf 'more' \(float64\[2\]\) is not a leaf of these weights",
    ),
    "another shape": (
        lambda state: state.update({"layer.weight": np.zeros((3, 300), np.float32)}),
        r"leaf 'layer\.weight' is float32\[300, 3\], but this publish has float32\[3, 300\]",
    ),
    "another dtype": (
        lambda state: state["norm"].update(seen=np.int32(1)),
        r"leaf 'norm\.seen' is int64\[\], but this publish has int32\[\]",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_tensors_are_refused_by_the_name_of_the_first(engine: Engine, what: str) -> None:
    publish(engine, 1)
    changed, says = OTHERS[what]
    state = of(2)
    changed(state)
    with pytest.raises(SchemaMismatchError, match=says) as error:
        weights.publish_arrays(engine.seat, state, 2)
    assert str(file_of(engine)) in str(error.value)
    assert "or remove this file; readers then have no weights" in str(error.value)
    assert number_in(newest(engine)) == 1
    assert publish(engine, 3) == 2


def test_the_same_tensors_in_another_order_are_the_same(engine: Engine) -> None:
    publish(engine, 1)
    state = dict(reversed(of(4).items()))
    assert weights.publish_arrays(engine.seat, state, 40) == 2
    assert number_in(newest(engine)) == 4


def test_a_file_that_was_removed_is_made_again_of_other_tensors(engine: Engine) -> None:
    """Items record the earlier versions, so the new versions must be larger."""
    before = publish(engine, 1)
    file_of(engine).unlink()
    version = weights.publish_arrays(engine.seat, {"w": np.ones(3)}, 5)
    assert version == consumer_version.read(engine.seat) > before
    found = newest(engine, before)
    assert found is not None
    assert found.state_dict["w"].tolist() == [1, 1, 1]


def test_a_reader_goes_on_with_the_file_that_replaced_a_removed_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(
        weights, "time", SimpleNamespace(monotonic=lambda: now_s[0], time=time.time)
    )
    before = publish(engine, 1)
    with Engine.open(path_of(engine), None) as reader:
        assert number_in(newest(reader)) == 1
        file_of(engine).unlink()
        now_s[0] += 1.0
        assert newest(reader) is None, "no weights until the next publish"
        assert reader.stats()["weights_version"] == 0
        version = weights.publish_arrays(engine.seat, {"w": np.ones(3)}, 5)
        found = newest(reader, before)
        assert found is not None
        assert (found.version, found.state_dict["w"].tolist()) == (version, [1, 1, 1])
        file_of(engine).unlink()
        later = weights.publish_arrays(engine.seat, {"w": np.zeros(3)}, 6)
        assert newest(reader, version) is None, "it looks once a second"
        now_s[0] += 1.0
        found = newest(reader, version)
        assert found is not None
        assert (found.version, found.step) == (later, 6)


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        ({}, ValueError, "1 to 4096 tensors, but 0"),
        ({"w": {}}, ValueError, "1 to 4096 tensors, but 0"),
        ({"w": "text"}, TypeError, r"'w' is a str that cannot be stored \(its dtype is str128\)"),
        ({"a": {"b": None}}, TypeError, r"'a\.b' is a NoneType"),
        ({3: np.zeros(1)}, TypeError, "a string, but is 3"),
        ([np.zeros(1)], TypeError, "a mapping, but is a list"),
    ],
)
def test_what_is_no_state_dict_is_refused(
    engine: Engine, state: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        weights.publish_arrays(engine.seat, state, 1)
    assert newest(engine) is None
    assert publish(engine, 1) == 1


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1])
def test_a_step_of_more_than_64_bits_is_refused(engine: Engine, step: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        weights.publish_arrays(engine.seat, of(1), step)
    with pytest.raises(TypeError, match=r"publish: step must be a whole number, but is 1\.5"):
        weights.publish_arrays(engine.seat, of(1), 1.5)  # type: ignore[arg-type]


# Weights are never torn, and no process waits.


@contextmanager
def pausing(path: Path, point: str, work: Callable[[Engine], None]) -> Iterator[Iterator[bytes]]:
    """Runs a client that pauses at a sync point; yields its pauses and resumes it at each step.

    At the end of the block the client continues and must end by itself.
    """
    (told, tell), (hear, say) = os.pipe(), os.pipe()

    def body() -> None:
        with Engine.open(path, None) as engine:
            _core.arm(point, "pause", notify_fd=tell, wait_fd=hear)
            work(engine)
            _core.disarm()

    def pauses() -> Iterator[bytes]:
        while found := os.read(told, 64):
            yield found
            os.write(say, b".")

    pid = fork(body)
    os.close(tell)
    found = pauses()
    yield found
    for _ in found:
        pass
    assert ended(pid) == 0
    for fd in (told, hear, say):
        os.close(fd)


@pytest.mark.full
def test_readers_beside_a_publisher_never_see_two_versions_in_one(engine: Engine) -> None:
    publish(engine, 0, size=40_000)
    path, last = path_of(engine), 120

    def read() -> None:
        with Engine.open(path, None) as reader:
            version, number = 0, -1
            while number < last:
                found = newest(reader, version)
                if found is None:
                    continue
                assert found.version > version
                assert number_in(found) > number
                version, number = found.version, number_in(found)

    readers = [fork(read) for _ in range(2)]
    for number in range(1, last + 1):
        publish(engine, number, size=40_000)
    assert [ended(pid) for pid in readers] == [0, 0]


@pytest.mark.parametrize("point", ["weights.looked", "weights.taken"])
@pytest.mark.parametrize("meanwhile", [1, 2, 3])
def test_a_reader_that_was_overtaken_returns_whole_weights(
    engine: Engine, point: str, meanwhile: int
) -> None:
    publish(engine, 1)
    # A version that was published meanwhile does not change the bytes that the reader copies.
    wanted = 1 if meanwhile == 1 else 1 + meanwhile

    def read(reader: Engine) -> None:
        assert number_in(newest(reader)) == wanted

    with pausing(path_of(engine), point, read) as pauses:
        assert next(pauses) == b"\1"
        for number in range(2, 2 + meanwhile):
            publish(engine, number)


def test_a_reader_that_finds_half_of_the_next_weights_looks_again(engine: Engine) -> None:
    publish(engine, 1)

    def read(reader: Engine) -> None:
        assert number_in(newest(reader)) == 2

    with ExitStack() as over, pausing(path_of(engine), "weights.looked", read) as pauses:
        next(pauses)
        publish(engine, 2)
        # Some bytes of version 1 are overwritten by version 3.
        half = stopped_at(path_of(engine), "weights.copied", lambda one: _publish(one, 3))
        over.enter_context(half)


def _publish(engine: Engine, number: int) -> None:
    publish(engine, number)


def test_a_reader_that_is_overtaken_again_and_again_gives_up(engine: Engine) -> None:
    publish(engine, 1)

    def read(reader: Engine) -> None:
        with pytest.raises(
            ShmBufferError, match="faster than this process can copy them; publish less"
        ):
            newest(reader)
        _core.disarm()
        assert number_in(newest(reader)) == 129

    with pausing(path_of(engine), "*", read) as pauses:
        number = 1
        for point in pauses:
            for _ in range(2 * (point == b"weights.taken\n")):
                number += 1
                publish(engine, number)
    assert number == 1 + 2 * 64


def test_a_stopped_publisher_is_named_and_stops_no_reader(engine: Engine) -> None:
    publish(engine, 1)
    with stopped_at(path_of(engine), "weights.copied", lambda victim: _publish(victim, 2)) as pid:
        with pytest.raises(
            AttachTimeout, match=rf"waited 0\.05 s for pid {pid} .*publishes weights"
        ):
            publish(engine, 3, timeout=0.05)
        assert number_in(newest(engine)) == 1
    assert publish(engine, 4) == 2  # the writer was killed, which released its lock
    assert number_in(newest(engine)) == 4


def test_a_child_of_a_fork_reads_and_publishes(engine: Engine) -> None:
    publish(engine, 1)

    def child() -> None:
        assert number_in(newest(engine)) == 1
        assert publish(engine, 2) == 2

    succeeds(child)
    assert number_in(newest(engine)) == 2


def test_a_closed_handle_says_so(engine: Engine) -> None:
    publish(engine, 1)
    assert newest(engine) is not None
    engine.close()
    for call in (lambda: publish(engine, 2), lambda: newest(engine)):
        with pytest.raises(BufferClosedError, match="this handle was closed"):
            call()


def test_a_buffer_in_anonymous_memory_has_no_place_for_weights() -> None:
    with Engine.anonymous(SETTINGS) as engine:
        for call in (lambda: publish(engine, 2), lambda: newest(engine)):
            with pytest.raises(ShmBufferError, match="in the directory of a buffer"):
                call()


# The file.


def test_weights_go_with_their_buffer(engine: Engine) -> None:
    publish(engine, 1)
    file_of(engine).with_name("weights.new").write_bytes(b"left by one that was killed")
    path = path_of(engine)
    assert engine.cleanup()
    assert not path.exists()
    with pytest.raises(BufferUnlinkedError):
        publish(engine, 2)
    assert not path.exists()


def test_before_the_first_write_the_weights_of_a_removed_directory_are_an_error(
    engine: Engine,
) -> None:
    publish(engine, 1)
    assert number_in(newest(engine)) == 1
    shutil.rmtree(path_of(engine))
    with pytest.raises(BufferUnlinkedError, match="the directory was removed or replaced while"):
        newest(engine)


def test_another_definition_of_an_item_leaves_the_weights(engine: Engine) -> None:
    publish(engine, 1)
    engine.define(schema())
    assert engine.undefine()
    assert number_in(newest(engine)) == 1


def test_inspect_tells_the_newest_and_counts_their_bytes(engine: Engine) -> None:
    before = inspect(path_of(engine))
    assert before["weights"] is None
    publish(engine, 1)
    publish(engine, 4)
    found = inspect(path_of(engine))
    assert found["bytes"] == before["bytes"] + file_of(engine).stat().st_size
    told = found["weights"]
    assert (told["version"], told["step"], told["pid"]) == (2, 40, os.getpid())
    assert (told["tensors"], told["bytes"]) == (5, 3648 + 64 + 320 + 64)
    assert told["at_s"] > 1_700_000_000


def test_stats_tell_the_newest_and_its_age(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> tuple[float, float]:
        found = engine.stats()
        return found["weights_version"], found["weights_age_s"]

    assert told() == (0, 0.0)
    now_s = time.time()
    for step in (5, 6):
        publish(engine, step)
    monkeypatch.setattr(time, "time", lambda: now_s + 100)
    version, age_s = told()
    assert version == 2
    assert 0 < age_s <= 100
    monkeypatch.setattr(time, "time", lambda: now_s - 100)  # another process has changed the clock
    assert told() == (2, 0.0)


def test_stats_of_a_buffer_whose_weights_are_damaged_are_those_without(engine: Engine) -> None:
    publish(engine, 1)
    change(file_of(engine), 0, b"XXXX")
    with Engine.open(path_of(engine), None) as other:
        found = other.stats()
    assert (found["weights_version"], found["weights_age_s"]) == (0, 0.0)


def test_inspect_tells_of_a_damaged_file(engine: Engine) -> None:
    publish(engine, 1)
    change(file_of(engine), 4100, b"x")
    told = inspect(path_of(engine))["weights"]
    assert told.keys() == {"damage"}
    assert "the file of the weights is damaged" in told["damage"]


def test_without_room_nothing_is_left_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "free_bytes", lambda _: 1000)
        with pytest.raises(SpaceError, match=r"weights\.new: .* are needed"):
            publish(engine, 1)
    assert not [each for each in os.listdir(path_of(engine) / ".shmbuffer") if "weights" in each]
    assert newest(engine) is None
    assert publish(engine, 1) == 1


def test_the_file_is_these_bytes(engine: Engine) -> None:
    weights.publish_arrays(
        engine.seat, {"w": np.array([1.5], "<f4"), "n": {"k": np.array(258, "<i8")}}, -2
    )
    data = file_of(engine).read_bytes()
    form = (
        b'[{"path":["w"],"dtype":"float32","shape":[1]},'
        b'{"path":["n","k"],"dtype":"int64","shape":[]}]'
    )
    head = b"SHMWTS\0\1" + struct.pack("<HHIQQI", 1, 0, 0x01020304, 128, 8192, len(form))
    assert data[:36] == head
    assert data[36:40] == struct.pack("<I", _core.crc32c(head + form))
    assert data[40:64] == bytes(24)
    assert data[64:72] == struct.pack("<Q", 1)
    assert data[COPY_0 : COPY_0 + 64] == bytes(64)
    version, step, time_ns, pid = struct.unpack_from("<QqQQ", data, COPY_1)
    assert (version, step, pid) == (1, -2, os.getpid())
    assert time_ns > 1_700_000_000 * 10**9
    assert data[4096:8192] == form.ljust(4096, b"\0")
    first, second = data[8192:8320], data[8320:]
    assert first == bytes(128)
    assert second == struct.pack("<f60xq56x", 1.5, 258)
    assert data[COPY_1 + 32 : COPY_1 + 36] == struct.pack(
        "<I", _core.crc32c(second, _core.crc32c(data[COPY_1 : COPY_1 + 32]))
    )


# Damage.


def test_a_byte_that_changed_is_noticed(engine: Engine) -> None:
    publish(engine, 1)
    change(file_of(engine), payload_at(file_of(engine), 1) + 100, b"x")
    with pytest.raises(
        CorruptBufferError, match=r"do not match their checksum.*publish the weights again"
    ):
        weights.newest(engine.seat)
    assert publish(engine, 2) == 2
    assert number_in(newest(engine)) == 2


def test_a_stamp_of_other_weights_is_noticed(engine: Engine) -> None:
    publish(engine, 1)
    change(file_of(engine), COPY_1 + 8, struct.pack("<q", 11))
    with pytest.raises(CorruptBufferError, match="do not match their checksum"):
        weights.newest(engine.seat)


@pytest.mark.parametrize(
    ("at", "data", "error", "says"),
    [
        (0, b"SHMHIS", FormatError, "this file does not contain weights"),
        (8, b"\2", IncompatibleVersionError, "the format version is 2, but this build needs 1"),
        (12, b"\1\2\3\4", IncompatibleVersionError, "format version"),
        (16, b"\1", CorruptBufferError, "its checksum is wrong"),
        (32, b"\xff\xff\xff\x7f", CorruptBufferError, "its checksum is wrong"),
        (4100, b"x", CorruptBufferError, "its checksum is wrong"),
    ],
)
def test_a_damaged_head_is_refused(
    engine: Engine, at: int, data: bytes, error: type[ShmBufferError], says: str
) -> None:
    publish(engine, 1)
    change(file_of(engine), at, data)
    with Engine.open(path_of(engine), None) as other:
        for call in (lambda: weights.newest(other.seat), lambda: publish(other, 2)):
            with pytest.raises(error, match=says) as raised:
                call()
            assert str(file_of(engine)) in str(raised.value)


def test_a_file_of_another_size_is_refused(engine: Engine) -> None:
    publish(engine, 1)
    os.truncate(file_of(engine), file_of(engine).stat().st_size - 1)
    with (
        Engine.open(path_of(engine), None) as other,
        pytest.raises(CorruptBufferError, match=r"is damaged \(it has \d+ bytes\)"),
    ):
        weights.newest(other.seat)


def test_an_empty_file_is_refused(engine: Engine) -> None:
    file_of(engine).write_bytes(b"")
    file_of(engine).chmod(0o600)
    with pytest.raises(FormatError, match="this file does not contain weights"):
        newest(engine)


# After a power cut, and in a copy.


def torn(path: Path, *versions: int) -> None:
    """Restores some bytes of these versions to their earlier values, as a power cut may do."""
    for version in versions:
        change(path / layout.WEIGHTS, payload_at(path / layout.WEIGHTS, version) + 3, b"\xff")
    reboot(path)


def published(path: Path, last: int) -> None:
    with Engine.open(path, SETTINGS) as engine:
        for number in range(1, last + 1):
            publish(engine, number)


def test_whole_weights_survive_a_reboot(fast_path: Path) -> None:
    path = fast_path / "buffer"
    published(path, 3)
    torn(path)
    with Engine.open(path, None) as engine:
        assert engine.report is not None
        assert engine.report.reason == "reboot"
        assert number_in(newest(engine)) == 3
        assert publish(engine, 4) == 4


def test_after_a_reboot_the_version_before_a_torn_one_counts(
    fast_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fast_path / "buffer"
    published(path, 3)
    torn(path, 3)
    with caplog.at_level(logging.WARNING), Engine.open(path, None) as engine:
        assert (
            "version 3 of the weights was incomplete and was removed; publish again" in caplog.text
        )
        assert number_in(newest(engine)) == 2
        assert newest(engine, 2) is None
        assert publish(engine, 8) == 5  # version 3 was visible to a client, and 4 would overwrite 2
        assert number_in(newest(engine, 3)) == 8


def test_after_a_reboot_that_tore_both_there_are_none_until_the_next(fast_path: Path) -> None:
    path = fast_path / "buffer"
    published(path, 5)
    torn(path, 4, 5)
    with Engine.open(path, None) as engine:
        assert newest(engine) is None
        assert publish(engine, 8) == 7
        assert number_in(newest(engine)) == 8


def test_a_reboot_removes_a_file_whose_head_is_damaged(
    fast_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fast_path / "buffer"
    published(path, 2)
    change(path / layout.WEIGHTS, 4100, b"x")
    reboot(path)
    with caplog.at_level(logging.WARNING), Engine.open(path, None) as engine:
        assert "the file of the weights is damaged" in caplog.text
        assert newest(engine) is None
        assert publish(engine, 1) > 2
        assert number_in(newest(engine, 2)) == 1


def test_a_copy_of_a_directory_has_the_weights(engine: Engine, fast_path: Path) -> None:
    publish(engine, 1)
    publish(engine, 2)
    copy = fast_path / "copy"
    shutil.copytree(path_of(engine), copy)
    # copied during the read
    change(copy / layout.WEIGHTS, payload_at(copy / layout.WEIGHTS, 2), b"?")
    with Engine.open(copy, None) as other:
        assert number_in(newest(other)) == 1
        assert publish(other, 6) == 4
    assert number_in(newest(engine)) == 2
