"""Cases of the conformance tests: each storage, sampler and writer, private or in a directory.

The tests themselves are in ``test_conformance_*.py``. Each test states one behaviour that a TorchRL
user relies on, and checks it by value for every combination that is allowed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from tensordict._reductions import _make_td

import shmbuffer

STEPS = 4  # steps of each trajectory that `steps` makes

LISTS = ("list", "lazy stack", "compressed")
RINGS = ("memory", "memmap", "directory")
RECORDS = ("stack of records", "compressed records")
STORAGES = LISTS + RINGS + RECORDS
SHARED = ("directory", *RECORDS)
SAMPLERS = (
    "random",
    "without replacement",
    "prioritized",
    "slices",
    "slices without replacement",
    "prioritized slices",
)
WRITERS = ("round robin", "tensordict round robin", "max value")


@dataclass(frozen=True)
class Case:
    """A combination of a storage, a sampler and a writer."""

    storage: str
    sampler: str = "random"
    writer: str = "round robin"

    def __str__(self) -> str:
        return f"{self.storage}/{self.sampler}/{self.writer}".replace(" ", "-")

    @property
    def shared(self) -> bool:
        return self.storage in SHARED

    @property
    def in_order(self) -> bool:
        """True if the items lie in the order in which they were written."""
        return self.writer != "max value"

    @property
    def draws_slices(self) -> bool:
        return "slices" in self.sampler


def allowed(case: Case) -> bool:
    """True if the parts can be combined.

    Top-k writers cannot be shared and do not keep trajectories together.
    """
    return case.in_order or not (case.shared or case.draws_slices)


CASES = [
    case
    for case in itertools.starmap(Case, itertools.product(STORAGES, SAMPLERS, WRITERS))
    if allowed(case)
]


def cases(
    storages: tuple[str, ...] = STORAGES,
    samplers: tuple[str, ...] = SAMPLERS,
    writers: tuple[str, ...] = WRITERS,
) -> list[Case]:
    """Returns the allowed combinations of these storages, samplers and writers."""
    return [
        case
        for case in CASES
        if case.storage in storages and case.sampler in samplers and case.writer in writers
    ]


def steps(start: int, stop: int) -> TensorDict:
    """Makes steps ``[stop - start]`` whose other entries all follow from ``id``.

    A trajectory has `STEPS` steps. The rank grows with ``id``, so that a top-k writer keeps the
    same items as a ring.
    """
    number = torch.arange(start, stop)
    last = (number % STEPS == STEPS - 1).unsqueeze(-1)
    return TensorDict(
        {
            "id": number,
            "obs": number.unsqueeze(-1) * torch.tensor([1.0, 10.0]),
            "rank": number.float(),
            "episode": number // STEPS,
            "next": TensorDict(
                {
                    "obs": (number.unsqueeze(-1) + 1) * torch.tensor([1.0, 10.0]),
                    "done": last,
                    "truncated": torch.zeros_like(last),
                },
                [stop - start],
            ),
        },
        [stop - start],
    )


ALL_STEPS = steps(0, 200)


def assert_are_steps(data: Any, numbers: list[int] | None = None, *, slices: bool = False) -> None:
    """Checks that every entry of ``data`` belongs to the step that its ``id`` names.

    Args:
        data: a batch.
        numbers: the expected ids, in this order.
        slices: True if the batch consists of slices, whose last steps are always marked as done.
    """
    if numbers is not None:
        assert data["id"].tolist() == numbers
    expected = ALL_STEPS[data["id"]]
    assert torch.equal(data["obs"], expected["obs"])
    assert torch.equal(data["next", "obs"], expected["next", "obs"])
    assert slices or torch.equal(data["next", "done"], expected["next", "done"])


class Maker:
    """Makes new parts for a case; the second buffer of a directory attaches to it.

    Args:
        case: the combination of parts to make.
        path: the folder for the directories of the buffers.
    """

    def __init__(self, case: Case, path: Path) -> None:
        self.case = case
        self._path = path
        self._made: list[Any] = []

    def storage(self, max_size: int, *, name: str = "buffer", **options: Any) -> Any:
        """Makes a storage; ``name`` is the name of its directory, if it has one."""
        make: dict[str, Any] = {
            "list": shmbuffer.ListStorage,
            "lazy stack": shmbuffer.LazyStackStorage,
            "compressed": shmbuffer.CompressedListStorage,
            "memory": shmbuffer.LazyTensorStorage,
            "memmap": shmbuffer.LazyMemmapStorage,
            "directory": shmbuffer.LazyMemmapStorage,
            "stack of records": shmbuffer.LazyStackStorage,
            "compressed records": shmbuffer.CompressedListStorage,
        }
        if self.case.storage in RECORDS:
            options = {"max_bytes": 2**20, **options}
        if self.case.shared:
            options = {"scratch_dir": self._path / name, "shared_init": True, **options}
        self._made.append(made := make[self.case.storage](max_size, **options))
        return made

    def sampler(self, max_size: int, **options: Any) -> Any:
        """Makes a sampler; slice samplers draw slices of 2 steps."""
        name = self.case.sampler
        slices = {"slice_len": 2, "traj_key": "episode"}
        priorities = {"alpha": 0.7, "beta": 0.9}
        match name:
            case "random":
                return shmbuffer.RandomSampler(**options)
            case "without replacement":
                return shmbuffer.SamplerWithoutReplacement(**options)
            case "prioritized":
                return shmbuffer.PrioritizedSampler(max_size, **priorities, **options)
            case "slices":
                return shmbuffer.SliceSampler(**slices, **options)
            case "slices without replacement":
                return shmbuffer.SliceSamplerWithoutReplacement(**slices, **options)
            case "prioritized slices":
                return shmbuffer.PrioritizedSliceSampler(
                    max_size, **priorities, **slices, **options
                )
            case _:
                raise ValueError(name)

    def writer(self) -> Any:
        """Makes a writer; the top-k writer ranks items by ``rank``."""
        return {
            "round robin": shmbuffer.RoundRobinWriter,
            "tensordict round robin": shmbuffer.TensorDictRoundRobinWriter,
            "max value": lambda: shmbuffer.TensorDictMaxValueWriter(rank_key="rank"),
        }[self.case.writer]()

    def buffer(
        self,
        max_size: int = 12,
        cls: str = "TensorDictReplayBuffer",
        *,
        batch_size: int | None = 4,
        name: str = "buffer",
        **options: Any,
    ) -> Any:
        """Makes a buffer of the three parts."""
        parts = {
            "storage": self.storage(max_size, name=name),
            "sampler": self.sampler(max_size),
            "writer": self.writer(),
        }
        made = getattr(shmbuffer, cls)(**{**parts, "batch_size": batch_size, **options})
        self._made.append(made)
        return made

    def close(self) -> None:
        """Ends the threads of every buffer and closes every directory."""
        for one in reversed(self._made):
            if hasattr(one, "close"):
                one.close()


def numbers(data: Any) -> list[int]:
    """Returns the ids in ``data``."""
    found: list[int] = data["id"].tolist()
    return found


def through_files(source: Any, target: Any, path: Path) -> None:
    """Saves a buffer and loads the save into another."""
    source.dumps(path / "save")
    target.loads(path / "save")


def through_a_state(source: Any, target: Any, path: Path) -> None:
    """Saves the state of a buffer as training scripts do, and loads it without pickle."""
    torch.save(source.state_dict(), path / "state")
    # tensordict 0.12 does not declare these as safe globals
    known = [_make_td, TensorDict, NonTensorData]
    with torch.serialization.safe_globals(known):
        target.load_state_dict(torch.load(path / "state", weights_only=True))
