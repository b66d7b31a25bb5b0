"""Fixtures for one torch thread, one seed for every draw, and the storages that a test uses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbuffer import LazyMemmapStorage, LazyTensorStorage, TensorStorage
from tests.replay.conformance import Maker

MakeStorage = Callable[..., TensorStorage]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _forkserver_has_loaded_torch() -> None:
    """Loads torch in the fork server once, because loading it takes a process seconds."""
    multiprocessing.set_forkserver_preload(["tensordict", "shmbuffer"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seeds the CPU only: torch would store the seeding call and its stack for missing devices."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(params=["memory", "anonymous memmap", "directory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStorage]:
    """Makes storages of one kind: ``make(max_size, **options)``."""
    made: list[TensorStorage] = []

    def storage(max_size: int, **options: Any) -> TensorStorage:
        if request.param == "memory":
            one: TensorStorage = LazyTensorStorage(max_size, **options)
        elif request.param == "anonymous memmap":
            one = LazyMemmapStorage(max_size, **options)
        else:
            path = tmp_path / f"buffer{len(made)}"
            one = LazyMemmapStorage(max_size, scratch_dir=path, shared_init=True, **options)
        made.append(one)
        return one

    yield storage
    for one in made:
        one.close()


@pytest.fixture
def maker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Makes the parts of a conformance case. The fixture is parametrized indirectly."""
    made = Maker(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["memory", "anonymous memmap"])
def make_private(request: pytest.FixtureRequest) -> Iterator[MakeStorage]:
    """Makes storages that no other process can open."""
    made: list[TensorStorage] = []

    def storage(max_size: int, **options: Any) -> TensorStorage:
        cls = LazyTensorStorage if request.param == "memory" else LazyMemmapStorage
        made.append(cls(max_size, **options))
        return made[-1]

    yield storage
    for one in made:
        one.close()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[MakeStorage]:
    """Makes storages in one directory, ``tmp_path / "buffer"``: every call attaches once more."""
    made: list[TensorStorage] = []

    def storage(max_size: int = 10, **options: Any) -> TensorStorage:
        options = {"scratch_dir": tmp_path / "buffer", "shared_init": True, **options}
        made.append(LazyMemmapStorage(max_size, **options))
        return made[-1]

    yield storage
    for one in made:
        one.close()
