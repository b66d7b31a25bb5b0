"""Shared bytes: where items lie, who may touch them, and what is left when a process dies.

numpy and the C core only; nothing here imports torch. A collector that has arrays can write from
here without paying for that import.
"""

from __future__ import annotations

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.limiter import RateLimiter
from shmbuffer.memory.moment import LIVING, Moment
from shmbuffer.memory.record_batch import Drawn, RecordBatch
from shmbuffer.memory.records import Records
from shmbuffer.memory.recovery_report import RecoveryReport
from shmbuffer.memory.ring import Ring
from shmbuffer.memory.schema import Leaf, Schema
from shmbuffer.memory.settings import Settings
from shmbuffer.memory.weighing import Weighed, weigh, weigh_moment

__all__ = [
    "LIVING",
    "Drawn",
    "Engine",
    "Leaf",
    "Moment",
    "RateLimiter",
    "RecordBatch",
    "Records",
    "RecoveryReport",
    "Ring",
    "Schema",
    "Settings",
    "Weighed",
    "weigh",
    "weigh_moment",
]
