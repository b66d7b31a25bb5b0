"""The fraction of each sample that comes from a data set, which all learners of a buffer share.

    offline_base       the initial fraction, in (0, 1); 0 if it was not set
    offline_fraction   the current fraction, in [0, 1)

Both numbers have eight bytes and are stored atomically. Under init.lock, the fraction is stored
before the base. If there is a base, there is therefore also a fraction.

If a process dies between the two stores, there is no base yet, and the next process stores both
numbers.
"""

from __future__ import annotations

from shmbuffer._native import _core
from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.engine import Engine


class Mixture:
    """The fraction of each sample that comes from a data set, for all processes.

    Args:
        engine: A handle to the buffer.
        base: The initial fraction, which must be the same in all processes.
        timeout: Seconds to wait for init.lock.

    Raises:
        ValueError: Another process has set a different initial fraction.
    """

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
                    f"handle passed {base:g}; pass the same value, and change the fraction with"
                    " anneal()"
                )

    @property
    def fraction(self) -> float:
        """The current fraction.

        Raises:
            CorruptBufferError: The stored fraction is not at least 0 and less than 1.
        """
        found = float(self._engine.seat.control.runtime["offline_fraction"][0])
        if not 0.0 <= found < 1.0:
            raise CorruptBufferError(
                f"{self._engine.where}: the stored fraction of the data set is {found:g}, which is"
                " invalid, because another program wrote to the shared memory; set it again with"
                " anneal(step, total_steps)",
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
