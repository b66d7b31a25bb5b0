"""What lies in a directory, to see that nothing was changed."""

from __future__ import annotations

from pathlib import Path


def contents(path: Path) -> dict[str, bytes]:
    """Every file and its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
