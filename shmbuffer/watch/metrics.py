"""Metrics of a buffer for Prometheus: an HTTP server on loopback in the OpenMetrics format.

    GET /metrics  ──▶  one snapshot of the engine  ──▶  shmbuffer_inserts_total{directory="..."} 123
                  ──▶  one of each shard           ──▶  ..._total{directory="...",node="..."} 123

Counters belong to the directory, so they continue when a coordinator is killed and another takes
over; Prometheus computes rates. The names are those of `stats`, with ``_total`` for counters.
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
    "loaded": "items that loads have written; they do not count as inserts",
    "batches_sampled": "batches drawn",
    "items_sampled": "items drawn",
    "age_sum": "writes between an item and its draw, summed over drawn items",
    "updates_applied": "priorities that were set",
    "updates_stale": "priorities that were dropped, because their item had been overwritten",
    "redraws": "rows drawn again, because they changed while they were copied",
    "waits": "writes that had to wait for a slot",
    "lock_waits": "calls that had to sleep until the lock was free",
    "aborts": "items that their writer did not complete",
    "evicted": "items that were evicted because their bytes were needed",
    "repairs": "times that the lock had a dead owner",
    "rolled_back": "slots that were freed for dead clients",
    "rolled_forward": "slots that were committed for dead clients",
    "reaped": "dead clients whose entry was freed",
    "epoch": "recoveries of the directory",
    "consumers_delivered": "items delivered to consumers",
    "consumers_acked": "items that consumers have acknowledged",
    "consumers_redelivered": "items delivered again after a death or the end of a lease",
    "consumers_refused": "items that were acknowledged too late",
    "consumers_dropped": "items that were given up without delivery",
    "deaths": "clients that died since this coordinator began",
    "restarts": "spawned processes that were started again",
    "held_back_s": "seconds in which the kernel throttled a writer since this coordinator began",
}
GAUGES = {
    "size": "items in the buffer",
    "capacity": "room for items",
    "write_count": "items that were ever written, less what was loaded or emptied since",
    "clients_alive": "handles of processes that are not dead",
    "clients_dead": "handles of dead processes that are not reaped yet",
    "waiters": "writers that wait for a slot",
    "limited": "clients that wait for the other side of a limiter",
    "samples_per_insert": "samples wanted for each insert; 0 without such a limit",
    "samples_ahead": "samples by which the inserts are ahead; below 0, the samples are ahead",
    "error_buffer": "samples by which one side may be ahead of the other",
    "min_size": "items that have to be written before any is drawn",
    "queued": "items that a queue may still hand out; 0 without a queue",
    "processes": "spawned processes that run",
    "p_sum": "sum of all priority masses",
    "max_priority": "largest priority that was given",
    "alpha": "priority exponent",
    "bytes": "size of all files",
    "weights_version": "version of the newest weights that a learner has published; 0: none",
    "weights_age_s": "seconds since the newest weights were published",
    "consumer_version": "policy version that learners have reported; 0: none",
    "consumers": "consumers of the buffer",
    "consumers_behind": "tickets between the slowest consumer's first open item and the newest",
    "leased": "items under leases of consumers",
    "reserved": "items that are reserved and not committed yet",
    "refused": "items that were too old to be committed",
}


SHARDS = {"shard_up": "1 if the shard of a node answers, 0 if it does not"}
"""Gauges of a buffer over several nodes."""

Reading = Iterable[tuple[Mapping[str, str], Mapping[str, Number]]]
"""Labels, with the same names in each, and numbers: the answer to a request."""


class MetricsServer:
    """Answers ``GET /metrics`` in a thread until it is closed; needs prometheus-client."""

    def __init__(
        self,
        read: Callable[[], Reading],  # called at each request, maybe in several threads
        port: int,  # 0 takes a free one
        address: str = LOOPBACK,  # without encryption or passwords, so only for this machine
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise missing(
                "metrics are served with prometheus-client", "metrics", name=error.name
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
        """Stops answering, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics of one snapshot; prometheus-client calls this "custom collector"."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        readings = list(self._read())
        families = (
            (COUNTERS, CounterMetricFamily),
            (GAUGES, GaugeMetricFamily),
            (SHARDS, GaugeMetricFamily),
        )
        for names, family in families:
            for name, says in names.items():
                told = [(labels, numbers) for labels, numbers in readings if name in numbers]
                if told:  # a shard lacks the numbers of a coordinator
                    metric = family(f"shmbuffer_{name}", says, labels=list(told[0][0]))
                    for labels, numbers in told:
                        metric.add_metric(list(labels.values()), numbers[name])
                    yield metric


def metrics_of(
    engine: Engine, more: Callable[[], Mapping[str, Number]], directory: Path, port: int
) -> MetricsServer:
    """Starts a server for the numbers of a directory and of ``more()``, read at each request."""

    def read() -> Reading:
        now = engine.stats()
        yield {"directory": str(directory)}, {**now, **describe(now, now), **more()}

    return MetricsServer(read, port)
