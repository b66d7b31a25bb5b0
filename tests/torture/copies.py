"""Copies of a directory, made beside running writers and put back over it when all are dead."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

from tests.torture.history import Log
from tests.torture.image import COMMITTED, HEAD_AT

#: What puts a copy, ``$0``, back over the files of a directory, ``$1``, or in its place. Without -I
#: two copies of one second look the same to rsync.
WAYS = {
    "cp": 'cp -rT "$0" "$1"',
    "cp with times": 'cp -aT "$0" "$1"',
    "tar": 'tar -C "$0" -cf - . | tar -C "$1" --overwrite -xf -',
    "a new directory": 'rm -r "$1" && cp -r "$0" "$1"',
    **({"rsync": 'rsync -aI --inplace "$0/" "$1/"'} if shutil.which("rsync") else {}),
}
KEPT = 3


class Copies:
    """The copies of one round.

    Args:
        path: the directory.
        logs: of the histories; what was copied and put back is noted there.
        capacity: slots.
    """

    def __init__(self, path: Path, logs: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self._logs = logs
        self._there: list[int] = []
        self._made = 0
        self._put_back: tuple[int, int] | None = None

    def make(self) -> bool:
        """One more, while others write; False if they removed a file under it."""
        self._made += 1
        began = time.monotonic_ns()
        copied = subprocess.run(
            ["cp", "-r", self.path, self._name(self._made)], capture_output=True, check=False
        )
        ended = time.monotonic_ns()
        if copied.returncode:
            shutil.rmtree(self._name(self._made), ignore_errors=True)
            return False
        with Log(self._logs, 0, 0) as log:
            log.copied(self._made, began, ended, self._oldest())
        self._there.append(self._made)
        if len(self._there) > KEPT:
            shutil.rmtree(self._name(self._there.pop(0)))
        return True

    def _oldest(self) -> int:
        """The oldest ticket that is there still: nothing from it on was touched before."""
        private = self.path / ".shmbuffer"
        head = int(np.fromfile(private / "control", "<u8", 1, offset=HEAD_AT)[0])
        words = np.fromfile(private / "slots", "<u8", self.capacity)
        tickets = (words[words & np.uint64(3) == COMMITTED] >> np.uint64(2)).astype(np.int64)
        return int(tickets[tickets >= head - self.capacity].min(initial=2**62))

    def put_back(self, rng: np.random.Generator) -> bool:
        """One of them, in one of the ways; nobody is alive. False if there is none yet."""
        if not self._there:
            return False
        number = self._there[int(rng.integers(len(self._there)))]
        way = WAYS[str(rng.choice(sorted(WAYS)))]
        self._put_back = number, time.monotonic_ns()
        subprocess.run(["sh", "-ec", way, self._name(number), self.path], check=True)
        return True

    def recovered(self, head: int, write_count: int) -> None:
        """Notes what a recovery made of it, once."""
        if self._put_back is not None:
            number, began = self._put_back
            with Log(self._logs, 0, 0) as log:
                log.restored(number, began, head, write_count)

    def noted(self) -> None:
        """Another process has noted it."""
        self._put_back = None

    def _name(self, number: int) -> Path:
        return self.path.with_name(f"copy-{number}")
