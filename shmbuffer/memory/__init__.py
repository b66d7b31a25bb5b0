"""Shared bytes: where items lie, who may touch them, and what is left when a process dies.

numpy and the C core only: a collector that has arrays pays for no import of torch.

The rooms, each of which knows those above it; the modules beside them make one handle of it all:

    system          files, pages, time, processes
    format          what each shared byte means
    record_format   the bytes of one record
    directory       the files of a buffer, its locks and its clients
    flow            who waits for whom: the limiter, reservations, consumers
    ring            items in and out: rows, records, priorities
    upkeep          recovery, durability, check, history
"""

from __future__ import annotations

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format.leaf import Leaf
from shmbuffer.memory.format.limiter import RateLimiter
from shmbuffer.memory.format.record_batch import RecordBatch, RecordSample
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.format.settings import Settings
from shmbuffer.memory.ring.item_snapshot import LIVE_READS, ItemSnapshot
from shmbuffer.memory.ring.records import Records
from shmbuffer.memory.ring.ring import Ring
from shmbuffer.memory.ring.totals import Totals
from shmbuffer.memory.upkeep.recovery_report import RecoveryReport

__all__ = [
    "LIVE_READS",
    "Engine",
    "ItemSnapshot",
    "Leaf",
    "RateLimiter",
    "RecordBatch",
    "RecordSample",
    "Records",
    "RecoveryReport",
    "Ring",
    "Schema",
    "Settings",
    "Totals",
]
