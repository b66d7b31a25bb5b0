"""Reads patch files: what is broken, which rule that breaks, and which tests have to catch it.

A patch file looks like this::

    The second look at a slot word is left out: a copy is kept whatever happened meanwhile.

    Rule: two equal reads of a word mean that nothing happened between them (G2).
    Caught by:
        tests/memory/ring/test_ring.py::test_a_row_that_changed_between_draw_and_copy_is_drawn_again
    Fails with: LockTimeout                         only if the error is not an assertion

    diff --git a/shmbuffer/_native/core/sample.c b/shmbuffer/_native/core/sample.c
    ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

Change = tuple[str, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Mutant:
    """A seeded bug.

    Attributes:
        name: the name of the file, without its number and its suffix.
        path: the patch.
        broken: what is broken, in a sentence or two.
        rule: the rule that the patch removes.
        caught_by: ids of tests, each of which has to fail. An id without parameters stands for all
            cases of the test, of which one failure is enough.
        fails_with: the error that a test may fail with instead of an assertion, or "" for none.
        changes: for each change the file, the old lines, and the new lines.
    """

    name: str
    path: Path
    broken: str
    rule: str
    caught_by: tuple[str, ...]
    fails_with: str
    changes: tuple[Change, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the patch changes."""
        return tuple(dict.fromkeys(file for file, _, _ in self.changes))

    @property
    def touches_the_core(self) -> bool:
        """True if the C core has to be compiled."""
        return any(name.endswith((".c", ".h")) for name in self.files)

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Reads a patch file; raises ValueError if its header is incomplete."""
        header, _, diff = path.read_text("utf-8").partition("diff --git ")
        mutant = cls(
            name=re.sub(r"^\d+-", "", path.stem),
            path=path,
            broken=" ".join(header.partition("Rule:")[0].split()),
            rule=" ".join(_field(header, "Rule").split()),
            caught_by=tuple(line.strip() for line in _field(header, "Caught by").split("\n")),
            fails_with=_field(header, "Fails with"),
            changes=tuple(_changes(diff)),
        )
        for field in ("broken", "rule", "caught_by", "changes"):
            if not any(getattr(mutant, field)):
                raise ValueError(f"{path.name}: its header does not say '{field}'")
        return mutant


def _field(header: str, name: str) -> str:
    found = re.search(rf"^{name}:(.*?)(?=^\S|\Z)", header, re.M | re.S)
    return found[1].strip() if found else ""


def _changes(diff: str) -> Iterator[Change]:
    for part in re.split(r"^diff --git ", diff, flags=re.M):
        head, *hunks = re.split(r"^@@ .*\n", part, flags=re.M)
        file = head.strip().rpartition("\n+++ b/")[2]
        for hunk in hunks:
            lines = hunk.rstrip("\n").split("\n")
            yield (
                file,
                tuple(line[1:] for line in lines if line[:1] in ("-", " ")),
                tuple(line[1:] for line in lines if line[:1] in ("+", " ")),
            )


def mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Returns all mutants, by number."""
    return [Mutant.read(path) for path in sorted(folder.glob("[0-9]*.patch"))]
