"""Splits C into tokens, and finds the brackets, operands and functions among them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_TOKEN = re.compile(
    r"[A-Za-z_]\w*|\d[\w.+]*|->|\+\+|--|<<=|>>=|[-+*/%&|^]=|==|!=|<=|>=|&&|\|\||<<|>>"
    r"|'(?:\\.|[^'])*'|\"\"|\S"
)
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


class Token(str):
    """A token with its line number."""

    __slots__ = ("line",)
    line: int


def tokens(text: str) -> list[Token]:
    """Returns the tokens of a source, without comments, string contents and preprocessor lines."""

    def blank(found: re.Match[str]) -> str:
        return " " + "\n" * found[0].count("\n")

    text = re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.S)
    text = re.sub(r"^[ \t]*#(\\\n|[^\n])*", blank, text, flags=re.M)
    text = re.sub(r"\b(Py_BEGIN_ALLOW_THREADS|Py_END_ALLOW_THREADS)\b", " ", text)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    found, line = [], 1
    for number, content in enumerate(text.split("\n"), line):
        for match in _TOKEN.finditer(content):
            token = Token(match[0])
            token.line = number
            found.append(token)
    return found


def closing(code: list[Token], at: int) -> int:
    """Returns the index of the bracket that closes the one at ``at``."""
    depth = 0
    for end in range(at, len(code)):
        depth += (code[end] in OPEN) - (code[end] in CLOSE)
        if depth == 0:
            return end
    raise SyntaxError(f"line {code[at].line}: {code[at]} is not closed")


def split(code: list[Token], *separators: str) -> list[list[Token]]:
    """Splits code at separators that are not inside brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in code:
        depth += (token in OPEN) - (token in CLOSE)
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def joined(code: Iterable[str]) -> str:
    return re.sub(r"(?<=\w) (?=\W)|(?<=\W) (?=\w)|(?<=\W) (?=\W)", "", " ".join(code))


def operand_before(code: list[Token], at: int) -> list[Token]:
    """Returns the operand that ends at ``at``: names, members, and parts in brackets."""
    begin = at
    while begin and (code[begin - 1] in CLOSE or re.match(r"\w|->|\.", code[begin - 1])):
        begin -= 1
        depth = code[begin] in CLOSE
        while depth:
            begin -= 1
            depth += (code[begin] in CLOSE) - (code[begin] in OPEN)
    return code[begin:at]


def operand_after(code: list[Token], at: int) -> list[Token]:
    """Returns the operand that begins at ``at``."""
    end = at
    while end < len(code) and (code[end] in "([*" or re.match(r"\w|->|\.", code[end])):
        end = closing(code, end) + 1 if code[end] in OPEN else end + 1
    return code[at:end]


def functions(code: list[Token]) -> Iterator[tuple[str, list[Token], list[Token]]]:
    at = 0
    while at < len(code):
        if code[at] in OPEN:
            end = closing(code, at)
            if code[at] == "(" and end + 1 < len(code) and code[end + 1] == "{":
                last = closing(code, end + 1)
                yield code[at - 1], code[at + 1 : end], code[end + 2 : last]
                end = last
            at = end
        at += 1
