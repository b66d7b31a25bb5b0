"""Reads the subset of C in which the core is written, and turns functions into steps of `flow`.

A store is an assignment, an atomic operation or a memcpy whose target is reached through a pointer
to shared memory, which has one of the types or members below. A pointer that is derived from such a
pointer is followed as long as it is a local variable. Reading fails if it is passed to another
function, because it could not be followed there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from tests.crash.sources.c_tokens import (
    CLOSE,
    OPEN,
    Token,
    closing,
    functions,
    joined,
    operand_after,
    operand_before,
    split,
    tokens,
)
from tests.crash.sources.flow import Call, Goto, Label, Leave, Loop, Point, Step, Store, Ways

#: A pointer to one of these types points to shared memory.
SHARED_TYPES = (
    *("shmb_runtime", "shmb_limiter", "shmb_entry", "shmb_record", "shmb_extent"),
    *("shmb_weights", "shmb_stamp", "shmb_ages", "shmb_reservation"),
    *("shmb_ledger", "shmb_consumer", "shmb_lease", "shmb_delivery"),
)
#: Members of private structs that point to shared memory.
SHARED_MEMBERS = "words|checksums|sources|raw|extents|mass|nexts|holders|reservations"
SHARED_MEMBERS += "|leases|deliveries|consumers|node_sums|node_leasts"
TREE_LEVELS = "sum|min"
_SHARED = re.compile(
    rf"(->|\.)({SHARED_MEMBERS})\[|(->|\.)({TREE_LEVELS})\[[^]]*\]\[|(->|\.)entries\["
    r"|(->|\.)(runtime|me|ledger|consumer)->|\b(header_at|shmb_record_at)\("
)
_LEADS_THERE = re.compile(
    rf"(->|\.)({SHARED_MEMBERS}|base|copies|runtime|me|entries|bytes|own_rows|ledger)\b(?!->)"
    r"|\b(header_at|shmb_record_at)\("
)
#: Functions that store to the memory at their first argument.
MOVES = ("memcpy", "memset", "memmove", "shmb_crc32c_move", "shmb_crc32c_copy")
#: Functions that store to the mutex. The stores of glibc and the kernel count as one.
MUTEX_CALLS = ("pthread_mutex_unlock", "pthread_mutex_consistent", "pthread_mutex_init")
MUTEX = ("&ring->runtime->mutex", "&runtime->mutex", "mutex")
LOCK = "lock"

_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}


def read(paths: Iterable[Path]) -> dict[str, Step]:
    """Reads every function in these sources."""
    return read_texts({path.name: path.read_text() for path in paths})


def private_targets(paths: Iterable[Path]) -> set[str]:
    """Returns the variables and members through which private memory is stored to."""
    private: set[str] = set()
    read_texts({path.name: path.read_text() for path in paths}, private)
    return private


def read_texts(texts: dict[str, str], private: set[str] | None = None) -> dict[str, Step]:
    found = {name: list(functions(tokens(text))) for name, text in texts.items()}
    known = {function for each in found.values() for function, _, _ in each}
    return {
        function: _Reader(name, parameters, known, private).function(body)
        for name, each in found.items()
        for function, parameters, body in each
    }


class _Reader:
    """Reads one function."""

    def __init__(
        self, file: str, parameters: list[Token], known: set[str], private: set[str] | None
    ) -> None:
        self.file = file
        self.known = known
        self.private = private
        self.shared: set[str] = set()
        for parameter in split(parameters, ","):
            self._declared(parameter)

    def function(self, body: list[Token]) -> Step:
        return self._block(body)

    def _block(self, code: list[Token]) -> list[Step]:
        steps: list[Step] = []
        at = 0
        while at < len(code):
            step, at = self._statement(code, at)
            steps.append(step)
        return steps

    def _statement(self, code: list[Token], at: int) -> tuple[Step, int]:
        match code[at]:
            case "{":
                end = closing(code, at)
                return self._block(code[at + 1 : end]), end + 1
            case "if":
                end = closing(code, at + 1)
                before = self._expression(code[at + 2 : end])
                then, at = self._statement(code, end + 1)
                other: Step = []
                if at < len(code) and code[at] == "else":
                    other, at = self._statement(code, at + 1)
                return [before, Ways((then, other))], at
            case "while":
                end = closing(code, at + 1)
                before = self._expression(code[at + 2 : end])
                body, at = self._statement(code, end + 1)
                return [before, Loop([body, before])], at
            case "for":
                end = closing(code, at + 1)
                first, until, after = split(code[at + 2 : end], ";")
                begin, test = self._expression(first), self._expression(until)
                follow = self._expression(after)
                body, at = self._statement(code, end + 1)
                return [begin, test, Loop([body, follow, test])], at
            case "do":
                body, at = self._statement(code, at + 1)
                end = closing(code, at + 1)
                return Loop([body, self._expression(code[at + 2 : end])], once=True), end + 2
            case "switch":
                end = closing(code, at + 1)
                last = closing(code, end + 1)
                return self._switch(code[at + 2 : end], code[end + 2 : last]), last + 1
        end = at
        while end < len(code) and code[end] != ";":
            end = closing(code, end) + 1 if code[end] in OPEN else end + 1
            if code[end - 1] == ":" and end == at + 2:
                return Label(code[at]), end
        return self._simple(code[at:end]), end + 1

    def _simple(self, code: list[Token]) -> Step:
        match code[:1]:
            case ["return"]:
                return [self._expression(code[1:]), Leave("return")]
            case ["break" | "continue"]:
                return Leave(code[0])
            case ["goto"]:
                return Goto(code[1])
        return self._expression(code)

    def _switch(self, value: list[Token], code: list[Token]) -> Step:
        cases: list[list[Step]] = [[]]
        at = 0
        while at < len(code):
            if code[at] in ("case", "default"):
                while code[at] != ":":
                    at += 1
                cases.append([])
                at += 1
                continue
            step, at = self._statement(code, at)
            cases[-1].append(step)
        ways: list[Step] = [list(chain(*cases[first:])) for first in range(len(cases))]
        return [self._expression(value), Loop(Ways((*ways, Leave("break"))), once=True)]

    # Expressions: what is evaluated, in order

    def _expression(self, code: list[Token]) -> list[Step]:
        steps: list[Step] = []
        for part in split(code, ","):
            steps += self._assignment(part)
        return steps

    def _assignment(self, code: list[Token]) -> list[Step]:
        depth = 0
        for at, token in enumerate(code):
            depth += (token in OPEN) - (token in CLOSE)
            if depth == 0 and token in _ASSIGN:
                left, right = code[:at], code[at + 1 :]
                if self._declared(left, right):
                    return self._conditional(right)
                steps = [*self._conditional(right), *self._operands(left)]
                return [*steps, *self._stores(code, left)]
        self._declared(code)
        return self._conditional(code)

    def _conditional(self, code: list[Token]) -> list[Step]:
        if len(parts := split(code, "?")) > 1:
            rest = code[len(parts[0]) + 1 :]
            then, *other = split(rest, ":")
            alternatives = (self._expression(then), *map(self._expression, other))
            return [*self._conditional(parts[0]), Ways(alternatives)]
        first, *others = split(code, "&&", "||")
        steps = self._operands(first)
        for other in others:
            steps.append(Ways((self._operands(other), [])))
        return steps

    def _operands(self, code: list[Token]) -> list[Step]:
        steps: list[Step] = []
        at = 0
        while at < len(code):
            token = code[at]
            if token in OPEN:
                end = closing(code, at)
                inner = code[at + 1 : end]
                steps += self._expression(inner)
                if token == "(" and at and re.fullmatch(r"[a-zA-Z_]\w*", code[at - 1]):
                    steps += self._call(code[at - 1], split(inner, ","))
                at = end
            at += 1
        for at, token in enumerate(code):
            if token in ("++", "--"):
                steps += self._stores(code, operand_before(code, at) or operand_after(code, at + 1))
        return steps

    def _call(self, name: Token, arguments: list[list[Token]]) -> list[Step]:
        where = f"{self.file}:{name.line}"
        if name in ("CP", "CP_ROW"):
            return [Point(arguments[-1][0])]
        first = arguments[0]
        if re.match(r"(__)?atomic_(store|fetch|exchange|compare|init)", name):
            target = first[1:] if first[0] == "&" else [Token("*"), *first]
            is_shared = self._stores(first, target)
            return [Store(f"{joined(first)} ({name})", where)] if is_shared else []
        if name in MOVES:
            there = _SHARED.search(joined(first)) or _LEADS_THERE.search(joined(first))
            if there or self.shared.intersection(first):
                return [Store(f"{name} to {joined(first)}", where)]
            return []
        if name in MUTEX_CALLS:
            return [Store(name, where)] if joined(first) in MUTEX else []
        if name in self.known:
            for argument in arguments:
                self._require_followed(name, argument, where)
            follows = [Store("the mutex is taken", where)] if name == LOCK else []
            return [Call(name), *follows]
        return []

    def _require_followed(self, name: str, argument: list[Token], where: str) -> None:
        text = joined(argument)
        bare = re.search(
            rf"(->|\.)({SHARED_MEMBERS}|base|{TREE_LEVELS})(\b(?!\[)|\[[^]]*\]$)", text
        )
        if (bare and text.startswith("&")) or re.search(rf"(->)({SHARED_MEMBERS})$", text):
            raise NotImplementedError(f"{where}: {text} is handed to {name}, which is not followed")

    def _stores(self, code: list[Token], target: list[Token]) -> list[Step]:
        """Returns the store to ``target`` if the target is shared."""
        if self._is_shared(target):
            return [Store(joined(target), f"{self.file}:{code[0].line}")]
        names = [token for token in target if re.fullmatch(r"[a-zA-Z_]\w*", token)]
        if self.private is not None and names and {"->", ".", "*"} & set(target):
            self.private.add(names[0])
        return []

    def _declared(self, left: list[Token], right: list[Token] | None = None) -> bool:
        """True if this declares a variable; notes whether the variable points to shared memory."""
        names = [token for token in left if re.fullmatch(r"[a-zA-Z_]\w*", token)]
        if left and left[0] == "*" and right is not None:
            return False
        kinds = len(names) > 1 and left[1] in ("*", names[1]) and not {"->", ".", "("} & set(left)
        is_pointer = "*" in left
        if kinds and is_pointer and "const" not in names:
            of_type = any(kind in names for kind in SHARED_TYPES)
            from_there = right is not None and _LEADS_THERE.search(joined(right))
            if of_type or from_there:
                self.shared.add(names[-1])
        if not kinds and right and len(left) == 1 and _LEADS_THERE.search(joined(right)):
            self._require_no_pointer(left[0], right)
        return kinds

    def _require_no_pointer(self, name: Token, right: list[Token]) -> None:
        whole = joined(right)
        if re.fullmatch(rf"&?ring->({SHARED_MEMBERS}|bytes|runtime|me|entries)", whole):
            raise NotImplementedError(f"{self.file}:{name.line}: {name} = {whole} is not followed")

    def _is_shared(self, left: list[Token]) -> bool:
        text = joined(left)
        if _SHARED.search(text):
            return not re.search(r"->(runtime|me)$", text)
        names = [token for token in left if re.fullmatch(r"[a-zA-Z_]\w*", token)]
        behind = "->" in left or "[" in left or "*" in left
        return bool(names) and names[0] in self.shared and behind
