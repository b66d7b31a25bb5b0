"""Supervision of collectors: starts them, notices deaths, and restarts them if asked to.

Deaths are seen through pidfds, so a dead collector's slots are free within milliseconds. Other
clients of the directory are watched too; they are reported and reaped, but not restarted. Before a
name is spawned, processes of an earlier coordinator with that name are ended, or adopted.

Always true
  1. A spawned process depends on nothing here: if this process is killed, it goes on.
  2. An orderly end of this process (``stop``, the end of the interpreter, SIGTERM unless the
     program handles it) stops the processes that it has spawned, and no others.
  3. Only the watcher starts processes, and it notes each under the lock: an interrupt of the main
     thread leaves no process that ``stop`` does not know.
  4. A fork of this process supervises nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar, get_args

from shmbuffer.errors import BufferClosedError, ShmBufferError
from shmbuffer.memory.directory import cleanup, roster
from shmbuffer.memory.directory.registry import Client
from shmbuffer.memory.engine import Engine
from shmbuffer.service.main_module import (
    UNPICKLABLE,
    cannot_be_pickled,
    require_importable,
    require_named,
)
from shmbuffer.service.orphans import Orphans, take_over
from shmbuffer.service.spawned import (
    ASKED_TO_END,
    ON_SIGTERM,
    Process,
    Spawned,
    hold_ctrl_c_back,
    names_of,
)
from shmbuffer.service.stopping import is_being_stopped
from shmbuffer.watch.historian import Death, Historian
from shmbuffer.watch.stats import Number
from shmbuffer.watch.writeback_warning import WritebackWarning

_Answer = TypeVar("_Answer")
_Key = tuple[int, int]  # of a client: entry, incarnation

log = logging.getLogger("shmbuffer.service")

SCAN_S = 0.5
"""How often the registry is read for new clients, and for deaths without a pidfd."""


class Supervisor:
    """Starts, watches and stops the processes of one coordinator."""

    def __init__(self, engine: Engine, scratch_dir: Path, *, grace_s: float = 5.0) -> None:
        self.deaths: list[Death] = []  # of all clients, in the order in which they were noticed
        self._engine = engine
        self._scratch_dir = scratch_dir
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._spawned: list[Spawned] = []
        self._spawned_pids: dict[int, str] = {}  # with the names
        self._due: list[tuple[float, Spawned]] = []  # what to restart, and when
        self._stopping = False
        self._failure: BaseException | None = None  # what ended the watch before its time
        self._wake_up = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Only the watcher touches these.
        self._others: dict[_Key, int] = {}  # pidfds of the other clients
        self._settled: set[_Key] = set()  # other clients without one, or whose pidfd has fired
        self._reported: set[_Key] = set()  # dead clients that are still in the registry
        self._buffer_is_gone = False
        self._writeback = WritebackWarning(scratch_dir) if engine.on_disk else None
        self._historian = Historian(engine, scratch_dir)
        if (directory := engine.seat.ground.directory) is not None:
            roster.forget_deaths(directory)  # of the run before
        self._complaint = ""  # the last one of the engine, to be logged once
        self._at_sigterm: cleanup.Ownership | None = None
        self._watcher = threading.Thread(
            target=self._watch, name="shmbuffer-supervisor", daemon=True
        )
        self._watcher.start()

    @property
    def processes(self) -> list[Spawned]:
        """The spawned processes, in order, ended ones included."""
        return list(self._spawned)

    def counts(self) -> dict[str, Number]:
        """Its counts for ``stats`` of the coordinator."""
        return {
            "processes": sum(spawned.is_alive() for spawned in self.processes),
            "deaths": len(self.deaths),
            "restarts": sum(spawned.restarts for spawned in self.processes),
            "held_back_s": 0.0 if self._writeback is None else self._writeback.seconds,
        }

    def spawn(
        self,
        target: Callable[..., object] | str,
        n: int,
        args: tuple[Any, ...],
        *,
        restart: bool,
        orphans: Orphans = "stop",
        name: str | None = None,
    ) -> list[Spawned]:
        """See ``Coordinator.spawn``."""
        if not (callable(target) or isinstance(target, str)):
            raise TypeError(
                f"spawn() takes the target first, a function or its name, not {target!r}; "
                "call spawn(target, n)"
            )
        if not hasattr(n, "__index__"):
            raise TypeError(f"n is a number of processes, not {n!r}; call spawn(target, n)")
        if n < 0:
            raise ValueError(f"n is a number of processes, not {n}")
        if orphans not in get_args(Orphans):
            raise ValueError(f"orphans is 'stop', 'adopt' or 'leave', not {orphans!r}")
        where = self._scratch_dir
        # Otherwise the roster would be another buffer's.
        self._engine.seat.require_there()
        if isinstance(target, str):
            target = require_named(where, target, args)
        elif n:
            require_importable(where, target, args)
        label, full_name = (name, name) if name else names_of(target)

        def start(spawned: Spawned) -> SpawnProcess:
            self._engine.seat.require_there()
            before, spawned.file = spawned.file, roster.plan(where)
            if before:
                roster.forget(where, before)
            try:
                process = Process(where, spawned, full_name, target, args)
                process.start()
            except BaseException as error:
                if not spawned.restarts:  # else it is tried again
                    roster.forget(where, spawned.file)
                if isinstance(error, UNPICKLABLE):
                    raise cannot_be_pickled(where, target, error) from None
                raise
            return process

        new = [
            Spawned(start, name=f"{label}-{index}", index=index, restart=restart)
            for index in range(n)
        ]
        adopted: dict[int, tuple[roster.LivingProcess, int]] = {}
        if orphans != "leave":
            with self._changed:  # the watcher may be about to restart one
                living = roster.living(where, {spawned.file for spawned in self._spawned})
            found = [one for one in living if one.name == full_name]
            how_many = n if orphans == "adopt" else 0
            adopted = take_over(where, found, how_many, self._grace_s)
        with self._changed:
            if self._stopping:
                for _, pidfd in adopted.values():
                    os.close(pidfd)
                raise BufferClosedError(f"{self._scratch_dir}: this coordinator is closed")
            if self._at_sigterm is None:
                self._at_sigterm = cleanup.own(self._scratch_dir, self.stop)
            for index, (entry, pidfd) in adopted.items():
                new[index].adopt(entry.identity.pid, pidfd, entry.file)
                self._spawned_pids[new[index].pid] = new[index].name
            self._spawned += new
            self._due += [(0.0, spawned) for spawned in new if not spawned.is_alive()]
            self._wake()
            self._wait_for(lambda: self._stopping or not any(map(self._is_due, new)), None)
            failures = [spawned for spawned in new if spawned.failure is not None]
            self._spawned = [spawned for spawned in self._spawned if spawned not in failures]
        for spawned in failures:
            assert spawned.failure is not None
            raise spawned.failure
        return new

    def join(self, timeout: float | None = None) -> bool:
        """See ``Coordinator.join``."""
        return self._wait_for(self._all_ended, timeout)

    def wait_for_deaths(self, count: int, timeout: float | None = None) -> bool:
        """See ``Coordinator.wait_for_deaths``."""
        return self._wait_for(lambda: len(self.deaths) >= count, timeout)

    def stop(self) -> None:
        """End the spawned processes (SIGTERM, then SIGKILL), then the watch. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._stopping = True
            self._due.clear()
            running = [spawned for spawned in self._spawned if spawned.is_alive()]
            for spawned in running:
                spawned.terminate()
        if self._failure is not None:
            log.error("nobody watched the end of %s", running)
        elif not self.join(self._grace_s):
            for spawned in running:
                if spawned.is_alive():
                    log.warning("%s (pid %d) ignored SIGTERM: killed", spawned.name, spawned.pid)
                    spawned.kill()
            self.join(self._grace_s)
        self._wake()
        self._watcher.join(self._grace_s)
        if self._at_sigterm is not None:
            self._at_sigterm.release()

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure is not None, timeout)
            if self._failure is not None:
                raise RuntimeError("the watch over the processes has failed") from self._failure
            return condition()

    # ---- the watcher's thread ----

    def _watch(self) -> None:
        hold_ctrl_c_back()
        try:
            while True:
                self._start_due()
                self._look_at_registry()
                with self._changed:
                    if self._stopping and self._all_ended():
                        return
                    mine = {s.sentinel: s for s in self._spawned if s.is_alive()}
                    next_s = min([SCAN_S, *(when - time.monotonic() for when, _ in self._due)])
                others = {pidfd: client for client, pidfd in self._others.items()}
                for fd in connection.wait([*mine, *others, self._wake_up], max(0.0, next_s)):
                    assert isinstance(fd, int)
                    if fd == self._wake_up:
                        os.eventfd_read(fd)
                    elif fd in mine:
                        self._note_end(mine[fd])
                    else:
                        self._settle(others[fd])
        except BaseException as error:
            with self._changed:
                self._failure = error  # a caller must not wait for ever
                self._changed.notify_all()
            raise
        finally:
            self._historian.close()
            with self._changed:
                for fd in (*self._others.values(), self._wake_up):
                    os.close(fd)
                self._others.clear()
                self._wake_up = -1

    def _wake(self) -> None:
        with self._changed:
            if self._wake_up >= 0:
                os.eventfd_write(self._wake_up, 1)

    def _all_ended(self) -> bool:
        return not self._due and not any(spawned.is_alive() for spawned in self._spawned)

    def _note_end(self, spawned: Spawned) -> None:
        """Reap and report one of our processes that has ended, and schedule its restart."""
        roles = {client.pid: client.role for client in self._clients()}
        pid, where = spawned.pid, (self._scratch_dir, spawned.file)
        words = self._asked(lambda: roster.last_words(*where), roster.LastWords())
        code = spawned.collect(words)
        self._reap()
        told_to_end = self._is_being_stopped()
        with self._changed:
            has_died = code != 0 and not self._stopping
            has_died = has_died and not (told_to_end and code in ON_SIGTERM)
            again = has_died and spawned.restart
            again = again and code not in ASKED_TO_END and not told_to_end
            if has_died and not again:
                dead = roster.Dead(spawned.name, code, words.error)
                spawned.file = self._asked(lambda: roster.note_death(*where, dead), spawned.file)
            elif not again:  # what is restarted keeps its file until its successor has one
                self._asked(lambda: roster.forget(*where), None)
            if has_died:
                if again:
                    self._due.append((time.monotonic() + spawned.pause_s(), spawned))
                role = roles.get(pid, "collector")
                self._report(Death(pid, role, spawned.name, spawned.index, code, restarted=again))
            self._changed.notify_all()

    def _is_due(self, spawned: Spawned) -> bool:
        return any(waiting is spawned for _, waiting in self._due)

    def _start_due(self) -> None:
        with self._changed:
            now = time.monotonic()
            ripe = [spawned for when, spawned in self._due if when <= now]
            self._due = [(when, spawned) for when, spawned in self._due if when > now]
            if ripe and self._is_being_stopped():
                for spawned in ripe:
                    spawned.failure = BufferClosedError(
                        f"{self._scratch_dir}: `shmbuffer stop` ends everybody here; start again "
                        "when it is done"
                    )
                self._changed.notify_all()
                return
            for spawned in ripe:
                spawned.begin()
                if spawned.failure is None:
                    self._spawned_pids[spawned.pid] = spawned.name
                elif spawned.restarts:  # a failure of the first start is raised by `spawn`
                    why = str(spawned.failure)  # a handler that keeps the error keeps its maps
                    if isinstance(spawned.failure, BufferClosedError):
                        log.error("%s is not started again: %s", spawned.name, why)
                        continue
                    log.error("%s could not be started again: %s", spawned.name, why)
                    self._due.append((now + 1.0 + spawned.pause_s(), spawned))
            if ripe:
                self._changed.notify_all()

    # ---- the other clients ----

    def _look_at_registry(self) -> None:
        """Reap and report dead clients that are not ours, and begin to watch living ones."""
        if self._engine.pages.prefault:
            self._asked(lambda: self._engine.ring(), None)  # it begins where a schema is seen
        self._asked(self._engine.seat.require_linked, None)
        clients = self._clients()
        with self._changed:
            known = {client.pid for client in clients} | {one.pid for one in self._spawned}
            for pid in self._spawned_pids.keys() - known if clients else ():
                del self._spawned_pids[pid]
            names = dict(self._spawned_pids)
        ours = {*names, self._pid}
        living = {_key(client): client.pid for client in clients if client.alive}
        dead = {_key(client): client for client in clients if not client.alive}
        if dead:
            self._reap()
        news = {dead[key].pid: dead[key].role for key in dead.keys() - self._reported}
        self._reported = set(dead)  # some may not be reaped yet
        with self._changed:
            for pid in news.keys() - ours:
                self._report(Death(pid, news[pid], "", None, None, restarted=False))
                self._changed.notify_all()
        living = {key: pid for key, pid in living.items() if pid not in ours}
        for key in self._others.keys() - living.keys():
            self._settle(key)
        self._settled &= living.keys()
        for key in living.keys() - self._others.keys() - self._settled:
            try:
                self._others[key] = os.pidfd_open(living[key])
            except OSError:
                self._settled.add(key)  # in another pid namespace, or just gone
        if self._writeback is not None:
            alive = {client.pid for client in clients if client.alive}
            pids = ours & alive | {living[key] for key in self._others}
            self._asked(functools.partial(self._writeback.look, pids), None)
        self._asked(lambda: self._historian.look(clients, self.deaths, names), None)

    def _settle(self, key: _Key) -> None:
        os.close(self._others.pop(key))
        self._settled.add(key)

    def _clients(self) -> list[Client]:
        return self._asked(self._engine.clients, [])

    def _reap(self) -> int:
        return self._asked(self._engine.seat.reap_dead, 0)

    def _is_being_stopped(self) -> bool:
        return self._asked(lambda: is_being_stopped(self._scratch_dir), False)

    def _asked(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """The answer of the engine or the files; after an error our processes are still watched."""
        if self._buffer_is_gone:
            return otherwise
        try:
            return question()
        except (OSError, ShmBufferError) as error:
            self._buffer_is_gone = isinstance(error, BufferClosedError)
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("the dead cannot be looked after: %s", self._complaint)
            return otherwise

    def _report(self, death: Death) -> None:
        self.deaths.append(death)
        log.warning("%s: %s", self._scratch_dir, death)


def _key(client: Client) -> _Key:
    return client.entry, client.incarnation
