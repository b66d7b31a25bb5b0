"""A library in its own interpreter. Requests and answers are lines of JSON.

    {"do": "round", "with": {"operation": {...}, "blocks": 40}}    ──▶
                                      ◀──    {"result": [...]}  or  {"error": "..."}

The process exists during the whole run, so that rounds can be interleaved. It ends when its
standard input is closed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.library import MEMMAP, Operation

PEERS = ("torchrl", "cpprb", "tianshou", "sb3", "flashbax", "reverb", "ray")

_ROOT = Path(__file__).resolve().parents[1]
#: Threads of a library beside the calls that are timed would take the CPU of the others.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def interpreter(peer: str) -> Path:
    """Returns the path of the interpreter in a peer's environment, if it exists."""
    home = ".venv-compat" if peer == "torchrl" else f".venv-peers/{peer}"
    return _ROOT / home / "bin" / "python"


def why_not(peer: str) -> str:
    """Returns why a peer has no environment, as recorded by scripts/peers."""
    note = _ROOT / ".venv-peers" / f"{peer}.failed"
    if note.exists():
        return f"not installed: {note.read_text().strip()}"
    return f"not installed: scripts/peers {peer} makes its environment"


class PeerError(Exception):
    """An error in the interpreter of a peer, with its message."""


class Peer:
    """A `Library` in another interpreter, connected by two pipes.

    Args:
        name: name of the library.
        python: interpreter of an environment with the library.
        log: file for the messages of the process.
        module: module of the library in `benchmarks.peers`.
        preload: shared object that the dynamic linker loads first in the process.

    Raises:
        PeerError: the interpreter does not exist.
    """

    def __init__(
        self,
        name: str,
        python: str,
        log: Path,
        *,
        module: str | None = None,
        preload: str | None = None,
    ) -> None:
        self.name = name
        self._log = log
        python = os.path.abspath(python) if os.sep in python else python  # cwd is another there
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}
        if preload is not None:
            environment["LD_PRELOAD"] = preload
        with log.open("w") as messages:
            try:
                self._process = subprocess.Popen(
                    [python, "-m", module or f"benchmarks.peers.{name}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    cwd=_ROOT,
                    env=environment,
                    text=True,
                )
            except OSError as error:
                raise PeerError(f"{name}: {error}") from None
        try:
            self._versions: dict[str, str] = self.ask("versions")
        except PeerError:
            self.end()
            raise

    def versions(self) -> dict[str, str]:
        """Implements `Library.versions`."""
        return self._versions

    def open(
        self, directory: str, kind: str, capacity: int, prioritized: bool, storage: str = MEMMAP
    ) -> bool:
        """Implements `Library.open`."""
        return bool(
            self.ask(
                "open",
                directory=directory,
                kind=kind,
                capacity=capacity,
                prioritized=prioritized,
                storage=storage,
            )
        )

    def share(self, writers: int, count: int) -> int:
        """Implements `Library.share`."""
        return int(self.ask("share", writers=writers, count=count))

    def prepare(self, operation: Operation, block_s: float) -> bool:
        """Implements `Library.prepare`."""
        return bool(self.ask("prepare", operation=dataclasses.asdict(operation), block_s=block_s))

    def round(self, operation: Operation, blocks: int) -> list[float]:
        """Implements `Library.round`."""
        answer: list[float] = self.ask(
            "round", operation=dataclasses.asdict(operation), blocks=blocks
        )
        return answer

    def calls(self, operation: Operation, count: int) -> list[float]:
        """Implements `Library.calls`."""
        answer: list[float] = self.ask(
            "calls", operation=dataclasses.asdict(operation), count=count
        )
        return answer

    def contend(self, writers: int, batch: int, seconds: float) -> dict[str, float]:
        """Implements `Library.contend`."""
        answer: dict[str, float] = self.ask(
            "contend", writers=writers, batch=batch, seconds=seconds
        )
        return answer

    def shrinks(self) -> float:
        """Implements `Library.shrinks`."""
        return float(self.ask("shrinks"))

    def close(self) -> None:
        """Implements `Library.close`."""
        self.ask("close")

    def end(self) -> None:
        """Ends the process and its children."""
        with self._process as process:  # closes both pipes, and waits
            assert process.stdin is not None
            try:
                process.stdin.close()
                process.wait(30)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                process.kill()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Calls a method in the process, and returns its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why it has ended is in its log
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise PeerError(f"{self.name}: {said[-1] if said else 'the process has ended'}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {do}: {answer['error']}")
        return answer["result"]
