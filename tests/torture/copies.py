"""Copies a directory beside running writers and puts a copy back when all processes are dead."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

from tests.torture.history import Log
from tests.torture.image import COMMITTED, HEAD_AT

#: Commands that put a copy, ``$0``, back over the files of a directory, ``$1``, or in its place.
#: Without -I, two copies made within one second look the same to rsync.
WAYS = {
    "cp": 'cp -rT "$0" "$1"',
    "cp with times": 'cp -aT "$0" "$1"',
    "tar": 'tar -C "$0" -cf - . | tar -C "$1" --overwrite -xf -',
    "a new directory": 'rm -r "$1" && cp -r "$0" "$1"',
    **({"rsync": 'rsync -aI --inplace "$0/" "$1/"'} if shutil.which("rsync") else {}),
}
KEPT = 3


class Copies:
    """The copies that are made in one round.

    Args:
        path: the directory of the buffer.
        logs: the folder of the histories, in which each copy and each return of a copy is noted.
        capacity: number of slots.
    """

    def __init__(self, path: Path, logs: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self._logs = logs
        self._there: list[int] = []
        self._made = 0
        self._put_back: tuple[int, int] | None = None

    def make(self) -> bool:
        """Makes a copy while others write; returns False if a file was removed during the copy."""
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
        """Returns the oldest present ticket. Items from it on have not been overwritten yet."""
        private = self.path / ".shmbuffer"
        head = int(np.fromfile(private / "control", "<u8", 1, offset=HEAD_AT)[0])
        words = np.fromfile(private / "slots", "<u8", self.capacity)
        tickets = (words[words & np.uint64(3) == COMMITTED] >> np.uint64(2)).astype(np.int64)
        return int(tickets[tickets >= head - self.capacity].min(initial=2**62))

    def put_back(self, rng: np.random.Generator) -> bool:
        """Puts back a random copy in a random way; returns False if there is no copy yet.

        All processes are dead.
        """
        if not self._there:
            return False
        number = self._there[int(rng.integers(len(self._there)))]
        way = WAYS[str(rng.choice(sorted(WAYS)))]
        self._put_back = number, time.monotonic_ns()
        subprocess.run(["sh", "-ec", way, self._name(number), self.path], check=True)
        return True

    def recovered(self, head: int, write_count: int) -> None:
        """Notes the counters that the first recovery after a copy was put back has found."""
        if self._put_back is not None:
            number, began = self._put_back
            with Log(self._logs, 0, 0) as log:
                log.restored(number, began, head, write_count)

    def noted(self) -> None:
        """Forgets the copy that was put back, because another process has noted its recovery."""
        self._put_back = None

    def _name(self, number: int) -> Path:
        return self.path.with_name(f"copy-{number}")
