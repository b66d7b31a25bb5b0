"""The identity of a process, and the proof that it is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shmbuffer._native import _core
from shmbuffer.memory.system import identity
from shmbuffer.memory.system.identity import (
    UNKNOWN_BOOT,
    Identity,
    boot_id,
    current,
    process_state,
    prove_dead,
)
from tests.kit.programs import Program, in_fork, needs_root

WHO = """
from shmbuffer.memory.system.identity import current
me = current()
print(me.pid, me.start_time, me.boot_id.hex(), me.pid_namespace, flush=True)
"""
WAITING = WHO + "input()"


def who(line: str) -> Identity:
    pid, start_time, boot, namespace = line.split()
    return Identity(int(pid), int(start_time), bytes.fromhex(boot), int(namespace))


def never_asked() -> bool:
    raise AssertionError("the facts decide; the lock does not")


def free() -> bool:
    return True


def held() -> bool:
    return False


@pytest.fixture
def living() -> Iterator[Identity]:
    """Runs another process, which waits."""
    with Program.python(WAITING) as process:
        yield who(process.line())


@pytest.fixture
def fake_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a /proc that shows only this process."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self").rmdir()
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / "self").symlink_to(str(os.getpid()))
    (tmp_path / "self/status").write_text(f"Name:\tpython\nNSpid:\t{os.getpid()}\n")
    monkeypatch.setattr(identity, "_PROC", tmp_path)
    return tmp_path


# The identity of a process.


def test_a_process_knows_itself() -> None:
    me = current()
    assert me.pid == os.getpid()
    assert me.start_time > 0
    assert me.boot_id == boot_id() != UNKNOWN_BOOT
    assert me.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    assert current() is me


def test_a_forked_child_has_another_identity() -> None:
    parent = current()

    def look() -> None:
        me = current()
        assert me.pid == os.getpid() != parent.pid
        assert me.start_time >= parent.start_time
        assert current() is me

    assert in_fork(look) == 0
    assert current() is parent


@pytest.mark.full
def test_another_program_sees_itself_as_we_see_it(living: Identity) -> None:
    me = current()
    assert (living.boot_id, living.pid_namespace) == (me.boot_id, me.pid_namespace)
    seen = identity._state_and_start(living.pid)
    assert seen is not None
    assert seen[1] == living.start_time


def test_a_boot_that_is_hidden_is_unknown(fake_proc: Path) -> None:
    assert boot_id() == UNKNOWN_BOOT
    (fake_proc / "sys/kernel/random").mkdir(parents=True)
    (fake_proc / "sys/kernel/random/boot_id").write_text("not a boot id\n")
    assert boot_id() == UNKNOWN_BOOT
    (fake_proc / "sys/kernel/random/boot_id").write_text("0123abcd-0000-0000-0000-00000000ffff\n")
    assert boot_id().hex() == "0123abcd00000000000000000000ffff"


def test_without_proc_only_the_pid_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_PROC", tmp_path)
    assert identity._identify_self() == Identity(os.getpid(), 0, UNKNOWN_BOOT, 0)


# The proof.


def test_a_living_process_is_alive_whatever_its_lock_says(living: Identity) -> None:
    assert not prove_dead(living, never_asked)
    assert not prove_dead(current(), never_asked)
    assert process_state(living.pid) == "running"


def test_a_process_that_is_gone_is_dead() -> None:
    with Program.python(WHO) as process:
        gone = who(process.line())
        assert process.end()[0] == 0
        assert process_state(gone.pid) == "dead"
        assert prove_dead(gone, never_asked)


def test_a_pid_that_is_used_again_is_not_the_same_process(living: Identity) -> None:
    before = replace(living, start_time=living.start_time - 1)
    assert prove_dead(before, never_asked)


def test_a_stopped_process_is_alive(living: Identity) -> None:
    os.kill(living.pid, signal.SIGSTOP)
    assert os.waitpid(living.pid, os.WUNTRACED)[0] == living.pid
    assert process_state(living.pid) == "stopped"
    assert not prove_dead(living, never_asked)


def test_a_zombie_is_dead_when_its_lock_is_free() -> None:
    with Program.python(WHO) as process:
        zombie = who(process.line())
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(zombie.pid) == "dead"
        assert prove_dead(zombie, free)
        assert not prove_dead(zombie, held)


@pytest.mark.full
def test_threads_that_outlive_the_first_one_keep_a_process_alive() -> None:
    """Such a process looks like a zombie, but its lock shows that it is alive."""
    with Program.python(
        WHO
        + """
import ctypes, fcntl, os, sys, threading
def outlive():
    file = open(sys.argv[1], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    while b") Z " not in open("/proc/self/stat", "rb").read():
        os.sched_yield()
    os.write(1, b"first thread ended\\n")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=outlive).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
""",
        os.devnull,
    ) as process:
        odd = who(process.line())
        assert process.line() == "first thread ended"
        assert process_state(odd.pid) == "dead"
        assert not prove_dead(odd, held)
        process.tell()
        os.waitid(os.P_PID, odd.pid, os.WEXITED | os.WNOWAIT)
        assert prove_dead(odd, free)


def test_a_name_made_to_confuse_is_not_a_state() -> None:
    with Program.python("open('/proc/self/comm', 'w').write(') Z 1 (x) ')" + WAITING) as process:
        odd = who(process.line())
        assert f"{odd.pid} () Z 1 (x) ) " in Path(f"/proc/{odd.pid}/stat").read_text()
        assert process_state(odd.pid) == "running"
        assert not prove_dead(odd, never_asked)
        assert prove_dead(replace(odd, start_time=odd.start_time + 1), never_asked)


def test_under_another_boot_id_the_lock_decides(living: Identity) -> None:
    """After a reboot the lock is free; in a container with its own boot id it may be held."""
    assert prove_dead(replace(living, boot_id=b"\1" * 16), free)
    assert not prove_dead(replace(living, boot_id=b"\1" * 16), held)


def test_a_boot_that_is_unknown_proves_nothing(
    living: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not prove_dead(replace(living, boot_id=UNKNOWN_BOOT), never_asked)
    monkeypatch.setattr(identity, "_current", replace(current(), boot_id=UNKNOWN_BOOT))
    assert not prove_dead(living, never_asked)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("namespace", [0, 1])
def test_in_another_pid_namespace_the_lock_decides(living: Identity, namespace: int) -> None:
    elsewhere = replace(living, pid_namespace=namespace)
    assert not prove_dead(elsewhere, held)
    assert prove_dead(elsewhere, free)


@pytest.mark.full
def test_two_processes_that_do_not_know_their_namespace_are_not_in_the_same(
    living: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_current", replace(current(), pid_namespace=0))
    assert prove_dead(replace(living, pid_namespace=0), free)
    assert not prove_dead(replace(living, pid_namespace=0), held)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("unknown", ["theirs", "ours"])
def test_where_start_times_do_not_compare_the_lock_decides(
    living: Identity, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    if unknown == "theirs":
        living = replace(living, start_time=0)
    else:
        monkeypatch.setattr(identity, "_current", replace(current(), start_time=0))
    assert prove_dead(living, free)
    assert not prove_dead(living, held)


@pytest.mark.parametrize("pid", [0, -1])
def test_a_pid_that_names_no_process_is_left_to_the_lock(pid: int) -> None:
    assert not prove_dead(replace(current(), pid=pid), held)
    assert prove_dead(replace(current(), pid=pid), free)


@pytest.mark.full
def test_a_process_that_proc_hides_is_not_gone(living: Identity, fake_proc: Path) -> None:
    """The mount option hidepid hides the process."""
    assert process_state(living.pid) == "running"
    assert not prove_dead(living, held)
    assert prove_dead(living, free)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("fake", ["self is another", "ours has two pids", "no status"])
def test_where_proc_is_not_of_our_namespace_the_lock_decides(
    living: Identity, fake_proc: Path, fake: str
) -> None:
    gone = replace(living, pid=2**22 + 1)  # above any pid_max, so that no process has it
    assert prove_dead(gone, never_asked)
    if fake == "self is another":
        (fake_proc / "1").mkdir()
        (fake_proc / "self").unlink()
        (fake_proc / "self").symlink_to("1")
    elif fake == "ours has two pids":
        (fake_proc / "self/status").write_text(f"Name:\tx\nNSpid:\t{os.getpid()}\t1\n")
    else:
        (fake_proc / "self/status").unlink()
    assert prove_dead(gone, free)
    assert not prove_dead(gone, held)


@pytest.mark.product(few=1)
@needs_root
@pytest.mark.parametrize("own_proc", [False, True])
def test_a_process_in_a_container_is_judged_by_its_lock(own_proc: bool) -> None:
    """Runs with and without a /proc of its own.

    Pid 2 and others are different processes outside.
    """
    container = ("unshare", "--pid", "--fork", "--kill-child")
    with Program.python(
        """
        import sys
        from shmbuffer.memory.system import identity
        me = identity.current()
        print(me.pid, me.start_time, me.boot_id.hex(), me.pid_namespace, flush=True)
        outside = identity.Identity(int(input()), *map(int, input().split()[:1]),
                                    me.boot_id, int(input()))
        print(identity._proc_is_ours())
        print(identity.prove_dead(me, lambda: False), identity.prove_dead(me, lambda: True))
        outside = [identity.prove_dead(outside, lambda: free) for free in (False, True)]
        print(*outside)
        """,
        before=(*container, "--mount-proc") if own_proc else container,
    ) as process:
        try:
            inside = who(process.line())
        except AssertionError as error:
            if "unshare failed" in str(error):
                pytest.skip(str(error))
            raise
        me = current()
        assert inside.pid == 1
        assert inside.boot_id == me.boot_id
        assert inside.pid_namespace != me.pid_namespace
        assert not prove_dead(inside, held)
        assert prove_dead(inside, free)
        for fact in (me.pid, me.start_time, me.pid_namespace):
            process.tell(str(fact))
        status, output, errors = process.end()
        assert status == 0, errors
        ours, itself, outside = output.splitlines()
        assert ours == str(own_proc)
        # If /proc is of another namespace, the process checks its own lock, too.
        assert itself == ("False False" if own_proc else "False True")
        assert outside == "False True"


@pytest.mark.product(few=1)
@needs_root
@pytest.mark.parametrize("offset", [0, 1000])
def test_a_shifted_clock_of_boot_makes_start_times_unknown(offset: int) -> None:
    with Program.python(
        WHO, before=("unshare", "--time", f"--boottime={offset}", "--fork")
    ) as process:
        status, output, errors = process.end()
        if "unshare" in errors:
            pytest.skip(errors)
        assert status == 0, errors
        assert (who(output).start_time == 0) == (offset != 0)


def test_the_offset_of_the_clock_of_boot_is_that_of_the_time_namespace(fake_proc: Path) -> None:
    assert identity.boot_offset_ns() == 0  # a kernel without time namespaces
    (fake_proc / "self/ns").mkdir()
    (fake_proc / "self/ns/time").touch()
    assert identity.boot_offset_ns() is None
    (fake_proc / "self/ns/time_for_children").touch()
    assert identity.boot_offset_ns() is None  # children will be in another namespace
    (fake_proc / "self/ns/time_for_children").unlink()
    os.link(fake_proc / "self/ns/time", fake_proc / "self/ns/time_for_children")
    (fake_proc / "self/timens_offsets").write_text("monotonic 5 0\nboottime 0 0\n")
    assert identity.boot_offset_ns() == 0
    (fake_proc / "self/timens_offsets").write_text("monotonic 0 0\nboottime -7 999999999\n")
    assert identity.boot_offset_ns() == -6_000_000_001


def test_an_unknown_offset_makes_start_times_unknown(
    fake_proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for offset_ns, is_known in ((0, True), (1, False), (None, False)):
        monkeypatch.setattr(identity, "boot_offset_ns", lambda told=offset_ns: told)
        monkeypatch.setattr(identity, "_state_and_start", lambda pid: ("R", 1234))
        assert (identity._identify_self().start_time != 0) == is_known


def test_the_clock_of_leases_is_that_of_the_initial_time_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for offset_ns in (0, 10**9, -(10**9)):
        monkeypatch.setattr(identity, "boot_offset_ns", lambda told=offset_ns: told)
        identity._set_boot_clock()
        try:
            before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            shown = _core.boot_ns()
            assert before <= shown + offset_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        finally:
            _core.set_boot_offset(0)


def test_this_test_really_waits_for_children() -> None:
    """The tests above must not depend on the reaper, so ended programs must free their pids."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert process_state(process.pid) == "dead"
