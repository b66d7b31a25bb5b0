"""Reads the contents of a directory, to check that a verb changed nothing."""

from __future__ import annotations

from pathlib import Path


def contents(path: Path) -> dict[str, bytes]:
    """Returns every file with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
