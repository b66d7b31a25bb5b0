"""Serves the metrics of all shards to Prometheus, on one port.

    GET /metrics  ──▶  stats of each shard, from its keeper  ──▶  ..._total{node="a"} 123

A shard's counters are stored in its directory, so they continue after a keeper or a node restarts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from shmbuffer.distributed.shards.sharded_client import ShardedClient
from shmbuffer.watch.metrics import MetricsServer, Reading


class ShardMetrics:
    """Serves the metrics of a sharded buffer on the loopback interface until `close` is called.

    Args:
        connect: function that returns a new handle to the buffer.
        base: directory on each node that contains the directory of the node's shard.
        port: port number. 0 chooses a free port.
    """

    def __init__(self, connect: Callable[[], ShardedClient], base: Path, port: int) -> None:
        self._client, self._base = connect(), base
        self._asking = threading.Lock()  # protects the handle, because each request has a thread
        self._server = MetricsServer(self._read, port)
        self.port = self._server.port

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.close()
        self._client.detach()

    def _read(self) -> Reading:
        """Yields the labels and numbers of each shard, and ``shard_up`` 0 for missing shards."""
        with self._asking:
            stats = self._client.stats()
        for node, numbers in stats["shards"].items():
            yield self._labels(node), {**numbers, "shard_up": 1}
        for node in stats["missing"]:
            yield self._labels(node), {"shard_up": 0}

    def _labels(self, node: str) -> dict[str, str]:
        """Returns the labels of the metrics of a node's shard."""
        return {"directory": str(self._base / node), "node": node}
