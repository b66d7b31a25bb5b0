"""The state of a buffer's transforms in a file, as TorchRL writes it: ``transform.t``.

    {"transforms.<number>.<key>": <value>}      written by torch.save, read with weights_only=True

A chain of TorchRL's own (its ``Compose``) that is the only transform of a buffer is the chain.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.errors import CorruptBufferError
from shmbuffer.replay.checkpoints import load_plainly

if TYPE_CHECKING:
    from shmbuffer.replay.transforms import Compose

_PREFIX = "transforms."


def write_states(file: Path, chain: Compose) -> None:
    """Write the states of the transforms; nothing where none has one."""
    states = chain.state_dict()
    if (only := _is_chain(chain)) is not None:
        content = only
    else:
        content = {
            f"{_PREFIX}{at}.{key}": value
            for at, state in states.items()
            for key, value in state.items()
        }
    if content:
        torch.save(content, file)


def read_states(file: Path, chain: Compose) -> dict[str, Any] | None:
    """What `write_states`, or TorchRL, wrote, as ``chain.load_state_dict`` takes it.

    Returns:
        None if there is no such file.

    Raises:
        ValueError: there is something in it that could only be unpickled, or no transform for it;
            nothing was changed.
    """
    if not file.exists():
        return None
    content = load_plainly(file)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CorruptBufferError(
            f"{file}: is not the state of transforms; take another copy of the checkpoint",
            path=str(file),
        )
    if _is_chain(chain) is not None:
        return {"0": content}
    states: dict[str, Any] = {}
    for key, value in content.items():
        at, _, rest = key.removeprefix(_PREFIX).partition(".")
        known = at.isdecimal() and int(at) < len(chain.transforms)
        if not known or not hasattr(chain.transforms[int(at)], "load_state_dict"):
            raise ValueError(
                f"{file}: has the state {key!r}, and the buffer's transforms are "
                f"{[type(one).__name__ for one in chain.transforms]}; give it those that it was "
                "saved with. Nothing was changed"
            )
        states.setdefault(at, {})[rest] = value
    return states


def _is_chain(chain: Compose) -> dict[str, Any] | None:
    """The state of the only transform, if that is a chain itself and has a state."""
    states = chain.state_dict()
    if len(chain.transforms) != 1 or not states:
        return None
    only: dict[str, Any] = states["0"]
    return only if only and all(key.startswith(_PREFIX) for key in only) else None
