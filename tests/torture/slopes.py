"""Fits a line to a series of measurements and tells whether the series grows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Quantile of Student's t with many degrees of freedom. Series with fewer than 30 points get a
#: wider interval.
_NORMAL = 1.96


@dataclass(frozen=True)
class Slope:
    """A straight line through a series: its growth per second, with the 95 % interval."""

    name: str
    mean: float
    a_second: float
    lowest: float
    highest: float
    seconds: float

    @classmethod
    def of(cls, name: str, times: list[float], values: list[float]) -> Slope:
        """Fits by least squares (Draper and Smith, Applied Regression Analysis, section 1.4)."""
        x, y = np.array(times), np.array(values, float)
        assert len(x) > 2, f"{name}: a line needs three points"
        if np.ptp(y) == 0:  # exactly 0, without rounding errors
            return cls(name, float(y[0]), 0.0, 0.0, 0.0, float(x[-1] - x[0]))
        centred = x - x.mean()
        spread = float((centred**2).sum())
        slope = float((centred * y).sum()) / spread
        left = y - y.mean() - slope * centred
        freedom = len(x) - 2
        error = float(np.sqrt((left**2).sum() / freedom / spread))
        reach = _NORMAL * (1 + 2 / freedom) * error
        seconds = float(x[-1] - x[0])
        return cls(name, float(y.mean()), slope, slope - reach, slope + reach, seconds)

    def grown(self) -> float:
        """Returns the least growth over the whole time (negative for a fall), or 0 if unclear."""
        if self.lowest > 0:
            return self.lowest * self.seconds
        return min(0.0, self.highest * self.seconds)

    def __str__(self) -> str:
        an_hour = [3600 * one for one in (self.a_second, self.lowest, self.highest)]
        slope, lowest, highest = (f"{one:+.4g}" for one in an_hour)
        return f"{self.name}: {self.mean:.6g} on average, {slope} an hour ({lowest} to {highest})"
