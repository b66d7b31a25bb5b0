"""How many items of any size can be written and sampled per second, and how small are they?

Frames are compressed, and sequences of 10 to 10,000 tokens are not. "private" is a list in one
process, "shared" a byte ring in a directory with checksums. torchrl has only private storages. Its
`CompressedListStorage` uses zlib up to Python 3.13, so it is also measured with zstandard as its
``compression_fn``. All libraries compress at the same level.

A lazy stack has not been read yet when it is returned. Batches are therefore also measured with all
entries read: frames as one tensor, sequences as lists of tensors, padded with a mask, or nested.
zstandard alone is measured with the same frames and number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import zstandard

from benchmarks.comparison import Setting
from benchmarks.library import (
    AS_IT_COMES,
    COMPRESSED,
    GIVEN_ZSTD,
    LAZY_STACK,
    LEVEL,
    LISTED,
    NESTED,
    PADDED,
    READ,
    Library,
    Operation,
)
from benchmarks.measure import Contender, Series, Timed, interleave
from benchmarks.ours import ShmBuffer
from benchmarks.recordings import RECORDINGS, STACKS
from shmbuffer.items.records.compression import Zstd

ITEMS = ("S",)  # in name only: it stores records
COUNTS = (32, 256)
PRIVATE, SHARED = "private", "shared"
_ADDING = {Operation("add", 1): "add(1)"}

Runner = tuple[str, Library, str]
"""A compared buffer: its form in the table, the library and the storage."""


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    private, shared = ShmBuffer(shared=False), ShmBuffer(shared=True)
    peers = [library for library in setting.libraries if library.name == "torchrl"]
    counts = sorted({min(count, setting.records) for count in COUNTS})
    most = counts[-1]
    ours = [(PRIVATE, private, COMPRESSED), (SHARED, shared, COMPRESSED)]
    theirs = [(PRIVATE, peer, COMPRESSED) for peer in peers]
    found = _measured(
        setting,
        "frames",
        [*ours, *theirs],
        {**_ADDING, **_writing(counts), **_drawing(counts, AS_IT_COMES, READ)},
        shrinks=True,
    )
    at_most = {**_writing([most]), **_drawing([most], READ)}
    given = [(f"{PRIVATE}, given zstd", peer, GIVEN_ZSTD) for peer in peers]
    if given:
        found += _measured(setting, "frames, zstd in both", [*ours, *given], at_most, shrinks=True)
    with _alone(setting) as alone:
        every = {**_writing(counts), **_drawing(counts, READ)}
        for recording in ("frames", "channels last"):
            beside = f"{recording}, beside zstd alone"
            found += _measured(setting, beside, ours, every, beside=alone)
    runners = [(form, library, LAZY_STACK) for form, library, _ in [*ours, *theirs]]
    reading = _drawing(counts, AS_IT_COMES, LISTED, PADDED, NESTED)
    writing = {**_ADDING, **_writing(counts)}
    found += _measured(setting, "sequences", runners, {**writing, **reading})
    return found


def _writing(counts: Sequence[int]) -> dict[Operation, str]:
    return {Operation("extend", count): f"extend({count})" for count in counts}


def _drawing(counts: Sequence[int], *forms: str) -> dict[Operation, str]:
    return {
        Operation("sample", count, form): f"sample({count}), {form}"
        for form in forms
        for count in counts
    }


def _measured(
    setting: Setting,
    recording: str,
    runners: Sequence[Runner],
    operations: dict[Operation, str],
    *,
    shrinks: bool = False,
    beside: Callable[[Operation, str], Contender] | None = None,
) -> list[Series]:
    """Measures each operation with each library in turn.

    Args:
        setting: settings of the run.
        recording: title, whose first word is the kind of the items.
        runners: compared buffers.
        operations: operations with their titles.
        shrinks: if True, the compression ratios are measured too.
        beside: returns a further contender for an operation and a title.
    """
    with ExitStack() as stack:
        for _, library, storage in runners:
            what = recording.partition(",")[0]
            stack.enter_context(setting.open(library, recording=what, storage=storage))
        contenders = []
        if shrinks:
            title = f"{recording}: times smaller"
            contenders += [_shrinking(library, title, form) for form, library, _ in runners]
        for operation, name in operations.items():
            title = f"{recording}: {name}"
            for form, library, _ in runners:
                if library.prepare(operation, setting.block_s):
                    contenders.append(_contender(setting, library, operation, title, form))
            if beside is not None:
                contenders.append(beside(operation, title))
        return interleave(setting.rounds, contenders, setting.load)


def _contender(
    setting: Setting, library: Library, operation: Operation, title: str, form: str
) -> Contender:
    measure = partial(library.round, operation, setting.blocks)
    return Contender(
        (Series(title, library.name, form, "1/s"),),
        lambda: [[operation.count / took for took in measure()]],
    )


def _shrinking(library: Library, title: str, form: str) -> Contender:
    found = library.shrinks()  # now, while all of them have the same items
    return Contender((Series(title, library.name, form, "x"),), lambda: [[found]])


@contextmanager
def _alone(setting: Setting) -> Iterator[Callable[[Operation, str], Contender]]:
    """Measures zstandard alone, which compresses both stacks of each item together.

    A storage does the same, for any layout. The number of threads is that of a storage, and they
    wait for the next call. Small entries are left out.
    """

    def batches_of(count: int) -> list[list[bytes]]:
        return [
            [
                b"".join([np.asarray(stack).tobytes() for stack in stacks])
                for stacks in zip(*[batch[key] for key in STACKS], strict=True)
            ]
            for batch in RECORDINGS["frames"].batches(count, "TensorDict")
        ]

    threads = Zstd(LEVEL).threads
    codecs = threading.local()

    def begin() -> None:
        codecs.compressor = zstandard.ZstdCompressor(LEVEL)
        codecs.expander = zstandard.ZstdDecompressor()

    def compress(pieces: Sequence[Any]) -> list[bytes]:
        return [codecs.compressor.compress(piece) for piece in pieces]

    def expand(pieces: Sequence[Any]) -> None:
        for content, place in pieces:
            codecs.expander.stream_reader(content).readinto(place)

    with ThreadPoolExecutor(threads, initializer=begin) as pool:

        def shared_out(work: Callable[[Sequence[Any]], Any], pieces: Sequence[Any]) -> None:
            for _ in pool.map(work, [pieces[at::threads] for at in range(threads)]):
                pass

        codec = zstandard.ZstdCompressor(LEVEL)

        def contender(operation: Operation, title: str) -> Contender:
            writes, count = operation.call == "extend", operation.count
            batches = batches_of(count)
            places = [memoryview(bytearray(len(piece))) for piece in batches[0]]
            contents = [
                list(zip(map(codec.compress, pieces), places, strict=True)) for pieces in batches
            ]
            timed = Timed(
                partial(shared_out, compress if writes else expand),
                [(pieces,) for pieces in (batches if writes else contents)],
                setting.block_s,
            )
            return Contender(
                (Series(title, "zstandard", f"alone, {threads} threads", "1/s"),),
                lambda: [[count / took for took in timed.blocks(setting.blocks)]],
            )

        yield contender
