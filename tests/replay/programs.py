"""Functions that these tests run in other processes."""

from __future__ import annotations

import sys
from typing import Any

import torch

import shmbuffer
from shmbuffer import ReplayBuffer
from tests.kit.items import items


def write(buffer: ReplayBuffer, value: int, connection: Any) -> None:
    """Extends the buffer once and sends the indices."""
    torch.set_num_threads(1)
    index = buffer.extend(items(value, value + 2))
    connection.send((index.tolist(), len(buffer)))
    buffer.close()


def write_first(buffer: ReplayBuffer, barrier: Any, value: int) -> None:
    """Competes with other processes for the first write."""
    torch.set_num_threads(1)
    barrier.wait(60)
    buffer.extend(items(value, value + 2))
    buffer.close()


def set_priorities(buffer: Any, connection: Any) -> None:
    """Sets all priorities but one to zero, as a second learner would."""
    torch.set_num_threads(1)
    sample = buffer.sample()
    sample["td_error"] = (sample["a"] == 2).float()
    connection.send(tuple(buffer.update_tensordict_priority(sample)))
    buffer.close()


def make_checkpointers_without_h5py(connection: Any) -> None:
    """Loads the checkpointers without h5py, and sends the error of the one that needs it."""
    sys.modules["h5py"] = None  # type: ignore[assignment]
    shmbuffer.H5Split(), shmbuffer.H5Combine(), shmbuffer.NestedStorageCheckpointer()
    try:
        shmbuffer.H5StorageCheckpointer()
    except ImportError as error:
        connection.send(str(error))
