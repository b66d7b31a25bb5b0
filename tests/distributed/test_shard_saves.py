"""Saves of several shards: removed files, concurrent saves, and refused lists. Without Ray."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import BufferExistsError, BufferNotFoundError, CorruptBufferError, UnsafePathError
from shmbuffer.distributed.shards.shard_saves import LIST, save_shards, saves_of_nodes
from shmbuffer.memory.format.layout import PARTS, PRIVATE
from shmbuffer.saves.publication import publish
from tests.crash.harness import is_killed_at
from tests.crash.test_save_points import points
from tests.kit.programs import needs_root

NODES = ("a", "10.0.0.2")
OLD = dict.fromkeys(NODES, "old")
NEW = dict.fromkeys(NODES, "new")


class Shard:
    """A member whose keeper is in this process and whose save is two files."""

    class totals:  # noqa: N801 - as the attribute of `Member`
        length = 1

    def __init__(self, node: str, content: str, during: Callable[[Path], None]) -> None:
        self.node, self.content, self.during = node, content, during

    def whole(self, name: str, path: Path) -> None:
        assert name == "dumps"
        self.during(path)
        with publish(path, "shard") as directory:
            write(directory, self.content)


def write(directory: Path, content: str) -> None:
    """Writes a file that stands for the save of a shard."""
    (directory / "storage" / PARTS).mkdir(parents=True)
    (directory / "storage" / "items").write_text(content)


class Shards(list[Shard]):
    """Members that all answer."""

    def missing_nodes(self) -> list[str]:
        return []

    def require_all(self, *_: Any) -> None:
        pass


def shards(contents: dict[str, str], during: Callable[[Path], None] = lambda _: None) -> Any:
    return Shards(Shard(node, content, during) for node, content in contents.items())


def loaded(path: Path) -> dict[str, str]:
    """Returns what each node loads."""
    saves = saves_of_nodes(shards(NEW), path)
    return {node: (save / "storage" / "items").read_text() for node, save in saves.items()}


def require_only_one_save(path: Path, *foreign: str) -> None:
    """Checks that there are no files of another save and no work directory."""
    assert sorted(os.listdir(path)) == sorted(["storage", *foreign])
    assert sorted(os.listdir(path / "storage")) == sorted([*NODES, LIST, PRIVATE])


def test_a_save_replaces_the_previous_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    save_shards(shards(OLD), path)
    assert loaded(path) == OLD
    (path / "precious").write_text("mine")
    for contents in (NEW, OLD):
        save_shards(shards(contents), path)
        assert loaded(path) == contents
        require_only_one_save(path, "precious")
    assert os.listdir(path.parent) == ["run"]
    (path / "storage" / "precious").write_text("mine")
    with pytest.raises(BufferExistsError, match="precious in this directory does not"):
        save_shards(shards(NEW), path)
    assert loaded(path) == OLD


@needs_root
def test_another_users_directory_is_refused_and_no_link_in_it_is_followed(tmp_path: Path) -> None:
    path, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("mine")
    path.mkdir()
    for name in ("storage", ".shmbuffer-save"):
        (path / name).symlink_to(victim)
    os.chown(path, 65534, 65534)
    path.chmod(0o777)
    before = sorted(os.listdir(path))
    with pytest.raises(UnsafePathError, match=r"run: belongs to uid 65534.*; use a directory of"):
        save_shards(shards(NEW), path)
    assert sorted(os.listdir(path)) == before
    assert victim.read_text() == "mine"


def test_a_directory_where_everybody_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(
        UnsafePathError, match=r"all users can write to this directory .*`chmod o-w"
    ):
        save_shards(shards(NEW), tmp_path)
    assert not list(tmp_path.iterdir())


def test_of_two_saves_at_the_same_time_the_last_one_stays(tmp_path: Path) -> None:
    path, other = tmp_path / "run", dict.fromkeys(NODES, "other")

    def save_too(_: Path) -> None:
        save_shards(shards(other), path)
        assert loaded(path) == other

    save_shards(shards(NEW, save_too), path)
    assert loaded(path) == NEW
    require_only_one_save(path)


def test_a_keeper_that_cannot_save_leaves_the_previous_save(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        if path.name == NODES[1]:
            raise RuntimeError("the shard of that node does not answer")

    save_shards(shards(OLD), tmp_path)
    with pytest.raises(RuntimeError, match="does not answer"):
        save_shards(shards(NEW, fail), tmp_path)
    assert loaded(tmp_path) == OLD
    require_only_one_save(tmp_path)


def test_a_keeper_that_answers_after_its_save_has_ended_saves_nothing(tmp_path: Path) -> None:
    late = []
    save_shards(shards(OLD, late.append), tmp_path)
    for path in late:
        with pytest.raises(BufferNotFoundError, match="the save operation that used it has ended"):
            shards(NEW)[0].whole("dumps", path)
    assert loaded(tmp_path) == OLD
    require_only_one_save(tmp_path)


def test_a_node_whose_name_is_no_name_of_a_directory_is_refused(tmp_path: Path) -> None:
    for node in ("../away", "rack/1", "..", ""):
        with pytest.raises(ValueError, match="cannot be used as directory names, so nothing was"):
            save_shards(shards({"a": "new", node: "new"}), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_other_users_may_not_write_to_a_save_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_shards(shards(NEW), tmp_path / "runs" / "run")
    finally:
        os.umask(before)
    found = [*(tmp_path / "runs").rglob("*")]
    assert len(found) > 2 * len(NODES)
    assert not [one for one in found if one.lstat().st_mode & stat.S_IWOTH]


DAMAGED = {
    "no nodes": ('{"nodes": []}', "not a list of node names"),
    "a number": ('{"nodes": [3]}', "not a list of node names"),
    "text": ('{"nodes": "ab"}', "not a list of node names"),
    "a way out": ('{"nodes": ["../x"]}', "not a list of node names"),
    "an absolute node": ('{"nodes": ["/x"]}', "not a list of node names"),
    "twice": ('{"nodes": ["a", "a"]}', "contains a node more than once"),
    "half of it": ('{"folder": "a"}', "cannot be read"),
    "a list": ("[]", "must contain a dict"),
    "noise": ("\0", "is not valid JSON"),
}


@pytest.mark.parametrize(("text", "why"), DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_list_is_refused_and_named(tmp_path: Path, text: str, why: str) -> None:
    save_shards(shards(OLD), tmp_path)
    (tmp_path / "storage" / LIST).write_text(text)
    with pytest.raises(CorruptBufferError, match=rf"{LIST}: .*{why}.*; use another copy"):
        saves_of_nodes(shards(NEW), tmp_path)


def test_a_list_without_its_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{LIST}: no such file, so no sharded buffer"):
        saves_of_nodes(shards(NEW), tmp_path)
    save_shards(shards({**OLD, "c": "old"}), tmp_path)
    (tmp_path / "storage" / "c").rename(tmp_path / "storage" / "d")
    with pytest.raises(FileNotFoundError, match=r"no save of the shards of c on .*Nothing was ch"):
        saves_of_nodes(shards(NEW), tmp_path)


def to_another_directory(place: Path, away: Path) -> None:
    place.rename(away)
    place.symlink_to(away)


def to_a_fifo(place: Path, away: Path) -> None:
    (place / "storage" / "items").unlink()
    os.mkfifo(place / "storage" / "items")


@pytest.mark.parametrize("trap", [to_another_directory, to_a_fifo])
def test_a_link_or_a_fifo_in_a_save_is_refused_before_a_keeper_reads_it(
    tmp_path: Path, trap: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "run"
    save_shards(shards(OLD), path)
    trap(saves_of_nodes(shards(NEW), path)["a"], tmp_path / "away")
    with pytest.raises(UnsafePathError, match="this is a"):
        saves_of_nodes(shards(NEW), path)


class Written(Shard):
    """A member with a remote keeper, which passes no sync point of this process."""

    def whole(self, name: str, path: Path) -> None:
        write(path, self.content)


def save(path: Path, contents: dict[str, str]) -> None:
    members: Any = Shards(Written(*each, lambda _: None) for each in contents.items())
    save_shards(members, path)


#: Points that are passed with strange umasks, without directories above, on a file system without
#: exchange, or if another process puts something there meanwhile.
NOT_PASSED = {
    *("save.returned", "save.closed", "save.parents", "save.moved away", "folder.mode"),
    *("folder.parents", "file.written", "file.renamed"),
}


@pytest.mark.crash
@pytest.mark.slow
def test_a_save_of_shards_that_is_killed_anywhere_leaves_the_old_one_or_the_new_one(
    tmp_path: Path,
) -> None:
    path, passed = tmp_path / "run", set()
    save(path, OLD)
    (path / "precious").write_text("mine")
    for point in points():
        for passing in range(2):
            save(path, OLD)
            if not is_killed_at(point, passing, lambda: save(path, NEW)):
                break
            passed.add(point)
            assert loaded(path) in (OLD, NEW), f"killed at {point}, passing {passing}"
            save(path, NEW)
            assert loaded(path) == NEW
            require_only_one_save(path, "precious")
    assert set(points()) - passed == NOT_PASSED
    assert os.listdir(tmp_path) == ["run"]
