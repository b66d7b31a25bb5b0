"""Compresses or expands the pieces of a batch with zstd in one call.

A context, which contains zstd's tables (about 100 KB), is created once and reused by later calls.
For a batch of more than a megabyte, a call starts several threads, each with its own context.
Starting a thread takes less time than zstd needs for 64 KiB. The threads end with the call, so that
none of them exists when the process forks between calls.

zstd runs without the GIL. Acquiring the GIL again costs more than expanding a small piece, so
consecutive pieces are expanded in one step.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import zstandard

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.errors import CorruptBufferError
from shmbuffer.items.records.places import Places, Run, Runs
from shmbuffer.items.records.views import writable

_MAX_THREADS = 4
# A call uses one more thread for each further block of this many bytes. Starting and ending a
# thread does not pay off for fewer bytes.
_COMPRESSED_ALONE = 2**20
_EXPANDED_ALONE = 2**21
_KEPT_BYTES = 2**22  # largest buffer of a context that is kept for later calls

#: True if zstandard supports threads, as its C backend does.
_HAS_THREADS = "multi_compress_to_buffer" in zstandard.backend_features

_LEAST_DICTIONARY = 256  # zstd creates no smaller dictionaries
_LEARNT = 100  # bytes of training data per byte of the dictionary

Buffer = bytes | memoryview
Frames = Sequence[Any]
"""Sequence of `Buffer` objects."""
Context = TypeVar("Context")


class UnknownDictionaryError(CorruptBufferError):
    """Raised if a frame needs a dictionary that is not loaded.

    Attributes:
        dictionary_id: number of the dictionary that the frame needs.
    """


class Zstd:
    """Compresses and expands batches of pieces. Several threads can use one object concurrently.

    Args:
        level: compression level of zstd, from 1 (fastest) to 22 (smallest).
        dictionary: result of `train`, or None. Frames without a dictionary can always be read.
        threads: number of threads per call, including the caller. If None, uses one thread per
            available CPU, up to 4. The caller alone processes small batches.

    Raises:
        ValueError: the level is out of range, or ``threads`` is below 1.
        CorruptBufferError: ``dictionary`` is invalid.
    """

    def __init__(
        self, level: int = 3, *, dictionary: bytes | None = None, threads: int | None = None
    ) -> None:
        if level not in range(1, 23):
            raise ValueError(f"compression_level must be a zstd level from 1 to 22, got {level!r}")
        if threads is not None and threads < 1:
            raise ValueError(
                f"threads includes the calling thread, so it must be at least 1, got {threads!r}"
            )
        self.level = int(level)
        self.dictionary_id = 0
        self.threads = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._dictionary = None if dictionary is None else self._load(dictionary)
        # Each context is used by only one thread at a time.
        self._compressors: list[zstandard.ZstdCompressor] = []
        self._expanders: list[_Expander] = []

    def compress(self, pieces: Sequence[Buffer]) -> Frames:
        """Compresses each piece to a frame that contains the size of the piece.

        An empty piece becomes ``b""``. Cost: 1 µs per piece, in addition to zstd.
        """
        total = sum(map(len, pieces))
        codec = _lent(self._compressors, self._compressor)
        try:
            if total < _COMPRESSED_ALONE or not _HAS_THREADS:
                return [codec.compress(piece) if len(piece) else b"" for piece in pieces]
            whole: Any = [piece for piece in pieces if len(piece)]
            threads = min(self.threads, 1 + total // _COMPRESSED_ALONE)
            frames: Any = codec.multi_compress_to_buffer(whole, threads=threads)
        finally:
            self._compressors.append(codec)
        if len(whole) == len(pieces):
            return frames  # type: ignore[no-any-return]
        left = iter(frames)
        return [next(left) if len(piece) else b"" for piece in pieces]

    def expand(self, places: Places, where: str = "a batch of records") -> None:
        """Expands frames to their destinations. ``where`` names their source in error messages.

        Cost: 0.1 µs per frame and 10 µs per run, in addition to zstd.

        Raises:
            CorruptBufferError: a frame is damaged.
            UnknownDictionaryError: a frame needs a dictionary that is not loaded.
        """
        frames = address(places.at), address(places.stored), len(places.at)
        if not _core.check_frames(*frames, address(places.whole), self.dictionary_id):
            self._look(_core.make_views(*frames), places.whole.tolist(), where)
        threads = min(self.threads, 1 + int(places.whole.sum()) // _EXPANDED_ALONE)
        runs = places.runs(threads)

        def work(mine: Iterator[Run]) -> None:
            expander = _lent(self._expanders, self._expander)
            try:
                for run in mine:
                    expander.expand(run, runs, places, where)
            finally:
                self._expanders.append(expander)

        _in_threads(work, runs.all, min(threads, len(runs.all)))

    @staticmethod
    def train(samples: Sequence[Buffer], nbytes: int, level: int = 3) -> bytes:
        """Trains a dictionary of ``nbytes`` bytes. Cost: 0.1 s per megabyte of samples.

        Raises ValueError if the dictionary is too small, or if there are too few samples.
        """
        if nbytes < _LEAST_DICTIONARY:
            raise ValueError(
                f"a dictionary must have at least {_LEAST_DICTIONARY} bytes, got {nbytes!r}"
            )
        step = max(1, sum(map(len, samples)) // (_LEARNT * nbytes))
        try:
            trained = zstandard.train_dictionary(
                nbytes, [bytes(sample) for sample in samples[::step]], level=level
            )
        except zstandard.ZstdError as error:
            raise ValueError(
                f"no dictionary of {nbytes} bytes can be trained on {len(samples)} samples of "
                f"{sum(map(len, samples))} bytes in total ({error}); use no dictionary, or use "
                f"more samples: {_LEARNT} times the size of the dictionary is recommended"
            ) from error
        return trained.as_bytes()

    def _load(self, dictionary: bytes) -> zstandard.ZstdCompressionDict:
        try:
            loaded = zstandard.ZstdCompressionDict(
                dictionary, dict_type=zstandard.DICT_TYPE_FULLDICT
            )
            loaded.precompute_compress(level=self.level)
        except zstandard.ZstdError as error:
            raise CorruptBufferError(
                f"a dictionary of {len(dictionary)} bytes is not a zstd dictionary ({error}); "
                "restore it from a copy of the directory, because frames that were compressed with "
                "it cannot be read without it"
            ) from error
        self.dictionary_id = loaded.dict_id()
        return loaded

    def _compressor(self) -> zstandard.ZstdCompressor:
        return zstandard.ZstdCompressor(level=self.level, dict_data=self._dictionary)

    def _expander(self) -> _Expander:
        return _Expander(zstandard.ZstdDecompressor(dict_data=self._dictionary))

    def _look(self, sources: Sequence[Buffer], sizes: list[int], where: str) -> None:
        """Checks the headers of all frames, before any frame is expanded.

        Raises CorruptBufferError for the first frame whose header does not match.
        """
        known, parameters = (0, self.dictionary_id), zstandard.get_frame_parameters
        for at, (source, size) in enumerate(zip(sources, sizes, strict=True)):
            if not size:
                if len(source):
                    _damaged(where, [at], f"it contains {len(source)} bytes for an empty piece")
                continue
            try:
                says = parameters(source)
            except zstandard.ZstdError as error:
                _damaged(where, [at], str(error), error)
            if says.dict_id not in known:
                self._refuse(where, at, says.dict_id)
            if says.content_size == zstandard.CONTENTSIZE_UNKNOWN:
                _damaged(where, [at], "its frame does not contain its size")
            if says.content_size != size:
                _damaged(where, [at], f"it contains {says.content_size} bytes instead of {size}")

    def _refuse(self, where: str, at: int, dictionary_id: int) -> NoReturn:
        loaded = f"dictionary {self.dictionary_id}" if self.dictionary_id else "no dictionary"
        raise UnknownDictionaryError(
            f"{where}: compressed piece {at} needs dictionary {dictionary_id}, but {loaded} is "
            "loaded; read the buffer through the storage that has its directory",
            path=where,
            dictionary_id=dictionary_id,
        )


def _lent(idle: list[Context], make: Callable[[], Context]) -> Context:
    """Removes a context from ``idle`` and returns it, or creates one if none is idle."""
    try:
        return idle.pop()
    except IndexError:
        return make()


class _Expander:
    """Expands runs of frames, either directly to their destinations or through a buffer."""

    def __init__(self, codec: zstandard.ZstdDecompressor) -> None:
        self._codec = codec
        self._memory = np.empty(0, np.uint8)

    def expand(self, run: Run, runs: Runs, places: Places, where: str) -> None:
        """Expands the frames of a run to their destinations.

        Raises CorruptBufferError if a frame is damaged.
        """
        frames = range(run.first, run.end)
        if run.other:
            for some, into in ((frames[::2], run.into), (frames[1::2], run.other)):
                self._read(some, places, writable(into, run.size // 2), where)
            _core.deinterleave(run.into, run.other, run.size // len(frames) // 2, len(frames))
            return
        if run.into:
            self._read(frames, places, writable(run.into, run.size), where)
            return
        memory = self._memory
        if len(memory) < run.size:
            memory = np.empty(run.size, np.uint8)
            if run.size <= _KEPT_BYTES:
                self._memory = memory
        self._read(frames, places, memory.data[: run.size], where)
        runs.move(run, address(memory))

    def _read(self, frames: range, places: Places, out: memoryview, where: str) -> None:
        try:
            stream = self._codec.stream_reader(places.source(frames), read_across_frames=True)
            written = stream.readinto(out)
            written += len(stream.read(1))  # detects more data than expected
        except (zstandard.ZstdError, ValueError) as error:
            self._find(frames, places, where)
            _damaged(where, frames, str(error), error)
        if written != len(out):
            self._find(frames, places, where)
            words = f"at least {written} bytes were decompressed instead of {len(out)}"
            _damaged(where, frames, words)

    def _find(self, frames: range, places: Places, where: str) -> None:
        """Expands each frame separately, so that the error names the damaged one.

        Returns if there is only one frame, or if every frame is valid by itself.
        """
        for at in frames if len(frames) > 1 else ():
            if places.stored[at]:
                room = memoryview(bytearray(int(places.whole[at])))
                self._read(range(at, at + 1), places, room, where)


def _damaged(
    where: str, frames: Sequence[int], found: str, error: Exception | None = None
) -> NoReturn:
    which = f"piece {frames[0]}" if len(frames) == 1 else f"pieces {frames[0]} to {frames[-1]}"
    raise CorruptBufferError(
        f"{where}: compressed {which} cannot be decompressed: {found}. The data are damaged or "
        "were not compressed with zstd; restore the buffer from a copy",
        path=where,
    ) from error


def _in_threads(work: Callable[[Iterator[Any]], None], items: Iterable[Any], count: int) -> None:
    """Runs ``work`` in ``count`` threads, which take their items from one iterator.

    Returns when all threads have ended, and raises the first of their errors. Threads are started
    with `_thread`, because `threading.Thread` waits until the new thread is running.
    """
    left = iter(items)  # next() is atomic, so each item is processed once
    errors: list[BaseException] = []

    def stop(error: BaseException) -> None:
        errors.append(error)
        for _ in left:  # removes the remaining items, so that the other threads stop
            pass

    def run() -> None:
        try:
            work(left)
        except BaseException as error:  # raised again when all threads have ended
            stop(error)

    started: list[_Ended] = []
    for _ in range(count - 1):
        ended = _Ended()
        try:
            _thread.start_new_thread(ended.after, (run,))
        except RuntimeError:  # no more threads can be started: the existing ones do the work
            break
        started.append(ended)
    run()
    for ended in started:
        while not ended.now:
            try:
                ended.wait()
            except KeyboardInterrupt as error:  # raised after the thread has ended
                stop(error)
    if errors:
        raise errors[0]


class _Ended:
    """Signals the end of a thread to another thread that waits for it."""

    def __init__(self) -> None:
        self.now = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def after(self, run: Callable[[], None]) -> None:
        """Calls ``run`` in the new thread, and then signals that the thread has ended."""
        try:
            run()
        finally:
            self.now = True
            self._lock.release()

    def wait(self) -> None:
        """Waits until the thread has ended."""
        self._lock.acquire()
