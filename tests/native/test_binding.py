"""The binding of the C core: every argument may be wrong, and every allocation may fail."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.harness import schema, settings


class Spoilt:
    """An object that is no number and has no truth value."""

    def _refuses(self) -> Any:
        raise TypeError("spoilt")

    __index__ = __int__ = __float__ = __bool__ = _refuses


SPOILT = Spoilt()


def parameters(method: str) -> list[str]:
    """Returns the parameter names in the first line of a method's documentation."""
    text = getattr(_core.Ring, method).__doc__
    names = re.match(rf"{method}\(([^)]*)\)", text)
    assert names is not None, text
    return [name.strip() for name in names[1].split(",") if name.strip()]


#: Parameters that are a tuple with one address per leaf.
ADDRESSES = ("addresses", "out")
METHODS = [
    name
    for name, value in vars(_core.Ring).items()
    if not name.startswith("_") and callable(value) and parameters(name)
]


@pytest.fixture(params=["rows", "records"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ring(kind: str) -> Iterator[Any]:
    with Engine.anonymous(settings(kind)) as engine:
        yield engine.define(schema(kind)).seat.native


def test_the_stub_of_the_core_declares_what_is_there() -> None:
    declared: dict[str, set[str]] = {}
    for node in ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            fields = {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            declared[node.name] = methods | fields
    assert "Ring" in declared
    there = {name: set(vars(getattr(_core, name))) for name in declared}
    for name, members in there.items():
        public = {member for member in members if not member.startswith("_")}
        assert public == {member for member in declared[name] if not member.startswith("_")}, name


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_argument_is_refused_in_any_position(ring: Any, kind: str, method: str) -> None:
    nowhere = (0,) * len(schema(kind).leaves)
    right = [nowhere if name in ADDRESSES else 0 for name in parameters(method)]
    call = getattr(ring, method)
    for at, name in enumerate(parameters(method)):
        if method == "update_arrays" and name != "timeout_ns":  # any object is accepted
            assert call(*right[:at], SPOILT, *right[at + 1 :]) is None
            continue
        with pytest.raises(TypeError) as refused:
            call(*right[:at], SPOILT, *right[at + 1 :])
        assert "were given" not in str(refused.value)
    for arguments in (right[:-1], [*right, 0]):
        message = f"{len(right)} arguments, but {len(arguments)} were given"
        with pytest.raises(TypeError, match=message):
            call(*arguments)


def calls(ring: Any) -> dict[str, Callable[[], object]]:
    """Returns calls that allocate memory outside of Python's lists of small objects."""
    return {
        "layout": _core.layout,
        "sections": lambda: _core.sections(300, 2, True),
        "crash points": _core.crash_points,
        "snapshot": lambda: ring.snapshot(10**9),
    }


@pytest.mark.parametrize("name", calls(None))
def test_an_allocation_that_fails_is_a_memory_error(ring: Any, name: str) -> None:
    python = pytest.importorskip("_testcapi", reason="CPython was built without its test modules")
    call = calls(ring)[name]
    right = call()

    def answer(first: int, last: int) -> object:
        python.set_nomemory(first, last)
        try:
            found = call()
        except MemoryError:
            return MemoryError
        finally:
            python.remove_mem_hooks()
        return found

    allocations = next(n for n in count() if answer(n, 0) is not MemoryError)
    assert allocations > 0
    assert all(answer(n, n + 1) in (MemoryError, right) for n in range(allocations))
    assert call() == right


@pytest.mark.parametrize("size", [(0, 0), (1, 0), (4096, 0), (4096, 1 << 40)])
def test_a_map_that_cannot_be_made_is_an_error(size: tuple[int, int]) -> None:
    nbytes, offset = size
    descriptor = os.memfd_create("a map")
    os.close(descriptor)
    if nbytes:
        for twice in (False, True):
            with pytest.raises(OSError, match="Bad file descriptor"):
                _core.Map(descriptor, nbytes, offset=offset, twice=twice)
    else:
        _core.Map(descriptor, nbytes).sync()


def test_a_buffer_says_where_it_begins() -> None:
    array = np.arange(24).reshape(4, 6)
    frozen = np.frombuffer(b"read-only", np.uint8)
    text = np.zeros(3, np.dtype([("when", "M8[s]"), ("what", "U4")]))
    for one in (array, array[1:, ::2], array.T, frozen, text, np.empty(0), np.zeros(())):
        assert _core.address(one) == one.__array_interface__["data"][0]
    assert _core.address(None) == 0
    assert _core.address(2**63) == 2**63
    with pytest.raises(AttributeError, match="data_ptr"):
        _core.address(SPOILT)
