"""Builds and runs the C core as a program, under a sanitizer and with faults if requested.

A program consists of the sources of the core that do not need Python, and of sources in this
package. `missing_tool` names a tool that is missing, so that a test can be skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORE = ROOT / "shmbuffer" / "_native"
OBJECTS = ROOT / "build" / "objects"
#: Sources that need no Python, by name. `crashpoint` is left out, because points.h replaces it.
SOURCES = {
    path.stem: path
    for folder in ("core", "tables")
    for path in sorted(CORE.glob(f"{folder}/*.c"))
    if path.stem != "crashpoint"
}
STRESS = ("stress", "world", "writing", "reading", "publishing", "tracking", "taking")
CORNERS = ("corners", "world")
RELINK = ("relink", "world", "writing", "reading")
COMPILER = os.environ.get("CC", "gcc")
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wvla", "-Wno-unused-parameter")
TIMEOUT_S = 300  # a program that runs longer than this hangs

Counts = dict[str, int]


@dataclass(frozen=True)
class Flavour:
    """A way to build and run a program.

    Attributes:
        flags: compiler flags for every source and for linking.
        settings: environment variables of the run.
        command: the command that runs the program.
        deaths: whether threads may die in the program.
        rounds: number of rounds of the stress program in about a second.
    """

    flags: tuple[str, ...] = ()
    settings: Mapping[str, str] | None = None
    command: tuple[str, ...] = ()
    deaths: bool = True
    rounds: int = 400


ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# A dead thread leaks its memory, so leaks are searched only in runs without deaths.
FLAVOURS = {
    "plain": Flavour(("-O2",)),
    "thread": Flavour(
        # gcc warns that it does not support fences. See points.h.
        ("-O1", "-fsanitize=thread", "-Wno-tsan"),
        {"TSAN_OPTIONS": "halt_on_error=1"},
    ),
    "address": Flavour(
        ADDRESS, {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    ),
    # A program that was built for "address" can be run as "leak".
    "leak": Flavour(ADDRESS, {"ASAN_OPTIONS": "detect_leaks=1"}, deaths=False),
    "coverage": Flavour(("-O0", "--coverage", "-fprofile-update=atomic")),
    "valgrind": Flavour(
        ("-O1",),
        command=("valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--fair-sched=yes"),
        deaths=False,
        rounds=64,
    ),
}


def corner_cases() -> list[str]:
    """Returns the names of the cases in corners.c."""
    return re.findall(r'^    \{"(\w+)", \w+\},$', (HERE / "corners.c").read_text(), re.MULTILINE)


class CompileError(Exception):
    """The compiler has rejected a source."""


class FoundError(AssertionError):
    """A program or its sanitizer found a fault in the core. The message has the command."""


def missing_tool(flavour: str, folder: Path) -> str | None:
    """Returns the name of a tool that this flavour needs and that does not work here."""
    chosen = FLAVOURS[flavour]
    if chosen.command and not shutil.which(chosen.command[0]):
        return chosen.command[0]
    source, program = folder / "nothing.c", folder / "nothing"
    source.write_text("int main(void) { return 0; }\n")
    works = subprocess.run(
        [COMPILER, *chosen.flags, str(source), "-o", str(program)], capture_output=True
    )
    if (
        works.returncode
        or subprocess.run([*chosen.command, program], capture_output=True).returncode
    ):
        return f"{COMPILER} {' '.join(chosen.flags)}"
    return None


def build(
    flavour: str,
    folder: Path,
    edits: Iterable[tuple[str, str, str]] = (),
    program: tuple[str, ...] = STRESS,
) -> Path:
    """Compiles a program into ``folder`` and returns its path.

    Args:
        flavour: a name in `FLAVOURS`.
        folder: existing folder for the program and for objects of edited sources.
        edits: changes of the core for this program only, as (source, old text that occurs once,
            new text).
        program: sources of this package.
    """
    flags = ["-std=gnu11", "-g", "-pthread", "-UNDEBUG", "-ffp-contract=off", "-Werror", *WARNINGS]
    flags += [*FLAVOURS[flavour].flags, f"-I{CORE}", f"-I{HERE}"]
    flags += ["-include", str(HERE / "points.h")]
    edited = _edited(folder, edits)
    sources = [path for name, path in SOURCES.items() if name not in edited]
    sources += [HERE / f"{name}.c" for name in program]
    # The counters of a source are written beside its object.
    counted = folder if flavour == "coverage" else None
    objects = compiled([COMPILER, *flags], sources, counted)
    objects += compiled([COMPILER, *flags], edited.values(), folder)
    built = folder / "-".join([program[0], *sorted(edited)])
    command = [
        COMPILER,
        *FLAVOURS[flavour].flags,
        "-pthread",
        *map(str, objects),
        "-lm",
        "-o",
        str(built),
    ]
    subprocess.run(command, check=True)
    return built


def compiled(command: list[str], sources: Iterable[Path], folder: Path | None = None) -> list[Path]:
    """Returns the objects of the sources, in order; without a folder, they are kept in `OBJECTS`.

    There an object is identified by its source, all headers and the command. It is compiled once
    for all processes and runs. It is removed when a newer object of the same source and command is
    made.

    Raises:
        CompileError: the compiler failed. The message has its output.
    """
    headers = b"".join(
        path.read_bytes() for path in sorted([*CORE.rglob("*.h"), *HERE.glob("*.h")])
    )
    objects, running = [], []
    for source in sources:
        said = repr([*command, str(source)]).encode()
        name = f"{source.stem}-{hashlib.sha256(said).hexdigest()[:16]}"
        text = hashlib.sha256(headers + source.read_bytes()).hexdigest()[:16]
        kept = OBJECTS / f"{name}-{text}.o"
        objects.append(folder / f"{source.stem}.o" if folder else kept)
        if folder or not kept.exists():
            objects[-1].parent.mkdir(parents=True, exist_ok=True)
            for old in OBJECTS.glob(f"{name}-*.o") if not folder else ():
                old.unlink(missing_ok=True)
            made = objects[-1].with_suffix(f".{os.getpid()}")
            full = [*command, "-c", str(source), "-o", str(made)]
            running.append(
                (full, made, objects[-1], subprocess.Popen(full, stderr=subprocess.PIPE))
            )
    for full, made, target, process in running:
        _, complaint = process.communicate()
        if process.returncode:
            raise CompileError(f"{shlex.join(full)}\n{complaint.decode()}")
        made.replace(target)
    return objects


def _edited(folder: Path, edits: Iterable[tuple[str, str, str]]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, before, after in edits:
        path = folder / f"edited-{name}" / f"{name}.c"
        text = (found.get(name) or SOURCES[name]).read_text()
        if text.count(before) != 1:
            raise ValueError(f"{name}.c has {text.count(before)} times: {before}")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace(before, after))
        found[name] = path
    return found


def run(flavour: str, program: Path, *options: str) -> Counts:
    """Runs a program and returns its counts.

    Raises:
        FoundError: the program failed, or its sanitizer found a fault.
    """
    chosen = FLAVOURS[flavour]
    command = [*chosen.command, str(program), *options]
    done = subprocess.run(
        command,
        env=os.environ | dict(chosen.settings or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        said = done.stderr[:6000]
        raise FoundError(f"{' '.join(command)}: exit status {done.returncode}\n{said}{done.stdout}")
    counts: Counts = json.loads(done.stdout)
    return counts
