"""Ray, imported on use; and who has started it ends it."""

from __future__ import annotations

import threading
from typing import Any

from shmbuffer.extras import missing

_lock = threading.RLock()
_leases = 0
_started_here = False


def require_ray() -> Any:
    """The module ``ray``.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise missing("RayReplayBuffer needs Ray", "ray", name="ray") from error
    return ray


class Lease:
    """One user of Ray in this process. If we started it, the last one to release shuts it down.

    Args:
        config: arguments of ``ray.init``, where Ray is not initialised yet.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        global _leases, _started_here
        ray = require_ray()
        with _lock:
            if not ray.is_initialized():
                ray.init(**(config or {}))
                _leases, _started_here = 0, True  # leases of a Ray that was shut down meanwhile
            _leases += 1
        self._released = False

    def release(self) -> None:
        """The user is done. Idempotent."""
        global _leases, _started_here
        with _lock:
            if self._released:
                return
            self._released = True
            _leases = max(0, _leases - 1)
            if _leases == 0 and _started_here:
                _started_here = False
                require_ray().shutdown()
