"""Arguments of TorchRL's constructors that this release does not support.

Their default values are accepted, so that a script only has to change its imports. Other values
raise NotImplementedError.
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
    "service_backend": "use a Coordinator and attach() on one machine, or a RayReplayBuffer",
    "transport": "use a RayReplayBuffer or a ShardedReplayBuffer to move batches between machines",
}


def refuse(cls: str, arguments: dict[str, Any]) -> None:
    """Raises an exception if an argument of a constructor is unknown or has an unsupported value.

    Args:
        cls: name of the class, for the message.
        arguments: the arguments by name.

    Raises:
        TypeError: an argument is unknown.
        NotImplementedError: an argument does not have its default value.
    """
    for name, value in arguments.items():
        if name not in _DEFAULTS:
            raise TypeError(f"{cls}() got an unexpected keyword argument {name!r}")
        if not any(value is default or value == default for default in _DEFAULTS[name]):
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise NotImplementedError(
                f"{cls}({name}={value!r}) is not supported in this release{instead}"
            )
