"""Checkpoints of the parts of a buffer: not there yet, and said so in one place."""

from __future__ import annotations

from typing import Any


class NoCheckpoints:
    """What storages, samplers and writers say until they can be dumped."""

    def dumps(self, path: Any) -> None:
        """Not there yet."""
        raise NotImplementedError(_LATER)

    def loads(self, path: Any) -> None:
        """Not there yet."""
        raise NotImplementedError(_LATER)


_LATER = "checkpoints (dumps, loads) come in a later release; use state_dict"
