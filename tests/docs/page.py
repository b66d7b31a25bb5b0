"""Runs documentation pages as a reader would, each in its own process and directory.

``python -m tests.docs.page`` imports what every page imports and then reads requests. A request is
a line with a JSON object, ``{"page": ..., "directory": ..., "again": ...}``. A fork runs the page,
which saves its import of torch, and other forks run the scripts that the page starts (see `warm`).
The answer is the exit status of the page. The output of the page is in ``page.log`` beside its
directory. A page that runs again in the same directory may print something else than it shows.
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

PATIENCE_S = 100.0  # for one command
LONGEST_S = 200  # for a page; then it is ended, and its caller gets a signal
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class WrongPageError(Exception):
    """A page contains a wrong statement."""


class Shell:
    """A bash that keeps its directory, variables and jobs between commands.

    The output of each command goes to a file of its own, so that background commands do not write
    into the output of others.
    """

    def __init__(self, beside: Path) -> None:
        self._beside, self._count = beside, 0
        self._bash = subprocess.Popen(["bash", "--norc"], stdin=subprocess.PIPE, text=True)

    def run(self, where: str, command: str, printed: str | None) -> None:
        """Runs a command; compares its output, unless ``printed`` is None.

        A command that ends in ``&`` continues in the background and must print the output later.

        Raises:
            WrongPageError: the command fails, prints something else, or does not end.
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
        """Ends bash; the caller ends its background processes."""
        self._bash.kill()
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait()


def run(page: str, beside: Path, *, again: bool = False) -> None:
    """Runs every block of a page that is meant to run, in this process's working directory.

    The output of the blocks is compared with the page, unless they run ``again``.

    Raises:
        WrongPageError: the page is wrong.
        Exception: raised by a block; its traceback has the lines of the page.
    """
    space = types.ModuleType("__main__")
    sys.modules["__main__"] = space  # the blocks define their names there
    sys.path.insert(0, os.getcwd())  # as for a script, so that files from the page can be imported
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
    # Empty lines above the code let a traceback show the line of the page.
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
    """Prepares the fork: a new session, no input, and output to the log."""
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
    """Serves requests until the input ends; a fork runs one page and then exits normally."""
    import shmbuffer

    for name in ("Coordinator", "attach", "TensorDictPrioritizedReplayBuffer"):
        getattr(shmbuffer, name)
    gc.freeze()  # a page collects its own garbage only
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_a_page(request["page"], Path(request["directory"]), again=request["again"])
            return
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # background processes of the page
        print(status, flush=True)


if __name__ == "__main__":
    main()
