"""Checks the English of docstrings and comments, as far as a program can.

    python scripts/lib/prose.py                       the package and the other folders in FOLDERS
    python scripts/lib/prose.py shmbuffer/storages    these files and folders

It reads the docstrings and comments of Python files and the comments of C files, and prints one
line for each fault:

* a docstring that begins with a pronoun, a relative clause or "See" instead of a verb or a noun,
  unless it is a question;
* "somebody", "nobody" or "whoever" instead of the process, thread or user;
* a sentence that ends with ", and not Y";
* a sentence of more than 30 words.

Code examples, tables, diagrams, and directives such as ``noqa`` are not read.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("shmbuffer", "tests", "benchmarks", "examples", "scripts")

EXCEPTIONS = {
    ("scripts/lib/prose.py", '* "somebody"'): "the rule names the words",
    ("tests/replay/test_torchrl_functions.py", "What it does."): "TorchRL's docstring is compared",
}
"""Faults that are allowed: the file and the beginning of the sentence, with the reason."""

MOST_WORDS = 30
FIRST_WORDS = re.compile(r"(What|Whether|See|The same|These|Those|They|It|One)(?![\w-])")
PERSONS = re.compile(r"\b(somebody|nobody|whoever)\b", re.IGNORECASE)
CLOSING = re.compile(r", and not [^,;:]*\.$")

ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc)\.")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[\w`*])")
QUOTED = re.compile(r"(`+)[^`]+\1")
ITEM = re.compile(r"\s*([*-] |\d+\. |\*{0,2}[\w`][\w`*., -]{0,60}: )")
DIRECTIVE = re.compile(r"noqa|type: |mypy: |pragma|ruff: |fmt: |!|-\*-|NOLINT|clang-format")
FENCED = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"[─-▿]|\S {3,}\S|^\s*[|+]| \| ", re.MULTILINE)
C_TOKEN = re.compile(
    r"/\*(?P<block>.*?)\*/|//(?P<line>[^\n]*)|\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])*'", re.DOTALL
)


class Fault(NamedTuple):
    """A sentence that has to be rewritten."""

    line: int
    rule: str
    sentence: str


def python_faults(source: str) -> list[Fault]:
    """Returns the faults in the docstrings and comments of a Python file, by line."""
    faults = []
    for line, docstring in docstrings(source):
        summary = docstring.split("\n")[0]
        if (first := FIRST_WORDS.match(summary)) is not None and not summary.endswith("?"):
            faults.append(Fault(line, f'begins with "{first[1]}"', summary))
        faults += prose_faults(line, docstring)
    for line, comment in python_comments(source):
        faults += prose_faults(line, comment)
    return sorted(faults)


def c_faults(source: str) -> list[Fault]:
    """Returns the faults in the comments of a C file, by line."""
    faults = []
    for token in C_TOKEN.finditer(source):
        comment = token["block"] or token["line"]
        if comment and not DIRECTIVE.match(comment.strip()):
            text = re.sub(r"^[ \t]*\* ?", "", comment, flags=re.MULTILINE)
            faults += prose_faults(source.count("\n", 0, token.start()) + 1, text)
    return faults


def prose_faults(line: int, text: str) -> Iterator[Fault]:
    """Yields the faults in the sentences of ``text``, whose first line has the number ``line``."""
    for offset, sentence in sentences(text):
        if (person := PERSONS.search(sentence)) is not None:
            yield Fault(line + offset, f'says "{person[0]}"', sentence)
        if CLOSING.search(sentence) is not None:
            yield Fault(line + offset, 'ends with ", and not ..."', sentence)
        if (count := count_words(sentence)) > MOST_WORDS:
            yield Fault(line + offset, f"has {count} words", sentence)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring, also of those below attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for before, statement in zip([node if owner else None, *body], body, strict=False):
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
                and (before is node or isinstance(before, ast.Assign | ast.AnnAssign))
            ):
                yield statement.lineno, without_indent(statement.value.value)


def without_indent(docstring: str) -> str:
    """Removes the common indentation of a docstring, but no blank lines at its beginning."""
    first, *rest = docstring.expandtabs().split("\n")
    indents = [len(line) - len(line.lstrip()) for line in rest if line.strip()]
    return "\n".join([first.lstrip(), *(line[min(indents, default=0) :] for line in rest)])


def python_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each comment; comments on consecutive lines are one."""
    start, end, column, lines = 0, 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#:").removeprefix(" ")
        if DIRECTIVE.match(text):
            continue
        if lines and token.start == (end + 1, column):
            lines.append(text)
        else:
            if lines:
                yield start, "\n".join(lines)
            start, column, lines = token.start[0], token.start[1], [text]
        end = token.start[0]
    if lines:
        yield start, "\n".join(lines)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yields the sentences of ``text``, each after the number of lines before its paragraph."""
    for offset, paragraph in paragraphs(text):
        joined = ABBREVIATION.sub(r"\1", " ".join(paragraph.split()))
        yield from ((offset, sentence) for sentence in SENTENCE_END.split(joined))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs and list items of ``text``, each after the number of lines before it.

    A line that ends with a colon ends a paragraph. Examples, fenced code, literal blocks after
    ``::``, tables and diagrams are left out.
    """
    number, literal_indent = 0, None
    text = FENCED.sub(lambda code: "\n" * code[0].count("\n"), text)
    for block in re.split(r"\n(?=\s*\n)", text):
        start = number
        number += block.count("\n") + 1
        block = re.split(r"^\s*>>>", block, maxsplit=1, flags=re.MULTILINE)[0]
        lines = block.split("\n")
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        if literal_indent is not None and indent > literal_indent:
            continue
        literal_indent = indent if block.rstrip().endswith("::") else None
        if TABLE.search(block) is not None:
            continue
        offset, paragraph = start, list[str]()
        for line_number, line in enumerate(lines, start):
            if paragraph and (ITEM.match(line) or paragraph[-1].rstrip().endswith(":")):
                yield offset, "\n".join(paragraph)
                paragraph = []
            if not paragraph:
                offset = line_number
            if line.strip():
                paragraph.append(line)
        if paragraph:
            yield offset, "\n".join(paragraph)


def count_words(sentence: str) -> int:
    """Counts the words of a sentence; quoted code is one word, and symbols are none."""
    return sum(any(map(str.isalnum, word)) for word in QUOTED.sub("code", sentence).split())


def sources(places: Iterable[Path]) -> Iterator[Path]:
    """Yields the Python and C files in these files and folders."""
    for place in places:
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        yield from (file for file in files if file.suffix in {".py", ".c", ".h"})


def main(arguments: list[str]) -> int:
    """Prints the faults in FOLDERS, or in ``arguments``; returns 1 if there are any."""
    places = [Path(argument).resolve() for argument in arguments] or [ROOT / one for one in FOLDERS]
    used, count = set(), 0
    for file in sources(places):
        path = str(file.relative_to(ROOT))
        check = python_faults if file.suffix == ".py" else c_faults
        for fault in check(file.read_text()):
            allowed = [e for e in EXCEPTIONS if e[0] == path and fault.sentence.startswith(e[1])]
            used.update(allowed)
            if not allowed:
                count += 1
                print(f"{path}:{fault.line}: {fault.rule}: {fault.sentence}")
    if not arguments:
        for path, sentence in EXCEPTIONS.keys() - used:
            count += 1
            print(f"{path}: has no such fault; remove it from EXCEPTIONS: {sentence}")
    if count:
        print(f"{count} faults; the head of scripts/lib/prose.py has the rules", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
