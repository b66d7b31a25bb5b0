"""Imports Ray on first use, and shuts it down in the process that started it."""

from __future__ import annotations

import threading
from typing import Any

from shmbuffer.extras import missing

PATIENT = {
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "120",
    "RAY_agent_register_timeout_ms": "600000",
}
"""Environment variables that give Ray's workers enough time to start on a busy machine.

By default a worker has niceness 15, and gets about one thirtieth of the CPU time of a process with
niceness 0. If no CPU is idle, a worker needs many minutes for its imports. Ray kills a worker that
has not registered within 60 seconds, and starts another one.
"""

STARTS_SOONER = (
    "set RAY_worker_niceness=0 and RAY_worker_register_timeout_seconds=600 in the environment "
    "before starting the cluster"
)

_lock = threading.RLock()
_uses: set[RayUse] | None = None  # unreleased uses of Ray; None if this process did not start Ray


def require_ray() -> Any:
    """Returns the module ``ray``. If Ray is missing, the ImportError explains how to install it."""
    try:
        import ray
    except ImportError as error:
        raise missing("RayReplayBuffer needs Ray", "ray", name="ray") from error
    return ray


def living_nodes() -> dict[str, str]:
    """Returns a mapping from the name of each living node to its Ray node id.

    Raises ValueError if two living nodes have the same name.
    """
    found: dict[str, str] = {}
    for node in require_ray().nodes():
        if not node["Alive"]:
            continue
        name = node["NodeName"]
        if found.setdefault(name, node["NodeID"]) != node["NodeID"]:
            raise ValueError(
                f"two nodes of the Ray cluster have the name {name!r}, but each shard needs a node "
                "name of its own; rename them with ray start --node-name"
            )
    return found


def own_node() -> str:
    """Returns the name of this process's node, or ``""`` if Ray is not initialized."""
    ray = require_ray()
    if not ray.is_initialized():
        return ""
    here = ray.get_runtime_context().get_node_id()
    return next((node["NodeName"] for node in ray.nodes() if node["NodeID"] == here), "")


class RayUse:
    """A use of Ray by one buffer. Releasing the last use shuts Ray down if a `RayUse` started it.

    Args:
        config: arguments of ``ray.init``, which is called if Ray is not initialized.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        global _uses
        ray = require_ray()
        with _lock:
            if not ray.is_initialized():
                ray.init(**(config or {}))
                _uses = set()  # discards the uses of an earlier Ray instance that was shut down
            if _uses is not None:
                _uses.add(self)

    def release(self) -> None:
        """Ends this use of Ray. Idempotent."""
        global _uses
        with _lock:
            if _uses is not None and self in _uses:
                _uses.remove(self)
                if not _uses:
                    _uses = None
                    require_ray().shutdown()
