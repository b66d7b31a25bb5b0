"""attach() opens a buffer from any process, before or after the buffer has a schema."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    AttachTimeout,
    BufferNotFoundError,
    Coordinator,
    PrioritizedSliceSampler,
    ProgressReport,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.memory import attaching
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.service import items


def batch(*values: int) -> TensorDict:
    return TensorDict({"obs": torch.tensor(values)}, [len(values)])


def test_the_buffer_is_the_one_that_was_recorded(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8, alpha=0.7, beta=0.3, batch_size=2, priority_key="p"):
        buffer = attach(scratch_dir)
        assert type(buffer) is TensorDictPrioritizedReplayBuffer
        assert (buffer.batch_size, buffer.priority_key) == (2, "p")
        assert (buffer.sampler.alpha, buffer.sampler.beta) == (0.7, 0.3)
        close(buffer)


def test_a_directory_without_priorities_is_a_uniform_buffer(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8, alpha=None):
        buffer = attach(scratch_dir)
        assert type(buffer) is TensorDictReplayBuffer
        close(buffer)


def test_before_the_first_write_it_is_empty_and_defines_with_it(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        first, second = attach(scratch_dir), attach(scratch_dir)
        assert (len(first), len(second)) == (0, 0)
        second.extend(batch(1, 2, 3))
        assert (len(first), len(second), len(coordinator.buffer)) == (3, 3, 3)
        assert first[:]["obs"].tolist() == [1, 2, 3]
        close(first)
        close(second)
        late = attach(scratch_dir)
        assert late[:]["obs"].tolist() == [1, 2, 3]
        close(late)


def test_a_client_may_leave_and_come_again(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        for number in range(3):
            buffer = attach(scratch_dir)
            assert coordinator.stats()["clients_alive"] == 2
            buffer.extend(batch(number))
            close(buffer)
            assert coordinator.stats()["clients_alive"] == 1
        assert coordinator.stats()["size"] == 3


def test_roles_are_in_the_registry(scratch_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        buffers = [attach(scratch_dir), attach(scratch_dir, role="learner")]
        monkeypatch.setattr(attaching, "role_of_this_process", "collector")
        buffers.append(attach(scratch_dir))
        roles = [one.role for one in coordinator.clients()]
        assert roles == ["coordinator", "client", "learner", "collector"]
        for buffer in buffers:
            close(buffer)


def test_an_unknown_role_is_refused_by_its_name(scratch_dir: Path) -> None:
    with (
        Coordinator(scratch_dir, capacity=8),
        pytest.raises(
            ValueError,
            match="role must be one of client, collector, learner, coordinator, but is 'actor'",
        ),
    ):
        attach(scratch_dir, role="actor")  # type: ignore[arg-type]


def test_arguments_that_are_not_recorded_are_the_callers(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8, batch_size=2):
        buffer = attach(
            scratch_dir, batch_size=3, transform=lambda data: data.set("twice", data["obs"] * 2)
        )
        buffer.extend(batch(1, 2, 3))
        sample = buffer.sample()
        assert sample.batch_size == (3,)
        assert (sample["twice"] == sample["obs"] * 2).all()
        close(buffer)


@pytest.mark.parametrize("written", [False, True])
def test_a_buffer_with_priorities_takes_any_sampler(scratch_dir: Path, written: bool) -> None:
    """With ``written``, the ring exists before the samplers attach."""
    with Coordinator(scratch_dir, capacity=8, batch_size=40) as coordinator:
        done = torch.zeros(4, 1, dtype=torch.bool)
        data = TensorDict({"obs": torch.arange(4), ("next", "done"): done}, [4])
        if written:
            coordinator.buffer.extend(data)
        by_priority = PrioritizedSliceSampler(8, 0.6, 0.4, slice_len=2)
        with (
            attach(scratch_dir, sampler=by_priority) as learner,
            attach(scratch_dir, sampler=lambda: SliceSampler(slice_len=2)) as other,
        ):
            if not written:
                coordinator.buffer.extend(data)
            coordinator.buffer.update_priority(torch.arange(4), torch.tensor([0.0, 1e9, 0.0, 0.0]))
            assert learner.sampler is by_priority
            sample = learner.sample()
            assert sample["obs"].view(-1, 2).tolist() == [[1, 2]] * 20
            sample["td_error"] = (sample["obs"] == 1) * 3.0
            assert learner.update_tensordict_priority(sample).applied == 40
            assert ring_of(coordinator.buffer).tree.priorities(np.arange(3)).tolist() == [
                0,
                3,
                0,
            ]
            assert len(other.sample()["obs"].view(-1, 2).unique(dim=0)) == 3
        with pytest.raises(ValueError, match=r"alpha=0\.6"):
            attach(scratch_dir, sampler=PrioritizedSliceSampler(8, 0.7, 0.4, slice_len=2))
        assert [client.pid for client in coordinator.clients()] == [os.getpid()]


def test_before_the_first_write_a_sampler_with_another_alpha_is_refused_too(
    scratch_dir: Path,
) -> None:
    with Coordinator(scratch_dir, capacity=8), pytest.raises(ValueError, match=r"alpha=0\.6.*0\.7"):
        attach(scratch_dir, sampler=PrioritizedSliceSampler(8, 0.7, 0.4, slice_len=2))


def test_an_argument_for_coordinators_only_is_refused_with_its_name(scratch_dir: Path) -> None:
    with pytest.raises(
        TypeError, match=r"argument 'capacity'.*Coordinator\(\.\.\., capacity=\.\.\.\)"
    ):
        attach(scratch_dir, capacity=8)


def test_a_wrong_argument_leaves_no_client_behind(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        with pytest.raises(TypeError, match="no_such_argument"):
            attach(scratch_dir, no_such_argument=1)
        assert coordinator.stats()["clients_alive"] == 1


@pytest.mark.full
def test_it_waits_for_a_buffer_that_comes_later(scratch_dir: Path) -> None:
    with Program.python(
        "import sys\n"
        "from shmbuffer import attach\n"
        "import shmbuffer.buffers\n"
        "print('waiting', flush=True)\n"
        "buffer = attach(sys.argv[1], timeout=50)\n"
        "print(len(buffer), buffer._storage is not None, flush=True)",
        scratch_dir,
    ) as program:
        assert program.line() == "waiting"
        with Coordinator(scratch_dir, capacity=8):
            assert program.line() == "0 True"
            assert program.end()[0] == 0


@pytest.mark.parametrize("made", [False, True])
def test_a_timeout_says_what_it_waited_for(scratch_dir: Path, made: bool) -> None:
    if made:
        scratch_dir.mkdir()
    with pytest.raises(AttachTimeout) as caught:
        attach(scratch_dir, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    still = "contains no buffer" if made else "does not exist"
    assert str(caught.value) == (
        f"{scratch_dir}: waited 0.05 s for a buffer, but the path still {still}; start a "
        f"coordinator for it (shmbuffer serve {scratch_dir} --capacity N), or check the path"
    )
    assert caught.value.parts["timeout_s"] == 0.05


@pytest.mark.parametrize("max_bytes", [None, 2**16], ids=["rows", "records"])
def test_a_device_says_where_samples_go(scratch_dir: Path, max_bytes: int | None) -> None:
    storage = None if max_bytes is None else "LazyStackStorage"
    options: dict[str, Any] = {"storage": storage, "max_bytes": max_bytes, "batch_size": 2}
    with Coordinator(scratch_dir, capacity=8, device="meta", **options) as coordinator:
        coordinator.buffer.extend(batch(1, 2, 3))
        assert coordinator.buffer.sample()["obs"].device.type == "meta"
        with attach(scratch_dir, device="meta") as rb:
            assert rb.sample()["obs"].device.type == "meta"
        for device in (None, "auto", "cpu") if max_bytes is None else (None, "cpu"):
            with attach(scratch_dir, device=device) as rb:
                assert set(rb.sample()["obs"].tolist()) <= {1, 2, 3}


def test_a_long_wait_is_logged_with_the_buffers_nearby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attaching, "LOG_AFTER_S", 0.0)
    monkeypatch.chdir(tmp_path)
    for name in ("run/replay", "run/eval"):
        Coordinator(name, capacity=8).close()
    for path, state, meant in (
        ("typo/replay", "does not exist", "run/replay"),
        ("run/replya", "does not exist", "run/eval, run/replay"),
        ("run", "contains no buffer", "run/eval, run/replay"),
        ("run/replay/inner", "does not exist", "run/replay"),
    ):
        caplog.clear()
        with pytest.raises(AttachTimeout, match=re.escape(f"the path; did you mean {meant}?")):
            attach(path, timeout=0.05)
        assert caplog.messages == [
            f"{tmp_path}/{path}: attach() has waited 0 s for a buffer, and will wait up to 0.05 s "
            f"more; the path {state}; did you mean {meant}?"
        ]
    caplog.clear()
    with pytest.raises(AttachTimeout, match=r"or check the path$"):
        attach("elsewhere/entirely", timeout=0.05)
    assert caplog.messages[0].endswith("the path does not exist")


def test_it_says_that_a_file_is_no_directory(scratch_dir: Path) -> None:
    scratch_dir.touch()
    with pytest.raises(AttachTimeout, match="still is not a directory"):
        attach(scratch_dir, timeout=0)


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_is_a_number_of_seconds(scratch_dir: Path, timeout: float) -> None:
    with pytest.raises(ValueError, match=f"but is {timeout}"):
        attach(scratch_dir, timeout=timeout)


def test_a_buffer_that_vanishes_under_it_is_waited_for_no_longer_than_asked(
    scratch_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Coordinator(scratch_dir, capacity=8).close()

    def gone(*_: object, **__: object) -> None:
        raise BufferNotFoundError("removed")

    monkeypatch.setattr("shmbuffer.memory.engine.Engine.open", gone)
    with pytest.raises(AttachTimeout, match="waited 0 s"):
        attach(scratch_dir, timeout=0)


@pytest.mark.full
def test_a_dead_directory_is_recovered_on_the_way(scratch_dir: Path) -> None:
    with Program.python(
        "import sys, signal, torch\n"
        "from tensordict import TensorDict\n"
        "from shmbuffer import Coordinator\n"
        "with Coordinator(sys.argv[1], capacity=8) as coordinator:\n"
        "    coordinator.buffer.extend(TensorDict({'obs': torch.arange(3)}, [3]))\n"
        "    print('there', flush=True)\n"
        "    signal.pause()",
        scratch_dir,
    ) as program:
        program.line()
        program.kill()
    buffer = attach(scratch_dir)
    assert buffer[:]["obs"].tolist() == [0, 1, 2]
    close(buffer)


def test_unrelated_processes_share_one_buffer_by_path(scratch_dir: Path) -> None:
    """The other process uses arrays, which takes a tenth of the time; docs/ covers tensors."""
    source = (
        "import sys\n"
        "from shmbuffer.numpy import attach\n"
        "with attach(sys.argv[1]) as buffer:\n"
        "    buffer.add({'obs': 7, 'td_error': 1000.0})\n"
        "    print(len(buffer), flush=True)"
    )
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        coordinator.buffer.extend(batch(1, 2))
        with Program.python(source, scratch_dir) as stranger:
            assert stranger.line() == "3"
            assert stranger.end()[0] == 0
        assert coordinator.buffer[:]["obs"].tolist() == [1, 2, 7]
        drawn = coordinator.buffer.sample(64)["obs"]
        assert (drawn == 7).float().mean() > 0.8  # the priority of the other process is visible
        loaded = TensorDict.load_memmap(scratch_dir)
        assert loaded["obs"][:3].tolist() == [1, 2, 7]


def close(buffer: ReplayBuffer) -> None:
    buffer.close()


def test_an_attaching_client_may_prefault_its_pages(scratch_dir: Path) -> None:
    heard: list[ProgressReport] = []
    with items.create(scratch_dir, 8) as engine:
        items.write(engine, [1, 2, 3])
        with attach(scratch_dir, prefault="full", on_progress=heard.append) as rb:
            assert (heard[-1].what, heard[-1].fraction) == ("prefault", 1.0)
            assert len(rb) == 3
    with pytest.raises(
        ValueError, match="prefault must be 'off', 'background' or 'full', but is 'on'"
    ):
        attach(scratch_dir, prefault="on")
