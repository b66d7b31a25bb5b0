"""Shared memory: stores items, gives processes access to them, and repairs them after a crash.

This package needs only NumPy and the C core. A collector that uses NumPy arrays therefore does not
import torch.

Each subpackage imports only from the subpackages above it in this list. The modules in this folder
combine all of them to `Engine`:

    system          files, pages, time and processes
    format          the layout of all shared bytes
    mapped          the mapped files of a buffer
    record_format   the layout of a record
    clients         file locks, the registry of clients, unfinished rollouts
    directory       creation, diagnosis, growth and removal of a buffer's files
    flow            flow control: rate limiter, reservations, consumers, waiting
    ring            reads and writes of rows, records and priorities
    upkeep          recovery, flushes, checks and history
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
