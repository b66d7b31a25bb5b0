"""Serves the metrics of all shards to Prometheus, on one port.

    GET /metrics  ──▶  stats of every shard, by the keepers  ──▶  ..._total{node="a"} 123

The counters of a shard are in its directory, so they continue when a keeper or a node restarts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from shmbuffer.distributed.shards.sharded_client import ShardedClient
from shmbuffer.watch.metrics import MetricsServer, Reading


class ShardMetrics:
    """Serves the metrics on loopback until it is closed.

    ``base`` is the parent of the nodes' directories.
    """

    def __init__(self, connect: Callable[[], ShardedClient], base: Path, port: int) -> None:
        self._client, self._base = connect(), base  # a separate handle, protected by the lock below
        self._asking = threading.Lock()  # each request runs in its own thread
        self._server = MetricsServer(self._read, port)
        self.port = self._server.port

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.close()
        self._client.detach()

    def _read(self) -> Reading:
        with self._asking:
            stats = self._client.stats()
        for node, numbers in stats["shards"].items():
            yield self._labels(node), {**numbers, "shard_up": 1}
        for node in stats["missing"]:
            yield self._labels(node), {"shard_up": 0}

    def _labels(self, node: str) -> dict[str, str]:
        return {"directory": str(self._base / node), "node": node}
