"""Prometheus reads the metrics of all shards from one port, labelled by node."""

from __future__ import annotations

import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from shmbuffer.distributed.shards.shard_metrics import ShardMetrics

parser = pytest.importorskip("prometheus_client.parser")


class Client:
    """Returns what `ShardedClient.stats` would: the answers of two keepers, and none of a third."""

    def __init__(self) -> None:
        self.asking, self.together, self.detached = threading.Lock(), False, False

    def stats(self) -> dict[str, Any]:
        self.together |= not self.asking.acquire(blocking=False)
        shards = {"a": {"inserts": 3, "size": 2}, "b": {"inserts": 5, "size": 4}}
        self.asking.release()
        return {"length": 6, "capacity": 9, "shards": shards, "missing": ["c"]}

    def detach(self) -> None:
        self.detached = True


def asked(port: int) -> dict[str, dict[tuple[str, str], float]]:
    """Returns the result of one request: name -> (directory, node) -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, str], float]] = {}
    for family in parser.text_string_to_metric_families(text):
        for one in family.samples:
            assert one.labels.keys() == {"directory", "node"}
            where = one.labels["directory"], one.labels["node"]
            found.setdefault(one.name, {})[where] = one.value
    return found


def test_each_shard_has_its_numbers_under_the_name_of_its_node() -> None:
    client: Any = Client()
    server = ShardMetrics(lambda: client, Path("run"), 0)
    try:
        found = asked(server.port)
    finally:
        server.close()
    assert found == {
        "shmbuffer_inserts_total": {("run/a", "a"): 3, ("run/b", "b"): 5},
        "shmbuffer_size": {("run/a", "a"): 2, ("run/b", "b"): 4},
        "shmbuffer_shard_up": {("run/a", "a"): 1, ("run/b", "b"): 1, ("run/c", "c"): 0},
    }
    assert client.detached


def test_requests_at_the_same_time_ask_one_after_the_other() -> None:
    client: Any = Client()
    server = ShardMetrics(lambda: client, Path("run"), 0)
    try:
        threads = [threading.Thread(target=asked, args=(server.port,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.close()
    assert not client.together
