"""Clients have an entry for each handle, which is reused only after its owner is proven dead."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer import RegistryFullError
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.clients.locks import LivenessFile
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import Phase
from shmbuffer.memory.system import identity
from tests.kit.rings import ring_of
from tests.memory.rows import (
    Child,
    Maker,
    Parent,
    child,
    contents,
    require_sound,
    sample,
    schema,
    succeeds,
    write,
)

SYS_EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]


def attached(engine: Engine) -> Any:
    """Runs a child with its own entry, which then waits."""

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause()

    return child(work)


def become_zombie(process: Child) -> None:
    """Kills a process without reading its exit status."""
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


# Joining and leaving.


def test_every_handle_has_an_entry_and_says_who_it_is(make: Maker) -> None:
    engine = make()
    make.second(engine, role="learner")
    clients = engine.clients()
    assert [client.entry for client in clients] == [0, 1]
    assert [client.incarnation for client in clients] == [1, 2]
    assert [client.role for client in clients] == ["client", "learner"]
    me = identity.current()
    for client in clients:
        assert (client.pid, client.alive, client.state) == (os.getpid(), True, "running")
        assert client.phase == "IDLE"
        assert abs(client.joined_s - time.time()) < 3600
        assert engine.seat.registry.identity(client.entry) == me
    assert clients[0].to_json()["counters"] == dict.fromkeys(layout.COUNTERS, 0)


@pytest.mark.parametrize("role", [role.name.lower() for role in layout.Role])
def test_a_role_is_for_display(make: Maker, role: str) -> None:
    engine = make()
    second = make.second(engine, role=role)
    assert engine.clients()[1].role == role
    write(ring_of(second), [1])


def test_a_client_shows_what_it_is_doing(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    assert engine.clients()[0].idle_s is None
    write(ring, range(4))
    ring.claims.claim(3)
    client = engine.clients()[0]
    assert client.phase == "PAYLOAD"
    assert client.idle_s is not None
    assert client.idle_s >= 0
    ring.claims.abort()
    sample(ring, 5)
    ring.update(np.arange(4), np.ones(4), np.array([0, 1, 2, 11]))
    counters = engine.clients()[0].counters
    assert {name: counters[name] for name in layout.COUNTERS if name != "age_sum"} == {
        "inserts": 4,
        "aborts": 3,
        "batches_sampled": 1,
        "items_sampled": 5,
        "redraws": 0,
        "updates_applied": 3,
        "updates_stale": 1,
        "waits": 0,
    }


def test_a_client_that_leaves_frees_its_entry_for_the_next(make: Maker) -> None:
    engine = make()
    second, third = make.second(engine), make.second(engine)
    second.close()
    assert [entry for entry, _ in engine.seat.registry.live()] == [0, 2]
    fourth = make.second(engine)
    assert engine.seat.registry.live() == [(0, 1), (1, 4), (2, 3)]
    assert [ring_of(one).seat.incarnation for one in (engine, third, fourth)] == [1, 3, 4]


def test_a_client_that_leaves_and_ends_during_a_look_is_not_dead(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    second = make.second(engine)
    entry, registry = second.seat.entry, engine.seat.registry
    monkeypatch.setattr(type(registry), "is_dead", lambda _, of: of == entry and not second.close())
    assert [client.entry for client in engine.clients()] == [engine.seat.entry]


def test_an_incarnation_is_used_once(make: Maker) -> None:
    engine = make()
    seen = {ring_of(engine).seat.incarnation}
    for _ in range(5):
        with make.second(engine) as second:
            seen.add(ring_of(second).seat.incarnation)
    assert seen == {1, 2, 3, 4, 5, 6}


def test_counters_outlive_their_client(make: Maker) -> None:
    engine = make()
    for numbers in range(3):
        with make.second(engine) as second:
            write(ring_of(second), range(numbers + 1))
    write(ring_of(engine), range(4))
    assert engine.stats()["inserts"] == 10
    assert engine.stats()["clients_alive"] == 1


def test_a_client_may_join_before_there_is_a_schema(make: Maker) -> None:
    engine = make.undefined()
    second = make.second(engine)
    assert second.ring() is None
    engine.define(schema())
    write(ring_of(engine), [1, 2])
    assert ring_of(second).length == 2
    write(ring_of(second), [3])
    assert contents(ring_of(engine)) == {0: 1, 1: 2, 2: 3}
    assert ring_of(engine).live.sources[:3].tolist() == [1, 1, 2]
    second.close()
    assert len(engine.seat.registry.live()) == 1


def test_a_client_that_is_forgotten_leaves(make: Maker) -> None:
    engine = make()
    make.second(engine)
    make.made.pop()
    import gc

    gc.collect()
    assert engine.seat.registry.live() == [(0, 1)]


# All entries taken.


@pytest.fixture
def many_files() -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.product(few=1)
@pytest.mark.usefixtures("many_files")
def test_there_are_256_entries_and_the_error_names_who_has_them(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    with attached(engine) as other:
        other.reached()
        # All entries are in use by living clients, so each client is checked once.
        with monkeypatch.context() as patch:
            patch.setattr("shmbuffer.memory.clients.registry.prove_dead", lambda *_: False)
            handles = [make.second(engine) for _ in range(254)]
        assert len(engine.seat.registry.live()) == 256
        before = engine.seat.control.entries.copy()
        pids = sorted([os.getpid(), other.pid])
        with pytest.raises(
            RegistryFullError,
            match="all 256 registry entries are in use by living clients "
            rf"\(pids {pids[0]}, {pids[1]}\); close handles that are not needed",
        ) as caught:
            make.second(engine)
        assert caught.value.pids == pids  # type: ignore[attr-defined]
        assert (engine.seat.control.entries == before).all()
        write(ring_of(handles[-1]), [7])
        assert ring_of(engine).length == 1

        other.kill()
        write(ring_of(make.second(engine)), [8])  # the entry of a dead client is free
    assert engine.stats()["clients_alive"] == 256


# The dead.


@pytest.mark.parametrize("fate", ["zombie", "gone"])
def test_the_entry_of_a_dead_client_is_taken_by_the_next(make: Maker, fate: str) -> None:
    engine = make()
    with attached(engine) as other:
        other.reached()
        assert not engine.seat.registry.is_dead(1)
        if fate == "zombie":
            become_zombie(other)
        else:
            other.kill()
        assert engine.seat.registry.is_dead(1)
        assert [client.alive for client in engine.clients()] == [True, False]
        assert engine.clients()[1].state == "dead"
        assert engine.stats()["clients_dead"] == 1
        second = make.second(engine)
        assert engine.seat.registry.live() == [(0, 1), (1, 3)]
        assert ring_of(second).seat.incarnation == 3
        assert engine.stats()["reaped"] == 1


def test_a_stopped_client_is_alive(make: Maker) -> None:
    engine = make()
    with attached(engine) as other:
        other.reached()
        other.stop()
        assert not engine.seat.registry.is_dead(1)
        assert engine.clients()[1].state == "stopped"
        assert engine.seat.reap_dead() == 0


def test_a_client_of_which_only_the_first_thread_has_ended_is_alive(make: Maker) -> None:
    """Such a process looks like a zombie but still writes."""
    engine = make()

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        started = threading.Event()

        def go_on() -> None:
            started.set()
            parent.pause()

        threading.Thread(target=go_on).start()
        started.wait()
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)

    with child(work) as other:
        other.reached()
        while identity.process_state(other.pid) != "dead":
            time.sleep(0.001)
        assert not engine.seat.registry.is_dead(1)
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert engine.seat.registry.is_dead(1)


@pytest.mark.parametrize(
    ("hidden", "found"),
    [("_proc_is_ours", False), ("_state_and_start", None)],
    ids=["/proc of another namespace", "hidepid"],
)
def test_what_proc_does_not_show_is_not_taken_for_dead(
    make: Maker, monkeypatch: pytest.MonkeyPatch, hidden: str, found: object
) -> None:
    engine = make()
    with attached(engine) as other:
        other.reached()
        monkeypatch.setattr(identity, hidden, lambda *_: found)
        assert not engine.seat.registry.is_dead(0)
        assert not engine.seat.registry.is_dead(1)


def test_a_client_under_another_boot_id_lives_as_long_as_its_lock(make_files: Maker) -> None:
    engine = make_files()
    second = make_files.second(engine)
    engine.seat.control.entries["boot_id"][1] = np.void(b"another boot....")
    assert not engine.seat.registry.is_dead(1)
    second.seat.membership.liveness.close()
    assert engine.seat.registry.is_dead(1)
    assert not engine.seat.registry.is_dead(0)


def test_a_client_of_an_earlier_boot_whose_lock_file_was_lost_is_dead(make_files: Maker) -> None:
    """A power cut removes a name that was never synced."""
    engine = make_files()
    make_files.second(engine)
    assert engine.path is not None
    (engine.path / LivenessFile.name(1)).unlink()
    assert not engine.seat.registry.is_dead(1), "within one boot that proves nothing"
    engine.seat.control.entries["boot_id"][1] = np.void(b"another boot....")
    assert engine.seat.registry.is_dead(1)


def test_a_client_with_another_start_time_is_dead(make: Maker) -> None:
    """Another process has got the same pid."""
    engine = make()
    make.second(engine)
    engine.seat.control.entries["start_time"][1] += np.uint64(1)
    assert engine.seat.registry.is_dead(1)


def test_a_client_in_another_pid_namespace_may_be_alive(make: Maker) -> None:
    engine = make()
    make.second(engine)
    engine.seat.control.entries["pid_namespace"][1] += np.uint64(1)
    engine.seat.control.entries["pid"][1] = 2**22 + 5
    assert not engine.seat.registry.is_dead(1)


# Reaping.


def test_reaping_gives_the_slots_of_the_dead_back(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        ring_of(engine).claims.claim(3)
        parent.pause()

    with child(work) as other:
        other.reached()
        assert engine.clients()[1].phase == "PAYLOAD"
        other.kill()
    assert engine.seat.reap_dead() == 1
    assert engine.seat.registry.live() == [(0, 1)]
    assert contents(ring) == {n: n for n in range(3, 8)}
    assert (engine.stats()["rolled_back"], engine.stats()["reaped"]) == (3, 1)
    assert engine.stats()["head"] == 11
    require_sound(engine)
    assert engine.seat.reap_dead() == 0
    assert engine.stats()["rolled_back"] == 3


def test_a_client_that_joins_finishes_the_claim_of_the_entry_it_takes(make: Maker) -> None:
    engine = make(alpha=1.0)
    write(ring_of(engine), range(8))

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        ring_of(engine).claims.claim_slots(np.array([2, 5]), in_place=True)
        parent.pause()

    with child(work) as other:
        other.reached()
        other.kill()
    second = make.second(engine)
    assert ring_of(second).seat.incarnation == 3
    assert set(contents(ring_of(engine))) == {0, 1, 3, 4, 6, 7}
    require_sound(engine)


def test_a_reaper_compares_the_incarnation(make: Maker) -> None:
    """Between the check and the lock, another client may have got the entry."""
    engine = make()
    second = make.second(engine)
    ring_of(second).claims.claim(2)
    native = ring_of(engine).seat.native
    before = (engine.seat.control.entries.copy(), ring_of(engine).live.words.tolist())
    for incarnation in (0, 1, 3, 2**64 - 1):
        assert native.reap(1, incarnation, 10**9) == 0
    assert (engine.seat.control.entries == before[0]).all()
    assert ring_of(engine).live.words.tolist() == before[1]
    assert native.reap(1, 2, 10**9) == 1, "of the right one the proof is the caller's business"
    assert native.reap(1, 2, 10**9) == 0
    with pytest.raises(IndexError, match="reap: there is no entry 256"):
        native.reap(256, 1, 10**9)


def test_a_client_whose_entry_was_taken_is_fenced_off(make: Maker) -> None:
    """The client was wrongly declared dead, and its later writes must not be committed."""
    from shmbuffer import BufferNeedsRestart

    engine = make(alpha=1.0)
    second = make.second(engine)
    ring = ring_of(second)
    ring.claims.claim(2)
    assert ring_of(engine).seat.native.reap(1, 2, 10**9) == 1
    for use in (
        ring.claims.commit,
        lambda: write(ring, [1]),
        lambda: ring.claims.claim(1),
        ring.empty,
    ):
        with pytest.raises(
            BufferNeedsRestart,
            match="another process considered this process dead and rolled its write back",
        ):
            use()
    third = make.second(engine)
    with pytest.raises(BufferNeedsRestart):
        write(ring, [1])
    second.close()
    write(ring_of(third), [])
    free_at_once = engine.path is None  # otherwise the client still holds a file
    assert engine.seat.registry.live() == [(0, 1), (1 if free_at_once else 2, 3)]
    assert contents(ring_of(engine)) == {}
    require_sound(engine)


def test_somebody_who_was_reaped_already_counts_as_reaped(make: Maker) -> None:
    engine = make()
    make.second(engine).close()
    assert engine.seat.reap_if_dead(1, 2)
    assert not engine.seat.reap_if_dead(0, 1), "oneself is alive"


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    "point", ["join.liveness", "join.incarnation", "join.identity", "join.live"]
)
def test_a_client_that_dies_while_joining_blocks_nobody(make: Maker, point: str) -> None:
    from shmbuffer._native import _core

    engine = make()

    def work(parent: Parent) -> None:
        _core.arm(point)
        engine.seat.rejoin()

    with child(work) as other:
        assert other.end() == -signal.SIGKILL
    second = make.second(engine)
    assert [entry for entry, _ in engine.seat.registry.live()] == [0, 1]
    assert engine.seat.registry.live()[1][1] == ring_of(second).seat.incarnation > 1
    write(ring_of(second), [1])
    require_sound(engine)


def test_a_child_that_ends_frees_its_own_entry_and_not_its_parents(make: Maker) -> None:
    engine = make()

    def work() -> None:
        write(ring_of(engine), [5])
        engine.close()

    succeeds(work)
    assert engine.seat.registry.live() == [(0, 1)]
    succeeds(engine.close)
    assert engine.seat.registry.live() == [(0, 1)]
    write(ring_of(engine), [6])
    assert contents(ring_of(engine)) == {0: 5, 1: 6}


def test_entries_have_liveness_files_that_stay(make_files: Maker) -> None:
    engine = make_files()
    second = make_files.second(engine)
    assert engine.path is not None
    procs: Path = engine.path / ".shmbuffer" / "procs"
    assert sorted(path.name for path in procs.iterdir()) == ["000.lock", "001.lock"]
    second.close()
    assert sorted(path.name for path in procs.iterdir()) == ["000.lock", "001.lock"]
    assert int(engine.seat.control.entries["phase"][0]) == Phase.IDLE


def test_a_pid_of_another_pid_namespace_says_nothing(fast_path: Path) -> None:
    with Engine.open(fast_path, Settings(capacity=8)) as engine:
        entries = engine.seat.control.entries
        # its lock file, which this process holds, shows that it is alive
        entries["pid_namespace"][0] += 1
        client = engine.clients()[0]
        assert (client.alive, client.state) == (True, "other container")
        entries["pid_namespace"][0] -= 1


def test_a_dead_client_is_gone_also_where_its_number_is_used_again(fast_path: Path) -> None:
    with Engine.open(fast_path, Settings(capacity=8)) as engine:
        entries = engine.seat.control.entries
        entries["start_time"][0] += 1
        client = engine.clients()[0]
        assert (client.alive, client.state) == (False, "dead")
        entries["start_time"][0] -= 1
