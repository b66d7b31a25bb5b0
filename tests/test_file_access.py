"""Files are created, replaced and removed by one module, and readers of saves never block.

The sources are read but not run. `shmbuffer.saves.safe_files` and the modules below it
(`shmbuffer.memory.system`, with its class `Directory`) create and remove files for all other
modules. A call of a method of our own classes is checked where the method is defined. The type of
the object is derived from annotations and assignments. An object of unknown type is refused like a
system call.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "shmbuffer"
EXEMPT = ("shmbuffer.memory.system", "shmbuffer.saves.safe_files")

#: The folders that read files of other users: saves, exports and data sets.
READERS = tuple(
    f"shmbuffer.{room}."
    for room in (
        *("buffers", "datasets", "ensembles", "samplers", "saves", "storages", "tensors"),
        *("torchrl", "units", "writers"),
    )
)

_NEW = "writes into a directory that `publish` has just made, and that no other user can reach"
_CHECKED = "the file was opened by `open_file` before, so it is a regular one"
_ANONYMOUS = "memory without a name in any directory"

#: Module, function and call of each line that may create, change or read files otherwise.
ALLOWED = {
    ("shmbuffer.cli", "_run", "os.open"): "the null device, in the place of a closed pipe",
    ("shmbuffer.memory.directory.anonymous", "Anonymous.create", "os.ftruncate"): _ANONYMOUS,
    ("shmbuffer.memory.directory.anonymous", "Anonymous.build", "os.ftruncate"): _ANONYMOUS,
    ("shmbuffer.memory.directory.anonymous", "_JoinLock.__enter__", "os.open"): _ANONYMOUS,
    (
        *("shmbuffer.saves.checkpointers.record_image", "RecordImage.in_memory", "os.ftruncate"),
    ): _ANONYMOUS,
    (
        *("shmbuffer.memory.clients.partials", "PartialFile._truncate", "os.ftruncate"),
    ): "a file that `Directory` has opened, and that this process has locked",
    ("shmbuffer.saves.checkpointers.copies", "make_columns", "truncate"): (
        "a file that `create_file` or `unnamed_file` has just made"
    ),
    (
        "shmbuffer.saves.checkpointers.tensor_checkpointer",
        "TensorStorageCheckpointer._write",
        "memmap",
    ): _NEW,
    (
        "shmbuffer.saves.checkpointers.tensor_checkpointer",
        "TensorStorageCheckpointer._read",
        "load_memmap",
    ): ("`require_plain` has looked at the directory before"),
    ("shmbuffer.storages.tensor", "TensorStorage._storage", "load_memmap"): (
        "the directory of a buffer that this handle has open, and has checked"
    ),
    (
        *(
            "shmbuffer.saves.checkpointers.episode_checkpointers",
            "H5StorageCheckpointer._write_file",
        ),
        "h5py.File",
    ): _NEW,
    (
        *(
            "shmbuffer.saves.checkpointers.episode_checkpointers",
            "H5StorageCheckpointer._write_file",
        ),
        "from_h5",
    ): _NEW,
    (
        *("shmbuffer.saves.checkpointers.episode_checkpointers", "H5StorageCheckpointer._read"),
        "from_h5",
    ): _CHECKED,
    (
        *("shmbuffer.saves.checkpointers.episode_checkpointers", "H5StorageCheckpointer._record"),
        "h5py.File",
    ): _CHECKED,
    ("shmbuffer.torchrl.compat.buffer_files", "write_generator", "memmap"): _NEW,
    ("shmbuffer.torchrl.compat.sampler_files", "_write_numbers", "memmap"): _NEW,
    ("shmbuffer.datasets.converted", "_write", "memmap_like"): _NEW,
    ("shmbuffer.saves.export", "_hdf5", "h5py.File"): _NEW,
    ("shmbuffer.saves.parquet_file", "write_rows", "ParquetWriter"): _NEW,
    ("shmbuffer.saves.parquet_file", "_open", "ParquetFile"): (
        "`require_plain` has looked at the file before"
    ),
    ("shmbuffer.torchrl.ted.flat", "TED2Flat._write", "memmap_"): _NEW,
    ("shmbuffer.torchrl.ted.flat", "_make_tensor", "make_memmap"): _NEW,
}


# -- what is refused -------------------------------------------------------------------------------

CREATING = {
    "os": "mkdir makedirs mknod mkfifo rename renames replace unlink remove rmdir removedirs "
    "symlink link truncate ftruncate creat",
    "shutil": "copy copy2 copyfile copytree move rmtree",
    "tempfile": "mkdtemp mkstemp TemporaryDirectory NamedTemporaryFile TemporaryFile "
    "SpooledTemporaryFile",
    "numpy": "save savez savez_compressed savetxt",
    "torch": "save",
    "pyarrow.parquet": "ParquetWriter write_table write_to_dataset",
    "zipfile": "ZipFile",
    "tarfile": "open",
    "sqlite3": "connect",
    "logging": "FileHandler",
}
READING = {
    "numpy": "load memmap fromfile loadtxt genfromtxt",
    "numpy.lib.format": "open_memmap",
    "torch": "load",
    "pyarrow.parquet": "ParquetFile read_table read_schema read_metadata",
}
CREATES = {f"{module}.{name}" for module, names in CREATING.items() for name in names.split()}
READS = {f"{module}.{name}" for module, names in READING.items() for name in names.split()}
OPENS = {"builtins.open", "io.open", "os.fdopen", "gzip.open", "bz2.open", "lzma.open"}

#: Methods of paths, files, arrays, TensorDicts and figures.
CREATING_METHODS = {
    *("write_text", "write_bytes", "mkdir", "rename", "rmdir", "unlink", "symlink_to"),
    *("hardlink_to", "touch", "truncate", "tofile", "to_h5", "savefig", "memmap", "memmap_"),
    *("memmap_like", "make_memmap", "make_memmap_from_tensor", "make_memmap_from_storage"),
    "ParquetWriter",
}
READING_METHODS = {"read_bytes", "read_text", "load_memmap", "from_h5", "ParquetFile"}
_LAST_NAMES = {each.rpartition(".")[2] for each in CREATES | READS | OPENS} | {
    *CREATING_METHODS,
    *READING_METHODS,
    *("File", "replace"),
}
_WRITING_FLAGS = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR | os.O_APPEND
_WITHOUT_WAITING = os.O_NONBLOCK | os.O_DIRECTORY | os.O_PATH


@dataclass(frozen=True)
class Finding:
    """A call that creates, changes or removes a file, or reads one in a way that can block."""

    module: str
    function: str
    call: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.call} {self.why}"

    @property
    def row(self) -> tuple[str, str, str]:
        return self.module, self.function, self.call


# -- what an expression is -------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """The known properties of an expression's value.

    ``kind`` is "module", "class", "function", "instance" or "outside". An "instance" is of a class
    of the package, and "outside" is a name from another package. The result of a call of such a
    name is "made". An iterable or a context manager that yields ``inner`` is "many".
    """

    kind: str
    name: str = ""
    inner: Value | None = None
    node: Any = None
    """The definition of a function."""


class Module:
    """The names in one module."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.tree = ast.parse(source)
        self.imports: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.imports[alias.asname or target] = target
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self.definitions: dict[str, Any] = {}
        self.constants: dict[str, ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.definitions[node.name] = node
            for target, value in _bindings(node):
                if isinstance(target, ast.Name):
                    self.constants[target.id] = value


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the targets of an assignment with their values."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            values = node.value
            if isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple):
                yield from zip(target.elts, values.elts, strict=False)
            elif isinstance(target, ast.Tuple):
                yield from ((each, ast.Constant(...)) for each in target.elts)  # unknown values
            else:
                yield target, values
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


class Sources:
    """The modules of the package, and the values of expressions in them."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.modules = {name: Module(name, source) for name, source in sources.items()}
        self._scopes: dict[int, dict[str, list[Any]]] = {}
        self._attributes: dict[tuple[str, str], Value | None] = {}
        self._busy: set[Any] = set()

    # -- names

    def named(self, dotted: str) -> Value:
        """Returns the value of a dotted name in any package."""
        if dotted in self.modules:
            return Value("module", dotted)
        above, _, last = dotted.rpartition(".")
        if above not in self.modules:
            return Value("outside", dotted)
        return self.global_name(self.modules[above], last) or Value("unknown", dotted)

    def global_name(self, module: Module, name: str) -> Value | None:
        node = module.definitions.get(name)
        if isinstance(node, ast.ClassDef):
            return Value("class", f"{module.name}.{name}")
        if node is not None:
            return Value("function", module.name, node=node)
        if name in module.imports and module.imports[name] != f"{module.name}.{name}":
            return self.named(module.imports[name])
        if name in module.constants:
            return self.guarded((module.name, name), module.constants[name], Scope(self, module))
        return Value("outside", f"builtins.{name}") if name == "open" else None

    def guarded(self, key: Any, node: ast.expr, scope: Scope) -> Value | None:
        """Returns the value of an expression, or None if it depends on itself."""
        if key in self._busy:
            return None
        self._busy.add(key)
        try:
            return scope.value(node)
        finally:
            self._busy.discard(key)

    # -- classes

    def class_of(self, name: str) -> tuple[Module, ast.ClassDef]:
        above, _, last = name.rpartition(".")
        return self.modules[above], self.modules[above].definitions[last]

    def attribute(self, owner: str, name: str) -> Value | None:
        """Returns an attribute, property or method of an instance of a class of the package."""
        if (owner, name) not in self._attributes:
            self._attributes[owner, name] = None  # for an attribute that depends on itself
            self._attributes[owner, name] = self._find_attribute(owner, name)
        return self._attributes[owner, name]

    def _find_attribute(self, owner: str, name: str) -> Value | None:
        module, node = self.class_of(owner)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and _is_name(each.target, name):
                return self.annotated(module, each.annotation, owner)
            if isinstance(each, ast.FunctionDef) and each.name == name:
                method = Value("function", module.name, Value("instance", owner), each)
                decorators = {ast.unparse(one) for one in each.decorator_list}
                is_property = bool(decorators & {"property", "cached_property"})
                return self.result(method) if is_property else method
        for method in (each for each in node.body if isinstance(each, ast.FunctionDef)):
            scope = Scope(self, module, owner, (method,))
            for each in ast.walk(method):
                if isinstance(each, ast.AnnAssign) and _is_attribute(each.target, name):
                    return self.annotated(module, each.annotation, owner)
                for target, value in _bindings(each):
                    if _is_attribute(target, name) and not _is_none(value):
                        return scope.value(value)
        for base in node.bases:
            above = Scope(self, module).value(base)
            if above is not None and above.kind == "class":
                found = self.attribute(above.name, name)
                if found is not None:
                    return found
        return None

    # -- annotations

    def annotated(self, module: Module, node: ast.expr | None, owner: str = "") -> Value | None:
        """Returns the value that an annotation describes."""
        match node:
            case ast.BinOp(left=left, right=right):
                return self.annotated(module, left, owner) or self.annotated(module, right, owner)
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return self.annotated(module, inner, owner)
            case ast.Subscript(value=base, slice=inner):
                whole = self.annotated(module, base, owner)
                if whole is not None and whole.kind == "instance":
                    return whole
                first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
                return Value("many", inner=self.annotated(module, first, owner))
            case ast.Name(id="Self") if owner:
                return Value("instance", owner)
            case ast.Name() | ast.Attribute():
                found = Scope(self, module).value(node)
                if found is not None and found.kind == "class":
                    return Value("instance", found.name)
                if found is not None and found.kind == "outside":
                    return Value("made", found.name)
        return None

    def result(self, function: Value) -> Value | None:
        """Returns the value that a function of the package returns."""
        owner = "" if function.inner is None else function.inner.name
        return self.annotated(self.modules[function.name], function.node.returns, owner)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_attribute(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and _is_name(node.value, "self")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


@dataclass(frozen=True)
class Scope:
    """The names visible in a function: its own, those of enclosing functions and of the module."""

    sources: Sources
    module: Module
    owner: str = ""
    functions: tuple[Any, ...] = ()
    """The enclosing functions, outermost first."""

    def value(self, node: ast.expr) -> Value | None:
        """Returns the value of an expression, or None if it is not known."""
        sources = self.sources
        match node:
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(self.value(inner), name)
            case ast.Call(func=ast.Attribute(attr="enter_context"), args=[entered]):
                return self.entered(entered)
            case ast.Call(func=function):
                called = self.value(function)
                if called is None:
                    return None
                if called.kind == "class":
                    return Value("instance", called.name)
                if called.kind == "outside":
                    return Value("made", called.name)
                return sources.result(called) if called.kind == "function" else None
            case ast.IfExp(body=body, orelse=other) | ast.BoolOp(values=[body, *_, other]):
                return self.value(body) or self.value(other)
            case ast.NamedExpr(value=inner):
                return self.value(inner)
            case ast.Subscript(value=inner):
                found = self.value(inner)
                return found.inner if found is not None and found.kind == "many" else None
        return None

    def entered(self, node: ast.expr) -> Value | None:
        """Returns the value that `with` binds for an expression."""
        found = self.value(node)
        if found is None or found.kind == "many":
            return None if found is None else found.inner
        if found.kind == "instance":
            method = self.sources.attribute(found.name, "__enter__")
            if method is not None and method.kind == "function":
                return self.sources.result(method) or found
        return found

    def _attribute(self, found: Value | None, name: str) -> Value | None:
        if found is None:
            return None
        match found.kind:
            case "outside":
                return Value("outside", f"{found.name}.{name}")
            case "module":
                return self.sources.named(f"{found.name}.{name}")
            case "class" | "instance":
                return self.sources.attribute(found.name, name)
        return None

    def _name(self, name: str) -> Value | None:
        for depth in range(len(self.functions), 0, -1):
            function = self.functions[depth - 1]
            inner = Scope(self.sources, self.module, self.owner, self.functions[:depth])
            if bound := inner._bound(function).get(name):
                values = []
                for at, (kind, node) in enumerate(bound):
                    if kind == "value" and _is_none(node):
                        continue
                    key = (id(function), name, at)
                    if key in self.sources._busy:
                        return None
                    self.sources._busy.add(key)
                    try:
                        values.append(inner._of(kind, node))
                    finally:
                        self.sources._busy.discard(key)
                return values[0] if len({*values}) == 1 else None
        return self.sources.global_name(self.module, name)

    def _of(self, kind: str, node: Any) -> Value | None:
        match kind:
            case "self":
                return Value("instance", self.owner)
            case "cls":
                return Value("class", self.owner)
            case "annotation":
                return self.sources.annotated(self.module, node, self.owner)
            case "value":
                return self.value(node)
            case "with":
                return self.entered(node)
            case "item":
                found = self.value(node)
                return found.inner if found is not None and found.kind == "many" else None
        return None

    def _bound(self, function: Any) -> dict[str, list[Any]]:
        """Returns the names that a function binds, with the expressions that are bound to each."""
        if (found := self.sources._scopes.get(id(function))) is not None:
            return found
        bound: dict[str, list[Any]] = {}

        def bind(target: ast.AST | None, kind: str, node: Any) -> None:
            if isinstance(target, ast.Name):
                bound.setdefault(target.id, []).append((kind, node))
            elif isinstance(target, ast.Tuple | ast.List | ast.Starred):
                for each in ast.iter_child_nodes(target):
                    bind(each, "unknown", None)

        parameters = function.args
        positional = [*parameters.posonlyargs, *parameters.args]
        for at, each in enumerate([*positional, *parameters.kwonlyargs]):
            kind, node = "annotation", each.annotation
            if at == 0 and node is None and self.owner and each.arg in ("self", "cls"):
                kind = each.arg
            bound.setdefault(each.arg, []).append((kind, node))
        for extra in (parameters.vararg, parameters.kwarg):
            if extra is not None:
                bound[extra.arg] = [("unknown", None)]
        body = function.body if isinstance(function.body, list) else [function.body]
        for node in (each for statement in body for each in _own_nodes(statement)):
            match node:
                case ast.Assign() | ast.NamedExpr():
                    for target, value in _bindings(node):
                        bind(target, "value", value)
                case ast.AnnAssign(target=target, annotation=annotation):
                    bind(target, "annotation", annotation)
                case ast.withitem(context_expr=value, optional_vars=target):
                    bind(target, "with", value)
                case (
                    ast.For(target=target, iter=value)
                    | ast.comprehension(target=target, iter=value)
                ):
                    bind(target, "item", value)
                case ast.ExceptHandler(name=str(name)):
                    bound.setdefault(name, []).append(("unknown", None))
        self.sources._scopes[id(function)] = bound
        return bound


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a statement and its nodes, except for nested functions."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


# -- the check -------------------------------------------------------------------------------------


class Check(ast.NodeVisitor):
    """Collects the findings of one module."""

    def __init__(self, sources: Sources, module: str) -> None:
        self.sources, self.module = sources, sources.modules[module]
        self.scope = Scope(sources, self.module)
        self.path: list[str] = []
        self.found: list[Finding] = []
        self.is_reader = module.startswith(READERS)
        self._functions: set[int] = set()  # called functions, which are not references
        self.visit(self.module.tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self.scope
        if not self.path:
            self.scope = Scope(self.sources, self.module, f"{self.module.name}.{node.name}")
        self._within(node.name, node)
        self.scope = before

    def visit_FunctionDef(self, node: Any) -> None:
        before = self.scope
        functions = (*before.functions, node)
        self.scope = Scope(self.sources, self.module, before.owner, functions)
        self._within(node.name, node)
        self.scope = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that `ast` asks for

    def visit_Lambda(self, node: ast.Lambda) -> None:
        before = self.scope
        functions = (*before.functions, node)
        self.scope = Scope(self.sources, self.module, before.owner, functions)
        self.generic_visit(node)
        self.scope = before

    def _within(self, name: str, node: ast.AST) -> None:
        self.path.append(name)
        self.generic_visit(node)
        self.path.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self._functions.add(id(node.func))
        first = node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "take" and first is not None:
            self._functions.add(id(first))  # `Descriptor.take(function, *arguments)` calls it
            self._judge(first, node.args[1:], node.keywords)
        self._judge(node.func, node.args, node.keywords)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._refer(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._refer(node)

    def _refer(self, node: Any) -> None:
        """Checks a function that is passed on without a call, because other code may call it."""
        last = node.attr if isinstance(node, ast.Attribute) else self._imported(node)
        is_read = isinstance(node.ctx, ast.Load) and id(node) not in self._functions
        if not is_read or last not in _LAST_NAMES:
            return
        found = self.scope.value(node)
        if found is not None and found.kind == "outside":
            is_refused = found.name in CREATES | OPENS | {"os.open", "h5py.File"}
            if is_refused or (self.is_reader and found.name in READS):
                self._add(node, found.name, "is passed on")

    def _judge(self, function: ast.expr, args: list[ast.expr], keywords: Any) -> None:
        """Checks a call."""
        options = {each.arg: each.value for each in keywords}
        last = function.attr if isinstance(function, ast.Attribute) else self._imported(function)
        if last not in _LAST_NAMES:
            return
        found = self.scope.value(function)
        if found is not None and found.kind == "outside":
            self._judge_outside(function, found.name, args, options)
        elif found is not None and found.kind in ("function", "class"):
            return  # a function of the package, which is checked where it is defined
        elif isinstance(function, ast.Attribute):
            self._judge_method(function, args, options)

    def _imported(self, node: ast.expr) -> str:
        """Returns the last part of the original name that an imported name stands for."""
        if not isinstance(node, ast.Name):
            return ""
        return self.module.imports.get(node.id, node.id).rpartition(".")[2]

    def _judge_outside(
        self, node: ast.expr, name: str, args: list[ast.expr], options: dict[str, ast.expr]
    ) -> None:
        if name in CREATES:
            if name in ("numpy.save", "torch.save") and any(map(self._is_in_memory, args)):
                return
            self._add(node, name, "makes, changes or removes a file")
        elif name in OPENS:
            is_descriptor = name == "os.fdopen" or _is_false(options.get("closefd"))
            self._judge_mode(node, name, _argument(args, options, 1, "mode"), is_descriptor)
        elif name == "h5py.File":
            self._judge_file(node, name, args, options)
        elif name == "os.open":
            self._judge_flags(node, _argument(args, options, 1, "flags"))
        elif name == "numpy.memmap":
            mode = _argument(args, options, 2, "mode")
            self._judge_mode(node, name, mode or ast.Constant("r+"), False)
        elif name in READS and self.is_reader and not any(map(self._is_in_memory, args)):
            self._add(node, name, "may wait for a FIFO, or follow a link")
        elif isinstance(node, ast.Attribute):
            self._judge_method(node, args, options)

    def _judge_method(
        self, node: ast.Attribute, args: list[ast.expr], options: dict[str, ast.expr]
    ) -> None:
        name = node.attr
        if name in CREATING_METHODS or (name == "replace" and _is_of_path(args, options)):
            if not any(map(self._is_in_memory, [node.value, *args])):
                self._add(node, name, "makes, changes or removes a file")
        elif name == "File":
            self._judge_file(node, "h5py.File", args, options)
        elif name == "open":
            self._judge_mode(node, "open", _argument(args, options, 0, "mode"), False)
        elif name == "from_h5" and options.get("mode") is not None:
            self._judge_mode(node, name, options["mode"], False)
        elif name in READING_METHODS and self.is_reader:
            self._add(node, name, "may wait for a FIFO, or follow a link")

    def _judge_mode(
        self, node: ast.expr, name: str, mode: ast.expr | None, is_descriptor: bool
    ) -> None:
        if mode is not None and not (isinstance(mode, ast.Constant) and type(mode.value) is str):
            self._add(node, name, f"has a mode that cannot be read here, {ast.unparse(mode)}")
        elif mode is not None and set(str(mode.value)) & set("wax+"):
            self._add(node, name, f"has the mode {mode.value!r}")
        elif self.is_reader and not is_descriptor:
            self._add(node, name, "may wait for a FIFO, or follow a link")

    def _judge_file(
        self, node: ast.expr, name: str, args: list[ast.expr], options: dict[str, ast.expr]
    ) -> None:
        mode = _argument(args, options, 1, "mode")
        if mode is None:
            self._add(node, name, "has no mode")
        else:
            self._judge_mode(node, name, mode, False)

    def _judge_flags(self, node: ast.expr, flags: ast.expr | None) -> None:
        found = None if flags is None else self._flags(flags, self.module)
        if found is None:
            self._add(node, "os.open", "has flags that cannot be read here")
        elif found & _WRITING_FLAGS:
            self._add(node, "os.open", "opens for writing")
        elif self.is_reader and not (found & os.O_NOFOLLOW and found & _WITHOUT_WAITING):
            self._add(node, "os.open", "may wait for a FIFO, or follow a link")

    def _flags(self, node: ast.expr, module: Module) -> int | None:
        """Returns the number that an expression of flags has if all its optional flags are set."""
        match node:
            case (
                ast.BinOp(left=one, op=ast.BitOr(), right=other) | ast.IfExp(body=one, orelse=other)
            ):
                parts = self._flags(one, module), self._flags(other, module)
                return None if None in parts else parts[0] | parts[1]  # type: ignore[operator]
            case ast.Constant(value=int(number)):
                return number
            case ast.Attribute(value=ast.Name(id="os"), attr=name):
                return getattr(os, name, None)
            case ast.Attribute(value=inner, attr=name):
                found = Scope(self.sources, module).value(inner)
                if found is not None and found.kind == "module":
                    return self._flags(ast.Name(name), self.sources.modules[found.name])
            case ast.Name(id=name) if name in module.constants:
                return self._flags(module.constants[name], module)
            case ast.Name(id=name) if name in module.imports:
                above, _, last = module.imports[name].rpartition(".")
                if above in self.sources.modules:
                    return self._flags(ast.Name(last), self.sources.modules[above])
        return None

    def _is_in_memory(self, node: ast.expr) -> bool:
        return self.scope.value(node) == Value("made", "io.BytesIO")

    def _add(self, node: ast.expr, call: str, why: str) -> None:
        function = ".".join(self.path) or "<module>"
        self.found.append(Finding(self.module.name, function, call, node.lineno, why))


def _argument(
    args: list[ast.expr], options: dict[str, ast.expr], at: int, name: str
) -> ast.expr | None:
    return args[at] if len(args) > at else options.get(name)


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_of_path(args: list[ast.expr], options: dict[str, ast.expr]) -> bool:
    """True if the arguments are those of `Path.replace`; `str.replace` has two or more."""
    return (len(args) == 1 and not options) or "target" in options


def findings(sources: Sources, modules: list[str]) -> list[Finding]:
    return [each for name in modules for each in Check(sources, name).found]


def package() -> dict[str, str]:
    """Returns the source of each module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text()
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return package()


def test_files_are_made_changed_and_removed_only_by_their_modules(sources: dict[str, str]) -> None:
    names = [name for name in sources if not name.startswith(EXEMPT)]
    found = findings(Sources(sources), names)
    assert [str(each) for each in found if each.row not in ALLOWED] == []
    assert set(ALLOWED) - {each.row for each in found} == set(), "no such line is there any more"


def calls(sources: dict[str, str], text: str, module: str = "shmbuffer.saves.snippet") -> set[str]:
    """Returns the calls that are refused in a module of the package with this text."""
    return {each.call for each in findings(Sources({**sources, module: text}), [module])}


@pytest.fixture(scope="module")
def few(sources: dict[str, str]) -> dict[str, str]:
    """Returns the modules that the snippets use."""
    names = ("memory.system.region", "memory.system.beneath", "saves.safe_files", "errors")
    return {f"shmbuffer.{name}": sources[f"shmbuffer.{name}"] for name in names}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("open(path, 'w')", "builtins.open"),
        ("open(path, mode='r+b')", "builtins.open"),
        ("open(path, 'ab')", "builtins.open"),
        ("open(path, mode)", "builtins.open"),
        ("import io\nio.open(path, 'x')", "io.open"),
        ("path.open('w')", "open"),
        ("path.open(mode=mode)", "open"),
        ("import os\nos.fdopen(fd, 'wb')", "os.fdopen"),
        ("import os\nos.open(path, os.O_RDONLY | os.O_CREAT)", "os.open"),
        ("import os\nos.open(path, os.O_WRONLY)", "os.open"),
        ("import os\nos.open(path, os.O_RDWR)", "os.open"),
        ("import os\nos.open(path, os.O_TRUNC)", "os.open"),
        ("import os\nos.open(path, flags)", "os.open"),
        ("import os\nFLAGS = os.O_RDWR\ndef f(path): os.open(path, FLAGS)", "os.open"),
        ("import os\nfile.take(os.open, path, os.O_RDWR)", "os.open"),
        ("from os import unlink as gone\ngone(path)", "os.unlink"),
        ("import os\nremove = os.unlink", "os.unlink"),
        ("import os as system\nsystem.replace(path, other)", "os.replace"),
        *((f"import os\nos.{name}(path)", f"os.{name}") for name in CREATING["os"].split()),
        *((f"import shutil\nshutil.{n}(path)", f"shutil.{n}") for n in CREATING["shutil"].split()),
        *(
            (f"import tempfile\ntempfile.{name}()", f"tempfile.{name}")
            for name in CREATING["tempfile"].split()
        ),
        *((f"path.{name}(other)", name) for name in sorted(CREATING_METHODS)),
        ("path.replace(other)", "replace"),
        ("path.replace(target=other)", "replace"),
        ("import numpy as np\nnp.save(path, x)", "numpy.save"),
        ("import numpy as np\nnp.savez(path, x)", "numpy.savez"),
        ("import torch\ntorch.save(x, path)", "torch.save"),
        ("import numpy as np\nnp.memmap(path)", "numpy.memmap"),
        ("import numpy as np\nnp.memmap(path, mode='w+')", "numpy.memmap"),
        ("import h5py\nh5py.File(path)", "h5py.File"),
        ("import h5py\nh5py.File(path, 'w')", "h5py.File"),
        ("import h5py\nh5py.File(path, mode=mode)", "h5py.File"),
        ("_h5py().File(path, 'a')", "h5py.File"),
        ("import pyarrow.parquet as pq\npq.ParquetWriter(path)", "pyarrow.parquet.ParquetWriter"),
        ("pyarrow().ParquetWriter(path)", "ParquetWriter"),
        ("TensorDict.from_h5(path, mode='r+')", "from_h5"),
        # Objects of an unknown class, or of two classes, are refused.
        ("def f(folder): folder.unlink('a')", "unlink"),
        (
            "from shmbuffer.memory.system.region import Directory\n"
            "def f(folder: Directory, other):\n    folder = other\n    folder.unlink('a')",
            "unlink",
        ),
        (
            "from shmbuffer.memory.system.region import Directory\nfrom pathlib import Path\n"
            "def f(folder: Path): folder.rename('a')",
            "rename",
        ),
        (
            "from shmbuffer.memory.system.region import Directory\n"
            "def f(folder: Directory): folder.touch()",  # Directory has no such method
            "touch",
        ),
    ],
)
def test_a_call_that_makes_changes_or_removes_a_file_is_refused(
    few: dict[str, str], text: str, call: str
) -> None:
    for module in ("shmbuffer.saves.snippet", "shmbuffer.watch.snippet"):
        assert calls(few, text, module) == {call}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("open(path)", "builtins.open"),
        ("open(path, 'rb')", "builtins.open"),
        ("path.open()", "open"),
        ("path.read_bytes()", "read_bytes"),
        ("path.read_text()", "read_text"),
        ("import numpy as np\nnp.load(path)", "numpy.load"),
        ("import numpy as np\nnp.fromfile(path)", "numpy.fromfile"),
        ("import numpy as np\nnp.memmap(path, mode='r')", "numpy.memmap"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch\nload = torch.load", "torch.load"),
        ("TensorDict.load_memmap(path)", "load_memmap"),
        ("PersistentTensorDict.from_h5(path)", "from_h5"),
        ("import h5py\nh5py.File(path, 'r')", "h5py.File"),
        ("import os\nos.open(path, os.O_RDONLY | os.O_NONBLOCK)", "os.open"),
        ("import os\nos.open(path, os.O_RDONLY | os.O_NOFOLLOW)", "os.open"),
    ],
)
def test_a_call_that_may_wait_for_a_fifo_is_refused_where_saves_are_read(
    few: dict[str, str], text: str, call: str
) -> None:
    assert calls(few, text) == {call}
    assert calls(few, text, "shmbuffer.watch.snippet") == set()


HELPERS = """
import io
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
import numpy as np
import torch
from shmbuffer.memory.system import beneath
from shmbuffer.memory.system.region import Directory
from shmbuffer.saves import safe_files
from shmbuffer.saves.safe_files import create_file, remove_file

@dataclass
class Save:
    folder: Directory

    def __init__(self, above: Directory) -> None:
        self.above = above
        self.opened = above.folder("b")

    @property
    def first(self) -> Directory | None:
        return self.folder

    def remove(self) -> None:
        self.folder.unlink("a")
        self.above.rename("a", "b", into=self.folder)
        self.opened.rmdir("c")
        self.first.make("d")

def by_annotation(directory: Directory, saves: list[Save]) -> None:
    directory.unlink("a")
    for save in saves:
        save.above.unlink("a")

def by_what_is_assigned(path, other=None) -> None:
    directory = Directory.open(path)
    directory.unlink("a")
    below = None
    if other:
        below = directory.folder("b")
        below.rename("a", "b")
    with Directory.open(path) as first, first.folder("c") as second, ExitStack() as stack:
        second.rmdir("d")
        third = stack.enter_context(second.folder("e"))
        third.unlink("f")
        lambda: third.unlink("g")

def by_functions_of_ours(path) -> None:
    safe_files.make_folder(path)
    remove_file(path)
    with create_file(path) as file:
        file.write(b"x")

def in_memory(value) -> None:
    content = io.BytesIO()
    torch.save(value, content)
    torch.load(content)
    np.load(io.BytesIO(b""))
    content.truncate(0)
    figure(value).savefig(content)

def of_other_things(text: str, save: Save, items: list, fd: int) -> None:
    text.replace("a", "b")
    replace(save, folder=None)
    items.remove(1)
    {1}.discard(1)
    open(fd, "rb", closefd=False)
    os.fdopen(fd)
    os.open(".", beneath.FOLDER)
    os.open("a", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    os.path.exists(text)
"""


def test_helpers_are_known_by_their_class_and_what_only_looks_alike_is_accepted(
    sources: dict[str, str],
) -> None:
    assert calls(sources, HELPERS) == set()
