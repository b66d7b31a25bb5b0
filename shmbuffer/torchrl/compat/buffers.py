"""The files that TorchRL saves of a buffer beside its storage, sampler and writer.

    buffer_metadata.json    {"batch_size": <int or null>, ...}
    rng_state/              tensordict's files of the generator's state, on its device
    transform.t             {"transforms.<number>.<key>": <value>}, of torch.save, which reads it
                            with weights_only=True

A chain of TorchRL's own (its ``Compose``) that is the only transform of a buffer is the chain.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer.memory.format.names import is_number
from shmbuffer.saves.safe_files import exists, read_file, write_file
from shmbuffer.saves.values import FORMAT, OURS, damaged, find_ours, read_json, reading, write_json
from shmbuffer.saves.work_directory import located
from shmbuffer.torchrl.compat.folders import read_folder
from shmbuffer.torchrl.transforms import Compose

METADATA = "buffer_metadata.json"
_PREFIX = "transforms."


def write_metadata(path: Path, batch_size: int | None, beside: Sequence[str]) -> None:
    """Write what a buffer knows beyond its parts, and what of ours is beside them."""
    ours = {"format": FORMAT, **dict.fromkeys(beside, True)}
    content = {"batch_size": batch_size, "consume_after_n_samples": None, OURS: ours}
    write_json(path / METADATA, content)


def read_metadata(path: Path) -> tuple[int | None, dict[str, Any]]:
    """The batch size of the buffer that was saved in a directory, and what is under our key."""
    missing = "no buffer was saved in this directory"
    found = read_json(path / METADATA, missing=missing)
    with reading(path / METADATA):
        size, ours = found["batch_size"], find_ours(found, path / METADATA) or {}
        if size is None or (type(size) is int and 0 < size < 2**63):
            return size, ours
        raise ValueError(f"{size!r:.40} is no batch size")


def write_generator(path: Path, state: torch.Tensor, device: torch.device) -> None:
    """Write the state of a generator."""
    TensorDict({"rng_state": state}, device=device).memmap(path)


def read_generator(path: Path) -> tuple[torch.Tensor, torch.device] | None:
    """The state of a generator, and its device; None if none was saved."""
    file = path / "meta.json"
    if not exists(file):
        return None
    with reading(file):
        device = torch.device(str(read_json(file)["device"]))
        state = read_folder(path).tensor(("rng_state",)).clone()
        if device.type == "cpu":
            torch.Generator().set_state(state)  # is it one?
    return state, device


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
        save_plainly(content, file)


def read_states(file: Path, chain: Compose) -> dict[str, Any] | None:
    """Read the states that `write_states` or TorchRL wrote; None without a file."""
    if not exists(file):
        return None
    content = load_plainly(file)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise damaged(file, "is not the state of transforms")
    if _is_chain(chain) is not None:
        return {"0": content}
    states: dict[str, Any] = {}
    for key, value in content.items():
        at, _, rest = key.removeprefix(_PREFIX).partition(".")
        known = is_number(at) and int(at) < len(chain.transforms)
        if not known or not hasattr(chain.transforms[int(at)], "load_state_dict"):
            raise ValueError(
                f"{file}: has the state {key!r}, and the buffer's transforms are "
                f"{[type(one).__name__ for one in chain.transforms]}; give it those that it was "
                "saved with. Nothing was changed"
            )
        states.setdefault(at, {})[rest] = value
    return states


def save_plainly(content: Any, file: Path) -> None:
    """Write what `load_plainly` reads; by itself torch.save does not say why it cannot."""
    data = io.BytesIO()
    torch.save(content, data)
    with located(file):
        write_file(file, data.getvalue())


def load_plainly(file: Path) -> Any:
    """Read a file of torch.save."""
    with located(file):
        content = io.BytesIO(read_file(file))
    try:
        return torch.load(content, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file}: cannot be loaded without running code from it ({type(error).__name__}); the "
            "state of transforms may hold tensors, text, numbers and containers of them"
        ) from error


def _is_chain(chain: Compose) -> dict[str, Any] | None:
    """The state of the only transform, if that is a chain itself and has a state."""
    states = chain.state_dict()
    if len(chain.transforms) != 1 or not states:
        return None
    only: dict[str, Any] = states["0"]
    return only if only and all(key.startswith(_PREFIX) for key in only) else None
