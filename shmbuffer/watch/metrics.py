"""The numbers of a buffer for Prometheus: an HTTP server on loopback that speaks OpenMetrics.

    GET /metrics  ──▶  one snapshot of the engine  ──▶  shmbuffer_inserts_total{directory="..."} 123
                  ──▶  one of each shard           ──▶  ..._total{directory="...",node="..."} 123

Counters are those of the directory, so they go on where a coordinator is killed and another takes
over; Prometheus makes rates of them. The names are those of `stats`, with ``_total`` behind what
only grows.
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

#: What only grows, and what it says.
COUNTERS = {
    "inserts": "items written",
    "batches_sampled": "batches drawn",
    "items_sampled": "items drawn",
    "age_sum": "writes between an item and its being drawn, summed over drawn items",
    "updates_applied": "priorities that were set",
    "updates_stale": "priorities that were dropped, because their item had been overwritten",
    "redraws": "rows drawn again, because they changed while they were copied",
    "waits": "writes that had to wait for a slot",
    "lock_waits": "times that somebody had to sleep until the lock was free",
    "aborts": "items that their writer gave back unfinished",
    "evicted": "items that went because their bytes were needed",
    "repairs": "times that the lock was found with a dead owner",
    "rolled_back": "slots that were given back for the dead",
    "rolled_forward": "slots that were committed for the dead",
    "reaped": "clients whose place was freed for them",
    "epoch": "recoveries of the directory",
    "consumers_delivered": "items that consumers were given",
    "consumers_acked": "items that they have acknowledged",
    "consumers_redelivered": "items that were given again: their holder died, or their lease ended",
    "consumers_refused": "items that were acknowledged too late",
    "consumers_dropped": "items that were given up without delivery",
    "deaths": "clients that died since this coordinator began",
    "restarts": "spawned processes that were started again",
    "held_back_s": "seconds in which a disk held a writer back since this coordinator began",
}
GAUGES = {
    "size": "items that are there",
    "capacity": "items that there is room for",
    "write_count": "items that were ever written, less what was loaded or emptied since",
    "clients_alive": "handles on the buffer",
    "clients_dead": "handles of the dead, not yet reaped",
    "waiters": "writers that wait for a slot",
    "limited": "clients that wait for the other side of a limiter",
    "samples_per_insert": "samples wanted for each insert; 0 without such a limit",
    "samples_ahead": "samples that the inserts are ahead by; below 0, the samples are",
    "error_buffer": "samples that the two sides may be apart",
    "min_size": "items that have to be there before any is drawn",
    "queued": "items that a queue has not handed out as often as it may; 0 without a queue",
    "processes": "spawned processes that run",
    "p_sum": "sum of all priority masses",
    "max_priority": "largest priority that was given",
    "alpha": "priority exponent",
    "bytes": "size of all files",
    "weights_version": "version of the newest weights that a learner has published; 0: none",
    "weights_age_s": "seconds since they were published",
    "consumer_version": "version of the policy that learners have, as they say; 0: nobody has said",
    "consumers": "consumers of the buffer",
    "consumers_behind": "tickets from what the slowest has not acknowledged to the newest item",
    "leased": "items under leases of consumers",
    "reserved": "items that are reserved and not committed yet",
    "refused": "items that were too old to be committed",
}


SHARDS = {"shard_up": "1 where the shard of a node answers, 0 where it does not"}
"""Gauges of a buffer over several nodes alone."""

Reading = Iterable[tuple[Mapping[str, str], Mapping[str, Number]]]
"""Labels, the same names in each, and numbers; what a request shows."""


class MetricsServer:
    """Answers ``GET /metrics`` in a thread of its own until it is closed.

    Raises MissingExtra without prometheus-client, OSError where the port is in use or not ours.
    """

    def __init__(
        self,
        read: Callable[[], Reading],  # asked at each request, maybe in several threads
        port: int,  # 0 takes one that is free
        # to listen at; nothing is encrypted or asked for, so it is this machine alone
        address: str = LOOPBACK,
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
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops answering, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterable[Metric]:
        """One snapshot, for prometheus-client; see its "custom collectors"."""
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
                if told:  # a shard has no number that only a coordinator counts
                    metric = family(f"shmbuffer_{name}", says, labels=list(told[0][0]))
                    for labels, numbers in told:
                        metric.add_metric(list(labels.values()), numbers[name])
                    yield metric


def metrics_of(
    engine: Engine, more: Callable[[], Mapping[str, Number]], directory: Path, port: int
) -> MetricsServer:
    """Serves the numbers of a directory; ``more`` gives further ones, asked at each request."""

    def read() -> Reading:
        now = engine.stats()
        yield {"directory": str(directory)}, {**now, **describe(now, now), **more()}

    return MetricsServer(read, port)
