"""The numbers of all shards for Prometheus, from one port.

    GET /metrics  ──▶  stats of every shard, by the keepers  ──▶  ..._total{node="a"} 123

What a shard counts is in its directory, so it goes on where a keeper or a node is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shmbuffer.watch.metrics import MetricsServer, Reading

if TYPE_CHECKING:
    from shmbuffer.distributed.shards.client import ShardedClient


class ShardMetrics:
    """Serves them until it is closed. Raises what `MetricsServer` does.

    Args:
        connect: gives a handle on the buffer that nobody else uses.
        base: directory above those of the nodes.
        port: to listen at, on loopback; 0 takes a free one.
    """

    def __init__(self, connect: Callable[[], ShardedClient], base: Path, port: int) -> None:
        self._client, self._base = connect(), base
        self._asking = threading.Lock()  # each request has a thread
        self._server = MetricsServer(self._read, port)
        self.port = self._server.port

    def close(self) -> None:
        """Stop answering, and free the port."""
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
