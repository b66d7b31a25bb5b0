"""A Ray cluster on this machine: several nodes on the loopback interface, to be killed at will.

    127.0.0.2   node-1, the head: it has this process, and is never killed
    127.0.0.3   node-2     each node has a raylet, an object store and workers of its own,
    127.0.0.4   node-3     as a machine has that was started with ``ray start``

For a laptop. On a real cluster a program calls ``ray.init(address="auto")``, and nothing here.
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
    "RAY_AUTH_TOKEN": secrets.token_hex(16),  # else Ray leaves one in the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
    **PATIENT,
}
_NODE = {"object_store_memory": 80 * 1024**2, "include_dashboard": False}
_PATIENCE_S = 60.0
_DEATH_IS_NOTICED = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Loopback:
    """The cluster, of named nodes or so many, the first being the head; end it by ``with``."""

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
        # In /tmp, because the names of its sockets may not be long.
        self._undo = ExitStack()
        self._folder = str(self._undo.enter_context(temporary_folder(Path("/tmp"))))
        make_folders(Path(tempfile.gettempdir(), "ray"))  # where Ray notes the address
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
            ray._private.worker._worker_logs_enabled = False  # else each death is a page of them
            if is_main:
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own
        except BaseException:
            self.close()
            raise

    def start(self, name: str) -> None:
        """Start a node, and wait until the cluster knows it; TimeoutError: Ray could not."""
        # First wait until Ray knows that the former one is dead: it would confuse the two.
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
        except Exception as error:  # Ray raises no other
            raise TimeoutError(
                f"Ray could not start {name} on this machine ({error}); try again when it is less "
                "busy"
            ) from error

    def kill(self, name: str) -> None:
        """Kill a node with its store and its workers, without a farewell; then none of them runs.

        Workers by themselves look only once a second whether their raylet lives, and answer until
        then.
        """
        workers = [os.pidfd_open(pid) for pid in _children(self.pid(name))]
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)
        for worker in workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
        for worker in workers:
            select.select([worker], [], [])  # until it has ended
            os.close(worker)

    def pid(self, name: str) -> int:
        """The pid of the raylet of a node."""
        return int(self._nodes[name].all_processes["raylet"][0].process.pid)

    def close(self) -> None:
        """End the cluster, and remove its files."""
        self._ray.shutdown()
        self._cluster.shutdown()
        self._undo.close()
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.environ.pop("RAY_AUTH_MODE", None)  # Ray sets it

    def _address(self, name: str) -> str:
        # Ray puts another address of the machine in the place of 127.0.0.1.
        return f"127.0.0.{2 + self.names.index(name)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in found for child in one.read_text().split()]
