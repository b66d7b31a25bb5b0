"""``python -m shmbuffer`` is ``shmbuffer``."""

from __future__ import annotations

import sys

from shmbuffer.cli import main

if __name__ == "__main__":
    sys.exit(main())
