"""Skips the tests of examples if the packages of the extra ``demo`` are not installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("gymnasium") else ["test_*.py"]
