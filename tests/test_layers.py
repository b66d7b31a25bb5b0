"""A module imports only from its own layer or a lower one, and never in a cycle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmbuffer"

# The first name below the package determines the layer. The examples are a link to examples/demo,
# which is not checked, and only the command line may import them.
FLOORS = {
    "__main__": 12,
    "cli": 12,
    "examples": 12,
    "": 10,
    "service": 9,
    "sb3": 9,
    "distributed": 9,
    "datasets": 8,
    "ensembles": 8,
    "buffers": 7,
    "samplers": 6,
    "units": 6,
    "writers": 6,
    "saves": 5,
    "storages": 5,
    "torchrl": 5,
    "numpy": 3,
    "tensors": 4,
    "watch": 3,
    "items": 2,
    "memory": 1,
    "_native": 0,
    "environments": 0,
    "errors": 0,
    "extras": 0,
    "guide_names": 0,
    "names": 0,
    "other_names": 0,
}

# The parts of a package, each of which may import those before it; other modules may import all.
ROOMS = {
    "shmbuffer.memory": (
        *(
            "system",
            "format",
            "mapped",
            "record_format",
            "clients",
            "directory",
            "flow",
            "ring",
            "upkeep",
        ),
    ),
    "shmbuffer.buffers": ("data_path", "flow", "calls"),
}


@dataclass(frozen=True)
class Import:
    """An imported name: its module, and whether the import runs when the module is imported."""

    importer: str
    line: int
    name: str
    on_import: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class Imports(ast.NodeVisitor):
    """Collects the imports of one module, with relative names made absolute."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.found: list[Import] = []
        self.on_import = True

    def add(self, node: ast.stmt, name: str) -> None:
        self.found.append(Import(self.module, node.lineno, name, self.on_import))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if node.level:
            is_package = MODULES[self.module].name == "__init__.py"
            above = node.level - 1 if is_package else node.level
            package = self.module.split(".")[: -above or None]
            source = ".".join([*package, *filter(None, [source])])
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            self.add(node, submodule if submodule in MODULES else source)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.visit_later(*node.body)
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit_later(*node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_later(*node.body)

    def visit_later(self, *nodes: ast.stmt) -> None:
        before, self.on_import = self.on_import, False
        for node in nodes:
            self.visit(node)
        self.on_import = before


@cache
def imports(module: str) -> list[Import]:
    visitor = Imports(module)
    visitor.visit(ast.parse(MODULES[module].read_text(), str(MODULES[module])))
    return visitor.found


def breaches(breach: Callable[[Import], bool]) -> str:
    """Returns every import of the package for which ``breach`` is true, one on each line."""
    return "\n".join(str(each) for module in MODULES for each in imports(module) if breach(each))


def is_from(foreign: str, name: str) -> bool:
    return name.split(".")[0] == foreign


def floor(module: str) -> int:
    return FLOORS[room(module)]


def room(module: str) -> str:
    """Returns the part of a name that determines the layer: `numpy` for `shmbuffer.items.rows`."""
    return module.split(".")[1] if "." in module else ""


def test_every_module_stands_on_a_floor() -> None:
    assert {room(module) for module in MODULES} <= FLOORS.keys()


def test_no_module_imports_from_upstairs() -> None:
    def breach(each: Import) -> bool:
        return is_from(PACKAGE.name, each.name) and floor(each.name) > floor(each.importer)

    assert breaches(breach) == ""


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_of_a_package_have_an_order(package: str) -> None:
    rooms = [f"{package}.{name}." for name in ROOMS[package]]
    inside = {name: path for name, path in MODULES.items() if name.startswith(f"{package}.")}
    assert {*rooms} == {f"{name}." for name, path in inside.items() if path.stem == "__init__"}

    def place(name: str) -> int:
        found = [at for at, room in enumerate(rooms) if f"{name}.".startswith(room)]
        return found[0] if found else len(rooms)

    def breach(each: Import) -> bool:
        return {each.importer, each.name} <= {package, *inside} and (
            place(each.name) > place(each.importer)
        )

    assert breaches(breach) == ""


def test_a_file_has_at_most_800_lines() -> None:
    larger = {name for name, path in MODULES.items() if path.read_text().count("\n") > 800}
    assert larger == set()


def ring(asked_for: Callable[[Import], list[str]]) -> str:
    """Returns the modules that form an import cycle."""
    graph = {
        module: {name for found in imports(module) for name in asked_for(found) if name in MODULES}
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


#: Modules of the NumPy client with the name of the module that they mirror.
MIRRORED = {"client", "replay_buffer", "rows"}


def test_no_two_files_share_a_name() -> None:
    names = Counter(
        path.stem
        for path in MODULES.values()
        if path.name not in ("__init__.py", "__main__.py")
        and path.parent.name != "cli"  # modules of cli are named after the verbs
        and not (path.parent.name == "numpy" and path.stem in MIRRORED)
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_no_modules_import_each_other_in_a_ring() -> None:
    """Imports in functions and for types count, because readers have to follow them as well."""
    assert ring(lambda found: [found.name]) == ""


def test_every_module_can_be_imported_first() -> None:
    """The packages that contain a module are imported before it."""

    def needed(found: Import) -> list[str]:
        names = accumulate(found.name.split("."), "{}.{}".format) if found.on_import else ()
        return [name for name in names if not f"{found.importer}.".startswith(f"{name}.")]

    assert ring(needed) == ""


@pytest.mark.parametrize("foreign", ["torch", "tensordict"])
def test_the_lower_floors_know_nothing_of(foreign: str) -> None:
    below = FLOORS["watch"]
    assert (
        breaches(lambda each: is_from(foreign, each.name) and floor(each.importer) <= below) == ""
    )


@pytest.mark.parametrize("foreign", ["torch", "tensordict"])
def test_the_front_door_and_the_command_line_start_without(foreign: str) -> None:
    def breach(each: Import) -> bool:
        on_top = floor(each.importer) == FLOORS["cli"]
        return is_from(foreign, each.name) and on_top and each.on_import

    assert breaches(breach) == ""


@pytest.mark.parametrize(
    "module", ["shmbuffer", "shmbuffer.cli", "shmbuffer.memory", "shmbuffer.numpy"]
)
def test_torch_is_not_loaded_by_an_import_of(module: str) -> None:
    program = f"import sys, {module}; print(*{{'torch', 'tensordict'}} & sys.modules.keys())"
    loaded = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    assert loaded.stdout.split() == []


def test_the_core_includes_no_header_of_torch() -> None:
    sources = [*PACKAGE.glob("_native/*/*.[ch]")]
    assert sources
    included = {
        header
        for source in sources
        for header in re.findall(
            r'^\s*#\s*include\s*[<"](.+?)[>"]', source.read_text(), re.MULTILINE
        )
    }
    assert "Python.h" in included
    assert [
        header for header in included if re.match(r"torch/|ATen|c10|caffe2|pybind11", header)
    ] == []
