"""Records the history of a buffer in its coordinator.

     registry, counters ──read without the mutex──▶ Historian ──▶ .shmbuffer/history

No process waits for the historian, and the historian waits for no process. While another process
creates, recovers or removes the buffer, recording is postponed. If the historian cannot write, for
example because the disk is full or the directory is read-only, it logs one warning and stops. The
buffer then continues without a history. ``memory/upkeep/history.py`` describes the file and
explains why it is not a database of the standard library.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shmbuffer.errors import AttachTimeout, BufferClosedError, ShmBufferError
from shmbuffer.memory.clients import roster
from shmbuffer.memory.clients.registry import Client
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format.layout import Role
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.history import (
    BY_RECOVERY,
    FINE_S,
    Event,
    EventKind,
    History,
    living,
    open_ends,
)
from shmbuffer.memory.upkeep.history_writer import HistoryWriter

log = logging.getLogger("shmbuffer.service")


@dataclass(frozen=True)
class Death:
    """A client that ended without closing its handle."""

    pid: int  # pid of the dead process
    role: str  # role in the registry, or "collector" for a spawned process without an entry
    name: str  # ``target-index`` of a spawned process, otherwise ""
    index: int | None  # index of the process among those of one ``spawn`` call, otherwise None
    # Exit code as defined by `multiprocessing`, where -N stands for signal N. None if the process
    # is not a child of this process.
    exitcode: int | None
    restarted: bool  # True if the coordinator restarts the process
    time_s: float = field(default_factory=time.time)  # time of detection, in seconds since 1970

    @property
    def cause(self) -> str:
        """Description of the cause of death, as far as this process knows it."""
        return roster.describe_exit(self.exitcode)

    def __str__(self) -> str:
        who = self.name or self.role
        after = "; it is restarted" if self.restarted else ""
        return f"{who} (pid {self.pid}) {self.cause}{after}"


class Historian:
    """Records the counters of a buffer, and the clients that join, leave or die."""

    def __init__(self, engine: Engine, scratch_dir: Path) -> None:
        self._engine = engine
        self._scratch_dir = scratch_dir
        self._recorder: HistoryWriter | None = None
        self._stopped = False
        self._next_s = 0.0  # time of the next record on the monotonic clock
        self._clients: dict[tuple[int, int], Client] = {}  # clients at the last call of `record`
        self._deaths = 0  # number of the supervisor's deaths that have been recorded
        self._died: set[int] = set()  # pids of recorded deaths that are still in the registry
        self._reaped = 0  # value of the counter `reaped` at the last call of `record`

    def record(
        self, clients: Iterable[Client], deaths: Sequence[Death], names: Mapping[int, str]
    ) -> None:
        """Records which clients joined or ended since the last call.

        Also records the counters once per second.

        Args:
            clients: clients in the registry.
            deaths: all deaths that the supervisor has detected so far, oldest first.
            names: names of spawned processes by pid.
        """
        present = {(client.entry, client.incarnation): client for client in clients}
        is_due = time.monotonic() >= self._next_s
        news = present.keys() != self._clients.keys() or len(deaths) != self._deaths
        if self._stopped or not (is_due or news):
            return
        if self._engine.seat.incarnation not in {client.incarnation for client in present.values()}:
            return  # the list is incomplete, because this process's own entry is missing
        now = self._engine.glance()
        try:
            if self._recorder is None and not self._begin(present, now):
                return
            if news:
                self._note_changes(present, deaths, names, now)
            if is_due:
                self._clients, self._reaped = present, int(now["reaped"])
                self._next_s = time.monotonic() + FINE_S
                self._record(now)
        except (OSError, ShmBufferError) as error:
            self._stop(error)

    def close(self) -> None:
        """Writes a last record and closes the history, so that another process can record it.

        Further calls have no effect.
        """
        if self._recorder is None or self._stopped:
            return
        try:
            now = self._engine.glance()
            self._record(now)
            for client in self._clients.values():
                if client.incarnation == self._engine.seat.incarnation:
                    self._note(EventKind.LEFT, client, now)
        except BufferClosedError:
            pass  # the engine was closed first, so the previous record is the last one
        except (OSError, ShmBufferError) as error:
            self._stop(error)
        self._stopped = True
        self._recorder.close()

    def _begin(
        self, present: Mapping[tuple[int, int], Client], now: Mapping[str, int | float]
    ) -> bool:
        """Opens the history, and records which clients ended since its last record.

        Returns False, without waiting, if another process has locked the buffer's files.
        """
        with Directory.open(self._scratch_dir) as directory:
            files = Files(directory)
            try:
                with files.lock(0.0):
                    uuid = self._engine.superblock.uuid
                    self._recorder = recorder = HistoryWriter.open(files, uuid)
            except AttachTimeout:
                return False
        if recorder.reason is not None:
            log.warning("%s: starting a new history: %s", self._scratch_dir, recorder.reason)
        self._reaped, epoch = int(now["reaped"]), int(now["epoch"])
        before = recorder.history
        if before is not None:
            self._note_ended(recorder, before, {client.incarnation for client in present.values()})
        last = before.fine["epoch"][-1] if before is not None and len(before.fine) else epoch
        if self._engine.report is not None or last != epoch:
            event = Event(EventKind.RECOVERED, "coordinator", epoch=epoch)
            recorder.note(event, self._engine.seat.incarnation)
        return True

    def _note_ended(self, recorder: HistoryWriter, before: History, present: set[int]) -> None:
        """Records the clients that ended while no process recorded the history.

        They are recorded as dead if at least as many clients were reaped in the meantime, and
        otherwise as clients that left.
        """
        ends = open_ends(before.events)
        gone = [event for incarnation, event in ends.items() if incarnation not in present]
        if not gone or not len(before.fine):
            return
        last = before.fine[-1]
        later = [event for event in before.events if event.time_ns >= last["time_ns"]]
        noted = [event for event in later if event.recorder == BY_RECOVERY]
        reaped = self._reaped - int(last["reaped"]) - len(noted)
        kind = EventKind.DIED if reaped >= len(gone) else EventKind.LEFT
        for event in gone:
            recorder.note(replace(event, kind=kind, epoch=int(last["epoch"])), BY_RECOVERY)

    def _note_changes(
        self,
        present: dict[tuple[int, int], Client],
        deaths: Sequence[Death],
        names: Mapping[int, str],
        now: Mapping[str, int | float],
    ) -> None:
        """Records the clients that joined, died or left since the last call."""
        for key in present.keys() - self._clients.keys():
            self._note(EventKind.JOINED, present[key], now, names.get(present[key].pid, ""))
        known = {client.pid: client for client in (*self._clients.values(), *present.values())}
        for death in deaths[self._deaths :]:
            client = known.get(death.pid)
            event = Event(
                EventKind.DIED,
                death.role,
                death.pid,
                0 if client is None else client.incarnation,
                int(now["epoch"]),
                death.name,
                death.exitcode,
                death.restarted,
            )
            self._write(event)
            self._died.add(death.pid)
        self._deaths = len(deaths)
        gone = [self._clients[key] for key in sorted(self._clients.keys() - present.keys())]
        others = [client for client in gone if client.pid not in self._died]
        # A dead client that another process has reaped is missing here, like a client that left. If
        # only some of the missing clients were reaped, it is unknown which ones. In that case all
        # are recorded as clients that left.
        reaped = int(now["reaped"]) - self._reaped - (len(gone) - len(others))
        kind = EventKind.DIED if reaped >= len(others) else EventKind.LEFT
        for client in others:
            self._note(kind, client, now, names.get(client.pid, ""))
        self._reaped = int(now["reaped"])
        self._clients = present
        self._died &= {client.pid for client in present.values()}

    def _record(self, now: Mapping[str, int | float]) -> None:
        """Writes a record of the counters and of the number of living clients per role."""
        if self._recorder is None:
            return
        roles = Counter(client.role for client in self._clients.values() if client.alive)
        alive = {living(role): roles[role.name.lower()] for role in Role}
        self._recorder.record({**now, **alive}, self._engine.seat.incarnation)

    def _note(
        self, kind: EventKind, client: Client, now: Mapping[str, int | float], name: str = ""
    ) -> None:
        epoch = int(now["epoch"])
        self._write(Event(kind, client.role, client.pid, client.incarnation, epoch, name))

    def _write(self, event: Event) -> None:
        if self._recorder is not None:
            self._recorder.note(event, self._engine.seat.incarnation)

    def _stop(self, error: BaseException) -> None:
        """Stops recording permanently, because the history cannot be written."""
        self._stopped = True
        if self._recorder is not None:
            self._recorder.close()
        log.warning("%s: stopped recording the history: %s", self._scratch_dir, str(error))
