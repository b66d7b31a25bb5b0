"""Every Python that scripts/test starts loads torch's compiler when it is used, and not before.

tensordict registers functions with it while it is imported, and that loads Dynamo and sympy: more
than half of the processor time that a fresh process takes to import shmbuffer, and a hundred tests
start some. Here these functions are registered as soon as something else loads Dynamo. With
``--full``, and where tests are run by name, everything is as a user has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Registered = Callable[..., Any]


class _Later:
    """Finds nothing itself but Dynamo, to hear of its end."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Registered]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "tensordict.utils" and "torch._dynamo" not in sys.modules:
            from torch import compiler

            for registers in ("allow_in_graph", "assume_constant_result"):
                setattr(compiler, registers, self._noting(registers, getattr(compiler, registers)))
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            for registers, function in self._waiting:
                getattr(module, registers)(function)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec

    def _noting(self, name: str, registers: Registered) -> Callable[[Registered], Registered]:
        def note(function: Registered) -> Registered:
            if "torch._dynamo" in sys.modules:
                return registers(function)  # type: ignore[no-any-return]
            self._waiting.append((name, function))
            return function  # as both of them do

        return note


sys.meta_path.insert(0, _Later())
