"""One operation, or several, by every library that is at hand, in turn."""

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
    """What a run is made with.

    Attributes:
        libraries: ours first.
        kind: of the items.
        capacity: of the buffers; they are full.
        records: capacity of those whose items differ in size.
        rounds: how often everybody is measured.
        blocks: in a round.
        block_s: how long a block is.
        contest_s: how long a round with writers is.
        calls: timed one by one, in a round, where the tail is asked for.
        directory: where the buffers are.
        load: filled by the measuring.
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
        """A full buffer of a library, for a while; its files are removed afterwards.

        False stands for it where the library has no such buffers.

        Args:
            library: whose.
            prioritized: whether it draws by priority.
            recording: what is stored where the items differ in size.
            storage: of the buffer.
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
        """Full buffers of all libraries that have such ones, until ``stack`` ends."""
        return [
            library
            for library in self.libraries
            if stack.enter_context(self.open(library, prioritized=prioritized))
        ]

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory, for a while."""
        with tempfile.TemporaryDirectory(dir=self.directory, ignore_cleanup_errors=True) as path:
            yield Path(path)


def compare(
    setting: Setting, operations: Mapping[Operation, str], *, prioritized: bool
) -> list[Series]:
    """Every operation, under the name given for it, by every library that has it."""
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
