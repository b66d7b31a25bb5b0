"""Formats numbers for display as sizes, durations, percentages, rates and bars."""

from __future__ import annotations

import time
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def size(count: int) -> str:
    """Formats a number of bytes, for example ``1.5 GiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, one: str, more: str | None = None) -> str:
    """Formats a number with its noun, for example ``3 items``."""
    return f"{count:,} {one if count == 1 or more is None else more}"


def span(seconds: float) -> str:
    """Formats a duration, for example ``12 min``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s" if seconds >= 10 else f"{max(0.0, seconds):.1f} s"


def clock(time_s: float) -> str:
    """Formats a time in seconds since 1970 as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def percent(share: float) -> str:
    """Formats a share from 0 to 1, for example ``12 %``."""
    return f"{100 * share:.3g} %" if share < 0.1 else f"{100 * share:.0f} %"


def rate(value: float | None) -> str:
    """Formats a rate with about four digits, or as "-" for None."""
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:,.2f} M"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def bars(values: Sequence[float | None], width: int = 40) -> str:
    """Draws the last ``width`` values as a line of bars, scaled to the largest. None is a gap."""
    shown = list(values)[-width:]
    greatest = max((value for value in shown if value is not None), default=0.0)

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        return _BARS[round(value / greatest * (len(_BARS) - 1))] if greatest > 0 else _BARS[0]

    return "".join(map(bar, shown))


def gauge(share: float, width: int) -> str:
    """Draws a bar of ``width`` characters that is filled to ``share``, from 0 to 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)
