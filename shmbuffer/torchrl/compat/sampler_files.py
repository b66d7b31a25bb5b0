"""Files of samplers in TorchRL's layout.

    priorities   sampler_metadata.json             alpha, beta, eps, largest priority, capacity
                 sumtree.memmap, mintree.memmap    float64 [capacity], masses
                 shmbuffer.priorities.memmap       float64 [elements], raw priorities; NaN without
                                                   an item
    a pass       tensordict's files of the state: len_storage, _sample_list, drop_last, _ran_out

TorchRL stores masses, ``(priority + eps) ** alpha``, in float32 or float64. The raw priorities
cannot be restored exactly from them. They are therefore saved in an additional file if the sampler
stores them itself. If the ring of the storage stores them, the save of the storage contains them.
A sampler that is loaded without its storage then computes rounded priorities from the masses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.items.raw_priorities import as_non_negative
from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.format.priorities import are_priorities, mass_of
from shmbuffer.memory.mapped.settings import exponent_fits
from shmbuffer.memory.mapped.slots_file import PIECE
from shmbuffer.saves.checkpoints import Loaded, PartFiles
from shmbuffer.saves.safe_files import create_file, make_folder, write_file
from shmbuffer.saves.saved_parts import missing_part
from shmbuffer.saves.values import FORMAT, OURS, find_ours, read_json, reading, write_json
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.folders import mapped, read_folder

_METADATA = "sampler_metadata.json"
_RAW = "shmbuffer.priorities.memmap"
_TREES = ("sumtree.memmap", "mintree.memmap")
_ELEMENTS = ("_sample_list", "_heads")  # entries of the state of a pass that are element indices
_SCHEMA_VERSION = 1  # version of TorchRL's files in which _max_priority is a raw priority


def _write_priorities(directory: Path, sampler: Any, state: dict[str, Any], moment: Any) -> None:
    make_folder(directory)
    alpha, eps, raw, largest = (
        state[key] for key in ("_alpha", "_eps", "_priorities", "_max_priority")
    )
    in_storage = raw is None and isinstance(moment, ItemSnapshot)
    elements = None if raw is None else len(raw)
    if in_storage:
        largest = moment.max_priority
        missing = np.repeat(moment.tickets < 0, len(moment.priorities) // len(moment.tickets))
        raw = np.where(missing, np.nan, moment.priorities)
    raw = np.empty(0) if raw is None else np.asarray(raw)
    nothing, left = torch.finfo(sampler.dtype).max, sampler._max_capacity
    with ExitStack() as stack:
        sums, least = (stack.enter_context(create_file(directory / name)) for name in _TREES)
        for at in range(0, len(raw), PIECE):
            piece = raw[at : at + PIECE][:left]
            left -= len(piece)
            mass = np.where(np.isnan(piece), 0.0, mass_of(piece, alpha, eps))
            sums.write(mass.data)
            least.write(np.where(mass > 0, mass, nothing).data)
        sums.write(np.zeros(left).data)
        least.write(np.full(left, nothing).data)
    if elements:
        write_file(directory / _RAW, raw.tobytes())
    write_json(
        directory / _METADATA,
        {
            "_alpha": alpha,
            "_beta": float(state["_beta"]),
            "_eps": eps,
            "_max_priority": [1.0 if largest is None else largest, 0.0],
            "_max_capacity": float(sampler._max_capacity),
            "_schema_version": _SCHEMA_VERSION,
            OURS: {
                "format": FORMAT,
                "elements": elements,
                "in_storage": in_storage,
                "max_priority": largest,
            },
        },
    )


def _read_priorities(directory: Path, sampler: Any) -> dict[str, Any]:
    found = read_json(directory / _METADATA, missing=missing_part("sampler"))
    with reading(directory / _METADATA):
        alpha, eps = (
            as_non_negative("_alpha", found["_alpha"]),
            as_non_negative("_eps", found["_eps"]),
        )
        ours = find_ours(found, directory / _METADATA)
        if not exponent_fits(alpha, eps, int(found["_max_capacity"])):
            raise ValueError(f"with alpha {alpha} and eps {eps}, no mass would be finite")
        largest = found["_max_priority"][0] if ours is None else ours["max_priority"]
        raw, in_storage = None, ours is not None and bool(ours["in_storage"])
        if ours is None or in_storage:
            raw = _raw_of_masses(directory, int(found["_max_capacity"]), alpha, eps)
        elif (elements := ours["elements"]) is not None:
            raw = mapped(directory / _RAW, torch.float64, (int(elements),)).clone()
        _require_weights(raw, largest, alpha, eps)
        return {
            "_alpha": alpha,
            "_beta": as_non_negative("_beta", found["_beta"]),
            "_eps": eps,
            "_max_priority": None if largest is None else float(largest),
            "_priorities": raw,
            "_in_storage": in_storage,  # if True, the storage has priorities that are more exact
        }


def _require_weights(raw: torch.Tensor | None, largest: Any, alpha: float, eps: float) -> None:
    """Raises ValueError if a ring would reject some of these priorities."""
    known = np.empty(0) if raw is None else raw.numpy()
    known = np.append(known[~np.isnan(known)], 0.0 if largest is None else float(largest))
    if not are_priorities(known, alpha, eps, 1 if raw is None else len(raw)).all():
        raise ValueError("some priorities are negative or infinite, or their sum is not finite")


def _raw_of_masses(directory: Path, capacity: int, alpha: float, eps: float) -> torch.Tensor:
    """Reads TorchRL's masses and converts them to raw priorities.

    The priorities are NaN without an item, and 1 if alpha is 0.
    """
    mass = mapped(directory / _TREES[0], torch.float64, (capacity,)).numpy()
    present = mass > 0
    raw = np.full(capacity, np.nan)
    raw[present] = np.maximum(mass[present] ** (1 / alpha) - eps, 0.0) if alpha > 0 else 1.0
    return torch.from_numpy(raw)


def moved(raw: torch.Tensor, loaded: Loaded, elements: int) -> torch.Tensor:
    """Returns priorities ``[elements]``, moved to the indices that their items have after loading.

    Args:
        raw: priorities at the indices that the items had when they were saved.
        loaded: mapping of these indices to the current ones.
        elements: number of elements of the storage.
    """
    if not loaded.shift and len(raw) == elements:
        return raw
    present = torch.nonzero(~raw.isnan())[:, 0]
    places = loaded.places(present)
    fits = places < elements
    result = cpu.full((elements,), torch.nan, dtype=torch.float64)
    result[places[fits]] = raw[present[fits]]
    return result


def _write_numbers(directory: Path, sampler: Any, state: dict[str, Any], moment: Any) -> None:
    make_folder(directory)
    numbers = {
        key: value if value is None else cpu.as_tensor(value) for key, value in state.items()
    }
    TensorDict(numbers).memmap(directory)


def _read_pass(directory: Path, sampler: Any) -> dict[str, Any]:
    with _reading_numbers(directory) as state:
        int(state["len_storage"]), bool(state["drop_last"]), bool(state["_ran_out"])
        for key in _ELEMENTS:
            if (numbers := state.get(key)) is not None and cpu.as_tensor(numbers).ndim != 1:
                raise ValueError(f"{key} has {cpu.as_tensor(numbers).ndim} dimensions")
    return state


def _read_integers(directory: Path, sampler: Any) -> dict[str, Any]:
    with _reading_numbers(directory) as state:
        return {name: int(state[name]) for name in sampler._state_keys}


@contextmanager
def _reading_numbers(directory: Path) -> Iterator[dict[str, Any]]:
    read_json(directory / "meta.json", missing=missing_part("sampler"))
    with reading(directory / "meta.json"):
        folder = read_folder(directory)
        state = {key[0]: value for key, value in folder.values.items()}
        yield state | {key[0]: folder.tensor(key).clone() for key in folder.tensors}


PRIORITIES = PartFiles(_write_priorities, _read_priorities)
"""Reads and writes the files of a `PrioritizedSampler`."""
PASS = PartFiles(_write_numbers, _read_pass)
"""Reads and writes the files of a `SamplerWithoutReplacement`."""
INTEGERS = PartFiles(_write_numbers, _read_integers)
"""Reads and writes the files of a sampler whose state consists of integers."""


def moved_pass(state: dict[str, Any], loaded: Loaded | None) -> dict[str, Any]:
    """Returns the state of a pass, with the indices that its items have after loading."""
    if loaded is None:
        return state
    return {
        key: loaded.places(value) if key in _ELEMENTS and value is not None else value
        for key, value in state.items()
    }
