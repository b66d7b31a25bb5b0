"""Starts collectors, detects and reports their deaths, and restarts them if requested.

A pidfd reports the death of each spawned process, so that its slots are freed within milliseconds.
Twice per second the supervisor looks for dead clients in the registry that it has not spawned. It
reports and reaps these clients, but does not restart them. Before it spawns processes with a name,
it ends or adopts the orphans with this name, which an earlier coordinator has spawned.

Invariants:
  1. If the coordinator is killed, the processes that it has spawned keep running.
  2. If the coordinator ends cleanly, it stops the processes that it has spawned, and no others. It
     ends cleanly on ``close``, at the end of the interpreter, and on SIGTERM unless the program
     handles SIGTERM.
  3. Only the watcher thread starts processes, and it records each process under the lock. Therefore
     ``stop`` finds all processes, even if the main thread was interrupted.
  4. The supervisor does nothing in a process that was forked from its process.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar, get_args

from shmbuffer.errors import BufferClosedError, ShmBufferError
from shmbuffer.memory.clients import roster
from shmbuffer.memory.clients.registry import Client
from shmbuffer.memory.directory import cleanup
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.system.identity import ProcessState
from shmbuffer.service.children import NEVER, Children, Orphans, Spawned, take_over
from shmbuffer.service.main_module import (
    UNPICKLABLE,
    cannot_be_pickled,
    require_importable,
    require_named,
)
from shmbuffer.service.process import Process, hold_ctrl_c_back, names_of
from shmbuffer.service.stopping import is_being_stopped
from shmbuffer.watch.historian import Death, Historian
from shmbuffer.watch.stats import Number
from shmbuffer.watch.writeback_warning import WritebackWarning

_Answer = TypeVar("_Answer")
_Key = tuple[int, int]  # entry and incarnation of a client
_HERE = (ProcessState.RUNNING, ProcessState.STOPPED)

log = logging.getLogger("shmbuffer.service")

SCAN_S = 0.5
"""Seconds between two searches of the registry for dead clients."""

ASKED_TO_END = (0, -signal.SIGINT, 128 + signal.SIGINT)
"""Exit codes of a process that returned or got Ctrl-C. Such a process is not restarted."""

ON_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a process that got SIGTERM. During `shmbuffer stop`, this is not a death."""


class Supervisor:
    """Starts, watches and stops the processes of one coordinator.

    Args:
        engine: engine of the buffer.
        scratch_dir: directory of the buffer.
        grace_s: seconds between SIGTERM and SIGKILL when processes are stopped.
    """

    def __init__(self, engine: Engine, scratch_dir: Path, *, grace_s: float = 5.0) -> None:
        self.deaths: list[Death] = []  # deaths of all clients, in the order of detection
        self._engine = engine
        self._scratch_dir = scratch_dir
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())  # guards the attributes below
        self._children = Children(scratch_dir)
        self._stopping = False
        self._failure: BaseException | None = None  # error that ended the watcher
        self._wake_up = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Only the watcher uses the attributes below.
        self._reported: set[_Key] = set()  # clients whose death was reported
        self._buffer_is_gone = False
        self._writeback = WritebackWarning(scratch_dir) if engine.on_disk else None
        self._historian = Historian(engine, scratch_dir)
        if (directory := engine.seat.backing.directory) is not None:
            roster.remove_deaths(directory)  # deaths that an earlier run has recorded
        self._complaint = ""  # message of the last error, so that it is logged only once
        self._at_sigterm: cleanup.Ownership | None = None
        self._watcher = threading.Thread(
            target=self._watch, name="shmbuffer-supervisor", daemon=True
        )
        self._watcher.start()

    @property
    def processes(self) -> list[Spawned]:
        """Spawned processes in the order of their start, including those that have ended."""
        return list(self._children.all)

    def counts(self) -> dict[str, Number]:
        """Returns the numbers that the coordinator adds to its ``stats``."""
        return {
            "processes": len(self._children.running()),
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
        """Starts and watches processes. See ``Coordinator.spawn`` for the arguments and errors."""
        if not (callable(target) or isinstance(target, str)):
            raise TypeError(
                "the first argument of spawn() must be the target, a function or its name, got "
                f"{target!r}; call spawn(target, n)"
            )
        if not hasattr(n, "__index__"):
            raise TypeError(f"n must be a number of processes, got {n!r}; call spawn(target, n)")
        if n < 0:
            raise ValueError(f"n must be a number of processes of at least 0, got {n}")
        if orphans not in get_args(Orphans):
            raise ValueError(f"orphans must be 'stop', 'adopt' or 'leave', got {orphans!r}")
        where = self._scratch_dir
        # If the directory was replaced, the roster would belong to another buffer.
        self._engine.seat.require_there()
        if isinstance(target, str):
            target = require_named(where, target, args)
        elif n:
            require_importable(where, target, args)
        label, full_name = (name, name) if name else names_of(target)

        def start(spawned: Spawned) -> SpawnProcess:
            self._engine.seat.require_there()
            before, spawned.file = spawned.file, roster.create_file(where)
            if before:
                roster.remove_file(where, before)
            try:
                process = Process(where, spawned, full_name, target, args)
                process.start()
            except BaseException as error:
                if not spawned.restarts:  # otherwise the restart is tried again
                    roster.remove_file(where, spawned.file)
                if isinstance(error, UNPICKLABLE):
                    raise cannot_be_pickled(where, target, error) from None
                raise
            return process

        new = [
            Spawned(start, name=f"{label}-{index}", index=index, restart=restart)
            for index in range(n)
        ]
        if orphans != "leave":
            with self._changed:  # because the watcher may be restarting a child
                found = self._children.orphans(full_name)
            take_over(where, found, new if orphans == "adopt" else (), self._grace_s)
        with self._changed:
            if self._stopping:
                for child in new:
                    child.release()
                raise BufferClosedError(f"{self._scratch_dir}: this coordinator is closed")
            if self._at_sigterm is None:
                self._at_sigterm = cleanup.own(self._scratch_dir, self.stop)
            for child in new:
                child.due_s = NEVER if child.is_alive() else 0.0
            self._children.all += new
            self._wake()
            self._wait_for(
                lambda: self._stopping or all(child.due_s == NEVER for child in new), None
            )
            failed = [child for child in new if child.failure is not None]
            self._children.all = [child for child in self._children.all if child not in failed]
        for child in failed:
            assert child.failure is not None
            raise child.failure
        return new

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all spawned processes have ended and none of them will be restarted.

        Returns False if this takes longer than ``timeout`` seconds.
        """
        return self._wait_for(self._children.have_ended, timeout)

    def wait_for_deaths(self, count: int, timeout: float | None = None) -> bool:
        """Waits until ``deaths`` has at least ``count`` entries.

        Returns False if this takes longer than ``timeout`` seconds.
        """
        return self._wait_for(lambda: len(self.deaths) >= count, timeout)

    def stop(self) -> None:
        """Ends the spawned processes (SIGTERM, then SIGKILL) and the watcher thread. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._stopping = True
            for child in self._children.waiting():
                child.due_s = NEVER
            running = self._children.running()
            for child in running:
                child.terminate()
        if self._failure is not None:
            log.error("supervision has failed, so stop() does not wait for %s", running)
        elif not self.join(self._grace_s):
            for child in self._children.running():
                log.warning(
                    "%s (pid %d) was killed because it ignored SIGTERM", child.name, child.pid
                )
                child.kill()
            self.join(self._grace_s)
        self._wake()
        self._watcher.join(self._grace_s)
        if self._at_sigterm is not None:
            self._at_sigterm.release()

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until a condition is true. Returns False after ``timeout`` seconds.

        Raises RuntimeError if the watcher thread has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure is not None, timeout)
            if self._failure is not None:
                raise RuntimeError("supervision of the processes has failed") from self._failure
            return condition()

    # ---- the watcher thread ----

    def _watch(self) -> None:
        """Starts, watches and restarts processes until `stop` has ended all of them."""
        hold_ctrl_c_back()
        try:
            while True:
                self._start_due()
                self._check_registry()
                with self._changed:
                    if self._stopping and self._children.have_ended():
                        return
                    mine = {child.sentinel: child for child in self._children.running()}
                    due_s = min((child.due_s for child in self._children.all), default=NEVER)
                next_s = min(SCAN_S, due_s - time.monotonic())
                for fd in connection.wait([*mine, self._wake_up], max(0.0, next_s)):
                    assert isinstance(fd, int)
                    if fd == self._wake_up:
                        os.eventfd_read(fd)
                    else:
                        self._note_end(mine[fd])
        except BaseException as error:
            with self._changed:
                self._failure = error  # `_wait_for` raises an error with this cause
                self._changed.notify_all()
            raise
        finally:
            self._historian.close()
            with self._changed:
                os.close(self._wake_up)
                self._wake_up = -1

    def _wake(self) -> None:
        """Wakes the watcher thread."""
        with self._changed:
            if self._wake_up >= 0:
                os.eventfd_write(self._wake_up, 1)

    def _note_end(self, child: Spawned) -> None:
        """Reaps and reports a spawned process that has ended, and schedules its restart."""
        entries = [client for client in self._clients() if client.pid == child.pid]
        where = self._scratch_dir, child.file
        words = self._try(lambda: roster.read_exit(*where), roster.ExitRecord())
        with self._changed:  # `join` must not return before a restart is scheduled
            code = child.collect(words)
            self._reported.update(map(_key, entries))
            self._try(self._engine.seat.reap_dead, 0)
            being_stopped = self._is_being_stopped()
            has_died = code != 0 and not self._stopping
            has_died = has_died and not (being_stopped and code in ON_SIGTERM)
            again = has_died and child.restart
            again = again and code not in ASKED_TO_END and not being_stopped
            if has_died and not again:
                dead = roster.Dead(child.name, code, words.error)
                child.file = self._try(lambda: roster.record_death(*where, dead), child.file)
            elif not again:  # a restarted process needs the file until it has a new one
                self._try(lambda: roster.remove_file(*where), None)
            if again:
                child.due_s = time.monotonic() + child.pause_s()
            if has_died:
                role = entries[-1].role if entries else "collector"
                self._report(Death(child.pid, role, child.name, child.index, code, again))
            self._changed.notify_all()

    def _start_due(self) -> None:
        """Starts the processes whose scheduled time has come."""
        with self._changed:
            now_s = time.monotonic()
            ripe = [child for child in self._children.waiting() if child.due_s <= now_s]
            if not ripe:
                return
            being_stopped = self._is_being_stopped()
            for child in ripe:
                child.due_s = NEVER
                if being_stopped:
                    child.failure = BufferClosedError(
                        f"{self._scratch_dir}: `shmbuffer stop` is stopping the processes of this "
                        "directory; start the process again when the command has finished"
                    )
                    continue
                child.begin()
                if child.failure is None or not child.restarts:
                    continue  # `spawn` raises the error of a first start
                why = str(child.failure)  # logging the error itself could keep its memory maps open
                if isinstance(child.failure, BufferClosedError):
                    log.error("%s is not restarted: %s", child.name, why)
                    continue
                log.error("%s could not be restarted: %s", child.name, why)
                child.due_s = now_s + 1.0 + child.pause_s()
            self._changed.notify_all()

    # ---- the other clients ----

    def _check_registry(self) -> None:
        """Reaps dead clients, reports those that were not spawned here, and records the history."""
        if self._engine.pages.prefault:
            self._try(self._engine.ring, None)  # opening the ring starts the allocation of pages
        self._try(self._engine.seat.require_linked, None)
        clients = self._clients()
        with self._changed:
            names = {child.pid: child.name for child in self._children.all}
            ours = {self._pid, *(child.pid for child in self._children.running())}
        present = {_key(client): client for client in clients}
        dead = {key: client for key, client in present.items() if not client.alive}
        if dead:
            self._try(self._engine.seat.reap_dead, 0)
        news = {dead[key].pid: dead[key].role for key in dead.keys() - self._reported}
        with self._changed:
            for pid in news.keys() - ours:
                self._report(Death(pid, news[pid], "", None, None, restarted=False))
                self._changed.notify_all()
        # Clients that are still in the registry must not be reported again.
        self._reported = (self._reported | dead.keys()) & present.keys()
        if self._writeback is not None:
            here = {client.pid for client in clients if client.state in _HERE}
            self._try(functools.partial(self._writeback.check, here), None)
        self._try(lambda: self._historian.record(clients, self.deaths, names), None)

    def _clients(self) -> list[Client]:
        """Returns the clients in the registry, or no clients if the registry cannot be read."""
        return self._try(self._engine.clients, [])

    def _is_being_stopped(self) -> bool:
        """True if `shmbuffer stop` is running for this directory."""
        return self._try(lambda: is_being_stopped(self._scratch_dir), False)

    def _try(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """Returns the result of a function, or a default if the function raises an error.

        The error is logged once, so that the watcher thread continues without the buffer.

        Args:
            question: the function.
            otherwise: the default.
        """
        if self._buffer_is_gone:
            return otherwise
        try:
            return question()
        except (OSError, ShmBufferError) as error:
            self._buffer_is_gone = isinstance(error, BufferClosedError)
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("the clients could not be checked: %s", self._complaint)
            return otherwise

    def _report(self, death: Death) -> None:
        """Records and logs a death."""
        self.deaths.append(death)
        log.warning("%s: %s", self._scratch_dir, death)


def _key(client: Client) -> _Key:
    """Returns the registry entry and the incarnation of a client, which identify it."""
    return client.entry, client.incarnation
