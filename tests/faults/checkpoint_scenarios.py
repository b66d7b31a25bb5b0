"""Saves and loads under faults: the previous save or the new one is present, never a part."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer._native import _core
from shmbuffer.saves import publication
from shmbuffer.saves.export import export
from shmbuffer.saves.saved_parts import PARTS
from tests.crash.harness import ended, fork
from tests.faults.audit import files_below
from tests.faults.scenario import Scenario

CAPACITY = 8


def items(first: int, stop: int) -> TensorDict:
    """Makes items whose leaves encode the item's number in different ways."""
    n = torch.arange(first, stop)
    return TensorDict({"a": n, "b": {"c": n[:, None].repeat(1, 3).float() / 4}}, [len(n)])


def numbers(buffer: TensorDictPrioritizedReplayBuffer) -> list[int]:
    """Returns the numbers of the items; all leaves of an item must agree."""
    if len(buffer) == 0:
        return []
    data = buffer[:]
    assert torch.equal(data["b", "c"], data["a"][:, None].repeat(1, 3).float() / 4)
    found: list[int] = data["a"].tolist()
    return sorted(found)


#: The file that shows that a save is present, for each layout.
IS_SAVED = (f"storage/{PARTS}", "buffer_metadata.json")
BEFORE, NOW = list(range(3, 11)), list(range(5, 13))


class Save(Scenario):
    """A buffer in memory is saved to a new directory."""

    #: Contents that a new process may load, or None if there may be nothing to load.
    saved: tuple[list[int] | None, ...] = (None, BEFORE)
    layout = "shmbuffer"
    files = frozenset({"storage/b/c.memmap", f"storage/{PARTS}/writer.jsonl"})

    def prepare(self) -> None:
        self.target = self.folder / "save"
        self.buffer = self.made()
        self.buffer.extend(items(0, 11))

    def made(self) -> TensorDictPrioritizedReplayBuffer:
        storage: Any = LazyTensorStorage(CAPACITY)
        if self.kind == "records":
            storage = LazyStackStorage(CAPACITY)
        return TensorDictPrioritizedReplayBuffer(storage=storage, alpha=0.7, beta=0.4, batch_size=4)

    def act(self) -> None:
        self.buffer.dumps(self.target, layout=self.layout)

    def again(self) -> None:
        assert numbers(self.buffer) == self.saved[-1]
        self.require_a_save()
        self.act()
        self.saved = self.saved[-1:]
        self.require_a_save()

    def require_a_save(self) -> None:
        target = self.folder / "save"
        if None in self.saved and not any((target / name).exists() for name in IS_SAVED):
            return
        other = self.made()
        other.loads(target)
        assert numbers(other) in self.saved
        other.extend(items(20, 21))
        other.close()

    def is_done(self) -> bool:
        self.saved = self.saved[-1:]
        self.require_a_save()
        return self.kind == "records" or self.files <= {*files_below(self.folder / "save")}

    def stop(self) -> None:
        # This removes what an interrupted save has left.
        self.buffer.dumps(self.target, layout=self.layout)
        self.buffer.close()
        self.remove()

    def look_afterwards(self) -> None:
        self.require_a_save()
        fresh = self.made()  # the next save removes what the dead process left
        fresh.extend(items(0, 2))
        fresh.dumps(self.folder / "save", layout=self.layout)
        fresh.close()
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.folder / "save")
        left = files_below(self.folder)
        assert left == ["tmp/"], left


class SaveAgain(Save):
    """A save replaces another one."""

    saved = (BEFORE, NOW)

    def prepare(self) -> None:
        super().prepare()
        super().act()
        self.buffer.extend(items(11, 13))


class SaveWithoutExchange(SaveAgain):
    """A save replaces another one on a file system that cannot exchange two directories."""

    def act(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publication, "exchange", lambda *_: False)
            super().act()


class SaveForTorchRL(SaveAgain):
    """A save in TorchRL's layout replaces another one."""

    layout = "torchrl"
    files = frozenset({"sampler/mintree.memmap", "storage/b/c.memmap", "writer/metadata.json"})


class Load(Save):
    """A save is loaded into a buffer that has other items."""

    saved = (BEFORE,)

    def prepare(self) -> None:
        super().prepare()
        self.buffer.dumps(self.target)
        self.other = self.made()
        self.other.extend(items(50, 53))

    def act(self) -> None:
        self.other.loads(self.target)

    def is_done(self) -> bool:
        return numbers(self.other) == BEFORE

    def again(self) -> None:
        assert {*numbers(self.other)} <= {50, 51, 52, *BEFORE}  # a load into memory is not atomic
        self.act()
        assert numbers(self.other) == BEFORE
        self.other.extend(items(60, 61))
        assert numbers(self.other) == [*BEFORE[1:], 60]

    def stop(self) -> None:
        self.other.close()
        super().stop()


class LoadInPlace(Load):
    """A save is loaded into a buffer in a directory, which other processes may have open."""

    def prepare(self) -> None:
        super().prepare()
        self.other.close()
        path = self.folder / "buffer"
        storage: Any = LazyMemmapStorage(CAPACITY, scratch_dir=path)
        if self.kind == "records":
            storage = LazyStackStorage(CAPACITY, max_bytes=2**16, scratch_dir=path)
        self.other = TensorDictPrioritizedReplayBuffer(
            storage=storage, alpha=0.7, beta=0.4, batch_size=4
        )
        self.other.extend(items(50, 53))

    def remove(self) -> None:
        shutil.rmtree(Path(self.folder, "buffer"))
        super().remove()


class Scale(torch.nn.Module):
    """A transform that has a state and does nothing else."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, data: Any) -> Any:
        return data


class Transformed:
    """Mixin for a buffer whose transform has a state, which is saved with the buffer."""

    def made(self) -> TensorDictPrioritizedReplayBuffer:
        storage: Any = LazyTensorStorage(CAPACITY)
        return TensorDictPrioritizedReplayBuffer(
            storage=storage, alpha=0.7, beta=0.4, batch_size=4, transform=Scale(3.0)
        )


class SaveTransformed(Transformed, Save):
    """A buffer with a transform is saved."""


class LoadTransformed(Transformed, Load):
    """A buffer with a transform is loaded."""


class Packed:
    """Mixin for a buffer of records in its own directory."""

    folder: Path

    def made(self) -> TensorDictPrioritizedReplayBuffer:
        path = Path(tempfile.mkdtemp(), "ring")
        storage: Any = LazyStackStorage(CAPACITY, max_bytes=2**16, scratch_dir=path)
        return TensorDictPrioritizedReplayBuffer(storage=storage, alpha=0.7, beta=0.4, batch_size=4)

    def remove(self) -> None:
        for path in Path(self.folder, "tmp").iterdir():
            shutil.rmtree(path)
        super().remove()  # type: ignore[misc]


class SavePacked(Packed, Save):
    """A ring of records is saved without changing its layout."""

    files = frozenset({"storage/.shmbuffer/records", f"storage/{PARTS}/writer.jsonl"})


class LoadPacked(Packed, Load):
    """A save of a ring of records is loaded."""


class LoadMovedBack(Load):
    """A save is loaded that a killed process had moved away in order to replace it."""

    def prepare(self) -> None:
        super().prepare()

        def victim() -> None:
            publication.exchange = lambda *_: False  # type: ignore[assignment]
            _core.arm("save.moved away")
            self.buffer.dumps(self.target)

        assert ended(fork(victim)) == -signal.SIGKILL


class SaveInPlace(Save):
    """A buffer is saved beside its own files, which stay where they are."""

    saved = (BEFORE,)

    def made(self) -> TensorDictPrioritizedReplayBuffer:
        storage: Any = LazyMemmapStorage(
            CAPACITY, scratch_dir=self.folder / "save" / "storage", existsok=True
        )
        return TensorDictPrioritizedReplayBuffer(storage=storage, alpha=0.7, beta=0.4, batch_size=4)

    def require_a_save(self) -> None:
        other = self.made()
        if (self.folder / "save" / IS_SAVED[0]).exists():
            other.loads(self.folder / "save")
        assert numbers(other) == BEFORE  # the files do not depend on the description
        other.close()

    def is_done(self) -> bool:
        self.require_a_save()
        return (self.folder / "save" / IS_SAVED[0] / "writer.jsonl").exists()

    def look_afterwards(self) -> None:
        self.require_a_save()
        fresh = self.made()
        fresh.dumps(self.folder / "save")
        fresh.close()
        self.remove()


class SaveMembers(Scenario):
    """An ensemble is saved and loaded with the states of its transforms."""

    def prepare(self) -> None:
        self.ensemble = self.made(5)

    def made(self, count: int) -> ReplayBufferEnsemble:
        parts = [
            TensorDictReplayBuffer(
                storage=LazyTensorStorage(CAPACITY), batch_size=2, transform=Scale(factor)
            )
            for factor in (3.0, 4.0)
        ]
        for part in parts:
            part.extend(items(0, count))
        return ReplayBufferEnsemble(*parts, batch_size=4)

    def act(self) -> None:
        self.ensemble.dumps(self.folder / "save")
        self.require_a_save()

    def require_a_save(self) -> None:
        other = self.made(1)
        other.loads(self.folder / "save")
        for member in other.storage._members:
            assert member[:]["a"].tolist() == list(range(5))
            assert torch.equal(member[:]["b", "c"], items(0, 5)["b", "c"])

    def is_done(self) -> bool:
        self.require_a_save()
        return True

    def stop(self) -> None:
        self.act()
        self.remove()

    def look_afterwards(self) -> None:
        self.prepare()
        self.act()
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.folder / "save")
        left = files_below(self.folder)
        assert left == ["tmp/"], left


class Export(Scenario):
    """Items are exported to a new Parquet file."""

    def prepare(self) -> None:
        self.storage = LazyTensorStorage(CAPACITY)
        self.storage.set(range(5), items(0, 5))

    def act(self) -> None:
        assert export(self.storage, self.folder / "parquet", "parquet") == 5

    def again(self) -> None:
        (self.folder / "parquet").unlink(missing_ok=True)
        self.act()

    def is_done(self) -> bool:
        return (self.folder / "parquet").stat().st_size > 0

    def stop(self) -> None:
        self.again()  # removes what the failed export left
        self.remove()

    def look_afterwards(self) -> None:
        self.prepare()
        self.stop()

    def remove(self) -> None:
        assert files_below(self.folder) == ["parquet", "tmp/"]


SCENARIOS: dict[str, type[Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        *(Save, SaveAgain, SaveWithoutExchange, SaveForTorchRL, SavePacked),
        *(Load, LoadInPlace, LoadMovedBack, LoadPacked),
        *(SaveTransformed, LoadTransformed, SaveInPlace, SaveMembers, Export),
    )
}
