"""A save that is ended at any of its system calls leaves a whole one: the old, or the new."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from shmbuffer.memory.system import beneath, region
from shmbuffer.saves import file_tree, publication, safe_files, work_directory
from shmbuffer.saves.publication import publish
from tests.crash.harness import is_killed_at

pytestmark = pytest.mark.crash

OLD = {"a": "old", "gone": "old"}
NEW = {"a": "new", "below/b": "new"}
FOREIGN = {"notes": "mine"}


def points() -> list[str]:
    """All of them, in source order."""
    text = "".join(
        Path(str(module.__file__)).read_text()
        for module in (beneath, region, file_tree, safe_files, work_directory, publication)
    )
    steps = [f"save.{name}" for name in re.findall(r'_step\("([\w ]+)"\)', text)]
    return [*re.findall(r'reached\("((?:save|file|folder)\.\w+)"\)', text), *steps]


def save(path: Path, files: dict[str, str]) -> None:
    with publish(path) as directory:
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(content)


def tree(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): file.read_text()
        for file in path.rglob("*")
        if file.is_file() and file.name != file_tree.MANIFEST
    }


def prepare(path: Path, before: str) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    if before != "nothing":
        save(path, OLD)
    if before == "foreign files":
        for name, content in FOREIGN.items():
            (path / name).write_text(content)


#: Only where something is put there meanwhile, or the file system cannot exchange, or the umask is
#: a strange one, or directories above are missing.
RARE = {
    *("save.within", "save.returned", "save.closed", "save.parents"),
    *("folder.mode", "folder.parents"),
}
REPLACED = {"save.replaced", "save.mode", "save.exchanged"}
MOVED = {
    *("save.counts", "save.complete", "save.shown", "save.place", "save.moved", "save.removed"),
    *("save.moved all", "file.written"),
}
NOT_PASSED = {
    "nothing": RARE | MOVED | {"save.mode", "save.exchanged"},
    "a save": RARE | MOVED | {"file.renamed"},
    "foreign files": RARE | REPLACED,
}


@pytest.mark.product(few=1)
@pytest.mark.slow
@pytest.mark.parametrize("before", NOT_PASSED)
def test_the_next_process_finds_a_whole_save_and_nothing_else(tmp_path: Path, before: str) -> None:
    path, passed = tmp_path / "runs" / "run", set()
    foreign = FOREIGN if before == "foreign files" else {}
    old = {} if before == "nothing" else OLD
    for point in points():
        for passing in range(2):
            prepare(path, before)
            if not is_killed_at(point, passing, lambda: save(path, NEW)):
                break
            passed.add(point)
            publication.finish(path)
            found = tree(path) if path.exists() else {}
            visible = {
                name: content
                for name, content in found.items()
                if not name.startswith(work_directory.MARK)
            }
            assert visible in (old | foreign, NEW | foreign), f"killed at {point}"
            save(path, NEW)
            assert tree(path) == NEW | foreign
            assert os.listdir(path.parent) == ["run"]
    assert set(points()) - passed == NOT_PASSED[before]
