"""Measures operations with each available library, in turn."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.items import Kind
from benchmarks.library import MEMMAP, Library, Operation
from benchmarks.measure import Contender, Load, Series, interleave


@dataclass(frozen=True)
class Setting:
    """Settings of a run.

    Attributes:
        libraries: the compared libraries, shmbuffer first.
        kind: kind of the items.
        capacity: capacity of the buffers, which are full.
        records: capacity of buffers whose items differ in size.
        rounds: number of rounds.
        blocks: number of blocks per round.
        block_s: length of a block in seconds.
        contest_s: length of a round with writers in seconds.
        calls: number of calls per round that are timed one by one to find the slowest.
        directory: directory of the buffers.
        load: load by other programs, recorded during the rounds.
    """

    libraries: Sequence[Library]
    kind: Kind
    capacity: int
    records: int
    rounds: int
    blocks: int
    block_s: float
    contest_s: float
    calls: int
    directory: Path
    load: Load = field(default_factory=Load)

    @contextmanager
    def open(
        self,
        library: Library,
        *,
        prioritized: bool = False,
        recording: str | None = None,
        storage: str = MEMMAP,
    ) -> Iterator[bool]:
        """Opens a full buffer of a library, and removes its files at the end of the context.

        Yields False if the library has no such buffers.

        Args:
            library: the library.
            prioritized: True for a buffer that samples by priority.
            recording: the stored items if they differ in size.
            storage: kind of the storage.
        """
        directory = tempfile.mkdtemp(dir=self.directory, prefix=f"{library.name}-")
        try:
            name, capacity = self.kind.name, self.capacity
            if recording is not None:
                name, capacity = recording, self.records
            yield library.open(directory, name, capacity, prioritized, storage)
        finally:
            try:
                library.close()
            finally:
                shutil.rmtree(directory)

    def open_all(self, stack: ExitStack, *, prioritized: bool) -> list[Library]:
        """Opens full buffers of all libraries that have such buffers, until ``stack`` ends."""
        return [
            library
            for library in self.libraries
            if stack.enter_context(self.open(library, prioritized=prioritized))
        ]

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yields an empty directory, and removes it at the end of the context."""
        with tempfile.TemporaryDirectory(dir=self.directory, ignore_cleanup_errors=True) as path:
            yield Path(path)


def compare(
    setting: Setting, operations: Mapping[Operation, str], *, prioritized: bool
) -> list[Series]:
    """Measures each operation with each library that has it; the values are titles."""
    with ExitStack() as stack:
        libraries = setting.open_all(stack, prioritized=prioritized)
        contenders = [
            _contender(setting, library, operation, name)
            for operation, name in operations.items()
            for library in libraries
            if library.prepare(operation, setting.block_s)
        ]
        return interleave(setting.rounds, contenders, setting.load)


def _contender(setting: Setting, library: Library, operation: Operation, name: str) -> Contender:
    series = Series(name, library.name, operation.form, "s")
    measure = partial(library.round, operation, setting.blocks)
    return Contender((series,), lambda: [measure()])
