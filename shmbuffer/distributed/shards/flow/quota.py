"""A keeper's part in flow control: it sets the quota of its ring, and reports the state.

The ring holds the quota: writers in memory wait for it there, and it outlives all processes. The
keeper only stores the state of the bank, for the next one.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from shmbuffer.buffers.data_path.parts import shareable
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.distributed.shards.flow.bank import BankState, Report
from shmbuffer.memory import Engine
from shmbuffer.memory.flow.rate_status import clients_on
from shmbuffer.memory.format.layout import EntryState, Side, Why
from shmbuffer.memory.format.limiter import Quota, quota_of
from shmbuffer.memory.ring.counters import split_snapshot
from shmbuffer.storages.ring_backed import RingBacked

LOOK, KEEP, OPEN, HOLD = "look", "keep", "open", "hold"
"""Orders: change nothing; have a quota, at first of no items; have none; write no more items. A
number as order is a room."""

_RECENT_S = 60.0  # after a write through Ray its writer counts as a client
_WAITS_S = 1.0  # after a refused write through Ray its writer counts as waiting


class KeeperReply(NamedTuple):
    """A keeper's answer."""

    bank: int  # the newest that it knows of; it ignores the others
    state: BankState | None  # the last that it was sent
    shard: str  # node and uuid of its directory
    report: Report
    holds: bool  # True if no write is possible or in progress


class Vault:
    """The quota of one keeper."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._bank = -1
        self._state: BankState | None = None
        self._wanted, self._wanted_at = 0, -_WAITS_S

    def obey(
        self, buffer: ReplayBuffer, bank: int, state: BankState | None, order: str | int
    ) -> KeeperReply:
        """Takes in the state of a bank, follows its order, and reports on the shard."""
        engine = shareable(buffer.storage, "a shard needs")
        if bank >= self._bank:
            self._bank = bank
            if state is not None:
                self._state = state
            self._order(engine, order)
        report = self._report(engine)
        shard = f"{self._node}/{engine.superblock.uuid.hex()}"
        holds = quota_of(engine.seat.control.runtime[0]) is not None and not (
            report.left or report.pending
        )
        return KeeperReply(self._bank, self._state, shard, report, holds)

    def note_refusal(self, buffer: ReplayBuffer) -> None:
        """Notes that a write through Ray lacked a quota; its writer tries again."""
        storage = buffer.storage
        engine = storage.open_engine if isinstance(storage, RingBacked) else None
        native = None if engine is None else engine.seat.native
        if native is not None and native.why == Why.QUOTA:
            self._wanted, self._wanted_at = int(native.needed), time.monotonic()

    def _order(self, engine: Engine, order: str | int) -> None:
        quota = quota_of(engine.seat.control.runtime[0])
        if isinstance(order, int):
            if quota is None or quota[0] != order:
                engine.set_limiter(Quota(order))
        elif order == OPEN and quota is not None:
            engine.set_limiter(None)
        elif order == HOLD or (order == KEEP and quota is None):
            engine.set_limiter(Quota(0 if quota is None else min(quota)))

    def _report(self, engine: Engine) -> Report:
        ring, seat = engine.ring(), engine.seat
        if ring is None:
            runtime, entries, width = seat.control.runtime[0], seat.control.entries, 1
        else:
            runtime, entries = split_snapshot(ring.snapshot())
            width = ring.width
        room, used = quota_of(runtime) or (0, 0)
        pending = int(runtime["pending"])
        capacity = ring.elements if ring else engine.settings.capacity
        waits = (entries["state"] == EntryState.LIVE) & (entries["waits_why"] == Why.QUOTA)
        waits &= entries["waits_for"] & Side.SAMPLES > 0
        wanted = int(entries["inserts_wanted"][waits].max(initial=0))
        if time.monotonic() - self._wanted_at < _WAITS_S:
            wanted = max(wanted, self._wanted)
        mine = (time.monotonic_ns() - int(entries["last_insert_ns"][seat.entry])) / 1e9
        return Report(
            room=max(room, used + pending),
            used=used,
            drawn=int(entries["items_sampled"].sum()),
            pending=pending,
            length=int(runtime["length"]) * width,
            capacity=capacity,
            wanted=wanted,
            has_writers=bool(clients_on(entries, Side.INSERTS, excluding=seat.entry))
            or mine < _RECENT_S
            or wanted > 0,
        )


def has_quota(buffer: ReplayBuffer) -> bool:
    """True if writes into the shard may have to wait."""
    engine: Any = getattr(buffer.storage, "open_engine", None)
    return engine is not None and quota_of(engine.seat.control.runtime[0]) is not None
