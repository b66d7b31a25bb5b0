"""Arguments of TorchRL's constructors that this release does not support.

Their default values are accepted, so that a script only has to change one import. Other values
raise an error.
"""

from __future__ import annotations

from typing import Any

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "service_backend": (None, "direct"),
    "service_backend_options": (None,),
    "transport": (None, "auto"),
    "transport_options": (None,),
}

_INSTEAD = {
    "service_backend": "Coordinator and attach share a buffer; RayReplayBuffer beyond one machine",
    "transport": "RayReplayBuffer and ShardedReplayBuffer move batches between machines",
}


def refuse(cls: str, given: dict[str, Any]) -> None:
    """Raises an error for unknown arguments and unsupported values."""
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise TypeError(f"{cls}() got an unexpected keyword argument {name!r}")
        if not any(value is default or value == default for default in _DEFAULTS[name]):
            instead = f"; until then: {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise NotImplementedError(f"{cls}({name}={value!r}) comes in a later release{instead}")
