"""Frames of a recording, their contents, and the six frames that tell the story."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z]|[\x0e\x0f]")


def trimmed(text: str) -> list[str]:
    """Returns the lines without empty ones at the beginning and the end."""
    lines = text.split("\n")
    filled = [at for at, line in enumerate(lines) if plain(line).strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def plain(text: str) -> str:
    """Removes the colours from the text of a terminal."""
    return _ESCAPES.sub("", text)


@dataclass(frozen=True)
class Frame:
    """Both panes at one time.

    Attributes:
        at_s: seconds since the start of the recording.
        demo: the whole output of the upper pane, with escape sequences.
        top: the current content of the lower pane.
    """

    at_s: float
    demo: str
    top: str

    @cached_property
    def plain(self) -> tuple[str, str]:
        """Returns the text of both panes without colours."""
        return plain(self.demo), plain(self.top)

    @cached_property
    def told(self) -> list[str]:
        """Returns the last lines of the demo, with a long table replaced by its title."""
        lines: list[str] = []
        for line in trimmed(self.demo):
            if not plain(line).startswith("  "):
                lines.append(line)
            elif lines and lines[-1] != _MORE:
                lines.append(_MORE)
        return lines[-_TOLD:]

    @cached_property
    def is_whole(self) -> bool:
        """True if the whole view had been drawn when it was captured."""
        return all(re.search(rf"^{part}", self.plain[1], re.M) for part in _PARTS)

    @cached_property
    def alive(self) -> set[int]:
        return self._clients("running")

    @cached_property
    def dead(self) -> set[int]:
        return self._clients("dead")

    def rate(self, name: str) -> float:
        """Returns the current value of a rate."""
        found = re.search(rf"^{re.escape(name)} +([\d.,]+)", self.plain[1], re.M)
        return float(found[1].replace(",", "")) if found else 0.0

    @cached_property
    def events(self) -> list[tuple[str, str]]:
        """Returns the events in the view, oldest first."""
        found = re.findall(r"^\d\d:\d\d:\d\d +(\w+(?: \w+)?) {2,}(.*)$", self.plain[1], re.M)
        return [(kind, text.rstrip()) for kind, text in found]

    def _clients(self, state: str) -> set[int]:
        rows = re.findall(rf"^[a-z]+ +(\d+) +{state}\b", self.plain[1], re.M)
        return set(map(int, rows))


_MORE = "  ..."
_TOLD = 14
_MOST_SHOTS = 7  # most shots in a scene
_TO_READ_S, _ONE_SHOT_S = 2.5, 0.5
_PARTS = ("items +[█░]", "rates ", "clients? ", "events *$")


@dataclass(frozen=True)
class Scene:
    """A frame that shows a part of the story, with the title of that part."""

    name: str
    title: str
    frame: Frame


@dataclass(frozen=True)
class Shot:
    """A frame of a film, with its title and duration."""

    frame: Frame
    title: str
    seconds: float


class Story:
    """The parts of a recording that the demo must show, found in its frames.

    Attributes:
        killed: pids of each kill, as the demo prints them: of a collector, then of all processes.
        missing: titles of the scenes that no frame shows.
    """

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = [frame for frame in frames if frame.is_whole]
        told: dict[str, list[int]] = {}
        for frame in self._frames:
            for what, pids in re.findall(
                r"killed (a collector|all) with SIGKILL \(pid ([\d, \n]+)\)", frame.plain[0]
            ):
                told.setdefault(what, [int(pid) for pid in re.findall(r"\d+", pids)])
        self.killed = [set(told.get(what, ())) for what in ("a collector", "all")]
        self.missing: list[str] = []
        self.scenes = list(self._found())

    def shots(self) -> list[Shot]:
        """Returns the shots of a film: each scene long enough to read, with the frames after it."""
        starts, at = [], 0
        for scene in self.scenes:
            at = self._frames.index(scene.frame, at)
            starts.append(at)
        shots = []
        for scene, start, end in zip(
            self.scenes, starts, [*starts[1:], len(self._frames)], strict=True
        ):
            shots.append(Shot(scene.frame, scene.title, _TO_READ_S))
            for frame in self._frames[start + 1 : min(end, start + _MOST_SHOTS)]:
                shots.append(Shot(frame, scene.title, _ONE_SHOT_S))
        return shots

    def _found(self) -> Iterator[Scene]:
        """Yields the scenes, each of which is searched for after the previous one."""
        one, everybody = self.killed
        at = 0
        asked: Sequence[tuple[str, str, Callable[[Frame], bool]]] = (
            (
                "1-running",
                "two collectors write, a learner samples",
                lambda f: (
                    len(f.alive) == 4
                    and f.rate("items sampled/s") > 0
                    and f.rate("items written/s") > 0
                ),
            ),
            (
                "2-killed",
                "a collector was killed",
                lambda f: bool(one) and one <= f.dead and _tells(f, "died", one),
            ),
            (
                "3-restarted",
                "the coordinator has started it again",
                lambda f: len(f.alive) == 4 and f.events[-1][0] in ("joined", "reaped"),
            ),
            (
                "4-all-killed",
                "all were killed at once",
                lambda f: bool(everybody & f.dead) and _tells(f, "died", everybody & f.dead),
            ),
            (
                "5-recovered",
                "the directory was recovered",
                # A single snapshot may also show that the next coordinator has joined.
                lambda f: bool(everybody & f.dead) and "recovered" in [e[0] for e in f.events[-2:]],
            ),
            (
                "6-going-on",
                "training goes on from there",
                # In a run that is solved quickly, no snapshot may show both the coordinator and the
                # rates.
                lambda f: bool(f.alive - everybody),
            ),
        )
        for name, title, shows in asked:
            found = next((i for i in range(at, len(self._frames)) if shows(self._frames[i])), None)
            if found is None:
                self.missing.append(title)
                continue
            if name == "1-running":
                found = self._before_the_kill(found, shows)
            at = found
            yield Scene(name, title, self._frames[found])

    def _before_the_kill(self, first: int, shows: Callable[[Frame], bool]) -> int:
        """Returns the last frame that shows the training before a collector is killed.

        The first such frame shows an empty buffer and no return yet.
        """
        last = first
        for at in range(first, len(self._frames)):
            if self.killed[0] & self._frames[at].dead:
                break
            if shows(self._frames[at]):
                last = at
        return last


def _tells(frame: Frame, kind: str, pids: set[int]) -> bool:
    told = " ".join(text for one, text in frame.events if one == kind)
    return all(str(pid) in told for pid in pids)
