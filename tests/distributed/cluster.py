"""A Ray cluster of several nodes on the loopback interface; each is a raylet with a store."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ENVIRONMENT = {
    "RAY_AUTH_TOKEN": secrets.token_hex(16),  # else Ray leaves one in the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "300",  # a dead node is known as such after five of them
    "RAY_agent_register_timeout_ms": "60000",  # on a busy machine
}
NODE = {
    "num_cpus": 2,
    "object_store_memory": 80 * 1024**2,
    "include_dashboard": False,
}


HEAD = "127.0.0.2"  # Ray puts another address of the machine in the place of 127.0.0.1


class Nodes:
    """Nodes called by names; the first one is the head, to which this process belongs."""

    def __init__(self, names: str) -> None:
        # In /tmp, because the names of its sockets may not be long.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        (Path(tempfile.gettempdir()) / "ray").mkdir(exist_ok=True)  # where Ray notes the address
        head = {**NODE, "node_name": names[0], "node_ip_address": HEAD}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**head, "temp_dir": self._folder}
        )
        self._nodes = {names[0]: self.cluster.head_node}
        for name in names[1:]:
            self.add(name)
        ray.init(
            address=self.cluster.address,
            _node_ip_address=HEAD,
            log_to_driver=False,
            logging_level="error",
        )

    def add(self, name: str) -> None:
        """Start a node, and wait until the others know it."""
        address = f"127.0.0.{3 + ord(name) % 100}"
        self._nodes[name] = self.cluster.add_node(**NODE, node_name=name, node_ip_address=address)

    def kill(self, name: str) -> None:
        """Kill a node, its store and its workers, without a farewell."""
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def end(self) -> None:
        """End all of it."""
        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def nodes(names: str) -> Iterator[Nodes]:
    """A cluster for a module of tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        handler = signal.getsignal(signal.SIGTERM)
        made = Nodes(names)
        try:
            yield made
        finally:
            made.end()
            signal.signal(signal.SIGTERM, handler)  # Ray leaves its own
            os.environ.pop("RAY_AUTH_MODE", None)  # Ray sets it


def on(name: str) -> dict[str, Any]:
    """Options of a task or an actor that runs on a node."""
    (node_id,) = (
        node["NodeID"] for node in ray.nodes() if node["NodeName"] == name and node["Alive"]
    )
    return {
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        "num_cpus": 0,
    }
