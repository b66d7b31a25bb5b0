"""The numbers of all shards for Prometheus, from one port.

    GET /metrics  ──▶  stats of every shard, by the keepers  ──▶  ..._total{node="a"} 123

The counters of a shard are in its directory, so they go on when a keeper or a node is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from shmbuffer.distributed.shards.sharded_client import ShardedClient
from shmbuffer.watch.metrics import MetricsServer, Reading


class ShardMetrics:
    """Serves them on loopback until it is closed; ``base`` is the directory above the nodes'."""

    def __init__(self, connect: Callable[[], ShardedClient], base: Path, port: int) -> None:
        self._client, self._base = connect(), base  # a second handle, which the lock below protects
        self._asking = threading.Lock()  # each request has a thread
        self._server = MetricsServer(self._read, port)
        self.port = self._server.port

    def close(self) -> None:
        """Stops answering, and frees the port."""
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
