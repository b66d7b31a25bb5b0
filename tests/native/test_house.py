"""The files of the C core form a tree in which each file calls only files below it.

There are three folders, each on top of the next. `python` has the bindings. `tables` has the data
that a process keeps about a ring without the mutex. `core` takes the mutex and moves items, in the
order of `ring.h`.
"""

from __future__ import annotations

import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from shmbuffer.memory.format import slots
from tests.crash.sources.c_tokens import Token, closing, functions, tokens
from tests.native.program import CORE

FOLDERS = ("core", "tables", "python")
PATHS = {path.name: path for path in sorted(CORE.rglob("*.[ch]"))}
FILES = {name: path.read_text() for name, path in PATHS.items()}
TOKENS = {name: tokens(text) for name, text in FILES.items() if name[-1] == "c"}
SOURCES_C = {name: list(functions(code)) for name, code in TOKENS.items()}
HOME = {function: file for file, found in SOURCES_C.items() for function, _, _ in found}
#: The functions in the table of Ring's methods. A macro builds their names.
RING_METHODS = [
    Token(f"shmb_ring_{name}") for name in re.findall(r"^    X\((\w+),", FILES["methods.h"], re.M)
]
#: Files below every ring, which do not use a ring.
FOUNDATION = {"layout.c", "crashpoint.c", "crc32c.c", "tree.c", "power.c"}


def named(code: list[Token]) -> set[str]:
    """Returns files whose functions are called or passed on; names with shmb_ are not static."""
    methods = RING_METHODS if "METHODS" in code else []
    return {HOME[token] for token in (*code, *methods) if token in HOME and token[:5] == "shmb_"}


def initialisers(code: list[Token]) -> list[Token]:
    """Returns the contents of tables outside functions, such as the method tables of types."""
    inside: list[Token] = []
    for at, (token, following) in enumerate(pairwise(code)):
        if token == "=" and following == "{":
            inside += code[at + 2 : closing(code, at + 1)]
    return inside


def calls(file: str) -> set[str]:
    """Returns files whose functions this file calls, or puts into a table of functions."""
    bodies = [token for _, _, body in SOURCES_C[file] for token in body]
    return named(bodies + initialisers(TOKENS[file])) - {file}


CALLS = {file: calls(file) for file in SOURCES_C}
INCLUDES = {
    name: set(re.findall(r'^#include "\w+/([\w.]+)"', text, re.MULTILINE)) & FILES.keys()
    for name, text in FILES.items()
}


@pytest.mark.parametrize(("what", "graph"), [("calls", CALLS), ("includes", INCLUDES)])
def test_no_files_of_the_core_need_each_other_in_a_ring(
    what: str, graph: dict[str, set[str]]
) -> None:
    assert any(graph.values())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a ring of {what}: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize(("what", "graph"), [("calls", CALLS), ("includes", INCLUDES)])
def test_a_folder_of_the_core_needs_no_folder_above_it(
    what: str, graph: dict[str, set[str]]
) -> None:
    floor = {name: FOLDERS.index(path.parent.name) for name, path in PATHS.items()}
    assert {*floor.values()} == {0, 1, 2}
    assert [
        f"{name} {what} {other}"
        for name, others in graph.items()
        for other in others
        if floor[other] > floor[name]
    ] == []


def test_only_the_glue_includes_python() -> None:
    glue = {name for name, path in PATHS.items() if path.parent.name == "python"}
    assert {name for name, text in FILES.items() if "<Python.h>" in text} <= glue


def test_every_include_names_the_folder_of_its_file() -> None:
    named = {
        header for text in FILES.values() for header in re.findall(r'^#include "(.+)"', text, re.M)
    }
    assert named
    assert [header for header in named if not (CORE / header).is_file()] == []


def test_a_function_in_a_table_of_methods_counts_as_called() -> None:
    assert "slicing.c" in CALLS["following.c"]
    assert "label_columns.c" in CALLS["labelling.c"]
    assert {"ring_methods.c", "ring_records.c", "ring_consuming.c"} <= CALLS["ring_binding.c"]


def test_the_header_of_the_ring_lists_its_files_from_the_lowest_to_the_highest() -> None:
    order = re.findall(r"^/\* (\w+\.c)\b", FILES["ring.h"], re.MULTILINE)
    assert {*order} | FOUNDATION == {
        name for name in SOURCES_C if PATHS[name].parent.name == "core"
    }
    assert [
        f"{file} calls {other}"
        for at, file in enumerate(order)
        for other in CALLS[file] - FOUNDATION
        if other not in order[:at]
    ] == []


def test_the_tree_knows_no_mutex_and_no_registry() -> None:
    included = INCLUDES["tree.c"] | INCLUDES["tree.h"]
    assert included == {"tree.h", "layout.h", "crashpoint.h", "power.h"}
    assert CALLS["tree.c"] == set()


def test_no_file_of_the_core_is_longer_than_can_be_read_at_once() -> None:
    lines = {name: text.count("\n") for name, text in FILES.items()}
    assert {name: count for name, count in lines.items() if count > 800} == {}


def test_a_name_means_one_function_of_the_core() -> None:
    """Otherwise readers of the sources, such as the test of crash points, would mix them up."""
    names = Counter(name for found in SOURCES_C.values() for name in {each for each, _, _ in found})
    assert [name for name, count in names.items() if count > 1] == []


def test_the_picture_of_its_life_names_every_file_that_writes_a_word() -> None:
    package = Path(slots.__file__).parents[2]
    stores = {
        "_native/*/*.c": r"atomic_store_explicit\(&(ring->)?words\[",
        "**/*.py": r"\.words\[.*\] \|?= ",
    }
    writers = {
        path.name
        for files, store in stores.items()
        for path in package.glob(files)
        # The words in these files are not shared between processes.
        if path.name not in ("copied_buffer.py", "snapshot.py")
        and re.search(store, path.read_text())
    }
    assert {*re.findall(r"``(\w+\.(?:c|py))``", str(slots.__doc__))} == writers
