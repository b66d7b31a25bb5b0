"""Shared memory: where items lie, which process may touch them, and how a crash is repaired.

These modules use numpy and the C core only, so a collector that has arrays does not import torch.

A room imports from the rooms above it. The modules beside the rooms put them together as `Engine`:

    system          files, pages, time, processes
    format          the meaning of each shared byte
    mapped          the files of a buffer as processes map them
    record_format   the bytes of one record
    clients         file locks, the registry, unfinished rollouts
    directory       the files of a buffer: made, diagnosed, grown and removed
    flow            waiting: the rate limiter, reservations, consumers
    ring            reads and writes of items: rows, records, priorities
    upkeep          recovery, durability, checks, history
"""

from __future__ import annotations

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format.leaf import Leaf
from shmbuffer.memory.format.limiter import RateLimiter
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.record_batch import RecordBatch, RecordSample
from shmbuffer.memory.mapped.settings import Settings
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
