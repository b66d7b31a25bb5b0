"""Programs that tests start: Python source in a process of its own, which reports in lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: it imports the package and the tests from this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


class Program:
    """A running process; killed at the end of the block if it still runs."""

    def __init__(self, *command: str, **extra: str) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**extra),
        )
        self.pid = self.process.pid

    @classmethod
    def python(cls, source: str, *argv: object) -> Self:
        """Run Python source."""
        return cls(sys.executable, "-c", source, *map(str, argv))

    @classmethod
    def shmbuffer(cls, *argv: object) -> Self:
        """Run the command line."""
        return cls(sys.executable, "-m", "shmbuffer", *map(str, argv))

    def line(self) -> str:
        """The next line of its output; fails with what it said on stderr if there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"the program ended: {self.process.stderr.read()}")
        return line.rstrip("\n")

    def json(self) -> Any:
        """The next line of its output, as JSON."""
        return json.loads(self.line())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit status, the rest of stdout, stderr."""
        out, err = self.process.communicate()
        return self.process.returncode, out, err

    def kill(self) -> None:
        """End it with SIGKILL. What it said last is not read: a child may hold the pipe open."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def run(*argv: object, **extra: str) -> tuple[int, str, str]:
    """Run the command line to its end."""
    with Program(sys.executable, "-m", "shmbuffer", *map(str, argv), **extra) as program:
        return program.end()
