"""The engine and the ring behind a handle, for tests that examine shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shmbuffer.memory import Engine, Ring


def engine_of(holder: Any) -> Engine:
    """Returns the engine of a coordinator, a storage, or a buffer of any kind of client."""
    holder = getattr(holder, "storage", holder)
    engine: Engine = holder.engine() if hasattr(holder, "engine") else holder._engine
    return engine


def ring_of(holder: Any) -> Ring:
    """Returns the ring of an engine, a storage, a sampler, or a buffer of any kind of client."""
    holder = getattr(holder, "storage", holder)
    ring: Ring | None = holder.ring() if hasattr(holder, "ring") else holder._need().ring
    assert ring is not None, "nothing has been written to this buffer"
    return ring


def path_of(engine: Engine) -> Path:
    """Returns the directory of an engine that has one."""
    assert engine.path is not None, "this buffer is in anonymous memory"
    return engine.path
