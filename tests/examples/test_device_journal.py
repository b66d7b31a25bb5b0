"""After a kill, the rows on the device equal those of their journal.

The device is the CPU, or ``meta``, which like a GPU refuses every operation with tensors of another
device. Code for CUDA alone, such as pinned memory, is not run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import Coordinator, attach

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples/device_journal.py"
CAPACITY, ENVS = 100, 8
SIZES = ("--device", "cpu", "--capacity", str(CAPACITY), "--envs", str(ENVS), "--publish", "10")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
ARMED = """
import runpy, sys
from shmbuffer._native import _core
_core.arm(sys.argv.pop(1), after=int(sys.argv.pop(1)))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_journal", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reloaded(example: ModuleType, path: Path) -> TensorDict:
    """Returns the rows that a restart has on its device, oldest first."""
    options = example.journal_options(torch.device("cpu"))
    with Coordinator(path, on_existing="recover", **options) as run:
        rows = example.DeviceRows(run.buffer, torch.device("cpu"))
        return rows.rows[: rows.size].clone()


def require_committed(path: Path, rows: TensorDict) -> None:
    """Checks that all rows are committed ones; the oldest may be in any slot of the ring."""
    with attach(path) as rb:
        stored = rb[:]
    assert len(stored) == len(rows)
    places = stored["observation"].tolist()
    assert len({tuple(place) for place in places}) == len(places)
    oldest = places.index(rows["observation"][0].tolist())
    for key, leaf in stored.items():
        assert torch.equal(leaf.roll(-oldest, 0), rows[key]), key


def test_after_a_kill_the_rows_on_the_device_are_the_committed_ones(
    example: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "rb"
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), str(path), *SIZES]
    with subprocess.Popen(
        [*command, "--steps", "1000000"], stdout=subprocess.PIPE, text=True, env=ONE_THREAD
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0 rows reloaded, step 0\n"
        while not process.stdout.readline().startswith("step 29, 100 rows"):
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    rows = reloaded(example, path)
    require_committed(path, rows)
    done = subprocess.run(
        [*command, "--steps", "3"], check=True, capture_output=True, text=True, env=ONE_THREAD
    )
    said = done.stdout.split()
    assert int(said[0]) == len(rows)
    assert int(said[-1]) >= 30
    after = reloaded(example, path)
    require_committed(path, after)
    new, kept = 3 * ENVS, len(after) - 3 * ENVS
    assert len(after) <= CAPACITY
    assert torch.equal(after["observation"][:kept], rows["observation"][len(rows) - kept :])
    assert not torch.isin(after["observation"][-new:], rows["observation"]).all()


@pytest.mark.parametrize(
    ("point", "passings", "left"),
    [("write.copy", 60, CAPACITY - ENVS), ("write.count", 15, CAPACITY)],  # one copy for each leaf
)
def test_a_kill_in_the_journal_leaves_whole_batches_on_the_device(
    example: ModuleType, tmp_path: Path, point: str, passings: int, left: int
) -> None:
    path = tmp_path / "rb"
    armed = [sys.executable, "-W", "ignore", "-c", ARMED, point, str(passings)]
    command = [*armed, str(EXAMPLE), str(path), *SIZES, "--steps", "100"]
    done = subprocess.run(command, check=False, env=ONE_THREAD)
    assert done.returncode == -signal.SIGKILL
    rows = reloaded(example, path)
    assert len(rows) == left
    require_committed(path, rows)


def test_rows_and_updates_stay_on_the_device_that_is_named(
    example: ModuleType, tmp_path: Path
) -> None:
    device = torch.device("meta")
    options = {"capacity": CAPACITY, **example.journal_options(device)}
    torch.manual_seed(0)
    with Coordinator(tmp_path / "rb", **options) as run:
        points = example.Points(ENVS, torch.device("cpu"))
        for _ in range(3):
            run.buffer.extend(points.step(torch.rand(ENVS, 1)))
        rows = example.DeviceRows(run.buffer, device)
        assert rows.size == 3 * ENVS
        assert {leaf.device for leaf in rows.rows.values(True, True)} == {device}
        agent = example.Agent().to(device)
        agent.losses(rows.sample(32)).backward()
        assert all(one.grad.device == device for one in agent.actor.parameters())
