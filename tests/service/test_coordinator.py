"""A coordinator creates, recovers or takes over a directory, and ends the run."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferClosedError,
    BufferExistsError,
    BufferInUseError,
    BufferNotFoundError,
    Coordinator,
    ForkedHandleError,
    PrioritizedSampler,
    ProgressReport,
    RateLimiter,
    RateLimitTimeout,
    SliceSampler,
    SpaceError,
    TensorDictPrioritizedReplayBuffer,
    attach,
)
from shmbuffer.memory.engine import Engine
from shmbuffer.service.run_directory import OnExisting
from tests.crash.harness import ended, fork
from tests.kit.programs import Program, environment
from tests.kit.rings import engine_of
from tests.memory.system.test_fork_lock import held_by_another_thread
from tests.service import items, targets
from tests.service.conftest import Reports

HOLD = """
import sys, time
from shmbuffer import Coordinator
from tests.kit.rings import engine_of
from tests.service import items
with Coordinator(sys.argv[1] or None, capacity=8) as coordinator:
    items.write(engine_of(coordinator), [1, 2, 3])
    print(coordinator.scratch_dir, flush=True)
    while True:  # no pause(): a signal that comes just before it would not end it
        time.sleep(0.01)
"""


def steps(count: int) -> TensorDict:
    """Makes steps of one trajectory that is still open."""
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"step": torch.arange(count), ("next", "done"): done}, [count])


def test_a_new_directory_is_made_and_stays(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        assert coordinator.scratch_dir == scratch_dir
        assert coordinator.capacity == 8
        assert coordinator.report is None
    with Engine.open(scratch_dir, None) as engine:
        assert (engine.settings.capacity, engine.settings.alpha, engine.settings.eps) == (
            8,
            0.6,
            1e-8,
        )
        assert engine.settings.extra == {
            "buffer": "TensorDictPrioritizedReplayBuffer",
            "beta": 0.4,
            "batch_size": None,
            "priority_key": "td_error",
        }


def test_without_alpha_the_buffer_has_no_priorities(scratch_dir: Path) -> None:
    with (
        Coordinator(scratch_dir, capacity=8, alpha=None),
        Engine.open(scratch_dir, None) as engine,
    ):
        assert engine.settings.alpha is None
        assert engine.settings.extra["buffer"] == "TensorDictReplayBuffer"


def test_a_buffer_that_is_there_is_an_error_unless_told_otherwise(scratch_dir: Path) -> None:
    Coordinator(scratch_dir, capacity=8).close()
    with pytest.raises(BufferExistsError) as caught:
        Coordinator(scratch_dir, capacity=8)
    assert str(scratch_dir) in str(caught.value)
    for way in ("attach()", "on_existing='recover'", "existsok=True", "on_existing='overwrite'"):
        assert way in str(caught.value)


def test_recover_finds_the_items(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        items.write(engine_of(coordinator), [1, 2, 3])
    with Coordinator(scratch_dir, on_existing="recover") as coordinator:
        assert coordinator.report is not None
        assert coordinator.report.items == 3
        assert coordinator.capacity == 8


def test_recover_makes_a_buffer_where_none_is(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8, on_existing="recover") as coordinator:
        assert coordinator.capacity == 8


def test_recover_without_capacity_and_without_a_buffer_says_so(scratch_dir: Path) -> None:
    with pytest.raises(BufferNotFoundError) as caught:
        Coordinator(scratch_dir, on_existing="recover")
    assert str(scratch_dir) in str(caught.value)
    assert not scratch_dir.exists()


def test_overwrite_creates_an_empty_buffer(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        items.write(engine_of(coordinator), [1, 2, 3])
    (scratch_dir / "mine.txt").write_text("not the buffer's")
    with Coordinator(scratch_dir, capacity=16, on_existing="overwrite") as coordinator:
        assert coordinator.stats()["size"] == 0
        assert coordinator.capacity == 16
    assert (scratch_dir / "mine.txt").read_text() == "not the buffer's"


def test_overwrite_refuses_a_buffer_that_is_in_use(scratch_dir: Path) -> None:
    with items.create(scratch_dir) as engine:
        items.write(engine, [1])
        with pytest.raises(BufferInUseError) as caught:
            Coordinator(scratch_dir, capacity=8, on_existing="overwrite")
        assert caught.value.parts["pids"] == [os.getpid()]
        assert str(os.getpid()) in str(caught.value)
        assert items.read(engine) == [1]


@pytest.mark.product(few=1)
@pytest.mark.parametrize("on_existing", ["error", "recover", "overwrite"])
def test_a_second_coordinator_is_told_the_pid_of_the_first(
    scratch_dir: Path, on_existing: Any
) -> None:
    with Program.python(HOLD, scratch_dir) as first:
        first.line()
        with pytest.raises(BufferInUseError) as caught:
            Coordinator(scratch_dir, capacity=8, on_existing=on_existing)
        assert caught.value.parts["pids"] == [first.pid]
        assert str(caught.value) == (
            f"{scratch_dir}: pid {first.pid} is already the coordinator of this directory; "
            "stop this process first, or use attach()"
        )
        with Engine.open(scratch_dir, None) as engine:
            assert items.read(engine) == [1, 2, 3]


def test_the_second_coordinator_of_one_process_is_refused_too(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8), pytest.raises(BufferInUseError, match="already"):
        Coordinator(scratch_dir, on_existing="recover")


def test_the_next_coordinator_may_come_when_the_first_is_gone(scratch_dir: Path) -> None:
    with Program.python(HOLD, scratch_dir) as first:
        first.line()
        first.kill()
    with Coordinator(scratch_dir, on_existing="recover") as second:
        assert second.report is not None
        assert second.report.items == 3
        assert second.report.clients_retired == 1
    with Coordinator(scratch_dir, on_existing="recover") as third:
        assert third.stats()["size"] == 3


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(scratch_dir: Path) -> None:
    fork = "import os; os.write(1, f'{os.fork()}\\n'.encode())"
    source = HOLD.replace("    while True:", f"    {fork}\n    while True:")
    with Program.python(source, scratch_dir) as first:
        first.line()
        lines = [int(first.line()), int(first.line())]
        child = next(pid for pid in lines if pid)
        first.kill()
        try:
            with Coordinator(scratch_dir, on_existing="recover") as second:
                assert second.stats()["size"] == 3
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"capacity": 16}, "capacity=8, but 16 was requested"),
        ({"alpha": 0.7}, "alpha=0.6, but 0.7 was requested"),
        ({"alpha": None}, "alpha=0.6, but None was requested"),
        ({"eps": 0.5}, "eps=1e-08, but 0.5 was requested"),
        ({"ndim": 2}, "ndim=1, but 2 was requested"),
    ],
)
def test_a_recorded_setting_cannot_be_contradicted(
    scratch_dir: Path, given: dict[str, Any], named: str
) -> None:
    Coordinator(scratch_dir, capacity=8).close()
    with pytest.raises(ValueError, match=named) as caught:
        Coordinator(scratch_dir, on_existing="recover", **given)
    assert str(scratch_dir) in str(caught.value)
    with Coordinator(scratch_dir, capacity=8, alpha=0.6, eps=1e-8, on_existing="recover"):
        pass


def test_recorded_settings_win_over_defaults_and_requested_ones_are_recorded(
    scratch_dir: Path,
) -> None:
    Coordinator(scratch_dir, capacity=8, alpha=0.9, beta=0.1, batch_size=4).close()
    Coordinator(scratch_dir, on_existing="recover", priority_key="p", beta=0.2).close()
    with Engine.open(scratch_dir, None) as engine:
        assert engine.settings.alpha == 0.9
        assert engine.settings.extra == {
            "buffer": "TensorDictPrioritizedReplayBuffer",
            "beta": 0.2,
            "batch_size": 4,
            "priority_key": "p",
        }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "capacity"),
        ({"capacity": 0}, "capacity.*0"),
        ({"capacity": 8, "alpha": -0.1}, "alpha.*-0.1"),
        ({"capacity": 8, "alpha": float("nan")}, "alpha.*nan"),
        ({"capacity": 8, "eps": -1.0}, "eps.*-1"),
        ({"capacity": 8, "on_existing": "keep"}, "got 'keep'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_and_leave_nothing(
    scratch_dir: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Coordinator(scratch_dir, **arguments)
    assert not scratch_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "mode"}, "reduction cannot be 'mode'"),
        ({"priority_key": ("next", 3)}, "priority_key cannot be .*3"),
        ({"priority_key": "x" * 5000}, "shorten priority_key"),
        ({"weight_key": ("a", "b")}, "weight_key cannot be .*'a'"),
        ({"batch_size": 2**40}, "batch_size cannot be"),
        ({"batch_size": 2.5}, "batch_size must be a number of items"),
    ],
    ids=lambda given: f"{given!s:.32}",
)
def test_what_would_keep_others_out_is_not_recorded(
    scratch_dir: Path, arguments: dict[str, Any], message: str
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        items.write(engine_of(coordinator), [1, 2, 3])
    for existing in ("recover", "overwrite"):
        with pytest.raises((ValueError, TypeError), match=message):
            Coordinator(scratch_dir, capacity=8, on_existing=existing, **arguments)
    with Engine.open(scratch_dir, None) as engine:
        assert items.read(engine) == [1, 2, 3]
    with pytest.raises((ValueError, TypeError), match=message):
        Coordinator(scratch_dir / "new", capacity=8, **arguments)
    assert not (scratch_dir / "new").exists()


def test_a_limiter_that_does_not_fit_costs_no_buffer_that_is_to_be_overwritten(
    scratch_dir: Path,
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        items.write(engine_of(coordinator), [1, 2, 3])
    limiter = RateLimiter(min_size=9)
    with pytest.raises(ValueError, match=r"min_size is 9.*room for only 8"):
        Coordinator(scratch_dir, capacity=8, on_existing="overwrite", rate_limiter=limiter)
    with Engine.open(scratch_dir, None) as engine:
        assert items.read(engine) == [1, 2, 3]


def test_numbers_of_numpy_are_recorded(scratch_dir: Path) -> None:
    given = {"capacity": np.int64(8), "batch_size": np.int32(4), "dim_extend": np.int64(0)}
    with Coordinator(scratch_dir, **given), attach(scratch_dir) as buffer:
        assert buffer.batch_size == 4


@pytest.mark.parametrize("storage", ["LazyMemmapStorage", "LazyStackStorage"])
def test_a_load_is_counted_apart_and_writes_nothing(
    scratch_dir: Path, tmp_path: Path, storage: str
) -> None:
    options: dict[str, Any] = {"capacity": 16, "storage": storage}
    if storage != "LazyMemmapStorage":
        options["max_bytes"] = 2**16
    with Coordinator(scratch_dir, **options) as coordinator:
        coordinator.buffer.extend(steps(8))
        coordinator.buffer.dumps(tmp_path / "saved")
        before = coordinator.stats()
    assert (before["inserts"], before["loaded"], before["write_count"]) == (8, 0, 8)
    with Coordinator(scratch_dir, on_existing="recover") as coordinator:
        coordinator.buffer.loads(tmp_path / "saved")
        coordinator.buffer.loads(tmp_path / "saved")
        after = coordinator.stats()
        assert (after["inserts"], after["loaded"], after["write_count"]) == (8, 16, 8)
        with attach(scratch_dir) as rb, pytest.raises(RateLimitTimeout, match="no collector"):
            rb.sample(9, min_size=9, timeout=0)  # the loading process does not write
        coordinator.buffer.extend(steps(1))
        after = coordinator.stats()
        assert (after["inserts"], after["loaded"], after["write_count"]) == (9, 16, 9)


def test_more_arguments_of_the_buffer_are_recorded_or_local(scratch_dir: Path) -> None:
    with Coordinator(
        scratch_dir,
        capacity=8,
        priority_key=("next", "error"),
        weight_key="w",
        reduction="min",
        transform=lambda data: data.set("twice", 2 * data["obs"]),
    ) as coordinator:
        extra = engine_of(coordinator).settings.extra
        assert extra["priority_key"] == ["next", "error"]
        assert (extra["weight_key"], extra["reduction"]) == ("w", "min")
        assert "transform" not in extra
        buffer = coordinator.buffer
        assert buffer.priority_key == ("next", "error")
        buffer.extend(TensorDict({"obs": torch.arange(6)}, [6]))
        sample = buffer.sample(4)
        assert (sample["twice"] == 2 * sample["obs"]).all()
        assert sample["w"].shape == (4,)
    with Coordinator(scratch_dir, on_existing="recover", priority_key=("next", "error")):
        pass


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) ^ 255


def test_a_coordinator_makes_a_buffer_of_records_that_attach_opens(scratch_dir: Path) -> None:
    with Coordinator(
        scratch_dir,
        capacity=50,
        storage="CompressedListStorage",
        max_bytes=100_000,
        batch_size=6,
        compression_level=5,
        compress=["obs", ("next", "obs")],
        pad_output=0,
    ) as coordinator:
        with attach(scratch_dir) as buffer:
            assert repr(buffer.storage).startswith("CompressedListStorage(max_size=50, max_bytes=1")
            assert buffer.storage.compression_level == 5
            buffer.extend([TensorDict(obs=torch.arange(n), text=str(n)) for n in (3, 5)])
        sample = coordinator.buffer.sample()
        assert sample["obs"].shape == (6, int(sample["mask"].sum(1).max()))
        assert coordinator.buffer[1]["text"] == "5"
    with Coordinator(
        scratch_dir, on_existing="recover", max_bytes=100_000, compression_level=7
    ) as coordinator:
        recorded = engine_of(coordinator).settings.extra["storage"]
        assert (recorded["kind"], recorded["compression_level"]) == ("CompressedListStorage", 7)
        assert recorded["compress"] == ["obs", ["next", "obs"]]
        assert len(coordinator.buffer) == 2


@pytest.mark.parametrize("argument", ["capacity", "batch_size", "rate_limiter"])
def test_an_argument_of_another_kind_is_named_and_leaves_nothing(
    scratch_dir: Path, argument: str
) -> None:
    arguments: dict[str, Any] = {"capacity": 5, argument: 1e3}
    with pytest.raises(TypeError, match=rf"{argument} must be .*1000\.0"):
        Coordinator(scratch_dir, **arguments)
    assert not scratch_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"storage": "ListStorage"},
            "storage must be one of LazyMemmapStorage, .* got 'ListStorage'",
        ),
        ({"storage": "LazyStackStorage"}, "needs max_bytes, the size of its byte ring"),
        ({"max_bytes": 9}, "storage='LazyMemmapStorage' does not support max_bytes"),
        ({"storage": "LazyStackStorage", "max_bytes": 0}, "max_bytes must be at least 1, got 0"),
        (
            {"storage": "LazyStackStorage", "max_bytes": 9, "dictionary_bytes": 9},
            "storage='LazyStackStorage' does not support dictionary_bytes",
        ),
        ({"compress": ["obs"]}, "storage='LazyMemmapStorage' does not support compress"),
        (
            {"storage": "LazyStackStorage", "max_bytes": 9, "ndim": 2},
            "storage='LazyStackStorage' has one dimension, so ndim=2",
        ),
    ],
    ids=str,
)
def test_a_storage_that_makes_no_sense_is_refused_and_leaves_nothing(
    scratch_dir: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Coordinator(scratch_dir, capacity=8, **arguments)
    assert not scratch_dir.exists()


def test_a_coordinator_recovers_records_without_repeating_their_options(scratch_dir: Path) -> None:
    kind = "CompressedListStorage"
    with Coordinator(scratch_dir, capacity=8, storage=kind, max_bytes=2**16) as first:
        first.buffer.extend(torch.zeros(2, 3))
    with Coordinator(scratch_dir, storage=kind, on_existing="recover") as again:
        assert len(again.buffer) == 2


def test_another_storage_than_the_recorded_one_is_an_error(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8, storage="LazyStackStorage", max_bytes=10_000):
        pass
    for arguments, message in (
        ({"storage": "LazyMemmapStorage"}, "has storage='LazyStackStorage', but 'LazyMemmap"),
        ({"max_bytes": 20_000}, "has max_bytes=12288, but 20480 was requested"),
        (
            {"dictionary_bytes": 9},
            "LazyStackStorage, which does not support dictionary_bytes",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Coordinator(scratch_dir, on_existing="recover", **arguments)


def test_functions_that_compress_are_of_this_process(scratch_dir: Path) -> None:
    with Coordinator(
        scratch_dir,
        capacity=8,
        storage="CompressedListStorage",
        max_bytes=10_000,
        compression_fn=flipped,
        decompression_fn=flipped,
    ) as coordinator:
        coordinator.buffer.extend(torch.arange(4.0).unsqueeze(-1))
        assert coordinator.buffer[2].item() == 2.0
        assert coordinator.buffer.storage.compression_fn is flipped


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((2, targets.fail), TypeError, "must be the target, a function or its name, got 2; "),
        (
            (targets.fail, targets.fail),
            TypeError,
            "n must be a number of processes, got <function fail",
        ),
        (
            (targets.fail, 1.0),
            TypeError,
            "n must be a number of processes, got 1.0; call spawn(targ",
        ),
        ((targets.fail, -1), ValueError, "n must be a number of processes of at least 0, got -1"),
    ],
)
def test_a_spawn_of_something_else_is_refused_and_leaves_nothing(
    scratch_dir: Path, given: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with (
        pytest.raises(error, match=re.escape(words)),
        Coordinator(scratch_dir, capacity=8) as coordinator,
    ):
        coordinator.spawn(*given)
    assert not scratch_dir.exists()


def test_a_refused_spawn_leaves_a_buffer_that_has_been_used(scratch_dir: Path) -> None:
    for use in ("write", "publish", "attach", "spawn", "recover"):
        existing: OnExisting = "recover" if use == "recover" else "overwrite"
        with (
            ExitStack() as stack,
            Coordinator(scratch_dir, capacity=8, on_existing=existing) as coordinator,
        ):
            if use == "write":
                coordinator.buffer.extend({"obs": torch.zeros(1)})
            elif use == "publish":
                coordinator.buffer.publish({"weight": torch.zeros(1)}, 1)
            elif use == "attach":
                stack.enter_context(Engine.open(scratch_dir, None))
            elif use == "spawn":
                coordinator.spawn(targets.fail, 0)
                coordinator.spawn("tests.service.targets:fail")
            with pytest.raises(ValueError, match="n must be a number"):
                coordinator.spawn(targets.fail, -1)
        assert Engine.open(scratch_dir, None).close() is None, use


def test_an_unknown_argument_is_refused_at_once(scratch_dir: Path) -> None:
    for name, hint in (
        ("alhpa", "did you mean alpha?"),
        ("bach_size", "did you mean batch_size?"),
        ("max_size", "check the name."),
    ):
        with pytest.raises(TypeError) as caught:
            Coordinator(scratch_dir, **{"capacity": 8, name: 1})  # type: ignore[arg-type]
        said = str(caught.value)
        assert said.startswith(
            f"Coordinator() got an unexpected argument {name!r}; {hint} The arguments are alpha, "
        )
        assert {"capacity", "batch_size", "sampler", "stack_dim"} <= set(re.findall(r"\w+", said))
        assert said.endswith("pass other arguments of the buffer's class to attach()")
    assert not scratch_dir.exists()


def test_a_sampler_of_its_own_is_for_the_buffer_of_the_coordinator(scratch_dir: Path) -> None:
    sampler = SliceSampler(slice_len=2)
    with Coordinator(scratch_dir, capacity=8, sampler=sampler, batch_size=4) as coordinator:
        buffer = coordinator.buffer
        buffer.extend(steps(4))
        assert buffer.sampler is sampler
        assert buffer.sample()["step"].view(2, 2).diff().tolist() == [[1], [1]]
        with attach(scratch_dir) as other:
            assert type(other) is type(buffer) is TensorDictPrioritizedReplayBuffer
            assert type(other.sampler) is PrioritizedSampler


def test_stats_are_one_flat_dict_of_numbers(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        assert coordinator.stats()["initialized"] is False
        items.write(engine_of(coordinator), range(6))
        stats = coordinator.stats()
    assert {type(value) for value in stats.values()} <= {int, float, bool}
    expected = {
        "size": 6,
        "capacity": 8,
        "write_count": 6,
        "utilization": 0.75,
        "fill": 0.75,
        "initialized": 1,
        "inserts": 6,
        "batches_sampled": 0,
        "sampled_age": 0.0,
        "updates_stale": 0,
        "redraws": 0,
        "clients_alive": 1,
        "clients_dead": 0,
        "processes": 0,
        "deaths": 0,
        "restarts": 0,
    }
    assert {name: stats[name] for name in expected} == expected
    assert stats["inserts_per_s"] > 0


def test_flush_is_the_engines(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        items.write(engine_of(coordinator), [1])
        coordinator.flush()


def test_a_closed_coordinator_says_so(scratch_dir: Path) -> None:
    coordinator = Coordinator(scratch_dir, capacity=8)
    coordinator.close()
    coordinator.close()
    assert coordinator.closed
    assert repr(coordinator) == f"<Coordinator {str(scratch_dir)!r} capacity=8 closed>"
    for use in (
        coordinator.stats,
        coordinator.flush,
        coordinator.clients,
        lambda: coordinator.buffer,
    ):
        with pytest.raises(BufferClosedError, match=f"{scratch_dir}: this coordinator is closed"):
            use()


def test_a_coordinator_stays_in_its_process(scratch_dir: Path) -> None:
    with (
        Coordinator(scratch_dir, capacity=8) as coordinator,
        pytest.raises(TypeError, match="scratch_dir to the other process, and call attach"),
    ):
        pickle.dumps(coordinator)


def test_auto_cleanup_removes_what_was_made_and_nothing_else(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8, auto_cleanup=True) as coordinator:
        items.write(engine_of(coordinator), [1])
    assert not scratch_dir.exists()
    scratch_dir.mkdir(mode=0o700)
    (scratch_dir / "mine.txt").touch()
    with Coordinator(scratch_dir, capacity=8, auto_cleanup=True) as coordinator:
        items.write(engine_of(coordinator), [1])
    assert os.listdir(scratch_dir) == ["mine.txt"]


def test_an_example_makes_the_files_at_once(scratch_dir: Path) -> None:
    example = TensorDict({"obs": torch.zeros(3)})
    with Coordinator(scratch_dir, capacity=8, example=example) as coordinator:
        assert (scratch_dir / "obs.memmap").stat().st_size == 8 * 3 * 4
        assert len(coordinator.buffer) == 0
        with Engine.open(scratch_dir, None) as engine:
            assert engine.ring() is not None
            assert [leaf.name for leaf in engine.ring().schema.leaves] == ["obs"]


def test_too_little_space_for_an_example_leaves_nothing(scratch_dir: Path) -> None:
    with pytest.raises(SpaceError, match="bytes"):
        Coordinator(scratch_dir, capacity=2**30, example=TensorDict({"obs": torch.zeros(2**20)}))
    assert not scratch_dir.exists()
    Coordinator(scratch_dir, capacity=8).close()


def test_the_buffer_is_of_the_family_and_sees_what_others_write(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8, batch_size=4) as coordinator:
        buffer = coordinator.buffer
        assert isinstance(buffer, TensorDictPrioritizedReplayBuffer)
        assert coordinator.buffer is buffer
        buffer.extend(TensorDict({"obs": torch.arange(6)}, [6]))
        sample = buffer.sample()
        assert sample.batch_size == (4,)
        assert coordinator.stats()["items_sampled"] == 4


def test_a_coordinator_needs_no_torch_before_its_buffer_is_used(scratch_dir: Path) -> None:
    source = (
        "import sys\n"
        "from shmbuffer import Coordinator\n"
        "with Coordinator(sys.argv[1], capacity=8) as c: c.stats()\n"
        "print(*{'torch', 'tensordict'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(scratch_dir)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


# ---- temporary directories ----


def test_a_temporary_directory_is_removed_at_the_end() -> None:
    with Coordinator(capacity=8) as coordinator:
        items.write(engine_of(coordinator), [1])
        scratch_dir = coordinator.scratch_dir
        assert scratch_dir.stat().st_mode & 0o777 == 0o700
    assert not scratch_dir.exists()


@pytest.mark.product(few=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_a_temporary_directory_and_keeps_its_exit_status(number: int) -> None:
    with Program.python(HOLD, "") as program:
        scratch_dir = Path(program.line())
        assert scratch_dir.exists()
        program.send_signal(number)
        assert program.end()[0] == -number
    assert not scratch_dir.exists()


@pytest.mark.product(few=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_directory_of_the_users(scratch_dir: Path, number: int) -> None:
    with Program.python(HOLD, scratch_dir) as program:
        program.line()
        program.send_signal(number)
        assert program.end()[0] == -number
    with Coordinator(scratch_dir, on_existing="recover") as coordinator:
        assert coordinator.stats()["size"] == 3


def test_the_temporary_directory_of_a_killed_owner_is_removed_by_the_next_start() -> None:
    with Program.python(HOLD, "") as program:
        scratch_dir = Path(program.line())
        program.kill()
    assert scratch_dir.exists()
    with Coordinator(capacity=8) as coordinator:
        assert not scratch_dir.exists()
        assert coordinator.scratch_dir.exists()


@pytest.mark.full
def test_that_start_may_be_of_a_directory_of_the_users(tmp_path: Path) -> None:
    with Program.python(HOLD, "") as program:
        left_behind = Path(program.line())
        program.kill()
    with Coordinator(tmp_path / "buffer", capacity=8):
        assert not left_behind.exists()


def test_a_successor_owns_the_temporary_directory_that_it_takes_over() -> None:
    with Program.python(HOLD, "") as program:
        scratch_dir = Path(program.line())
        program.kill()
    with Coordinator(scratch_dir, on_existing="recover") as second:
        assert second.stats()["size"] == 3
        with Coordinator(capacity=8):  # its janitor does not remove the directory
            assert scratch_dir.exists()
    assert not scratch_dir.exists()


@pytest.mark.full
def test_a_successor_may_leave_the_temporary_directory_alone() -> None:
    with Program.python(HOLD, "") as program:
        scratch_dir = Path(program.line())
        program.kill()
    with Coordinator(scratch_dir, on_existing="recover", auto_cleanup=False):
        pass
    try:
        assert scratch_dir.exists()
    finally:
        with Coordinator(scratch_dir, on_existing="recover", auto_cleanup=True):
            pass
    assert not scratch_dir.exists()


def test_a_spawned_child_does_not_remove_a_temporary_directory(reports: Reports) -> None:
    with Coordinator(capacity=8) as coordinator:
        (one,) = coordinator.spawn(targets.stay, 1, reports.out)
        reports.next()
        one.terminate()
        assert coordinator.join(30)
        assert coordinator.scratch_dir.exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_remove_a_temporary_directory() -> None:
    with Coordinator(capacity=8) as coordinator:
        child = os.fork()
        if child == 0:
            coordinator.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert coordinator.scratch_dir.exists()
        assert str(coordinator.scratch_dir).startswith(tempfile.gettempdir())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_waits_for_no_watcher_which_it_does_not_have() -> None:
    with Coordinator(capacity=8) as coordinator:

        def ask() -> None:
            signal.alarm(20)
            assert coordinator.processes == []
            for wait in (coordinator.join, partial(coordinator.wait_for_deaths, 1)):
                with pytest.raises(ForkedHandleError):
                    wait()

        with held_by_another_thread(coordinator._supervisor._changed):
            assert ended(fork(ask)) == 0


@pytest.mark.parametrize("prefault", ["background", "full"])
def test_the_pages_of_an_example_are_made_ahead(
    scratch_dir: Path, prefault: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[ProgressReport] = []
    done = threading.Event()

    def report(now: ProgressReport) -> None:
        heard.append(now)
        if now.done == now.total:
            done.set()

    example = TensorDict({"obs": torch.zeros(4096)}, [])
    with Coordinator(
        scratch_dir, capacity=100, example=example, prefault=prefault, on_progress=report
    ) as coordinator:
        if prefault == "full":
            assert done.is_set()
        assert done.wait(30)
        mapped = engine_of(coordinator).seat.mapped
        assert mapped
        assert heard[-1].total == mapped.nbytes
    assert not caplog.records


def test_the_pages_of_what_a_collector_defines_are_made_when_they_are_there(
    scratch_dir: Path,
) -> None:
    done = threading.Event()
    with Coordinator(
        scratch_dir,
        capacity=8,
        prefault="background",
        on_progress=lambda now: now.done == now.total and done.set(),
    ):
        assert not done.wait(0.01)
        with Engine.open(scratch_dir, None) as engine:
            items.write(engine, [1, 2, 3])
        assert done.wait(30)


def test_an_invalid_prefault_makes_nothing(scratch_dir: Path) -> None:
    with pytest.raises(
        ValueError, match="prefault must be 'off', 'background' or 'full', but is 'on'"
    ):
        Coordinator(scratch_dir, capacity=8, prefault="on")
    assert not scratch_dir.exists()
