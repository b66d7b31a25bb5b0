"""Serves the metrics of a buffer for Prometheus, over HTTP on loopback in the OpenMetrics format.

    GET /metrics  ──▶  one snapshot of the engine  ──▶  shmbuffer_inserts_total{directory="..."} 123
                  ──▶  one per shard               ──▶  ..._total{directory="...",node="..."} 123

Counters belong to the directory. If a coordinator is killed and another one replaces it, they
continue from their old values. Prometheus computes the rates. The names are those of `stats`.
Counters have the suffix ``_total``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shmbuffer.extras import missing
from shmbuffer.watch.stats import Number, describe

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from shmbuffer.memory.engine import Engine

LOOPBACK = "127.0.0.1"

COUNTERS = {
    "inserts": "items written",
    "loaded": "items written by loading a save; they do not count as inserts",
    "batches_sampled": "batches sampled",
    "items_sampled": "items sampled",
    "age_sum": "sum of the ages of the sampled items, in writes",
    "updates_applied": "priorities that were set, including those set by loads",
    "updates_stale": "priority updates that were dropped because the item had been overwritten",
    "redraws": "rows sampled again because they were overwritten while they were copied",
    "waits": "writes that waited for a slot",
    "lock_waits": "calls that slept until the lock was free",
    "aborts": "items whose write was aborted",
    "evicted": "items evicted because the byte ring was full",
    "repairs": "repairs of the lock after its owner had died",
    "rolled_back": "slots in which the write of a dead client was rolled back",
    "rolled_forward": "slots in which the write of a dead client was rolled forward",
    "reaped": "dead clients that were reaped",
    "epoch": "recoveries of the buffer",
    "consumers_delivered": "items delivered to consumers",
    "consumers_acked": "items acknowledged by consumers",
    "consumers_redelivered": "items delivered again because a client died or its lease expired",
    "consumers_refused": "items acknowledged after their lease expired",
    "consumers_dropped": "items dropped without being delivered",
    "deaths": "clients that died since this coordinator started",
    "restarts": "spawned processes that were restarted",
    "held_back_s": "seconds for which the kernel throttled a writer since this coordinator started",
}
GAUGES = {
    "size": "items in the buffer",
    "capacity": "maximum number of items",
    "write_count": "items written since the buffer was created, emptied or loaded",
    "clients_alive": "handles of living processes",
    "clients_dead": "handles of dead processes that have not been reaped yet",
    "waiters": "writers that are waiting for a slot",
    "limited": "clients that are waiting for the rate limiter",
    "samples_per_insert": "configured samples per insert; 0 without this limit",
    "samples_ahead": "number of samples by which inserts are ahead; negative if samples are ahead",
    "error_buffer": "maximum number of samples by which one side can be ahead of the other",
    "min_size": "items that must be written before sampling starts",
    "queued": "items in the queue; 0 without a queue",
    "processes": "spawned processes that are running",
    "p_sum": "sum of all priority masses",
    "max_priority": "largest priority ever set",
    "alpha": "priority exponent",
    "bytes": "size of all files",
    "weights_version": "version of the newest published weights; 0 without weights",
    "weights_age_s": "seconds since the newest weights were published",
    "consumer_version": "policy version reported by learners; 0 if none was reported",
    "consumers": "consumers of the buffer",
    "consumers_behind": "items by which the slowest consumer is behind the newest item",
    "leased": "items leased by consumers",
    "reserved": "items that are reserved but not committed yet",
    "refused": "items that were too old to be committed",
}


SHARDS = {"shard_up": "1 if the shard of the node answers, otherwise 0"}
"""Gauges that only a buffer on several nodes has."""

Reading = Iterable[tuple[Mapping[str, str], Mapping[str, Number]]]
"""Answer to a request: pairs of labels and numbers. All pairs have the same label names."""


class MetricsServer:
    """Answers ``GET /metrics`` in a thread until ``close`` is called.

    Raises:
        ModuleNotFoundError: prometheus-client is not installed.
        OSError: the port is in use.
    """

    def __init__(
        self,
        read: Callable[[], Reading],  # called for each request, possibly in several threads
        port: int,  # 0 chooses a free port
        address: str = LOOPBACK,  # only this machine, since there is no encryption and no password
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise missing(
                "serving metrics needs prometheus-client", "metrics", name=error.name
            ) from error
        self._read = read
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            why = f"metrics cannot be served at {address}:{port} ({error.strerror}); choose another"
            raise OSError(error.errno, f"{why} port, or 0 for a free one") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops the server and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics of one snapshot. prometheus-client calls this for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        readings = list(self._read())
        families = (
            (COUNTERS, CounterMetricFamily),
            (GAUGES, GaugeMetricFamily),
            (SHARDS, GaugeMetricFamily),
        )
        for names, family in families:
            for name, says in names.items():
                available = [(labels, numbers) for labels, numbers in readings if name in numbers]
                if available:  # shards lack the numbers that a coordinator adds
                    metric = family(f"shmbuffer_{name}", says, labels=list(available[0][0]))
                    for labels, numbers in available:
                        metric.add_metric(list(labels.values()), numbers[name])
                    yield metric


def metrics_of(
    engine: Engine, more: Callable[[], Mapping[str, Number]], directory: Path, port: int
) -> MetricsServer:
    """Starts a server for the metrics of a directory.

    For each request it reads the numbers of the engine and calls ``more`` for additional numbers.
    """

    def read() -> Reading:
        now = engine.stats()
        yield {"directory": str(directory)}, {**now, **describe(now, now), **more()}

    return MetricsServer(read, port)
