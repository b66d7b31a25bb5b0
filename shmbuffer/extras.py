"""Errors for optional packages that are not installed."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = "shmbuffer"


class MissingExtra(ModuleNotFoundError):  # noqa: N818 - named after the missing package
    """An optional package is not installed. The message contains the command to install it."""


def missing(needs: str, extra: str, *, name: str | None) -> MissingExtra:
    """Returns the error for an optional package that is not installed.

    ``needs`` is the start of the message, ``extra`` the extra that installs the package, and
    ``name`` the name of the missing module.
    """
    return MissingExtra(f"{needs}, which is not installed: {command(extra)}", name=name)


def command(extra: str) -> str:
    """Returns the command that installs an extra, from the same source as the package itself."""
    wanted = f"[{extra}]"
    try:
        recorded = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # imported from a clone that is not installed
        return f'pip install ".{wanted}"'
    origin = json.loads(recorded) if recorded else {}
    clone = Path(unquote(urlsplit(origin.get("url", "")).path))
    if "dir_info" not in origin or not (clone / "pyproject.toml").is_file():
        return f'pip install "{PACKAGE}{wanted}"'
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f'pip install {editable}".{wanted}" (in {clone})'
