"""Prints every message of the package with its file and line, to be read in a row.

Messages are the texts of raised errors, warnings and log calls, and the help of the command line.
All other strings of more than one word are messages too, such as the labels of ``top``. Docstrings
are left out. The variable parts of an f-string are shown as ``{}``.

    python scripts/lib/messages.py [PATH ...]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
HELP = {"help", "description", "epilog", "metavar", "usage", "title"}


def main(paths: list[str]) -> None:
    """Prints the messages of the Python files below the paths, or of the whole package."""
    for path in map(Path, paths or [str(ROOT / "shmbuffer")]):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for line, kind, text in messages(ast.parse(file.read_text())):
                shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
                print(f"{shown}:{line}: {kind}: {' '.join(text.split())}")


def messages(tree: ast.Module) -> list[tuple[int, str, str]]:
    """Returns the line, the kind and the text of each message, in the order of the source."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = _messages_below(tree, "text", docstrings)
    return sorted(found, key=lambda message: message[0])


def _messages_below(
    node: ast.AST, kind: str, docstrings: set[int]
) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.JoinedStr | ast.Constant):
        text = _text_of(node)
        sentence = kind != "text" or re.search(r"\w\S* +\S*\w", text)
        if id(node) not in docstrings and sentence and re.search(r"[a-z]", text):
            yield node.lineno, kind, text
        if isinstance(node, ast.JoinedStr):  # strings inside the braces are messages too
            for value in node.values:
                if isinstance(value, ast.FormattedValue):
                    yield from _messages_below(value.value, "text", docstrings)
        return
    for child in ast.iter_child_nodes(node):
        yield from _messages_below(child, _kind_of(child, kind), docstrings)


def _kind_of(node: ast.AST, outer: str) -> str:
    if isinstance(node, ast.Raise):
        return "error"
    if isinstance(node, ast.keyword):
        return "help" if node.arg in HELP else "text"
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if called == "warn":
            return "warning"
        if called in LOGGING:
            return "log"
        return outer if outer == "error" and isinstance(node.func, ast.Name) else "text"
    return outer


def _text_of(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        value.value if isinstance(value, ast.Constant) else "{}" for value in node.values
    )


if __name__ == "__main__":
    main(sys.argv[1:])
