"""The package makes its own tensors with `tensors.form.cpu`, whatever the caller's defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parents[1] / "shmbuffer"
#: The module itself, and programs that are written like a user's.
EXEMPT = ("tensors/form/cpu.py",)
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}
#: Functions that use the default dtype of `torch.set_default_dtype` unless one is passed.
NEED_DTYPE = {"empty", "zeros", "ones", "full", "rand"}


def faults(source: str) -> Iterator[str]:
    """Yields the calls that depend on the caller's defaults, as ``line: call``."""
    tree = ast.parse(source)
    pinned = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and any(word.arg == "device" for word in node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in CONSTRUCTORS:
                    yield f"{node.lineno}: from torch import {alias.name}"
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id == "torch" and node.attr in CONSTRUCTORS and id(node) not in pinned:
            yield f"{node.lineno}: torch.{node.attr}"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func) in {f"cpu.{name}" for name in NEED_DTYPE}
            and not any(word.arg == "dtype" for word in node.keywords)
        ):
            yield f"{node.lineno}: cpu.{node.func.attr} without a dtype"


def test_the_package_makes_its_own_tensors_in_one_place() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{fault}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path.relative_to(PACKAGE)).startswith(EXEMPT)
        for fault in faults(path.read_text())
    ]
    assert not found, "use shmbuffer.tensors.form.cpu:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import torch\nx = torch.empty(3)", "2: torch.empty"),
        ("draw = partial(torch.randint, 3)", "1: torch.randint"),
        ("x = torch.as_tensor(value)", "1: torch.as_tensor"),
        ("from torch import arange", "1: from torch import arange"),
        ("x = cpu.ones(3)", "1: cpu.ones without a dtype"),
    ],
)
def test_a_bare_call_is_found(source: str, fault: str) -> None:
    assert list(faults(source)) == [fault]


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.zeros(3, dtype=dtype, device=column.device)",
        "x = cpu.empty(3, dtype=torch.int64)",
        "x = cpu.arange(3)",
        "x = torch.from_numpy(array)",
    ],
)
def test_a_pinned_call_is_allowed(source: str) -> None:
    assert not list(faults(source))
