"""Statistics of a buffer as a flat dict of numbers, with TorchRL's keys if TorchRL has them.

    size, capacity, write_count       items present, capacity, items ever written (TorchRL's names)
    utilization, fill                 size / capacity, under TorchRL's name and under our own name
    initialized                       True after the first write, which fixes the schema (TorchRL's)
    inserts, batches_sampled,
    items_sampled                     items written, batches and items sampled, since creation
    inserts_per_s, ...                increase of these counters per second since the last reading
    loaded                            items written by loading a save; they do not count as inserts
    sampled_age                       mean age in writes of the items sampled since the last
                                      reading, or of all sampled items if there are none since then
    updates_applied, updates_stale    priorities set; dropped because their item was overwritten
    redraws, waits                    rows sampled again because they changed; writes that waited
    lock_waits                        calls that slept until the lock was free
    clients_alive, clients_dead       handles of living processes; handles of dead processes that
                                      have not been reaped yet
    repairs, rolled_back, rolled_forward, reaped   repairs after deaths
    weights_version, weights_age_s    version and age of the newest weights; 0 without weights
    consumer_version                  policy version reported by learners; 0 if none was reported
    reserved, refused                 items that are reserved; items that were too old to commit
    epoch, bytes, p_sum, ...          the engine's other numbers, under its own names

A reading is one snapshot of the engine. Counters are shared by all processes, but each meter
computes the rates between its own readings.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.system.fork_lock import ForkLock

Number = int | float

RATED = ("inserts", "batches_sampled", "items_sampled")
"""Counters for which a meter computes a rate per second."""


class Meter:
    """Reads the engine's counters and computes their rates since the last reading.

    The first reading computes the rates since the meter was created.
    """

    _lock = ForkLock()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: Mapping[str, Number] = engine.stats()
        self._rates: dict[str, float] = dict.fromkeys((f"{name}_per_s" for name in RATED), 0.0)

    def read(self) -> dict[str, Number]:
        """Returns the current numbers and the rates since the last reading. Cost: about 10 µs."""
        with self._lock:
            now, before = self._engine.stats(), self._last
            self._last = now
            elapsed_s = (now["time_ns"] - before["time_ns"]) / 1e9
            if elapsed_s > 0:
                self._rates = {
                    f"{name}_per_s": (now[name] - before[name]) / elapsed_s for name in RATED
                }
            rates = self._rates
        return describe(now, before) | {"initialized": self._engine.ring() is not None} | rates


def describe(now: Mapping[str, Number], before: Mapping[str, Number]) -> dict[str, Number]:
    """Converts a snapshot of the engine to the flat dict, without rates and ``initialized``.

    ``before`` is the snapshot from which ``sampled_age`` is computed.
    """
    length, capacity = now["length"], now["elements"]
    utilization = length / capacity
    renamed = {
        "size": length,
        "write_count": now["write_count"],
        "capacity": capacity,
        "utilization": utilization,
        "fill": utilization,
        "sampled_age": _age(now, before),
    }
    return renamed | {k: v for k, v in now.items() if k not in renamed and k not in _INTERNAL}


_INTERNAL = {"length", "elements", "age_sum", "time_ns"}


def _age(now: Mapping[str, Number], before: Mapping[str, Number]) -> float:
    sampled = now["items_sampled"] - before["items_sampled"]
    if sampled > 0:
        return (now["age_sum"] - before["age_sum"]) / sampled
    return now["age_sum"] / now["items_sampled"] if now["items_sampled"] else 0.0
