"""Files that vanish, do not appear, or run out of space, as other projects report.

Each test is named after the repository and number of a report, and asserts the expected behaviour.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from shmbuffer import SpaceError
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.format.layout import CONTROL
from tests.field.conftest import SETTINGS
from tests.kit.programs import Program, needs_root
from tests.kit.rings import ring_of
from tests.memory.rows import (
    Parent,
    child,
    contents,
    files_of,
    require_sound,
    sample,
    schema,
    write,
)

FULL_TMPFS = """
import os, subprocess, sys
from pathlib import Path
from shmbuffer.errors import SpaceError
from shmbuffer.memory import Engine, Settings
from tests.memory.rows import contents, schema, write

place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place], check=True)
with Engine.open(place / "buffer", Settings(capacity=100_000)) as engine:
    try:
        engine.define(schema(100_000))
    except SpaceError as error:
        print(error.parts["needed_bytes"] > 2**20 > error.parts["free_bytes"], flush=True)
    engine.cleanup()
with Engine.open(place / "buffer", Settings(capacity=8)) as engine:
    ring = engine.define(schema())
    rest = os.statvfs(place)
    (place / "somebody else's").write_bytes(bytes(rest.f_bavail * rest.f_frsize))
    for lap in range(3):
        write(ring, range(8 * lap, 8 * lap + 8))
    print(sorted(contents(ring).values()) == [*range(16, 24)], flush=True)
"""


@needs_root
def test_ray_14182_16540_16824_a_full_memory_file_system_kills_nobody(fast_path: Path) -> None:
    """Memory was promised but not available: SIGBUS at the first access by any process.

    Space may be missing from the start, or be taken by other processes later.
    """
    with Program.python(FULL_TMPFS, fast_path, before=("unshare", "--mount")) as process:
        assert process.line() == "True"
        assert process.line() == "True"
        assert process.end() == (0, "", "")


@pytest.mark.crash
def test_ray_201_a_reader_that_dies_in_the_middle_of_a_read_takes_nothing_along(
    engine: Engine, ring: Ring
) -> None:
    """The store of all workers died with a worker that was reading an object."""

    def read_and_die(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause_at("sample.copy")
        sample(ring, 8)

    with child(read_and_die) as reader:
        reader.reached()
        reader.kill()
    assert contents(ring) == {i: i for i in range(8)}
    write(ring, [8])
    require_sound(engine)


def test_pytorch_5040_5247_161910_too_little_room_is_an_error_of_the_one_who_asks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DataLoader workers died from SIGBUS if /dev/shm was too small for a batch."""
    asked: list[int] = []
    allocate = os.posix_fallocate

    def nearly_full(fd: int, offset: int, size: int) -> None:
        asked.append(size)
        if len(asked) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, size)

    with Engine.open(path, SETTINGS) as engine:
        before = files_of(path)
        monkeypatch.setattr(os, "posix_fallocate", nearly_full)
        with pytest.raises(SpaceError):
            engine.define(schema())
        assert len(asked) == 3
        assert files_of(path).keys() - before.keys() <= {".shmbuffer/made.json", "next"}
        monkeypatch.undo()
        write(engine.define(schema()), [1])


@pytest.mark.full
def test_pytorch_176073_176075_the_answer_of_an_allocation_is_what_it_returns(
    fast_path: Path,
) -> None:
    """posix_fallocate returns its error; errno has the error of another call, or none."""
    source = """
import resource, sys
from shmbuffer.errors import SpaceError
from shmbuffer.memory import Engine, Settings
from tests.memory.rows import schema
engine = Engine.open(sys.argv[1], Settings(capacity=100_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    engine.define(schema(100_000))
except SpaceError as error:
    print(error, flush=True)
"""
    with Program.python(source, fast_path / "buffer") as process:
        assert "limit" in process.line()
        assert process.end()[0] == 0


@pytest.mark.full
@pytest.mark.crash
def test_vllm_51317_what_a_killed_creator_leaves_is_removed_by_the_next_start(
    tmp_path: Path,
) -> None:
    """Every SIGKILL leaked memory as large as the cache; a fixed name blocked the next start."""
    source = """
import sys
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.cleanup import temporary_directory
from tests.memory.rows import schema, write
path = temporary_directory()
engine = Engine.open(path, Settings(capacity=8), temporary=True)
write(engine.define(schema()), range(8))
named = Engine.open(sys.argv[1], Settings(capacity=8))
write(named.define(schema()), range(8))
print(path, flush=True)
input()
"""
    with Program.python(source, tmp_path / "named", TMPDIR=str(tmp_path)) as creator:
        left = Path(creator.line())
        assert (left / CONTROL).exists()
        creator.kill()
    with Program.python(source, tmp_path / "named", TMPDIR=str(tmp_path)) as again:
        path = Path(again.line())
        assert not left.exists()
        with Engine.open(tmp_path / "named", None) as engine:
            assert sorted(contents(ring_of(engine)).values()) == [*range(8)]
        again.send_signal(signal.SIGTERM)
        assert again.end()[0] == -signal.SIGTERM
    assert not path.exists()
    assert sorted(os.listdir(tmp_path)) == ["named"]


@pytest.mark.full
def test_cpython_82300_the_first_to_leave_takes_no_memory_from_the_others(engine: Engine) -> None:
    """A resource tracker removed shared memory that other processes were using."""
    source = """
import sys
from shmbuffer.memory import Engine
from tests.memory.rows import write
from tests.kit.rings import ring_of
engine = Engine.open(sys.argv[1], None)
write(ring_of(engine), range(8, 12))
assert "multiprocessing.resource_tracker" not in sys.modules
"""
    before = files_of(engine.path).keys()  # type: ignore[arg-type]
    with Program.python(source, engine.path) as visitor:
        assert visitor.end() == (0, "", "")
    assert files_of(engine.path).keys() >= before  # type: ignore[arg-type]
    assert sorted(contents(ring_of(engine)).values()) == [*range(4, 12)]


@pytest.mark.full
@pytest.mark.crash
def test_chronicle_map_515_many_that_recover_at_once_recover_once(path: Path) -> None:
    """Concurrent recovery by several processes damaged the data further."""

    def use_and_die(parent: Parent) -> None:
        engine = Engine.open(path, Settings(capacity=8, alpha=1.0))
        write(engine.define(schema()), range(8))
        parent.pause_at("write.claimed")
        write(ring_of(engine), [8])

    def recover(parent: Parent) -> None:
        parent.pause()
        with Engine.open(path, None) as engine:
            assert engine.superblock.epoch == 1
            assert contents(ring_of(engine)) == {i: i for i in range(1, 8)}
            parent.pause()

    with ExitStack() as stack:
        victim = stack.enter_context(child(use_and_die))
        helpers = [stack.enter_context(child(recover)) for _ in range(6)]
        victim.reached()
        victim.kill()
        for helper in helpers:
            helper.reached()
        for helper in helpers:
            helper.go()
        for helper in helpers:
            helper.reached()
        for helper in helpers:
            helper.go()
        assert [helper.end() for helper in helpers] == [0] * 6
