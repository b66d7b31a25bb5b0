"""Processes that use arrays: the modules they load, and the buffer after they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shmbuffer._native import _core
from shmbuffer.numpy import attach
from tests.crash.harness import ended, fork
from tests.kit.rings import engine_of
from tests.memory.system.test_fork_lock import held_by_another_thread
from tests.numpy.conftest import Directory

ALL_OF_IT = """
import sys

import numpy as np
import shmbuffer.numpy

with shmbuffer.numpy.attach(sys.argv[1], rng=0) as buffer:
    buffer.extend({"obs": np.zeros((4, 3), np.float32), "next": {"a": [1, 2, 3, 4]}})
    buffer.add({"obs": [1.0, 2.0, 3.0], "next": {"a": 5}, "td_error": 2.0})
    buffer.extend([{"obs": np.zeros(3, np.float32), "next": {"a": 6}}])
    sample = buffer.sample(8)
    assert buffer.update_priority(sample, np.ones(8)) == (8, 0), sample
    assert len(buffer) == buffer.stats()["size"] == 6
    assert buffer.dtypes[("obs",)] == "float32"
    repr(buffer)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "tensordict"}))
"""


def run(program: str, path: Path) -> str:
    """Returns the output of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def test_a_process_of_arrays_loads_neither_torch_nor_tensordict(directory: Directory) -> None:
    directory.create(alpha=0.6)
    assert run(ALL_OF_IT, directory.path).split() == []
    assert directory.tensors()[4]["obs"].tolist() == [1.0, 2.0, 3.0]


RECORDED = """
import sys

import numpy as np
import shmbuffer.numpy
from shmbuffer import Recorder

with shmbuffer.numpy.attach(sys.argv[1]) as buffer, Recorder(buffer, num_envs=2) as recorder:
    obs = np.zeros((2, 3), np.float32)
    recorder.reset(obs)
    for _ in range(4):
        recorder.step(obs, np.zeros(2, np.int64), np.ones(2), [False] * 2, [False] * 2, {})
    assert len(buffer) == 8, len(buffer)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "tensordict"}))
"""


def test_the_front_door_leads_to_clients_of_arrays_and_loads_no_torch() -> None:
    program = (
        "import sys, shmbuffer; print(shmbuffer.numpy.attach.__module__, 'torch' in sys.modules)"
    )
    assert run(program, Path()).split() == ["shmbuffer.numpy.client", "False"]


def test_a_recorder_of_environments_needs_no_torch_either(directory: Directory) -> None:
    directory.create()
    assert run(RECORDED, directory.path).split() == []
    assert directory.tensors()[:]["next", "reward"].tolist() == [1.0] * 8


COLLECTING = """
import sys

import numpy as np
import shmbuffer.numpy

with shmbuffer.numpy.attach(sys.argv[1], role="collector") as buffer:
    for number in range(200):
        row = np.full((16, 50), number, np.int32)
        buffer.extend({"a": row[:, 0].copy(), "b": row, "td_error": np.ones(16)})
"""


def test_a_learner_of_tensors_never_sees_half_an_item_of_collectors_of_arrays(
    directory: Directory,
) -> None:
    directory.create(capacity=64, alpha=0.6)
    learner = directory.tensors(batch_size=32)
    programs = [
        subprocess.Popen([sys.executable, "-c", COLLECTING, str(directory.path)]) for _ in range(2)
    ]
    running = True
    while running:
        running = any(program.poll() is None for program in programs)
        sample = learner.sample(min_size=16)
        assert (sample["b"] == sample["a"][:, None]).all()
        sample["td_error"] = torch.rand(32)
        learner.update_tensordict_priority(sample)
    assert [program.wait() for program in programs] == [0, 0]
    assert learner.write_count == 2 * 200 * 16
    assert engine_of(learner).check().ok


def collect(path: Path, point: str) -> None:
    """Runs a collector that dies at a sync point of its second batch."""
    with attach(path, role="collector") as buffer:
        buffer.extend({"a": np.full(4, 1), "b": np.full((4, 100), 1.0)})
        _core.arm(point)
        buffer.extend({"a": np.full(4, 2), "b": np.full((4, 100), 2.0)})


@pytest.mark.product(few=1)
@pytest.mark.crash
@pytest.mark.parametrize(
    ("point", "kept"),
    [("write.claimed", 4), ("write.payload", 4), ("write.committing", 8), ("write.count", 8)],
)
def test_a_collector_that_is_killed_in_a_write_leaves_the_learner_with_whole_batches(
    point: str, kept: int, directory: Directory
) -> None:
    directory.create(capacity=16, alpha=0.6)
    learner = directory.tensors(batch_size=8)
    assert ended(fork(lambda: collect(directory.path, point))) == -signal.SIGKILL
    for number in (3, 4):
        rows = torch.full((8, 100), number, dtype=torch.float64)
        learner.extend({"a": torch.full((8,), number), "b": rows})
        sample = learner.sample()
        assert (sample["b"] == sample["a"][:, None]).all()
        assert learner.update_priority(sample["index"], torch.ones(8)).applied == 8
        if number == 3:
            assert len(learner) == kept + 8
    assert sorted(set(learner[:]["a"].tolist())) in ([3, 4], [2, 3, 4])


def test_a_handle_goes_on_in_the_child_of_a_fork(directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays()
    arrays.extend({"a": np.zeros(2)})

    def child() -> None:
        arrays.extend({"a": np.ones(3)})
        assert arrays.add({"a": 1}) == 5
        assert len(arrays.sample(4)["a"]) == 4
        arrays.close()

    assert ended(fork(child)) == 0
    assert len(arrays) == 6
    assert arrays.add({"a": 2}) == 6
    assert {one.pid for one in engine_of(arrays).clients()} == {os.getpid()}


def test_a_child_attaches_to_a_ring_that_another_thread_was_attaching_to(
    directory: Directory,
) -> None:
    directory.create()
    buffer = directory.arrays()
    directory.tensors().extend({"x": torch.arange(4)})

    def read() -> None:
        signal.alarm(20)
        assert len(buffer) == 4

    with held_by_another_thread(buffer._rows_lock):
        assert ended(fork(read)) == 0
