"""A copy of the repository that may be broken: made, patched, compiled.

Of the core only what a patch changes is compiled; the other objects are those of the unpatched
sources, which all mutants share.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
NATIVE = "shmbuffer/_native"
CORE = f"{NATIVE}/_core.abi3.so"
_COPIED = ("shmbuffer", "tests", "docs")
# -O1 takes half the time; -ffp-contract as in setup.py: tests compare sums bit by bit.
_FLAGS = ["-std=gnu11", "-O1", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden"]


class DoesNotCompileError(Exception):
    """The compiler has refused a mutant, which shows nothing about the tests."""


class DoesNotApplyError(Exception):
    """A patch is of other sources than these: rewrite it for the current ones."""


def copy_of_the_repository(into: Path) -> Path:
    """What the tests of the memory floor need, with the core that is in place here."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("*.patch"))
    shutil.copy2(ROOT / "pyproject.toml", into)
    return into


def apply(mutant: Mutant, tree: Path) -> None:
    """Changes the copy; DoesNotApplyError as for `changed`."""
    for file, text in changed(mutant, tree).items():
        (tree / file).write_text(text, "utf-8")


def changed(mutant: Mutant, tree: Path) -> dict[str, str]:
    """What a mutant makes of the files that it changes.

    Raises:
        DoesNotApplyError: its lines are not there, or at several places.
    """
    texts = {file: (tree / file).read_text("utf-8").split("\n") for file in mutant.files}
    places: dict[str, list[tuple[int, int, tuple[str, ...]]]] = {file: [] for file in texts}
    for file, old, new in mutant.changes:
        lines, n = texts[file], len(old)
        found = [at for at in range(len(lines)) if tuple(lines[at : at + n]) == old]
        if len(found) != 1:
            shown = "\n".join(old)
            raise DoesNotApplyError(
                f"{mutant.path.name} is of other sources: {file} has these lines {len(found)} "
                f"times, not once:\n{shown}"
            )
        places[file].append((found[0], n, new))
    for file, edits in places.items():
        for at, n, new in sorted(edits, reverse=True):
            texts[file][at : at + n] = new
    return {file: "\n".join(lines) for file, lines in texts.items()}


def compile_core(mutant: Mutant, tree: Path, objects: Path) -> None:
    """Compiles what the mutant changes and links it with the rest.

    Args:
        mutant: what was applied to the copy.
        tree: the copy.
        objects: of the unpatched sources; those that are missing are made.

    Raises:
        DoesNotCompileError: with what the compiler says.
    """
    sources = sorted(path.name for path in (tree / NATIVE).glob("*.c"))
    if any(name.endswith(".h") for name in mutant.files):
        patched = sources
    else:
        patched = [name for name in sources if f"{NATIVE}/{name}" in mutant.files]
    linked = [_compiled(tree / NATIVE / name, tree) for name in patched]
    for name in sources:
        if name not in patched:
            there = objects / Path(name).with_suffix(".o")
            linked.append(there if there.exists() else _compiled(ROOT / NATIVE / name, objects))
    core = tree / CORE
    core.unlink(missing_ok=True)
    _run([_compiler(), "-shared", "-pthread", *map(str, linked), "-o", str(core)])


def _compiled(source: Path, into: Path) -> Path:
    target = into / source.with_suffix(".o").name
    include = f"-I{sysconfig.get_path('include')}"
    macro = "-DPy_LIMITED_API=0x030B0000"
    _run([_compiler(), *_FLAGS, include, macro, "-c", str(source), "-o", str(target)])
    return target


def _compiler() -> str:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DoesNotCompileError(f"{shlex.join(command)}\n{done.stderr}")
