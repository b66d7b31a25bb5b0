"""Runs a Ray cluster of several nodes on the loopback interface, whose nodes can be killed.

    127.0.0.2   node-1, the head, with this process; it is never killed
    127.0.0.3   node-2     each node has its own raylet, object store and workers,
    127.0.0.4   node-3     like a machine on which ``ray start`` was called

This module is for demonstrations on one machine. On a real cluster, a program only calls
``ray.init(address="auto")``.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from shmbuffer.distributed.runtime import PATIENT, living_nodes, require_ray
from shmbuffer.saves.safe_files import make_folders, temporary_folder

_ENVIRONMENT = {
    "RAY_AUTH_TOKEN": secrets.token_hex(16),  # otherwise Ray writes a token to the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
    **PATIENT,
}
_NODE = {"object_store_memory": 80 * 1024**2, "include_dashboard": False}
_PATIENCE_S = 60.0
_DEATH_IS_NOTICED = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Loopback:
    """A cluster of named or numbered nodes, the first of which is the head. Use it in ``with``."""

    def __init__(self, names: int | Sequence[str]) -> None:
        self._ray = ray = require_ray()
        from ray.cluster_utils import Cluster

        if isinstance(names, int):
            names = [f"node-{number}" for number in range(1, names + 1)]
        self.names = list(names)
        self._environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        # In /tmp, because the paths of sockets must be short.
        self._undo = ExitStack()
        self._folder = str(self._undo.enter_context(temporary_folder(Path("/tmp"))))
        make_folders(Path(tempfile.gettempdir(), "ray"))  # Ray stores the address there
        self._nodes: dict[str, Any] = {}
        self._cluster: Any = Cluster()
        try:
            for name in self.names:
                self.start(name)
            ray.init(
                address=self._cluster.address,
                _node_ip_address=self._address(self.names[0]),
                log_to_driver=False,
                logging_level="error",
            )
            ray._private.worker._worker_logs_enabled = (
                False  # otherwise each death prints a page of logs
            )
            if is_main:
                signal.signal(signal.SIGTERM, handler)  # Ray has installed its own handler
        except BaseException:
            self.close()
            raise

    def start(self, name: str) -> None:
        """Starts a node and waits until the cluster has registered it; TimeoutError otherwise."""
        # Wait until Ray has noticed the death of the previous node with this name.
        end_s = time.monotonic() + _PATIENCE_S
        while self._nodes and self._ray.is_initialized() and name in living_nodes():
            if time.monotonic() > end_s:
                raise TimeoutError(f"Ray takes {name} for alive, {_PATIENCE_S:g} s after its death")
            time.sleep(0.05)
        head = (
            {} if self._nodes else {"temp_dir": self._folder, "_system_config": _DEATH_IS_NOTICED}
        )
        try:
            self._nodes[name] = self._cluster.add_node(
                **_NODE, **head, num_cpus=1, node_name=name, node_ip_address=self._address(name)
            )
        except Exception as error:  # Ray raises no more specific class
            raise TimeoutError(
                f"Ray could not start {name} on this machine ({error}); try again when it is less "
                "busy"
            ) from error

    def kill(self, name: str) -> None:
        """Kills a node with its object store and its workers, and waits until they have ended.

        Workers check only once per second whether their raylet is alive, and answer requests until
        then, so they are killed too.
        """
        workers = [os.pidfd_open(pid) for pid in _children(self.pid(name))]
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)
        for worker in workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
        for worker in workers:
            select.select([worker], [], [])  # wait until it has ended
            os.close(worker)

    def pid(self, name: str) -> int:
        """Returns the pid of a node's raylet."""
        return int(self._nodes[name].all_processes["raylet"][0].process.pid)

    def close(self) -> None:
        """Ends the cluster, and removes its files."""
        self._ray.shutdown()
        self._cluster.shutdown()
        self._undo.close()
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.environ.pop("RAY_AUTH_MODE", None)  # Ray sets it

    def _address(self, name: str) -> str:
        # Ray replaces 127.0.0.1 by another address of the machine.
        return f"127.0.0.{2 + self.names.index(name)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _children(pid: int) -> list[int]:
    """Returns the pids of the children of all threads of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in found for child in one.read_text().split()]
