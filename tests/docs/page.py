"""Runs pages of the documentation as a reader would, each in a process and a directory of its own.

``python -m tests.docs.page`` imports what every page imports, then reads requests, one JSON object
a line, ``{"page": ..., "directory": ..., "again": ...}``: a fork of it runs that page, which saves
its import of torch; other forks of it run the scripts that the page starts (see `warm`). It answers
with the exit status of each page; what the page printed is in ``page.log`` beside its directory. A
page that runs again, in the same directory, may print something else than it shows.
"""

from __future__ import annotations

import contextlib
import doctest
import gc
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

from tests.docs import warm
from tests.docs.blocks import ROOT, Block, blocks_of

PATIENCE_S = 100.0  # with one command
LONGEST_S = 200  # of a page; then it is ended, and its caller gets a signal
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class WrongPageError(Exception):
    """A page says what is not so."""


class Shell:
    """A bash that keeps its directory, variables and jobs from command to command.

    What a command prints goes to a file of its own, so that what runs in the background does not
    talk into the output of others.
    """

    def __init__(self, beside: Path) -> None:
        self._beside, self._count = beside, 0
        self._bash = subprocess.Popen(["bash", "--norc"], stdin=subprocess.PIPE, text=True)

    def run(self, where: str, command: str, printed: str | None) -> None:
        """Run a command; compare what it prints, unless ``printed`` is None.

        One that ends in ``&`` goes on, and has to print that at some time.

        Raises:
            WrongPageError: it fails, prints something else, or does not come to an end.
        """
        self._count += 1
        output, status = (self._beside / f"command-{self._count}.{end}" for end in ("out", "rc"))
        into = f">{shlex.quote(str(output))} 2>&1 </dev/null"
        background = command.endswith("&")
        asked = f"{command[:-1]} {into} &" if background else f"{{ {command}\n}} {into}"
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{asked}\necho $? >{shlex.quote(str(status))}\n")
        self._bash.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(0.01)
            if not status.exists() or not status.read_text().endswith("\n"):
                continue
            got, code = output.read_text() if output.exists() else "", int(status.read_text())
            if code != 0:
                raise WrongPageError(f"{where}: exit status {code}: {command}\n{got}")
            if printed is None or _is(printed, got):
                return
            if not background:
                raise WrongPageError(f"{where}: {command}\n{_difference(printed, got)}")
        got = output.read_text() if output.exists() else ""
        raise WrongPageError(f"{where}: waited {PATIENCE_S} s: {command}\n{got}")

    def close(self) -> None:
        """End bash; what it left in the background is the caller's to end."""
        self._bash.kill()
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait()


def run(page: str, beside: Path, *, again: bool = False) -> None:
    """Run every block of a page that runs, in the working directory of this process.

    What the blocks print is compared with the page, except if they run ``again``.

    Raises:
        WrongPageError: something is not as the page says.
        Exception: what a block raises; its traceback has the lines of the page.
    """
    space = types.ModuleType("__main__")
    sys.modules["__main__"] = space  # what the blocks define is defined there
    sys.path.insert(0, os.getcwd())  # as for a script: files that the page shows can be imported
    with contextlib.closing(Shell(beside)) as shell:
        for block in blocks_of(page):
            where = f"{page}:{block.line}"
            if block.not_run is not None:
                continue
            if block.title is not None:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.code)
            elif block.language == "python":
                _run_python(block, where, space, compare=not again)
            elif block.language == "console":
                for line, command, printed in block.commands:
                    shell.run(f"{page}:{line}", command, None if again else printed)
            elif block.language == "bash":
                shell.run(where, f"(set -e\n{block.code})", None)


def _run_python(block: Block, where: str, space: types.ModuleType, *, compare: bool) -> None:
    # With the lines above it, so that a traceback shows the line of the page.
    source = "\n" * (block.line - 1) + block.code
    got = io.StringIO()
    with contextlib.redirect_stdout(got):
        exec(compile(source, str(ROOT / block.page), "exec"), vars(space))
    sys.stdout.write(got.getvalue())
    if compare and block.prints is not None and not _is(block.prints, got.getvalue()):
        raise WrongPageError(f"{where}:\n{_difference(block.prints, got.getvalue())}")


def _is(wanted: str, got: str) -> bool:
    return doctest.OutputChecker().check_output(wanted, got, FLAGS)


def _difference(wanted: str, got: str) -> str:
    example = doctest.Example("", wanted)
    return doctest.OutputChecker().output_difference(example, got, FLAGS)


def _become_a_page(page: str, directory: Path, *, again: bool) -> None:
    """In the fork: a session of its own, no input, output to the log."""
    os.setsid()
    with open(os.devnull) as nothing, open(directory.parent / "page.log", "w") as log:
        for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(ours.fileno(), theirs)
    os.chdir(directory)
    os.environ["PAGE"] = address = f"shmbuffer-page-{os.getpid()}"
    listening = warm.listen(address)
    if os.fork() == 0:
        warm.serve(listening)
        return
    listening.close()
    signal.alarm(LONGEST_S)
    run(page, directory.parent, again=again)


def main() -> None:
    """Serve until the end of the input; in a fork, be one page and end as any program does."""
    import shmbuffer

    for name in ("Coordinator", "attach", "TensorDictPrioritizedReplayBuffer"):
        getattr(shmbuffer, name)
    gc.freeze()  # a page collects its own garbage
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_a_page(request["page"], Path(request["directory"]), again=request["again"])
            return
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it left in the background
        print(status, flush=True)


if __name__ == "__main__":
    main()
