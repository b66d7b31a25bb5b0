"""Prefetched batches in a save, which a buffer delivers first after a load.

    <parts>/ahead.jsonl, .data     only if there are prefetched batches; see `values`

The sampler and the generator are saved in the state after the last delivered batch. A load can
therefore ignore the prefetched batches and draw them again. This is necessary if items have other
indices or tickets, and it always happens if the loading buffer does not prefetch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from shmbuffer.buffers.data_path.prefetch import Draws, Made
from shmbuffer.buffers.data_path.sample_info import without_info
from shmbuffer.items.keys import GENERATION
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.saves.safe_files import remove_file
from shmbuffer.saves.values import read_values, reading, write_values

_AHEAD = "ahead"


def write_prefetched(directory: Path, made: list[Made], now: Draws, sampler: Sampler) -> bool:
    """Writes prefetched batches, and the positions of sampler and generator after each of them.

    Args:
        directory: directory of the files.
        made: the complete batches.
        now: positions after the last batch.
        sampler: the sampler, which converts its positions.

    Returns:
        False if nothing was written, because a batch contains objects or GPU tensors, or because a
        sampler from another package cannot convert its position.
    """
    values, before = [], None
    try:
        for at, one in enumerate(made):
            data, info = one.result()
            after = made[at + 1].before if at + 1 < len(made) else now
            position = sampler._to_plain(after.position, before)
            batch = without_info(data, info), info  # batches from a thread have no such entries
            values.append((batch, one.ends_pass, position, after.state))
            before = after.position
        write_values(directory, _AHEAD, values, allow_pickle=False, what="batch", cpu_only=True)
    except TypeError:
        for file in directory.glob(f"{_AHEAD}.*"):
            remove_file(file)
        return False
    return True


def read_prefetched(directory: Path) -> list[Any]:
    """Reads the files of `write_prefetched`. `restored` converts the result."""
    with reading(directory / f"{_AHEAD}.jsonl"):
        found = list(read_values(directory, _AHEAD, allow_pickle=False))
        for (_, info), ends_pass, _, state in found:
            if not isinstance(info, (dict, TensorDictBase)) or not isinstance(ends_pass, bool):
                raise ValueError("a prefetched batch has no info, or no flag for the end of a pass")
            if state is not None:
                torch.Generator().set_state(state)  # raises for an invalid state
    return found


def fits(saved: list[Any], loaded: Loaded | list[Loaded | None] | None) -> bool:
    """True if the indices and tickets in saved batches refer to the loaded items.

    Args:
        saved: result of `read_prefetched`.
        loaded: result of loading the storage, or a list with the results of several storages.
    """
    if isinstance(loaded, list):
        return all(fits(saved, one) for one in loaded)
    if loaded is None or loaded.shift:
        return False
    tracked = any(GENERATION in info.keys() for (_, info), *_ in saved)  # noqa: SIM118
    return loaded.in_place or loaded.same_tickets or not tracked


def restored(saved: list[Any], draws: Draws, sampler: Sampler) -> tuple[list[Made], Draws]:
    """Converts the result of `read_prefetched`.

    Args:
        saved: result of `read_prefetched`.
        draws: positions of sampler and generator before the first batch.
        sampler: the sampler, which converts its positions.

    Returns:
        The batches, and the positions after the last batch.
    """
    made, position = [], None
    for batch, ends_pass, plain, state in saved:
        made.append(Made((batch[0], batch[1]), ends_pass, draws))
        position = sampler._of_plain(plain, position)
        draws = Draws(position, draws.generator, state)
    return made, draws
