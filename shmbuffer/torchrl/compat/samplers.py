"""Files of samplers, as TorchRL writes and reads them.

    priorities   sampler_metadata.json             alpha, beta, eps, largest priority, capacity
                 sumtree.memmap, mintree.memmap    float64 [capacity], masses
                 shmbuffer.priorities.memmap       float64 [elements], raw; NaN: no item
    a pass       tensordict's files of the state: len_storage, _sample_list, drop_last, _ran_out

TorchRL keeps masses, ``(priority + eps) ** alpha``, in float32 or float64. Raw priorities cannot be
restored from them exactly, so a table of the sampler's own is saved in a file of ours too. The
save of a ring has its raw priorities; a sampler that is loaded without it gets rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.items.raw_priorities import from_zero
from shmbuffer.memory import Masses
from shmbuffer.memory.format.priorities import are_priorities
from shmbuffer.memory.format.settings import exponent_fits
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.saves.parts import NO_SAMPLER
from shmbuffer.saves.safe_files import create_file, make_folder
from shmbuffer.saves.values import FORMAT, OURS, find_ours, read_json, reading, write_json
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.folders import mapped, read_folder

_METADATA = "sampler_metadata.json"
_RAW = "shmbuffer.priorities.memmap"
_TREES = ("sumtree.memmap", "mintree.memmap")
_ELEMENTS = ("_sample_list", "_heads")  # of a pass: numbers of elements
_SCHEMA_VERSION = 1  # TorchRL's: _max_priority is raw


def write_priorities(
    directory: Path,
    weighed: Masses,
    beta: float,
    capacity: int,
    dtype: torch.dtype,
    *,
    in_storage: bool = False,
) -> None:
    """Writes the state of a `PrioritizedSampler`.

    ``in_storage``: the save of the storage has the raw priorities.
    """
    make_folder(directory)
    nothing, elements, left = torch.finfo(dtype).max, weighed.elements, capacity
    names = (*_TREES, _RAW) if elements and not in_storage else _TREES
    with ExitStack() as stack:
        sums, least, *own = [stack.enter_context(create_file(directory / name)) for name in names]
        for mass, raw in weighed.pieces:
            for file in own:
                file.write(raw.data)
            mass, left = mass[:left], max(0, left - len(mass))
            held = mass > 0
            sums.write(mass.data)
            least.write((mass if held.all() else np.where(held, mass, nothing)).data)
        sums.write(np.zeros(left).data)
        least.write(np.full(left, nothing).data)
    largest = weighed.max_priority
    write_json(
        directory / _METADATA,
        {
            "_alpha": weighed.alpha,
            "_beta": float(beta),
            "_eps": weighed.eps,
            "_max_priority": [1.0 if largest is None else largest, 0.0],
            "_max_capacity": float(capacity),
            "_schema_version": _SCHEMA_VERSION,
            OURS: {
                "format": FORMAT,
                "elements": elements if _RAW in names else None,
                "in_storage": in_storage,
                "max_priority": largest,
            },
        },
    )


def read_priorities(directory: Path) -> dict[str, Any]:
    """The state of a `PrioritizedSampler` that was written here or by TorchRL."""
    found = read_json(directory / _METADATA, missing=NO_SAMPLER)
    with reading(directory / _METADATA):
        alpha, eps = from_zero("_alpha", found["_alpha"]), from_zero("_eps", found["_eps"])
        ours = find_ours(found, directory / _METADATA)
        if not exponent_fits(alpha, eps, int(found["_max_capacity"])):
            raise ValueError(f"no mass is finite with alpha {alpha} and eps {eps}")
        largest = found["_max_priority"][0] if ours is None else ours["max_priority"]
        raw, in_storage = None, ours is not None and bool(ours["in_storage"])
        if ours is None or in_storage:
            raw = _raw_of_masses(directory, int(found["_max_capacity"]), alpha, eps)
        elif (elements := ours["elements"]) is not None:
            raw = mapped(directory / _RAW, torch.float64, (int(elements),)).clone()
        _require_weights(raw, largest, alpha, eps)
        return {
            "_alpha": alpha,
            "_beta": from_zero("_beta", found["_beta"]),
            "_eps": eps,
            "_max_priority": None if largest is None else float(largest),
            "_priorities": raw,
            "_in_storage": in_storage,  # more exactly than in the masses
        }


def _require_weights(raw: torch.Tensor | None, largest: Any, alpha: float, eps: float) -> None:
    """ValueError where a ring would not keep these priorities."""
    known = np.empty(0) if raw is None else raw.numpy()
    known = np.append(known[~np.isnan(known)], 0.0 if largest is None else float(largest))
    if not are_priorities(known, alpha, eps, 1 if raw is None else len(raw)).all():
        raise ValueError("there are priorities that are negative, infinite, or have no sum")


def _raw_of_masses(directory: Path, capacity: int, alpha: float, eps: float) -> torch.Tensor:
    """The priorities of which TorchRL has made masses; 1 if alpha is 0."""
    mass = mapped(directory / _TREES[0], torch.float64, (capacity,)).numpy()
    held = mass > 0
    raw = np.full(capacity, np.nan)
    raw[held] = np.maximum(mass[held] ** (1 / alpha) - eps, 0.0) if alpha > 0 else 1.0
    return torch.from_numpy(raw)


def moved(raw: torch.Tensor, loaded: Loaded, elements: int) -> torch.Tensor:
    """Priorities ``[elements]`` of a storage of another capacity, where its items are now."""
    if not loaded.shift and len(raw) == elements:
        return raw
    held = torch.nonzero(~raw.isnan())[:, 0]
    places = loaded.places(held)
    fits = places < elements
    result = cpu.full((elements,), torch.nan, dtype=torch.float64)
    result[places[fits]] = raw[held[fits]]
    return result


def write_numbers(directory: Path, state: dict[str, Any]) -> None:
    """Write a state that is flags, numbers, tensors of them, and None."""
    make_folder(directory)
    numbers = {
        key: value if value is None else cpu.as_tensor(value) for key, value in state.items()
    }
    TensorDict(numbers).memmap(directory)


def read_pass(directory: Path) -> dict[str, Any]:
    """Read the state of a `SamplerWithoutReplacement`, from here or from TorchRL."""
    with _reading_numbers(directory) as state:
        int(state["len_storage"]), bool(state["drop_last"]), bool(state["_ran_out"])
        for key in _ELEMENTS:
            if (numbers := state.get(key)) is not None and cpu.as_tensor(numbers).ndim != 1:
                raise ValueError(f"{key} has {cpu.as_tensor(numbers).ndim} dimensions")
    return state


def read_integers(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the whole numbers, by name, that `write_numbers` or TorchRL wrote."""
    with _reading_numbers(directory) as state:
        return {name: int(state[name]) for name in names}


@contextmanager
def _reading_numbers(directory: Path) -> Iterator[dict[str, Any]]:
    read_json(directory / "meta.json", missing=NO_SAMPLER)
    with reading(directory / "meta.json"):
        folder = read_folder(directory)
        state = {key[0]: value for key, value in folder.values.items()}
        yield state | {key[0]: folder.tensor(key).clone() for key in folder.tensors}


def moved_pass(state: dict[str, Any], loaded: Loaded | None) -> dict[str, Any]:
    """The state of a pass over items that are elsewhere now."""
    if loaded is None:
        return state
    return {
        key: loaded.places(value) if key in _ELEMENTS and value is not None else value
        for key, value in state.items()
    }
