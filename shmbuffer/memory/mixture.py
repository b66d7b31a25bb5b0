"""Stores the share of a data set in each sample: one number that all learners of a buffer read.

    offline_base       the initial share, in (0, 1); 0 if it was not set
    offline_fraction   the current share, in [0, 1)

Each is one store of eight bytes, so a reader sees the number before or after it. The fraction is
stored before the base, under init.lock, so a base implies a fraction.
If a process dies between the two stores, there is no base yet, and the next process sets its own.
"""

from __future__ import annotations

from shmbuffer._native import _core
from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.engine import Engine


class Mixture:
    """The share of a data set in the samples of all processes; initially ``base``."""

    def __init__(self, engine: Engine, base: float, *, timeout: float = 60.0) -> None:
        self._engine = engine
        with engine.seat.backing.lock(timeout):
            runtime = engine.seat.control.runtime
            known = float(runtime["offline_base"][0])
            if not known:
                runtime["offline_fraction"] = base
                _core.reached("mixture.fraction")
                runtime["offline_base"] = base
                _core.reached("mixture.base")
                engine.seat.control.touch()
            elif known != base:
                raise ValueError(
                    f"{engine.where}: the first handle set offline_fraction={known:g}, but this "
                    f"handle was given {base:g}; pass the same value, and anneal() from there"
                )

    @property
    def fraction(self) -> float:
        """The current share; CorruptBufferError if it is not a number from 0 to 1."""
        found = float(self._engine.seat.control.runtime["offline_fraction"][0])
        if not 0.0 <= found < 1.0:
            raise CorruptBufferError(
                f"{self._engine.where}: the share of the data set in a sample, {found:g}, is "
                "invalid, because another program wrote to the shared memory; set it again with "
                "anneal(step, total_steps)",
                path=str(self._engine.path),
                found=found,
            )
        return found

    @fraction.setter
    def fraction(self, value: float) -> None:
        self._engine.seat.require_open()
        self._engine.seat.control.runtime["offline_fraction"] = value
        _core.reached("mixture.fraction")
        self._engine.seat.control.touch()
