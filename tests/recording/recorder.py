"""Captures the demo and `top` beside it until the demo ends; then draws the run with `plot`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shmbuffer.watch import findings
from shmbuffer.watch.buffer_state import read_state
from shmbuffer.watch.plot import report
from tests.recording.frames import Frame
from tests.recording.terminal import Terminal

WIDTH = 112
HEIGHTS = (13, 35)
INTERVAL_S = 0.25
"""Refresh interval of `top`. The demo recovers some milliseconds after it kills all processes."""

_FRAMES_PER_LOOK = 2
_ENDED = "the demo ended with"


def frames(folder: Path, *, seed: int, max_minutes: float) -> Iterator[Frame]:
    """Yields the content of both panes whenever it changes.

    Args:
        folder: folder in which the run is created; it is removed from the text.
        seed: seed of the demo.
        max_minutes: time after which the demo gives up.

    The last frame contains the exit status of the demo.
    """
    python = [sys.executable, "-m", "shmbuffer"]
    demo = shlex.join(
        [
            *(*python, "demo", "--scratch-dir", "run", "--picture", str(folder / "curve.png")),
            *("--seed", str(seed), "--max-minutes", str(max_minutes)),
        ]
    )
    top = shlex.join([*python, "top", "run/replay", "--interval", str(INTERVAL_S)])
    # `top` has nothing to show before the buffer exists.
    first = f'{demo}; echo "{_ENDED} $?"'
    second = f"until test -e run/replay/.shmbuffer/control; do sleep 0.1; done; {top}"
    began, last = time.monotonic(), ("", "")
    with Terminal(first, second, width=WIDTH, heights=HEIGHTS, folder=folder) as terminal:
        ended = False
        while not ended:
            upper, lower = (pane.replace(f"{folder}/", "") for pane in terminal.captured())
            panes = upper, lower
            if panes != last:
                yield Frame(time.monotonic() - began, *panes)
            last = panes
            ended = _ENDED in panes[0]
            time.sleep(INTERVAL_S / _FRAMES_PER_LOOK)


def plot(folder: Path, picture: Path) -> None:
    """Draws the run of `frames` with `shmbuffer plot`; `folder` is removed from the text."""
    from PIL import Image

    look = read_state(str(folder / "run" / "replay"), None)
    shown = dataclasses.replace(look, found={**look.found, "path": "run/replay"})
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(report.picture(shown, findings.find_problems(shown), "png"))
    with Image.open(picture) as drawn:  # 256 colours take a third of the space
        fewer = drawn.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    fewer.save(picture, optimize=True)
