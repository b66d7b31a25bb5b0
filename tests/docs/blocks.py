"""Reads the code blocks of a Markdown page, as the tests run them.

    ```python                     runs; the blocks of a page share one namespace
    ```python title="learn.py"    is written to that file, for a command of the page to run
    ```console                    "$ " begins a command for bash; below it is what it prints
    ```bash                       runs in bash
    ```text                       what the Python block before it prints

Output is compared as doctest compares it: "..." matches anything, and all white space is equal.
Blocks without a language or with another one are not run, nor are blocks after a line ``<!-- not
run: the reason -->``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"(?P<marks>```+)(?P<language>[\w-]*)(?P<rest>.*)")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->")
RUNS = ("python", "console", "bash")


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        page: path of the file relative to the root of the repository.
        line: number of its first line of code, counted from 1.
        language: the language after the fence.
        title: name of the file that the block is written to, if any.
        code: the lines of the block.
        not_run: the reason why the block is not run, if any.
        prints: content of the ``text`` block that belongs to it.
    """

    page: str
    line: int
    language: str
    title: str | None
    code: str
    not_run: str | None
    prints: str | None = None

    @property
    def commands(self) -> list[tuple[int, str, str]]:
        """Returns line, command and output of each command in a ``console`` block."""
        found: list[tuple[int, str, str]] = []
        for number, line in enumerate(self.code.splitlines(keepends=True), self.line):
            if line.startswith("$ "):
                found.append((number, line[2:].rstrip("\n"), ""))
            elif not found:
                raise ValueError(f"{self.page}:{number}: output before the first command")
            elif line.startswith("> "):
                at, command, _ = found[-1]
                found[-1] = (at, command + "\n" + line[2:].rstrip("\n"), "")
            else:
                at, command, printed = found[-1]
                found[-1] = (at, command, printed + line)
        return found


def pages() -> list[str]:
    """Returns every page of the documentation, relative to the root of the repository."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
    return ["README.md", "benchmarks/README.md", *docs]


def blocks_of(page: str) -> list[Block]:
    """Returns the blocks of a page in order.

    A ``text`` block is part of the block that prints it.
    """
    found: list[Block] = []
    lines = (ROOT / page).read_text().splitlines(keepends=True)
    number, last = 0, ""
    while number < len(lines):
        opening = FENCE.fullmatch(lines[number].rstrip("\n"))
        if opening is None:
            last = lines[number].strip() or last
            number += 1
            continue
        end = next(
            (n for n in range(number + 1, len(lines)) if lines[n].rstrip() == opening["marks"]),
            None,
        )
        if end is None:
            raise ValueError(f"{page}:{number + 1}: a block without an end")
        marker, title = NOT_RUN.fullmatch(last), re.search(r'title="(.+?)"', opening["rest"])
        block = Block(
            page=page,
            line=number + 2,
            language=opening["language"],
            title=title and title[1],
            code="".join(lines[number + 1 : end]),
            not_run=marker and marker["reason"],
        )
        if block.language == "text" and block.not_run is None:
            found.append(_printing(found, block))
        else:
            found.append(block)
        number, last = end + 1, ""
    return found


def _printing(found: list[Block], text: Block) -> Block:
    """Removes the last block from ``found`` and returns it with its output."""
    if not found or found[-1].language != "python" or found[-1].title or found[-1].prints:
        raise ValueError(f"{text.page}:{text.line}: nothing before this text prints it")
    before = found.pop()
    return Block(**{**vars(before), "prints": text.code})
