"""Saves and loads report their progress, and the callback may stop them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from shmbuffer import (
    CompressedListStorage,
    Coordinator,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ProgressReport,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorStorage,
    attach,
)
from shmbuffer.memory.system import progress
from shmbuffer.storages.movers import tensor_rows
from tests.kit.rings import engine_of

N = 20
Make = Callable[[Path], Any]
RING = {"max_bytes": 2**20, "shared_init": True}


class StoppedError(Exception):
    """The error that a callback raises."""


class StopAt:
    """Records all reports and raises at one of them."""

    def __init__(self, what: str, number: int) -> None:
        self.heard: list[ProgressReport] = []
        self._what, self._number = what, number

    def __call__(self, report: ProgressReport) -> None:
        self.heard.append(report)
        if sum(one.what == self._what for one in self.heard) == self._number:
            raise StoppedError


@pytest.fixture(autouse=True)
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every operation report each slot."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(progress, "PIECE_BYTES", 1)


MAKERS: dict[str, Make] = {
    "memmap": lambda path: LazyMemmapStorage(32),
    "directory": lambda path: LazyMemmapStorage(32, scratch_dir=path, shared_init=True),
    "tensor": lambda path: LazyTensorStorage(32),
    "held": lambda path: TensorStorage(TensorDict({"obs": torch.zeros(32, 3)}, [32])),
    "list": lambda path: ListStorage(32),
    "stack": lambda path: LazyStackStorage(32, scratch_dir=path, **RING),
    "compressed": lambda path: CompressedListStorage(32, scratch_dir=path, **RING),
}
UNITS = {"list": "items"}


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path) -> Callable[[], Any]:
    number = itertools.count()
    return lambda: ReplayBuffer(
        storage=MAKERS[kind](tmp_path / f"buffer{next(number)}"), batch_size=2
    )


def filled(rb: Any, first: float = 0.0) -> Any:
    data = TensorDict({"obs": torch.full((N, 3), first) + torch.arange(float(N))[:, None]}, [N])
    if isinstance(rb.storage, TensorStorage) and len(rb):
        rb.empty()
    rb.extend(data)
    return rb


def numbers(rb: Any) -> list[float]:
    return sorted(float(rb[at]["obs"][0]) for at in range(len(rb)))


def steps(heard: list[ProgressReport]) -> list[str]:
    """Returns the operations in order, after checking that each one advances to its end."""
    for what, group in itertools.groupby(heard, lambda one: (one.what, one.total, one.unit)):
        done = [one.done for one in group]
        assert done == sorted(set(done)), what
        assert done[-1] == what[1] > 0, what
    return [what for what, _ in itertools.groupby(one.what for one in heard)]


def test_a_save_tells_what_is_copied_and_what_is_synced(
    make: Callable[[], Any], kind: str, tmp_path: Path
) -> None:
    heard: list[ProgressReport] = []
    rb = filled(make())
    rb.dumps(tmp_path / "save", on_progress=heard.append)
    assert steps(heard) == ["copy", "sync"]
    copies = [one for one in heard if one.what == "copy"]
    assert copies[0].unit == UNITS.get(kind, "bytes")
    if kind not in ("stack", "compressed"):  # which copy sixteen megabytes at a time
        assert len(copies) == N
    saved = sum(one.stat().st_size for one in (tmp_path / "save").rglob("*") if one.is_file())
    assert heard[-1].total == saved
    rb.close()


def test_a_load_tells_of_it(make: Callable[[], Any], kind: str, tmp_path: Path) -> None:
    filled(make()).dumps(tmp_path / "save")
    heard: list[ProgressReport] = []
    rb = make()
    rb.loads(tmp_path / "save", on_progress=heard.append)
    assert steps(heard) == ["check", "load"]
    assert numbers(rb) == list(range(N))


@pytest.mark.parametrize("door", ["save", "dump"])
def test_the_other_names_of_a_save_and_a_load_do_the_same(door: str, tmp_path: Path) -> None:
    heard: list[ProgressReport] = []
    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    getattr(rb, door)(tmp_path / "save", on_progress=heard.append)
    rb.load(tmp_path / "save", on_progress=heard.append)
    assert steps(heard) == ["copy", "sync", "check", "load"]
    heard.clear()
    getattr(rb.storage, door)(tmp_path / "storage", on_progress=heard.append)
    rb.storage.load(tmp_path / "storage", on_progress=heard.append)
    assert steps(heard) == ["copy", "sync", "check", "load"]
    heard.clear()
    getattr(rb.writer, door)(tmp_path / "writer", on_progress=heard.append)
    assert steps(heard) == ["sync"]


@pytest.mark.product(few=6)
@pytest.mark.parametrize(("what", "number"), [("copy", 1), ("sync", 1), ("sync", 2)])
def test_a_save_that_is_ended_leaves_the_one_before(
    make: Callable[[], Any], what: str, number: int, tmp_path: Path
) -> None:
    rb = filled(make())
    rb.dumps(tmp_path / "save")
    before = {one: one.read_bytes() for one in (tmp_path / "save").rglob("*") if one.is_file()}
    filled(rb, 100.0)
    with pytest.raises(StoppedError):
        rb.dumps(tmp_path / "save", on_progress=StopAt(what, number))
    after = {one: one.read_bytes() for one in (tmp_path / "save").rglob("*") if one.is_file()}
    assert after == before
    assert [one.name for one in tmp_path.iterdir() if "save" in one.name] == ["save"]
    again = make()
    again.loads(tmp_path / "save")
    assert numbers(again) == list(range(N))
    rb.dumps(tmp_path / "save")  # no leftovers block the next save
    assert len(rb.sample()) == 2


def test_the_last_report_of_a_save_comes_before_it_is_visible(tmp_path: Path) -> None:
    def stop(report: ProgressReport) -> None:
        if report.what == "sync" and report.done == report.total:
            raise StoppedError

    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    with pytest.raises(StoppedError):
        rb.dumps(tmp_path / "save", on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_do_not_change_the_last_report_of_a_save(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "notes.txt").write_text("mine")
    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    with pytest.raises(StoppedError):
        rb.dumps(tmp_path / "save", on_progress=StopAt("sync", 2))
    assert [one.name for one in (tmp_path / "save").iterdir()] == ["notes.txt"]


@pytest.mark.product(few=5)
@pytest.mark.parametrize("number", [1, 2])
def test_a_load_that_is_ended_leaves_the_buffer_empty_or_as_it_was_and_says_so(
    make: Callable[[], Any],
    kind: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled(make()).dumps(tmp_path / "save")
    rb = filled(make(), 100.0)
    stop = StopAt("load", number)
    if kind in ("stack", "compressed"):
        monkeypatch.setattr("shmbuffer.saves.checkpointers.record_image._PIECE_BYTES", 64)
    with pytest.raises(StoppedError) as ended:
        rb.loads(tmp_path / "save", on_progress=stop)
    if kind == "list":  # items are read before anything is changed
        assert not hasattr(ended.value, "__notes__")
        assert numbers(rb) == [100.0 + one for one in range(N)]
    else:
        assert ended.value.__notes__ == [
            f"{rb.storage.where}: the load was interrupted, so the buffer is empty; load again"
        ]
        assert len(rb) == 0
    rb.loads(tmp_path / "save")
    assert numbers(rb) == list(range(N))
    assert len(rb.sample()) == 2


def test_records_that_are_looked_at_first_are_not_changed_when_that_is_ended(
    tmp_path: Path,
) -> None:
    make = MAKERS["stack"]
    filled(ReplayBuffer(storage=make(tmp_path / "one"))).dumps(tmp_path / "save")
    rb = filled(ReplayBuffer(storage=make(tmp_path / "two"), batch_size=2), 100.0)
    with pytest.raises(StoppedError):
        rb.loads(tmp_path / "save", on_progress=StopAt("check", 1))
    assert numbers(rb) == [100.0 + one for one in range(N)]


def test_a_buffer_that_was_emptied_is_usable_and_its_sampler_knows(tmp_path: Path) -> None:
    def made() -> Any:
        storage = LazyMemmapStorage(32)
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=4)

    filled(made()).dumps(tmp_path / "save")
    rb = filled(made())
    with pytest.raises(StoppedError):
        rb.loads(tmp_path / "save", on_progress=StopAt("load", 5))
    assert (len(rb), rb.stats()["p_sum"]) == (0, 0.0)
    filled(rb, 7.0)
    assert set(rb.sample()["index"].tolist()) <= set(range(N))
    assert engine_of(rb).check().ok


def test_a_load_that_is_ended_by_a_signal_leaves_it_empty_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_rows, "PIECE", 4)
    filled(ReplayBuffer(storage=LazyMemmapStorage(32))).dumps(tmp_path / "save")
    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)), 100.0)
    fill = type(rb.storage.mover())._replace_some
    calls = itertools.count()

    def interrupted(self: Any, *arguments: Any, **options: Any) -> None:
        fill(self, *arguments, **options)
        if next(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(rb.storage.mover()), "_replace_some", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rb.loads(tmp_path / "save")
    assert len(rb) == 0


def test_the_members_of_an_ensemble_are_told_of_one_after_the_other(tmp_path: Path) -> None:
    def ensemble() -> Any:
        members = [ReplayBuffer(storage=LazyMemmapStorage(32), batch_size=2) for _ in range(2)]
        return ReplayBufferEnsemble(*members, batch_size=4)

    rb = ensemble()
    for member in (rb[0], rb[1]):
        filled(member)
    heard: list[ProgressReport] = []
    rb.dumps(tmp_path / "save", on_progress=heard.append)
    ends = [one.what for one in heard if one.done == one.total]
    assert ends == ["copy", "copy", "sync"]
    heard.clear()
    other = ensemble()
    other.loads(tmp_path / "save", on_progress=heard.append)
    done = [one.what for one in heard if one.done == one.total]
    assert done == ["check", "load", "check", "load"]
    assert [len(other[0]), len(other[1])] == [N, N]


def test_a_part_of_the_user_s_own_need_not_know_of_it(tmp_path: Path) -> None:
    class Mine(LazyMemmapStorage):
        def dumps(self, path: Any) -> None:  # type: ignore[override] # TorchRL's arguments
            super().dumps(path)

        def loads(self, path: Any) -> None:  # type: ignore[override]
            super().loads(path)

    heard: list[ProgressReport] = []
    storage = filled(ReplayBuffer(storage=Mine(32))).storage
    storage.save(tmp_path / "save", on_progress=heard.append)
    storage.load(tmp_path / "save", on_progress=heard.append)
    assert steps(heard) == ["copy", "sync", "check", "load"]


def test_what_cannot_be_called_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    calls: tuple[Callable[..., None], ...] = (rb.dumps, rb.storage.dumps, rb.writer.dumps)
    for call in calls:
        with pytest.raises(
            TypeError,
            match="on_progress must be a function or None, but is 1",
        ):
            call(tmp_path / "save", on_progress=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [BrokenPipeError, FileNotFoundError])
def test_an_error_of_the_callback_comes_out_unchanged(kind: type[OSError], tmp_path: Path) -> None:
    def fail(_report: ProgressReport) -> None:
        raise kind(32, "of the terminal")  # an error to which a file name is added

    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    rb.dumps(tmp_path / "save")
    for call in (rb.dumps, rb.loads):
        with pytest.raises(kind) as ended:
            call(tmp_path / "save", on_progress=fail)
        assert str(ended.value) == "[Errno 32] of the terminal"


def test_an_error_of_the_callback_during_a_sync_comes_out_unchanged(tmp_path: Path) -> None:
    def fail(report: ProgressReport) -> None:
        if report.what == "sync":
            raise PermissionError(13, "of the terminal")

    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    with pytest.raises(PermissionError) as ended:
        rb.dumps(tmp_path / "save", on_progress=fail)
    assert str(ended.value) == "[Errno 13] of the terminal"


def test_a_removal_is_not_retried_after_another_save(tmp_path: Path) -> None:
    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    rb.dumps(tmp_path / "save")
    other = filled(ReplayBuffer(storage=LazyMemmapStorage(32)), 100.0)
    heard: list[ProgressReport] = []

    def fail(report: ProgressReport) -> None:
        heard.append(report)
        other.dumps(tmp_path / "save")
        raise FileNotFoundError("mine")

    with pytest.raises(FileNotFoundError, match="mine"):
        rb.loads(tmp_path / "save", on_progress=fail)
    assert len(heard) == 1
    rb.loads(tmp_path / "save")
    assert numbers(rb) == [100.0 + one for one in range(N)]


def test_it_is_by_name_only(tmp_path: Path) -> None:
    rb = filled(ReplayBuffer(storage=LazyMemmapStorage(32)))
    with pytest.raises(TypeError, match="positional"):
        rb.dumps(tmp_path / "save", print)


def test_a_buffer_that_is_loaded_from_where_it_lives_tells_of_the_copy(tmp_path: Path) -> None:
    live = filled(ReplayBuffer(storage=MAKERS["directory"](tmp_path / "live")))
    rb = ReplayBuffer(storage=LazyMemmapStorage(32))
    heard: list[ProgressReport] = []
    rb.storage.loads(tmp_path / "live", on_progress=heard.append)
    assert steps(heard) == ["copy", "load"]
    assert numbers(rb) == numbers(live)


def test_objects_next_to_tensors_are_counted_as_references(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(32))
    words = NonTensorStack(*map(str, range(N)))
    rb.extend(TensorDict({"obs": torch.rand(N, 3), "word": words}, [N]))
    heard: list[ProgressReport] = []
    rb.dumps(tmp_path / "save", on_progress=heard.append)
    assert heard[0].total == N * (12 + 8)
    other = ReplayBuffer(storage=LazyTensorStorage(32))
    other.loads(tmp_path / "save", on_progress=heard.append)
    assert steps(heard) == ["copy", "sync", "check", "load"]
    assert other[:]["word"] == rb[:]["word"]


def test_a_large_file_is_synced_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PIECE_BYTES", 2**16)
    rb = ReplayBuffer(storage=LazyMemmapStorage(32))
    rb.extend(TensorDict({"obs": torch.rand(32, 2**14)}, [32]))
    heard: list[ProgressReport] = []
    rb.dumps(tmp_path / "save", on_progress=heard.append)
    synced = [one.done for one in heard if one.what == "sync"]
    assert max(b - a for a, b in itertools.pairwise(synced)) == 2**16
    other = ReplayBuffer(storage=LazyMemmapStorage(32))
    other.loads(tmp_path / "save")
    assert torch.equal(other[:]["obs"], rb[:]["obs"])


# -- who opens a directory -------------------------------------------------------------------------


def dead_copy(tmp_path: Path) -> Path:
    """Makes a copied directory, so that each of its items is verified."""
    filled(ReplayBuffer(storage=MAKERS["directory"](tmp_path / "first"))).close()
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "open_it",
    [
        lambda path, heard: attach(path, on_progress=heard),
        lambda path, heard: Coordinator(path, on_existing="recover", on_progress=heard),
        lambda path, heard: ReplayBuffer(
            storage=LazyMemmapStorage(32, scratch_dir=path, shared_init=True, on_progress=heard)
        ),
    ],
    ids=["attach", "coordinator", "storage"],
)
def test_a_recovery_is_reported_to_the_process_that_opens_the_directory(
    open_it: Any, tmp_path: Path
) -> None:
    heard: list[ProgressReport] = []
    path = dead_copy(tmp_path)
    with pytest.raises(StoppedError):
        open_it(path, StopAt("recover", 3))
    opened = open_it(path, heard.append)
    assert steps(heard) == ["recover"]
    assert heard[-1].total == N
    opened.close()


# -- and in the middle of it everything ends -------------------------------------------------------


def die_at(buffer: Path, save: Path, call: str, what: str, number: int) -> None:
    """Saves or loads in a process that is killed at the given report."""
    heard = []

    def die(report: Any) -> None:
        heard.append(report.what)
        if heard.count(what) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    progress.EVERY_S, progress.PIECE_BYTES = 0.0, 1
    rb = ReplayBuffer(storage=LazyMemmapStorage(32, scratch_dir=buffer, shared_init=True))
    getattr(rb, call)(save, on_progress=die)


def killed_at(*arguments: object) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=die_at, args=arguments)
    process.start()
    process.join(50)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("what", "number"), [("copy", 5), ("sync", 3)])
def test_a_kill_while_saving_leaves_the_save_before(what: str, number: int, tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    rb = filled(ReplayBuffer(storage=MAKERS["directory"](path)))
    rb.dumps(tmp_path / "save")
    filled(rb, 100.0)
    killed_at(path, tmp_path / "save", "dumps", what, number)
    other = ReplayBuffer(storage=LazyMemmapStorage(32))
    other.loads(tmp_path / "save")
    assert numbers(other) == list(range(N))
    rb.dumps(tmp_path / "save")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["buffer", "save"]


def test_a_kill_while_loading_leaves_a_sound_buffer_that_can_be_loaded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "buffer"
    rb = filled(ReplayBuffer(storage=MAKERS["directory"](path)))
    rb.dumps(tmp_path / "save")
    filled(rb, 100.0).close()
    killed_at(path, tmp_path / "save", "loads", "load", 7)
    with attach(path) as after:
        assert numbers(after) == list(range(7))
        assert engine_of(after).check().ok
        after.loads(tmp_path / "save")
        assert numbers(after) == list(range(N))
