"""Runs the command line for ``python -m shmbuffer``."""

from __future__ import annotations

import sys

from shmbuffer.cli import main

if __name__ == "__main__":
    sys.exit(main())
