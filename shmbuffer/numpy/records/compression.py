"""zstd for the pieces of a batch, all in one call, in threads that live as long as the call.

A context (zstd's tables, some 100 KB) is made once and lent from call to call; from a megabyte on
a call's threads have their own. To start a thread takes less than zstd needs for 64 KiB, and a
process that forks has none of them. zstd runs without the GIL, and to take it again costs more than
a small piece: so neighbouring pieces are expanded in one step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeVar

import zstandard

from shmbuffer.errors import CorruptBufferError
from shmbuffer.numpy.records.views import address_of, writable

_MAX_THREADS = 4
_ALONE_BYTES = 2**20  # work that one thread does in the time that another takes to start and end
_BLOCK_BYTES = 2**18  # what a thread takes at a time: threads end within its time of each other
_DIRECT_BYTES = 2**15  # from here on, setting up a stream costs less than a copy

#: Whether zstandard has its threads; where it is not written in C, it has not.
_HAS_THREADS = "multi_compress_to_buffer" in zstandard.backend_features

_LEAST_DICTIONARY = 256  # zstd makes none that is smaller
_LEARNT = 100  # as many times the size of a dictionary is worth looking at

Buffer = bytes | memoryview
Destination = memoryview | list[memoryview]
"""Where the bytes of a frame go: to one place, or part by part to several."""
Context = TypeVar("Context")


class UnknownDictionaryError(CorruptBufferError):
    """A frame needs a dictionary that is not known here. Attributes: ``dictionary_id``."""


class Zstd:
    """Compresses and expands batches of pieces. Any number of threads may use it at once.

    Args:
        level: of zstd, 1 (fast) to 22 (small).
        dictionary: from `train`; None: none. Frames that were made without it can be read with it.
        threads: of a call, the caller's among them; None: one for each CPU that this process may
            use, up to 4. Small batches are done by the caller alone.

    Raises:
        ValueError: another level, or no threads.
        CorruptBufferError: ``dictionary`` is invalid.
    """

    def __init__(
        self, level: int = 3, *, dictionary: bytes | None = None, threads: int | None = None
    ) -> None:
        if level not in range(1, 23):
            raise ValueError(f"compression_level is a level of zstd, 1 to 22, got {level!r}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads counts the caller too, so it is 1 or more, got {threads!r}")
        self.level = int(level)
        self.dictionary_id = 0
        self.threads = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._dictionary = None if dictionary is None else self._load(dictionary)
        # Lent to one thread at a time.
        self._compressors: list[zstandard.ZstdCompressor] = []
        self._decompressors: list[zstandard.ZstdDecompressor] = []

    def compress(self, pieces: Sequence[Buffer]) -> list[bytes]:
        """Each piece as a frame that knows its size, empty ones as no bytes. Cost: 1 µs a piece."""
        whole: list[Any] = [piece for piece in pieces if len(piece)]
        total = sum(map(len, whole))
        codec = _lent(self._compressors, self._compressor)
        try:
            if total < _ALONE_BYTES or not _HAS_THREADS:
                frames = [codec.compress(piece) for piece in whole]
            else:
                threads = min(self.threads, 1 + total // _ALONE_BYTES)
                found: Any = codec.multi_compress_to_buffer(whole, threads=threads)
                frames = [frame.tobytes() for frame in found]
        finally:
            self._compressors.append(codec)
        if len(whole) == len(pieces):
            return frames
        left = iter(frames)
        return [next(left) if len(piece) else b"" for piece in pieces]

    def expand(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Destination],
        where: str = "a batch of records",
    ) -> None:
        """Writes what each frame holds to its destination. Cost: that of zstd, and 1 µs a piece."""
        places = [one if isinstance(one, list) else [one] for one in destinations]
        sizes = [sum(map(len, parts)) for parts in places]
        self._look(sources, sizes, where)
        runs = _runs(places, sizes)

        def work(mine: Iterator[range]) -> None:
            codec = _lent(self._decompressors, self._decompressor)
            try:
                for run in mine:
                    _expand(codec, run, sources, places, sizes, where)
            finally:
                self._decompressors.append(codec)

        total = sum(sizes)
        if total < _ALONE_BYTES or self.threads == 1:
            work(iter(runs))
        else:
            _in_threads(work, runs, min(self.threads, len(runs), 1 + total // _ALONE_BYTES))

    @staticmethod
    def train(samples: Sequence[Buffer], nbytes: int, level: int = 3) -> bytes:
        """A dictionary of what many samples have in common. Cost: 0.1 s a megabyte of samples."""
        if nbytes < _LEAST_DICTIONARY:
            raise ValueError(f"a dictionary has {_LEAST_DICTIONARY} bytes or more, got {nbytes!r}")
        step = max(1, sum(map(len, samples)) // (_LEARNT * nbytes))
        try:
            trained = zstandard.train_dictionary(
                nbytes, [bytes(sample) for sample in samples[::step]], level=level
            )
        except zstandard.ZstdError as error:
            raise ValueError(
                f"no dictionary of {nbytes} bytes can be learned from {len(samples)} samples of "
                f"{sum(map(len, samples))} bytes together ({error}); use none, or more samples: "
                f"{_LEARNT} times its size is good"
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
                f"a dictionary of {len(dictionary)} bytes is not one of zstd ({error}); restore it "
                "from a copy of the directory: frames that were made with it need it"
            ) from error
        self.dictionary_id = loaded.dict_id()
        return loaded

    def _compressor(self) -> zstandard.ZstdCompressor:
        return zstandard.ZstdCompressor(level=self.level, dict_data=self._dictionary)

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        return zstandard.ZstdDecompressor(dict_data=self._dictionary)

    def _look(self, sources: Sequence[Buffer], sizes: list[int], where: str) -> None:
        """Compares what frames say of themselves, before anything is done for it."""
        known, parameters = (0, self.dictionary_id), zstandard.get_frame_parameters
        for at, (source, size) in enumerate(zip(sources, sizes, strict=True)):
            one = range(at, at + 1)
            if not size:
                if len(source):
                    _damaged(where, one, f"{len(source)} bytes for a piece without any")
                continue
            try:
                says = parameters(source)
            except zstandard.ZstdError as error:
                _damaged(where, one, str(error), error)
            if says.dict_id not in known:
                self._refuse(where, at, says.dict_id)
            if says.content_size != size:
                _damaged(where, one, f"{says.content_size} bytes where {size} belong")

    def _refuse(self, where: str, at: int, dictionary_id: int) -> NoReturn:
        loaded = f"dictionary {self.dictionary_id}" if self.dictionary_id else "none"
        raise UnknownDictionaryError(
            f"{where}: compressed piece {at} was made with dictionary {dictionary_id}, and "
            f"{loaded} is loaded here; read the buffer through the storage that has its directory",
            path=where,
            dictionary_id=dictionary_id,
        )


def _lent(idle: list[Context], make: Callable[[], Context]) -> Context:
    """A context that nobody uses, or a new one."""
    try:
        return idle.pop()
    except IndexError:
        return make()


def _runs(places: Sequence[list[memoryview]], sizes: list[int]) -> list[range]:
    """Pieces that are expanded as one: neighbours in memory, and those that go there in parts."""
    runs: list[range] = []
    start = end = held = 0
    for at, (parts, size) in enumerate(zip(places, sizes, strict=True)):
        here = address_of(parts[0]) if size else 0
        apart = len(parts) == 1 and here != end
        if held and (held >= _BLOCK_BYTES or not size or apart):
            runs.append(range(start, at))
            held = 0
        if not held:
            start = at
        end = here + len(parts[0]) if len(parts) == 1 else 0
        held += size
    if held:
        runs.append(range(start, len(sizes)))
    return runs


def _expand(
    codec: zstandard.ZstdDecompressor,
    run: range,
    sources: Sequence[Buffer],
    places: Sequence[list[memoryview]],
    sizes: list[int],
    where: str,
) -> None:
    first, end = run[0], run[-1] + 1
    try:
        if len(run) == 1 and sizes[first] < _DIRECT_BYTES and len(places[first]) == 1:
            places[first][0][:] = codec.decompress(sources[first])
            return
        size = sum(sizes[first:end])
        source = sources[first] if len(run) == 1 else b"".join(sources[first:end])
        stream = codec.stream_reader(source, read_across_frames=True)
        written = sum(map(stream.readinto, _neighbours(places[first:end])))
        written += len(stream.read(1))  # a frame too many would stand where others belong
    except (zstandard.ZstdError, ValueError) as error:
        _damaged(where, run, str(error), error)
    if written != size:
        _damaged(where, run, f"{written} bytes or more where {size} belong")


def _neighbours(places: Sequence[list[memoryview]]) -> Iterator[memoryview]:
    """The places in order; as one those that lie one behind the other."""
    start = end = 0
    for place in chain.from_iterable(places):
        here = address_of(place)
        if here != end:
            if end > start:
                yield writable(start, end - start)
            start = here
        end = here + len(place)
    if end > start:
        yield writable(start, end - start)


def _damaged(where: str, run: range, found: str, error: Exception | None = None) -> NoReturn:
    which = f"piece {run[0]}" if len(run) == 1 else f"pieces {run[0]} to {run[-1]}"
    raise CorruptBufferError(
        f"{where}: compressed {which} cannot be expanded: {found}. It was not compressed with "
        "zstd, or its bytes are damaged",
        path=where,
    ) from error


def _in_threads(work: Callable[[Iterator[range]], None], runs: list[range], count: int) -> None:
    """Runs ``work`` in threads on one iterator; all have ended when it returns or raises."""
    left = iter(runs)  # the next of a list is one step: each run goes to one thread
    errors: list[BaseException] = []

    def stop(error: BaseException) -> None:
        errors.append(error)
        for _ in left:  # the others find nothing to do
            pass

    def run() -> None:
        try:
            work(left)
        except BaseException as error:  # raised again below, by the caller
            stop(error)

    started = []
    for _ in range(count - 1):
        thread = threading.Thread(target=run, name="shmbuffer-zstd")
        try:
            thread.start()
        except RuntimeError:  # there can be no more of them: those that run do it all
            break
        started.append(thread)
    run()
    for thread in started:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as error:  # raised when the thread has done its run
                stop(error)
    if errors:
        raise errors[0]
