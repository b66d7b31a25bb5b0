"""Records are saved as one consistent snapshot and load into any list that has space."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferInUseError,
    CompressedListStorage,
    CorruptBufferError,
    FormatError,
    LazyMemmapStorage,
    LazyStackStorage,
    ReplayBuffer,
    SchemaMismatchError,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.memory.format.layout import PRIVATE
from tests.replay.conformance import through_a_state, through_files
from tests.replay.records.items import KINDS, is_item, items, shared

Make = Callable[..., Any]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes prioritized buffers; with ``shared``, each has a directory of its own."""
    made: list[Any] = []

    def buffer(kind: type[Any], is_shared: bool, max_size: int = 20, **options: Any) -> Any:
        path = tmp_path / f"buffer{len(made)}"
        storage = (
            shared(kind, path, max_size, **options) if is_shared else kind(max_size, **options)
        )
        made.append(
            TensorDictPrioritizedReplayBuffer(
                alpha=0.8, beta=0.9, storage=storage, batch_size=8, priority_key="p"
            )
        )
        return made[-1]

    yield buffer
    for one in made:
        one.close()


def ids(rb: Any) -> list[int]:
    return [int(one["id"]) for one in rb[:].unbind(0)]


WAYS = pytest.mark.parametrize("way", [through_files, through_a_state], ids=["files", "state"])


@every_kind
@pytest.mark.parametrize("source", [True, False], ids=["shared", "private"])
def test_where_records_have_no_room_nothing_is_changed(
    kind: type[Any], source: bool, make: Make, tmp_path: Path
) -> None:
    rb = make(kind, source)
    noise = [TensorDict(a=torch.randint(0, 256, (6000,), dtype=torch.uint8)) for _ in range(20)]
    rb.extend(noise)
    rb.dumps(tmp_path / "dump")
    small = make(kind, True, max_bytes=2**16)
    small.extend(items(0, 3))
    with pytest.raises(ValueError, match=r"records of .* bytes .*max_bytes 65536"):
        small.loads(tmp_path / "dump")
    with pytest.raises(ValueError, match=r"records of .* bytes"):
        small.load_state_dict(rb.state_dict())
    assert ids(small) == [0, 1, 2]


@WAYS
def test_a_dictionary_travels_with_the_records(way: Any, make: Make, tmp_path: Path) -> None:
    def lines(start: int, stop: int) -> list[dict[str, Any]]:
        return [
            {"t": (f"the number of this line of text is {n}, and the next {n + 1} " * 3).encode()}
            for n in range(start, stop)
        ]

    rb = make(CompressedListStorage, True, max_size=1000, dictionary_bytes=512)
    for start in range(0, 800, 100):
        rb.extend(lines(start, start + 100))
    assert rb.storage.open_engine.seat.dictionary() is not None
    plain, private = (
        make(CompressedListStorage, True, 1000),
        make(CompressedListStorage, False, 1000),
    )
    other = make(CompressedListStorage, True, max_size=1000, dictionary_bytes=512)
    for start in range(2000, 2800, 100):
        other.extend(lines(start, start + 100))
    mine = rb.storage.open_engine.seat.dictionary()
    assert other.storage.open_engine.seat.dictionary() not in (None, mine)
    for buffer in (plain, private, other):
        way(rb, buffer, tmp_path)
        assert [buffer[at]["t"] for at in (0, 333, 799)] == [
            lines(at, at + 1)[0]["t"] for at in (0, 333, 799)
        ]
        buffer.extend(lines(900, 901))
        assert buffer[800]["t"] == lines(900, 901)[0]["t"]


def test_loading_into_a_list_needs_the_custom_functions(make: Make, tmp_path: Path) -> None:
    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8) ^ 255

    def back(chunk: torch.Tensor) -> torch.Tensor:
        return chunk ^ 255

    functions = {"compression_fn": flipped, "decompression_fn": back}
    rb = make(CompressedListStorage, True, **functions)
    rb.extend(items(0, 5))
    rb.dumps(tmp_path / "dump")
    for buffer in (
        make(CompressedListStorage, True, **functions),
        make(CompressedListStorage, False, **functions),
    ):
        buffer.loads(tmp_path / "dump")
        assert all(map(is_item, buffer[:].unbind(0)))
    without = make(CompressedListStorage, False)
    with pytest.raises(RuntimeError, match="decompression_fn"):
        without.loads(tmp_path / "dump")


@every_kind
def test_a_save_is_of_one_moment_while_others_write(
    kind: type[Any], make: Make, tmp_path: Path
) -> None:
    rb = make(kind, True, max_size=64, max_bytes=2**15)
    rb.extend(items(0, 8))
    stop = threading.Event()

    def write() -> None:
        start = 8
        while not stop.is_set():
            rb.extend(items(start, start + 4))
            start += 4

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for at in range(5):
            rb.dumps(tmp_path / str(at))
    finally:
        stop.set()
        writer.join()
    for at in range(5):
        other = make(kind, False, 64)
        other.loads(tmp_path / str(at))
        found = sorted(ids(other))
        assert all(map(is_item, other[:].unbind(0)))
        assert found == list(range(found[0], found[0] + len(found)))  # the newest, without a gap
        assert (found[0] + len(found)) % 4 == 0  # no partial batches
        assert other.write_count == found[-1] + 1


@every_kind
def test_loaded_items_keep_their_sources_apart(kind: type[Any], make: Make, tmp_path: Path) -> None:
    one = TensorDictReplayBuffer(storage=shared(kind, tmp_path / "two"), batch_size=8)
    other = TensorDictReplayBuffer(storage=shared(kind, tmp_path / "two"), batch_size=8)
    for start in (0, 2):  # the two writers take turns
        for buffer, offset in ((one, 0), (other, 100)):
            number = torch.arange(start, start + 2) + offset
            buffer.extend(TensorDict({"episode": number // 100, "n": number}, [2]))
    one.dumps(tmp_path / "dump")
    loaded = TensorDictReplayBuffer(
        storage=shared(kind, tmp_path / "loaded"),
        sampler=SliceSampler(slice_len=4, traj_key="episode"),
        batch_size=8,
    )
    loaded.loads(tmp_path / "dump")
    assert {tuple(row) for row in loaded.sample()["n"].reshape(-1, 4).tolist()} <= {
        (0, 1, 2, 3),
        (100, 101, 102, 103),
    }
    for buffer in (one, other, loaded):
        buffer.close()


@every_kind
def test_a_buffer_that_others_use_is_not_loaded_into(
    kind: type[Any], make: Make, tmp_path: Path
) -> None:
    rb = make(kind, True)
    rb.extend(items(0, 5))
    rb.dumps(tmp_path / "dump")
    second = ReplayBuffer(storage=shared(kind, rb.storage.scratch_dir, 20), batch_size=2)
    with pytest.raises(BufferInUseError, match="while other processes use the buffer"):
        rb.loads(tmp_path / "dump")
    assert ids(rb) == [0, 1, 2, 3, 4]
    second.close()


@every_kind
def test_nothing_that_was_written_cannot_be_saved(kind: type[Any], tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=kind(9, scratch_dir=tmp_path / "buffer", max_bytes=2**16))
    with pytest.raises(RuntimeError, match="Cannot save a non-initialized storage"):
        rb.dumps(tmp_path / "dump")
    empty = ReplayBuffer(storage=shared(kind, tmp_path / "empty"))
    empty.dumps(tmp_path / "dump")
    other = ReplayBuffer(storage=shared(kind, tmp_path / "other"))
    other.extend(items(0, 3))
    other.loads(tmp_path / "dump")
    assert (len(other), other.write_count) == (0, 0)
    other.load_state_dict(rb.state_dict())
    assert len(other) == 0
    for buffer in (empty, other):
        buffer.close()


@every_kind
def test_a_save_where_the_records_lie_copies_nothing(kind: type[Any], tmp_path: Path) -> None:
    where = tmp_path / "dump" / "storage"
    rb = TensorDictReplayBuffer(storage=shared(kind, where, 20), batch_size=4)
    rb.extend(items(0, 5))
    rb.dumps(tmp_path / "dump")
    rb.extend(items(5, 7))
    rb.close()
    storage = kind(20, scratch_dir=where, max_bytes=2**20)  # opened by the load
    other = TensorDictReplayBuffer(storage=storage, batch_size=4)
    other.loads(tmp_path / "dump")
    assert ids(other) == list(range(7))  # the items of the live buffer
    assert all(map(is_item, other.sample().unbind(0)))
    other.register_save_hook(lambda data, path: data)
    with pytest.raises(RuntimeError, match=r"own files there, which .* would overwrite"):
        other.dumps(tmp_path / "dump")
    other.close()


@every_kind
def test_a_live_buffer_of_others_is_loaded_by_value(kind: type[Any], tmp_path: Path) -> None:
    where = tmp_path / "dump" / "storage"
    rb = TensorDictReplayBuffer(storage=shared(kind, where, 20), batch_size=4)
    rb.extend(items(0, 25))
    rb.dumps(tmp_path / "dump")
    rb.extend(items(25, 27))
    for storage in (kind(20), shared(kind, tmp_path / "other", 20), kind(30)):
        other = TensorDictReplayBuffer(storage=storage, batch_size=4)
        other.loads(tmp_path / "dump")
        assert sorted(ids(other)) == list(range(7, 27))
        assert all(map(is_item, other.sample().unbind(0)))
        other.close()
    rb.close()
    rows = TensorDictReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path / "rows"))
    rows.extend(TensorDict({"a": torch.arange(3)}, [3]))
    with pytest.raises(SchemaMismatchError, match=r"a buffer of rows.*LazyMemmapStorage"):
        kind(9).loads(tmp_path / "rows")
    rows.close()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40:60] = bytes(20)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("records", damage, "does not match the saved data"),
        ("records", lambda path: path.write_bytes(b""), "the file has 0 bytes instead of"),
        ("records", Path.unlink, "missing"),
        ("slots", lambda path: path.write_bytes(b"no array"), "the file has 8 bytes instead of"),
        ("control", lambda path: path.write_bytes(b""), "the file has 0 bytes instead of"),
        ("schema.json", lambda path: path.write_bytes(b"{}"), "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("target", [True, False], ids=["shared", "private"])
def test_damaged_files_are_refused_and_nothing_is_changed(
    name: str, how: Callable[[Path], Any], words: str, target: bool, make: Make, tmp_path: Path
) -> None:
    rb, other = make(LazyStackStorage, True), make(LazyStackStorage, target)
    rb.extend(items(0, 5))
    rb.storage.dumps(tmp_path / "dump")
    how(tmp_path / "dump" / PRIVATE / name)
    other.extend(items(7, 9))
    with pytest.raises((CorruptBufferError, FormatError), match=words):
        other.storage.loads(tmp_path / "dump")
    assert ids(other) == [7, 8]
