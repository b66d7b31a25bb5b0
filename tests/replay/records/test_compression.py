"""Chunks that are compressed and expanded in batches by several threads come back unchanged."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import zstandard

from shmbuffer import CorruptBufferError
from shmbuffer._native import _core
from shmbuffer.items.records import compression
from shmbuffer.items.records.compression import UnknownDictionaryError, Zstd
from shmbuffer.items.records.places import Places


def pieces(count: int, nbytes: int, seed: int = 0) -> list[bytes]:
    """Makes chunks that are half noise and half identical."""
    chance = random.Random(seed)
    common = chance.randbytes(nbytes - nbytes // 2)
    return [chance.randbytes(nbytes // 2) + common for _ in range(count)]


def numerals(nbytes: int, seed: int = 0) -> bytes:
    """Makes compressible text in which any changed bit changes the content."""
    chance = random.Random(seed)
    return " ".join(str(chance.randrange(3000)) for _ in range(nbytes)).encode()[:nbytes]


def expand(zstd: Zstd, frames: list[bytes], places: Places, *where: str) -> None:
    at, stored = np.empty((2, len(frames)), np.int64)
    _core.locate_buffers(frames, at.ctypes.data, stored.ctypes.data)
    zstd.expand(places._replace(at=at, stored=stored), *where)


def whole(*out: np.ndarray[Any, np.dtype[np.uint8]]) -> Places:
    """Places that put each whole frame into one of these buffers."""
    nbytes = np.array([one.size for one in out], np.int64)
    to = np.array([one.ctypes.data for one in out], np.int64)
    planes = np.ones_like(nbytes)
    return Places(
        nbytes, nbytes, nbytes, np.arange(len(out)), np.zeros_like(nbytes), nbytes, to, planes
    )


def compressed(zstd: Zstd, given: Sequence[bytes | memoryview]) -> list[bytes]:
    return [bytes(memoryview(frame)) for frame in zstd.compress(given)]


def expanded(zstd: Zstd, frames: list[bytes], sizes: list[int]) -> list[bytes]:
    out = [np.full(size, 0xAA, np.uint8) for size in sizes]
    expand(zstd, frames, whole(*out))
    return [one.tobytes() for one in out]


# -- there and back ----------------------------------------------------------------------------


@pytest.mark.product(few=6)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [1, 63, 64, 5000, 2**15 - 1, 2**15, 200_000])
def test_pieces_come_back_as_they_were_in_their_order(nbytes: int, threads: int) -> None:
    zstd = Zstd(threads=threads)
    given = pieces(50, nbytes)
    frames = compressed(zstd, given)
    assert expanded(zstd, frames, [nbytes] * 50) == given


def test_pieces_of_all_sizes_share_a_batch() -> None:
    chance = random.Random(3)
    given = [chance.randbytes(chance.choice([0, 1, 100, 40_000, 300_000])) for _ in range(100)]
    zstd = Zstd(threads=3)
    assert expanded(zstd, compressed(zstd, given), [len(piece) for piece in given]) == given


def test_a_piece_without_bytes_is_stored_without_bytes() -> None:
    zstd = Zstd()
    assert compressed(zstd, [b"", memoryview(b"")]) == [b"", b""]
    assert expanded(zstd, [b""], [0]) == [b""]


@pytest.mark.product(few=2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("gaps", [(0,), (0, 8), (0, 0, 0, 5)], ids=str)
def test_pieces_that_lie_one_behind_the_other_come_back_and_gaps_are_left_alone(
    gaps: tuple[int, ...], threads: int
) -> None:
    chance = random.Random(len(gaps))
    text = numerals(400_000)
    sizes = [chance.choice([0, 1, 60, 3000, 40_000, 300_000]) for _ in range(120)]
    given = [text[at : at + size] for at, size in enumerate(sizes)]
    lead = [chance.choice(gaps) for _ in given]
    memory = np.full(sum(map(len, given)) + sum(lead) + 9, 0xAA, np.uint8)
    expected, destinations, at = memory.copy(), [], 0
    for piece, gap in zip(given, lead, strict=True):
        at += gap
        destinations.append(memory[at : at + len(piece)])
        expected[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    order = chance.sample(range(120), 120) if len(gaps) == 2 else range(120)
    zstd = Zstd(threads=threads)
    expand(
        zstd, compressed(zstd, [given[n] for n in order]), whole(*[destinations[n] for n in order])
    )
    assert memory.tobytes() == expected.tobytes()


@pytest.mark.product(few=1)
@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_a_frame_go_to_their_places_and_the_rest_of_it_nowhere(
    threads: int, full: bool
) -> None:
    chance = random.Random(threads)
    sizes = [chance.choice([1, 700, 50_000, 600_000]) for _ in range(40 if full else 12)]
    given = [numerals(size, seed) for seed, size in enumerate(sizes)]
    memory = np.full(sum(map(len, given)) * 3 + 400, 0xAA, np.uint8)
    expected, parts, at = memory.copy(), [], 0
    for frame, piece in enumerate(given):
        # sometimes none, sometimes the same bytes several times
        for _ in range(chance.randrange(4)):
            before = chance.randrange(len(piece))
            nbytes = chance.randrange(len(piece) - before) // 2 + 1
            part = memory[at : at + nbytes]
            expected[at : at + nbytes] = np.frombuffer(piece, np.uint8)[before : before + nbytes]
            parts.append((frame, before, nbytes, part.ctypes.data))
            at += nbytes + chance.choice([0, 0, 3])

    columns = np.ascontiguousarray(np.array(parts, np.int64).T)
    frames = [np.array(sizes, np.int64)] * 3
    places = Places(*frames, *columns, np.ones(len(parts), np.int64))
    zstd = Zstd(threads=threads)
    for _ in range(2):  # the second time through a buffer that holds the bytes of the first
        expand(zstd, compressed(zstd, given), places)
        assert memory.tobytes() == expected.tobytes()
        memory[:] = 0xAA


def test_frames_that_go_to_one_stretch_of_memory_go_there_in_one_step() -> None:
    memory = np.empty(9000, np.uint8)
    apart = [memory[:4000], memory[4001:5000], memory[5000:9000]]
    (run,) = whole(*apart[1:]).runs().all
    assert (run.first, run.end, run.size) == (0, 2, 4999)
    assert run.into == memory.ctypes.data + 4001
    runs = whole(*apart).runs()
    assert [run.into for run in runs.all] == [0]
    assert runs.at.tolist() == [0, 4000, 4999]
    half = whole(*apart[1:])._replace(nbytes=np.array([999, 3999]))
    assert half.runs().all[0].into == 0
    planes = whole(*apart[1:])._replace(planes=np.array([1, 4]))
    assert [(run.into, run.planar) for run in planes.runs().all] == [(0, 1)]


def halves(nbytes: int, one: int, other: int, count: int) -> Places:
    """Places that put the halves of each frame into two memory ranges."""
    half, at = nbytes // 2, np.arange(count)
    to = np.stack([one + at * half, other + at * half], 1).ravel()
    return Places(
        at,
        at,
        np.full(count, nbytes),
        at.repeat(2),
        np.tile([0, half], count),
        np.full(2 * count, half),
        to,
        np.ones(2 * count, np.int64),
    )


@pytest.mark.product(few=1)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("nbytes", [2, 10_000, 300_000])
def test_halves_of_frames_that_go_to_two_stretches_of_memory_come_there(
    nbytes: int, threads: int
) -> None:
    zstd, half = Zstd(threads=threads), nbytes // 2
    for count in (1, 2, 3, 4, 11):
        given = [numerals(nbytes, seed) for seed in range(count)]
        memory = np.full(count * nbytes + 16, 0xAA, np.uint8)
        first, second = (b"".join(p[a : a + half] for p in given) for a in (0, half))
        for one, other in ((0, 8 + len(first)), (8 + len(first), 0)):
            at = memory.ctypes.data
            expand(zstd, compressed(zstd, given), halves(nbytes, at + one, at + other, count))
            expected = (first, second) if one < other else (second, first)
            assert memory.tobytes() == expected[0] + b"\xaa" * 8 + expected[1] + b"\xaa" * 8


def test_frames_are_woven_where_each_has_one_half_in_either_place() -> None:
    def woven(places: Places) -> list[bool]:
        return [run.other != 0 for run in places.runs().all]

    memory = np.empty(9 * 1000 + 9, np.uint8)
    at, count = memory.ctypes.data, 9
    places = halves(1000, at, at + 500 * count, count)
    assert [(run.first, run.end, run.size) for run in places.runs().all] == [
        (0, 8, 8000),
        (8, 9, 1000),
    ]
    assert woven(places) == [True, False]
    for field, change in (("to", 1), ("before", 1), ("nbytes", -1), ("planes", 1)):
        changed = getattr(places, field).copy()
        changed[5] += change
        assert woven(places._replace(**{field: changed})) == [True, False], field
        assert places._replace(**{field: changed}).runs().all[0].end == 2, field
    beside = halves(1000, at, at + 500, count)  # the two ranges would overlap
    assert woven(beside) == [False]


def test_damage_in_a_woven_frame_is_told_with_its_number() -> None:
    zstd, memory = Zstd(), np.empty(40_000, np.uint8)
    frames = compressed(zstd, [numerals(5000, seed) for seed in range(8)])
    at = memory.ctypes.data
    for damaged in (4, 5):
        given = [*frames[:damaged], frames[damaged][:-1], *frames[damaged + 1 :]]
        words = f"compressed piece {damaged} cannot be decompressed"
        with pytest.raises(CorruptBufferError, match=words):
            expand(zstd, given, halves(5000, at, at + 20_000, 8))


def test_the_runs_of_a_batch_are_shared_out_evenly() -> None:
    out = [np.empty(50_000, np.uint8) for _ in range(32)]
    assert {run.end - run.first for run in whole(*out).runs(2).all} == {4}
    assert [run.end - run.first for run in whole(*out).runs(1).all] == [5] * 6 + [2]
    large = [np.empty(500_000, np.uint8) for _ in range(3)]
    assert [run.size for run in whole(*large).runs(2).all] == [500_000] * 3


def test_without_the_threads_of_zstandard_the_caller_compresses_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = pieces(30, 100_000)
    frames = compressed(Zstd(threads=3), given)
    monkeypatch.setattr(compression, "_HAS_THREADS", False)
    assert compressed(Zstd(threads=3), given) == frames


def test_without_pieces_there_is_no_work() -> None:
    assert compressed(Zstd(), []) == []
    expand(Zstd(), [], whole())


def test_a_frame_is_one_that_any_zstd_reads_and_says_its_size() -> None:
    given = pieces(1, 5000)[0]
    (frame,) = compressed(Zstd(level=9), [given])
    assert zstandard.ZstdDecompressor().decompress(frame) == given
    assert zstandard.get_frame_parameters(frame).content_size == 5000


def test_frames_of_another_zstd_are_read() -> None:
    given = pieces(1, 100_000)[0]
    frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(given)
    assert expanded(Zstd(), [frame], [len(given)]) == [given]


def test_the_number_of_threads_does_not_change_the_bytes() -> None:
    given = pieces(100, 30_000)
    assert compressed(Zstd(threads=1), given) == compressed(Zstd(threads=4), given)


def test_a_higher_level_compresses_more() -> None:
    given = [" ".join(map(str, range(at, at + 3000))).encode() for at in range(5)]
    fast, small = compressed(Zstd(level=1), given), compressed(Zstd(level=19), given)
    assert sum(map(len, small)) < sum(map(len, fast))


# -- threads and processes ---------------------------------------------------------------------


def test_contexts_are_made_once_and_not_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def count(name: str) -> Callable[..., Any]:
        real = getattr(zstandard, name)
        return lambda *args, **kwargs: made.append(name) or real(*args, **kwargs)

    for name in ("ZstdCompressor", "ZstdDecompressor"):
        monkeypatch.setattr(zstandard, name, count(name))
    zstd = Zstd(threads=2)
    given = pieces(80, 30_000)
    for _ in range(10):
        frames = compressed(zstd, given)
        expanded(zstd, frames, [30_000] * 80)
    assert sorted(set(made)) == ["ZstdCompressor", "ZstdDecompressor"]
    assert len(made) <= 4


def test_a_small_batch_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: pytest.fail("it was started"))
    zstd = Zstd(threads=4)
    given = pieces(100, 1000)
    assert expanded(zstd, compressed(zstd, given), [1000] * 100) == given


def test_no_thread_is_left_over() -> None:
    before = _thread._count()
    zstd = Zstd(threads=4)
    given = pieces(60, 100_000)
    expanded(zstd, compressed(zstd, given), [100_000] * 60)
    wait_until_ended(before)


def wait_until_ended(before: int) -> None:
    """Waits until the worker threads have ended, which they do shortly after their last job."""
    while _thread._count() > before:
        time.sleep(0.001)


def test_where_no_thread_can_be_started_the_caller_does_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    zstd = Zstd(threads=4)
    given = pieces(60, 100_000)
    assert expanded(zstd, compressed(zstd, given), [100_000] * 60) == given


def test_threads_of_the_caller_share_one_codec() -> None:
    zstd = Zstd(threads=2)
    given = {seed: pieces(40, 40_000, seed) for seed in range(4)}
    found = {}

    def run(seed: int) -> None:
        for _ in range(5):
            found[seed] = expanded(zstd, compressed(zstd, given[seed]), [40_000] * 40)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == given


def test_a_child_of_a_fork_compresses_with_what_it_inherited() -> None:
    zstd = Zstd(threads=3)
    given = pieces(60, 50_000)
    frames = compressed(zstd, given)
    reader, writer = multiprocessing.Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        writer.send(compressed(zstd, given) == frames)
        writer.send(expanded(zstd, frames, [50_000] * 60) == given)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (reader.recv(), reader.recv()) == (True, True)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_any_thread_reaches_the_caller_when_all_have_ended(threads: int) -> None:
    zstd = Zstd(threads=threads)
    text = numerals(100_000)
    given = [text[at:] + text[:at] for at in range(60)]
    frames = compressed(zstd, given)
    frames[57] = frames[57][:-1000] + bytes(1000)
    before = _thread._count()
    with pytest.raises(CorruptBufferError, match="compressed piece 57 cannot be decompressed"):
        expanded(zstd, frames, [100_000] * 60)
    wait_until_ended(before)
    del frames[57]
    assert expanded(zstd, frames, [100_000] * 59) == given[:57] + given[58:]


def test_an_interrupt_while_threads_run_is_raised_when_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupts = iter([KeyboardInterrupt])
    wait = compression._Ended.wait

    def interrupted(self: compression._Ended) -> None:
        for error in interrupts:
            raise error
        wait(self)

    gate, ended = threading.Event(), []
    main = threading.get_ident()

    def work(blocks: Any) -> None:
        if threading.get_ident() != main:
            gate.wait()
        for _ in blocks:
            gate.set()
        ended.append(threading.get_ident())

    # The other thread waits for the caller's first block, and the caller's first wait is
    # interrupted.
    monkeypatch.setattr(compression._Ended, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compression._in_threads(work, [range(1)] * 3, 2)
    assert ended[0] == main
    assert len(ended) == 2


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 23, -1, 2.5])
def test_another_level_is_refused(level: Any) -> None:
    with pytest.raises(ValueError, match=rf"a zstd level from 1 to 22, got {level}"):
        Zstd(level)


def test_less_than_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Zstd(threads=0)


def test_a_frame_of_another_size_is_refused_before_anything_is_written() -> None:
    zstd = Zstd()
    frames = compressed(zstd, [b"x" * 100, b"y" * 100])
    out = [np.zeros(100, np.uint8), np.zeros(101, np.uint8)]
    with pytest.raises(
        CorruptBufferError, match=r"run/b: compressed piece 1 .* 100 bytes instead of 101"
    ):
        expand(zstd, frames, whole(*out), "run/b")
    assert not out[0].any()


def test_damage_among_pieces_that_are_expanded_as_one_is_told_with_its_number() -> None:
    zstd = Zstd()
    frames = compressed(zstd, [numerals(5000, seed) for seed in range(6)])
    memory = np.zeros(6 * 5000 + 50, np.uint8)
    out = [memory[at * 5000 : at * 5000 + 5000] for at in range(6)]
    for damaged in (frames[3] + b"?", frames[3][:-1], frames[3] + frames[2]):
        given = [*frames[:3], damaged, *frames[4:]]
        # Old versions of zstandard ignore a single byte behind a frame.
        seen = len(damaged) != len(frames[3]) + 1 or zstandard.__version__ >= "0.20"
        words = f"run/b: compressed piece{' 3' if seen else 's 0 to 5'} cannot be decompressed"
        with pytest.raises(CorruptBufferError, match=words):
            expand(zstd, given, whole(*out), "run/b")
        assert not memory[-50:].any()


def test_a_frame_that_promises_terabytes_is_refused_unread() -> None:
    frame = b"\x28\xb5\x2f\xfd" + bytes([0b11000000, 0x58]) + (2**42).to_bytes(8, "little")
    assert zstandard.get_frame_parameters(frame).content_size == 2**42
    with pytest.raises(CorruptBufferError, match=f"{2**42} bytes instead of 64"):
        expanded(Zstd(), [frame + bytes(20)], [64])


def test_a_frame_that_does_not_say_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 500)
    with pytest.raises(CorruptBufferError, match="its frame does not contain its size"):
        expanded(Zstd(), [frame], [500])


@pytest.mark.parametrize("found", [b"", b"x", b"no zstd at all, but some bytes"])
def test_bytes_that_are_not_a_frame_are_refused(found: bytes) -> None:
    with pytest.raises(CorruptBufferError, match="compressed piece 0 cannot be decompressed"):
        expanded(Zstd(), [found], [100])


def test_bytes_for_a_piece_without_bytes_are_refused() -> None:
    with pytest.raises(CorruptBufferError, match="1 bytes for an empty piece"):
        expanded(Zstd(), [b"x"], [0])


@pytest.mark.parametrize("nbytes", [3000, 60_000])
def test_a_damaged_frame_is_an_error_or_gives_no_more_than_its_destination(nbytes: int) -> None:
    zstd, chance = Zstd(threads=1), random.Random(1)
    given = numerals(nbytes)
    (frame,) = compressed(zstd, [given])
    refused = []
    for _ in range(300):
        damaged = bytearray(frame)
        kind = chance.randrange(3)
        if kind == 0:
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del damaged[chance.randrange(len(damaged)) :]
        else:
            at = chance.randrange(len(damaged))
            damaged[at : at + 20] = chance.randbytes(20)
        memory = np.zeros(nbytes + 64, np.uint8)
        try:
            expand(zstd, [bytes(damaged)], whole(memory[:nbytes]))
        except CorruptBufferError as error:
            refused.append(str(error))
        assert not memory[nbytes:].any()
    assert len(refused) > 150
    assert all(" cannot be decompressed: " in words or " dictionary " in words for words in refused)
    # the context keeps no state from the failed call
    assert expanded(zstd, [frame], [nbytes]) == [given]


# -- dictionaries ------------------------------------------------------------------------------


def sentences(count: int, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    words = [random.Random(at).randbytes(8) for at in range(200)]
    return [b" ".join(chance.choices(words, k=20)) for _ in range(count)]


@pytest.fixture(scope="module")
def dictionary() -> bytes:
    return Zstd.train(sentences(500, 0), 4096)


def test_a_dictionary_makes_small_pieces_smaller_and_they_come_back(dictionary: bytes) -> None:
    given = sentences(100, 1)
    plain, zstd = Zstd(), Zstd(dictionary=dictionary)
    frames = compressed(zstd, given)
    assert sum(map(len, frames)) < 0.6 * sum(map(len, compressed(plain, given)))
    assert expanded(zstd, frames, [len(piece) for piece in given]) == given


def test_frames_without_the_dictionary_are_read_with_it(dictionary: bytes) -> None:
    for given in (sentences(20, 2), pieces(3, 100_000)):
        frames = compressed(Zstd(), given)
        assert expanded(Zstd(dictionary=dictionary), frames, list(map(len, given))) == given


def test_a_frame_of_an_unknown_dictionary_is_told_apart_before_anything_is_written(
    dictionary: bytes,
) -> None:
    zstd = Zstd(dictionary=dictionary)
    other = Zstd.train(sentences(500, 9)[::-1], 1024)
    frames = compressed(Zstd(), [b"x" * 200]) + compressed(zstd, sentences(1, 3))
    out = [np.zeros(200, np.uint8), np.zeros(179, np.uint8)]
    words = f"needs dictionary {zstd.dictionary_id}"
    for reader, loaded in (
        (Zstd(), "no dictionary is loaded"),
        (Zstd(dictionary=other), "is loaded"),
    ):
        with pytest.raises(UnknownDictionaryError, match=words) as caught:
            expand(reader, frames, whole(*out), "run/b")
        assert loaded in str(caught.value)
        assert str(caught.value).startswith("run/b: compressed piece 1")
        assert not out[0].any()
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.dictionary_id == zstd.dictionary_id != 0


def test_a_damaged_dictionary_is_refused(dictionary: bytes) -> None:
    for damaged in (b"", b"no dictionary", dictionary[:100]):
        with pytest.raises(
            CorruptBufferError, match=f"a dictionary of {len(damaged)} bytes is not"
        ):
            Zstd(dictionary=damaged)


@pytest.mark.parametrize("samples", [[], [b"a"], [b"abc" * 10] * 3])
def test_a_dictionary_of_too_few_samples_is_refused(samples: list[bytes]) -> None:
    with pytest.raises(ValueError, match=f"can be trained on {len(samples)} samples"):
        Zstd.train(samples, 1024)


def test_a_dictionary_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 256 bytes, got 255"):
        Zstd.train(sentences(100, 0), 255)


def test_training_looks_at_a_bounded_part_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    real = zstandard.train_dictionary

    def train(nbytes: int, samples: list[bytes], level: int) -> Any:
        looked.extend(samples)
        return real(nbytes, samples, level=level)

    monkeypatch.setattr(zstandard, "train_dictionary", train)
    given = sentences(5000, 0)
    Zstd.train(given, 256)
    assert sum(map(len, looked)) <= 2 * 100 * 256 < sum(map(len, given))
