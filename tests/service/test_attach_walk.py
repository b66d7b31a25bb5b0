"""An attach that recovers: the functions it calls, and what is mapped, read and decoded once."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import shmbuffer
from shmbuffer import attach
from shmbuffer.memory.directory import files
from shmbuffer.memory.mapped import control
from shmbuffer.memory.system.region import Directory
from tests.crash.harness import ended, fork
from tests.service import items

PACKAGE = Path(shmbuffer.__file__).parent
DESIGN = (Path(__file__).parents[2] / "docs/design/modules.md").read_text()


@pytest.fixture
def dead(scratch_dir: Path) -> Path:
    """Makes a directory whose only process was killed."""

    def body() -> None:
        engine = items.create(scratch_dir)
        items.write(engine, range(10))
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(body)) == -signal.SIGKILL
    return scratch_dir


def test_twelve_functions_do_the_work_in_the_order_of_the_document(dead: Path) -> None:
    section = DESIGN.split("### An attach that recovers\n", 1)[1].split("\n#", 1)[0]
    told = re.findall(r"^\| `([\w.]+)` \| `([\w/.]+)` \|", section, re.MULTILINE)
    assert 0 < len(told) <= 12
    entered: list[tuple[str, str]] = []

    def look(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            entered.append((code.co_qualname, str(Path(code.co_filename).relative_to(PACKAGE))))

    sys.setprofile(look)
    try:
        buffer = attach(dead)
    finally:
        sys.setprofile(None)
    assert len(buffer) == 10
    buffer.close()
    assert [one for one in entered if one in told] == told, "each once, in this order"


def test_each_file_is_mapped_once_and_each_page_of_a_superblock_decoded_once(
    dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: Counter[str] = Counter()
    read: Counter[str] = Counter()
    decoded: Counter[bytes] = Counter()
    map_file, open_control = files.Files._map_file, files.Files.open_control
    read_file, unpack = Directory.read, control.Superblock.unpack

    def mapping(self: files.Files, name: str, *args: Any, **kwargs: Any) -> Any:
        mapped[name] += 1
        return map_file(self, name, *args, **kwargs)

    def opening(self: files.Files, **kwargs: Any) -> Any:
        mapped["control"] += 1
        return open_control(self, **kwargs)

    def reading(self: Directory, name: str, **kwargs: Any) -> bytes:
        read[name] += 1
        return read_file(self, name, **kwargs)

    def unpacking(page: bytes) -> Any:
        decoded[page] += 1
        return unpack(page)

    monkeypatch.setattr(files.Files, "_map_file", mapping)
    monkeypatch.setattr(files.Files, "open_control", opening)
    monkeypatch.setattr(Directory, "read", reading)
    monkeypatch.setattr(control.Superblock, "unpack", unpacking)
    attach(dead).close()
    assert set(mapped.values()) == set(read.values()) == set(decoded.values()) == {1}
    assert len(mapped) == 4
    assert list(read) == [".shmbuffer/schema.json"]
    assert len(decoded) >= 4, "two copies, RECOVERING, READY, and what the buffer records"
