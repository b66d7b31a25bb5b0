"""Maps each public name of the package to the module from which it is loaded on first use.

``guide_names.pyi`` and ``other_names.pyi`` list the names for this module and for type checkers.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from shmbuffer import errors

_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as ", re.MULTILINE)


def _read(stub: str) -> dict[str, str]:
    """Reads the module of each name from a file of import statements."""
    text = (Path(__file__).parent / stub).read_text(encoding="utf-8")
    return {name: module for module, name in _IMPORT.findall(text)}


LISTED = _read("guide_names.pyi")
"""Module of each name that the guides use."""

HOME_OF = LISTED | _read("other_names.pyi")
"""Module of each public name."""
for _name, _one in vars(errors).items():
    if isinstance(_one, type) and issubclass(_one, errors.ShmBufferError):
        HOME_OF[_name] = errors.__name__


def load(name: str) -> Any:
    """Imports the module of a public name and returns the object.

    Raises:
        AttributeError: there is no such name.
        ImportError: the module cannot be imported.
    """
    module = HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'shmbuffer' has no attribute {name!r}")
    try:
        home = importlib.import_module(module)
    except AttributeError as error:  # an AttributeError would be reported as a missing name
        raise ImportError(
            f"{module} cannot be imported: {error}; if sources have changed, compile the core "
            "again (pip install -e .)",
            name=module,
        ) from error
    return getattr(home, name)
