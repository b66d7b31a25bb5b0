"""Files of a saved buffer, apart from those of its storage, sampler and writer.

    buffer_metadata.json    {"batch_size": <int or null>, ...}
    rng_state/              state of the random generator, in tensordict's files
    transform.t             {"transforms.<number>.<key>": <value>}, written by torch.save and read
                            with weights_only=True

If the only transform of a buffer is TorchRL's own chain (``Compose``), ``transform.t`` contains the
state of that chain.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer.saves.safe_files import exists, read_file, write_file
from shmbuffer.saves.saved_parts import checked_batch_size, checked_generator, require_states
from shmbuffer.saves.values import FORMAT, OURS, damaged, find_ours, read_json, reading, write_json
from shmbuffer.saves.work_directory import located
from shmbuffer.torchrl.compat.folders import read_folder
from shmbuffer.torchrl.transforms import Compose

METADATA = "buffer_metadata.json"
_PREFIX = "transforms."


def write_metadata(path: Path, batch_size: int | None, beside: Sequence[str]) -> None:
    """Writes the batch size of a buffer, and the names of this package's additional files."""
    ours = {"format": FORMAT, **dict.fromkeys(beside, True)}
    content = {"batch_size": batch_size, "consume_after_n_samples": None, OURS: ours}
    write_json(path / METADATA, content)


def read_metadata(path: Path) -> tuple[int | None, dict[str, Any]]:
    """Reads the batch size of a saved buffer, and the entries under this package's key."""
    missing = "no buffer was saved in this directory"
    found = read_json(path / METADATA, missing=missing)
    with reading(path / METADATA):
        size = checked_batch_size(found["batch_size"])
        return size, find_ours(found, path / METADATA) or {}


def write_generator(path: Path, state: torch.Tensor, device: torch.device) -> None:
    """Writes the state of a generator."""
    TensorDict({"rng_state": state}, device=device).memmap(path)


def read_generator(path: Path) -> tuple[torch.Tensor, torch.device] | None:
    """Reads the state and the device of a generator. Returns None if none was saved."""
    file = path / "meta.json"
    if not exists(file):
        return None
    with reading(file):
        state = read_folder(path).tensor(("rng_state",)).clone()
        return checked_generator(state, read_json(file)["device"])


def write_states(file: Path, chain: Compose) -> None:
    """Writes the states of the transforms. Writes no file if they have no state."""
    states = chain.state_dict()
    if (only := _state_of_chain(chain)) is not None:
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
    """Reads the states of transforms that `write_states` or TorchRL wrote.

    Returns None if there is no file.
    """
    if not exists(file):
        return None
    content = load_plainly(file)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise damaged(file, "is not the state of transforms")
    if _state_of_chain(chain) is not None:
        return {"0": content}
    states: dict[str, Any] = {}
    for key, value in content.items():
        at, _, rest = key.removeprefix(_PREFIX).partition(".")
        states.setdefault(at, {})[rest] = value
    require_states(file, states, chain)
    return states


def save_plainly(content: Any, file: Path) -> None:
    """Writes a file in the format of torch.save. Errors contain its path."""
    data = io.BytesIO()
    torch.save(content, data)
    with located(file):
        write_file(file, data.getvalue())


def load_plainly(file: Path) -> Any:
    """Reads a file that was written by torch.save, without unpickling objects.

    Raises:
        ValueError: the file is damaged, or contains objects that can only be unpickled.
    """
    with located(file):
        content = io.BytesIO(read_file(file))
    try:
        return torch.load(content, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file}: cannot be loaded without running code from it ({type(error).__name__}); the "
            "state of transforms may only contain tensors, strings, numbers and containers of them"
        ) from error


def _state_of_chain(chain: Compose) -> dict[str, Any] | None:
    """Returns the state of the only transform if it is itself a chain, otherwise None."""
    states = chain.state_dict()
    if len(chain.transforms) != 1 or not states:
        return None
    only: dict[str, Any] = states["0"]
    return only if only and all(key.startswith(_PREFIX) for key in only) else None
