"""Flow control in a keeper, which sets the quota of its ring and reports on its shard.

The quota is stored in the control file of the ring. Writers on the node wait for it there, and it
remains if all processes die. The keeper itself only stores the state of the bank, so that the next
bank can continue from this state.
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
"""Orders to a keeper.

LOOK only requests a report. KEEP keeps the quota of the ring, and sets a quota of zero if there is
none. OPEN removes the quota. HOLD lowers the quota so that no further write can start. An integer
sets the room of the quota; see bank.py.
"""
_RECENT_S = 60.0  # seconds for which a client that writes through Ray counts as a writer
_WAITS_S = 1.0  # seconds for which a client that writes through Ray counts as waiting if refused


class KeeperReply(NamedTuple):
    """A keeper's answer to an order."""

    bank: int  # number of the newest bank known to the keeper, which ignores orders of other banks
    state: BankState | None  # the last state that the keeper received
    shard: str  # node, and UUID of the keeper's directory
    report: Report
    holds: bool  # True if no write is allowed and none is in progress


class Vault:
    """Manages the quota of one keeper's ring."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._bank = -1
        self._state: BankState | None = None
        self._wanted, self._wanted_at = 0, -_WAITS_S

    def obey(
        self, buffer: ReplayBuffer, bank: int, state: BankState | None, order: str | int
    ) -> KeeperReply:
        """Stores the state of a bank, carries out its order, and reports on the shard.

        Args:
            buffer: the shard's buffer.
            bank: number of the bank. The state and the order of an older bank are ignored.
            state: state of the bank, or None if the bank has none.
            order: LOOK, KEEP, OPEN, HOLD, or the new room.
        """
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
        """Records that a write through Ray was refused, if it lacked a quota.

        The client repeats the write, so it counts as a waiting writer in the meantime.
        """
        storage = buffer.storage
        engine = storage.open_engine if isinstance(storage, RingBacked) else None
        native = None if engine is None else engine.seat.native
        if native is not None and native.why == Why.QUOTA:
            self._wanted, self._wanted_at = int(native.needed), time.monotonic()

    def _order(self, engine: Engine, order: str | int) -> None:
        """Carries out an order of the map in the ring of the shard."""
        quota = quota_of(engine.seat.control.runtime[0])
        if isinstance(order, int):
            if quota is None or quota[0] != order:
                engine.set_limiter(Quota(order))
        elif order == OPEN and quota is not None:
            engine.set_limiter(None)
        elif order == HOLD or (order == KEEP and quota is None):
            engine.set_limiter(Quota(0 if quota is None else min(quota)))

    def _report(self, engine: Engine) -> Report:
        """Returns a report on the shard for the map."""
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
    """True if the shard's ring has a quota, for which writes may have to wait."""
    engine: Any = getattr(buffer.storage, "open_engine", None)
    return engine is not None and quota_of(engine.seat.control.runtime[0]) is not None
