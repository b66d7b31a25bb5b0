"""Cuts a recording at each of its steps, in the worst ways and at random, and opens the images."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shmbuffer.memory import Engine
from tests.crash.harness import ended
from tests.power import scripts
from tests.power.audit import audit
from tests.power.choices import Random, designed
from tests.power.disk import Choice, Disk, Image
from tests.power.history import History
from tests.power.machine import Machine, boot
from tests.power.recorder import Recording, apply, record

#: Boots of the simulated machine. Images of one boot are opened in the next.
FIRST, SECOND, THIRD = 1, 2, 3


@contextmanager
def folder() -> Iterator[tuple[Path, Path]]:
    """A tree to be recorded and an attic, in memory if the machine has a directory there."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="shmbuffer-power-", dir=base))
    try:
        (path / "tree").mkdir()
        (path / "attic").mkdir()
        yield path / "tree", path / "attic"
    finally:
        shutil.rmtree(path)


def apart(work: Callable[[], dict[str, int]]) -> Counter[str]:
    """Runs ``work`` in a child with its own boot and maps, and returns its figures."""
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        answer: dict[str, Any] = {}
        try:
            answer["figures"] = work()
        except AssertionError as error:
            answer["failure"] = f"{error}\n{traceback.format_exc()}"
        except BaseException:
            answer["failure"] = traceback.format_exc()
        finally:
            with os.fdopen(tell, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
    os.close(tell)
    with os.fdopen(told) as pipe:
        said = pipe.read()
    status = ended(pid)
    assert status == 0, f"a process that opened images ended with {status}"
    answer = json.loads(said)
    assert "failure" not in answer, answer["failure"]
    return Counter(answer["figures"])


class Simulation:
    """The images of one recording.

    Args:
        kind: the kind of items.
        seed: seed of all random choices.
        images: number of random images at each step at which anything changed.
        worst: number of designed images at each step, or None for all.
        again: number of images whose recovery is recorded and cut in turn.
        lives: number of images in which a script continues, which is recorded and cut in turn.
        used: share of the images that are written to and removed.
        at: pattern for the names of the steps that are cut.
        created: whether steps before the first write are cut, whose images are slow to open.
        mapped: whether most images are recovered in files that stay mapped, without the ledger.
    """

    def __init__(
        self,
        kind: str,
        seed: int,
        *,
        images: int,
        worst: int | None = 3,
        again: int = 0,
        lives: int = 0,
        used: float = 0.02,
        at: str = "",
        created: bool = True,
        mapped: bool = True,
    ) -> None:
        self.kind = kind
        self.seed = seed
        self.images = images
        self.worst = worst
        self.lives = lives
        self.used = used
        self.at = re.compile(at)
        self.created = created
        self.mapped = mapped
        self.figures: Counter[str] = Counter()
        self._random = np.random.default_rng(seed)
        self._room = again + lives
        self._kept: list[tuple[Image, History]] = []

    def run(self, script: scripts.Script) -> Counter[str]:
        """Records a script and cuts it."""
        with folder() as (tree, attic):
            boot(FIRST)
            recording = record(
                tree,
                attic,
                lambda reporter: script(reporter, tree / "buffer", self.kind),
            )
            self.cut(recording, History(self.kind), Machine(tree, attic, self.kind), SECOND)
            kept, self._room = self._kept, 0
            for at, (image, history) in enumerate(kept):
                self._cut_again(tree, attic, image, history, goes_on=at < self.lives)
        return self.figures

    def cut(self, recording: Recording, history: History, machine: Machine, opened_in: int) -> None:
        """Opens images of every step in a boot; keeps some of them with their guaranteed items."""
        boot(opened_in)
        disk, changed = recording.before, True
        for number, event in enumerate(recording.events):
            apply(disk, event)
            history.follow(disk, event)
            changed = changed or event.kind not in ("step", "mark")
            if event.kind != "step":
                continue
            step = f"step {number}, {event.value}"
            wanted = self.created or history.acked
            if changed and wanted and self.at.search(event.value):
                self.figures["steps"] += 1
                for choice in self._choices(disk):
                    self._open(history, disk, choice, machine, step)
            changed = False

    def _choices(self, disk: Disk) -> Iterator[Choice]:
        worst = list(designed(disk))
        if self.worst is not None and self.worst < len(worst):
            some = self._random.choice(len(worst), self.worst, replace=False)
            worst = [worst[int(i)] for i in some]
        yield from worst
        for _ in range(self.images):
            yield Random(int(self._random.integers(2**63)))

    def _open(self, history: History, disk: Disk, choice: Any, machine: Machine, step: str) -> None:
        image = disk.cut(choice)
        self.figures["images"] += 1
        try:
            started = None
            if self.mapped and disk.settled and self.figures["images"] % 32:
                started = machine.start_mapped(image)
            if started is None:
                self.figures["images opened by path"] += 1
                started = machine.start(image)
            self.figures["items checked"] += audit(history, image, started)
            if self._random.random() < self.used:
                self.figures["images used"] += 1
                machine.use_and_remove(image)
        except Exception as error:
            raise AssertionError(
                f"{step}: image {choice.name!r} of {history.kind}, seed {self.seed}: {error}"
            ) from error
        if started is not None:
            self._keep(image, history)

    def _keep(self, image: Image, history: History) -> None:
        """Keeps a uniform random sample of all images."""
        at = len(self._kept)
        if at >= self._room:
            at = int(self._random.integers(self.figures["images"]))
        if at < self._room:
            self._kept[at : at + 1] = [(image, history.cut())]

    def _cut_again(
        self, tree: Path, attic: Path, image: Image, history: History, *, goes_on: bool
    ) -> None:
        """Cuts the power again, during the recovery from the first cut, or some time later."""
        machine = Machine(tree, attic, self.kind)
        machine.place(image)
        boot(SECOND)
        if goes_on:
            recording = record(tree, attic, lambda at: scripts.goes_on(at, machine.path, self.kind))
        else:
            recording = record(tree, attic, lambda _: Engine.open(machine.path, None).close())
        self.figures["lives" if goes_on else "recoveries cut"] += 1
        self.cut(recording, history, machine, THIRD)
