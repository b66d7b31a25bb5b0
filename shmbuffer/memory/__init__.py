"""Shared memory: stores items, gives processes access to them, and repairs them after a crash.

These modules use only numpy and the C core, so a collector with arrays does not import torch.

A folder imports only from the folders above it. The modules in this folder combine them to
`Engine`:

    system          files, pages, time, processes
    format          the meaning of each shared byte
    mapped          the files of a buffer as processes map them
    record_format   the bytes of one record
    clients         file locks, the registry, unfinished rollouts
    directory       creation, diagnosis, growth and removal of the files of a buffer
    flow            flow control: the rate limiter, reservations, consumers, waiting
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
