"""Living processes taken for dead ones and dead ones for living, as other projects report.

Each test is named after the repository and number of a report, and asserts the expected behaviour.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import (
    BufferInUseError,
    Coordinator,
    RegistryFullError,
    RingOverrunError,
    UnsafeFilesystemError,
)
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format.layout import ENTRIES
from shmbuffer.memory.system import filesystem
from tests.field.conftest import SETTINGS
from tests.kit.programs import Program, needs_root
from tests.kit.rings import ring_of
from tests.memory.rows import (
    Child,
    Parent,
    child,
    contents,
    files_of,
    mutex_held,
    sample,
    slot_held,
    succeeds,
    write,
)

A_LONG_TIME_NS = 10**18
FUTEX_WAITERS = 0x80000000
YEAR_S = 365 * 24 * 3600


def look_long_silent(engine: Engine) -> None:
    """Makes every client look as if it had joined long ago and been idle since."""
    for entry, _ in engine.seat.registry.live():
        engine.seat.control.entries["joined_ns"][entry] -= A_LONG_TIME_NS
        engine.seat.control.entries["last_seen_ns"][entry] = 1


@pytest.mark.crash
@pytest.mark.parametrize("doing", ["nothing", "filling a slot", "holding the mutex"])
def test_aeron_256_373_374_1599_a_client_that_pauses_is_not_declared_dead(
    engine: Engine, doing: str
) -> None:
    """Garbage collection or SIGSTOP for longer than a timeout ended a living client."""

    def attach(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause()

    situations: dict[str, Callable[[], AbstractContextManager[Child]]] = {
        "nothing": lambda: child(attach),
        "filling a slot": lambda: slot_held(engine),
        "holding the mutex": lambda: mutex_held(engine),
    }
    with situations[doing]() as client:
        if doing == "nothing":
            client.reached()
        client.stop()
        look_long_silent(engine)
        assert [one.alive for one in engine.clients()] == [True, True]
        assert engine.seat.reap_dead() == 0
        os.kill(client.pid, signal.SIGCONT)
        client.go()
        assert client.end() == 0


@pytest.mark.crash
def test_akka_core_20561_a_pause_does_not_make_a_client_a_stranger(
    engine: Engine, ring: Ring
) -> None:
    """A client that was declared dead during a pause could not take part any more."""
    with slot_held(engine) as client:
        client.stop()
        look_long_silent(engine)
        with Engine.open(engine.path, None) as another:  # type: ignore[arg-type]
            assert another.seat.reap_dead() == 0
            os.kill(client.pid, signal.SIGCONT)
            client.go()
            assert client.end() == 0
            assert contents(ring_of(another))[0] == 99


@pytest.mark.crash
def test_chronicle_queue_recovery_timeout_a_slow_writer_is_not_overridden(
    engine: Engine, ring: Ring
) -> None:
    """Another writer took the slot after 20 s, and the slow writer then corrupted the file."""
    with slot_held(engine) as slow:
        slow.stop()
        look_long_silent(engine)
        with pytest.raises(RingOverrunError, match=f"process {slow.pid} \\(stopped\\)"):
            write(ring, range(8, 16), timeout=0.1)
        os.kill(slow.pid, signal.SIGCONT)
        slow.go()
        assert slow.end() == 0
    assert contents(ring) == {**{i: i for i in range(1, 8)}, 0: 99}


HOLDS = """
import os, sys
from shmbuffer.memory import Engine
from tests.kit.rings import ring_of
engine = Engine.open(sys.argv[1], None)
ring_of(engine).claims.claim(1)
print(os.getpid(), flush=True)
input()
"""
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@needs_root
@pytest.mark.crash
def test_iceoryx2_1660_a_client_in_another_container_is_judged_rightly(
    engine: Engine, ring: Ring
) -> None:
    """In another pid namespace, living clients were found dead and dead ones living."""
    with Program.python(HOLDS, engine.path, before=CONTAINER) as container:
        assert int(container.line()) < 10, "pids of its own"
        assert [one.alive for one in engine.clients()] == [True, True]
        assert engine.seat.reap_dead() == 0
        container.kill()
        write(ring, range(8, 16), timeout=30.0)
    assert len(engine.clients()) == 1


@needs_root
@pytest.mark.crash
def test_gbrain_2840_the_lock_of_a_living_process_in_a_container_is_not_stolen(
    engine: Engine, path: Path
) -> None:
    """kill(pid, 0) found no process with that pid in this container."""
    with Program.python(HOLDS, path, before=CONTAINER) as container:
        container.line()
        engine.close()
        before = files_of(path)[".shmbuffer/slots"]
        with pytest.raises(BufferInUseError):
            Engine.open(path, SETTINGS, existing="overwrite")
        assert files_of(path)[".shmbuffer/slots"] == before
        with Engine.open(path, None) as again:
            assert again.report is None, "nothing to recover while somebody lives"
        container.tell()


def test_iceoryx2_274_a_process_sees_itself_alive(engine: Engine) -> None:
    def look() -> None:
        engine.seat.rejoin()
        assert [one.alive for one in engine.clients()] == [True, True]

    with Engine.open(engine.path, None) as second:  # type: ignore[arg-type]
        for handle in (engine, second):
            assert [one.alive for one in handle.clients()] == [True, True]
            assert handle.seat.reap_dead() == 0
    succeeds(look)


@pytest.mark.full
@pytest.mark.crash
def test_frappe_mail_559_killed_workers_do_not_use_up_the_places_of_clients(
    path: Path, ring: Ring
) -> None:
    """Each killed worker kept its slot in the table of readers until no slot was free."""

    def open_many(parent: Parent) -> None:
        handles = [Engine.open(path, None) for _ in range(ENTRIES // 8)]
        parent.pause()
        assert handles

    for _ in range(9):
        with child(open_many) as worker:
            worker.reached()
            worker.kill()
    write(ring, [8])


@pytest.mark.full
def test_atlaspack_594_a_full_table_names_who_is_in_it_and_a_close_makes_room(
    engine: Engine, path: Path
) -> None:
    """MDB_READERS_FULL neither named the readers nor suggested a remedy."""
    with ExitStack() as stack:
        others = [
            stack.enter_context(Engine.open(path, None, role="learner")) for _ in range(ENTRIES - 1)
        ]
        with pytest.raises(RegistryFullError, match=rf"pids {os.getpid()}\); close handles"):
            Engine.open(path, None)
        others[7].close()
        with Engine.open(path, None) as late:
            assert late.clients()[8].pid == os.getpid()


@pytest.mark.crash
def test_biggraphite_202_readers_that_were_killed_while_they_read_are_cleared_away(
    engine: Engine, ring: Ring
) -> None:
    """Readers of a restarted pool stayed in the table and kept old data."""

    def read(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause_at("sample.copy")
        sample(ring, 4)

    with ExitStack() as stack:
        for reader in [stack.enter_context(child(read)) for _ in range(4)]:
            reader.reached()
            reader.kill()
        with Engine.open(engine.path, None) as fresh:  # type: ignore[arg-type]
            assert len(fresh.clients()) == 2, "a joining client clears the dead away"
    write(ring, range(8, 16))


@pytest.mark.parametrize("age_s", [-10 * YEAR_S, 10 * YEAR_S])
def test_filelock_725_735_738_a_lock_file_that_a_dead_host_left_blocks_nobody(
    path: Path, age_s: int
) -> None:
    """The content and the age of a file decided whether the lock was taken."""
    (path / ".shmbuffer" / "procs").mkdir(parents=True, mode=0o700)
    for directory in (path, path / ".shmbuffer"):
        directory.chmod(0o700)
    names = ["init.lock", "coordinator.lock", *(f"procs/{n:03d}.lock" for n in range(4))]
    for name in names:
        left = path / ".shmbuffer" / name
        left.write_text("1\nanother-host\n")
        left.chmod(0o600)
        os.utime(left, ns=(0, left.stat().st_mtime_ns + age_s * 10**9))
    with Coordinator(path, capacity=8, on_existing="recover") as coordinator:
        assert coordinator.report is None, "there was nothing to recover"


def test_filelock_6_73_a_network_file_system_gets_no_lock_that_does_not_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS granted a lock to two processes."""
    monkeypatch.setattr(filesystem, "filesystem_type", lambda fd: 0x6969)
    with pytest.raises(UnsafeFilesystemError, match=r"is on NFS, where .* file locks"):
        Engine.open(path, SETTINGS)
    assert not path.exists()


WRITES = """
import os, sys
from shmbuffer.memory import Engine
from shmbuffer.memory.system import identity
from tests.memory.rows import write
from tests.kit.rings import ring_of
assert identity.boot_id() == b"a container's id", identity.boot_id()
engine = Engine.open(sys.argv[1], None)
for number in range(200):
    write(ring_of(engine), [number], timeout=30.0)
    with Engine.open(sys.argv[1], None) as another:
        assert another.report is None, "recovered beside a living process"
print(engine.superblock.epoch, flush=True)
input()
"""


@pytest.mark.full
@needs_root
@pytest.mark.crash
def test_systemd_nspawn_two_boot_ids_on_one_machine_are_no_reboot(
    engine: Engine, ring: Ring, path: Path, tmp_path: Path
) -> None:
    """A container with its own boot id was taken for a dead client of another boot."""
    shown = tmp_path / "boot_id"
    shown.write_text(str(uuid.UUID(bytes=b"a container's id")) + "\n")
    bind = f'mount --bind {shown} /proc/sys/kernel/random/boot_id && exec "$@"'
    container = (*CONTAINER, "--mount", "sh", "-c", bind, "sh")
    with Program.python(WRITES, path, before=container) as inside:
        for number in range(200):
            write(ring, [number], timeout=30.0)
            with Engine.open(path, None) as another:
                assert another.report is None, "recovered beside a living process"
        assert inside.line() == "0", "the epoch: nobody has recovered"
        assert [one.alive for one in engine.clients()] == [True, True]
        inside.kill()
        while engine.seat.reap_dead() == 0:  # the kernel ends the namespace after its first process
            pass
    assert len(engine.clients()) == 1


LOCKS = """
import sys
from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.memory.rows import write
from tests.kit.rings import ring_of
engine = Engine.open(sys.argv[1], None)
ring = ring_of(engine)
if sys.argv[2] == "holds":
    _core.arm("mutex.locked", "pause", notify_fd=1, wait_fd=0)
else:
    print("w", end="", flush=True)
write(ring, [99], timeout=60.0)
"""


@needs_root
@pytest.mark.crash
def test_glibc_robust_list_a_waiter_that_dies_gives_nobody_else_s_lock_up(
    engine: Engine, ring: Ring, path: Path
) -> None:
    """The kernel compares thread numbers, and each container has a thread 1."""
    write(ring, range(4))
    word = np.frombuffer(engine.seat.control.runtime["mutex"], np.uint32)
    with Program.python(LOCKS, path, "holds", before=CONTAINER) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        holder.stdout.read(1)
        assert word[0] == 1, "held by thread 1 of its container"
        with Program.python(LOCKS, path, "waits", before=CONTAINER) as waiter:
            assert waiter.stdout is not None
            waiter.stdout.read(1)
            while not word[0] & FUTEX_WAITERS:
                pass
            waiter.kill()
            # the kernel ends the namespace after its first process
            while len(engine.seat.registry.alive()) > 2:
                pass
        assert word[0] == 1 | FUTEX_WAITERS, "nobody has died that held it"
        holder.tell()
        assert holder.wait(30) == 0
    write(ring, [5], timeout=30.0)
    assert engine.stats()["repairs"] == 0
