"""Ray, imported on use; and who has started it ends it."""

from __future__ import annotations

import threading
from typing import Any

from shmbuffer.extras import missing

_lock = threading.RLock()
_leases: set[Lease] | None = None  # of a Ray that was started here


def require_ray() -> Any:
    """The module ``ray``."""
    try:
        import ray
    except ImportError as error:
        raise missing("RayReplayBuffer needs Ray", "ray", name="ray") from error
    return ray


class Lease:
    """One user of Ray in this process. If we started it, the last one to release shuts it down."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        global _leases
        ray = require_ray()
        with _lock:
            if not ray.is_initialized():
                ray.init(**(config or {}))
                _leases = set()  # without those of a Ray that was shut down meanwhile
            if _leases is not None:
                _leases.add(self)

    def release(self) -> None:
        """The user is done. Idempotent."""
        global _leases
        with _lock:
            if _leases is not None and self in _leases:
                _leases.remove(self)
                if not _leases:
                    _leases = None
                    require_ray().shutdown()
