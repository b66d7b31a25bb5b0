"""Which directories the next start may remove, and which ones it must keep."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from shmbuffer.memory.directory import removal
from shmbuffer.memory.format import layout
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system.region import Directory
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import contents

KILLED = """
import sys
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory import cleanup
from tests.memory.rows import schema, write

path = cleanup.temporary_directory()
engine = Engine.open(path, Settings(capacity=8), temporary=sys.argv[1] == "temporary")
write(engine.define(schema()), [1])
print(path, flush=True)
input()
"""
Abandoned = Callable[[str], Path]


@pytest.fixture
def abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Abandoned:
    """Makes a buffer whose process is killed, in a directory named after the process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make(kind: str) -> Path:
        with Program.python(KILLED, kind, TMPDIR=str(tmp_path)) as process:
            path = Path(process.line())
            process.kill()
        return path

    return make


def swept(path: Path) -> list[Path]:
    return removal.sweep(excluding=path.with_name("another"))


def test_the_directory_of_a_killed_owner_is_swept(abandoned: Abandoned) -> None:
    path = abandoned("temporary")
    assert swept(path) == [path]
    assert not path.exists()


def test_a_buffer_that_is_not_temporary_is_not_swept_whatever_its_name(
    abandoned: Abandoned,
) -> None:
    path = abandoned("to be kept")
    assert swept(path) == []
    with Engine.open(path, None) as engine:
        assert contents(ring_of(engine)) == {0: 1}


def test_an_owner_in_another_container_may_live_though_nobody_uses_its_buffer(
    abandoned: Abandoned,
) -> None:
    found = abandoned("temporary")
    uid, _, pid, start_time, rest = found.name.removeprefix("shmbuffer-").split("-")
    path = found.rename(found.with_name(f"shmbuffer-{uid}-1-{pid}-{start_time}-{rest}"))
    with Directory.open(path) as directory, directory.open_file(layout.CONTROL) as file:
        control = Control(_core.Map(file.fd, layout.CONTROL_BYTES), str(path))
    control.write(replace(control.superblock(), owner_pid_namespace=1))
    assert swept(path) == []
    with Engine.open(path, None) as engine:
        assert not engine.take_ownership()
        assert contents(ring_of(engine)) == {0: 1}
