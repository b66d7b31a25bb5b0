"""The C core in a program of its own: compiled under a sanitizer, with faults put in if asked for.

A program is the core's sources that need no Python, and sources of this package. Where a tool is
missing, `missing_tool` says which, for a skip by name.
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
#: By name those that need no Python, but for `crashpoint`: points.h has other crash points.
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
TIMEOUT_S = 300  # a program that still runs then hangs

Counts = dict[str, int]


@dataclass(frozen=True)
class Flavour:
    """A way to build and run a program.

    Attributes:
        flags: of the compiler, for every source and the link.
        settings: environment of the run.
        command: what the program is run by.
        deaths: whether threads may die in it.
        rounds: of the stress program, for a run of about a second.
    """

    flags: tuple[str, ...] = ()
    settings: Mapping[str, str] | None = None
    command: tuple[str, ...] = ()
    deaths: bool = True
    rounds: int = 400


ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Deaths leave memory of the dead thread behind, so leaks are looked for where nobody dies.
FLAVOURS = {
    "plain": Flavour(("-O2",)),
    "thread": Flavour(
        # gcc warns that fences are not known: points.h says what that means.
        ("-O1", "-fsanitize=thread", "-Wno-tsan"),
        {"TSAN_OPTIONS": "halt_on_error=1"},
    ),
    "address": Flavour(
        ADDRESS, {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    ),
    # A program of "address" can be run as one of "leak".
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
    """Names of the cases in corners.c."""
    return re.findall(r'^    \{"(\w+)", \w+\},$', (HERE / "corners.c").read_text(), re.MULTILINE)


class CompileError(Exception):
    """The compiler has refused a source."""


class FoundError(AssertionError):
    """What a program, or what watched it, said against the core; with the command that said so."""


def missing_tool(flavour: str, folder: Path) -> str | None:
    """The name of a tool that this flavour needs and that does not work here."""
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
    """Compile a program into ``folder`` and return its path.

    Args:
        flavour: a name in `FLAVOURS`.
        folder: for the program, and what is compiled of edited sources; exists.
        edits: (source, what stands there once, what shall stand there) of the core, for this
            program alone.
        program: sources of this package.
    """
    flags = ["-std=gnu11", "-g", "-pthread", "-UNDEBUG", "-ffp-contract=off", "-Werror", *WARNINGS]
    flags += [*FLAVOURS[flavour].flags, f"-I{CORE}", f"-I{HERE}"]
    flags += ["-include", str(HERE / "points.h")]
    edited = _edited(folder, edits)
    sources = [path for name, path in SOURCES.items() if name not in edited]
    sources += [HERE / f"{name}.c" for name in program]
    # What counts a source's lines lies beside its object.
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
    """Objects of the sources, in order; where no folder is named, kept in `OBJECTS`.

    There an object is known by its source, all headers and the command: it is compiled once for all
    processes and runs, and removed when the next one of this source and command is made.

    Raises:
        CompileError: with what the compiler says.
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
    """Run a program and return what it counted.

    Raises:
        FoundError: it failed, or what watched it found something.
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
