"""The numbers of a buffer for Prometheus: an HTTP server on loopback that speaks OpenMetrics.

    GET /metrics  ──▶  one snapshot of the engine  ──▶  shmbuffer_inserts_total{directory="..."} 123

Counters are those of the directory, so they go on where a coordinator is killed and another takes
over; Prometheus makes rates of them. The names are those of `stats`, with ``_total`` behind what
only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
}


class MetricsServer:
    """Answers ``GET /metrics`` in a thread of its own until it is closed.

    Raises MissingExtra without prometheus-client, OSError where the port is in use or not ours.
    """

    def __init__(
        self,
        engine: Engine,  # whose numbers
        more: Callable[[], Mapping[str, Number]],  # further ones, asked for at each request
        directory: Path,  # the label of all of them
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
        self._engine, self._more, self._directory = engine, more, str(directory)
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

        now = self._engine.stats()
        numbers: dict[str, Any] = {**now, **describe(now, now), **self._more()}
        for names, family in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, says in names.items():
                metric = family(f"shmbuffer_{name}", says, labels=["directory"])
                metric.add_metric([self._directory], numbers[name])
                yield metric
