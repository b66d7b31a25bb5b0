"""A save that is ended at any system call leaves a complete save, either the old or the new one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from shmbuffer.memory.system import beneath, region
from shmbuffer.saves import file_tree, publication, safe_files, work_directory
from tests.crash.harness import is_killed_at
from tests.replay.test_publication import save, tree

pytestmark = pytest.mark.crash

OLD = {"a": "old", "gone": "old"}
NEW = {"a": "new", "below/b": "new"}


def points() -> list[str]:
    """Returns all points of a save, in source order."""
    text = "".join(
        Path(str(module.__file__)).read_text()
        for module in (beneath, region, file_tree, safe_files, work_directory, publication)
    )
    steps = [f"save.{name}" for name in re.findall(r'_step\("([\w ]+)"\)', text)]
    return [*re.findall(r'reached\("((?:save|file|folder)\.\w+)"\)', text), *steps]


#: Points that are passed only if a file appears in the meantime, the umask is unusual, or parent
#: directories are missing.
RARE = {"save.returned", "save.closed", "save.parents", "folder.mode", "folder.parents"}
RARE |= {"file.written"}
NOT_PASSED = {
    "nothing": RARE | {"save.mode", "save.exchanged", "save.moved away"},
    "a save": RARE | {"file.renamed", "save.moved away"},
    "a save, without exchange": RARE | {"save.exchanged"},
}


@pytest.mark.product(few=1)
@pytest.mark.slow
@pytest.mark.parametrize("before", NOT_PASSED)
def test_the_next_process_finds_a_whole_save_and_nothing_else(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "without" in before:
        monkeypatch.setattr(publication, "exchange", lambda *_: False)
    path, passed = tmp_path / "runs" / "run", set()
    old = {} if before == "nothing" else OLD
    for point in points():
        for passing in range(2):
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir()
            save(path, old)
            if not is_killed_at(point, passing, lambda: save(path, NEW)):
                break
            passed.add(point)
            publication.settle(path)
            assert (tree(path) if path.exists() else {}) in (old, NEW), f"killed at {point}"
            save(path, NEW)
            assert tree(path) == NEW
            assert os.listdir(path.parent) == ["run"]
    assert set(points()) - passed == NOT_PASSED[before]
