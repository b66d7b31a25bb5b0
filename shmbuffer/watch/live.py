"""A buffer that is looked at again and again, through crashes, recoveries and removal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shmbuffer.errors import BufferNotFoundError, ShmBufferError
from shmbuffer.memory.inspect import inspect
from shmbuffer.watch import terminal
from shmbuffer.watch.pace import Pace, Watch
from shmbuffer.watch.screen import Screen


def look(path: str) -> dict[str, Any]:
    """Looks once; raises what `inspect` does."""
    return inspect(path, priorities=True, live_bytes=False)


def looks(
    path: str, watch: Watch, interval_s: float, pause: Callable[[float], bool] = terminal.sleep
) -> Iterator[tuple[dict[str, Any], Pace]]:
    """Yields each look, until a pause says so; one that found no buffer has ``error``."""
    while not pause(interval_s):
        try:
            found = look(path)
        except BufferNotFoundError:
            still = "still there" if os.path.isdir(path) else "gone too"
            what = f"there is no buffer here any more; the directory is {still}"
            yield {"path": path, "error": what}, watch.lose(what)
        except ShmBufferError as error:  # is being made, or removed, or damaged: it may pass
            yield {"path": path, "error": str(error)}, watch.lose(str(error), "gone")
        else:
            yield found, watch.see(found)


def fill_screen(
    path: str,
    found: dict[str, Any],
    watch: Watch,
    interval_s: float,
    pause: Callable[[float], bool],
) -> None:
    """Shows each look on the whole terminal, in place of the one before; needs rich."""
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:

        def show(found: Mapping[str, Any], pace: Pace) -> None:
            live.update(Screen(path, found, pace, watch), refresh=True)

        show(found, Pace.nothing())
        for found, pace in looks(path, watch, interval_s, pause):
            show(found, pace)
