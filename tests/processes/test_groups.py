"""A terminal or a service manager sends a signal to a whole group of processes at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shmbuffer.memory import Engine
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import contents, require_sound

GROUP = """
import os, sys, time
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.cleanup import temporary_directory
from tests.memory.rows import schema, write
from tests.kit.rings import ring_of

def collect(path):
    with Engine.open(path, None, role="collector") as engine:
        os.write(told, b".")
        try:
            while True:
                write(ring_of(engine), range(4), timeout=30.0)
        except KeyboardInterrupt:
            sys.exit(130)

path = temporary_directory() if sys.argv[1] == "temporary" else sys.argv[1]
owner = Engine.open(path, Settings(capacity=8, alpha=1.0), temporary=sys.argv[1] == "temporary")
write(owner.define(schema()), range(8))
tell, told = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        collect(path)
for _ in range(3):
    os.read(tell, 1)
print(path, flush=True)
while True:  # no pause(): a signal that comes just before it would not end it
    time.sleep(0.01)
"""


@pytest.mark.product(few=1)
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_all_at_once_leaves_whole_items_and_nobody_in_the_registry(
    fast_path: Path, number: signal.Signals
) -> None:
    path = fast_path / "buffer"
    with Program.python(GROUP, path, before=("setsid",)) as group:
        group.line()
        os.killpg(group.pid, number)
        assert group.end()[0] == -number
    with Engine.open(path, None) as engine:
        assert set(contents(ring_of(engine)).values()) <= set(range(8))
        assert len(engine.clients()) == 1
        require_sound(engine)


@pytest.mark.product(few=1)
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_owner_of_a_temporary_directory_removes_it_though_all_end_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Program.python(GROUP, "temporary", before=("setsid",), TMPDIR=str(tmp_path)) as group:
        path = Path(group.line())
        os.killpg(group.pid, number)
        assert group.end()[0] == -number
    assert not path.exists()
