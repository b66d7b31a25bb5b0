"""A save that somebody prepared, and what others put beside one.

Nothing outside of the save is read as ours, emptied, moved, written over or removed, no path is
blocked for good, and no load waits for a file that never ends.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from shmbuffer import (
    CompressedListStorage,
    ConsumingSampler,
    CorruptBufferError,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    ShmBufferError,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    UnsafePathError,
)
from shmbuffer.saves import publication
from shmbuffer.saves.file_tree import MANIFEST
from shmbuffer.saves.publication import finish, publish, publish_file
from shmbuffer.saves.values import Parts
from shmbuffer.torchrl.compat.storages import METADATA
from tests.damage.hostile import ROOT_TRAPS, TRAPS
from tests.damage.test_damaged_saves import end
from tests.kit.programs import as_nobody, in_fork, needs_root
from tests.replay.episodes import stream
from tests.replay.test_publication import save, tree

WORK = ".shmbuffer-save"


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Path]:
    """A directory outside, with what nobody may touch; it is looked at in the end."""
    away = tmp_path / "away"
    (away / "below").mkdir(parents=True)
    (away / "precious").write_text("mine")
    (away / "below" / "precious").write_text("mine too")
    yield away
    assert tree(away) == {"precious": "mine", "below/precious": "mine too"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A save."""
    path = tmp_path / "runs" / "run"
    save(path, {"a": "1", "b/c": "2"})
    return path


def work_directory(where: Path, *, plan: object = None) -> Path:
    """What a dead process leaves, as somebody else would make it."""
    (where / "checkpoint").mkdir(parents=True)
    (where / "owner").write_text("1")
    if plan is not None:
        (where / "complete.json").write_text(json.dumps(plan))
    return where


def to_a_file(owner: Path, away: Path) -> None:
    owner.symlink_to(away / "precious")


def by_a_hard_link(owner: Path, away: Path) -> None:
    os.link(away / "precious", owner)


def a_fifo(owner: Path, away: Path) -> None:
    os.mkfifo(owner)


def a_directory(owner: Path, away: Path) -> None:
    owner.mkdir()


@pytest.mark.parametrize("trap", [to_a_file, by_a_hard_link, a_fifo, a_directory])
def test_a_foreign_file_in_the_place_of_an_owner_file_is_not_opened(
    path: Path, away: Path, trap: Callable[[Path, Path], None]
) -> None:
    beside = work_directory(path.parent / ".run.0a1b.shmbuffer-save")
    (beside / "owner").unlink()
    trap(beside / "owner", away)
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3"}
    assert beside.exists()

    within = work_directory(path / WORK, plan={"remove": []})
    (within / "owner").unlink()
    trap(within / "owner", away)
    for call in (lambda: finish(path), lambda: save(path, {"a": "4"})):
        with pytest.raises(UnsafePathError, match=r"shmbuffer-save/owner: .* (put|move|remove)"):
            call()
    shutil.rmtree(within)  # as the message says, or more
    save(path, {"a": "4"})
    assert tree(path) == {"a": "4"}


def test_a_work_directory_that_is_a_link_is_no_work_directory(path: Path, away: Path) -> None:
    work_directory(away.parent / "theirs", plan={"remove": ["precious"]})
    (path / WORK).symlink_to(away.parent / "theirs")
    (path.parent / ".run.0a1b.shmbuffer-save").symlink_to(away.parent / "theirs")
    finish(path)
    with pytest.raises(UnsafePathError, match=r"shmbuffer-save: .*symbolic link.* move it away"):
        save(path, {"a": "3"})
    (path / WORK).unlink()
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3"}
    assert set(tree(away.parent / "theirs")) == {"owner", "complete.json"}


@pytest.mark.parametrize("way", ["lnk/precious", "lnk/below/precious", "b/lnk/precious"])
def test_a_plan_removes_nothing_behind_a_link(path: Path, away: Path, way: str) -> None:
    link = path / way.partition("/precious")[0].removesuffix("/below")
    for call in (lambda: finish(path), lambda: save(path, {"a": "3"})):
        if not link.is_symlink():
            link.symlink_to(away)
        work_directory(path / WORK, plan={"remove": [way, "b/c"]})
        call()
        assert not (path / WORK).exists()
        assert not (path / "b" / "c").exists()


def test_files_are_not_taken_from_behind_a_link(path: Path, away: Path) -> None:
    work = work_directory(path / WORK, plan={"remove": []})
    (work / "checkpoint").rmdir()
    (work / "checkpoint").symlink_to(away)
    for call in (lambda: finish(path), lambda: save(path, {"a": "3"})):
        with pytest.raises(UnsafePathError, match=r"checkpoint: .*symbolic link.* move it away"):
            call()
    (work / "checkpoint").unlink()
    with pytest.raises(CorruptBufferError, match=r"checkpoint is missing.*remove"):
        finish(path)
    shutil.rmtree(work)
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3"}


def test_a_folder_that_is_a_link_within_what_is_moved_is_moved_as_a_link(
    path: Path, away: Path
) -> None:
    work = work_directory(path / WORK, plan={"remove": []})
    (work / "checkpoint" / "d").symlink_to(away)
    finish(path)
    assert os.readlink(path / "d") == str(away)


def test_a_list_of_files_removes_nothing_behind_a_link(path: Path, away: Path) -> None:
    (path / "lnk").symlink_to(away)
    (path / MANIFEST).write_text(json.dumps({"format": 1, "files": ["a", "lnk/precious"]}))
    save(path, {"d": "3"})
    assert {name for name in tree(path) if not name.startswith("lnk")} == {"b/c", "d"}


def test_a_list_that_is_a_fifo_or_a_link_is_no_list(path: Path, away: Path) -> None:
    (path / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)
    save(path, {"a": "3"})
    (path / MANIFEST).unlink()
    (away.parent / "list").write_text(json.dumps({"files": ["a", "b/c"]}))
    (path / MANIFEST).symlink_to(away.parent / "list")
    save(path, {"a": "4"})
    assert tree(path) == {"a": "4", "b/c": "2"}


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"remove": 3}', "{}", "[" * 100_000, ""])
def test_a_plan_that_makes_no_sense_is_a_clear_error_and_blocks_nothing_for_good(
    path: Path, text: str
) -> None:
    work = work_directory(path / WORK)
    (work / "complete.json").write_text(text)
    for call in (lambda: finish(path), lambda: save(path, {"a": "3"})):
        with pytest.raises(CorruptBufferError, match=f"complete.json: .*remove {work}, then"):
            call()
        assert {"a": "1", "b/c": "2"}.items() <= tree(path).items()
    shutil.rmtree(work)
    finish(path)
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_look_into_a_work_directory_or_write_to_a_save(
    tmp_path: Path, umask: int
) -> None:
    path, before = tmp_path / "run", os.umask(umask)
    try:
        for within in (False, True):
            with publish(path, within=within) as directory:
                (directory / "b").mkdir()
                (directory / "b" / "c").write_text("1")
                above = path if within else tmp_path
                (work,) = (each for each in above.iterdir() if each.name.endswith(WORK))
                assert stat.S_IMODE(work.stat().st_mode) == 0o700
                assert stat.S_IMODE((work / "owner").stat().st_mode) == 0o600
            for each in (path, *path.rglob("*")):
                full = 0o777 if each.is_dir() else 0o666
                assert stat.S_IMODE(each.stat().st_mode) == full & ~umask & ~stat.S_IWOTH, each
    finally:
        os.umask(before)


@pytest.mark.parametrize("within", [False, True])
def test_nothing_is_left_where_every_directory_is_open_to_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """As file systems without permissions show them; the save is refused."""
    path, mkdir, chmod = tmp_path / "run", os.mkdir, os.chmod
    save(path, {"a": "1"})

    def open_to_everybody(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        chmod(name, 0o777, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", open_to_everybody)
        patch.setattr(os, "chmod", lambda *_, **__: None)
        with pytest.raises(UnsafePathError, match=f"{WORK}: everybody can write there"):
            save(path, {"a": "2"}, within=within)
    assert os.listdir(tmp_path) == ["run"]
    assert sorted(os.listdir(path)) == ["a", MANIFEST]


def exchange_names(work: Path, away: Path) -> None:
    """As somebody can who may write to the directory beside: the work directory is theirs now."""
    work.rename(work.with_name("gone"))
    (work / "checkpoint").mkdir(parents=True)
    (work / "checkpoint" / "a").symlink_to(away / "precious")
    (work / "checkpoint" / "below").symlink_to(away / "below")
    (work / "owner").symlink_to(away / "precious")


def test_a_save_writes_to_its_work_directory_even_if_its_name_is_replaced(
    path: Path, away: Path
) -> None:
    with publish(path) as directory:
        (work,) = path.parent.glob(f".run.*{WORK}")
        exchange_names(work, away)
        (directory / "a").write_text("3")
        (directory / "below").mkdir()
        (directory / "below" / "precious").write_text("4")
    assert tree(path) == {"a": "3", "below/precious": "4"}


def test_a_file_is_checked_again_after_its_move(
    path: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the earlier save and the exchange another directory takes its name."""
    theirs = path.parent / "theirs"
    (theirs / "d").mkdir(parents=True)
    (theirs / "d" / "precious").write_text("mine")
    exchange = publication.exchange
    left = [True]

    def late(*names: object) -> bool:
        if left and left.pop():
            path.rename(path.with_name("earlier"))
            theirs.rename(path)
        return exchange(*names)  # type: ignore[arg-type]

    monkeypatch.setattr(publication, "exchange", late)
    save(path, {"a": "3"})
    assert tree(path) == {"a": "3", "d/precious": "mine"}
    assert tree(path.with_name("earlier")) == {"a": "1", "b/c": "2"}


def test_a_work_directory_that_is_exchanged_on_its_way_into_the_save_is_not_taken(
    path: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> bool:
        (work,) = path.parent.glob(f".run.*{WORK}")
        exchange_names(work, away)
        return False

    monkeypatch.setattr(publication, "exchange", late)
    with pytest.raises(UnsafePathError, match=r"shmbuffer-save: another process .*remove it"):
        save(path, {"a": "3"})
    shutil.rmtree(path / WORK)
    assert tree(path) == {"a": "1", "b/c": "2"}


def test_a_link_next_to_a_single_file_is_not_written_through(tmp_path: Path, away: Path) -> None:
    target = tmp_path / "run.h5"
    (tmp_path / f".run.h5.{os.getpid()}.shmbuffer-save").symlink_to(away / "precious")
    with publish_file(target) as file:
        file.write_text("1")
    assert target.read_text() == "1"
    target.unlink()
    target.symlink_to(away / "precious")
    with publish_file(target) as file:
        file.write_text("2")
    assert target.read_text() == "2"
    with suppress(OSError), publish_file(target) as file:
        file.write_text("3")
        raise OSError
    assert target.read_text() == "2"
    assert [each for each in os.listdir(tmp_path) if each.endswith(WORK)] == [
        f".run.h5.{os.getpid()}.shmbuffer-save"
    ]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody can look into; pytest's own are closed to others."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@needs_root
def test_foreign_files_next_to_a_save_are_ignored_and_kept(public: Path) -> None:
    path, mine = public / "run", public / "precious"
    mine.write_text("mine")

    def plant() -> None:
        as_nobody()
        os.umask(0)
        for owner in ("a link", "a file"):
            work = work_directory(public / f".run.{owner}.shmbuffer-save")
            (work / "checkpoint" / "theirs").write_text("theirs")
            if owner == "a link":
                (work / "owner").unlink()
                (work / "owner").symlink_to(mine)

    assert in_fork(plant) == 0
    before = tree(public)
    save(path, {"a": "1"})
    save(path, {"a": "2"})
    assert tree(public) == before | {"run/a": "2"}


@needs_root
def test_a_save_of_another_user_can_be_read_and_is_not_changed(public: Path) -> None:
    path = public / "run"

    def theirs() -> None:
        as_nobody()
        save(path, {"a": "1"})
        (path / "lnk").symlink_to("/")

    assert in_fork(theirs) == 0
    finish(path)
    with pytest.raises(UnsafePathError, match=r"run: belongs to uid .*directory of your own"):
        save(path, {"a": "2"})
    assert (path / "a").read_text() == "1"
    assert os.listdir(public) == ["run"]


@needs_root
def test_the_work_directory_of_another_user_is_ignored_for_our_save(public: Path) -> None:
    path = public / "run"
    save(path, {"a": "1"})
    path.chmod(0o777)

    def plant() -> None:
        as_nobody()
        work_directory(path / WORK, plan={"remove": ["a"]})

    assert in_fork(plant) == 0
    finish(path)
    assert (path / "a").read_text() == "1"
    with pytest.raises(ShmBufferError, match=r"everybody can write there .*chmod o-w"):
        save(path, {"a": "2"})


@needs_root
@pytest.mark.parametrize("by_a_link_of_ours", [False, True])
def test_a_link_of_another_user_in_a_shared_directory_is_not_followed(
    public: Path, away: Path, by_a_link_of_ours: bool
) -> None:
    public.chmod(0o1777)
    path = way = public / "run"

    def plant() -> None:
        as_nobody()
        path.symlink_to(away)

    assert in_fork(plant) == 0
    if by_a_link_of_ours:
        way = public / "ours"
        way.symlink_to("./../" + public.name + "/run/")
    for call in (lambda: finish(way), lambda: save(way, {"precious": "2"})):
        with pytest.raises(UnsafePathError, match=r"run: a link of uid 65534 .*not followed"):
            call()
    os.chown(public, 65534, -1)  # what is in their own directory is theirs to say
    finish(way)


class Scaled(torch.nn.Module):
    """A transform with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, data: Any) -> Any:
        return data


def steps(first: int) -> TensorDict:
    return stream(6, seed=first)


def rows_with_everything() -> Any:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(8, 0.7, 0.4),
        generator=torch.Generator().manual_seed(1),
        batch_size=4,
        prefetch=2,
    )
    rb.append_transform(Scaled())
    return rb


def labelled(first: int) -> TensorDict:
    data = steps(first)
    data["text"] = NonTensorStack(*[f"{first + i}" for i in range(6)])
    return data


def tree_of_tensors() -> Any:
    return ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)


def objects(storage: Callable[[int], Any]) -> Any:
    return ReplayBuffer(storage=storage(8), batch_size=4, collate_fn=lambda batch: batch)


def records(**options: Any) -> Any:
    storage = LazyStackStorage(8, max_bytes=2**16, shared_init=True)
    return TensorDictReplayBuffer(storage=storage, batch_size=4, **options)


def of_tensordicts(**options: Any) -> Any:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, **options)


def of_episodes(checkpointer: Any) -> Any:
    return of_tensordicts(checkpointer=checkpointer)


#: Of each kind of save: the buffer, what it is given, and the files that a load does not need.
SAVES: dict[str, tuple[Callable[[], Any], Callable[[int], Any], set[str]]] = {
    "rows, with everything": (
        rows_with_everything,
        labelled,
        {"sampler/sumtree.memmap", "sampler/mintree.memmap"},
    ),
    "rows of a pytree": (
        tree_of_tensors,
        lambda first: (torch.arange(first, first + 6), {"k": torch.ones(6, 2)}),
        set(),
    ),
    "rows with a consumer": (lambda: of_tensordicts(sampler=ConsumingSampler()), steps, set()),
    "rows with a pass": (lambda: of_tensordicts(sampler=SamplerWithoutReplacement()), steps, set()),
    "rows with windows": (
        lambda: of_tensordicts(
            sampler=StreamingSliceSampler(slice_len=2, traj_key=("collector", "traj_ids"))
        ),
        steps,
        set(),
    ),
    "rows with ranks": (
        lambda: of_tensordicts(writer=TensorDictMaxValueWriter(rank_key="action")),
        steps,
        {"writer/current_top_values.memmap"},
    ),
    "records": (records, steps, set()),
    "records with a consumer": (lambda: records(sampler=ConsumingSampler()), steps, set()),
    "list": (
        lambda: objects(ListStorage),
        lambda first: [{"x": torch.ones(first + i), "z": np.arange(3)} for i in range(6)],
        set(),
    ),
    "compressed": (
        lambda: objects(CompressedListStorage),
        lambda first: [{"x": torch.ones(first + i), "s": "t"} for i in range(6)],
        set(),
    ),
    "flat episodes": (lambda: of_episodes(FlatStorageCheckpointer()), steps, set()),
    "nested episodes": (lambda: of_episodes(NestedStorageCheckpointer()), steps, set()),
    "episodes in HDF5": (lambda: of_episodes(H5StorageCheckpointer()), steps, set()),
}


def content(rb: Any) -> tuple[Any, ...]:
    """The items of a buffer, in a form that can be compared."""
    parts = Parts(rb[:])
    return parts.form, parts.objects, list(map(bytes, parts.chunks))


def load_with_traps(saved: Path, victim: Path, kind: str, trap: str, log: Path) -> None:
    """Loads a save with a trap in the place of each file; to be called in a child.

    The log names the file while its load runs, and has the unexpected results at the end.
    """
    make, data, _ = SAVES[kind]
    target, wrong, unread = None, [], set()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for file in sorted(str(one.relative_to(saved)) for one in saved.rglob("*") if one.is_file()):
        copy = saved.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        (TRAPS | ROOT_TRAPS)[trap](copy / file, victim)
        if target is None:
            target = make()
            target.extend(data(20))
            before = content(target)
        log.write_text(file)
        signal.alarm(120)  # ends the child, also within a call of the system
        try:
            target.loads(copy)
        except (UnsafePathError, CorruptBufferError) as error:
            if str(copy / file) not in str(error) or content(target) != before:
                wrong.append(f"{file}: {error}")
        else:
            unread.add(file)
            end(target)
            target = None
        finally:
            signal.alarm(0)
    if target is not None:
        end(target)
    log.write_text(json.dumps({"wrong": wrong, "unread": sorted(unread)}))


@pytest.mark.product
@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize(
    "trap",
    [
        *("a link", "a link to itself", "a FIFO", "a directory", "a socket"),
        pytest.param("a device", marks=needs_root),  # /dev/zero, which can be read without end
    ],
)
def test_what_replaces_a_file_of_a_save_is_refused_at_once_and_the_buffer_keeps_its_items(
    tmp_path: Path, kind: str, trap: str
) -> None:
    make, data, unread = SAVES[kind]
    rb = make()
    rb.extend(data(1))
    if rb._sampler is not None and kind != "rows with ranks":
        rb.sample()
    rb.dumps(tmp_path / "saved", extra={"step": torch.ones(2)})
    end(rb)
    log, most = tmp_path / "log", resource.getrlimit(resource.RLIMIT_AS)[1]

    def child() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + 2**32  # what reads a device to its end fails
        resource.setrlimit(resource.RLIMIT_AS, (room, most))
        load_with_traps(tmp_path / "saved", tmp_path / "victim", kind, trap, log)

    assert in_fork(child) == 0, log.read_text()
    found = json.loads(log.read_text())
    assert found["wrong"] == []
    assert set(found["unread"]) == unread | {MANIFEST}


def test_a_save_reads_no_file_outside_of_its_directory(tmp_path: Path) -> None:
    """The names of the tensors of a PyTree are in its metadata."""
    outside = tmp_path / "outside"
    outside.with_suffix(".memmap").write_bytes(bytes(48))
    rb = tree_of_tensors()
    rb.extend(torch.arange(6))
    rb.dumps(tmp_path / "saved")
    for name in (str(outside), "...outside"):
        about = {"device": "cpu", "dtype": "torch.int64", "shape": [6]}
        metadata = {"is_pytree": True, "len": 6, "metadata": {name: about}}
        (tmp_path / "saved" / "storage" / METADATA).write_text(json.dumps(metadata))
        with pytest.raises(CorruptBufferError, match=f"{METADATA}: .*outside.* not the name of a"):
            tree_of_tensors().loads(tmp_path / "saved")


@pytest.mark.parametrize("way", ["external storage", "an external link", "a virtual dataset"])
def test_an_hdf5_file_of_a_save_takes_no_data_from_other_files(tmp_path: Path, way: str) -> None:
    rb = of_episodes(H5StorageCheckpointer())
    rb.extend(steps(1))
    rb.dumps(tmp_path / "saved")
    file = tmp_path / "saved" / "storage" / "checkpoint.h5"
    with h5py.File(file, "r+") as content:
        if way == "external storage":
            os.mkfifo(tmp_path / "fifo")
            content.create_dataset("x", (8,), "u1", external=[(tmp_path / "fifo", 0, 8)])
        elif way == "an external link":
            content["x"] = h5py.ExternalLink(tmp_path / "other.h5", "/x")
        else:
            layout = h5py.VirtualLayout((8,), "u1")
            layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", (8,))
            content.create_virtual_dataset("x", layout)
    with pytest.raises(UnsafePathError, match=r"checkpoint.h5: the data of /x are in another file"):
        of_episodes(H5StorageCheckpointer()).loads(tmp_path / "saved")


def test_the_path_of_a_save_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    (tmp_path / "link.h5").symlink_to(tmp_path / "storage.h5")
    for checkpointer in (None, FlatStorageCheckpointer(), H5StorageCheckpointer()):
        rb, other = of_episodes(checkpointer), of_episodes(checkpointer)
        rb.extend(steps(1))
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "link")
        assert content(other) == content(rb)
        (tmp_path / "link to it").symlink_to(tmp_path / "saved" / "storage")
        again = of_episodes(checkpointer)
        again.storage.checkpointer.loads(again.storage, tmp_path / "link to it")
        assert content(again) == content(rb)
        (tmp_path / "link to it").unlink()
    rb.storage.checkpointer.dumps(rb.storage, tmp_path / "storage.h5")
    again.storage.checkpointer.loads(again.storage, tmp_path / "link.h5")
    assert content(again) == content(rb)
