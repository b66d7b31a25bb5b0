"""Shared bytes: where items lie, who may touch them, and what is left when a process dies.

numpy and the C core only: a collector that has arrays pays for no import of torch.
"""

from __future__ import annotations

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.item_snapshot import LIVE_READS, ItemSnapshot
from shmbuffer.memory.leaf import Leaf
from shmbuffer.memory.limiter import RateLimiter
from shmbuffer.memory.masses import Masses, masses_of, masses_of_snapshot
from shmbuffer.memory.record_batch import RecordBatch, RecordSample
from shmbuffer.memory.records import Records
from shmbuffer.memory.recovery_report import RecoveryReport
from shmbuffer.memory.ring import Ring
from shmbuffer.memory.schema import Schema
from shmbuffer.memory.settings import Settings
from shmbuffer.memory.totals import Totals

__all__ = [
    "LIVE_READS",
    "Engine",
    "ItemSnapshot",
    "Leaf",
    "Masses",
    "RateLimiter",
    "RecordBatch",
    "RecordSample",
    "Records",
    "RecoveryReport",
    "Ring",
    "Schema",
    "Settings",
    "Totals",
    "masses_of",
    "masses_of_snapshot",
]
