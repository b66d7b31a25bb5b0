"""Makes a copy of the repository, applies a patch to it, and compiles it.

Only the sources of the core that a patch changes are compiled. The other objects come from the
sources without the patch, and are shared by all mutants and runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.native.program import compiled

ROOT = Path(__file__).parents[2]
NATIVE = "shmbuffer/_native"
CORE = f"{NATIVE}/_core.abi3.so"
_COPIED = ("shmbuffer", "tests", "docs")
# -O1 takes half the time. -ffp-contract as in setup.py, because tests compare sums exactly.
_FLAGS = ["-std=gnu11", "-O1", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden"]


class DoesNotApplyError(Exception):
    """A patch does not fit these sources, and must be rewritten for the current ones."""


def copy_of_the_repository(into: Path) -> Path:
    """Copies the files that tests of the memory floor need, and the compiled core."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("*.patch"))
    shutil.copy2(ROOT / "pyproject.toml", into)
    return into


def apply(mutant: Mutant, tree: Path) -> None:
    """Changes the copy; raises DoesNotApplyError like `changed`."""
    for file, text in changed(mutant, tree).items():
        (tree / file).write_text(text, "utf-8")


def changed(mutant: Mutant, tree: Path) -> dict[str, str]:
    """Returns the changed text of each file that a mutant changes.

    Raises:
        DoesNotApplyError: the old lines are missing, or occur at several places.
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


def compile_core(mutant: Mutant, tree: Path) -> None:
    """Compiles the sources that the mutant changes in its copy, and links the core.

    Raises:
        CompileError: the compiler failed. The message has its output.
    """
    sources = sorted(str(path.relative_to(tree)) for path in (tree / NATIVE).glob("*/*.c"))
    if any(name.endswith(".h") for name in mutant.files):
        patched = sources
    else:
        patched = [name for name in sources if name in mutant.files]
    include = f"-I{sysconfig.get_path('include')}"
    command = [_compiler(), *_FLAGS, include, "-DPy_LIMITED_API=0x030B0000"]
    linked = compiled([*command, f"-I{tree / NATIVE}"], [tree / name for name in patched], tree)
    others = [ROOT / name for name in sources if name not in patched]
    linked += compiled([*command, f"-I{ROOT / NATIVE}"], others)
    core = tree / CORE
    core.unlink(missing_ok=True)
    subprocess.run([_compiler(), "-shared", "-pthread", *linked, "-o", core], check=True)


def _compiler() -> str:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
