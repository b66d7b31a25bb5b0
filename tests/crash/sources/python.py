"""Reads the subset of Python in which the memory floor and the saves are written.

A store is an assignment to an item of an array that is not known to be private, or a system call
that changes a directory or a file. A call of the C core that stores is a store too, and has its own
points. Methods are found by the name of the variable on which they are called. The path to an
exception handler is not followed, because the call that raised has not stored anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from tests.crash.sources.flow import Call, Leave, Loop, Point, Step, Store, Try, Ways

#: The classes of variables with these names, in all modules.
CLASSES = {
    "directory": "Directory",
    "_directory": "Directory",
    "files": "Files",
    "backing": "Files",
    "seat": "Seat",
    "_seat": "Seat",
    "membership": "Membership",
    "control": "Control",
    "_control": "Control",
    "registry": "Registry",
    "work": "Work",
    "above": "Directory",
    "target": "Directory",
    "new": "Directory",
    "LivenessFile": "LivenessFile",
    "cls": "Directory",
}
#: Functions that change files or directories. os.open does so if it creates a file.
OS_CALLS = {
    *("mkdir", "makedirs", "unlink", "remove", "rename", "replace", "renames"),
    *("rmdir", "removedirs", "write", "pwrite", "writev", "truncate", "ftruncate"),
    *("posix_fallocate", "chmod", "fchmod", "link", "symlink", "mknod", "mkfifo"),
}
OTHER_CALLS = {("shutil", "rmtree"), ("shutil", "move"), ("tempfile", "mkdtemp")}
PATH_CALLS = {
    *("mkdir", "unlink", "rmdir", "write_text", "write_bytes", "touch", "rename"),
    *("chmod",),
}
#: Attributes that are views of shared memory.
ARRAYS = {"runtime", "entries", "words", "raw", "sources", "extents", "data", "_bytes"}
#: Functions that fill an array, which may be shared.
FILLING = {
    *("fill", "put", "copyto", "pack_into", "memmove", "memset", "itemset"),
    *("setfield",),
}
#: Methods of the C core that store, and the variables on which they are called.
CORE_CALLS = {"reap", "rebuild", "relink", "leave", "format_mutex", "publish"}
CORE = {"_core", "native", "_native"}
#: Names of variables with arrays and dicts that are private to the process.
PRIVATE = {
    *("page", "numbers", "settings", "_memberships", "least", "data"),
    *("sources", "raw", "extents", "folder", "folders", "wrong", "written", "fields"),
    *("self.intakes", "intakes", "self.stack_outtakes", "self._mapped"),
}


def read(paths: Iterable[Path]) -> dict[str, Step]:
    """Reads every function in these modules."""
    return read_texts({path.stem: path.read_text() for path in paths})


def read_texts(texts: dict[str, str]) -> dict[str, Step]:
    found: dict[str, tuple[str, str, ast.FunctionDef]] = {}
    for module, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                found[f"{module}.{node.name}"] = module, module, node
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        found[f"{node.name}.{method.name}"] = module, node.name, method
    known = set(found)
    return {
        name: _Reader(module, owner, known).block(node.body)
        for name, (module, owner, node) in found.items()
    }


class _Reader:
    """Reads one function."""

    def __init__(self, module: str, owner: str, known: set[str]) -> None:
        self.module = module
        self.owner = owner
        self.known = known

    def block(self, body: Iterable[ast.stmt]) -> list[Step]:
        return [self.statement(node) for node in body]

    def statement(self, node: ast.stmt) -> Step:
        match node:
            case ast.If():
                ways = (self.block(node.body), self.block(node.orelse))
                return [self.expression(node.test), Ways(ways)]
            case ast.While():
                test = self.expression(node.test)
                for_ever = isinstance(node.test, ast.Constant)
                return [test, Loop([self.block(node.body), test], once=for_ever)]
            case ast.For():
                return [self.expression(node.iter), Loop(self.block(node.body))]
            case ast.With():
                entered = [self.expression(item.context_expr) for item in node.items]
                body = self.block(node.body)
                suppressed = any("suppress" in ast.unparse(i.context_expr) for i in node.items)
                return [*entered, Try(body, ([],)) if suppressed else body]
            case ast.Try():
                handlers = tuple(self.block(handler.body) for handler in node.handlers)
                body = [self.block(node.body), self.block(node.orelse)]
                return [Try(body, handlers), self.block(node.finalbody)]
            case ast.Match():
                ways = tuple(self.block(case.body) for case in node.cases)
                return [self.expression(node.subject), Ways((*ways, []))]
            case ast.Return():
                return [self.expression(node.value), Leave("return")]
            case ast.Raise():
                return Leave("raise")
            case ast.Break():
                return Leave("break")
            case ast.Continue():
                return Leave("continue")
            case ast.Assign():
                return [self.expression(node.value), *map(self.target, node.targets)]
            case ast.AugAssign(ast.Attribute(attr=name)) if name in ARRAYS:
                return Store(ast.unparse(node), f"{self.module}.py:{node.lineno}")
            case ast.AugAssign() | ast.AnnAssign():
                return [self.expression(node.value), self.target(node.target)]
            case ast.Expr() | ast.Assert() | ast.Delete():
                return [self.expression(child) for child in ast.iter_child_nodes(node)]
            case ast.FunctionDef() | ast.ClassDef():
                return []  # a closure is read where it is called
        return []

    def target(self, node: ast.expr) -> Step:
        match node:
            case ast.Tuple():
                return [self.target(each) for each in node.elts]
            case ast.Subscript():
                root: ast.expr = node
                while isinstance(root, ast.Subscript):
                    root = root.value
                if ast.unparse(root) not in PRIVATE:
                    return Store(ast.unparse(node), f"{self.module}.py:{node.lineno}")
        return []

    def expression(self, node: ast.AST | None) -> Step:
        match node:
            case None | ast.Lambda():
                return []
            case ast.Call():
                before = [self.expression(child) for child in ast.iter_child_nodes(node)]
                return [*before, *self.call(node)]
            case ast.IfExp():
                ways = (self.expression(node.body), self.expression(node.orelse))
                return [self.expression(node.test), Ways(ways)]
            case ast.BoolOp():
                first, *others = map(self.expression, node.values)
                return [first, *(Ways((other, [])) for other in others)]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return Loop([self.expression(child) for child in ast.iter_child_nodes(node)])
        return [self.expression(child) for child in ast.iter_child_nodes(node)]

    def call(self, node: ast.Call) -> list[Step]:
        where = f"{self.module}.py:{node.lineno}"
        match node.func:
            case ast.Attribute(ast.Name("_core"), "reached") | ast.Name("_step"):
                name = node.args[0]
                return [Point(name.value if isinstance(name, ast.Constant) else "")]
            case ast.Name(name):
                return self.of_module(name)
            case ast.Attribute(value, name):
                return self.of_object(value, name, node, where)
        return []

    def of_module(self, name: str) -> list[Step]:
        if f"{name}.__init__" in self.known:
            return [Call(f"{name}.__init__")]
        if f"{self.module}.{name}" in self.known:
            return [Call(f"{self.module}.{name}")]
        elsewhere = [each for each in self.known if each.endswith(f".{name}") and each[0].islower()]
        return [Call(elsewhere[0])] if len(elsewhere) == 1 else []

    def of_object(self, value: ast.expr, name: str, node: ast.Call, where: str) -> list[Step]:
        on = value.attr if isinstance(value, ast.Attribute) else ast.unparse(value)
        text = ast.unparse(node)
        if on == "self" or (on == "cls" and f"{self.owner}.{name}" in self.known):
            on_class = self.owner
        else:
            on_class = CLASSES.get(on, on)
        if f"{on_class}.{name}" in self.known:
            return [Call(f"{on_class}.{name}")]
        creates = "O_CREAT" in text and (
            (on == "os" and name == "open") or (name == "take" and "(os.open, " in text)
        )
        if creates or (on == "os" and name in OS_CALLS) or (on, name) in OTHER_CALLS:
            return [Store(text, where)]
        if (name in PATH_CALLS and on != "os") or name in FILLING:
            return [Store(text, where)]
        if name in CORE_CALLS and (on in CORE or ast.unparse(value).startswith("self._native(")):
            return [Store(text, where), Point("of the core")]
        return []
