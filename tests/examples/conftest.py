"""The examples need what the extra ``demo`` installs; without it their tests are left out."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("gymnasium") else ["test_*.py"]
