"""Prints requirements of pyproject.toml in the format of pip, one per line.

requirements.py wanted EXTRA...   to build and to run the package with these extras
requirements.py alone EXTRA...    these extras, for what works beside the package and not with it
requirements.py lowest            each dependency of the package, pinned to its lower bound
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def wanted(pyproject: dict[str, Any], extras: list[str]) -> list[str]:
    """The requirements of the build, of the package and of these extras."""
    package = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    return [*package, *alone(pyproject, extras)]


def alone(pyproject: dict[str, Any], extras: list[str]) -> list[str]:
    """The requirements of these extras."""
    optional = pyproject["project"]["optional-dependencies"]
    return [requirement for extra in extras for requirement in optional[extra]]


def lowest(pyproject: dict[str, Any]) -> list[str]:
    """Every dependency at its lower bound; a dependency without one is an error."""
    pins = []
    for requirement in pyproject["project"]["dependencies"]:
        bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement)
        if bound is None:
            raise SystemExit(
                f"pyproject.toml: dependency {requirement!r} is not of the form name>=version"
            )
        pins.append(f"{bound[1]}=={bound[2]}")
    return pins


def main() -> None:
    """Print what the first argument asks for."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    match sys.argv[1:]:
        case ["wanted", *extras]:
            print(*wanted(pyproject, extras), sep="\n")
        case ["alone", *extras]:
            print(*alone(pyproject, extras), sep="\n")
        case ["lowest"]:
            print(*lowest(pyproject), sep="\n")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
